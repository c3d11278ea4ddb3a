"""A scorer in a process with a Python, and so with packages, of its own.

It needs no Ray, and of this package only the files scorer_child.py and basics/read_code.py
(docs/decisions/0010-scorers-apart.md).
"""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from unified_trainer.basics.errors import MissingFileError, UnscoredError, UserError
from unified_trainer.basics.plugins import Code, agreed_bytes, agreed_code
from unified_trainer.basics.requests import first_images
from unified_trainer.basics.types import PerSample, Video
from unified_trainer.rewards import scorer_child
from unified_trainer.rewards.base import ScorerConfig
from unified_trainer.rewards.own_settings import for_class

# Variables of this process that a scorer gets: where files, libraries and caches are, its devices and threads. Others
# may hold keys, change what it imports, or tell it that it is a rank of the training.
INHERITED = re.compile(
    r"PATH|HOME|USER|LOGNAME|SHELL|LANG|LC_\w+|TZ|TMPDIR|LD_\w+|TCMALLOC_\w+|XDG_\w+|SSL_CERT_\w+|REQUESTS_CA_BUNDLE|"
    r"(?i:https?_proxy|no_proxy|all_proxy)|HF_(HOME|ENDPOINT|HUB_\w+|DATASETS_CACHE)|TRANSFORMERS_\w+|TORCH_(HOME|LOGS)|"
    r"(OMP|MKL|OPENBLAS|NUMEXPR)_\w+|(CUDA|NVIDIA|NCCL|HIP|ROCR|ASCEND|PYTORCH|TRITON|TORCHINDUCTOR)_\w+"
)
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "OPENCV_FOR_THREADS_NUM")
ON_A_CORE = dict.fromkeys(THREADS, "1") | {"CUDA_VISIBLE_DEVICES": ""}  # what processes of this Python get besides


class ScorerError(Exception):
    """The code of a scorer raised an exception in its process; the message holds the traceback."""


