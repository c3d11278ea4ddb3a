"""The kinds of rows in FastVideo's parquet files that are trained on: clips, and trajectories of a teacher.

A tensor NAME is three columns: NAME_bytes, NAME_shape and NAME_dtype.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from unified_trainer.basics.errors import UserError
from unified_trainer.data.fastvideo import FLOATS, IMAGE_TENSORS, NETWORK_TIME, columns_of
from unified_trainer.numerics.flow import unshift_sigma

LATENT = columns_of("vae_latent")
STATES = columns_of("trajectory_latents")
TIMES = columns_of("trajectory_timesteps")
NOISE = columns_of("initial_noise")
SAME_LEVEL = 1e-5  # largest difference of two noise levels that are taken as one; files hold them as float32
SHOWN = 4  # noise levels that a message names
Shape = tuple[int, int, int, int]
Images = Mapping[str, tuple[int, ...]]  # shapes by the names of a condition's tensors
Stored = Callable[[Sequence[str]], Tensor]  # the three columns of a tensor -> that of a row, in float32


class RowKind(Protocol):
    """A kind of rows: the columns they have, their checks, and the value of a row that is trained on."""

    tensors: tuple[str, ...]  # columns that are read for a batch, besides text embeddings
    small: tuple[str, ...]  # columns that are read of all rows before training
    images: Mapping[str, tuple[str, ...]]  # columns of the tensors of condition images, by the names of a condition
    shapes: int  # that latents may have

    def check_columns(self, file: Path, columns: Collection[str]) -> None:
        """Raise UserError for a file of another kind."""

    def fault(self, place: str, row: Mapping[str, Any]) -> str:
        """Return what is wrong with a row as far as small columns tell; raise UserError for what is wrong with all."""

    def value(self, stored: Stored, columns: Collection[str]) -> Tensor:
        """Return what a batch holds of a row of a file with these columns."""


class ClipRows:
    """Kinds t2v and i2v: raw latents of a clip, and what was encoded of its first frame where a student needs it."""

    def __init__(self, latent_shape: Shape, images: Images | None = None, *others: "ClipRows") -> None:
        """`images` holds the shapes of the tensors of the student's condition image; `others` have other latents."""
        self._latent_shape, self.shapes = latent_shape, 1 + len(others)
        self._others: dict[tuple[int, ...], ClipRows] = {kind._latent_shape: kind for kind in others}
        self.images: Mapping[str, tuple[str, ...]] = {name: columns_of(IMAGE_TENSORS[name]) for name in images or {}}
        self._shapes = {self.images[name]: shape for name, shape in (images or {}).items()}
        self.tensors = (*LATENT, *chain(*self.images.values()))
        self.small = (*LATENT[1:], *chain(*(columns[1:] for columns in self.images.values())))

    def check_columns(self, file: Path, columns: Collection[str]) -> None:
        missing = [name for name in ("id", "caption", *LATENT) if name not in columns]
        if STATES[0] in columns:
            raise UserError(f"data.path: {file} holds trajectories of a teacher (kind ode) instead of clips (kind t2v)")
        if missing == [*LATENT]:
            raise UserError(
                f"data.path: {file} holds captions without clips; methods that train on none take --prompts"
            )
        if missing:
            raise UserError(f"data.path: columns {', '.join(missing)} are missing in {file}; expected FastVideo's t2v")
        if missing := [name for name in self.tensors if name not in columns]:
            raise UserError(
                f"data.path: {file} holds clips without the encoded first frames that the student needs (columns "
                f"{', '.join(missing)}): preprocess the videos with --model of this student, or give the videos"
            )

    def fault(self, place: str, row: Mapping[str, Any]) -> str:
        shape, dtype = (row[name] for name in LATENT[1:])
        if other := self._others.get(tuple(shape or ())):
            return other.fault(place, row)
        if tuple(shape or ()) != self._latent_shape:
            made = " or ".join(map(str, (self._latent_shape, *self._others)))
            return f"has latents {tuple(shape or ())}, the run's video.* settings make {made} (see data.buckets)"
        if dtype not in FLOATS:
            return f"has latents of type {dtype}, not {', '.join(FLOATS)}"
        for (_, shape, dtype), expected in self._shapes.items():
            if tuple(row[shape] or ()) != expected or row[dtype] not in FLOATS:
                return f"has {shape} {tuple(row[shape] or ())} of type {row[dtype]}, the student takes {expected}"
        return ""

    def value(self, stored: Stored, columns: Collection[str]) -> Float[Tensor, "c t h w"]:
        """Return the raw latents."""
        return stored(LATENT)


