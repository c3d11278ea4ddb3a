"""Versions of installed packages, and how further ones are installed."""

import shlex
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

CHECKOUT = Path(__file__).parents[2]


def version_of(package: str) -> str:
    """Return the version of an installed package; "not installed" for one that is only found on Python's path."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def install(extra: str) -> str:
    """Return the command that installs an extra of this checkout; no index of packages is asked for its name."""
    return f"pip install -e {shlex.quote(f'{CHECKOUT}[{extra}]')}"
