"""This script measures the trainer's overhead: a training step against the same network calls without the trainer.

    python scripts/bench_step.py --method dance_grpo

It records every call of the roles' networks, the decoder and the scorer in a step and whether it took a gradient, then
repeats the calls alone. It measures processor time too, which other work on the machine does not change. With
`--encoders.cache-memory-gib 0` every prompt is encoded anew in every step.
"""

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from unified_trainer.build import build
from unified_trainer.cli.command_line import parse
from unified_trainer.models.wan.causal import Cache, CausalWanModel
from unified_trainer.models.wan.codec import WanCodec
from unified_trainer.models.wan.model import WanModel
from unified_trainer.parallel.device import peak_memory
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.rewards.hpsv3 import HPSv3

ROUNDS = 5
TEXT = "WanCodec.encode_text"
FROZEN_CALLS = ((WanCodec, "encode_text"), (WanCodec, "decode"), (HPSv3, "score"), (CausalWanModel, "append"))
TRAINED_CALLS = ((WanModel, "velocity"), (CausalWanModel, "velocity_cached"), (CausalWanModel, "velocity_masked"))


@dataclass(frozen=True)
class Call:
    """A recorded call of a model."""

    name: str
    call: Callable[[], Tensor]
    grad: bool

    def repeat(self) -> None:
        """Repeat the forward pass, and the backward pass where the step had one."""
        with torch.set_grad_enabled(self.grad):
            out = self.call()
            if self.grad:
                out.square().mean().backward()


def at_call(argument: object) -> object:
    """Copy a cache as it was at the call; no other argument changes later."""
    return replace(argument, text=list(argument.text)) if isinstance(argument, Cache) else argument


@contextmanager
def recorded(calls: list[Call]) -> Iterator[None]:
    """Append every call of the models to the list."""
    with ExitStack() as patches:
        for kind, name in (*TRAINED_CALLS, *FROZEN_CALLS):
            original, trained = getattr(kind, name), (kind, name) in TRAINED_CALLS

            def note(
                *args: object,
                original: Callable = original,
                trained: bool = trained,
                label: str = f"{kind.__name__}.{name}",
            ) -> Tensor:
                calls.append(Call(label, partial(original, *map(at_call, args)), torch.is_grad_enabled() and trained))
                return original(*args)

            patches.enter_context(patch.object(kind, name, note))
        yield


def seconds(work: Callable[[], object]) -> tuple[float, float]:
    """Return the seconds of the clock and of the processor that the work takes."""
    start, worked = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - start, time.process_time() - worked


def main(argv: list[str]) -> None:
    run = parse(argv)
    mesh = Mesh.join(run.device)
    trainer = build(run, mesh).trainer
    trainer.step(0)
    pairs, texts, counts = [], [], Counter()
    for n in range(1, ROUNDS + 1):
        calls: list[Call] = []
        with recorded(calls):
            step = seconds(lambda n=n: trainer.step(n))
        pairs.append((step, seconds(lambda calls=calls: [call.repeat() for call in calls])))
        texts.append(seconds(lambda calls=calls: [call.repeat() for call in calls if call.name == TEXT]))
        counts.update((call.name, call.grad) for call in calls)
    table = Table("measure", "value", title=f"{run.method}, {Path(sys.argv[0]).name}")
    for (name, grad), count in counts.items():
        table.add_row(f"calls of {name}{' with gradient' if grad else ''} in {ROUNDS} steps", str(count))
    for i, by in enumerate(("", " of processor time")):
        steps, bare = (sum(times[i] for times in column) for column in zip(*pairs, strict=True))
        table.add_row(f"{ROUNDS} steps, s{by}", f"{steps:.2f}")
        table.add_row(f"their calls alone, s{by}", f"{bare:.2f}")
        table.add_row(f"{TEXT} alone, s{by}", f"{sum(times[i] for times in texts):.4f}")
        table.add_row(f"overhead ratio{by}", f"{steps / bare:.3f}")
    table.add_row("peak memory, GiB", f"{peak_memory(mesh.device):.2f}")
    Console().print(table)


if __name__ == "__main__":
    main(sys.argv[1:])
