"""Latents of distribution matching as videos that people look at: in the run directory and in the trackers."""

from collections.abc import Mapping
from pathlib import Path

from unified_trainer.basics.requests import Request
from unified_trainer.basics.types import Batch, Latents
from unified_trainer.data.video_files import file_name, to_uint8
from unified_trainer.methods.base import Method
from unified_trainer.methods.distribution_matching import Direction, FindDirection, MatchingConfig, MatchingMethod
from unified_trainer.models.base import Codec
from unified_trainer.numerics.flow import per_sample
from unified_trainer.parallel.random import Streams
from unified_trainer.run.settings.config import RunConfig
from unified_trainer.run.tracking.external import ExternalTracker
from unified_trainer.run.tracking.tracker import Tracker
from unified_trainer.run.validation.report import ValidationSample, write_samples

FOLDER = "matching"  # in the run directory


def show_matching(method: Method, codec: Codec, run: RunConfig, output: Path, tracker: Tracker) -> None:
    """Let the first samples of the main rank go to the trackers with all that their student's update compares.

    Of the student's updates, the first one at or after every multiple of `tracking.rollouts_every` steps is shown.
    """
    if run.tracking.rollouts_every and tracker.active and isinstance(method, MatchingMethod):
        shown = ShownMatching(method.matching.direction, codec, run, output / FOLDER, tracker)
        method.matching.direction = shown
        tracker.add(shown)


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
        folder = self._folder / f"step_{step}"
        sheet = folder / "contact_sheet.png"
        if warning := write_samples(folder, clips, samples, requests, step, self._run.video.fps, sheet):
            self._tracker.say(f"warning: {warning}; the run goes on")
        else:
            self._tracker.log_rollouts(step, samples, sheet)
