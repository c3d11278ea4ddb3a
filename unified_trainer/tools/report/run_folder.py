"""A run directory read into dataclasses: settings, curves of metrics, checkpoints, starts and validation samples."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unified_trainer.basics.input_files import read_yaml
from unified_trainer.run.checkpoint import manifest
from unified_trainer.run.checkpoint.run_lock import LOCK
from unified_trainer.run.settings import config as settings
from unified_trainer.run.validation.report import ValidationSample
from unified_trainer.tools.report.metrics_reader import (
    VALIDATION,
    Curve,
    MetricsReader,
    RunFolderUnreadableError,
    objects,
)

CONFIG, METRICS, ENVIRONMENT, SAMPLES = "config.yaml", "metrics.jsonl", "environment.jsonl", "samples.jsonl"

__all__ = ["VALIDATION", "Curve", "RunFolderUnreadableError"]  # the parts of a record are read from here


@dataclass(frozen=True)
class ValidationRecord:
    """The samples of one validation, of all ranks."""

    step: int
    samples: tuple[ValidationSample, ...]


@dataclass(frozen=True)
class RunRecord:
    """Everything that a run directory holds besides weights and videos."""

    folder: Path
    config: dict[str, Any]  # flat: student.learning_rate and so on
    curves: dict[str, Curve]  # by name
    times: tuple[float, ...]  # when lines of metrics.jsonl were written, in seconds since 1970
    step: int  # training steps that metrics.jsonl has
    checkpoints: tuple[int, ...]  # steps of checkpoints, lowest first
    starts: tuple[dict[str, Any], ...]  # lines of environment.jsonl: the start and every continuation

    @property
    def name(self) -> str:
        """The name of the directory."""
        return self.folder.resolve().name

    @property
    def method(self) -> str:
        """The method, as --method names it."""
        return str(self.config.get("method", ""))


def is_run(folder: Path) -> bool:
    """Whether a folder is a run directory."""
    return (folder / CONFIG).is_file() and any((folder / name).is_file() for name in (METRICS, ENVIRONMENT, LOCK))


def find_runs(folder: Path) -> list[Path]:
    """Return the run directories below a folder, or the folder itself if it is one, sorted by path."""
    if is_run(folder):
        return [folder]
    below = sorted(path for path in folder.iterdir() if path.is_dir() and not path.is_symlink())
    found = []
    for path in below:
        with suppress(FileNotFoundError, NotADirectoryError, PermissionError):  # removed meanwhile, or of someone else
            found += find_runs(path)
    return found


def read_run(folder: Path, metrics: MetricsReader | None = None) -> RunRecord:
    """Return what a run directory holds; RunFolderUnreadableError names what is missing or damaged.

    The run may go on meanwhile: a last line that is not whole yet is left out. `metrics` is the reader of its
    metrics.jsonl that earlier calls had, if there were any.
    """
    if not is_run(folder):
        raise RunFolderUnreadableError(f"{folder} is no run directory: it has no {CONFIG}, or nothing beside it")
    config = settings.flat(read_yaml(folder / CONFIG))
    metrics = metrics or MetricsReader(folder / METRICS)
    metrics.update()
    checkpoints = tuple(manifest.step_of(path) for path in manifest.folders(folder / "checkpoints"))
    starts = tuple(_lines(folder / ENVIRONMENT))
    return RunRecord(folder, config, metrics.curves(), tuple(metrics.times), metrics.step, checkpoints, starts)


def read_validations(folder: Path) -> tuple[ValidationRecord, ...]:
    """Return the validations of a run whose samples are listed, lowest step first."""
    found = []
    for path in manifest.folders(folder / "validation"):
        file = path / SAMPLES
        if file.is_file():
            samples = tuple(_sample(row, path, file) for row in _lines(file))
            found.append(ValidationRecord(manifest.step_of(path), samples))
    return tuple(found)


def _lines(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of a file, one per whole line; none if there is no file."""
    if file.is_file():
        yield from objects(file.read_bytes(), file)


def _sample(row: Mapping[str, Any], folder: Path, file: Path) -> ValidationSample:
    try:
        video = folder / Path(row["video"]).name if row["video"] else None
        return ValidationSample(**{**row, "video": video if video and video.is_file() else None})
    except (KeyError, TypeError) as error:
        raise RunFolderUnreadableError(f"{file} is not a list of validation samples ({error!r})") from error
