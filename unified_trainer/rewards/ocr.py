"""The scorer ocr: how well a video shows the words that its prompt has in double quotes, read by rapidocr's networks.

It is the measure of Flow-GRPO (arXiv:2505.05470).
"""

import importlib.util
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from unified_trainer.basics.errors import MissingPackageError, UserError
from unified_trainer.basics.types import PerSample
from unified_trainer.basics.versions import install
from unified_trainer.rewards.base import PromptRules, Scorer, ScorerConfig, ScorerKind, check_no_weights, of_images

PACKAGES = ("rapidocr", "onnxruntime")
QUOTED = re.compile('"([^"]*)"|\u201c([^\u201d]*)\u201d')  # straight or curved


def wanted_text(prompt: str) -> str:
    """Return what is between double quotes in a prompt, in lower case and without spaces.

    Raise UserError if there is nothing.
    """
    text = _plain("".join(straight or curved for straight, curved in QUOTED.findall(prompt)))
    if not text:
        raise UserError(
            f'OCR: the prompt has no words in double quotes to look for: {prompt!r}; write a sign "like this"'
        )
    return text


def similarity(seen: str, wanted: str) -> float:
    """Compute 1 - min(d, n) / n, with Levenshtein's distance d of the texts and the length n of the wanted one.

    A text that holds the wanted one has 1. Case and spaces do not count.
    """
    seen, wanted = _plain(seen), _plain(wanted)
    if wanted in seen:
        return 1.0
    return 1 - min(edit_distance(seen, wanted), len(wanted)) / len(wanted)


def edit_distance(left: str, right: str) -> int:
    """Return the least number of inserted, removed and replaced characters that turn one text into the other."""
    row = list(range(len(right) + 1))
    for i, a in enumerate(left, 1):
        before, row[0] = row[0], i
        for j, b in enumerate(right, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (a != b))
    return row[-1]


def _plain(text: str) -> str:
    return "".join(text.lower().split())


@cache
def _reader() -> Callable[[np.ndarray], str]:
    """Return a function that reads the text in an image of 8 bits, [height, width, BGR]; lines follow each other."""
    from rapidocr import RapidOCR  # an optional extra

    threads = {f"EngineConfig.onnxruntime.{of}_op_num_threads": torch.get_num_threads() for of in ("intra", "inter")}
    engine = RapidOCR(params={"Global.log_level": "critical", **threads})

    def read(image: np.ndarray) -> str:
        return " ".join(engine(image, use_cls=False).txts or ())

    return read


def score(images: Float[Tensor, "b 3 *frame h w"], prompts: Sequence[str]) -> PerSample:
    """Return the scores of images, or of videos of one frame, on the CPU."""
    wanted, read = [wanted_text(prompt) for prompt in prompts], _reader()
    frames = images.detach().reshape(len(images), 3, *images.shape[-2:])
    pixels = (255 * frames.clamp(0, 1)).round().to("cpu", torch.uint8).flip(1).movedim(1, -1).contiguous()
    return torch.tensor([similarity(read(x.numpy()), text) for x, text in zip(pixels, wanted, strict=True)])


def _load(config: ScorerConfig, device: torch.device) -> Scorer:
    _reader()
    return of_images(score, config.batch, config.top_fraction)


def _check(config: ScorerConfig, key: str, frames: int) -> None:
    check_no_weights(config, key, frames)
    if missing := [name for name in PACKAGES if importlib.util.find_spec(name) is None]:
        raise MissingPackageError(f"{key}: ocr needs {' and '.join(missing)}: {install('ocr')}")


def _fault(prompt: str) -> str:
    try:
        wanted_text(prompt)
    except UserError:
        return 'has no words in double quotes, which the scorer ocr looks for: write a sign "like this"'
    return ""


KIND = ScorerKind("ocr", _load, _check, per_frame=True, prompt_rules=lambda _: PromptRules(fault=_fault))
# 0.4 to 0.45 s were measured at 480 x 832 pixels with rapidocr 3.10.
KIND = replace(KIND, program=f"{__file__}:score", cpu_seconds=0.5)
