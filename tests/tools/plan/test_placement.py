"""Where plan has samples made follows from the memory of a card, and it says why."""

from dataclasses import replace

import pytest
from helpers import flags

from unified_trainer.run.settings.command_line import parse
from unified_trainer.tools.plan import memory, placement
from unified_trainer.tools.plan.estimate import estimate
from unified_trainer.tools.plan.passes import PassBytes

pytestmark = pytest.mark.slow  # seconds together

GRPO = {"method": "dance_grpo", "recipe": "tiny", "student.ema-decay": 0.9, "reward.offload": True}
GRPO |= {"video.height": 512, "video.width": 512, "sampler.num-steps": 3}
GRPO |= {"algorithm.num-prompts": 8, "algorithm.num-samples": 2, "algorithm.prompts-per-update": 8}


@pytest.fixture
def without_activations(monkeypatch):
    monkeypatch.setattr(memory, "pass_bytes", lambda *_, **_named: PassBytes(0.0, 0.0, 0.0, 0.0))
    monkeypatch.setattr(memory, "decode_bytes", lambda *_, **_named: 0.0)


def test_samples_are_made_where_they_fit(without_activations):
    """All samples of the step are on the card of a training process, none waits on that of a worker."""
    planned = estimate(parse(flags(GRPO)), 8)
    there, offloaded = (placement._sampling(planned, offload=offload) for offload in (False, True))
    apart, trained = placement._apart(planned), planned.parameters["student"]
    assert there - offloaded == pytest.approx((8 + 4) * trained / 8, rel=1e-3)  # moments and EMA of one of 8 shards
    assert apart < offloaded < there
    words = {
        there: "in the training processes: ",
        offloaded: "in the training processes with --rollouts.offload: ",
        apart: "apart, by --rollouts.workers: ",
        apart - 1: "nowhere: ",
    }
    for usable, begin in words.items():
        assert placement.placement(planned, usable).startswith(begin)
    moved = replace(planned, run=replace(planned.run, rollouts=replace(planned.run.rollouts, offload=True)))
    assert placement.placement(moved, there) == placement.placement(planned, there)


def test_the_ranks_of_a_worker_share_the_student(without_activations):
    """Its weights in halves and two blocks gathered at a time, and no scorers, which reward workers hold."""
    shared = {"rollouts.workers": 1, "rollouts.reward-workers": 1, "student.precision": "fp32", "reward.offload": True}
    alone, halves = (estimate(parse(flags(GRPO | shared | {"rollouts.ranks": ranks})), 8) for ranks in (1, 2))
    whole = 4 * alone.parameters["student"]
    gathered = memory.held_networks(halves.counts, placement._of_worker(halves))["student", ""].gathered
    assert 0 < gathered < whole
    assert placement._apart(alone) - placement._apart(halves) == pytest.approx(whole / 2 - gathered, rel=1e-6)
    assert " on each of 2 cards" in placement.placement(halves, placement._apart(halves))


def test_a_worker_holds_weights_in_the_precision_of_its_passes(without_activations):
    """In bf16 all but norms and modulation, which are few."""
    exact, half = (
        estimate(parse(flags(GRPO | {"student.precision": p, "rollouts.workers": 1})), 8) for p in ("fp32", "bf16")
    )
    trained = exact.parameters["student"]
    assert placement._apart(exact) - placement._apart(half) == pytest.approx(2 * trained, rel=0.05)


def test_methods_without_rollouts_have_no_place_for_samples():
    planned = estimate(parse(flags({"method": "finetune", "recipe": "tiny"})), 1)
    assert placement.placement(planned, 0.0) is None


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (
            {"rollouts.ahead": 1},
            "{0:.3g} GiB copied by a rank ({1:.2g} s of waiting at 5 GB/s), {0:.3g} packed and sent",
        ),
        ({"rollouts.ahead": 0}, "{0:.3g} GiB packed and sent by a rank, while training waits for samples"),
        ({"method": "dance_ppo"}, "{0:.3g} GiB packed"),  # without the value function
    ],
)
def test_what_workers_cost_a_training_process(more, said):
    """Each of eight ranks copies and sends its own shard of the student."""
    own = {key: value for key, value in GRPO.items() if more.get("method") is None or "algorithm" not in key}
    planned = estimate(parse(flags(own | {"rollouts.workers": 2} | more)), 8)
    shard = 4 * planned.parameters["student"] / 8
    assert placement.weights_for_workers(planned).startswith(said.format(shard / 2**30, shard / 5e9))


def test_a_run_without_workers_sends_no_weights():
    assert placement.weights_for_workers(estimate(parse(flags(GRPO)), 8)) is None
