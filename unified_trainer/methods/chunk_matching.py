"""A causal student's rollouts in the methods that match them: settings, exit steps, and the frames with a gradient."""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.ranges import Frames
from unified_trainer.basics.types import Batch, Latents
from unified_trainer.methods.base import MethodConfig, MethodSetup
from unified_trainer.methods.distribution_matching import MatchingConfig
from unified_trainer.models.base import Codec, ImageEncoder
from unified_trainer.numerics.chunks import ChunkConfig
from unified_trainer.parallel.meter import phase
from unified_trainer.parallel.random import Streams
from unified_trainer.roles.causal import CausalStudent
from unified_trainer.sampling.solver import SamplerConfig, trainable_steps


@dataclass(frozen=True)
class ChunkMatchingConfig(MatchingConfig):
    """Settings of the methods that match a causal student's own rollouts."""

    masks_chunks: ClassVar[bool] = False
    same_step_across_chunks: bool = True
    """Draw one exit step for all chunks of a rollout instead of one for each."""
    last_step_only: bool = False
    """Every chunk exits at the sampler's last step."""
    gradient_frames: Frames = 21
    """Latent frames at the end whose chunks are trained; earlier chunks are context only."""

    def check(self, setup: MethodSetup) -> None:
        super().check(setup)
        if not setup.sampler.chunks.causal:
            raise UserError("sampler.chunks.chunk_frames must be at least 1: this method trains a causal student")
        least = setup.sampler.chunks.chunk_frames
        if self.gradient_frames < least:
            raise UserError(
                f"algorithm.gradient_frames must be at least sampler.chunks.chunk_frames ({least}), so that a chunk is "
                f"trained, not {self.gradient_frames}"
            )
        if self.last_step_only:
            setup.require_trained("student", [setup.sampler.sigmas()[-2:-1].tolist()], "algorithm.last_step_only")

    def exits(self, student: CausalStudent, sampler: SamplerConfig, frames: int, rng: Streams) -> list[int]:
        """Return the sampling step at which each chunk of so many frames stops, equal on all ranks."""
        count, calls = len(sampler.chunks.ranges(frames)), trainable_steps(student, sampler)
        if self.last_step_only:
            return [sampler.num_steps - 1] * count
        if self.same_step_across_chunks:
            return [calls[int(rng.shared.integers(len(calls)))]] * count
        return [calls[i] for i in rng.shared.integers(len(calls), size=count)]


@dataclass(frozen=True)
class WindowMatchingConfig(ChunkMatchingConfig):
    """Settings of the methods that match windows of videos longer than the teacher's clips."""

    teacher_frames: Frames = 21
    """Latent frames of the clips that teacher and critic know: the longest part of a video that they see."""

    matches_windows: ClassVar[bool] = True
    teacher_guidance = MethodConfig.teacher_guidance  # no guard: its teacher would make videos of video.frames

    def check(self, setup: MethodSetup) -> None:
        super().check(setup)
        if self.gan_weight:
            raise UserError(
                "algorithm.gan_weight must be 0 where windows of longer videos are matched, which are no clips: leave "
                "it out, or train with self_forcing"
            )
        chunks = setup.sampler.chunks
        first = 1 if chunks.independent_first_frame else 0
        chunk, more = chunks.chunk_frames, (self.teacher_frames - first) % chunks.chunk_frames
        if self.teacher_frames <= chunk or more:
            below = self.teacher_frames - more
            good = " or ".join(str(frames) for frames in (below, below + chunk) if frames > chunk)
            raise UserError(
                f"algorithm.teacher_frames must be whole chunks and more frames than sampler.chunks.chunk_frames "
                f"({chunk}), so that a chunk fits behind an image latent, not {self.teacher_frames}: set "
                f"{good or 2 * chunk + first}"
            )


def trained_frames(chunks: ChunkConfig, frames: int, first: int, device: torch.device) -> Tensor | None:
    """Return the mask [t, 1, 1] of the frames whose chunk starts at frame `first` or later, or None for all."""
    if first <= 0:
        return None
    trained = [start >= first for start, stop in chunks.ranges(frames) for _ in range(start, stop)]
    return torch.tensor(trained, device=device)[:, None, None]


def seen_at(codec: Codec, batch: Batch, x0: Latents, *, stop: int, frames: int) -> Batch:
    """Return the batch of a window `x0` that ends before latent frame `stop` of a video of `frames`.

    What conditions its frames is cut, and a condition image is the window's own first frame.
    """
    batch = batch.window(stop - x0.shape[2], stop, frames)
    if not isinstance(codec, ImageEncoder):
        return batch
    image = codec.first_frames(x0.detach())
    if image.tensors.keys().isdisjoint(batch.cond.tensors):  # samples of text alone
        return batch
    return replace(batch, cond=batch.cond.updated(image), uncond=batch.uncond.updated(image))


@torch.no_grad()
def image_latent(codec: Codec, x0: Latents, part_frames: int) -> Float[Tensor, "b c 1 h w"]:
    """Decode latent frames [b, c, t, h, w] and encode the last pixel frame, as a clip's first one."""
    with phase("decode"), codec.in_use():
        decode = codec.decoder()
        for part in x0.split(part_frames, 2):  # in parts: all pixels are never in memory
            video = decode(part)
        return codec.encode(video[:, :, -1:])
