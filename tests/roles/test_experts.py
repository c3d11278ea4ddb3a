"""Experts: two networks of a role that meet at a noise level, and learn as one would."""

from itertools import product

import numpy as np
import pytest
import torch
from cells import cells
from expert_world import BOUNDARY, CAUSAL, CONFIGS, MOVES, STAYS, networks, trainer, trajectory
from helpers import ALONE, Calls, Recording, assert_near, assert_same, small_batch

from unified_trainer.numerics.flow import ShiftedUniform, guide, x0_from_velocity
from unified_trainer.parallel.random import Streams
from unified_trainer.roles.causal import CausalStudent
from unified_trainer.roles.critic import Critic
from unified_trainer.roles.experts import ExpertConfig, balanced_uniform
from unified_trainer.roles.role import Frozen, RoleConfig, Trainable, TrainableConfig
from unified_trainer.run.checkpoint import dcp as checkpoint
from unified_trainer.sampling.solver import SamplerConfig, predict_chunks

pytestmark = pytest.mark.slow  # seconds together

X_T = torch.randn(4, 16, 2, 2, 2, generator=torch.Generator().manual_seed(3))
MIXED = torch.tensor([0.9, 0.4, BOUNDARY, 0.1], dtype=torch.float64)
METHODS = tuple(CONFIGS)
ALL = ("student", "teacher", "critic")


def role(seeds=(0, 1), kind=Trainable, name="student", config=STAYS, **options):
    return kind(name, networks(name, ALONE, seeds, **options), config)


def summed(found: dict[str, torch.Tensor], update: str) -> dict[str, torch.Tensor]:
    """The gradient of one update, those of experts added up."""
    total: dict[str, torch.Tensor] = {}
    for key, value in found.items():
        if key.startswith(update):
            name = key.removeprefix(update).removeprefix("high/").removeprefix("low/")
            total[name] = total.get(name, 0) + value
    return total


# Routing.


def test_each_sample_is_answered_by_the_expert_of_its_own_noise_level():
    """High at the boundary itself; the rows come back in their order, and no expert sees another's."""
    both, high, low = role((0, 1)), role((0,)), role((1,))
    calls = {side: Calls.of(role_of) for side, role_of in zip(("high", "low"), sides(both), strict=True)}
    cond = small_batch(4).cond
    answer = both.velocity(X_T, MIXED, cond)
    for rows, alone in (([0, 2], high), ([1, 3], low)):
        expected = alone.velocity(X_T[rows], MIXED[rows], cond.map(lambda x, rows=rows: x[rows]))
        assert torch.equal(answer[rows], expected)
    assert [calls[side].sigma[0].tolist() for side in calls] == [[0.9, BOUNDARY], [0.4, 0.1]]


def sides(both):
    """The networks of a role, each as a role of its own for `Calls`."""
    return [type("One", (), {"network": both._backbones[side].model.network}) for side in ("high", "low")]


@pytest.mark.parametrize(("levels", "runs"), [([0.9, 0.8], (1, 0)), ([0.1, 0.79], (0, 1)), ([0.9, 0.1], (1, 1))])
def test_an_expert_without_samples_does_not_run(levels, runs):
    both = role()
    calls = [Calls.of(one) for one in sides(both)]
    both.velocity(X_T[:2], torch.tensor(levels, dtype=torch.float64), small_batch(2).cond)
    assert tuple(len(one.sigma) for one in calls) == runs


def test_a_frozen_role_and_a_critic_route_too():
    cond = small_batch(4).cond
    teacher = role(name="teacher", kind=Frozen, config=RoleConfig())
    assert torch.equal(teacher.velocity(X_T, MIXED, cond), role().velocity(X_T, MIXED, cond).detach())
    assert not teacher.velocity(X_T, MIXED, cond).requires_grad
    critic = role(name="critic", kind=Critic)
    for i, head in enumerate(critic._heads.values()):
        head.weight.data.fill_(1.0 + i)
    velocity, logits = critic.velocity_and_logits(X_T, MIXED, cond)
    assert torch.equal(velocity, critic.velocity(X_T, MIXED, cond))
    for seed, weight, rows in ((0, 1.0, [0, 2]), (1, 2.0, [1, 3])):
        alone = role((seed,), name="critic", kind=Critic)
        alone._heads[""].weight.data.fill_(weight)
        _, expected = alone.velocity_and_logits(X_T[rows], MIXED[rows], cond.map(lambda x, rows=rows: x[rows]))
        torch.testing.assert_close(logits[rows], expected)


