"""Counting the votes that people gave on votes.html."""

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.table import Table

from unified_trainer.basics.errors import MissingFileError, UserError
from unified_trainer.basics.input_files import read_json, read_text
from unified_trainer.basics.terminal import printable, say, show
from unified_trainer.numerics.bootstrap import wilson_interval
from unified_trainer.tools.evaluate import files
from unified_trainer.tools.evaluate.measures import WIDTH
from unified_trainer.tools.output_folder import write_text

COLUMNS = ("key", "voter", "pair", "vote")
VALUES = {"left": 0.0, "right": 1.0, "tie": 0.5}  # of the video on the right
Votes = dict[tuple[str, str, int], tuple[dict[str, Any], str]]  # ballot and vote by key, voter and number of the pair


@dataclass(frozen=True)
class Preference:
    """The votes on two checkpoints, as those for the second against the first."""

    first: str
    second: str
    wins: int  # of the second
    losses: int
    ties: int
    prompts: int
    voters: int
    win_rate: float  # of the second, a tie is one half: mean over prompts of the mean over votes
    interval: tuple[float, float]  # Wilson's, with prompts as its independent units


def count(output: Path, votes: Sequence[Path], confidence: float) -> list[Preference]:
    """Count the votes on the pages of an evaluation, print them and write votes.json; UserError for wrong files.

    Of several votes of one voter on one pair the last counts.
    """
    if not (output / files.ABOUT).is_file():
        raise MissingFileError(f"{output / files.ABOUT} is missing: name the folder of the evaluation with --output")
    given: Votes = {}
    for file in votes:
        given |= _read(file, output)
    names = [checkpoint["name"] for checkpoint in read_json(output / files.ABOUT)["checkpoints"]]
    preferences = _preferences(names, given, confidence)
    content = {"confidence": confidence, "votes": len(given), "preferences": list(map(asdict, preferences))}
    write_text(output / "votes.json", json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    table = Table("checkpoint", "against", "wins", "losses", "ties", "prompts", "voters", "win rate")
    for preference in preferences:
        rate = f"{preference.win_rate:.3f} [{preference.interval[0]:.3f}, {preference.interval[1]:.3f}]"
        numbers = (preference.wins, preference.losses, preference.ties, preference.prompts, preference.voters)
        table.add_row(printable(preference.second), printable(preference.first), *map(str, numbers), rate)
    show(table, width=WIDTH)
    say(f"{output / 'votes.json'}: {len(given)} votes; a tie counts one half, intervals are of {confidence:.0%}")
    return preferences


def _read(file: Path, output: Path) -> Votes:
    rows = list(csv.reader(io.StringIO(read_text(file, "--votes"), newline="")))
    if not rows or tuple(rows[0]) != COLUMNS:
        raise UserError(f"--votes {file} is no file of votes: its first line must be {','.join(COLUMNS)}")
    ballots: dict[str, list[dict[str, Any]]] = {}
    votes: Votes = {}
    for line, row in enumerate(rows[1:], 2):
        place = f"--votes {file}: line {line}"
        if len(row) != len(COLUMNS):
            raise UserError(f"{place} has {len(row)} values, not {len(COLUMNS)}")
        key, voter, pair, vote = row
        if key not in ballots:
            held = output / f"votes-{key}.json"
            if not key.isalnum() or not held.is_file():
                raise UserError(f"{place} is of another evaluation: {output} has no votes-{key}.json")
            ballots[key] = read_json(held)["ballots"]
        if vote not in VALUES:
            raise UserError(f"{place}: the vote must be left, right or tie, not {vote!r}")
        if not pair.isdecimal() or int(pair) >= len(ballots[key]):
            raise UserError(f"{place}: pair {pair} is none of the {len(ballots[key])} of votes-{key}.json")
        votes[key, voter, int(pair)] = (ballots[key][int(pair)], vote)
    return votes


def _preferences(names: Sequence[str], given: Votes, confidence: float) -> list[Preference]:
    # By checkpoints in the order of the evaluation: (prompt, voter, value of the second).
    votes: dict[tuple[str, str], list[tuple[str, str, float]]] = {}
    order = {name: i for i, name in enumerate(names)}
    for (_, voter, _), (ballot, vote) in given.items():
        left, right = ballot["left"], ballot["right"]
        swapped = order.get(left, len(names)) > order.get(right, len(names))
        value = 1 - VALUES[vote] if swapped else VALUES[vote]
        pair = (right, left) if swapped else (left, right)
        votes.setdefault(pair, []).append((ballot["prompt"], voter, value))
    preferences = []
    for (first, second), rows in votes.items():
        by_prompt: dict[str, list[float]] = {}
        for prompt, _, value in rows:
            by_prompt.setdefault(prompt, []).append(value)
        wins, losses, ties = map([value for _, _, value in rows].count, (1.0, 0.0, 0.5))
        voters, rate = len({voter for _, voter, _ in rows}), fmean(map(fmean, by_prompt.values()))
        interval = wilson_interval(rate, len(by_prompt), confidence)
        preferences.append(Preference(first, second, wins, losses, ties, len(by_prompt), voters, rate, interval))
    return preferences
