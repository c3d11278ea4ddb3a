"""The samples of a validation: which process makes which, and what is measured of each."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from unified_trainer.basics.requests import Request
from unified_trainer.basics.types import Latents, Video, check_finite
from unified_trainer.data.loader import make_batch
from unified_trainer.data.tiny_world import is_tiny_world
from unified_trainer.data.tiny_world_measures import exact_measures
from unified_trainer.data.video_files import to_uint8
from unified_trainer.models.base import Codec
from unified_trainer.parallel.meter import phase
from unified_trainer.parallel.random import Streams
from unified_trainer.rewards.pixels import statistics, thumbnail
from unified_trainer.rewards.reward import Reward, RewardSum
from unified_trainer.roles.role import Role
from unified_trainer.run.settings.config import ValidationConfig
from unified_trainer.run.validation.distances import Distances
from unified_trainer.sampling.solver import SamplerConfig, generate

SCORES, PIXELS = "score", "pixels/"  # names of columns, and what such names begin with
THUMBNAILS = "thumbnail"
EXTREMES = 2  # best and worst samples of a validation that are written as videos beside its first ones


@dataclass(frozen=True)
class Measured:
    """Measurements of some samples, and videos of those that `shown` names."""

    columns: dict[str, Tensor]  # a row for each sample
    clips: dict[int, np.ndarray]  # by the number of the sample; [frames, height, width, 3], uint8


def batches(config: ValidationConfig, ranks: int) -> list[list[range]]:
    """Return for each data rank the samples of its batches, in order.

    Ranks that share weights must make equally many passes, so the last ones pad with numbers from `num_samples` on.
    """
    count = samples_of_rank(config.num_samples, ranks)
    shares = [range(rank * count, (rank + 1) * count) for rank in range(ranks)]
    return [[share[i : i + config.batch] for i in range(0, count, config.batch)] for share in shares]


def samples_of_rank(samples: int, ranks: int) -> int:
    """Return how many samples of a validation each of as many data ranks makes: their share, rounded up."""
    return -(-samples // ranks)


def shown(reward: RewardSum, columns: Mapping[str, Tensor], numbers: range, videos: int) -> set[int]:
    """Return which samples have a video: numbers below `videos`, and the best and worst rows by the reward."""
    if not videos or SCORES not in columns:
        return {*range(videos)}
    scores = columns[SCORES][: len(numbers), : len(reward.weights)].cpu().double()
    rewards = reward.partial_total(scores)
    order = rewards.argsort(stable=True)[: int((~rewards.isnan()).sum())].tolist()  # NaN is last
    return {*range(videos), *(numbers[i] for i in (*order[:EXTREMES], *order[-EXTREMES:]))}


def sample_requests(requests: Sequence[Request], config: ValidationConfig) -> tuple[Request, ...]:
    """Return the request of every sample: sample i is of request i, counted round and round."""
    return tuple(requests[i % len(requests)] for i in range(config.num_samples))


class SampleMaker:
    """Generates samples with fixed prompts and noise and measures them, one batch at a time."""

    def __init__(
        self,
        config: ValidationConfig,
        codec: Codec,
        reward: Reward,
        distances: Distances | None,
        sampler: SamplerConfig,
        requests: Sequence[Request],
        latent_shape: tuple[int, int, int, int],
        device: torch.device,
    ) -> None:
        self.requests = sample_requests(requests, config)
        self._config, self._codec, self._reward = config, codec, reward
        self._distances, self._sampler = distances, sampler
        self._latent_shape, self._device = latent_shape, device

    @torch.no_grad()
    def make(self, role: Role, samples: range, videos: int, step: int) -> Measured:
        """Make and measure one batch of samples with a role after `step` training steps.

        `shown` says which are kept as video. Raise NotFiniteError for samples that are not finite.
        """
        x0, video = self._generate(role, list(samples), step)
        columns = {f"{PIXELS}{name}": row for name, row in statistics(video).items()}
        columns[THUMBNAILS] = thumbnail(video)
        requests = self._requests(samples)
        prompts = tuple(request.prompt for request in requests)
        if names := (*self._reward.weights, *self._reward.held_out):
            columns[SCORES] = self._reward.parts_of(x0, video, prompts, names)
        if is_tiny_world(video.shape[2:], [request.text for request in self.requests]):
            columns |= {name: rows.to(self._device) for name, rows in exact_measures(video, prompts).items()}
        if self._distances is not None:
            columns |= self._distances.columns(video, samples)
        kept = sorted(shown(self._reward, columns, samples, videos).intersection(samples))
        return Measured(columns, dict(zip(kept, to_uint8(video[[i - samples.start for i in kept]]), strict=True)))

    def _requests(self, samples: Sequence[int]) -> tuple[Request, ...]:
        return tuple(self.requests[i % len(self.requests)] for i in samples)

    def _generate(self, role: Role, samples: list[int], step: int) -> tuple[Latents, Video]:
        batch = make_batch(
            self._codec,
            self._requests(samples),
            self._sampler.negative_prompt,
            self._latent_shape,
            prompt_ids=samples,
            sample_ids=samples,
        )
        streams = Streams(self._config.seed, 0, self._device)

        def draw(name: str) -> Tensor:
            return streams.noise(name, samples, self._latent_shape)

        x0 = generate(role, draw("validation"), batch, self._sampler, lambda s: draw(f"transition {s}"))
        check_finite(x0, f"validation after training step {step}")
        with phase("decode"):
            return x0, self._codec.decode(x0)
