"""Plant the mutants of tests/mutants/mutants.toml one at a time and run the tests that must fail with them.

    python scripts/mutants.py [--only PATTERN] [--jobs N] [--check]

Each mutant is planted into a copy of the package and the tests; the checkout is not changed. A mutant is killed if a
test fails that passes without it. The exit status is 1 if a mutant survives or does not apply, or if its test fails
without it. With `--check`, the tests of `make check` run instead of the mutant's own.
"""

import argparse
import functools
import importlib
import multiprocessing
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from rich.console import Console

REPO = Path(__file__).resolve().parents[1]
MUTANTS = REPO / "tests" / "mutants" / "mutants.toml"
DOCUMENTS = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")
COPIED = ("unified_trainer", "tests", "scripts", "docs", "examples", "pyproject.toml", "Makefile", *DOCUMENTS)
FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.M)
TIMEOUT = 900  # seconds for the tests of one mutant
CHECK = ("-m", "not slow and not ranks and not kill", "tests")
IMPORTED = "ignore::pytest.PytestAssertRewriteWarning"  # of plugins that were imported before the fork
TOOLS = ("evaluate.evaluate", "export.export", "prepare.preprocess", "report.after_training", "serve.serve")
LIBRARIES = (*(f"unified_trainer.tools.{name}" for name in TOOLS), "hypothesis", "beartype", "matplotlib")


@dataclass(frozen=True)
class Mutant:
    """A fault: the snippet `find`, which occurs once in `file` of the package, becomes `replace`."""

    name: str
    file: str
    find: str
    replace: str
    killed_by: str  # path::function below tests/


@dataclass(frozen=True)
class Outcome:
    """What became of a mutant: killed, SURVIVED, does not apply, runs no test, or fails without it."""

    mutant: Mutant
    word: str
    reason: str
    seconds: float


def load(path: Path = MUTANTS) -> list[Mutant]:
    """Read the mutants of a file."""
    return [Mutant(**row) for row in tomllib.loads(path.read_text(encoding="utf-8"))["mutants"]]


def copy_of_repository(folder: Path) -> Path:
    """Copy what the tests need into a new folder and return it."""
    folder.mkdir()
    for name in COPIED:
        if (REPO / name).is_dir():
            shutil.copytree(REPO / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", ".*cache"))
        else:
            shutil.copy2(REPO / name, folder / name)
    return folder


def plant(mutant: Mutant, repository: Path, words: Sequence[str]) -> tuple[str, str]:
    """Plant a mutant in a copy, run pytest with `words`, restore the file; return the outcome and its reason."""
    path = repository / "unified_trainer" / mutant.file
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    if text.count(mutant.find) != 1:
        return "does not apply", f"{mutant.file} holds the snippet {text.count(mutant.find)} times"
    _write(path, text.replace(mutant.find, mutant.replace))
    try:
        code, printed = run_tests(repository, ("-x", *words))
    finally:
        _write(path, text)
    failed = FAILED.search(printed)
    if code is None:
        return "killed", f"no end after {TIMEOUT} s"
    if code == pytest.ExitCode.TESTS_FAILED and failed:
        return "killed", failed[1]
    if code == pytest.ExitCode.OK:
        return "SURVIVED", " ".join(words)
    return "runs no test", printed.strip()[-600:]


def run_tests(repository: Path, words: Sequence[str]) -> tuple[int | None, str]:
    """Run pytest in a process of its own; return its exit code, None after TIMEOUT, and what it printed."""
    with tempfile.TemporaryFile("w+") as printed:
        process = os.fork()
        if not process:
            _become_pytest(repository, words, printed.fileno())
        code, end = None, time.monotonic() + TIMEOUT
        while code is None and time.monotonic() < end:
            done, status = os.waitpid(process, os.WNOHANG)
            code = os.waitstatus_to_exitcode(status) if done else None
            time.sleep(0.05)
        if code is None:
            os.killpg(process, signal.SIGKILL)
            os.waitpid(process, 0)
        printed.seek(0)
        return code, printed.read()


def failing(repository: Path, tests: Sequence[str]) -> set[str]:
    """Return those of the tests, path::function, that fail or do not exist without any mutant."""
    code, printed = run_tests(repository, tests)
    if code == pytest.ExitCode.OK:
        return set()
    failed = {name.partition("[")[0] for name in FAILED.findall(printed)}
    return failed if code == pytest.ExitCode.TESTS_FAILED else set(tests)


def _become_pytest(repository: Path, words: Sequence[str], output: int) -> None:
    code = 70
    try:
        os.setsid()  # with the processes that the tests start, so that all of them can be killed
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(repository)
        os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(repository)}
        sys.path[:] = [str(repository), *(path for path in sys.path if not path.startswith(str(REPO / "scripts")))]
        code = pytest.main(["-q", "--tb=line", "-p", "no:cacheprovider", "-W", IMPORTED, *words])
    finally:
        sys.stdout.flush()
        os._exit(code)


def _write(path: Path, text: str) -> None:
    """Write a module and remove its bytecode: Python compares times of whole seconds only."""
    path.write_text(text, encoding="utf-8")
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
        compiled.unlink()


def load_libraries() -> None:
    """Import what the package imports, once for all mutants, and then forget the package itself."""
    sys.path.insert(0, str(REPO))
    for name in LIBRARIES:
        importlib.import_module(name)
    for name in [name for name in sys.modules if name.split(".")[0] == "unified_trainer"]:
        del sys.modules[name]
    sys.path.remove(str(REPO))


def _of_mutant(folders: "multiprocessing.Queue[Path]", broken: set[str], check: bool, mutant: Mutant) -> Outcome:
    folder, start = folders.get(), time.monotonic()
    try:
        test = f"tests/{mutant.killed_by}"
        if test in broken:
            word, reason = "fails without", test
        else:
            word, reason = plant(mutant, folder, CHECK if check else (test,))
    finally:
        folders.put(folder)
    return Outcome(mutant, word, reason, time.monotonic() - start)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="regular expression of the mutants' names, files or tests")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time")
    parser.add_argument("--check", action="store_true", help="run the tests of `make check` on every mutant")
    options = parser.parse_args()
    pattern, console = re.compile(options.only), Console(highlight=False, markup=False, soft_wrap=True)
    chosen = [one for one in load() if pattern.search(f"{one.name} {one.file} {one.killed_by}")]
    load_libraries()
    counts: Counter[str] = Counter()
    fork = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder, fork.Manager() as manager:
        folders = manager.Queue()
        for i in range(options.jobs):
            folders.put(copy_of_repository(Path(folder) / str(i)))
        unplanted = CHECK if options.check else sorted({f"tests/{mutant.killed_by}" for mutant in chosen})
        broken = failing(Path(folder) / "0", unplanted)
        if broken and options.check:
            console.print(f"the tests of make check fail without any mutant: {', '.join(sorted(broken))}")
            return 1
        run = functools.partial(_of_mutant, folders, broken, options.check)
        with fork.Pool(options.jobs) as pool:
            for found in pool.imap_unordered(run, chosen):
                counts[found.word] += 1
                console.print(f"{found.word:>14}  {found.seconds:5.1f} s  {found.mutant.name}  [{found.reason}]")
    console.print(f"{len(chosen)} mutants: " + ", ".join(f"{count} {word}" for word, count in counts.items()))
    return 0 if counts["killed"] == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
