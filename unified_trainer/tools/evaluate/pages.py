"""The two pages of an evaluation, and the file that says which checkpoint is which on the page of votes."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from unified_trainer.parallel.random import generator
from unified_trainer.tools.evaluate.measures import sign_of
from unified_trainer.tools.evaluate.page import Ballot, Card, SampleRow, evaluation_page, votes_page
from unified_trainer.tools.evaluate.samples import Measured
from unified_trainer.tools.output_folder import write_text

QUESTION = "Which video is better?"


def write(output: Path, about: Mapping[str, Any], rows: Sequence[Measured], limit: int, seed: int) -> str:
    """Write evaluation.html, and votes.html where there are videos of several checkpoints; return what in words.

    `limit` bounds the videos of each page in bytes. Order and sides of the ballots follow from `seed`.
    """
    samples = _rows(about, rows)
    signs = {measure: sign_of(measure) for measure in about["measures"]}
    page, count = evaluation_page(about, signs, samples, limit)
    write_text(output / "evaluation.html", page)
    line = f"evaluation.html with {count} videos"
    ballots, names = _ballots(about, samples, seed)
    if not ballots:
        return line
    key = hashlib.blake2b(json.dumps([names, about["plan"]]).encode(), digest_size=4).hexdigest()
    page, count = votes_page(ballots, key, QUESTION, limit)
    write_text(output / f"votes-{key}.json", json.dumps({"ballots": names}, indent=1, ensure_ascii=False) + "\n")
    write_text(output / "votes.html", page)
    return f"{line}, votes.html with {count} of {len(ballots)} pairs"


def _rows(about: Mapping[str, Any], rows: Sequence[Measured]) -> list[SampleRow]:
    """Return the samples prompt by prompt: the first of every prompt, then the second, and so on."""
    prompts, scores = about["plan"]["prompts"], _scores(rows)
    order = sorted(range(len(rows[0].rows)), key=lambda i: [rows[0].rows[i][key] for key in ("sample", "seed")])
    return [
        SampleRow(prompts[row["prompt"]], row["seed"], row["sample"], [_card(measured, i, scores) for measured in rows])
        for i in order
        for row in [rows[0].rows[i]]
    ]


def _scores(rows: Sequence[Measured]) -> list[str]:
    """Return the names of reward and scores; without the reward, where one of the scores is the same everywhere."""
    every = [row for measured in rows for row in measured.rows]
    names = [name for name in every[0] if name.partition("/")[0] == "reward"]
    total = "reward" in names
    same = [name for name in names[1:] if total and all(row[name] == row["reward"] for row in every)]
    return names[1:] if same else names


def _card(measured: Measured, number: int, scores: Sequence[str]) -> Card:
    row = measured.rows[number]
    hits = {name.partition("/")[2]: bool(value) for name, value in row.items() if name.startswith("accuracy/")}
    video = measured.folder / row["video"] if row["video"] else None
    return Card(video, {name: row[name] for name in scores}, hits)


def _ballots(
    about: Mapping[str, Any], rows: Sequence[SampleRow], seed: int
) -> tuple[list[Ballot], list[dict[str, Any]]]:
    """Return the ballots of the first sample of every prompt and seed, for every two checkpoints, in random order.

    The second list says of each ballot which checkpoints are left and right.
    """
    names = [checkpoint["name"] for checkpoint in about["checkpoints"]]
    random, ballots = generator(seed, "ballots"), []
    for row in rows:
        for second in range(len(names)):
            for first in range(second):
                left, right = (first, second) if random.random() < 0.5 else (second, first)
                files = [row.cards[i].video for i in (left, right)]
                if row.sample == 0 and files[0] is not None and files[1] is not None:
                    named = {"left": names[left], "right": names[right], "prompt": row.prompt, "seed": row.seed}
                    ballots.append((Ballot(row.prompt, files[0], files[1]), named))
    order = random.permutation(len(ballots)).tolist()
    return [ballots[i][0] for i in order], [ballots[i][1] for i in order]
