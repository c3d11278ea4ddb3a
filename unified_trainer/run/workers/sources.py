"""The samples and validations that workers give to training."""

from collections.abc import Sequence

from unified_trainer.basics.requests import Request
from unified_trainer.data.loader import Loader
from unified_trainer.methods.rl.buffer import FreshRows
from unified_trainer.methods.rl.rollout_config import RolloutConfig
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.rewards.reward import RewardSum
from unified_trainer.roles.role import Role, Trainable
from unified_trainer.roles.weight_copy import WeightCopy
from unified_trainer.run.settings.config import RunConfig
from unified_trainer.run.validation.report import Report
from unified_trainer.run.validation.samples import sample_requests
from unified_trainer.run.workers.evaluation import RemoteValidation
from unified_trainer.run.workers.group import WorkerGroup
from unified_trainer.run.workers.replica import ReplicaSender
from unified_trainer.run.workers.rollouts import RemoteRollouts
from unified_trainer.run.workers.weights import WeightSender


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


def remote_validation(
    run: RunConfig, workers: WorkerGroup, student: Role, reward: RewardSum, requests: Sequence[Request], mesh: Mesh
) -> RemoteValidation:
    """Return the validations of evaluation workers."""
    report = Report(run.validation, reward, sample_requests(requests, run.validation), mesh, run.video.fps)
    sender = WeightSender(mesh, run.rollouts.transport, student.bf16_weights)
    return RemoteValidation(workers, run.validation, report, mesh, sender)
