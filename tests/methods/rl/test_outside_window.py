"""Steps outside of a policy's window: the solver of second order, its levels, and what the window is with them."""

import dataclasses

import numpy as np
import pytest
import torch
from diffusers import DPMSolverMultistepScheduler
from helpers import (
    ALONE,
    CAPTIONS,
    WAN,
    Calls,
    ScriptedScorer,
    WatchedRollouts,
    dance_grpo,
    setup_of,
    small_batch,
    small_causal,
    tiny_codec,
    trainable,
)
from policy_case import CONFIG, ODE, REWARDS

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.requests import Request
from unified_trainer.data.loader import make_batch
from unified_trainer.methods.dance_grpo import DanceGRPO
from unified_trainer.methods.rl.sde_windows import WindowConfig
from unified_trainer.models.wan.model import WanModel
from unified_trainer.numerics.chunks import ChunkConfig
from unified_trainer.numerics.flow import sigma_table, x0_from_velocity
from unified_trainer.numerics.kernels import Policy
from unified_trainer.parallel.random import Streams
from unified_trainer.roles.backbone import Backbone
from unified_trainer.roles.causal import CausalStudent, KVCache
from unified_trainer.roles.role import Frozen, RoleConfig, TrainableConfig
from unified_trainer.sampling.outside_window import OutsideWindow, dpm_solver_2m, euler
from unified_trainer.sampling.solver import SamplerConfig, policy_velocity, rollout

NINE = dataclasses.replace(ODE, num_steps=9)
MIDDLE = WindowConfig(size=2, every=1, outside_steps=4)  # in training step 3: 2 calls before the window and 2 after it


def bent(x_t, sigma):
    """A velocity that is not straight, in state and level."""
    return torch.sin(3 * x_t) + x_t * sigma.to(x_t)


