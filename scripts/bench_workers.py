"""What workers cost and gain: the overlap of sampling and training, and the seconds that weights take to a worker.

python scripts/bench_workers.py            # both tables
python scripts/bench_workers.py --only weights --megabytes 400
"""

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Literal

import torch
import tyro

from unified_trainer.__main__ import main as program
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.run.settings.workers import RayConfig
from unified_trainer.run.workers import cluster

# A scorer that waits instead of computing: it leaves the cores to the training process.
SCORER = """
import threading

def score(video, prompts):
    threading.Event().wait({seconds})
    return video.flatten(1).mean(1)
"""
FLAGS = [
    "--method",
    "dance_grpo",
    "--recipe",
    "tiny",
    "--device",
    "cpu",
    "--validate-every",
    "0",
    "--checkpoint-every",
    "0",
    "--steps",
    "12",
    "--video.frames",
    "5",
    "--video.height",
    "32",
    "--video.width",
    "32",
    "--sampler.num-steps",
    "4",
    "--algorithm.num-prompts",
    "4",
    "--algorithm.num-samples",
    "4",
    "--algorithm.prompts-per-update",
    "1",
    "--algorithm.rollout-batch",
    "16",
    "--algorithm.update-batch",
    "1",
    "--algorithm.timestep-fraction",
    "1",
    "--reward.path",
    '""',
    "--reward.kind",
    '""',
]
FIRST = 3  # steps that are not measured


def step_seconds(folder: Path, wait: float, ahead: int, workers: int, rollout_batch: int = 16) -> dict[str, float]:
    """Return medians of a step's seconds, of the wait for samples and of the weights, in one run."""
    scorer = folder / f"wait_{wait:g}.py"
    scorer.write_text(SCORER.format(seconds=wait))
    output = folder / f"run-{wait:g}-{ahead}-{workers}-{rollout_batch}"
    flags = [flag if flag != '""' else "" for flag in FLAGS]
    flags += ["--reward.scorers.wait.kind", f"{scorer}:score", "--output", str(output)]
    flags += ["--rollouts.ahead", str(ahead), "--rollouts.workers", str(workers)]
    flags += ["--algorithm.rollout-batch", str(rollout_batch)]
    if program(flags):
        raise RuntimeError(f"the run {output.name} failed")
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()][FIRST:]
    names = ("seconds", "seconds/rollout", "seconds/update", "seconds/weights", "worker_seconds/rollout")
    return {name: statistics.median(row[f"train/{name}"] for row in rows) for name in names}


def overlap(folder: Path) -> None:
    """Print the table of step times with a scorer that waits."""
    alone = step_seconds(folder, 0.0, 0, 1)
    train = alone["seconds"] - alone["seconds/rollout"]
    rows = [("a scorer that takes as long as training", max(0.0, train - alone["worker_seconds/rollout"]), 16)]
    rows.append(("four work items, each with a scorer that takes as long", train, 4))
    write("| scorer | ahead | workers | sampling and scoring R, s | training T, s | step, s | step / max(R, T) |")
    write("| --- | --- | --- | --- | --- | --- | --- |")
    for name, wait, size in rows:
        for ahead, workers in ((0, 1), (1, 1), (1, 2)) if size < 16 else ((0, 1), (1, 1)):
            found = step_seconds(folder, wait, ahead, workers, size)
            made = (found["worker_seconds/rollout"] + wait * 16 / size) / workers
            step = found["seconds"]
            cells = (made, train, step, step / max(made, train))
            write(f"| {name} | {ahead} | {workers} | " + " | ".join(f"{cell:.2f}" for cell in cells) + " |")


class Receiver:
    """A process that copies weights as a rollout worker does."""

    def __init__(self, held: dict[str, torch.Tensor]) -> None:
        self._weights = {name: torch.zeros_like(weight) for name, weight in held.items()}

    def take(self, weights) -> float:
        from unified_trainer.run.workers.weights import copy_parts

        begun = time.perf_counter()
        copy_parts([weights], self._weights)
        return time.perf_counter() - begun


def weights(megabytes: int, tensors: int) -> None:
    """Print the seconds in which weights are sent and copied by one worker and by two, for each transport."""
    import ray

    from unified_trainer.run.workers.weights import WeightSender

    cluster.connect(RayConfig(), 4)
    sent = {str(i): torch.randn(megabytes * 2**18 // tensors) for i in range(tensors)}
    receivers = [ray.remote(Receiver).remote(sent) for _ in range(2)]
    write("| transport | weights | workers | | sent, s | copied by a worker, s | until the last worker has them, s |")
    write("| --- | --- | --- | --- | --- | --- | --- |")
    for transport in ("object_store", "nixl"):
        sender = WeightSender(Mesh(torch.device("cpu")), transport)
        for count in (1, 2):
            rounds = []
            for version in range(5 * count, 5 * count + 5):
                begun = time.perf_counter()
                reference = sender.send(version, sent, version)
                put = time.perf_counter() - begun
                copied = ray.get([receiver.take.remote(reference) for receiver in receivers[:count]])
                rounds.append((put, max(copied), time.perf_counter() - begun))
            medians = [statistics.median(column) for column in zip(*rounds, strict=True)]
            for which, row in (("first", rounds[0]), ("median", medians)):
                cells = " | ".join(f"{value:.2f}" for value in row)
                write(f"| {transport} | {megabytes} MB in {tensors} | {count} | {which} | {cells} |")
    ray.shutdown()


def write(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main(only: Literal["both", "overlap", "weights"] = "both", megabytes: int = 400, tensors: int = 100) -> None:
    """Print the tables."""
    torch.set_num_threads(1)
    if only != "overlap":
        weights(megabytes, tensors)
    if only != "weights":
        with tempfile.TemporaryDirectory() as folder:
            overlap(Path(folder))


if __name__ == "__main__":
    tyro.cli(main)
