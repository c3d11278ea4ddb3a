"""The settings of Ray and of the workers that make samples; Ray itself is not imported."""

import importlib
import importlib.util
from dataclasses import dataclass, field
from typing import Annotated, Literal

from unified_trainer.basics.effects import CONTACTS
from unified_trainer.basics.errors import UserError
from unified_trainer.basics.ranges import MAY_CHANGE, MOST, Count, CountOrZero, Minutes, PeriodOrZero, above, at_least
from unified_trainer.basics.versions import install
from unified_trainer.methods.rl.buffer import BufferConfig

Transport = Literal["object_store", "nixl"]


@dataclass(frozen=True)
class RayConfig:
    address: Annotated[str, CONTACTS] = ""
    """Address of a running Ray cluster, or auto for the one that this machine belongs to. Empty starts Ray on this
    machine for this run alone."""
    ranks: Count = 1
    """Training processes that --launcher ray starts, one for each device."""
    least_ranks: CountOrZero = 0
    """With --launcher ray, training processes with which a run may continue when the cluster has become too small for
    ray.ranks: the largest number from here on that divides the batch. 0 waits for the room of all."""
    cpus: Annotated[float, above(0, MOST)] = 1.0
    """CPU cores of one training process, as Ray counts them."""
    restarts: CountOrZero = 3
    """With --launcher ray, how often in a row, without a new checkpoint, the run goes on from its newest one after a
    training process died or its machine failed."""
    timeout_minutes: Minutes = 30.0
    """Minutes to wait until the cluster has room for all processes of the run and they have started."""


