"""The settings of Ray and of the workers that make samples; Ray itself is not imported."""

import importlib.util
from dataclasses import dataclass

from unified_trainer.errors import UserError


@dataclass(frozen=True)
class RayConfig:
    address: str = ""
    """Address of a running Ray cluster, or auto for the one that this machine belongs to. Empty starts Ray on this
    machine for this run alone."""
    ranks: int = 1
    """Training processes that --launcher ray starts, one for each device."""
    cpus: float = 1.0
    """CPU cores of one training process, as Ray counts them."""
    restarts: int = 3
    """With --launcher ray, how often the run goes on from its newest checkpoint after a training process died."""
    timeout_minutes: float = 30.0
    """Minutes to wait until the cluster has room for all processes of the run and they have started."""

    def check(self) -> None:
        """Raise UserError, naming the key, for values that cannot be."""
        if self.ranks < 1 or self.restarts < 0:
            raise UserError(
                f"ray.ranks must be at least 1, and ray.restarts not negative, not {self.ranks} and {self.restarts}"
            )
        if not (self.cpus > 0 and self.timeout_minutes > 0):
            raise UserError(
                f"ray.cpus and ray.timeout_minutes must be above 0, not {self.cpus:g} and {self.timeout_minutes:g}"
            )


@dataclass(frozen=True)
class WorkerConfig:
    ahead: int = 0
    """Training steps that samples are made ahead of training, with weights that are as many steps old. 0 makes them
    with the present weights; 1 lets sampling and training overlap."""
    workers: int = 0
    """Rollout workers: processes on Ray that make the samples of training; 0 makes them in the training processes."""
    reward_workers: int = 0
    """Reward workers: processes on Ray that only decode and score samples; 0 scores in the rollout workers."""
    cpus: float = 1.0
    """CPU cores of one rollout worker, as Ray counts them."""
    gpus: float = 1.0
    """Devices of one rollout worker, or the part of one that it shares; 0 samples on the CPU."""
    reward_cpus: float = 1.0
    """CPU cores of one reward worker, as Ray counts them."""
    reward_gpus: float = 1.0
    """Devices of one reward worker, or the part of one that it shares; 0 decodes and scores on the CPU."""
    timeout_minutes: float = 30.0
    """Minutes that a worker may take for algorithm.rollout_batch samples; after that it is restarted."""
    check_every: int = 20
    """Training steps after which samples of the same rollout worker are compared again with their replay in training.
    0 compares the first samples of each worker only."""

    @property
    def cores(self) -> float:
        """CPU cores of all workers."""
        return self.cpus * self.workers + self.reward_cpus * self.reward_workers

    def check(self, sampled: bool, method: str) -> None:
        """Raise UserError, naming the key, for values that cannot be; `sampled`: the method asks for samples."""
        for name in ("ahead", "workers", "reward_workers", "check_every"):
            if getattr(self, name) < 0:
                raise UserError(f"rollouts.{name} must not be negative, but is {getattr(self, name)}")
        for name in ("cpus", "reward_cpus", "timeout_minutes"):
            if not getattr(self, name) > 0:
                raise UserError(f"rollouts.{name} must be above 0, not {getattr(self, name):g}")
        for name in ("gpus", "reward_gpus"):
            if not getattr(self, name) >= 0:
                raise UserError(f"rollouts.{name} must not be negative, but is {getattr(self, name):g}")
        if self.workers and not sampled:
            raise UserError(
                f"rollouts.workers must be 0 for {method}, which trains through its own samples: only methods that "
                "learn from the rewards of finished samples can take them from workers"
            )
        for name in ("ahead", "reward_workers"):
            if getattr(self, name) and not self.workers:
                raise UserError(f"rollouts.{name} needs rollouts.workers above 0")


def check_installed(key: str) -> None:
    """Raise UserError unless Ray is installed; `key` is the setting that needs it."""
    if importlib.util.find_spec("ray") is None:
        raise UserError(f"{key} needs Ray: pip install 'unified-trainer[ray]'")
