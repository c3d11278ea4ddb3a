"""A comparison of what must be equal on all ranks: one digest, and the items by name only if it differs."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch

from unified_trainer.parallel.mesh import Mesh, RanksDivergedError

SHOWN = 80  # characters of a value that a message names
NAMED = 8  # items that a message names
ABSENT = "absent"


def assert_equal(mesh: Mesh, items: Mapping[str, str]) -> None:
    """Raise RanksDivergedError on all ranks, with each item that differs and its values by rank, unless all are equal.

    A collective; a rank may lack items that others have.
    """
    if mesh.size == 1:
        return
    digest = bytes.fromhex(digest_of(json.dumps(items, sort_keys=True)))
    if len(mesh.all_gather_cpu(torch.tensor([[*digest]], dtype=torch.uint8)).unique(dim=0)) == 1:
        return
    by_rank = [json.loads(text) for text in mesh.all_gather_text(json.dumps(items))]
    raise RanksDivergedError(f"ranks diverged: {'; '.join(differences(by_rank))}")


def differences(by_rank: Sequence[Mapping[str, str]]) -> list[str]:
    """Return a sentence for each item that is not the same on all ranks: its values, and the ranks that have each."""
    lines = []
    for name in dict.fromkeys(name for items in by_rank for name in items):
        ranks: dict[str, list[int]] = {}
        for rank, items in enumerate(by_rank):
            ranks.setdefault(items.get(name, ABSENT), []).append(rank)
        if len(ranks) > 1:
            values = [f"{_short(value)} on {in_words(those)}" for value, those in ranks.items()]
            lines.append(f"{name} is {' and '.join(values)}")
    more = [f"and {len(lines) - NAMED} more"] if len(lines) > NAMED else []
    return lines[:NAMED] + more


def files_in_words(files: Iterable[Path], texts: Iterable[str] = ()) -> str:
    """Return number, bytes and a digest of files, by their names and sizes, and of texts that belong to them."""
    rows = [(file.name, file.stat().st_size) for file in files]
    digest = digest_of(json.dumps([rows, list(texts)]))
    return f"{len(rows)} files of {sum(size for _, size in rows)} bytes (sha256 {digest[:12]})"


def prompts_in_words(prompts: Sequence[str]) -> str:
    """Return the number of prompts and a digest of them."""
    return f"{len(prompts)} prompts (sha256 {digest_of(json.dumps(prompts))[:12]})"


def digest_of(text: str) -> str:
    """Return the SHA-256 of a text in hexadecimal digits."""
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()


def _short(value: str) -> str:
    return value if len(value) <= SHOWN else f"{value[:SHOWN]}... (sha256 {digest_of(value)[:12]})"


def in_words(ranks: Sequence[int]) -> str:
    """Return "rank 3" or "ranks 3, 5", at most NAMED of them."""
    listed = ", ".join(map(str, ranks[:NAMED])) + (f" and {len(ranks) - NAMED} more" if len(ranks) > NAMED else "")
    return f"rank {listed}" if len(ranks) == 1 else f"ranks {listed}"
