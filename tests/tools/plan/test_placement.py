"""Where plan has samples made follows from the memory of a card, and it says why."""

from dataclasses import replace

import pytest
from helpers import flags

from unified_trainer.run.settings.command_line import parse
from unified_trainer.tools.plan import memory, placement
from unified_trainer.tools.plan.estimate import estimate
from unified_trainer.tools.plan.passes import PassBytes

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


def test_methods_without_rollouts_have_no_place_for_samples():
    planned = estimate(parse(flags({"method": "finetune", "recipe": "tiny"})), 1)
    assert placement.placement(planned, 0.0) is None
