"""Marks in the type of a setting: the range of its numbers, and whether --resume may change it.

A range is declared once, in the type of its field, and holds wherever a value comes from.

    max_grad_norm: NonNegative = 1.0
    eta: Annotated[float, above(0, 100)] = 0.3

A range in the type of an optional value or of a tuple holds for each number. Infinity and NaN are in no range that does
not list them, and a number whose type has no range must be finite.

A resumed run computes what the run before would have computed, so only marked fields, or those of a marked section, may
have other values than in its config.yaml:

    keep_last: Annotated[Count, MAY_CHANGE] = 2
"""

import math
import typing
from dataclasses import dataclass
from typing import Annotated, Any

LONGEST = 10**9  # training steps or updates: more than any run has, and few enough to count with
MOST = 10**6  # of what a run makes or holds at a time, such as samples or processes


@dataclass(frozen=True)
class MayChange:
    """The mark of a setting that does not change what a training step computes."""


MAY_CHANGE = MayChange()


@dataclass(frozen=True)
class Range:
    """An interval of numbers; as a mark of a type it says which values a setting may have."""

    low: float = -math.inf
    high: float = math.inf
    open_low: bool = False  # low itself is outside
    open_high: bool = False  # high itself is outside
    also: tuple[float, ...] = ()  # values outside the interval that are allowed, such as -inf
    never: tuple[float, ...] = ()  # values inside the interval that are refused

    def __contains__(self, value: float) -> bool:
        if value in self.also:
            return True
        above_low = value > self.low if self.open_low else value >= self.low
        below_high = value < self.high if self.open_high else value <= self.high
        return above_low and below_high and -math.inf < value < math.inf and value not in self.never

    def __str__(self) -> str:
        low = f"{'above' if self.open_low else 'at least'} {_shown(self.low)}" if self.low > -math.inf else ""
        high = f"{'below' if self.open_high else 'at most'} {_shown(self.high)}" if self.high < math.inf else ""
        if low and high and not self.open_low and not self.open_high:
            words = f"from {_shown(self.low)} to {_shown(self.high)}"
        else:
            words = " and ".join(filter(None, (low, high))) or "a finite number"
        words += "".join(f" but not {_shown(value)}" for value in self.never)
        return words + "".join(f", or {_shown(value)}" for value in self.also)

    @property
    def interval(self) -> str:
        """The interval as formulas write it, such as (0, 1]."""
        low, high = "(" if self.open_low else "[", ")" if self.open_high else "]"
        return f"{low}{_shown(self.low)}, {_shown(self.high)}{high}"


def at_least(low: float, high: float = math.inf) -> Range:
    """Return the numbers from `low` on, up to `high`, both included."""
    return Range(low, high)


def above(low: float, high: float = math.inf) -> Range:
    """Return the numbers above `low`, up to `high`, which is included."""
    return Range(low, high, open_low=True)


Finite = Annotated[float, Range()]
NonNegative = Annotated[float, at_least(0)]
Positive = Annotated[float, above(0)]
Fraction = Annotated[float, at_least(0, 1)]
PositiveFraction = Annotated[float, above(0, 1)]
Decay = Annotated[float, Range(0, 1, open_high=True)]
Count = Annotated[int, at_least(1, MOST)]
CountOrZero = Annotated[int, at_least(0, MOST)]
Period = Annotated[int, at_least(1, LONGEST)]  # in training steps or updates
PeriodOrZero = Annotated[int, at_least(0, LONGEST)]
Port = Annotated[int, at_least(0, 2**16 - 1)]
Seed = Annotated[int, at_least(-(10**18), 10**18)]
NetworkCalls = Annotated[int, at_least(1, 1000)]  # per sample
Frames = Annotated[int, at_least(1, 100_000)]
FramesOrZero = Annotated[int, at_least(0, 100_000)]
Pixels = Annotated[int, at_least(1, 16_384)]
PixelsOrZero = Annotated[int, at_least(0, 16_384)]
FramesPerSecond = Annotated[float, above(0, 1000)]
Shift = Annotated[float, above(0, 1000)]  # of noise levels, see numerics/flow.py
Gibibytes = Annotated[float, at_least(0, 1e6)]
Minutes = Annotated[float, above(0, 1e6)]
Seconds = Annotated[float, above(0, 1e7)]


def range_of(kind: Any) -> Range | None:
    """Return the range that a type is marked with, itself or in the types that it consists of; None without one."""
    for part in typing.get_args(kind):
        if limits := part if isinstance(part, Range) else range_of(part):
            return limits
    return None


def reason(limits: Range | None, value: Any) -> str:
    """Return in words why a value is refused, such as "must be above 0, not -1.0"; "" for one that is allowed.

    `limits` is the range of its type. The numbers of a tuple are looked at one by one; values of other types pass.
    """
    for number in value if isinstance(value, tuple) else (value,):
        if isinstance(number, (int, float)) and not isinstance(number, bool) and number not in (limits or Range()):
            which = "each be" if isinstance(value, tuple) else "be"
            return f"must {which} {limits or Range()}, not {str(number).removesuffix('.0')}"
    return ""


def _shown(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"
