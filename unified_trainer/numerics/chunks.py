"""Chunks of latent frames, and who sees whom: what a causal student is made of (Self-Forcing, arXiv:2506.08009)."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool
from torch import Tensor


@dataclass(frozen=True)
class ChunkConfig:
    chunk_frames: int = 0  # latent frames that a causal student makes at a time; 0 makes all at once, bidirectionally
    independent_first_frame: bool = False  # the first latent frame is a chunk of its own
    window_frames: int = 0  # finished latent frames that a chunk looks back on; 0 is all of them
    sink_frames: int = 0  # how many of those are always the very first ones
    context_noise: float = 0.0  # noise level at which finished chunks are looked back on

    @property
    def causal(self) -> bool:
        return self.chunk_frames > 0

    def check(self) -> None:
        """Raise ValueError, naming the key, for what cannot be."""
        if self.chunk_frames < 0 or self.sink_frames < 0 or not 0 <= self.context_noise < 1:
            raise ValueError(
                "sampler.chunks: chunk_frames and sink_frames must not be negative, context_noise in [0, 1)"
            )
        if self.window_frames and self.window_frames < self.chunk_frames + self.sink_frames:
            raise ValueError(
                f"sampler.chunks.window_frames must hold the sink and a chunk ({self.sink_frames} + "
                f"{self.chunk_frames}), not {self.window_frames}"
            )

    def ranges(self, frames: int) -> list[tuple[int, int]]:
        """First and one past the last latent frame of every chunk; ValueError when they do not divide."""
        first = 1 if self.independent_first_frame else 0
        if frames < 1 or (frames - first) % self.chunk_frames:
            alone = " after the first" if first else ""
            raise ValueError(
                f"sampler.chunks.chunk_frames must divide the {frames - first} latent frames{alone}, "
                f"not {self.chunk_frames}: change it, or video.frames"
            )
        starts = range(first, frames, self.chunk_frames)
        return [(0, 1)] * first + [(start, start + self.chunk_frames) for start in starts]

    def kept(self, resident: list[int]) -> list[int]:
        """What of these latent frames stays to be looked back on: the sink, and the newest that fit."""
        over = len(resident) - self.window_frames if self.window_frames else 0
        return resident if over <= 0 else resident[: self.sink_frames] + resident[self.sink_frames + over :]

    def visible_frames(self, frames: int) -> list[list[int]]:
        """For every chunk, the earlier latent frames that it sees."""
        seen: list[list[int]] = []
        resident: list[int] = []
        for start, stop in self.ranges(frames):
            seen.append(resident)
            resident = self.kept([*resident, *range(start, stop)])
        return seen


def block_causal_mask(chunks: ChunkConfig, frames: int) -> Bool[Tensor, "t t"]:
    """Whether the frame of a row sees the frame of a column: its own chunk, and what that looks back on."""
    return _own_mask(chunks, frames) | _past_mask(chunks, frames)


def teacher_forcing_mask(chunks: ChunkConfig, frames: int) -> Bool[Tensor, "two_t two_t"]:
    """The same over [clean | noisy]: a noisy frame sees its own noisy chunk and the clean frames before it."""
    own, past = _own_mask(chunks, frames), _past_mask(chunks, frames)
    return torch.cat([torch.cat([own | past, torch.zeros_like(own)], 1), torch.cat([past, own], 1)])


def _own_mask(chunks: ChunkConfig, frames: int) -> Bool[Tensor, "t t"]:
    mask = torch.zeros(frames, frames, dtype=torch.bool)
    for start, stop in chunks.ranges(frames):
        mask[start:stop, start:stop] = True
    return mask


def _past_mask(chunks: ChunkConfig, frames: int) -> Bool[Tensor, "t t"]:
    mask = torch.zeros(frames, frames, dtype=torch.bool)
    for (start, stop), seen in zip(chunks.ranges(frames), chunks.visible_frames(frames), strict=True):
        mask[start:stop, seen] = True
    return mask
