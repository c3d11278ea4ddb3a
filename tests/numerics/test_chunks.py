"""Chunks of latent frames, the frames that stay in the KV cache, and the two masks."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unified_trainer.numerics.chunks import ChunkConfig, block_causal_mask, teacher_forcing_mask


def rows(mask):
    return ["".join(str(int(sees)) for sees in row) for row in mask]


def test_ranges():
    assert ChunkConfig(3).ranges(21) == [(i, i + 3) for i in range(0, 21, 3)]
    alone_first = ChunkConfig(3, independent_first_frame=True)
    assert alone_first.ranges(22) == [(0, 1)] + [(i, i + 3) for i in range(1, 22, 3)]
    assert alone_first.ranges(1) == [(0, 1)]
    assert ChunkConfig(5).ranges(5) == [(0, 5)]


@pytest.mark.parametrize(("frames", "alone"), [(22, False), (21, True), (2, False), (0, False)])
def test_frames_that_chunks_do_not_divide(frames, alone):
    with pytest.raises(ValueError, match=r"sampler\.chunks\.chunk_frames must divide the \d+ latent frames"):
        ChunkConfig(3, independent_first_frame=alone).ranges(frames)


def test_rolling_residents():
    """Room for 6 frames, of which 3 are the sink; before each chunk, and after the last."""
    looked = ChunkConfig(3, window_frames=6, sink_frames=3).visible_frames(18)
    first = [0, 1, 2]
    assert looked == [[], first, [*range(6)], [*first, 6, 7, 8], [*first, 9, 10, 11], [*first, 12, 13, 14]]


def test_a_window_may_cut_a_chunk():
    looked = ChunkConfig(2, independent_first_frame=True, window_frames=4, sink_frames=1).visible_frames(9)
    assert looked == [[], [0], [0, 1, 2], [0, 2, 3, 4], [0, 4, 5, 6]]


def test_block_causal_rows():
    assert rows(block_causal_mask(ChunkConfig(2), 4)) == ["1100", "1100", "1111", "1111"]
    local = block_causal_mask(ChunkConfig(2, window_frames=2), 6)
    assert rows(local)[::2] == ["110000", "111100", "001111"]
    sink = block_causal_mask(ChunkConfig(2, window_frames=3, sink_frames=1), 6)
    assert rows(sink)[::2] == ["110000", "111100", "101111"]


def test_teacher_forcing_rows():
    mask = rows(teacher_forcing_mask(ChunkConfig(2), 4))
    assert mask[:4] == ["11000000", "11000000", "11110000", "11110000"]
    assert mask[4:] == ["00001100", "00001100", "11000011", "11000011"]


@given(
    chunk=st.integers(1, 4),
    count=st.integers(1, 5),
    alone=st.booleans(),
    extra=st.integers(0, 9),
    sink=st.integers(0, 3),
)
def test_masks_are_causal_and_of_bounded_reach(chunk, count, alone, extra, sink):
    """Every frame sees its own chunk whole, nothing later, at most the window before it, and the sink if anything."""
    chunks = ChunkConfig(chunk, alone, window_frames=chunk + sink + extra, sink_frames=sink)
    chunks.check()
    frames = chunk * count + alone
    mask, forced = block_causal_mask(chunks, frames), teacher_forcing_mask(chunks, frames)
    for start, stop in chunks.ranges(frames):
        assert mask[start:stop, start:stop].all() and not mask[start:stop, stop:].any()
        past = mask[start:stop, :start]
        assert torch.equal(past, past[:1].expand_as(past))
        assert past[0].sum() == min(start, chunks.window_frames)
        assert past[0, : min(sink, start)].all()
    assert torch.equal(forced[:frames, :frames], mask) and not forced[:frames, frames:].any()
    assert torch.equal(forced[frames:, :frames] | forced[frames:, frames:], mask)
    assert not (forced[frames:, :frames] & forced[frames:, frames:]).any()


@pytest.mark.parametrize(
    ("chunks", "key"),
    [
        (ChunkConfig(3, sink_frames=1), "sink_frames 1 needs sampler.chunks.window_frames"),
        (ChunkConfig(3, window_frames=2), "window_frames"),
        (ChunkConfig(3, window_frames=5, sink_frames=3), "window_frames"),
        (ChunkConfig(3, window_frames=5, rolling_sink=True), "rolling_sink needs sampler.chunks.sink_frames"),
    ],
)
def test_what_cannot_be(chunks, key):
    with pytest.raises(ValueError, match=key):
        chunks.check()
