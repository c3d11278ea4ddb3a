"""The metrics of a validation do not depend on the number of ranks."""

import json
import sys
from pathlib import Path

import pytest
from helpers import ALONE

sys.path.insert(0, str(Path(__file__).parent))
import validated
from launch import fork_ranks

from unified_trainer.run.settings.config import ValidationConfig
from unified_trainer.run.validation.samples import batches


@pytest.mark.parametrize(("samples", "ranks", "batch"), [(16, 42, 1), (16, 320, 8), (16, 3, 4), (48, 8, 4)])
def test_every_sample_has_a_rank_and_all_ranks_make_equally_many_passes(samples, ranks, batch):
    shares = batches(ValidationConfig(num_samples=samples, batch=batch), ranks)
    assert len(shares) == ranks and len({tuple(map(len, share)) for share in shares}) == 1
    numbers = [number for share in shares for part in share for number in part]
    assert numbers == list(range(len(numbers))) and samples <= len(numbers) < samples + ranks


@pytest.mark.ranks
@pytest.mark.parametrize("samples", [4, 3])
def test_two_ranks_measure_what_one_does(tmp_path, samples):
    """Rewards, accuracies, and the Frechet distance to the real clips, which go with the sample and not with the rank.

    Other real clips of the same captions move the distance by a twentieth of itself; rounding does by 1e-4.
    Of three samples the second rank has one, and makes another to be together with the first.
    """
    fork_ranks(2, validated.work, tmp_path, samples)
    one = validated.measured(ALONE, tmp_path / "one", samples)
    two = json.loads((tmp_path / "metrics.json").read_text())
    assert one["validation/frechet"] > 1 and one["validation/reward_std"] > 0
    assert two == pytest.approx(one, rel=1e-3)
    table, alone = (
        [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
        for folder in (tmp_path, tmp_path / "one")
    )
    assert [(row["sample"], row["prompt"]) for row in table] == [(row["sample"], row["prompt"]) for row in alone]
    assert [row["reward"] for row in table] == pytest.approx([row["reward"] for row in alone], rel=1e-3)
    assert len(table) == samples
