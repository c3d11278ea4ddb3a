"""Devices and their backends: cuda with nccl, npu with hccl, cpu with gloo. No other file names a device."""

from typing import Literal

import psutil
import torch

from unified_trainer.errors import UserError

Device = Literal["auto", "cuda", "npu", "cpu"]
BACKENDS = {"cuda": "cpu:gloo,cuda:nccl", "npu": "cpu:gloo,npu:hccl", "cpu": "gloo"}
CONTROL_BACKEND = "gloo"  # of the control group, whose collectives run on the CPUs


def pick_device(name: Device, local_rank: int) -> torch.device:
    """Return the device of this process and select it in torch.

    `auto` takes an accelerator that torch already knows, else the CPU; only `npu` imports torch_npu.
    Raises UserError if the device, or one for this local rank, is not available.
    """
    if name == "npu":
        _import_npu()
    if name == "auto":
        seen = torch.accelerator.current_accelerator(check_available=True)
        name = seen.type if seen is not None and seen.type in BACKENDS else "cpu"
    if name == "cpu":
        return torch.device(name)
    torch_device = torch.get_device_module(name)
    if not torch_device.is_available():
        raise UserError(f"--device {name}: torch sees no {name.upper()} device; use --device cpu")
    if local_rank >= torch_device.device_count():
        raise UserError(
            f"--device {name}: local rank {local_rank} has no device, torch sees {torch_device.device_count()}; "
            "start at most one rank per device"
        )
    device = torch.device(name, local_rank)
    torch_device.set_device(device)
    return device


def peak_memory(device: torch.device) -> float:
    """Return this process's peak memory in GiB: allocated by torch on an accelerator, resident on a CPU."""
    if device.type != "cpu":
        return torch.get_device_module(device).max_memory_allocated(device) / 2**30
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def has_flex_attention(device: torch.device) -> bool:
    """Return whether masked attention should use FlexAttention; other devices use a dense mask."""
    return device.type == "cuda"


def can_pin(device: torch.device) -> bool:
    """Return whether CPU memory can be pinned for copies to this device."""
    return device.type != "cpu"


def free_memory(device: torch.device) -> int:
    """Return the bytes that can still be allocated, including those in torch's cache."""
    if device.type == "cpu":
        return psutil.virtual_memory().available
    torch_memory = torch.get_device_module(device)
    cached = torch_memory.memory_reserved(device) - torch_memory.memory_allocated(device)
    return torch_memory.mem_get_info(device)[0] + cached


def require_memory(needed: int, device: torch.device, what: str, way_out: str) -> None:
    """Raise UserError if fewer than `needed` bytes are free; the message is about `what` and ends with `way_out`."""
    free = free_memory(device)
    if needed > free:
        raise UserError(f"{what} needs {needed / 2**30:.2f} GiB, but {device} has {free / 2**30:.2f} free: {way_out}")


def _import_npu() -> None:
    try:
        import torch_npu  # noqa: F401
    except (ImportError, OSError, RuntimeError) as error:
        why = str(error).splitlines()[0]
        raise UserError(
            f"--device npu needs torch_npu and CANN ({why}); install the extra: pip install '.[npu]'"
        ) from error
