"""The scorer clip: similarity of image and prompt (CLIP, arXiv:2103.00020), from any CLIPModel folder of transformers.

PickScore (arXiv:2305.01569) is such a folder.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor
from transformers import CLIPModel, CLIPTextConfig, CLIPTokenizer

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.input_files import Schema, read_as, read_json
from unified_trainer.basics.types import PerSample
from unified_trainer.models.folder import load_strictly, read_tokenizer
from unified_trainer.models.hub import component
from unified_trainer.models.prompt_lengths import cut_by
from unified_trainer.numerics.resize import resize
from unified_trainer.rewards.base import (
    NetworkScorer,
    PromptRules,
    Scorer,
    ScorerConfig,
    ScorerKind,
    check_path,
    check_pixels,
    of_images,
)

SETTINGS = "preprocessor_config.json"
BICUBIC: Literal[3] = 3  # PIL's number
Size = Annotated[int, Field(ge=1, le=2**20)]


class ImageSettings(Schema):
    """preprocessor_config.json: how an image becomes the network's input."""

    size: Size | dict[str, Size]
    crop_size: Size | dict[str, Size] | None = None
    resample: Literal[3] = BICUBIC
    image_mean: Annotated[list[Annotated[float, Field(ge=0, le=1)]], Field(min_length=3, max_length=3)]
    image_std: Annotated[list[Annotated[float, Field(gt=0, le=1)]], Field(min_length=3, max_length=3)]


class NetworkConfig(Schema):
    """config.json, as far as it tells the network from another one."""

    model_type: Literal["clip"]
    projection_dim: Size = 512


