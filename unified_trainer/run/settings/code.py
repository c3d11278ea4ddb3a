"""The code that a run computes with, which must be the same in all of its processes: digests of files, none is run."""

import hashlib
import importlib.util
from collections.abc import Iterable, Mapping
from pathlib import Path

from unified_trainer.basics.errors import UserError
from unified_trainer.run.settings.config import RunConfig, flat, plain
from unified_trainer.run.settings.run_paths import OBJECTS

PACKAGE = Path(__file__).parents[2]


def code_of(run: RunConfig) -> dict[str, str]:
    """Return a digest of this package, and of each file of the user's own that a setting names."""
    digests = {"the code of unified_trainer": _in_words(sorted(PACKAGE.rglob("*.py")))}
    for key, value in flat(plain(run)).items():
        if OBJECTS.fullmatch(key):
            for spec in value if isinstance(value, list) else [value]:
                file = _file_of(spec.rpartition(":")[0])
                if file is not None and file.is_file():
                    digests[f"the code of {key} {spec}"] = _in_words([file])
    return digests


def check_code_of_workers(own: Mapping[str, str], workers: Mapping[str, Mapping[str, str]]) -> None:
    """Raise UserError that names each worker whose code is not that of training."""
    for name, code in workers.items():
        if code != own:
            unlike = [
                f"{item} is {code.get(item)} there and {mine} here"
                for item, mine in own.items()
                if code.get(item) != mine
            ]
            raise UserError(f"{name} has other code than training: {'; '.join(unlike)}. Install the same on all nodes")


def _file_of(place: str) -> Path | None:
    """Return the file of path/to/file.py or package.module; a package that is not found is the importer's to name."""
    if place.endswith(".py"):
        return Path(place)
    top, *rest = place.split(".")
    spec = importlib.util.find_spec(top) if top else None  # of a package, which is not imported for it
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent.joinpath(*rest)
    return Path(spec.origin) if not rest else folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")


def _in_words(files: Iterable[Path]) -> str:
    whole, count = hashlib.sha256(), 0
    for file in files:
        content = file.read_bytes()
        whole.update(f"{file.name} {len(content)}\n".encode() + content)
        count += 1
    return f"{count} files (sha256 {whole.hexdigest()[:12]})"
