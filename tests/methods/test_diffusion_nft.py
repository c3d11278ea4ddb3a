"""DiffusionNFT: its loss in closed form, its samples, and the updates of the old policy."""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType

import pytest
import torch
from chunk_world import causal_student
from helpers import (
    ALONE,
    CAPTIONS,
    LATENT_SHAPE,
    SMALL,
    Calls,
    Recorder,
    ScriptedScorer,
    assert_near,
    assert_same,
    checkpoint_of,
    cut_off,
    frozen,
    gradients,
    metrics_of,
    reward_of,
    reward_parts,
    setup_of,
    small_causal,
    small_model,
    tiny_codec,
    trainable,
)

from unified_trainer.__main__ import main
from unified_trainer.basics.requests import Request
from unified_trainer.data.loader import Loader
from unified_trainer.data.prompts import Prompts
from unified_trainer.methods.awm import AWM, AWMConfig
from unified_trainer.methods.diffusion_nft import DiffusionNFT, DiffusionNFTConfig, contrast
from unified_trainer.numerics.chunks import ChunkConfig
from unified_trainer.numerics.flow import sigma_table
from unified_trainer.parallel.random import Streams
from unified_trainer.roles.backbone import Backbone
from unified_trainer.roles.causal import CausalStudent, CausalWeightCopy
from unified_trainer.roles.role import Trainable, TrainableConfig
from unified_trainer.roles.weight_copy import WeightCopy
from unified_trainer.run.trainer import Trainer
from unified_trainer.sampling.solver import SamplerConfig, generate

STEPS = 3
SIGMAS = [float(sigma) for sigma in sigma_table(STEPS, 3.0)]
SAMPLER = SamplerConfig(num_steps=STEPS, guidance_scale=1.0)
CAUSAL = dataclasses.replace(SAMPLER, chunks=ChunkConfig(chunk_frames=1))
REWARDS = (1.0, 2.0, 4.0, 5.0, -1.0, 2.0, -3.0, 1.0)
SIZES = {"num_prompts": 2, "num_samples": 4, "prompts_per_update": 2, "rollout_batch": 8, "update_batch": 8}
CONFIG = DiffusionNFTConfig(**SIZES, beta=0.5, old_decay_rise=0.1)


def trainer(
    *,
    old_seed: int = 1,
    seeds: Mapping[str, int] = MappingProxyType({}),
    reference=None,
    rewards=REWARDS,
    moves: bool = False,
    kind=DiffusionNFT,
    of=CONFIG,
    sampler: SamplerConfig = SAMPLER,
    **changes,
) -> Trainer:
    """Return a trainer whose student records its gradients; the old policy has other weights unless its seed is 0.

    `kind` is another method with an old policy, `of` its settings, and `seeds` those of its further copies of the
    student. A causal sampler makes the roles causal.
    """
    config = dataclasses.replace(of, **changes)
    copy, network = (CausalWeightCopy, small_causal) if sampler.chunks.causal else (WeightCopy, small_model)
    copies = {
        name: copy(name, Backbone(network(seed), ALONE), TrainableConfig())
        for name, seed in {"old": old_seed, **seeds}.items()
    }
    student = Recorder(TrainableConfig(max_grad_norm=0.0, learning_rate=1e-2), moves=moves)
    if sampler.chunks.causal:
        student = causal_student()
    reward = reward_of(ScriptedScorer(rewards))
    loader = Loader(Prompts(Request.of(CAPTIONS)), tiny_codec(), config.plan(), LATENT_SHAPE, "", 0, ALONE)
    parts = reward_parts(kind, config, sampler, copies["old"], reward, loader)
    method = kind(config, sampler, student=student, **copies, reference=reference, **parts)
    kept = {name: (role, "student") for name, role in copies.items()}
    return Trainer(method, {"student": student}, loader, ALONE, copies=kept, seed=0)


def gradient(**changes) -> dict[str, torch.Tensor]:
    one = trainer(**changes)
    one.step(0)
    (only,) = one.roles["student"].gradients
    return only


