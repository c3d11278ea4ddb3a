"""Calls of samples with one initial noise are made once: what they give is what calls for every sample give.

The tests compare with the same step in which no rows count as equal. Network outputs of a row may differ in the last
bits with the number of rows of a batch; on a CPU they are mostly equal.
"""

import dataclasses
import functools

import pytest
import torch
from helpers import (
    ALONE,
    Calls,
    assert_near,
    dance_grpo,
    frozen,
    setup_of,
    small_batch,
    small_causal,
    trainable,
)
from policy_case import CONFIG, ODE, SDE

from unified_trainer.basics.errors import UserError
from unified_trainer.methods.dance_grpo import DanceGRPO
from unified_trainer.methods.diffusion_nft import DiffusionNFT, DiffusionNFTConfig
from unified_trainer.methods.rl.policy import initial_noise
from unified_trainer.methods.rl.sde_windows import WindowConfig
from unified_trainer.numerics.chunks import ChunkConfig
from unified_trainer.parallel.random import Streams
from unified_trainer.roles.backbone import Backbone
from unified_trainer.roles.causal import CausalStudent
from unified_trainer.roles.role import TrainableConfig
from unified_trainer.sampling.equal_rows import EqualRows
from unified_trainer.sampling.shared_calls import kept_for_the_next_part, shared_velocity
from unified_trainer.sampling.solver import SamplerConfig, policy_velocity

GUIDED = dataclasses.replace(ODE, guidance_scale=3.0)
WINDOW = WindowConfig(size=1, every=1)


def no_rows(keys) -> EqualRows:
    """Stand-in for `EqualRows.of`: no two rows are equal."""
    rows = tuple(range(len(list(keys))))
    return EqualRows(tuple(map(object.__new__, [object] * len(rows))), rows, rows)


@pytest.fixture
def apart(monkeypatch):
    """A function that makes all rows differ from then on."""
    return lambda: monkeypatch.setattr(EqualRows, "of", no_rows)


def assert_alike(left: torch.Tensor, right: torch.Tensor) -> None:
    """Equal up to the last bits of float32, for values around 1."""
    torch.testing.assert_close(left, right, rtol=1e-5, atol=2e-6)


def test_equal_rows_by_hand():
    equal = EqualRows.of("abcab")
    assert (equal.first, equal.place, equal.any) == ((0, 1, 2), (0, 1, 2, 0, 1), True)
    assert equal.keys == ("a", "b", "c")
    x = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    assert equal.spread(x).tolist() == [1, 2, 3, 1, 2]
    assert equal.reduce(torch.arange(5.0)).tolist() == [0, 1, 2]
    (equal.spread(x) * torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])).sum().backward()
    assert x.grad.tolist() == [5, 7, 3]
    assert not EqualRows.of("abc").any


class Stepped:
    """One training step with its samples, calls, gradient and metrics."""

    def __init__(self, sampler: SamplerConfig, step: int, reference=None, **changes) -> None:
        config = dataclasses.replace(CONFIG, init_same_noise=True, clip_low=1e-3, **changes)
        self.one = dance_grpo(config, sampler=sampler, reference=reference)
        self.calls, self.seen = Calls.of(self.one.roles["student"]), []
        samples = self.one.method.rollouts.samples
        self.one.method.rollouts.samples = lambda *given: self.seen.append(samples(*given)) or self.seen[-1]
        self.metrics = self.one.step(step)
        self.rows = [len(x_t) for x_t in self.calls.x_t]
        (self.gradient,) = self.one.roles["student"].gradients


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sampler", "step", "changes", "rows", "rows_apart"),
    [
        (ODE, 0, {}, [2, 8, 8, 8, 2, 8, 8], [8] * 7),
        (SDE, 0, {"rollout_batch": 2}, [*[1, 2, 2, 2, 2, 2, 2] * 2, 2, 8, 8], [*[2] * 16, 8, 8, 8]),
        (GUIDED, 0, {"rollout_batch": 6}, [*[4, 12, 12, 12], *[4, 4, 4], 4, 16, 16], None),
        (ODE, 2, {"window": WINDOW}, [2, 2, 2, 8, 2], [8] * 5),  # the window is transition 2
        (ODE, 1, {"window": WINDOW, "update_batch": 2}, [2, 2, 8, 8, 1, 1, 1, 1], None),
    ],
    ids=["all transitions", "renoising, split groups", "guided, uneven parts", "window at the end", "second order"],
)
def test_a_step_with_shared_calls_is_that_with_a_call_for_each_sample(sampler, step, changes, rows, rows_apart, apart):
    shared = Stepped(sampler, step, **changes)
    apart()
    alone = Stepped(sampler, step, **changes)
    assert sum(shared.rows) < sum(alone.rows)
    assert shared.rows == rows
    assert rows_apart is None or alone.rows == rows_apart
    for name in ("states", "log_probs", "x0"):
        assert_alike(getattr(shared.seen[0].rollout, name), getattr(alone.seen[0].rollout, name))
    assert_alike(shared.seen[0].scores.parts, alone.seen[0].scores.parts)
    assert_near(shared.gradient, alone.gradient, 1e-3)  # advantages divide by the small spread of rewards


