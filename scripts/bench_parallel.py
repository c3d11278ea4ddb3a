"""This script compares two ranks with one at fixed work: time, bytes sent per rank, and memory against a prediction.

    python scripts/bench_parallel.py

A Wan transformer with random weights trains on one batch, on every mesh of two processes. Rank 0 does the same work
alone in turn with it, so that other work on the machine disturbs both alike. The efficiency by processor time leaves
waiting out.
"""

import contextlib
import multiprocessing
import os
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from diffusers import WanTransformer3DModel
from rich.console import Console
from rich.table import Table
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from unified_trainer.basics.types import Condition
from unified_trainer.models.wan.model import WanModel
from unified_trainer.parallel.fsdp import to_local
from unified_trainer.parallel.mesh import Mesh, ParallelConfig
from unified_trainer.roles.backbone import Backbone
from unified_trainer.roles.role import Trainable, TrainableConfig

ROUNDS, BATCH, MICRO, FRAMES, SIDE = 5, 4, 2, 2, 16
WIDTH, LAYERS, HEADS = 256, 6, 8
DEEP = 100  # layers of a network that is only read
PROCESSES = multiprocessing.get_context("fork")  # one per measurement: memory that is freed may stay resident
MESHES = {
    "sharded": ParallelConfig(),
    "sharded, not resharded": ParallelConfig(reshard_after_forward=False),
    "replicated": ParallelConfig(replicate=2),
    "shared tokens": ParallelConfig(sequence=2),
}
# The argument that holds the exchanged tensors, and how many halves of it a rank of two sends.
EXCHANGES = {
    "_allgather_base_": (0, 1),
    "_reduce_scatter_base_": (1, 1),
    "alltoall_base_": (1, 1),
    "allreduce_": (0, 2),
}