def samples(one: Trainer) -> torch.Tensor:
    """Return the samples of the old policy in training step 0."""
    batch, rng = one.loader.batch(0), Streams(0, 0)
    noise = rng.noise("initial", batch.sample_ids, LATENT_SHAPE)
    return generate(one.method.old, noise, batch, one.method.sampler, lambda s: noise)


def velocity_on(x0: torch.Tensor, one: Trainer):
    """Return a function as `velocity` of a role; chunks of a causal one attend to the clean chunks of x0."""
    chunks = one.method.sampler.chunks
    if not chunks.causal:
        return lambda role, *call: role.velocity(*call)
    return lambda role, *call: role.masked_velocity(*call, chunks, x0)


def student_of(one: Trainer) -> Trainable:
    """Return a role with the weights that the trainer's student starts with."""
    if not one.method.sampler.chunks.causal:
        return trainable()
    return CausalStudent("student", Backbone(small_causal(), ALONE, trained=True), TrainableConfig())


def optimality() -> torch.Tensor:
    """Return A / 10 + 1 / 2 with A the standardised rewards of each group, none of which exceeds 5."""
    groups = torch.tensor(REWARDS).reshape(2, 4)
    return ((groups - groups.mean(1, keepdim=True)) / groups.std(1, keepdim=True)).flatten() / 10 + 0.5


# The loss.


def test_the_loss_by_hand():
    """One element: x0 = 0, x_t = 1, sigma = .5, v = 1, v_old = 2, r = .75, beta = .5.

    v+ = 1.5, x0+ = .25, w+ = .25: .25^2 / .25 = .25; v- = 2.5, x0- = -.25 gives .25 too. (.75 .25 + .25 .25) / .5 = .5.
    """
    shape = (1, 1, 1, 1, 1)
    x0, x_t, v, v_old = (torch.full(shape, value) for value in (0.0, 1.0, 1.0, 2.0))
    assert float(contrast(x0, x_t, 0.5, v, v_old, torch.tensor([0.75]), 0.5)) == pytest.approx(0.5)
    v_old = torch.full(shape, 3.0)  # v+ = 2, x0+ = 0: w is the least error; v- = 4, x0- = -1: 1; .25 / .5
    assert float(contrast(x0, x_t, 0.5, v, v_old, torch.tensor([0.75]), 0.5)) == pytest.approx(0.5)


@pytest.mark.parametrize("r", [0.0, 0.25, 0.5, 1.0])
def test_the_gradient_where_the_policies_agree(r):
    """dL/dv = (2 r - 1) 2 (x0_hat - x0) (-sigma) / (w D): better samples attract, worse ones repel, for any beta."""
    x0, x_t, v = torch.randn(3, 2, *LATENT_SHAPE)
    leaf = v.clone().requires_grad_()
    contrast(x0, x_t, 0.7, leaf, v, torch.full((2,), r), 0.3).sum().backward()
    error = (x_t - 0.7 * v) - x0
    width = error.abs().flatten(1).mean(1).view(2, 1, 1, 1, 1)
    expected = (2 * r - 1) * 2 * error * -0.7 / (width * x0[0].numel())
    torch.testing.assert_close(leaf.grad, expected, rtol=1e-3, atol=1e-6)


def by_hand(one: Trainer, kl: float = 0.0, reference=None, rows=slice(None)) -> dict[str, torch.Tensor]:
    """Return the gradient of 5 x MATH.md 9, averaged over samples of the old policy and over noise levels."""
    role, old, batch, x0 = student_of(one), one.method.old, one.loader.batch(0), samples(one)
    velocity = velocity_on(x0, one)
    beta, r, total = one.method.config.beta, optimality(), 0.0
    for s in range(STEPS):
        sigma = SIGMAS[s]
        noise = Streams(0, 0).noise(f"forward {s}", batch.sample_ids, LATENT_SHAPE)
        x_t = (1 - sigma) * x0 + sigma * noise
        level = torch.full((8,), sigma, dtype=torch.float64)
        v, v_old = (velocity(of, x_t, level, batch.cond) for of in (role, old))
        terms = []
        for implicit in (beta * v + (1 - beta) * v_old, (1 + beta) * v_old - beta * v):
            error = x_t - sigma * implicit - x0
            terms.append(error.square().flatten(1).mean(1) / error.detach().abs().flatten(1).mean(1))
        loss = 5 * (r * terms[0] + (1 - r) * terms[1]) / beta
        if reference is not None:
            loss = loss + kl * (v - reference.velocity(x_t, level, batch.cond)).square().flatten(1).mean(1)
        total = total + loss[rows].mean() / STEPS
    total.backward()
    return gradients(role.network)


