"""Ranks on Ray that differ; what a rank says to standard error goes to the file RANK in the folder argv[0]."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from unified_trainer.basics.errors import UserError
from unified_trainer.parallel import meeting
from unified_trainer.run import train
from unified_trainer.run.settings.config import RunConfig
from unified_trainer.run.workers.launch import TrainingProcess


class ReadsShell(TrainingProcess):
    """A rank that says what it has of the shell."""

    def where(self) -> tuple[str, int, str]:
        return os.environ.get("WANDB_API_KEY", ""), 0, ""


def _rank(folder: str) -> int:
    rank = int(os.environ["RANK"])
    descriptor = os.open(Path(folder, str(rank)), os.O_WRONLY | os.O_CREAT)
    os.dup2(descriptor, sys.stderr.fileno())
    meeting.GRACE = 0.3
    return rank


def other_version(run: RunConfig, argv: Sequence[str]) -> int | None:
    rank = _rank(argv[0])
    train.version_of = lambda name: f"{name} {rank}"
    return train.train_in_actor(run, argv)


def no_families(run: RunConfig, argv: Sequence[str]) -> int | None:
    """The other rank waits in a library until this one joins."""
    if _rank(argv[0]):
        train.add_families = _fail
    return train.train_in_actor(run, argv)


def _fail(_families: Sequence[str]) -> None:
    raise UserError("no such family")


def card_fails(run: RunConfig, argv: Sequence[str]) -> int | None:
    _rank(argv[0])
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def code_fails(run: RunConfig, argv: Sequence[str]) -> int | None:
    _rank(argv[0])
    raise KeyError("gone")
