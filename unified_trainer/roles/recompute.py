"""Activations that the backward pass computes again: in which blocks of a network, and which results are kept."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy

from unified_trainer.basics.ranges import Count
from unified_trainer.models.sparse_attention import KERNELS
from unified_trainer.parallel.device import NPU_ATTENTION

Recomputed = Literal["none", "selective", "full"]  # of one block
ActivationMemory = Recomputed | Count  # for all blocks of a network alike, or the number that recompute everything

PRODUCTS = (
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
)
ATTENTION = (
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_fused_attention_overrideable.default,
    torch.ops.higher_order.flex_attention,  # masked attention on CUDA, as compiled blocks call it
)
NAMED = (*NPU_ATTENTION, *KERNELS)  # attention of other packages, by the names of their operations
WIDENING = 8  # a product that has more columns than this times its inner width is cheap to repeat and costly to keep


@dataclass(frozen=True)
class Recompute:
    """A choice for each block of a network: the first `full` recompute everything, the others do as `others` says.

    The first blocks' turn in the backward pass comes last, when the activations of all other blocks are free again:
    the memory in which a block is recomputed then adds nothing to the peak.
    """

    others: Recomputed = "none"
    full: int = 0

    @classmethod
    def of_setting(cls, how: ActivationMemory, blocks: int) -> "Recompute":
        """Return the choice of a setting for a network of so many blocks; a number n is full in n, else selective."""
        if how == "full" or (isinstance(how, int) and how >= blocks):
            return cls(full=blocks)
        return cls("selective", how) if isinstance(how, int) else cls(others=how)

    @classmethod
    def least_memory(cls, several: Iterable["Recompute"]) -> "Recompute":
        """Return what suits all roles that share a network: none of them keeps more than its own setting says."""
        every = [*several]
        others: Recomputed = "selective" if any(setting.others == "selective" for setting in every) else "none"
        return cls(others, max((setting.full for setting in every), default=0))

    def of(self, block: int) -> Recomputed:
        """Return what one block recomputes, by its place in the order of the forward pass."""
        return "full" if block < self.full else self.others


def selective_policy(_context: Any, operation: Any, *inputs: Any, **_named: Any) -> CheckpointPolicy:
    """Keep attention and matrix products, which take longest to repeat, and recompute everything else.

    Products that widen their input more than WIDENING times, such as the second factor of an adapter, are as large as
    the others and take little time: they are recomputed too.
    """
    if operation in ATTENTION or operation.name() in NAMED:
        return CheckpointPolicy.MUST_SAVE
    if operation not in PRODUCTS:
        return CheckpointPolicy.PREFER_RECOMPUTE
    rows, columns = inputs[-2:]
    if isinstance(rows, Tensor) and columns.shape[-1] > WIDENING * rows.shape[-1]:
        return CheckpointPolicy.PREFER_RECOMPUTE
    return CheckpointPolicy.MUST_SAVE
