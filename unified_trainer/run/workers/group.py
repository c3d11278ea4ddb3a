"""How the workers of a run are started, and ended."""

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
import torch
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.requests import Request
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.roles.role import Trainable
from unified_trainer.roles.weight_copy import WeightCopy
from unified_trainer.run.settings.code import check_code_of_workers
from unified_trainer.run.settings.config import RunConfig
from unified_trainer.run.workers import cluster
from unified_trainer.run.workers.replica import Replica
from unified_trainer.run.workers.scheduler import Scheduler
from unified_trainer.run.workers.weights import check_equal, signature
from unified_trainer.run.workers.workers import Build, BuildEvaluation, EvaluationWorker, Worker

LAST_ANSWER = 10.0  # seconds that the scheduler gets to end its open calls
CALLS = 10_000  # requests that the scheduler leads at a time


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
            sampler = Replica if config.ranks > 1 else Worker
            scorers_begin, last = config.workers, config.workers + config.reward_workers

            def pool(kind: str, own: Sequence[cluster.Needs], *how: Any) -> dict[str, Any]:
                names = [f"{kind} worker {i}" for i in range(len(own))]
                return {one: _worker(f"{one} of {name}", run, need, *how) for one, need in zip(names, own, strict=True)}

            pools = [
                pool("rollout", needs[:scorers_begin], sampler, build, True, not config.reward_workers),
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

    def check(self, role: Trainable | WeightCopy, timeout: float, code: Mapping[str, str]) -> dict[str, str]:
        """Wait until all workers have started and compare their weights, which are the role's, and their code.

        Return where each one runs: only the main rank knows. UserError if they have not started after `timeout`
        seconds, or have other `code`.
        """
        trained, places, codes = signature(role.weights, role.bf16_weights), {}, {}
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
    ranks = config.ranks
    sampler: cluster.Needs = {"CPU": ranks * config.cpus, **cluster.devices(kind, ranks * config.gpus)}
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
