"""DancePPO: both roles' gradients by hand, warm-up, batches, lag, state, and wrong settings.

With values of zero, as at the start, PPO is GRPO with advantages over the whole batch. tests/methods/
test_dance_ppo_exact.py compares with closed forms.
"""

import dataclasses

import pytest
import torch
from helpers import (
    ALONE,
    SMALL,
    Calls,
    ScriptedScorer,
    WatchedRollouts,
    assert_near,
    assert_same,
    checkpoint_of,
    cut_off,
    dance_grpo,
    dance_ppo,
    flags,
    gradients,
    metrics_of,
    run,
    setup_of,
    small_model,
)

from unified_trainer.__main__ import main
from unified_trainer.basics.errors import UserError
from unified_trainer.methods.dance_grpo import DanceGRPOConfig
from unified_trainer.methods.dance_ppo import DancePPOConfig
from unified_trainer.methods.rl.sde_windows import WindowConfig
from unified_trainer.numerics.chunks import ChunkConfig
from unified_trainer.numerics.flow import sigma_table
from unified_trainer.numerics.objectives import OBJECTIVES
from unified_trainer.roles.backbone import Backbone
from unified_trainer.roles.experts import ExpertLayout
from unified_trainer.roles.role import TrainableConfig
from unified_trainer.roles.value import Value
from unified_trainer.sampling.solver import SamplerConfig

pytestmark = pytest.mark.slow  # seconds together

STEPS = 4
SIGMAS = sigma_table(STEPS, 3.0)
REWARDS = (1.0, 2.0, 4.0, 5.0)
MEAN, STD = 3.0, (10 / 3) ** 0.5  # of the rewards, with Bessel's correction
STANDARD = [(r - MEAN) / STD for r in REWARDS]
SIZES = {"num_prompts": 4, "prompts_per_update": 4, "rollout_batch": 4, "update_batch": 4, "timestep_fraction": 1.0}
CONFIG = DancePPOConfig(**SIZES)


def trainer(**changes):
    rest = {key: changes.pop(key) for key in ("sampler", "moves", "role", "head", "scorer") if key in changes}
    config = dataclasses.replace(CONFIG, **changes)
    return dance_ppo(config, **{"scorer": ScriptedScorer(REWARDS)} | rest)


def stepped(**changes):
    one = trainer(**changes)
    return one, one.step(0)


def recorded(**changes) -> dict[str, dict[str, torch.Tensor]]:
    """Return the gradients of both roles' only update."""
    one, _ = stepped(**changes)
    return {name: role.gradients[0] for name, role in one.roles.items()}


# The policy's gradient.


def test_with_values_of_zero_it_is_grpo_over_the_whole_batch():
    one, metrics = stepped(normalise_advantages=False)
    grpo = DanceGRPOConfig(**SIZES | {"num_prompts": 2, "prompts_per_update": 2}, num_samples=2, advantage="global")
    other = dance_grpo(grpo, scorer=ScriptedScorer(REWARDS), captions=("a red circle moving left",) * 4)
    samples = one.loader.batch(0)
    other.loader.batch = lambda step: dataclasses.replace(samples, prompt_ids=(0, 0, 1, 1))
    expected = other.step(0)
    assert_near(one.roles["student"].gradients[0], other.roles["student"].gradients[0], 1e-5)
    for key in ("approx_kl", "clip_fraction", "u_mean", "ess", "log_ratio_abs_max"):
        assert metrics[key] == pytest.approx(expected[key])


def values_and_gradient(calls: list[torch.Tensor], cond, loss) -> dict[str, torch.Tensor]:
    """Return the gradient of loss(values [b, s]) of a fresh copy of the value function at these states."""
    copy = Value("value", Backbone(small_model(1), ALONE, trained=True), TrainableConfig())
    for i, weight in enumerate(copy._heads[""].parameters()):
        weight.data.copy_(0.3 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(i)))
    levels = [sigma.expand(len(calls[0])) for sigma in SIGMAS[: len(calls)]]
    values = torch.stack([copy.value(x, level, cond) for x, level in zip(calls, levels, strict=True)], 1).double()
    loss(values).backward()
    head = {f"value.{key}": p.grad for key, p in copy._heads[""].named_parameters()}
    return gradients(copy.network) | head


