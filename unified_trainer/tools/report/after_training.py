"""Training with --report: the page is written when the run has ended."""

from pathlib import Path

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.terminal import say
from unified_trainer.run.settings.config import RunConfig
from unified_trainer.run.train import After


def report_after(run: RunConfig) -> After | None:
    """Return what `train` calls with the run directory when the run has ended: None without --report."""
    return write_run_report if run.report else None


def write_run_report(run: Path) -> None:
    """Write report.html into a run directory; a failure is a warning, because the run itself is complete."""
    from unified_trainer.tools.report.page import write_report  # templates and charts, which training does not need

    out = run / "report.html"
    try:
        write_report([run], out)
        say(f"report in {out}")
    except (UserError, OSError) as error:
        say(f"warning: no report: {error}")
