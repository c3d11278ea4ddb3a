"""Passwords and keys: they are named by an environment variable or a file, and never stored or printed."""

import os
import re
from pathlib import Path

from unified_trainer.basics.errors import UserError

OF_A_URL = re.compile(r"(?<=://)[^\s/@'\"]+(?=@)")
NAME = (
    r"(?:(?:api|access|secret|private|auth)[_-]?key|secret|pass(?:word|wd|phrase)?|pwd|auth|bearer|credentials?|token)"
)
NAMES = re.compile(rf"(?:^|[_.-]){NAME}$")
OF_A_QUERY = re.compile(rf"(?<=[?&#])((?:[\w.-]*[_.-])?(?:{NAME}|key|sig|signature))=[^\s&#'\"]+", re.IGNORECASE)
VARIABLE, FILE = "env:", "file:"


def masked(text: str) -> str:
    """Return a text in which user and password of each URL, and keys and tokens in its query, are ***."""
    return OF_A_QUERY.sub(r"\1=***", OF_A_URL.sub("***", text))


def check_secret(key: str, value: str) -> None:
    """Raise UserError, naming the setting, for a secret that is not named by variable or file, or is not there."""
    if not NAMES.search(key.lower()) or not value:
        return
    if not value.startswith((VARIABLE, FILE)):
        raise UserError(
            f"{key} would be stored in the run: give {VARIABLE}NAME, the environment variable that holds it, or "
            f"{FILE}PATH, a file with it"
        )
    revealed(key, value)


def revealed(key: str, value: str) -> str:
    """Return the secret that a setting names, and every other value as it is; UserError if it is not there."""
    if not NAMES.search(key.lower()):
        return value
    if value.startswith(VARIABLE):
        if not (secret := os.environ.get(value.removeprefix(VARIABLE), "")):
            raise UserError(f"{key}: the environment has no {value.removeprefix(VARIABLE)}")
        return secret
    if value.startswith(FILE):
        try:
            return Path(value.removeprefix(FILE)).expanduser().read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{key} {value}: {error}") from error
    return value
