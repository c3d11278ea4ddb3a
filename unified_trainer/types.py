"""What passes between the parts: conditions, batches, rollouts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Protocol, Self, runtime_checkable

from jaxtyping import Float
from torch import Tensor, cat

Latents = Float[Tensor, "b c t h w"]
Video = Float[Tensor, "b 3 frames height width"]  # in [0, 1]
PerSample = Float[Tensor, " b"]
PerFrame = Float[Tensor, "b t"]


class Condition(Protocol):
    """What a family conditions on; opaque to everything but the family."""

    def __len__(self) -> int: ...

    def map(self, fn: Callable[[Tensor], Tensor]) -> Self:
        """`fn` applied to every tensor; the first axis is the sample."""
        ...

    def cat(self, other: Self) -> Self:
        """The samples of both, in order."""
        ...


@runtime_checkable
class Stateful(Protocol):
    """An object whose state is in the checkpoints, with torch's names."""

    def state_dict(self) -> dict[str, Tensor]:
        """Return tensors by name, to be written, or filled in place before `load_state_dict` is called."""
        ...

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore from tensors by name."""
        ...


@dataclass(frozen=True)
class Batch:
    """Samples to train on or to generate; all fields run over the same samples."""

    prompts: tuple[str, ...]
    prompt_ids: tuple[int, ...]
    sample_ids: tuple[int, ...]  # position in the whole step's batch: keys the noise, whatever rank holds the sample
    latent_shape: tuple[int, int, int, int]  # channels, latent frames, height, width
    cond: Condition
    uncond: Condition
    latents: Latents | None = None  # clean, for methods that learn from data

    def __len__(self) -> int:
        return len(self.prompts)

    def split(self, size: int) -> list["Batch"]:
        """Consecutive parts of `size` samples."""
        return [self[slice(i, i + size)] for i in range(0, len(self), size)]

    def __getitem__(self, part: slice) -> "Batch":
        return self.take(range(len(self))[part])

    def take(self, rows: Sequence[int]) -> "Batch":
        """These samples, in this order; one may come more than once."""
        index = list(rows)
        return replace(
            self,
            prompts=tuple(self.prompts[i] for i in index),
            prompt_ids=tuple(self.prompt_ids[i] for i in index),
            sample_ids=tuple(self.sample_ids[i] for i in index),
            cond=self.cond.map(lambda x: x[index]),
            uncond=self.uncond.map(lambda x: x[index]),
            latents=None if self.latents is None else self.latents[index],
        )

    def cat(self, other: "Batch") -> "Batch":
        """The samples of both, in order."""
        return replace(
            self,
            prompts=self.prompts + other.prompts,
            prompt_ids=self.prompt_ids + other.prompt_ids,
            sample_ids=self.sample_ids + other.sample_ids,
            cond=self.cond.cat(other.cond),
            uncond=self.uncond.cat(other.uncond),
            latents=None if self.latents is None else cat([self.latents, other.latents]),
        )


@dataclass(frozen=True)
class Rollout:
    """What the policy did: the s stochastic transitions of b samples, stored in float32."""

    states: Float[Tensor, "b s_plus_1 c t h w"]  # before the first of them, and after each
    log_probs: Float[Tensor, "b s"]
    x0: Latents  # the final clean prediction

    @classmethod
    def from_x0(cls, x0: Latents) -> "Rollout":
        """One without stochastic transitions."""
        return cls(x0[:, None][:, :0], x0.new_zeros(len(x0), 0), x0)

    def take(self, rows: Sequence[int]) -> "Rollout":
        """These samples, in this order."""
        return Rollout(**{f.name: getattr(self, f.name)[list(rows)] for f in fields(self)})

    @classmethod
    def cat(cls, parts: Sequence["Rollout"]) -> "Rollout":
        return cls(**{f.name: cat([getattr(part, f.name) for part in parts]) for f in fields(cls)})
