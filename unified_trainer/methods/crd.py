"""Centered Reward Distillation: a model's implicit rewards are fitted to the rewards of its samples (arXiv:2603.14128).

The implicit reward of a sample is the gain of its likelihood over a moving average of the student. It is known up to a
constant of the prompt, which falls out where both rewards are centred in the group.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from unified_trainer.basics.ranges import Decay, Fraction, Positive
from unified_trainer.basics.types import Batch, Latents, PerSample
from unified_trainer.methods.base import Loss, initial_copy, trained, updated_copy
from unified_trainer.methods.rl.minibatches import Minibatch
from unified_trainer.methods.rl.old_policy import NoisedSamples, OldPolicyConfig, OldPolicyMethod, Update
from unified_trainer.methods.rl.updates import LossAt, MinibatchLoss
from unified_trainer.numerics.advantages import group_means
from unified_trainer.numerics.flow import promote
from unified_trainer.numerics.kl import velocity_kl
from unified_trainer.numerics.objectives import relative_error
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.parallel.random import Streams
from unified_trainer.roles.weight_copy import WeightCopy

LEAST_KL = 1e-4  # coefficient of the KL at an advantage of -advantage_clip


@dataclass(frozen=True)
class CRDConfig(OldPolicyConfig):
    """The defaults are those of Flow-Factory's trainer `crd`, but for old_decay and its KL to the reference."""

    beta: Positive = 1.0
    """Factor of the implicit reward, which is fitted to the advantage over twice advantage_clip."""
    moving_decay: Decay = 0.999
    """Largest decay of the moving average of the student that implicit rewards are measured from; it is updated once a
    training step."""
    moving_decay_start: Decay = 0.25
    """That decay in the first training step."""
    moving_decay_rise: Fraction = 0.005
    """Increase of that decay in each training step."""


class CRD(OldPolicyMethod):
    """loss = c / beta (d - mean d)^2 of each sample, d = beta (l - l_average) - A / (2 c), the mean that of its group.

    l = `log_likelihood`, l_average that of the moving average; A is the advantage, at most c = advantage_clip.
    """

    config_class = CRDConfig
    roles = {
        "student": trained(),
        "old": updated_copy("student"),
        "moving_average": updated_copy("student"),
        "reference": initial_copy("student", when=lambda config: config.kl_coefficient > 0),
    }
    sampled_by = "old"
    moving_average: WeightCopy

    def step(self, batch: Batch, step: int, rng: Streams, mesh: Mesh) -> Iterator[Loss]:
        config = self.config
        yield from super().step(batch, step, rng, mesh)
        decay = config.moving_decay_start + config.moving_decay_rise * step
        self.moving_average.update_from(self.student, min(config.moving_decay, decay))

    def start_update(self, update: Update) -> LossAt:
        """Measure the update's samples without gradient, for the means of their groups, and return its losses."""
        beta, c = self.config.beta, self.config.advantage_clip
        measured = dict(zip(update.levels, self._measure(update), strict=True))

        def loss_at(minibatch: Minibatch, s: int, last: bool) -> MinibatchLoss:
            samples = self.noised(update, minibatch, s)
            velocity = self.velocity(self.student, samples)
            fitted, gap = measured[s][:, minibatch.rows]
            error = beta * log_likelihood(velocity, samples) - fitted
            return self.weighted(minibatch, samples, velocity, c / beta * error.square(), {"policy_gap": gap})

        return loss_at

    @torch.no_grad()
    def _measure(self, update: Update) -> Float[Tensor, "levels 2 rows"]:
        """Return y + mean d and mean |v - v_average|^2 of each sample: d - mean d = beta l - (y + mean d).

        A mean is over all ranks, so every rank measures before any trains.
        """
        mesh, parts = update.mesh, update.minibatches
        passes = [torch.cat([self._pass(update, part, s) for part in parts], 1) for s in update.levels]
        y, gap, d = torch.stack(passes, 1)  # each [levels, samples of the minibatches]
        rows, weights = torch.cat([part.rows for part in parts]), torch.cat([part.weights for part in parts])
        ids = torch.tensor(update.samples.batch.prompt_ids)[rows]
        of_all = (mesh.gather(x.to(d.device, non_blocking=True)) for x in (d.T, ids, weights))
        mean_d = group_means(*of_all)[mesh.data_rank * len(rows) :][: len(rows)].T
        measured = d.new_zeros(len(update.levels), 2, len(update.samples.batch))
        real = (weights > 0).nonzero().flatten()  # rows of padding stand for others
        measured[:, :, rows[real]] = torch.stack([y + mean_d, gap], 1)[:, :, real]
        return measured

    def _pass(self, update: Update, minibatch: Minibatch, s: int) -> Float[Tensor, "3 m"]:
        """Return y = beta l_average + A / (2 c), mean |v - v_average|^2 and d = beta l - y of a minibatch's samples."""
        samples, beta = self.noised(update, minibatch, s), self.config.beta
        v, v_average = (self.velocity(role, samples) for role in (self.student, self.moving_average))
        y = beta * log_likelihood(v_average, samples) + samples.advantages / (2 * self.config.advantage_clip)
        return torch.stack([y, velocity_kl(v, v_average).to(y), beta * log_likelihood(v, samples) - y])

    def kl_coefficient(self, samples: NoisedSamples) -> PerSample:
        """Return LEAST_KL for the worst sample that there can be up to kl_coefficient for the best."""
        largest, place = self.config.kl_coefficient, samples.advantages / (2 * self.config.advantage_clip) + 0.5
        least = min(LEAST_KL, largest)
        return least + place * (largest - least)


def log_likelihood(velocity: Latents, samples: NoisedSamples) -> PerSample:
    """Return -mean e^2 / mean |e| of each sample, e = v - (noise - x0), the divisor without gradient.

    It takes the place of a log-density, up to a constant (arXiv:2603.14128); in float32 or wider.
    """
    return -relative_error(promote(velocity), promote(samples.noise - samples.x0))
