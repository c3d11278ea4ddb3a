"""Files that the program writes into folders that may come from somebody else: a link there is never followed."""

import os
from pathlib import Path


def no_follow(path: str | Path, flags: int) -> int:
    """Open a file for `open(..., opener=no_follow)`; OSError (ELOOP) if its last part is a link."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def without_link(file: Path) -> Path:
    """Return the path of a file that will be written anew, after removing a link that is there."""
    if file.is_symlink():
        file.unlink()
    return file


def write(file: Path, content: bytes) -> None:
    """Write or replace a file of a run directory: a kill leaves the old or the new one."""
    file.parent.mkdir(parents=True, exist_ok=True)
    building = without_link(file.with_suffix(".tmp"))
    building.write_bytes(content)
    building.replace(file)
