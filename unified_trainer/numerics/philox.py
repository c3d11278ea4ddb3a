"""Normal and uniform numbers as a function of a key: Philox4x32-10 (Salmon et al., SC 2011) in torch integers.

A stream is four 32-bit words in int64: two are Philox's key, two the upper half of its counter. The lower half, two
words, is the number of a block of four words. A number depends on its stream and its position alone, so that any set
of streams and any way of computing them in parts give the same numbers.
"""

import math
from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

NAME = "philox4x32-10"  # in the manifests of checkpoints, so that a resume can say that the noise is another one
WORD = 2**32 - 1  # mask of 32 bits
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
PART = {"cpu": 2**14}  # blocks that are computed at a time: on a CPU as many as fit its cache
PART_ON_DEVICE = 2**21  # elsewhere as many as fit in about .2 GiB
COMPILED: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {}  # `words` as one kernel, by kind of accelerator
# Polynomials of Cephes in float32, highest power first: of log(1 + x), and of sin x and cos x in |x| <= pi / 4.
LOG: tuple[float, ...] = (
    7.0376836292e-2,
    -1.1514610310e-1,
    1.1676998740e-1,
    -1.2420140846e-1,
    1.4249322787e-1,
    -1.6668057665e-1,
)
LOG += (2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1)
SIN = (-1.9515295891e-4, 8.3321608736e-3, -1.6666654611e-1)
COS = (2.443315711809948e-5, -1.388731625493765e-3, 4.166664568298827e-2)


def words(streams: Int[Tensor, "n 4"], start: int, stop: int) -> tuple[Int[Tensor, "2 n m"], Int[Tensor, "2 n m"]]:
    """Return blocks `start` to `stop` of each stream: their words 0 and 2, and their words 3 and 1.

    A round is c0, c1, c2, c3 = hi(M1 c2) ^ c1 ^ k0, lo(M1 c2), hi(M0 c0) ^ c3 ^ k1, lo(M0 c0) with M = MULTIPLIERS;
    after it, k0 and k1 grow by KEY_STEPS. Products wrap modulo 2^64, which keeps all their bits.
    """
    # Both halves of a round are one operation. They change places in each round: (c0, c2) with (c3, c1), then (c2, c0)
    # with (c1, c3), and after an even number of rounds as before.
    device, n, m = streams.device, len(streams), stop - start
    even, odd, products = (torch.empty(2, n, m, dtype=torch.int64, device=device) for _ in range(3))
    counter = torch.arange(start, stop, device=device)
    even[0], even[1] = counter & WORD, streams[:, 2, None]
    odd[0], odd[1] = streams[:, 3, None], (counter >> 32) & WORD
    rounds = torch.arange(ROUNDS, device=device)[:, None, None]
    keys = [((streams[:, i, None] + KEY_STEPS[i] * rounds) & WORD).unbind() for i in range(2)]  # of every round
    for number in range(ROUNDS):
        first = number % 2  # which of the multipliers and keys is the first half's
        torch.mul(even[0], MULTIPLIERS[first], out=products[0])
        torch.mul(even[1], MULTIPLIERS[1 - first], out=products[1])
        odd[0].bitwise_xor_(keys[1 - first][number])
        odd[1].bitwise_xor_(keys[first][number])
        torch.bitwise_right_shift(products, 32, out=even).bitwise_xor_(odd).bitwise_and_(WORD)
        torch.bitwise_and(products[1], WORD, out=odd[0])
        torch.bitwise_and(products[0], WORD, out=odd[1])
    return even, odd


def normal_pair(a: Int[Tensor, "*s"], b: Int[Tensor, "*s"]) -> tuple[Float[Tensor, "*s"], Float[Tensor, "*s"]]:
    """Return r cos p and r sin p, r = sqrt(-2 ln((a + 1/2) / 2^32)), p = 2 pi (b + 1/2) / 2^32, in float64."""
    radius = a.double().add_(0.5).mul_(2.0**-32).log_().mul_(-2).sqrt_()
    angle = b.double().add_(0.5).mul_(2.0**-31 * math.pi)
    return radius * angle.cos(), angle.sin_().mul_(radius)


