"""Devices and their backends: cuda with nccl, npu with hccl, cpu with gloo. No other file names an accelerator.

`numerics/flow.py` alone says besides which of them have no float64.
"""

import itertools
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import psutil
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.versions import install

Device = Literal["auto", "cuda", "npu", "cpu"]
Attention = Literal["auto", "cudnn", "flash", "efficient", "math", "flash_3", "flash_4", "sage"]
TF32 = Literal["none", "convolutions", "all"]
ATTENTION = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
# Kernels of other packages by the names of diffusers' attention dispatcher, where they have no backward pass.
OTHER_ATTENTION = {"flash_3": "_flash_3_hub", "flash_4": "flash_4_hub", "sage": "sage_hub"}
CUDNN_FIRST = (9, 10)  # compute capabilities where torch begins with cuDNN's kernel if cuDNN is new: Hopper, Blackwell
_chosen_attention = ExitStack()  # torch keeps the order of kernels until this is closed
_chosen_other: dict[str, str] = {}  # kind of device -> the dispatcher's name of a kernel of another package
BACKENDS = {"cuda": "cpu:gloo,cuda:nccl", "npu": "cpu:gloo,npu:hccl", "cpu": "gloo"}
# Attention of torch_npu by name: these operations exist only where it is installed.
NPU_ATTENTION = ("npu::npu_fusion_attention", "npu::npu_fusion_attention_v2", "npu::npu_fusion_attention_v3")
RAY_RESOURCES = {"cuda": "GPU", "npu": "NPU"}  # names by which Ray counts devices; it does not count a CPU as one
VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES")  # variables that number devices
# Of the compiler that torch.compile calls for devices of a kind: an environment variable, and its usual names.
COMPILERS = {"cpu": ("CXX", ("g++",)), "cuda": ("CC", ("gcc", "clang"))}
# Graphs of a compiled function, of all roles together: with and without gradient, and for each adapter, shape (such as
# those of data.buckets) and kind of recomputation.
GRAPHS = 256
PRODUCTS_FROM = {"fp8": (8, 9), "nvfp4": (10, 0)}  # NVIDIA's compute capability; every device has products of int8
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # variables with its settings; the first one counts
CONTROL_BACKEND = "gloo"  # of the control group, whose collectives run on the CPUs
# Published dense bf16 matrix products of one device in TFLOP/s with fp32 sums, by words of its name; the first row that
# matches counts. Vendors' data sheets print twice these numbers where they assume 2:4 sparsity.
PEAK_TFLOPS = (
    (r"GB200", 2500.0),  # NVIDIA GB200 NVL72: 360 PFLOP/s with sparsity by 72 devices
    (r"B200", 2250.0),  # NVIDIA DGX B200: 72 PFLOP/s fp8 with sparsity by 8 devices; bf16 is half of fp8
    (r"H[12]00 NVL", 835.0),  # NVIDIA H100 and H200 data sheets: 1671 with sparsity
    (r"H100 PCIe", 756.0),  # NVIDIA H100 data sheet: 1513 with sparsity
    (r"GH200|H[128]00", 989.0),  # NVIDIA H100 and H200 data sheets, SXM: 1979 with sparsity
    (r"H20", 148.0),  # NVIDIA H20 data sheet
    (r"A[18]00", 312.0),  # NVIDIA A100 data sheet, for all its forms
    (r"A30", 165.0),  # NVIDIA A30 data sheet
    (r"A40", 149.7),  # NVIDIA A40 data sheet
    (r"A10", 125.0),  # NVIDIA A10 data sheet
    (r"L40S", 362.0),  # NVIDIA L40S data sheet: 733 with sparsity
    (r"L40", 181.0),  # NVIDIA L40 data sheet: 362 with sparsity
    (r"L4", 121.0),  # NVIDIA L4 data sheet: 242 with sparsity
    (r"RTX 5090", 209.5),  # NVIDIA RTX Blackwell architecture white paper
    (r"RTX 4090", 165.2),  # NVIDIA Ada architecture white paper, appendix A
    (r"RTX 3090", 71.0),  # NVIDIA GA102 white paper, appendix A
    (r"MI300X|MI325X", 1307.4),  # AMD Instinct MI300X and MI325X data sheets
)
CARD_KIND = "cuda"  # what torch calls each of them


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


def peak_flops(name: str) -> float | None:
    """Return the published dense bf16 FLOP/s of the device of this name; None if unknown, or for a part of a device."""
    if re.search(r"\b(?:MIG|Laptop|4090 D)\b", name):
        return None
    return next((1e12 * peak for words, peak in PEAK_TFLOPS if re.search(rf"\b(?:{words})\b", name)), None)


