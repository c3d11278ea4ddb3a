"""Philox against Random123's known answers, and the two transforms to normal numbers against float64."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unified_trainer.numerics import philox

# Counter, key and words of philox4x32-10 in Random123's kat_vectors.
KNOWN = {
    "zeros": ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    "ones": ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    "pi": ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
}
EDGES = [0, 1, 2, 2**29 - 1, 2**29, 2**30, 2**31 - 1, 2**31, 3037000499, 3037000500, 3 * 2**30, 2**32 - 2, 2**32 - 1]


def some_streams(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 2**32, (count, 4), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", KNOWN)
def test_known_answers(name):
    counter, key, expected = ([int(word, 16) for word in words.split()] for words in KNOWN[name])
    block = counter[0] | counter[1] << 32
    block -= 2**64 if block >= 2**63 else 0  # an int64 of these bits
    even, odd = philox.words(torch.tensor([key + counter[2:]]), block, block + 1)
    assert [int(word) for word in (even[0], odd[1], even[1], odd[0])] == expected


@given(count=st.integers(1, 70), part=st.integers(1, 30), rows=st.lists(st.integers(0, 4), min_size=1, max_size=4))
def test_a_row_depends_neither_on_other_rows_nor_on_the_length_of_parts(count, part, rows):
    streams = some_streams(5)
    whole = philox.normal(streams, 70)
    assert torch.equal(philox.normal(streams[rows], count, part=part), whole[rows, :count])
    assert torch.equal(philox.uniform(streams[rows]), philox.uniform(streams)[rows])


def test_large_draws_in_parts_are_equal():
    """Also where a part is longer than the vectors of the processor, and ends within one."""
    streams = some_streams(3)
    whole = philox.normal(streams, 40003, part=2**20)
    for part in (999, 2**14):
        assert torch.equal(philox.normal(streams, 40003, part=part), whole)


def test_uniform_is_the_first_two_words():
    even, odd = philox.words(some_streams(64), 0, 1)
    first, second = even[0, :, 0], odd[1, :, 0]
    expected = [(int(a) * 2**32 + int(b)) // 2**11 / 2**53 for a, b in zip(first, second, strict=True)]
    assert philox.uniform(some_streams(64)).tolist() == expected


def by_hand(a: int, b: int) -> tuple[float, float]:
    radius, angle = math.sqrt(-2 * math.log((a + 0.5) / 2**32)), 2 * math.pi * (b + 0.5) / 2**32
    return radius * math.cos(angle), radius * math.sin(angle)


@pytest.mark.parametrize(("pair", "error"), [(philox.normal_pair, 1e-14), (philox.normal_pair_float32, 1e-6)])
def test_the_transform_by_hand(pair, error):
    """Where words are at their ends, and where octants and powers of two of float32 change."""
    grid = torch.cartesian_prod(torch.tensor(EDGES), torch.tensor(EDGES))
    found = torch.stack(pair(*grid.unbind(1)), 1)
    expected = torch.tensor([by_hand(a, b) for a, b in grid.tolist()], dtype=torch.float64)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=error)


def test_without_float64_the_numbers_are_within_1e_6():
    streams = some_streams(4)
    drawn = philox.normal(streams, 2**16, float64=False)
    assert drawn.dtype == torch.float32
    difference = (drawn - philox.normal(streams, 2**16)).abs().max()
    assert 0 < float(difference) < 1e-6


def test_the_numbers_are_standard_normal():
    """Moments of 2^20 numbers within five of their deviations: 1, sqrt 2, sqrt 15, sqrt 96 by 2^-10."""
    drawn = philox.normal(some_streams(4), 2**18).double()
    for power, expected, deviation in ((1, 0, 1), (2, 1, 2**0.5), (3, 0, 15**0.5), (4, 3, 96**0.5)):
        assert float(drawn.pow(power).mean()) == pytest.approx(expected, abs=5 * deviation / 2**10)
    neighbors = torch.corrcoef(drawn.reshape(-1, 4).T) - torch.eye(4)
    assert float(neighbors.abs().max()) < 5 / 2**9
