"""bf16 copies of weights that autocast would otherwise round in every pass.

FSDP2's mixed precision rounds the weights of sharded networks; this file does it where a rank holds a network whole.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


class _Linear(nn.Linear):
    in_pass: tuple[Tensor, Tensor | None]  # weight and bias

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, *self.in_pass)


class _Convolution(nn.modules.conv._ConvNd):
    in_pass: tuple[Tensor, Tensor | None]

    def forward(self, x: Tensor) -> Tensor:
        return self._conv_forward(x, *self.in_pass)


class _Conv1d(_Convolution, nn.Conv1d): ...


class _Conv2d(_Convolution, nn.Conv2d): ...


class _Conv3d(_Convolution, nn.Conv3d): ...


# Of the layers in `fsdp.ROUNDED`. Autocast goes on rounding the weights of subclasses, whose forward may be another.
KINDS = {nn.Linear: _Linear, nn.Conv1d: _Conv1d, nn.Conv2d: _Conv2d, nn.Conv3d: _Conv3d}


def keep_rounded(network: nn.Module, blocks: Sequence[nn.Module]) -> list["RoundedCopies"]:
    """Let the linear and convolutional layers of a network compute with bf16 copies of their float32 weights.

    Return the copies, those of each block and those of the rest.

    For networks that run under bf16 autocast only. Outputs and gradients are those of autocast bit for bit. A copy is
    made before the first pass after its weight changed, and no pass casts a weight. The weights stay the network's
    parameters and get the gradients, in float32. If a weight changes between a pass and its backward pass, autograd
    raises RuntimeError.
    """
    of_blocks = [_layers(block) for block in blocks]
    inside = {layer for layers in of_blocks for layer in layers}
    outside = [layer for layer in _layers(network) if layer not in inside]
    copies = [RoundedCopies(layers) for layers in (*of_blocks, outside)]
    for module, hook in zip((*blocks, network), copies, strict=True):
        module.register_forward_pre_hook(hook)
    return copies


def _layers(module: nn.Module) -> list[nn.Module]:
    return [layer for layer in module.modules() if type(layer) in KINDS and layer.weight.dtype == torch.float32]


class RoundedCopies:
    """The copies of the weights of a block's layers: a hook before each pass of the block, outside of its graph."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        for layer in layers:
            layer.__class__ = KINDS[type(layer)]
        self._layers = layers
        self._copies = {p: p.detach().bfloat16() for layer in layers for p in layer.parameters()}
        self._versions: dict[nn.Parameter, int] = {}  # none yet: the first pass rounds all
        self._trained = [p for p in self._copies if p.requires_grad]
        self._connect()

    def __call__(self, _block: nn.Module, _inputs: Any) -> None:
        self.round_changed()
        if self._trained and torch.is_grad_enabled():
            self._connect()

    @property
    def weights(self) -> Sequence[nn.Parameter]:
        """The weights in float32; as long as they do not change, only an update reads them."""
        return list(self._copies)

    @torch.no_grad()
    def round_changed(self) -> None:
        """Round the weights that have changed."""
        changed = [p for p in self._copies if self._versions.get(p) != p._version]
        if changed:
            torch._foreach_copy_([self._copies[p] for p in changed], changed)
            self._versions |= {p: p._version for p in changed}

    @torch.enable_grad()
    def _connect(self) -> None:
        """Give the layers copies with a new way for gradients; so those of several passes are added in float32."""
        copies = [self._copies[p] for p in self._trained]
        connected = dict(zip(self._trained, _Connected.apply(copies, *self._trained), strict=True))
        in_pass = {None: None, **self._copies, **connected}
        for layer in self._layers:
            layer.in_pass = in_pass[layer.weight], in_pass[layer.bias]


class _Connected(torch.autograd.Function):
    """Copies of weights in bf16; their gradients go to the weights in float32, as through a cast."""

    @staticmethod
    def forward(context: Any, copies: Sequence[Tensor], *_weights: Tensor) -> tuple[Tensor, ...]:
        context.set_materialize_grads(False)  # a layer that took no part gets no gradient
        return tuple(copy.detach() for copy in copies)

    @staticmethod
    def backward(_context: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, *(None if gradient is None else gradient.float() for gradient in gradients)