def test_the_update_is_the_gradient_of_the_paper():
    one = trainer()
    calls = Calls.of(one.roles["student"])
    metrics = one.step(0)
    assert_near(one.roles["student"].gradients[0], by_hand(trainer()), 1e-3)
    assert len(calls.graph) == STEPS and all(calls.graph)  # the student runs for its loss only
    assert metrics["policy_gap"] > 0 and metrics["reward"] == pytest.approx(sum(REWARDS) / 8)


@pytest.mark.slow
@pytest.mark.parametrize("chunk_frames", [1, 2])
def test_chunks_of_a_causal_student_attend_to_clean_chunks(chunk_frames):
    """Two chunks, or one; the old policy generates its samples chunk by chunk."""
    sampler = dataclasses.replace(CAUSAL, chunks=ChunkConfig(chunk_frames))
    one = trainer(sampler=sampler)
    one.step(0)
    assert_near(one.roles["student"].gradients[0], by_hand(trainer(sampler=sampler)), 1e-3)


def test_kl_to_the_reference():
    reference = frozen("reference", seed=2)
    one = trainer(reference=reference, kl_coefficient=3.0)
    metrics = one.step(0)
    assert_near(one.roles["student"].gradients[0], by_hand(trainer(), 3.0, frozen("reference", seed=2)), 1e-3)
    assert metrics["kl"] > 0 and not gradients(reference.network)


