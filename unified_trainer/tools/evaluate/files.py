"""The files of an evaluation: evaluation.json with everything, and tables for other programs."""

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from unified_trainer.run.settings.config import plain
from unified_trainer.tools.evaluate.checkpoints import Checkpoint
from unified_trainer.tools.evaluate.measures import BootstrapConfig, Summary, as_json
from unified_trainer.tools.evaluate.plan import Plan
from unified_trainer.tools.evaluate.samples import Measured
from unified_trainer.tools.output_folder import begin_output, write_text

ABOUT, WHAT = "evaluation.json", "evaluations"
HEAD = {"version": 1, "content": "evaluation"}
SAMPLES = "samples"  # folder with the samples of each checkpoint


def begin(output: Path) -> None:
    """Begin the folder of an evaluation, or go on with one; OutputExistsError if it holds something else."""
    begin_output(output, ABOUT, HEAD, WHAT)


def write(
    output: Path,
    checkpoints: Sequence[Checkpoint],
    rows: Sequence[Measured],
    plan: Plan,
    config: BootstrapConfig,
    summary: Summary,
    frechet_to: str,
) -> dict[str, Any]:
    """Write evaluation.json, samples.csv, measures.csv and differences.csv; return the first one's content."""
    names = [checkpoint.name for checkpoint in checkpoints]
    about = HEAD | {"checkpoints": [_about(*pair) for pair in zip(checkpoints, rows, strict=True)]}
    about |= {"plan": asdict(plan), "bootstrap": asdict(config), "frechet_to": frechet_to} | as_json(summary, names)
    write_text(output / ABOUT, json.dumps(about, indent=1, ensure_ascii=False) + "\n")
    write_text(output / "samples.csv", _table(_samples(output, names, rows, plan)))
    write_text(output / "measures.csv", _table(_measures(summary, names)))
    write_text(output / "differences.csv", _table(_differences(summary, names)))
    return about


def _about(checkpoint: Checkpoint, row: Measured) -> dict[str, Any]:
    run = plain(checkpoint.run)
    return {
        "name": checkpoint.name,
        "spec": checkpoint.spec,
        "step": checkpoint.step,
        "ema": checkpoint.ema,
        "weights": checkpoint.digest,
        "sampler": run["sampler"],
        "video": run["video"],
        "samples": f"{SAMPLES}/{row.folder.name}",
    }


def _samples(output: Path, names: Sequence[str], rows: Sequence[Measured], plan: Plan) -> list[dict[str, Any]]:
    found = []
    for name, measured in zip(names, rows, strict=True):
        for row in measured.rows:
            video = measured.folder.relative_to(output) / row["video"] if row["video"] else ""
            found.append({"checkpoint": name} | row | {"prompt": plan.prompts[row["prompt"]], "video": str(video)})
    return found


def _measures(summary: Summary, names: Sequence[str]) -> list[dict[str, Any]]:
    return [
        {"measure": measure, "checkpoint": name, "mean": measured.mean}
        | _ends(measured.interval)
        | {"std_over_seeds": measured.std_over_seeds}
        for measure, values in summary.measures.items()
        for name, measured in zip(names, values, strict=True)
    ]


def _differences(summary: Summary, names: Sequence[str]) -> list[dict[str, Any]]:
    return [
        {
            "measure": difference.measure,
            "left": names[difference.left],
            "right": names[difference.right],
            "difference": difference.difference,
        }
        | _ends(difference.interval)
        for difference in summary.differences
    ]


def _ends(interval: tuple[float, float] | None) -> dict[str, float | None]:
    low, high = interval or (None, None)
    return {"low": low, "high": high}


def _table(rows: Sequence[dict[str, Any]]) -> str:
    """Return rows of the same keys as CSV; None is an empty cell."""
    text = io.StringIO()
    if rows:
        writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return text.getvalue()
