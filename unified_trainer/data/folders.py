"""The files of a folder as people keep them: with linked folders, and without hidden files."""

from collections import deque
from pathlib import Path

from unified_trainer.basics.errors import UserError


def files_below(folder: Path) -> list[Path]:
    """Return the files of a folder and of those below it, in the order of their names.

    Names that begin with a dot are left out. A folder that is reached by a link is read too, each folder once. A link
    that leads nowhere counts as a file. Raise UserError for a folder that cannot be read.
    """
    found, waiting, seen = list[Path](), deque([folder]), set[Path]()
    while waiting:
        here = waiting.popleft()
        if (real := here.resolve()) in seen:
            continue
        seen.add(real)
        try:
            entries = [entry for entry in here.iterdir() if not entry.name.startswith(".")]
        except OSError as error:
            raise UserError(f"{here} cannot be read: {error.strerror}") from error
        for entry in sorted(entries):
            if not entry.is_dir():
                found.append(entry)
            elif entry.is_symlink():
                waiting.append(entry)  # last, so that a file has the name that it has without links
            else:
                waiting.appendleft(entry)
    return sorted(found)
