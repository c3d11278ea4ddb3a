"""With `rollouts.offload` a run has the same bits, and while it samples, what only training reads takes no memory."""

from dataclasses import replace

import pytest
from forked import program
from helpers import (
    OF_SAMPLES,
    ScriptedScorer,
    assert_same,
    checkpoint_of,
    dance_grpo,
    flags,
    metrics_of,
    refused,
    small_model,
    small_pipeline,
)

from unified_trainer.__main__ import main
from unified_trainer.methods.dance_grpo import DanceGRPOConfig
from unified_trainer.methods.rl.rollouts import LocalRollouts
from unified_trainer.parallel.copy_queue import CopyQueue
from unified_trainer.parallel.fsdp import ROUNDED
from unified_trainer.roles.role import TrainableConfig
from unified_trainer.run.offloaded_rollouts import OffloadedRollouts
from unified_trainer.run.settings.command_line import parse
from unified_trainer.tools.plan import memory
from unified_trainer.tools.plan.estimate import estimate
from unified_trainer.tools.plan.passes import PassBytes

COMMON = {"recipe": "tiny", "validate-every": 0, "video.frames": 5, "video.height": 32, "video.width": 32, "steps": 2}
COMMON |= {"sampler.num-steps": 3, "reward.kind": "sharpness", "reward.path": "", "encoders.cache": "CACHE"}
GROUPS = {"algorithm.num-prompts": 2, "algorithm.num-samples": 2, "algorithm.prompts-per-update": 1}
GROUPS |= {"algorithm.rollout-batch": 1, "algorithm.update-batch": 1}
SINGLES = GROUPS | {"algorithm.num-prompts": 4, "algorithm.num-samples": 1, "algorithm.prompts-per-update": 2}
RUNS = {
    "dance_grpo": GROUPS | {"student.precision": "bf16", "student.ema-decay": 0.5, "algorithm.kl-coefficient": 0.1},
    "dance_ppo": SINGLES | {"student.moments": "bf16", "student.ema-decay": 0.5, "student.ema-device": "cpu"},
    "diffusion_nft": GROUPS | {"student.precision": "bf16", "algorithm.dynamic-sampling-rounds": 1},
    "awm": GROUPS | {"student.adapter.rank": 2, "student.precision": "bf16", "student.ema-decay": 0.5},
    "crd": GROUPS | {"student.precision": "bf16"},
    "online_dpo": GROUPS | {"student.boundary": 0.8, "student.ema-decay": 0.5},
    "distill_rl": GROUPS | {"student.adapter.rank": 2},
}


class Offloaded:
    """What a run offloads: bytes of each rollout, and those that are still there while it samples."""

    def __init__(self, monkeypatch) -> None:
        self.bytes, self.left = [], []
        whole, samples = CopyQueue._whole, LocalRollouts.samples

        def noted(queue, tensors):
            self.parts = whole(queue, tensors)
            self.bytes.append(sum(len(part) for part in self.parts))
            return self.parts

        def watched(rollouts, *given):
            self.left.append(sum(part.untyped_storage().nbytes() for part in self.parts))
            return samples(rollouts, *given)

        monkeypatch.setattr(CopyQueue, "_whole", noted)
        monkeypatch.setattr(LocalRollouts, "samples", watched)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("offloaded")
    small_pipeline(folder / "wan")
    return folder


def words(folder, method: str, output: str, **changes: object) -> list[str]:
    own = {"student.path": folder / "wan", "encoders.cache": folder / "cache", "output": folder / output}
    return flags({"method": method} | COMMON | RUNS[method] | own | changes)


def assert_equal(one, other) -> None:
    assert metrics_of(one) == metrics_of(other)
    assert_same(checkpoint_of(one, 2), checkpoint_of(other, 2))


@pytest.mark.slow
@pytest.mark.parametrize("method", [method for method in OF_SAMPLES if method != "dance_grpo"])
def test_every_method_has_the_bits_of_a_run_without(method, folder, monkeypatch):
    assert main(words(folder, method, f"{method}/off")) == 0
    offloaded = Offloaded(monkeypatch)
    assert main([*words(folder, method, f"{method}/on"), "--rollouts.offload"]) == 0
    assert min(offloaded.bytes) > 0 and not any(offloaded.left)
    assert_equal(folder / method / "on", folder / method / "off")


