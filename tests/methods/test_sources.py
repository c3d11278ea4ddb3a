"""Published values and laws of every method: recipe and code have them, or the method's page lists the deviation.

`sources/METHOD.toml` names the page and the sources. Its rows are [published, place] or [published, place, deviation]:

- `settings`: a setting of the run that `--recipe wan2.1-1.3b --method METHOD` resolves to;
- `laws`: a formula, which the function METHOD_NAME below computes from the source and compares with the package;
- `read`: what only a person can compare; each row is a deviation, with the place in the source.

A deviation is a bullet of the page, `- **Name.** ...`, in the section "Deviations from the published code". A row
without one must agree, a row with one must not, and every bullet has a row.
"""

import math
import re
import tomllib
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from unified_trainer.basics.types import Condition, Trajectory
from unified_trainer.methods import METHODS
from unified_trainer.methods.awm import AWMConfig
from unified_trainer.methods.awm import log_likelihood as awm_log_likelihood
from unified_trainer.methods.consistency import ConsistencyConfig
from unified_trainer.methods.consistency_loss import consistency_loss
from unified_trainer.methods.crd import CRD, CRDConfig
from unified_trainer.methods.crd import log_likelihood as crd_log_likelihood
from unified_trainer.methods.diffusion_nft import DiffusionNFT, DiffusionNFTConfig
from unified_trainer.methods.distribution_matching import (
    DistributionMatching,
    distribution_matching_gradient,
    distribution_matching_loss,
)
from unified_trainer.methods.flow_dpo import preference_logits
from unified_trainer.methods.flow_map import FlowMap, FlowMapConfig, mean_flow_target
from unified_trainer.methods.long_self_forcing import LongSelfForcing
from unified_trainer.methods.ode_init import ODEInit
from unified_trainer.methods.rcm import RCMConfig
from unified_trainer.methods.rl.groups import Advantages
from unified_trainer.methods.rl.old_policy import OldPolicyMethod
from unified_trainer.methods.score_directions import score_identity_loss
from unified_trainer.methods.streaming_tuning import Windows
from unified_trainer.numerics.advantages import gae, group_advantages
from unified_trainer.numerics.chunks import ChunkConfig
from unified_trainer.numerics.kernels import log_prob, transition
from unified_trainer.numerics.values import value_loss
from unified_trainer.run.settings.command_line import parse

SOURCES = Path(__file__).with_name("sources")
PAGES = Path(__file__).parents[2] / "docs" / "methods"
TITLE = "## Deviations from the published code\n"
SHAPE = (3, 2, 2, 2)  # of one sample
D = math.prod(SHAPE)


@cache
def source(method: str) -> dict:
    held = tomllib.loads((SOURCES / f"{method}.toml").read_text(encoding="utf-8"))
    assert held.keys() <= {"page", "sources", "settings", "laws", "read"}, method
    assert held["sources"] and all(re.search(r"arXiv:\d{4}\.\d{5}|github\.com/", each) for each in held["sources"])
    return {"settings": {}, "laws": {}, "read": {}} | held


def rows(kind: str) -> list:
    """Method, key, published value or law, place in the source, and the name of a deviation or None."""
    found = [(m, key, *row, *[None] * (3 - len(row))) for m in METHODS for key, row in source(m)[kind].items()]
    return [pytest.param(*row, id=f"{row[0]}-{row[1]}") for row in found]