@pytest.mark.filterwarnings("ignore:__array__:DeprecationWarning")
@pytest.mark.parametrize("steps", [1, 2, 3, 8, 20])
@pytest.mark.parametrize("whole", [True, False], ids=["to data", "to a level"])
def test_the_solver_is_that_of_diffusers(steps, whole):
    """On the scheduler's own levels, and on levels from 1 to one above 0."""
    scheduler = DPMSolverMultistepScheduler(
        use_flow_sigmas=True,
        prediction_type="flow_prediction",
        flow_shift=3.0,
        final_sigmas_type="zero" if whole else "sigma_min",
        lower_order_final=whole,
    )
    scheduler.set_timesteps(steps)
    scheduler.sigmas = scheduler.sigmas.double() if whole else sigma_table(steps + 3, 3.0)[: steps + 1]
    x = start = torch.randn(2, 1, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    scheduler.set_begin_index(0)
    for time, sigma in zip(scheduler.timesteps, scheduler.sigmas, strict=False):
        x = scheduler.step(bent(x, sigma), time, x).prev_sample
    torch.testing.assert_close(dpm_solver_2m(bent, start, scheduler.sigmas), x, rtol=1e-5, atol=1e-5)


def test_the_error_is_of_second_order():
    """Half the step leaves about a quarter of the error, and half of Euler's."""
    start = torch.linspace(-1, 1, 8, dtype=torch.float64).reshape(1, 1, 1, 1, 8)

    def ratio(solver) -> float:
        ends = [solver(bent, start, torch.linspace(0.9, 0.3, n + 1, dtype=torch.float64)) for n in (40, 80, 1280)]
        return float((ends[0] - ends[2]).norm() / (ends[1] - ends[2]).norm())

    assert ratio(euler) == pytest.approx(2, abs=0.2)
    assert ratio(dpm_solver_2m) == pytest.approx(4, abs=0.5)


def test_levels_land_on_the_window_and_calls_are_shared_out_in_proportion():
    for steps in (4, 9, 20):
        sigmas = SamplerConfig(num_steps=steps, terminal=0.1).sigmas()
        for size in (1, steps // 2):
            for window in WindowConfig(size=size, schedule="random").all(steps - 1):
                for calls in range(1 + bool(window.start), steps - size + 1):
                    outside = OutsideWindow.of_calls(sigmas, window, calls)
                    assert outside.calls == calls
                    assert (outside.before[0], outside.before[-1]) == (sigmas[0], sigmas[window.start])
                    assert (outside.after[0], outside.after[-1]) == (sigmas[window.stop], 0)
                    assert all(bool((levels.diff() < 0).all()) for levels in (outside.before, outside.after))
                    before = calls * window.start / (steps - size)
                    assert abs(len(outside.before) - 1 - before) <= 1 and len(outside.after) > 1
                own = OutsideWindow.of_calls(sigmas, window, steps - size)
                assert torch.equal(own.before, sigmas[: window.start + 1])
                assert torch.equal(own.after, sigmas[window.stop :])


def test_ends_are_nearer_to_200_euler_steps_than_those_of_as_many_euler_steps():
    """The embedded Wan model with guidance 3 and a window of 4 of 20 steps; the policy's noise is equal."""
    role = Frozen("student", Backbone(WanModel.open(WAN, "transformer"), ALONE), RoleConfig())
    sampler = SamplerConfig(num_steps=20, shift=3.0, guidance_scale=3.0)
    sigmas, window = sampler.sigmas(), range(8, 12)
    shape, generator = tiny_codec().latent_shape(5, 64, 32), torch.Generator().manual_seed(0)
    batch = make_batch(tiny_codec(), Request.of(CAPTIONS[:1]), "", shape, prompt_ids=[0], sample_ids=[0])
    noise, *drawn = torch.randn(20, 1, *shape, generator=generator)
    policy = Policy("dance", 0.3, sigmas)
    places = np.linspace(0, 8, 97), np.linspace(12, 20, 101)
    exact = OutsideWindow(*(torch.from_numpy(np.interp(at, range(21), sigmas)) for at in places), euler)

    def end(outside: OutsideWindow) -> torch.Tensor:
        return rollout(role, noise, batch, sampler, policy, window, drawn.__getitem__, outside=outside).x0

    reference = end(exact)
    for calls in (8, 12):
        outside = OutsideWindow.of_calls(sigmas, window, calls)
        errors = [
            float((end(dataclasses.replace(outside, solve=f)) - reference).norm()) for f in (dpm_solver_2m, euler)
        ]
        assert errors[0] < 0.9 * errors[1]


def stepped(window: WindowConfig, step: int, **changes):
    """Return a training step's trainer, calls of the student, samples and metrics."""
    config = dataclasses.replace(CONFIG, window=window, clip_low=1e-3, **changes)
    one = dance_grpo(config, sampler=NINE, scorer=ScriptedScorer(REWARDS))
    calls = Calls.of(one.roles["student"])
    one.method.sample_from(watched := WatchedRollouts(one.method.rollouts))
    metrics = one.step(step)
    return calls, watched.seen[0].rollout, metrics


def test_the_replay_is_exact_with_fewer_calls():
    calls, samples, metrics = stepped(MIDDLE, 3)
    sigmas = sigma_table(9, 3.0)
    levels = [float(sigma[0]) for sigma in calls.sigma]
    outside = OutsideWindow.of_calls(sigmas, range(3, 5), 4)
    wanted = torch.cat([outside.before[:-1], sigmas[3:5], outside.after[:-1], sigmas[3:5]])
    assert levels == pytest.approx(wanted.tolist())  # the rollout's 6 in place of 9, and the replay's
    assert calls.where(graph=True) == [6, 7]
    assert all(torch.equal(calls.x_t[i], calls.x_t[i + 4]) for i in (2, 3))
    assert torch.equal(samples.states, torch.stack(calls.x_t[2:5], 1))
    assert metrics["log_ratio_abs_max"] == 0 and metrics["window_first"] == 3


@pytest.mark.parametrize("window", [range(3), range(1, 3), range(2, 3)])
def test_steps_by_default_are_the_euler_steps_of_the_sampler_bit_for_bit(window):
    role, batch, sigmas = trainable(), small_batch(2), ODE.sigmas()
    x_t, *drawn = torch.randn(5, 2, *batch.latent_shape)
    policy = CONFIG.policy(ODE)
    made = rollout(role, x_t, batch, ODE, policy, window, drawn.__getitem__)
    with torch.no_grad():
        for s in range(3):
            velocity = policy_velocity(role, x_t, sigmas[s], batch, ODE)
            if s in window:
                mean, std = policy.step(s, x_t, velocity)
                x_t = mean + std * drawn[s]
            else:
                x_t = x_t + float(sigmas[s + 1] - sigmas[s]) * velocity
        assert torch.equal(made.x0, x0_from_velocity(x_t, policy_velocity(role, x_t, sigmas[3], batch, ODE), sigmas[3]))


def test_calls_of_one_noise_are_shared_up_to_the_window():
    calls, *_ = stepped(MIDDLE, 3, init_same_noise=True)
    assert [len(x_t) for x_t in calls.x_t] == [2, 2, 2, 8, 8, 8, 2, 8]


def test_a_causal_student_makes_the_fewer_calls_in_every_chunk():
    sampler = dataclasses.replace(NINE, chunks=ChunkConfig(chunk_frames=1))
    role = CausalStudent("student", Backbone(small_causal(), ALONE, trained=True), TrainableConfig())
    config = dataclasses.replace(CONFIG, window=MIDDLE)
    levels, velocity = [], KVCache.velocity
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KVCache, "velocity", lambda self, x, s: levels.append(float(s)) or velocity(self, x, s))
        made = DanceGRPO.sample(config, sampler, role, small_batch(2), 3, Streams(0, 3))
    outside = OutsideWindow.of_calls(sampler.sigmas(), range(3, 5), 4)
    assert levels == [*outside.before[:-1], *sampler.sigmas()[3:5], *outside.after[:-1]] * 2
    policy, sigmas = config.policy(sampler), sampler.sigmas()
    with torch.no_grad():
        for i, s in enumerate((3, 4)):
            x_t, x_next = made.states[:, i], made.states[:, i + 1]
            velocity_at = policy_velocity(role, x_t, sigmas[s], small_batch(2), sampler, made.x0)
            log_prob = policy.log_prob(x_next, *policy.step(s, x_t, velocity_at))
            torch.testing.assert_close(log_prob, made.log_probs[:, i], rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("window", "flow_map", "message"),
    [
        (WindowConfig(outside_steps=4), False, "must be 0 without algorithm.window.size"),
        (MIDDLE, True, r"must be 0 for a flow map \(student.flow_map\)"),
        (WindowConfig(size=2, outside_steps=1), False, "must be 0, or 2 to 7, not 1"),
        (WindowConfig(size=2, outside_steps=8), False, "must be 0, or 2 to 7, not 8"),
        (WindowConfig(size=8, outside_steps=2), False, "must be 0, or 1 to 1, not 2"),
    ],
)
def test_what_cannot_be_names_the_key(window, flow_map, message):
    setup = setup_of(NINE, student=TrainableConfig(flow_map=flow_map))
    with pytest.raises(UserError, match="algorithm.window.outside_steps " + message):
        dataclasses.replace(CONFIG, window=window).check(setup)


@pytest.mark.parametrize(("size", "calls"), [(2, 2), (2, 7), (8, 1)])
def test_the_bounds_themselves_are_taken(size, calls):
    dataclasses.replace(CONFIG, window=WindowConfig(size=size, outside_steps=calls)).check(setup_of(NINE))
