"""What the settings of dance_grpo change: each against MATH.md's formulas on the states that the network was given.

`moved` students are nudged between rollout and replay, so that ratios differ from 1 and the options from each other.
"""

import dataclasses
import math
from dataclasses import dataclass

import pytest
import torch
from helpers import ALONE, Calls, ScriptedScorer, assert_near, dance_grpo, frozen, gradients, trainable

from unified_trainer import config as settings
from unified_trainer.build import build
from unified_trainer.methods.dance_grpo import DanceGRPOConfig
from unified_trainer.numerics.flow import sigma_table
from unified_trainer.numerics.objectives import ObjectiveParameters, diagnostics, surrogate
from unified_trainer.registry import METHODS
from unified_trainer.rl.minibatches import Minibatch
from unified_trainer.rl.replay import Replay
from unified_trainer.rl.sde_windows import WindowConfig
from unified_trainer.roles.role import Role
from unified_trainer.sampling import SamplerConfig, generate

STEPS = 4
SIGMAS = [float(sigma) for sigma in sigma_table(STEPS, 3.0)]
ELEMENTS = 128
REWARDS = (1.0, 2.0, 4.0, 5.0, -1.0, 2.0, -3.0, 1.0)
ODE = SamplerConfig(num_steps=STEPS, guidance_scale=1.0)
SDE = dataclasses.replace(ODE, solver="sde")
CONFIG = DanceGRPOConfig(
    num_prompts=2, num_samples=4, prompts_per_update=2, rollout_batch=8, update_batch=8, timestep_fraction=1.0
)
KERNELS = {  # kernel and level
    "dance": 0.3,
    "flow": 0.7,
    "flow_wan": 0.3,
    "cps": 0.8,
}


def advantages() -> torch.Tensor:
    groups = torch.tensor(REWARDS).reshape(2, 4)
    return ((groups - groups.mean(1, keepdim=True)) / groups.std(1, keepdim=True)).flatten()


A = advantages()


def kernel(name: str, level: float, x_t: torch.Tensor, v: torch.Tensor, s: int) -> tuple[torch.Tensor, float]:
    """MATH.md 4: mean and standard deviation of x_{s+1}."""
    sigma, after = SIGMAS[s], SIGMAS[s + 1]
    if name == "cps":
        std = after * math.sin(level * math.pi / 2)
        kept = math.sqrt(max(0.0, after**2 - std**2))
        return (1 - after) * (x_t - sigma * v) + kept * (x_t + (1 - sigma) * v), std
    below = SIGMAS[1] if sigma == 1 else sigma
    diffusion = {"dance": level, "flow": level * math.sqrt(sigma / (1 - below)), "flow_wan": SIGMAS[1] * sigma}[name]
    drift = v + diffusion**2 / (2 * sigma) * (x_t + (1 - sigma) * v)
    return x_t + (after - sigma) * drift, diffusion * math.sqrt(sigma - after)


@dataclass
class Step:
    """One transition of all samples as some role makes it."""

    velocity: torch.Tensor
    mean: torch.Tensor
    std: float
    x_next: torch.Tensor
    normalised: bool = True

    @property
    def log_prob(self) -> torch.Tensor:
        if not self.normalised:
            return -(self.x_next - self.mean).square().flatten(1).mean(1)
        return torch.distributions.Normal(self.mean, self.std).log_prob(self.x_next).flatten(1).mean(1)


def nudge(role: Role, size: float = 0.02) -> None:
    with torch.no_grad():
        generator = torch.Generator().manual_seed(5)
        weight = role.network.proj_out.weight
        weight.add_(size * torch.randn(weight.shape, generator=generator))


