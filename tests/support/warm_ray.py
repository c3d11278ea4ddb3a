"""Processes that Ray or torchrun starts, as copies of a warm process: an import costs them most of their time.

`warm_ray` starts the warm process, which has imported all but Ray, and has Ray start a stand-in in place of Python. The
stand-in hands its command line to the warm process, which forks a copy for it, and lives as long as the copy does. A
copy dies with its stand-in, which is what Ray, or the test, kills in place of a process of its own.

`quick_ranks` does the same for torchrun; there the warm process is a copy of the test's.
"""

import atexit
import gc
import json
import os
import runpy
import select
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import jaxtyping
import psutil
import torch
from helpers import environment

PROGRAMS = ("unlike.py", "direct_weights.py")  # of tests, that are copied too
WORKERS = ("setup_worker.py", "default_worker.py")  # by which Ray starts a worker, with and without an environment
STAND_IN = """#!{python} -IS
import json, os, signal, socket, sys
words = [word for word in sys.argv[1:] if word != "-u"]
if not words[0].endswith({copied}) and words[:2] != ["-m", "unified_trainer"]:
    os.execv("{python}", ["{python}", *sys.argv[1:]])
asked = socket.socket(socket.AF_UNIX)
asked.connect("{address}")
what = {{"words": words, "where": os.getcwd(), "environment": dict(os.environ)}}
socket.send_fds(asked, [json.dumps(what).encode() + b"\\n"], [0, 1, 2])
said = asked.makefile()
copy = int(said.readline())
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, lambda number, frame: os.kill(copy, number))
code = int(said.readline() or 1)
if code > 128:  # it ends as its copy did
    signal.signal(code - 128, signal.SIG_DFL)
    os.kill(os.getpid(), code - 128)
sys.exit(code)
"""


@dataclass(frozen=True)
class Warm:
    """A stand-in for Python, and the warm process."""

    python: Path
    process: psutil.Process

    def processes(self) -> set[psutil.Process]:
        """All copies and what they have started."""
        return set(self.process.children(recursive=True))


@contextmanager
def warm_ray() -> Iterator[Warm]:
    """The stand-in for Python; within the context Ray starts it too."""
    with _stand_in() as (python, listener):
        command = [sys.executable, __file__, str(listener.fileno()), str(python)]
        server = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[listener.fileno()], env=environment())
        listener.close()
        before, sys.executable = sys.executable, str(python)
        try:
            yield Warm(python, psutil.Process(server.pid))
        finally:
            sys.executable = before
            server.communicate()


@contextmanager
def quick_ranks() -> Iterator[dict[str, str]]:
    """The environment of a torchrun whose ranks are copies of this process."""
    import forked  # noqa: F401  (all that a run imports)

    with _stand_in() as (python, listener):
        end, ours = os.pipe()
        if not (server := os.fork()):
            try:
                os.close(ours)
                os.dup2(end, 0)
                _forget_exit_functions()
                jaxtyping.config.update("jaxtyping_disable", True)
                _serve(listener, str(python))
            finally:
                os._exit(0)
        os.close(end)
        listener.close()
        try:
            yield environment(PYTHON_EXEC=str(python))
        finally:
            os.close(ours)
            os.waitpid(server, 0)


def _forget_exit_functions() -> None:
    """Let this process run the exit functions alone that it registers from now on, and none of the tests'.

    `atexit._clear` drops what the functions hold while it walks over them, which may end the process by a fault.
    """
    registered = ExitStack()
    atexit.register, atexit._run_exitfuncs = registered.callback, registered.close


@contextmanager
def _stand_in() -> Iterator[tuple[Path, socket.socket]]:
    """A stand-in for Python, and the socket to which it hands its command lines."""
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
        python, address = Path(folder, "python"), f"{folder}/socket"
        python.write_text(STAND_IN.format(python=sys.executable, address=address, copied=(*WORKERS, *PROGRAMS)))
        python.chmod(0o755)
        listener.bind(address)
        listener.listen(64)
        yield python, listener


def _serve(listener: socket.socket, python: str) -> None:
    """Fork a keeper for each stand-in until the test's process has closed its end of a pipe."""
    gc.freeze()  # a copy would look at all of this again and again, and copy its pages
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while 0 not in select.select([listener, 0], [], [])[0]:
        asked, _ = listener.accept()
        if not os.fork():
            listener.close()
            _keep(asked, python)
        asked.close()


def _keep(asked: socket.socket, python: str) -> None:
    """Fork the copy that a stand-in asks for, and tell it the exit code; end the copy with the stand-in."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    text, files, _, _ = socket.recv_fds(asked, 1 << 20, 3)
    while not text.endswith(b"\n"):
        text += asked.recv(1 << 20)
    what = json.loads(text)
    if not (copy := os.fork()):
        asked.close()
        _be(what["words"], what["where"], what["environment"], files, python)
    for file in files:
        os.close(file)
    asked.sendall(f"{copy}\n".encode())
    died = os.pidfd_open(copy)
    if died not in select.select([asked, died], [], [])[0]:
        os.kill(copy, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(copy, 0)[1])
    try:
        asked.sendall(f"{code if code >= 0 else 128 - code}\n".encode())
    finally:
        os._exit(0)


def _be(words: list[str], where: str, environment: dict[str, str], files: Sequence[int], python: str) -> None:
    """Do what Python would do with these words, and end."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    code = 1
    try:
        for at, file in enumerate(files):
            os.dup2(file, at)
        sys.stdout, sys.stderr = (os.fdopen(at, "w", buffering=1, closefd=False) for at in (1, 2))
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(where)
        torch.set_num_threads(int(environment.get("OMP_NUM_THREADS", 1)))
        sys.path[:0] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
        sys.executable = python
        if words[0] == "-m":
            sys.argv = words[1:]
            from forked import main

            code = main(words[2:])
        else:
            if not words[0].endswith(PROGRAMS):
                os.execvp = _worker
            _run(words)
            code = 0
    except SystemExit as ended:
        code = int(ended.code or 0)
    except BaseException:  # noqa: BLE001  (what a process of its own would print)
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()  # Ray's, which ends its servers
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _worker(_file: str, args: Sequence[str]) -> None:
    """The worker that `setup_worker` would start through a shell: bash -c "exec python default_worker.py ..."."""
    _, python, *words = shlex.split(args[2])
    assert Path(python).name.startswith("python"), args
    _run(words)


def _run(words: Sequence[str]) -> None:
    sys.argv = list(words)
    runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    import forked  # noqa: F401  (all that a run imports)

    _serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2])
