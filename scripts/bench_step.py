"""Overhead of the trainer: one training step against the same network calls made bare.

    python scripts/bench_step.py --method dance_grpo

Records every call of the student, the decoder and the scorer in one step and whether it took a gradient,
then times steps and bare repetitions in turn.
"""

import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch
import transformers
from rich.console import Console
from rich.table import Table
from torch import Tensor

from unified_trainer import checkpoint, config
from unified_trainer.build import build
from unified_trainer.models.hpsv3 import HPSv3
from unified_trainer.models.wan import WanCodec, WanModel
from unified_trainer.parallel.device import peak_memory
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.registry import METHODS

ROUNDS = 5
FROZEN_CALLS = ((WanCodec, "encode_text"), (WanCodec, "decode"), (HPSv3, "score"))
TRAINED_CALL = (WanModel, "velocity")


@dataclass(frozen=True)
class Call:
    name: str
    call: Callable[[], Tensor]
    grad: bool

    def repeat(self) -> None:
        """The forward pass, and the backward pass where the step had one."""
        with torch.set_grad_enabled(self.grad):
            out = self.call()
            if self.grad:
                out.square().mean().backward()


def record(step: Callable[[], object]) -> list[Call]:
    """Every call of the models while `step` runs."""
    calls: list[Call] = []
    trained = getattr(*TRAINED_CALL)
    with ExitStack() as patches:
        for kind, name in (TRAINED_CALL, *FROZEN_CALLS):
            original = getattr(kind, name)

            def note(*args: object, original: Callable = original, label: str = f"{kind.__name__}.{name}") -> Tensor:
                grad = torch.is_grad_enabled() and original is trained
                calls.append(Call(label, partial(original, *args), grad))
                return original(*args)

            patches.enter_context(patch.object(kind, name, note))
        step()
    return calls


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def main(argv: list[str]) -> None:
    transformers.utils.logging.disable_progress_bar()
    run = config.parse(argv, {name: kind for name, (_, kind) in METHODS.items()}, checkpoint.contract)
    mesh = Mesh.join(run.device)
    trainer = build(run, mesh).trainer
    calls = record(lambda: trainer.step(0))

    def bare() -> None:
        for call in calls:
            call.repeat()

    pairs = [(seconds(lambda n=n: trainer.step(n)), seconds(bare)) for n in range(1, ROUNDS + 1)]
    table = Table("measure", "value", title=f"{run.method}, {Path(sys.argv[0]).name}")
    for (name, grad), count in Counter((call.name, call.grad) for call in calls).items():
        table.add_row(f"calls of {name}{' with gradient' if grad else ''}", str(count))
    table.add_row("step, median s", f"{statistics.median(step for step, _ in pairs):.2f}")
    table.add_row("bare calls, median s", f"{statistics.median(alone for _, alone in pairs):.2f}")
    table.add_row("overhead ratio, median", f"{statistics.median(step / alone for step, alone in pairs):.3f}")
    table.add_row("peak memory, GiB", f"{peak_memory(mesh.device):.2f}")
    Console().print(table)


if __name__ == "__main__":
    main(sys.argv[1:])
