"""This script measures the update of many small sharded weights: on this rank's parts against operations on DTensors.

    python scripts/bench_optimizer.py

Two processes share 825 weights, as many as Wan2.1-1.3B has. The arithmetic of such weights takes next to no time, so
that what is left is the cost of each operation. Ratios are within one run. Moments in bf16 and
the EMA are measured too.
"""

import multiprocessing
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable
from unittest.mock import patch

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

from unified_trainer.parallel.fsdp import clip, total_norm
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.roles import optimizer
from unified_trainer.roles.ema import EMA
from unified_trainer.roles.optimizer import AdamW

WEIGHTS, SIDE, ROUNDS = 825, 16, 9
OPTIONS = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}


def sharded(mesh: Mesh) -> dict[str, nn.Parameter]:
    draw = torch.Generator().manual_seed(0)
    found = {}
    for number in range(WEIGHTS):
        whole = torch.randn(SIDE, SIDE, generator=draw)
        found[f"weight {number}"] = nn.Parameter(distribute_tensor(whole, mesh.weights, [Shard(0)]))
        found[f"weight {number}"].grad = found[f"weight {number}"].detach().sin()
    return found


def milliseconds(works: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Return the median time of each piece of work; the pieces alternate."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(ROUNDS + 1):
        for name, work in works.items():
            start = time.perf_counter()
            work()
            times[name].append(1e3 * (time.perf_counter() - start))
    return {name: statistics.median(values[1:]) for name, values in times.items()}


def measure() -> None:
    torch.set_num_threads(1)
    mesh = Mesh.join("cpu")
    weights, theirs = sharded(mesh), sharded(mesh)
    ours, half = AdamW(weights, **OPTIONS), AdamW(sharded(mesh), **OPTIONS, moments="bf16")
    other = torch.optim.AdamW(theirs.values(), lr=1e-3, **OPTIONS)
    with patch.object(optimizer, "optimizer_kernels", lambda _device: {"foreach": True}):
        fast = AdamW(sharded(mesh), **OPTIONS)
    many = torch.optim.AdamW(sharded(mesh).values(), lr=1e-3, **OPTIONS, foreach=True)
    gradients, ema = [p.grad for p in weights.values()], EMA(weights, 0.99)
    found = milliseconds(
        {
            "AdamW, DTensors one by one": other.step,
            "AdamW, DTensors with foreach": many.step,
            "AdamW, this rank's parts": lambda: ours.step(1e-3, 0),
            "AdamW, this rank's parts with foreach": lambda: fast.step(1e-3, 0),
            "AdamW, moments in bf16": lambda: half.step(1e-3, 0),
            "norm, DTensors": lambda: torch.nn.utils.get_total_norm(gradients).full_tensor(),
            "norm, this rank's parts": lambda: total_norm(gradients),
            "clipping, DTensors": lambda: torch.nn.utils.clip_grads_with_norm_(theirs.values(), 1e9, torch.ones(())),
            "clipping, this rank's parts": lambda: clip(gradients, 1e9, torch.ones(())),
            "EMA": lambda: ema.update(1),
        }
    )
    same = all(torch.equal(weights[key].to_local(), theirs[key].to_local()) for key in weights)
    if mesh.is_main:
        title = f"{WEIGHTS} sharded weights of {SIDE} x {SIDE}; AdamW equal bit for bit: {same}"
        table = Table("work", "ms", title=title)
        for name, value in found.items():
            table.add_row(name, f"{value:.1f}")
        Console().print(table)
    mesh.barrier()


def main() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    os.environ |= {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    processes = []
    for rank in range(2):
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        processes.append(multiprocessing.get_context("fork").Process(target=measure))
        processes[-1].start()
    for process in processes:
        process.join()
    return max(abs(process.exitcode or 0) for process in processes)


if __name__ == "__main__":
    sys.exit(main())
