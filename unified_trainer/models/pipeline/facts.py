"""The facts about a network, its conditions and its VAE that the calls of a pipeline show."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from unified_trainer.basics.types import Latents
from unified_trainer.models.base import Shape
from unified_trainer.models.pipeline.arguments import FoundArguments
from unified_trainer.models.pipeline.guidance import Rule
from unified_trainer.models.pipeline.latents import KNOWN, FoundLatents
from unified_trainer.models.pipeline.sound import FoundSound
from unified_trainer.models.pipeline.tokens import FoundTokens
from unified_trainer.models.pipeline.values import Place, Size


@dataclass(frozen=True)
class FoundTime:
    """An argument with the time: slope w + offset, where w is sigma without the shift `warp`."""

    name: str
    slope: float
    offset: float
    warp: float
    shape: tuple[int, ...]  # of one sample, where each token has a time
    fixed: Tensor | None  # of that shape: the times of tokens whose time is that at every level, and nan for others

    def __str__(self) -> str:
        """Return the time in words."""
        words = f"{self.name} = {self.slope:.6g} sigma" + (f" + {self.offset:.6g}" if self.offset else "")
        words += f", sigma without a shift of {self.warp:.6g}" if self.warp != 1 else ""
        words += " for each token" if self.shape else ""
        return words + (", another one for clean tokens" if self.fixed is not None else "")

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
    latents: FoundLatents  # of the video, or of the image
    sound: FoundSound | None
    times: tuple[FoundTime, ...]
    sign: float  # velocity = sign x output
    output: Place | None  # the output's channels that are the velocity, if it has others
    arguments: FoundArguments
    given_levels: bool  # whether the pipeline gives its scheduler the levels before the shift
    guidance: str  # the argument of guidance that is embedded in the network; "": none
    guidance_factor: float
    rule: Rule  # of guidance
    negative: tuple[int, int] | None  # a guided step's call, and its row, with a negative prompt unlike a prompt
    tokens: FoundTokens  # of the middle block
    no_guidance: Mapping[str, float]  # arguments of the call that turn guidance off

    @property
    def shape(self) -> Shape:
        """The shape of the trainer's latents."""
        return self.sound.shape if self.sound else self.latents.shape

    def frames_of(self, latent_frames: int) -> int:
        """Return the frames of a video of so many latent frames."""
        return 1 + (latent_frames - 1) * ((self.size[0] - 1) // max(1, self.latents.shape[1] - 1))

    def of_video(self, latents: Latents) -> Float[Tensor, "b c frames h w"]:
        """Return the part of the trainer's latents that the video's VAE decodes."""
        return self.sound.parts(latents).video if self.sound else latents

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
        behind = ", with other channels behind them" if self.latents.channels else ""
        sound = f" and {self.sound.latents.name} {[*self.sound.latents.native]} of its sound" if self.sound else ""
        parts = [
            f"latents: {self.latents.name} {[*self.latents.native]}{behind}{sound}",
            f"time: {', '.join(map(str, self.times))}",
            f"velocity: {'-' if self.sign < 0 else ''}output",
            f"prompt{' with its image' * self.arguments.joint}: {', '.join(self.arguments.text)}",
        ]
        parts += [f"image: {', '.join(self.arguments.images)}"] if self.arguments.images else []
        parts += [f"guidance in the network: {self.guidance}"] if self.guidance else []
        parts += ["negative prompts are encoded unlike prompts"] if self.negative else []
        parts += [f"guidance scale: the pipeline's + {self.rule.more:g}"] if self.rule.more else []
        return "; ".join(filter(None, [*parts, str(self.rule)]))
