"""--resume auto: one command line that begins a run, and continues it when a launcher gives it again.

And --resume s3://bucket/mine: a run that its mirror holds is copied into a run directory, which is continued.
"""

from collections.abc import Mapping, Sequence
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
        copied = _restored(resumed, given.get("--output", []), store)
        return [*_without(argv, {"--resume", "--output"}), f"--resume={copied}"]
    if resumed != AUTO:
        return list(argv)
    if not given.get("--output"):
        raise ConfigError("--resume auto needs --output DIR, the folder of the run that it begins or continues")
    folder = Path(given["--output"][0])
    if not _holds_run(folder, store):
        return _without(argv, {"--resume"})
    saved = flat(read_yaml(folder / "config.yaml"))
    pinned = {name for name, values in given.items() if values and _is_pinned(saved, name, values[0])}
    return [*_without(argv, {"--resume", "--config", *pinned}), f"--resume={folder}"]


def _holds_run(folder: Path, store: Store | None) -> bool:
    """Return whether the main rank finds a run in the folder: a shared disk may show ranks different states."""
    continues = (folder / "config.yaml").is_file()
    if store is None:
        return continues
    if size_and_rank()[1] == 0:
        store.set("continues", str(continues))
    return store.get("continues").decode() == str(True)


def _restored(address: str, output: Sequence[str], store: Store | None) -> str:
    """Return the run directory into which the main rank has copied a mirror."""
    from unified_trainer.run.checkpoint.restore import restore

    folder = Path(output[0]) if output else None
    if store is None:
        return str(restore(address, folder))
    if size_and_rank()[1] == 0:
        store.set("restored", str(restore(address, folder)))
    return store.get("restored").decode()


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
