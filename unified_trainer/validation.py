"""Validation: reward, accuracy and sample videos of the student, with the same prompts and noise every time."""

import json
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from unified_trainer.config import ValidationConfig
from unified_trainer.data.loader import make_batch
from unified_trainer.data.tiny_world import SUBJECT_OF_CAPTION, check_attributes, is_tiny_world, real_clip, render
from unified_trainer.data.video_files import Row, contact_sheet, to_uint8, write_mp4
from unified_trainer.errors import UserError
from unified_trainer.meter import phase
from unified_trainer.models.base import Codec
from unified_trainer.numerics.frechet import frame_features, frechet_distance
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.parallel.random import Streams
from unified_trainer.rewards.pixels import diversity, statistics, thumbnail
from unified_trainer.roles.reward import Reward
from unified_trainer.roles.role import Trainable
from unified_trainer.sampling import SamplerConfig, generate
from unified_trainer.suggestions import multiples_near


def check_validation(config: ValidationConfig, mesh: Mesh) -> None:
    """Raise UserError for counts of samples that cannot be divided over the ranks."""
    if config.num_samples % mesh.data_size:
        raise UserError(
            f"validation.num_samples ({config.num_samples}) must be divisible by the number of data ranks "
            f"({mesh.data_size}): set it to {multiples_near(config.num_samples, mesh.data_size)}"
        )


@dataclass(frozen=True)
class ValidationSample:
    """One sample of a validation with what was measured of it."""

    sample: int  # number of the sample; its noise follows from seed and number
    seed: int
    prompt: str
    reward: float | None  # None without scorers
    scores: dict[str, float]  # scale x score of every scorer, held-out ones too
    accuracy: dict[str, bool]  # tiny world: whether color, shape, direction and all of them match the prompt
    video: Path | None  # mp4 file, where one was written

    def row(self) -> dict[str, Any]:
        """Return the sample's line of samples.jsonl."""
        return {**vars(self), "video": None if self.video is None else self.video.name}

    @property
    def about(self) -> str:
        """The sample's number, seed and scores in words."""
        reward = "" if self.reward is None else f"   reward {self.reward:.3f}"
        accuracy = f"   accuracy {self.accuracy['all']:d}" if self.accuracy else ""
        return f"sample {self.sample}   seed {self.seed}{reward}{accuracy}"


@dataclass(frozen=True)
class ValidationResult:
    """The metrics of a validation, and its samples, both of all ranks."""

    metrics: dict[str, float]
    samples: tuple[ValidationSample, ...]
    contact_sheet: Path | None  # picture of the samples with a video, if there are any
    warning: str | None  # what could not be written, on the rank that writes


