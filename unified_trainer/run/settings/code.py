"""The code that a run computes with, which must be the same in all of its processes: digests of files, none is run."""

import os
from collections.abc import Mapping
from pathlib import Path

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.plugins import Code, digest_of
from unified_trainer.run.settings.config import RunConfig, flat, plain
from unified_trainer.run.settings.run_paths import OBJECTS

PACKAGE = Path(__file__).parents[2]


def code_of(run: RunConfig) -> dict[str, str]:
    """Return a digest of this package, and of the user's own code that a setting names, with the modules beside it."""
    own = {str(file): file.read_bytes() for file in sorted(PACKAGE.rglob("*.py"))}
    digests = {"the code of unified_trainer": _in_words(own)}
    for key, value in flat(plain(run)).items():
        if OBJECTS.fullmatch(key):
            for spec in value if isinstance(value, list) else [value]:
                if ":" in spec and (files := Code.read(spec).files):
                    digests[f"the code of {key} {spec}"] = _in_words(files)
    return digests


def check_code_of_workers(own: Mapping[str, str], workers: Mapping[str, Mapping[str, str]]) -> None:
    """Raise UserError that names each worker whose code is not that of training."""
    for name, code in workers.items():
        if code != own:
            items = [item for item in own if code.get(item) != own[item]]
            unlike = [f"{item} is {code.get(item)} there and {own[item]} here" for item in items]
            raise UserError(f"{name} has other code than training: {'; '.join(unlike)}. Install the same on all nodes")


def _in_words(files: Mapping[str, bytes]) -> str:
    start = os.path.commonpath(map(os.path.dirname, files))  # other nodes may have them elsewhere
    named = {os.path.relpath(file, start): content for file, content in files.items()}
    return f"{len(files)} files (sha256 {digest_of(named)[:12]})"
