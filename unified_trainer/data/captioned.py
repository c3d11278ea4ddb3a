"""Videos with captions: a folder with a text file beside each video, or a table of paths and captions."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from unified_trainer.basics.errors import MissingFileError, UserError
from unified_trainer.basics.input_files import read_text
from unified_trainer.data.tables import TABLES, read_columns, refuse_unreadable

VIDEOS = (".avi", ".m4v", ".mkv", ".mov", ".mp4", ".webm")
PICTURES = (".jpeg", ".jpg", ".png", ".webp")  # of a folder without videos
PATHS = ("path", "video", "file_name", "file")  # column of a table that names the videos
CAPTIONS = ("caption", "text", "prompt", "cap")


@dataclass(frozen=True)
class CaptionedVideo:
    """A video file and its caption; `name` is its path below the folder, or in the table."""

    name: str
    file: Path
    caption: str

    @property
    def fault(self) -> str:
        """Return in words why it cannot be used, without opening it; "" if nothing is known."""
        try:
            if not self.file.is_file():
                return "no such file"
        except OSError as error:
            return str(error.strerror)
        return "" if self.caption else f"no caption: {self.file.with_suffix('.txt').name} is missing or empty"


def find_videos(source: Path, key: str, captions: Path | None = None) -> tuple[CaptionedVideo, ...]:
    """Return the videos of a folder in the order of their names, or those of a table in its order.

    A folder without videos may hold images, which are videos of one frame. The caption of x.mp4 is the text of x.txt
    beside it, or stands in the table `captions`. Paths in a table are relative to the folder, or else to the table. A
    video without a caption, or that is not there, has a `fault`.
    `key` is the setting that names the source, for messages. Raise UserError for a source without videos.
    """
    if not source.exists():
        raise MissingFileError(f"{key} {source}: no such file or folder")
    if source.is_dir() and captions is None:
        files = _files(source, VIDEOS) or _files(source, PICTURES)
        videos = [CaptionedVideo(file.relative_to(source).as_posix(), file, _caption(file)) for file in files]
    elif source.is_dir() or source.suffix in TABLES:
        table, folder = (captions or source, source if source.is_dir() else source.parent)
        rows = read_columns(table, "--captions" if captions else key, PATHS, CAPTIONS)
        videos = [CaptionedVideo(path, folder / path, caption.strip()) for _, (path, caption) in rows]
    else:
        raise UserError(f"{key} {source} is neither a folder of videos nor a table ({', '.join(TABLES)})")
    if not videos:
        raise UserError(f"{key} {source} holds no videos ({', '.join(VIDEOS)}) or images ({', '.join(PICTURES)})")
    if twice := [name for name, count in Counter(video.name for video in videos).items() if count > 1]:
        raise UserError(f"{key} {source} names {twice[0]} more than once: a video has one caption")
    return tuple(videos)


def _files(folder: Path, kinds: tuple[str, ...]) -> list[Path]:
    return sorted(file for file in folder.rglob("*") if file.suffix.lower() in kinds and file.is_file())


def _caption(file: Path) -> str:
    """Return the text beside a video; "" without one. Raise UserError for one that is not UTF-8."""
    beside = file.with_suffix(".txt")
    if not beside.is_file():
        return ""
    caption = " ".join(read_text(beside).split())
    refuse_unreadable(caption, str(beside))
    return caption
