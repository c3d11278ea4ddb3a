"""Every mesh is one rank: replicated, sharded, with shared tokens, and two of these at once.

Tolerance: float32 has 6e-8 of rounding, and a gradient is a sum of thousands of terms in another order, two updates
after another; 5e-6 of the largest gradient of its role and update is ten times what was seen. AdamW's eps is far above
rounding here, so that a trajectory is as smooth as its gradients.
"""

import functools
import re
import sys
from pathlib import Path

import pytest
import torch
from helpers import ALONE, WAN, assert_near
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parent))
import meshes
from launch import fork_ranks

pytestmark = pytest.mark.ranks

TOLERANCE = 5e-6


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """The tensors of two and of four ranks, and the error message of the two."""
    folder = tmp_path_factory.mktemp("ranks")
    for count in meshes.MESHES:
        fork_ranks(count, meshes.work, folder / str(count))
    files = {count: folder / str(count) / "words.txt" for count in meshes.MESHES}
    return {count: (load_file(file.parent / "tensors.safetensors"), file.read_text()) for count, file in files.items()}


@pytest.fixture(scope="module")
def two(ranks):
    return ranks[2]


@pytest.fixture(scope="module")
def four(ranks):
    return ranks[4]


@pytest.fixture(scope="module")
def causal():
    """The causal passes of one rank."""
    return meshes.causal_passes(ALONE)


@functools.cache
def alone(method: str) -> dict[str, torch.Tensor]:
    return meshes.trajectory(ALONE, *meshes.PARTS[method](ALONE))


def below(tensors: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}


def assert_one_trajectory(ours: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Assert equal metrics, and gradients that differ by little of the largest one of their update."""
    assert ours.keys() == expected.keys()
    gradients = {key: value for key, value in expected.items() if key.startswith("gradients/")}
    update = {key: re.match(r"gradients/\w+/\d+", key)[0] for key in gradients}
    largest: dict[str, float] = {}
    for key, value in gradients.items():
        largest[update[key]] = max(largest.get(update[key], 0.0), float(value.abs().max()))
    assert min(largest.values()) > 0
    for key, value in expected.items():
        bound = TOLERANCE * largest[update[key]] if key in update else 1e-6
        torch.testing.assert_close(ours[key], value, rtol=1e-5, atol=bound, msg=lambda text, key=key: f"{key}: {text}")


@pytest.mark.parametrize(("mesh", "method"), meshes.ON_TWO)
def test_two_ranks_learn_what_one_does(two, mesh, method):
    """FSDP2 takes the mean over all ranks; sequence ranks have the gradient of their tokens, 9 over two of them."""
    assert_one_trajectory(below(two[0], f"{mesh}/{method}/"), alone(method))


@pytest.mark.parametrize(("mesh", "method"), meshes.ON_FOUR)
def test_four_ranks_learn_what_one_does(four, mesh, method):
    assert_one_trajectory(below(four[0], f"{mesh}/{method}/"), alone(method))


def test_a_causal_network_with_shared_tokens_is_that_of_one_rank(two, causal):
    """Three tokens a frame, over two ranks; cached, masked, and attending to clean frames in one pass."""
    ours, expected = below(two[0], "causal/"), causal
    assert ours.keys() == expected.keys()
    for name in ("cached", "masked", "forced"):
        torch.testing.assert_close(ours[name], expected[name], rtol=0, atol=1e-6)
        grads = [below(one, f"gradients of {name}/") for one in (ours, expected)]
        assert_near(*grads, tolerance=TOLERANCE)
    torch.testing.assert_close(expected["cached"], expected["forced"], rtol=0, atol=1e-6)
    assert not torch.equal(expected["masked"], expected["forced"])


def test_a_rank_keeps_its_heads_of_the_cache(two, causal):
    """Half of the bytes that one rank holds, and as many as `cache_bytes` computes in advance."""
    ours, expected = two[0], causal
    assert expected["held"] == expected["said"] == 2 * ours["causal/held"] == 2 * ours["causal/said"] > 0


@pytest.mark.parametrize("method", meshes.METHODS)
def test_four_passes_of_one_sample_learn_what_one_of_four_does(method):
    ours = meshes.trajectory(ALONE, *meshes.PARTS[method](ALONE, micro_batch=4))
    other = meshes.PARTS[method](ALONE, micro_batch=1)
    assert_one_trajectory(ours, meshes.trajectory(ALONE, *other))


@pytest.mark.parametrize("option", meshes.OPTIONS)
def test_options_of_the_mesh_change_nothing_that_is_learnt(two, option):
    """How it is accumulated, when the ranks exchange gradients, what they keep gathered and where weights stay."""
    assert_one_trajectory(below(two[0], f"options/{option}/"), alone("finetune"))


@pytest.mark.parametrize("mesh", meshes.MESHES[2])
def test_a_pass_sees_weights_that_moved_after_the_last(two, mesh):
    """Also those of the root, which FSDP2 by itself keeps gathered after a pass."""
    torch.testing.assert_close(two[0][f"{mesh}/stale"], meshes.stale(ALONE))


@pytest.mark.parametrize("mesh", meshes.MESHES[2])
def test_the_samples_and_their_noise_are_those_of_one_rank(two, mesh):
    """A sequence group holds each sample once, whatever the mesh."""
    samples, noise = meshes.samples_and_noise(ALONE)
    assert torch.equal(two[0][f"{mesh}/samples"], samples)
    assert torch.equal(two[0][f"{mesh}/noise"], noise)


def test_ranks_read_their_shards_of_a_folder_and_no_more(two):
    """All of them together the whole; the few weights that do not divide are on one rank."""
    ours = below(two[0], "read/")
    assert ours.pop("share") == pytest.approx(0.5, abs=0.01)
    stored = load_file(WAN / "transformer" / "diffusion_pytorch_model.safetensors")
    assert ours.keys() == stored.keys()
    assert all(torch.equal(ours[key], stored[key].float()) for key in stored)


def test_ranks_that_diverge_are_told_so(two):
    """Before they gather weights for different passes, which could end in a hang or in each other's weights."""
    passes = ("pass of student with gradient", "pass of student without gradient")
    assert two[1] == f"ranks diverged: rank 0: {passes[0]}; rank 1: {passes[1]}"
