"""Roles that generate chunk by chunk, each looking back on the finished ones."""

import torch

from unified_trainer.chunks import ChunkConfig
from unified_trainer.flow import guide
from unified_trainer.models.base import Cache, CausalVideoModel
from unified_trainer.roles.role import Follower, Frozen, Role, Trainable
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
        """All chunks in one pass, looking back on each other as they are or on clean ones."""
        with self.running() as model:
            return model.velocity_masked(x_t, sigma, cond, chunks, clean)

    def look_back(self, batch_cond: Condition, uncond: Condition, chunks: ChunkConfig, guidance_scale: float) -> "Past":
        """An empty past: no chunk is finished yet."""
        with self.running() as model:
            return Past(self, model, model.open_cache(chunks), batch_cond, uncond, guidance_scale)


class CausalStudent(Causal, Trainable):
    """A trainable one."""


class CausalFrozen(Causal, Frozen):
    """One that nobody moves."""


class CausalFollower(Causal, Follower):
    """One that only follows."""


CAUSAL: dict[type[Role], type[Causal]] = {
    Trainable: CausalStudent,
    Frozen: CausalFrozen,
    Follower: CausalFollower,
}  # the causal form of each kind of role


class Past:
    """The finished chunks of one rollout, as the next chunk sees them."""

    def __init__(
        self,
        role: Causal,
        model: CausalVideoModel,
        cache: Cache,
        cond: Condition,
        uncond: Condition,
        guidance_scale: float,
    ) -> None:
        self._role, self._model, self._cache, self._scale = role, model, cache, guidance_scale
        self._cond = cond if guidance_scale == 1 else cond.cat(uncond)

    def velocity(self, x_t: Latents, sigma: PerSample) -> Latents:
        """Of the next chunk, guided; with gradient to the weights, not to the past."""
        x_t, sigma = self._wide(x_t), self._wide(sigma)
        with self._role.running():
            velocity = self._model.velocity_cached(x_t, sigma, self._cond, self._cache)
        return velocity if self._scale == 1 else guide(*velocity.chunk(2), self._scale)

    def append(self, x: Latents) -> None:
        """The next chunk is finished: it is `x`, at the context's noise level."""
        with self._role.running():
            self._model.append(self._wide(x.detach()), self._cond, self._cache)

    def _wide(self, x: torch.Tensor) -> torch.Tensor:
        """With guidance both conditions run in one pass, each with a past of its own."""
        return x if self._scale == 1 else torch.cat([x, x])
