"""The metrics of a validation do not depend on the number of ranks."""

import json
import sys
from pathlib import Path

import pytest
from helpers import ALONE

sys.path.insert(0, str(Path(__file__).parent))
import validated
from launch import fork_ranks

pytestmark = pytest.mark.ranks


def test_two_ranks_measure_what_one_does(tmp_path):
    """Rewards, accuracies, and the Frechet distance to the real clips, which go with the sample and not with the rank.

    Other real clips of the same captions move the distance by a twentieth of itself; rounding does by 1e-4.
    """
    fork_ranks(2, validated.work, tmp_path)
    two, one = json.loads((tmp_path / "metrics.json").read_text()), validated.measured(ALONE, tmp_path / "one")
    assert one["validation/frechet"] > 1 and one["validation/reward_std"] > 0
    assert two == pytest.approx(one, rel=1e-3)
    table, alone = (
        [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
        for folder in (tmp_path, tmp_path / "one")
    )
    assert [(row["sample"], row["prompt"]) for row in table] == [(row["sample"], row["prompt"]) for row in alone]
    assert [row["reward"] for row in table] == pytest.approx([row["reward"] for row in alone], rel=1e-3)
    assert len(table) == 4
