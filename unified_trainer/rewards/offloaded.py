"""Scorers whose networks are on the device only while they score."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from unified_trainer.basics.types import PerSample, Video
from unified_trainer.models.frozen_network import FrozenNetwork
from unified_trainer.rewards.base import Features, Scorer


@dataclass(frozen=True)
class OffloadedScorer:
    """A scorer with networks in CPU memory, which are on the device during a call or a longer use."""

    scorer: Scorer
    networks: tuple[FrozenNetwork, ...]

    @classmethod
    def of(cls, scorer: Scorer, networks: Sequence[nn.Module], device: torch.device) -> "OffloadedScorer":
        """Take a scorer that runs these networks on a device; their weights are moved to CPU memory."""
        frozen = tuple(FrozenNetwork(partial(_same, network), device, offload=True) for network in networks)
        for network in frozen:
            network.load()
        return cls(scorer, frozen)

    def __call__(self, video: Video, prompts: Sequence[str]) -> PerSample:
        with self.in_use():
            return self.scorer(video, prompts)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Keep the networks on the device."""
        with ExitStack() as stack:
            for network in self.networks:
                stack.enter_context(network.in_use())
            yield

    def features(self, features: Features) -> Features:
        """Return image features that run the same networks."""

        def of(images: torch.Tensor) -> torch.Tensor:
            with self.in_use():
                return features(images)

        return of


def _same(network: nn.Module) -> nn.Module:
    return network
