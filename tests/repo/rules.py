"""A rule of the repository is one test: it looks at every file, setting or word, and lists all that break it."""

import inspect
from collections.abc import Callable, Collection
from typing import Any


def each(
    items: Collection[Any], name: Callable[[Any], str] = str
) -> Callable[[Callable[..., None]], Callable[[], None]]:
    """Make one test of a rule about an item, or about several values in a tuple; `name` names it in the list.

    An item breaks the rule by an AssertionError; any other exception is an error of the rule itself. A rule without
    items fails: files have moved away from it.
    """

    def decorate(rule: Callable[..., None]) -> Callable[[], None]:
        count = len(inspect.signature(rule).parameters)

        def test() -> None:
            assert items, "this rule looks at nothing"
            broken = []
            for item in items:
                try:
                    rule(*item) if count > 1 else rule(item)
                except AssertionError as error:
                    broken.append(f"{name(item)}: {error}")
            assert not broken, "\n" + "\n".join(broken)

        test.__name__, test.__doc__, test.__module__ = rule.__name__, rule.__doc__, rule.__module__
        return test

    return decorate
