"""The processes that make samples and score them, and how they are started."""

import os
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
import torch
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from torch import Tensor

from unified_trainer.config import RunConfig
from unified_trainer.data.loader import make_batch
from unified_trainer.engine import arrays, cluster
from unified_trainer.engine.arrays import Arrays, Signature, Weights
from unified_trainer.engine.scheduler import Measured, Scheduler, WorkItem
from unified_trainer.errors import UserError
from unified_trainer.parallel.device import pick_device
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.parallel.random import Streams
from unified_trainer.rl.rollouts import Sampling

Build = Callable[[RunConfig, torch.device, bool, bool], Sampling]  # run, device, whether it samples, whether it scores
CALLS = 10_000  # requests that the scheduler leads at a time


class Worker:
    """Makes samples with the weights that come with the work, or scores them.

    It keeps nothing that a restart could lose: every result follows from the arguments.
    """

    def __init__(self, build: Build, run: RunConfig, folder: str, threads: int, samples: bool, scores: bool) -> None:
        """`folder` is the working directory of the run, and `threads` the CPU threads of a training process."""
        os.chdir(folder)
        torch.set_num_threads(threads)
        self._run, self._version = run, -1
        self._sampling = build(run, pick_device(run.device, 0), samples, scores)  # Ray shows it no other device
        self._name = f"{place()}, process {os.getpid()}"

    def ready(self) -> tuple[Signature, str]:
        """Return the signature of the weights, and where the worker runs, once it has started."""
        return arrays.signature(self._sampling.weights), place()

    def make(self, item: WorkItem, weights: Weights) -> tuple[tuple[str, Measured], Arrays]:
        """Return who made the rollout of a work item with these weights, what it took, and the rollout."""
        begun = time.perf_counter()
        if item.version != self._version:
            self._version = -1
            weights.copy_to(self._sampling.weights)
            self._version = item.version
        copied = time.perf_counter()
        batch = make_batch(
            self._sampling.codec,
            list(item.prompts),
            self._sampling.codec.encode_text([self._run.sampler.negative_prompt]),
            self._sampling.latent_shape,
            prompt_ids=list(item.prompt_ids),
            sample_ids=list(item.sample_ids),
        )
        assert self._sampling.sample is not None, "a reward worker was asked for samples"
        rollout = self._sampling.sample(batch, item.step, Streams(self._run.seed, item.step))
        took = {"worker_seconds/copy_weights": copied - begun, "worker_seconds/rollout": time.perf_counter() - copied}
        return (self._name, took), arrays.of_rollout(rollout)

    def score(self, item: WorkItem, rollout: Arrays) -> tuple[Measured, dict[str, Any]]:
        """Return the scores of the samples of a work item."""
        begun, reward = time.perf_counter(), self._sampling.reward
        assert reward is not None, "a rollout worker was asked for scores, but reward workers give them"
        before = reward.retried
        scores = reward.score(arrays.to_rollout(rollout, self._sampling.device).x0, item.prompts, item.step)
        took = {"worker_seconds/score": time.perf_counter() - begun}
        if reward.config.retries:
            took["reward/retried"] = float(reward.retried - before)
        return took, arrays.of_scores(scores)


def place() -> str:
    """Return the machine and the devices of this process, in words."""
    context = ray.get_runtime_context()
    devices = [f"{kind} {one}" for kind, ids in context.get_accelerator_ids().items() for one in ids]
    return ", ".join([f"node {ray.util.get_node_ip_address()}", *devices])


class WorkerGroup:
    """The workers of a run and their scheduler, as every training process sees them."""

    def __init__(self, scheduler: Any, workers: list[Any]) -> None:
        """`workers` are known to the main rank alone, which started them."""
        self.scheduler, self._workers = scheduler, workers

    @classmethod
    def start(cls, run: RunConfig, build: Build, mesh: Mesh) -> "WorkerGroup":
        """Start the workers on the main rank; all ranks must call it, connected to the cluster.

        The workers load while training loads.
        """
        needs, count = worker_needs(run, mesh.device.type), run.rollouts.workers
        cluster.wait_for_room(run.ray, needs)
        name, scheduler, workers = mesh.broadcast(f"scheduler-{uuid.uuid4()}"), None, []
        if mesh.is_main:
            makers = [_worker(run, build, need, True, not run.rollouts.reward_workers) for need in needs[:count]]
            scorers = [_worker(run, build, need, False, True) for need in needs[count:]]
            workers = [*makers, *scorers]
            # On this node, because an actor without needs may be put on any, and the run cannot go on without it.
            here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
            options = {"num_cpus": 0, "max_concurrency": CALLS, "name": name, "runtime_env": _environment()}
            options["scheduling_strategy"] = here
            scheduler = (
                ray.remote(Scheduler).options(**options).remote(makers, scorers, 60 * run.rollouts.timeout_minutes)
            )
            ray.get(scheduler.ready.remote())
        mesh.barrier()
        return cls(scheduler or ray.get_actor(name, cluster.NAMESPACE), workers)

    def check(self, weights: Mapping[str, Tensor], timeout: float) -> list[str]:
        """Wait until all workers have started and compare the weights that they hold; return where they run.

        Only the main rank knows. UserError if they have not started after `timeout` seconds.
        """
        trained, places = arrays.signature(weights), []
        # A worker that is killed while it starts is started again.
        started = [worker.ready.options(max_task_retries=-1).remote() for worker in self._workers]
        try:
            for held, where in ray.get(started, timeout=timeout):
                places.append(where)
                if held:  # a reward worker holds none
                    arrays.check_equal(trained, held)
        except ray.exceptions.GetTimeoutError:
            raise UserError(
                f"not all of {len(self._workers)} workers started within ray.timeout_minutes ({timeout / 60:g}): the "
                f"cluster has {ray.available_resources()} left"
            ) from None
        return places

    def stop(self) -> None:
        """End the workers and the scheduler."""
        for actor in [*self._workers, *([self.scheduler] if self._workers else [])]:
            ray.kill(actor)


def worker_needs(run: RunConfig, kind: str) -> list[cluster.Needs]:
    """Return the resources of every worker of a run on devices of this kind: rollout workers, then reward workers."""
    config = run.rollouts
    sampler: cluster.Needs = {"CPU": config.cpus, **cluster.devices(kind, config.gpus)}
    scorer: cluster.Needs = {"CPU": config.reward_cpus, **cluster.devices(kind, config.reward_gpus)}
    return [*[sampler] * config.workers, *[scorer] * config.reward_workers]


def _worker(run: RunConfig, build: Build, needs: cluster.Needs, samples: bool, scores: bool) -> Any:
    kind = ray.remote(Worker).options(
        **cluster.options(needs), max_restarts=-1, max_task_retries=0, runtime_env=_environment()
    )
    return kind.remote(build, placed(run, needs), str(Path.cwd()), torch.get_num_threads(), samples, scores)


def placed(run: RunConfig, needs: cluster.Needs) -> RunConfig:
    """Return the run as a worker with these needs sees it: on the CPU if Ray counts no device for it."""
    return run if needs.keys() - {"CPU"} else replace(run, device="cpu")


def _environment() -> dict[str, Any]:
    """Return the environment of a worker: as many threads as this process has; Ray would set the cores of the actor."""
    return {"env_vars": {"OMP_NUM_THREADS": str(torch.get_num_threads())}}