def test_each_expert_has_its_guidance_scale():
    both, batch = role(), small_batch(4)
    cond, uncond = (both.velocity(X_T, MIXED, c).detach() for c in (batch.cond, batch.uncond))
    expected = guide(cond, uncond, torch.tensor([4.0, 1.5, 4.0, 1.5]))
    guided = both.guided_velocity(X_T, MIXED, batch.cond, batch.uncond, (4.0, 1.5)).detach()
    torch.testing.assert_close(guided, expected, rtol=1e-5, atol=1e-5)
    calls = [Calls.of(one) for one in sides(both)]
    low = torch.full((4,), 0.3, dtype=torch.float64)
    both.guided_velocity(X_T, low, batch.cond, batch.uncond, (4.0, 1.0))
    assert [len(x) for x in calls[1].x_t] == [4] and not calls[0].x_t  # where no guidance is asked for, none is made
    with pytest.raises(ValueError, match="student is one network and has one guidance_scale"):
        role((0,)).guided_velocity(X_T, MIXED, batch.cond, batch.uncond, (4.0, 1.5))


# Two experts of equal weights are the one network.


@pytest.mark.parametrize(("method", "two"), cells(product(METHODS, [("student",), ("teacher", "critic"), ALL])))
def test_equal_experts_learn_what_one_network_does(method, two):
    """Gradients summed over the experts, update by update, and every metric that is not of one expert."""
    dense, experts = trajectory(trainer(method)), trajectory(trainer(method, two=two, equal=True))
    updates = sorted({"/".join(key.split("/")[:3]) + "/" for key in dense if key.startswith("gradients")})
    assert updates
    for update in updates:
        assert_near(summed(experts, update), summed(dense, update), 1e-5)
    for key, value in dense.items():
        if key.startswith("metrics"):
            torch.testing.assert_close(experts[key], value, rtol=1e-5, atol=1e-6)


def test_equal_adapters_over_one_base_learn_what_one_does():
    """Two adapters of the same weights on one network."""
    dense = trajectory(trainer("dmd2", adapters=True))
    one = trainer("dmd2", two=ALL, equal=True, adapters=True)
    for name in ("student", "critic"):
        given = one.roles[name]._backbones["high"]
        for key, weight in given.weights(f"{name}_high").items():
            source = dense[f"state/{name}/weights/{key}"]
            weight.data.copy_(source)
            given.weights(f"{name}_low")[key].data.copy_(source)
        assert one.roles[name]._backbones["low"] is given
    experts = trajectory(one)
    for update in ("gradients/student/0/", "gradients/critic/1/"):
        assert_near(summed(experts, update), summed(dense, update), 1e-5)


@pytest.mark.parametrize("method", ["finetune", "dmd2"])
def test_accumulation_over_batches_of_different_experts_is_one_large_batch(method):
    parts, whole = (trajectory(trainer(method, two=ALL, micro_batch=size)) for size in (1, 4))
    gradients = [{k: v for k, v in one.items() if k.startswith("gradients")} for one in (parts, whole)]
    assert {key.split("/")[3] for key in gradients[0]} == {"high", "low"}
    assert_near(*gradients, 1e-5)


# What an expert's optimizer does.


def give(role_of: Trainable, side: str, value: float = 1.0) -> None:
    for key, p in role_of.weights.items():
        if key.startswith(side):
            p.grad = torch.full_like(p, value)


def state(role_of: Trainable) -> dict[str, torch.Tensor]:
    return {key: value.clone() for key, value in role_of.state_dict().items()}


def of(side: str, found: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: value for key, value in found.items() if key.split("/")[1] == side}


