"""Types and shapes of the product are checked while the tests run; runs are deterministic and on one thread.

Nothing here imports torch or the product before a test needs it: the process that only hands tests to others would
spend seconds on it before they start.
"""

import ctypes
import gc
import logging
import os
import sys
import tempfile

import checking
import hypothesis
import jaxtyping
import pytest

LONGEST = {
    "test_bench_gpu.py",
    "test_examples.py",
    "test_image_families.py",
    "test_invariance.py",
    "test_kill.py",
    "test_meshes.py",
    "test_mission.py",
    "test_readme.py",
    "test_runs.py",
    "test_shown_matching.py",
    "test_two_ranks.py",
}

MUCH = 256 << 20  # bytes
_held = 0  # bytes when memory was freed last
TOGETHER = ("tests/run/workers/",)  # one Ray

os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="state-")  # where trust is remembered
logging.disable(logging.DEBUG)  # torch notes every call of its checkpoints there, thousands in a run
gc.disable()  # until everything is imported: it would look at the same objects over and over
checking.install()  # before the first import of the product
os.fsync = lambda descriptor: None  # no test cuts the power, and processes that are killed lose nothing without it
hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None, max_examples=50)
hypothesis.settings.load_profile("repeatable")


def pytest_configure(config):
    if config.getoption("numprocesses", None):  # the process that hands tests to others collects none
        gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Hand out whole files, and whole those folders that share what takes seconds to start."""
    from xdist.scheduler import LoadFileScheduling

    class Shared(LoadFileScheduling):
        def _split_scope(self, nodeid):
            return next((folder for folder in TOGETHER if nodeid.startswith(folder)), super()._split_scope(nodeid))

    return Shared(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_collection_modifyitems(config, items):
    """Leave out the cells of matrices that others cover, and begin with the files that take longest.

    A long file that is last would run alone at the end.
    """
    if not config.getoption("--all-cells"):
        left_out = [item for item in items if item.get_closest_marker("cell")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("cell")]
    items.sort(key=lambda item: item.path.name not in LONGEST)


def pytest_collection_finish():
    """Leave everything imported so far out of the garbage collector's passes, which otherwise take seconds."""
    gc.freeze()
    gc.set_threshold(10_000)
    gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown():
    """Free what tests have left once it is much: every fork copies the page table of all memory that is held.

    Models lie in cycles, which the collector finds by the number of objects, of which they have few. tcmalloc, as
    `.ci/run` sets it, keeps what is free.
    """
    global _held
    if held() > _held + MUCH:
        gc.collect()
        if "tcmalloc" in os.environ.get("LD_PRELOAD", ""):
            ctypes.CDLL(None).MallocExtension_ReleaseFreeMemory()
        _held = held()


def held() -> int:
    """Bytes of this process in memory."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def pytest_addoption(parser):
    parser.addoption("--odd-values", type=int, default=0, help="values of each file that test_odd_configs.py tries")
    parser.addoption(
        "--damaged-files", type=int, default=0, help="copies of each kind that test_damaged_bytes.py damages"
    )
    parser.addoption(
        "--all-cells",
        action="store_true",
        help="run every cell of the matrices; those of test_invariance.py alone",
    )
    parser.addoption("--all-pipelines", action="store_true", help="try every small folder of a pipeline, not a few")
    parser.addoption("--kills", type=int, default=0, help="how often test_kill.py kills each run; 0 is a few times")
    parser.addoption("--kills-first", type=int, default=0, help="number of the first life that is killed")


def pytest_runtest_logstart():
    checking.begin_test()


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    """Calls of scorers are repeated at once; the test of the pauses sets its own."""
    if (reward := sys.modules.get("unified_trainer.rewards.reward")) is not None:
        monkeypatch.setattr(reward, "FIRST_PAUSE", 0.0)


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    import torch

    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seeded():
    """Tests that draw with torch's own generator draw the same every time."""
    import torch

    torch.manual_seed(0)


@pytest.fixture
def unchecked():
    """The product without the type hook: what a caller outside the tests sees when a name is wrong."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture(scope="session")
def codec():
    """The tiny world's text encoder and causal VAE."""
    from helpers import tiny_codec

    return tiny_codec()


@pytest.fixture
def run_folder(tmp_path):
    """Where a run of the test may write."""
    return tmp_path / "run"
