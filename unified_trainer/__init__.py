"""One trainer for few-step distillation and reinforcement learning of video diffusion models."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from unified_trainer.basics.late_torchao import leave_out_torchao

if TYPE_CHECKING:
    from unified_trainer.api import Run, Student, configure, train
    from unified_trainer.basics.errors import UserError
    from unified_trainer.methods.base import (
        Loss,
        Method,
        MethodConfig,
        SingleUpdateConfig,
        frozen,
        initial_copy,
        trained,
        updated_copy,
    )
    from unified_trainer.models.base import Family
    from unified_trainer.numerics.objectives import Objective
    from unified_trainer.rewards.base import ScorerConfig, ScorerKind
    from unified_trainer.run.settings.config import RunConfig
    from unified_trainer.tools.serve.remote_student import RemoteStudent

__all__ = [
    "Family",
    "Loss",
    "Method",
    "MethodConfig",
    "Objective",
    "RemoteStudent",
    "Run",
    "RunConfig",
    "ScorerConfig",
    "ScorerKind",
    "SingleUpdateConfig",
    "Student",
    "UserError",
    "configure",
    "frozen",
    "initial_copy",
    "train",
    "trained",
    "updated_copy",
]

_MODULES = {
    "unified_trainer.api": ("Run", "Student", "configure", "train"),
    "unified_trainer.run.settings.config": ("RunConfig",),
    "unified_trainer.basics.errors": ("UserError",),
    "unified_trainer.methods.base": (
        "Loss",
        "Method",
        "MethodConfig",
        "SingleUpdateConfig",
        "frozen",
        "initial_copy",
        "trained",
        "updated_copy",
    ),
    "unified_trainer.models.base": ("Family",),
    "unified_trainer.numerics.objectives": ("Objective",),
    "unified_trainer.rewards.base": ("ScorerConfig", "ScorerKind"),
    "unified_trainer.tools.serve.remote_student": ("RemoteStudent",),
}


leave_out_torchao()


def __getattr__(name: str) -> Any:
    """Import a name when it is first used: parts of the package, such as the scheduler of workers, need no torch."""
    for module, names in _MODULES.items():
        if name in names:
            return globals().setdefault(name, vars(import_module(module))[name])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
