"""FLOPs and memory traffic: of a pass of a network, of VAEs, text encoders and HPSv3.

They are counted as `unified_trainer.parallel.meter` counts them: a product with a matrix of p weights takes 2 p FLOPs a
row. Elementwise work has no FLOPs; it has traffic, the bytes that it reads and writes, which no product hides.
"""

import functools
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from diffusers import AutoencoderKLQwenImage, AutoencoderKLWan
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from unified_trainer.models.base import PassSize
from unified_trainer.tools.plan.network_size import CodecKind, Config, NetworkSize, frozen_config, thawed

# Bytes of elementwise work in a block's forward pass in bf16, for each token: a factor of the width and one of the
# feed-forward width. Eager: counted operation by operation (`tests/tools/plan/test_flops.py`) in a block of Wan. Fused:
# every norm, rotary embedding, gate and activation reads its inputs and writes its result once.
EAGER, FUSED = (353, 4), (42, 4)
BACKWARD = 2  # assumed: traffic of a backward pass over that of its forward pass


@dataclass(frozen=True)
class PassFLOPs:
    """The FLOPs of one pass over one sample."""

    forward: float
    backward: float  # of a pass with gradient; without `recompute`
    recompute: float  # of activations that the backward pass computes again
    attention: float  # part of `forward` in products of two activations
    flash: float  # the attention scores that a fused kernel computes again in its backward pass; no work of the model
    traffic: float = 0.0  # bytes of elementwise work in the forward pass

    def times(self, samples: int) -> "PassFLOPs":
        """Return the cost of a pass over several samples."""
        return PassFLOPs(**{f.name: samples * vars(self)[f.name] for f in fields(self)})

    @property
    def trained(self) -> float:
        """FLOPs of the model in a pass with gradient, from which the MFU is computed: without any recomputation."""
        return self.forward + self.backward

    @property
    def executed(self) -> float:
        """FLOPs that the device executes in a pass with gradient."""
        return self.trained + self.recompute + self.flash


def pass_flops(
    size: NetworkSize,
    passed: PassSize,
    *,
    rank: int = 0,
    repeated: float = 0.0,
    to_features: bool = False,
    fused: bool = False,
) -> PassFLOPs:
    """Return the FLOPs of one pass over one sample, whose rows and attention `passed` has.

    With `rank` an adapter of that rank is trained, and the matrices are not: that halves their backward pass.
    `repeated` is the share of the blocks that the backward pass computes again as a whole; selective recomputation
    repeats only the second factors of adapters, which are not counted. A pass to the features runs the blocks up to the
    middle one, and its backward pass begins there. `fused` is for compiled blocks.
    """
    layers = size.layers_to_features if to_features else size.layers
    attention = passed.attention * layers / size.layers
    products = blocks = adapter = behind = 0.0
    for matrix in size.matrices:
        if to_features and matrix.behind:
            continue
        rows = 2.0 * passed.rows[matrix.kind]
        products += rows * matrix.weights
        blocks += rows * matrix.weights if matrix.in_block else 0.0
        adapter += rows * matrix.adapted * rank
        behind += rows * matrix.weights if matrix.kind == "output" else 0.0
    gates = 2.0 * layers * size.gates * passed.tokens * size.width**2
    in_blocks = {matrix.kind for matrix in size.matrices if matrix.in_block}
    rows = sum(passed.rows[kind] for kind in ("tokens", "text") if kind in in_blocks)
    factors = FUSED if fused else EAGER
    return PassFLOPs(
        forward=products + attention + adapter + gates,
        backward=(1 if rank else 2) * (products - (behind if to_features else 0)) + 2 * (attention + adapter + gates),
        recompute=repeated * (blocks + attention + adapter + gates),
        attention=attention,
        flash=0.5 * attention,
        traffic=layers * rows * (size.width * factors[0] + size.ffn * factors[1]),
    )


def decode_flops(codec: CodecKind, vae: Mapping[str, Any], frames: int, height: int, width: int) -> float:
    """Return the FLOPs of a VAE's decoder over latents of this size.

    Wan's, which Qwen-Image's is too, is counted in closed form, others by torch on tensors without memory.
    """
    if codec.vae_class in (AutoencoderKLWan, AutoencoderKLQwenImage):
        return _decode_flops_of_wan(vae, frames, height, width)
    return _counted_decode_flops(codec, frozen_config(vae), frames, height, width)


@functools.lru_cache(maxsize=64)
def _counted_decode_flops(codec: CodecKind, vae: Config, frames: int, height: int, width: int) -> float:
    with torch.device("meta"):
        network = codec.vae_class.from_config(thawed(vae)).eval()
        mean, _ = codec.statistics(network.config)
        latents = torch.zeros(1, len(mean), frames, height, width)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        codec.decoded(network, codec.of_video(latents))
    return float(counter.get_total_flops())


def _decode_flops_of_wan(vae: Mapping[str, Any], frames: int, height: int, width: int) -> float:
    """Return the FLOPs of the convolutions, without attention.

    The first latent frame becomes one frame and every other one four.
    """
    whole = {"base_dim": 96, "z_dim": 16, "dim_mult": (1, 2, 4, 4), "num_res_blocks": 2, "out_channels": 3, **vae}
    base, residual = whole.get("decoder_base_dim") or whole["base_dim"], whole.get("is_residual", False)
    times = [*whole.get("temperal_downsample", (False, True, True))][::-1]
    widths = [base * factor for factor in (whole["dim_mult"][-1], *reversed(whole["dim_mult"]))]
    pixels, total = frames * height * width, 0.0
    total += pixels * 27 * (whole["z_dim"] * widths[0] + 4 * widths[0] ** 2)  # the first convolution and the middle
    for i, (before, after) in enumerate(itertools.pairwise(widths)):
        before = before // 2 if i and not residual else before
        total += pixels * 27 * (before * after + (2 * whole["num_res_blocks"] + 1) * after**2)
        if i + 2 == len(widths):
            continue
        if times[i]:
            total += pixels * 3 * 2 * after**2
            frames = 2 * frames - 1
        height, width = 2 * height, 2 * width
        pixels = frames * height * width
        total += pixels * 9 * after * (after if residual else after // 2)
    return 2 * (total + pixels * 27 * widths[-1] * whole["out_channels"])


@functools.lru_cache(maxsize=16)
def encode_flops(codec: CodecKind, encoders: tuple[Config, ...], tokens: tuple[int, ...]) -> float:
    """Return the FLOPs of a codec's text encoders over one prompt of so many tokens each, without attention scores."""
    total = 0.0
    for kind, config, count in zip(codec.text_classes, encoders, tokens, strict=True):
        with torch.device("meta"):
            encoder = codec.text_layers(kind(kind.config_class.from_dict(thawed(config))))
        layers = (layer for layer in encoder.modules() if isinstance(layer, nn.Linear))
        total += 2.0 * count * sum(layer.weight.numel() for layer in layers)
    return total


def score_flops() -> float:
    """Return the FLOPs of HPSv3 for one frame, which is resized to 256 tokens of 4 patches each.

    Its text, instruction and prompt, is taken to have 350 tokens. Sizes are those of Qwen2-VL-7B.
    """
    language, vision = 28 * (2 * 3584**2 + 2 * 3584 * 512 + 3 * 3584 * 18944), 675e6
    return 2 * (language * (256 + 350) + vision * 4 * 256)
