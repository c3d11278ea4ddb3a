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
from unified_trainer.tools.evaluate.measures import BootstrapConfig, Summary
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
    measures = {
        measure: dict(zip(names, map(asdict, values), strict=True)) for measure, values in summary.measures.items()
    }
    differences = [asdict(one) | {"left": names[one.left], "right": names[one.right]} for one in summary.differences]
    about = HEAD | {"checkpoints": [_about(*pair) for pair in zip(checkpoints, rows, strict=True)]}
    about |= {"plan": asdict(plan), "bootstrap": asdict(config), "frechet_to": frechet_to}
    about |= {"measures": measures, "differences": differences}
    write_text(output / ABOUT, json.dumps(about, indent=1, ensure_ascii=False) + "\n")
    write_text(output / "samples.csv", _table(_samples(output, names, rows, plan)))
    by_checkpoint = [
        {"measure": measure, "checkpoint": name} | one for measure, row in measures.items() for name, one in row.items()
    ]
    columns = ("measure", "checkpoint", "mean", "low", "high", "std_over_seeds")
    write_text(output / "measures.csv", _table(_with_ends(by_checkpoint), columns))
    columns = ("measure", "left", "right", "difference", "low", "high")
    write_text(output / "differences.csv", _table(_with_ends(differences), columns))
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


def _with_ends(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row | dict(zip(("low", "high"), row["interval"] or (None, None), strict=True)) for row in rows]


def _table(rows: Sequence[dict[str, Any]], columns: Sequence[str] = ()) -> str:
    """Return these columns of rows, by default all, as CSV; None is an empty cell."""
    text = io.StringIO()
    if rows:
        writer = csv.DictWriter(text, columns or list(rows[0]), extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return text.getvalue()
