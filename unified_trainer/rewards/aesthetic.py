"""The scorer aesthetic: how beautiful people find an image, predicted by linear layers on CLIP's image features.

It is LAION's improved aesthetic predictor, whose layers have no activations between them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
from jaxtyping import Float
from safetensors.torch import load_file
from torch import Tensor, nn

from unified_trainer.basics.effects import READS
from unified_trainer.basics.errors import MissingFileError, UserError
from unified_trainer.basics.types import PerSample
from unified_trainer.models.hub import component
from unified_trainer.models.tensor_file import floating_shapes
from unified_trainer.rewards.base import NetworkScorer, Scorer, ScorerConfig, check_path, of_images
from unified_trainer.rewards.clip import CLIP
from unified_trainer.rewards.own_settings import ScorerSettings, kind_of


@dataclass(frozen=True, kw_only=True)
class Aesthetic(ScorerSettings):
    """A head of linear layers on the image features of the CLIP folder at `config.path`."""

    head: Annotated[str, READS]
    """Safetensors file of the head: layers.N.weight and layers.N.bias, applied in the order of N."""
    per_frame = True
    files = component("")

    def check(self, config: ScorerConfig, key: str, frames: int) -> None:
        """Raise UserError, naming the key, unless folder and file are given and the file is there."""
        check_path(config, key, frames)
        if not Path(self.head).is_file():
            raise MissingFileError(f"{key}.settings.head {self.head}: no such file")

    def load(self, config: ScorerConfig, device: torch.device) -> Scorer:
        """Load network and head; raise UserError, naming the file, unless they fit."""
        clip = CLIP.load(Path(config.path), device, config.dtype)
        head = load_head(Path(self.head), clip.network.config.projection_dim).to(device)

        def score(images: Float[Tensor, "b 3 h w"], prompts: Sequence[str]) -> PerSample:
            return head(clip.features(images))[:, 0]

        return NetworkScorer(of_images(score, config.batch, config.top_fraction), (clip.network, head))


def load_head(file: Path, width: int) -> nn.Sequential:
    """Return the linear layers of a file, which take `width` features to one number.

    Raise UserError for other keys or shapes.
    """
    floating_shapes(file)
    tensors = load_file(file)
    numbers = sorted(int(key.split(".")[1]) for key in tensors if key.endswith(".weight") and _is_layer(key))
    expected = {f"layers.{number}.{part}" for number in numbers for part in ("weight", "bias")}
    if not numbers or tensors.keys() != expected:
        raise UserError(f"{file} has the keys {', '.join(sorted(tensors))}; expected layers.N.weight and layers.N.bias")
    layers = []
    for number in numbers:
        weight, bias = tensors[f"layers.{number}.weight"], tensors[f"layers.{number}.bias"]
        if weight.ndim != 2 or weight.shape[1] != width or bias.shape != weight.shape[:1]:
            raise UserError(f"{file}: layers.{number} has shape {list(weight.shape)}, but gets {width} features")
        layer = nn.Linear(width, len(weight))
        layer.load_state_dict({"weight": weight.float(), "bias": bias.float()})
        layers.append(layer.requires_grad_(False))
        width = len(weight)
    if width != 1:
        raise UserError(f"{file}: the last layer gives {width} numbers, expected one")
    return nn.Sequential(*layers)


def _is_layer(key: str) -> bool:
    parts = key.split(".")
    return len(parts) == 3 and parts[0] == "layers" and parts[1].isdigit()


KIND = kind_of("aesthetic", Aesthetic)
