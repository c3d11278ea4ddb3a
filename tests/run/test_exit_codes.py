"""How the program ends."""

import subprocess
import sys

import pytest

END = """
import atexit
from unified_trainer.run.exit_codes import end
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
