"""Videos with captions, in the layouts that people keep them in: docs/data.md lists them."""

import os
import tarfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from unified_trainer.basics.actions import ACTIONS, NO_ACTIONS, Actions
from unified_trainer.basics.errors import MissingFileError, UserError
from unified_trainer.basics.input_files import BYTE_ORDER_MARK, decoded, parse_object, read_text
from unified_trainer.data.folders import files_below
from unified_trainer.data.tables import TABLES, lines_of, pick, read_rows, refuse_unreadable, texts_of, texts_of_one

VIDEOS = (".avi", ".m4v", ".mkv", ".mov", ".mp4", ".webm")
PICTURES = (".jpeg", ".jpg", ".png", ".webp")  # of a folder without videos
MEDIA = (*VIDEOS, *PICTURES)
PATHS = ("path", "video", "file_name", "file", "video_path", "image", "image_path")  # column that names the videos
CAPTIONS = ("caption", "text", "prompt", "cap", "captions")
CONDITIONS = ("condition", "conditions")  # column that names condition images or clips: one, or a list
STARTS, ENDS = ("start", "start_time"), ("end", "end_time")  # columns of seconds
BESIDE = (".txt", ".caption")  # endings of the text beside a video
LISTS = ("videos.txt", "video.txt", "images.txt", "image.txt")  # a path in each line
LISTS_OF_CAPTIONS = ("prompts.txt", "prompt.txt", "captions.txt", "caption.txt")  # beside them
BYTES = (pa.binary(), pa.large_binary())
NAMED_TABLES = ("videos2caption.json", *(f"{name}{end}" for name in ("captions", "metadata") for end in TABLES))
Columns = tuple[str, ...]  # of a table: that of the paths, and those of captions; (): by their names above
# place, path, caption or captions, all fields, and what reads the video where the file holds it
Row = tuple[str, Any, Any, Mapping[str, Any], Callable[[], bytes] | None]


@dataclass(frozen=True)
class CaptionedVideo:
    """A video, or its part from `start` on, and its captions; `name` is its path below the folder, or in the table."""

    name: str
    file: Path  # of a video inside a .tar or .parquet file: its place in there
    captions: tuple[str, ...] = ()
    wrong: str = ""  # why a caption cannot be used
    start: float = 0.0  # seconds
    end: float = float("inf")
    holder: Path | None = None  # the .tar or .parquet file
    contents: Callable[[], bytes] | None = field(default=None, compare=False)  # of the holder
    actions: Actions = NO_ACTIONS
    conditions: tuple[Path, ...] = ()  # files of condition images or clips; without any, an image is the first frame

    @property
    def rows(self) -> list[tuple[str, str]]:
        """A name and a caption for each caption."""
        return [(f"{self.name}#{i}" if i > 1 else self.name, caption) for i, caption in enumerate(self.captions, 1)]

    @property
    def fault(self) -> str:
        """Return in words why it cannot be used, without opening it; "" if nothing is known."""
        try:
            if not (self.holder or self.file).is_file():
                return "no such file"
        except OSError as error:
            return str(error.strerror)
        beside = self.file.with_suffix(BESIDE[0]).name
        return self.wrong or ("" if self.captions else f"no caption: {beside} is missing or empty")

    @contextmanager
    def on_disk(self) -> Iterator[Path]:
        """Give the path of a file with the video while the context lasts."""
        if self.contents is None:
            yield self.file
            return
        with TemporaryDirectory() as folder:
            file = Path(folder, self.file.name)
            file.write_bytes(self.contents())
            yield file


def find_videos(
    source: Path, key: str, captions: Path | None = None, columns: Columns = ()
) -> tuple[CaptionedVideo, ...]:
    """Return the videos of a folder in the order of their names, or those of a table or a .tar file in its order.

    A folder without videos may hold images, which are videos of one frame. A video has the captions of its rows in a
    table; without any, the text beside it. With the table `captions`, a folder has the videos of its rows. A video
    without a caption, or that is not there, has a `fault`.
    `key` is the setting that names the source, for messages. Raise UserError for a source without videos.
    """
    if not source.exists():
        raise MissingFileError(f"{key} {source}: no such file or folder")
    if captions is not None:
        videos = _listed(captions, source, source, "--captions", columns)
    elif source.is_dir():
        videos = _folder(source, key, columns)
    elif source.suffix in (*TABLES, ".tar"):
        videos = _listed(source, source.parent, source.parent, key, columns)
    else:
        raise UserError(f"{key} {source} is neither a folder of videos nor a table ({', '.join(TABLES)}) or .tar file")
    if not videos:
        raise UserError(f"{key} {source} holds no videos ({', '.join(VIDEOS)}) or images ({', '.join(PICTURES)})")
    merged: dict[str, CaptionedVideo] = {}
    for video in videos:
        known = merged.setdefault(video.name, video)
        together = tuple(dict.fromkeys((*known.captions, *video.captions)))
        other = "its rows name different conditions" if video.conditions != known.conditions else ""
        merged[video.name] = replace(known, captions=together, wrong=known.wrong or video.wrong or other)
    return tuple(merged.values())


