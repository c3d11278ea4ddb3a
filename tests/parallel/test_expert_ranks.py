"""Two ranks whose samples need different experts learn what one rank does, and never wait for each other.

Tolerances are those of test_meshes.py, for the same reasons.
"""

import functools
import sys
from pathlib import Path

import pytest
import torch
from helpers import ALONE, assert_near
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parent))
import expert_ranks
from expert_ranks import CASES, MESHES, SAVED, STEPS, made
from expert_world import trajectory
from launch import fork_ranks
from test_meshes import assert_one_trajectory, below

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """The folder that two ranks left, and the tensors in it."""
    folder = tmp_path_factory.mktemp("ranks")
    fork_ranks(2, expert_ranks.work, folder)
    return folder, load_file(folder / "tensors.safetensors")


@functools.cache
def alone(case: str) -> dict[str, torch.Tensor]:
    return trajectory(made(case, ALONE), STEPS)


def learnt(found: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: value for key, value in found.items() if not key.startswith("state/")}


@pytest.mark.parametrize(("mesh", "case"), [(mesh, case) for mesh, (_, cases) in MESHES.items() for case in cases])
def test_two_ranks_learn_what_one_does(two, mesh, case):
    """In every update the same experts move, by equal gradients; metrics, weights and EMA weights are equal too."""
    ours, expected = below(two[1], f"{mesh}/{case}/"), alone(case)
    assert_one_trajectory(learnt(ours), learnt(expected))
    for kind in ("weights", "ema"):
        key = f"state/student/{kind}/"
        assert_near(below(ours, key), below(expected, key), 1e-5)
    counters = [key for key in expected if "/updates" in key]
    assert counters and all(torch.equal(ours[key], expected[key]) for key in counters)


def test_the_cases_are_about_something():
    """In every case both experts of a role learn, unless one is not trained."""
    for case in CASES:
        moved = {}
        for key in alone(case):
            if key.startswith("gradients/"):
                _, role, update, side, *_ = key.split("/")
                moved.setdefault((role, update), set()).add(side)
        assert len({"high", "low"} & set.union(*moved.values())) == (1 if "offloaded" in case else 2), case


def test_a_rank_without_samples_for_an_expert_passes_one_that_is_thrown_away(two):
    """Rank 0 has two high samples, rank 1 two low ones; in a second call both have high ones, and low does not run."""
    assert two[1]["passes"].tolist() == [[[2, 2], [1, 0]], [[1, 2], [2, 0]]]


def test_a_checkpoint_of_two_ranks_is_resumed_by_one(two):
    one = made(SAVED, ALONE)
    assert one.resume(two[0]) == (STEPS, [])
    expected = below(alone(SAVED), "state/student/weights/")
    assert_near({key: p.detach() for key, p in one.roles["student"].weights.items()}, expected, 1e-5)


def test_ranks_that_disagree_on_the_experts_are_told_so(two):
    """Before they gather weights of different networks."""
    passed = (
        "rank 0: pass of student, split at 0.6, with gradient; rank 1: pass of student, split at 0.8, with gradient"
    )
    asked = "rank 0: pass of student high with gradient; rank 1: pass of student low with gradient"
    said = [f"ranks diverged: {words}" for words in (passed, asked)]
    assert (two[0] / "words.txt").read_text().split("\n") == said
