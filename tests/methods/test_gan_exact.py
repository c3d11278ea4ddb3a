"""The discriminator of distribution matching in a world of two points, where the best one is known.

Clips are x = 1 and samples x = -1 in every element. Noised to sigma, x_tau is normal around +(1 - sigma) and
-(1 - sigma) with deviation sigma, so that the best logit log p(clip) / p(sample) is 2 (1 - sigma) / sigma^2 times the
sum of the elements: linear in x_tau, as the head is.
"""

import functools
from contextlib import contextmanager

import torch
from exact_world import SHAPE, SIZE, ClassCodec, Model, role
from helpers import ALONE
from torch import nn

from unified_trainer.basics.requests import Request
from unified_trainer.data.loader import make_batch
from unified_trainer.methods.distribution_matching import DistributionMatching, ScoreConfig
from unified_trainer.numerics.flow import add_noise
from unified_trainer.parallel.random import Streams
from unified_trainer.roles.backbone import Backbone
from unified_trainer.roles.critic import Critic
from unified_trainer.roles.role import Frozen, RoleConfig, TrainableConfig

COUNT, SIGMA = 3000, 0.8
BEST = 2 * (1 - SIGMA) / SIGMA**2


class DrawnOnce(Streams):
    """Streams that make each draw once: the same ones are asked for in every step of the optimizer."""

    def __init__(self) -> None:
        super().__init__(0, 0)
        self.noise, self.uniform = (functools.cache(self._hashed(draw)) for draw in (super().noise, super().uniform))

    @staticmethod
    def _hashed(draw):
        return lambda name, keys, *shape: draw(name, list(keys), *shape)


class Still(nn.Module):
    """A network without motion."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(()))

    def forward(self, x_t, sigma, label):
        return self.scale * x_t


class ElementFeatures(Model):
    """A model whose features are the elements of x_t."""

    feature_size = SIZE

    @contextmanager
    def features(self, *, alone=False):
        seen = []
        handle = self.network.register_forward_hook(lambda _m, inputs, _o: seen.append(inputs[0].flatten(1)[:, None]))
        yield seen
        handle.remove()


def world():
    config = ScoreConfig(guidance_scale=1.0, tau_range=(SIGMA, SIGMA))
    critic = Critic("critic", Backbone(ElementFeatures(Still()), ALONE, trained=True), TrainableConfig())
    teacher = role(Frozen, "teacher", Still(), RoleConfig())
    matching = DistributionMatching(config, teacher, critic, gan_weight=1.0, gan_critic_weight=1.0)
    ids, codec = list(range(COUNT)), ClassCodec()
    clips, prompts = torch.ones(COUNT, *SHAPE), ["class 0"] * COUNT
    batch = make_batch(codec, Request.of(prompts), "", SHAPE, prompt_ids=ids, sample_ids=ids, latents=clips)
    return matching, critic, batch, -clips


def test_the_discriminator_learns_the_log_ratio_and_moves_samples_to_the_clips():
    matching, critic, batch, samples = world()
    (head,), rng = critic._heads.values(), DrawnOnce()
    optimizer = torch.optim.LBFGS(head.parameters(), max_iter=60, line_search_fn="strong_wolfe")

    def loss():
        optimizer.zero_grad()
        value = matching.critic_loss(samples, batch, rng).value
        value.backward()
        return value

    optimizer.step(loss)
    weight = head.weight.detach()[0]
    assert abs(float(weight.mean()) / BEST - 1) < 0.05 and float((weight / BEST - 1).abs().max()) < 0.2
    assert abs(float(head.bias.detach())) < 0.1
    found = matching.direction(samples, batch, rng)
    noise = rng.noise("student tau noise", batch.sample_ids, SHAPE)
    logits = add_noise(samples, noise, torch.tensor(SIGMA)).flatten(1) @ weight + head.bias.detach()
    expected = -(1 - SIGMA) / COUNT * (-logits).sigmoid()[:, None] * weight
    torch.testing.assert_close(found.gan_gradient.flatten(1), expected, rtol=1e-3, atol=1e-8)
    assert bool((found.gan_gradient < 0).all())  # descent raises every element, towards the clips