def test_an_expert_moves_only_if_it_got_a_gradient():
    """Its weights, moments, average and counter; the other's stay bit for bit, weight decay and momentum too."""
    one = role(config=TrainableConfig(learning_rate=1e-2, weight_decay=0.1, ema_decay=0.5))
    for side in ("high", "low"):
        give(one, side)
    one.step()
    before = state(one)
    give(one, "low")
    assert set(one.step()) == {"student/low/grad_norm", "student/low/learning_rate"}
    after = state(one)
    assert_same(of("high", after), of("high", before))
    assert all(not torch.equal(after[key], before[key]) for key in of("low", after) if "weights" in key or "ema" in key)
    assert (int(after["updates/high"]), int(after["updates/low"]), one.updates) == (1, 2, 3)
    assert one.step() == {} and all(p.grad is None for p in one.weights.values())
    assert_same(state(one), after)


def test_each_expert_has_its_own_norm_clock_and_rate():
    config = TrainableConfig(
        learning_rate=0.5,
        warmup_updates=2,
        max_grad_norm=0.25,
        high=ExpertConfig(learning_rate=0.1),
        low=ExpertConfig(max_grad_norm=0.0),
    )
    one = role(config=config)
    sizes = {side: sum(p.numel() for k, p in one.weights.items() if k.startswith(side)) for side in ("high", "low")}
    give(one, "low", 2.0)
    assert one.step()["student/low/learning_rate"] == 0.25
    give(one, "high", 3.0)
    give(one, "low", 2.0)
    metrics = one.step()
    assert (metrics["student/high/learning_rate"], metrics["student/low/learning_rate"]) == (0.05, 0.5)
    assert metrics["student/high/grad_norm"] == pytest.approx(3 * sizes["high"] ** 0.5, rel=1e-4)
    moments = state(one)
    given = {
        side: max(float(v.max()) for k, v in of(side, moments).items() if "exp_avg" in k and "sq" not in k)
        for side in ("high", "low")
    }
    assert given["high"] == pytest.approx(0.1 * 0.25 / sizes["high"] ** 0.5, rel=1e-3)  # clipped by its own norm
    assert given["low"] == pytest.approx(0.19 * 2.0, rel=1e-5)  # twice, never clipped


def test_a_gradient_that_is_not_finite_moves_neither():
    one = role(config=TrainableConfig(ema_decay=0.5))
    give(one, "high")
    give(one, "low")
    one.weights["low/blocks.1.ffn.net.2.weight"].grad[0, 0] = float("nan")
    before = state(one)
    message = r"student/low: the gradient of blocks\.1\.ffn\.net\.2\.weight is not finite.*Lower student\.learning_rate"
    with pytest.raises(FloatingPointError, match=message):
        one.step()
    assert_same(state(one), before)


def test_the_average_is_of_both():
    one = role(config=TrainableConfig(learning_rate=0.1, ema_decay=0.75))
    start = {key: p.detach().clone() for key, p in one.weights.items()}
    give(one, "high")
    one.step()
    moved = {key: p.detach().clone() for key, p in one.weights.items()}
    with one.ema_weights():
        assert_near(
            {k: p.detach() for k, p in one.weights.items()}, {k: 0.75 * start[k] + 0.25 * moved[k] for k in start}, 1e-6
        )
    assert_same({key: p.detach() for key, p in one.weights.items()}, moved)


# Checkpoints.


@pytest.mark.parametrize("frozen", [(), ("high",)])
@pytest.mark.parametrize("method", ["finetune", "dmd2"])
def test_a_resumed_run_is_the_run_that_was_never_stopped(tmp_path, method, frozen):
    options = {"two": ALL, "moves": True, "role": MOVES, "frozen": frozen}
    first, second = (trainer(method, **options) for _ in range(2))
    for step in range(2):
        first.step(step)
    checkpoint.save(tmp_path / "checkpoints", 2, first.tensors(), ALONE)
    assert second.resume(tmp_path) == (2, [])
    assert_same(second.tensors(), first.tensors())
    assert second.roles["student"].updates == first.roles["student"].updates > 0
    assert first.step(2) == second.step(2)
    assert_same(second.tensors(), first.tensors())