@dataclass(frozen=True)
class CLIP:
    """A scorer of images: logit_scale x cosine(image, prompt), the diagonal of the logits of `CLIPModel`."""

    network: CLIPModel
    tokenizer: CLIPTokenizer
    shortest: int | None  # pixels of the shorter side before the crop; None resizes to the crop's own shape
    crop: tuple[int, int]  # height and width of what the network sees
    mean: tuple[float, ...]  # per channel, of images in [0, 1]
    std: tuple[float, ...]
    own_special: ClassVar[tuple[str, ...]] = ()  # texts besides the tokenizer's that no prompt may hold

    @classmethod
    def load(cls, folder: Path, device: torch.device, dtype: torch.dtype) -> Self:
        """Load a frozen scorer; raise UserError, naming the file, unless the folder is whole and its parts fit."""
        settings = read_as(ImageSettings, folder / SETTINGS)
        read_as(NetworkConfig, folder / "config.json")
        shortest, crop = _sizes(folder / SETTINGS, settings)
        tokenizer = read_tokenizer(CLIPTokenizer, folder)
        network = load_strictly(CLIPModel, folder, "model")
        side = network.config.vision_config.image_size
        if crop != (side, side):
            raise UserError(f"{folder / SETTINGS} crops to {crop}, but the network sees {side} x {side}")
        network = network.to(device, dtype).requires_grad_(False).eval()
        return cls(network, tokenizer, shortest, crop, tuple(settings.image_mean), tuple(settings.image_std))

    def score(self, images: Float[Tensor, "b 3 h w"], prompts: Sequence[str]) -> PerSample:
        """Score images in [0, 1], with a gradient to them; a prompt is cut to the length that the network reads.

        Raise UserError for a prompt with a special token, ValueError for an image outside [0, 1]; both name the sample.
        """
        if len(images) != len(prompts):
            raise ValueError(f"CLIP: {len(images)} images but {len(prompts)} prompts, expected one prompt for each")
        distinct = sorted(set(prompts))
        seen = self.network(**self._text(distinct), pixel_values=self.pixels(images))
        rows = torch.tensor([[distinct.index(prompt)] for prompt in prompts])
        logits = seen.logits_per_image.float()
        return logits.gather(1, rows.to(logits.device))[:, 0]

    def features(self, images: Float[Tensor, "b 3 h w"]) -> Float[Tensor, "b d"]:
        """Return the projected features of images, of length 1, with a gradient to them."""
        seen = self.network.vision_model(pixel_values=self.pixels(images)).pooler_output
        return torch.nn.functional.normalize(self.network.visual_projection(seen).float(), dim=-1)

    def pixels(self, images: Float[Tensor, "b 3 h w"]) -> Float[Tensor, "b 3 s s"]:
        """Fit images in [0, 1] to the network's size and normalise: the network's input."""
        check_pixels(images, "CLIP")
        weight = self.network.visual_projection.weight
        seen = self.fit(images.to(weight.device).float())
        mean, std = (seen.new_tensor(values).view(3, 1, 1) for values in (self.mean, self.std))
        return ((seen - mean) / std).to(weight.dtype)

    def fit(self, images: Float[Tensor, "b 3 h w"]) -> Float[Tensor, "b 3 s s"]:
        """Resize (bicubic, antialiased) to the shorter side, and crop the middle."""
        height, width = images.shape[2:]
        target = self.crop
        if self.shortest is not None:
            short = min(height, width)
            target = (height * self.shortest // short, width * self.shortest // short)
        small = resize(images, *target)
        top, left = ((side - cut) // 2 for side, cut in zip(target, self.crop, strict=True))
        return small[:, :, top : top + self.crop[0], left : left + self.crop[1]]

    @staticmethod
    def cleaned(prompt: str) -> str:
        """Return a prompt as the tokenizer gets it."""
        return prompt

    def _text(self, prompts: list[str]) -> dict[str, Tensor]:
        texts = [self.cleaned(prompt) for prompt in prompts]
        for i, text in enumerate(texts):
            for token in (*special_tokens(self.tokenizer), *self.own_special):
                if token in text:
                    raise UserError(f"CLIP: prompt {i} holds the special token {token}; remove it: {prompts[i]!r}")
        length = self.network.config.text_config.max_position_embeddings
        encoded = self.tokenizer(texts, padding=True, truncation=True, max_length=length, return_tensors="pt")
        device = self.network.visual_projection.weight.device
        return {name: encoded[name].to(device) for name in ("input_ids", "attention_mask")}


def _sizes(file: Path, settings: ImageSettings) -> tuple[int | None, tuple[int, int]]:
    """Return the shorter side to resize to, None where the shape is given, and the shape to crop to."""
    size = settings.size
    shortest = size if isinstance(size, int) else size.get("shortest_edge")
    crop = size if shortest is None else shortest if settings.crop_size is None else settings.crop_size
    try:
        return shortest, (crop, crop) if isinstance(crop, int) else (crop["height"], crop["width"])
    except KeyError as error:
        raise UserError(f"{file}: a size has neither shortest_edge nor height and width") from error


def load(config: ScorerConfig, device: torch.device, cls: type[CLIP] = CLIP) -> Scorer:
    """Return the scorer of videos in the folder `config.path`."""
    clip = cls.load(Path(config.path), device, config.dtype)
    return NetworkScorer(of_images(clip.score, config.batch, config.top_fraction), (clip.network,))


def special_tokens(tokenizer: CLIPTokenizer) -> tuple[str, ...]:
    """Return the texts that no prompt may hold; a token that pads alone, such as "!", is none."""
    ends = (tokenizer.bos_token, tokenizer.eos_token)
    return tuple(token for token in tokenizer.all_special_tokens if token in ends or token != tokenizer.pad_token)


def prompt_rules(config: ScorerConfig, cls: type[CLIP] = CLIP) -> PromptRules:
    """Return the demands of the scorer in the folder `config.path`."""
    tokenizer = read_tokenizer(CLIPTokenizer, Path(config.path))
    text = read_json(Path(config.path, "config.json")).get("text_config", {})
    longest = text.get("max_position_embeddings", CLIPTextConfig().max_position_embeddings)
    special, cut = (*special_tokens(tokenizer), *cls.own_special), partial(cut_by, tokenizer, longest)
    return PromptRules(special, cls.cleaned, cut=lambda prompts: cut([cls.cleaned(prompt) for prompt in prompts]))


KIND = ScorerKind("clip", load, check_path, files=component(""), per_frame=True, prompt_rules=prompt_rules)
