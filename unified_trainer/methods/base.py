"""What a method is: roles in, a generator of losses out."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Protocol, runtime_checkable

from torch import Tensor

from unified_trainer.data.batch_plan import BatchPlan
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.parallel.random import Streams
from unified_trainer.roles.experts import ExpertLayout
from unified_trainer.sampling import SamplerConfig
from unified_trainer.types import Batch


@dataclass(frozen=True)
class Loss:
    """One backward pass, and whether its role moves afterwards.

    The values of the losses up to a move must sum to the mean over this generator's samples; the trainer divides by
    the number of micro_batches. Metrics are averaged over micro_batches, rounds and ranks: a number counts once, a vector as
    many times as it has elements. Names ending in _max are maxima.
    """

    role: str
    value: Tensor
    moves: bool = True
    metrics: dict[str, float | Tensor] = field(default_factory=dict)
    words: tuple[str, ...] = ()  # what a person should be told of this training step; each said once


class Algorithm(Protocol):
    """A method's own settings."""

    @property
    def needs_clips(self) -> bool:
        """Whether batches bring clean latents."""
        ...

    def check(self, sampler: SamplerConfig) -> None:
        """Raise ValueError, naming the key, for what cannot be; called before any weight is loaded."""
        ...

    def check_experts(self, sampler: SamplerConfig, layouts: Mapping[str, ExpertLayout]) -> None:
        """The same for what each role is made of, one network or two experts."""
        ...

    def plan(self) -> BatchPlan:
        """How a training step's batch divides."""
        ...


class WithOptionalRoles(Protocol):
    """What the settings of a method besides say, whose constructor has roles with a default."""

    @property
    def optional_roles(self) -> tuple[str, ...]:
        """Which of them to build."""
        ...


@runtime_checkable
class Stateful(Protocol):
    """What a checkpoint holds the state of; a method may be one."""

    def state_dict(self) -> dict[str, Tensor]:
        """Tensors by name, for a checkpoint to write, or to fill in place."""
        ...

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take what of this state, now filled, is not a tensor of one's own."""
        ...


class Method(Protocol):
    """An algorithm. Its roles are its constructor's keyword-only arguments."""

    trained_for_sampler: ClassVar[bool]  # whether the student is trained for the run's sampler, which then goes with it

    def micro_batches(self, batch: Batch) -> list[Batch]:
        """The parts of this rank's batch that `step` is called on, in lockstep."""
        ...

    def step(self, batch: Batch, step: int, rng: Streams, mesh: Mesh) -> Iterator[Loss]: ...
