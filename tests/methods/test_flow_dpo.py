"""Flow-DPO: its logit by hand, its gradient in closed form, the pairs of each group, and what all ranks share."""

import dataclasses
import json
import math

import pytest
import torch
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
    random_clips,
    reward_of,
    reward_parts,
    setup_of,
    tiny_codec,
    trainable,
)

from unified_trainer.__main__ import main
from unified_trainer.basics.errors import UserError
from unified_trainer.basics.requests import Request
from unified_trainer.data.clips import Clips
from unified_trainer.data.loader import Loader
from unified_trainer.data.prompts import Prompts
from unified_trainer.methods.flow_dpo import FlowDPO, FlowDPOConfig, OnlineDPO, OnlineDPOConfig, preference_logits
from unified_trainer.numerics.chunks import ChunkConfig
from unified_trainer.numerics.flow import sigma_table
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.parallel.random import Streams
from unified_trainer.roles.role import TrainableConfig
from unified_trainer.run.trainer import Trainer
from unified_trainer.sampling.solver import SamplerConfig, generate

STEPS = 3
SIGMAS = [float(sigma) for sigma in sigma_table(STEPS, 3.0)]
SAMPLER = SamplerConfig(num_steps=STEPS, guidance_scale=1.0)
REWARDS = (1.0, 2.0, 5.0, 4.0, -1.0, 2.0, -3.0, 1.0)  # best 2 and worst 0 of the first group; 5 and 6 of the second
CONFIG = OnlineDPOConfig(num_prompts=2, num_samples=4, prompts_per_update=2, rollout_batch=8, update_batch=8, beta=20.0)


def trainer(*, rewards=REWARDS, captions=CAPTIONS, moves: bool = False, mesh: Mesh = ALONE, **changes) -> Trainer:
    config = dataclasses.replace(CONFIG, **changes)
    student = Recorder(TrainableConfig(max_grad_norm=0.0, learning_rate=1e-2), moves=moves, mesh=mesh)
    reward = reward_of(ScriptedScorer(rewards))
    loader = Loader(Prompts(Request.of(captions)), tiny_codec(), config.plan(), LATENT_SHAPE, "", 0, mesh)
    parts = reward_parts(OnlineDPO, config, SAMPLER, student, reward, loader)
    method = OnlineDPO(config, SAMPLER, student=student, reference=frozen("reference", seed=2), **parts)
    return Trainer(method, {"student": student}, loader, mesh, seed=0)


def gradient(**changes) -> dict[str, torch.Tensor]:
    one = trainer(**changes)
    one.step(0)
    (only,) = one.roles["student"].gradients
    return only


# The logit.


def test_the_logit_by_hand():
    """One element, target 0: errors 1 and 4 of the student, 9 and 1 of the reference.

    The preferred sample gained 8, the rejected one lost 3: -beta / 2 (-8 - 3) = 11 at beta 2.
    """
    v, ref = (torch.tensor(of).view(2, 1, 1, 1, 1) for of in ([1.0, 2.0], [3.0, 1.0]))
    assert preference_logits(v, ref, torch.zeros(2, 1, 1, 1, 1), 2.0).tolist() == [11.0]
    assert preference_logits(v.flip(0), ref.flip(0), torch.zeros(2, 1, 1, 1, 1), 2.0).tolist() == [-11.0]


def test_the_gradient_in_closed_form():
    """d -log sigmoid(z) / dv = -(1 - sigmoid(z)) dz/dv, dz/dv = -+ beta (v - target) / D: nearer to w, away from l."""
    v, ref, target = torch.randn(3, 6, *LATENT_SHAPE, dtype=torch.float64)
    leaf = v.clone().requires_grad_()
    logits = preference_logits(leaf, ref, target, 0.5)
    torch.nn.functional.softplus(-logits).sum().backward()
    share = (1 - torch.sigmoid(logits.detach())).repeat(2).view(6, 1, 1, 1, 1)
    sign = torch.tensor([1.0] * 3 + [-1.0] * 3, dtype=torch.float64).view(6, 1, 1, 1, 1)
    torch.testing.assert_close(leaf.grad, share * sign * 0.5 * (v - target) / v[0].numel())


def test_a_student_that_is_the_reference_has_logit_0():
    v, target = torch.randn(2, 4, *LATENT_SHAPE)
    assert not preference_logits(v, v, target, 2000.0).any()


# Stored pairs.


def stored(count: int = 4) -> Clips:
    clips = random_clips(2 * count)
    return Clips(clips.prompts[:count], clips.encoded[:count], clips.encoded[count:])


def pair_trainer(*, clips: Clips | None = None, **changes) -> Trainer:
    config = FlowDPOConfig(**{"batch_size": 4, "micro_batch": 4, "beta": 20.0} | changes)
    student = Recorder(TrainableConfig(max_grad_norm=0.0))
    loader = Loader(clips or stored(), tiny_codec(), config.plan(), LATENT_SHAPE, "", 0, ALONE)
    method = FlowDPO(config, SAMPLER, student=student, reference=frozen("reference", seed=2))
    return Trainer(method, {"student": student}, loader, ALONE, seed=0)


