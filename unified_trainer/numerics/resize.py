"""Resizing of 8-bit images as Pillow does it, bit for bit, on any device.

Pillow's bicubic filter (a = -.5, stretched where an image shrinks) in fixed point: weights are multiples of 2^-22, and
both passes round to 8 bits. Products and sums of these integers are exact in float64.
"""

import functools

import torch
from jaxtyping import Float
from torch import Tensor

UNIT = 1 << 22  # Pillow's fixed-point one


def resize_8bit(pixels: Float[Tensor, "*b h w"], height: int, width: int) -> Float[Tensor, "*b height width"]:
    """Resize whole numbers from 0 to 255 as `PIL.Image.resize` does with BICUBIC; float64, on the same device.

    Columns come first. Pillow 13 begins with the rows of images that lose much more height than width.
    """
    pixels = pixels.double()
    columns = _weights(pixels.shape[-1], width).to(pixels.device)
    rows = _weights(pixels.shape[-2], height).to(pixels.device)
    return _round(rows @ _round(pixels @ columns.T))


def _round(sums: Tensor) -> Tensor:
    return ((sums + UNIT // 2) / UNIT).floor().clamp(0, 255)


@functools.lru_cache(maxsize=64)
def _weights(source: int, target: int) -> Float[Tensor, "target source"]:
    """Return the weights of one axis, whole numbers of which a row sums to about UNIT."""
    scale = source / target
    stretch = max(scale, 1.0)
    weights = torch.zeros(target, source, dtype=torch.float64)
    for row in range(target):
        centre = (row + 0.5) * scale
        first = max(int(centre - 2 * stretch + 0.5), 0)
        last = min(int(centre + 2 * stretch + 0.5), source)
        taps = [_bicubic((i - centre + 0.5) * (1 / stretch)) for i in range(first, last)]
        total = sum(taps)
        scaled = [tap * (1 / total) * UNIT for tap in taps]
        weights[row, first:last] = torch.tensor([int(tap - 0.5 if tap < 0 else tap + 0.5) for tap in scaled]).double()
    return weights


def _bicubic(x: float) -> float:
    x = abs(x)
    if x < 1:
        return ((1.5 * x) - 2.5) * x * x + 1
    return (((x - 5) * x + 8) * x - 4) * -0.5 if x < 2 else 0.0
