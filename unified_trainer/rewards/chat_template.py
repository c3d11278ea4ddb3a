"""Chat templates of a scorer's folder: Jinja programs, which are tried once before they are used."""

import json
from collections.abc import Iterable, Iterator
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from unified_trainer.basics.errors import UserError

STEPS = 10_000  # rounds of loops, calls and products that writing one chat may take; Qwen2-VL's template takes 20

FAULTS = (TemplateError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox that transformers renders templates in, with a bound on the steps of one rendering."""

    intercepted_binops = frozenset(["*", "**"])  # a product can be a text that fills the memory

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        self.filters["bounded"], self.filters["tojson"] = self._bounded, json.dumps
        self.globals["raise_exception"] = _refuse
        self._steps = 0

    def render_bounded(self, template: str, **variables: Any) -> str:
        """Render a template; raise TemplateError for one that takes more than STEPS steps."""
        self._steps = 0
        tree = self.parse(template)
        for loop in tree.find_all(nodes.For):
            loop.iter = nodes.Filter(loop.iter, "bounded", [], [], None, None, lineno=loop.lineno)
        tree.set_environment(self)
        return self.from_string(tree).render(**variables)

    def call(self, *positional: Any, **named: Any) -> Any:
        self._count()
        return super().call(*positional, **named)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        self._count()
        if not isinstance(left, int | float) or not isinstance(right, int | float) or operator == "**":
            raise TemplateError(f"{operator} is for small numbers only")
        return super().call_binop(context, operator, left, right)

    def _bounded(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self._count()
            yield item

    def _count(self) -> None:
        self._steps += 1
        if self._steps > STEPS:
            raise TemplateError(f"it takes more than {STEPS} steps for one chat")


def check_template(template: str, messages: list[dict[str, Any]], place: str) -> None:
    """Raise UserError, which begins with `place`, unless a template can write these messages in STEPS steps."""
    try:
        _Environment().render_bounded(template, messages=messages, add_generation_prompt=True)
    except FAULTS as error:
        raise UserError(f"{place}: chat_template fails ({' '.join(str(error).split())}): fetch it again") from error


def _refuse(message: str) -> None:
    raise TemplateError(message)
