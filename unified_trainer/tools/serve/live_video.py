"""One video of a causal student while it is made, chunk by chunk: its prompt may change, and it has no end."""

import functools
import itertools
from collections.abc import Iterator

import numpy as np
import torch
from jaxtyping import Float

from unified_trainer.basics.actions import ACTIONS
from unified_trainer.basics.errors import UserError
from unified_trainer.basics.requests import Request
from unified_trainer.basics.types import Latents, Video, check_finite, of_kind
from unified_trainer.models.base import ActionForm, Codec
from unified_trainer.roles.causal import Causal, KVCache
from unified_trainer.sampling.solver import next_chunks
from unified_trainer.tools.sample.sample import SampledRole, begin_samples


class LiveVideo:
    """A video that goes on for as long as chunks are asked for.

    Up to the length of the run's videos its frames are those of the command sample with the same request and seed. Then
    noise is drawn for as many latent frames again, so that no memory grows with the video but that of a KV cache
    without a window.
    """

    def __init__(self, student: SampledRole, codec: Codec, seed: int, form: ActionForm | None = None) -> None:
        """`form` is that of the actions which a student takes."""
        self._student, self._codec, self._seed, self._form = student, codec, seed, form
        self._actions: Float[np.ndarray, "rows k"] | None = None
        self._decode, self._latents = codec.decoder(), self._chunks()

    @torch.no_grad()
    def next(self, request: Request, actions: Float[np.ndarray, "rows k"] | None = None) -> Video:
        """Generate the next chunk, `[1, 3, frames, height, width]` in [0, 1]; another request is a switch of prompts.

        `actions` have a row for each of its pixel frames, or one for all. The chunk before is appended to the KV cache
        only now, so that its frames were not held up. Raise UserError for another number of rows, and beyond the last
        position of the network.
        """
        self._request, self._actions = request, actions
        x0 = next(self._latents)
        check_finite(x0, self._student.name)
        return self._decode(x0)

    def _chunks(self) -> Iterator[Latents]:
        """Yield the latents of chunk after chunk, each with `self._request` as it then is."""
        role, sampler = of_kind(Causal, self._student.role), self._student.run.sampler
        batch_of, draw = begin_samples(self._student, self._codec, [self._seed])
        request = self._request
        batch, exits = batch_of([request]), [sampler.num_steps - 1]
        cache = role.open_cache(batch.cond, batch.uncond, sampler.chunks, sampler.guidance_scale, sampler.sigmas()[:-1])
        ranges, seen = sampler.chunks.ranges(batch.latent_shape[1]), 0  # latent frames
        later = ranges[1:] if sampler.chunks.independent_first_frame else ranges
        for part in itertools.chain([ranges], itertools.repeat(later)):
            noise, drawn = draw(0), functools.cache(draw)
            for own in part:
                if self._request != request:
                    request = self._request
                    cache.set_condition(batch_of([request]).cond)
                self._act(cache, seen, seen := seen + own[1] - own[0])
                yield from next_chunks(cache, noise, sampler, drawn, [own], exits, endless=True)

    def _act(self, cache: KVCache, start: int, stop: int) -> None:
        """Add the actions of the latent frames from `start` on, before `stop`, for a student that takes some."""
        if self._form is None or self._actions is None:
            return
        frames, rows = self._form.pixel_frames(stop) - self._form.pixel_frames(start), torch.from_numpy(self._actions)
        if len(rows) not in (1, frames):
            raise UserError(f"actions must have a row for each of the chunk's {frames} frames, or one, not {len(rows)}")
        cache.add_frames(ACTIONS, rows.expand(frames, -1)[None])


def check_length(student: SampledRole, codec: Codec, frames: int, most: int) -> None:
    """Raise UserError unless a video can have so many frames; 0 stands for no end, both in `frames` and in `most`."""
    video, chunks = student.run.video, student.run.sampler.chunks
    if most and not 0 < frames <= most:
        raise UserError(
            f"frames must be from 1 to {most}, not {frames}: a longer stream, or one without end, needs a student with "
            "a window (serve --window-frames) and without condition images"
        )
    if frames:
        chunks.ranges(codec.latent_shape(frames, video.height, video.width)[1])
