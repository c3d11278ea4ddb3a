"""Clips of the tiny world to learn from: captions, latents and sizes."""

import pytest
import torch

from unified_trainer.data.clips import DataConfig, VideoConfig, check_tiny_clips, render_clips
from unified_trainer.data.tiny_world import FRAMES, SIZE, SUBJECT_OF_CAPTION, TRAINING


def clips(codec):
    return render_clips(DataConfig(num_clips=24), codec, VideoConfig(FRAMES, SIZE, SIZE), seed=0)


@pytest.mark.slow
def test_rendered_clips_are_named_rightly_and_repeat(codec):
    one, other = clips(codec), clips(codec)
    assert [SUBJECT_OF_CAPTION[prompt] for prompt in one.prompts] == list(TRAINING[:24])
    assert one.prompts == other.prompts and torch.equal(one.encoded, other.encoded)
    assert one.encoded.shape == (24, 16, 5, 4, 4)


def test_rendered_clips_have_one_size():
    with pytest.raises(ValueError, match=r"17 frames of 64 x 64 pixels, but video\.frames"):
        check_tiny_clips(VideoConfig(frames=5))
