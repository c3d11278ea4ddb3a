"""--resume auto: one command line that begins a run, and continues it when a launcher gives it again.

And --resume s3://bucket/mine: a run that its mirror holds is copied into a run directory, which is continued.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.distributed import Store

from unified_trainer.basics.input_files import read_yaml
from unified_trainer.parallel.torchrun import size_and_rank
from unified_trainer.run.settings.config import ConfigError, flat
from unified_trainer.run.settings.flags import split
from unified_trainer.run.settings.run_paths import PINNED

AUTO = "auto"  # value of --resume; a folder of this name is ./auto


def without_auto(argv: Sequence[str], store: Store | None = None) -> list[str]:
    """Return a command line with --resume DIR in place of `--resume auto` if --output DIR holds a run, else without it.

    In place of --resume ADDRESS it has the directory into which the mirror there was copied. `store` is that of the
    ranks' `meeting`: the main rank looks, and copies, for all of them. A run that is continued has its settings, so
    that --config is left out too.
    """
    given = {_flag(name): values for name, values in split(argv)}
    resumed = "".join(given.get("--resume", []))
    if "://" in resumed:
        from unified_trainer.run.checkpoint.restore import restore

        output = given.get("--output", [])
        copied = _by_main_rank(store, "restored", lambda: restore(resumed, Path(output[0]) if output else None))
        return [*_without(argv, {"--resume", "--output"}), f"--resume={copied}"]
    if resumed != AUTO:
        return list(argv)
    if not given.get("--output"):
        raise ConfigError("--resume auto needs --output DIR, the folder of the run that it begins or continues")
    folder = Path(given["--output"][0])
    if _by_main_rank(store, "continues", (folder / "config.yaml").is_file) != str(True):
        return _without(argv, {"--resume"})
    saved = flat(read_yaml(folder / "config.yaml"))
    pinned = {name for name, values in given.items() if values and _is_pinned(saved, name, values[0])}
    return [*_without(argv, {"--resume", "--config", *pinned}), f"--resume={folder}"]


def _by_main_rank(store: Store | None, key: str, work: Callable[[], object]) -> str:
    """Return as text what the main rank finds: a shared disk may show ranks different states."""
    if store is None:
        return str(work())
    if size_and_rank()[1] == 0:
        store.set(key, str(work()))
    return store.get(key).decode()


def _is_pinned(saved: Mapping[str, Any], flag: str, value: str) -> bool:
    """Return whether the run has a flag's id of the hub with the commit that it took at its beginning."""
    known = str(saved.get(flag.removeprefix("--").replace("-", "_"), ""))
    return PINNED.search(known) is not None and PINNED.sub("", known) == value


def _flag(name: str) -> str:
    return name.replace("_", "-")


def _without(argv: Sequence[str], flags: set[str]) -> list[str]:
    """Return a command line without some flags and the words after them."""
    kept, flag = [], ""
    for word in argv:
        flag = _flag(word.partition("=")[0]) if word.startswith("--") else flag
        kept += [] if flag in flags else [word]
    return kept
