"""Which device a run takes; torch_npu is imported when it is asked for, and only then."""

import subprocess
import sys

import pytest
import torch
from helpers import REPO, environment

from unified_trainer.__main__ import main
from unified_trainer.parallel.device import allocator_settings, can_pin, free_memory, peak_memory, pick_device

# A torch_npu that registers a device of torch's kind for backends outside of it, with none of its kernels.
STAND_IN = """
import torch

class npu(torch.nn.Module):
    chosen = None

    @staticmethod
    def is_available():
        return True

    @staticmethod
    def device_count():
        return 2

    @staticmethod
    def get_amp_supported_dtype():
        return [torch.bfloat16]

    @staticmethod
    def current_device():
        return 0

    @staticmethod
    def set_device(device):
        npu.chosen = device

    @staticmethod
    def max_memory_allocated(device):
        return 3 * 2**30

    @staticmethod
    def mem_get_info(device):
        return 5 * 2**30, 8 * 2**30

    @staticmethod
    def memory_reserved(device):
        return 2 * 2**30

    @staticmethod
    def memory_allocated(device):
        return 2**30

torch.utils.rename_privateuse1_backend("npu")
torch._register_device_module("npu", npu)
"""
WITH_NPU = """
import sys
import torch
from unified_trainer.parallel.device import BACKENDS, can_pin, free_memory, has_flex_attention, peak_memory, pick_device

assert pick_device("cpu", 1) == torch.device("cpu")
assert "torch_npu" not in sys.modules
device = pick_device("npu", 1)
assert device == torch.device("npu", 1) == torch.npu.chosen, (device, torch.npu.chosen)
assert peak_memory(device) == 3
assert free_memory(device) == 6 * 2**30
assert can_pin(device) and not has_flex_attention(device)
assert BACKENDS[device.type] == "cpu:gloo,npu:hccl"
assert torch.autocast(device.type, torch.bfloat16, enabled=False)
try:
    pick_device("npu", 2)
except ValueError as error:
    assert "local rank 2 has no device, torch sees 2" in str(error)
else:
    raise AssertionError("a rank without a device was accepted")
"""


def python(program: str, **extra: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-c", program]
    return subprocess.run(words, cwd=REPO, env=environment(**extra), capture_output=True, text=True, timeout=120)


def test_auto_is_the_cpu_where_torch_sees_nothing_else():
    assert pick_device("auto", 3) == torch.device("cpu")
    assert "torch_npu" not in sys.modules


def test_the_cpu_is_measured_by_the_process():
    cpu = torch.device("cpu")
    assert 0 < peak_memory(cpu) < 1024
    assert free_memory(cpu) > 2**20
    assert not can_pin(cpu)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("device", "said"),
    [
        ("npu", "--device npu needs torch_npu and CANN (No module named 'torch_npu'); install the extra"),
        ("cuda", "--device cuda: torch sees no CUDA device; use --device cpu"),
    ],
)
def test_a_device_that_is_not_there_is_one_clear_line(device, said, capsys, run_folder):
    assert main(["--device", device, "--output", str(run_folder)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith(f"error: {said}")


@pytest.mark.slow
def test_a_torch_npu_without_its_libraries_is_one_clear_line(tmp_path):
    """The import fails like this where CANN is not installed."""
    (tmp_path / "torch_npu.py").write_text("raise ImportError('libhccl.so: cannot open shared object file\\nmore')")
    done = python("from unified_trainer.parallel.device import pick_device; pick_device('npu', 0)", **path(tmp_path))
    last = done.stderr.strip().splitlines()[-1]
    assert (
        "--device npu needs torch_npu and CANN (libhccl.so: cannot open shared object file); install the extra" in last
    )


@pytest.mark.slow
def test_a_stand_in_npu_is_picked_measured_and_named(tmp_path):
    (tmp_path / "torch_npu.py").write_text(STAND_IN)
    done = python(WITH_NPU, **path(tmp_path))
    assert done.returncode == 0, done.stderr


def path(folder) -> dict[str, str]:
    return {"PYTHONPATH": f"{folder}:{REPO}"}


GROWING = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


@pytest.mark.parametrize(
    ("environment", "cuda", "read_by_others", "expected"),
    [
        ({"PATH": "/bin"}, "13.0", False, GROWING),
        ({"PYTORCH_ALLOC_CONF": ""}, "13.0", False, {}),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512"}, "13.0", False, {}),
        ({}, "13.0", True, {}),
        ({}, None, False, {}),
    ],
)
def test_segments_of_cuda_grow_unless_the_user_has_set_the_allocator(environment, cuda, read_by_others, expected):
    assert allocator_settings(environment, cuda, read_by_others=read_by_others) == expected


@pytest.mark.slow
@pytest.mark.skipif("_accelerator_getAllocatorSettings" not in dir(torch._C), reason="this torch does not show them")
def test_torch_reads_the_settings_of_the_allocator_after_it_is_imported():
    program = f"import os, torch; os.environ.update({GROWING}); print(torch._C._accelerator_getAllocatorSettings())"
    done = python(program)
    assert done.stdout.strip() == GROWING["PYTORCH_ALLOC_CONF"], done.stderr
