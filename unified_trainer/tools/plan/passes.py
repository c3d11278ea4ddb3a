"""Activations of one pass of a role's network, traced on tensors without memory.

The role's own code runs on two and on three blocks; memory is linear in their number. What autograd keeps is exact for
the kernels of a CPU; those of other devices keep the same tensors, apart from statistics of the attention.
"""

import functools
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from diffusers import AutoencoderKLQwenImage, AutoencoderKLWan, QwenImageTransformer2DModel, WanTransformer3DModel
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from unified_trainer.basics.types import Condition
from unified_trainer.models.base import VideoModel
from unified_trainer.models.qwen_image.model import QwenImageModel
from unified_trainer.models.wan.image_model import ImageChannelsWanModel
from unified_trainer.models.wan.model import WanModel
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.roles.adapter import AdapterConfig
from unified_trainer.roles.backbone import Backbone, hold_in_bf16
from unified_trainer.roles.recompute import Recompute
from unified_trainer.roles.role import Frozen, Precision, RoleConfig, Trainable, TrainableConfig
from unified_trainer.tools.plan.flops import CLIP_TOKENS
from unified_trainer.tools.plan.tracing import LiveBytes, quiet_norms

FEW = (2, 3)  # blocks that are traced
NOTHING = Recompute()
ALONE = Mesh(torch.device("cpu"))


@dataclass(frozen=True)
class Network:
    """A network as a role runs it."""

    config: tuple[tuple[str, Any], ...]  # of the transformer; lists as tuples
    precision: Precision
    half: bool  # whether its frozen weights are held in bf16
    rank: int = 0  # of the adapter that is trained
    trained: bool = False
    recompute: Recompute = NOTHING

    @property
    def layers(self) -> int:
        return int(dict(self.config)["num_layers"])


@dataclass(frozen=True)
class PassBytes:
    """The memory of one pass, in bytes, besides weights and what was there before."""

    peak: float  # while it runs forward
    kept: float  # for the backward pass; its output, in a pass without gradient
    backward: float  # peak of the backward pass right after it, without gradients of weights that are there before
    first: float  # the same with the gradients of all weights, of which none is there before


@functools.lru_cache(maxsize=256)
def pass_bytes(
    network: Network,
    latent: tuple[int, int, int, int],
    text_tokens: int,
    samples: int,
    *,
    gradient: bool,
    fresh: bool,
) -> PassBytes:
    """Return the memory of a pass over this many samples.

    With `fresh` a backward pass without gradients that are there before is traced too; otherwise `first` is `backward`.
    """
    if 0 < network.recompute.full < network.layers:
        others, full = (
            pass_bytes(each, latent, text_tokens, samples, gradient=gradient, fresh=fresh) for each in _uniform(network)
        )
        return _mixed(network, others, full)
    few, more = (
        _trace(network, layers, latent, text_tokens, samples, gradient=gradient, fresh=fresh) for layers in FEW
    )
    steps = (network.layers - FEW[0]) / (FEW[1] - FEW[0])
    return PassBytes(*(a + steps * (b - a) for a, b in zip(few, more, strict=True)))


def _trace(
    network: Network,
    layers: int,
    latent: tuple[int, int, int, int],
    text_tokens: int,
    samples: int,
    *,
    gradient: bool,
    fresh: bool,
) -> tuple[int, int, int, int]:
    role = _role(network, layers)
    traces = []
    for before in (True, False) if gradient and fresh else (True,):
        for p in role.network.parameters():
            p.grad = torch.empty_like(p) if before and p.requires_grad else None
        live = LiveBytes()
        with FakeTensorMode(allow_non_fake_inputs=True), quiet_norms():
            inputs = _inputs(network, latent, text_tokens, samples)
            with live, nullcontext() if gradient else torch.no_grad():
                velocity = role.velocity(*inputs)
                forward, kept = live.peak, live.now
                if gradient:
                    velocity.square().mean().backward()
        traces.append((forward, kept, live.peak))
    (forward, kept, backward), *rest = traces
    return forward, kept, backward, rest[0][2] if rest else backward


def _forward(
    role: Trainable | Frozen, network: Network, latent: tuple[int, int, int, int], text_tokens: int, samples: int
) -> int:
    """Return what a pass with gradient keeps."""
    live = LiveBytes()
    with FakeTensorMode(allow_non_fake_inputs=True), quiet_norms():
        inputs = _inputs(network, latent, text_tokens, samples)
        with live:
            velocity = role.velocity(*inputs)
            kept = live.now  # while the output is there
    del velocity
    return kept


def _inputs(
    network: Network, latent: tuple[int, int, int, int], text_tokens: int, samples: int
) -> tuple[Tensor, Tensor, Condition]:
    config = dict(network.config)
    if _makes_images(config):
        mask = torch.ones(samples, text_tokens, dtype=torch.bool)
        text = torch.zeros(samples, text_tokens, int(config["joint_attention_dim"]))
        cond = Condition({"text": text, "text_mask": mask})
        return torch.zeros(samples, *latent), torch.full((samples,), 0.5), cond
    held = {"text": torch.zeros(samples, text_tokens, int(config["text_dim"]))}
    if _reads_images(config):
        held["image"] = torch.zeros(samples, *latent)
    if config.get("image_dim"):
        held["clip"] = torch.zeros(samples, CLIP_TOKENS, int(config["image_dim"]))
    return torch.zeros(samples, *latent), torch.full((samples,), 0.5), Condition(held)