@pytest.mark.slow
@pytest.mark.parametrize("where", ["loss", "reward"])
def test_the_reference_is_called_once_for_equal_samples(where, apart):
    def stepped() -> tuple[list[int], Stepped]:
        reference = frozen("reference", seed=1)
        calls = Calls.of(reference)
        one = Stepped(ODE, 0, reference, kl_coefficient=0.1, kl_in=where)
        return [len(x_t) for x_t in calls.x_t], one

    rows, shared = stepped()
    apart()
    rows_apart, alone = stepped()
    assert (rows, rows_apart) == ([2, 8, 8], [8, 8, 8])
    assert shared.metrics["kl"] == pytest.approx(alone.metrics["kl"], rel=1e-5)
    assert_near(shared.gradient, alone.gradient, 1e-3)


@pytest.mark.parametrize(("same", "first"), [(True, 2), (False, 8)])
def test_noise_is_drawn_once_by_the_rollout_and_once_by_the_replay(same, first, monkeypatch):
    drawn, noise = [], Streams.noise
    monkeypatch.setattr(
        Streams, "noise", lambda self, *given: drawn.append((given[0], len(given[1]))) or noise(self, *given)
    )
    one = dance_grpo(dataclasses.replace(CONFIG, init_same_noise=same, clip_low=1e-3), sampler=ODE)
    one.step(0)
    transitions = [(f"transition {s}", 8) for s in range(3)]
    assert drawn == [("initial", first), *transitions, *transitions]


BATCH = dataclasses.replace(small_batch(2).take([0, 0, 1, 0]), sample_ids=(0, 1, 2, 3))  # not in groups one by one


def sampled(method, config, sampler: SamplerConfig, role, step: int = 0) -> tuple[list[int], torch.Tensor]:
    """Return the rows of each call, and the samples."""
    calls = Calls.of(role)
    made = method.sample(config, sampler, role, BATCH, step, Streams(0, step)).x0
    return [len(x_t) for x_t in calls.x_t], made


@pytest.mark.parametrize(("elsewhere", "rows"), [(False, [2]), (True, [2, 1])])
def test_all_ranks_make_a_call_that_one_of_them_needs(elsewhere, rows, monkeypatch):
    """Weights are sharded: a rank that has the result from the part before makes the call once more."""
    role, batch, x_t, sigma = trainable(), small_batch(2), torch.randn(2, *BATCH.latent_shape), ODE.sigmas()[0]
    calls = Calls.of(role)

    def velocity_of(rows):
        return functools.partial(policy_velocity, role, batch=rows, sampler=ODE)

    with kept_for_the_next_part():
        first = shared_velocity(role, batch, EqualRows.of("ab"), 1, velocity_of)(x_t, sigma)
        monkeypatch.setattr(type(role), "on_any_rank", lambda _, here: here or elsewhere)
        second = shared_velocity(role, batch.take([1]), EqualRows.of("b"), 1, velocity_of)(x_t[1:], sigma)
    assert [len(each) for each in calls.x_t] == rows
    assert torch.equal(second, first[1:])


def test_whether_calls_are_shared_does_not_depend_on_the_ids_of_a_rank():
    """Sharing is a collective: a rank whose prompt and sample ids happen to be equal takes part as the others do."""
    batch = small_batch(1)
    for prompt in range(3):
        one = dataclasses.replace(batch, prompt_ids=(prompt,), sample_ids=(1,))
        noise, equal = initial_noise(Streams(0, 0), one, same=True)
        assert equal is not None and not equal.any
        assert torch.equal(noise, Streams(0, 0).noise("initial", [prompt], one.latent_shape))
        assert initial_noise(Streams(0, 0), one, same=False)[1] is None


def test_diffusion_nft_shares_the_first_call_of_renoising(apart):
    config = DiffusionNFTConfig(init_same_noise=True)
    rows, made = sampled(DiffusionNFT, config, SDE, trainable())
    assert rows == [2, 4, 4, 4]
    assert float((made[0] - made[1]).abs().max()) > 0.1  # samples of one prompt
    apart()
    rows, alone = sampled(DiffusionNFT, config, SDE, trainable())
    assert rows == [4, 4, 4, 4]
    assert_alike(made, alone)


@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_a_causal_student_shares_calls_of_the_first_chunk_and_appends_all_but_the_last(scale, apart):
    """Two chunks of one latent frame, four steps each: 4 calls, the first of 2 rows, 1 to append the chunk, 4 calls."""
    sampler = dataclasses.replace(ODE, guidance_scale=scale, chunks=ChunkConfig(chunk_frames=1))
    config = dataclasses.replace(CONFIG, init_same_noise=True)

    def student() -> CausalStudent:
        return CausalStudent("student", Backbone(small_causal(), ALONE, trained=True), TrainableConfig())

    rows, made = sampled(DanceGRPO, config, sampler, student())
    both = 1 if scale == 1 else 2
    assert rows == [both * n for n in (2, 4, 4, 4, 4, 4, 4, 4, 4)]
    apart()
    rows, alone = sampled(DanceGRPO, config, sampler, student())
    assert rows == [both * 4] * 9
    assert_alike(made, alone)


def test_equal_samples_are_refused_where_no_other_noise_tells_them_apart():
    config, once = DiffusionNFTConfig(init_same_noise=True), SamplerConfig(num_steps=1, solver="sde", guidance_scale=1)
    for sampler in (ODE, once):
        with pytest.raises(UserError, match=r"init_same_noise must be false .*--algorithm\.no-init-same-noise"):
            config.check(setup_of(sampler))
    config.check(setup_of(SDE))
    dataclasses.replace(config, init_same_noise=False).check(setup_of(ODE))