class Case:
    """One training step of the small student, and what its transitions were."""

    def __init__(self, moved: bool = False, sampler: SamplerConfig = ODE, reference=None, step: int = 0, **changes):
        changes = {"clip_low": 1e-3, "clip_high": 2e-3} | changes
        config = dataclasses.replace(CONFIG, **changes)
        self.moved, self.config = moved, config
        scorer = ScriptedScorer(REWARDS)
        self.one = dance_grpo(config, sampler=sampler, scorer=scorer, reference=reference)
        self.one.method._checked = moved
        if moved:
            scorer.before = lambda: nudge(self.one.roles["student"])
        self.calls = Calls.of(self.one.roles["student"])
        self.metrics = self.one.step(step)
        self.cond = self.one.loader.batch(step).cond
        self.kernel = (config.kernel, config.eta) if config.kernel != "auto" else ("dance", config.eta)
        if sampler.solver == "sde" and config.kernel == "auto":
            self.kernel = ("cps", 1.0)

    @property
    def gradient(self) -> dict[str, torch.Tensor]:
        (only,) = self.one.roles["student"].gradients
        return only

    def steps(self, role: Role) -> list[Step]:
        """The three stochastic transitions, made by `role`."""
        made = []
        for s in range(STEPS - 1):
            x_t, x_next = self.calls.x_t[s], self.calls.x_t[s + 1]
            velocity = role.velocity(x_t, torch.full((8,), SIGMAS[s], dtype=torch.float64), self.cond)
            made.append(Step(velocity, *kernel(*self.kernel, x_t, velocity, s), x_next, self.config.normalised))
        return made

    def expected(self, loss) -> dict[str, torch.Tensor]:
        """The gradient of loss(now, then), lists of transitions by the student as it is and as it sampled."""
        now, then = trainable(), trainable()
        if self.moved:
            nudge(now)
        with torch.no_grad():
            old = self.steps(then)
        loss(self.steps(now), old).backward()
        return gradients(now.network)


def log_ratios(now: list[Step], then: list[Step]) -> torch.Tensor:
    return torch.stack([a.log_prob - b.log_prob for a, b in zip(now, then, strict=True)], 1)


def ks(now: list[Step], then: list[Step]) -> torch.Tensor:
    """mean(dmu^2) / (2 std^2) of every sample and transition."""
    pairs = zip(now, then, strict=True)
    return torch.stack([(a.mean - b.mean).square().flatten(1).mean(1) / (2 * a.std**2) for a, b in pairs], 1)


def policy_gradient(now: list[Step], then: list[Step]) -> torch.Tensor:
    return -(A[:, None] * log_ratios(now, then)).mean()


# Kernels.


@pytest.mark.parametrize("name", KERNELS)
def test_the_first_update_of_every_kernel_is_its_policy_gradient(name):
    case = Case(kernel=name, eta=KERNELS[name])
    assert_near(case.gradient, case.expected(policy_gradient), 1e-4)
    assert case.metrics["log_ratio_abs_max"] == 0


def test_the_unnormalised_density_of_cps():
    case = Case(kernel="cps", eta=0.8, normalised=False)
    assert_near(case.gradient, case.expected(policy_gradient), 1e-4)


def test_auto_follows_the_sampler():
    """dance at eta for Euler steps; for a few-step student its own renoising, x' = (1 - sigma') x0 + sigma' eps."""
    case = Case(sampler=SDE, eta=0.1)
    assert_near(case.gradient, case.expected(policy_gradient), 1e-4)
    assert_near(Case(eta=0.2).gradient, Case(kernel="dance", eta=0.2).gradient)
    for s in range(STEPS - 1):
        x0 = case.calls.x_t[s] - SIGMAS[s] * case.steps(trainable())[s].velocity.detach()
        drawn = (case.calls.x_t[s + 1] - (1 - SIGMAS[s + 1]) * x0) / SIGMAS[s + 1]
        assert float(drawn.std()) == pytest.approx(1, abs=0.05)


def test_the_policy_of_a_few_step_student_is_its_sampler():
    """The same noise gives what `generate` makes: what is trained is what will be sampled."""
    decoded = []
    one = dance_grpo(CONFIG, sampler=SDE, scorer=ScriptedScorer(REWARDS))
    judge = one.method.reward.judge
    one.method.reward.judge = lambda x0, prompts: (decoded.append(x0), judge(x0, prompts))[1]
    calls = Calls.of(one.roles["student"])
    one.step(0)
    role = trainable()
    noises = []
    for s in range(STEPS - 1):
        x_t, x_next = calls.x_t[s], calls.x_t[s + 1]
        with torch.no_grad():
            x0 = x_t - SIGMAS[s] * role.velocity(x_t, torch.full((8,), SIGMAS[s]), one.loader.batch(0).cond)
        noises.append((x_next - (1 - SIGMAS[s + 1]) * x0) / SIGMAS[s + 1])
    made = generate(role, calls.x_t[0], one.loader.batch(0), SDE, lambda s: noises[s])
    torch.testing.assert_close(decoded[0], made, rtol=1e-4, atol=1e-4)