def normal_pair_float32(a: Int[Tensor, "*s"], b: Int[Tensor, "*s"]) -> tuple[Float[Tensor, "*s"], Float[Tensor, "*s"]]:
    """Return the pair of `normal_pair` from integers and float32 alone, for devices without float64.

    It takes only additions, multiplications and square roots, which every device rounds alike, so that its numbers are
    the same on all of them. They are within 1e-6 of those of float64.
    """
    radius = _minus_log(a).mul_(2).sqrt_()
    quarter = (b + 2**29) >> 30  # the nearest of 0 ... 4 quarter turns
    angle = (((b - (quarter << 30)) << 1) + 1).float() * (2.0**-32 * math.pi)  # the rest, in [-pi / 4, pi / 4]
    square = angle * angle
    sine = _polynomial(square, SIN).mul_(square).mul_(angle).add_(angle)
    cosine = _polynomial(square, COS).mul_(square).sub_(0.5).mul_(square).add_(1.0)
    swapped = (quarter & 1) == 1
    negative_cosine, negative_sine = ((quarter + 1) & 2).float(), (quarter & 2).float()  # 2 where it is negative
    return (
        torch.where(swapped, sine, cosine).mul_(1 - negative_cosine).mul_(radius),
        torch.where(swapped, cosine, sine).mul_(1 - negative_sine).mul_(radius),
    )


def _minus_log(a: Int[Tensor, "*s"]) -> Float[Tensor, "*s"]:
    """Return -ln((a + 1/2) / 2^32) in float32.

    (2 a + 1) / 2^33 = 2^-k (1 + x) with x in [sqrt(1/2) - 1, sqrt(2) - 1]. x is a difference of integers: in float32,
    numbers near 1 would lose their distance to 1.
    """
    whole = 2 * a + 1
    root, one = (torch.tensor(value).view(torch.int32).item() for value in (math.sqrt(0.5), 1.0))
    exponent = (whole.float().view(torch.int32) + (one - root)) >> 23  # with the bias of float32, 127
    power = (exponent << 23).view(torch.float32)
    x = (whole - power.long()).float() / power
    square = x * x
    log = _polynomial(x, LOG).mul_(x).mul_(square).sub_(square, alpha=0.5).add_(x)
    return (127 + 33 - exponent).float().mul_(math.log(2)).sub_(log)


def _polynomial(x: Float[Tensor, "*s"], coefficients: tuple[float, ...]) -> Float[Tensor, "*s"]:
    y = x * coefficients[0]
    for coefficient in coefficients[1:-1]:
        y.add_(coefficient).mul_(x)
    return y.add_(coefficients[-1])


@torch.no_grad()
def normal(
    streams: Int[Tensor, "n 4"], count: int, *, float64: bool = True, part: int | None = None
) -> Float[Tensor, "n count"]:
    """Return the first `count` standard normal numbers of each stream, float32, on the streams' device.

    Block j has numbers 4j ... 4j + 3: the pair of its words 0 and 3, and that of its words 2 and 1 (Box-Muller). The
    transform is computed in float64 and rounded once; without `float64` see `normal_pair_float32`. `part` is the number
    of blocks that are computed at a time; it changes no number.
    """
    n, blocks = len(streams), -(-count // 4)
    pair, drawn = normal_pair if float64 else normal_pair_float32, COMPILED.get(streams.device.type, words)
    size = max(1, (part or PART.get(streams.device.type, PART_ON_DEVICE)) // max(n, 1))
    noise = torch.empty(n, blocks, 2, 2, device=streams.device)
    for start in range(0, blocks, size):
        stop = min(start + size, blocks)
        for i, numbers in enumerate(pair(*drawn(streams, start, stop))):
            noise[:, start:stop, :, i] = numbers.permute(1, 2, 0)
    return noise.view(n, 4 * blocks)[:, :count]


@torch.no_grad()
def uniform(streams: Int[Tensor, "n 4"]) -> Float[Tensor, " n"]:
    """Return one float64 number in [0, 1) of each stream: the upper 53 bits of words 0 and 1 of its first block."""
    even, odd = words(streams, 0, 1)
    return ((even[0, :, 0] << 21) + (odd[1, :, 0] >> 11)).double() * 2.0**-53
