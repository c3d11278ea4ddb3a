"""A validation whose result has not taken effect yet, and how a checkpoint holds it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from unified_trainer.parallel.fsdp import cpu_copy
from unified_trainer.roles.role import Trainable
from unified_trainer.run.checkpoint import manifest

KIND = "validation/student"  # kind of state: the weights that it samples with


@dataclass(frozen=True)
class PendingValidation:
    """A validation that was started after `step` training steps."""

    step: int
    looks: dict[str, float]  # how its samples compare with the teacher's
    weights: dict[str, Tensor]  # this rank's part of the weights that it samples with, in CPU memory

    @property
    def metadata(self) -> dict[str, Any]:
        """Its entry in a checkpoint's manifest."""
        return {"step": self.step, "looks": self.looks}

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Its tensors in a checkpoint."""
        return {f"{KIND}/{name}": weight for name, weight in self.weights.items()}

    @classmethod
    def of_checkpoint(cls, metadata: Mapping[str, Any], student: Trainable) -> "PendingValidation | None":
        """Return the pending validation of a checkpoint's manifest, if any; its weights are still to be loaded."""
        held = metadata.get(manifest.VALIDATION_STARTED)
        return None if held is None else cls(held["step"], held["looks"], cpu_copy(student.weights))
