"""Samples from rollout workers, begun with weights that are always the same number of training steps old."""

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext, suppress
from typing import Any

import ray
import torch
from ray.exceptions import RayError
from torch import Tensor

from unified_trainer.basics.requests import Request
from unified_trainer.basics.types import Batch
from unified_trainer.data.loader import Loader
from unified_trainer.methods.rl.buffer import FreshRows
from unified_trainer.methods.rl.kept_rollout import HostRollout, KeptRollout, join
from unified_trainer.methods.rl.rollout_config import RolloutConfig, TrajectoryPlace
from unified_trainer.methods.rl.rollouts import Check, ScoredSamples
from unified_trainer.parallel.fsdp import cpu_copy
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.parallel.meter import phase
from unified_trainer.parallel.random import Streams
from unified_trainer.rewards.reward import Scores
from unified_trainer.roles.ema import exchanged
from unified_trainer.roles.role import Trainable
from unified_trainer.roles.weight_copy import WeightCopy
from unified_trainer.run.settings.config import RunConfig
from unified_trainer.run.workers import arrays
from unified_trainer.run.workers.group import WorkerGroup
from unified_trainer.run.workers.replica import ReplicaSender
from unified_trainer.run.workers.scheduler import WorkItem
from unified_trainer.run.workers.weights import WeightSender
from unified_trainer.run.workers.workers import received

Asked = tuple[tuple[Request, ...], tuple[int, ...], tuple[int, ...]]  # with prompt ids and sample ids
Ordered = list[tuple[WorkItem, Any]]  # a work item, and the scheduler's reply to come


