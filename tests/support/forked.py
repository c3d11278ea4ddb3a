"""The program in copies of this process, for tests whose subject is what it does and not how it starts.

A copy has everything imported, which is most of what a small run costs. Its types are not checked, as in a process of
its own. Its words are those of a command line: `-m unified_trainer --method ...`, `script.py ...`.
"""

import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import jaxtyping
import torch
from helpers import REPO, environment, free_port

from unified_trainer.__main__ import COMMANDS, command_named, main
from unified_trainer.tools.report import after_training  # noqa: F401  (all that a training imports)

for name in COMMANDS:
    command_named(name)  # imports it

PROGRAM = ["-m", "unified_trainer"]
LAUNCHED = ["--standalone", "--shutdown-timeout", "900", "--nproc-per-node"]
SECONDS = 300  # after which a copy ends by SIGALRM
# A stand-in for `python` and `torchrun` that hands its command line to the test: a folder with a socket is its place.
STAND_IN = """#!{python} -IS
import json, os, socket, sys
asked = socket.socket(socket.AF_UNIX)
asked.connect("{address}")
what = {{"words": sys.argv, "where": os.getcwd(), "environment": dict(os.environ)}}
socket.send_fds(asked, [json.dumps(what).encode() + b"\\n"], [1, 2])
sys.exit(int(asked.makefile().readline()))
"""


def program(*words: object, where: Path = REPO, ranks: int = 1) -> subprocess.CompletedProcess[str]:
    """Run Python with these words in a folder; with several ranks, as torchrun would start them."""
    with written() as files:
        numbers = [file.fileno() for file in files]
        code = _run([str(word) for word in words], where, ranks, environment(), numbers)
        return subprocess.CompletedProcess(words, code, *_texts(files))


def script(*words: object, where: Path, variables: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a script of a shell in whose PATH `python` and `torchrun` are copies of this process."""
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener, written() as files:
        listener.bind(f"{folder}/socket")
        listener.listen()
        for name in ("python", "torchrun"):
            file = Path(folder, name)
            file.write_text(STAND_IN.format(python=sys.executable, address=f"{folder}/socket"))
            file.chmod(0o755)
        seen = {**variables, "PATH": f"{folder}:{variables['PATH']}"}
        with subprocess.Popen(
            [str(word) for word in words], cwd=where, env=seen, stdout=files[0], stderr=files[1]
        ) as one:
            ended = os.pidfd_open(one.pid)
            while ended not in select.select([listener, ended], [], [])[0]:
                with listener.accept()[0] as asked:
                    _answer(asked)
            os.close(ended)
        return subprocess.CompletedProcess(words, one.returncode, *_texts(files))


def forked_code(work: Callable[[], None]) -> int:
    """The exit code of a copy of this process that does this work; minus a signal."""
    if not (pid := os.fork()):
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@contextmanager
def written() -> Iterator[tuple[IO[str], IO[str]]]:
    """Files for what is printed and for errors."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        yield out, err


def _texts(files: Sequence[IO[str]]) -> list[str]:
    for file in files:
        file.seek(0)
    return [file.read() for file in files]


def _answer(asked: socket.socket) -> None:
    """Run what a stand-in was asked for, and tell it the exit code."""
    asked.settimeout(10)
    said, files, _, _ = socket.recv_fds(asked, 1 << 20, 2)
    while not said.endswith(b"\n"):
        said += asked.recv(1 << 20)
    what = json.loads(said)
    name, *words = what["words"]
    ranks = 1
    if Path(name).name == "torchrun":
        assert words[: len(LAUNCHED)] == LAUNCHED, words
        ranks, words = int(words[len(LAUNCHED)]), words[len(LAUNCHED) + 1 :]
    code = _run(words, Path(what["where"]), ranks, what["environment"], files)
    for file in files:
        os.close(file)
    asked.sendall(f"{code}\n".encode())


def _run(words: Sequence[str], where: Path, ranks: int, variables: Mapping[str, str], files: Sequence[int]) -> int:
    """The exit code of a process, or the largest of several ranks; of a signal it is above 128."""
    place = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    places = [{}] if ranks == 1 else [place | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
    pids = [_fork(words, where, {**variables, **one}, files) for one in places]
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    return max(code if code >= 0 else 128 - code for code in codes)


def _fork(words: Sequence[str], where: Path, variables: Mapping[str, str], files: Sequence[int]) -> int:
    if pid := os.fork():
        return pid
    signal.alarm(SECONDS)
    gc.freeze()  # what the test's process holds: the collector would look at it again and again, and copy its pages
    code = 1
    try:
        for at, file in enumerate(files, 1):
            os.dup2(file, at)
        sys.stdout, sys.stderr = (os.fdopen(at, "w", buffering=1, closefd=False) for at in (1, 2))
        os.environ.clear()
        os.environ.update(variables)
        os.chdir(where)
        jaxtyping.config.update("jaxtyping_disable", True)
        torch.set_num_threads(1)
        sys.argv = list(words)
        sys.path.insert(0, "")
        if words[:2] == PROGRAM:
            code = main(list(words[2:]))
        else:
            runpy.run_path(words[0], run_name="__main__")
            code = 0
    except SystemExit as ended:
        code = int(ended.code or 0)
    except BaseException:  # noqa: BLE001  (what a process of its own would print)
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
