"""This script measures the time that synchronous and asynchronous checkpoints cost the training, and their bytes.

    python scripts/bench_save.py --blocks 12 --width 480

It trains a random Wan transformer of this size with finetune and EMA weights, and saves between steps.
"""

import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import tyro
from diffusers import WanTransformer3DModel
from rich.console import Console
from rich.table import Table

from unified_trainer.parallel.mesh import Mesh
from unified_trainer.run.build import build
from unified_trainer.run.checkpoint.manager import Keep, Saver
from unified_trainer.run.registry import TINY
from unified_trainer.run.settings.command_line import parse
from unified_trainer.run.trainer import Trainer

ROUNDS = 5


def pipeline(folder: Path, blocks: int, width: int) -> Path:
    """Write the tiny world's folder with a random transformer of this size."""
    shutil.copytree(TINY / "wan", folder, ignore=shutil.ignore_patterns("transformer"))
    settings = WanTransformer3DModel.load_config(TINY / "wan" / "transformer")
    heads = width // settings["attention_head_dim"]
    sized = settings | {"num_layers": blocks, "num_attention_heads": heads, "ffn_dim": 4 * width}
    WanTransformer3DModel.from_config(sized).save_pretrained(folder / "transformer")
    return folder


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def cost(trainer: Trainer, saver: Saver, step: float) -> tuple[float, float, float]:
    """Return seconds of the call, seconds until the checkpoint is there, and seconds that the training lost."""
    start = time.perf_counter()
    call = seconds(lambda: saver.save(int(start * 1e3), trainer.tensors(), trainer.metadata({})))
    steps = 0
    while saver.saving:
        trainer.step(steps)
        steps += 1
    saver.wait()
    written = time.perf_counter() - start
    return call, written, written - steps * step


def main(blocks: int = 12, width: int = 480, folder: Path | None = None) -> None:
    """Measure and print a table.

    Args:
        blocks: number of blocks of the transformer
        width: width of its hidden state, a multiple of 24
        folder: folder to write to; by default a temporary one
    """
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        words = [
            "--recipe",
            "tiny",
            "--method",
            "finetune",
            "--student.path",
            str(pipeline(Path(scratch) / "wan", blocks, width)),
        ]
        words += ["--algorithm.batch-size", "4", "--algorithm.micro-batch", "4", "--data.num-clips", "8"]
        run = parse(words)
        mesh = Mesh.join(run.device)
        trainer = build(run, mesh).trainer
        trainer.step(0)
        step = statistics.median(seconds(lambda n=n: trainer.step(n)) for n in range(1, ROUNDS + 1))
        table = Table("save", "call", "until written", "training lost", "steps lost", title="seconds, medians")
        for name, asynchronous in (("synchronous", False), ("asynchronous", True)):
            root = Path(scratch) / name
            with Saver(root, mesh, Keep(1), Console().print, asynchronous=asynchronous) as saver:
                rows = [cost(trainer, saver, step) for _ in range(ROUNDS)]
            call, written, late = (statistics.median(column) for column in zip(*rows, strict=True))
            table.add_row(name, f"{call:.2f}", f"{written:.2f}", f"{late:.2f}", f"{late / step:.2f}")
        (newest,) = root.iterdir()
        bytes_written = sum(file.stat().st_size for file in newest.rglob("*") if file.is_file())
        least = sum(tensor.numel() * tensor.element_size() for tensor in trainer.tensors().values())
    weights = sum(p.numel() for p in trainer.roles["student"].weights.values())
    console = Console()
    console.print(f"{weights / 1e6:.1f} M weights, {torch.get_num_threads()} threads, a step takes {step:.2f} s")
    console.print(table)
    console.print(f"{bytes_written / 2**20:.1f} MiB written, {bytes_written / least:.4f} of the tensors' own bytes")


if __name__ == "__main__":
    tyro.cli(main)
