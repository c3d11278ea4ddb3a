"""Validation: reward, accuracy and sample videos of the student, with the same prompts and noise every time."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from unified_trainer.basics.own_files import without_link
from unified_trainer.basics.requests import Request
from unified_trainer.data.tiny_world_measures import ACCURACY, DRAWN, WORLD, world_distances
from unified_trainer.data.video_files import Row, contact_sheet, file_name, write_clip
from unified_trainer.models.base import Codec
from unified_trainer.parallel.device import fitting
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.rewards.pixels import diversity
from unified_trainer.rewards.reward import Reward, RewardSum
from unified_trainer.roles.role import Trainable
from unified_trainer.run.settings.config import ValidationConfig
from unified_trainer.run.validation.distances import FEATURES, REAL, Distances, distances
from unified_trainer.run.validation.samples import (
    PIXELS,
    SCORES,
    THUMBNAILS,
    Measured,
    SampleMaker,
    batches,
    samples_of_rank,
    shown,
)
from unified_trainer.sampling.solver import SamplerConfig


@dataclass(frozen=True)
class ValidationSample:
    """One sample of a validation with what was measured of it."""

    sample: int  # number of the sample; its noise follows from seed and number
    seed: int
    prompt: str
    reward: float | None  # None without scorers
    scores: dict[str, float]  # scale x score of every scorer, held-out ones too
    accuracy: dict[str, bool]  # tiny world: whether color, shape, direction and all of them match the prompt
    video: Path | None  # mp4 file, or PNG of an image, where one was written
    images: tuple[str, ...] = ()  # files of the condition images
    shows: str = ""  # of a step of matching: which latents, such as "real, at tau 0.731"

    @classmethod
    def listed(cls, row: Mapping[str, Any], folder: Path) -> "ValidationSample":
        """Return the sample of a line of samples.jsonl in a folder, with its video if that is there."""
        own = {name: row[name] for name in cls.__dataclass_fields__ if name in row}
        video = _there(folder / Path(row["video"] or "").name)
        return cls(**own | {"video": video, "images": tuple(row.get("images", ()))})

    def row(self) -> dict[str, Any]:
        """Return the sample's line of samples.jsonl; `images` and `shows` are in it where there are some."""
        row = {**vars(self), "video": None if self.video is None else self.video.name}
        row = json.loads(json.dumps(row), parse_constant=lambda _: None)  # NaN, without a score
        return {name: value for name, value in row.items() if value or name not in ("images", "shows")}

    @property
    def about(self) -> str:
        """The sample's number, seed and scores in words, after which latents it shows."""
        shows = f"{self.shows}   " if self.shows else ""
        reward = "" if self.reward is None else f"   reward {self.reward:.3f}"
        accuracy = f"   accuracy {self.accuracy['all']:d}" if self.accuracy else ""
        return f"{shows}sample {self.sample}   seed {self.seed}{reward}{accuracy}"


Shown = tuple[Sequence[ValidationSample], Path | None]  # with their contact sheet, if one was written


@dataclass(frozen=True)
class ValidationResult:
    """The metrics of a validation, and its samples, both of all ranks."""

    metrics: dict[str, float]
    samples: tuple[ValidationSample, ...]
    contact_sheet: Path | None  # picture of the samples with a video, if there are any
    warning: str | None  # what could not be written, on the rank that writes
    costs: Mapping[str, float] = field(default_factory=dict)  # of workers, on the main rank: logged, no guard sees them


class ValidationSource(Protocol):
    """A maker of validations: this process between two training steps, or other processes beside training."""

    ema: bool  # whether the samples are those of the student's EMA weights

    def start(self, student: Trainable, step: int) -> None:
        """Start the validation of the student, as its weights are now after `step` training steps (a collective)."""

    def finish(self, folder: Path, step: int) -> "ValidationResult":
        """Wait for the validation that was started, write it into `folder` on the main rank, and return it."""


class Validation:
    """Makes and measures the samples in the training processes; every data rank makes an equal number."""

    def __init__(
        self,
        config: ValidationConfig,
        codec: Codec,
        reward: Reward,
        measured: Distances | None,
        sampler: SamplerConfig,
        requests: Sequence[Request],
        latent_shape: tuple[int, int, int, int],
        mesh: Mesh,
        fps: float,
    ) -> None:
        self.ema, self._mesh = config.ema, mesh
        self._batches = batches(config, mesh.data_size)[mesh.data_rank]
        self._maker = SampleMaker(config, codec, reward, measured, sampler, requests, latent_shape, mesh.device)
        self._report = Report(config, reward, self._maker.requests, mesh, fps)
        self._parts: list[Measured] = []

    def start(self, student: Trainable, step: int) -> None:
        """Make and measure all samples."""
        size = max(map(len, self._batches))
        with fitting(f"a batch of {size} samples of the validation", "lower validation.batch"):
            parts: list[Measured] = []
            for samples in self._batches:
                part = self._maker.make(student, samples, self._report.videos, step)
                parts = [self._report.joined([*parts, part], self._batches[0].start)]
            self._parts = parts

    def finish(self, folder: Path, step: int) -> "ValidationResult":
        (part,), self._parts = self._parts, []
        columns = {name: self._mesh.gather(rows) for name, rows in part.columns.items()}
        if self._mesh.sequence_rank == 0:
            self._report.write_extremes(columns, part.clips, folder)
        self._mesh.barrier()
        return self._report.result(columns, part.clips, folder, step)


