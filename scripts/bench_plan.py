"""This script compares what `plan` computes with what a real training step does: calls, FLOPs and bytes of tensors.

    python scripts/bench_plan.py

Each run trains on a CPU: two steps, so that the optimizer has its moments, and a third one that is measured. Bytes are
those of all tensors alive at a time, the networks' and the optimizer's included, without text encoder, VAE and scorers.
"""

import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from unified_trainer.parallel.mesh import Mesh
from unified_trainer.parallel.meter import Meter, Pass
from unified_trainer.run.build import build
from unified_trainer.run.settings.command_line import parse
from unified_trainer.tools.plan.estimate import Estimate, estimate
from unified_trainer.tools.plan.tracing import LiveBytes

SIZE = ["--video.frames", "17", "--video.height", "128", "--video.width", "128"]
GROUPS = ["--algorithm.num-prompts", "2", "--algorithm.num-samples", "2", "--algorithm.prompts-per-update", "2"]
GROUPS += ["--algorithm.rollout-batch", "2", "--algorithm.update-batch", "2"]
PAIR = ["--algorithm.batch-size", "2", "--algorithm.micro-batch", "2", *SIZE]
CLIPS = ["--algorithm.batch-size", "16", "--algorithm.micro-batch", "16", "--data.num-clips", "16"]
RECOMPUTE = ["--student.activation-memory", "full"]
RUNS = {
    "finetune": ["--method", "finetune", *CLIPS],
    "finetune, adapter": ["--method", "finetune", *CLIPS, "--student.adapter.rank", "4"],
    "finetune, recomputed": ["--method", "finetune", *CLIPS, *RECOMPUTE],
    "dmd2": ["--method", "dmd2", *PAIR],
    "self_forcing": ["--method", "self_forcing", *PAIR],
    "dance_grpo": ["--method", "dance_grpo", *GROUPS, *SIZE],
}
SCORER = "def score(videos, prompts):\n    return videos.flatten(1).mean(1)\n"


@dataclass(frozen=True)
class Measured:
    """A training step that ran."""

    passes: Counter[tuple[str, bool, int]]  # role, with gradient, samples
    flops: float
    tokens: float
    bytes: int  # most at a time; only of weights and optimizer without `memory`


def measure(flags: Sequence[str], step: int = 2, *, memory: bool = True) -> Measured:
    """Measure a step: after all steps before it, or without `memory` on its own, which is much faster."""
    run, mesh = parse(flags), Mesh(torch.device("cpu"))
    passes: list[Pass] = []
    built = build(run, mesh)
    for before in range(step if memory else 0):
        built.trainer.step(before)
    meter, live = Meter(mesh.device, note=passes.append), LiveBytes()
    with live if memory else nullcontext(), meter.measure():
        built.trainer.step(step)
    networks = [one.model.network for role in built.roles.values() for one in role.backbones.values()]
    tensors = [p for network in networks for p in network.parameters()]
    tensors += [one for name, one in built.trainer.tensors().items() if "/optimizer/" in name or "/ema/" in name]
    held = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    built.close()
    found = Counter((one.role, one.gradient, one.samples) for one in passes)
    return Measured(found, meter.flops, meter.tokens, sum(held.values()) + live.peak())


def predicted(flags: Sequence[str], step: int = 2) -> tuple[Estimate, Counter[tuple[str, bool, int]]]:
    """Return the estimate of one training step, and its passes."""
    found = estimate(parse(flags), 1, first=step, steps=1)
    counts = found.counts
    passes = Counter((one.role, one.gradient, one.samples) for one in counts.passes for _ in range(counts.repeats))
    return found, passes


def bytes_of(found: Estimate) -> float:
    """Return the bytes that `measure` counts."""
    memory = found.memory
    trained = [memory.total(phase) for phase in memory.phases if phase != "validation"]
    return max(trained) - memory.always["VAE"] - memory.always["scorers"]


def flags_of(name: str, folder: Path) -> list[str]:
    (folder / "scorer.py").write_text(SCORER, encoding="utf-8")
    reward = ["--reward.path", "", "--reward.kind", f"{folder / 'scorer.py'}:score"]
    return ["--recipe", "tiny", "--validate-every", "0", *RUNS[name], *(reward if name == "dance_grpo" else [])]


def main() -> None:
    columns = ("calls equal", "FLOPs, measured / computed", "computed MiB", "measured MiB", "measured / computed")
    table = Table("run", *columns)
    with tempfile.TemporaryDirectory() as place:
        for name in RUNS:
            flags = flags_of(name, Path(place))
            real, (computed, passes) = measure(flags), predicted(flags)
            size = bytes_of(computed)
            flops = real.flops / computed.model_flops
            megabytes = [f"{x / 2**20:.1f}" for x in (size, real.bytes)]
            table.add_row(name, str(passes == real.passes), f"{flops:.4f}", *megabytes, f"{real.bytes / size:.3f}")
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
