"""Plant the mutants of tests/mutants/mutants.toml one at a time and run the tests that must fail with them.

    python scripts/mutants.py [--only PATTERN] [--jobs N] [--check] [--every N]

Each mutant is planted into a copy of the package and the tests; the checkout is not changed. A mutant is killed if a test
fails. The exit status is 1 if a mutant survives, does not apply, or runs no test. With `--check`, the tests of `make check`
run instead of the mutants' own.
"""

import argparse
import concurrent.futures
import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

REPO = Path(__file__).resolve().parents[1]
MUTANTS = REPO / "tests" / "mutants" / "mutants.toml"
COPIED = (
    "unified_trainer",
    "tests",
    "scripts",
    "docs",
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "pyproject.toml",
)
FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.M)
TIMEOUT = 900  # seconds for the tests of one mutant
CHECK = ("-m", "not slow and not ranks and not kill", "tests")


@dataclass(frozen=True)
class Mutant:
    """A fault: the snippet `find`, which occurs once in `file` of the package, becomes `replace`."""

    name: str
    file: str
    find: str
    replace: str
    killed_by: str  # path::function below tests/


def load(path: Path = MUTANTS) -> list[Mutant]:
    """Read the mutants of a file."""
    return [Mutant(**row) for row in tomllib.loads(path.read_text(encoding="utf-8"))["mutants"]]


def copy_of_repository(folder: Path) -> Path:
    """Copy what the tests need into `folder` and return it."""
    ignored = shutil.ignore_patterns("__pycache__", ".*cache")
    for name in COPIED:
        source = REPO / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=ignored)
        elif source.is_file():
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, folder / name)
    return folder


def outcome(mutant: Mutant, repository: Path, words: tuple[str, ...]) -> tuple[str, str]:
    """Plant a mutant in a copy, run pytest with `words`, restore the file; return the outcome and its reason."""
    path = repository / "unified_trainer" / mutant.file
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    if text.count(mutant.find) != 1:
        return "does not apply", f"{mutant.file} holds the snippet {text.count(mutant.find)} times"
    _write(path, text.replace(mutant.find, mutant.replace))
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--tb=line", "-p", "no:cacheprovider", *words]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(repository)}
    try:
        done = subprocess.run(command, cwd=repository, env=environment, capture_output=True, text=True, timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        return "killed", f"no end after {TIMEOUT} s"
    finally:
        _write(path, text)
    failed = FAILED.search(done.stdout)
    if done.returncode == 1 and failed:
        return "killed", failed[1]
    if done.returncode == 0:
        return "SURVIVED", " ".join(words)
    return "runs no test", (done.stdout + done.stderr).strip()[-400:]


def _write(path: Path, text: str) -> None:
    """Write a module and remove its bytecode: Python compares times of whole seconds only."""
    path.write_text(text, encoding="utf-8")
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
        compiled.unlink()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="regular expression; of the mutants' names, files and tests")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time")
    parser.add_argument("--check", action="store_true", help="run the tests of `make check` on every mutant")
    parser.add_argument("--every", type=int, default=1, help="take every N-th of the chosen mutants")
    options = parser.parse_args()
    pattern, console = re.compile(options.only), Console(highlight=False, markup=False, soft_wrap=True)
    chosen = [one for one in load() if pattern.search(f"{one.name} {one.file} {one.killed_by}")][:: options.every]
    copies: queue.Queue[Path] = queue.Queue()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        for i in range(options.jobs):
            copies.put(copy_of_repository(Path(folder) / str(i)))

        def run(mutant: Mutant) -> str:
            copy, start = copies.get(), time.monotonic()
            try:
                found, why = outcome(mutant, copy, CHECK if options.check else (f"tests/{mutant.killed_by}",))
            finally:
                copies.put(copy)
            console.print(f"{found:>14}  {time.monotonic() - start:5.1f} s  {mutant.name}  [{why}]")
            return found

        with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
            counts = Counter(pool.map(run, chosen))
    console.print(f"{len(chosen)} mutants: " + ", ".join(f"{count} {found}" for found, count in counts.items()))
    return 0 if counts["killed"] == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
