"""Self-forcing beyond the clip: videos longer than the teacher knows are matched in windows (arXiv:2506.08009)."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from unified_trainer.basics.types import Batch, Latents
from unified_trainer.methods.base import Loss
from unified_trainer.methods.chunk_matching import WindowMatchingConfig, image_latent, seen_at, trained_frames
from unified_trainer.methods.distribution_matching import matching_losses
from unified_trainer.methods.score_directions import DirectedMethod
from unified_trainer.models.base import Codec
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.parallel.random import Streams
from unified_trainer.roles.causal import CausalStudent
from unified_trainer.sampling.solver import predict_chunks


@dataclass(frozen=True)
class LongSelfForcingConfig(WindowMatchingConfig):
    pass


class LongSelfForcing(DirectedMethod):
    """Generate up to the end of a drawn window, and match the teacher's distribution over the window."""

    config_class = LongSelfForcingConfig
    uses_codec = True
    student: CausalStudent
    codec: Codec

    def step(self, batch: Batch, step: int, rng: Streams, mesh: Mesh) -> Iterator[Loss]:
        channels, frames, *size = batch.latent_shape
        known = min(self.config.teacher_frames, frames)
        stop = self._draw_end(frames, rng)
        seen = replace(batch, latent_shape=(channels, known, *size))
        sample = partial(self._sample, of_video=batch, stop=stop)
        mask = partial(self._trained_frames, stop=stop)
        seen_as = partial(seen_at, self.codec, stop=stop, frames=frames)
        yield from matching_losses(self.config, self.matching, step, seen, rng, sample, mask, seen_as)

    def _draw_end(self, frames: int, rng: Streams) -> int:
        """Draw the frame at which the window ends, a chunk's end, equal on all ranks.

        The first window is as long as a clip. Nothing is drawn for a video that is no longer than that.
        """
        known = min(self.config.teacher_frames, frames)
        ends = [stop for _, stop in self.sampler.chunks.ranges(frames) if stop >= known]
        return ends[int(rng.shared.integers(len(ends)))] if len(ends) > 1 else ends[0]

    def _sample(self, seen: Batch, rng: Streams, purpose: str, *, of_video: Batch, stop: int) -> Latents:
        """Generate frames 0 to `stop` and return the window that ends there, as teacher and critic see it."""
        shape = of_video.latent_shape

        def draw(name: str | int) -> Latents:
            return rng.noise(f"{purpose} {name}", seen.sample_ids, shape).to(self.student.device)

        exits, first = self.config.exits(self.student, self.sampler, stop, rng), self._first_trained(stop)
        noise = draw("noise")[:, :, :stop]
        return self._window(predict_chunks(self.student, noise, seen, self.sampler, draw, exits, first))

    def _window(self, x0: Latents) -> Float[Tensor, "b c seen h w"]:
        """Return the newest `teacher_frames` latent frames of a video; of a longer one, the first is an image latent.

        A clip's first latent frame is that of one pixel frame, which the frames of a video are not.
        """
        behind = self.config.teacher_frames - 1
        if x0.shape[2] <= behind + 1:
            return x0
        before, newest = x0.split([x0.shape[2] - behind, behind], 2)
        return torch.cat([image_latent(self.codec, before, self.sampler.chunks.chunk_frames).to(newest), newest], 2)

    def _first_trained(self, stop: int) -> int:
        """Return the frame from which on chunks are trained in a video of `stop` frames; 0 or less trains all."""
        known = self.config.teacher_frames
        return stop - min(self.config.gradient_frames, known if stop <= known else known - 1)

    def _trained_frames(self, x0: Latents, *, stop: int) -> Tensor | None:
        """Return which frames of a window have a gradient, or None for all; an image latent has none."""
        mask = trained_frames(self.sampler.chunks, stop, self._first_trained(stop), x0.device)
        if mask is None or stop <= self.config.teacher_frames:
            return mask
        return mask[stop - x0.shape[2] :]
