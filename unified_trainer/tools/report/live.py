"""The pages of a server: the list of runs, and the report of one or several of them, as they are at each request."""

import functools
import hashlib
import re
import threading
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from http import HTTPStatus
from pathlib import Path

from markupsafe import Markup
from plotly.offline import get_plotlyjs

from unified_trainer.basics.errors import UserError
from unified_trainer.run.tracking.tracker import VALIDATED
from unified_trainer.tools.report.differences import Settings, settings_of_run
from unified_trainer.tools.report.page import SCRIPTS, Frame, render
from unified_trainer.tools.report.run_folder import CONFIG, RunRecord
from unified_trainer.tools.report.run_list import RunList, counts, link_to
from unified_trainer.tools.report.run_watch import (
    VALIDATIONS,
    RunWatch,
    is_inside,
    signature_of,
    signature_of_samples,
    stamp_of,
)
from unified_trainer.tools.report.sample_videos import SampleVideos
from unified_trainer.tools.report.templates import filled, own_file
from unified_trainer.tools.serve.page_server import Answer, Query, RefusedError

HTML, SCRIPT, VIDEO = "text/html; charset=utf-8", "text/javascript; charset=utf-8", "video/mp4"
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
NUMBER, NAME = re.compile("[0-9]{1,12}"), re.compile(r"[\w-]{1,80}\.mp4")  # of a validation's step, and of its videos


class LivePages:
    """Answers requests for the pages of the runs below a folder; it only reads."""

    def __init__(self, folder: Path, every: float) -> None:
        """`every` is the time between two requests of a page that is open, in seconds."""
        self._folder, self._every = folder, every
        self.watch = RunWatch(folder)
        self._list = RunList(self.watch)
        self._pages: OrderedDict[tuple[str, ...], tuple[str, bytes]] = OrderedDict()
        self._settings: dict[Path, tuple[Hashable, Settings]] = {}
        self._lock = threading.Lock()  # of everything that is remembered

    def __call__(self, path: str, query: Query) -> Answer:
        """Return the answer to a request; RefusedError if there is none."""
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
            counts=counts(rows),
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
        """Return the page of runs, which is made anew if they changed."""
        with self._lock:
            known = self._pages.get(names)
            if known is None or known[0] != tag:
                known = tag, self._made(names, folders)
            self._pages[names] = known
            self._pages.move_to_end(names)
            while len(self._pages) > KEPT:
                self._pages.popitem(last=False)
            return known[1]

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
        stamp, known = stamp_of(run.folder / CONFIG), self._settings.get(run.folder)
        if known is None or known[0] != stamp:
            known = stamp, settings_of_run(run)
            self._settings[run.folder] = known
        return known[1]

    def _folder_of(self, name: str) -> Path:
        """Return the directory of a run; a name is only looked up among those found, and never a path."""
        folder = self.watch.runs().get(name)
        if folder is None:
            raise RefusedError(HTTPStatus.NOT_FOUND, f"no run {name} is here now; the list of runs is at /")
        return folder

    def _video_url(self, file: Path) -> str:
        """Return the path of a validation video at this server; another file has another one."""
        folder = file.parent
        run = folder.parent.parent
        name = run.name if run == self.watch.root else str(run.relative_to(self.watch.root))
        inode, size, changed = stamp_of(file) or (0, 0, 0)
        link = link_to(name).replace("/run?", "/video?", 1)
        return f"{link}&step={folder.name.removeprefix('step_')}&file={file.name}&at={inode}-{size}-{changed}"

    def _video(self, name: str, step: str, file: str) -> Answer:
        folder = self._folder_of(name)
        path = folder / VALIDATIONS / f"step_{step}" / file
        plain = NUMBER.fullmatch(step) and NAME.fullmatch(file)
        stamp = stamp_of(path) if plain and is_inside(path, folder) and path.is_file() else None
        if stamp is None:
            raise RefusedError(HTTPStatus.NOT_FOUND, "there is no such video")
        return Answer("-".join(map(str, stamp)), lambda: _content(path), VIDEO, seconds=DAY)


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
