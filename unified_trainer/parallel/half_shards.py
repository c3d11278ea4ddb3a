"""bf16 copies of the shards of a network that FSDP2 gathers in bf16, while its float32 shards are elsewhere."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from unified_trainer.parallel.fsdp import is_unit, reshard


@contextmanager
def half_shards(network: nn.Module) -> Iterator[list[Tensor]]:
    """Inside, FSDP2 gathers bf16 copies of the float32 shards that it rounds otherwise: passes have the same bits.

    Yield these shards; nothing reads them inside, where passes have no gradient. None of a network that is not sharded
    or is gathered in float32. torch has no public way to it: the names that begin with an underscore are FSDP2's own.
    """
    states: list[Any] = [module._get_fsdp_state() for module in network.modules() if is_unit(module)]
    if is_unit(network):
        network._get_fsdp_state()._lazy_init()  # which would go back to the float32 shards before the first pass
        reshard(network)
    groups = [state._fsdp_param_group for state in states if state._fsdp_param_group]
    rounded = [weight for group in groups for weight in group.fsdp_params if _is_rounded(weight)]
    shards = [weight._sharded_param_data for weight in rounded]
    for weight, shard in zip(rounded, shards, strict=True):
        weight._sharded_param_data = shard.bfloat16()
    try:
        yield shards
    finally:
        reshard(network)
        for weight, shard in zip(rounded, shards, strict=True):
            weight._sharded_param_data = shard


def _is_rounded(weight: Any) -> bool:
    return bool(weight.param_dtype == torch.bfloat16 and weight._sharded_param_data.dtype == torch.float32)
