"""The only file that names a device: cuda with nccl, npu with hccl, cpu with gloo."""

from typing import Literal

import psutil
import torch

Device = Literal["auto", "cuda", "npu", "cpu"]
BACKENDS = {"cuda": "cpu:gloo,cuda:nccl", "npu": "cpu:gloo,npu:hccl", "cpu": "gloo"}
CONTROL_BACKEND = "gloo"  # between the ranks' CPUs, beside what their devices exchange


def pick_device(name: Device, local_rank: int) -> torch.device:
    """The device of this process; `auto` takes an accelerator that torch sees by itself, and imports none."""
    if name == "npu":
        _import_npu()
    if name == "auto":
        seen = torch.accelerator.current_accelerator(check_available=True)
        name = seen.type if seen is not None and seen.type in BACKENDS else "cpu"
    if name == "cpu":
        return torch.device(name)
    torch_device = torch.get_device_module(name)
    if not torch_device.is_available():
        raise ValueError(f"--device {name}: torch sees no {name.upper()} device; use --device cpu")
    device = torch.device(name, local_rank)
    torch_device.set_device(device)
    return device


def peak_memory(device: torch.device) -> float:
    """Peak memory in GiB: allocated on an accelerator, resident on a CPU."""
    if device.type != "cpu":
        return torch.get_device_module(device).max_memory_allocated(device) / 2**30
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def has_flex_attention(device: torch.device) -> bool:
    """Whether FlexAttention pays on this device; elsewhere attention takes a dense mask."""
    return device.type == "cuda"


def can_pin(device: torch.device) -> bool:
    """Whether CPU memory can be pinned for copies to this device."""
    return device.type != "cpu"


def free_memory(device: torch.device) -> int:
    """Bytes that can still be allocated, those that torch holds without using them among them."""
    if device.type == "cpu":
        return psutil.virtual_memory().available
    torch_memory = torch.get_device_module(device)
    held = torch_memory.memory_reserved(device) - torch_memory.memory_allocated(device)
    return torch_memory.mem_get_info(device)[0] + held


def require_memory(needed: int, device: torch.device, what: str, way_out: str) -> None:
    """ValueError if `needed` bytes cannot be allocated, before anybody tries."""
    free = free_memory(device)
    if needed > free:
        raise ValueError(f"{what} needs {needed / 2**30:.2f} GiB, but {device} has {free / 2**30:.2f} free: {way_out}")


def _import_npu() -> None:
    try:
        import torch_npu  # noqa: F401
    except (ImportError, OSError, RuntimeError) as error:
        why = str(error).splitlines()[0]
        raise ValueError(
            f"--device npu needs torch_npu and CANN ({why}); install the extra: pip install '.[npu]'"
        ) from error
