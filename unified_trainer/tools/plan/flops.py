"""FLOPs and memory traffic in closed form: of a pass of a Wan transformer, of Wan's VAE, text encoder and HPSv3.

They are counted as `unified_trainer.parallel.meter` counts them: a product with a matrix of p weights takes 2 p FLOPs a
row. Elementwise work has no FLOPs; it has traffic, the bytes that it reads and writes, which no product hides.
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

# Bytes of elementwise work in a block's forward pass in bf16, for each token: a factor of the width and one of the
# feed-forward width. Eager: counted operation by operation (`tests/tools/plan/test_flops.py`). Fused: every norm,
# rotary embedding, gate and activation reads its inputs and writes its result once.
EAGER, FUSED = (353, 4), (42, 4)
BACKWARD = 2  # assumed: traffic of a backward pass over that of its forward pass
CLIP_TOKENS = 257  # of a condition image: 16 x 16 patches and one for all of it


@dataclass(frozen=True)
class TransformerSize:
    """The sizes of a WanTransformer3DModel on which its FLOPs and its number of weights depend."""

    width: int  # d, channels of a token
    layers: int
    ffn: int  # f, width of the feed-forward layers
    text_width: int = 4096
    frequencies: int = 256  # of the embedding of the noise level
    channels: int = 16  # of the latents
    patch: int = 4  # latent positions of one token
    inputs: int = 16  # channels that the network reads: those of the latents, and of a condition image
    image_width: int = 0  # channels of CLIP's tokens of a condition image; 0 where the network reads none
    gates: int = 0  # d x d layers of a block that sparse attention adds; they are trained beside an adapter

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "TransformerSize":
        """Read the config of a WanTransformer3DModel, with all keys that diffusers writes."""
        time, height, width = config["patch_size"]
        return cls(
            width=config["num_attention_heads"] * config["attention_head_dim"],
            layers=config["num_layers"],
            ffn=config["ffn_dim"],
            text_width=config["text_dim"],
            frequencies=config["freq_dim"],
            channels=config["out_channels"],
            patch=time * height * width,
            inputs=config["in_channels"],
            image_width=config.get("image_dim") or 0,
        )

    @property
    def parameters(self) -> int:
        """The number of weights, without adapters."""
        d, f = self.width, self.ffn
        block = 8 * d * d + 2 * d * f + f + 21 * d + self.gates * (d * d + d)
        text, time = self.text_width * d + d * d + 2 * d, self.frequencies * d + d * d + 2 * d
        patch = (self.inputs + self.channels) * self.patch * d + d + self.channels * self.patch
        if w := self.image_width:
            block += 2 * d * d + 3 * d
            text += w * w + w * d + 3 * w + 3 * d
        return self.layers * block + text + time + 6 * d * d + 6 * d + 2 * d + patch

    @property
    def block(self) -> int:
        """The number of weights of a block, without those of CLIP's tokens."""
        return 8 * self.width**2 + 2 * self.width * self.ffn + self.ffn + 21 * self.width

    @property
    def small(self) -> int:
        """The number of weights that stay in fp32: norms and modulation tables."""
        return 12 * self.width * self.layers + 2 * self.width

    @property
    def layers_to_features(self) -> int:
        """The number of blocks up to the middle one, whose output the features are."""
        return self.layers // 2 + 1

    def adapter(self, rank: int) -> int:
        """Return the number of weights of an adapter on all attention and feed-forward matrices, and of the gates."""
        gates = self.gates * (self.width + 1) * self.width
        return self.layers * (rank * (8 * 2 * self.width + 2 * (self.width + self.ffn)) + gates)


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
    size: TransformerSize,
    tokens: int,
    text_tokens: int = 512,
    *,
    rank: int = 0,
    repeated: float = 0.0,
    pairs: float | None = None,
    text_keys: int | None = None,
    times: int = 1,
    to_features: bool = False,
    fused: bool = False,
    clip_tokens: int = CLIP_TOKENS,
) -> PassFLOPs:
    """Return the FLOPs of one pass over a sample of `tokens` latent tokens and `text_tokens` tokens of text.

    With `rank` an adapter of that rank is trained, and the matrices are not: that halves their backward pass.
    `repeated` is the share of the blocks that the backward pass computes again as a whole; selective recomputation
    repeats only the second factors of adapters, which are not counted. Of a causal pass, `pairs` are the pairs of query
    and key, `text_keys` the text tokens whose keys are not cached, and `times` the noise levels of a sample; by default
    all tokens attend to all, at one noise level. A pass to the features runs the blocks up to the middle one, and its
    backward pass begins there. `fused` is for compiled blocks. `clip_tokens` count where the network reads those of a
    condition image.
    """
    d, f, n, t = size.width, size.ffn, tokens, text_tokens
    layers = size.layers_to_features if to_features else size.layers
    keys, pairs = t if text_keys is None else text_keys, n * n if pairs is None else pairs
    block = 2 * (n * (6 * d * d + 2 * d * f) + keys * 2 * d * d)
    pixels = n * (size.inputs + size.channels) * size.patch * d
    outside = 2 * (pixels + t * (size.text_width * d + d * d) + times * (size.frequencies * d + 7 * d * d))
    attention = 4 * d * layers * (pairs + n * t)
    if w := size.image_width:
        block += 2 * clip_tokens * 2 * d * d
        outside += 2 * clip_tokens * (w * w + w * d)
        attention += 4 * d * layers * n * clip_tokens
    adapter = 2 * layers * rank * (n * (6 * 2 * d + 2 * (d + f)) + keys * 2 * 2 * d)
    products, gates = layers * block + outside, 2 * layers * size.gates * n * d * d
    trained = 1 if rank else 2
    blocks = layers * block + attention + adapter + gates
    return PassFLOPs(
        forward=products + attention + adapter + gates,
        backward=trained * (products - (pixels if to_features else 0)) + 2 * (attention + adapter + gates),
        recompute=repeated * blocks,
        attention=attention,
        flash=0.5 * attention,
        traffic=layers * n * (d * (FUSED if fused else EAGER)[0] + f * (FUSED if fused else EAGER)[1]),
    )


def decode_flops(vae: Mapping[str, Any], frames: int, height: int, width: int) -> float:
    """Return the FLOPs of AutoencoderKLWan's decoder over latents of this size: its convolutions, without attention.

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


def encode_flops(encoder: Mapping[str, Any], tokens: int) -> float:
    """Return the FLOPs of a UMT5 encoder over one prompt, without its attention scores."""
    inner, d = encoder["num_heads"] * encoder["d_kv"], encoder["d_model"]
    return 2.0 * tokens * encoder["num_layers"] * (4 * d * inner + 3 * d * encoder["d_ff"])


def score_flops() -> float:
    """Return the FLOPs of HPSv3 for one frame, which is resized to 256 tokens of 4 patches each.

    Its text, instruction and prompt, is taken to have 350 tokens. Sizes are those of Qwen2-VL-7B.
    """
    language, vision = 28 * (2 * 3584**2 + 2 * 3584 * 512 + 3 * 3584 * 18944), 675e6
    return 2 * (language * (256 + 350) + vision * 4 * 256)