class RemoteRollouts:
    """The samples of step k come from the weights after max(0, k' - ahead) steps, whoever makes them and whenever.

    k' is the first step of the super-batch of step k, and k itself without super-batches.
    A run is therefore a function of its settings and of `ahead`: the number of workers, their speed, kills and resumes
    change no number. It is the capacity rule of AReaL (arXiv:2505.24298) at equality, in whole training steps. A method
    may lower `ahead`; samples that are under way by then keep the weights that they were ordered with.
    """

    uniform = False
    check: Check | None = None

    def __init__(
        self,
        group: WorkerGroup,
        role: Trainable | WeightCopy,
        loader: Loader | FreshRows,
        mesh: Mesh,
        sender: WeightSender,
        *,
        size: int,
        ahead: int,
        check_every: int,
        super_batch: int = 1,
        trajectories: TrajectoryPlace = "device",
    ) -> None:
        """Make at most `size` samples as one work item, and check those of a worker every `check_every` steps."""
        self._sender, self._place = sender, trajectories
        self._group, self._role, self._loader, self._mesh = group, role, loader, mesh
        self._size, self._ahead, self._check_every, self._super_batch = size, ahead, check_every, super_batch
        self._checked: dict[str, int] = {}  # the training step in which samples of a worker were checked last
        self._step = -1  # the training step that asked last
        self._versions: dict[int, int] = {}  # of the weights that make the samples of this step and of later ones
        self._ordered: dict[int, Ordered] = {}
        self._published = -1
        self._packing = ThreadPoolExecutor(1)  # in the order of versions, while training goes on
        self._sent: dict[int, Future[None]] = {}  # versions on their way to the scheduler
        # The weights of this rank before each of the steps that samples under way may lag, newest first: a resumed run
        # makes them again.
        self._past = [cpu_copy(role.weights) for _ in range(ahead + super_batch - 1)]
        self._metrics: dict[str, float] = {}
        self._received = 0  # samples of this step

    def samples(self, batch: Batch, step: int, rng: Streams) -> ScoredSamples:
        past = self._past  # without the present weights
        if step != self._step:
            self._step, self._metrics, self._received = step, {}, 0
            self._versions = {later: version for later, version in self._versions.items() if later >= step}
            self._ordered = {later: ordered for later, ordered in self._ordered.items() if later >= step}
        size = self._super_batch
        for later in range(step, ((step + self._ahead) // size + 1) * size):
            self._versions.setdefault(later, max(0, later // size * size - self._ahead))
        for later, version in self._versions.items():
            if later not in self._ordered:
                self._publish(version, step)
                self._ordered[later] = self._order(later, version, self._planned(later, step))
        self._publish(step, step)
        ordered, asked = self._ordered[step], (batch.requests, batch.prompt_ids, batch.sample_ids)
        further = asked != self._planned(step, step)
        if further:
            ordered = self._order(step, step, asked)
        self._finish_sending(ordered)
        with phase("rollout"):
            received = (self._receive(item, reply) for item, reply in ordered)
            rollouts, scores, makers = zip(*received, strict=True)
        versions = [torch.full((len(item.prompts),), item.version) for item, _ in ordered]
        if self.check is not None and not further and (due := self._due(makers, step)) is not None:
            part, version = batch.split(self._size)[due], ordered[due][0].version  # the version of all ranks
            with nullcontext() if version == step else exchanged(self._role.weights, past[step - version - 1]):
                self.check(ScoredSamples(part, rollouts[due], scores[due], versions[due]), rng, makers[due])
        return ScoredSamples(batch, join(rollouts), Scores.cat(scores), torch.cat(versions))

    def metrics(self) -> dict[str, float]:
        made = {}
        if seconds := sum(took for name, took in self._metrics.items() if name.startswith("worker_seconds/")):
            made["worker_samples_per_second"] = self._received / seconds
        return self._metrics | made | {"worker_deaths": float(ray.get(self._group.scheduler.deaths.remote()))}

    def lower_ahead(self) -> None:
        self._ahead = max(0, self._ahead - 1)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the weights that the samples under way are made with, and which of them make those of which step."""
        if not self._past:
            return {}
        past = {f"weights/{age}/{name}": p for age, kept in enumerate(self._past, 1) for name, p in kept.items()}
        later = range(self._step + 1, self._step + 1 + len(self._past))
        versions = torch.tensor([self._versions.get(step, -1) for step in later])  # -1: not under way
        return past | {"step": torch.tensor(self._step), "ahead": torch.tensor(self._ahead), "versions": versions}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore which samples were under way; the tensors of `state_dict` were filled in place."""
        if self._past:
            self._step, self._ahead = int(state["step"]), int(state["ahead"])
            later = enumerate(state["versions"].tolist(), self._step + 1)
            self._versions = {step: version for step, version in later if version >= 0}

    def _due(self, makers: Sequence[str], step: int) -> int | None:
        """Return the number of the work item to check, whose worker was checked longest ago; None if none is due.

        If one is due on any rank, every rank checks one: a replay is a collective.
        """
        number = min(range(len(makers)), key=lambda i: self._checked.get(makers[i], -1))
        last = self._checked.get(makers[number])
        if not self._mesh.any(last is None or 0 < self._check_every <= step - last):
            return None
        self._checked[makers[number]] = step
        return number

    def _planned(self, step: int, now: int) -> Asked:
        """Return requests, prompt ids and sample ids of this rank's batch of a step, as they are known now."""
        rows, sample_ids = self._loader.rows(step, step - now)
        return tuple(map(self._loader.request, rows)), tuple(rows), tuple(sample_ids)

    def _publish(self, version: int, step: int) -> None:
        """Begin to send this rank's part of the weights of a version to the scheduler."""
        if version == self._published:
            return
        with phase("weights"):
            if version < step:
                weights = self._past[step - version - 1]
            elif self._past:  # training changes the weights while their copy is packed
                weights = cpu_copy(self._role.weights)
                self._past = [weights, *self._past[:-1]]
            else:
                weights = dict(self._role.weights)
        oldest = min(self._versions.values())
        self._sent[version] = self._packing.submit(self._send, version, weights, step, oldest)
        self._published = version

    def _send(self, version: int, weights: Mapping[str, Tensor], step: int, oldest: int) -> None:
        sent = self._sender.send(version, weights, oldest)
        self._group.scheduler.publish.remote(version, self._mesh.rank, [sent], step, oldest)

    def _finish_sending(self, ordered: Ordered) -> None:
        """Wait until the weights that make these samples are sent: their sending may have failed."""
        with phase("weights"):
            newest = max(item.version for item, _ in ordered)
            for version in [version for version in self._sent if version <= newest]:
                self._sent.pop(version).result()
        self._metrics["weights_gib"] = self._sender.size / 2**30

    def _order(self, step: int, version: int, asked: Asked) -> Ordered:
        requests, prompt_ids, sample_ids = asked
        parts = [slice(i, i + self._size) for i in range(0, len(requests), self._size)]
        items = [WorkItem(step, version, requests[part], prompt_ids[part], sample_ids[part]) for part in parts]
        ordered = [(item, self._group.scheduler.make.remote(item)) for item in items]
        threading.Thread(target=_fetch, args=([reply for _, reply in ordered],), daemon=True).start()
        return ordered

    def _receive(self, item: WorkItem, reply: Any) -> tuple[KeptRollout, Scores, str]:
        """Return samples, scores and the worker that sampled."""
        scheduler = self._group.scheduler
        (rollout, scores), seconds, maker = received(reply, lambda: scheduler.make_again.remote(item))
        self._received += len(item.prompts)
        for name, spent in (seconds | {"samples_gib": arrays.size(rollout, scores) / 2**30}).items():
            self._metrics[name] = self._metrics.get(name, 0.0) + spent
        device = self._mesh.device
        made: KeptRollout
        if self._place == "cpu":
            made = HostRollout.of(arrays.to_rollout(rollout, torch.device("cpu")), device)
        else:
            made = arrays.to_rollout(rollout, device)
        return made, arrays.to_scores(scores, device), maker


def _fetch(replies: Sequence[Any]) -> None:
    """Copy samples and scores to this machine as soon as they are made, while training goes on."""
    with suppress(RayError):  # which who receives them is told
        for reply in replies:
            references, *_ = ray.get(reply)
            ray.wait(references, num_returns=len(references), fetch_local=True)


def remote_rollouts(
    run: RunConfig,
    algorithm: RolloutConfig,
    workers: WorkerGroup,
    role: Trainable | WeightCopy,
    loader: Loader,
    mesh: Mesh,
) -> RemoteRollouts:
    """Return the samples of rollout workers, which make none in place of stored ones."""
    kind = ReplicaSender if run.rollouts.ranks > 1 else WeightSender
    sender = kind(mesh, run.rollouts.transport, role.bf16_weights)
    return RemoteRollouts(
        workers,
        role,
        FreshRows(run.rollouts.buffer, loader) if run.rollouts.buffer.share else loader,
        mesh,
        sender,
        size=algorithm.rollout_batch,
        ahead=run.rollouts.ahead,
        check_every=run.rollouts.check_every,
        super_batch=run.rollouts.super_batch,
        trajectories=algorithm.trajectories,
    )
