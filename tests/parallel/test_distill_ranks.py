"""distill_rl on two ranks does what one does: gradients, metrics, and a run that is resumed."""

import sys
from pathlib import Path

import pytest
from helpers import ALONE, assert_near
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parent))
import distill_ranks
from launch import fork_ranks

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """The folder that two ranks left, and the tensors in it."""
    folder = tmp_path_factory.mktemp("ranks")
    fork_ranks(2, distill_ranks.work, folder)
    return folder, load_file(folder / "tensors.safetensors")


def below(tensors, prefix):
    return {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}


def assert_one(found, expected) -> None:
    """Gradients, metrics and weights of a training step, within rounding."""
    for kind, tolerance in (
        ("gradients/student/", 1e-4),
        ("gradients/critic/", 1e-4),
        ("state/student/weights/", 1e-5),
    ):
        assert_near(below(found, kind), below(expected, kind), tolerance)
    metrics, wanted = (below(one, "metrics/") for one in (found, expected))
    assert metrics == {key: pytest.approx(float(value), rel=2e-3, abs=1e-4) for key, value in wanted.items()}


@pytest.fixture(scope="module")
def alone():
    """Two steps of one rank."""
    one = distill_ranks.made(ALONE)
    return [distill_ranks.step_of(one, step) for step in range(2)]


def test_two_ranks_learn_and_measure_what_one_does(two, alone):
    """The weights sharded, for two steps, or copied."""
    for name, step in (("sharded", 0), ("sharded", 1), ("replicated", 0)):
        assert_one(below(two[1], f"{name}/{step}/"), alone[step])


def test_a_resumed_run_goes_on_on_two_ranks_bit_for_bit_and_on_one(two, alone):
    folder, tensors = two
    assert "resumed" in tensors  # compared bit for bit by the ranks
    again = distill_ranks.made(ALONE)
    assert again.resume(folder) == (1, [])
    assert_one(distill_ranks.step_of(again, 1), alone[1])
