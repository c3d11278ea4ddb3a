"""Roles that generate chunk by chunk: each chunk attends to the finished chunks before it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import torch
from jaxtyping import Float
from torch import Tensor

from unified_trainer.basics.types import Batch, Condition, Latents, PerFrame, PerSample
from unified_trainer.models.base import Cache, CausalVideoModel
from unified_trainer.numerics.chunks import ChunkConfig
from unified_trainer.numerics.flow import GuidanceScale
from unified_trainer.parallel.random import Streams
from unified_trainer.roles.experts import Expert, Pick, expert_at, route
from unified_trainer.roles.role import Frozen, Role, Trainable
from unified_trainer.roles.weight_copy import WeightCopy


class Causal(Role):
    """A role over a causal model."""

    @contextmanager
    def running(self, expert: Expert = "") -> Iterator[CausalVideoModel]:
        """Yield one network as `Role.running` does; it was opened as a causal one."""
        with super().running(expert) as model:
            yield cast(CausalVideoModel, model)

    def masked_velocity(
        self,
        x_t: Latents,
        sigma: PerSample | PerFrame,
        cond: Condition,
        chunks: ChunkConfig,
        clean: Latents | None = None,
    ) -> Latents:
        """Return the velocity of all chunks from one masked pass.

        Chunks attend to earlier chunks of `x_t`, or to those of `clean` (teacher forcing). Where the chunks of a sample
        need both experts, each expert runs on all of them, since each has a KV cache of its own.
        """

        def call(expert: Expert, pick: Pick) -> tuple[Latents]:
            past = None if clean is None else pick(clean)
            with self.running(expert) as model:
                return (model.velocity_masked(pick(x_t), pick(sigma), cond.map(pick), chunks, past),)

        return route(self._row_masks(sigma), call)[0]

    def attending_to(self, clean: Latents, chunks: ChunkConfig) -> "TeacherForced":
        """Return this role with chunks that attend to the clean chunks before them, in one masked pass."""
        return TeacherForced(self, clean, chunks)

    def open_cache(
        self,
        cond: Condition,
        uncond: Condition,
        chunks: ChunkConfig,
        guidance_scale: GuidanceScale,
        sigmas: Float[Tensor, " calls"],
    ) -> "KVCache":
        """Return an empty KV cache of one rollout; `sigmas` are the noise levels at which it will be read."""
        caches = {}
        for expert in self.running_at(sigmas):
            with self.running(expert) as model:
                caches[expert] = model.open_cache(chunks)
        return KVCache(self, caches, cond, uncond, guidance_scale)

    def running_at(self, sigmas: Float[Tensor, " calls"]) -> list[Expert]:
        """Return the networks that run at these noise levels."""
        wanted = {expert_at(sigma, self.boundary) for sigma in sigmas.tolist()}
        return [expert for expert in self.experts if expert in wanted]

    def cache_bytes(
        self,
        latent_shape: tuple[int, int, int, int],
        chunks: ChunkConfig,
        dtype: torch.dtype,
        sigmas: Float[Tensor, " calls"],
    ) -> int:
        """Return the bytes of one sample's full KV cache, one for each network that reads it."""
        size = 0
        for expert in self.running_at(sigmas):
            with self.running(expert) as model:
                size += model.cache_bytes(latent_shape, chunks, dtype)
        return size


class TeacherForced:
    """A causal role given the clean chunks of its samples, with the velocities of a bidirectional role."""

    def __init__(self, role: Causal, clean: Latents, chunks: ChunkConfig) -> None:
        self._role, self._clean, self._chunks = role, clean, chunks

    def velocity(self, x_t: Latents, sigma: PerSample | PerFrame, cond: Condition) -> Latents:
        """Return the velocity of all chunks, each at its own noise level if `sigma` has one per frame."""
        return self._role.masked_velocity(x_t, sigma, cond, self._chunks, self._clean)

    def guided_velocity(
        self,
        x_t: Latents,
        sigma: PerSample | PerFrame,
        cond: Condition,
        uncond: Condition,
        guidance_scale: GuidanceScale,
    ) -> Latents:
        """Return uncond + w (cond - uncond), both from one batched pass; w = 1 runs cond alone."""
        if guidance_scale == 1:
            return self.velocity(x_t, sigma, cond)
        both = TeacherForced(self._role, torch.cat([self._clean] * 2), self._chunks).velocity(
            torch.cat([x_t, x_t]), torch.cat([sigma, sigma]), cond.cat(uncond)
        )
        conditional, unconditional = both.chunk(2)
        return self._role.guide(conditional, unconditional, self._role.scale(sigma, guidance_scale))


