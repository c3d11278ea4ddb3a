"""Resizing of images as Pillow does it with its bicubic filter, on any device.

Pillow resizes 8-bit images in fixed point: weights are multiples of 2^-22, and both passes round to 8 bits. A weight is
the sum of two parts of 12 bits or fewer here, whose sums with 8-bit pixels are exact in float32.
"""

import functools

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import interpolate

BITS = 22  # of Pillow's weights behind the point
LOW = 11  # of them in the lower part of a weight


def resize(images: Float[Tensor, "b c h w"], height: int, width: int) -> Float[Tensor, "b c height width"]:
    """Resize images in [0, 1] without rounding, with a gradient to them; columns come first, each pass is clipped."""
    for shape in ((images.shape[2], width), (height, width)):
        images = interpolate(images, shape, mode="bicubic", antialias=True).clamp(0, 1)
    return images


def resize_8bit(pixels: Float[Tensor, "*b h w"], height: int, width: int) -> Float[Tensor, "*b height width"]:
    """Resize whole numbers from 0 to 255, in float32, as `PIL.Image.resize` does; a side shrinks 16-fold at most.

    Columns come first. Pillow 13 begins with the rows of images that lose much more height than width.
    """
    with torch.autocast(pixels.device.type, enabled=False):
        columns = _rows(pixels, _weights(pixels.shape[-1], width, pixels.device))
        return _rows(columns.mT, _weights(pixels.shape[-2], height, pixels.device)).mT


def _rows(pixels: Tensor, weights: tuple[Tensor, Tensor]) -> Tensor:
    """Resize rows: round their products with the weights."""
    high, low = (pixels @ part for part in weights)
    sums = (high.int() << LOW) + low.int() + (1 << BITS - 1)
    return (sums >> BITS).clamp(0, 255).float()


@functools.lru_cache(maxsize=64)
def _weights(source: int, target: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the upper and the lower part of the weights of an axis, [source, target], on the device."""
    scale = source / target
    stretch = max(scale, 1.0)
    weights = torch.zeros(target, source, dtype=torch.int64)
    for row in range(target):
        centre = (row + 0.5) * scale
        first = max(int(centre - 2 * stretch + 0.5), 0)
        last = min(int(centre + 2 * stretch + 0.5), source)
        taps = [_bicubic((i - centre + 0.5) * (1 / stretch)) for i in range(first, last)]
        total = sum(taps)
        scaled = [tap * (1 / total) * (1 << BITS) for tap in taps]
        weights[row, first:last] = torch.tensor([int(tap - 0.5 if tap < 0 else tap + 0.5) for tap in scaled])
    high = weights + (1 << LOW - 1) >> LOW
    return high.float().mT.to(device), (weights - (high << LOW)).float().mT.to(device)


def _bicubic(x: float) -> float:
    x = abs(x)
    if x < 1:
        return ((1.5 * x) - 2.5) * x * x + 1
    return (((x - 5) * x + 8) * x - 4) * -0.5 if x < 2 else 0.0
