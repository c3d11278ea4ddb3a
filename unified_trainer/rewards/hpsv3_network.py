"""The network of HPSv3: Qwen2-VL with a reward head (arXiv:2508.03789)."""

from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import Qwen2VLConfig
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel, Qwen2VLTextModel

from unified_trainer.basics.errors import UserError
from unified_trainer.models.layout import reading_config, without_memory
from unified_trainer.models.tensor_file import floating_shapes

UNUSED_KEYS = {"lm_head.weight"}


@dataclass(frozen=True)
class Inputs:
    """A right-padded batch of Qwen2-VL's inputs; the patches of all images follow each other."""

    input_ids: Int[Tensor, "b n"]
    attention_mask: Int[Tensor, "b n"]
    patches: Float[Tensor, "p d"]
    grids: Int[Tensor, "b 3"]  # time, height and width of each image in patches
    is_image: Bool[Tensor, "b n"]
    is_reward: Bool[Tensor, "b n"]


class HPSv3Network(nn.Module):
    """Qwen2-VL with a reward head; its state_dict has the keys of the official checkpoint."""

    def __init__(self, config: Qwen2VLConfig, head_widths: tuple[int, int]) -> None:
        super().__init__()
        self.visual = Qwen2VisionTransformerPretrainedModel(config.vision_config)
        self.model = Qwen2VLTextModel(config.text_config)
        wide, narrow = head_widths
        self.rm_head = nn.Sequential(
            nn.Linear(config.text_config.hidden_size, wide),
            nn.ReLU(),
            nn.Dropout(0.05),
            nn.Linear(wide, narrow),
            nn.ReLU(),
            nn.Linear(narrow, 2),
        )

    def forward(self, inputs: Inputs) -> Float[Tensor, "b 2"]:
        """Compute (mu, raw sigma) from the final-norm hidden state at the reward token; the head computes in float32.

        HPSv3 was trained with positions 0..n-1 on all three M-RoPE axes, not with Qwen2-VL's image grid positions.
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


def skeleton(config: Qwen2VLConfig, config_file: Path, checkpoint: Path) -> HPSv3Network:
    """Build the network of a checkpoint without weights (meta device); raise UserError if keys or shapes differ."""
    shapes = floating_shapes(checkpoint)
    heads = ("rm_head.0.weight", "rm_head.3.weight")
    absent = [key for key in heads if key not in shapes]
    if absent:
        raise UserError(f"{checkpoint}: missing {', '.join(absent)}; this is not an HPSv3 checkpoint")
    widths = (shapes[heads[0]][0], shapes[heads[1]][0])
    with reading_config(config_file, HPSv3Network.__name__):
        network = without_memory(lambda: HPSv3Network(config, widths), 2 * len(shapes) + 2)
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
