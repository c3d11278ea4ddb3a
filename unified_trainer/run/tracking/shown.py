"""Samples of training steps that people look at: of rollouts, and the latents that distribution matching compares."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from unified_trainer.basics.requests import Request
from unified_trainer.basics.types import Batch, Latents
from unified_trainer.data.video_files import file_name, to_uint8
from unified_trainer.methods.base import Method
from unified_trainer.methods.distribution_matching import Direction, FindDirection, MatchingConfig, MatchingMethod
from unified_trainer.methods.rl.rollout_method import RolloutMethod
from unified_trainer.methods.rl.rollouts import AroundRollouts, Rollouts, ScoredSamples
from unified_trainer.models.base import Codec
from unified_trainer.numerics.flow import per_sample
from unified_trainer.parallel.meter import phase
from unified_trainer.parallel.random import Streams
from unified_trainer.rewards.reward import RewardSum
from unified_trainer.run.settings.config import ConfigError, RunConfig
from unified_trainer.run.tracking.external import ExternalTracker
from unified_trainer.run.tracking.tracker import Tracker
from unified_trainer.run.validation.report import ValidationSample, write_samples


def check_rollouts(run: RunConfig, method: type[Method]) -> None:
    """Raise ConfigError if rollouts or matching shall be shown and there is neither, or no sample of them."""
    if every := run.tracking.rollouts_every:
        if not issubclass(method, RolloutMethod | MatchingMethod):
            raise ConfigError(
                f"tracking.rollouts_every {every}: {run.method} makes no rollouts and matches no teacher; set it to 0"
            )
        if not run.validation.num_videos:
            raise ConfigError(
                f"tracking.rollouts_every {every} shows as many samples as validation.num_videos says, which is 0: "
                "raise it, or set tracking.rollouts_every 0"
            )


def show_steps(method: Method, codec: Codec, reward: RewardSum, run: RunConfig, output: Path, tracker: Tracker) -> None:
    """Let the first samples of the main rank go into the run directory and to the trackers.

    Those of rollouts every `tracking.rollouts_every` training steps; of a distillation, with all that the student's
    update compares, those of the first one at or after every multiple of so many steps.
    """
    if not (run.tracking.rollouts_every and tracker.active):
        return
    if isinstance(method, RolloutMethod):
        method.rollouts = ShownRollouts(method.rollouts, codec, reward, run, output / "rollouts", tracker)
    if isinstance(method, MatchingMethod):
        shown = ShownMatching(method.matching.direction, codec, run, output / "matching", tracker)
        method.matching.direction = shown
        tracker.add(shown)


def _show(
    tracker: Tracker,
    run: RunConfig,
    folder: Path,
    step: int,
    clips: Sequence[np.ndarray],
    samples: Sequence[ValidationSample],
    requests: Sequence[Request],
) -> None:
    sheet = folder / "contact_sheet.png"
    if warning := write_samples(folder, clips, samples, requests, step, run.video.fps, sheet):
        tracker.say(f"warning: {warning}; the run goes on")
    else:
        tracker.log_rollouts(step, samples, sheet)


class ShownRollouts(AroundRollouts):
    """Samples of another source: those of every n-th training step are shown, and none is changed."""

    def __init__(
        self, source: Rollouts, codec: Codec, reward: RewardSum, run: RunConfig, folder: Path, tracker: Tracker
    ) -> None:
        super().__init__(source)
        self._codec, self._reward, self._run, self._folder, self._tracker = codec, reward, run, folder, tracker

    def samples(self, batch: Batch, step: int, rng: Streams) -> ScoredSamples:
        samples = self._source.samples(batch, step, rng)
        if (step + 1) % self._run.tracking.rollouts_every == 0:
            self._decode_and_show(samples, step + 1)
        return samples

    def _decode_and_show(self, samples: ScoredSamples, step: int) -> None:
        batch, rows = samples.batch, range(min(self._run.validation.num_videos, len(samples.batch)))
        with phase("decode"), self._codec.in_use():
            clips = [to_uint8(self._codec.decode(samples.rollout.end([row])))[0] for row in rows]
        folder, parts = self._folder / f"step_{step}", samples.scores.parts[: len(rows)].cpu().double()
        rewards, scores = self._reward.partial_total(parts).tolist(), parts.tolist()
        shown = [
            ValidationSample(
                batch.sample_ids[row],
                self._run.seed,
                batch.requests[row].text,
                rewards[row],
                dict(zip(self._reward.weights, scores[row], strict=True)),
                {},
                folder / file_name(batch.sample_ids[row], len(clips[row])),
                tuple(batch.requests[row].files.get("images", ())),
            )
            for row in rows
        ]
        _show(self._tracker, self._run, folder, step, clips, shown, batch.requests)


class ShownMatching(ExternalTracker):
    """A direction of matching around another one: its latents are kept, and decoded when the step is logged.

    Then no graph is alive, and the VAE has the memory of the update. No number of the training is changed.
    """

    def __init__(self, source: FindDirection, codec: Codec, run: RunConfig, folder: Path, tracker: Tracker) -> None:
        self._source, self._codec, self._run, self._folder, self._tracker = source, codec, run, folder, tracker
        self._period = run.algorithm.student_every if isinstance(run.algorithm, MatchingConfig) else 1
        self._kept: list[tuple[Latents, ValidationSample, Request]] = []  # latents [1, c, t, h, w] on the CPU

    def __call__(self, x0: Latents, batch: Batch, rng: Streams) -> Direction:
        direction = self._source(x0, batch, rng)
        every, step = self._run.tracking.rollouts_every, rng.step + 1
        if step // every > max(step - self._period, 0) // every:  # the update before is on the other side of a multiple
            self._keep(x0, batch, direction, self._folder / f"step_{step}")
        return direction

    def _keep(self, x0: Latents, batch: Batch, direction: Direction, folder: Path) -> None:
        """Keep the first samples; g is scaled to a mean square of 1, as latents have, because it has no unit."""
        g, run = direction.gradient, self._run
        size = g.square().flatten(1).mean(1).sqrt()
        latents = {"x": x0.detach(), **direction.compared, "g": g / per_sample(size.where(size > 0, 1), g)}
        for row in range(min(len(batch), run.validation.num_videos - len(self._kept) // len(latents))):
            sample, request = batch.sample_ids[row], batch.requests[row]
            for name, x in latents.items():
                file = folder / file_name(f"{sample}_{name}", run.video.frames)
                images, shows = tuple(request.files.get("images", ())), f"{name}, tau {float(direction.tau[row]):.3f}"
                shown = ValidationSample(sample, run.seed, request.text, None, {}, {}, file, images, shows)
                self._kept.append((x[row : row + 1].cpu(), shown, request))

    def rewind(self, step: int, lines: int) -> None:
        self.taken = lines

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Decode and show what was kept of the step that ends."""
        if not self._kept:
            return
        (latents, samples, requests), self._kept = zip(*self._kept, strict=True), []
        with self._codec.in_use():
            clips = [to_uint8(self._codec.decode(x))[0] for x in latents]
        _show(self._tracker, self._run, self._folder / f"step_{step}", step, clips, samples, requests)
