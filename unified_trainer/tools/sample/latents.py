"""Latents of requests with seeds: the videos of a student all at once, or those of a causal one chunk by chunk."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from unified_trainer.basics.actions import ACTIONS
from unified_trainer.basics.errors import UserError
from unified_trainer.basics.requests import Request
from unified_trainer.basics.types import Batch, Latents, check_finite, of_kind
from unified_trainer.data.loader import make_batch
from unified_trainer.models.base import ActionForm, Codec
from unified_trainer.numerics.chunks import ChunkConfig
from unified_trainer.roles.causal import Causal, KVCache
from unified_trainer.roles.role import Trainable
from unified_trainer.run.settings.config import RunConfig
from unified_trainer.sampling.solver import Draw, as_context, frames_of, generate, sample_to_step


class SampledRole(Protocol):
    """A role with the run whose sampler and video size it generates with."""

    @property
    def run(self) -> RunConfig: ...

    @property
    def role(self) -> Trainable: ...

    @property
    def name(self) -> str: ...  # of its weights, for messages


def draw_latents(student: SampledRole, codec: Codec, requests: Sequence[Request], seeds: Sequence[int]) -> Latents:
    """Generate a batch of clean latents; sample i depends on requests[i] and seeds[i] alone, but for rounding.

    Its noise is what diffusers draws with `torch.Generator().manual_seed(seeds[i])`. Raise NotFiniteError, which names
    the student, for samples that are not finite.
    """
    batch_of, draw = begin_samples(student, codec, seeds)
    x0 = generate(student.role, draw(0), batch_of(requests), student.run.sampler, draw)
    check_finite(x0, student.name)
    return x0


def begin_samples(
    student: SampledRole, codec: Codec, seeds: Sequence[int]
) -> tuple[Callable[[Sequence[Request]], Batch], Draw]:
    """Return a function from requests to a batch, and the noise of samples with these seeds, which each call draws."""
    video, ids = student.run.video, list(range(len(seeds)))
    shape = codec.latent_shape(video.frames, video.height, video.width)
    negative = student.run.sampler.negative_prompt
    streams = [torch.Generator().manual_seed(seed) for seed in seeds]

    def draw(_: int) -> Tensor:
        return torch.cat([torch.randn(1, *shape, generator=stream) for stream in streams]).to(student.role.device)

    def batch_of(requests: Sequence[Request]) -> Batch:
        return make_batch(codec, requests, negative, shape, prompt_ids=ids, sample_ids=ids)

    return batch_of, draw


class Stream:
    """The chunks of b videos of a causal student, one after the other for as long as they are asked for.

    Up to the length of the run's videos they are those of `draw_latents` with the same requests and seeds. Then noise
    is drawn for as many latent frames again, so that no memory grows with the video but that of a KV cache without a
    window. `decode` returns the frames of chunk after chunk, `[b, 3, frames, height, width]` in [0, 1].
    """

    def __init__(
        self,
        student: SampledRole,
        codec: Codec,
        requests: Sequence[Request],
        seeds: Sequence[int],
        actions: ActionForm | None = None,
    ) -> None:
        """`actions` are those that `next` is given, of which the requests have none."""
        self._sampler, self._form, self.decode = student.run.sampler, actions, codec.decoder()
        self._student, self._requests, video = student, list(requests), student.run.video
        self._batch_of, draw = begin_samples(student, codec, seeds)
        latent_frames = codec.latent_shape(video.frames, video.height, video.width)[1]
        self._noise = _by_chunk(self._sampler.chunks, latent_frames, draw)
        self._finished: Latents | None = None  # chunk that the KV cache is to have
        self._seen = 0  # latent frames

    @functools.cached_property
    def _cache(self) -> KVCache:
        """The KV cache, which is opened, and its prompts encoded, when the first chunk is generated."""
        role, batch, sampler = of_kind(Causal, self._student.role), self._batch_of(self._requests), self._sampler
        sigmas = sampler.sigmas()[:-1]
        return role.open_cache(batch.cond, batch.uncond, sampler.chunks, sampler.guidance_scale, sigmas)

    @property
    def frames(self) -> int:
        """The pixel frames of the next chunk, for which `next` takes actions; 0 of a student without them."""
        chunks, start = self._sampler.chunks, self._seen
        stop = 1 if chunks.independent_first_frame and not start else start + chunks.chunk_frames
        return self._form.pixel_frames(stop) - self._form.pixel_frames(start) if self._form else 0

    @torch.no_grad()
    def next(
        self, requests: Sequence[Request] | None = None, actions: Float[Tensor, "b frames k"] | None = None
    ) -> Latents:
        """Generate the next chunk; other requests than before are a switch of prompts.

        `actions` have a row for each of its pixel frames, or one for all. The chunk before is appended to the KV cache
        only now, with the prompts that it was made with, so that its frames were not held up. Raise UserError for
        actions that do not fit, after which the chunk can be asked for again, and beyond the last position of the
        network; NotFiniteError, which names the student, for latents that are not finite.
        """
        self._check(actions)
        if self._finished is not None:
            self._cache.append(self._finished)
            self._finished = None
        if requests is not None and list(requests) != self._requests:
            self._cache.set_condition(self._batch_of(requests).cond)
            self._requests = list(requests)
        if actions is not None:
            self._cache.add_frames(ACTIONS, actions.expand(-1, self.frames, -1))
        noise, draw = next(self._noise)
        x0 = sample_to_step(self._cache.velocity, noise, self._sampler, draw, self._sampler.num_steps - 1)
        check_finite(x0, self._student.name)
        self._finished = as_context(x0, self._sampler, draw)
        self._seen += x0.shape[2]
        return x0

    def _check(self, actions: Tensor | None) -> None:
        wanted = [len(self._requests), self.frames, self._form.size] if self._form else None
        given = None if actions is None else list(actions.shape)
        if given != wanted and (wanted is None or given != [wanted[0], 1, wanted[2]]):
            takes = f"actions {wanted}, or one row for all its frames" if wanted else "no actions"
            raise UserError(f"a chunk takes {takes}, not {given or 'none'}")
        if actions is not None and not bool(actions.isfinite().all()):
            raise UserError("the actions of a chunk must be finite")


def _by_chunk(chunks: ChunkConfig, frames: int, draw: Draw) -> Iterator[tuple[Latents, Draw]]:
    """Yield the noise of chunk after chunk and the draws of its transitions, drawn for so many frames at a time."""
    ranges = chunks.ranges(frames)
    while True:
        noise, drawn = draw(0), functools.cache(draw)
        for start, stop in ranges:
            own = slice(start, stop)
            yield noise[:, :, own], frames_of(drawn, own)
        ranges = [own for own in ranges if own != (0, 1) or not chunks.independent_first_frame]
