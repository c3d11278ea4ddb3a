"""Activations of one pass of a role's network, traced on tensors without memory.

The role's own code runs on few blocks; memory is linear in the number of each kind, by what the last of them keeps.
What autograd keeps is exact for the kernels of a CPU; those of other devices keep the same tensors, apart from
statistics of the attention.
"""

import functools
import json
import math
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import count, pairwise
from typing import Any

import torch
from diffusers import AutoencoderKLQwenImage, AutoencoderKLWan
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from unified_trainer.models.base import Shape
from unified_trainer.models.blueprint import Config
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.roles.adapter import AdapterConfig
from unified_trainer.roles.backbone import Backbone, hold_in_bf16
from unified_trainer.roles.recompute import Recompute
from unified_trainer.roles.role import Frozen, Precision, RoleConfig, Trainable, TrainableConfig
from unified_trainer.tools.plan.network_size import laid_out, size_of, with_layers
from unified_trainer.tools.plan.tracing import Bytes, LiveBytes, peak_of, quiet_norms

FEW = 1  # blocks of each kind that are traced
RECOMPUTED = 2  # where they are recomputed whole: the backward pass of a block alone has another peak
NOTHING = Recompute()  # also of a pass without gradient: nothing is kept, so that no recomputation matters
ALONE = Mesh(torch.device("cpu"))


@dataclass(frozen=True)
class Network:
    """A network as a role runs it."""

    kind: Any  # class of its model
    config: Config  # of the transformer
    precision: Precision
    half: bool  # whether its frozen weights are held in bf16
    layers: int  # the first blocks, which run
    rank: int = 0  # of the adapter that is trained
    trained: bool = False
    recompute: Recompute = NOTHING


@dataclass(frozen=True)
class PassBytes:
    """The memory of one pass, in bytes, besides weights and what was there before."""

    peak: float  # while it runs forward
    kept: float  # for the backward pass; its output, in a pass without gradient
    backward: float  # peak of the backward pass right after it, without gradients of weights that are there before
    first: float  # the same with the gradients of all weights, of which none is there before


@functools.lru_cache(maxsize=256)
def pass_bytes(
    network: Network, latent: Shape, text_tokens: int, samples: int, *, gradient: bool, fresh: bool
) -> PassBytes:
    """Return the memory of a pass over this many samples.

    With `fresh` a backward pass without gradients that are there before is traced too; otherwise `first` is `backward`.
    """
    how: dict[str, Any] = {"latent": latent, "text_tokens": text_tokens, "gradient": gradient, "fresh": fresh}
    if 0 < network.recompute.full < network.layers:  # linear between none and all; the backward pass begins with others
        uniform = (Recompute(others=network.recompute.others), Recompute.of_setting("full", network.layers))
        others, full = (pass_bytes(replace(network, recompute=one), samples=samples, **how) for one in uniform)
        share = network.recompute.full / network.layers
        peak, kept = (a + share * (b - a) for a, b in ((others.peak, full.peak), (others.kept, full.kept)))
        return PassBytes(peak, kept, kept + others.backward - others.kept, kept + others.first - others.kept)
    whole = size_of(network.kind, network.config)
    kinds = [[number for number in kind if number < network.layers] for kind in whole.kinds]
    own = RECOMPUTED if gradient and network.recompute.full else FEW
    few = tuple(sorted(number for kind in kinds for number in kind[: own + gradient]))
    traced = _trace(network, few, alone=samples == 1, **how)
    peak, kept, backward, fresh_backward = (peak_of(heights, samples) for heights in traced.heights)
    if not gradient:  # a block then leaves nothing but its output, which the next one replaces
        return PassBytes(peak, kept, backward, fresh_backward)
    held = [b.of(samples) - a.of(samples) for a, b in pairwise(traced.ends)]
    rest = [(few.index(kind[own]), len(kind) - own - 1) for kind in kinds if len(kind) > own]
    more = sum(number * held[at] for at, number in rest)
    weight = fresh * network.trained * torch.float32.itemsize  # of gradients, which replace what a block kept
    first = sum(number * max(held[at], weight * whole.blocks[few[at]]) for at, number in rest)
    return PassBytes(peak + more, kept + more, backward + more, fresh_backward + first)


@dataclass(frozen=True)
class _Traced:
    """The bytes of a pass with few blocks, for any number of samples above one, or for one."""

    heights: tuple[frozenset[Bytes], ...]  # the largest of each is a number of PassBytes
    ends: tuple[Bytes, ...]  # before the first block, and after each


@functools.lru_cache(maxsize=256)
def _trace(
    network: Network,
    blocks: tuple[int, ...],
    *,
    latent: Shape,
    text_tokens: int,
    alone: bool,
    gradient: bool,
    fresh: bool,
) -> _Traced:
    """Trace a pass with these blocks only, over a number of samples that tells which tensors have an axis of them.

    A sample `alone` has its own trace: an axis of one is moved without a copy.
    """
    fake, traces = FakeTensorMode(allow_non_fake_inputs=True), list[frozenset[Bytes]]()
    role = role_of(network, blocks, fake)
    model = next(iter(role.backbones.values())).model
    sizes = (*latent, text_tokens, *(p.numel() for p in role.network.parameters()))
    samples = 1 if alone else _samples(sizes)
    ends, live = [Bytes(0, 0)], LiveBytes(samples)
    for block in model.blocks:
        block.register_forward_hook(lambda *_: ends.append(live.now))
    with fake, quiet_norms():
        for before in (True, False) if gradient and fresh else (True,):
            for p in role.network.parameters():
                p.grad = torch.empty_like(p) if before and p.requires_grad else None
            live = LiveBytes(samples)
            inputs = model.example(latent, samples, text_tokens)
            with live, nullcontext() if gradient else torch.no_grad():
                velocity = role.velocity(*inputs)
                forward = frozenset(live.heights), frozenset({live.now})
                if gradient:
                    velocity.square().mean().backward()
            traces += [*forward, frozenset(live.heights)] if before else [frozenset(live.heights)]
    return _Traced((*traces, traces[-1])[:4], tuple(ends))