def test_only_the_best_and_the_worst_are_trained_on():
    kept = torch.tensor([0, 3, 5, 6])
    assert_near(gradient(best_of_n=2), by_hand(trainer(), rows=kept), 1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("batches", [{"update_batch": 2}, {"rollout_batch": 3}, {"update_batch": 1, "best_of_n": 2}])
def test_the_gradient_does_not_depend_on_batches(batches):
    whole = {key: value for key, value in batches.items() if key == "best_of_n"}
    assert_near(gradient(**batches), gradient(**whole), 1e-4)


@pytest.mark.slow
def test_metrics_do_not_depend_on_the_update_batch():
    parts, whole = (trainer(best_of_n=2, update_batch=size).step(0) for size in (1, 8))
    assert parts == pytest.approx(whole, rel=1e-4, abs=1e-6)


def test_a_fraction_of_the_levels():
    one = trainer(timestep_fraction=0.34)
    calls = Calls.of(one.roles["student"])
    one.step(0)
    assert len(calls.sigma) == 1


def test_a_range_of_the_levels():
    """Levels 1 and .857 of the sampler, and not .6: steps 0 and 1."""
    one = trainer(noise_range=(0.7, 1.0))
    calls = Calls.of(one.roles["student"])
    one.step(0)
    assert [float(sigma[0]) for sigma in calls.sigma] == pytest.approx(SIGMAS[:2])


# The old policy.


@pytest.mark.slow
def test_the_old_policy_follows_after_the_updates():
    """At step 0 it becomes the student; at step s it is an average with decay min(.5, .1 s)."""
    one = trainer(moves=True)
    for step, decay in ((0, 0.0), (2, 0.2), (9, 0.5)):
        before = {key: value.clone() for key, value in one.method.old.state_dict().items()}
        metrics = one.step(step)
        assert metrics["old_decay"] == pytest.approx(decay)
        for key, weight in one.method.old.state_dict().items():
            student = one.roles["student"].weights[key.removeprefix("copied/")].detach()
            torch.testing.assert_close(weight, decay * before[key] + (1 - decay) * student)


def test_the_old_policy_stays_the_same_within_a_step():
    """The second of two updates still compares with the policy that sampled."""
    one = trainer(moves=True, old_seed=0, prompts_per_update=1, update_batch=4)
    start = {key: value.clone() for key, value in one.method.old.state_dict().items()}
    seen = []
    one.roles["student"].network.register_forward_pre_hook(
        lambda *_: seen.append(
            all(torch.equal(value, start[key]) for key, value in one.method.old.state_dict().items())
        )
    )
    metrics = one.step(0)
    assert len(seen) == 2 * STEPS and all(seen)
    assert metrics["policy_gap"] > 0


def test_a_step_with_nothing_to_learn():
    one = trainer(moves=True, rewards=[1.0] * 8)
    metrics = one.step(0)
    assert one.roles["student"].updates == 0 and metrics["skipped_updates"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--student.adapter.rank", "2"]], ids=["full", "adapter"])
def test_a_resumed_run_is_the_run_that_was_never_stopped(options, tmp_path):
    options = [*options, "--algorithm.kl-coefficient", "0.1", "--algorithm.old-decay-rise", "0.2"]
    options += ["--student.learning-rate", "0.01", "--sampler.guidance-scale", "1"]
    small = ["--method", "diffusion_nft", *SMALL["dance_grpo"][2:], *options]
    straight, halved = tmp_path / "straight", tmp_path / "halved"
    assert main([*small, "--output", str(straight), "--steps", "3", "--checkpoint-every", "1"]) == 0
    assert main(["--resume", str(cut_off(straight, halved, 2))]) == 0
    assert metrics_of(halved) == metrics_of(straight)
    held = checkpoint_of(straight, 3)
    assert_same(checkpoint_of(halved, 3), held)
    old = {key: value for key, value in held.items() if key.startswith("old/copied/")}
    assert old and all(
        not torch.equal(value, held[key.replace("old/copied", "student/weights")]) for key, value in old.items()
    )


@pytest.mark.parametrize(("kind", "of"), [(DiffusionNFT, CONFIG), (AWM, AWMConfig(**SIZES))])
def test_samples_are_guided_and_the_trained_velocity_is_not(kind, of):
    """Each call of the rollout has the samples with and without the negative prompt; each pass of training has one."""
    guided = dataclasses.replace(SAMPLER, guidance_scale=3.0)
    one = trainer(kind=kind, of=of, sampler=guided)
    old, student = Calls.of(one.method.old), Calls.of(one.roles["student"])
    one.step(0)
    assert [len(x) for x in old.x_t] == [16] * STEPS + [8] * STEPS
    assert [len(x) for x in student.x_t] == [8] * STEPS
    free = trainer(kind=kind, of=of)
    free.method.rollouts = trainer(kind=kind, of=of, sampler=guided).method.rollouts  # equal samples, no guidance
    free.step(0)
    assert_near(free.roles["student"].gradients[0], one.roles["student"].gradients[0], 1e-6)


# Wrong settings.


@pytest.mark.parametrize(
    ("changes", "sampler", "message"),
    [
        ({"num_samples": 1}, SAMPLER, r"algorithm\.num_samples must be at least 2"),
        ({}, dataclasses.replace(SAMPLER, guidance_scale=(3.0, 2.0)), r"\(3\.0, 2\.0\) is for two experts"),
        ({}, dataclasses.replace(CAUSAL, chunks=ChunkConfig(1, context_noise=0.1)), r"context_noise must be 0"),
    ],
)
def test_a_wrong_setting_names_its_key(changes, sampler, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **changes).check(setup_of(sampler))


def test_a_kl_needs_a_reference():
    with pytest.raises(ValueError, match=r"algorithm\.kl_coefficient above 0 needs a reference role"):
        trainer(kl_coefficient=1.0)
