"""The command line: python -m unified_trainer."""

import gc
import signal

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during the imports ends the process without their traceback

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.plugins import load_object
from unified_trainer.basics.suggestions import must_know
from unified_trainer.basics.terminal import console, say
from unified_trainer.basics.trust import asking
from unified_trainer.basics.versions import version_of
from unified_trainer.methods import METHODS
from unified_trainer.run.exit_codes import end, exit_code
from unified_trainer.run.settings.flags import apply
from unified_trainer.tools.overview import overview

COMMANDS = {  # as text: `command_named` imports the one that is called
    "evaluate": "unified_trainer.tools.evaluate.evaluate:evaluate",
    "export": "unified_trainer.tools.export.export:export",
    "extract-adapter": "unified_trainer.tools.export.adapters:extract_adapter",
    "import-hpsv2": "unified_trainer.tools.prepare.import_hpsv2:import_hpsv2",
    "import-hpsv3": "unified_trainer.tools.prepare.import_hpsv3:import_hpsv3",
    "import-weights": "unified_trainer.tools.prepare.import_weights:import_weights",
    "merge": "unified_trainer.tools.export.adapters:merge",
    "plan": "unified_trainer.tools.plan.command:plan",
    "preprocess": "unified_trainer.tools.prepare.preprocess:preprocess",
    "push": "unified_trainer.tools.export.push:push",
    "report": "unified_trainer.tools.report.page:report",
    "rollout": "unified_trainer.tools.sample.rollout:rollout",
    "runs": "unified_trainer.tools.report.command_runs:runs",
    "sample": "unified_trainer.tools.sample.sample:sample",
    "score": "unified_trainer.tools.sample.rollout:score",
    "serve": "unified_trainer.tools.serve.serve:serve",
    "serve-reward": "unified_trainer.tools.serve.serve_reward:serve_reward",
}
WIDEST = 120  # columns of a help page
HELP = {"-h", "--help", "--help-all"}


def main(argv: list[str]) -> int:
    """Run a command or a training and return the exit code; an exception that is not a UserError is raised."""
    try:
        with asking(argv) as words:
            if not words or HELP & {*words}:
                say(_page(words, min(console().width, WIDEST)))
                return 0 if words else 2
            if "--version" in words:
                say(f"unified-trainer {version_of('unified-trainer')}, torch {version_of('torch')}")
                return 0
            if _names_command(words):
                return apply(command_named(words[0]), words[1:])() or 0
            return _train(words)
    except (Exception, KeyboardInterrupt) as error:
        code = exit_code(error)
        if code is None:
            raise
        return code


def _train(argv: list[str]) -> int:
    with _importing():
        from unified_trainer.parallel.meeting import meeting
        from unified_trainer.run.settings.auto_resume import without_auto
        from unified_trainer.run.settings.command_line import minutes_to_meet, parse
    with meeting(minutes_to_meet(argv)) as store:
        with _importing():
            run = parse(without_auto(argv, store))  # before what a wrong flag does not need is imported
            from unified_trainer.run.train import train
            from unified_trainer.tools.report.after_training import report_after
        return train(run, argv, store, report_after(run))


def _page(argv: list[str], width: int) -> str:
    """Return the help page that a command line with --help, or an empty one, asks for."""
    everything, sought = "--help-all" in argv, ""
    if everything and (after := argv[argv.index("--help-all") + 1 :]) and not after[0].startswith("-"):
        sought, place = after[0], argv.index("--help-all")
        argv = argv[:place] + after[1:]
    words = [word for word in argv if word not in HELP]
    if not words and not everything:
        return overview(COMMANDS, width)
    with _importing():
        from unified_trainer.run.registry import method_named
        from unified_trainer.run.settings.auto_resume import without_auto
        from unified_trainer.run.settings.command_line import before_flags
        from unified_trainer.tools import help_pages

    if _names_command(words):
        return help_pages.of_command(words[0], command_named(words[0]), width)
    run = before_flags(without_auto(words))
    return help_pages.of_method(method_named(run.method), run, width, everything=everything, sought=sought)


def _names_command(argv: list[str]) -> bool:
    return bool(argv) and argv[0][:1].isalnum()


def command_named(name: str) -> Callable[..., int | None]:
    """Return a command; UserError names the nearest one for an unknown name."""
    if name in METHODS:
        raise UserError(f"{name} is a method, not a command; did you mean --method {name}?")
    must_know("command", name, list(COMMANDS))
    with _importing():
        return load_object(COMMANDS[name], name)


@contextmanager
def _importing() -> Iterator[None]:
    """Inside, Ctrl-C ends the program at once, because transformers would make it an error of another kind.

    The garbage collector is off: it would look at imported objects again and again, a fifth of the time.
    """
    collects, handler = gc.isenabled(), signal.getsignal(signal.SIGINT)
    interruptible = __name__ == "__main__" and handler is signal.default_int_handler
    gc.disable()
    if interruptible:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        if collects:
            gc.enable()
        if interruptible:
            signal.signal(signal.SIGINT, handler)


def run_cli() -> None:
    if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    code = main(sys.argv[1:])
    gc.freeze()  # no pass of the collector over everything at the end, which takes half a second
    end(code)


if __name__ == "__main__":
    run_cli()
