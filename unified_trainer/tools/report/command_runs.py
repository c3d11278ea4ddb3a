"""The command runs: it lists the runs below a folder with their state and best metrics."""

import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import tyro
from rich.table import Table
from rich.text import Text

from unified_trainer.basics.errors import MissingFileError
from unified_trainer.basics.terminal import printable, show
from unified_trainer.run.tracking.tracker import VALIDATED
from unified_trainer.tools.report.run_folder import RunFolderUnreadableError, RunRecord, find_runs, name_below, read_run
from unified_trainer.tools.report.status import Status, best_of, status_of

WIDTH = 200  # columns where the output is no terminal
AGES = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))
STYLES = {"running": "cyan", "finished": "green", "stopped": "yellow"} | dict.fromkeys(
    ("hacked", "collapsed", "failed"), "red"
)


def runs(folder: Annotated[str, tyro.conf.Positional] = "runs") -> None:
    """List the runs below a folder: state, steps, and the last and best value of the main validation metrics.

    A run is running, finished, hacked or collapsed (the hacking monitor, or the guard of distillation, stopped it),
    stopped (its last step is saved) or failed; how often it was rolled back follows. A mirror shows a run as of its
    newest copy.

    Args:
        folder: Folder with run directories, at any depth; or the address of a mirror, or of a folder of mirrors.
    """
    if "://" not in folder:
        return _list(Path(folder), folder)
    from unified_trainer.run.checkpoint.restore import outline  # takes a while: most lists are of folders here

    with TemporaryDirectory() as copied:
        below = Path(copied, folder.rstrip("/").rpartition("/")[2])
        below.mkdir(exist_ok=True)
        outline(folder, below)
        _list(below, folder)


def _list(folder: Path, shown: str) -> None:
    """Print a table of the runs below a folder; `shown` names it in messages."""
    if not folder.is_dir():
        raise MissingFileError(f"runs {shown}: no such folder; name one with run directories")
    folders = find_runs(folder)
    if not folders:
        raise MissingFileError(f"runs {shown}: no run directory below it; name another folder")
    table = Table(*("run", "method", "seed", "state", "steps", *VALIDATED.values(), "updated"))
    for run in folders:
        table.add_row(*(Text(printable(words), style) for words, style in _row(run, name_below(run, folder))))
    show(table, width=WIDTH)


def _row(folder: Path, name: str) -> list[tuple[str, str]]:
    """Return the cells of a run as text and style; a run that cannot be read says why."""
    try:
        run = read_run(folder)
    except RunFolderUnreadableError as error:
        return [(name, ""), ("", ""), ("", ""), (f"unreadable: {error}", "red")]
    status = status_of(run)
    metrics = [_metric(run, name.removeprefix("validation/")) for name in VALIDATED]
    before = (name, run.method, str(run.config.get("seed", "")))
    after = (f"{status.step}/{status.steps}", *metrics, _age(run))
    return [*((cell, "") for cell in before), (_state(status), STYLES[status.state]), *((cell, "") for cell in after)]


def _state(status: Status) -> str:
    """Return the state, how often the run was rolled back, and the first alarm of a guard that did not end it."""
    words: list[str] = [status.state]
    if status.rollbacks:
        words.append(f"rolled back {status.rollbacks} time{'s' if status.rollbacks > 1 else ''}")
    if status.hacking and status.state != "hacked":
        words.append(f"hacking suspected at step {status.hacking[0]}")
    if status.alarms and status.state != "collapsed":
        words.append(f"collapse suspected at step {status.alarms[0]}")
    return ", ".join(words)


def _metric(run: RunRecord, name: str) -> str:
    best = best_of(run, name)
    return "" if best is None else f"{best.last:.4g}, best {best.best:.4g} @ {best.best_step}"


def _age(run: RunRecord) -> str:
    if run.written is None:
        return ""
    seconds = max(0.0, time.time() - run.written)
    unit, size = next((row for row in AGES if seconds >= row[1]), AGES[-1])
    return f"{int(seconds // size)} {unit} ago"
