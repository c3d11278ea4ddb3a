"""Resizing of 8-bit images against Pillow."""

import numpy as np
import pytest
import torch
from PIL import Image

from unified_trainer.numerics.resize import resize_8bit

SHAPES = [  # height, width -> height, width: of videos that HPSv3 reads, and of odd ones
    ((64, 64), (112, 112)),
    ((64, 64), (448, 448)),
    ((240, 416), (336, 588)),
    ((480, 832), (336, 588)),
    ((416, 240), (588, 336)),
    ((720, 1280), (336, 588)),
    ((37, 53), (37, 91)),
    ((53, 37), (20, 37)),
    ((1, 9), (1, 4)),
    ((7, 5), (7, 5)),
    ((480, 3), (30, 3)),
]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["noise", "black and white", "smooth"])
@pytest.mark.parametrize(("source", "target"), SHAPES)
def test_every_value_is_pillows(source, target, kind):
    drawn = np.random.default_rng(0).integers(0, 256, (*source, 3), dtype=np.uint8)
    if kind == "black and white":  # the filter overshoots at every edge
        drawn = (drawn > 127).astype(np.uint8) * 255
    if kind == "smooth":
        ramp = np.add.outer(np.arange(source[0]), np.arange(source[1])) * 255 // (sum(source) - 1)
        drawn = np.stack([ramp, 255 - ramp, ramp // 2], -1).astype(np.uint8)
    expected = Image.fromarray(drawn).resize(target[::-1], Image.Resampling.BICUBIC)
    resized = resize_8bit(torch.from_numpy(drawn).movedim(-1, 0).float(), *target)
    assert torch.equal(resized.movedim(0, -1).byte(), torch.from_numpy(np.array(expected)))


def test_images_of_a_batch_are_resized_apart():
    images = torch.randint(0, 256, (3, 2, 20, 30), generator=torch.Generator().manual_seed(0)).float()
    together = resize_8bit(images, 11, 40)
    assert all(torch.equal(part, resize_8bit(image, 11, 40)) for part, image in zip(together, images, strict=True))


def test_values_are_the_same_within_autocast():
    image = torch.randint(0, 256, (3, 48, 80), generator=torch.Generator().manual_seed(0)).float()
    exact = resize_8bit(image, 30, 112)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(resize_8bit(image, 30, 112), exact)