class TrajectoryRows:
    """Kind ode: states of a teacher's ODE, of which those at the student's noise levels are trained on.

    State s of trajectory_latents [1, s, c, t, h, w] is the one after the step from timestep s, 1000 sigma: it is at the
    level of timestep s + 1, and the last is at 0. The state at the first timestep is initial_noise [c, t, h, w], which
    files of FastVideo lack.
    """

    tensors: tuple[str, ...] = (*STATES, *TIMES, *NOISE)
    small: tuple[str, ...] = (*STATES[1:], *TIMES, *NOISE[1:])
    images: Mapping[str, tuple[str, ...]] = {}
    shapes = 1

    def __init__(self, latent_shape: Shape, levels: Float[Tensor, " l"], shift: float) -> None:
        """`levels` are the student's falling noise levels without 0, and `shift` is that of its sampler."""
        self._latent_shape, self.levels, self._shift = latent_shape, levels, shift

    def check_columns(self, file: Path, columns: Collection[str]) -> None:
        missing = [name for name in ("id", "caption", *STATES, *TIMES) if name not in columns]
        if LATENT[0] in columns:
            raise UserError(f"data.path: {file} holds clips (kind t2v) instead of trajectories of a teacher (kind ode)")
        if missing:
            raise UserError(
                f"data.path: columns {', '.join(missing)} are missing in {file}; expected FastVideo's ode_trajectory, "
                "which preprocess --trajectories writes"
            )

    def fault(self, place: str, row: Mapping[str, Any]) -> str:
        shape, dtype = (row[name] for name in STATES[1:])
        shape = tuple(shape or ())
        if len(shape) < 5 or shape[-4:] != self._latent_shape or math.prod(shape[:-5]) != 1:
            return f"has states {shape}, the run's video.* settings make (1, n, {str(self._latent_shape)[1:]}"
        if dtype not in FLOATS:
            return f"has states of type {dtype}, not {', '.join(FLOATS)}"
        try:
            data, _, kind = (row[name] for name in TIMES)
            times = np.frombuffer(data, np.dtype(kind)).astype(np.float64)
        except (TypeError, ValueError) as error:
            return f"has trajectory_timesteps that cannot be read ({error})"
        if len(times) != shape[-5] or (np.diff(times, append=0.0) >= 0).any():
            return f"has {len(times)} noise levels for {shape[-5]} states, which must be as many and fall to above 0"
        has_noise = NOISE[1] in row
        if has_noise and tuple(row[NOISE[1]] or ()) != self._latent_shape:
            return f"has initial noise {tuple(row[NOISE[1]] or ())}, its states are {self._latent_shape}"
        held = torch.from_numpy(times) / NETWORK_TIME
        self._check_levels(place, held if has_noise else held[1:])
        return ""

    def _check_levels(self, place: str, held: Float[Tensor, " n"]) -> None:
        """Raise UserError unless there are states at all levels of the student."""
        missing = [level for level in self.levels if not ((held - level).abs() <= SAME_LEVEL).any()]
        if not missing:
            return
        below = [level for level in self.levels if level not in missing]
        nearest = [held[(held - level).abs().argmin()] for level in missing] if len(held) else []
        way_out = "make trajectories for this sampler: preprocess PROMPTS OUT --trajectories"
        near = sorted({float(level) for level in (*below, *nearest)}, reverse=True)
        if len(near) == len(self.levels):
            sigmas = " ".join(f"{float(unshift_sigma(level, self._shift)):.6g}" for level in near)
            way_out += f"; or train a student of levels that it has: --sampler.step-sigmas {sigmas}"
        raise UserError(
            f"data.path: {place} has no state at noise level {_listed(missing)} of the student; near them it has "
            f"{_listed(nearest) or 'none'}. {way_out[0].upper()}{way_out[1:]}"
        )

    def value(self, stored: Stored, columns: Collection[str]) -> Float[Tensor, "l_and_end c t h w"]:
        """Return the states at the student's levels, and the end."""
        states = stored(STATES).reshape(-1, *self._latent_shape)
        held = stored(TIMES).flatten().double() / NETWORK_TIME
        if NOISE[0] in columns:
            states = torch.cat([stored(NOISE)[None], states])
        else:
            held = held[1:]
        rows = [int((held - level).abs().argmin()) for level in self.levels]
        return states[[*rows, -1]]


def _listed(levels: Sequence[Tensor]) -> str:
    rest = f" and {len(levels) - SHOWN} more" if len(levels) > SHOWN else ""
    return ", ".join(f"{float(level):.6g}" for level in levels[:SHOWN]) + rest
