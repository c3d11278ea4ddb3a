"""The scorer subject_consistency: how alike the frames of a video are to DINO (VBench, arXiv:2311.17982).

VBench's is of DINO ViT-B/16 (arXiv:2104.14294), over all frames.
"""

import math
import re
from pathlib import Path
from typing import Annotated, Literal, Self

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor
from torch.nn.functional import interpolate, normalize
from transformers import ViTConfig, ViTModel
from transformers.models.vit.modeling_vit import ViTEmbeddings

from unified_trainer.basics.input_files import Schema, read_as
from unified_trainer.models.folder import load_strictly
from unified_trainer.models.hub import component
from unified_trainer.rewards.base import NetworkScorer, Scorer, ScorerConfig, ScorerKind, check_path, check_pixels
from unified_trainer.rewards.frame_consistency import of_features

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet; preprocessor_config.json may say others
EPS = 1e-6  # of its norms; configs of published folders say 1e-12
MARGIN = 0.1  # patches by which it widens a grid of positions
NAMES = {  # parts of the names of weights in files: in the network
    r"encoder\.layer\.": "layers.",
    r"attention\.attention\.query": "attention.q_proj",
    r"attention\.attention\.key": "attention.k_proj",
    r"attention\.attention\.value": "attention.v_proj",
    r"attention\.output\.dense": "attention.o_proj",
    r"intermediate\.dense": "mlp.fc1",
    r"output\.dense": "mlp.fc2",
}
Size = Annotated[int, Field(ge=1, le=2**20)]


class NetworkConfig(Schema):
    """config.json, as far as it tells the network from another one."""

    model_type: Literal["vit"]
    image_size: Size = 224
    patch_size: Size = 16


class Embeddings(ViTEmbeddings):
    """The embeddings of a ViT with the positions that DINO's own program gives images that are not square."""

    def interpolate_pos_encoding(self, embeddings: Tensor, height: int, width: int) -> Tensor:
        """Return the positions of the class token and of the patches of an image of `height` x `width` pixels."""
        known = self.position_embeddings
        if height == width:  # which is the size of the network
            return known
        side = math.isqrt(known.shape[1] - 1)
        grid = known[:, 1:].float().unflatten(1, (side, side)).movedim(-1, 1)
        scale = [(length // self.patch_size + MARGIN) / side for length in (height, width)]
        fitted = interpolate(grid, scale_factor=scale, mode="bicubic").flatten(2).mT
        return torch.cat([known[:, :1], fitted.to(known)], 1)


class DINO(ViTModel):
    """DINO's ViT, from a ViTModel folder of transformers with or without a pooler."""

    _keys_to_ignore_on_load_unexpected = (r"^pooler\.",)

    def __init__(self, config: ViTConfig) -> None:
        config.layer_norm_eps = EPS
        super().__init__(config, add_pooling_layer=False)
        self.embeddings = Embeddings(config)

    @classmethod
    def load(cls, folder: Path, device: torch.device, dtype: torch.dtype) -> Self:
        """Load a frozen network; raise UserError, naming the file, unless the folder is whole and its parts fit."""
        read_as(NetworkConfig, folder / "config.json")
        network = load_strictly(cls, folder, "model", inside=_inside, key_mapping=NAMES)
        return network.to(device, dtype).requires_grad_(False).eval()

    def features(self, images: Float[Tensor, "b 3 h w"]) -> Float[Tensor, "b d"]:
        """Return the class tokens of images in [0, 1], of length 1, with a gradient to them.

        Raise ValueError, naming the image, for one outside [0, 1].
        """
        check_pixels(images, "DINO")
        seen = self(self.pixels(images), interpolate_pos_encoding=True).last_hidden_state
        return normalize(seen[:, 0].float(), dim=-1)

    def pixels(self, images: Float[Tensor, "b 3 h w"]) -> Float[Tensor, "b 3 height width"]:
        """Resize (bilinear, not antialiased) to the network's size of the shorter side, and normalise."""
        weight = self.embeddings.cls_token
        short = min(images.shape[2:])
        shape = [length * self.config.image_size // short for length in images.shape[2:]]
        small = interpolate(images.to(weight.device).float(), shape, mode="bilinear")
        mean, std = (small.new_tensor(values).view(3, 1, 1) for values in (MEAN, STD))
        return ((small - mean) / std).to(weight.dtype)


def _inside(key: str) -> str:
    for part, name in NAMES.items():
        key = re.sub(part, name, key)
    return key


def load(config: ScorerConfig, device: torch.device) -> Scorer:
    """Return the scorer of videos with the DINO folder `config.path`."""
    dino = DINO.load(Path(config.path), device, config.dtype)
    return NetworkScorer(of_features(dino.features, config.batch), (dino,))


KIND = ScorerKind("subject_consistency", load, check_path, min_frames=2, files=component(""))
