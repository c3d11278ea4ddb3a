"""All methods on a simulated device: no wait within a rollout or a replay, and nothing in float64 on the device."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from helpers import REPO
from torch.utils.checkpoint import CheckpointPolicy

from unified_trainer.registry import METHODS
from unified_trainer.roles.recompute import selective_policy

SCRIPT = REPO / "tests" / "simulated_runs.py"
UPDATES = {"dance_grpo": 2, "dmd2": 2, "self_forcing": 2, "finetune": 1}  # of all roles in a training step
WAITS = {"dance_grpo": 7, "dmd2": 3, "self_forcing": 3, "finetune": 2}  # in all, as docs/performance.md says
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict:
    folder: Path = tmp_path_factory.mktemp("simulated")
    environment = os.environ | {"PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, SCRIPT, folder], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
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
    assert between == ({"roles/reward.py": 1, "rl/replay.py": 2} if method == "dance_grpo" else {}), waits
    assert sum(by_phase.values()) == WAITS[method], waits


def test_selective_recomputation_keeps_the_attention_of_torch_npu():
    library = torch.library.Library("npu", "FRAGMENT")
    library.define("npu_fusion_attention(Tensor query) -> Tensor")
    library.define("npu_rotary_mul(Tensor query) -> Tensor")
    assert selective_policy(None, torch.ops.npu.npu_fusion_attention.default) == CheckpointPolicy.MUST_SAVE
    assert selective_policy(None, torch.ops.npu.npu_rotary_mul.default) == CheckpointPolicy.PREFER_RECOMPUTE
