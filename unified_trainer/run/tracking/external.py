"""Trackers: where the metrics and validation samples of a run go besides its own folder.

TensorBoard, Weights & Biases and SwanLab are three; `--tracking.custom path/to/file.py:Class` adds any other.
"""

import importlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.input_files import read_json
from unified_trainer.basics.own_files import without_link
from unified_trainer.basics.pictures import open_picture
from unified_trainer.basics.plugins import load_object
from unified_trainer.basics.versions import install
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.run.settings.config import TrackingConfig
from unified_trainer.run.validation.report import ValidationSample


@dataclass(frozen=True)
class RunInfo:
    """The run that a tracker follows."""

    folder: Path
    settings: Mapping[str, Any]  # all resolved settings, nested
    config: TrackingConfig
    start: int  # training steps already done


class ExternalTracker:
    """Base of all trackers: subclass it, and name the class in `tracking.custom`. Only the main rank has trackers.

    It is given each line of metrics.jsonl once. The run remembers how many it has taken, and a run that is continued
    gives it those that it lacks first. A constructor that knows better, as by asking a server, sets `taken`.
    """

    taken: int = -1  # lines of metrics.jsonl that it has; below 0, the run knows

    @classmethod
    def check(cls, config: TrackingConfig) -> None:
        """Raise UserError if the tracker cannot start; called before any weight is read."""

    def __init__(self, run: RunInfo) -> None:
        """Start, or continue after `run.start` steps."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log metrics by name, `train/...` or `validation/...`, after `step` training steps.

        A validation beside training is logged when its result takes effect: `step` is then lower than in earlier calls.
        """
        raise NotImplementedError

    def log_samples(self, step: int, samples: Sequence[ValidationSample], contact_sheet: Path | None) -> None:
        """Log the samples of a validation, of all ranks, with the picture of the first ones if one was written."""

    def log_rollouts(self, step: int, samples: Sequence[ValidationSample], contact_sheet: Path) -> None:
        """Log samples that training step `step` learned from, if `tracking.rollouts_every` asks for them.

        Of a distillation, each is one of the latents that the step compared, which its `shows` names.
        """

    def rewind(self, step: int, lines: int) -> None:
        """The run is back at the checkpoint of `step`: metrics.jsonl has fewer lines than `taken`, and others follow.

        A tracker that can remove what it has of them sets `taken` to what is left; else they are not given again.
        """

    def close(self, *, failed: bool) -> None:
        """Finish; `failed` says that an exception ended the run."""


def tracker_classes(config: TrackingConfig) -> list[type[ExternalTracker]]:
    """Return the trackers that the settings ask for; UserError if one of the user's own cannot be found."""
    classes: list[type[ExternalTracker]] = []
    if config.tensorboard:
        classes.append(TensorBoard)
    if config.wandb != "off":
        classes.append(WeightsAndBiases)
    if config.swanlab != "off":
        classes.append(SwanLab)
    for spec in config.custom:
        kind = load_object(spec, "--tracking.custom")
        if not (isinstance(kind, type) and issubclass(kind, ExternalTracker)):
            raise UserError(f"--tracking.custom {spec}: must be a class derived from {__name__}.ExternalTracker")
        classes.append(kind)
    return classes


def check_tracking(config: TrackingConfig, mesh: Mesh) -> None:
    """Raise UserError if a tracker of the run cannot start on the main rank, which is the only one that has them."""
    if mesh.is_main:
        for kind in tracker_classes(config):
            kind.check(config)


class _Grouped(ExternalTracker):
    """A tracker that shows the samples of validations, rollouts and matching in groups of these names."""

    def log_samples(self, step: int, samples: Sequence[ValidationSample], contact_sheet: Path | None) -> None:
        self._show("validation", step, samples, contact_sheet)

    def log_rollouts(self, step: int, samples: Sequence[ValidationSample], contact_sheet: Path) -> None:
        self._show("matching" if samples[0].shows else "rollouts", step, samples, contact_sheet)

    def _show(self, group: str, step: int, samples: Sequence[ValidationSample], contact_sheet: Path | None) -> None:
        raise NotImplementedError


class TensorBoard(_Grouped):
    """Event files in the run directory's folder `tensorboard`, with contact sheets and prompts."""

    @classmethod
    def check(cls, config: TrackingConfig) -> None:
        _package("torch.utils.tensorboard", "tensorboard")

    def __init__(self, run: RunInfo) -> None:
        self._writer = _package("torch.utils.tensorboard", "tensorboard").SummaryWriter
        self._folder = str(run.folder / "tensorboard")
        self.taken = -1 if (run.folder / "tensorboard").is_dir() else 0
        self._board = self._writer(self._folder, purge_step=run.start + 1)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._board.add_scalar(name, value, step)
        self._board.flush()  # `taken` counts the line

    def _show(self, group: str, step: int, samples: Sequence[ValidationSample], contact_sheet: Path | None) -> None:
        if contact_sheet is not None:
            with open_picture(contact_sheet, str(contact_sheet)) as picture:
                self._board.add_image(f"{group}/contact_sheet", np.asarray(picture), step, dataformats="HWC")
        lines = (json.dumps(sample.row(), ensure_ascii=False) for sample in samples)
        # Four spaces make a block of code: no character of a prompt is markup.
        self._board.add_text(f"{group}/samples", "\n".join(f"    {line}" for line in lines), step)

    def rewind(self, step: int, lines: int) -> None:
        self._board.close()
        self._board, self.taken = self._writer(self._folder, purge_step=step + 1), lines

    def close(self, *, failed: bool) -> None:
        self._board.close()


