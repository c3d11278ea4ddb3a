"""Marks in the type of a setting that is a text: what the program does with what the text names.

    python: Annotated[str, RUNS_PROGRAM] = ""

The user is asked about each such setting of a received file (run/settings/border.py), unless it only names data to
read. `tests/run/settings/test_effects.py` refuses a text without a mark.
"""

import typing
from dataclasses import dataclass
from typing import Annotated, Any, Literal

Form = Literal["code", "program", "file", "path", "text"]


@dataclass(frozen=True)
class Effect:
    """The mark of a setting whose value has an effect; `form` is the kind of thing that the value names."""

    does: Literal["run", "read", "write", "contact", "send", "nothing"]
    form: Form = "text"
    asked: bool = True  # whether a file of somebody else needs the user's agreement for it
    unless: tuple[str, ...] = ()  # values with which nothing is done, beside the empty text


RUNS_CODE = Effect("run", "code")  # file.py:NAME, package.module:NAME, or a name that an installed package offers
RUNS_PROGRAM = Effect("run", "program")
RUNS_FILE = Effect("run", "file")  # a format that holds a program, such as TorchScript
READS = Effect(
    "read", "path", asked=False, unless=("tiny",)
)  # formats that are data alone, here or on the Hugging Face hub
WRITES = Effect("write", "path")
CONTACTS = Effect("contact")
SENDS = Effect("send")  # a secret, and what a user's own code does with a text is not known
TRACKS = Effect("send", unless=("off", "offline", "False"))  # a service that gets metrics; YAML reads off as False
ACCOUNT = Effect("contact", asked=False)  # belongs to a setting with TRACKS, which is asked about
PLAIN = Effect("nothing", asked=False)

Text = Annotated[str, PLAIN]


def effect_of(kind: Any) -> Effect | None:
    """Return the effect that a type is marked with, itself or in the types that it consists of; None without one."""
    for part in typing.get_args(kind):
        if effect := part if isinstance(part, Effect) else effect_of(part):
            return effect
    return None
