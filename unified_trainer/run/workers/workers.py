"""The processes that make samples and score them, and how they are started."""

import os
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from ray.exceptions import ObjectLostError, RayActorError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from torch import Tensor

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.requests import Request
from unified_trainer.data.loader import make_batch
from unified_trainer.methods.rl.rollouts import Sampling
from unified_trainer.parallel.device import pick_device
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.parallel.meter import Meter, phase
from unified_trainer.parallel.random import Streams
from unified_trainer.roles.weight_copy import WeightCopy
from unified_trainer.run.settings.code import check_code_of_workers, code_of
from unified_trainer.run.settings.config import RunConfig
from unified_trainer.run.validation.samples import SampleMaker
from unified_trainer.run.workers import arrays, cluster
from unified_trainer.run.workers.arrays import Arrays
from unified_trainer.run.workers.scheduler import Costs, Scheduler, ValidationBatch, WorkItem
from unified_trainer.run.workers.weights import Signature, Weights, check_equal, copy_parts, signature

Build = Callable[[RunConfig, torch.device, bool, bool], Sampling]  # run, device, whether it samples, whether it scores
# Run, device and requests of validation -> the student, and what makes and measures its samples.
BuildEvaluation = Callable[[RunConfig, torch.device, Sequence[Request]], tuple[WeightCopy, SampleMaker]]
LAST_ANSWER = 10.0  # seconds that the scheduler gets to end its open calls
CALLS = 10_000  # requests that the scheduler leads at a time


class Worker:
    """Makes samples with the weights that come with the work, or scores them.

    It keeps nothing that a restart could lose: every result follows from the arguments.
    """

    def __init__(self, build: Build, run: RunConfig, folder: str, threads: int, samples: bool, scores: bool) -> None:
        """`folder` is the working directory of the run, and `threads` the CPU threads of a training process."""
        _settle(folder, threads)
        self._run, self._version = run, -1
        self._sampling = build(run, pick_device(run.device, 0), samples, scores)  # Ray shows it no other device
        self._name = f"{place()}, process {os.getpid()}"

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
            self._sampling.codec.encode_text([self._run.sampler.negative_prompt]),
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
        if reward.config.retries:
            took["reward/retried"] = float(reward.retried - before)
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

    def measure(self, item: ValidationBatch, *weights: Weights) -> tuple[Costs, tuple[Arrays, list[np.ndarray]]]:
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


