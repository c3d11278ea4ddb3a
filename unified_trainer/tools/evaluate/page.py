"""The pages of an evaluation: one to look at, and a blind one on which people vote. Each is one file."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plotly.offline import get_plotlyjs

from unified_trainer.tools.report.page import BASE64
from unified_trainer.tools.report.templates import INLINE, filled, inside, own_file
from unified_trainer.tools.report.videos import data_uri

SIGNS = {1: "higher is better", 0: "", -1: "lower is better"}


@dataclass(frozen=True)
class Card:
    """One sample of one checkpoint."""

    video: Path | None
    scores: Mapping[str, float]
    accuracy: Mapping[str, bool]


@dataclass(frozen=True)
class SampleRow:
    """The samples of all checkpoints of one prompt and noise."""

    prompt: str
    seed: int
    sample: int
    cards: Sequence[Card]


@dataclass(frozen=True)
class Ballot:
    """Two videos of one prompt and noise, in the order that they are shown."""

    prompt: str
    left: Path
    right: Path


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
            self.videos.append(data_uri(file, "mp4"))
        return self._positions[file]

    def fits(self, files: Sequence[Path]) -> bool:
        """Whether these videos fit in, together."""
        return sum(file.stat().st_size for file in files if file not in self._positions) <= self._left


def evaluation_page(
    about: Mapping[str, Any], signs: Mapping[str, int], rows: Sequence[SampleRow], limit: int
) -> tuple[str, int]:
    """Return the page of evaluation.json's content, and the number of its videos.

    `signs` says of each measure whether more is better (1), less is (-1), or neither (0); `limit` is the size of all
    videos in bytes.
    """
    names = [one["name"] for one in about["checkpoints"]]
    embedded, shown = Embedded(limit), []
    for row in rows:
        clips = [card.video for card in row.cards if card.video is not None]
        if len(clips) == len(row.cards) and embedded.fits(clips):
            shown.append(
                {"prompt": row.prompt, "seed": row.seed, "sample": row.sample}
                | {"cards": [_card(card, embedded) for card in row.cards]}
            )
    against = {(one["measure"], one["right"]): one for one in about["differences"] if one["left"] == names[0]}
    table = [
        {
            "measure": measure,
            "better": SIGNS[signs[measure]],
            "cells": [_cell(values[name], against.get((measure, name)), signs[measure]) for name in names],
        }
        for measure, values in about["measures"].items()
    ]
    charts = [
        {"measure": row["measure"], "better": row["better"], "points": [_point(i, cell) for i, cell in wide]}
        for row in table
        if (wide := [(i, cell) for i, cell in enumerate(row["cells"]) if cell["difference"] and cell["interval"]])
    ]
    data = {"runs": names, "charts": charts, "rows": shown, "videos": embedded.videos}
    page = filled(
        "evaluation.html",
        INLINE,
        inside((get_plotlyjs(), own_file("pairs.js"), own_file("evaluation.js"))),
        data=data,
        about=about,
        names=names,
        table=table,
        left_out=sum(any(card.video for card in row.cards) for row in rows) - len(shown),
    )
    return page, len(embedded.videos)


def votes_page(ballots: Sequence[Ballot], key: str, question: str, limit: int) -> tuple[str, int]:
    """Return the page on which people vote, and the number of ballots on it: the first that fit.

    The page holds no name of a checkpoint; `key` is the name of the file that has them. `limit` is the size of all
    videos in bytes.
    """
    embedded, shown = Embedded(limit), []
    for ballot in ballots:
        if not embedded.fits([ballot.left, ballot.right]):
            break
        left, right = embedded.position(ballot.left), embedded.position(ballot.right)
        shown.append({"prompt": ballot.prompt, "left": left, "right": right})
    data = {"key": key, "ballots": shown, "videos": embedded.videos}
    scripts = inside((own_file("pairs.js"), own_file("votes.js")))
    return filled("votes.html", INLINE, scripts, data=data, question=question), len(shown)


def _card(card: Card, embedded: Embedded) -> dict[str, Any]:
    position = None if card.video is None else embedded.position(card.video)
    return {"scores": dict(card.scores), "accuracy": dict(card.accuracy), "video": position}


def _cell(measure: Mapping[str, Any], difference: Mapping[str, Any] | None, sign: int) -> dict[str, Any]:
    """Return what a cell of the table shows: mean, spread, and the difference to the first checkpoint with its kind."""
    interval = difference["interval"] if difference else measure["interval"]
    clear = bool(difference and interval and (interval[0] > 0 or interval[1] < 0))
    kind = ""
    if clear and difference:
        up = difference["difference"] > 0
        kind = "changed" if not sign else "up" if up == (sign > 0) else "down"
    return {
        "mean": measure["mean"],
        "std": measure["std_over_seeds"],
        "difference": difference and {"value": difference["difference"]},
        "interval": interval,
        "kind": kind,
    }


def _point(position: int, cell: Mapping[str, Any]) -> dict[str, Any]:
    low, high = cell["interval"]
    return {"run": position, "value": cell["difference"]["value"], "low": low, "high": high, "kind": cell["kind"]}
