"""The pages of an evaluation: one to look at, and a blind one on which people vote. Each is one file."""

import base64
import hashlib
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL.Image import Image as Picture
from plotly.offline import get_plotlyjs

from unified_trainer.basics.requests import identity_of
from unified_trainer.parallel.random import generator
from unified_trainer.tools.evaluate.measures import beside_zero, sign_of, verdict
from unified_trainer.tools.evaluate.samples import Measured
from unified_trainer.tools.output_folder import write_text
from unified_trainer.tools.report.page import BASE64
from unified_trainer.tools.report.sample_videos import data_uri
from unified_trainer.tools.report.templates import filled, own_file

QUESTION = "Which video is better?"
SIGNS = {1: "higher is better", 0: "", -1: "lower is better"}
KINDS = {1: "up", 0: "changed", -1: "down"}  # of a difference whose interval does not hold 0
PICTURE = 480  # most pixels of a side of a condition image
Row = dict[str, Any]  # prompt, its number, seed, sample, and of each checkpoint a card: scores, accuracy, video


class Embedded:
    """The videos of a page as data URIs, in any order, up to a size in bytes."""

    def __init__(self, limit: int) -> None:
        self.videos: list[str] = []
        self._left, self._positions = limit / BASE64, dict[Path, int]()

    def position(self, file: Path) -> int:
        """Return the position of a video, which is added unless it is there."""
        if file not in self._positions:
            self._positions[file] = len(self.videos)
            self._left -= file.stat().st_size
            self.videos.append(data_uri(file))
        return self._positions[file]

    def fits(self, files: Sequence[Path]) -> bool:
        """Whether these videos fit in, together."""
        return sum(file.stat().st_size for file in files if file not in self._positions) <= self._left


def write(
    output: Path, about: Mapping[str, Any], measured: Sequence[Measured], prompts: Sequence[str], limit: int, seed: int
) -> str:
    """Write evaluation.html, and votes.html where there are videos of several checkpoints; return what in words.

    `about` is the content of evaluation.json. `prompts` are shown with their condition images. `limit` bounds the
    videos of each page in bytes. Order and sides of the ballots follow from `seed`. The page of votes names no
    checkpoint: votes-KEY.json says which one is which.
    """
    rows = _rows(about, measured)
    images = _images(prompts, about["checkpoints"][0]["video"])
    page, count = _evaluation_page(about, rows, images, limit)
    write_text(output / "evaluation.html", page)
    line = f"evaluation.html with {count} videos"
    ballots = _ballots(rows, len(measured), seed)
    if not ballots:
        return line
    names = [checkpoint["name"] for checkpoint in about["checkpoints"]]
    held = [
        {"left": names[left], "right": names[right], "prompt": row["prompt"], "seed": row["seed"]}
        for row, left, right in ballots
    ]
    key = hashlib.blake2b(json.dumps([held, about["plan"]]).encode(), digest_size=4).hexdigest()
    page, count = _votes_page(ballots, images, key, limit)
    write_text(output / f"votes-{key}.json", json.dumps({"ballots": held}, indent=1, ensure_ascii=False) + "\n")
    write_text(output / "votes.html", page)
    return f"{line}, votes.html with {count} of {len(ballots)} pairs"


def _rows(about: Mapping[str, Any], measured: Sequence[Measured]) -> list[Row]:
    """Return the samples prompt by prompt: the first of every prompt, then the second, and so on."""
    first, scores = measured[0].rows, _scores(measured)
    return [
        {"prompt": about["plan"]["prompts"][first[i]["prompt"]], "number": first[i]["prompt"]}
        | {"seed": first[i]["seed"], "sample": first[i]["sample"]}
        | {"cards": [_card(one, i, scores) for one in measured]}
        for i in sorted(range(len(first)), key=lambda i: (first[i]["sample"], first[i]["seed"]))
    ]


def _scores(measured: Sequence[Measured]) -> list[str]:
    """Return the names of reward and scores; without the reward, where one of the scores is the same everywhere."""
    every = [row for one in measured for row in one.rows]
    names = [name for name in every[0] if name.partition("/")[0] == "reward"]
    total = "reward" in names
    same = [name for name in names[1:] if total and all(row[name] == row["reward"] for row in every)]
    return names[1:] if same else names


def _card(measured: Measured, number: int, scores: Sequence[str]) -> dict[str, Any]:
    row = measured.rows[number]
    hits = {name.partition("/")[2]: bool(value) for name, value in row.items() if name.startswith("accuracy/")}
    video = measured.folder / row["video"] if row["video"] else None
    return {"scores": {name: row[name] for name in scores}, "accuracy": hits, "video": video}


