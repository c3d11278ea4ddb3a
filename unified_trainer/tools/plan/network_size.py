"""The sizes of a network, counted on its own layers without memory: weights, matrices, and the FLOPs of a pass."""

import functools
import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from unified_trainer.models.base import Shape, VideoModel
from unified_trainer.models.blueprint import Config, frozen_config
from unified_trainer.models.pass_flops import PassCount, count_pass
from unified_trainer.parallel.fsdp import ROUNDED


@dataclass(frozen=True)
class Matrix:
    """The matrix of a linear layer or convolution."""

    weights: int
    outputs: int
    adapted: int  # inputs and outputs, of a layer that adapters go on


@dataclass(frozen=True)
class NetworkSize:
    """The sizes of a network on which its memory, its FLOPs and its number of weights depend."""

    width: int  # channels of a token
    blocks: tuple[int, ...]  # weights of each
    kinds: tuple[tuple[int, ...], ...]  # numbers of the blocks that have the same layers
    weights: int  # without gates
    small: int  # weights that stay in fp32: norms and tables
    largest: int  # elements of the largest weight
    matrices: Mapping[str, Matrix]  # by the name of their layer
    new: int  # weights of layers that a folder may lack, which are trained beside an adapter
    gates: int = 0  # width x width layers of a block that sparse attention adds; they are trained beside an adapter

    @property
    def layers(self) -> int:
        return len(self.blocks)

    @property
    def layers_to_features(self) -> int:
        """The number of blocks up to the middle one, whose output the features are."""
        return self.layers // 2 + 1

    @property
    def parameters(self) -> int:
        """The number of weights, without adapters."""
        return self.weights + self._gates

    @property
    def _gates(self) -> int:
        return self.layers * self.gates * (self.width + 1) * self.width

    def adapter(self, rank: int) -> int:
        """Return the number of weights of an adapter on the layers that the family adapts, and of new layers."""
        return rank * sum(matrix.adapted for matrix in self.matrices.values()) + self.new + self._gates


def with_layers(config: Config, layers: int) -> Config:
    """Return the config of a network with so many blocks."""
    return frozen_config(json.loads(config) | {"num_layers": layers})


def laid_out(kind: Any, config: Config) -> Any:
    """Return the network of a config, on the device of the context."""
    return kind.network_class.from_config(json.loads(config))


@functools.lru_cache(maxsize=16)
def outline_of(kind: Any, config: Config) -> VideoModel:
    """Return the model of a config without memory."""
    with torch.device("meta"):
        return kind(laid_out(kind, config))


@functools.lru_cache(maxsize=16)
def size_of(kind: Any, config: Config) -> NetworkSize:
    """Return the sizes of the network of a config."""
    return measured(outline_of(kind, config))


def measured(model: VideoModel) -> NetworkSize:
    """Return the sizes of a network, without adapters."""
    network, blocks = model.network, model.blocks
    matrices = dict[str, Matrix]()
    for name, layer in network.named_modules():
        if isinstance(layer, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d):
            adapts = any(f".{name}".endswith(f".{suffix}") for suffix in model.adapter_layers)
            outputs, inputs = layer.weight.shape[:2]
            matrices[name] = Matrix(layer.weight.numel(), outputs, adapts * (outputs + inputs))
    kinds = defaultdict[tuple[Any, ...], list[int]](list)
    for number, block in enumerate(blocks):
        kinds[tuple((name, p.shape) for name, p in block.named_parameters())].append(number)
    sizes = [p.numel() for p in network.parameters()]
    rounded = sum(p.numel() for m in network.modules() if isinstance(m, ROUNDED) for p in m.parameters(recurse=False))
    return NetworkSize(
        width=model.feature_size,
        blocks=tuple(sum(p.numel() for p in block.parameters()) for block in blocks),
        kinds=tuple(map(tuple, kinds.values())),
        weights=sum(sizes),
        small=sum(sizes) - rounded,
        largest=max(sizes),
        matrices=matrices,
        new=sum(p.numel() for name, p in network.named_parameters() if name.endswith(model.new_layers)),
    )


@functools.lru_cache(maxsize=256)
def plain_pass(kind: Any, config: Config, shape: Shape, text_tokens: int) -> PassCount:
    """Return the FLOPs of a forward pass over one sample whose latents have this shape."""
    model = outline_of(kind, config)
    return count_pass(model, lambda: model.velocity(*model.example(shape, 1, text_tokens)))
