"""All methods on a simulated device: no wait within a rollout or a replay, and nothing in float64 on the device."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from helpers import REPO, checkpoint_of
from torch.utils.checkpoint import CheckpointPolicy

from unified_trainer.roles.recompute import selective_policy
from unified_trainer.run.registry import METHODS

SCRIPT = REPO / "tests" / "parallel" / "simulated_runs.py"
UPDATES = {"dance_grpo": 2, "dmd2": 2, "self_forcing": 2, "finetune": 1}  # of all roles in a training step
WAITS = {"dance_grpo": 7, "dmd2": 3, "self_forcing": 3, "finetune": 2}  # in all, as docs/performance.md says
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("simulated")
    # Not a copy of this process: torch's autograd must not have run before it knows the device.
    environment = os.environ | {"PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, SCRIPT, folder], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return folder


@pytest.fixture(scope="module")
def found(folder) -> dict:
    return json.loads((folder / "found.json").read_text(encoding="utf-8"))


def test_every_method_trains_and_a_run_resumes(found):
    assert found.keys() == set(METHODS)
    assert {(run["code"], run["resumed"]) for run in found.values()} == {(0, 0)}


def test_nothing_is_computed_in_float64_on_the_device(found):
    assert {method: run["float64"] for method, run in found.items() if run["float64"]} == {}


@pytest.mark.parametrize("method", UPDATES)
def test_no_pass_of_a_step_waits_for_the_device(found, method):
    """One read of an update for its gradient norm, one for its metrics; one of a step for its scores, one at its end.

    No pass of a rollout or a replay waits.
    """
    waits = found[method]["waits"]
    by_phase = Counter()
    for phase, _kind, _line, count in waits:
        by_phase[phase] += count
    assert by_phase["rollout"] == 0, waits
    assert by_phase["optimizer"] == UPDATES[method], waits
    between = Counter()
    for phase, _kind, line, count in waits:
        if phase == "update":
            between[line.split(":")[0]] += count
    assert between == ({"rewards/reward.py": 1, "methods/rl/replay.py": 2} if method == "dance_grpo" else {}), waits
    assert sum(by_phase.values()) == WAITS[method], waits


@pytest.mark.parametrize("method", ["dance_ppo", "diffusion_nft", "distill_rl"])
def test_nothing_waits_for_copies_of_a_rollout_that_is_kept_in_cpu_memory(found, method):
    lines = {line.split(":")[0] for _phase, _kind, line, _count in found[method]["waits"]}
    assert "roles/learner.py" in lines and not lines & {"parallel/copy_queue.py", "methods/rl/kept_rollout.py"}
    assert not [wait for wait in found[method]["waits"] if wait[0] == "rollout"]


def test_vae_and_scorer_are_on_the_device_only_while_the_samples_are_scored_and_come_once(folder):
    phases = json.loads((folder / "phases.json").read_text(encoding="utf-8"))
    for place in ("device", "cpu"):
        there, offloaded = (phases[f"{place}, {how}"] for how in ("there", "offloaded"))
        assert there["moves"] == [] and len(offloaded["moves"]) == 2  # VAE and scorer, for four samples
        weights = sum(offloaded["moves"])
        assert min(offloaded["score"]) > weights > 20 * max(offloaded["sample"])
        assert offloaded["after"] == there["after"]  # no byte of them is left; those of `there` are not counted
        assert offloaded["scores"] == there["scores"]


def test_the_state_of_training_leaves_the_device_while_samples_are_made(folder):
    """Moments, EMA and reference of a student in float32: 8 + 4 + 4 bytes a weight, as docs/scale.md says."""
    found = json.loads((folder / "offloaded.json").read_text(encoding="utf-8"))
    trained = checkpoint_of(folder / "offloaded", 1)
    state = 16 * sum(weight.numel() for key, weight in trained.items() if key.startswith("student/weights/"))
    assert found["code"] == 0 and found["before"] - found["start"] == found["after"] - found["end"] == state > 0


def test_images_are_prepared_for_hpsv3_on_the_device(folder):
    """A batch waits once, to know whether its values lie in [0, 1]."""
    prepared = json.loads((folder / "prepared.json").read_text(encoding="utf-8"))
    assert [kind for _phase, kind, _line, _count in prepared["waits"]] == ["read by nonzero", "tolist"]
    assert prepared["float64"] == 0 and prepared["same"]


def test_a_rollout_in_cpu_memory_leaves_the_device(folder):
    """Four samples of four states and an x0 of 256 bytes each; two rows of a state are read."""
    phases = json.loads((folder / "phases.json").read_text(encoding="utf-8"))
    device, cpu = (phases[f"{place}, there"] for place in ("device", "cpu"))
    assert device["after"] - cpu["after"] == 4 * 5 * 256
    kept = 3 + 1 + 3 + 3 * 64  # log-densities, a score, statistics of pixels and the thumbnail: no decoded frame
    assert cpu["after"] == 4 * 4 * kept
    assert cpu["read"] == 2 * 256 and cpu["rows"] == device["rows"] and cpu["scores"] == device["scores"]
    parts = device["sample"]  # before each part is made: the whole is there once, and the part before
    assert parts[0] == 0 and max(parts) < 2 * 4 * 5 * 256


def test_selective_recomputation_keeps_the_attention_of_torch_npu():
    library = torch.library.Library("npu", "FRAGMENT")
    library.define("npu_fusion_attention(Tensor query) -> Tensor")
    library.define("npu_rotary_mul(Tensor query) -> Tensor")
    assert selective_policy(None, torch.ops.npu.npu_fusion_attention.default) == CheckpointPolicy.MUST_SAVE
    assert selective_policy(None, torch.ops.npu.npu_rotary_mul.default) == CheckpointPolicy.PREFER_RECOMPUTE
