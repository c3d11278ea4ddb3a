"""The types that modules exchange: conditions, batches and rollouts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Protocol, TypeVar, runtime_checkable

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, cat

from unified_trainer.basics.errors import NotFiniteError
from unified_trainer.basics.requests import Request

Latents = Float[Tensor, "b c t h w"]
Video = Float[Tensor, "b 3 frames height width"]  # in [0, 1]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
PerSample = Float[Tensor, " b"]
PerFrame = Float[Tensor, "b t"]  # t latent frames
WITHOUT_FLOAT64 = ("npu",)  # types of devices
PER_FRAME = ("actions",)  # tensors of a condition with a row for each pixel frame of the video, [b, frames, ...]
T = TypeVar("T")


def widest(device: torch.device) -> torch.dtype:
    """Return float64, or float32 on a device whose kernels refuse float64.

    There a log-density of order 1 is rounded by 6e-8: an error of the log-ratio that is .6% of its spread at D = 1e6.
    """
    return torch.float32 if device.type in WITHOUT_FLOAT64 else torch.float64


def check_finite(samples: Latents, student: str) -> None:
    """Raise NotFiniteError, before a scorer sees them, for samples that hold NaN or infinity; `student` made them."""
    if not bool(samples.isfinite().all()):
        raise NotFiniteError(
            f"the student's samples are not finite ({student}): go back to an older checkpoint, RUN@STEP, or lower "
            "student.learning_rate"
        )


def of_kind(kind: type[T], value: object) -> T:
    """Return a value that is of a kind wherever this is called; TypeError, which is a bug, if it is not."""
    if not isinstance(value, kind):
        raise TypeError(f"expected {kind.__name__}, not {type(value).__name__}")
    return value


def take_rows(x: Tensor, rows: Sequence[int]) -> Tensor:
    """Return these rows of x, without waiting for its device; consecutive ones are a view."""
    index = list(rows)
    if index and not 0 <= min(index) <= max(index) < len(x):
        raise IndexError(f"rows {min(index)} to {max(index)} of a tensor of {len(x)} rows")
    if index and index == list(range(index[0], index[0] + len(index))):
        return x[index[0] : index[0] + len(index)]
    return x.index_select(0, torch.tensor(index, dtype=torch.int64).to(x.device, non_blocking=True))


def take_frames(x: Float[Tensor, "b c t h w"], frames: Sequence[int]) -> Float[Tensor, "b c some h w"]:
    """Return these latent frames of x, without waiting for its device; consecutive ones are a view."""
    return take_rows(x.transpose(0, 2), frames).transpose(0, 2)


@dataclass(frozen=True, eq=False)
class Condition:
    """The inputs of b samples, such as encoded text: tensors by names that only the model family knows."""

    tensors: Mapping[str, Shaped[Tensor, "_ ..."]]  # the first axis is the sample

    def __post_init__(self) -> None:
        lengths = {name: len(x) for name, x in self.tensors.items()}
        if len(set(lengths.values())) != 1:
            raise ValueError(f"the tensors of a condition must have a row for each sample, but have {lengths}")

    def __len__(self) -> int:
        return len(next(iter(self.tensors.values())))

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def map(self, fn: Callable[[Tensor], Tensor]) -> "Condition":
        """Apply `fn` to every tensor; their first axis is the sample."""
        return Condition({name: fn(x) for name, x in self.tensors.items()})

    def take(self, rows: Sequence[int]) -> "Condition":
        """Return the samples of these rows, in this order; a row may occur more than once."""
        return self.map(lambda x: take_rows(x, rows))

    def expand(self, samples: int) -> "Condition":
        """Return the one sample of this condition as many samples, which share its memory."""
        return self.map(lambda x: x.expand(samples, *x.shape[1:]))

    @property
    def by_frame(self) -> dict[str, Tensor]:
        """The tensors with a row for each pixel frame."""
        return {name: self.tensors[name] for name in PER_FRAME if name in self.tensors}

    def window(self, start: int, stop: int, frames: int) -> "Condition":
        """Return the condition of latent frames `start` to `stop` of a video of so many.

        The first of them counts as one pixel frame, the last that it holds, as that of a clip does.
        """

        def cut(x: Float[Tensor, "b all k"]) -> Float[Tensor, "b own k"]:
            each = (x.shape[1] - 1) // max(1, frames - 1)  # pixel frames of a latent frame
            return x[:, each * start : each * (stop - 1) + 1]

        return Condition({**self.tensors, **{name: cut(x) for name, x in self.by_frame.items()}})

    def updated(self, other: "Condition") -> "Condition":
        """Return the same samples with the tensors of another condition, which replace those of equal names."""
        return Condition({**self.tensors, **other.tensors})

    def cat(self, other: "Condition") -> "Condition":
        """Return the samples of both, in order; ValueError unless they have the same names."""
        if self.tensors.keys() != other.tensors.keys():
            raise ValueError(f"conditions of {sorted(self.tensors)} and of {sorted(other.tensors)} cannot be joined")
        return Condition({name: cat([x, other[name]]) for name, x in self.tensors.items()})


@runtime_checkable
class Stateful(Protocol):
    """An object whose state is in the checkpoints, with torch's names."""

    def state_dict(self) -> dict[str, Tensor]:
        """Return tensors by name, to be written, or filled in place before `load_state_dict` is called."""

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore from tensors by name."""


@dataclass(frozen=True)
class Trajectory:
    """States of a teacher's ODE at l noise levels, which all b samples share, and where it ends; normalised latents."""

    sigmas: Float[Tensor, " l"]  # noise levels of the states in (0, 1], falling; float64
    states: Float[Tensor, "b l c t h w"]
    end: Latents  # the state at noise level 0

    def map(self, fn: Callable[[Tensor], Tensor]) -> "Trajectory":
        """Apply `fn` to states and end; their first axis is the sample."""
        return replace(self, states=fn(self.states), end=fn(self.end))

    def cat(self, other: "Trajectory") -> "Trajectory":
        """Return the samples of both, in order; they must have equal noise levels."""
        return replace(self, states=cat([self.states, other.states]), end=cat([self.end, other.end]))


