"""The number of ranks, and which one this is, from the environment that torchrun sets; torch is not imported."""

import json
import os
import re
import time
from pathlib import Path

from unified_trainer.basics.errors import UserError

TORCHRUN = ("RANK", "MASTER_ADDR", "MASTER_PORT")  # environment variables by which ranks find each other

SHUTDOWN_TIMEOUT = 30.0  # seconds, torchrun's default


def where() -> str:
    """Return " on rank R" for messages, or "" if there is one rank."""
    return "" if os.environ.get("WORLD_SIZE", "1") == "1" else f" on rank {os.environ.get('RANK', '0')}"


def under_torchrun() -> bool:
    """Whether torchrun started this process: its ranks on a node write to one terminal."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def tell_torchrun(text: str) -> None:
    """Write why this rank fails into the file from which torchrun takes what its own report says of the rank."""
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        Path(file).write_text(json.dumps({"message": text, "timestamp": int(time.time())}), encoding="utf-8")


def size_and_rank() -> tuple[int, int]:
    """Return the number of ranks that torchrun started, 1 without it, and this process's rank; UserError if wrong."""
    size, rank = environment_number("WORLD_SIZE", 1, least=1), environment_number("RANK", 0)
    if rank >= size:
        raise UserError(f"the environment variable RANK is {rank}, but WORLD_SIZE is {size}: use torchrun")
    return size, rank


def check_started(size: int) -> None:
    """Raise UserError unless the variables by which `size` ranks find each other are set."""
    if absent := [name for name in TORCHRUN if name not in os.environ]:
        raise UserError(f"WORLD_SIZE is {size}, but {', '.join(absent)} is not set: start the ranks with torchrun")


def environment_number(name: str, default: int, least: int = 0) -> int:
    """Return an integer of the environment that torchrun sets; raise UserError, naming the variable, for another."""
    text = os.environ.get(name, str(default))
    if not text.isdecimal() or int(text) < least:
        raise UserError(
            f"the environment variable {name} must be an integer of at least {least}, not {text!r}: use torchrun"
        )
    return int(text)


def shutdown_timeout() -> float | None:
    """Return the seconds that torchrun gives its ranks to end after SIGTERM; None if torchrun did not start this one.

    It is --shutdown-timeout of the process above this one, where that can be read, or torchrun's environment variable.
    """
    if not under_torchrun():
        return None
    try:
        words = Path(f"/proc/{os.getppid()}/cmdline").read_text(encoding="utf-8", errors="replace")
    except OSError:
        words = ""
    match = re.search(r"--shutdown[-_]timeout[\0=]([\d.]+)\0", words)
    text = match[1] if match else os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "")
    try:
        return float(text)
    except ValueError:
        return SHUTDOWN_TIMEOUT