def pairs_by_hand(beta: float = 20.0) -> dict[str, torch.Tensor]:
    """The gradient of the paper's loss over the batch of step 0: one noise and one level of each pair."""
    batch, role, reference = pair_trainer().loader.batch(0), trainable(), frozen("reference", seed=2)
    clips, rng, total = stored(), Streams(0, 0), 0.0
    for i, row in enumerate(batch.prompt_ids):
        noise = rng.noise("noise", [batch.sample_ids[i]], LATENT_SHAPE)
        u = rng.uniform("sigma", [batch.sample_ids[i]])
        sigma, cond, gained = 3 * u / (1 + 2 * u), batch.take([i]).cond, []
        for x0 in (clips.encoded[[row]], clips.less_preferred[[row]]):
            x_t = (1 - float(sigma)) * x0 + float(sigma) * noise
            errors = [(of.velocity(x_t, sigma, cond) - (noise - x0)).square().mean() for of in (role, reference)]
            gained.append(errors[0] - errors[1])
        total = total - torch.nn.functional.logsigmoid(-beta / 2 * (gained[0] - gained[1])) / len(batch)
    total.backward()
    return gradients(role.network)


def test_the_update_on_stored_pairs_is_the_gradient_of_the_paper():
    one = pair_trainer()
    calls = Calls.of(one.roles["student"])
    metrics = one.step(0)
    assert_near(one.roles["student"].gradients[0], pairs_by_hand(), 1e-3)
    assert [len(x) for x in calls.x_t] == [8] and metrics["loss"] > 0


def test_the_gradient_of_stored_pairs_does_not_depend_on_the_micro_batch():
    parts, whole = pair_trainer(micro_batch=1), pair_trainer()
    assert parts.step(0) == pytest.approx(whole.step(0), rel=1e-4)
    assert_near(parts.roles["student"].gradients[0], whole.roles["student"].gradients[0], 1e-4)


def test_swapped_pairs_turn_the_preference_around():
    """The logits change their sign, so that the losses of both differ by the logit."""
    clips = stored()
    swapped = Clips(clips.prompts, clips.less_preferred, clips.encoded)
    ours, theirs = pair_trainer().step(0), pair_trainer(clips=swapped).step(0)
    assert theirs["preference_logit"] == pytest.approx(-ours["preference_logit"], rel=1e-3)
    assert theirs["loss"] - ours["loss"] == pytest.approx(ours["preference_logit"], rel=1e-3)


TINY_PAIRS = ["--method", "flow_dpo", *SMALL["finetune"][2:], "--student.learning-rate", "0.001"]


@pytest.mark.slow
def test_a_run_on_pairs_resumes_as_if_it_was_never_stopped(tmp_path):
    straight, halved = tmp_path / "straight", tmp_path / "halved"
    assert main([*TINY_PAIRS, "--output", str(straight), "--steps", "4", "--checkpoint-every", "1"]) == 0
    assert main(["--resume", str(cut_off(straight, halved, 2))]) == 0
    assert metrics_of(halved) == metrics_of(straight)
    assert_same(checkpoint_of(halved, 4), checkpoint_of(straight, 4))
    lines = [line for line in metrics_of(straight) if "train/loss" in line]
    assert lines[0]["train/preference_logit"] == 0 and lines[-1]["train/preference_logit"] != 0


# The update.


def by_hand(pairs, beta: float = 20.0, captions=CAPTIONS) -> dict[str, torch.Tensor]:
    """The gradient of the paper's loss over these pairs of rows and all noise levels, both of a pair with one noise."""
    one, role, reference = trainer(captions=captions), trainable(), frozen("reference", seed=2)
    batch, total = one.loader.batch(0), 0.0
    start = Streams(0, 0).noise("initial", batch.sample_ids, LATENT_SHAPE)
    x0 = generate(trainable(), start, batch, SAMPLER, lambda s: start)
    for s, sigma in enumerate(SIGMAS[:STEPS]):
        for best, worst in pairs:
            noise = Streams(0, 0).noise(f"forward {s}", [best], LATENT_SHAPE)
            errors = {}
            for row in (best, worst):
                x_t, level = (1 - sigma) * x0[[row]] + sigma * noise, torch.full((1,), sigma, dtype=torch.float64)
                cond = batch.take([row]).cond
                for name, of in (("student", role), ("reference", reference)):
                    error = of.velocity(x_t, level, cond) - (noise - x0[[row]])
                    errors[name, row] = error.square().mean()
            gained = [errors["student", row] - errors["reference", row] for row in (best, worst)]
            logit = -beta / 2 * (gained[0] - gained[1])
            total = total - torch.nn.functional.logsigmoid(logit) / (STEPS * len(pairs))
    total.backward()
    return gradients(role.network)