# Weights of transitions.


def test_inverse_dt_divides_by_the_step():
    case = Case(step_weight="inverse_dt")
    weights = torch.tensor([1 / (SIGMAS[s] - SIGMAS[s + 1]) for s in range(3)])
    expected = case.expected(lambda now, then: -(A[:, None] * weights * log_ratios(now, then)).mean())
    assert_near(case.gradient, expected, 1e-4)


@pytest.mark.parametrize("guard", [False, True])
@pytest.mark.parametrize("name", KERNELS)
def test_equal_pulls_every_velocity_by_its_noise_alone(name, guard):
    """d loss / d v = A eps / D at every transition, for any kernel: raising the density means lowering v along eps."""
    case = Case(kernel=name, eta=KERNELS[name], step_weight="equal", guard=guard)

    def loss(now, then):
        pulls = [((a.x_next - b.mean) / b.std * a.velocity).flatten(1).mean(1) for a, b in zip(now, then, strict=True)]
        return (A[:, None] * torch.stack(pulls, 1)).mean()

    assert_near(case.gradient, case.expected(loss), 2e-4)


def test_guard_and_inverse_dt_of_dance_weigh_by_std_over_step():
    case = Case(guard=True, step_weight="inverse_dt")
    weights = torch.tensor([0.3 / math.sqrt(SIGMAS[s] - SIGMAS[s + 1]) for s in range(3)])
    expected = case.expected(lambda now, then: -(A[:, None] * weights * log_ratios(now, then)).mean())
    assert_near(case.gradient, expected, 1e-4)


# Objectives, away from ratio 1.

SHAPES = {
    "none": {},
    "clip": {},
    "dual_clip": {"dual_clip": 1.003},
    "soft_clip": {"alpha": 40.0},
    "sapo": {"tau_pos": 30.0, "tau_neg": 50.0},
    "ce_gppo": {"beta_low": 0.3, "beta_high": 0.6},
    "cispo": {},
}


@pytest.mark.parametrize("mode", SHAPES)
def test_every_objective_with_its_own_parameters(mode):
    case = Case(moved=True, objective=mode, shape=ObjectiveParameters(**SHAPES[mode]))

    def loss(now, then, mode=mode, shape=SHAPES[mode]):
        d = log_ratios(now, then)
        return -surrogate(mode, d, A[:, None].expand_as(d), clip_low=1e-3, clip_high=2e-3, **shape).mean()

    assert_near(case.gradient, case.expected(loss), 1e-3)
    assert case.metrics["outside"] > 0


def test_gspo_has_the_gradient_of_the_whole_sequence():
    """Pass by pass, one graph at a time, the gradient of -mean min(s A, clip(s) A), s of all transitions."""
    case = Case(moved=True, objective="gspo", update_batch=4)

    def loss(now, then):
        return -surrogate("gspo", log_ratios(now, then), A, clip_low=1e-3, clip_high=2e-3).mean()

    assert_near(case.gradient, case.expected(loss), 1e-3)
    assert 0 < case.metrics["dead"] < 1
    assert_near(Case(objective="gspo").gradient, Case().gradient, 1e-5)


def test_the_guard_reads_the_means_before_and_after():
    case = Case(moved=True, guard=True)

    def loss(now, then):
        stds = torch.tensor([step.std for step in now])
        guarded = (log_ratios(now, then) + ks(now, then)) * stds
        return -surrogate("clip", guarded, A[:, None].expand_as(guarded), clip_low=1e-3, clip_high=2e-3).mean()

    assert_near(case.gradient, case.expected(loss), 1e-3)


def test_the_trust_region_drops_what_already_went_far_enough():
    bound = Case(moved=True).metrics["k"]
    case = Case(moved=True, objective="none", trust_region=bound)
    shares = []

    def loss(now, then):
        d = log_ratios(now, then)
        leaves = (ks(now, then) >= bound) & (d * A[:, None] > 0)
        shares.append(leaves.double().mean().item())
        return -(d.exp() * A[:, None]).masked_fill(leaves, 0.0).mean()

    assert_near(case.gradient, case.expected(loss), 1e-3)
    assert 0 < shares[0] < 1 and case.metrics["trust_region_left"] == pytest.approx(shares[0])


