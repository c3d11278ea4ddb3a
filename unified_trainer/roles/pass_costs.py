"""The FLOPs of the passes of a role's network, forward and backward, with the adapter that runs."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from unified_trainer.models.base import VideoModel
from unified_trainer.models.pass_flops import PassCount, count_pass


@dataclass(frozen=True)
class PassCost:
    """The tokens and FLOPs of a pass over whole samples."""

    tokens: int
    forward: int
    backward: int


# Counts of this process by architecture and shapes of inputs: roles of one architecture share them.
_PLAIN: dict[tuple[Any, ...], PassCount] = {}


class PassCosts:
    """Counts passes on a copy of a model without memory, once for each architecture and shape of their inputs.

    The gradient of a product takes as many FLOPs as the product for its input, and as many for its matrix where that is
    trained; attention takes twice its own. What activation checkpointing recomputes is not counted.
    """

    def __init__(self, model: VideoModel) -> None:
        """Copy a model that has no adapters and whose weights are not sharded."""
        tensors = (*model.network.parameters(), *model.network.buffers())
        self._model, self._depth = model, len(model.blocks)
        self._copy = copy.deepcopy(model, {id(x): _without_memory(x) for x in tensors})
        described = type(model.network).__module__.startswith("diffusers.")  # by its config; others share nothing
        self._architecture = (type(model), model.network.to_json_string() if described else object())
        self._costs: dict[tuple[Any, ...], PassCost] = {}

    def of(self, inputs: tuple[Any, ...], named: Mapping[str, Any], adapter: str, *, to_features: bool) -> PassCost:
        """Return the cost of the pass of the network that just ran; UserError where it cannot be counted.

        The backward pass of one `to_features` begins behind the middle block.
        """
        shapes = tuple(x.shape if isinstance(x, Tensor) else x for x in tree_leaves((*inputs, *named.items())))
        shorter, share = len(self._model.blocks) < self._depth, self._model.pass_share
        key = (shapes, adapter, shorter, to_features, *share.items())
        if key not in self._costs:
            plain = (*self._architecture, shapes)
            if plain not in _PLAIN:
                _PLAIN[plain] = self._counted(inputs, dict(named))
            count = _PLAIN[plain].scaled(share)
            self._costs[key] = self._cost(count, adapter, shorter=shorter, to_features=to_features)
        return self._costs[key]

    def _counted(self, *given: Any) -> PassCount:
        held = {name: x for name, x in vars(self._model).items() if isinstance(x, Tensor)}  # as the span of a flow map
        with _disable_current_modes():  # they would see the tensors of the copy
            (inputs, named), held = tree_map_only(Tensor, _without_memory, (given, held))
            vars(self._copy).update(held)
            return count_pass(self._copy, lambda: self._copy.network(*inputs, **named))

    def _cost(self, count: PassCount, adapter: str, *, shorter: bool, to_features: bool) -> PassCost:
        modules, middle = dict(self._model.network.named_modules()), self._depth // 2
        forward = backward = 0
        for part in count.parts:
            if shorter and middle < part.block < self._depth:
                continue
            with_adapter = f"{part.module}.base_layer"  # peft's name
            base = modules[with_adapter if with_adapter in modules else part.module]
            products = [(part.products, any(p.requires_grad for p in base.parameters(recurse=False)))]
            for factor in ("lora_A", "lora_B"):
                if layer := modules.get(f"{part.module}.{factor}.{adapter}"):
                    products.append((part.products * _size(layer) // _size(base), True))
            forward += part.attention + sum(flops for flops, _ in products)
            if not to_features or part.block <= middle:
                backward += 2 * part.attention + sum((1 + trained) * flops for flops, trained in products)
        return PassCost(count.tokens, forward, backward)


def _size(layer: nn.Module) -> int:
    return layer.get_parameter("weight").numel()


def _without_memory(x: Tensor) -> Tensor:
    dtype = torch.float32 if x.is_floating_point() else x.dtype  # weights of the copy are in float32 too
    empty = torch.empty(x.shape, dtype=dtype, device="meta")
    return nn.Parameter(empty, requires_grad=False) if isinstance(x, nn.Parameter) else empty
