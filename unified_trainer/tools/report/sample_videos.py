"""The validation samples of a page as plain data: videos over training within a size, best and worst by each scorer."""

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from unified_trainer.basics.errors import UserError
from unified_trainer.run.validation.report import ValidationSample
from unified_trainer.run.validation.samples import EXTREMES
from unified_trainer.tools.report.charts import finite
from unified_trainer.tools.report.run_folder import ValidationRecord


class SampleVideos:
    """Collects what a page shows of the validation samples of its runs; each video is in it once."""

    def __init__(self) -> None:
        self.videos: list[str] = []  # data URIs; cards name them by position
        self.left_out = 0  # validations and samples whose videos did not fit
        self._positions = dict[Any, int]()

    def over_time(self, runs: Sequence[Sequence[ValidationRecord]], limit: int) -> dict[str, Any]:
        """Return steps, and rows of one prompt, seed and sample with a card for every run and step.

        `limit` is the size of all videos in bytes. Samples without a video in a validation have no row.
        """
        rows: dict[tuple[int, int, str], dict[str, Any]] = {}
        steps: set[int] = set()
        for run, validations in enumerate(runs):
            shown, samples = within(validations, limit / len(runs))
            filmed = [[s for s in validation.samples if s.video is not None][:samples] for validation in shown]
            self.left_out += sum(s.video is not None for validation in validations for s in validation.samples)
            self.left_out -= sum(map(len, filmed))
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
            self.videos.append(data_uri(sample.video))
        alone = sample.reward is None or len(sample.scores) == 1  # the reward is then the only score itself
        scores = sample.scores if alone else {"reward": sample.reward} | sample.scores
        return {
            "sample": sample.sample,
            "seed": sample.seed,
            "prompt": sample.prompt,
            "scores": {name: finite(value) for name, value in scores.items()},
            "accuracy": sample.accuracy,
            "video": self._positions.get(sample.video),
        }


def data_uri(file: Path) -> str:
    """Return a PNG or mp4 file as a data URI; UserError if it cannot be read."""
    try:
        content = base64.b64encode(file.read_bytes()).decode()
    except OSError as error:
        raise UserError(f"{file} cannot be read ({error}): remove it, or its line in samples.jsonl") from error
    return f"data:{'image/png' if file.suffix == '.png' else 'video/mp4'};base64,{content}"


def within(validations: Sequence[ValidationRecord], limit: float) -> tuple[tuple[ValidationRecord, ...], int]:
    """Return validations whose videos are at most `limit` bytes together, and the number of samples of each.

    Validations in the middle are left out evenly at first, then samples: one sample of the first and of the last
    validation stays unless the limit is 0.
    """
    shown = [validation for validation in validations if any(sample.video for sample in validation.samples)]
    if not shown or limit <= 0:
        return (), 0
    sizes = [[sample.video.stat().st_size for sample in validation.samples if sample.video] for validation in shown]
    samples = max(map(len, sizes))
    last = len(shown) - 1
    for stride in range(1, max(last, 1) + 1):
        kept = sorted({*range(0, last, stride), last})
        if sum(sum(sizes[i]) for i in kept) <= limit:
            return tuple(shown[i] for i in kept), samples
    kept = sorted({0, last})
    while samples > 1 and sum(sum(sizes[i][:samples]) for i in kept) > limit:
        samples -= 1
    return tuple(shown[i] for i in kept), samples
