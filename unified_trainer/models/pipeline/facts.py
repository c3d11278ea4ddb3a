"""The facts about a network, its conditions and its VAE that the calls of a pipeline show."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from unified_trainer.models.pipeline.arguments import FoundArguments
from unified_trainer.models.pipeline.guidance import Rule
from unified_trainer.models.pipeline.latents import KNOWN, FoundLatents
from unified_trainer.models.pipeline.tokens import FoundTokens
from unified_trainer.models.pipeline.values import Place, Size


@dataclass(frozen=True)
class FoundTime:
    """The argument with the time: slope w + offset, where w is sigma without the shift `warp`."""

    name: str
    slope: float
    offset: float
    warp: float
    shape: tuple[int, ...]  # of one sample, where each token has a time
    fixed: Tensor | None  # of that shape: the times of tokens whose time is that at every level, and nan for others

    def at(self, sigma: Tensor) -> Tensor:
        """Return the times at levels [b]."""
        time = self.slope * (sigma / (self.warp - (self.warp - 1) * sigma)) + self.offset
        time = time.view(-1, *[1] * len(self.shape)).expand(-1, *self.shape)
        return time if self.fixed is None else torch.where(self.fixed.isnan(), time, self.fixed)


@dataclass(frozen=True)
class Facts:
    """The facts at one size."""

    pipeline: str
    size: Size
    latents: FoundLatents
    time: FoundTime
    sign: float  # velocity = sign x output
    output: Place | None  # the output's channels that are the velocity, if it has others
    arguments: FoundArguments
    given_levels: bool  # whether the pipeline gives its scheduler the levels before the shift
    guidance: str  # the argument of guidance that is embedded in the network; "": none
    guidance_factor: float
    rule: Rule  # of guidance
    tokens: FoundTokens  # of the middle block
    no_guidance: Mapping[str, float]  # arguments of the call that turn guidance off

    @property
    def latents_hold_image(self) -> bool:
        """Whether the first latent frames of a clip are all that the network is given of a condition image."""
        return self.arguments.images.keys() == {KNOWN} and self.latents.known_encoded

    @property
    def pixels(self) -> int:
        """The pixels of a latent along a side."""
        return self.size[1] // self.latents.shape[2]

    def __str__(self) -> str:
        """Return the facts in words."""
        found = self.time
        time = f"{found.slope:.6g} sigma" + (f" + {found.offset:.6g}" if found.offset else "")
        time += f", sigma without a shift of {found.warp:.6g}" if found.warp != 1 else ""
        time += " for each token" if found.shape else ""
        time += ", another one for clean tokens" if found.fixed is not None else ""
        behind = ", with other channels behind them" if self.latents.channels else ""
        parts = [
            f"latents: {self.latents.name} {[*self.latents.native]}{behind}",
            f"time: {found.name} = {time}",
            f"velocity: {'-' if self.sign < 0 else ''}output",
            f"prompt{' with its image' * self.arguments.joint}: {', '.join(self.arguments.text)}",
        ]
        parts += [f"image: {', '.join(self.arguments.images)}"] if self.arguments.images else []
        parts += [f"guidance in the network: {self.guidance}"] if self.guidance else []
        parts += [f"guidance scale: the pipeline's + {self.rule.more:g}"] if self.rule.more else []
        return "; ".join(filter(None, [*parts, str(self.rule)]))