def test_a_dense_roles_keys_and_metrics_are_what_they_were():
    one = trainer("finetune", moves=True, role=MOVES)
    metrics = one.step(0)
    assert {"student/grad_norm", "student/learning_rate"} <= set(metrics)
    kinds = {"/".join(key.split("/")[:2]) for key in one.tensors()}
    assert kinds == {"student/weights", "student/optimizer", "student/ema", "student/updates"}
    assert "student/weights/proj_out.weight" in one.tensors() and "student/updates" in one.tensors()


# Which side is drawn.


@pytest.mark.parametrize("balance", ["mixed", "natural", "equal"])
def test_the_law_of_the_levels_is_kept(balance):
    """Weighted by p / q, the mean of any function of u over many draws is its integral: here 1, u, u^2 and a step."""
    share, random = 0.3, np.random.default_rng(0)
    total, counts = torch.zeros(4, dtype=torch.float64), {True: 0, False: 0}
    for _ in range(4000):
        u, weight = balanced_uniform(torch.from_numpy(random.random(4)), share, balance, random)
        total += weight * torch.stack([torch.ones_like(u), u, u * u, (u > 0.9).double()]).mean(1)
        counts[bool((u >= 1 - share).all())] += 1
        assert balance == "mixed" or bool((u >= 1 - share).all()) != bool((u < 1 - share).all())
    torch.testing.assert_close(
        total / 4000, torch.tensor([1, 1 / 2, 1 / 3, 0.1], dtype=torch.float64), atol=0.02, rtol=0
    )
    if balance != "mixed":
        assert counts[True] / 4000 == pytest.approx(share if balance == "natural" else 0.5, abs=0.025)


@pytest.mark.parametrize("method", ["finetune", "dmd2"])
def test_a_balanced_batch_runs_one_expert_whatever_its_parts(method):
    """All samples of a step, in all micro-batches, are on one side; over steps both sides come."""
    seen = set()
    for balance in ("natural", "equal"):
        one = trainer(
            method, two=("student",) if method == "finetune" else ("teacher", "critic"), expert_balance=balance
        )
        network = one.roles["student"] if method == "finetune" else one.roles["critic"]
        calls = [Calls.of(each) for each in sides(network)]
        for step in range(6):
            before = [len(call.sigma) for call in calls]
            one.step(step)
            ran = [bool(len(call.sigma) - count) for call, count in zip(calls, before, strict=True)]
            if method == "finetune":
                assert sum(ran) == 1
            seen.add(tuple(ran))
    assert len(seen) >= 2


def test_equal_balance_weighs_the_loss():
    """The gradient of a step is p / q of that of the same levels unweighted: here seen by the loss's own gradient."""
    found = {}
    for balance in ("natural", "equal"):
        one = trainer("finetune", two=("student",), expert_balance=balance)
        for step in range(12):
            one.step(step)
        found[balance] = one.roles["student"].gradients
    share = ShiftedUniform(3.0).share_above(BOUNDARY)
    ratios = set()
    for natural, equal in zip(found["natural"], found["equal"], strict=True):
        if natural.keys() == equal.keys():  # the same side was drawn, so the same levels
            key = next(key for key in natural if key.endswith("proj_out.weight"))
            ratio = float(equal[key].norm() / natural[key].norm())
            expected = 2 * share if key.startswith("high") else 2 * (1 - share)
            assert ratio == pytest.approx(expected, rel=1e-4)
            ratios.add(key.split("/")[0])
    assert ratios == {"high", "low"}


def test_recording_is_a_role():
    """The helper that keeps gradients names them as the role does."""
    one = role(kind=Recording)
    give(one, "high")
    one.step()
    assert set(one.gradients[0]) == {key for key in one.weights if key.startswith("high/")}


# Chunk by chunk.


def causal(seeds, **options) -> CausalStudent:
    return CausalStudent("student", networks("student", ALONE, seeds, causal=True, **options), STAYS)


