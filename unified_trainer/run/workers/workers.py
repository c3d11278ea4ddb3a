"""The processes that make samples and score them."""

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import ray
import torch
from ray.exceptions import ObjectLostError, RayActorError, RayTaskError

from unified_trainer.basics.requests import Request
from unified_trainer.data.loader import make_batch
from unified_trainer.methods.rl.rollouts import Sampling
from unified_trainer.parallel.device import pick_device
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.parallel.meter import Meter, phase
from unified_trainer.parallel.random import Streams
from unified_trainer.roles.weight_copy import WeightCopy
from unified_trainer.run.settings.code import code_of
from unified_trainer.run.settings.config import RunConfig
from unified_trainer.run.validation.samples import SampleMaker
from unified_trainer.run.workers import arrays
from unified_trainer.run.workers.arrays import Arrays
from unified_trainer.run.workers.scheduler import Costs, ValidationBatch, WorkItem
from unified_trainer.run.workers.weights import Signature, Weights, copy_parts, signature

Build = Callable[[RunConfig, Mesh, bool, bool], Sampling]  # run, ranks, whether they sample, whether they score
# Run, device and requests of validation -> the student, and what makes and measures its samples.
BuildEvaluation = Callable[[RunConfig, torch.device, Sequence[Request]], tuple[WeightCopy, SampleMaker]]


class Worker:
    """Makes samples with the weights that come with the work, or scores them.

    It keeps nothing that a restart could lose: every result follows from the arguments.
    """

    def __init__(self, build: Build, run: RunConfig, folder: str, threads: int, samples: bool, scores: bool) -> None:
        """`folder` is the working directory of the run, and `threads` the CPU threads of a training process."""
        _settle(folder, threads)
        self._run, self._version = run, -1
        self._sampling = build(run, self._join(run), samples, scores)
        self._name = f"{place()}, process {os.getpid()}"

    def _join(self, run: RunConfig) -> Mesh:
        """Return this process alone, on the one device that Ray shows it."""
        return Mesh(pick_device(run.device, 0))

    def ready(self) -> tuple[Signature, str, dict[str, str]]:
        """Return the signature of the weights, where the worker runs, and its code, once it has started."""
        return signature(self._sampling.weights), place(), code_of(self._run)

    def make(self, item: WorkItem, *weights: Weights) -> tuple[tuple[str, Costs], Arrays]:
        """Return who made the rollout of a work item with the weights of these parts, what it took, and the rollout."""
        begun = time.perf_counter()
        if item.version != self._version:
            self._version = -1  # while they are copied
            copy_parts(weights, self._sampling.weights)
            self._version = item.version
        copied = time.perf_counter()
        batch = make_batch(
            self._sampling.codec,
            item.requests,
            self._run.sampler.negative_prompt,
            self._sampling.latent_shape,
            prompt_ids=list(item.prompt_ids),
            sample_ids=list(item.sample_ids),
        )
        assert self._sampling.sample is not None, "a reward worker was asked for samples"
        streams = Streams(self._run.seed, item.step, self._sampling.device)
        rollout = arrays.of_rollout(self._sampling.sample(batch, item.step, streams))
        took = {"worker_seconds/copy_weights": copied - begun, "worker_seconds/rollout": time.perf_counter() - copied}
        return (self._name, took), rollout

    def score(self, item: WorkItem, rollout: Arrays) -> tuple[Costs, dict[str, Any]]:
        """Return the scores of the samples of a work item."""
        begun, reward = time.perf_counter(), self._sampling.reward
        assert reward is not None, "a rollout worker was asked for scores, but reward workers give them"
        before = reward.retried
        scores = reward.score(arrays.to_rollout(rollout, self._sampling.device).x0, item.prompts, item.step)
        took = {"worker_seconds/score": time.perf_counter() - begun}
        if retried := reward.retried - before:
            took["reward/retried"] = float(retried)
        return took, arrays.of_scores(scores)


class EvaluationWorker:
    """Makes and measures samples of validations with the weights that come with the work; it keeps nothing else."""

    def __init__(
        self, build: BuildEvaluation, run: RunConfig, folder: str, threads: int, requests: Sequence[Request]
    ) -> None:
        """Take the arguments of `Worker`, and the requests of validation."""
        _settle(folder, threads)
        self._run, self._device, self._version = run, pick_device(run.device, 0), -1
        self._student, self._maker = build(run, self._device, requests)

    def ready(self) -> tuple[Signature, str, dict[str, str]]:
        """Return the signature of the weights, where the worker runs, and its code, once it has started."""
        return signature(self._student.weights), place(), code_of(self._run)

    def measure(self, item: ValidationBatch, *weights: Weights) -> tuple[Costs, tuple[Arrays, dict[int, np.ndarray]]]:
        """Return the seconds of each phase, and the columns and videos of a batch with these weights."""
        meter = Meter(self._device)
        with meter.measure():
            if item.version != self._version:
                self._version = -1
                with phase("copy_weights"):
                    copy_parts(weights, self._student.weights)
                self._version = item.version
            part = self._maker.make(self._student, range(item.start, item.stop), item.videos, item.step)
        return meter.seconds(), (arrays.of_columns(part.columns), part.clips)


def _settle(folder: str, threads: int) -> None:
    """Work in the working directory of the run, with as many CPU threads as a training process."""
    os.chdir(folder)
    torch.set_num_threads(threads)


def cause(error: Exception) -> Exception:
    """Return what was raised in a worker."""
    while isinstance(error, RayTaskError):
        error = error.cause
    return error


def received(reply: Any, again: Callable[[], Any]) -> tuple[Any, ...]:
    """Return the results that a reply of the scheduler refers to, and what else it says.

    Where they were lost with the machine that held them, `again` asks anew.
    """
    try:
        while True:
            references, *said = ray.get(reply)
            try:
                return ray.get(references), *said
            except ObjectLostError:
                reply = again()
    except RayTaskError as error:
        raise cause(error) from error
    except RayActorError as error:
        raise RuntimeError("the scheduler of the workers cannot start again; continue with --resume") from error


def place() -> str:
    """Return the machine and the devices of this process, in words."""
    context = ray.get_runtime_context()
    devices = [f"{kind} {number}" for kind, ids in context.get_accelerator_ids().items() for number in ids]
    return ", ".join([f"node {ray.util.get_node_ip_address()}", *devices])