class Sent(TorchDispatchMode):
    """A dispatch mode that counts the bytes that this rank sends to the other."""

    bytes = 0

    def __torch_dispatch__(self, call, _types, arguments=(), named=None):
        name = call._opname if call.namespace == "c10d" else ""
        if name in EXCHANGES:
            position, halves = EXCHANGES[name]
            whole = arguments[position] if isinstance(arguments[position], list | tuple) else [arguments[position]]
            self.bytes += sum(halves * tensor.nbytes // 2 for tensor in whole)
        elif name == "allgather_":
            self.bytes += sum(tensor.nbytes for tensor in arguments[1])
        return call(*arguments, **(named or {}))


def write_folder(folder: Path, layers: int) -> None:
    sizes = {"num_attention_heads": HEADS, "attention_head_dim": WIDTH // HEADS, "num_layers": layers}
    network = WanTransformer3DModel(patch_size=(1, 2, 2), text_dim=32, freq_dim=64, ffn_dim=4 * WIDTH, **sizes)
    network.save_pretrained(folder / "transformer")


def student(folder: Path, mesh: Mesh) -> Trainable:
    return Trainable("student", Backbone(WanModel.open(folder, "transformer"), mesh, trained=True), TrainableConfig())


def update(role: Trainable, mesh: Mesh) -> None:
    """Train one step on the rank's part of the batch, in micro-batches."""
    draw = torch.Generator().manual_seed(mesh.data_rank)
    share = BATCH // mesh.data_size
    for start in range(0, share, MICRO):
        role.backward(loss_of(role, draw), last=start + MICRO == share)
    role.step()


def loss_of(role: Trainable, draw: torch.Generator) -> torch.Tensor:
    """Return the loss of one random micro-batch."""
    x_t = torch.randn(MICRO, 16, FRAMES, 2 * SIDE, 2 * SIDE, generator=draw)
    cond = Condition({"text": torch.randn(MICRO, 16, 32, generator=draw)})
    return role.velocity(x_t, torch.full((MICRO,), 0.5), cond).square().mean()


def seconds(work: Callable[[], object]) -> tuple[float, float]:
    """Return the seconds of the clock and of the processor that the work takes."""
    start, worked = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - start, time.process_time() - worked


def status(key: str) -> int:
    """Return a number of bytes from /proc/self/status: VmRSS, or VmHWM, its maximum since `clear_refs`."""
    return 1024 * int(Path("/proc/self/status").read_text().partition(f"{key}:")[2].split()[0])


@contextlib.contextmanager
def grown(found: list[int]) -> Iterator[None]:
    """Append the largest growth of the process's memory, in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    yield
    found.append(status("VmHWM") - before)


def activations(role: Trainable, mesh: Mesh) -> int:
    """Return the bytes of activations that a pass over one micro-batch keeps for its backward pass on this rank."""
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        weights = (p for p in role.network.parameters() if not isinstance(p, DTensor))
        if storage.data_ptr() not in {p.untyped_storage().data_ptr() for p in weights}:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = loss_of(role, torch.Generator().manual_seed(mesh.data_rank))
    role.backward(loss, last=True)
    role.step()
    return sum(kept.values())


def least(role: Trainable, config: ParallelConfig, passes: int) -> int:
    """Return the bytes that a rank of two must send: half of the weights per gather, half of the gradients, and tokens.

    Blocks are gathered for the forward and for the backward pass, the rest once. The tokens are queries, keys, values
    and results of attention, their gradients, and the output.
    """
    weights, blocks = sizes(role)
    if config.replicate == 2:
        return weights
    tokens = MICRO * FRAMES * SIDE * SIDE if config.sequence == 2 else 0
    shared = 4 * tokens * (8 * LAYERS * WIDTH // 4 + 64 // 2)
    return (passes * (weights + blocks if config.reshard_after_forward else weights) + weights) // 2 + passes * shared


def sizes(role: Trainable) -> tuple[int, int]:
    """Return the bytes of all weights, and of the weights of the blocks."""
    weights, blocks = (sum(p.nbytes for p in part.parameters()) for part in (role.network, role.network.blocks))
    return weights, blocks


def needed(role: Trainable, config: ParallelConfig, kept: int) -> int:
    """Predict the memory: weights, gradients, two moments; gathered weights and gradients; activations."""
    weights, blocks = sizes(role)
    if config.replicate == 2:
        return 4 * weights + kept
    return (
        2 * weights + (4 * blocks // LAYERS if config.reshard_after_forward else weights + 2 * blocks // LAYERS) + kept
    )


def read(name: str, folder: Path, rows: "multiprocessing.Queue[list[str]]") -> None:
    """Measure the memory in which a rank of two reads and holds a deep network, without mapped file pages."""
    mesh, ended, found = Mesh.join("cpu", MESHES[name]), threading.Event(), [status("RssAnon")]

    def look() -> None:
        while not ended.wait(1e-3):
            found.append(status("RssAnon"))

    watcher = threading.Thread(target=look)
    watcher.start()
    deep = student(folder / "deep", mesh)
    ended.set()
    watcher.join()
    held = sum(to_local(p).nbytes for p in deep.network.parameters())
    if mesh.is_main:
        rows.put([f"{x / 1e6:.0f}" for x in (held, max(found) - found[0])])
    mesh.barrier()


def measure(name: str, folder: Path, rows: "multiprocessing.Queue[tuple[list[str], list[str]]]") -> None:
    """Measure one mesh, as one rank of two."""
    torch.set_num_threads(1)
    mesh, alone = Mesh.join("cpu", MESHES[name]), Mesh(torch.device("cpu"))
    size, sent, times = [], Sent(), []
    with grown(size):
        role = student(folder / "plain", mesh)
        update(role, mesh)
        update(role, mesh)
    with sent:
        update(role, mesh)
    kept = activations(role, mesh)
    single = student(folder / "plain", alone)
    for _ in range(ROUNDS):
        mesh.barrier()
        one = seconds(lambda: update(single, alone)) if mesh.is_main else (0.0, 0.0)
        mesh.barrier()
        two = seconds(lambda: update(role, mesh))
        both = float(mesh.all_gather_cpu(torch.tensor([two[1]])).sum())
        times.append((two[0], one[0], both, one[1]))
    if mesh.is_main:
        minimum = least(single, mesh.config, BATCH // mesh.data_size // MICRO)
        wall = statistics.median(one / (2 * two) for two, one, _, _ in times)
        work = statistics.median(one / both for _, _, both, one in times)
        step, single_step = (statistics.median(row[i] for row in times) for i in (0, 1))
        sums = [f"{x / 1e6:.1f}" for x in (sent.bytes, minimum)]
        predicted = needed(single, mesh.config, kept)
        first = [
            f"{step:.2f}",
            f"{single_step:.2f}",
            f"{wall:.2f}",
            f"{work:.2f}",
            *sums,
            f"{sent.bytes / minimum:.3f}",
        ]
        rows.put((first, [f"{predicted / 1e6:.0f}", f"{size[0] / 1e6:.0f}", f"{size[0] / predicted:.2f}"]))
    mesh.barrier()


def free_port() -> str:
    with contextlib.closing(socket.socket()) as listener:
        listener.bind(("127.0.0.1", 0))
        return str(listener.getsockname()[1])


def on_two_ranks(work: Callable[..., None], name: str, folder: Path) -> Any:
    """Run the work on two ranks; return what the first one puts into the queue."""
    rows: multiprocessing.Queue = PROCESSES.Queue()
    os.environ |= {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    ranks = []
    for rank in range(2):
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        ranks.append(PROCESSES.Process(target=work, args=(name, folder, rows)))
        ranks[-1].start()
    found = rows.get(timeout=600)
    for one in ranks:
        one.join()
    return found


def main() -> None:
    headings = ("step s", "one rank s", "efficiency", "by processor time", "sent MB", "least MB", "ratio")
    times = Table("mesh", *headings)
    memory = Table("mesh", "deep: held MB", "peak when read", "trained: predicted MB", "peak", "ratio")
    with tempfile.TemporaryDirectory() as place:
        for part, layers in (("plain", LAYERS), ("deep", DEEP)):
            writer = PROCESSES.Process(target=write_folder, args=(Path(place) / part, layers))
            writer.start()
            writer.join()
        for name in MESHES:
            first, second = on_two_ranks(measure, name, Path(place))
            times.add_row(name, *first)
            memory.add_row(name, *on_two_ranks(read, name, Path(place)), *second)
    for table in (times, memory):
        Console(width=140).print(table)


if __name__ == "__main__":
    main()
