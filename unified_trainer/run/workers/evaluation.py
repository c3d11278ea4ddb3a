"""Validations by evaluation workers, beside training."""

import itertools
import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import ray

from unified_trainer.basics.requests import Request
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.parallel.meter import phase
from unified_trainer.rewards.reward import RewardSum
from unified_trainer.roles.role import Role, Trainable
from unified_trainer.run.settings.config import RunConfig, ValidationConfig
from unified_trainer.run.validation.report import Report, ValidationResult
from unified_trainer.run.validation.samples import Measured, batches, sample_requests
from unified_trainer.run.workers import arrays
from unified_trainer.run.workers.group import WorkerGroup
from unified_trainer.run.workers.scheduler import ValidationBatch
from unified_trainer.run.workers.weights import WeightSender
from unified_trainer.run.workers.workers import received


class RemoteValidation:
    """Sends the student's weights, each rank its part, to evaluation workers, which make and measure the batches.

    The main rank alone asks and writes; the others get the metrics, by which guards decide.
    """

    def __init__(
        self, group: WorkerGroup, config: ValidationConfig, report: Report, mesh: Mesh, sender: WeightSender
    ) -> None:
        self.ema = config.ema
        self._group, self._report, self._mesh, self._sender = group, report, mesh, sender
        shares = batches(config, mesh.data_size)
        self._samples = [batch for share in shares for batch in share if batch.start < config.num_samples]
        self._versions = itertools.count()  # a step may be validated twice, with other weights
        self._ordered: list[tuple[ValidationBatch, Any]] = []  # a batch, and the scheduler's reply to come

    def start(self, student: Trainable, step: int) -> None:
        """Send the weights and ask for all batches."""
        with phase("weights"):
            version = next(self._versions)
            sent = self._sender.send(version, student.weights, version)
            self._group.scheduler.publish_validation.remote(version, self._mesh.rank, [sent])
            if self._mesh.is_main:
                videos = self._report.videos
                items = [ValidationBatch(step, version, rows.start, rows.stop, videos) for rows in self._samples]
                self._ordered = [(item, self._ask(item)) for item in items]

    def finish(self, folder: Path, step: int) -> ValidationResult:
        """Wait for the workers; the metrics are those of a validation in training."""
        if not self._mesh.is_main:
            return ValidationResult(json.loads(self._mesh.broadcast("")), (), None, None)
        took: dict[str, float] = {}
        parts = [self._receive(item, reply, took) for item, reply in self._ordered]
        part = self._report.joined(parts, 0)
        self._group.scheduler.forget_validation.remote(self._ordered[0][0].version)
        self._ordered = []
        self._report.write_extremes(part.columns, part.clips, folder)
        result = self._report.result(part.columns, part.clips, folder, step)
        self._mesh.broadcast(json.dumps(result.metrics))
        costs = {f"worker_seconds/{name}": seconds for name, seconds in took.items()}
        costs["worker_deaths"] = float(ray.get(self._group.scheduler.deaths.remote()))
        return replace(result, costs=costs)

    def _ask(self, item: ValidationBatch) -> Any:
        return self._group.scheduler.validate.remote(item)

    def _receive(self, item: ValidationBatch, reply: Any, took: dict[str, float]) -> Measured:
        """Return what was measured of a batch, and add the worker's seconds to `took`."""
        (columns, clips), seconds = received(reply, partial(self._ask, item))
        for name, spent in seconds.items():
            took[name] = took.get(name, 0.0) + spent
        return Measured(arrays.to_columns(columns, self._mesh.device), clips)


def remote_validation(
    run: RunConfig, workers: WorkerGroup, student: Role, reward: RewardSum, requests: Sequence[Request], mesh: Mesh
) -> RemoteValidation:
    """Return the validations of evaluation workers."""
    report = Report(run.validation, reward, sample_requests(requests, run.validation), mesh, run.video.fps)
    sender = WeightSender(mesh, run.rollouts.transport, student.bf16_weights)
    return RemoteValidation(workers, run.validation, report, mesh, sender)
