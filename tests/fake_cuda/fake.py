"""A GPU that only has shapes: torch's CUDA build under FakeTensorMode, on a machine with or without a GPU.

Devices, dtypes and the choice of operations are those of CUDA. No value exists, so that reading one is an error outside
of `Reading`. The backward pass asks CUDA for its devices and streams: driver.c answers, which must be preloaded.
"""

import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import unified_trainer
from unified_trainer.models import masked_attention
from unified_trainer.roles import blocks

with warnings.catch_warnings():  # of torch about itself
    warnings.simplefilter("ignore", DeprecationWarning)
    from torch._inductor import compile_fx
    from torch._inductor import config as inductor_config
    from torch._inductor.exc import InductorError
    from torch._inductor.scheduler import ExternKernelSchedulerNode, NopKernelSchedulerNode, Scheduler

CUDA = torch.device("cuda", 0)
SCALARS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default)
H100 = SimpleNamespace(  # what Inductor asks the driver for
    name="NVIDIA H100",
    major=9,
    minor=0,
    multi_processor_count=132,
    total_memory=80 * 2**30,
    warp_size=32,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    shared_memory_per_block_optin=232448,
    shared_memory_per_multiprocessor=233472,
)


@contextmanager
def fake_cuda() -> Iterator[None]:
    """New tensors have no memory, and devices "cuda" are there."""
    with pytest.MonkeyPatch.context() as patches, FakeTensorMode(allow_non_fake_inputs=True):
        patches.setattr("torch.cuda.amp.common.amp_definitely_not_available", lambda: False)
        patches.setattr(torch.cuda, "is_bf16_supported", lambda *_, **__: True)
        patches.setattr(masked_attention, "scaled_dot_product_attention", _attention)
        patches.setattr(torch.nn.functional, "scaled_dot_product_attention", _autocast)
        patches.setattr(torch.cuda, "Event", Moment)
        for name in ("tensor", "as_tensor"):
            patches.setattr(torch, name, _from_cpu(getattr(torch, name)))
        patches.setattr(torch.Tensor, "new_tensor", _like)
        patches.setattr(torch._C, "_select_conv_backend", lambda *_, **__: torch._C._ConvBackend.Cudnn)
        patches.setattr(torch.cuda, "is_available", lambda: False)  # nothing is allocated on the device of driver.c
        yield


class Reading(TorchDispatchMode):
    """Inside `fake_cuda`: tensors of the CPU have memory, and numbers that are read from the GPU are made up.

    `reads` counts by file of the package what the program waited for. Truth values are true, integers 1, and other
    numbers random.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reads: Counter[str] = Counter()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        place = kwargs.get("device") and torch.device(kwargs["device"]).type
        there = any(isinstance(leaf, FakeTensor) for leaf in tree_leaves((args, kwargs)))
        copies = operation is torch.ops.aten._to_copy.default
        if copies and place == "cuda" and not there:
            return torch.empty(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype, device=CUDA)
        reads = there and (
            operation in SCALARS
            or (copies and place == "cpu")
            or (operation is torch.ops.aten.copy_.default and not isinstance(args[0], FakeTensor))
        )
        if (there or place == "cuda") and not reads:
            return operation(*args, **kwargs)
        with unset_fake_temporarily():
            return operation(*map(self._read, args), **kwargs) if reads else operation(*args, **kwargs)

    def _read(self, value: Any) -> Any:
        """Make up the values of a tensor of the GPU."""
        if not isinstance(value, FakeTensor):
            return value
        frame, package = sys._getframe(1), Path(unified_trainer.__file__).parent
        while package not in Path(frame.f_code.co_filename).parents:
            frame = frame.f_back
        self.reads[str(Path(frame.f_code.co_filename).relative_to(package))] += 1
        draw = torch.rand if value.is_floating_point() else torch.ones
        return draw(value.shape, dtype=value.dtype)


class Moment:
    """Stands for an event in a queue of the GPU."""

    def __init__(self, **_: object) -> None: ...

    def record(self) -> None: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, _other: "Moment") -> float:
        return 1.0


def _from_cpu(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Make a tensor of numbers on the CPU before it goes to a device: torch would make it on a real one."""
    return lambda data, *, device=None, **options: make(data, **options).to(device)


