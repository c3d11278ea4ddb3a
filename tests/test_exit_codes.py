"""How the program ends."""

import signal
import subprocess
import sys

import pytest

END = """
import atexit
from unified_trainer.exit_codes import end
class Last:
    def __del__(self):
        print("finalized")
last = Last()
atexit.register(print, "exit functions")
end(3)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("size", "said"), [("1", ["exit functions", "finalized"]), ("2", ["exit functions"])])
def test_a_rank_of_several_ends_without_finalization(monkeypatch, size, said):
    """Where a thread of gloo can abort the process; what it printed and its exit functions are not lost."""
    monkeypatch.setenv("WORLD_SIZE", size)
    done = subprocess.run([sys.executable, "-c", END], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.split("\n")[:-1]) == (3, said), done.stderr


FAILING = """
import os, signal, sys
from contextlib import contextmanager
from unified_trainer.errors import UserError
from unified_trainer.exit_codes import end, exit_code
@contextmanager
def interrupted():
    try:
        yield
    finally:
        os.kill(os.getpid(), signal.SIGTERM)
def work():
    with interrupted():
        if sys.argv[1] == "fails":
            raise UserError("a setting is wrong")
    return 0
end(exit_code(work))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "what", "code", "said"),
    [
        ("2", "fails", 2, "error on rank 1: a setting is wrong\n"),
        ("2", "works", -signal.SIGTERM, ""),
        ("1", "fails", -signal.SIGTERM, ""),
    ],
)
def test_a_rank_that_fails_says_so_before_it_is_ended(monkeypatch, size, what, code, said):
    """The signal comes while the exception passes through a context, as that which takes requests to stop."""
    monkeypatch.setenv("WORLD_SIZE", size)
    monkeypatch.setenv("RANK", "1")
    done = subprocess.run([sys.executable, "-c", FAILING, what], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (code, said), done.stderr
