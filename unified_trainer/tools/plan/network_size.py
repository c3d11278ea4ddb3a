"""The sizes of a network, counted on its own layers without memory: weights, matrices, and the rows of a pass."""

import functools
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from unified_trainer.models.base import PassSize, Shape, VideoModel
from unified_trainer.parallel.fsdp import ROUNDED

Config = tuple[tuple[str, Any], ...]  # a config that can be the key of a cache
ModelKind = Any  # type[DiffusersModel]; mypy takes no class for a key of a cache
CodecKind = Any  # type[DiffusersCodec]


@dataclass(frozen=True)
class Matrices:
    """Linear layers and convolutions that see the same rows."""

    kind: str  # a key of PassSize.rows
    in_block: bool
    behind: bool  # whether a pass to the features does not run them
    weights: int
    adapted: int  # inputs and outputs of the layers that adapters go on


@dataclass(frozen=True)
class NetworkSize:
    """The sizes of a network on which its memory, its FLOPs and its number of weights depend."""

    width: int  # channels of a token
    ffn: int  # the most outputs that a layer of a block has for each token
    blocks: tuple[int, ...]  # weights of each
    kinds: tuple[tuple[int, ...], ...]  # numbers of the blocks that have the same layers
    weights: int  # without gates
    small: int  # weights that stay in fp32: norms and tables
    largest: int  # elements of the largest weight
    matrices: tuple[Matrices, ...]
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
    def block(self) -> int:
        """The number of weights of the largest block, without gates."""
        return max(self.blocks)

    @property
    def parameters(self) -> int:
        """The number of weights, without adapters."""
        return self.weights + self._gates

    @property
    def _gates(self) -> int:
        return self.layers * self.gates * (self.width + 1) * self.width

    def adapter(self, rank: int) -> int:
        """Return the number of weights of an adapter on the layers that the family adapts, and of new layers."""
        return rank * sum(matrix.adapted for matrix in self.matrices) + self.new + self._gates


def frozen_config(config: Mapping[str, Any]) -> Config:
    """Return a config as a key of a cache."""
    return tuple((key, _frozen(value)) for key, value in sorted(config.items()))


def _frozen(value: Any) -> Any:
    if isinstance(value, Mapping):
        return _Mapping(frozen_config(value))
    return tuple(map(_frozen, value)) if isinstance(value, list | tuple) else value


class _Mapping(tuple[tuple[str, Any], ...]):
    """A frozen mapping inside a config."""

    __slots__ = ()


def thawed(config: Config) -> dict[str, Any]:
    """Return the config of a key."""
    return {key: _thawed(value) for key, value in config}


def _thawed(value: Any) -> Any:
    if isinstance(value, _Mapping):
        return thawed(value)
    return list(map(_thawed, value)) if isinstance(value, tuple) else value


def with_layers(config: Config, layers: int) -> Config:
    """Return the config of a network with so many blocks, where it has a number of them."""
    return tuple((key, layers if key == "num_layers" else value) for key, value in config)


def laid_out(kind: ModelKind, config: Config) -> Any:
    """Return the network of a config, on the device of the context."""
    return kind.network_class(**{k: v for k, v in thawed(config).items() if not k.startswith("_")})


@functools.lru_cache(maxsize=16)
def outline_of(kind: ModelKind, config: Config) -> VideoModel:
    """Return the model of a config without memory."""
    with torch.device("meta"):
        return kind(laid_out(kind, config))


@functools.lru_cache(maxsize=16)
def size_of(kind: ModelKind, config: Config) -> NetworkSize:
    """Return the sizes of the network of a config."""
    return measured(outline_of(kind, config))


def measured(model: VideoModel) -> NetworkSize:
    """Return the sizes of a network, without adapters."""
    network, blocks = model.network, model.blocks
    place = {layer: number for number, block in enumerate(blocks) for layer in block.modules()}
    matrices: dict[tuple[str, bool, bool], tuple[int, int]] = {}
    ffn = 0
    for name, layer in network.named_modules():
        if not isinstance(layer, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d):
            continue
        kind, number = model.layer_kind(name), place.get(layer, -1)
        key = (kind, number >= 0, number > len(blocks) // 2)
        adapts = any(f".{name}".endswith(f".{suffix}") for suffix in model.adapter_layers)
        weights, adapted = matrices.get(key, (0, 0))
        outputs, inputs = layer.weight.shape[:2]
        matrices[key] = (weights + layer.weight.numel(), adapted + adapts * (outputs + inputs))
        if number >= 0 and kind == "tokens":
            ffn = max(ffn, outputs)
    sizes = [p.numel() for p in network.parameters()]
    rounded = sum(p.numel() for m in network.modules() if isinstance(m, ROUNDED) for p in m.parameters(recurse=False))
    return NetworkSize(
        width=model.feature_size,
        ffn=ffn,
        blocks=tuple(sum(p.numel() for p in block.parameters()) for block in blocks),
        kinds=_kinds(blocks),
        weights=sum(sizes),
        small=sum(sizes) - rounded,
        largest=max(sizes),
        matrices=tuple(Matrices(*key, *value) for key, value in matrices.items()),
        new=sum(p.numel() for name, p in network.named_parameters() if name.endswith(model.new_layers)),
    )


def _kinds(blocks: Iterable[nn.Module]) -> tuple[tuple[int, ...], ...]:
    kinds = defaultdict[tuple[Any, ...], list[int]](list)
    for number, block in enumerate(blocks):
        kinds[tuple((name, p.shape) for name, p in block.named_parameters())].append(number)
    return tuple(map(tuple, kinds.values()))


class _Reached(Exception):
    """The network is called: its inputs are known."""


@functools.lru_cache(maxsize=256)
def pass_size(kind: ModelKind, config: Config, shape: Shape, text_tokens: int) -> PassSize:
    """Return the size of a pass over one sample whose latents have this shape; the network does not run."""
    model, seen = outline_of(kind, config), list[PassSize]()

    def note(_network: nn.Module, inputs: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        tensors = {name: value for name, value in named.items() if isinstance(value, torch.Tensor)}
        seen.append(model.pass_size(*inputs, **tensors))
        raise _Reached

    hook = model.network.register_forward_pre_hook(note, with_kwargs=True)
    try:
        model.velocity(*model.example(shape, 1, text_tokens))
    except _Reached:
        return seen[0]
    finally:
        hook.remove()
    raise AssertionError("a velocity without a pass of the network")