def test_the_trust_region_reads_the_ratio_of_the_objective():
    """Under guard the ratio is centred: samples 0 and 1 left by the raw log-ratio or the guarded one, never by both."""
    method = dance_grpo(dataclasses.replace(CONFIG, guard=True, trust_region=0.5, objective="none")).method
    log_ratio, ratio = torch.tensor([-0.1, 0.1, 0.1, 0.1]), torch.tensor([0.1, -0.1, 0.1, 0.1])
    replay = Replay(log_ratio, ratio, torch.tensor([1.0, 1.0, 1.0, 0.1]), None, (1e-3, 1e-3))
    minibatch = Minibatch(torch.arange(4), torch.tensor([1.0, 10.0, 100.0, 1000.0]))
    loss = method._loss(replay, torch.ones(4), minibatch, 0, {})
    assert float(loss) == pytest.approx(-10 * math.exp(-0.1) - 1000 * math.exp(0.1), rel=1e-5)


# KL to a reference.


def divergence(kind: str, now: list[Step], ref: list[Step]) -> torch.Tensor:
    if kind == "exact":
        return ks(now, ref)
    if kind == "velocity":
        pairs = zip(now, ref, strict=True)
        return torch.stack([(a.velocity - b.velocity).square().flatten(1).mean(1) for a, b in pairs], 1)
    d = log_ratios(now, ref)
    return {"k1": d, "k2": d.square() / 2, "k3": (-d).exp() + d - 1}[kind]


@pytest.mark.parametrize("kind", ["exact", "k1", "k2", "k3", "velocity"])
def test_kl_in_the_loss(kind):
    reference = frozen("reference", seed=1)
    case = Case(reference=reference, kl=kind, kl_coefficient=0.7)
    with torch.no_grad():
        ref = case.steps(reference)
    values = []

    def loss(now, then):
        kl = divergence(kind, now, ref)
        values.append(kl.mean().item())
        return policy_gradient(now, then) + 0.7 * kl.mean()

    assert_near(case.gradient, case.expected(loss), 1e-3)
    assert case.metrics["kl"] == pytest.approx(values[0], rel=1e-4)
    assert not gradients(reference.network)


def test_an_adapted_coefficient_is_that_of_the_loss():
    """Not the one of the settings: from 0.1 adapted to 0.7, the gradient is that of 0.7."""
    changes = {"clip_low": 1e-3, "clip_high": 2e-3, "kl_coefficient": 0.1, "kl_target": 1e-3}
    scorer, reference = ScriptedScorer(REWARDS), frozen("reference", seed=1)
    one = dance_grpo(dataclasses.replace(CONFIG, **changes), sampler=ODE, scorer=scorer, reference=reference)
    one.method.load_state_dict({"kl_coefficient": torch.tensor(0.7, dtype=torch.float64)})
    assert one.step(0)["kl_coefficient"] == 0.7
    fixed = Case(reference=frozen("reference", seed=1), kl_coefficient=0.7)
    assert_near(one.roles["student"].gradients[0], fixed.gradient, 1e-6)


def test_a_reference_that_is_the_student_is_no_pull():
    """Its KL is exactly 0, and so is its gradient."""
    case = Case(reference=frozen("reference"), kl_coefficient=100.0)
    assert case.metrics["kl"] == 0
    assert_near(case.gradient, Case().gradient)


def test_the_gradient_with_kl_does_not_depend_on_the_update_batch():
    changes = {"kl_coefficient": 0.7, "best_of_n": 2}
    whole = Case(reference=frozen("reference", seed=1), **changes)
    parts = Case(reference=frozen("reference", seed=1), update_batch=2, **changes)
    assert_near(parts.gradient, whole.gradient, 1e-4)


# Windows.


