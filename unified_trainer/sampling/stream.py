"""A causal student's video while it is generated: each chunk is made with the actions that are given just before it."""

import torch
from jaxtyping import Float
from torch import Tensor

from unified_trainer.basics.actions import ACTIONS
from unified_trainer.basics.errors import UserError
from unified_trainer.basics.types import Batch, Latents
from unified_trainer.models.base import ActionForm
from unified_trainer.roles.causal import Causal
from unified_trainer.sampling.solver import Draw, SamplerConfig, next_chunks


class Stream:
    """The chunks of b videos, one after the other; equal actions give the videos of `predict_chunks`."""

    def __init__(
        self,
        student: Causal,
        noise: Latents,
        batch: Batch,
        sampler: SamplerConfig,
        draw: Draw,
        actions: ActionForm | None = None,
    ) -> None:
        """Begin with an empty KV cache; `actions` are those that the student takes, which `batch` has none of."""
        self._form, self._shape = actions, (len(batch), actions.size if actions else 0)
        ranges, given = sampler.chunks.ranges(noise.shape[2]), (batch.cond, batch.uncond)
        self._cache = student.open_cache(*given, sampler.chunks, sampler.guidance_scale, sampler.sigmas()[:-1])
        self._ahead = list(ranges)  # chunks that are still to be generated
        self._made = next_chunks(self._cache, noise, sampler, draw, ranges, [sampler.num_steps - 1] * len(ranges))

    @property
    def left(self) -> int:
        """The chunks that are still to be generated."""
        return len(self._ahead)

    @property
    def frames(self) -> int:
        """The pixel frames of the next chunk, for which `next` takes actions; 0 of a student without them."""
        start, stop = self._ahead[0]
        return self._form.pixel_frames(stop) - self._form.pixel_frames(start) if self._form else 0

    @torch.no_grad()
    def next(self, actions: Float[Tensor, "b frames k"] | None = None) -> Latents:
        """Generate the next chunk with the actions of its pixel frames.

        UserError for actions of another shape or that are not finite, and for some where the student takes none, or
        none where it takes some; the chunk can then be asked for again. IndexError behind the last chunk.
        """
        wanted = [self._shape[0], self.frames, self._shape[1]]
        if (actions is None) != (self._form is None) or (actions is not None and list(actions.shape) != wanted):
            given = "none" if actions is None else list(actions.shape)
            raise UserError(f"a chunk takes {f'actions {wanted}' if self._form else 'no actions'}, not {given}")
        if actions is not None:
            if not bool(actions.isfinite().all()):
                raise UserError("the actions of a chunk must be finite")
            self._cache.add_frames(ACTIONS, actions)
        del self._ahead[0]
        return next(self._made)
