"""A GPU that only has shapes: torch's CUDA build under FakeTensorMode, on a machine with or without a GPU.

Devices, dtypes and the choice of operations are those of CUDA. No value exists, so that reading one is an error; there
is no backward pass, because autograd asks the driver for its devices.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from unified_trainer.models import masked_attention
from unified_trainer.roles.rounded_weights import _Connected

CUDA = torch.device("cuda", 0)


@contextmanager
def fake_cuda() -> Iterator[None]:
    """New tensors have no memory, and devices "cuda" are there."""
    with pytest.MonkeyPatch.context() as patches, FakeTensorMode():
        patches.setattr("torch.cuda.amp.common.amp_definitely_not_available", lambda: False)
        patches.setattr(torch.cuda, "is_bf16_supported", lambda *_, **__: True)
        patches.setattr(masked_attention, "scaled_dot_product_attention", _flash)
        patches.setattr(_Connected, "apply", _leaves)
        yield


def _flash(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: None = None) -> torch.Tensor:
    """Call FlashAttention: without a driver torch would choose the math kernel."""
    assert attn_mask is None
    return torch.ops.aten._scaled_dot_product_flash_attention(query, key, value)[0]


def _leaves(copies: Sequence[torch.Tensor], *_weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Stand for the way of gradients to the weights: autograd functions of Python ask the driver for its streams."""
    return tuple(copy.detach().requires_grad_() for copy in copies)


def moved(network: nn.Module) -> nn.Module:
    """Give a network of the meta device weights and buffers on the fake GPU."""
    for module in network.modules():
        for name, p in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(torch.empty(p.shape, dtype=p.dtype, device=CUDA)))
        for name, table in list(module.named_buffers(recurse=False)):
            setattr(module, name, torch.empty(table.shape, dtype=table.dtype, device=CUDA))
    return network


class Kernels(TorchDispatchMode):
    """Counts the operations that launch kernels and the bytes that they read and write, each operand once.

    Operations that return a view launch none. Matrix products and attention are counted apart.
    """

    PRODUCTS = ("mm", "addmm", "bmm", "convolution", "scaled_dot_product")

    def __init__(self) -> None:
        super().__init__()
        self.launched, self.unfused, self.attention, self.casts, self.norms = 0, 0, [], [], 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        out = operation(*args, **(kwargs or {}))
        if operation.namespace != "aten":  # questions about a tensor
            return out
        name = operation.name().removeprefix("aten::")
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if "scaled_dot_product" in name:
            self.attention.append((name, *((one.dtype, one.shape, one.stride()) for one in tensors)))
        self.norms += name == "_fused_rms_norm"
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
