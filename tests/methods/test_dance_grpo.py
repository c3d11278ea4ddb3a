"""DanceGRPO: the gradient in closed form, the trained transitions, the noise, and the exact replay.

The tests record the network's calls. The inputs of a rollout's four steps are the states x_0 .. x_3, and x_{s+1} was
drawn from the kernel at x_s. Expected values are computed from these states with the formulas of MATH.md.
"""

import dataclasses
import math
import re

import pytest
import torch
from helpers import ALONE, CPU, Calls, ScriptedScorer, assert_near, dance_grpo, gradients, setup_of, trainable

from unified_trainer.methods.dance_grpo import DanceGRPOConfig
from unified_trainer.methods.rl.sde_windows import WindowConfig
from unified_trainer.numerics.flow import sigma_table
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.roles.role import Trainable
from unified_trainer.sampling.solver import SamplerConfig

STEPS, ETA = 4, 0.3
SIGMAS = sigma_table(STEPS, 3.0)
REWARDS = (1.0, 2.0, 4.0, 5.0, -1.0, 1.0, -1.0, 1.0)  # of two groups of four
HALF = math.sqrt(3) / 2  # 1 / (Bessel's std of -1, 1, -1, 1)
ADVANTAGES = torch.tensor([-1.0954451, -0.5477226, 0.5477226, 1.0954451, -HALF, HALF, -HALF, HALF])
CONFIG = DanceGRPOConfig(
    num_prompts=2, num_samples=4, prompts_per_update=2, rollout_batch=8, update_batch=8, eta=ETA, timestep_fraction=1.0
)
RENOISED = SamplerConfig(num_steps=STEPS, guidance_scale=1.0, solver="sde")
GUIDED = SamplerConfig(num_steps=STEPS, guidance_scale=3.0)


def trainer(scorer=None, **changes):
    rest = {key: changes.pop(key) for key in ("sampler", "moves", "config", "mesh") if key in changes}
    return dance_grpo(dataclasses.replace(CONFIG, **changes), scorer=scorer or ScriptedScorer(REWARDS), **rest)


def stepped(step: int = 0, **changes):
    """Return a trainer after one training step, its metrics, and the calls of its network."""
    one = trainer(**changes)
    calls = Calls.of(one.roles["student"])
    return one, one.step(step), calls


def gradient(**changes) -> dict[str, torch.Tensor]:
    return stepped(**changes)[0].roles["student"].gradients[0]


def kernel(velocity: torch.Tensor, x_t: torch.Tensor, s: int) -> tuple[torch.Tensor, float]:
    """Return mean and standard deviation of x_{s+1} (MATH.md 4, dance)."""
    sigma, dt = float(SIGMAS[s]), float(SIGMAS[s + 1] - SIGMAS[s])
    drift = velocity + ETA**2 / (2 * sigma) * (x_t + (1 - sigma) * velocity)
    return x_t + dt * drift, ETA * math.sqrt(-dt)


def initial_student() -> Trainable:
    return trainable()


def velocity_at(role: Trainable, states: list[torch.Tensor], s: int, cond, rows: slice | torch.Tensor) -> torch.Tensor:
    return role.velocity(states[s][rows], SIGMAS[s].expand(len(states[s][rows])), cond)


def expected_gradient(
    one, calls: Calls, advantages: torch.Tensor, rows: slice | torch.Tensor = slice(None), steps=(0, 1, 2)
):
    """-mean over samples and trained steps of A d log pi(x_{s+1} | x_s): at ratio 1 the clip has no effect."""
    role, cond = initial_student(), one.loader.batch(0).cond.map(lambda x: x[rows])
    loss = 0.0
    for s in steps:
        x_t, x_next = calls.x_t[s][rows], calls.x_t[s + 1][rows]
        mean, std = kernel(velocity_at(role, calls.x_t, s, cond, rows), x_t, s)
        density = torch.distributions.Normal(mean, std).log_prob(x_next).flatten(1).mean(1)
        loss = loss - (advantages[rows] * density).mean() / len(steps)
    loss.backward()
    return gradients(role.network)


# The gradient.


def test_the_first_update_is_the_policy_gradient():
    one, _, calls = stepped()
    assert_near(one.roles["student"].gradients[0], expected_gradient(one, calls, ADVANTAGES), 1e-4)


