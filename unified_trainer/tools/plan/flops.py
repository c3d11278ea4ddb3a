"""FLOPs of one pass of a Wan transformer over one sample, in closed form.

They are counted as `unified_trainer.parallel.meter` counts them: a product with a matrix of p weights takes 2 p FLOPs a
row, and elementwise work is left out.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any


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
            channels=config["in_channels"],
            patch=time * height * width,
        )

    @property
    def parameters(self) -> int:
        """The number of weights, without adapters."""
        d, f = self.width, self.ffn
        block = 8 * d * d + 2 * d * f + f + 21 * d + self.gates * (d * d + d)
        text, time = self.text_width * d + d * d + 2 * d, self.frequencies * d + d * d + 2 * d
        patch = 2 * self.channels * self.patch * d + d + self.channels * self.patch
        return self.layers * block + text + time + 6 * d * d + 6 * d + 2 * d + patch

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

    def times(self, samples: int) -> "PassFLOPs":
        """Return the FLOPs of a pass over several samples."""
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
) -> PassFLOPs:
    """Return the FLOPs of one pass over a sample of `tokens` latent tokens and `text_tokens` tokens of text.

    With `rank` an adapter of that rank is trained, and the matrices are not: that halves their backward pass.
    `repeated` is the share of the blocks that the backward pass computes again as a whole; selective recomputation
    repeats only the second factors of adapters, which are not counted. Of a causal pass, `pairs` are the pairs of query
    and key, `text_keys` the text tokens whose keys are not cached, and `times` the noise levels of a sample; by default
    all tokens attend to all, at one noise level. A pass to the features runs the blocks up to the middle one, and its
    backward pass begins there.
    """
    d, f, n, t = size.width, size.ffn, tokens, text_tokens
    layers = size.layers_to_features if to_features else size.layers
    keys, pairs = t if text_keys is None else text_keys, n * n if pairs is None else pairs
    block = 2 * (n * (6 * d * d + 2 * d * f) + keys * 2 * d * d)
    pixels = n * 2 * size.channels * size.patch * d
    outside = 2 * (pixels + t * (size.text_width * d + d * d) + times * (size.frequencies * d + 7 * d * d))
    attention = 4 * d * layers * (pairs + n * t)
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
    )
