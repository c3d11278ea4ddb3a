"""Flow-DPO: preferences between two clips of a prompt, learned without a reward's scale (arXiv:2501.13918).

The logit of a pair is that of Diffusion-DPO (arXiv:2311.12908) for the errors of a velocity, with a constant beta.
`FlowDPO` learns from stored pairs, `OnlineDPO` from the best and the worst of its own samples.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import logsigmoid

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.ranges import Positive, Shift
from unified_trainer.basics.types import Batch, Latents, PerSample, take_rows
from unified_trainer.data.batch_plan import BatchPlan, largest_divisor
from unified_trainer.methods.base import (
    Loss,
    Method,
    MethodSetup,
    Metrics,
    SingleUpdateConfig,
    initial_copy,
    trained,
)
from unified_trainer.methods.rl.forward_process import ForwardConfig, generate_samples
from unified_trainer.methods.rl.groups import Advantages, reward_metrics
from unified_trainer.methods.rl.minibatches import Minibatch, plan_minibatches
from unified_trainer.methods.rl.rollout_method import RolloutMethod
from unified_trainer.methods.rl.rollouts import ScoredSamples
from unified_trainer.methods.rl.scored_groups import ScoredGroups
from unified_trainer.methods.rl.updates import LossAt, MinibatchLoss, update_losses
from unified_trainer.numerics.advantages import groups, zero_variance
from unified_trainer.numerics.flow import ShiftedUniform, add_noise
from unified_trainer.numerics.kl import velocity_kl
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.parallel.random import Streams
from unified_trainer.roles.role import Frozen, Trainable


@dataclass(frozen=True)
class FlowDPOConfig(SingleUpdateConfig):
    beta: Positive = 2000.0
    """Strength of a preference: how much the errors of a pair count beside those of the reference."""
    shift: Shift = 3.0
    """Shift of the uniform noise levels towards noise; 1 is none."""
    runs_untrained = ()
    needs_clips: ClassVar[bool] = True
    needs_pairs: ClassVar[bool] = True

    def check(self, setup: MethodSetup) -> None:
        if setup.sampler.chunks.causal:
            raise UserError("sampler.chunks.chunk_frames must be 0 for flow_dpo; dance_grpo trains causal students")
        setup.check_guidance("student", "sampler.guidance_scale", setup.sampler.guidance_scale)
        setup.check_noise_levels("student", self.sigma_law)

    @property
    def sigma_law(self) -> ShiftedUniform:
        """Law of the noise levels of pairs."""
        return ShiftedUniform(self.shift)


class FlowDPO(Method):
    """loss = -mean log sigmoid of `preference_logits`, with one noise and one noise level for both clips of a pair."""

    config_class = FlowDPOConfig
    roles = {"student": trained(), "reference": initial_copy("student")}
    student: Trainable
    reference: Frozen

    def step(self, batch: Batch, step: int, rng: Streams, mesh: Mesh) -> Iterator[Loss]:
        assert batch.latents is not None and batch.rejected is not None  # `needs_pairs`
        x0, ids = torch.cat([batch.latents, batch.rejected]), batch.sample_ids
        noise = rng.noise("noise", ids * 2, batch.latent_shape).to(x0)
        level, weight = self.student.draw_noise_levels("sigma", ids, rng, self.config.sigma_law)
        sigma, cond = torch.cat([level, level]), batch.cond.cat(batch.cond)
        x_t = add_noise(x0, noise, sigma)
        velocity, reference = (role.velocity(x_t, sigma, cond) for role in (self.student, self.reference))
        logits = preference_logits(velocity, reference, noise - x0, self.config.beta)
        loss, seen = -logsigmoid(logits), logits.detach()
        metrics = {"loss": loss.detach(), "preferred": (seen > 0).float(), "preference_logit": seen}
        yield Loss("student", weight * loss.mean(), metrics=metrics)


@dataclass(frozen=True)
class OnlineDPOConfig(ForwardConfig):
    beta: Positive = 2000.0
    """Strength of a preference: how much the errors of a pair count beside those of the reference."""

    def check(self, setup: MethodSetup) -> None:
        super().check(setup)
        if setup.sampler.chunks.causal:
            raise UserError("sampler.chunks.chunk_frames must be 0 for online_dpo; awm trains causal students")
        if self.num_samples < 2:
            raise UserError("algorithm.num_samples must be at least 2: a pair is the best and the worst of a group")
        setup.check_guidance("student", "sampler.guidance_scale", setup.sampler.guidance_scale)

    def plan(self) -> BatchPlan:
        return replace(super().plan(), whole_groups=True)


class Pairs(NamedTuple):
    """The worst sample of the group of each best one, by the best one's row among this rank's samples."""

    worst: list[int]  # its row, if it is of this rank
    moved: dict[int, Latents]  # its x0 [c, t, h, w], if it is of another one


class OnlineDPO(RolloutMethod):
    """Sample and score groups, and prefer the best sample of each to the worst; the reference is the run's start."""

    config_class = OnlineDPOConfig
    roles = {"student": trained(), "reference": initial_copy("student")}

    sample = staticmethod(generate_samples)

    def step(self, batch: Batch, step: int, rng: Streams, mesh: Mesh) -> Iterator[Loss]:
        levels = self.config.levels(self.student, self.sampler, rng)
        metrics: Metrics = {}
        samples = self.roll_out(batch, step, rng, mesh, metrics)
        pairs, preferences = self._pairs(samples, mesh, metrics)

        def start_update(minibatches: list[Minibatch]) -> LossAt:
            return lambda minibatch, s, last: self._loss(samples, pairs, minibatch, s, rng)

        yield from update_losses(preferences, levels, start_update, metrics)

    def _pairs(self, samples: ScoredSamples, mesh: Mesh, metrics: Metrics) -> tuple[Pairs, Advantages]:
        """Pair the best and the worst sample of each prompt id, and plan the passes; equal rewards have no pair.

        A pair is of the rank and the update of its best sample.
        """
        config, own = self.config, len(samples.batch)
        updates = config.num_prompts // config.prompts_per_update
        scored = ScoredGroups.of(samples, samples.batch.prompt_ids, self.reward, mesh, metrics)
        rewards, ids, places = scored.rewards, scored.ids, scored.rows.tolist()
        order = mesh.gather(torch.tensor(samples.batch.sample_ids))
        gap, worst = torch.zeros_like(rewards), list(range(len(order)))
        if not places:
            return Pairs([*range(own)], {}), Advantages.none(scored, own, updates)
        by_prompt = groups(rewards, ids)
        for members in by_prompt.values():
            rows = members[order[scored.rows[members]].argsort()]  # of equal samples the first, on any number of ranks
            best, least = rows[rewards[rows].argmax()], rows[rewards[rows].argmin()]
            gap[best], worst[places[best]] = rewards[best] - rewards[least], places[least]
        gap[zero_variance(rewards, ids)] = 0.0
        gap = scored.everywhere(gap)
        size = largest_divisor(own // config.num_samples // updates, max(1, config.update_batch // 2))
        minibatches = plan_minibatches(gap > 0, gap, mesh.data_rank, mesh.data_size, updates, size)
        skipped = sum(not parts for parts in minibatches)
        metrics |= reward_metrics(rewards, ids) | self.reward.metrics(scored.scores, ids)
        metrics |= {
            "frac_zero_std_groups": 1 - int((gap > 0).sum()) / len(by_prompt),
            "skipped_updates": float(skipped),
        }
        messages = (f"{skipped} of {updates} updates skipped because no group has unequal rewards",) if skipped else ()
        first = mesh.data_rank * own
        pairs = Pairs([row % own for row in worst[first : first + own]], _moved(worst, own, samples, mesh))
        return pairs, Advantages(gap[first : first + own].float(), minibatches, (*scored.messages, *messages), scored)

    def _loss(self, samples: ScoredSamples, pairs: Pairs, minibatch: Minibatch, s: int, rng: Streams) -> MinibatchLoss:
        """-log sigmoid of the logits at one noise level, weighted over the pairs; a pair has one noise."""
        rows = minibatch.rows.tolist()
        batch, best = samples.batch.take(rows * 2), samples.rollout.end(rows)  # both of a pair are of one prompt
        worst = zip(rows, samples.rollout.end([pairs.worst[row] for row in rows]), strict=True)
        x0 = torch.cat([best, torch.stack([pairs.moved.get(row, end) for row, end in worst])])
        noise = rng.noise(f"forward {s}", batch.sample_ids, batch.latent_shape).to(x0)
        sigma = self.sampler.sigmas()[s]
        x_t, level = add_noise(x0, noise, sigma), sigma.expand(len(batch))
        assert self.reference is not None  # declared
        velocity, reference = (role.velocity(x_t, level, batch.cond) for role in (self.student, self.reference))
        logits = preference_logits(velocity, reference, noise - x0, self.config.beta)
        loss = -logsigmoid(logits)
        seen = {"loss": loss, "preferred": (logits > 0).float(), "preference_logit": logits}
        real = minibatch.real.nonzero().flatten().tolist()
        metrics = {name: take_rows(value.detach(), real) for name, value in seen.items()}
        return MinibatchLoss((minibatch.weights.to(loss, non_blocking=True) * loss).sum(), metrics)


def _moved(worst: list[int], own: int, samples: ScoredSamples, mesh: Mesh) -> dict[int, Latents]:
    """Bring x0 of other ranks that are the worst of a group to the rows of its best; a rank has `own` samples."""
    far = [(best, row) for best, row in enumerate(worst) if best // own != row // own]
    if not far:
        return {}
    ends = mesh.gather(samples.rollout.end([row % own if row // own == mesh.data_rank else 0 for _, row in far]))
    parts = ends.chunk(mesh.data_size)
    here = [(n, best, row) for n, (best, row) in enumerate(far) if best // own == mesh.data_rank]
    return {best % own: parts[row // own][n] for n, best, row in here}


def preference_logits(
    velocity: Float[Tensor, "both ..."],
    reference: Float[Tensor, "both ..."],
    target: Float[Tensor, "both ..."],
    beta: float,
) -> PerSample:
    """Return -beta / 2 ((e_w - e_w_ref) - (e_l - e_l_ref)) of p pairs (arXiv:2501.13918, with a constant beta).

    The first p rows are the preferred samples w, the others the rejected l; e = mean (v - target)^2 over the elements.
    """
    gained = velocity_kl(velocity, target) - velocity_kl(reference, target)
    preferred, rejected = gained.chunk(2)
    return -beta / 2 * (preferred - rejected)
