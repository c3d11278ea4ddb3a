"""The command watch: pages of the list of runs, and the report of one or several, as they are at each request."""

import functools
import hashlib
import re
import threading
from collections import Counter
from collections.abc import Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Annotated

import tyro
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from unified_trainer.basics.errors import MissingFileError, UserError
from unified_trainer.basics.ranges import Port, at_least
from unified_trainer.run.tracking.tracker import VALIDATED
from unified_trainer.tools.report.page import SCRIPTS, Frame, render
from unified_trainer.tools.report.run_folder import CONFIG, RunRecord, name_below
from unified_trainer.tools.report.run_list import RunList, link_to
from unified_trainer.tools.report.run_watch import (
    VALIDATIONS,
    Remembered,
    RunWatch,
    is_inside,
    signature_of,
    signature_of_samples,
    stamp_of,
)
from unified_trainer.tools.report.sample_videos import SampleVideos
from unified_trainer.tools.report.tables import Settings, settings_of_run
from unified_trainer.tools.report.templates import filled, own_file
from unified_trainer.tools.serve.guard import Door
from unified_trainer.tools.serve.page_server import Answer, Pages, Query, RefusedError
from unified_trainer.tools.serve.web_server import serve_until_stopped

HTML, SCRIPT = "text/html; charset=utf-8", "text/javascript; charset=utf-8"
VIDEO = {".mp4": "video/mp4", ".png": "image/png"}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'unsafe-inline'; img-src data: blob:; media-src blob:; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'"
)
FRAMED = "; frame-ancestors 'none'"  # of the header alone: a page must not say it
PLOTLY = "plotly.js"
OF_RUNS, OF_LIST = (PLOTLY, *SCRIPTS, "renew.js", "live.js"), ("renew.js", "list.js")
MOST_POINTS = 2000  # of a curve in a page, about
MOST_RUNS = 20  # in one page
KEPT = 4  # pages in memory
DAY = 86400
NUMBER = re.compile("[0-9]{1,12}")  # of a validation's step
NAME = re.compile(r"[\w-]{1,80}\.(mp4|png)")  # of its videos


def watch(
    folder: Annotated[Path, tyro.conf.Positional] = Path("runs"),
    port: Port = 8010,
    host: str = "127.0.0.1",
    token_variable: str = "",
    every: Annotated[float, at_least(1, 3600)] = 5.0,
) -> None:
    """Show the runs below a folder in a browser, renewed as they go on, until SIGTERM or Ctrl-C. Nothing is written.

    Args:
        folder: Folder with run directories, at any depth, or one run directory.
        every: Seconds after which an open page asks for what is new.
    """
    if not folder.is_dir():
        raise MissingFileError(f"watch {folder}: no such folder; name one with run directories")
    pages = LivePages(folder, every)
    count = len(pages.watch.runs())
    if not count:
        raise MissingFileError(f"watch {folder}: no run directory below it; start a run first or name another folder")
    said = lambda address: f"{count} run{'s' if count > 1 else ''} at {address}, until Ctrl-C"  # noqa: E731
    serve_until_stopped(Door(host, port, token_variable), lambda: Pages(pages), said)


