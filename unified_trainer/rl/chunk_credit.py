"""Temporal credit: a causal student's chunks are rewarded one by one, and groups may share their first chunks."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from unified_trainer.errors import UserError
from unified_trainer.numerics.chunk_credit import chunk_advantages, chunk_returns
from unified_trainer.numerics.chunks import ChunkConfig
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.parallel.random import Streams
from unified_trainer.ranges import CountOrZero, Fraction
from unified_trainer.rl.groups import GroupConfig, gather_ids
from unified_trainer.rl.policy import PolicyConfig
from unified_trainer.rl.rollouts import ScoredSamples
from unified_trainer.roles.reward import Reward, RewardSum
from unified_trainer.sampling import SamplerConfig
from unified_trainer.types import Batch, PerSample


@dataclass(frozen=True)
class CreditConfig:
    """Which part of a sample a reward is of."""

    per_chunk: bool = False
    """Reward every chunk of a causal student by itself, and give its transitions an advantage of their own
    (experimental)."""
    frames: Literal["own", "up_to"] = "own"
    """Frames that the reward of a chunk scores: its own, or those of all chunks up to it."""
    discount: Fraction = 1.0
    """Weight of the next chunk's return in that of a chunk; 0: a chunk has its own reward alone."""
    shared_chunks: CountOrZero = 0
    """First chunks that the samples of a branch share: they have equal noise there (experimental)."""
    branches: CountOrZero = 1
    """Branches of a prompt's group, each with its own shared chunks."""

    def check(self, config: PolicyConfig, groups: GroupConfig, sampler: SamplerConfig) -> None:
        """Raise UserError, naming the key, for settings that cannot work with those of the policy and the groups."""
        if not self.per_chunk:
            if self.shared_chunks:
                raise UserError("algorithm.credit.shared_chunks needs --algorithm.credit.per-chunk")
            return
        if not sampler.chunks.causal:
            raise UserError(
                "algorithm.credit.per_chunk needs a causal student: set sampler.chunks.chunk_frames above 0"
            )
        if config.objective == "gspo" or config.guard or config.trust_region or config.clip_velocity:
            raise UserError(
                "algorithm.credit.per_chunk needs another objective than gspo, no algorithm.guard, and "
                "algorithm.trust_region and algorithm.clip_velocity 0: these are of whole samples"
            )
        if config.correction != "none" or (config.kl_coefficient and config.kl_in == "reward"):
            raise UserError(
                "algorithm.credit.per_chunk needs algorithm.correction none and algorithm.kl_in loss: weights and "
                "penalties are of whole samples"
            )
        if groups.advantage == "gdpo" or groups.reward_threshold > float("-inf"):
            raise UserError(
                "algorithm.credit.per_chunk needs another algorithm.advantage than gdpo, and no "
                "algorithm.reward_threshold"
            )
        if self.shared_chunks:
            self._check_branches(groups)

    def _check_branches(self, groups: GroupConfig) -> None:
        if not self.branches or groups.num_samples % self.branches or groups.num_samples < 2 * self.branches:
            raise UserError(
                f"algorithm.credit.branches must divide algorithm.num_samples ({groups.num_samples}) into branches of "
                f"at least two samples, not {self.branches}"
            )
        if groups.init_same_noise:
            raise UserError(
                "algorithm.init_same_noise must be false with algorithm.credit.shared_chunks, which says itself what "
                "the samples of a prompt share"
            )


@dataclass(frozen=True)
class CreditedGroupConfig(GroupConfig):
    """Settings of groups whose rewards may be of chunks."""

    credit: CreditConfig = field(default_factory=CreditConfig)


