"""Samples of training rollouts that people look at: in the run directory and in the trackers."""

from collections.abc import Callable
from pathlib import Path

from unified_trainer.basics.types import Batch
from unified_trainer.data.video_files import file_name, to_uint8
from unified_trainer.methods.base import Method
from unified_trainer.methods.distribution_matching import MatchingMethod
from unified_trainer.methods.rl.rollout_method import RolloutMethod
from unified_trainer.methods.rl.rollouts import Check, Rollouts, ScoredSamples
from unified_trainer.models.base import Codec
from unified_trainer.parallel.meter import phase
from unified_trainer.parallel.random import Streams
from unified_trainer.rewards.reward import RewardSum
from unified_trainer.run.settings.config import ConfigError, RunConfig
from unified_trainer.run.tracking.tracker import Tracker
from unified_trainer.run.validation.report import ValidationSample, write_samples

FOLDER = "rollouts"  # in the run directory

Show = Callable[[ScoredSamples, int], None]  # samples of a rank, and the number of their training step from 1


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


def show_rollouts(
    method: Method, codec: Codec, reward: RewardSum, run: RunConfig, output: Path, tracker: Tracker
) -> None:
    """Let the first samples of the main rank go to the trackers every `tracking.rollouts_every` training steps."""
    if run.tracking.rollouts_every and tracker.active and isinstance(method, RolloutMethod):
        show = RolloutWriter(codec, reward, run, output, tracker)
        method.rollouts = ShownRollouts(method.rollouts, run.tracking.rollouts_every, show)


class ShownRollouts:
    """A source of samples around another one: those of every n-th training step are shown, and none is changed."""

    def __init__(self, source: Rollouts, every: int, show: Show) -> None:
        self._source, self._every, self._show = source, every, show
        self.uniform = source.uniform
        self.check: Check | None = None  # that of the source is called

    def samples(self, batch: Batch, step: int, rng: Streams) -> ScoredSamples:
        samples = self._source.samples(batch, step, rng)
        if (step + 1) % self._every == 0:
            self._show(samples, step + 1)
        return samples

    def metrics(self) -> dict[str, float]:
        return self._source.metrics()

    def lower_ahead(self) -> None:
        self._source.lower_ahead()


class RolloutWriter:
    """Decodes samples of a training step, writes them into the run directory, and gives them to the trackers."""

    def __init__(self, codec: Codec, reward: RewardSum, run: RunConfig, output: Path, tracker: Tracker) -> None:
        self._codec, self._reward, self._tracker = codec, reward, tracker
        self._folder, self._count = output / FOLDER, run.validation.num_videos
        self._seed, self._fps = run.seed, run.video.fps

    def __call__(self, samples: ScoredSamples, step: int) -> None:
        batch, rows = samples.batch, range(min(self._count, len(samples.batch)))
        with phase("decode"), self._codec.in_use():
            clips = [to_uint8(self._codec.decode(samples.rollout.end([row])))[0] for row in rows]
        folder, parts = self._folder / f"step_{step}", samples.scores.parts[: len(rows)].cpu().double()
        rewards, scores = self._reward.total(parts).tolist(), parts.tolist()
        shown = [
            ValidationSample(
                batch.sample_ids[row],
                self._seed,
                batch.requests[row].text,
                rewards[row],
                dict(zip(self._reward.weights, scores[row], strict=True)),
                {},
                folder / file_name(batch.sample_ids[row], len(clips[row])),
                tuple(batch.requests[row].files.get("images", ())),
            )
            for row in rows
        ]
        sheet = folder / "contact_sheet.png"
        if warning := write_samples(folder, clips, shown, batch.requests, step, self._fps, sheet):
            self._tracker.say(f"warning: {warning}; the run goes on")
        else:
            self._tracker.log_rollouts(step, shown, sheet)
