"""Weights gathered in bf16 on two ranks: the velocities of one rank bit for bit, for half of the bytes.

Gradients differ by rounding only; an adapter's, over a base that is held in bf16, do not differ at all.
"""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import ALONE, REPO, assert_near, assert_same, environment
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parent))
import half_ranks
from test_meshes import below

pytestmark = [pytest.mark.ranks, pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")]

# Of the largest gradient: autograd adds the gradients of text and time in bf16, over blocks, in another order (4e-4);
# ranks that share tokens round their parts of a product before they are added (2e-3). bf16 rounds to 4e-3.
CASES = [
    ("sharded", "whole", 1e-3),
    ("sharded", "adapter", 0),
    ("replicated", "whole", 1e-3),
    ("sequence", "whole", 5e-3),
]


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    folder = tmp_path_factory.mktemp("half")
    return folder, {"whole": half_ranks.alone(folder), "adapter": half_ranks.alone(folder / "a", "adapter")}


@pytest.fixture(scope="module")
def two(one):
    """What two ranks wrote."""
    command = [sys.executable, half_ranks.__file__, str(one[0])]
    done = subprocess.run(command, cwd=REPO, env=environment(), capture_output=True, text=True, timeout=300)
    assert (one[0] / "tensors.safetensors").is_file(), done.stderr
    return load_file(one[0] / "tensors.safetensors")


@pytest.mark.parametrize(("mesh", "kind", "tolerance"), CASES)
def test_two_ranks_are_one(one, two, mesh, kind, tolerance):
    """Velocities, gradients and their norm in the first update; then weights and EMA after two clipped updates."""
    ours, expected = below(two, f"{mesh}/{kind}/"), one[1][kind]
    ours = {key: value for key, value in ours.items() if not key.startswith("sent/")}
    assert ours.keys() == expected.keys()
    assert torch.equal(ours["velocity/0"], expected["velocity/0"])
    assert_near(below(ours, "gradients/0/"), below(expected, "gradients/0/"), tolerance)
    torch.testing.assert_close(ours["norm/0"], expected["norm/0"], rtol=tolerance / 10, atol=0)
    assert float(ours["norm/0"]) > half_ranks.CONFIG.max_grad_norm
    for state in ("state/weights/", "state/ema/"):
        assert_near(below(ours, state), below(expected, state), 2 * tolerance)


@pytest.mark.parametrize("mesh", ["sharded", "sequence"])
def test_compiled_blocks_change_no_bit(two, mesh):
    """One graph with gradient and one without serve all blocks and updates."""
    found = below(two, f"{mesh}/compiled/")
    assert found.pop("graphs") == 2
    assert_same(found, {key: value for key, value in below(two, f"{mesh}/whole/").items() if key in found})


@pytest.mark.parametrize("kind", ["whole", "adapter"])
def test_without_its_float32_shards_a_student_samples_and_then_trains_as_with_them(two, kind):
    """Also in its first pass; all float32 weights that are sharded leave, which a rank shares with the other one."""
    found = below(two, f"halves/{kind}/")
    shards, left, gathered = found.pop("bytes").tolist()
    assert_same(found, {key: value for key, value in below(two, f"sharded/{kind}/").items() if key in found})
    weights = below(found, "state/weights/")
    held = 4 * sum(weight.numel() for weight in weights.values())
    assert left == 0 < gathered and 0.45 * held < shards < 0.6 * held


def test_half_of_the_bytes_are_gathered(two):
    """Norms and tables are whole on every rank, which are less than 0.1% of Wan2.1's weights."""
    (half, _, count), (exact, none, _) = two["gathered/half"].tolist(), two["gathered/float"].tolist()
    assert none == 0 and count > 8
    assert 0.4 * exact < half <= 0.5 * exact


@pytest.mark.parametrize(("mesh", "kind", "_"), CASES)
def test_workers_get_the_weights_from_the_parts_of_the_ranks(two, mesh, kind, _):
    """Each rank sends its own rows and gathers nothing. What passes round to bf16 goes so; an adapter is in float32."""
    weights, found = below(two, f"{mesh}/{kind}/state/weights/"), below(two, f"{mesh}/{kind}/sent/")
    there = below(found, "weights/")
    rounded = {name for name, weight in there.items() if weight.dtype == torch.bfloat16}
    least = sum(weight.nbytes for weight in there.values())
    first, second, gathered = found["bytes"].tolist()
    assert gathered == 0 and least <= first + second < 1.1 * least
    assert second == 0 if mesh == "replicated" else 0.4 * least < second < 0.6 * least
    assert 0.5 <= least / sum(weight.nbytes for weight in weights.values()) < 0.6 if kind == "whole" else not rounded
    assert_same(there, {k: w.bfloat16() if k in rounded else w for k, w in weights.items()})


def test_blocks_behind_the_features_are_not_gathered_for_a_value(two):
    """The last one of four."""
    velocity, value, block = two["gathered/values"].tolist()
    assert 1 <= (velocity - value) / block < 1.05  # with padding


@pytest.mark.parametrize("kind", ["whole", "adapter"])
def test_one_rank_continues_what_two_saved(one, two, kind):
    role = half_ranks.student(ALONE, adapter=kind == "adapter")
    loaded = half_ranks.load(role, one[0] / "two" / kind / f"step_{half_ranks.UPDATES}", ALONE)
    assert_same(below(loaded, "state/"), below(two, f"sharded/{kind}/state/"))
    assert role.updates == half_ranks.UPDATES


def test_two_ranks_continue_what_one_saved(one, two):
    assert_same(below(two, "back/state/"), below(one[1]["whole"], "state/"))