def test_a_subset_of_the_steps_is_averaged_over_itself():
    one, _, calls = stepped(timestep_fraction=0.34)
    (replayed,) = calls.where(graph=True)
    (trained,) = [s for s in range(3) if torch.allclose(calls.sigma[replayed], SIGMAS[s].expand(8))]
    expected = expected_gradient(one, calls, ADVANTAGES, steps=(trained,))
    assert_near(one.roles["student"].gradients[0], expected, 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("update_batch", [4, 2, 1])
def test_the_gradient_does_not_depend_on_the_update_batch(update_batch):
    assert_near(gradient(update_batch=update_batch), gradient(), 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("rollout_batch", [100, 3, 1])
def test_the_gradient_does_not_depend_on_the_rollout_batch(rollout_batch):
    """A rollout batch that does not divide the samples, 3 + 3 + 2, changes nothing either."""
    assert_near(gradient(rollout_batch=rollout_batch), gradient(), 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("sampler", [GUIDED, SamplerConfig(num_steps=STEPS, guidance_scale=0.5)])
def test_the_gradient_with_guidance_does_not_depend_on_batches(sampler):
    assert_near(gradient(sampler=sampler, update_batch=2, rollout_batch=4), gradient(sampler=sampler), 1e-4)


def test_the_advantage_is_clipped():
    one, _, calls = stepped(advantage_clip=0.7)
    expected = expected_gradient(one, calls, ADVANTAGES.clamp(-0.7, 0.7))
    assert_near(one.roles["student"].gradients[0], expected, 1e-4)


def test_a_group_below_the_threshold_teaches_nothing():
    """The means are 3 and 0: the second group gets advantage 0, and the mean is still over all samples."""
    one, metrics, calls = stepped(reward_threshold=1.0)
    expected = expected_gradient(one, calls, torch.cat([ADVANTAGES[:4], torch.zeros(4)]))
    assert_near(one.roles["student"].gradients[0], expected, 1e-4)
    assert metrics["frac_zero_advantage"] == metrics["frac_below_threshold_groups"] == 0.5
    assert metrics["frac_zero_std_groups"] == 0


EQUAL = ScriptedScorer([0.1] * 8)
HALF_EQUAL = ScriptedScorer([*REWARDS[:4], 2.0, 2.0, 2.0, 2.0])


@pytest.mark.parametrize(
    ("changes", "why"),
    [({"reward_threshold": 10.0}, "frac_below_threshold_groups"), ({"scorer": EQUAL}, "frac_zero_std_groups")],
)
def test_a_step_with_nothing_to_learn_moves_nothing_and_says_so(changes, why):
    """The update is skipped: without a gradient AdamW would still apply its momentum and weight decay."""
    one, metrics, calls = stepped(moves=True, **changes)
    assert one.roles["student"].gradients == [] and one.roles["student"].updates == 0
    assert not calls.where(graph=True)
    assert metrics["frac_zero_advantage"] == metrics[why] == metrics["skipped_updates"] == 1
    reasons = [metrics.get(f"frac_{name}_groups", 0) for name in ("below_threshold", "zero_std")]
    assert sum(reasons) == 1  # each group counts under one reason
    assert metrics["reward"] == pytest.approx(sum(changes.get("scorer", ScriptedScorer(REWARDS)).rewards) / 8)


def test_a_group_of_equal_rewards_leaves_the_mean():
    """The mean is over the remaining samples, unlike for a group below the threshold."""
    one, metrics, calls = stepped(scorer=HALF_EQUAL)
    assert_near(one.roles["student"].gradients[0], expected_gradient(one, calls, ADVANTAGES, slice(0, 4)), 1e-4)
    assert (metrics["frac_zero_std_groups"], metrics["skipped_updates"]) == (0.5, 0)


def test_only_the_update_without_minibatches_is_skipped():
    one, metrics, calls = stepped(scorer=HALF_EQUAL, prompts_per_update=1, update_batch=4)
    (only,) = one.roles["student"].gradients
    assert_near(only, expected_gradient(one, calls, ADVANTAGES, slice(0, 4)), 1e-4)
    assert metrics["skipped_updates"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("update_batch", [8, 4, 2, 1])
def test_only_the_best_and_the_worst_are_trained_on(update_batch):
    """Advantages are of the whole groups (1 2 4 5 and -1 1 -1 1), the mean is over the kept samples without padding."""
    one, _, calls = stepped(best_of_n=2, update_batch=update_batch)
    kept = torch.tensor([0, 3, 4, 7])  # of equal rewards the first is the worst and the last the best
    assert_near(one.roles["student"].gradients[0], expected_gradient(one, calls, ADVANTAGES, kept), 1e-4)


def test_rewards_are_spread_in_and_between_groups():
    """Bessel's stds of (1, 2, 4, 5) and (-1, 1, -1, 1); means 3 and 0."""
    metrics = stepped()[1]
    assert metrics["reward_std_in_groups"] == pytest.approx((math.sqrt(10 / 3) + math.sqrt(4 / 3)) / 2)
    assert metrics["reward_std_between_groups"] == pytest.approx(3 / math.sqrt(2))


def test_rewards_go_to_their_own_samples():
    """Rewards scored four at a time stay in the order of the samples."""
    one, metrics, calls = stepped(rollout_batch=4)
    states = [torch.cat(calls.x_t[s : 2 * STEPS : STEPS]) for s in range(STEPS)]
    expected = expected_gradient(one, Calls(x_t=states), ADVANTAGES)
    assert_near(one.roles["student"].gradients[0], expected, 1e-4)
    assert metrics["reward"] == pytest.approx(sum(REWARDS) / 8)
    assert metrics["reward_std"] == pytest.approx(float(torch.tensor(REWARDS).std()))


# Updates.


def test_several_updates_of_one_rollout():
    """With num_prompts / prompts_per_update = 2, each update averages over its own prompt's samples."""
    one, _, calls = stepped(prompts_per_update=1, update_batch=4)
    first, second = one.roles["student"].gradients
    assert_near(first, expected_gradient(one, calls, ADVANTAGES, slice(0, 4)), 1e-4)
    assert_near(second, expected_gradient(one, calls, ADVANTAGES, slice(4, 8)), 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("prompts_per_update", "update_batch", "moves"), [(2, 8, 1), (2, 2, 1), (1, 4, 2), (1, 1, 2)])
def test_the_student_steps_once_per_update(prompts_per_update, update_batch, moves):
    one, _, _ = stepped(prompts_per_update=prompts_per_update, update_batch=update_batch, moves=True)
    assert one.roles["student"].updates == moves


def test_the_second_update_sees_the_updated_student():
    _, metrics, _ = stepped(prompts_per_update=1, update_batch=4, rollout_batch=4, moves=True)
    assert metrics["log_ratio_abs_max"] > 0


# Which transitions are trained.


def trained_sigmas(step: int, seed: int = 0, **changes) -> tuple[float, ...]:
    sampler = SamplerConfig(num_steps=9, guidance_scale=1.0)
    config = dataclasses.replace(CONFIG, **{"timestep_fraction": 0.5} | changes)
    one = dance_grpo(config, sampler=sampler, scorer=ScriptedScorer(REWARDS), seed=seed)
    calls = Calls.of(one.roles["student"])
    one.step(step)
    return tuple(float(calls.sigma[i][0]) for i in calls.where(graph=True))


def test_all_but_the_last_transition_are_trained():
    """The last transition goes to the clean prediction without noise, so it has no density."""
    table = sigma_table(9, 3.0)
    assert trained_sigmas(0, timestep_fraction=1.0) == pytest.approx(table[:8].tolist())


@pytest.mark.slow
@pytest.mark.parametrize(("fraction", "count"), [(0.01, 1), (0.5, 4), (0.6, 5), (1.0, 8)])
def test_a_fraction_of_the_transitions(fraction, count):
    assert len(trained_sigmas(0, timestep_fraction=fraction)) == count


@pytest.mark.slow
def test_the_subset_is_a_function_of_seed_and_step():
    subsets = [trained_sigmas(step) for step in range(4)]
    assert subsets == [trained_sigmas(step) for step in range(4)]
    assert len(set(subsets)) > 1
    assert all(len(set(subset)) == 4 for subset in subsets)
    assert subsets != [trained_sigmas(step, seed=1) for step in range(4)]


def test_the_subset_is_the_same_on_all_ranks():
    """Every rank draws it from (seed, step): otherwise ranks would average gradients of different transitions."""
    method = trainer(timestep_fraction=0.5).method
    per_rank = []
    for rank in range(2):
        one = dance_grpo(CONFIG, scorer=ScriptedScorer(REWARDS), mesh=ALONE)
        one.loader.mesh = Mesh(CPU, rank, 2)
        calls = Calls.of(one.roles["student"])
        one.method.config = dataclasses.replace(method.config, rollout_batch=4, update_batch=4)
        one.step(5)
        per_rank.append([float(calls.sigma[i][0]) for i in calls.where(graph=True)])
    assert per_rank[0] == per_rank[1]


# The replay.


@pytest.mark.slow
@pytest.mark.parametrize("sampler", [SamplerConfig(num_steps=STEPS, guidance_scale=1.0), GUIDED])
@pytest.mark.parametrize("batch", [8, 4, 1])
def test_the_replay_is_exact(sampler, batch):
    """With equal batches and unchanged weights the ratio is exactly 1."""
    _, metrics, _ = stepped(sampler=sampler, rollout_batch=batch, update_batch=batch)
    assert metrics["log_ratio_abs_max"] == 0 and metrics["log_ratio"] == 0 and metrics["clip_fraction"] == 0


@pytest.mark.slow
def test_with_other_batches_the_replay_differs_by_rounding_and_a_message_says_so():
    one, metrics, _ = stepped(rollout_batch=8, update_batch=1)
    assert metrics["log_ratio_abs_max"] < 1e-4
    (message,) = one.messages
    pattern = r"on-policy check: largest log-ratio before the first update is (\S+)% of the clip range"
    found = re.fullmatch(pattern, message)
    clip = one.method.config.clip_low
    assert float(found[1]) == pytest.approx(100 * metrics["log_ratio_abs_max"] / clip, rel=0.1)
    one.step(1)
    assert not one.messages


def test_the_replay_is_of_the_same_states():
    _, _, calls = stepped()
    for rolled, replayed in zip(range(3), calls.where(graph=True), strict=True):
        assert torch.equal(calls.x_t[rolled], calls.x_t[replayed])
        assert torch.equal(calls.text[rolled], calls.text[replayed])
        assert torch.equal(calls.sigma[rolled], calls.sigma[replayed])


def test_guidance_is_in_the_rollout_and_in_the_update():
    """With guidance every call holds cond and uncond of all samples; without it none holds uncond."""
    for sampler, rows in ((GUIDED, 16), (SamplerConfig(num_steps=STEPS, guidance_scale=1.0), 8)):
        one, _, calls = stepped(sampler=sampler)
        assert {len(x_t) for x_t in calls.x_t} == {rows}
        batch = one.loader.batch(0)
        both = torch.cat([batch.cond["text"], batch.uncond["text"]])
        assert all(torch.equal(text, both[:rows]) for text in calls.text)


def nudge(one) -> None:
    """Change the student between rollout and replay, as stale rollout weights would."""
    with torch.no_grad():
        one.roles["student"].network.proj_out.weight.add_(0.05)


def test_a_replay_that_differs_is_refused_before_any_weight_moves():
    late = []
    scorer = ScriptedScorer(REWARDS, before=lambda: nudge(late[0]))
    late.append(trainer(scorer, moves=True))
    with pytest.raises(RuntimeError, match=r"log-ratio is .* with unchanged weights.*rollout and replay differ"):
        late[0].step(0)
    assert late[0].roles["student"].updates == 0


def test_the_replay_is_checked_on_the_first_update_of_the_run_only():
    scorer = ScriptedScorer(REWARDS)
    one = trainer(scorer, moves=True)
    one.step(0)
    scorer.before = lambda: nudge(one)
    assert one.step(1)["log_ratio_abs_max"] > 1e-4


# Noise.


def initial(step: int = 0, **changes) -> torch.Tensor:
    return stepped(step, **changes)[2].x_t[0].flatten(1)


def largest_correlation(rows: torch.Tensor) -> float:
    """Return the largest absolute correlation of two rows; for independent normals of 128 elements it is below
    5 / sqrt(128) = .44.
    """
    return float((torch.corrcoef(rows) - torch.eye(len(rows))).abs().max())


def test_initial_noise_is_of_the_sample_and_the_step():
    assert largest_correlation(torch.cat([initial(0), initial(1)])) < 0.44


def test_init_same_noise_is_one_noise_per_prompt_and_never_one_for_all():
    """The first call is made once for the samples of a prompt: here for two."""
    shared = initial(init_same_noise=True)
    assert len(shared) == 2
    assert largest_correlation(torch.cat([shared, initial(1, init_same_noise=True)])) < 0.44


def test_the_drawn_noise_is_new_at_every_transition_of_every_sample():
    """eps = (x_{s+1} - mean) / std, recovered from the states, is standard normal and uncorrelated."""
    one, _, calls = stepped(init_same_noise=True)
    calls.x_t[0] = calls.x_t[0].repeat_interleave(4, 0)  # of the first call, which is made once for a prompt
    role, cond = initial_student(), one.loader.batch(0).cond
    drawn = []
    for s in range(3):
        with torch.no_grad():
            mean, std = kernel(velocity_at(role, calls.x_t, s, cond, slice(None)), calls.x_t[s], s)
        drawn.append(((calls.x_t[s + 1] - mean) / std).flatten(1))
    eps = torch.cat(drawn)
    assert largest_correlation(eps) < 0.44
    assert float(eps.std()) == pytest.approx(1, abs=0.05)
    assert float(eps.mean()) == pytest.approx(0, abs=0.1)


def test_the_rollout_is_the_same_for_any_rollout_batch():
    one, other = stepped()[2], stepped(rollout_batch=2)[2]
    torch.testing.assert_close(torch.cat([other.x_t[STEPS * i] for i in range(4)]), one.x_t[0], rtol=0, atol=0)
    torch.testing.assert_close(torch.cat([other.x_t[STEPS * i + 3] for i in range(4)]), one.x_t[3])


# Wrong settings.


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_samples": 1}, r"algorithm\.num_samples must be at least 2: a group of one"),
        ({"sampler": SamplerConfig(num_steps=1)}, r"sampler\.num_steps must be at least 2"),
        ({"kernel": "ode"}, r"algorithm\.kernel must be stochastic"),
        ({"kernel": "cps", "eta": 1.2}, r"algorithm\.eta must be at most 1 for cps, not 1\.2"),
        ({"normalised": False}, r"--algorithm\.no-normalised needs algorithm\.kernel cps"),
        ({"std_cap": 0.5, "kernel": "cps"}, r"algorithm\.std_cap needs algorithm\.kernel dance or flow, not cps"),
        ({"kernel": "cps", "normalised": False, "guard": True}, r"set --algorithm\.normalised"),
        ({"kernel": "cps", "normalised": False, "step_weight": "equal"}, r"set --algorithm\.normalised"),
        ({"kernel": "cps", "normalised": False, "clip_velocity": 0.1}, r"set --algorithm\.normalised"),
        ({"window": WindowConfig(size=4)}, r"algorithm\.window\.size must be at most 3, .*, not 4"),
        ({"window": WindowConfig(size=2), "sampler": RENOISED}, r"algorithm\.window\.size must be 0 for .* sde"),
        ({"kl_target": 0.1}, r"algorithm\.kl_target, .* need algorithm\.kl_coefficient above 0"),
        ({"kl_in": "reward"}, r"algorithm\.kl_in reward and .* need algorithm\.kl_coefficient above 0"),
        ({"kl_estimate": "abs"}, r"algorithm\.kl_estimate need algorithm\.kl_coefficient above 0"),
        ({"best_of_n": 3}, r"algorithm\.best_of_n must be even and at most .*, not 3"),
        ({"best_of_n": 6}, r"algorithm\.best_of_n must be even and at most .*, not 6"),
    ],
)
def test_a_wrong_setting_names_its_key(changes, message):
    changes = dict(changes)
    sampler = changes.pop("sampler", GUIDED)
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **changes).check(setup_of(sampler))


def test_a_kl_needs_a_reference():
    with pytest.raises(ValueError, match=r"algorithm\.kl_coefficient above 0 needs a reference role"):
        trainer(kl_coefficient=0.1)


def test_a_transition_without_density_is_named():
    """The level is so small that its noise is 0 in float32."""
    config = dataclasses.replace(CONFIG, kernel="cps", eta=1e-50)
    with pytest.raises(ValueError, match=r"algorithm\.kernel cps at level .* has no density at transition 0"):
        config.check(setup_of(GUIDED))
