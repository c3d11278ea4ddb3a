"""A rollout worker of several devices: ranks that share the weights of the student and the tokens of each sample.

A replica has one process for each device, all on one node, and one more that leads them. Ray gives the leader all
devices at once, or none. The leader owns its ranks: Ray ends them with it, however it ends.
"""

import os
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any

import ray
from ray import ObjectRef
from ray.exceptions import RayActorError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from torch import Tensor
from torch.distributed import TCPStore

from unified_trainer.parallel.device import VISIBLE
from unified_trainer.parallel.mesh import Mesh, peer_lost
from unified_trainer.run.settings.code import code_of
from unified_trainer.run.settings.config import RunConfig
from unified_trainer.run.workers.arrays import Arrays
from unified_trainer.run.workers.scheduler import Costs, WorkItem
from unified_trainer.run.workers.weights import Signature, Weights, WeightSender
from unified_trainer.run.workers.workers import Build, Worker, cause, place

DIED = 1  # exit code of a leader that lost a rank


class ReplicaRank(Worker):
    """One device of a replica. All ranks are asked for the same samples, and the first one returns them."""

    def __init__(self, environment: Mapping[str, str], build: Build, run: RunConfig, *how: Any) -> None:
        """Take what torchrun would set, the devices of the leader, and the arguments of `Worker`."""
        os.environ.update(environment)
        super().__init__(build, run, *how)

    def _join(self, run: RunConfig) -> Mesh:
        """Meet the other ranks: they share weights, branches of guidance and tokens."""
        sequence = run.sequence_of_workers
        together = replace(
            run.parallel, replicate=1, shard=run.rollouts.ranks // sequence, sequence=sequence, offload_weights=False
        )
        self._mesh = Mesh.join(run.device, together)
        return self._mesh

    def make(self, item: WorkItem, *weights: Weights) -> tuple[tuple[str, Costs], Arrays]:
        """Make the samples of a work item with the other ranks, with the rows of weights that this rank holds."""
        if item.version != self._version:
            weights = tuple(part.needed_by(self._sampling.weights) for part in weights)
        told, rollout = super().make(item, *weights)
        return told, rollout if self._mesh.is_main else {}


class Replica:
    """Leads its ranks. To the scheduler it is a rollout `Worker`: it has the same methods.

    Its process ends when a rank has died. Ray then ends the other ranks and starts the replica again.
    """

    def __init__(self, build: Build, run: RunConfig, *how: Any) -> None:
        """Start the ranks and wait until they have loaded the student; take the arguments of `Worker`."""
        self._run, self._name = run, f"{place()}, process {os.getpid()}"
        address, longest = ray.util.get_node_ip_address(), timedelta(minutes=run.parallel.timeout_minutes)
        self._store = TCPStore(address, 0, None, True, longest, wait_for_workers=False)  # where the ranks meet
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        start = ray.remote(ReplicaRank).options(num_cpus=0, scheduling_strategy=here).remote  # counted once
        own = environments(run.rollouts.ranks, address, self._store.port)
        self._ranks = [start(environment, build, run, *how) for environment in own]
        self._signature, *_ = self._first_of("ready")

    def ready(self) -> tuple[Signature, str, dict[str, str]]:
        """Return what a `Worker` does, with the devices of all ranks."""
        return self._signature, place(), code_of(self._run)

    def make(self, item: WorkItem, *weights: list[ObjectRef]) -> tuple[tuple[str, Costs], Arrays]:
        """Return what a `Worker` does; `weights` come from a `ReplicaSender`."""
        (_, took), rollout = self._first_of("make", item, *(part for (part,) in weights))
        return (self._name, took), rollout

    def _first_of(self, method: str, *arguments: Any) -> Any:
        """Return what the first rank answers once all have; raise what a rank raises first."""
        asked = [getattr(rank, method).remote(*arguments) for rank in self._ranks]
        pending = asked
        try:
            while pending:  # in the order of their answers: a rank that waits for one that failed may never answer
                done, pending = ray.wait(pending)
                ray.get(done)
            return ray.get(asked[0])
        except (RayTaskError, RayActorError) as error:
            died = isinstance(error, RayActorError) and not error.actor_init_failed
            if not died and not peer_lost(raised := cause(error)):
                raise raised from error
        os._exit(DIED)


def environments(ranks: int, address: str, port: int) -> list[dict[str, str]]:
    """Return what torchrun would set for each rank, and the devices of this process, of which each rank takes one."""
    shared = {"MASTER_ADDR": address, "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    shared |= {"TORCHELASTIC_USE_AGENT_STORE": "True"}  # the store is not in the first rank
    shared |= {name: os.environ[name] for name in VISIBLE if name in os.environ}
    return [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]


class ReplicaSender(WeightSender):
    """Gives weights to replicas: as references in lists, which Ray does not replace by what they refer to.

    The leader passes them on, and each rank reads the weights from the memory of its node.
    """

    def send(self, version: int, weights: Mapping[str, Tensor], oldest: int) -> ObjectRef:
        return ray.put([super().send(version, weights, oldest)])
