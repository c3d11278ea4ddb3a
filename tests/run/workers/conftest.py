"""One Ray for the tests of this folder that a process runs one after another, as a run would start it."""

import gc
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from warm_ray import Warm, warm_ray

from unified_trainer.run.settings.workers import RayConfig
from unified_trainer.run.workers import cluster

HERE = Path(__file__).parent


class Shared:
    """What tests share, each started by the first test that asks for it."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._started: dict[Callable, Any] = {}

    def start(self, context: Callable[[], AbstractContextManager[Any]]) -> Any:
        if context not in self._started:
            self._started[context] = self._stack.enter_context(context())
        return self._started[context]

    def end(self) -> None:
        self._started.clear()
        self._stack.close()


SHARED = Shared()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(nextitem):
    """Ray ends with the last test of the folder: its servers would work beside all later tests."""
    if nextitem is None or HERE not in nextitem.path.parents:
        SHARED.end()


@pytest.fixture
def warm() -> Warm:
    """A stand-in for Python that starts the program, and workers of Ray, as warm copies."""
    return SHARED.start(warm_ray)


@pytest.fixture
def ray(warm):
    return SHARED.start(_ray)


@contextmanager
def _ray() -> Iterator[Any]:
    before = dict(os.environ)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE.parents[1] / "support"), str(HERE)])
    cluster.connect(RayConfig(), cores=16)
    import ray

    yield ray
    ray.shutdown()
    with warnings.catch_warnings(action="ignore", category=ResourceWarning):
        gc.collect()  # Ray does not wait for the processes that it has ended
    os.environ.clear()
    os.environ.update(before)


sys.path.insert(0, str(HERE))
