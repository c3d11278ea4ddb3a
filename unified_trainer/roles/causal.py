"""Roles that generate chunk by chunk, each looking back on the finished ones."""

import torch
from jaxtyping import Float
from torch import Tensor

from unified_trainer.models.base import Cache
from unified_trainer.numerics.chunks import ChunkConfig
from unified_trainer.numerics.flow import GuidanceScale, guide
from unified_trainer.roles.experts import Rows, Side, ask, side_of
from unified_trainer.roles.role import Frozen, Role, Trainable
from unified_trainer.roles.weight_copy import WeightCopy
from unified_trainer.types import Condition, Latents, PerFrame, PerSample


class Causal(Role):
    """A role over a causal model."""

    def masked_velocity(
        self,
        x_t: Latents,
        sigma: PerSample | PerFrame,
        cond: Condition,
        chunks: ChunkConfig,
        clean: Latents | None = None,
    ) -> Latents:
        """All chunks in one pass, looking back on each other as they are or on clean ones.

        Where chunks of a sample are on both sides of a boundary, each expert makes all of them for its own to look
        back on, as each has a cache of its own.
        """

        def of(side: Side, rows: Rows) -> tuple[Latents]:
            past = None if clean is None else clean[rows]
            with self.running(side) as model:
                return (model.velocity_masked(x_t[rows], sigma[rows], cond.map(lambda x: x[rows]), chunks, past),)

        return ask(self._shares(sigma), of)[0]

    def open_cache(
        self,
        batch_cond: Condition,
        uncond: Condition,
        chunks: ChunkConfig,
        guidance_scale: GuidanceScale,
        levels: Float[Tensor, " calls"],
    ) -> "KVCache":
        """An empty past: no chunk is finished yet. `levels` are the noise levels at which it will be looked at."""
        caches = {}
        for side in self.running_at(levels):
            with self.running(side) as model:
                caches[side] = model.open_cache(chunks)
        return KVCache(self, caches, batch_cond, uncond, guidance_scale)

    def running_at(self, levels: Float[Tensor, " calls"]) -> list[Side]:
        """The networks that run at these noise levels."""
        wanted = {side_of(level, self.boundary) for level in levels.tolist()}
        return [side for side in self.sides if side in wanted]

    def cache_bytes(
        self,
        latent_shape: tuple[int, int, int, int],
        chunks: ChunkConfig,
        dtype: torch.dtype,
        levels: Float[Tensor, " calls"],
    ) -> int:
        """Memory of one sample's past, with a cache for each network that looks at it."""
        size = 0
        for side in self.running_at(levels):
            with self.running(side) as model:
                size += model.cache_bytes(latent_shape, chunks, dtype)
        return size


class CausalStudent(Causal, Trainable):
    """A trainable one."""


class CausalFrozen(Causal, Frozen):
    """One that nobody moves."""


class CausalWeightCopy(Causal, WeightCopy):
    """One that only follows."""


def causal_form(kind: type[Role]) -> type[Causal]:
    """The same kind of role over a causal model."""
    if issubclass(kind, Causal):
        return kind
    return {Trainable: CausalStudent, Frozen: CausalFrozen, WeightCopy: CausalWeightCopy}[kind]


class KVCache:
    """The finished chunks of one rollout, as the next chunk sees them: each expert those that it made itself."""

    def __init__(
        self,
        role: Causal,
        caches: dict[Side, Cache],
        cond: Condition,
        uncond: Condition,
        guidance_scale: GuidanceScale,
    ) -> None:
        self._role, self._caches, self._scale, self._uncond = role, caches, guidance_scale, uncond
        self._cond = cond if guidance_scale == 1 else cond.cat(uncond)

    def velocity(self, x_t: Latents, sigma: Float[Tensor, ""]) -> Latents:
        """Of the next chunk, at one noise level, guided; with gradient to the weights, not to the past."""
        level: PerSample = sigma.expand(len(x_t))
        side = side_of(float(sigma), self._role.boundary)
        with self._role.running(side) as model:
            velocity = model.velocity_cached(self._wide(x_t), self._wide(level), self._cond, self._caches[side])
        return velocity if self._scale == 1 else guide(*velocity.chunk(2), self._role.scale(level, self._scale))

    def append(self, x: Latents) -> None:
        """The next chunk is finished: it is `x`, at the context's noise level."""
        for side, cache in self._caches.items():
            with self._role.running(side) as model:
                model.append(self._wide(x.detach()), self._cond, cache)

    def set_condition(self, cond: Condition) -> None:
        """The chunks to come have another condition; what was seen stays as it was seen."""
        self._cond = cond if self._scale == 1 else cond.cat(self._uncond)
        for cache in self._caches.values():
            cache.start_prompt()

    def _wide(self, x: torch.Tensor) -> torch.Tensor:
        """With guidance both conditions run in one pass, each with a past of its own."""
        return x if self._scale == 1 else torch.cat([x, x])