def device_name(device: torch.device) -> str:
    """Return the name that the device's driver gives it; that of a CPU is "cpu"."""
    return "cpu" if device.type == "cpu" else torch.get_device_module(device).get_device_name(device)


def driver_versions() -> dict[str, str | None]:
    """Return the versions of the accelerator libraries that torch was built with."""
    return {"cuda": torch.version.cuda, "hip": torch.version.hip}


class Timeline:
    """Points in time and the seconds between them.

    A point of an accelerator is an event in its queue: marking one waits for nothing, and the seconds between two are
    those that the device took, or waited for more work, between the ends of the work queued before them.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._points: list[Any] = []

    def mark(self) -> None:
        """Add a point."""
        if self._device.type == "cpu":
            self._points.append(time.perf_counter())
            return
        event = torch.get_device_module(self._device).Event(enable_timing=True)
        event.record()
        self._points.append(event)

    def seconds(self) -> list[float]:
        """Return the seconds between neighboring points; wait until the device has reached the last."""
        if self._device.type == "cpu":
            return [after - before for before, after in itertools.pairwise(self._points)]
        self._points[-1].synchronize()
        return [before.elapsed_time(after) / 1000 for before, after in itertools.pairwise(self._points)]


def attention_order(choice: Attention, device: torch.device) -> Sequence[str]:
    """Return the kernels of unmasked attention by name, to be tried in this order; none for torch's own order.

    The first that supports a call's precision, shape and mask computes it: the text encoder and the VAE in float32 need
    another one than a transformer in bf16. `auto` is torch's order, which begins with cuDNN's kernel on Hopper and
    Blackwell if cuDNN is newer than 9.15. A kernel of another package computes passes in bf16 without gradient, and
    torch's order the others. UserError for a kernel that the device cannot have or that is not installed.
    """
    if choice == "auto":
        return []
    if choice == "math":
        return ["math"]
    if choice in OTHER_ATTENTION and device.type == "cuda":
        _check_other(choice)
        return [choice]
    here = ["flash", "math"] if device.type == "cpu" else ["cudnn", "flash", "efficient", "math"]
    if choice not in here or device.type not in ("cpu", "cuda"):
        raise UserError(f"parallel.attention {choice} does not run on {device.type}: leave it at auto")
    return [choice, *(name for name in here if name != choice)]


def use_attention(choice: Attention, device: torch.device) -> None:
    """Let scaled_dot_product_attention try kernels in `attention_order`, in the whole process, until the next call."""
    order = [ATTENTION[name] for name in attention_order(choice, device) if name in ATTENTION]
    _chosen_attention.close()
    _chosen_other.clear()
    if choice in OTHER_ATTENTION:
        _chosen_other[device.type] = OTHER_ATTENTION[choice]
    if order:
        _let_torch_choose(device)
        _chosen_attention.enter_context(sdpa_kernel(order, set_priority=True))


def _let_torch_choose(device: torch.device) -> None:
    """Let torch choose a kernel: the first time that it does on CUDA it sets its own order, over one set before."""
    if device.type == "cuda":
        query = torch.empty(1, 1, 1, 64, device=device, dtype=torch.bfloat16)
        torch._fused_sdp_choice(query, query, query)


def other_attention(device: torch.device) -> str:
    """Return the name, in diffusers' dispatcher, of the kernel of another package that is chosen, or "" for none.

    It is chosen for the devices of one kind: what a process computes on its CPU besides has torch's kernels.
    """
    return _chosen_other.get(device.type, "")


def _check_other(choice: str) -> None:
    """Raise UserError unless diffusers can use the kernel, which it fetches from the hub here."""
    from diffusers.models.attention_dispatch import attention_backend  # seconds, for those who choose such a kernel

    try:
        with attention_backend(OTHER_ATTENTION[choice]):
            pass
    except Exception as error:  # of other packages, and of the network
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        way_out = f"{install('kernels')}, or leave it at auto"
        raise UserError(f"parallel.attention {choice}: {reason}; {way_out}") from error


def attention_in_words(choice: Attention, device: torch.device) -> tuple[str, str]:
    """Return what computes unmasked attention in bf16 as `use_attention` has set it, and a warning or "".

    The warning is for Hopper and Blackwell, where torch takes FlashAttention 2 in silence if cuDNN is 9.15 or older.
    """
    order = ", ".join(attention_order(choice, device)) or "torch's own"
    if device.type not in ("cpu", "cuda"):
        return f"order of kernels: {order}", ""
    query = torch.empty(1, 1, 1024, 128, device=device, dtype=torch.bfloat16, requires_grad=True)
    taken = SDPBackend(torch._fused_sdp_choice(query, query, query))
    kernel = next(name for name, backend in ATTENTION.items() if backend == taken)
    if choice in OTHER_ATTENTION:
        return f"{choice} without gradient, {kernel} with", ""
    first = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] in CUDNN_FIRST
    if kernel == "cudnn" or not first or choice not in ("auto", "cudnn"):
        return f"{kernel} (order: {order})", ""
    return f"{kernel} (order: {order})", (
        f"warning: attention is computed by {kernel}, which takes up to 1.8 times as long here as cuDNN's kernel: "
        "torch chooses that with a cuDNN above 9.15, so install a newer nvidia-cudnn; this one is "
        f"{torch.backends.cudnn.version()}"
    )


def rounds_products() -> bool:
    """Return whether matrix products in float32 round their inputs to TF32."""
    return torch.backends.cuda.matmul.allow_tf32


def has_channels_last(kind: str) -> bool:
    """Return whether devices of a kind support torch's channels_last_3d."""
    return kind != "npu"


