"""The checks of guards, checkpoints and workers against each other, before any weight is read."""

from unified_trainer.methods.base import Method
from unified_trainer.roles.role import TrainableConfig
from unified_trainer.run.guards.base import GuardConfig
from unified_trainer.run.guards.distillation import DistillationGuardConfig
from unified_trainer.run.guards.hacking_monitor import HackingMonitorConfig
from unified_trainer.run.settings.config import ConfigError, RunConfig
from unified_trainer.run.settings.workers import check_installed, check_transport


def check_guards(run: RunConfig, method: type[Method]) -> None:
    """Raise ConfigError for settings of a guard that the method has not, or whose action the run cannot take."""
    guards: dict[str, GuardConfig] = {}
    if method.uses_reward:
        guards["hacking_monitor"] = run.hacking_monitor
        if run.hacking_monitor.action in ("stop", "roll_back") and not run.validate_every:
            action = run.hacking_monitor.action
            raise ConfigError(f"hacking_monitor.action {action} needs validations to compare: set validate_every")
    elif run.hacking_monitor != HackingMonitorConfig():
        raise ConfigError(f"--hacking-monitor.*: {run.method} trains on no reward; leave these settings out")
    if run.algorithm.teacher_guidance is not None:
        run.guard.check()
        guards["guard"] = run.guard
    elif run.guard != DistillationGuardConfig():
        raise ConfigError(f"--guard.*: {run.method} has no teacher and critic to compare; leave these settings out")
    for key, guard in guards.items():
        if guard.action != "roll_back":
            continue
        if run.checkpoint_every < 1:
            raise ConfigError(f"{key}.action roll_back needs checkpoints to go back to: set checkpoint_every")
        if run.checkpoint_minutes:
            raise ConfigError(
                f"{key}.action roll_back needs checkpoints at fixed steps, so that the run can be repeated: set "
                "checkpoint_minutes 0, and checkpoint_every to a number of steps"
            )
        student = run.roles["student"]
        if not (isinstance(student, TrainableConfig) and student.ema_decay):
            raise ConfigError(f"{key}.action roll_back goes on from EMA weights: set student.ema_decay")
        if run.rollouts.workers or run.rollouts.evaluation_workers:
            raise ConfigError(
                f"{key}.action roll_back cannot recall samples that workers have begun: set rollouts.workers 0 and "
                "rollouts.evaluation_workers 0"
            )


def check_workers(run: RunConfig, method: type[Method]) -> None:
    """Raise ConfigError for settings of workers that the method or the student does not fit."""
    run.rollouts.check(bool(method.sampled_by), run.method, run.validate_every)
    if run.rollouts.offload and run.parallel.offload_weights and run.parallel.offload_optimizer:
        raise ConfigError(
            "rollouts.offload: parallel.offload_weights and offload_optimizer keep all state in CPU memory already: "
            "leave it out"
        )
    if run.rollouts.evaluation_workers and any(run.validation.sets.values()):
        raise ConfigError("validation.sets needs rollouts.evaluation_workers 0: workers validate one set of prompts")


def check_worker_packages(run: RunConfig, device: str) -> None:
    """Raise UserError unless what the workers of a run need is installed, for devices of this kind."""
    for name, count in (("workers", run.rollouts.workers), ("evaluation_workers", run.rollouts.evaluation_workers)):
        if count:
            check_installed(f"rollouts.{name}")
    check_transport(run.rollouts.transport, device)
