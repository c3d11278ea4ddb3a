"""The validation samples of a page as plain data: videos over training time, and best and worst by each scorer."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from unified_trainer.run.validation.report import ValidationSample
from unified_trainer.run.validation.samples import EXTREMES
from unified_trainer.tools.report.charts import finite
from unified_trainer.tools.report.run_folder import ValidationRecord
from unified_trainer.tools.report.videos import within


class SampleVideos:
    """Collects what a page shows of the validation samples of its runs; each video is in it once.

    `source` returns the URL of a video file: one that holds it, or of a server.
    """

    def __init__(self, source: Callable[[Path], str]) -> None:
        self.videos: list[str] = []  # URLs; cards name them by position
        self.left_out = 0  # validations and samples whose videos did not fit
        self._source, self._positions = source, dict[Any, int]()

    def over_time(self, runs: Sequence[Sequence[ValidationRecord]], limit: float) -> dict[str, Any]:
        """Return steps, and rows of one prompt, seed and sample with a card for every run and step.

        `limit` is the size of all videos in bytes, or infinite. Samples without a video in a validation have no row.
        """
        rows: dict[tuple[int, int, str], dict[str, Any]] = {}
        steps: set[int] = set()
        for run, validations in enumerate(runs):
            shown, samples = within(validations, limit / len(runs))
            have = sum(sample.video is not None for validation in validations for sample in validation.samples)
            filmed = [[s for s in validation.samples if s.video is not None][:samples] for validation in shown]
            have -= sum(map(len, filmed))
            for sample in filmed[-1] if filmed else ():
                self.card(sample)
            common = set.intersection(*({s.sample for s in row} for row in filmed)) if filmed else set()
            for validation, candidates in zip(shown, filmed, strict=True):
                steps.add(validation.step)
                for sample in (s for s in candidates if s.sample in common):
                    row = rows.setdefault(
                        (sample.sample, sample.seed, sample.prompt),
                        {"sample": sample.sample, "seed": sample.seed, "prompt": sample.prompt, "cards": {}},
                    )
                    row["cards"].setdefault(str(run), {})[str(validation.step)] = self.card(sample)
            self.left_out += have
        return {"steps": sorted(steps), "rows": [rows[key] for key in sorted(rows)]}

    def extremes(self, validations: Sequence[ValidationRecord]) -> list[dict[str, Any]]:
        """Return the best and the worst of the last validation's samples with a video in the page, by every scorer."""
        if not validations:
            return []
        last = validations[-1]
        cards = [self.card(sample) for sample in last.samples if sample.video in self._positions]
        rows = []
        for name in dict.fromkeys(name for card in cards for name in card["scores"]):
            ranked = sorted((c for c in cards if c["scores"].get(name) is not None), key=lambda c: -c["scores"][name])
            count = min(EXTREMES, len(ranked) // 2)
            best, worst = ranked[:count], ranked[len(ranked) - count :][::-1]
            rows.append({"scorer": name, "step": last.step, "of": len(last.samples), "best": best, "worst": worst})
        return rows

    def card(self, sample: ValidationSample) -> dict[str, Any]:
        """Return prompt, scores and video of a sample, and add its video to the page."""
        if sample.video is not None and sample.video not in self._positions:
            self._positions[sample.video] = len(self.videos)
            self.videos.append(self._source(sample.video))
        return {
            "sample": sample.sample,
            "seed": sample.seed,
            "prompt": sample.prompt,
            "scores": _scores(sample),
            "accuracy": sample.accuracy,
            "video": self._positions.get(sample.video),
        }


def _scores(sample: ValidationSample) -> dict[str, float | None]:
    """Return the reward, where it is not the only score itself, and all scores."""
    alone = len(sample.scores) == 1
    total = {} if sample.reward is None or alone else {"reward": finite(sample.reward)}
    return total | {name: finite(value) for name, value in sample.scores.items()}
