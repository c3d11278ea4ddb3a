"""This script measures the bytes that training reads of parquet files of clips, over the bytes that it wants.

    python scripts/bench_reading.py --ranks 8

It writes random latents of the size of Wan's, reads epochs of them as the ranks of a run do, and counts what the
operating system was asked for (rchar of /proc/self/io). Linux only.
"""

import statistics
import tempfile
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
import tyro
from rich.console import Console

from unified_trainer.data.batch_plan import BatchPlan
from unified_trainer.data.loader import Loader
from unified_trainer.data.parquet import ParquetClips
from unified_trainer.data.parquet_files import read_stored_files
from unified_trainer.data.row_kinds import LATENT, ClipRows
from unified_trainer.models.encoders import EncoderConfig
from unified_trainer.models.wan.codec import WanCodec
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.run.registry import TINY

CPU = torch.device("cpu")
CAPTION = "a red circle moving left"


def write(file: Path, rows: int, shape: tuple[int, int, int, int], row_group: int, draw: torch.Generator) -> None:
    """Write a file of kind t2v without text embeddings."""
    latents = [torch.randn(shape, generator=draw).numpy() for _ in range(rows)]
    names = {"id": [f"{file.stem} {i}" for i in range(rows)], "caption": [CAPTION] * rows}
    tensors = ([x.tobytes() for x in latents], [[*shape]] * rows, ["float32"] * rows)
    table = pa.table(names | dict(zip(LATENT, tensors, strict=True)))
    pq.write_table(table, file, compression="none", row_group_size=row_group)


def bytes_read() -> int:
    """Return the bytes that this process has read so far."""
    lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    return int(dict(line.split(": ") for line in lines)["rchar"])


def main(
    rows: int = 512,
    row_group: int = 8,
    batch: int = 8,
    ranks: int = 1,
    epochs: int = 2,
    shape: tuple[int, int, int, int] = (16, 6, 60, 104),
) -> None:
    """Print bytes read per step over bytes wanted.

    Args:
        rows: number of clips, in files of 64
        row_group: rows of a row group
        batch: clips of a training step, over all ranks
        ranks: number of ranks, which read one after the other here
        epochs: number of epochs
        shape: channels, latent frames, height and width of a clip's latents
    """
    codec = WanCodec.load(TINY / "wan", CPU, EncoderConfig())
    with tempfile.TemporaryDirectory() as folder:
        draw = torch.Generator().manual_seed(0)
        for first in range(0, rows, 64):
            write(Path(folder) / f"{first:06}.parquet", min(64, rows - first), shape, row_group, draw)
        files, plan = read_stored_files(Path(folder), ClipRows(shape)), BatchPlan.one_update(batch, batch)
        lanes, meshes = files.lanes(batch, 16.0), [Mesh(CPU, rank, ranks) for rank in range(ranks)]
        loaders = [Loader(ParquetClips(files, codec, lanes), codec, plan, shape, "", 0, mesh) for mesh in meshes]
        start, steps, times = bytes_read(), epochs * rows // batch, []
        for step in range(steps):
            began = time.perf_counter()
            for loader in loaders:
                loader.batch(step)
            times.append(time.perf_counter() - began)
        for loader in loaders:
            loader.close()
        read = (bytes_read() - start) / steps
        whole = sum(file.stat().st_size for file in Path(folder).iterdir())
    wanted = batch * 4 * torch.Size(shape).numel()
    console = Console()
    console.print(
        f"{rows} clips of {wanted / batch / 2**20:.2f} MiB in {whole / 2**20:.0f} MiB, row groups of {row_group}"
    )
    console.print(f"batch {batch}, {ranks} ranks, {steps} steps of {statistics.median(times):.3f} s")
    console.print(f"{read / 2**20:.2f} MiB read per step, {wanted / 2**20:.2f} MiB wanted: ratio {read / wanted:.3f}")


if __name__ == "__main__":
    tyro.cli(main)
