"""The processes of Inductor's compilers, which a stop of the run must not end."""

import signal
import subprocess
import sys

import pytest
import torch
from helpers import ALONE, small_model
from torch._inductor import async_compile

from unified_trainer.roles import blocks
from unified_trainer.roles.backbone import Backbone

BLOCKED = "import signal; print(*sorted(int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, [])))"


@pytest.fixture
def started(monkeypatch) -> list[set[int]]:
    """The signals that each compiler process blocks, of a stand-in for torch's."""
    found = []

    def start() -> None:
        said = subprocess.run([sys.executable, "-c", BLOCKED], capture_output=True, text=True, check=True)
        found.append({int(number) for number in said.stdout.split()})

    monkeypatch.setattr(async_compile, "maybe_warm_pool", start)
    return found


def test_what_stops_a_run_does_not_end_them(started):
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    Backbone(small_model(), ALONE, compile=True)
    assert len(started) == 1 and started[0] >= {signal.SIGTERM, signal.SIGHUP}
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before


@pytest.mark.parametrize(("compile", "backend"), [(False, "inductor"), (True, "aot_eager")])
def test_a_run_that_calls_no_compiler_starts_none(compile, backend, started, monkeypatch):
    monkeypatch.setattr(blocks, "BACKEND", backend)
    Backbone(small_model(), ALONE, compile=compile)
    assert not started


def test_reductions_of_compiled_blocks_follow_no_timing_and_all_gradients_are_written(started):
    inductor = torch._inductor.config
    with inductor.patch({"deterministic": False, "triton.mix_order_reduction": True, "emulate_precision_casts": False}):
        Backbone(small_model(), ALONE, compile=True)
        assert inductor.deterministic and inductor.emulate_precision_casts
        assert not inductor.triton.mix_order_reduction
