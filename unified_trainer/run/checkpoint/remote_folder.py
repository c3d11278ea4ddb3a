"""Files in a folder of a storage, of any kind that fsspec knows: s3://, gs://, az://, sftp://, file://."""

import re
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import fsspec
from fsspec.implementations.local import LocalFileSystem

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.secrets import masked

TRIES, PAUSE = 3, 1.0  # of an operation, and seconds before the second one; before each further one twice as many
LIMIT, SLOWEST = 60.0, 2**20  # seconds that an operation may take, besides those of its bytes at so many per second
ANSWERS = (FileNotFoundError, FileExistsError, NotADirectoryError)  # errors that are no faults of a connection
SECRET = re.compile(r"://[^@]*:.*@|[?&][^/]*=")  # a password before the host, or a query, which may hold a token
LATER = threading.Event()  # never set
T = TypeVar("T")


def checked_address(address: str, key: str) -> str:
    """Return an address, that of a local folder as an absolute one; UserError for a password or a query in it."""
    if SECRET.search(address):
        raise UserError(
            f"{key}: the address holds a password or a query, which the run would store: leave it out, and give it as "
            "the storage's package reads it, by a variable such as FSSPEC_SFTP_PASSWORD, or in ~/.config/fsspec"
        )
    if not address or fsspec.utils.get_protocol(address) not in ("file", "local") or "::" in address:
        return address
    return f"file://{LocalFileSystem._strip_protocol(address)}"


class RemoteFolder:
    """A folder of a storage. Its operations run one after another; each is tried a few times, within a limit of time.

    One that fails raises a UserError with `key`, the setting of the address, and no password.
    """

    def __init__(self, address: str, key: str) -> None:
        """Open the folder, which need not exist; UserError for an address that cannot be opened."""
        self.shown, self._key, self._running = masked(checked_address(address, key)), key, threading.Lock()
        self._files, self._place = self._do(lambda: fsspec.core.url_to_fs(address))
        self.local = Path(self._place) if isinstance(self._files, LocalFileSystem) else None

    def read(self, name: str) -> bytes | None:
        """Return the content of a file, None without one."""
        with suppress(FileNotFoundError):
            return self._do(lambda: self._files.cat_file(f"{self._place}/{name}"))
        return None

    def create(self, name: str, content: bytes) -> None:
        """Write a file; FileExistsError if there is one, also one of this moment where the storage can tell."""

        def work(place: str) -> None:
            if self.local is None:
                return self._files.pipe_file(place, content, mode="create")
            with open(place, "xb") as file:  # where fsspec looks before it writes
                file.write(content)

        self._put(name, work)

    def write(self, name: str, content: bytes) -> None:
        """Write or replace a file: a reader finds the old or the new one."""
        renames = type(self._files).mv is not fsspec.AbstractFileSystem.mv  # others put whole objects

        def work(place: str) -> None:
            self._files.pipe_file(f"{place}.tmp" if renames else place, content)
            if renames:
                self._files.mv(f"{place}.tmp", place)

        self._put(name, work, len(content))

    def send(self, file: Path, name: str) -> None:
        """Copy a local file to the storage."""
        self._put(name, lambda place: self._files.put_file(str(file), place), file.stat().st_size)

    def fetch(self, name: str, file: Path, size: int) -> None:
        """Copy a file of so many bytes from the storage."""
        self._do(lambda: self._files.get_file(f"{self._place}/{name}", str(file)), size)

    def remove(self, name: str) -> None:
        """Remove a file, if there is one."""
        with suppress(FileNotFoundError):
            self._do(lambda: self._files.rm_file(f"{self._place}/{name}"))

    def names(self, folder: str = "") -> list[str]:
        """Return the names in a folder, none without one."""

        def look() -> list[str]:
            self._files.invalidate_cache()
            return self._files.ls(f"{self._place}/{folder}".rstrip("/"), detail=False)

        with suppress(FileNotFoundError, NotADirectoryError):
            return sorted({Path(place).name for place in self._do(look)} - {"", ".."})
        return []

    def _put(self, name: str, work: Callable[[str], None], size: int = 0) -> None:
        place = f"{self._place}/{name}"

        def put() -> None:
            self._files.makedirs(place.rpartition("/")[0], exist_ok=True)
            work(place)

        self._do(put, size)

    def _do(self, work: Callable[[], T], size: int = 0, tried: int = 1) -> T:
        done: Future[T] = Future()
        threading.Thread(target=self._run, args=(done, work), daemon=True).start()  # one that hangs holds no exit
        try:
            return done.result(LIMIT + size / SLOWEST)
        except ANSWERS:
            raise
        except Exception as error:  # each storage has its own
            hangs = done.cancel() or not done.done()
            if hangs or tried == TRIES or isinstance(error, ImportError | ValueError):
                why = "no answer in time" if hangs else f"{type(error).__name__}: {masked(str(error))}"
                raise UserError(f"{self._key} {self.shown} fails: {why}") from error
        LATER.wait(PAUSE * 2 ** (tried - 1))
        return self._do(work, size, tried + 1)

    def _run(self, done: "Future[Any]", work: Callable[[], Any]) -> None:
        with self._running:  # also of one that was given up and still runs: it must not come after a later one
            if done.set_running_or_notify_cancel():
                try:
                    done.set_result(work())
                except Exception as error:  # noqa: BLE001  (raised where it is waited for)
                    done.set_exception(error)