def _makes_images(config: Mapping[str, Any]) -> bool:
    return config.get("_class_name") == QwenImageTransformer2DModel.__name__


def _model(config: Mapping[str, Any]) -> tuple[type[Any], type[Any]]:
    """Return the classes of the network and of its model."""
    if _makes_images(config):
        return QwenImageTransformer2DModel, QwenImageModel
    return WanTransformer3DModel, ImageChannelsWanModel if _reads_images(config) else WanModel


def _reads_images(config: Mapping[str, Any]) -> bool:
    return bool(config["in_channels"] != config["out_channels"])


def _role(network: Network, layers: int) -> Trainable | Frozen:
    """A role with this many blocks whose weights are addresses without pages."""
    config = {key: list(value) if isinstance(value, tuple) else value for key, value in network.config}
    network_class, model_class = _model(config)
    config = {key: value for key, value in config.items() if not key.startswith("_")} | {"num_layers": layers}
    with torch.device("meta"):
        transformer = network_class(**config)
        if network.half and not network.trained:  # here, where rounding copies nothing
            hold_in_bf16(transformer.requires_grad_(False))
    transformer.to_empty(device="cpu")
    adapter = AdapterConfig(rank=network.rank)
    backbone = Backbone(
        cast(VideoModel, model_class(transformer)),
        ALONE,
        trained=network.trained,
        adapters={"role": adapter} if network.rank else None,
        recompute="full" if network.recompute.full else network.recompute.others,
        half=network.half,
    )
    for p in backbone.model.network.parameters():
        if p.requires_grad:  # an adapter has the dtype of its layer, which a real role rounds afterwards
            p.data = p.data.float()
    if not (network.trained or network.rank):
        return Frozen("role", backbone, RoleConfig(precision=network.precision))
    return Trainable("role", backbone, TrainableConfig(precision=network.precision, adapter=adapter))


def _uniform(network: Network) -> tuple[Network, Network]:
    """Return the network with all blocks as those that are not recomputed whole, and with all recomputed whole."""
    others = Recompute(others=network.recompute.others)
    return replace(network, recompute=others), replace(network, recompute=Recompute(full=network.layers))


def _mixed(network: Network, others: PassBytes, full: PassBytes) -> PassBytes:
    """Return the memory of a pass whose first blocks are recomputed whole; its backward pass begins with the others."""
    share = network.recompute.full / network.layers
    peak, kept = (a + share * (b - a) for a, b in ((others.peak, full.peak), (others.kept, full.kept)))
    return PassBytes(peak, kept, kept + others.backward - others.kept, kept + others.first - others.kept)


def _decodes_images(vae: Mapping[str, Any]) -> bool:
    return vae.get("_class_name") == AutoencoderKLQwenImage.__name__


@functools.lru_cache(maxsize=64)
def decode_bytes(
    vae: tuple[tuple[str, object], ...], latent: tuple[int, int, int, int], samples: int, *, half: bool, gradient: bool
) -> float:
    """Return the peak memory of decoding: with gradient, everything that the backward pass needs is kept.

    Three and four latent frames are decoded; memory is linear in their number.
    """
    config = {key: list(value) if isinstance(value, tuple) else value for key, value in vae}
    with torch.device("meta"):
        network = (AutoencoderKLQwenImage if _decodes_images(config) else AutoencoderKLWan).from_config(config)
    network.to_empty(device="cpu").eval().requires_grad_(False)
    dtype = torch.bfloat16 if half else torch.float32
    torch.nn.Module.to(network, dtype)  # diffusers' own warns of modules that are usually kept in float32
    peaks = []
    frames = (min(3, latent[1]), min(4, latent[1]))
    for count in frames:
        live = LiveBytes()
        with FakeTensorMode(allow_non_fake_inputs=True):
            x = torch.zeros(samples, latent[0], count, *latent[2:], dtype=dtype, requires_grad=gradient)
            with live, nullcontext() if gradient else torch.no_grad():
                (network.decode(x).sample.float() / 2 + 0.5).clamp(0, 1)
        peaks.append(live.peak)
    return peaks[0] + (latent[1] - frames[0]) * (peaks[1] - peaks[0])


def frozen_config(config: object) -> tuple[tuple[str, object], ...]:
    """Return a config as a key of a cache."""
    items = dict(config) if isinstance(config, dict) else {}
    return tuple((key, tuple(value) if isinstance(value, list) else value) for key, value in sorted(items.items()))


def without_gradient(network: Network) -> Network:
    """Return the network as a pass without gradient runs it: nothing is kept, so that no recomputation matters."""
    return replace(network, recompute=Recompute())
