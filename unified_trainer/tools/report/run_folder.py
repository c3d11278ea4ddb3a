"""A run directory read into dataclasses: settings, curves of metrics, checkpoints, starts and validation samples."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from os.path import lexists
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.input_files import Schema, checked, read_yaml
from unified_trainer.run.checkpoint import manifest
from unified_trainer.run.checkpoint.run_lock import LOCK
from unified_trainer.run.settings import config as settings
from unified_trainer.run.validation.report import ValidationSample
from unified_trainer.tools.report.metrics_reader import (
    VALIDATION,
    Curve,
    RunFolderUnreadableError,
    objects,
    read_metrics,
)

Whole = Annotated[int, Field(ge=-(2**63), le=2**64)]
Number = Annotated[float, Field(ge=-1e300, le=1e300)]
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
    written: float | None  # when the last line of metrics.jsonl was, in seconds since 1970
    step: int  # training steps that metrics.jsonl has
    checkpoints: tuple[int, ...]  # steps of checkpoints, lowest first
    starts: tuple[dict[str, Any], ...]  # lines of environment.jsonl: the start and every continuation

    @property
    def method(self) -> str:
        """The method, as --method names it."""
        return str(self.config.get("method", ""))


def is_run(folder: Path) -> bool:
    """Whether a folder is a run directory, also one whose files cannot be read."""
    return lexists(folder / CONFIG) and any(lexists(folder / name) for name in (METRICS, ENVIRONMENT, LOCK))


def find_runs(folder: Path) -> list[Path]:
    """Return the run directories below a folder, or the folder itself if it is one, sorted by path."""
    if is_run(folder):
        return [folder]
    folders = []
    for path in sorted(path for path in folder.iterdir() if path.is_dir() and not path.is_symlink()):
        with suppress(FileNotFoundError, NotADirectoryError, PermissionError):  # removed meanwhile, or of someone else
            folders += find_runs(path)
    return folders


def read_run(folder: Path) -> RunRecord:
    """Return what a run directory holds; every fault of its files, which others write, is a RunFolderUnreadableError.

    The run may go on meanwhile: a last line that is not whole yet is left out.
    """
    if not is_run(folder):
        raise RunFolderUnreadableError(f"{folder} is no run directory: it has no {CONFIG}, or nothing beside it")
    try:
        config = settings.flat(read_yaml(folder / CONFIG))
        checked(_Config, config, str(folder / CONFIG))
        metrics = read_metrics(folder / METRICS)
        checkpoints = tuple(manifest.step_of(path) for path in manifest.folders(folder / "checkpoints"))
        starts = tuple(_lines(folder / ENVIRONMENT, _Start))
    except UserError as error:
        raise RunFolderUnreadableError(str(error)) from error
    except OSError as error:
        raise RunFolderUnreadableError(f"{folder} cannot be read ({error.strerror})") from error
    return RunRecord(folder, config, metrics.curves, metrics.written, metrics.step, checkpoints, starts)


def name_below(run: Path, root: Path) -> str:
    """Return the name of a run in a list of those below a folder, which may be the run itself."""
    return run.resolve().name if run == root else str(run.relative_to(root))


def read_validations(folder: Path) -> tuple[ValidationRecord, ...]:
    """Return the validations of a run whose samples are listed, lowest step first."""
    records = []
    for path in manifest.folders(folder / "validation"):
        file = path / SAMPLES
        if file.is_file():
            samples = tuple(ValidationSample.listed(row, path) for row in _lines(file, _Sample))
            records.append(ValidationRecord(manifest.step_of(path), samples))
    return tuple(records)


class _Config(Schema):
    """The settings that a report depends on."""

    method: str = ""
    recipe: str = ""
    steps: Whole = 0
    seed: Whole = 0


class _Start(Schema):
    time: str
    step: Whole
    versions: dict[str, Any] | None = None
    git: dict[str, Any] | None = None


class _Sample(Schema):
    sample: Whole
    seed: Whole
    prompt: str
    reward: Number | None
    scores: dict[str, Number | None]
    accuracy: dict[str, bool]
    video: str | None


def _lines(file: Path, schema: type[Schema]) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of a file, one per whole line, as they are; none if there is no file."""
    if file.is_file():
        for number, row in enumerate(objects(file.read_bytes(), file), 1):
            checked(schema, row, f"{file} is damaged in line {number}")
            yield row
