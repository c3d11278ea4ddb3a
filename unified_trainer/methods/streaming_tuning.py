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
from unified_trainer.methods.chunk_matching import WindowMatchingConfig, beginning_at, image_latent
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
        return 1 + (self.frames - self.known) // self.added if self.frames > self.known else 1

    def number(self, step: int) -> int:
        """Return the window of a training step, 0 where the streams begin.

        Where the number of windows and the steps between two updates of the student have a common divisor, a shorter
        stream follows each whole one, so that the updates reach every window.
        """
        lengths = range(self.count, self.count + self.student_every)
        cycle = next(length for length in lengths if math.gcd(length, self.student_every) == 1)
        return step % cycle % self.count

    def start(self, window: int) -> int:
        """Return the first latent frame that a window generates."""
        return 0 if window == 0 else self.known + (window - 1) * self.added

    def ranges(self, window: int) -> list[tuple[int, int]]:
        """Return (start, stop) of the chunks that a window generates, from its first one on."""
        size = self.chunks.chunk_frames
        if window == 0:
            return self.chunks.ranges(self.known)
        return [(start, start + size) for start in range(0, self.added, size)]

    def attended(self, window: int) -> list[int]:
        """Return the finished frames in the KV cache before a window."""
        if window == 0:
            return []
        return self.chunks.visible_frames(self.start(window) + self.chunks.chunk_frames)[-1]

    def kept(self, window: int) -> list[int]:
        """Return the finished frames that a window needs: those in its KV cache, and the newest of the clip before."""
        start = self.start(window)
        return sorted({*self.attended(window), *range(max(0, start - self.known + 1), start)})


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
        longest = max(len(self.windows.kept(window)) for window in range(self.windows.count))
        self._own = self.loader.rows(0)[1]  # ids of this rank's samples
        # Of this rank's streams: the frames of `Windows.kept`, and the first frame of the newest window.
        self._past = torch.zeros(len(self._own), channels, longest, *size, device=self.student.device)
        self._first = torch.zeros(len(self._own), channels, 1, *size, device=self.student.device)

    def step(self, batch: Batch, step: int, rng: Streams, mesh: Mesh) -> Iterator[Loss]:
        window, (channels, _, height, width) = self.windows.number(step), batch.latent_shape
        batch = replace(self._prompted(batch, step, rng), latent_shape=(channels, self.windows.known, height, width))
        past = self._of(batch, self._past)[:, :, : len(self.windows.kept(window))]
        before = self._before(self._of(batch, self._first), past, window)
        streams = [past]

        def sample(batch: Batch, rng: Streams, purpose: str) -> Latents:
            added = self._continue(past, batch, window, rng, purpose)
            streams[0] = torch.cat([past, added.detach()], 2)  # the last one made is continued
            return torch.cat([before, added], 2)

        mask = partial(self._trained_frames, window=window)
        seen_as = partial(beginning_at, self.codec)
        yield from matching_losses(self.config, self.matching, step, batch, rng, sample, mask, seen_as)
        if (following := self.windows.number(step + 1)) > 0:
            self._keep(batch, before, streams[0], following)

    def _prompted(self, batch: Batch, step: int, rng: Streams) -> Batch:
        """Return the samples of a step with the prompts in force: those of the step where they began or changed."""
        window, count = self.windows.number(step), self.windows.count
        begun = rng.of_step(step - window)
        switch = 0
        if count > 1 and float(begun.uniform("prompt switch", [0])) < self.config.prompt_switch:
            switch = 1 + int(float(begun.uniform("prompt switch window", [0])) * (count - 1))
        since = step - window + (switch if 0 < switch <= window else 0)
        if since == step:
            return batch
        rows, ids = self.loader.rows(since)
        return self.loader.batch_of([rows[ids.index(each)] for each in batch.sample_ids], list(batch.sample_ids))

    def _continue(self, past: PastFrames, batch: Batch, window: int, rng: Streams, purpose: str) -> Latents:
        """Generate a window's chunks, with gradient; they attend to a KV cache of the past under the prompts in force.

        The cache is computed from latents in every step: it fits the weights and the prompts of now, as after the KV
        recache of LongLive, and a resumed run has the same.
        """
        channels, _, *size = batch.latent_shape
        ranges = self.windows.ranges(window)
        frames = ranges[-1][1]

        def draw(name: str | int, length: int = frames) -> Latents:
            shape = (channels, length, *size)
            return rng.noise(f"{purpose} {name}", batch.sample_ids, shape).to(self.student.device)

        stop, attended, kept = self.windows.start(window + 1), self.windows.attended(window), self.windows.kept(window)
        exits = self.config.exits(self.student, self.sampler, stop, rng)[-len(ranges) :]
        context = take_frames(past, [kept.index(frame) for frame in attended])
        of_past = partial(draw, length=len(attended))
        cache = recomputed_cache(
            self.student, context, attended, batch, self.sampler, lambda s: of_past(f"past {s}"), exits
        )
        first = frames - self.config.gradient_frames
        return torch.cat(list(next_chunks(cache, draw("noise"), self.sampler, draw, ranges, exits, first)), 2)

    def _before(self, first: Latents, past: PastFrames, window: int) -> Float[Tensor, "b c before h w"]:
        """Return the frames of a window before those that it generates: an image latent and finished frames.

        The image is the last one before these frames in the clip that teacher and critic saw in the step before.
        """
        if window == 0:
            return past
        between = self.windows.known - 1 - self.windows.added
        clip = torch.cat([first, past[:, :, past.shape[2] - self.windows.known + 1 :]], 2)
        seen, rest = clip.split([self.windows.known - between, between], 2)
        image = image_latent(self.codec, seen, self.sampler.chunks.chunk_frames)
        return torch.cat([image.to(rest), rest], 2)

    def _trained_frames(self, x0: Latents, *, window: int) -> Tensor | None:
        """Return which of a window's frames have a gradient, or None for all; only generated ones have."""
        ranges = self.windows.ranges(window)
        frames = ranges[-1][1]
        trained = [start >= frames - self.config.gradient_frames for start, stop in ranges for _ in range(start, stop)]
        trained = [False] * (x0.shape[2] - frames) + trained
        return None if all(trained) else torch.tensor(trained, device=x0.device)[:, None, None]

    def _keep(self, batch: Batch, before: PastFrames, stream: Latents, following: int) -> None:
        """Keep what the next window needs of streams whose frames are `stream`."""
        window = following - 1
        frames = [*self.windows.kept(window), *range(self.windows.start(window), self.windows.start(following))]
        kept = self.windows.kept(following)
        self._of(batch, self._past)[:, :, : len(kept)] = take_frames(stream, [frames.index(frame) for frame in kept])
        self._of(batch, self._first)[:] = (before if window else stream)[:, :, :1]

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
