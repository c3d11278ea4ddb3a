"""scripts/bench_gpu.py at toy size: rows that work, rows that fail, and what is written."""

import json
import math
import multiprocessing
import os
import signal
import sys
from types import SimpleNamespace

import pytest
import torch
from helpers import ALONE, REPO, shell

sys.path.insert(0, str(REPO / "scripts"))
import bench_gpu
import recorded_calls
from random_wan import write

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


def test_the_largest_kernels_of_a_pass_are_rows(tmp_path):
    write(tmp_path / "wan", bench_gpu.SMALL.architecture, torch.device("cpu"))
    measured = bench(tmp_path)
    bench_gpu.kernels(measured)
    assert not any(row.get("failed") for row in measured.rows)
    noise, products, measured.rows[:] = measured.rows[0], measured.rows[1:5], measured.rows[5:]
    assert (
        noise["section"] == "noise"
        and noise["ms"] > 0
        and all("Q, K, V of one layer" in row["name"] for row in products)
    )
    names = [row["name"] for row in measured.rows]
    assert len(names) == 2 * bench_gpu.KERNELS
    assert any("aten::addmm" in name for name in names) and any("backward" in name for name in names)
    shares = [row["share"] for row in measured.rows[: bench_gpu.KERNELS]]
    assert sorted(shares, reverse=True) == shares and 0.5 < sum(shares) <= 1
    assert "calls" in (tmp_path / "bench.md").read_text()


def test_one_wide_product_gives_queries_keys_values_and_gradients_of_three():
    x = torch.randn(5, 8, requires_grad=True)
    weights = [(torch.randn(8, 8, requires_grad=True), torch.randn(8, requires_grad=True)) for _ in range(3)]
    inputs = [x, *(one for pair in weights for one in pair)]
    found = [project(x, weights) for project in bench_gpu.PROJECTIONS.values()]
    gradients = [torch.autograd.grad([part.square().sum() for part in parts], inputs) for parts in found]
    for pair in (*zip(*found, strict=True), *zip(*gradients, strict=True)):
        torch.testing.assert_close(*pair)


def test_no_row_begins_after_the_time(tmp_path):
    late = bench(tmp_path, end=-math.inf)
    late.row("step", "late", lambda: pytest.fail("begun"))
    assert late.rows == [{"section": "step", "name": "late", "skipped": "no time left"}]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_sections_that_fail_do_not_end_the_others(tmp_path, monkeypatch):
    """One ends its process, one never ends, one raises; the rows that they measured before stay.

    The time limit of the one that never ends is the moment at which it has measured its row.
    """
    forks = multiprocessing.get_context("fork")
    measuring, hanging = forks.Pipe(duplex=False)

    class Process(forks.Process):
        def __init__(self, target, args):
            super().__init__(target=target, args=args)
            self.hangs = args[0] == "hangs"

        def join(self, timeout=None):
            super().join(measuring.recv() if self.hangs and timeout else timeout)

    def dies(measured):
        measured.row("dies", "before", lambda: {"ms": 1})
        os._exit(3)

    def hangs(measured):
        measured.row("hangs", "before", lambda: {"ms": 2})
        hanging.send(0.0)
        signal.pause()

    def works(measured):
        measured.row("works", "row", lambda: {"ms": 3})

    contexts = SimpleNamespace(get_context=lambda start: SimpleNamespace(Process=Process))
    monkeypatch.setattr(bench_gpu, "multiprocessing", contexts)  # a forked process gets what is replaced here
    monkeypatch.setattr(bench_gpu, "write", lambda *_: None)
    monkeypatch.setattr(bench_gpu, "SECTIONS", {"dies": dies, "hangs": hangs, "works": works})
    monkeypatch.setattr(bench_gpu, "SHARES", {"dies": 1, "hangs": 1, "works": 1})
    with pytest.raises(SystemExit):
        bench_gpu.main(tmp_path, toy=True)
    rows = json.loads((tmp_path / "bench.json").read_text())["rows"]
    assert [(row["section"], row.get("ms"), row.get("failed")) for row in rows] == [
        ("dies", 1, None),
        ("dies", None, "its process ended with exit code 3"),
        ("hangs", 2, None),
        ("hangs", None, "stopped at its time limit"),
        ("works", 3, None),
    ]
    assert "stopped at its time limit" in (tmp_path / "bench.md").read_text()


