"""HunyuanVideo 1.5's transformer as a `VideoModel` (arXiv:2511.18870)."""

from functools import partial
from pathlib import Path

import torch
from diffusers import HunyuanVideo15Transformer3DModel
from diffusers.models.embeddings import apply_rotary_emb
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn.functional import pad

from unified_trainer.basics.types import Condition, Latents, PerSample
from unified_trainer.models.base import Shape
from unified_trainer.models.hunyuan15.codec import GLYPHS
from unified_trainer.models.joint_model import JointAttention, JointModel, Rotate


class Hunyuan15Model(JointModel):
    """A HunyuanVideo15Transformer3DModel of text; its time is 1000 sigma, and it reads zeros where an image would be.

    It runs by `forward` and `JointAttention`, which wait for no number on the device and have a mask of keys. Diffusers
    has one of all pairs, 2.3 GiB at 121 x 480 x 832, and also masks the queries of padding, which nothing reads.
    """

    network_class = HunyuanVideo15Transformer3DModel
    embedder, video = "x_embedder", 0
    adapter_layers = (
        *("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"),
        *("ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2"),
    )

    def __init__(self, network: HunyuanVideo15Transformer3DModel, folder: Path | None = None) -> None:
        super().__init__(network, folder)
        network.forward = partial(forward, network)
        for block in network.transformer_blocks:
            block.attn.set_processor(JointAttention(self.rotations))

    @staticmethod
    def rotations(angles: tuple[Tensor, Tensor]) -> tuple[Rotate, Rotate]:
        """Return the rotation of the video's tokens; text has no positions."""
        return partial(apply_rotary_emb, freqs_cis=angles, sequence_dim=1), lambda x: x

    def velocity(self, x_t: Latents, sigma: PerSample, cond: Condition) -> Latents:
        channels, *tokens = self.image_inputs(x_t, cond)
        time = 1000 * sigma.float().to(x_t.device, non_blocking=True)
        texts = (cond[name] for name in ("text", "text_mask", "glyphs", "glyphs_mask"))
        return self.network(torch.cat([x_t, channels], 1), time, *texts, *tokens).float()

    def image_inputs(self, x_t: Latents, cond: Condition) -> tuple[Tensor, ...]:
        """Return the channels of an image, beside those of `x_t`, and its tokens where the network has some."""
        b, c, *shape = x_t.shape
        return (x_t.new_zeros(b, self.network.config.in_channels - c, *shape),)

    def example(
        self, shape: Shape | None = None, samples: int = 1, text_tokens: int = 4
    ) -> tuple[Latents, PerSample, Condition]:
        config, draw = self.network.config, torch.Generator().manual_seed(0)
        shape = shape or (config.out_channels, 2, 2 * config.patch_size, 2 * config.patch_size)
        x_t = torch.randn(samples, *shape, generator=draw)
        text = torch.randn(samples, text_tokens, config.text_embed_dim, generator=draw)
        glyphs = text[:, :GLYPHS, : config.text_embed_2_dim]
        mask = (torch.arange(text_tokens) > 0).expand(samples, -1)  # the first row is of quoted text
        held = {"text": text, "text_mask": mask, "glyphs": glyphs, "glyphs_mask": ~mask[:, :GLYPHS]}
        device = next(self.network.parameters()).device
        cond = Condition(held).map(lambda x: x.to(device))
        return x_t.to(device), torch.full((samples,), 0.5, device=device), cond


def forward(
    network: HunyuanVideo15Transformer3DModel,
    x: Float[Tensor, "b read t h w"],
    time: Tensor,
    text: Float[Tensor, "b n d"],
    text_mask: Bool[Tensor, "b n"],
    glyphs: Float[Tensor, "b m e"],
    glyphs_mask: Bool[Tensor, "b m"],
    image: Float[Tensor, "b s f"] | None = None,
) -> Latents:
    """Run a network on a text, and on tokens of an image, as its own forward does.

    That one looks for tokens that are not masked, and sorts them to the front. Text and image have no positions: masks
    are enough.
    """
    (b, _, t, h, w), patch = x.shape, network.config.patch_size
    turns, times = network.rope(x), network.time_embed(time)
    first, second, third = network.cond_type_embed.weight
    words = refined(network.context_embedder, text, time, text_mask)
    said = torch.cat([network.context_embedder_2(glyphs) + second, words + first], 1)
    mask, tokens = torch.cat([glyphs_mask, text_mask], 1), network.x_embedder(x)
    if image is not None:
        said = torch.cat([network.image_embedder(image) + third, said], 1)
        mask = pad(mask, (image.shape[1], 0), value=True)
    for block in network.transformer_blocks:
        tokens, said = block(tokens, said, times, mask, turns)
    tokens = network.proj_out(network.norm_out(tokens, times))
    patches = tokens.view(b, t, h // patch, w // patch, -1, patch, patch).permute(0, 4, 1, 2, 5, 3, 6)
    return patches.reshape(b, -1, t, h, w)


def refined(embedder: nn.Module, text: Float[Tensor, "b n d"], time: Tensor, mask: Bool[Tensor, "b n"]) -> Tensor:
    """Return the tokens of a text, which attend to those that are not masked."""
    counted = mask.unsqueeze(2).to(text)
    times = embedder.time_text_embed(time, (text * counted).sum(1) / counted.sum(1))
    tokens = embedder.proj_in(text)
    for block in embedder.token_refiner.refiner_blocks:
        tokens = block(tokens, times, mask[:, None, None])
    return tokens
