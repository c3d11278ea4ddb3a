"""Scorers that declare their networks can keep them in CPU memory; the device "meta" stands for an accelerator."""

import pytest
import torch
from helpers import CPU

from unified_trainer.rewards.base import NetworkScorer, RewardConfig, ScorerConfig
from unified_trainer.rewards.offloaded import OffloadedScorer
from unified_trainer.rewards.scorers import KINDS, load_scorers

META = torch.device("meta")
PROMPTS = ("a red circle", "something else")


@pytest.mark.slow
def test_hpsv3_is_as_before_after_its_networks_were_on_the_device():
    """Also its rotary frequencies, which no state_dict has."""
    scorer = KINDS["hpsv3"].load(ScorerConfig(kind="hpsv3", path="tiny"), CPU)
    assert isinstance(scorer, NetworkScorer)
    (network,) = scorer.networks
    video = torch.rand(2, 3, 1, 56, 56, generator=torch.Generator().manual_seed(0))
    before = scorer(video, PROMPTS)
    offloaded = OffloadedScorer.of(scorer, scorer.networks, META)
    with offloaded.in_use():
        assert {value.device.type for value in (*network.parameters(), *network.buffers())} == {"meta"}
    assert torch.equal(offloaded.scorer(video, PROMPTS), before)


def test_a_scorer_without_declared_networks_is_left_alone(tmp_path):
    file = tmp_path / "own.py"
    file.write_text("def score(videos, prompts):\n    return videos.flatten(1).mean(1)\n")
    scorers = {"own": ScorerConfig(kind=f"{file}:score"), "sharpness": ScorerConfig(weight=0.5)}
    loaded, _ = load_scorers(RewardConfig(scorers=scorers, offload=True), CPU)
    assert not any(isinstance(one, OffloadedScorer) for one in loaded.values())
    network, _ = load_scorers(RewardConfig(kind="hpsv3", path="tiny", offload=True), CPU)
    assert isinstance(network["hpsv3"], OffloadedScorer)