class CausalStudent(Causal, Trainable):
    """A trainable causal role."""


class CausalFrozen(Causal, Frozen):
    """A frozen causal role."""


class CausalWeightCopy(Causal, WeightCopy):
    """A causal role that keeps a copy of a trained role's weights."""


def causal_form(kind: type[Role]) -> type[Causal]:
    """Return the kind of role over a causal model that matches a kind over a bidirectional one."""
    if issubclass(kind, Causal):
        return kind
    return {Trainable: CausalStudent, Frozen: CausalFrozen, WeightCopy: CausalWeightCopy}[kind]


def by_chunk(name: str, batch: Batch, rng: Streams, chunks: ChunkConfig) -> PerFrame:
    """Draw a uniform number in [0, 1) for each chunk of each sample, as one value per latent frame."""
    frames = batch.latent_shape[1]
    drawn = [rng.uniform(f"{name} {i}", batch.sample_ids) for i in range(len(chunks.ranges(frames)))]
    return chunks.by_frame(drawn, frames)


class KVCache:
    """Keys and values of the finished chunks of one rollout; each expert has those that it computed itself."""

    def __init__(
        self,
        role: Causal,
        caches: dict[Expert, Cache],
        cond: Condition,
        uncond: Condition,
        guidance_scale: GuidanceScale,
    ) -> None:
        self._role, self._caches, self._scale, self._uncond = role, caches, guidance_scale, uncond
        self._added: dict[str, torch.Tensor] = {}
        self.set_condition(cond)

    def set_condition(self, cond: Condition) -> None:
        """Switch the prompt for later chunks; cached keys and values of finished chunks, and added frames, stay."""
        self._given = cond
        self._join()
        for cache in self._caches.values():
            cache.start_prompt()

    def add_frames(self, name: str, values: Float[Tensor, "b frames k"]) -> None:
        """Append what the condition's tensor of this name has for further pixel frames, in both branches."""
        values = values.to(self._role.device)
        known = {**self._given.tensors, **self._added}.get(name, values[:, :0])
        self._added[name] = torch.cat([known, values.to(known)], 1)
        self._join()

    def velocity(self, x_t: Latents, sigma: Float[Tensor, ""]) -> Latents:
        """Return the guided velocity of the next chunk at one noise level; its gradient does not reach the cache."""
        level: PerSample = sigma.expand(len(x_t))
        expert = expert_at(float(sigma), self._role.boundary)
        with self._role.running(expert) as model:
            velocity = model.velocity_cached(self._both(x_t), self._both(level), self._cond, self._caches[expert])
        if self._scale == 1:
            return velocity
        conditional, unconditional = velocity.chunk(2)
        return self._role.guide(conditional, unconditional, self._role.scale(level, self._scale))

    def append(self, x: Latents, at: int | None = None) -> None:
        """Append a finished chunk `x`, which is at the context's noise level; `at` is its first frame in the video.

        By default it follows the chunk before it.
        """
        for expert, cache in self._caches.items():
            if at is not None:
                cache.seen = at
            with self._role.running(expert) as model:
                model.append(self._both(x.detach()), self._cond, cache)

    def _join(self) -> None:
        cond, uncond = (Condition({**each.tensors, **self._added}) for each in (self._given, self._uncond))
        self._cond = cond if self._scale == 1 else cond.cat(uncond)

    def _both(self, x: torch.Tensor) -> torch.Tensor:
        """With guidance, cond and uncond run in one pass, each with a cache of its own."""
        return x if self._scale == 1 else torch.cat([x, x])
