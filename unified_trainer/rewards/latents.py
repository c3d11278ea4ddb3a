"""Rewards with scorers that read latents, as a reward model in the latent space of the VAE does."""

from collections.abc import Iterable, Mapping

import torch
from jaxtyping import Float
from torch import Tensor

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.types import Latents, PerSample, Video
from unified_trainer.models.base import Codec
from unified_trainer.rewards.base import LatentScorer, RewardConfig, Scorer
from unified_trainer.rewards.reward import Reward


class LatentReward(Reward):
    """The reward of samples some of whose scorers read latents.

    Nothing is decoded where all scorers with a weight do; then there are no pixel statistics and no diversity.
    """

    def __init__(self, scorers: Mapping[str, Scorer], codec: Codec, config: RewardConfig) -> None:
        """Take scorers as `Reward` does; those that read latents are each a LatentScorer."""
        super().__init__(scorers, codec, config)
        of_latents = {name: found.scorer for name, found in scorers.items() if isinstance(found, LatentScorer)}
        self.scorers |= of_latents
        self._of_latents = tuple(of_latents)
        self._decodes = any(name not in of_latents for name in self.weights)

    def parts(self, video: Video, prompts: tuple[str, ...], names: Iterable[str]) -> Float[Tensor, "b r"]:
        """Return what `VideoReward.parts` does; raise UserError for a scorer that reads latents."""
        for name in (names := tuple(names)):
            if name in self._of_latents:
                raise UserError(f"reward: {name} reads latents, but here are videos alone")
        return super().parts(video, prompts, names)

    def parts_of(
        self, x0: Latents, video: Video, prompts: tuple[str, ...], names: Iterable[str]
    ) -> Float[Tensor, "b r"]:
        """Return scale x score, a column for each named scorer, each of what it reads."""
        columns = [self._part(name, x0 if name in self._of_latents else video, prompts) for name in names]
        return torch.stack(columns, 1) if columns else x0.new_zeros(len(x0), 0)

    def _seen(self, video: Video, step: int) -> tuple[dict[str, PerSample], Float[Tensor, "b d"]]:
        return super()._seen(video, step) if self._decodes else ({}, video.new_zeros(len(video), 0))

    def _decode(self, x0: Latents) -> Video:
        if self._decodes:
            return super()._decode(x0)
        return x0.new_empty(len(x0), 3, 0, 0, 0)  # no scorer reads it


def reward_of(scorers: Mapping[str, Scorer], codec: Codec, config: RewardConfig) -> Reward:
    """Return the reward of these scorers: a LatentReward if some of them read latents."""
    latents = any(isinstance(scorer, LatentScorer) for scorer in scorers.values())
    return (LatentReward if latents else Reward)(scorers, codec, config)