def left_out(source: Path) -> str:
    """Say how many files of a folder, by their endings, are read for neither clips nor captions; "" without any."""
    files = files_below(source) if source.is_dir() else []
    endings = Counter(file.suffix.lower() or "no ending" for file in files if file.name not in NAMED_TABLES)
    known = (*_kinds(files), *BESIDE, ".tar", ".parquet")
    rest = ", ".join(f"{count} {ending}" for ending, count in sorted(endings.items()) if ending not in known)
    return f"{source}: files of other endings are left out: {rest}" if rest else ""


def is_encoded(file: Path) -> bool:
    """Return whether a .parquet file holds tensors in place of videos; one that cannot be read counts as such."""
    try:
        return any(name.endswith("_bytes") for name in pq.read_schema(file).names)
    except (OSError, pa.ArrowException):
        return True


def lists_videos(file: Path) -> bool:
    """Return whether a file of a folder lists videos or holds some, by its name and the columns of a .parquet file."""
    if file.suffix == ".parquet":
        return not is_encoded(file)
    return file.suffix == ".tar" or file.name in NAMED_TABLES or (file.name in LISTS and bool(_captions_of(file)))


def _captions_of(file: Path) -> list[Path]:
    """Return the list of captions beside a list of paths, which else is the caption of video.mp4."""
    return [other for name in LISTS_OF_CAPTIONS if (other := file.with_name(name)).is_file()][:1]


def _folder(source: Path, key: str, columns: Columns) -> list[CaptionedVideo]:
    """Return the videos that files of a folder list, and the others with the text beside each."""
    files = files_below(source)
    videos = [
        video for file in files if lists_videos(file) for video in _listed(file, file.parent, source, key, columns)
    ]
    listed = {video.file for video in videos}
    kinds = _kinds([*files, *listed])
    for file in files:
        if file.suffix.lower() in kinds and file not in listed:
            text = next((beside for end in BESIDE if (beside := file.with_suffix(end)).is_file()), None)
            video = CaptionedVideo(file.relative_to(source).as_posix(), file)
            videos.append(_captioned(video, text.read_bytes() if text else ""))
    return sorted(videos, key=lambda video: Path(video.name).parts)


def _kinds(files: Iterable[Path]) -> tuple[str, ...]:
    """Return the endings of the clips among files: images where there are no videos."""
    return PICTURES if {file.suffix.lower() for file in files}.isdisjoint(VIDEOS) else VIDEOS


def _captioned(video: CaptionedVideo, value: Any) -> CaptionedVideo:
    """Return a video with a caption, in UTF-8 if in bytes, or captions; anything else is a fault of the video."""
    try:
        if isinstance(value, UserError):
            raise value
        value = decoded(value, "its caption").removeprefix(BYTE_ORDER_MARK) if isinstance(value, bytes) else value
        captions = [" ".join(text.split()) for text in texts_of(value, "its caption")]
        for caption in captions:
            refuse_unreadable(caption, "its caption")
    except UserError as error:
        return replace(video, wrong=str(error))
    return replace(video, captions=tuple(filter(None, captions)))


def _listed(file: Path, folder: Path, root: Path, key: str, columns: Columns) -> list[CaptionedVideo]:
    """Return the videos that a file lists, relative to `folder` or its folder `videos`, or holds; named from `root`."""
    layout = _tar_rows if file.suffix == ".tar" else _list_rows if file.name in LISTS else _table_rows
    videos = []
    for where, path, value, row, contents in layout(file, key, columns):
        if not isinstance(path, str):
            raise UserError(f"{key} {file}: {where} holds {path!r} instead of the path of a video")
        if os.path.isfile(folder / "videos" / path) and not os.path.exists(folder / path):  # as FastVideo keeps them
            path = os.path.join("videos", path)
        path = os.path.normpath(path)
        name = os.path.normpath(os.path.join(os.path.relpath(folder, root), path))
        actions = Actions.read(row.get(ACTIONS), file.parent, f"{key} {file}: {where}")
        holder = file if contents else None
        named = texts_of_one(row, CONDITIONS, f"{key} {file}: {where}")
        conditions = tuple(file.parent / name for name in named)
        video = CaptionedVideo(
            name, folder / path, holder=holder, contents=contents, actions=actions, conditions=conditions
        )
        videos.append(_from_start(_captioned(video, value), row))
    return videos