def has_tf32(device: torch.device) -> bool:
    """Return whether `use_tf32` counts on this device."""
    return device.type == "cuda"


def use_tf32(where: TF32) -> None:
    """Set which float32 operations round their inputs to TF32 on a GPU, in the whole process, until the next call."""
    torch.backends.cuda.matmul.allow_tf32 = where == "all"
    torch.backends.cudnn.allow_tf32 = where != "none"


def has_sparse_kernels(kind: str) -> bool:
    """Whether the kernels of fastvideo-kernel run on devices of this kind."""
    return kind == "cuda"


def has_products(kind: str, device: torch.device) -> bool:
    """Whether the device multiplies numbers of this kind, such as fp8."""
    if kind not in PRODUCTS_FROM:
        return True
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= PRODUCTS_FROM[kind]


def has_flex_attention(device: torch.device) -> bool:
    """Return whether masked attention should use FlexAttention; other devices use a dense mask."""
    return device.type == "cuda"


def optimizer_kernels(device: torch.device) -> dict[str, bool]:
    """Return how torch's optimizers work on weights of this device: in one kernel for many weights where it has one.

    By itself torch does so for plain tensors only, and updates sharded weights one after the other.
    """
    return {"cpu": {}, "cuda": {"fused": True}}.get(device.type, {"foreach": True})


def allocator_settings(environment: Mapping[str, str], cuda: str | None, *, read_by_others: bool) -> dict[str, str]:
    """Return the variables that make the allocator of CUDA devices grow its segments, for less fragmentation.

    torch reads them when it allocates first. There are none where torch has no CUDA, where the user has set the
    allocator, and where other processes read its memory, which they cannot if it grows.
    """
    if cuda is None or read_by_others or any(name in environment for name in ALLOCATOR):
        return {}
    return {ALLOCATOR[0]: "expandable_segments:True"}


def set_allocator(*, read_by_others: bool) -> None:
    """Set torch's allocator by `allocator_settings`; call it before anything is allocated on a device."""
    os.environ.update(allocator_settings(os.environ, torch.version.cuda, read_by_others=read_by_others))


def synchronize(device: torch.device) -> None:
    """Wait until a device has done all that it was given; a CPU does everything at once."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def can_pin(device: torch.device) -> bool:
    """Return whether CPU memory can be pinned for copies to this device; to "meta" nothing is copied."""
    return device.type not in ("cpu", "meta")


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


@contextmanager
def fitting(what: str, way_out: str) -> Iterator[None]:
    """Turn an out-of-memory error into a UserError about `what`, which one setting makes smaller: `way_out`."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        why = str(error).partition("\n")[0].rpartition("] ")[2]  # without torch's own check
        raise UserError(f"{what} does not fit in memory ({why}): {way_out}") from error


def out_of_memory(error: Exception) -> bool:
    """Return whether an allocation failed, on an accelerator or in CPU memory."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(error)


def _import_npu() -> None:
    try:
        import torch_npu  # noqa: F401
    except (ImportError, OSError, RuntimeError) as error:
        why = str(error).splitlines()[0]
        raise UserError(
            f"--device npu needs torch_npu and CANN ({why}); install the extra: {install('npu')}"
        ) from error