def _samples(sizes: Iterable[int]) -> int:
    """Return a number that has no factor in common with any of these sizes."""
    return next(number for number in count(11) if math.gcd(number, math.prod(sizes)) == 1)


def role_of(network: Network, blocks: Sequence[int], fake: FakeTensorMode) -> Trainable | Frozen:
    """A role with these blocks alone, whose weights are tensors of `fake`: a pass would convert others every time."""
    adapter = AdapterConfig(rank=network.rank)
    with torch.device("meta"):
        transformer = _with_blocks(network, blocks)
        if network.half and not network.trained:
            hold_in_bf16(transformer.requires_grad_(False))
        backbone = Backbone(
            network.kind(transformer),
            ALONE,
            trained=network.trained,
            adapters={"role": adapter} if network.rank else None,
            recompute="full" if network.recompute.full else network.recompute.others,
        )
    with fake:
        _replace_tensors(backbone.model.network)
    if not (network.trained or network.rank):
        return Frozen("role", backbone, RoleConfig(precision=network.precision))
    return Trainable("role", backbone, TrainableConfig(precision=network.precision, adapter=adapter))


def _replace_tensors(network: nn.Module) -> None:
    """Give a network on the meta device tensors of the CPU, of the mode that is on; what is trained is in float32."""
    for module in network.modules():
        for name, weight in module.named_parameters(recurse=False):
            dtype = torch.float32 if weight.requires_grad else weight.dtype
            own = torch.empty(weight.shape, dtype=dtype, device="cpu")
            setattr(module, name, nn.Parameter(own, weight.requires_grad))
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.empty(buffer.shape, dtype=buffer.dtype, device="cpu"))


def _with_blocks(network: Network, blocks: Sequence[int]) -> Any:
    size = size_of(network.kind, network.config)
    if len(size.kinds) == 1 and json.loads(network.config).get("num_layers") == size.layers:
        return laid_out(network.kind, with_layers(network.config, len(blocks)))
    transformer = laid_out(network.kind, network.config)
    dropped = {block for number, block in enumerate(network.kind(transformer).blocks) if number not in blocks}
    for part in list(transformer.modules()):
        if isinstance(part, nn.ModuleList):
            for place in reversed(range(len(part))):
                if part[place] in dropped:
                    del part[place]
    return transformer


def decode_flops(kind: Any, vae: Config, latent: Shape, *, half: bool) -> float:
    """Return the FLOPs of decoding one sample."""
    channels, frames, *size = latent
    count = functools.partial(_decoded, kind, vae, half=half, gradient=False, tile=0)
    if frames <= 4 or kind.vae_class not in (AutoencoderKLWan, AutoencoderKLQwenImage):
        return count(latent).flops
    third, fourth = (count((channels, few, *size)).flops for few in (3, 4))
    return third + (frames - 3) * (fourth - third)  # from the third on, all take as many


def decode_bytes(
    kind: Any, vae: Config, latent: Shape, samples: int, *, half: bool, gradient: bool, tile: int = 0
) -> float:
    """Return the peak memory of decoding: with gradient, everything that the backward pass needs is kept.

    Memory is linear in the number of samples, and of latent frames from the third on.
    """
    channels, frames, *size = latent
    few, more = (
        _decoded(kind, vae, (channels, min(count, frames), *size), half=half, gradient=gradient, tile=tile).peak()
        for count in (3, 4)
    )
    return samples * (few + max(0, frames - 3) * (more - few))


@functools.lru_cache(maxsize=64)
def _decoded(kind: Any, vae: Config, latent: Shape, *, half: bool, gradient: bool, tile: int) -> LiveBytes:
    """Return the bytes and FLOPs of decoding one sample.

    Without gradient on PyTorch's meta device, which takes half of the time. With gradient it counts 2.5% more there
    than on fake tensors of a CPU.
    """
    with torch.device("meta"):
        network = kind.vae_class.from_config(json.loads(vae))
    dtype = torch.bfloat16 if half else torch.float32
    nn.Module.to(network, dtype)  # here, where it copies nothing; diffusers' own warns of modules kept in float32
    network.eval().requires_grad_(False)
    live, where = LiveBytes(), FakeTensorMode(allow_non_fake_inputs=True) if gradient else torch.device("meta")
    if gradient:
        with where:
            _replace_tensors(network)
    if tile:
        kind.tile(network, tile)
    with where:
        x = torch.zeros(1, *latent, dtype=dtype, requires_grad=gradient)
        with live, nullcontext() if gradient else torch.no_grad():
            (kind.decoded(network, x).float() / 2 + 0.5).clamp(0, 1)
    return live