def _like(tensor: torch.Tensor, data: Any) -> torch.Tensor:
    return torch.tensor(data, dtype=tensor.dtype, device=tensor.device)


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Call the kernel that CUDA has for it: without a driver torch would choose the one of plain products."""
    assert dropout_p == 0 and not is_causal and not enable_gqa
    if attn_mask is None:
        return torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, scale=scale)[0]
    if attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(~attn_mask, -torch.inf)
    bias = attn_mask.to(query.dtype)  # as autocast does
    bias = bias.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    kept = torch.is_grad_enabled()
    return torch.ops.aten._scaled_dot_product_efficient_attention(query, key, value, bias, kept, scale=scale)[0]


def _autocast(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> torch.Tensor:
    """Bring the inputs to the dtype of autocast before, as CUDA's autocast does for attention."""
    if torch.is_autocast_enabled("cuda"):
        query, key, value = (part.to(torch.get_autocast_dtype("cuda")) for part in (query, key, value))
    return _attention(query, key, value, **options)


def moved(network: nn.Module) -> nn.Module:
    """Give a network of the meta device weights and buffers on the fake GPU."""
    for module in network.modules():
        for name, p in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(torch.empty(p.shape, dtype=p.dtype, device=CUDA)))
        for name, table in list(module.named_buffers(recurse=False)):
            setattr(module, name, torch.empty(table.shape, dtype=table.dtype, device=CUDA))
    return network


class _Scheduled(Exception):
    """Inductor has chosen its kernels; to write them it would need the driver."""


class Fused:
    """A back end of torch.compile that counts the kernels into which Inductor fuses a graph for an H100.

    `unfused` are the bytes that kernels other than products and attention read and write. The graph itself runs as it
    is.
    """

    def __init__(self) -> None:
        self.launched, self.unfused, self.graphs = 0, 0, 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: Sequence[torch.Tensor]) -> Callable[..., Any]:
        self.graphs += 1
        with pytest.MonkeyPatch.context() as patches, inductor_config.patch(fx_graph_cache=False, compile_threads=1):
            patches.setattr(torch.cuda, "_get_device_properties", lambda *_: H100, raising=False)
            patches.setattr(torch.cuda, "get_device_capability", lambda *_: (H100.major, H100.minor))
            patches.setattr(torch.cuda, "device_count", lambda: 1)
            patches.setattr(torch.cuda, "current_device", lambda: 0)
            patches.setattr(torch.cuda, "_lazy_init", lambda: None)
            patches.setattr(compile_fx, "_check_triton_bf16_support", lambda _: None)
            patches.setattr("torch._inductor.scheduler.has_triton", lambda *_: True)
            patches.setattr(Scheduler, "codegen", lambda scheduler: self._count(scheduler))
            with pytest.raises(InductorError, match="_Scheduled"):
                compile_fx.compile_fx(graph, inputs, config_patches=blocks.INDUCTOR)
        return graph.forward

    def _count(self, scheduler: Scheduler) -> None:
        for node in scheduler.nodes:
            self.launched += not isinstance(node, NopKernelSchedulerNode)
            if not isinstance(node, (NopKernelSchedulerNode, ExternKernelSchedulerNode)):
                self.unfused += node.get_read_write_buffers_sizes()
        raise _Scheduled


class Kernels(TorchDispatchMode):
    """Counts the operations that launch kernels and the bytes that they read and write, each operand once.

    Operations that return a view launch none. Matrix products and attention are counted apart.
    """

    PRODUCTS = ("mm", "addmm", "bmm", "convolution", "scaled_dot_product")

    def __init__(self) -> None:
        super().__init__()
        self.launched, self.unfused, self.attention, self.casts = 0, 0, [], []
        self.norms, self.updates = 0, 0  # fused

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        out = operation(*args, **(kwargs or {}))
        if operation.namespace != "aten":  # questions about a tensor
            return out
        name = operation.name().removeprefix("aten::")
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if "scaled_dot_product" in name:
            self.attention.append((name, *((one.dtype, one.shape, one.stride()) for one in tensors)))
        self.norms += name == "_fused_rms_norm"
        self.updates += name == "_fused_adamw_"
        if operation is torch.ops.aten._to_copy.default and isinstance(args[0], torch.nn.Parameter):
            self.casts.append(tuple(args[0].shape))
        if any(one.alias_info is not None and not one.alias_info.is_write for one in operation._schema.returns):
            return out
        if any(one.device.type == "cuda" for one in tensors):
            self.launched += 1
            results = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
            if not any(word in name for word in self.PRODUCTS):
                self.unfused += sum(one.numel() * one.element_size() for one in (*tensors, *results))
        return out
