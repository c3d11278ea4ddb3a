"""Scorers of clips of handwritten digits: rewards of one file, which build_digits_world.py copies into its folder.

A prompt names one digit, such as 7, and `direction` also needs one of left, right, up and down.

python -m unified_trainer --method dance_grpo --recipe digits --reward.scorers.other.weight 1 \
    --reward.scorers.other.kind digits/scorers.py:LogProbability --reward.scorers.other.path digits/checker.safetensors
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from unified_trainer.basics.errors import UserError
from unified_trainer.rewards.base import NetworkScorer, Scorer, ScorerConfig
from unified_trainer.rewards.own_settings import ScorerSettings

DIRECTIONS = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}
LEAST_TRAVEL = 4.0  # pixels; real clips have 7 to 11


class Reader(nn.Sequential):
    """A network from gray images [b, h, w] in [0, 1], of at least 8 x 8 pixels, to logits of the ten digits [b, 10]."""

    def __init__(self, width: int) -> None:
        def block(inner: int, outer: int) -> list[nn.Module]:
            return [nn.Conv2d(inner, outer, 3, padding=1), nn.BatchNorm2d(outer), nn.ReLU(), nn.MaxPool2d(2)]

        parts = [*block(1, width), *block(width, 2 * width), *block(2 * width, 4 * width)]
        super().__init__(
            nn.Unflatten(0, (-1, 1)), *parts, nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(64 * width, 10)
        )


def load_reader(file: Path, key: str) -> Reader:
    """Load a network that build_digits_world.py has trained; UserError names the setting for another file."""
    try:
        weights = load_file(file)
        reader = Reader(len(weights["1.weight"]))
        reader.load_state_dict(weights)
    except (OSError, SafetensorError, KeyError, RuntimeError) as error:
        raise UserError(f"{key} {file} is no reader of the digits world: {error}") from error
    return reader.eval().requires_grad_(False)


def digit_of(prompt: str) -> int:
    """Return the digit that a prompt names; ValueError for a prompt with none or with several."""
    named = set(re.findall(r"\b\d+\b", prompt))
    if len(named) != 1 or len(number := named.pop()) != 1:
        raise ValueError(f"the prompt {prompt!r} must name one digit")
    return int(number)


def direction_of(prompt: str) -> str:
    """Return the direction that a prompt names; ValueError for a prompt with none or with several."""
    named = [word for word in DIRECTIONS if re.search(rf"\b{word}\b", prompt)]
    if len(named) != 1:
        raise ValueError(f"the prompt {prompt!r} must name one of {', '.join(DIRECTIONS)}")
    return named[0]


@dataclass(frozen=True)
class LogProbability(ScorerSettings):
    """The log-probability of the prompt's digit, a mean over the frames."""

    def check(self, config: ScorerConfig, key: str, frames: int) -> None:
        if not config.path:
            raise UserError(
                f"{key}.path must be a reader of scripts/build_digits_world.py, such as digits/reader.safetensors"
            )

    def load(self, config: ScorerConfig, device: torch.device) -> Scorer:
        reader = load_reader(Path(config.path), "path").to(device)

        def score(videos: Float[Tensor, "b 3 t h w"], prompts: Sequence[str]) -> Float[Tensor, " b"]:
            return self.of(log_probabilities(reader, videos), [digit_of(prompt) for prompt in prompts])

        return NetworkScorer(score, (reader,))

    def of(self, read: Float[Tensor, "b 10"], digits: Sequence[int]) -> Float[Tensor, " b"]:
        """Return the score of videos by the log-probabilities of their digits."""
        return read[range(len(digits)), digits]


@dataclass(frozen=True)
class Accuracy(LogProbability):
    """1 where the prompt's digit has the largest mean log-probability, else 0."""

    def of(self, read: Float[Tensor, "b 10"], digits: Sequence[int]) -> Float[Tensor, " b"]:
        return (read.argmax(1) == torch.tensor(digits, device=read.device)).float()


def log_probabilities(reader: nn.Module, videos: Float[Tensor, "b 3 t h w"]) -> Float[Tensor, "b 10"]:
    """Return the log-probabilities of the ten digits, means over the frames of each video."""
    gray = videos.float().mean(1)
    return reader(gray.flatten(0, 1)).log_softmax(1).unflatten(0, gray.shape[:2]).mean(1)


def direction(videos: Float[Tensor, "b 3 t h w"], prompts: Sequence[str]) -> Float[Tensor, " b"]:
    """1 where the centre of the ink moves as the prompt says, by LEAST_TRAVEL or more and twice as far as aside."""
    ink = videos.float().mean(1)
    ink = torch.where(ink > 0.25, ink, 0.0)
    total = ink.sum((2, 3)).clamp(min=1e-6)
    x, y = (ink.sum(axis) @ (torch.arange(ink.shape[5 - axis]) + 0.5).to(ink) / total for axis in (2, 3))
    moved = torch.stack([x[:, -1] - x[:, 0], y[:, -1] - y[:, 0]], 1)
    along = torch.tensor([DIRECTIONS[direction_of(prompt)] for prompt in prompts]).to(moved)
    forward = (moved * along).sum(1)
    aside = (moved - forward[:, None] * along).norm(dim=1)
    return ((forward >= LEAST_TRAVEL) & (forward >= 2 * aside)).float()
