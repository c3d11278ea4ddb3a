"""The command watch: it shows the runs below a folder in a browser while they go on."""

from pathlib import Path
from typing import Annotated

import tyro

from unified_trainer.basics.errors import MissingFileError
from unified_trainer.basics.ranges import Port, at_least
from unified_trainer.tools.report.live import LivePages
from unified_trainer.tools.serve.guard import Door
from unified_trainer.tools.serve.page_server import Pages
from unified_trainer.tools.serve.web_server import serve_until_stopped


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
        port: Port to listen at; 0 takes a free one.
        host: Address to listen at.
        token_variable: Environment variable that holds a token, which clients must then show: as a bearer token, or as
            the password that a browser asks for. Without one, open the server only to a network that you trust.
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