def _ballots(rows: Sequence[Row], checkpoints: int, seed: int) -> list[tuple[Row, int, int]]:
    """Return the first sample of every prompt and seed, for every two checkpoints, left and right, in random order."""
    random, ballots = generator(seed, "ballots"), []
    for row in rows:
        for second in range(checkpoints):
            for first in range(second):
                left, right = (first, second) if random.random() < 0.5 else (second, first)
                if row["sample"] == 0 and row["cards"][left]["video"] and row["cards"][right]["video"]:
                    ballots.append((row, left, right))
    return [ballots[i] for i in random.permutation(len(ballots))]


def _images(prompts: Sequence[str], size: Mapping[str, int]) -> list[str]:
    """Return the condition image of each prompt as a data URI, cropped as in a video of this size; "" without one."""
    every = [identity_of(prompt)[1] for prompt in prompts]
    return [_jpeg(images[0].first(size["height"], size["width"])) if images else "" for images in every]


def _of(shown: Sequence[Row], images: Sequence[str]) -> list[str]:
    """Leave out the images of prompts that a page does not show."""
    numbers = {row["number"] for row in shown}
    return [image if number in numbers else "" for number, image in enumerate(images)]


def _jpeg(picture: Picture) -> str:
    picture.thumbnail((PICTURE, PICTURE))
    file = io.BytesIO()
    picture.save(file, "JPEG")
    return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"


def _evaluation_page(
    about: Mapping[str, Any], rows: Sequence[Row], images: Sequence[str], limit: int
) -> tuple[str, int]:
    names = [one["name"] for one in about["checkpoints"]]
    embedded, shown = Embedded(limit), []
    for row in rows:
        clips = [card["video"] for card in row["cards"] if card["video"]]
        if len(clips) == len(names) and embedded.fits(clips):
            shown.append(row | {"cards": [card | {"video": embedded.position(card["video"])} for card in row["cards"]]})
    against = {(one["measure"], one["right"]): one for one in about["differences"] if one["left"] == names[0]}
    table = [
        {
            "measure": measure,
            "better": SIGNS[sign_of(measure)],
            "cells": [_cell(values[name], against.get((measure, name))) for name in names],
        }
        for measure, values in about["measures"].items()
    ]
    charts = [
        {"measure": row["measure"], "better": row["better"], "points": points}
        for row in table
        if (points := [_point(i, cell) for i, cell in enumerate(row["cells"]) if i > 0 and cell["interval"]])
    ]
    data = {"runs": names, "charts": charts, "rows": shown, "images": _of(shown, images), "videos": embedded.videos}
    scripts = (get_plotlyjs(), own_file("pairs.js"), own_file("evaluation.js"))
    left_out = sum(any(card["video"] for card in row["cards"]) for row in rows) - len(shown)
    values: dict[str, Any] = {"data": data, "about": about, "names": names, "table": table, "left_out": left_out}
    return filled("evaluation.html", scripts, **values), len(embedded.videos)


def _votes_page(
    ballots: Sequence[tuple[Row, int, int]], images: Sequence[str], key: str, limit: int
) -> tuple[str, int]:
    """Return the page on which people vote, and the number of ballots on it: the first that fit."""
    embedded, shown = Embedded(limit), []
    for row, *sides in ballots:
        files = [row["cards"][side]["video"] for side in sides]
        if not embedded.fits(files):
            break
        left, right = map(embedded.position, files)
        shown.append({"prompt": row["prompt"], "number": row["number"], "left": left, "right": right})
    data = {"key": key, "ballots": shown, "images": _of(shown, images), "videos": embedded.videos}
    scripts = (own_file("pairs.js"), own_file("votes.js"))
    return filled("votes.html", scripts, data=data, question=QUESTION), len(shown)


def _cell(measure: Mapping[str, Any], difference: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return what a cell of the table shows: mean, spread, and the difference to the first checkpoint with its kind."""
    cell = {"mean": measure["mean"], "std": measure["std_over_seeds"], "kind": ""}
    if difference is None:
        return cell | {"difference": None, "interval": measure["interval"]}
    cell |= {"difference": difference["difference"], "interval": difference["interval"]}
    if beside_zero(difference["interval"]):
        cell["kind"] = KINDS[verdict(difference["measure"], difference["difference"])]
    return cell


def _point(position: int, cell: Mapping[str, Any]) -> dict[str, Any]:
    low, high = cell["interval"]
    return {"run": position, "value": cell["difference"], "low": low, "high": high, "kind": cell["kind"]}