class WorkerGroup:
    """The workers of a run and their scheduler, as every training process sees them."""

    def __init__(self, scheduler: Any, workers: Mapping[str, Any]) -> None:
        """`workers`, by kind and number, are known to the main rank alone, which started them."""
        self.scheduler, self._workers = scheduler, workers

    @classmethod
    def start(
        cls,
        run: RunConfig,
        build: Build,
        build_evaluation: BuildEvaluation,
        requests: Sequence[Request],
        mesh: Mesh,
        *,
        store: int,
    ) -> "WorkerGroup":
        """Start the workers on the main rank; all ranks must call it, connected to the cluster.

        The workers load while training loads. `requests` are those of validation, and Ray's object store must have room
        for `store` bytes.
        """
        needs, config = worker_needs(run, mesh.device.type), run.rollouts
        cluster.wait_for_room(run.ray, needs)
        cluster.check_store(store)
        name, scheduler, workers = mesh.broadcast(f"scheduler-{uuid.uuid4()}"), None, {}
        if mesh.is_main:
            scorers_begin, last = config.workers, config.workers + config.reward_workers

            def pool(kind: str, own: Sequence[cluster.Needs], *how: Any) -> dict[str, Any]:
                names = [f"{kind} worker {i}" for i in range(len(own))]
                return {one: _worker(f"{one} of {name}", run, need, *how) for one, need in zip(names, own, strict=True)}

            pools = [
                pool("rollout", needs[:scorers_begin], Worker, build, True, not config.reward_workers),
                pool("reward", needs[scorers_begin:last], Worker, build, False, True),
                pool("evaluation", needs[last:], EvaluationWorker, build_evaluation, requests),
            ]
            workers = pools[0] | pools[1] | pools[2]
            names = [[f"{worker} of {name}" for worker in own] for own in pools]
            # On this node, because an actor without needs may be put on any, and the run cannot go on without it.
            here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
            options = {"num_cpus": 0, "max_concurrency": CALLS, "name": name, "runtime_env": _environment()}
            options |= {"scheduling_strategy": here, "max_restarts": -1, "max_task_retries": -1}  # of all open calls
            timeout = 60 * config.timeout_minutes
            scheduler = ray.remote(Scheduler).options(**options).remote(*names, timeout, mesh.size)
            ray.get(scheduler.ready.remote())
        mesh.barrier()
        return cls(scheduler or ray.get_actor(name, cluster.NAMESPACE), workers)

    def check(self, weights: Mapping[str, Tensor], timeout: float, code: Mapping[str, str]) -> dict[str, str]:
        """Wait until all workers have started and compare their weights and their code; return where each one runs.

        Only the main rank knows. UserError if they have not started after `timeout` seconds, or have other `code`.
        """
        trained, places, codes = signature(weights), {}, {}
        # A worker that is killed while it starts is started again.
        started = [worker.ready.options(max_task_retries=-1).remote() for worker in self._workers.values()]
        try:
            for name, (held, where, own) in zip(self._workers, ray.get(started, timeout=timeout), strict=True):
                places[name], codes[f"{name} ({where})"] = where, own
                if held:  # a reward worker holds none
                    check_equal(trained, held)
        except ray.exceptions.GetTimeoutError:
            raise UserError(
                f"not all of {len(self._workers)} workers started within ray.timeout_minutes ({timeout / 60:g}): the "
                f"cluster has {ray.available_resources()} left"
            ) from None
        check_code_of_workers(code, codes)
        return places

    def stop(self) -> None:
        """End the workers and the scheduler."""
        if self._workers:
            ray.wait([self.scheduler.end.remote()], timeout=LAST_ANSWER)
        for actor in [*self._workers.values(), *([self.scheduler] if self._workers else [])]:
            ray.kill(actor)


def worker_needs(run: RunConfig, kind: str) -> list[cluster.Needs]:
    """Return the resources of every worker on devices of this kind: rollout, then reward, then evaluation workers."""
    config = run.rollouts
    sampler: cluster.Needs = {"CPU": config.cpus, **cluster.devices(kind, config.gpus)}
    scorer: cluster.Needs = {"CPU": config.reward_cpus, **cluster.devices(kind, config.reward_gpus)}
    evaluator: cluster.Needs = {"CPU": config.evaluation_cpus, **cluster.devices(kind, config.evaluation_gpus)}
    counts = ((sampler, config.workers), (scorer, config.reward_workers), (evaluator, config.evaluation_workers))
    return [needs for needs, count in counts for _ in range(count)]


def _worker(name: str, run: RunConfig, needs: cluster.Needs, kind: type, build: Any, *rest: Any) -> Any:
    environment = _environment()  # where weights do not arrive, the pool restarts the worker, before Ray gives up
    environment["env_vars"]["RAY_rdt_fetch_fail_timeout_milliseconds"] = f"{60_000 * run.rollouts.timeout_minutes:.0f}"
    options = {"name": name, "max_restarts": -1, "max_task_retries": 0, "runtime_env": environment}
    actor = ray.remote(kind).options(**cluster.options(needs), **options)
    return actor.remote(build, placed(run, needs), str(Path.cwd()), torch.get_num_threads(), *rest)


def placed(run: RunConfig, needs: cluster.Needs) -> RunConfig:
    """Return the run as a worker with these needs sees it: on the CPU if Ray counts no device for it."""
    return run if needs.keys() - {"CPU"} else replace(run, device="cpu")


def _environment() -> dict[str, Any]:
    """Return the environment of a worker: variables of the shell, and as many threads as this process has.

    Ray would set the cores of the actor.
    """
    return {"env_vars": {**cluster.forwarded(), "OMP_NUM_THREADS": str(torch.get_num_threads())}}