@pytest.mark.parametrize("gae_lambda", [1.0, 0.6])
def test_both_gradients_by_hand(gae_lambda):
    """Values far from zero, discount .9: the value function moves to the targets, the policy by A = GAE."""
    one = trainer(head=0.3, discount=0.9, gae_lambda=gae_lambda, normalise_advantages=False)
    calls = Calls.of(one.roles["student"])
    one.step(0)
    batch, states, seen = one.loader.batch(0), calls.x_t[: STEPS - 1], []

    def half_squared_error(values):
        after, following = torch.zeros(4, dtype=torch.float64), torch.zeros(4, dtype=torch.float64)
        columns = []
        for s in reversed(range(STEPS - 1)):
            reward = torch.tensor(STANDARD, dtype=torch.float64) if s == STEPS - 2 else 0.0
            value = values[:, s].detach()
            after = reward + 0.9 * following - value + 0.9 * gae_lambda * after
            following = value
            columns.insert(0, after)
        seen.append(torch.stack(columns, 1))
        return (values - (values.detach() + seen[0])).square().mean() / 2

    expected = values_and_gradient(states, batch.cond, half_squared_error)
    assert_near(one.roles["value"].gradients[0], expected, 1e-4)

    student = trainer().roles["student"]  # as it was
    loss = 0.0
    for s in range(STEPS - 1):
        x_t, x_next, sigma, dt = states[s], calls.x_t[s + 1], float(SIGMAS[s]), float(SIGMAS[s + 1] - SIGMAS[s])
        velocity = student.velocity(x_t, SIGMAS[s].expand(4), batch.cond)
        mean = x_t + dt * (velocity + 0.3**2 / (2 * sigma) * (x_t + (1 - sigma) * velocity))
        density = torch.distributions.Normal(mean, 0.3 * (-dt) ** 0.5).log_prob(x_next).flatten(1).mean(1)
        loss = loss - (seen[0][:, s] * density).mean() / (STEPS - 1)
    loss.backward()
    assert_near(one.roles["student"].gradients[0], gradients(student.network), 1e-4)


def test_advantages_are_normalised_over_samples_and_transitions_and_clipped():
    one = trainer(head=0.3, advantage_clip=0.8)
    seen, begin = [], one.method.update.begin
    one.method.update.begin = lambda trajectories, advantages, *rest: (
        seen.append(advantages) or begin(trajectories, advantages, *rest)
    )
    plain = trainer(head=0.3)
    compared, compare = [], plain.method._compare
    plain.method._compare = lambda *arguments: compared.append(compare(*arguments)) or compared[0]
    one.step(0)
    plain.step(0)
    advantages = compared[0][1]
    expected = ((advantages - advantages.mean()) / advantages.flatten().std()).clamp(-0.8, 0.8)
    torch.testing.assert_close(seen[0], expected, rtol=1e-6, atol=1e-6)
    assert float(expected.abs().max()) == 0.8 > float(expected.abs().min())


def test_the_value_function_does_not_move_the_student_nor_the_student_it():
    """The gradients of each are those of its own weights: they share none here, and no loss reaches both."""
    both = recorded(head=0.3)
    assert "value.weight" in both["value"] and "value.weight" not in both["student"]
    again = recorded(head=0.3, value_clip=0.0)
    assert_same(both["student"], again["student"])


# Batches.


@pytest.mark.parametrize("changes", [{"update_batch": 2}, {"update_batch": 1}, {"rollout_batch": 3}])
def test_no_gradient_depends_on_batches(changes):
    expected = recorded(head=0.3)
    for name, found in recorded(head=0.3, **changes).items():
        assert_near(found, expected[name], 1e-4)


@pytest.mark.parametrize(("per_update", "updates"), [(4, 1), (2, 2), (1, 4)])
def test_both_roles_step_once_per_update(per_update, updates):
    one, metrics = stepped(prompts_per_update=per_update, moves=True, head=0.3)
    assert [role.updates for role in one.roles.values()] == [updates, updates]
    assert {"value/grad_norm", "student/grad_norm", "value_loss", "approx_kl"} <= metrics.keys()