class ValidationSets:
    """A validation of the run's prompts, and after it one of each further set.

    Guards, the best checkpoint's `best_metric` and trackers of samples see the run's own prompts as without sets. The
    metrics of a set are validation/sets/NAME/..., and its samples and videos lie in a folder NAME below the others.
    """

    def __init__(self, own: ValidationSource, sets: Mapping[str, ValidationSource]) -> None:
        self.ema, self._own, self._sets = own.ema, own, dict(sets)

    def start(self, student: Trainable, step: int) -> None:
        """Make and measure the samples of all sets."""
        for source in (self._own, *self._sets.values()):
            source.start(student, step)

    def finish(self, folder: Path, step: int) -> ValidationResult:
        """Return the result of the run's prompts with the metrics of the sets, and the first warning of them."""
        result = self._own.finish(folder, step)
        metrics, warning = dict(result.metrics), result.warning
        for name, source in self._sets.items():
            of_set = source.finish(folder / name, step)
            named = {key.removeprefix("validation/"): value for key, value in of_set.metrics.items()}
            metrics |= {f"validation/sets/{name}/{key}": value for key, value in named.items()}
            warning = warning or of_set.warning
        return replace(result, metrics=metrics, warning=warning)


class Report:
    """The metrics of a validation from what was measured of its samples, and the files that people look at."""

    def __init__(
        self, config: ValidationConfig, reward: RewardSum, requests: Sequence[Request], mesh: Mesh, fps: float
    ) -> None:
        """`requests` are those of all samples, in order."""
        self._requests, self._seed, self._reward = tuple(requests), config.seed, reward
        self._scorers, self._is_main, self._fps = (*reward.weights, *reward.held_out), mesh.is_main, fps
        own = samples_of_rank(config.num_samples, mesh.data_size)
        self.videos = min(config.num_videos, own)  # first samples that have a video, all of the main rank

    def joined(self, parts: Sequence[Measured], first: int) -> Measured:
        """Join what was measured of samples from number `first` on; videos that cannot be written are dropped."""
        columns = {name: torch.cat([part.columns[name] for part in parts]) for name in parts[0].columns}
        kept = self._shown(columns, first)
        return Measured(columns, {i: clip for part in parts for i, clip in part.clips.items() if i in kept})

    def _shown(self, columns: Mapping[str, Tensor], first: int = 0) -> set[int]:
        return shown(self._reward, columns, range(first, len(self._requests)), self.videos)

    def write_extremes(self, columns: Mapping[str, Tensor], clips: Mapping[int, np.ndarray], folder: Path) -> None:
        """Write the videos of the best and the worst of all samples that this rank made; `result` writes the others."""
        with suppress(OSError):  # `result` writes to the same disk and warns
            folder.mkdir(parents=True, exist_ok=True)
            for number in sorted(self._shown(columns).intersection(clips).difference(range(self.videos))):
                write_clip(clips[number], folder / file_name(number, len(clips[number])), self._fps)

    def result(
        self, columns: Mapping[str, Tensor], clips: Mapping[int, np.ndarray], folder: Path, step: int
    ) -> "ValidationResult":
        """Return the metrics of all samples, without padding; the main rank writes them and clips into `folder`."""
        columns = {name: rows[: len(self._requests)] for name, rows in columns.items()}
        rows_of_vectors = (THUMBNAILS, FEATURES, REAL)  # stay in float32
        exact = {
            name: rows.cpu() if name.startswith(rows_of_vectors) else rows.cpu().double()
            for name, rows in columns.items()
        }
        scores = self._scores(exact)
        hits = {name.removeprefix(ACCURACY): rows for name, rows in exact.items() if name.startswith(ACCURACY)}
        metrics = self._reward.count_unscored(exact[SCORES]) if scores else {}
        metrics |= mean_and_std({name: values[~values.isnan()] for name, values in scores.items()})
        metrics |= mean_and_std({name: rows for name, rows in exact.items() if name.startswith((PIXELS, DRAWN, WORLD))})
        if (spread := diversity(exact[THUMBNAILS], self._requests)) is not None:
            metrics["pixels/diversity"] = spread
        if hits:
            metrics |= _accuracies(hits) | world_distances(exact, [request.text for request in self._requests])
        metrics |= distances(exact)
        names = {i: file_name(i, len(clip)) for clip in [*clips.values()][:1] for i in self._shown(columns)}
        videos = {i: folder / name for i, name in names.items() if i < self.videos or (folder / name).is_file()}
        samples = self._samples(scores, hits, videos)
        sheet = folder / "contact_sheet.png" if self.videos else None
        warning = None
        if self._is_main:
            first = [clips[i] for i in range(self.videos)]
            warning = write_samples(folder, first, samples, self._requests, step, self._fps, sheet)
        if warning is not None:
            samples, sheet = tuple(replace(one, video=None) for one in samples), None
        return ValidationResult(
            {f"validation/{name}": value for name, value in metrics.items()}, samples, sheet, warning
        )

    def _scores(self, columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the reward of every sample, and the score of every scorer, including held-out ones."""
        if not self._scorers:
            return {}
        parts = columns[SCORES]
        found = (
            {"reward": self._reward.partial_total(parts[:, : len(self._reward.weights)])}
            if self._reward.weights
            else {}
        )
        return found | {f"reward/{name}": part for name, part in zip(self._scorers, parts.unbind(1), strict=True)}

    def _samples(
        self, columns: dict[str, Tensor], hits: dict[str, Tensor], videos: Mapping[int, Path]
    ) -> tuple["ValidationSample", ...]:
        """Return the samples of all ranks."""
        scores = {name: columns[f"reward/{name}"].tolist() for name in self._scorers}
        rewards = columns["reward"].tolist() if "reward" in columns else [None] * len(self._requests)
        accuracies = {name: right.bool().tolist() for name, right in hits.items()}
        return tuple(
            ValidationSample(
                i,
                self._seed,
                request.text,
                reward,
                {name: values[i] for name, values in scores.items()},
                {name: values[i] for name, values in accuracies.items()},
                videos.get(i),
                tuple(request.files.get("images", ())),
            )
            for i, (request, reward) in enumerate(zip(self._requests, rewards, strict=True))
        )


def write_samples(
    folder: Path,
    clips: Sequence[np.ndarray],
    samples: Sequence[ValidationSample],
    requests: Sequence[Request],
    step: int,
    fps: float,
    sheet: Path | None,
) -> str | None:
    """Write the clips of the first samples, and rows of all samples, which `requests` made; return what went wrong."""
    shown = list(zip(clips, samples, requests, strict=False))  # the first samples
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for frames, sample, _ in shown:
            assert sample.video is not None  # of the first samples
            write_clip(frames, sample.video, fps)
        if sheet is not None:
            rows = [
                Row(frames, f"step {step}   {sample.about}", sample.prompt, request.pictures(*frames.shape[1:3]))
                for frames, sample, request in shown
            ]
            contact_sheet(rows, sheet)
        lines = "".join(json.dumps(sample.row(), ensure_ascii=False) + "\n" for sample in samples)
        without_link(folder / "samples.jsonl").write_text(lines, encoding="utf-8")
    except OSError as error:
        return f"{error.filename or folder} cannot be written ({error.strerror or error})"
    return None


def listed_samples(folder: Path) -> Shown:
    """Return the samples that `write_samples` listed in a folder, and their contact sheet; none that cannot be read."""
    try:
        lines = (folder / "samples.jsonl").read_bytes().splitlines()
        samples = [ValidationSample.listed(json.loads(line), folder) for line in lines]
    except (OSError, ValueError, TypeError, KeyError):
        samples = []
    return samples, _there(folder / "contact_sheet.png")


def _there(file: Path) -> Path | None:
    """Return a file that is there, and no link to another place."""
    return file if file.is_file() and not file.is_symlink() else None


def _accuracies(hits: dict[str, Tensor]) -> dict[str, float]:
    """Return the share of samples that match their caption; no reward contains it."""
    rates = {name: right.mean().item() for name, right in hits.items()}
    means = {"accuracy": rates.pop("all"), "accuracy_std": hits["all"].std().item()}
    return means | {f"accuracy/{name}": rate for name, rate in rates.items()}


def mean_and_std(columns: dict[str, Tensor]) -> dict[str, float]:
    """Return the mean of each column under its name, and its Bessel-corrected std under NAME_std."""
    means = {name: values.mean().item() for name, values in columns.items()}
    return means | {f"{name}_std": values.std().item() for name, values in columns.items()}
