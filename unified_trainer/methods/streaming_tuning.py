"""Streaming long tuning: a causal student continues its own videos from step to step (LongLive, arXiv:2509.22622)."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from unified_trainer.basics.ranges import Fraction
from unified_trainer.basics.types import Batch, Latents, take_frames, take_rows
from unified_trainer.data.loader import Loader
from unified_trainer.methods.base import Loss
from unified_trainer.methods.chunk_matching import WindowMatchingConfig, image_latent, seen_at, trained_frames
from unified_trainer.methods.distribution_matching import matching_losses
from unified_trainer.methods.score_directions import DirectedMethod
from unified_trainer.models.base import Codec
from unified_trainer.numerics.chunks import ChunkConfig
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.parallel.random import Streams
from unified_trainer.roles.causal import CausalStudent
from unified_trainer.sampling.solver import SamplerConfig, next_chunks, recomputed_cache

PastFrames = Float[Tensor, "b c past h w"]  # finished frames of streams, none in the first window


@dataclass(frozen=True)
class StreamingTuningConfig(WindowMatchingConfig):
    prompt_switch: Fraction = 1.0
    """Chance that the prompts of the streams change once, before a window that is drawn among the later ones."""
    continues_samples: ClassVar[bool] = True


@dataclass(frozen=True)
class Window:
    """A part of a stream, which one training step generates, in latent frames from the start of the stream."""

    start: int  # first frame that is generated
    stop: int  # behind the last; teacher and critic see a clip that ends here
    chunks: list[tuple[int, int]]  # (start, stop) of each chunk that is generated
    cached: list[int]  # finished frames in the KV cache
    kept: list[int]  # finished frames that are needed: those cached, and the clip before without its first frame


@dataclass(frozen=True)
class Windows:
    """The windows of a stream, one for each training step: all streams of a run are at the same one.

    The first window is as long as a clip. A later one adds the chunks that fit behind an image latent.
    """

    chunks: ChunkConfig
    frames: int  # latent frames of a whole stream
    known: int  # latent frames of a clip
    student_every: int  # training steps between two updates of the student

    @property
    def added(self) -> int:
        """Latent frames that a later window adds."""
        return (self.known - 1) // self.chunks.chunk_frames * self.chunks.chunk_frames

    @property
    def count(self) -> int:
        """Windows of a stream."""
        return 1 + max(0, self.frames - self.known) // max(1, self.added)

    def number(self, step: int) -> int:
        """Return (step mod n) mod N, the window of a training step: a stream has N = count windows.

        n >= N is the least number that has no common divisor with student_every, so that the updates of the student
        reach every window: where n > N, a shorter stream follows each whole one.
        """
        n = next(n for n in range(self.count, self.count + self.student_every) if math.gcd(n, self.student_every) == 1)
        return step % n % self.count

    def at(self, number: int) -> Window:
        """Return a window by its number."""
        start, stop = self.known + (number - 1) * self.added if number else 0, self.known + number * self.added
        ranges = [(first, last) for first, last in self.chunks.ranges(stop) if first >= start]
        cached = self.chunks.visible_frames(ranges[0][1])[-1]
        kept = sorted({*cached, *range(max(0, start - self.known + 1), start)})
        return Window(start, stop, ranges, cached, kept)


class StreamingTuning(DirectedMethod):
    """Continue each sample's stream by a window, and match the teacher's distribution over the window."""

    config_class = StreamingTuningConfig
    uses_loader = True
    uses_codec = True
    student: CausalStudent
    loader: Loader
    codec: Codec

    def __init__(self, config: StreamingTuningConfig, sampler: SamplerConfig, **parts: Any) -> None:
        super().__init__(config, sampler, **parts)
        channels, frames, *size = self.loader.latent_shape
        known = min(config.teacher_frames, frames)
        self.windows = Windows(sampler.chunks, frames, known, config.student_every)
        longest = max(len(self.windows.at(number).kept) for number in range(self.windows.count))
        self._own = self.loader.rows(0)[1]  # ids of this rank's samples
        # Of this rank's streams: the frames `Window.kept`, and the first frame of the newest clip.
        self._past = torch.zeros(len(self._own), channels, longest, *size, device=self.student.device)
        self._first = torch.zeros(len(self._own), channels, 1, *size, device=self.student.device)

    def step(self, batch: Batch, step: int, rng: Streams, mesh: Mesh) -> Iterator[Loss]:
        window, (channels, _, height, width) = self.windows.at(self.windows.number(step)), batch.latent_shape
        batch = replace(self._prompted(batch, step, rng), latent_shape=(channels, self.windows.known, height, width))
        past = self._of(batch, self._past)[:, :, : len(window.kept)]
        before = self._before(self._of(batch, self._first), past, window)
        streams = [past]

        def sample(batch: Batch, rng: Streams, purpose: str) -> Latents:
            added = self._continue(past, batch, window, rng, purpose)
            streams[0] = torch.cat([past, added.detach()], 2)  # the last one made is continued
            return torch.cat([before, added], 2)

        mask = partial(self._trained_frames, window=window)
        seen_as = partial(seen_at, self.codec, stop=window.stop, frames=self.windows.frames)
        yield from matching_losses(self.config, self.matching, step, batch, rng, sample, mask, seen_as)
        if following := self.windows.number(step + 1):
            self._keep(batch, before if window.start else streams[0], streams[0], window, self.windows.at(following))

    def _prompted(self, batch: Batch, step: int, rng: Streams) -> Batch:
        """Return the samples of a step with the prompts in force: those of the step where they began or changed.

        What a stream has for each frame stays that of the prompts it began with.
        """
        window, count = self.windows.number(step), self.windows.count
        begun = rng.of_step(step - window)
        switch = 0
        if count > 1 and float(begun.uniform("prompt switch", [0])) < self.config.prompt_switch:
            switch = 1 + int(float(begun.uniform("prompt switch window", [0])) * (count - 1))
        since = step - window + (switch if 0 < switch <= window else 0)
        now, began = self._at(since, batch, step), step - window
        if since == began or not now.cond.by_frame:
            return now
        return now.with_frames_of(self._at(began, batch, step))

    def _at(self, other: int, batch: Batch, step: int) -> Batch:
        """Return the same samples of another step."""
        if other == step:
            return batch
        rows, ids = self.loader.rows(other)
        return self.loader.batch_of([rows[ids.index(each)] for each in batch.sample_ids], list(batch.sample_ids))

    def _continue(self, past: PastFrames, batch: Batch, window: Window, rng: Streams, purpose: str) -> Latents:
        """Generate a window's chunks, with gradient; they attend to a KV cache of the past under the prompts in force.

        The cache is computed from latents in every step: it fits the weights and the prompts of now, as after the KV
        recache of LongLive, and a resumed run has the same.
        """
        channels, _, *size = batch.latent_shape
        frames, ranges = window.stop - window.start, [(a - window.start, b - window.start) for a, b in window.chunks]

        def draw(name: str | int, length: int = frames) -> Latents:
            shape = (channels, length, *size)
            return rng.noise(f"{purpose} {name}", batch.sample_ids, shape).to(self.student.device)

        exits = self.config.exits(self.student, self.sampler, window.stop, rng)[-len(ranges) :]
        cached = take_frames(past, [window.kept.index(frame) for frame in window.cached])
        of_past = partial(draw, length=len(window.cached))
        cache = recomputed_cache(
            self.student, cached, window.cached, batch, self.sampler, lambda s: of_past(f"past {s}"), exits
        )
        first = frames - self.config.gradient_frames
        return torch.cat(list(next_chunks(cache, draw("noise"), self.sampler, draw, ranges, exits, first)), 2)

    def _before(self, first: Latents, past: PastFrames, window: Window) -> Float[Tensor, "b c before h w"]:
        """Return frames stop - known to start, an image latent and finished frames: a window's clip begins with them.

        The clip of the step before has frames start - known to start, the first of them `first`. The image is its last
        pixel frame up to frame stop - known.
        """
        if window.start == 0:
            return past
        clip = torch.cat([first, past[:, :, past.shape[2] - self.windows.known + 1 :]], 2)
        seen, rest = clip.tensor_split([window.stop - window.start + 1], 2)
        return torch.cat([image_latent(self.codec, seen, self.sampler.chunks.chunk_frames).to(rest), rest], 2)

    def _trained_frames(self, x0: Latents, *, window: Window) -> Tensor | None:
        """Return which of a clip's frames have a gradient, or None for all; only generated ones have."""
        first = max(window.start, window.stop - self.config.gradient_frames)
        mask = trained_frames(self.sampler.chunks, window.stop, first, x0.device)
        return None if mask is None else mask[-x0.shape[2] :]

    def _keep(self, batch: Batch, clip: PastFrames, stream: Latents, window: Window, following: Window) -> None:
        """Keep what the next window needs: of the stream's frames, and of a clip's the first one."""
        frames = [*window.kept, *range(window.start, window.stop)]
        kept = take_frames(stream, [frames.index(frame) for frame in following.kept])
        self._of(batch, self._past)[:, :, : len(following.kept)] = kept
        self._of(batch, self._first)[:] = clip[:, :, :1]

    def _of(self, batch: Batch, x: Tensor) -> Tensor:
        """Return a view of the rows of consecutive samples."""
        start = self._own.index(batch.sample_ids[0])
        return x[start : start + len(batch)]

    def state_dict(self) -> dict[str, Tensor]:
        """Return the kept latents of all samples of a step, in the order of their ids; a collective."""
        mesh = self.loader.mesh
        return {"past": mesh.gather(self._past), "first": mesh.gather(self._first)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self._past, self._first = (take_rows(state[name], self._own).clone() for name in ("past", "first"))
