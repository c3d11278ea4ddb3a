"""Qwen2-VL with a reward head: the network of HPSv3 (arXiv:2508.03789) and VideoAlign (arXiv:2501.13918)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import Qwen2VLConfig
from transformers.models.qwen2_vl.modeling_qwen2_vl import (
    Qwen2VisionTransformerPretrainedModel,
    Qwen2VLRotaryEmbedding,
    Qwen2VLTextModel,
    Qwen2VLVisionRotaryEmbedding,
)

from unified_trainer.basics.errors import UserError
from unified_trainer.models.layout import reading_config, without_memory
from unified_trainer.models.tensor_file import floating_shapes

UNUSED_KEYS = {"lm_head.weight"}


@dataclass(frozen=True)
class Inputs:
    """A right-padded batch of Qwen2-VL's inputs; the patches of all images or videos follow each other."""

    input_ids: Int[Tensor, "b n"]
    attention_mask: Int[Tensor, "b n"]
    patches: Float[Tensor, "p d"]
    grids: Int[Tensor, "b 3"]  # time, height and width of each image or video in patches
    is_image: Bool[Tensor, "b n"]
    is_reward: Bool[Tensor, "b n"]

    def to(self, device: torch.device) -> "Inputs":
        return Inputs(**{name: tensor.to(device) for name, tensor in vars(self).items()})


class RewardNetwork(nn.Module):
    """Qwen2-VL with a reward head; its state_dict has the keys of transformers 4.45, as official checkpoints do."""

    def __init__(self, config: Qwen2VLConfig, head: nn.Module) -> None:
        super().__init__()
        self.visual = Qwen2VisionTransformerPretrainedModel(config.vision_config)
        self.model = Qwen2VLTextModel(config.text_config)
        self.rm_head = head

    def forward(self, inputs: Inputs) -> Float[Tensor, "rewards d"]:
        """Return the head of the final-norm hidden state at each reward token; the head computes in float32.

        Both were trained with positions 0..n-1 on all three M-RoPE axes, not with Qwen2-VL's image grid positions.
        """
        embeds = self.model.embed_tokens(inputs.input_ids)
        image_embeds = self.visual(inputs.patches, grid_thw=inputs.grids).pooler_output
        embeds = embeds.masked_scatter(inputs.is_image[..., None], image_embeds.to(embeds.dtype))
        b, n = inputs.input_ids.shape
        hidden = self.model(
            inputs_embeds=embeds,
            attention_mask=inputs.attention_mask,
            position_ids=torch.arange(n, device=embeds.device).expand(3, b, n),
            use_cache=False,
        ).last_hidden_state
        with torch.autocast(hidden.device.type, enabled=False):
            return self.rm_head(hidden[inputs.is_reward].float())

    def filled(
        self, config: Qwen2VLConfig, weight: Callable[[str], Tensor], device: torch.device | str, dtype: torch.dtype
    ) -> "RewardNetwork":
        """Take the weights that `weight` gives by their keys, frozen; `dtype` is the backbone's."""
        # The packages cast the whole backbone, so that in bfloat16 the rotary frequencies are rounded too.
        self.visual.rotary_pos_emb = Qwen2VLVisionRotaryEmbedding(config.vision_config).to(device, dtype)
        self.model.rotary_emb = Qwen2VLRotaryEmbedding(config.text_config).to(device, dtype)
        kinds = {key: torch.float32 if key.startswith("rm_head.") else dtype for key in self.state_dict()}
        self.load_state_dict({key: weight(key).to(device, kind) for key, kind in kinds.items()}, assign=True)
        return self.requires_grad_(False).eval()


def hpsv3_network(config: Qwen2VLConfig, head_widths: tuple[int, int]) -> RewardNetwork:
    """Build HPSv3's network, whose head gives (mu, raw sigma)."""
    wide, narrow = head_widths
    into = nn.Linear(config.text_config.hidden_size, wide)
    head = (into, nn.ReLU(), nn.Dropout(0.05), nn.Linear(wide, narrow), nn.ReLU(), nn.Linear(narrow, 2))
    return RewardNetwork(config, nn.Sequential(*head))


def skeleton(config: Qwen2VLConfig, config_file: Path, checkpoint: Path) -> RewardNetwork:
    """Build the network of a checkpoint without weights (meta device); raise UserError if keys or shapes differ."""
    shapes = floating_shapes(checkpoint)
    heads = ("rm_head.0.weight", "rm_head.3.weight")
    absent = [key for key in heads if key not in shapes]
    if absent:
        raise UserError(f"{checkpoint}: missing {', '.join(absent)}; this is not an HPSv3 checkpoint")
    widths = (shapes[heads[0]][0], shapes[heads[1]][0])
    return outlined(lambda: hpsv3_network(config, widths), shapes, config_file, checkpoint)


def outlined(
    make: Callable[[], RewardNetwork], shapes: Mapping[str, tuple[int, ...]], config_file: Path, checkpoint: Path
) -> RewardNetwork:
    """Build a network without weights (meta device); raise UserError unless it has the keys and shapes of a file."""
    with reading_config(config_file, RewardNetwork.__name__):
        network = without_memory(make, 2 * len(shapes) + 2)
    wanted = {key: tuple(tensor.shape) for key, tensor in network.state_dict().items()}
    problems = [f"missing {key}" for key in wanted.keys() - shapes.keys()]
    problems += [f"unexpected {key}" for key in shapes.keys() - wanted.keys() - UNUSED_KEYS]
    problems += [
        f"{key} is {shapes[key]}, config.json wants {wanted[key]}"
        for key in wanted.keys() & shapes.keys()
        if shapes[key] != wanted[key]
    ]
    if problems:
        shown = "; ".join(sorted(problems)[:8]) + (f"; and {len(problems) - 8} more" if len(problems) > 8 else "")
        raise UserError(f"{checkpoint} does not fit {config_file}: {shown}; import it with the right --base")
    return network