@dataclass(frozen=True)
class WorkerConfig:
    ahead: CountOrZero = 0
    """Training steps that samples are made ahead of training, with weights that are as many steps old. 0 makes them
    with the present weights; 1 lets sampling and training overlap."""
    super_batch: Count = 1
    """Training steps whose samples workers make as one super-batch, with the weights of one step, `ahead` steps before
    the first of them. With rollouts.ahead equal to it the next super-batch is made while this one is trained on: a
    double buffer (experimental)."""
    buffer: BufferConfig = field(default_factory=BufferConfig)
    transport: Annotated[Transport, MAY_CHANGE] = "object_store"
    """How weights travel to workers: through Ray's object store, or nixl: workers read them straight from the memory of
    the training processes' devices (experimental; needs CUDA devices or CPUs). The numbers are the same."""
    offload: Annotated[bool, MAY_CHANGE] = False
    """Keep what only training reads in pinned CPU memory while the training processes make and score samples: moments,
    EMA weights, networks that make no samples, and on one device float32 weights that have a bf16 copy. The numbers are
    the same."""
    workers: Annotated[CountOrZero, MAY_CHANGE] = 0
    """Rollout workers: processes on Ray that make the samples of training; 0 makes them in the training processes."""
    ranks: Annotated[Count, MAY_CHANGE] = 1
    """Processes of one rollout worker, on one node with a device each. They share the weights, the branches of guidance
    and the tokens of each sample: samples differ from those of one device by rounding (experimental)."""
    reward_workers: Annotated[CountOrZero, MAY_CHANGE] = 0
    """Reward workers: processes on Ray that only decode and score samples; 0 scores in the rollout workers."""
    cpus: Annotated[float, above(0, MOST), MAY_CHANGE] = 1.0
    """CPU cores of one rollout worker, or of each of its ranks, as Ray counts them."""
    gpus: Annotated[float, at_least(0, MOST), MAY_CHANGE] = 1.0
    """Devices of one rollout worker, or the part of one that it shares; 0 samples on the CPU. Of several ranks each has
    one, or none."""
    reward_cpus: Annotated[float, above(0, MOST), MAY_CHANGE] = 1.0
    """CPU cores of one reward worker, as Ray counts them."""
    reward_gpus: Annotated[float, at_least(0, MOST), MAY_CHANGE] = 1.0
    """Devices of one reward worker, or the part of one that it shares; 0 decodes and scores on the CPU."""
    evaluation_workers: Annotated[CountOrZero, MAY_CHANGE] = 0
    """Evaluation workers: processes on Ray that validate while training goes on; 0 validates in the training processes,
    which wait."""
    evaluation_lag: Annotated[CountOrZero, MAY_CHANGE] = 0
    """Training steps after which the result of a validation beside training takes effect: it is written, and guards and
    keep_best decide by it. Training waits for it then. 0 is as late as the next validation."""
    evaluation_cpus: Annotated[float, above(0, MOST), MAY_CHANGE] = 1.0
    """CPU cores of one evaluation worker, as Ray counts them."""
    evaluation_gpus: Annotated[float, at_least(0, MOST), MAY_CHANGE] = 1.0
    """Devices of one evaluation worker, or the part of one that it shares; 0 validates on the CPU."""
    timeout_minutes: Annotated[Minutes, MAY_CHANGE] = 30.0
    """Minutes that a worker may take for algorithm.rollout_batch or validation.batch samples; after that it is
    restarted."""
    check_every: Annotated[PeriodOrZero, MAY_CHANGE] = 20
    """Training steps after which samples of the same rollout worker are compared again with their replay in training.
    0 compares the first samples of each worker only."""

    @property
    def cores(self) -> float:
        """CPU cores of all workers."""
        others = self.reward_cpus * self.reward_workers + self.evaluation_cpus * self.evaluation_workers
        return self.cpus * self.ranks * self.workers + others

    @property
    def devices(self) -> float:
        """Devices of all workers, beside those of the training processes."""
        others = self.reward_gpus * self.reward_workers + self.evaluation_gpus * self.evaluation_workers
        return self.gpus * self.ranks * self.workers + others

    def check(self, sampled: bool, method: str, validate_every: int) -> None:
        """Raise UserError, naming the key, unless the settings fit the method; `sampled`: it asks for samples."""
        if self.workers and not sampled:
            raise UserError(
                f"rollouts.workers must be 0 for {method}, which trains through its own samples: only methods that "
                "learn from the rewards of finished samples can take them from workers"
            )
        if self.offload and (self.workers or not sampled):
            way_out = "set rollouts.workers 0, or leave it out" if sampled else "leave it out"
            raise UserError(f"rollouts.offload: the training processes of this run make no rollouts: {way_out}")
        if self.transport == "nixl" and not (self.workers or self.evaluation_workers):
            raise UserError("rollouts.transport nixl needs rollouts.workers or rollouts.evaluation_workers above 0")
        if self.buffer.share and not sampled:
            raise UserError(f"rollouts.buffer.share must be 0 for {method}, which makes no rollouts that can be stored")
        for name, off in (("ahead", 0), ("super_batch", 1), ("reward_workers", 0)):
            if getattr(self, name) != off and not self.workers:
                raise UserError(f"rollouts.{name} needs rollouts.workers above 0")
        if self.ranks > 1 and not self.reward_workers:
            raise UserError("rollouts.ranks above 1 needs rollouts.reward_workers above 0: such workers hold no scorer")
        if self.ranks > 1 and self.gpus not in (0, 1):
            raise UserError(
                f"rollouts.gpus must be 1 with rollouts.ranks {self.ranks}, or 0 for the CPU, not {self.gpus:g}: each "
                "rank has a device of its own"
            )
        if self.evaluation_workers and not validate_every:
            raise UserError("rollouts.evaluation_workers has nothing to validate: set validate_every")
        if self.evaluation_lag and not self.evaluation_workers:
            raise UserError("rollouts.evaluation_lag needs rollouts.evaluation_workers above 0")
        if self.evaluation_lag > validate_every:
            raise UserError(
                f"rollouts.evaluation_lag ({self.evaluation_lag}) must be at most validate_every ({validate_every}): "
                "one validation is under way at a time"
            )


def check_installed(key: str) -> None:
    """Raise UserError unless Ray is installed; `key` is the setting that needs it."""
    if importlib.util.find_spec("ray") is None:
        raise UserError(f"{key} needs Ray: {install('ray')}")


def check_transport(transport: Transport, kind: str) -> None:
    """Raise UserError unless weights can travel so from devices of this kind with what is installed."""
    if transport == "object_store":
        return
    if kind == "npu":
        raise UserError(
            "rollouts.transport nixl reads the memory of CUDA devices and CPUs, not of an NPU: set rollouts.transport "
            "object_store"
        )
    try:
        importlib.import_module("nixl")
    except ImportError as error:
        raise UserError(f"rollouts.transport nixl needs NIXL ({error}): {install('ray-direct')}") from error
