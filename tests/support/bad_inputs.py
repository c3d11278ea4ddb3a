"""What all tables of bad inputs share: how a file is spoilt, and what its error must be."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from unified_trainer.basics.errors import UserError

ABSENT = ...  # the value of a field that is removed


def refused(call: Callable[[], Any], *named: str) -> None:
    """It ends in one error of one line, which names all of these."""
    with pytest.raises(UserError) as caught:
        call()
    said = str(caught.value)
    assert "\n" not in said and [part for part in named if part not in said] == [], said


def edit(file: Path, field: str, value: Any) -> None:
    """Change a field of a JSON file, named a.b.c, or remove it."""
    content = json.loads(file.read_text())
    *outer, last = field.split(".")
    inner = content
    for name in outer:
        inner = inner[name]
    if value is ABSENT:
        del inner[last]
    else:
        inner[last] = value
    file.write_text(json.dumps(content))