def tensors(*shape: int, count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def near(ours, theirs) -> bool:
    both = (torch.as_tensor(each, dtype=torch.float64) for each in (ours, theirs))
    return torch.allclose(*both, rtol=1e-5, atol=1e-9)


@cache
def run_of(method: str):
    return parse(["--recipe", "wan2.1-1.3b", "--method", method])


def setting(method: str, key: str):
    value = run_of(method)
    for name in key.split("."):
        value = value[name] if isinstance(value, dict) else vars(value)[name]
    return list(value) if isinstance(value, tuple) else value


# The laws: each returns whether the package computes what the source does.


def levels_of(sigma: float) -> torch.Tensor:
    return torch.full((2,), sigma, dtype=torch.float64)


def decays(kind, config) -> list[float]:
    """The decays of the old policy after three training steps, each of two updates of the student."""
    found = []
    one = kind.__new__(kind)
    one.config = SimpleNamespace(**vars(config), levels=lambda *a: [])
    one.student = one.sampler = None
    one.old = one.moving_average = SimpleNamespace(update_from=lambda role, decay: found.append(decay))
    one.roll_out = lambda *a: None
    one.groups = SimpleNamespace(advantages=lambda *a: Advantages(torch.zeros(0), [], 0, ()))
    for step in range(3):
        list(OldPolicyMethod.step(one, None, step, None, None))
    return found


def nft_decay(config) -> bool:
    updates = config.num_prompts // config.prompts_per_update
    published = [min(config.old_decay, config.old_decay_rise * updates * (step + 1)) for step in range(3)]
    return near(decays(DiffusionNFT, config), published)


TWO_UPDATES = {"num_prompts": 16, "prompts_per_update": 8}


def diffusion_nft_decay() -> bool:
    return nft_decay(DiffusionNFTConfig(**TWO_UPDATES))


def awm_decay() -> bool:
    return nft_decay(AWMConfig(**TWO_UPDATES))


def crd_decay() -> bool:
    return nft_decay(CRDConfig(**TWO_UPDATES))


def crd_likelihood() -> bool:
    v, x0, noise = tensors(2, *SHAPE, count=3)
    e = (v - (noise - x0)).flatten(1)
    ours = crd_log_likelihood(v, SimpleNamespace(x0=x0, noise=noise))
    return near(ours, -e.square().mean(1) / e.abs().mean(1).clamp(min=1e-5))


def crd_kl() -> bool:
    one = SimpleNamespace(config=CRDConfig(kl_coefficient=0.1))
    advantages = torch.tensor([-5.0, -1.0, 0.0, 5.0], dtype=torch.float64)
    reward, least = advantages / 5 / 2 + 0.5, 1e-4 / 0.1
    return near(CRD.kl_coefficient(one, SimpleNamespace(advantages=advantages)), 0.1 * (least + reward * (1 - least)))


def diffusion_nft_loss() -> bool:
    (x0, noise, v, old), sigma, beta = tensors(2, *SHAPE, count=4), 0.7, 0.4
    x_t, advantages = (1 - sigma) * x0 + sigma * noise, torch.tensor([-2.0, 7.0], dtype=torch.float64)
    one = SimpleNamespace(config=DiffusionNFTConfig(beta=beta))
    samples = SimpleNamespace(x0=x0, x_t=x_t, sigma=sigma, advantages=advantages)
    errors = []
    for policy in (beta * v + (1 - beta) * old, (1 + beta) * old - beta * v):
        e = (x_t - sigma * policy - x0).flatten(1)
        errors.append(e.square().mean(1) / e.abs().mean(1).clamp(min=1e-5))
    r = (advantages / 5 / 2 + 0.5).clamp(0, 1)
    return near(DiffusionNFT.objective(one, samples, v, old)[0], 5 * (r * errors[0] + (1 - r) * errors[1]) / beta)


def awm_likelihood() -> bool:
    (v, target), sigma, p = tensors(2, *SHAPE, count=2), 0.7, 0.25
    e = (v - target).square().flatten(1).mean(1)
    return near(awm_log_likelihood(v, target, sigma, p), -((e + 1e-10) ** p - 1e-10**p) * sigma / p)


class Linear:
    """A network whose velocity is a factor of x_t + 1; it notes the states it is asked for."""

    def __init__(self, factor: float) -> None:
        self.factor, self.states = factor, []

    def velocity(self, x_t, sigma, cond):
        self.states.append(x_t)
        return self.factor * (x_t + 1)

    def guided_velocity(self, x_t, sigma, cond, uncond, scale):
        return self.velocity(x_t, sigma, cond)

    def trains(self, sigma) -> bool:
        return True

    def draw_noise_levels(self, name, ids, rng, law, partner=None):
        return levels_of(self.sigma), 1.0


class Fixed:
    """Streams that draw the noise they are given, and 0."""

    def __init__(self, noise) -> None:
        self._noise = noise

    def noise(self, name, ids, shape):
        return self._noise

    def uniform(self, name, ids):
        return torch.zeros(len(ids), dtype=torch.float64)


def batch_of(x0):
    return SimpleNamespace(latents=x0, sample_ids=[0, 1], latent_shape=SHAPE, cond=None, uncond=None)


def consistency(config, step: int):
    """The loss of a step of the teacher, the errors d, the two levels, and the state after the step."""
    x0, noise = tensors(2, *SHAPE, count=2)
    student, teacher = Linear(0.3), Linear(0.8)
    loss = consistency_loss(config, 1.0, student, teacher, batch_of(x0), torch.tensor([step, step]), Fixed(noise))
    (x_next, x_t), (sigma, sigma_next) = student.states, config.table[step : step + 2].tolist()
    d = (x_t - sigma * 0.3 * (x_t + 1)) - (x_next - sigma_next * 0.3 * (x_next + 1))
    return loss, d.flatten(1), sigma, sigma_next, (x_t, x_next)


def is_of_the_whole_vector(**changes) -> bool:
    """Up to one factor for all steps, as AdamW does not see it."""
    config, factors = ConsistencyConfig(teacher_steps=6, **changes), []
    for step in (0, 2, 4):
        ours, d, sigma, sigma_next, _ = consistency(config, step)
        c = 5.4e-4 * math.sqrt(D)
        factors.append(ours / (((d.square().sum(1) + c * c).sqrt() - c) / (sigma - sigma_next)).mean())
    return near(factors, [1 / (6 * math.sqrt(D))] * 3)


def consistency_vector() -> bool:
    return is_of_the_whole_vector(distance="vector", huber=5.4e-4)


def consistency_distance() -> bool:
    return is_of_the_whole_vector()


def rcm_matching() -> bool:
    x, real, fake = tensors(2, *SHAPE, count=3)
    width = (x - real).abs().flatten(1).mean(1).clamp(min=1e-5).view(2, 1, 1, 1, 1)
    return near(distribution_matching_gradient(x, real, fake), (fake - real) / width)


def rcm_critic() -> bool:
    """Losses at two levels, over the loss of the first."""
    x0, noise = tensors(2, *SHAPE, count=2)
    ours, theirs = [], []
    for sigma in (0.2, 0.9):
        critic = Linear(0.3)
        critic.sigma = sigma
        matching = DistributionMatching(RCMConfig(), critic, critic)
        ours.append(matching.critic_loss(x0, batch_of(x0), Fixed(noise)).value)
        x_tau, angle = (1 - sigma) * x0 + sigma * noise, math.atan(sigma / (1 - sigma))
        fake = x_tau - sigma * 0.3 * (x_tau + 1)
        theirs.append(((x0 - fake) ** 2 / math.sin(angle) ** 2).sum())
    return near(ours[1] / ours[0], theirs[1] / theirs[0])


def rcm_levels() -> bool:
    config, uniform = RCMConfig(teacher_steps=48), torch.linspace(0, 0.999, 1000, dtype=torch.float64)
    return len(set(config.steps_at(uniform, Linear(0.0)).tolist())) == 1000


def rcm_step() -> bool:
    *_, sigma, sigma_next, (x_t, x_next) = consistency(RCMConfig(teacher_steps=48), 30)
    (angle, size), (lower, size_next) = ((math.atan(s / (1 - s)), math.hypot(s, 1 - s)) for s in (sigma, sigma_next))
    f = (math.cos(angle) * x_t / size - (x_t - sigma * 0.8 * (x_t + 1))) / math.sin(angle)
    return near(x_next, size_next * (x_t / size - (angle - lower) * f))


def rcm_distance() -> bool:
    """The ratio of the losses of two steps is that of their sums of squares."""
    (ours, d, *_), (other, e, *_) = (consistency(RCMConfig(teacher_steps=48), step) for step in (10, 40))
    return near(ours / other, d.square().sum() / e.square().sum())


def rcm_tau() -> bool:
    u = torch.tensor([0.0, 0.5, 0.9999], dtype=torch.float64)
    return near(RCMConfig().tau_law(u), 5 * u / (1 + 4 * u))


def flow_map_levels() -> bool:
    """The mean and the distribution of the larger of two uniform numbers, shifted."""
    law, u = FlowMapConfig(level_draws=2).law, (torch.arange(20_000, dtype=torch.float64) + 0.5) / 20_000
    larger = torch.rand(2, 200_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64).amax(0)
    shifted = 5 * larger / (1 + 4 * larger)
    same = abs(law.share_above(0.7) - float((shifted >= 0.7).double().mean())) < 0.005
    return same and abs(float(law(u).mean()) - 0.8765) < 1e-3 > abs(float(shifted.mean()) - 0.8765) - 1e-3


def flow_map_ends() -> bool:
    one, t = SimpleNamespace(config=FlowMapConfig()), torch.tensor([0.9, 0.6], dtype=torch.float64)
    u, before = torch.tensor([0.3, 0.8], dtype=torch.float64), t / (5 - 4 * t)
    r = FlowMap._ends(one, t, u, torch.ones(2, dtype=torch.float64))
    return near(r, 5 * u * before / (1 + 4 * u * before))


def flow_map_derivative() -> bool:
    """For u = a t + b r + c x along (v, 1, 0), the difference quotient is exact: a + c v."""
    (x, v), (t, r, h) = tensors(2, *SHAPE, count=2), (0.8, 0.2, 0.1)
    u, u_next = (2 * level + r + 3 * state for level, state in ((t, x), (t - h, x - h * v)))
    y = mean_flow_target(u, u_next, v, levels_of(t), levels_of(t - h), levels_of(r))
    return near(y, v - (t - h - r) * (2 + 3 * v))


def flow_map_weight() -> bool:
    """The losses of two students on steps without length, where y = v, of their sums of squares."""
    x0, noise = tensors(2, *SHAPE, count=2)
    batch, ours, theirs = batch_of(x0), [], []
    batch.cond = Condition({"text": torch.zeros(2, 1)})
    for factor in (0.8001, 0.9):
        one = SimpleNamespace(config=FlowMapConfig(equal_share=1.0), student=Linear(factor), teacher=Linear(0.8))
        one.student.sigma, one._ends = 0.7, lambda t, u, kind: t
        (loss,) = FlowMap.step(one, batch, 0, Fixed(noise), None)
        error = ((factor - 0.8) * (0.3 * x0 + 0.7 * noise + 1)).square().flatten(1).sum(1)
        ours.append(loss.value)
        theirs.append((error / (error + 1e-3)).mean())
    return near(ours[1] / ours[0], theirs[1] / theirs[0])


def dmd2_gradient() -> bool:
    x, real, fake = tensors(2, *SHAPE, count=3)
    x.requires_grad_()
    g = (fake - real) / (x - real).detach().abs().flatten(1).mean(1).view(2, 1, 1, 1, 1)
    ours = distribution_matching_loss(x, distribution_matching_gradient(x, real, fake))
    (slope,) = torch.autograd.grad(ours, x)
    return near(ours.detach(), 0.5 * g.square().mean()) and near(slope, g / x.numel())


def dmd2_tau() -> bool:
    k = torch.arange(1000, dtype=torch.float64)
    theirs = (5 * (k / 1000) / (1 + 4 * (k / 1000)) * 1000).clamp(20, 980) / 1000
    return near(run_of("dmd2").algorithm.tau_law((k + 0.5) / 1000), theirs)


def warped(method: str) -> bool:
    """The steps 1000, 750, 500 and 250 of a table of 1000 levels with shift 5, and the end."""
    u = torch.tensor([1.0, 0.75, 0.5, 0.25, 0.0], dtype=torch.float64)
    return near(run_of(method).sampler.sigmas(), 5 * u / (1 + 4 * u))


def dmd2_sampler() -> bool:
    return warped("dmd2")


def self_forcing_sampler() -> bool:
    return warped("self_forcing")


def ode_init_sampler() -> bool:
    return warped("ode_init")


def dmd2_sid() -> bool:
    (x, r, f), alpha = tensors(2, *SHAPE, count=3), 1.0
    width = (x - r).abs().flatten(1).mean(1).view(2, 1, 1, 1, 1)
    return near(score_identity_loss(x, r, f, alpha).mean(), ((r - f) * ((r - x) - alpha * (r - f)) / width).mean())


def self_forcing_gradient() -> bool:
    chunks, frames = run_of("self_forcing").sampler.chunks, 30
    first = frames - run_of("self_forcing").algorithm.gradient_frames
    return [start for start, _ in chunks.ranges(frames) if start >= first] == [9, 12, 15, 18, 21, 24, 27]


def long_self_forcing_gradient() -> bool:
    """Of 21 frames, the image latent and the two frames of a chunk that the window cuts have no gradient."""
    run = run_of("long_self_forcing")
    one = SimpleNamespace(config=run.algorithm, sampler=run.sampler)
    one._first_trained = lambda stop: LongSelfForcing._first_trained(one, stop)
    mask = LongSelfForcing._trained_frames(one, torch.zeros(1, 1, 21, 1, 1), stop=42)
    return mask.flatten().tolist() == [False] * 3 + [True] * 18


def streams() -> Windows:
    return Windows(run_of("streaming_tuning").sampler.chunks, frames=240, known=21, student_every=5)


def streaming_tuning_added() -> bool:
    return streams().added == 18


def streaming_tuning_switch() -> bool:
    return [streams().at(number).start for number in range(1, streams().count)] == [*range(21, 202, 18)]


class OneTrajectory:
    """A batch of one sample with its trajectory."""

    def __init__(self, trajectory) -> None:
        self.trajectory, self.cond = trajectory, None

    def __len__(self) -> int:
        return 1


def ode_init_loss() -> bool:
    x, end = tensors(1, *SHAPE, count=2)
    batch = OneTrajectory(Trajectory(levels_of(0.5)[:1], x[:, None], end))
    one = SimpleNamespace(student=Linear(0.0), chunks=ChunkConfig(), config=SimpleNamespace(passes=1))
    (loss,) = ODEInit.step(one, batch, 0, None, None)
    return near(loss.value, (x - end).square().mean())


def dance_grpo_dance() -> bool:
    """DanceGRPO's step in its own terms: a score estimate from x0, and its log-density."""
    (x, v, eps), sigma, lower, eta = tensors(2, *SHAPE, count=3), 0.9, 0.8, 0.25
    x0, dsigma = x - sigma * v, lower - sigma
    score = -(x - x0 * (1 - sigma)) / sigma**2
    mean, std = x + dsigma * v - 0.5 * eta**2 * score * dsigma, eta * math.sqrt(-dsigma)
    ours = transition("dance", x, v, sigma, lower, eta)
    x_next = mean + std * eps
    density = -((x_next - mean) ** 2) / (2 * std**2) - math.log(std) - math.log(math.sqrt(2 * math.pi))
    same = near(ours[0], mean) and near(ours[1].flatten(), [std] * ours[1].numel())
    return same and near(log_prob(x_next, *ours), density.flatten(1).mean(1))


def dance_grpo_flow() -> bool:
    (x, v), level = tensors(2, *SHAPE, count=2), 0.7
    for sigma, lower in ((0.9, 0.8), (1.0, 0.95)):
        s, dt = math.sqrt(sigma / (1 - (0.95 if sigma == 1 else sigma))) * level, lower - sigma
        mean = x * (1 + s**2 / (2 * sigma) * dt) + v * (1 + s**2 * (1 - sigma) / (2 * sigma)) * dt
        ours, std = transition("flow", x, v, sigma, lower, level, sigma_max=0.95)
        if not (near(ours, mean) and near(std.flatten(), [s * math.sqrt(-dt)] * std.numel())):
            return False
    return True


def dance_grpo_advantage() -> bool:
    r = torch.tensor([1.0, 2.0, 4.0, 5.0], dtype=torch.float64)
    return near(group_advantages(r, torch.zeros(4, dtype=torch.int64)), (r - r.mean()) / (r.std() + 1e-8))


def dance_grpo_cps() -> bool:
    return not run_of("dance_grpo").algorithm.normalised


def dance_ppo_gae() -> bool:
    reward, value = tensors(3, count=2)
    discount, decay, advantage, theirs = 0.9, 0.8, 0.0, []
    for s in (2, 1, 0):
        after = float(value[s + 1]) if s < 2 else 0.0
        advantage = float(reward[s]) + discount * after - float(value[s]) + discount * decay * advantage
        theirs.insert(0, advantage)
    discounts = torch.tensor([discount, discount, 0.0], dtype=torch.float64)
    return near(gae(reward, value, discounts, 0.0, decay)[1], theirs)


def dance_ppo_value() -> bool:
    v, old, target = tensors(8, count=3)
    clipped = old + (v - old).clamp(-0.5, 0.5)
    return near(value_loss(v, old, target, 0.5), torch.maximum((v - target) ** 2, (clipped - target) ** 2) / 2)


def distill_rl_policy() -> bool:
    run = run_of("distill_rl")
    policy = run.algorithm.policy(run.sampler)
    return (policy.kernel, policy.level) == ("cps", 0.9)


def finetune_levels() -> bool:
    u = torch.tensor([0.0, 0.3, 0.99], dtype=torch.float64)
    return near(run_of("finetune").algorithm.sigma_law(u), 5 * u / (1 + 4 * u))


def flow_dpo_logit() -> bool:
    (v, reference, target), beta = tensors(4, *SHAPE, count=3), 500.0
    e, e_ref = ((each - target).square().flatten(1).mean(1) for each in (v, reference))
    difference = (e[:2] - e[2:]) - (e_ref[:2] - e_ref[2:])
    return near(preference_logits(v, reference, target, beta), -0.5 * beta * difference)


online_dpo_logit = flow_dpo_logit


@pytest.mark.parametrize(("method", "key", "published", "place", "deviation"), rows("settings"))
def test_a_recipe_has_the_published_value_or_its_page_says_so(method, key, published, place, deviation):
    ours = setting(method, key)
    assert place and (ours == published) == (deviation is None), f"{key}: {ours!r} here, {published!r} in {place}"


@pytest.mark.usefixtures("unchecked")  # roles and batches are stand-ins
@pytest.mark.parametrize(("method", "law", "published", "place", "deviation"), rows("laws"))
def test_the_code_has_the_published_law_or_its_page_says_so(method, law, published, place, deviation):
    assert published and place
    assert globals()[f"{method}_{law}"]() == (deviation is None)


@pytest.mark.parametrize("page", sorted({source(method)["page"] for method in METHODS}))
def test_a_page_lists_the_deviations_of_its_methods_and_no_others(page):
    text = (PAGES / page).read_text(encoding="utf-8")
    assert text.count(TITLE) == 1, f"{page}: one section {TITLE.strip()!r}"
    section = text.partition(TITLE)[2].partition("\n## ")[0]
    listed = re.findall(r"^- \*\*(.+?)\.\*\* [A-Z`]", section, re.M)
    assert len(listed) == len(re.findall("^- ", section, re.M)), f"{page}: every bullet is - **Name.** and a sentence"
    known = set()
    for method in METHODS:
        held = source(method)
        if held["page"] == page:
            rows = [*held["settings"].values(), *held["laws"].values()]
            known |= {row[2] for row in rows if len(row) == 3} | held["read"].keys()
    assert sorted(listed) == sorted(known)


def test_every_method_has_its_sources_and_no_file_is_of_none():
    assert {path.stem for path in SOURCES.glob("*.toml")} == {*METHODS}
