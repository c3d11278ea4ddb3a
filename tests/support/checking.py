"""The type checker that the test run puts around every function of the product."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, Literal, Protocol, get_args, get_origin, runtime_checkable

import jaxtyping
from beartype import BeartypeConf, beartype
from beartype.roar import BeartypeDecorHintPep673Exception

_checked = beartype(conf=BeartypeConf(is_pep484_tower=True))  # ints pass as floats, as Python's typing says
_with_shapes = jaxtyping.jaxtyped
CALLS = 4  # of each function that are checked in a test: training makes thousands, all alike
_tests = 0  # that were begun


def begin_test() -> None:
    """Check the next CALLS calls of every function again."""
    global _tests
    _tests += 1


def install() -> None:
    """Check the product from its next import on, except while `jaxtyping_disable` is set."""
    jaxtyping.jaxtyped = decorator
    jaxtyping.install_import_hook("unified_trainer", "checking.check")


def decorator(*, typechecker: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The decorator that the import hook writes above every function and class."""

    def decorated(thing: Any) -> Any:
        if inspect.isfunction(thing):
            return _function(thing, typechecker)
        if dataclasses.is_dataclass(thing) and inspect.isfunction(made := vars(thing).get("__init__")):
            thing.__init__ = made if hasattr(made, "__wrapped__") else _function(made, typechecker)
        return thing

    return decorated


def _function(given: Callable[..., Any], typechecker: Callable[[Any], Any]) -> Callable[..., Any]:
    """With its first calls in a test checked; the checks are made when it is first called.

    A function inside another one is left alone: it would be given new checks at each call of that one.
    """
    if not given.__annotations__ or "<locals>" in given.__qualname__:
        return given
    config, checked, test, left = jaxtyping.config, None, 0, CALLS

    @functools.wraps(given)
    def chosen(*arguments: Any, **named: Any) -> Any:
        nonlocal checked, test, left
        if config.jaxtyping_disable:  # without a trace: a compiler may follow this call
            return given(*arguments, **named)
        if test != _tests:
            test, left = _tests, CALLS
        if not left:
            return given(*arguments, **named)
        left -= 1
        if checked is None:
            checked = _with_checks(given, typechecker)
        return checked(*arguments, **named)

    return chosen


def _with_checks(given: Callable[..., Any], typechecker: Callable[[Any], Any]) -> Callable[..., Any]:
    """With its types checked, and its shapes where it names any: a call with shapes costs thirty times as much."""
    hints = tuple(given.__annotations__.values())
    if any(map(_names_a_shape, _parts(hints))):
        return _with_shapes(given, typechecker=typechecker)
    return typechecker(given)


def check(thing: Any) -> Any:
    """beartype, which looks only into runtime protocols and cannot read `Self` in a method of a protocol."""
    for hint in _parts(tuple(getattr(thing, "__annotations__", {}).values())):
        if isinstance(hint, type) and Protocol in hint.__bases__:
            runtime_checkable(hint)
    try:
        return _checked(thing)
    except BeartypeDecorHintPep673Exception:
        return thing


def _names_a_shape(hint: Any) -> bool:
    """Also any text, which is not looked into."""
    return isinstance(hint, str) or (isinstance(hint, type) and issubclass(hint, jaxtyping.AbstractArray))


def _parts(hints: tuple[Any, ...]) -> Iterator[Any]:
    for hint in hints:
        yield hint
        if get_origin(hint) is not Literal:
            yield from _parts(get_args(hint))
