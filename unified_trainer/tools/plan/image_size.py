"""The sizes of Qwen-Image for `plan`: weights and FLOPs in closed form, as those of Wan in flops.py."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from unified_trainer.tools.plan.flops import EAGER, FUSED, PassFLOPs

FREQUENCIES = 256  # of the embedding of the noise level


@dataclass(frozen=True)
class QwenImageSize:
    """The sizes of a QwenImageTransformer2DModel on which its FLOPs and its number of weights depend."""

    width: int  # d, channels of a token
    layers: int
    head: int  # channels of a head
    text_width: int = 3584
    inputs: int = 64  # channels of a token's latents
    patch: int = 4  # latent positions of one token

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "QwenImageSize":
        """Read the config of a QwenImageTransformer2DModel, with all keys that diffusers writes."""
        head, inputs = config["attention_head_dim"], config["in_channels"]
        return cls(
            config["num_attention_heads"] * head, config["num_layers"], head, config["joint_attention_dim"], inputs
        )

    @property
    def channels(self) -> int:
        """The channels of the latents."""
        return self.inputs // self.patch

    @property
    def ffn(self) -> int:
        """The width of the feed-forward layers."""
        return 4 * self.width

    @property
    def block(self) -> int:
        """The number of weights of a block: modulation, attention and feed-forward layers of image and of text."""
        return 36 * self.width**2 + 30 * self.width + 4 * self.head

    @property
    def small(self) -> int:
        """The number of weights that stay in fp32: norms."""
        return 4 * self.head * self.layers + self.text_width

    @property
    def parameters(self) -> int:
        """The number of weights, without adapters."""
        d, w = self.width, self.text_width
        ends = 2 * self.inputs * d + d + self.inputs + w + w * d + d
        return self.layers * self.block + ends + FREQUENCIES * d + d * d + 2 * d + 2 * d * d + 2 * d

    @property
    def layers_to_features(self) -> int:
        """The number of blocks up to the middle one, whose output the features are."""
        return self.layers // 2 + 1

    def adapter(self, rank: int) -> int:
        """Return the number of weights of an adapter on all attention matrices."""
        return self.layers * rank * 8 * 2 * self.width


def image_flops(
    size: QwenImageSize,
    tokens: int,
    text_tokens: int,
    *,
    rank: int = 0,
    repeated: float = 0.0,
    to_features: bool = False,
    fused: bool = False,
    **_causal: object,
) -> PassFLOPs:
    """Return the FLOPs of one pass over an image; the arguments are those of `pass_flops`.

    Image and text attend to each other and have matrices of their own. Traffic is taken to be that of Wan's blocks.
    """
    d, n, t = size.width, tokens, text_tokens
    layers = size.layers_to_features if to_features else size.layers
    block = 2 * ((n + t) * 12 * d * d + 12 * d * d)
    pixels = n * 2 * size.inputs * d
    outside = 2 * (pixels + t * size.text_width * d + FREQUENCIES * d + 3 * d * d)
    attention = 4 * d * layers * (n + t) ** 2
    adapter = 2 * layers * rank * (n + t) * 4 * 2 * d
    products, trained = layers * block + outside, 1 if rank else 2
    factors = FUSED if fused else EAGER
    return PassFLOPs(
        forward=products + attention + adapter,
        backward=trained * (products - (pixels if to_features else 0)) + 2 * attention + 2 * adapter,
        recompute=repeated * (layers * block + attention + adapter),
        attention=attention,
        flash=0.5 * attention,
        traffic=layers * (n + t) * (d * factors[0] + size.ffn * factors[1]),
    )


def decoder_flops(encoder: Mapping[str, Any], tokens: int) -> float:
    """Return the FLOPs of Qwen2.5-VL's language model over one prompt, without its attention scores."""
    text = encoder.get("text_config") or encoder
    d, heads = text["hidden_size"], text["num_attention_heads"]
    keys = d // heads * text["num_key_value_heads"]
    return 2.0 * tokens * text["num_hidden_layers"] * (2 * d * d + 2 * d * keys + 3 * d * text["intermediate_size"])