@dataclass(frozen=True)
class Batch:
    """b samples to train on or to generate; all fields list the same samples in the same order."""

    requests: tuple[Request, ...]
    prompt_ids: tuple[int, ...]  # samples with equal ids are one group
    sample_ids: tuple[int, ...]  # position in the batch of the whole step, over all ranks; it keys the noise
    latent_shape: tuple[int, int, int, int]  # channels, latent frames, height, width
    cond: Condition
    uncond: Condition  # the condition of the unconditional branch of guidance
    latents: Latents | None = None  # clean latents, for methods that learn from data
    trajectory: Trajectory | None = None  # of a teacher, for methods that learn from stored ones
    rejected: Latents | None = None  # clean latents that are preferred less than `latents`, for methods of pairs

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def prompts(self) -> tuple[str, ...]:
        """The texts of the samples."""
        return tuple(request.prompt for request in self.requests)

    def split(self, size: int) -> list["Batch"]:
        """Return consecutive parts of `size` samples; the last may be smaller."""
        return [self[slice(i, i + size)] for i in range(0, len(self), size)]

    def window(self, start: int, stop: int, frames: int) -> "Batch":
        """Return the samples with the conditions of latent frames `start` to `stop`: see `Condition.window`."""
        cond, uncond = (each.window(start, stop, frames) for each in (self.cond, self.uncond))
        return replace(self, cond=cond, uncond=uncond)

    def with_frames_of(self, other: "Batch") -> "Batch":
        """Return the samples with what another batch has for each pixel frame."""
        cond, uncond = (
            replace(own, tensors={**own.tensors, **other.cond.by_frame}) for own in (self.cond, self.uncond)
        )
        return replace(self, cond=cond, uncond=uncond)

    def __getitem__(self, part: slice) -> "Batch":
        return self.take(range(len(self))[part])

    def take(self, rows: Sequence[int]) -> "Batch":
        """Return the samples of these rows, in this order; a row may occur more than once."""
        index = list(rows)
        return replace(
            self,
            requests=tuple(self.requests[i] for i in index),
            prompt_ids=tuple(self.prompt_ids[i] for i in index),
            sample_ids=tuple(self.sample_ids[i] for i in index),
            cond=self.cond.take(index),
            uncond=self.uncond.take(index),
            latents=None if self.latents is None else take_rows(self.latents, index),
            trajectory=None if self.trajectory is None else self.trajectory.map(lambda x: take_rows(x, index)),
            rejected=None if self.rejected is None else take_rows(self.rejected, index),
        )

    def cat(self, other: "Batch") -> "Batch":
        """Return the samples of both, in order."""
        return replace(
            self,
            requests=self.requests + other.requests,
            prompt_ids=self.prompt_ids + other.prompt_ids,
            sample_ids=self.sample_ids + other.sample_ids,
            cond=self.cond.cat(other.cond),
            uncond=self.uncond.cat(other.uncond),
            latents=None if self.latents is None else cat([self.latents, other.latents]),
            trajectory=self.trajectory and other.trajectory and self.trajectory.cat(other.trajectory),
            rejected=None if self.rejected is None else cat([self.rejected, other.rejected]),
        )


@dataclass(frozen=True)
class Rollout:
    """The s kept transitions of b samples and their final latents, in float32; log_probs in the widest dtype of
    the device: float64, on an NPU float32.
    """

    states: Float[Tensor, "b s_plus_1 c t h w"]  # before the first transition and after each
    log_probs: Float[Tensor, "b s"]  # log-density of each transition, averaged over its elements
    x0: Latents  # final prediction of the clean latents

    @classmethod
    def from_x0(cls, x0: Latents) -> "Rollout":
        """Return a rollout of deterministic samples: x0 and zero transitions."""
        return cls(x0[:, None][:, :0], x0.new_zeros(len(x0), 0, dtype=widest(x0.device)), x0)

    def state(self, number: int, rows: Sequence[int]) -> Latents:
        """Return, of these samples, state `number`: that before the window's transition of this number."""
        return take_rows(self.states[:, number], rows)

    def end(self, rows: Sequence[int]) -> Latents:
        """Return the final x0 of these samples."""
        return take_rows(self.x0, rows)

    def take(self, rows: Sequence[int]) -> "Rollout":
        """Return the samples of these rows, in this order."""
        return Rollout(**{f.name: take_rows(getattr(self, f.name), rows) for f in fields(self)})

    @classmethod
    def cat(cls, parts: Sequence["Rollout"]) -> "Rollout":
        """Return the samples of all parts, in order; they must have the same number of transitions.

        A single part is not copied.
        """
        if len(parts) == 1:
            return parts[0]
        return cls(**{f.name: cat([getattr(part, f.name) for part in parts]) for f in fields(cls)})