class ScorerProcess:
    """A scorer of videos whose file runs in a process of another Python, or of this one on one core.

    Each call sends the frames as float32 and gets one number for each video, without gradient. The process answers one
    call at a time, and ends with this object, with this process, and after a call that failed; the next call starts it
    again.
    """

    def __init__(self, config: ScorerConfig, device: torch.device, key: str, timeout: float) -> None:
        """Start the process and load the scorer; `key` is its setting, for messages, `timeout` in seconds.

        Raise UserError if a setting does not fit the file, else what a call raises.
        """
        file, _, name = config.kind.rpartition(":")
        own = Path(file).parent != Path(__file__).parent
        code = agreed_code(config.kind, f"{key}.kind") if own else Code.read(config.kind)
        if config.python:
            agreed_bytes(str(shutil.which(config.python)), f"{key}.python", config.python)
        sources = {place: content.decode("latin-1") for place, content in code.files.items()}  # each byte a character
        self._load = {"file": file, "name": name, "settings": for_class(config, device), "sources": sources}
        self._python, self._key, self._timeout = config.python or sys.executable, key, timeout
        self._variables = config.python_variables if config.python else None
        self._start()

    def __call__(self, video: Video, prompts: Sequence[str]) -> PerSample:
        """Score videos, after a failure in a new process.

        Raise TimeoutError if there is no answer in time, ChildProcessError if the process died or the scorer raised an
        OSError or RuntimeError, UnscoredError if it did, and ScorerError for every other exception of the scorer.
        """
        if not self.end.alive:
            self._start()
        frames = video.detach().to("cpu", torch.float32).contiguous()
        images = first_images(prompts, *frames.shape[-2:]) if self._asks_for_images else None
        request = {"prompts": list(prompts), "shape": list(frames.shape), "images": images is not None}
        numbers = frames if images is None else torch.cat([frames.flatten(), images.flatten()])
        answer = self._ask(request, memoryview(numbers.numpy()).cast("B"))
        if "unscored" in answer:
            raise UnscoredError(answer["unscored"], answer["scores"])
        return torch.tensor(answer["scores"], dtype=torch.float32, device=video.device)

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        ours.settimeout(self._timeout)
        with theirs:
            self._process = subprocess.Popen(
                [str(shutil.which(self._python)), "-u", scorer_child.__file__, str(theirs.fileno())],
                env=self._environment(),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=2,  # what the scorer prints is no output of this program
                start_new_session=True,  # Ctrl-C is for this process, which may want to finish its step
            )
        self._connection = ours
        self.end = weakref.finalize(self, _end, self._process, ours)
        self._asks_for_images = self._ask(self._load)["images"]

    def _environment(self) -> dict[str, str]:
        given, named = os.environ, self._variables
        if named is None:
            return given | ON_A_CORE | {"PYTHONPATH": os.pathsep.join(place or os.getcwd() for place in sys.path)}
        return {name: value for name, value in given.items() if INHERITED.fullmatch(name) or name in named}

    def _ask(self, message: dict[str, Any], data: memoryview = scorer_child.NO_DATA) -> dict[str, Any]:
        """Return the answer to a message; without one the process is ended, because a late one must not be the next."""
        with ExitStack() as failed:
            failed.callback(self.end)
            answer = self._exchange(message, data)
            if "refused" in answer:
                raise UserError(f"{self._key}.{answer['refused']}")
            if "error" in answer:
                kind = ChildProcessError if answer["fault"] else ScorerError
                raise kind(f"{self._key}: {self._load['file']} failed in {self._python}:\n{answer['error']}")
            failed.pop_all()
        return answer

    def _exchange(self, message: dict[str, Any], data: memoryview) -> dict[str, Any]:
        where = f"{self._key}: the process of {self._python}"
        try:
            scorer_child.send(self._connection, message, data)
            return scorer_child.receive(self._connection)[0]
        except TimeoutError as error:
            raise TimeoutError(
                f"{where} gave no answer in {self._timeout:g} s and was ended: raise reward.timeout, or reward.retries "
                "to start it again"
            ) from error
        except (OSError, scorer_child.HangUpError) as error:
            raise ChildProcessError(
                f"{where} {_fate(self._process)}: see what it printed; reward.retries starts it again"
            ) from error


def check_own_python(config: ScorerConfig, key: str, frames: int) -> None:
    """Check a scorer with a Python of its own: raise UserError unless it is a file's and the executable exists."""
    file, _, name = config.kind.rpartition(":")
    setting = f"{key}.{'python' if config.python else 'processes'}"
    if not (file.endswith(".py") and name.isidentifier()):
        raise UserError(
            f"{setting} is for scorers of files: {key}.kind must be path/to/file.py:NAME, not {config.kind!r}; leave "
            f"{setting} out for a scorer of this package"
        )
    if not Path(file).is_file():
        raise MissingFileError(f"{key}.kind {file}: no such file")
    if absent := [name for name in config.python_variables if name not in os.environ]:
        raise UserError(f"{key}.python_variables: the environment has no {', '.join(absent)}")
    if not config.python and config.device not in ("", "cpu"):
        raise UserError(f"{key}.device {config.device}: {key}.processes run on CPU cores; leave one of them out")
    if config.python and shutil.which(config.python) is None:
        raise UserError(f"{key}.python {config.python!r} is no executable file; expected one such as venv/bin/python")


def _end(process: subprocess.Popen[bytes], connection: socket.socket) -> None:
    """End a process with those that it started."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    connection.close()  # a call in another thread has seen that the process is gone


def _fate(process: subprocess.Popen[bytes]) -> str:
    """Say what became of a process that has closed its connection."""
    try:
        code = process.wait(timeout=10)
    except subprocess.TimeoutExpired:
        return "closed its connection"
    if code >= 0:
        return f"ended with exit code {code}"
    return f"was killed by signal {-code}" + (", often for want of memory" if code == -signal.SIGKILL else "")