def test_one_sample_of_a_prompt_has_no_statistics_of_groups():
    _, metrics = stepped()
    assert metrics["reward"] == MEAN and metrics["reward_std"] == pytest.approx(STD)
    assert not [key for key in metrics if "groups" in key or "advantage" in key or key == "pixels/diversity"]
    _, metrics = stepped(num_prompts=2, prompts_per_update=2, num_samples=2)
    assert metrics["reward_std_in_groups"] == pytest.approx(0.5**0.5) and "pixels/diversity" in metrics


def test_a_window_is_trained_whole_and_its_states_are_valued():
    window = WindowConfig(size=2)
    one = trainer(window=window, head=0.3)
    calls = Calls.of(one.roles["value"])
    metrics = one.step(0)
    levels = [float(sigma[0]) for sigma in calls.sigma]
    assert levels == pytest.approx([float(SIGMAS[s]) for s in (0, 1, 0, 1)])
    assert [calls.graph[i] for i in range(4)] == [False, False, True, True]
    assert metrics["window_first"] == 0 and {"explained_variance/0", "explained_variance/1"} <= metrics.keys()


def test_a_fraction_trains_fewer_transitions_of_the_policy_and_all_of_the_values():
    one = trainer(timestep_fraction=0.34, head=0.3)
    calls = [Calls.of(role) for role in one.roles.values()]
    one.step(0)
    assert [sum(each.graph) for each in calls] == [1, STEPS - 1]


# Warm-up and the unit of the values.


def test_the_value_function_is_trained_alone_at_first():
    one = trainer(value_warmup_steps=2, moves=True, head=0.3)
    for step, expected in enumerate(([0, 1], [0, 2], [1, 3])):
        metrics = one.step(step)
        assert [role.updates for role in one.roles.values()] == expected
        assert ("approx_kl" in metrics) is (step == 2) and "reward" in metrics
    assert any("on-policy check" in message for message in one.messages)


def test_values_are_in_units_of_the_first_rewards():
    scorer = ScriptedScorer(REWARDS)
    one = trainer(scorer=scorer)
    assert one.step(0)["value_mean"] == MEAN
    scorer.rewards = [value + 7 for value in REWARDS]
    assert one.step(1)["value_mean"] == MEAN
    assert one.method.state_dict()["reward_scale"].tolist() == pytest.approx([MEAN, STD])
    other = trainer(scorer=scorer)
    other.method.load_state_dict(one.method.state_dict())
    other.step(0)
    assert other.method.scale.tolist() == pytest.approx([MEAN, STD])


def test_equal_first_rewards_are_no_unit():
    scorer = ScriptedScorer([2.0] * 4)
    one = trainer(scorer=scorer)
    metrics = one.step(0)
    assert metrics["value_loss"] == metrics["explained_variance"] == 0
    scorer.rewards = list(REWARDS)
    one.step(1)
    assert one.method.scale.tolist() == pytest.approx([MEAN, STD])


@pytest.mark.parametrize(("clip", "moved"), [(0.0, True), (1e-6, False)])
def test_the_clip_of_values_stops_values_that_moved(clip, moved):
    """All rewards of the second step are high: its second update finds values that went up, beyond the clip."""
    scorer = ScriptedScorer(REWARDS)
    role = TrainableConfig(learning_rate=1e-3, max_grad_norm=0.0)
    one = trainer(scorer=scorer, value_clip=clip, prompts_per_update=2, moves=True, role=role)
    one.step(0)
    scorer.rewards = [9.0] * 4
    one.step(1)
    *_, before, after = one.roles["value"].gradients
    assert any(bool(gradient.any()) for gradient in before.values())
    assert any(bool(gradient.any()) for gradient in after.values()) is moved


# A lag.


