"""Stochastic rounding of float32 to bf16: up or down by chance, so that the mean is the exact value."""

from collections.abc import Sequence
from zlib import crc32

import torch
from torch import Tensor

GOLDEN = -1640531527  # 2^32 divided by the golden ratio, as a signed integer
FIRST, SECOND = -2048144789, -1028477387  # multipliers of the 32-bit finalizer of MurmurHash3, signed
KEPT = 16  # bits of a float32 that bf16 keeps


def random_bits(key: int, ranges: Sequence[tuple[int, int]], device: torch.device) -> Tensor:
    """Return 32 random bits, as int32, for each position of ranges (first, count), one range after the other.

    The bits of a position are a function of (key, position) only: the finalizer of MurmurHash3 over position and key.
    Positions and arithmetic wrap at 2^32.
    """
    size = sum(count for _, count in ranges)
    x = torch.empty(size, dtype=torch.int32, device=device)
    starts = [_signed(first) for first, _ in ranges]
    for part, start in zip(x.split([count for _, count in ranges]), starts, strict=True):
        torch.arange(len(part), dtype=torch.int32, device=device, out=part)
        part.add_(start)
    x.mul_(GOLDEN).add_(_signed(crc32(key.to_bytes(8, "little"))))
    for shift, factor in ((16, FIRST), (13, SECOND), (16, None)):
        x.bitwise_xor_((x >> shift).bitwise_and_((1 << 32 - shift) - 1))  # without the copies of the sign
        if factor is not None:
            x.mul_(factor)
    return x


def round_to_bf16_(out: Sequence[Tensor], values: Sequence[Tensor], bits: Tensor) -> None:
    """Fill bf16 tensors with float32 values, rounded up by the chance of their distance to the lower neighbor.

    The low 16 bits of `bits`, one number for each element, decide. The values are used up; they must be finite.
    """
    raw = [value.view(-1).view(torch.int32) for value in values]
    chances = bits.bitwise_and((1 << KEPT) - 1).split([len(tensor) for tensor in raw])
    torch._foreach_add_(raw, list(chances))
    for tensor in raw:
        tensor.bitwise_and_(-1 << KEPT)
    torch._foreach_copy_([tensor.view(-1) for tensor in out], [tensor.view(torch.float32) for tensor in raw])


def _signed(value: int) -> int:
    """Return the signed integer with the lowest 32 bits of `value`."""
    return (value + 2**31) % 2**32 - 2**31
