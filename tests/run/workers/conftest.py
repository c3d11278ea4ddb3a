"""One Ray for all tests of a process, as a run would start it; it ends with the tests."""

import gc
import os
import sys
import warnings
from pathlib import Path

import pytest

from unified_trainer.run.settings.workers import RayConfig
from unified_trainer.run.workers import cluster


@pytest.fixture(scope="package")
def ray():
    before = dict(os.environ)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[2] / "support"), str(Path(__file__).parent)])
    cluster.connect(RayConfig(), cores=16)
    import ray

    yield ray
    ray.shutdown()
    with warnings.catch_warnings(action="ignore", category=ResourceWarning):
        gc.collect()  # Ray does not wait for the processes that it has ended
    os.environ.clear()
    os.environ.update(before)


sys.path.insert(0, str(Path(__file__).parent))