class LivePages:
    """Answers requests for the pages of the runs below a folder; it only reads."""

    def __init__(self, folder: Path, every: float) -> None:
        """`every` is the time between two requests of a page that is open, in seconds."""
        self._folder, self._every = folder, every
        self.watch = RunWatch(folder)
        self._list = RunList(self.watch)
        self._pages = Remembered[tuple[str, ...], bytes](KEPT)
        self._settings = Remembered[Path, Settings](MOST_RUNS)
        self._lock = threading.Lock()  # of everything that is remembered

    def __call__(self, path: str, query: Query) -> Answer:
        if path == "/":
            return self._runs()
        if path == "/run":
            return self._run(tuple(dict.fromkeys(query.get("name", ()))))
        if path == "/video":
            return self._video(*(query.get(key, [""])[0] for key in ("name", "step", "file")))
        if path.removeprefix("/page/") in {*OF_RUNS, *OF_LIST}:
            return script(path.removeprefix("/page/"))
        raise RefusedError(HTTPStatus.NOT_FOUND, "there is no such page; the list of runs is at /")

    def _runs(self) -> Answer:
        with self._lock:
            rows = self._list.rows()
        text = filled(
            "list.html",
            POLICY,
            _elements(OF_LIST),
            folder=str(self._folder),
            rows=rows,
            counts=dict(Counter(row.state for row in rows).most_common()),
            validated=VALIDATED,
            renewed_every=self._every,
        )
        body = text.encode(errors="replace")
        return Answer(_hash(body), lambda: body, HTML, POLICY + FRAMED)

    def _run(self, names: tuple[str, ...]) -> Answer:
        if not 1 <= len(names) <= MOST_RUNS:
            raise RefusedError(HTTPStatus.BAD_REQUEST, f"name 1 to {MOST_RUNS} runs, as in {link_to('one', 'two')}")
        folders = [self._folder_of(name) for name in names]
        tag = _hash(repr([(signature_of(folder), signature_of_samples(folder)) for folder in folders]).encode())
        return Answer(tag, lambda: self._page(names, folders, tag), HTML, POLICY + FRAMED)

    def _page(self, names: tuple[str, ...], folders: Sequence[Path], tag: str) -> bytes:
        with self._lock:
            return self._pages.get(names, tag, lambda: self._made(names, folders))

    def _made(self, names: Sequence[str], folders: Sequence[Path]) -> bytes:
        frame = Frame(POLICY, _elements(OF_RUNS), self._every, MOST_POINTS, self._settings_of)
        samples = SampleVideos(self._video_url)
        try:
            runs = [self.watch.record(folder) for folder in folders]
            for folder in folders:
                self.watch.check_samples(folder)
            return render(runs, names, samples, float("inf"), frame).encode(errors="replace")
        except UserError as error:
            raise RefusedError(HTTPStatus.SERVICE_UNAVAILABLE, f"not readable now: {error}") from error
        except OSError as error:  # a file that was there a moment ago
            raise RefusedError(HTTPStatus.SERVICE_UNAVAILABLE, f"the run changes: {error}; try again") from error

    def _settings_of(self, run: RunRecord) -> Settings:
        """Return the settings of a run beside those of its recipe, which takes half a second, once for each file."""
        return self._settings.get(run.folder, stamp_of(run.folder / CONFIG), lambda: settings_of_run(run))

    def _folder_of(self, name: str) -> Path:
        """Return the directory of a run; a name is only looked up among those found, and never a path."""
        folder = self.watch.runs().get(name)
        if folder is None:
            raise RefusedError(HTTPStatus.NOT_FOUND, f"no run {name} is here now; the list of runs is at /")
        return folder

    def _video_url(self, file: Path) -> str:
        """Return the path of a validation video at this server; another file has another one."""
        folder = file.parent
        link = link_to(name_below(folder.parent.parent, self.watch.root)).replace("/run?", "/video?", 1)
        at = "-".join(map(str, stamp_of(file) or (0, 0, 0)))
        return f"{link}&step={folder.name.removeprefix('step_')}&file={file.name}&at={at}"

    def _video(self, name: str, step: str, file: str) -> Answer:
        folder = self._folder_of(name)
        path = folder / VALIDATIONS / f"step_{step}" / file
        plain = NUMBER.fullmatch(step) and NAME.fullmatch(file)
        stamp = stamp_of(path) if plain and is_inside(path, folder) and path.is_file() else None
        if stamp is None:
            raise RefusedError(HTTPStatus.NOT_FOUND, "there is no such video")
        return Answer("-".join(map(str, stamp)), lambda: _content(path), VIDEO[path.suffix], seconds=DAY)


@functools.cache
def script(name: str) -> Answer:
    """Return a script of the pages."""
    body = (get_plotlyjs() if name == PLOTLY else own_file(name)).encode()
    return Answer(_hash(body), lambda: body, SCRIPT)


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise RefusedError(HTTPStatus.NOT_FOUND, "there is no such video") from error


def _elements(names: Sequence[str]) -> tuple[Markup, ...]:
    return tuple(Markup(f'<script src="/page/{name}"></script>') for name in names)


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:32]
