"""A run directory read into dataclasses: settings, curves of metrics, checkpoints, starts and validation samples."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unified_trainer import config as settings
from unified_trainer.checkpoint import manifest
from unified_trainer.checkpoint.run_lock import LOCK
from unified_trainer.errors import UserError
from unified_trainer.input_files import read_yaml
from unified_trainer.validation import ValidationSample

CONFIG, METRICS, ENVIRONMENT, SAMPLES = "config.yaml", "metrics.jsonl", "environment.jsonl", "samples.jsonl"
TRAIN, VALIDATION = "train/", "validation/"


class RunFolderUnreadableError(UserError):
    """A run directory lacks a file or holds a damaged one; the message names it."""


@dataclass(frozen=True)
class Curve:
    """The values of one metric; a training metric has its name without the prefix train/, as in docs/metrics.md."""

    name: str
    steps: tuple[int, ...]
    values: tuple[float, ...]


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
    return [run for path in below for run in find_runs(path)]


def read_run(folder: Path) -> RunRecord:
    """Return what a run directory holds; RunFolderUnreadableError names what is missing or damaged.

    The run may go on meanwhile: a last line that is not whole yet is left out.
    """
    if not is_run(folder):
        raise RunFolderUnreadableError(f"{folder} is no run directory: it has no {CONFIG}, or nothing beside it")
    config = settings.flat(read_yaml(folder / CONFIG))
    rows = list(_lines(folder / METRICS))
    curves = _curves(rows, folder / METRICS)
    trained = (row["step"] for row in rows if any(name.startswith(TRAIN) for name in row))
    checkpoints = tuple(manifest.step_of(path) for path in manifest.folders(folder / "checkpoints"))
    times = tuple(float(row["time"]) for row in rows if "time" in row)
    starts = tuple(_lines(folder / ENVIRONMENT))
    return RunRecord(folder, config, curves, times, max(trained, default=0), checkpoints, starts)


def read_validations(folder: Path) -> tuple[ValidationRecord, ...]:
    """Return the validations of a run whose samples are listed, lowest step first."""
    found = []
    for path in manifest.folders(folder / "validation"):
        file = path / SAMPLES
        if file.is_file():
            samples = tuple(_sample(row, path, file) for row in _lines(file))
            found.append(ValidationRecord(manifest.step_of(path), samples))
    return tuple(found)


def _curves(rows: list[dict[str, Any]], file: Path) -> dict[str, Curve]:
    columns: dict[str, tuple[list[int], list[float]]] = {}
    for row in rows:
        if not isinstance(row.get("step"), int):
            raise RunFolderUnreadableError(f"{file} is damaged: a line has no step; remove that line")
        for name, value in row.items():
            if name not in ("step", "time") and isinstance(value, (int, float)):
                steps, values = columns.setdefault(name.removeprefix(TRAIN), ([], []))
                steps.append(row["step"])
                values.append(float(value))
    return {name: Curve(name, tuple(steps), tuple(values)) for name, (steps, values) in columns.items()}


def _lines(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of a file, one per whole line; none if there is no file."""
    if not file.is_file():
        return
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(keepends=True), 1):
        if not line.endswith("\n"):
            return
        try:
            row = json.loads(line)
        except ValueError as error:
            raise RunFolderUnreadableError(f"{file} is damaged in line {number} ({error}): remove that line") from error
        if not isinstance(row, dict):
            raise RunFolderUnreadableError(f"{file} is damaged in line {number}: expected an object; remove that line")
        yield row


def _sample(row: Mapping[str, Any], folder: Path, file: Path) -> ValidationSample:
    try:
        video = folder / Path(row["video"]).name if row["video"] else None
        return ValidationSample(**{**row, "video": video if video and video.is_file() else None})
    except (KeyError, TypeError) as error:
        raise RunFolderUnreadableError(f"{file} is not a list of validation samples ({error!r})") from error
