"""A validation keeps the videos of its first samples and of its best and worst ones, however it is cut into parts."""

import json

import numpy as np
import pytest
import torch
from helpers import ALONE

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.requests import Request
from unified_trainer.rewards.reward import RewardConfig, RewardSum, ScorerConfig
from unified_trainer.run.settings.config import ValidationConfig
from unified_trainer.run.validation.report import Report
from unified_trainer.run.validation.samples import EXTREMES, SCORES, THUMBNAILS, Measured, shown


def reward(**weights: float) -> RewardSum:
    return RewardSum(RewardConfig(scorers={name: ScorerConfig(weight=weight) for name, weight in weights.items()}))


SUM, ONE = reward(sharpness=3.0, dark_share=-2.0, saturation=0.0), reward(sharpness=1.0)


def part(scores: torch.Tensor, numbers: range) -> Measured:
    columns = {SCORES: scores[numbers.start : numbers.stop]}
    return Measured(columns, {number: np.full(1, number) for number in numbers})


@pytest.mark.parametrize(("batch", "share"), [(12, 12), (5, 12), (1, 12), (4, 6), (1, 3)])
def test_the_extremes_of_parts_hold_those_of_all_samples(batch, share):
    scores = torch.rand(12, 3, generator=torch.Generator().manual_seed(0)).mul(4).round()  # with ties
    wanted = shown(SUM, {SCORES: scores}, range(12), 2)
    report = Report(ValidationConfig(num_samples=12, num_videos=2), SUM, Request.of(["a cat"] * 12), ALONE, 8.0)
    kept = {}
    for first in range(0, 12, share):  # of each rank
        own = range(first, first + share)
        held = part(scores, own[:batch])
        for start in range(batch, share, batch):
            held = report.joined((held, part(scores, own[start : start + batch])), first)
        assert len(report.joined((held,), first).clips) <= 2 + 2 * EXTREMES
        kept |= held.clips
    assert wanted <= kept.keys() and all(kept[number] == number for number in kept)
    totals = 3 * scores[:, 0] - 2 * scores[:, 1]
    assert {totals.max().item(), totals.min().item()} <= {*totals[sorted(wanted)].tolist()}
    others = totals[[number for number in range(12) if number not in wanted]]
    extremes = totals[sorted(wanted - {0, 1})]
    assert len(extremes) >= 2 and not ((extremes > others.min()) & (extremes < others.max())).any()


def test_a_sample_without_a_score_is_no_part_of_the_means(tmp_path):
    """Nor is it among the best; its line has null, since JSON has no NaN. All of them end the run."""
    scores = torch.tensor([[0.0], [3.0], [float("nan")], [1.0]])
    assert shown(ONE, {SCORES: scores}, range(4), 1) == {0, 1, 3}
    report = Report(ValidationConfig(num_samples=4, num_videos=0), ONE, Request.of(["a cat"] * 4), ALONE, 8.0)
    columns = {SCORES: scores, THUMBNAILS: torch.zeros(4, 3)}
    result = report.result(columns, {}, tmp_path, 1)
    wanted = {"reward": 4 / 3, "reward/sharpness": 4 / 3, "reward/unscored": 1.0}
    assert {name: result.metrics[f"validation/{name}"] for name in wanted} == pytest.approx(wanted)
    rows = map(json.loads, (tmp_path / "samples.jsonl").read_text().splitlines())
    assert [row["reward"] for row in rows] == [0.0, 3.0, None, 1.0]
    with pytest.raises(UserError, match="4 of 4 samples cannot be scored"):
        report.result(columns | {SCORES: scores * float("nan")}, {}, tmp_path, 1)


def test_padding_is_never_shown_and_no_video_means_none():
    scores = torch.tensor([[0.0], [3.0], [1.0], [2.0], [-1.0], [0.5], [9.0]])  # the last row is padding
    assert shown(ONE, {SCORES: scores}, range(10, 16), 1) == {0, 11, 13, 14, 10}
    assert shown(ONE, {SCORES: scores}, range(10, 16), 0) == set()
    assert shown(ONE, {}, range(10, 16), 2) == {0, 1}
