"""The command line: python -m unified_trainer."""

import gc
import signal

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during the imports ends the process without their traceback

COLLECTS = gc.isenabled()
gc.disable()  # until everything is imported: it would look at the same objects over and over, a fifth of the start

import sys
from collections.abc import Callable
from importlib.metadata import version

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.suggestions import must_know
from unified_trainer.basics.terminal import console, say
from unified_trainer.parallel.meeting import meeting
from unified_trainer.run.exit_codes import end, exit_code
from unified_trainer.run.registry import METHODS, method_named
from unified_trainer.run.settings.command_line import before_flags, parse
from unified_trainer.run.settings.flags import apply
from unified_trainer.tools import help_pages
from unified_trainer.tools.evaluate.evaluate import evaluate
from unified_trainer.tools.export.export import export
from unified_trainer.tools.export.push import push
from unified_trainer.tools.plan.command import plan
from unified_trainer.tools.prepare.import_hpsv3 import import_hpsv3
from unified_trainer.tools.prepare.preprocess import preprocess
from unified_trainer.tools.report.after_training import train_and_report
from unified_trainer.tools.report.command_report import report
from unified_trainer.tools.report.command_runs import runs
from unified_trainer.tools.report.command_watch import watch
from unified_trainer.tools.sample.rollout import rollout
from unified_trainer.tools.sample.sample import sample
from unified_trainer.tools.sample.score import score
from unified_trainer.tools.serve.serve import serve
from unified_trainer.tools.serve.serve_reward import serve_reward

if COLLECTS:
    gc.enable()
if __name__ == "__main__" and signal.getsignal(signal.SIGINT) == signal.SIG_DFL:
    signal.signal(signal.SIGINT, signal.default_int_handler)

COMMANDS: dict[str, Callable[..., int | None]] = {
    "evaluate": evaluate,
    "export": export,
    "import-hpsv3": import_hpsv3,
    "plan": plan,
    "preprocess": preprocess,
    "push": push,
    "report": report,
    "rollout": rollout,
    "runs": runs,
    "sample": sample,
    "score": score,
    "serve": serve,
    "serve-reward": serve_reward,
    "watch": watch,
}
WIDEST = 120  # columns of a help page
HELP = {"-h", "--help", "--help-all"}


def main(argv: list[str]) -> int:
    """Run a command or a training and return the exit code; an exception that is not a UserError is raised."""
    return exit_code(lambda: _run(argv))


def _run(argv: list[str]) -> int:
    if not argv or HELP & {*argv}:
        say(_page(argv, min(console().width, WIDEST)))
        return 0 if argv else 2
    if "--version" in argv:
        say(f"unified-trainer {version('unified-trainer')}, torch {version('torch')}")
    elif _names_command(argv):
        return apply(_command(argv[0]), argv[1:])() or 0
    else:
        with meeting() as store:
            return train_and_report(parse(argv), argv, store)
    return 0


def _page(argv: list[str], width: int) -> str:
    """Return the help page that a command line with --help, or an empty one, asks for."""
    words = [word for word in argv if word not in HELP]
    if _names_command(words):
        return help_pages.of_command(words[0], _command(words[0]), width)
    if words or "--help-all" in argv:
        run = before_flags(words)
        return help_pages.of_method(method_named(run.method), run, width, everything="--help-all" in argv)
    return help_pages.overview(COMMANDS, width)


def _names_command(argv: list[str]) -> bool:
    return bool(argv) and argv[0][:1].isalnum()


def _command(name: str) -> Callable[..., int | None]:
    """Return a command; UserError names the nearest one for an unknown name."""
    if name in METHODS:
        raise UserError(f"{name} is a method, not a command; did you mean --method {name}?")
    must_know("command", name, list(COMMANDS))
    return COMMANDS[name]


def run_cli() -> None:
    gc.freeze()  # what is imported stays: no pass of the collector looks at it again
    end(main(sys.argv[1:]))


if __name__ == "__main__":
    run_cli()