class Validation:
    """Generates fixed samples with the student and measures them; every data rank generates an equal number."""

    def __init__(
        self,
        config: ValidationConfig,
        codec: Codec,
        reward: Reward,
        features: Callable[[Tensor], Float[Tensor, "b d"]] | None,
        sampler: SamplerConfig,
        prompts: Sequence[str],
        latent_shape: tuple[int, int, int, int],
        mesh: Mesh,
        fps: float,
    ) -> None:
        """`features` maps frames to the vectors of the Frechet distance; None measures none.

        Sample i is of prompt i, counted round and round.
        """
        self._prompts = tuple(prompts[i % len(prompts)] for i in range(config.num_samples))
        self._config, self._codec, self._reward = config, codec, reward
        self._features, self._sampler = features, sampler
        self._scorers = (*reward.weights, *reward.held_out)
        self._latent_shape, self._mesh, self._fps = latent_shape, mesh, fps
        self._real: Tensor | None = None  # features of real clips, computed on first use

    def run(self, student: Trainable, folder: Path, step: int) -> ValidationResult:
        """Measure the student after `step` training steps; the main rank writes samples and videos into `folder`."""
        with student.ema_weights() if self._config.ema else nullcontext():
            return self._measure(student, folder, step)

    @torch.no_grad()
    def _measure(self, student: Trainable, folder: Path, step: int) -> ValidationResult:
        count = self._config.num_samples // self._mesh.data_size
        samples = range(self._mesh.data_rank * count, (self._mesh.data_rank + 1) * count)
        parts, videos = [], []
        for start in range(samples.start, samples.stop, self._config.batch):
            video, part = self._generate(student, list(range(start, min(start + self._config.batch, samples.stop))))
            parts.append(part)
            videos.append(video)
        video = torch.cat(videos)
        prompts = [self._prompts[i] for i in samples]
        columns, hits = self._rewards(torch.cat(parts)), {}
        metrics = mean_and_std(columns) | self._pixels(video)
        if is_tiny_world(video, self._prompts):
            hits = self._attributes(video, prompts)
            metrics |= _accuracies(hits)
            if self._features is not None:
                metrics["frechet"] = self._frechet(video, samples)
        clips = to_uint8(video[: self._config.num_videos])
        found = self._samples(columns, hits, folder, len(clips))
        sheet = folder / "contact_sheet.png" if clips else None
        warning = self._write(folder, clips, found, step, sheet) if self._mesh.is_main else None
        if warning is not None:
            found, sheet = tuple(replace(one, video=None) for one in found), None
        return ValidationResult({f"validation/{name}": value for name, value in metrics.items()}, found, sheet, warning)

    def _generate(self, student: Trainable, samples: list[int]) -> tuple[Tensor, Tensor]:
        """Return the videos of these samples, and a column of scores for each scorer."""
        prompts = [self._prompts[i] for i in samples]
        batch = make_batch(
            self._codec,
            prompts,
            self._codec.encode_text([self._sampler.negative_prompt]),
            self._latent_shape,
            prompt_ids=samples,
            sample_ids=samples,
        )
        streams = Streams(self._config.seed, 0, self._mesh.device)

        def draw(name: str) -> Tensor:
            return streams.noise(name, samples, self._latent_shape)

        x0 = generate(student, draw("validation"), batch, self._sampler, lambda s: draw(f"transition {s}"))
        with phase("decode"):
            video = self._codec.decode(x0)
        if not self._scorers:
            return video, torch.empty(len(video), 0, device=video.device)
        return video, self._reward.parts(video, tuple(prompts), self._scorers)

    def _rewards(self, parts: Tensor) -> dict[str, Tensor]:
        """Return the reward of every sample of all ranks, and the score of every scorer, including held-out ones."""
        if not self._scorers:
            return {}
        parts = self._mesh.gather(parts).cpu().double()
        columns = {"reward": self._reward.total(parts[:, : len(self._reward.weights)])} if self._reward.weights else {}
        return columns | {f"reward/{name}": part for name, part in zip(self._scorers, parts.unbind(1), strict=True)}

    def _pixels(self, video: Tensor) -> dict[str, float]:
        """Return mean and std of pixel statistics, and the diversity of samples of one prompt if there are several."""
        columns = {f"pixels/{name}": self._mesh.gather(row).cpu().double() for name, row in statistics(video).items()}
        spread = diversity(self._mesh.gather(thumbnail(video)).cpu(), self._prompts)
        return mean_and_std(columns) | ({} if spread is None else {"pixels/diversity": spread})

    def _attributes(self, video: Tensor, prompts: list[str]) -> dict[str, Tensor]:
        """Return which samples of all ranks have the color, shape and direction of their caption, and all of them."""
        parts = check_attributes(video.cpu(), [SUBJECT_OF_CAPTION[prompt] for prompt in prompts])
        return {name: self._mesh.gather(right.double()) for name, right in parts.items()}

    def _samples(
        self, columns: dict[str, Tensor], hits: dict[str, Tensor], folder: Path, videos: int
    ) -> tuple[ValidationSample, ...]:
        """Return the samples of all ranks; the first `videos` have a file."""
        scores = {name: columns[f"reward/{name}"].tolist() for name in self._scorers}
        rewards = columns["reward"].tolist() if "reward" in columns else [None] * len(self._prompts)
        accuracies = {name: right.bool().tolist() for name, right in hits.items()}
        return tuple(
            ValidationSample(
                i,
                self._config.seed,
                prompt,
                reward,
                {name: values[i] for name, values in scores.items()},
                {name: values[i] for name, values in accuracies.items()},
                folder / f"{i}.mp4" if i < videos else None,
            )
            for i, (prompt, reward) in enumerate(zip(self._prompts, rewards, strict=True))
        )

    def _frechet(self, video: Tensor, samples: range) -> float:
        """Return the Frechet distance of frame features to as many real clips of the same captions, both decoded."""
        if self._real is None:
            clips = render([real_clip(self._prompts[sample], self._config.seed, sample) for sample in samples])
            parts = clips.to(self._mesh.device).split(self._config.batch)
            self._real = torch.cat([self._frame_features(self._codec.decode(self._codec.encode(p))) for p in parts])
        return frechet_distance(self._mesh.gather(self._frame_features(video)), self._mesh.gather(self._real))

    def _frame_features(self, video: Tensor) -> Tensor:
        return frame_features(video, self._features, self._config.frechet_stride, self._config.batch).flatten(0, 1)

    def _write(
        self,
        folder: Path,
        clips: list[np.ndarray],
        samples: tuple[ValidationSample, ...],
        step: int,
        sheet: Path | None,
    ) -> str | None:
        """Write what people look at; return what went wrong: no number depends on it."""
        shown = list(zip(clips, samples, strict=False))  # the first samples
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for frames, one in shown:
                write_mp4(frames, folder / f"{one.sample}.mp4", self._fps)
            if sheet is not None:
                contact_sheet([Row(frames, f"step {step}   {one.about}", one.prompt) for frames, one in shown], sheet)
            lines = "".join(json.dumps(one.row(), ensure_ascii=False) + "\n" for one in samples)
            (folder / "samples.jsonl").write_text(lines, encoding="utf-8")
        except OSError as error:
            return f"{error.filename or folder} cannot be written ({error.strerror or error})"
        return None


def _accuracies(hits: dict[str, Tensor]) -> dict[str, float]:
    """Return the share of samples that match their caption; no reward contains it."""
    rates = {name: right.mean().item() for name, right in hits.items()}
    found = {"accuracy": rates.pop("all"), "accuracy_std": hits["all"].std().item()}
    return found | {f"accuracy/{name}": rate for name, rate in rates.items()}


def mean_and_std(columns: dict[str, Tensor]) -> dict[str, float]:
    """Return the mean of each column under its name, and its Bessel-corrected std under NAME_std."""
    means = {name: values.mean().item() for name, values in columns.items()}
    return means | {f"{name}_std": values.std().item() for name, values in columns.items()}
