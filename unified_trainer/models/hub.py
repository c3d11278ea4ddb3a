"""Folders on the Hugging Face hub: a path owner/name[@revision] that is no folder here means one in the hub's cache."""

import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import constants
from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

from unified_trainer.basics.errors import MissingFileError, UserError

ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?")
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
        repo, revision = _parts(path)
        raise UserError(f"{key} {path}: {repo} has no revision {revision} on the hub") from error
    except errors.RepositoryNotFoundError as error:  # also one that is private or gated
        raise UserError(
            f"{key} {path} is no folder here, and the hub has no such repository, or shows it to its members alone: "
            "check the name, or run `hf auth login`"
        ) from error
    except (errors.LocalEntryNotFoundError, errors.HfHubHTTPError, OSError, errors.HFValidationError) as error:
        offline = "HF_HUB_OFFLINE is set" if constants.is_offline_mode() else "the hub cannot be reached"
        raise MissingFileError(absent(path, key, advised or patterns, f"{offline} and its cache lacks it")) from error


def pinned(path: str, folder: Path) -> str:
    """Return a hub id with the commit that `folder`, of the cache, holds."""
    return f"{_parts(path)[0]}@{folder.name}"


def _parts(path: str) -> tuple[str, str | None]:
    repo, _, revision = path.partition("@")
    return repo, revision or None


def _snapshot(path: str, patterns: Sequence[str], *, local: bool) -> Path:
    from huggingface_hub import snapshot_download

    repo, revision = _parts(path)
    allowed, ignored = list(patterns), list(VARIANTS)
    return Path(
        snapshot_download(
            repo, revision=revision, local_files_only=local, allow_patterns=allowed, ignore_patterns=ignored
        )
    )


def absent(path: str, key: str, patterns: Sequence[str], why: str) -> str:
    """Return the message for files that cannot be had, with the command that gets them."""
    repo, revision = _parts(path)
    words = ["hf", "download", repo, *(["--revision", revision] if revision else [])]
    words += [word for pattern in patterns for word in ("--include", pattern)]
    words += [word for pattern in VARIANTS for word in ("--exclude", pattern)]
    return (
        f"{key} {path} is no folder here, and {why} ({constants.HF_HUB_CACHE}). On a machine with a connection run "
        f"`{shlex.join(words)}`, with HF_HOME naming a folder that this one reads too, or give a folder"
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
