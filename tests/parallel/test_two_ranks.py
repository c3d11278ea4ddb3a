"""Two gloo ranks are one: equal gradients, equal metrics, and a checkpoint that one rank continues.

The ranks are started once, as copies of this process.
"""

import functools
import json
import sys
from pathlib import Path

import pytest
import torch
from helpers import ALONE, assert_near, assert_same, files_of, metrics_of
from safetensors.torch import load_file

from unified_trainer.__main__ import main

sys.path.insert(0, str(Path(__file__).parent))
import two_ranks
from launch import fork_ranks

pytestmark = pytest.mark.ranks

RANKS = 2
UPDATES_TWICE = ("buffer", "crd", "dance_grpo", "dance_ppo")  # in each training step


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where both ranks wrote what they computed."""
    out = tmp_path_factory.mktemp("ranks")
    fork_ranks(RANKS, two_ranks.work, out)
    assert (out / "program" / "checkpoints" / "step_2" / "manifest.json").is_file()
    return out


@pytest.fixture(scope="module")
def tensors(folder):
    return load_file(folder / "tensors.safetensors")


@pytest.fixture(scope="module")
def metrics(folder):
    return json.loads((folder / "metrics.json").read_text())


@pytest.fixture(scope="module")
def alone():
    """The gradients and metrics of a method on one rank."""
    return functools.cache(lambda method: two_ranks.gradients(method, ALONE))


def below(tensors: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}


@pytest.mark.parametrize("method", two_ranks.METHODS)
def test_gradients_are_those_of_one_rank(tensors, alone, method):
    """FSDP2 averages over ranks what each rank averaged over its samples: the mean over all of them."""
    expected, _ = alone(method)
    ours = below(tensors, f"{method}/gradients/")
    for role in {key.split("/")[0] for key in expected}:
        assert_near(below(ours, f"{role}/"), below(expected, f"{role}/"), 1e-5 if method == "finetune" else 1e-4)


@pytest.mark.parametrize("method", two_ranks.METHODS)
def test_metrics_are_those_of_one_rank(metrics, alone, method):
    """Rewards, losses and the largest log-ratio are those of all ranks, not of the main one."""
    _, expected = alone(method)
    assert metrics[method] == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_the_weights_were_sharded(metrics):
    assert metrics["shards"] == "DTensor"


def test_the_mesh_gathers_in_rank_order(metrics):
    assert metrics["gathered"] == [[0.0, 0.0], [1.0, 1.0]]
    assert metrics["any"] == [True, False]


@pytest.mark.parametrize("method", two_ranks.METHODS)
def test_one_rank_continues_what_two_saved(folder, tensors, method):
    """Weights, moments, EMA weights and counters; the shards of the EMA are whole, not one rank's."""
    one = two_ranks.trainer(method, ALONE, moves=True)
    assert one.resume(folder / method) == (2, [])
    assert_same(two_ranks.whole(one), below(tensors, f"{method}/state/"))
    assert {role.updates for role in one.roles.values()} == {4 if method in UPDATES_TWICE else 2}
    assert torch.equal(two_ranks.averaged(one), tensors[f"{method}/averaged"])


def test_two_ranks_learn_what_one_does(tensors):
    """After two updates with clipping and warm-up; AdamW turns rounding of tiny gradients into 1e-5 of a step."""
    one = two_ranks.trainer("finetune", ALONE, moves=True)
    for step in range(2):
        one.step(step)
    state = two_ranks.whole(one)
    for kind in ("weights", "ema"):
        assert_near(below(tensors, f"finetune/state/student/{kind}/"), below(state, f"student/{kind}/"), 1e-3)


def test_the_program_on_two_ranks_resumes_on_one(folder, tmp_path):
    """One run directory, written by the main rank, with the metrics of one rank."""
    two, one = folder / "program", tmp_path / "one"
    assert main([*two_ranks.PROGRAM, "--output", str(one)]) == 0
    for left, right in zip(metrics_of(two), metrics_of(one), strict=True):
        assert left == pytest.approx(right, rel=1e-2, abs=1e-3)
    assert sorted(files_of(two / "validation")) == sorted(files_of(one / "validation"))
    assert main(["--resume", str(two), "--steps", "3"]) == 0
    assert [line["step"] for line in metrics_of(two)] == [0, 1, 2, 2, 3, 3]