class WeightsAndBiases(_Grouped):
    """A run on Weights & Biases, with videos and prompts; `--resume` continues it by the id in `wandb.json`.

    Its `_step` is the line of metrics.jsonl, so that a server says how many it has. Offline each start writes the whole
    run into one folder; that of the start before is renamed to replaced-offline-run-..., which is not to be synced.
    """

    @classmethod
    def check(cls, config: TrackingConfig) -> None:
        wandb = _package("wandb", "wandb")
        if config.wandb != "online":
            return
        try:
            logged_in = wandb.login(prompt=False)
        except wandb.Error as error:
            raise UserError(f"--tracking.wandb online: {error}") from error
        if not logged_in:
            raise UserError(
                "--tracking.wandb online: not logged in. Run `wandb login`, set WANDB_API_KEY, or log into the run "
                "directory with --tracking.wandb offline"
            )

    def __init__(self, run: RunInfo) -> None:
        self._wandb, self._info = _package("wandb", "wandb"), run
        self._open()

    def _open(self) -> None:
        run, config = self._info, self._info.config
        file = run.folder / "wandb.json"
        held = read_json(file).get("id") if file.is_file() else None
        for folder in (run.folder / "wandb").glob("offline-run-*") if config.wandb == "offline" else ():
            if folder.name.endswith(f"-{held}"):
                folder.rename(folder.with_name(f"replaced-{folder.name}"))
        try:
            self._run = self._wandb.init(
                project=config.wandb_project,
                entity=config.wandb_entity or None,
                group=config.wandb_group or None,
                tags=list(config.wandb_tags),
                name=config.wandb_name or run.folder.name,
                dir=str(run.folder),
                mode=config.wandb,
                config=dict(run.settings),
                id=held,
                resume="allow" if held else None,
                allow_val_change=True,  # of settings that a resumed run may change
            )
        except self._wandb.Error as error:
            raise UserError(f"--tracking.wandb {config.wandb}: {error}") from error
        self.taken = self._run.step
        without_link(file).write_text(json.dumps({"id": self._run.id, "url": self._run.url}) + "\n", encoding="utf-8")
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({"step": step, **metrics}, step=self.taken)

    def _show(self, group: str, step: int, samples: Sequence[ValidationSample], contact_sheet: Path | None) -> None:
        wandb, rows = self._wandb, [sample.row() for sample in samples]
        videos = [
            self._media(sample.video, json.dumps(row, ensure_ascii=False))
            for sample, row in zip(samples, rows, strict=True)
            if sample.video is not None
        ]
        names = [name for name in rows[0] if name != "video"]
        table = wandb.Table(columns=names, data=[[_cell(row[name]) for name in names] for row in rows])
        media: dict[str, Any] = {f"{group}/samples": table}
        if videos:
            media[f"{group}/videos"] = videos
        if contact_sheet is not None:
            media[f"{group}/contact_sheet"] = wandb.Image(str(contact_sheet))
        self.log(step, media)

    def _media(self, file: Path, caption: str) -> Any:
        if file.suffix == ".png":
            return self._wandb.Image(str(file), caption=caption)
        return self._wandb.Video(str(file), caption=caption, format="mp4")

    def rewind(self, step: int, lines: int) -> None:
        if self._info.config.wandb == "offline":
            self._run.finish()
            self._open()

    def close(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class SwanLab(_Grouped):
    """An experiment on SwanLab, with contact sheets and prompts; it shows no mp4 files.

    `--resume` continues an online one by the id in `swanlab.json`; offline, each start is one of its own, of all steps.
    """

    @classmethod
    def check(cls, config: TrackingConfig) -> None:
        swanlab = _package("swanlab", "swanlab")
        if config.swanlab != "online":
            return
        try:
            swanlab.login()
        except (swanlab.exceptions.AuthenticationError, OSError) as error:
            raise UserError(
                f"--tracking.swanlab online: {error}\nRun `swanlab login`, set SWANLAB_API_KEY, or log into the run "
                "directory with --tracking.swanlab offline"
            ) from error

    def __init__(self, run: RunInfo) -> None:
        self._swanlab, config = _package("swanlab", "swanlab"), run.config
        online, file = config.swanlab == "online", run.folder / "swanlab.json"
        held = read_json(file).get("id") if online and file.is_file() else None
        try:
            self._run = self._swanlab.init(
                project=config.swanlab_project,
                workspace=config.swanlab_workspace or None,
                name=run.folder.name,
                log_dir=str(run.folder / "swanlab"),
                mode=config.swanlab,
                config=dict(run.settings),
                id=held,
                resume="allow" if held else None,
            )
        except RuntimeError as error:
            raise UserError(f"--tracking.swanlab {config.swanlab}: {error}") from error
        self.taken = -1 if online else 0
        if online:
            written = {"id": self._run.id, "url": self._run.url}
            without_link(file).write_text(json.dumps(written) + "\n", encoding="utf-8")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def _show(self, group: str, step: int, samples: Sequence[ValidationSample], contact_sheet: Path | None) -> None:
        lines = "\n".join(json.dumps(sample.row(), ensure_ascii=False) for sample in samples)
        media: dict[str, Any] = {f"{group}/samples": self._swanlab.Text(lines)}
        if contact_sheet is not None:
            media[f"{group}/contact_sheet"] = self._swanlab.Image(str(contact_sheet))
        self._run.log(media, step=step)

    def close(self, *, failed: bool) -> None:
        if failed:
            self._run.finish(state="crashed", error="an exception ended the run")
        else:
            self._run.finish()


def _cell(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, dict) else value


def _package(module: str, extra: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(f"--tracking.{extra} needs the package {extra}: {install(extra)}") from error