def rolled(student: CausalStudent, sampler: SamplerConfig, exits=(2, 2)) -> torch.Tensor:
    streams, batch = Streams(0, 0), small_batch(2)
    noise = streams.noise("noise", batch.sample_ids, batch.latent_shape)
    with torch.no_grad():
        return predict_chunks(
            student, noise, batch, sampler, lambda s: streams.noise(str(s), batch.sample_ids, noise.shape[1:]), exits
        )


def test_each_expert_has_a_kv_cache_of_its_own():
    """Both experts run the context pass, at the context's noise level, and neither reads the other's cache.

    There is one such pass: no chunk attends to the second and last one.
    """
    both = causal((0, 1))
    calls = [Calls.of(one) for one in sides(both)]
    ours = rolled(both, CAUSAL)
    assert calls[0].sigma[0].unique().item() == 1.0
    asked = [[round(float(level.unique()), 3) for level in call.sigma] for call in calls]
    assert asked == [[1.0, 0.857, 0.0, 1.0, 0.857], [0.6, 0.0, 0.6]]
    high, low = causal((0,)), causal((1,))
    batch, chunks, sigmas = small_batch(2), CAUSAL.chunks, CAUSAL.sigmas()
    streams = Streams(0, 0)
    noise = streams.noise("noise", batch.sample_ids, batch.latent_shape)
    pasts = [one.open_cache(batch.cond, batch.uncond, chunks, 1.0, sigmas[:-1]) for one in (high, low)]
    finished = []
    with torch.no_grad():
        for frame in range(2):
            x = noise[:, :, frame : frame + 1]
            for s, past in enumerate((pasts[0], pasts[0], pasts[1])):
                x0 = x0_from_velocity(x, past.velocity(x, sigmas[s]), sigmas[s])
                draw = streams.noise(str(s), batch.sample_ids, noise.shape[1:])[:, :, frame : frame + 1]
                x = (1 - float(sigmas[s + 1])) * x0 + float(sigmas[s + 1]) * draw
            for past in pasts:
                past.append(x0)
            finished.append(x0)
    torch.testing.assert_close(ours, torch.cat(finished, 2), rtol=1e-4, atol=1e-5)


def test_an_expert_that_no_call_needs_writes_no_cache():
    both = causal((0, 1))
    calls = [Calls.of(one) for one in sides(both)]
    rolled(both, CAUSAL, exits=(1, 0))
    assert [len(call.sigma) for call in calls] == [4, 0]
    shape, dtype, levels = (16, 2, 2, 2), torch.float32, CAUSAL.sigmas()[:-1]
    one = both.cache_bytes(shape, CAUSAL.chunks, dtype, levels[:2])
    assert both.cache_bytes(shape, CAUSAL.chunks, dtype, levels) == 2 * one > 0


def test_chunks_on_both_sides_are_each_answered_by_their_expert():
    """Each expert attends to its own keys of the clean chunks: each frame equals that of one expert alone."""
    cond = small_batch(4).cond
    clean = torch.randn(X_T.shape, generator=torch.Generator().manual_seed(4))
    levels = torch.tensor([[0.9, 0.2], [0.2, 0.9], [0.9, 0.85], [0.1, 0.2]], dtype=torch.float64)
    roles = (causal(seeds) for seeds in ((0, 1), (0,), (1,)))
    answers = [one.masked_velocity(X_T, levels, cond, CAUSAL.chunks, clean).detach() for one in roles]
    expected = torch.where((levels >= BOUNDARY)[:, None, :, None, None], answers[1], answers[2])
    torch.testing.assert_close(answers[0], expected, rtol=1e-5, atol=1e-6)


# What reinforcement learning trains.


def test_transitions_are_counted_by_expert_and_those_of_a_frozen_one_are_left_out():
    """Noise levels 1, .9 and .75 of the three transitions, boundary .8."""
    for frozen, counts in (((), (2, 1)), (("high",), (0, 1)), (("low",), (2, 0))):
        metrics = trainer("dance_grpo", two=("student",), frozen=frozen).step(0)
        assert (metrics["transitions_high"], metrics["transitions_low"]) == counts
    assert "transitions_high" not in trainer("dance_grpo").step(0)