def test_a_window_alone_is_stochastic_stored_and_trained():
    window = WindowConfig(size=2, every=1)
    sampler = SamplerConfig(num_steps=6, guidance_scale=1.0)
    sigmas = sigma_table(6, 3.0)
    for step, first in enumerate([0, 1, 2, 3, 0]):
        case = Case(sampler=sampler, window=window, step=step)
        trained = [int((sigmas - case.calls.sigma[i][0]).abs().argmin()) for i in case.calls.where(graph=True)]
        assert trained == [first, first + 1] and case.metrics["window_first"] == first
        role = trainable()
        for s in range(5):
            x_t, x_next = case.calls.x_t[s], case.calls.x_t[s + 1]
            with torch.no_grad():
                euler = x_t + float(sigmas[s + 1] - sigmas[s]) * role.velocity(x_t, sigmas[s].expand(8), case.cond)
            assert torch.allclose(x_next, euler, atol=1e-5) == (s not in trained)


def test_only_the_states_of_the_window_are_kept():
    kept = []
    one = dance_grpo(
        dataclasses.replace(CONFIG, window=WindowConfig(size=2)),
        sampler=dataclasses.replace(ODE, num_steps=9),
        scorer=ScriptedScorer(REWARDS),
    )
    collect = one.method._collect
    one.method._collect = lambda *words, **more: (kept.append(collect(*words, **more)), kept[0])[1]
    one.step(0)
    assert kept[0].rollout.states.shape[1] == 3 and kept[0].rollout.log_probs.shape[1] == 2


def test_a_share_of_the_window_is_trained():
    case = Case(sampler=dataclasses.replace(ODE, num_steps=9), window=WindowConfig(size=4), timestep_fraction=0.5)
    assert len(case.calls.where(graph=True)) == 2


# What is logged.


def test_k_and_its_noise_floor():
    case = Case(moved=True)
    now, then = trainable(), trainable()
    nudge(now)
    with torch.no_grad():
        after, before = case.steps(now), case.steps(then)
    k, d = ks(after, before), log_ratios(after, before)
    assert case.metrics["k"] == pytest.approx(float(k.mean()), rel=1e-3)
    assert case.metrics["log_ratio_noise_floor"] == pytest.approx(math.sqrt(2 * float(k.mean()) / ELEMENTS), rel=1e-3)
    for s in range(3):
        assert case.metrics[f"k/{s}"] == pytest.approx(float(k[:, s].mean()), rel=1e-3)
    assert case.metrics["log_ratio"] == pytest.approx(float(d.mean()), abs=1e-5)
    wanted = diagnostics("clip", d.flatten(), A[:, None].expand_as(d).flatten(), clip_low=1e-3, clip_high=2e-3)
    assert {key: case.metrics[key] for key in wanted} == pytest.approx(wanted, rel=1e-2)
    assert 0 < wanted["dead"] < 1


def test_k_of_unchanged_weights_is_rounding():
    """The means are recovered from the states and the noise drawn again: far below any KL that a step makes."""
    for sampler in (ODE, SDE):
        assert Case(sampler=sampler).metrics["k"] < 1e-10


@pytest.mark.parametrize("changes", [{"update_batch": 2}, {"update_batch": 1, "best_of_n": 2}])
def test_what_is_logged_does_not_depend_on_the_update_batch(changes):
    """Quantiles and effective sizes are of the whole update, and what only fills up is not in them."""
    parts, whole = Case(moved=True, **changes).metrics, Case(moved=True, **changes | {"update_batch": 8}).metrics
    assert parts.keys() == whole.keys()
    assert parts == pytest.approx(whole, rel=2e-3, abs=1e-6)


def test_the_default_run_keeps_its_numbers():
    """The tiny recipe with fewer samples, as it was before there was anything to choose."""
    sizes = {"num-prompts": 4, "num-samples": 4, "prompts-per-update": 2, "rollout-batch": 8, "update-batch": 8}
    words = [word for name, size in sizes.items() for word in (f"--algorithm.{name}", str(size))]
    algorithms = {name: config for name, (_, config) in METHODS.items()}
    run = settings.parse(["--method", "dance_grpo", *words], algorithms, lambda run: None)
    metrics = build(run, ALONE).trainer.step(0)
    expected = {
        "reward": 2.8781769797205925,
        "reward_std": 1.9231677881264946,
        "frac_zero_advantage": 0.0,
        "log_ratio": -3.215856850147247e-05,
        "log_ratio_abs_max": 0.0008201003074645996,
        "outside": 0.0,
        "student/grad_norm": 0.05558130331337452,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-3, abs=2e-6)