class Stale(WatchedRollouts):
    """Rollouts that say their weights were `lag` steps older than they are."""

    def __init__(self, rollouts, lag: int) -> None:
        super().__init__(rollouts)
        self.lag = lag

    def samples(self, batch, step, rng):
        samples = super().samples(batch, step, rng)
        return dataclasses.replace(samples, versions=samples.versions - self.lag)


@pytest.mark.parametrize("correction", ["none", "vtrace"])
@pytest.mark.parametrize("gae_lambda", [1.0, 0.5])
def test_a_lag_without_a_change_of_weights_is_gae(gae_lambda, correction):
    """The update is that of a step without lag: the replay of V-trace finds ratios of 1."""
    expected = recorded(head=0.3, gae_lambda=gae_lambda)
    one = trainer(head=0.3, gae_lambda=gae_lambda, correction=correction)
    one.method.sample_from(Stale(one.method.rollouts, 1))
    calls = Calls.of(one.roles["student"])
    metrics = one.step(0)
    replays = 2 if correction == "vtrace" else 1  # of all transitions: for V-trace, for the update
    assert metrics["lag"] == 1 and len(calls.graph) == STEPS + replays * (STEPS - 1)
    for name, role in one.roles.items():
        assert_near(role.gradients[0], expected[name], 1e-5)


OBJECTIVES_OF_PPO = [one for name, one in OBJECTIVES.items() if name not in ("clip", "none")]


@pytest.mark.parametrize("objective", OBJECTIVES_OF_PPO)
def test_every_objective_at_unchanged_weights_has_the_gradient_of_the_clipped_one(objective):
    """Each slope is the advantage at ratio 1; GSPO takes another advantage for each transition (GSPO-token)."""
    changed, clipped = recorded(head=0.3, gae_lambda=0.5, objective=objective()), recorded(head=0.3, gae_lambda=0.5)
    for name in changed:
        assert_near(changed[name], clipped[name], 1e-5)


# Causal students.

CAUSAL = SamplerConfig(num_steps=STEPS, guidance_scale=1.0, chunks=ChunkConfig(chunk_frames=1))


def test_a_causal_student_has_one_value_for_each_sample_that_of_its_initial_noise():
    """Its advantages are R - V(initial noise) at every transition; the value function moves to R there alone."""
    one = trainer(sampler=CAUSAL, head=0.3, normalise_advantages=False, value_clip=0.0)
    calls, seen, begin = Calls.of(one.roles["value"]), [], one.method.update.begin
    one.method.update.begin = lambda trajectories, advantages, *rest: (
        seen.append((trajectories, advantages)) or begin(trajectories, advantages, *rest)
    )
    one.step(0)
    ((trajectories, advantages),) = seen
    noise = trajectories.rng.noise("initial", trajectories.batch.sample_ids, trajectories.batch.latent_shape)
    assert [torch.equal(x, noise) for x in calls.x_t] == [True, True] and calls.graph == [False, True]
    expected = values_and_gradient(
        [noise],
        one.loader.batch(0).cond,
        lambda values: (
            seen.append(values.detach())
            or ((values[:, 0] - torch.tensor(STANDARD, dtype=torch.float64)).square().mean() / 2)
        ),
    )
    torch.testing.assert_close(advantages, (torch.tensor(STANDARD).double()[:, None] - seen[1]).expand(-1, STEPS - 1))
    assert_near(one.roles["value"].gradients[0], expected, 1e-4)


@pytest.mark.parametrize("density", ["mean", "joint"])
def test_v_trace_of_a_causal_student_by_hand(density):
    """With one value V of a sample, td_s = (R - V) times the product of min(1, rho) over the transitions after s."""
    one = trainer(sampler=CAUSAL, head=0.3, correction="vtrace", weight_density=density, normalise_advantages=False)
    one.method.sample_from(Stale(one.method.rollouts, 1))
    rho, values, compare = [], [], one.method._compare
    ratios = one.method._log_ratios
    one.method._log_ratios = lambda trajectories: rho.append(ratios(trajectories).fill_(-0.5)) or rho[0]
    one.method._compare = lambda trajectories, returns, value, mesh: (
        values.append((value, compare(trajectories, returns, value, mesh))) or values[0][1]
    )
    one.step(0)
    ((value, (targets, advantages)),) = values
    error = torch.tensor(STANDARD, dtype=torch.float64) - value[:, 0]
    for s in range(STEPS - 1):
        after = STEPS - 2 - s
        torch.testing.assert_close(advantages[:, s], error * torch.exp(torch.tensor(-0.5 * after)))
        torch.testing.assert_close(targets[:, s], value[:, 0] + error * torch.exp(torch.tensor(-0.5 * (after + 1))))


