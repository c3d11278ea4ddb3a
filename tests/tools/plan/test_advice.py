"""The settings that plan names: those that help, and together if none of them alone is enough."""

from types import SimpleNamespace

import pytest

from unified_trainer.run.settings.command_line import parse, with_settings
from unified_trainer.tools.plan import advice, rehearsal
from unified_trainer.tools.plan.estimate import needs
from unified_trainer.tools.plan.memory import Memory


@pytest.mark.slow
@pytest.mark.parametrize(("usable", "fits_alone"), [(85.0, True), (60.0, False)])
def test_what_lowers_nothing_is_left_out_and_the_rest_is_tried_together(monkeypatch, usable, fits_alone):
    """Made-up peaks: half of the frames save 20 of 100, averages on the CPU 15, moments in bf16 half a one."""
    run = parse(["--method", "finetune", "--recipe", "tiny", "--student.ema-decay", "0.9", "--video.frames", "17"])

    def estimated(changed, ranks):
        saved = 20 * (changed.video.frames < 17) + 15 * (changed.roles["student"].ema_device == "cpu")
        saved += 0.5 * (changed.roles["student"].moments == "bf16")
        return SimpleNamespace(memory=Memory({"weights": 60.0 - saved}, {"rollout": {"activations": 40.0}}))

    monkeypatch.setattr(advice, "needs", estimated)
    alone, together = advice.better_settings(run, 1, estimated(run, 1).memory, usable)
    assert [one.peak for one in alone] == [80.0, 85.0]
    assert alone[0].flags == "--video.frames 9" and alone[1].flags == "--student.ema-device cpu"
    if fits_alone:
        assert together is None
    else:
        assert together.peak == 65.0 and all(one.flags in together.flags for one in alone)


@pytest.mark.slow
@pytest.mark.parametrize(("batch", "recompute", "skips"), [("8", "none", False), ("2", "full", True)])
def test_advice_is_the_best_of_all_candidates_and_what_plans_of_it_say(monkeypatch, batch, recompute, skips):
    """Passes of 8 samples are best made smaller; those of 2, with weights above all, are not tried in half the size."""
    words = ["--method", "dance_grpo", "--recipe", "tiny", "--reward.path", "tiny", "--validate-every", "0"]
    words += ["--algorithm.rollout-batch", batch, "--algorithm.update-batch", batch]
    words += ["--student.activation-memory", recompute]
    run, tried, peak = parse(words), [], advice._peak
    monkeypatch.setattr(advice, "_peak", lambda *given: tried.append(given) or peak(*given))
    memory = needs(run, 1).memory
    alone, together = advice.better_settings(run, 1, memory, 0.0)
    few = len(tried)
    for flags, least in (*alone, together):
        advised = needs(parse([*words, *flags.split()]), 1).memory
        assert advised.total(advised.peak) == least < memory.total(memory.peak)
    monkeypatch.setattr(advice, "_bound", lambda *_: 0.0)
    assert advice.better_settings(run, 1, memory, 0.0) == (alone, together)
    assert (len(tried) > 2 * few) == skips


@pytest.mark.slow
def test_runs_that_differ_in_no_pass_share_a_rehearsal(monkeypatch):
    """Averages, moments, recomputation, shards and the number of validation's samples change none."""
    run, rehearsed, train = parse(["--method", "dmd2", "--recipe", "tiny"]), [], rehearsal._train
    shown, generate = [], rehearsal.generate
    monkeypatch.setattr(rehearsal, "_TRAINED", {})
    monkeypatch.setattr(rehearsal, "_VALIDATED", {})
    monkeypatch.setattr(rehearsal, "generate", lambda *given: shown.append(given) or generate(*given))
    monkeypatch.setattr(rehearsal, "_train", lambda *given, **more: rehearsed.append(given) or train(*given, **more))
    whole = needs(run, 2).counts
    unseen = {"student.ema_decay": 0.9, "student.moments": "bf16", "critic.activation_memory": "full"}
    unseen |= {"parallel.offload_optimizer": True, "encoders.offload": True}
    assert needs(with_settings(run, unseen, "test"), 2).counts.validation == whole.validation and len(shown) == 1
    unseen |= {"validation.num_samples": 2}
    other = needs(with_settings(run, unseen, "test"), 2).counts
    assert len(shown) == 2
    assert len(rehearsed) == 1 and other.losses == whole.losses and len(other.validation) == len(whole.validation)
    assert {call.samples for call in other.validation} == {1} != {call.samples for call in whole.validation}
    assert needs(with_settings(run, {"video.frames": 1}, "test"), 2).counts.losses != whole.losses
    assert len(rehearsed) == 2


@pytest.mark.slow
def test_calls_outside_of_the_window_are_counted():
    """Two rollouts of 12 calls; with outside_steps 4 and a window of 2 they take 6."""
    words = ["--method", "dance_grpo", "--recipe", "tiny", "--validate-every", "0", "--sampler.num-steps", "12"]
    words += ["--algorithm.window.size", "2"]
    every, fewer = (
        needs(parse([*words, *more]), 1).counts.calls()["student"]
        for more in ([], ["--algorithm.window.outside-steps", "4"])
    )
    assert (every["without gradient"], fewer["without gradient"]) == (24, 12)
    assert every["with gradient"] == fewer["with gradient"] == 4


@pytest.mark.slow
def test_fewer_bits_need_no_device_that_has_them_and_are_named_as_not_counted():
    """A CPU multiplies no numbers of fp8, and a plan of a run on GPUs is made on it."""
    words = ["--method", "dmd2", "--recipe", "tiny", "--validate-every", "0"]
    plain, rounded = (needs(parse([*words, *more]), 1) for more in ([], ["--teacher.quantize", "fp8"]))
    assert {*rounded.notes} - {*plain.notes} == {"not counted: what teacher.quantize fp8 changes in bytes and seconds"}
    assert rounded.counts.calls() == plain.counts.calls()
