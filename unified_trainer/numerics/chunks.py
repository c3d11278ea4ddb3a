"""Chunks of latent frames and attention masks of a causal student (Self-Forcing, arXiv:2506.08009).

A causal student generates a video chunk by chunk. Each chunk attends to itself and to earlier frames in the KV cache.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.ranges import Decay, FramesOrZero

# Settings that say how a method rolls out, which a student of other methods need not keep; the rest it fits.
ROLLED_OUT = ("window_frames", "sink_frames", "rolling_sink")


@dataclass(frozen=True)
class ChunkConfig:
    chunk_frames: FramesOrZero = 0
    """Latent frames that a causal student generates at a time; 0: all at once, bidirectional."""
    independent_first_frame: bool = False
    """Make the first latent frame a chunk of its own."""
    window_frames: FramesOrZero = 0
    """Latent frames in the KV cache, the sink included; 0 keeps all."""
    sink_frames: FramesOrZero = 0
    """First latent frames of the video that always stay in the cache."""
    rolling_sink: bool = False
    """Move the sink along with a video that outgrows the window: a chunk has it at the distances of a video's start."""
    context_noise: Decay = 0.0
    """Noise level in [0, 1) at which finished chunks are written into the cache."""

    @property
    def causal(self) -> bool:
        """Whether the video is generated in chunks."""
        return self.chunk_frames > 0

    def check(self) -> None:
        """Raise UserError, naming the setting, for values that contradict each other."""
        if self.sink_frames and not self.window_frames:
            raise UserError(
                f"sampler.chunks.sink_frames {self.sink_frames} needs sampler.chunks.window_frames: without a window "
                "all frames stay in the cache"
            )
        if self.window_frames and self.window_frames < self.chunk_frames + self.sink_frames:
            raise UserError(
                f"sampler.chunks.window_frames must hold the sink and a chunk ({self.sink_frames} + "
                f"{self.chunk_frames} frames) or be 0, not {self.window_frames}"
            )
        if self.rolling_sink and not self.sink_frames:
            raise UserError("sampler.chunks.rolling_sink needs sampler.chunks.sink_frames: without a sink none moves")

    def check_whole(self) -> None:
        """Raise UserError, naming the setting, for a sink or a window that holds a part of a chunk."""
        chunk, sink, first = self.chunk_frames, self.sink_frames, int(self.independent_first_frame)
        if sink and (sink < first or (sink - first) % chunk):
            raise UserError(
                f"sampler.chunks.sink_frames must be whole chunks for sparse attention, whose tiles are those of "
                f"chunks: {first or chunk}, {first + chunk if first else 2 * chunk} ... frames, not {sink}"
            )
        if (self.window_frames - sink) % chunk and self.window_frames:
            raise UserError(
                f"sampler.chunks.window_frames must be the sink and whole chunks for sparse attention, whose tiles are "
                f"those of chunks: {sink} and a multiple of {chunk} frames, not {self.window_frames}"
            )

    def check_masked(self, frames: int) -> None:
        """Raise UserError if one masked pass over all chunks cannot do what passes through the cache do."""
        last, window = self.ranges(frames)[-1][0], self.window_frames
        if self.rolling_sink and last > window:
            raise UserError(
                f"sampler.chunks.rolling_sink cannot be in one masked pass over all chunks, where the sink of each is "
                f"elsewhere: set it to false, or sampler.chunks.window_frames to {last} or more, not {window}"
            )

    def ranges(self, frames: int) -> list[tuple[int, int]]:
        """Return (start, stop) of every chunk in latent frames, stop exclusive.

        Raises UserError if chunk_frames does not divide the number of frames.
        """
        first = 1 if self.independent_first_frame else 0
        if frames < 1 or (frames - first) % self.chunk_frames:
            after_first = " after the first" if first else ""
            raise UserError(
                f"sampler.chunks.chunk_frames must divide the {frames - first} latent frames{after_first}, "
                f"but is {self.chunk_frames}: change it or video.frames"
            )
        starts = range(first, frames, self.chunk_frames)
        return [(0, 1)] * first + [(start, start + self.chunk_frames) for start in starts]

    def by_frame(self, values: Sequence[Float[Tensor, " b"]], frames: int) -> Float[Tensor, "b t"]:
        """Repeat the value of each chunk for all of its frames."""
        sizes = [stop - start for start, stop in self.ranges(frames)]
        return torch.stack(list(values), 1).repeat_interleave(torch.tensor(sizes), 1)

    def kept(self, resident: list[int]) -> list[int]:
        """Return which of the cached latent frames stay: the sink, and the newest that fit into the window."""
        over = len(resident) - self.window_frames if self.window_frames else 0
        return resident if over <= 0 else resident[: self.sink_frames] + resident[self.sink_frames + over :]

    def visible_frames(self, frames: int) -> list[list[int]]:
        """Return, for every chunk, the earlier latent frames that it attends to."""
        seen: list[list[int]] = []
        resident: list[int] = []
        for start, stop in self.ranges(frames):
            seen.append(resident)
            resident = self.kept([*resident, *range(start, stop)])
        return seen


def block_causal_mask(chunks: ChunkConfig, frames: int) -> Bool[Tensor, "t t"]:
    """Return the attention mask over latent frames; row q, column k: whether frame q attends to frame k.

    A frame attends to its own chunk and to the earlier frames in that chunk's window.
    """
    return _own_mask(chunks, frames) | _past_mask(chunks, frames)


def teacher_forcing_mask(chunks: ChunkConfig, frames: int) -> Bool[Tensor, "two_t two_t"]:
    """Return the block-causal mask over the concatenation [clean frames | noisy frames].

    A clean frame attends to clean frames as in `block_causal_mask`. A noisy frame attends to its own noisy chunk and to
    the clean frames in the window before it.
    """
    own, past = _own_mask(chunks, frames), _past_mask(chunks, frames)
    return torch.cat([torch.cat([own | past, torch.zeros_like(own)], 1), torch.cat([past, own], 1)])


def _own_mask(chunks: ChunkConfig, frames: int) -> Bool[Tensor, "t t"]:
    mask = torch.zeros(frames, frames, dtype=torch.bool)
    for start, stop in chunks.ranges(frames):
        mask[start:stop, start:stop] = True
    return mask


def _past_mask(chunks: ChunkConfig, frames: int) -> Bool[Tensor, "t t"]:
    chunks.check_masked(frames)
    mask = torch.zeros(frames, frames, dtype=torch.bool)
    for (start, stop), seen in zip(chunks.ranges(frames), chunks.visible_frames(frames), strict=True):
        mask[start:stop, seen] = True
    return mask
