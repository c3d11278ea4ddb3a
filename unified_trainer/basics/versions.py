"""Versions of installed packages."""

from importlib.metadata import PackageNotFoundError, version


def version_of(package: str) -> str:
    """Return the version of an installed package; "not installed" for one that is only found on Python's path."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
