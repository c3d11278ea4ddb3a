"""Prompts to generate from: captions of the tiny world, of a file, or of a folder of clips."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unified_trainer.basics.actions import ACTIONS, Actions
from unified_trainer.basics.errors import MissingFileError, UserError
from unified_trainer.basics.input_files import read_text
from unified_trainer.basics.requests import Request
from unified_trainer.data.captioned import CONDITIONS, MEDIA, find_videos, lists_videos
from unified_trainer.data.folders import files_below
from unified_trainer.data.stored_prompts import parquet_files
from unified_trainer.data.tables import TABLES, lines_of, read_texts, refuse_unreadable, texts_of_one
from unified_trainer.data.tiny_world import HELD_OUT, PHRASINGS, SUBJECTS
from unified_trainer.data.video_reader import read_condition
from unified_trainer.models import hub

COLUMNS = ("prompt", "caption", "text", "cap", "prompt_en")  # of a table, unless the settings name another
IMAGES = ("image", "images", *CONDITIONS)  # columns of paths of condition images or clips: one, or a list
NEGATIVES = ("negative_prompt",)  # column of prompts of the unconditional branch; empty: that of the run
SUFFIXES = (".txt", *TABLES)  # a text that ends so names a file
Row = tuple[str, str, dict[str, Any], Path]  # its place, such as "line 3", text, other columns, and folder of its files


@dataclass(frozen=True)
class Prompts:
    """A source of prompts, with or without condition images, and without clips."""

    requests: tuple[Request, ...]

    def __len__(self) -> int:
        return len(self.requests)

    def request(self, index: int) -> Request:
        """Return the prompt of a row, and its condition images."""
        return self.requests[index]

    def latents(self, indices: list[int]) -> None:
        """Return None: there are no clips."""
        return None


def training_captions() -> tuple[str, ...]:
    """Return captions of every training subject in all phrasings but the one that it is validated in."""
    return tuple(
        subject.caption(phrasing)
        for i, subject in enumerate(SUBJECTS)
        for phrasing in range(len(PHRASINGS))
        if subject not in HELD_OUT and phrasing != i % len(PHRASINGS)
    )


def validation_captions(count: int) -> tuple[str, ...]:
    """Return `count` captions that are no training prompts: each subject in one phrasing, held-out subjects first."""
    captions = [(subject not in HELD_OUT, subject.caption(i % len(PHRASINGS))) for i, subject in enumerate(SUBJECTS)]
    ordered = [caption for _, caption in sorted(captions, key=lambda row: row[0])]
    return tuple(ordered[i % len(ordered)] for i in range(count))


@dataclass(frozen=True)
class PromptFile:
    """The requests of a file, and a note on lines that were skipped."""

    requests: tuple[Request, ...]
    note: str = ""  # empty if every line is a prompt of its own
    places: tuple[str, ...] = ()  # setting, file and line of each prompt, for messages; none for built-in captions

    @property
    def prompts(self) -> tuple[str, ...]:
        """The texts of the requests."""
        return tuple(request.text for request in self.requests)

    @property
    def placed(self) -> tuple[tuple[str, ...], Callable[[int], str]]:
        """The prompts that have a place, and a function that gives the place of one by its number."""
        return self.prompts if self.places else (), self.places.__getitem__


def prompts_of(path: str, tiny: tuple[str, ...], key: str, column: str, *, images: float = 0) -> PromptFile:
    """Return the captions `tiny` for the path "tiny", otherwise the prompts of that file; see `read_prompts`."""
    if path == "tiny":
        return PromptFile(Request.of(tiny))
    return read_prompts(hub.local_file(path, key), key, column, images=images)


def read_prompts(file: Path, key: str = "--prompts", column: str = "", *, images: float = 0) -> PromptFile:
    """Read the lines of a text file, a column of a .json, .jsonl, .csv or .parquet file, or the captions of a folder.

    A folder holds .parquet files, or videos with captions. With `images`, the column `image` or `condition` of a
    table, or its column `images` of lists, names the condition images of each prompt, relative to the folder of the
    table, or clips, which have that many frames per second. A column
    `actions` holds the actions of each prompt, or names their files. Blank lines and repeated rows, of equal text,
    images, negative prompt and actions, are skipped and counted in the note. `key` is the setting that names the file,
    for messages. Raise UserError, naming file and line, for a file that cannot be read or holds no prompt.
    """
    of_one = _rows_of_folder if os.path.isdir(file) else _rows
    rows = of_one(file, key, column, images=images)
    texts = [text.strip() for _, text, *_ in rows]
    media = [where for (where, *_), text in zip(rows, texts, strict=True) if text.lower().endswith(MEDIA)]
    if 2 * len(media) > sum(map(bool, texts)):
        raise UserError(
            f"{key} {file}: {media[0]} is the path of a video or an image, as most are: give a file of prompts, or the "
            "folder of the videos"
        )
    requests: dict[Request, str] = {}
    for (where, _, row, folder), text in zip(rows, texts, strict=True):
        place = f"{key} {file}: {where}"
        refuse_unreadable(text, place)
        if text:
            negative = " ".join(texts_of_one(row, NEGATIVES, place))
            refuse_unreadable(negative, place)
            named = texts_of_one(row, IMAGES, place) if images else ()
            images_of = tuple(read_condition(folder / name, place, images) for name in named)
            request = Request(text, images_of, negative, Actions.read(row.get(ACTIONS), folder, place))
            requests.setdefault(request, place)
    if not requests:
        raise UserError(f"{key} {file} is empty; write one prompt per line")
    blank = sum(not text for text in texts)
    repeated = len(texts) - blank - len(requests)
    skipped = f"{key} {file}: {len(requests)} prompts; skipped {blank} blank and {repeated} repeated lines"
    return PromptFile(tuple(requests), skipped if blank or repeated else "", tuple(requests.values()))


def _rows_of_folder(folder: Path, key: str, column: str, *, images: float) -> list[Row]:
    """Return the rows of the folder's parquet files, or without any the caption of each video."""
    if files := parquet_files(folder):
        named = ((file.relative_to(folder), _rows(file, key, column, images=images)) for file in files)
        return [(f"{file}: {where}", text, row, beside) for file, rows in named for where, text, row, beside in rows]
    if not any(file.suffix.lower() in MEDIA or lists_videos(file) for file in files_below(folder)):
        raise MissingFileError(f"{key} {folder}: it is a folder without .parquet files, videos and images")
    videos = find_videos(folder, key)
    return [(video.name, caption, {}, folder) for video in videos for caption in video.captions or ("",)]


def _rows(file: Path, key: str, column: str, *, images: float) -> list[Row]:
    """Return the place, the text and the other columns of each row."""
    if file.suffix in TABLES:
        more = {*NEGATIVES, ACTIONS, *(IMAGES if images else ())}
        read = read_texts(file, key, (column,) if column else COLUMNS, more, ": set prompts_column")
        return [(*row, file.parent) for row in read]
    if file.suffix not in ("", ".txt"):
        raise UserError(f"{key} {file}: {file.suffix} is no ending of a file of prompts; have {', '.join(SUFFIXES)}")
    lines = lines_of(read_text(file, key))
    lines = lines[:-1] if lines[-1] == "" else lines  # the end of the last line is no line of its own
    return [(f"line {i}", line, {}, file.parent) for i, line in enumerate(lines, 1)]