class BranchStreams(Streams):
    """The streams of a rollout whose samples take the noise of the first frames from the first one of their branch."""

    def __init__(self, rng: Streams, frames: int, size: int) -> None:
        """`frames` latent frames are shared by `size` consecutive samples."""
        self._rng, self._frames, self._size = rng, frames, size
        self.shared = rng.shared

    def restarted(self) -> "BranchStreams":
        return BranchStreams(self._rng.restarted(), self._frames, self._size)

    def numbered(self, number: int) -> "BranchStreams":
        return BranchStreams(self._rng.numbered(number), self._frames, self._size)

    def noise(self, name: str, keys: Sequence[int], shape: Sequence[int]) -> Float[Tensor, "b c t h w"]:
        """Return the noise of latents [len(keys), c, t, h, w]; the keys are sample ids."""
        noise = self._rng.noise(name, keys, shape)
        first = self._rng.noise(name, [key - key % self._size for key in keys], shape)
        return torch.cat([first[:, :, : self._frames], noise[:, :, self._frames :]], 2)

    def uniform(self, name: str, keys: Sequence[int]) -> Float[Tensor, " b"]:
        return self._rng.uniform(name, keys)


def rollout_streams(config: CreditedGroupConfig, sampler: SamplerConfig, batch: Batch, rng: Streams) -> Streams:
    """Return the random numbers of a batch's rollout: with shared chunks, those of its branches in these chunks."""
    shared = config.credit.shared_chunks
    if not shared:
        return rng
    ranges = sampler.chunks.ranges(batch.latent_shape[1])
    if shared >= len(ranges):
        raise UserError(
            f"algorithm.credit.shared_chunks must be below the {len(ranges)} chunks of a sample, not {shared}: the "
            "samples of a branch would be equal"
        )
    return BranchStreams(rng, ranges[shared][0], config.num_samples // config.credit.branches)


def transition_advantages(
    config: CreditedGroupConfig,
    sampler: SamplerConfig,
    reward: RewardSum,
    samples: ScoredSamples,
    advantages: PerSample,
    trained: list[int],
    mesh: Mesh,
) -> Float[Tensor, "b trained"] | Float[Tensor, "b trained k"]:
    """Return the advantage of each sample, or of each of its chunks, at each trained transition.

    The advantage of a sample, or of a chunk, is that of all its transitions.
    """
    if not config.credit.per_chunk:
        return advantages[:, None].expand(-1, len(trained))
    of_chunks = _of_chunks(config, sampler.chunks, reward, samples, mesh)
    return of_chunks[:, None].expand(-1, len(trained), -1)


def _of_chunks(
    config: CreditedGroupConfig, chunks: ChunkConfig, reward: RewardSum, samples: ScoredSamples, mesh: Mesh
) -> Float[Tensor, "b k"]:
    """Score every chunk of this rank's samples, and return the chunks' advantages within the groups of all ranks."""
    if not isinstance(reward, Reward):
        raise UserError(
            "algorithm.credit.per_chunk needs the scorers in the training processes: set rollouts.workers 0"
        )
    credit, batch, rollout = config.credit, samples.batch, samples.rollout
    ranges, size, past = chunks.ranges(batch.latent_shape[1]), config.rollout_batch, credit.frames == "up_to"
    rows = [range(len(batch))[start : start + size] for start in range(0, len(batch), size)]
    prompts = [tuple(batch.prompts[row] for row in own) for own in rows]
    with reward.scoring():
        parts = [
            reward.score_chunks(rollout.end(own), named, ranges, past=past)
            for own, named in zip(rows, prompts, strict=True)
        ]
    returns = mesh.gather(chunk_returns(torch.cat(parts).cpu().double(), credit.discount))
    branches = None
    if credit.shared_chunks:
        of_sample = torch.tensor(batch.sample_ids, device=returns.device) // (config.num_samples // credit.branches)
        branches = mesh.gather(of_sample)
    ids = gather_ids(batch, returns, mesh)
    advantages = chunk_advantages(returns, ids, config.advantage, branches, credit.shared_chunks)
    start = mesh.data_rank * len(batch)
    return advantages[start : start + len(batch)].clamp(-config.advantage_clip, config.advantage_clip).float()
