"""Paths on the Hugging Face hub, which mean a folder or file in its cache.

owner/name[@revision] is the folder of a model, unless it is one here, and hf://datasets/owner/name[@revision]/file is a
file of a data set.
"""

import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from huggingface_hub import constants
from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

from unified_trainer.basics.errors import MissingFileError, UserError

ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?")
DATA = "hf://datasets/"  # before a file of a data set
FILE = re.compile(DATA + r"([^/@]+/[^/@]+)(?:@([^/]+))?/(.+)")
VARIANTS = ("*.fp16.*", "*.bf16.*", "*.fp16-*", "*.bf16-*")  # second copies of the weights in another precision
# The files of a component in the layouts of diffusers and transformers: configs, tokenizers, weights in safetensors.
COMPONENT = ("*.json", "*.jinja", "*.model", "*.txt", "*model.safetensors", "*model-*-of-*.safetensors")


def component(*names: str) -> tuple[str, ...]:
    """Return patterns of the files of a folder's components; those of the folder itself for the name ""."""
    return tuple(f"{name}/{pattern}" if name else pattern for name in names for pattern in COMPONENT)


INDEX = "model_index.json"
CONFIGS = (INDEX, "*/config.json")  # of a pipeline, which say what else it holds
PIPELINE = (INDEX, *component("*"))


def is_hub_id(path: str) -> bool:
    """Return whether a path has the form owner/name[@revision] and is nothing on this disk."""
    return bool(ID.fullmatch(path)) and not Path(path).exists()


def is_hub_file(path: str) -> bool:
    """Return whether a path names a file of a data set on the hub."""
    return path.startswith("hf:")


def cached(path: str, key: str, patterns: Sequence[str], advised: Sequence[str] = ()) -> Path:
    """Return the folder of a hub id in the cache; MissingFileError says how to get the files that `patterns` select.

    `key` is the setting, for messages, which advise to get the files of `advised` in place of `patterns`. Nothing is
    downloaded.
    """
    from huggingface_hub import errors

    try:
        return _snapshot(path, patterns, local=True)
    except (errors.LocalEntryNotFoundError, errors.HFValidationError) as error:
        raise MissingFileError(absent(path, key, advised or patterns, "the hub's cache lacks it")) from error


def download(path: str, key: str, patterns: Sequence[str], advised: Sequence[str] = ()) -> Path:
    """Return the folder of a hub id in the cache, after missing files that `patterns` select were downloaded.

    Progress goes to the terminal. The newest commit of a branch is taken, or, where the hub cannot be reached, the
    cached one. Raise UserError, with the way out, if there is no such repository or the files cannot be had. `key` and
    `advised` are as in `cached`.
    """
    from huggingface_hub import errors

    try:
        with _progress():
            return _snapshot(path, patterns, local=False)
    except errors.RevisionNotFoundError as error:
        repository = _parts(path)
        raise UserError(f"{key} {path}: {repository.name} has no revision {repository.revision} on the hub") from error
    except errors.RepositoryNotFoundError as error:  # also one that is private or gated
        raise UserError(
            f"{key} {path} is not here, and the hub has no such repository, or shows it to its members alone: "
            "check the name, or run `hf auth login`"
        ) from error
    except (errors.LocalEntryNotFoundError, errors.HfHubHTTPError, OSError, errors.HFValidationError) as error:
        offline = "HF_HUB_OFFLINE is set" if constants.is_offline_mode() else "the hub cannot be reached"
        raise MissingFileError(absent(path, key, advised or patterns, f"{offline} and its cache lacks it")) from error


def local_file(path: str, key: str, get: Callable[..., Path] = cached) -> Path:
    """Return a path, or where a hub's file lies in the cache; with `get=download` after it was downloaded if need be.

    Raise MissingFileError as `get` does, and for a file that the data set lacks.
    """
    if not is_hub_file(path):
        return Path(path)
    name = _file(path, key)
    file = get(path, key, (name,)) / name
    if not file.is_file():
        raise MissingFileError(f"{key} {path}: the data set on the hub has no such file in this revision")
    return file


def pinned_file(path: str, key: str) -> str:
    """Return a path, that of a hub's file with the commit that the cache holds."""
    if not is_hub_file(path):
        return path
    name = _file(path, key)
    return f"{DATA}{_parts(path).name}@{cached(path, key, (name,)).name}/{name}"


def _file(path: str, key: str) -> str:
    """Return the name of a hub's file within its data set."""
    if match := FILE.fullmatch(path):
        return match[3]
    raise UserError(f"{key} {path}: write a file on the hub as {DATA}owner/name/file or {DATA}owner/name@revision/file")


def pinned(path: str, folder: Path) -> str:
    """Return a hub id with the commit that `folder`, of the cache, holds."""
    return f"{_parts(path).name}@{folder.name}"


class _Repository(NamedTuple):
    name: str
    revision: str | None
    type: str = "model"


def _parts(path: str) -> _Repository:
    if match := FILE.fullmatch(path):
        return _Repository(match[1], match[2], "dataset")
    name, _, revision = path.partition("@")
    return _Repository(name, revision or None)


def _snapshot(path: str, patterns: Sequence[str], *, local: bool) -> Path:
    from huggingface_hub import snapshot_download

    repository = _parts(path)
    allowed, ignored = list(patterns), list(VARIANTS)
    return Path(
        snapshot_download(
            repository.name,
            repo_type=repository.type,
            revision=repository.revision,
            local_files_only=local,
            allow_patterns=allowed,
            ignore_patterns=ignored,
        )
    )


def absent(path: str, key: str, patterns: Sequence[str], why: str) -> str:
    """Return the message for files that cannot be had, with the command that gets them."""
    repository = _parts(path)
    words = ["hf", "download", repository.name]
    words += ["--repo-type", "dataset"] if repository.type == "dataset" else []
    words += ["--revision", repository.revision] if repository.revision else []
    words += [word for pattern in patterns for word in ("--include", pattern)]
    words += [word for pattern in VARIANTS for word in ("--exclude", pattern) if repository.type == "model"]
    return (
        f"{key} {path} is not here, and {why} ({constants.HF_HUB_CACHE}). On a machine with a connection run "
        f"`{shlex.join(words)}`, with HF_HOME naming a folder that this one reads too, or give a path on this disk"
    )


@contextmanager
def _progress() -> Iterator[None]:
    """Show the hub's progress bars, which the program otherwise turns off; HF_HUB_DISABLE_PROGRESS_BARS rules."""
    hidden = are_progress_bars_disabled() and constants.HF_HUB_DISABLE_PROGRESS_BARS is None
    if hidden:
        enable_progress_bars()
    try:
        yield
    finally:
        if hidden:
            disable_progress_bars()
