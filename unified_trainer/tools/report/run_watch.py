"""The runs below a folder as they go on: a run is read again only when its files changed, and what grew from there."""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Generic, TypeVar

from unified_trainer.run.checkpoint import manifest
from unified_trainer.tools.report.metrics_reader import MetricsReader
from unified_trainer.tools.report.run_folder import (
    CONFIG,
    ENVIRONMENT,
    METRICS,
    SAMPLES,
    RunFolderUnreadableError,
    RunRecord,
    find_runs,
    name_below,
    read_run,
)
from unified_trainer.tools.report.status import is_locked

READ = 16  # runs whose metrics stay in memory
CHECKPOINTS, VALIDATIONS = "checkpoints", "validation"
Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class Remembered(Generic[Key, Value]):
    """Values that are made anew when their signature changes; of more than `most` those used last stay."""

    def __init__(self, most: int) -> None:
        self._most, self._held = most, OrderedDict[Key, tuple[Hashable, Value]]()

    def get(self, key: Key, signature: Hashable, make: Callable[[], Value]) -> Value:
        """Return the value of a key."""
        known = self._held.get(key)
        if known is None or known[0] != signature:
            known = signature, make()
        self._held[key] = known
        self._held.move_to_end(key)
        while len(self._held) > self._most:
            self._held.popitem(last=False)
        return known[1]


class RunWatch:
    """Finds and reads the runs below a folder, which may appear, grow and disappear meanwhile; for one thread."""

    def __init__(self, folder: Path) -> None:
        self.root = folder.resolve()
        self._records, self._readers = Remembered[Path, RunRecord](READ), Remembered[Path, MetricsReader](READ)

    def runs(self) -> dict[str, Path]:
        """Return the run directories by name, which is their path below the folder; none if the folder is gone."""
        try:
            folders = find_runs(self.root)
        except OSError:
            return {}
        return {name_below(path, self.root): path for path in folders}

    def record(self, folder: Path) -> RunRecord:
        """Return a run as it is now; RunFolderUnreadableError if it is damaged, gone, or linked to elsewhere."""
        return self._records.get(folder, signature_of(folder), lambda: self._read(folder))

    def _read(self, folder: Path) -> RunRecord:
        for name in (CONFIG, METRICS, ENVIRONMENT):
            self.require_inside(folder / name)
        return read_run(folder, self._readers.get(folder, None, lambda: MetricsReader(folder / METRICS)))

    def check_samples(self, folder: Path) -> None:
        """Raise RunFolderUnreadableError for a list of validation samples that leads out of the folder."""
        for path in manifest.folders(folder / VALIDATIONS):
            self.require_inside(path / SAMPLES)

    def require_inside(self, file: Path) -> None:
        """Raise RunFolderUnreadableError for a link that leads out of the folder."""
        if not is_inside(file, self.root):
            raise RunFolderUnreadableError(f"{file} leads out of {self.root}: put the file there in place of the link")


def is_inside(file: Path, folder: Path) -> bool:
    """Return whether a file lies below a folder once links are followed."""
    try:
        return file.resolve().is_relative_to(folder)
    except (OSError, RuntimeError, ValueError):  # a circle of links, or no path at all
        return False


def signature_of(folder: Path) -> Hashable:
    """Return what changes whenever a run writes metrics, settings or a checkpoint, starts or ends."""
    files = (CONFIG, METRICS, ENVIRONMENT, CHECKPOINTS, VALIDATIONS)
    try:
        locked = is_locked(folder)
    except OSError:
        locked = False
    return (*(stamp_of(folder / name) for name in files), locked)


def signature_of_samples(folder: Path) -> Hashable:
    """Return what changes whenever a run writes validation samples."""
    return tuple((path.name, stamp_of(path / SAMPLES)) for path in manifest.folders(folder / VALIDATIONS))


def stamp_of(path: Path) -> tuple[int, int, int] | None:
    """Return what changes with the content of a file or folder, or None if there is none."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns
