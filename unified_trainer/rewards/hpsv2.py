"""The scorer hpsv2: HPSv2 and HPSv2.1 (arXiv:2306.09341), a CLIP ViT-H/14 trained on preferences of people.

`import-hpsv2` writes its folder, which is one of transformers' CLIPModel.
"""

import html
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Self

import ftfy
import torch
from jaxtyping import Float
from tokenizers import normalizers
from torch import Tensor
from torch.nn.functional import interpolate, pad

from unified_trainer.basics.types import PerSample
from unified_trainer.rewards.base import ScorerKind, check_path
from unified_trainer.rewards.clip import CLIP, load, prompt_rules


class HPSv2(CLIP):
    """A scorer of images: the cosine of image and prompt, of whole images on black."""

    own_special = ("<start_of_text>", "<end_of_text>")  # which the package reads as begin and end

    @classmethod
    def load(cls, folder: Path, device: torch.device, dtype: torch.dtype) -> Self:
        """Load a frozen scorer, as `CLIP.load` does; cleaned prompts are read as they are, as in the package."""
        scorer = super().load(folder, device, dtype)
        scorer.tokenizer.backend_tokenizer.normalizer = normalizers.Sequence([])
        return scorer

    @staticmethod
    def cleaned(prompt: str) -> str:
        """Return a prompt as the package hpsv2 cleans it: straight quotes, no HTML entities, lower case."""
        return " ".join(html.unescape(html.unescape(ftfy.fix_text(prompt))).lower().split())

    def score(self, images: Float[Tensor, "b 3 h w"], prompts: Sequence[str]) -> PerSample:
        """Score images in [0, 1], with a gradient to them; errors are those of `CLIP.score`."""
        return super().score(images, prompts) / self.network.logit_scale.float().exp()

    def fit(self, images: Float[Tensor, "b 3 h w"]) -> Float[Tensor, "b 3 s s"]:
        """Resize (bicubic, antialiased) to the longer side, and fill the shorter one with black on both sides."""
        side, longest = self.crop[0], max(images.shape[2:])
        height, width = (max(1, round(length * side / longest)) for length in images.shape[2:])
        small = interpolate(images, (height, width), mode="bicubic", antialias=True)
        above, left = (side - height) // 2, (side - width) // 2
        return pad(small, (left, side - width - left, above, side - height - above))


KIND = ScorerKind(
    "hpsv2", partial(load, cls=HPSv2), check_path, per_frame=True, prompt_rules=partial(prompt_rules, cls=HPSv2)
)