@pytest.mark.slow
def test_a_run_may_begin_without_and_offloads_the_bytes_of_the_docs(folder, monkeypatch):
    """In bf16 on one device: moments, EMA, the reference, and the student's float32 weights with a bf16 copy."""
    assert main(words(folder, "dance_grpo", "off")) == 0
    assert main(words(folder, "dance_grpo", "on", steps=1)) == 0
    offloaded = Offloaded(monkeypatch)
    assert main(["--resume", str(folder / "on"), "--steps", "2", "--rollouts.offload"]) == 0
    assert_equal(folder / "on", folder / "off")
    network = small_model().network
    weights = sum(p.numel() for p in network.parameters())
    rounded = sum(
        p.numel() for layer in network.modules() if isinstance(layer, ROUNDED) for p in layer.parameters(False)
    )
    reference = 2 * rounded + 4 * (weights - rounded)
    assert offloaded.bytes == [8 * weights + 4 * weights + 4 * rounded + reference]
    assert planned(folder, monkeypatch) == pytest.approx({"rollout": offloaded.bytes[0], "reward": offloaded.bytes[0]})


def planned(folder, monkeypatch) -> dict[str, float]:
    """Return the bytes that leave each phase of the same run by `plan`, whatever activations take."""
    monkeypatch.setattr(memory, "pass_bytes", lambda *_, **_named: PassBytes(0.0, 0.0, 0.0, 0.0))
    monkeypatch.setattr(memory, "decode_bytes", lambda *_, **_named: 0.0)
    run = parse(words(folder, "dance_grpo", "plan"))
    there, moved = (
        estimate(replace(run, rollouts=replace(run.rollouts, offload=offload)), 1).memory for offload in (False, True)
    )
    saved = {phase: there.total(phase) - moved.total(phase) for phase in there.phases}
    return {phase: size for phase, size in saved.items() if abs(size) > 1}


@pytest.mark.ranks
def test_two_ranks_offload_their_shards(folder):
    """Also beside weights that FSDP2 gathers in bf16, and with a reference of its own."""
    for output, more in (("two/off", []), ("two/on", ["--rollouts.offload"])):
        done = program("-m", "unified_trainer", *words(folder, "dance_grpo", output), *more, ranks=2)
        assert done.returncode == 0, done.stderr
    assert_equal(folder / "two" / "on", folder / "two" / "off")


@pytest.mark.slow
def test_after_an_error_in_a_rollout_all_state_is_there():
    scorer = ScriptedScorer((0.0, 1.0) * 2)
    config = DanceGRPOConfig(num_prompts=2, num_samples=2, prompts_per_update=2, rollout_batch=2, update_batch=4)
    one = dance_grpo(config, scorer=scorer, moves=True, role=TrainableConfig(ema_decay=0.5))
    one.step(0)
    before = {key: value.clone() for key, value in one.tensors().items()}
    one.method.sample_from(OffloadedRollouts(one.method.rollouts, one.roles, one.roles["student"]))

    def fails():
        moments = [state for key, state in one.tensors().items() if "exp_avg" in key]
        assert moments and not any(moment.untyped_storage().nbytes() for moment in moments)
        raise RuntimeError("no samples")

    scorer.before = fails
    with pytest.raises(RuntimeError, match="no samples"):
        one.step(1)
    assert_same(one.tensors(), before)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["dance_grpo", "--rollouts.workers", "1"], "make no rollouts: set rollouts.workers 0"),
        (["dmd2"], "make no rollouts: leave it out"),
        (
            ["dance_grpo", "--parallel.offload-weights", "--parallel.offload-optimizer"],
            "keep all state in CPU memory already",
        ),
    ],
)
def test_where_nothing_can_be_offloaded_it_is_refused(more, said, capsys):
    given = ["plan", "--recipe", "tiny", "--hardware", "8xH100", "--rollouts.offload", "--method", *more]
    assert said in refused(capsys, *given)
