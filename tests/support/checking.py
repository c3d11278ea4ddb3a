"""The type checker that the test run puts around every function of the product."""

from collections.abc import Iterator
from typing import Any, Protocol, get_args, runtime_checkable

from beartype import BeartypeConf, beartype
from beartype.roar import BeartypeDecorHintPep673Exception

_checked = beartype(conf=BeartypeConf(is_pep484_tower=True))  # ints pass as floats, as Python's typing says


def check(thing: Any) -> Any:
    """beartype, which looks only into runtime protocols and cannot read `Self` in a method of a protocol."""
    for hint in _parts(tuple(getattr(thing, "__annotations__", {}).values())):
        if isinstance(hint, type) and Protocol in hint.__bases__:
            runtime_checkable(hint)
    try:
        return _checked(thing)
    except BeartypeDecorHintPep673Exception:
        return thing


def _parts(hints: tuple[Any, ...]) -> Iterator[Any]:
    for hint in hints:
        yield hint
        yield from _parts(get_args(hint))
