"""A reward in the finite world of `exact_world`, and the law that joint training must reach.

The reward of a sample is R_k of the nearest template k of its class, R = 0, 1/3, 2/3, 1, smoothed between templates.
With a teacher that draws every template equally often, the law of max E[R] - beta KL is p_k = exp(R_k / beta) / Z.
"""

import copy
import functools

import torch
from exact_world import (
    CLASSES,
    EACH,
    PROMPTS,
    SAMPLER,
    SHAPE,
    SIZE,
    ClassCodec,
    Posterior,
    pretrained,
    role,
    samples,
    templates,
)
from helpers import ALONE, reward_parts

from unified_trainer.basics.requests import Request
from unified_trainer.data.loader import Loader
from unified_trainer.data.prompts import Prompts
from unified_trainer.methods.distill_rl import DistillRL
from unified_trainer.methods.distill_rl_settings import DistillRLConfig, MatchingTermConfig, TermConfig, TiltConfig
from unified_trainer.rewards.base import RewardConfig
from unified_trainer.rewards.reward import Reward, Scores
from unified_trainer.roles.critic import Critic
from unified_trainer.roles.role import Frozen, Role, RoleConfig, Trainable, TrainableConfig
from unified_trainer.run.trainer import Trainer

R = torch.linspace(0, 1, EACH, dtype=torch.float64)
WIDTH = 0.5  # distance over which the reward changes from template to template
GROUP = 32  # samples of each class in an update


def distances(x0: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the distance of each sample to each template of its class."""
    return (x0.flatten(1)[:, None] - templates().view(CLASSES, EACH, SIZE)[labels]).norm(dim=-1)


def template_reward(x0: torch.Tensor, prompts: tuple[str, ...]) -> torch.Tensor:
    """Return R of the nearest template of each sample's class, smoothed over `WIDTH`."""
    labels = torch.tensor([int(prompt[-1]) for prompt in prompts])
    near = (-distances(x0, labels).square() / (2 * WIDTH**2)).softmax(-1).double()
    return (near @ R).float()


class TemplateReward(Reward):
    """The reward of the class's templates; latents are scored as they are, and have no pixels to measure."""

    def __init__(self) -> None:
        super().__init__({"template": template_reward}, ClassCodec(), RewardConfig(kind="template"))

    def begin(self, x0, prompts, step=0):
        scores = Scores(template_reward(x0, prompts)[:, None], {}, torch.zeros(len(x0), 1))
        return lambda: scores


def law(beta: float) -> torch.Tensor:
    """Return exp(R / beta) / Z."""
    return (R / beta).softmax(-1)


def frequencies(student: Role, count: int = 3000) -> torch.Tensor:
    """Return how often each template of each class is the nearest one, [CLASSES, EACH]."""
    labels = torch.arange(count) % CLASSES
    nearest = distances(samples(student, count=count), labels).argmin(1)
    return torch.stack([(nearest[labels == c, None] == torch.arange(EACH)).double().mean(0) for c in range(CLASSES)])


def total_variation(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return half the sum of absolute differences, averaged over the classes."""
    return float((found - wanted).abs().sum(1).mean() / 2)


def fitted_beta(found: torch.Tensor) -> float:
    """Return the beta whose law is nearest to the frequencies."""
    return min(torch.logspace(-1.5, 1.5, 200).tolist(), key=lambda beta: total_variation(found, law(beta)))


def joint(
    *,
    beta: float = 0.0,
    surrogate: float = 0.0,
    updates: int,
    critic_updates: int = 2,
    rate: float = 2e-3,
    seed: int = 0,
) -> Trainer:
    """Return a trainer of distill_rl with the exact teacher; student and critic start from flow matching."""
    config = DistillRLConfig(
        num_prompts=CLASSES,
        num_samples=GROUP,
        prompts_per_update=CLASSES,
        rollout_batch=CLASSES * GROUP,
        update_batch=CLASSES * GROUP,
        timestep_fraction=1.0,
        advantage="dr_grpo",
        clip_low=1.0,
        clip_high=1e9,  # no clip
        matching=MatchingTermConfig(weight=1.0, guidance_scale=1.0, tau_shift=2.0),
        surrogate=TermConfig(weight=surrogate),
        tilt=TiltConfig(beta=beta),
        critic_updates=critic_updates,
    )
    adam = functools.partial(TrainableConfig, betas=(0.0, 0.99), weight_decay=0.0)
    roles = {
        "student": role(
            Trainable,
            "student",
            copy.deepcopy(pretrained()),
            adam(learning_rate=rate, lr_schedule="linear", lr_decay_updates=updates, min_lr_ratio=0.1),
        ),
        "teacher": role(Frozen, "teacher", Posterior(), RoleConfig()),
        "critic": role(Critic, "critic", copy.deepcopy(pretrained()), adam(learning_rate=3e-3)),
    }
    reward = TemplateReward()
    loader = Loader(Prompts(Request.of(PROMPTS)), ClassCodec(), config.plan(), SHAPE, "", seed, ALONE)
    parts = reward_parts(DistillRL, config, SAMPLER, roles["student"], reward, loader)
    method = DistillRL(config, SAMPLER, **roles, **parts)
    return Trainer(method, {name: roles[name] for name in ("student", "critic")}, loader, ALONE, seed=seed)
