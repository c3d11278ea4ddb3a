"""The command report: one HTML file of one or several runs that a browser opens from disk, without a network."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro
from plotly.offline import get_plotlyjs

from unified_trainer.basics.errors import OutputExistsError, UserError
from unified_trainer.basics.own_files import without_link
from unified_trainer.basics.ranges import NonNegative
from unified_trainer.basics.terminal import say
from unified_trainer.tools.report.charts import chart_groups
from unified_trainer.tools.report.healthy import departures
from unified_trainer.tools.report.run_folder import RunRecord, read_run, read_validations
from unified_trainer.tools.report.sample_videos import SampleVideos
from unified_trainer.tools.report.status import best_of, status_of
from unified_trainer.tools.report.tables import (
    Settings,
    differing,
    last_metrics,
    phase_times,
    reward_parts,
    settings_of_run,
)
from unified_trainer.tools.report.templates import filled, own_file

MEGABYTE = 10**6
VIDEO_MEGABYTES = 20.0  # of a page, unless asked otherwise
BASE64 = 4 / 3  # bytes of a data URI for each byte of a video
MARK = '<meta name="generator" content="unified-trainer report">'
HEADLINES = ("reward", "accuracy", "frechet")  # validation metrics at the top
SCRIPTS = ("curves.js", "samples.js")
MOST_POINTS = 4000  # of a curve, about


def report(
    runs: Annotated[tuple[Path, ...], tyro.conf.Positional],
    out: Path = Path("report.html"),
    video_megabytes: NonNegative = VIDEO_MEGABYTES,
) -> None:
    """Write one HTML file of runs that a browser opens from disk: curves, samples over training, settings.

    Several runs are compared: curves over each other, samples in columns, last metrics with their spread over seeds.

    Args:
        runs: Run directories; a run may still go on.
        out: File to write; a report that is there already is replaced.
        video_megabytes: Megabytes of videos in the page; 0 leaves out all, else validations in the middle are left out.
    """
    samples, unreadable = write_report(runs, out, video_megabytes)
    line = f"{out}: {out.stat().st_size / MEGABYTE:.1f} MB, {len(samples.videos)} videos"
    if samples.left_out:
        line += f"; {samples.left_out} more did not fit into --video-megabytes {video_megabytes:g}"
    for fault in unreadable:
        say(f"warning: {fault}")
    say(line)


def write_report(
    folders: Sequence[Path], out: Path, video_megabytes: float = VIDEO_MEGABYTES
) -> tuple[SampleVideos, tuple[str, ...]]:
    """Write the report of run directories; return its videos, and why some of the runs are not in it.

    Raise UserError, before anything is written, if none of them can be read.
    """
    check_out(out)
    if video_megabytes < 0:
        raise UserError(f"--video-megabytes must not be negative, but is {video_megabytes}")
    names = dict(zip(folders, _distinct_names(folders), strict=True))
    runs, unreadable = _readable(folders)
    samples = SampleVideos()
    limit = int(video_megabytes * MEGABYTE / BASE64)
    text = _rendered(runs, [names[run.folder] for run, _ in runs], samples, limit, unreadable)
    building = out.with_suffix(".tmp")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        without_link(building).write_text(text, encoding="utf-8", errors="replace")  # of a name that is not UTF-8
        building.replace(out)
    except OSError as error:
        raise UserError(f"{out} cannot be written ({error.strerror}); choose another --out") from error
    return samples, unreadable


def _readable(folders: Sequence[Path]) -> tuple[list[tuple[RunRecord, Settings]], tuple[str, ...]]:
    """Return the runs that can be read with their settings, and why the others cannot; UserError if none can."""
    runs, faults = [], []
    for folder in folders:
        try:
            run = read_run(folder)
            read_validations(folder)
            runs.append((run, settings_of_run(run)))
        except UserError as error:
            faults.append(error)
    if not runs:
        raise faults[0]
    return runs, tuple(f"unreadable: {fault}" for fault in faults)


def check_out(out: Path) -> None:
    """Raise UserError for a file that is no page, and OutputExistsError for one that another program wrote."""
    if out.suffix != ".html":
        raise UserError(f"--out {out} must end in .html")
    if out.is_dir():
        raise OutputExistsError(f"--out {out} is a folder; name a file in it, such as {out / 'report.html'}")
    if out.exists() and not (out.is_file() and MARK.encode() in out.read_bytes()[:2000]):
        raise OutputExistsError(f"--out {out} exists and is no report; choose another file or remove it")


def _rendered(
    read: Sequence[tuple[RunRecord, Settings]],
    names: Sequence[str],
    samples: SampleVideos,
    limit: int,
    unreadable: Sequence[str],
) -> str:
    """Return the page of runs, each with its settings, and fill `samples`.

    `limit` bounds their videos in bytes, before they are text; `unreadable` says why runs that were asked for are not
    in the page.
    """
    runs = [run for run, _ in read]
    validations = [read_validations(run.folder) for run in runs]
    over_time = samples.over_time(validations, limit)
    extremes = [samples.extremes(validation) for validation in validations]
    groups = chart_groups(runs, MOST_POINTS)
    data = {"runs": list(names), "groups": groups, "samples": over_time, "videos": samples.videos}
    return filled(
        "report.html",
        (get_plotlyjs(), *map(own_file, SCRIPTS)),
        MARK,
        data=data,
        left_out=samples.left_out,
        unreadable=unreadable,
        runs=[_about(run, name, found, own) for (run, own), name, found in zip(read, names, extremes, strict=True)],
        differing=differing(runs) if len(runs) > 1 else {},
        last=last_metrics(runs),
    )


def _about(run: RunRecord, name: str, extremes: list[dict[str, Any]], settings: Settings) -> dict[str, Any]:
    return {
        "name": name,
        "folder": str(run.folder),
        "method": run.method,
        "recipe": run.config.get("recipe", ""),
        "seed": run.config.get("seed"),
        "status": status_of(run),
        "best": [best for key in HEADLINES if (best := best_of(run, key)) is not None],
        "departures": departures(run),
        "extremes": extremes,
        "parts": reward_parts(run),
        "phases": phase_times(run),
        "settings": settings,
        "starts": [_start(start) for start in run.starts],
        "checkpoints": run.checkpoints,
    }


def _start(start: Mapping[str, Any]) -> dict[str, Any]:
    """Return a line of environment.jsonl as rows of a table."""
    git = start.get("git") or {}
    commit = f"{git['commit']}{', changed' if git.get('dirty') else ''}" if git.get("commit") else None
    versions = {f"version of {key}": value for key, value in (start.get("versions") or {}).items()}
    return (
        {key: value for key, value in start.items() if key not in ("versions", "git")} | {"commit": commit} | versions
    )


def _distinct_names(folders: Sequence[Path]) -> list[str]:
    """Return a name for every run: its directory's, with those above it where two are the same."""
    paths = [folder.resolve() for folder in folders]
    if len({*paths}) < len(paths):
        raise UserError("report: the same run is named twice; name each one once")
    depth = 1
    while len({*(names := ["/".join(path.parts[-depth:]) for path in paths])}) < len(paths):
        depth += 1
    return names
