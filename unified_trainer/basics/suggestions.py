"""The known name, or the number, that a wrong one probably means."""

import tomllib
from collections.abc import Collection, Sequence
from difflib import SequenceMatcher
from pathlib import Path

from unified_trainer.basics.errors import UserError

CLOSE = 0.6  # similarity in [0, 1] from which a name is suggested
SHOWN = 3  # names in one message

NAMES = tomllib.loads((Path(__file__).parents[1] / "assets" / "settings.toml").read_text(encoding="utf-8"))
# What other trainers call a setting: the ends of our keys, in order of preference. And what took a setting's place.
USUAL = {name: tuple(ours.split()) for ours, names in NAMES["elsewhere"].items() for name in names.split()}
GONE = {key: instead for instead, keys in NAMES["gone"].items() for key in keys.split()}
# What other trainers call the number of ranks, which torchrun sets.
RANKS = ("devices", "gpus", "n_gpus", "ngpus", "nnodes", "nproc_per_node", "num_gpus", "num_processes", "world_size")


def replacement(key: str) -> str:
    """Return what took the place of a setting that was removed, in words; "" for another key."""
    return next((words for old, words in GONE.items() if f".{old}." in f".{key}."), "")


def nearest(key: str, known: Collection[str]) -> list[str]:
    """Return the known keys, such as student.learning_rate, that a wrong key may mean: the likeliest first.

    Keys with the same last part, or with what other trainers call so, come before similar ones.
    """
    section, _, last = key.rpartition(".")
    usual = [_ending(end, known) for end in USUAL.get(last, ())]
    if same := [*_ending(last, known), *next(filter(None, usual), [])]:
        return _shortest([candidate for candidate in same if section and candidate.startswith(f"{section}.")] or same)
    similar = {}
    for candidate in known:
        place, _, name = candidate.rpartition(".")
        alike = _similarity(last, name)
        similar[candidate] = alike if place == section else 0.85 * max(_similarity(key, candidate), alike)
    least = max(CLOSE, max(similar.values(), default=0.0) - 0.05)
    return _shortest(
        sorted(
            (candidate for candidate in known if similar[candidate] >= least), key=lambda candidate: -similar[candidate]
        )
    )


def multiples_near(value: int, unit: int) -> str:
    """Return the multiples of `unit` below and above a value, in words."""
    below = value // unit * unit
    return f"{below} or {below + unit}" if below > 0 else f"{unit}"


def must_know(what: str, name: str, known: Sequence[str]) -> None:
    """Raise UserError, with the nearest known name, unless `name` is known."""
    if name not in known:
        near = sorted(known, key=lambda other: -_similarity(name, other))[:1]
        hint = "".join(f"; did you mean {other}?" for other in near if _similarity(name, other) > 0.45) or "."
        raise UserError(f"{what} {name!r} is not known{hint} Have: {', '.join(known)}")


def _shortest(keys: list[str]) -> list[str]:
    """Return the first of those keys that lie in the fewest groups."""
    least = min((key.count(".") for key in keys), default=0)
    return [key for key in keys if key.count(".") == least][:SHOWN]


def _ending(end: str, known: Collection[str]) -> list[str]:
    return [key for key in known if key == end or key.endswith(f".{end}")]


def _similarity(left: str, right: str) -> float:
    return SequenceMatcher(None, left.lower(), right.lower()).ratio()
