"""This script measures the trainer's overhead: a training step against the same network calls without the trainer.

    python scripts/bench_step.py --method dance_grpo

It records every call of the roles' networks, the decoder and the scorer in a step and whether it took a gradient, then
repeats the calls alone. It measures processor time too, which other work on the machine does not change. With
`--encoders.cache-memory-gib 0` every prompt is encoded anew in every step.
"""

import sys
from collections import Counter
from pathlib import Path

from recorded_calls import TEXT, Call, recorded, seconds
from rich.console import Console
from rich.table import Table

from unified_trainer.parallel.device import peak_memory
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.run.build import build
from unified_trainer.run.settings.command_line import parse

ROUNDS = 5


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
