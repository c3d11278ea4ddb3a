"""The processes of Inductor's compilers, which a stop of the run must not end."""

import functools
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from helpers import ALONE, small_model
from torch._inductor import async_compile

from unified_trainer.numerics import philox
from unified_trainer.roles import backbone, blocks
from unified_trainer.roles.backbone import Backbone
from unified_trainer.roles.recompute import Recompute

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


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"
)  # of torch about itself
@pytest.mark.parametrize(("memory", "tuned"), [("none", False), ("selective", False), ("none", True)])
def test_every_graph_is_compiled_with_our_options(started, monkeypatch, memory, tuned):
    """With gradient and without, of several shapes: a global setting would hold for the first graph of a process alone.

    Inductor is stopped where it has the graphs of a forward or a backward pass, which then run as they are.
    """
    from torch._dynamo.backends.debugging import boxed_nop
    from torch._inductor import compile_fx  # seconds

    torch._dynamo.reset()
    found, whole = [], compile_fx.compile_fx

    def as_it_is(graph: torch.fx.GraphModule, _inputs: list[torch.Tensor], **_how: object) -> Callable[..., object]:
        config = torch._inductor.config
        ours = (config.emulate_precision_casts, config.triton.mix_order_reduction)
        found.append((config.deterministic, config.max_autotune, *ours))
        return boxed_nop(graph, ())

    monkeypatch.setattr(compile_fx, "compile_fx", functools.partial(whole, inner_compile=as_it_is))
    block = torch.nn.Linear(3, 3)
    blocks.prepare_blocks([block], Recompute.of_setting(memory, 1), nullcontext, lambda *inputs: inputs, tuned=tuned)
    for samples in (1, 2):
        for gradient in (False, True):
            with torch.set_grad_enabled(gradient):
                result = block(torch.ones(samples, 3))
        result.sum().backward()
    assert len(found) == 6 and set(found) == {(not tuned, tuned, True, False)}


# In a process of its own: this one's hooks, which check shapes and types in every function, cannot be compiled.
COMPILED_NOISE = """
import torch
from unified_trainer.numerics import philox
from unified_trainer.roles import blocks
blocks.compile_noise("cuda")
kernel = philox.COMPILED["cuda"]
streams = torch.randint(0, 2**32, (3, 4), generator=torch.Generator().manual_seed(0))
eager = philox.normal(streams, 4099)
philox.COMPILED["cpu"] = kernel  # turned to the device that is here
drawn = [philox.normal(streams, 4099), philox.normal(streams, 4099, part=900)]
print([torch.equal(one, eager) for one in drawn], philox.COMPILED["cuda"] is kernel)
print(torch._dynamo.utils.counters["stats"]["unique_graphs"])
"""


@pytest.mark.slow
def test_compiled_noise_is_equal_bit_for_bit():
    """In one part and in several, of which the last one is shorter, by one graph; by Inductor's compiler for CPUs."""
    done = subprocess.run([sys.executable, "-c", COMPILED_NOISE], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["[True, True] True", "1"]


def test_noise_that_cannot_be_compiled_is_drawn_as_before(monkeypatch):
    def failing(*_):
        raise torch._dynamo.exc.InternalTorchDynamoError("no compiler")

    streams = torch.arange(8).view(2, 4)
    expected = philox.normal(streams, 50)
    monkeypatch.setattr(torch, "compile", lambda *_, **_named: failing)
    monkeypatch.setattr(philox, "COMPILED", {})
    blocks.compile_noise("cuda")
    philox.COMPILED["cpu"] = philox.COMPILED["cuda"]
    assert torch.equal(philox.normal(streams, 50), expected) and philox.COMPILED["cuda"] is philox.words


def test_the_setting_of_blocks_reaches_noise_of_accelerators_and_kernels_of_products(started, monkeypatch):
    monkeypatch.setattr(philox, "COMPILED", {})
    Backbone(small_model(), ALONE, compile=True)
    assert not philox.COMPILED
    kinds, tuned = [], []
    monkeypatch.setattr(backbone, "compile_noise", kinds.append)
    monkeypatch.setattr(backbone, "prepare_blocks", lambda *_, **named: tuned.append(named["tuned"]))
    for compile in (False, True, "max_autotune"):
        Backbone(small_model(), ALONE, compile=compile)
    assert kinds == ["cpu", "cpu"] and tuned == [False, False, True]
