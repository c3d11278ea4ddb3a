"""Training with --report: the page is written when the run has ended."""

from collections.abc import Sequence
from pathlib import Path

from torch.distributed import Store

from unified_trainer.commands.train import train
from unified_trainer.config import RunConfig
from unified_trainer.errors import UserError
from unified_trainer.terminal import say


def train_and_report(run: RunConfig, argv: Sequence[str], store: Store | None = None) -> int:
    """Train, write report.html into the run directory if the settings ask for it, and return the exit code."""
    return train(run, argv, store, after=write_run_report if run.report else None)


def write_run_report(run: Path) -> None:
    """Write report.html into a run directory; a failure is a warning, because the run itself is complete."""
    from unified_trainer.reporting.page import write_report  # templates and charts, which training does not need

    out = run / "report.html"
    try:
        write_report([run], out)
        say(f"report in {out}")
    except (UserError, OSError) as error:
        say(f"warning: no report: {error}")