@pytest.mark.slow
def test_the_update_is_the_gradient_of_the_paper():
    one = trainer()
    calls = Calls.of(one.roles["student"])
    metrics = one.step(0)
    assert_near(one.roles["student"].gradients[0], by_hand([(2, 0), (5, 6)]), 1e-3)
    assert [len(x) for x in calls.x_t] == [8] * STEPS + [4] * STEPS  # eight are sampled, and two pairs trained
    assert metrics["reward"] == pytest.approx(sum(REWARDS) / 8) and metrics["frac_zero_std_groups"] == 0


@pytest.mark.slow
def test_a_prompt_that_comes_twice_is_one_group():
    """Its samples have one prompt id: the best is in the first half of the step, the worst in the second."""
    one = trainer(captions=CAPTIONS[:1])
    metrics = one.step(0)
    assert_near(one.roles["student"].gradients[0], by_hand([(2, 6)], captions=CAPTIONS[:1]), 1e-3)
    assert metrics["frac_zero_std_groups"] == 0
    split = trainer(captions=CAPTIONS[:1], prompts_per_update=1)
    split.step(0)
    assert len(split.roles["student"].gradients) == 1  # the pair is of the update of its best sample


@pytest.mark.slow
def test_a_group_of_equal_rewards_has_no_pair():
    rewards = (*REWARDS[:4], *[1.0] * 4)
    assert_near(gradient(rewards=rewards), by_hand([(2, 0)]), 1e-3)
    one = trainer(rewards=[1.0] * 8, moves=True)
    metrics = one.step(0)
    assert one.roles["student"].updates == 0 and metrics["skipped_updates"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("batches", [{"update_batch": 2}, {"update_batch": 1}, {"rollout_batch": 3}])
def test_the_gradient_does_not_depend_on_batches(batches):
    assert_near(gradient(**batches), gradient(), 1e-4)


@pytest.mark.slow
def test_each_update_has_the_pairs_of_its_own_prompts():
    one = trainer(prompts_per_update=1)
    one.step(0)
    first, second = one.roles["student"].gradients
    assert_near(first, by_hand([(2, 0)]), 1e-3)
    assert_near(second, by_hand([(5, 6)]), 1e-3)


def test_a_fraction_and_a_range_of_the_levels():
    one = trainer(noise_range=(0.7, 1.0), timestep_fraction=0.5)
    calls = Calls.of(one.roles["student"])
    one.step(0)
    (level,) = {float(sigma[0]) for sigma, graph in zip(calls.sigma, calls.graph, strict=True) if graph}
    assert min(abs(level - sigma) for sigma in SIGMAS[:2]) < 1e-6


@pytest.mark.slow
def test_learning_makes_the_pairs_preferred(tmp_path):
    """Of a run that trains on, most pairs come to be told apart as the reward tells them; nothing is at its start."""
    run = ["--method", "online_dpo", *SMALL["dance_grpo"][2:], "--steps", "6", "--student.learning-rate", "3e-4"]
    assert main([*run, "--sampler.guidance-scale", "1", "--output", str(tmp_path / "run")]) == 0
    lines = [line for line in metrics_of(tmp_path / "run") if "train/loss" in line]
    assert lines[0]["train/preference_logit"] == 0 and lines[0]["train/loss"] == pytest.approx(math.log(2))
    assert sum(line["train/preferred"] for line in lines[1:]) / 5 > 0.5
    assert json.dumps(lines[0])


@pytest.mark.slow
def test_a_resumed_run_is_the_run_that_was_never_stopped(tmp_path):
    small = ["--method", "online_dpo", *SMALL["dance_grpo"][2:], "--student.learning-rate", "0.01"]
    small += ["--sampler.guidance-scale", "1"]
    straight, halved = tmp_path / "straight", tmp_path / "halved"
    assert main([*small, "--output", str(straight), "--steps", "3", "--checkpoint-every", "1"]) == 0
    assert main(["--resume", str(cut_off(straight, halved, 2))]) == 0
    assert metrics_of(halved) == metrics_of(straight)
    assert_same(checkpoint_of(halved, 3), checkpoint_of(straight, 3))


# Wrong settings.


@pytest.mark.parametrize(
    ("changes", "sampler", "message"),
    [
        ({"num_samples": 1}, SAMPLER, r"algorithm\.num_samples must be at least 2"),
        ({"init_same_noise": True}, SAMPLER, r"algorithm\.init_same_noise must be false"),
        ({"noise_range": (0.0, 0.1)}, SAMPLER, r"no step is trained with algorithm\.noise_range"),
        ({}, dataclasses.replace(SAMPLER, chunks=ChunkConfig(chunk_frames=1)), r"chunk_frames must be 0"),
    ],
)
def test_a_wrong_setting_names_its_key(changes, sampler, message):
    with pytest.raises(UserError, match=message):
        dataclasses.replace(CONFIG, **changes).check(setup_of(sampler))


def test_ranks_must_divide_the_prompts():
    """Two prompts of four samples divide by four ranks, but a prompt's samples would lie on two of them."""
    assert CONFIG.plan().table(2)["samples per rank"] == 4
    with pytest.raises(UserError, match=r"prompts_per_update \(2\) must be divisible by the number of ranks \(4\)"):
        CONFIG.plan().table(4)