UNUSED = ("pyarrow", "av", "plotly", "starlette", "uvicorn", "ray", "nixl")
BLOCKED = f"""
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {UNUSED}:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Blocked())
sys.path.insert(0, "scripts")
import bench_gpu
"""


@pytest.mark.slow
def test_it_needs_no_package_that_it_does_not_use():
    done = shell(sys.executable, "-c", BLOCKED)
    assert done.returncode == 0, done.stderr


def test_an_unknown_section_is_named(tmp_path):
    with pytest.raises(SystemExit, match="network: the sections are gradients, log_ratio, forward"):
        bench_gpu.main(tmp_path, only=("network",))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight:UserWarning")  # torch: a slower kernel
def test_the_toy_run(tmp_path, monkeypatch):
    """All sections without compilation, with the steps whose calls are hardest to repeat: roles on one network, and a
    KV cache."""
    seen = []
    steps = {name: bench_gpu.STEPS[name] for name in ("self_forcing", "dmd2, adapters")}
    monkeypatch.setattr(bench_gpu, "STEPS", steps)
    monkeypatch.setattr(bench_gpu, "ROUNDS", 1)
    repeat = recorded_calls.Call.repeat
    monkeypatch.setattr(recorded_calls.Call, "repeat", lambda call: (seen.append(call), repeat(call)))
    monkeypatch.setattr(bench_gpu, "COMPILED", {"uncompiled": False})
    model = tmp_path / "wan"
    bench_gpu.prepare(tmp_path, model, bench_gpu.SMALL, "python scripts/bench_gpu.py")
    role, _ = bench_gpu._Passes(bench(tmp_path), bench_gpu.SMALL.small)._role()
    assert role.backbones[""].half_passes  # weights have bf16 copies, as in runs
    for section in bench_gpu.SECTIONS:
        bench_gpu.measure(section, tmp_path, model, bench_gpu.SMALL, math.inf)
    written = json.loads((tmp_path / "bench.json").read_text())
    rows = {row["name"]: row for row in written["rows"]}
    assert not any("failed" in row for row in written["rows"])
    assert next(row["gradient_difference"] for row in written["rows"] if row["section"] == "gradients") == 0
    assert rows["32x32x5, uncompiled, adapters of rank 32"]["whole_difference"] == 0
    assert 0 < rows["attention of 20 tokens, head size 16, flash"]["gradient_difference"] < 1e-2  # bf16
    assert 0 < rows["bf16, samples per pass 2 in the rollout, 2 in the replay"]["noise_floor"] < 1e-6
    forward, both = rows["32x32x5, uncompiled"], rows["32x32x5, uncompiled, recomputing full"]
    # MATH: products of the input's layers have no gradient of their input counted apart, so a pass is exactly thrice.
    assert both["model_tflop"] == pytest.approx(3 * forward["model_tflop"])
    assert rows["decode 32x32x5, bf16, channels last"]["ms"] > 0
    assert [name for name in rows if "32x32x9, forward, " in name] == [
        "32x32x9, forward, flash",
        "32x32x9, forward, math",
    ]
    step, causal = rows["dmd2, adapters, 32x32x9"], rows["self_forcing, 32x32x9"]
    assert step["calls"] + causal["calls"] == len(seen)
    assert "CausalWanModel.velocity_cached" in {call.name for call in seen[: causal["calls"]]}
    seen = seen[causal["calls"] :]
    assert sum(call.grad for call in seen) >= 2
    assert all(call.half for call in seen if call.name == "WanModel.velocity")
    adapters = {adapter for call in seen for _, adapter in call.adapters}
    assert adapters == {"student", "critic", "none"} and 0 < sum(step["phases"].values()) == pytest.approx(1)
    assert rows["fp32, samples per pass 1 in the rollout, 1 in the replay"]["largest_log_ratio"] < 1e-6
    assert written["environment"]["command"].startswith("python scripts/bench_gpu.py")
