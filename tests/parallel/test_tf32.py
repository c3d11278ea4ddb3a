"""Which operations in float32 may round to TF32: torch's flags for the process, which count on a GPU."""

import sys

import pytest
import torch
from helpers import ALONE, SMALL, flags, shell

from unified_trainer.__main__ import main
from unified_trainer.parallel.mesh import Mesh, ParallelConfig
from unified_trainer.run.build_worker import _in_worker
from unified_trainer.run.settings.command_line import parse


@pytest.fixture(autouse=True)
def _torchs_default_again():
    yield
    Mesh.alone("cpu")


def flags_of_torch() -> tuple[bool, bool]:
    """Of matrix products and of convolutions."""
    return torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32


@pytest.mark.parametrize(
    ("where", "expected"), [("none", (False, False)), ("convolutions", (False, True)), ("all", (True, True))]
)
def test_the_setting_sets_the_flags_of_the_process(where, expected):
    Mesh.join("cpu", ParallelConfig(tf32=where))
    assert flags_of_torch() == expected
    Mesh.alone("cpu")
    assert flags_of_torch() == (False, True)


@pytest.mark.slow
def test_torchs_own_default_is_the_default():
    code = "import torch; print(torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32)"
    done = shell(sys.executable, "-c", code)
    Mesh.join("cpu", ParallelConfig())
    assert done.stdout.split() == [str(flag) for flag in flags_of_torch()]


def test_a_worker_takes_that_of_its_run():
    _in_worker(parse([*SMALL["dance_grpo"], "--parallel.tf32", "none"]), ALONE)
    assert flags_of_torch() == (False, False)


@pytest.mark.slow
def test_a_run_takes_it_from_its_settings(run_folder):
    more = flags({"steps": 1, "validate-every": 0, "device": "cpu", "parallel.tf32": "all"})
    assert main([*SMALL["finetune"], *more, "--output", str(run_folder)]) == 0
    assert flags_of_torch() == (True, True)
