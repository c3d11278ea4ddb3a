"""Newer weights in the middle of a rollout: every log-density is of the weights that are written down for it."""

import numpy as np
import torch
from helpers import ALONE, LATENT_SHAPE, small_batch, small_causal, trainable

from unified_trainer.numerics.chunks import ChunkConfig
from unified_trainer.parallel.fsdp import cpu_copy
from unified_trainer.parallel.random import Streams
from unified_trainer.rl.policy import PolicyConfig, sample_policy
from unified_trainer.roles.backbone import Backbone
from unified_trainer.roles.causal import CausalStudent
from unified_trainer.roles.role import TrainableConfig
from unified_trainer.sampling import SamplerConfig, policy_velocity
from unified_trainer.weight_swaps import WeightSwaps

CONFIG = PolicyConfig(eta=0.5)
WHOLE = SamplerConfig(num_steps=5, guidance_scale=2.0)
CHUNKS = SamplerConfig(num_steps=3, guidance_scale=2.0, chunks=ChunkConfig(chunk_frames=1))


class Arrivals:
    """A role whose weights of versions 0, 1, 2 are known; version v is there from the border `when[v]` on."""

    def __init__(self, role, when: dict[int, int]) -> None:
        self.role, self.when, self.borders = role, when, 0
        first = cpu_copy(role.weights)
        self.weights = [{key: (1 + 0.2 * v) * p for key, p in first.items()} for v in range(3)]

    def become(self, version: int) -> None:
        with torch.no_grad():
            for key, weight in self.role.weights.items():
                weight.copy_(self.weights[version][key])

    def take(self, version: int) -> int:
        """What a worker does at a border."""
        self.borders += 1
        newest = max([version, *(v for v, border in self.when.items() if border < self.borders)])
        if newest > version:
            self.become(newest)
        return newest

    def sample(self, sampler: SamplerConfig):
        """A rollout that begins with version 0, and the versions that made it."""
        self.become(0)
        batch, rng = small_batch(), Streams(0, 0)
        swaps = WeightSwaps(0, self.take)
        with swaps.use():
            made = sample_policy(CONFIG, sampler, self.role, batch, 0, rng, same_noise=False)
        return made, swaps.versions

    def log_probs(self, rollout, sampler: SamplerConfig, version: int) -> torch.Tensor:
        """Log-densities of all transitions by one version, a column for each chunk: [b, s, k]."""
        self.become(version)
        batch, policy, found = small_batch(), CONFIG.policy(sampler), []
        ranges = sampler.chunks.ranges(LATENT_SHAPE[1]) if sampler.chunks.causal else [(0, LATENT_SHAPE[1])]
        with torch.no_grad():
            for s in range(rollout.log_probs.shape[1]):
                x_t, x_next = rollout.states[:, s], rollout.states[:, s + 1]
                v = policy_velocity(self.role, x_t, policy.sigmas[s], batch, sampler, rollout.x0)
                mean, std = policy.step(s, x_t, v)
                chunks = [policy.log_prob(x_next[:, :, a:b], mean[:, :, a:b], std) for a, b in ranges]
                found.append(torch.stack(chunks, 1))
        return torch.stack(found, 1)


def test_every_transition_has_the_version_and_the_density_of_its_weights():
    """Version 1 comes before the third call, version 2 before the fourth; the bits are those of a replay."""
    arrivals = Arrivals(trainable(), {1: 2, 2: 3})
    made, versions = arrivals.sample(WHOLE)
    assert versions.tolist() == [[0], [0], [1], [2]] and arrivals.borders == WHOLE.num_steps
    replayed = [arrivals.log_probs(made, WHOLE, version)[..., 0] for version in range(3)]
    for s, (version,) in enumerate(versions.tolist()):
        assert torch.equal(made.log_probs[:, s], replayed[version][:, s])
        others = [replayed[other][:, s] for other in range(3) if other != version]
        assert all((made.log_probs[:, s] - other).abs().min() > 1e-5 for other in others)


def test_the_last_call_has_the_newest_weights_too():
    first, second = Arrivals(trainable(), {}), Arrivals(trainable(), {1: WHOLE.num_steps - 1})
    (early, of_early), (late, of_late) = first.sample(WHOLE), second.sample(WHOLE)
    assert of_early.tolist() == of_late.tolist() == [[0]] * 4
    assert torch.equal(early.states, late.states) and not torch.equal(early.x0, late.x0)


def test_a_causal_student_swaps_between_chunks_alone():
    """The second chunk attends to the first as the new weights see it, and its densities are theirs."""
    role = CausalStudent("student", Backbone(small_causal(), ALONE, trained=True), TrainableConfig())
    arrivals = Arrivals(role, {1: 1})
    made, versions = arrivals.sample(CHUNKS)
    assert versions.tolist() == [[0, 1], [0, 1]] and arrivals.borders == 2
    old, new = (arrivals.log_probs(made, CHUNKS, version) for version in (0, 1))
    expected = (old[..., 0] + new[..., 1]) / 2
    assert torch.allclose(made.log_probs, expected, rtol=0, atol=1e-6)
    for other in (old.mean(-1), new.mean(-1), (new[..., 0] + old[..., 1]) / 2):
        assert (made.log_probs - other).abs().min() > 1e-5


def test_asking_without_newer_weights_changes_nothing():
    arrivals, batch, rng = Arrivals(trainable(), {}), small_batch(), Streams(0, 0)
    alone = sample_policy(CONFIG, WHOLE, arrivals.role, batch, 0, rng, same_noise=False)
    made, versions = arrivals.sample(WHOLE)
    assert arrivals.borders == WHOLE.num_steps and not np.any(versions)
    assert torch.equal(made.x0, alone.x0)
