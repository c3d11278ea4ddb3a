"""FlexAttention's blocks from frames are those that it would find from the whole mask, and both masks attend alike."""

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from unified_trainer.models.masked_attention import attend, token_mask
from unified_trainer.numerics.chunks import ChunkConfig, block_causal_mask, teacher_forcing_mask

MASKS = {
    "causal": block_causal_mask(ChunkConfig(2), 6),
    "window": block_causal_mask(ChunkConfig(1, window_frames=2, sink_frames=1), 7),
    "forced": teacher_forcing_mask(ChunkConfig(2, independent_first_frame=True), 5),
}


@pytest.mark.parametrize("tokens", [7, 64, 128, 150])
@pytest.mark.parametrize("kind", MASKS)
def test_the_same_blocks_as_from_the_whole_mask(kind, tokens):
    frames = MASKS[kind]
    dense = token_mask(frames, tokens, flex=False)
    n = len(frames) * tokens
    whole = create_block_mask(lambda _b, _h, q, k: dense[q, k], None, None, n, n, device="cpu")
    ours = token_mask(frames, tokens, flex=True)
    assert ours.shape == whole.shape
    for name in ("kv", "q", "full_kv", "full_q"):
        count = getattr(whole, f"{name}_num_blocks")
        assert torch.equal(getattr(ours, f"{name}_num_blocks"), count), name
        for row, length in enumerate(count[0, 0].tolist()):
            mine, theirs = (getattr(mask, f"{name}_indices")[0, 0, row, :length] for mask in (ours, whole))
            assert torch.equal(mine.sort().values, theirs.sort().values), name


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("kind", MASKS)
def test_both_masks_attend_alike(kind):
    """Without compiling, FlexAttention evaluates the mask by token; on a CPU it has no backward."""
    tokens = 5
    n = len(MASKS[kind]) * tokens
    query, key, value = (torch.randn(2, n, 3, 16) for _ in range(3))
    dense = attend(query, key, value, token_mask(MASKS[kind], tokens, flex=False))
    by_head = (part.transpose(1, 2) for part in (query, key, value))
    flex = flex_attention(*by_head, block_mask=token_mask(MASKS[kind], tokens, flex=True)).transpose(1, 2)
    torch.testing.assert_close(flex, dense, rtol=0, atol=1e-6)


def test_a_masked_token_gives_exactly_nothing():
    mask = token_mask(MASKS["causal"], 3, flex=False)
    query, key, value = (torch.randn(1, 18, 2, 8) for _ in range(3))
    before = attend(query, key, value, mask)
    key[:, 12:], value[:, 12:] = 7.0, -7.0  # the last chunk
    after = attend(query, key, value, mask)
    assert torch.equal(before[:, :12], after[:, :12]) and not torch.equal(before[:, 12:], after[:, 12:])
