"""scripts/bench_gpu.py at toy size: rows that work, rows that fail, and what is written."""

import json
import math
import sys

import pytest
import torch
from helpers import ALONE, REPO

sys.path.insert(0, str(REPO / "scripts"))
import bench_gpu
import recorded_calls

FACTS = {"device": "a device", "time": "2026-01-02T03:04:05", "command": "c", "versions": {"torch": "2"}}


def bench(tmp_path, end=math.inf):
    return bench_gpu.Bench(tmp_path, tmp_path / "wan", bench_gpu.SMALL, ALONE, end, FACTS)


def test_a_row_that_fails_does_not_end_the_others(tmp_path, capsys):
    def out_of_memory():
        raise torch.OutOfMemoryError

    measured = bench(tmp_path)
    measured.row("step", "too large", out_of_memory)
    measured.row("step", "broken", lambda: {"ms": 1 / 0})
    measured.row("step", "good", lambda: measured.rate(0.5, 2e12, 100))
    rows = json.loads((tmp_path / "bench.json").read_text())["rows"]
    assert [row.get("failed", "") for row in rows] == ["out of memory", "ZeroDivisionError: division by zero", ""]
    assert (rows[2]["ms"], rows[2]["model_tflop"], rows[2]["tokens_per_second"]) == (500, 2, 200)
    assert "1 / 0" in rows[1]["traceback"]
    table = (tmp_path / "bench.md").read_text()
    assert "a device, torch 2, 2026-01-02, `c`." in table and "| broken | ZeroDivisionError" in table
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_no_row_begins_after_the_time(tmp_path):
    late = bench(tmp_path, end=-math.inf)
    late.row("step", "late", lambda: pytest.fail("begun"))
    assert late.rows == [{"section": "step", "name": "late", "skipped": "no time left"}]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight:UserWarning")  # torch: a slower kernel
def test_the_toy_run(tmp_path, monkeypatch):
    """Every section but compilation, with the step whose calls are hardest to repeat: three roles on one network."""
    seen = []
    monkeypatch.setattr(bench_gpu, "STEPS", {"dmd2, adapters": bench_gpu.STEPS["dmd2, adapters"]})
    monkeypatch.setattr(bench_gpu, "ROUNDS", 1)
    repeat = recorded_calls.Call.repeat
    monkeypatch.setattr(recorded_calls.Call, "repeat", lambda call: (seen.append(call), repeat(call)))
    bench_gpu.main(tmp_path, toy=True, only=("network", "attention", "methods", "vae", "log_ratio"))
    written = json.loads((tmp_path / "bench.json").read_text())
    rows = {row["name"]: row for row in written["rows"]}
    assert not any("failed" in row for row in written["rows"])
    forward, both = rows["32x32x5, forward"], rows["32x32x5, forward and backward, recomputing full"]
    # MATH: products of the input's layers have no gradient of their input counted apart, so a pass is exactly thrice.
    assert both["model_tflop"] == pytest.approx(3 * forward["model_tflop"])
    assert rows["decode 32x32x5, bf16, channels last"]["ms"] > 0
    assert [name for name in rows if "32x32x9, forward, " in name] == [
        "32x32x9, forward, flash",
        "32x32x9, forward, math",
    ]
    step = rows["dmd2, adapters, 32x32x9"]
    assert step["calls"] == len(seen) and sum(call.grad for call in seen) >= 2
    assert all(call.half for call in seen if call.name == "WanModel.velocity")
    adapters = {adapter for call in seen for _, adapter in call.adapters}
    assert adapters == {"student", "critic", "none"} and 0 < sum(step["phases"].values()) == pytest.approx(1)
    assert rows["fp32, samples per pass 1 in the rollout, 1 in the replay"]["largest_log_ratio"] < 1e-6
    assert written["environment"]["command"].startswith("python scripts/bench_gpu.py")