def _from_start(video: CaptionedVideo, row: Mapping[str, Any]) -> CaptionedVideo:
    """Return the part of a video between the seconds that a row names, if it names any."""
    given = ((row[name] for name in names if row.get(name) not in (None, "")) for names in (STARTS, ENDS))
    start, end = (next(values, None) for values in given)
    try:
        begun, ended = float(start or 0), video.end if end is None else float(end)
    except (TypeError, ValueError):
        begun = ended = float("nan")
    if not 0 <= begun < ended:
        return replace(video, name=f"{video.name}@{start}", wrong=f"its part from {start} to {end} is not in seconds")
    return replace(video, name=f"{video.name}@{begun:.10g}" if begun else video.name, start=begun, end=ended)


def _table_rows(file: Path, key: str, columns: Columns) -> Iterator[Row]:
    """Yield the rows of a table; a .parquet file may hold the videos themselves."""
    schema = pq.read_schema(file) if file.suffix == ".parquet" and not is_encoded(file) else ()
    packed = {field.name: None for field in schema if pa.types.is_struct(field.type) or field.type in BYTES}
    wanted = {*PATHS, *CAPTIONS, *CONDITIONS, *STARTS, *ENDS, ACTIONS, *columns} - packed.keys()
    rows = read_rows(file, key, wanted, endings=MEDIA)
    held = packed | dict.fromkeys(name for _, row in rows for name in row)
    place = f"{key} {file}: {rows[0][0] if rows else ''}"
    choices = [*((name,) for name in columns), *(PATHS, CAPTIONS)[len(columns) :]] if rows else []
    path, *texts = [pick(held, choice, place, ": set data.columns") for choice in choices] or [""]
    for number, (where, row) in enumerate(rows):
        contents = partial(_cell, file, path, number) if path in packed else None
        ending = ".png" if path.startswith("image") else ".mp4"
        name = f"{file.name}/{number:06}{ending}" if contents else row.get(path)
        yield where, name, [row.get(column) for column in texts], row, contents


def _list_rows(file: Path, key: str, columns: Columns) -> Iterator[Row]:
    """Yield the rows of a list of paths and of the list of captions beside it, line by line."""
    texts = _captions_of(file)
    paths, captions = (lines_of(read_text(lines, key).rstrip()) for lines in (file, *texts))
    if len(paths) != len(captions):
        raise UserError(f"{key} {file} has {len(paths)} lines, and {texts[0].name} {len(captions)}: write one for each")
    for i, (path, caption) in enumerate(zip(paths, captions, strict=True), 1):
        yield f"line {i}", path.strip(), caption, {}, None


def _tar_rows(file: Path, key: str, columns: Columns) -> Iterator[Row]:
    """Yield the videos of a .tar file (webdataset): the caption of x.mp4 is in x.txt, or in a field of x.json."""
    parts: dict[str, Callable[[], bytes]] = {}
    try:
        with tarfile.open(file, "r:") as opened:
            for member in opened:
                if member.isfile() and not Path(member.name).name.startswith("."):
                    parts[os.path.normpath(member.name)] = partial(_part, file, member.offset_data, member.size)
    except (OSError, tarfile.TarError) as error:
        raise UserError(f"{key} {file} cannot be read as a .tar file without compression: {error}") from error
    kinds = _kinds(map(Path, parts))
    for name in (name for name in parts if Path(name).suffix.lower() in kinds):
        stem = os.path.splitext(name)[0]
        text = next((stem + end for end in (*BESIDE, ".json") if stem + end in parts), "")
        value: Any = parts[text]() if text else ""
        row: dict[str, Any] = {}
        if text.endswith(".json"):
            try:
                row = parse_object(decoded(value, text), text)
                value = [row.get(column) for column in columns[1:] or [name for name in CAPTIONS if name in row][:1]]
            except UserError as error:
                value = error
        yield name, f"{file.name}/{name}", value, row, parts[name]


def _part(file: Path, offset: int, size: int) -> bytes:
    with file.open("rb") as opened:
        opened.seek(offset)
        return opened.read(size)


def _cell(file: Path, column: str, number: int) -> bytes:
    """Return the bytes of a video in a row of a .parquet file; none where the row holds none."""
    metadata, group = pq.read_metadata(file), 0
    while number >= (size := metadata.row_group(group).num_rows):
        number, group = number - size, group + 1
    value = _row_group(file, group, column)[number].as_py()
    return (value.get("bytes") if isinstance(value, dict) else value) or b""


@lru_cache(maxsize=1)
def _row_group(file: Path, group: int, column: str) -> pa.ChunkedArray:
    return pq.ParquetFile(file).read_row_group(group, columns=[column])[column]