# The whole program.


def test_a_run_resumes_bit_for_bit(run_folder):
    whole, halves = run_folder / "whole", run_folder / "halves"
    more = ["--value.learning-rate", "1e-3", "--algorithm.value-warmup-steps", "1", "--checkpoint-every", "1"]
    run("dance_ppo", whole, *more, "--steps", "3")
    assert main(["--resume", str(cut_off(whole, halves, 2))]) == 0
    assert_same(checkpoint_of(halves, 3), checkpoint_of(whole, 3))
    assert metrics_of(halves)[-1] == metrics_of(whole)[-1]


def test_student_and_value_function_as_adapters_of_one_network(run_folder):
    adapters = flags({"student.adapter.rank": 2, "value.adapter.rank": 2, "value.learning-rate": 1e-3})
    run("dance_ppo", run_folder, *adapters, "--steps", "2")
    keys = checkpoint_of(run_folder, 2)
    weights = {key.split("/", 2)[2] for key in keys if key.startswith("value/weights/")}
    assert {"value.weight", "value.bias"} < weights and all("lora_" in key for key in weights if "value." not in key)


def test_two_experts_of_both_roles(run_folder):
    run("dance_ppo", run_folder, "--student.boundary", "0.9", "--value.boundary", "0.9", "--steps", "1")
    (line,) = metrics_of(run_folder)
    assert {"train/value/high/grad_norm", "train/value/low/grad_norm", "train/transitions_high"} <= line.keys()


# Wrong settings.


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_prompts": 1, "prompts_per_update": 1}, r"num_prompts x algorithm\.num_samples must be at least 2"),
        *(
            (
                {"sampler": SamplerConfig(num_steps=STEPS, chunks=ChunkConfig(chunk_frames=1))} | changes,
                r"algorithm\.window\.size must be 0, algorithm\.discount 1 and algorithm\.gae_lambda 1 for a causal",
            )
            for changes in ({"window": WindowConfig(size=1)}, {"discount": 0.9}, {"gae_lambda": 0.5})
        ),
        ({"correction": "vtrace", "c_bar": 2.0}, r"algorithm\.c_bar must be at most algorithm\.rho_bar \(1\), not 2"),
        ({"rho_bar": 2.0}, r"algorithm\.rho_bar and algorithm\.c_bar need algorithm\.correction vtrace"),
        (
            {"correction": "vtrace", "kernel": "cps", "normalised": False, "weight_density": "joint"},
            r"algorithm\.weight_density joint needs",
        ),
        ({"value": TrainableConfig(ema_decay=0.9)}, r"value\.ema_decay must be 0"),
    ],
)
def test_a_wrong_setting_names_its_key(changes, message):
    sampler, roles = changes.pop("sampler", SamplerConfig(num_steps=STEPS)), {}
    if "value" in changes:
        roles["value"] = changes.pop("value")
    with pytest.raises(UserError, match=message):
        dataclasses.replace(CONFIG, **changes).check(setup_of(sampler, **roles))


def test_every_state_needs_a_trained_expert_of_the_value_function():
    two = {"high": "transformer", "low": "transformer_2"}
    setup = setup_of(SamplerConfig(num_steps=STEPS), {"value": ExpertLayout(0.8, two, ("high",))})
    with pytest.raises(UserError, match=r"algorithm\.window lies wholly in the expert of value that is not trained"):
        CONFIG.check(setup)


def test_settings_of_groups_are_unknown(capsys):
    assert main([*SMALL["dance_ppo"], "--algorithm.dynamic-sampling-rounds", "1"]) == 2
    assert "--algorithm.dynamic-sampling-rounds" in capsys.readouterr().err
