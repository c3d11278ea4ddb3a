"""DMD2: update schedule, network calls, samples, and gradients that do not depend on the micro-batch."""

import dataclasses
import json
import shutil

import pytest
import torch
from helpers import (
    ALONE,
    CAPTIONS,
    FEW_STEPS,
    LATENT_SHAPE,
    SMALL,
    WAN,
    Calls,
    assert_near,
    assert_same,
    dmd2,
    flags,
    small_batch,
    trainable,
    weights,
)

from unified_trainer.__main__ import main
from unified_trainer.basics.types import Rollout
from unified_trainer.methods.dmd2 import DMD2, DMD2Config
from unified_trainer.models.wan.causal import CausalWanModel
from unified_trainer.numerics.chunks import ChunkConfig
from unified_trainer.numerics.flow import add_noise, x0_from_velocity
from unified_trainer.numerics.kernels import Policy
from unified_trainer.parallel.random import Streams
from unified_trainer.roles.backbone import Backbone
from unified_trainer.roles.causal import CausalStudent
from unified_trainer.roles.role import TrainableConfig
from unified_trainer.sampling.solver import SamplerConfig, generate, predict_at, rollout

SMALLEST = {"batch_size": 4, "micro_batch": 4, "guidance_scale": 2.0}
STEPS = 4
ONE_STEP = SamplerConfig(num_steps=1, solver="sde", guidance_scale=1.0)
RUN = [*SMALL["finetune"], *flags({"method": "dmd2", "sampler.num-steps": 4, "sampler.guidance-scale": 1.0})]


def trainer(moves=False, sampler=FEW_STEPS, role=None, **config):
    return dmd2(DMD2Config(**SMALLEST | config), moves=moves, sampler=sampler, role=role)


def exits(step: int, rollouts: int, seed: int = 0, num_steps: int = STEPS) -> list[int]:
    """Return the exit steps of a training step's rollouts, in order."""
    rng = Streams(seed, step)
    return [int(rng.shared.integers(num_steps)) for _ in range(rollouts)]


def record_calls(one) -> dict[str, Calls]:
    matching = one.method.matching
    return {r.name: Calls.of(r) for r in (one.method.student, matching.teacher, matching.critic)}


# Calls: the minimum that the algorithm needs.


@pytest.mark.slow
@pytest.mark.parametrize("update_schedule", ["every_step", "exclusive"])
@pytest.mark.parametrize("critic_samples", ["fresh", "shared"])
@pytest.mark.parametrize("rollout", ["simulate", "data"])
@pytest.mark.parametrize("gan_weight", [0.0, 0.5])
def test_model_calls_are_the_minimum(update_schedule, critic_samples, rollout, gan_weight):
    """A rollout that exits at step e is e + 1 calls (one on data); only the last call of the student's own has a graph.

    The student's loss is one call of the teacher, on both conditions, and one of the critic. The critic's loss is one
    call of the critic, on samples and clips together with a GAN term.
    """
    settings = {"critic_samples": critic_samples, "rollout": rollout, "gan_weight": gan_weight}
    one = trainer(student_every=2, update_schedule=update_schedule, **settings)
    for step in range(7):
        calls = record_calls(one)
        one.step(step)
        student = step % 2 == 0
        critic = update_schedule == "every_step" or not student
        rollouts = int(student) + int(critic and not (student and critic_samples == "shared"))
        drawn = exits(step, rollouts) if rollout == "simulate" else [0] * rollouts
        assert [len(x) for x in calls["student"].x_t] == [4] * sum(e + 1 for e in drawn)
        assert calls["student"].where(graph=True) == ([drawn[0]] if student else [])
        assert [len(x) for x in calls["teacher"].x_t] == [8] * student
        assert not any(calls["teacher"].graph)
        assert [len(x) for x in calls["critic"].x_t] == [4] * student + [8 if gan_weight else 4] * critic
        assert calls["critic"].graph == [bool(gan_weight)] * student + [True] * critic


def test_the_steps_above_exit_at_every_step():
    assert {e for step in range(7) for e in exits(step, 2)} == set(range(STEPS))


def test_an_unguided_teacher_runs_on_one_condition():
    """A guidance scale of 1 is the conditional prediction, at half the work."""
    one = trainer(guidance_scale=1.0, student_every=1)
    calls = record_calls(one)
    one.step(0)
    assert [len(x) for x in calls["teacher"].x_t] == [4]


# The rollout.


@pytest.mark.parametrize("solver", ["sde", "ode"])
@pytest.mark.parametrize("step_sigmas", [(), (1.0, 0.7, 0.3)])
def test_a_rollout_is_the_hand_written_loop(solver, step_sigmas):
    """x0 = x - sigma v, then (1 - s) x0 + s noise (sde) or x + (s - sigma) v (ode), for every exit step."""
    sampler = SamplerConfig(num_steps=3, step_sigmas=step_sigmas, shift=5.0, solver=solver, guidance_scale=1.0)
    levels = [u * 5 / (1 + 4 * u) for u in ((1.0, 0.7, 0.3) if step_sigmas else (1, 2 / 3, 1 / 3))]
    role, batch = trainable(), small_batch()
    noise = torch.randn(4, 2, *batch.latent_shape)
    for exit_step in range(3):
        got = predict_at(role, noise[3], batch, sampler, noise.__getitem__, exit_step)
        x = noise[3]
        for s, sigma in enumerate(levels[: exit_step + 1]):
            velocity = role.velocity(x, torch.full((2,), sigma, dtype=torch.float64), batch.cond)
            x0, following = x - sigma * velocity, levels[s + 1] if s < 2 else 0.0
            x = (1 - following) * x0 + following * noise[s] if solver == "sde" else x + (following - sigma) * velocity
        torch.testing.assert_close(got, x0, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        generate(role, noise[3], batch, sampler, noise.__getitem__), x0.detach(), rtol=1e-4, atol=1e-5
    )


def test_only_the_last_call_of_a_rollout_has_a_graph():
    """The gradient of a rollout equals that of its last call on a detached input."""
    role, batch = trainable(), small_batch()
    noise, calls = torch.randn(5, 2, *batch.latent_shape), Calls.of(role)
    predict_at(role, noise[4], batch, FEW_STEPS, noise.__getitem__, 2).square().sum().backward()
    got = {key: p.grad.clone() for key, p in role.network.named_parameters() if p.grad is not None}
    assert calls.graph == [False, False, True]
    role.network.zero_grad()
    x_t, sigma = calls.x_t[2], FEW_STEPS.sigmas()[2].expand(2)
    x0_from_velocity(x_t, role.velocity(x_t, sigma, batch.cond), sigma).square().sum().backward()
    assert_same(got, {key: p.grad for key, p in role.network.named_parameters() if p.grad is not None})


def test_a_rollout_on_data_is_one_call_at_a_level_of_the_list_drawn_for_each_sample():
    one = trainer(rollout="data", batch_size=64, micro_batch=64)
    calls = record_calls(one)
    for step in (1, 2):
        one.step(step)
    levels, seen = FEW_STEPS.sigmas()[:STEPS], torch.cat(calls["student"].sigma)
    nearest = (seen[:, None] - levels).abs().min(1)
    assert float(nearest.values.max()) < 1e-6
    counts = nearest.indices.bincount(minlength=STEPS)
    assert int(counts.min()) >= 16 and int(counts.max()) <= 50  # 32 each, +- 3 sqrt(128 / 4 * 3 / 4) = 15
    assert torch.equal(calls["student"].text[0], one.loader.batch(1).cond["text"])


def test_a_rollout_on_data_starts_from_the_noised_clips():
    one = trainer(rollout="data")
    calls, batch = record_calls(one), one.loader.batch(1)
    one.step(1)
    noise = Streams(0, 1).noise("critic noise", batch.sample_ids, batch.latent_shape)
    torch.testing.assert_close(calls["student"].x_t[0], add_noise(batch.latents, noise, calls["student"].sigma[0]))


def test_exit_steps_are_uniform():
    """Over 400 training steps each of 4 exit steps is drawn 100 +- 4 sqrt(75) = 35 times."""
    counts = torch.tensor([exits(step, 1)[0] for step in range(400)]).bincount(minlength=STEPS)
    assert int(counts.min()) >= 65 and int(counts.max()) <= 135


@pytest.mark.slow
def test_all_micro_batches_exit_together():
    one = trainer(micro_batch=1, student_every=1)
    for step in range(4):
        calls = record_calls(one)["student"]
        one.step(step)
        student, critic = exits(step, 2)
        assert len(calls.x_t) == 4 * (student + 1 + critic + 1)
        assert len(calls.where(graph=True)) == 4


def test_the_critic_follows_the_moved_student():
    """Fresh samples are of the student after its update, shared ones of the student before it."""
    for critic_samples in ("fresh", "shared"):
        one = trainer(moves=True, student_every=1, critic_samples=critic_samples, sampler=ONE_STEP)
        calls = record_calls(one)
        before = weights(one.roles["student"].network)
        one.step(0)
        batch = one.loader.batch(0)
        purpose = "critic" if critic_samples == "fresh" else "student"
        if critic_samples == "shared":
            one.roles["student"].network.load_state_dict(before)
        noise = Streams(0, 0).noise(f"{purpose} noise", batch.sample_ids, batch.latent_shape)
        x0 = generate(one.roles["student"], noise, batch, ONE_STEP, {}.__getitem__)
        tau_noise = Streams(0, 0).noise("critic tau noise", batch.sample_ids, batch.latent_shape)
        torch.testing.assert_close(calls["critic"].x_t[1], add_noise(x0, tau_noise, calls["critic"].sigma[1]))


# Micro-batches, update schedule, update counters.


@pytest.mark.slow
@pytest.mark.parametrize("micro_batch", [1, 2])
@pytest.mark.parametrize("settings", [{}, {"rollout": "data", "gan_weight": 0.5}], ids=["simulate", "data and GAN"])
def test_gradients_do_not_depend_on_the_micro_batch(micro_batch, settings):
    whole, parts = (trainer(student_every=1, micro_batch=size, **settings) for size in (4, micro_batch))
    metrics = [one.step(0) for one in (whole, parts)]
    for name in ("student", "critic"):
        assert_near(parts.roles[name].gradients[0], whole.roles[name].gradients[0], 1e-4)
    assert metrics[1] == pytest.approx(metrics[0], rel=1e-3)


def updated(steps: int, **config) -> dict[str, list[int]]:
    """Return the training steps in which each role was updated."""
    one = trainer(**config)
    updates = {"student": [], "critic": []}
    for step in range(steps):
        before = {name: len(role.gradients) for name, role in one.roles.items()}
        one.step(step)
        for name, role in one.roles.items():
            updates[name] += [step] * (len(role.gradients) - before[name])
    return updates


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "student", "critic"),
    [
        ({}, [0, 3, 6], [0, 1, 2, 3, 4, 5, 6]),
        ({"update_schedule": "exclusive"}, [0, 3, 6], [1, 2, 4, 5]),
        ({"critic_warmup_steps": 2}, [2, 5], [0, 1, 2, 3, 4, 5, 6]),
        ({"critic_warmup_steps": 2, "update_schedule": "exclusive"}, [2, 5], [0, 1, 3, 4, 6]),
    ],
)
def test_the_calendar(config, student, critic):
    assert updated(7, student_every=3, micro_batch=2, **config) == {"student": student, "critic": critic}


@pytest.mark.slow
def test_the_students_clock_counts_its_own_updates():
    """Learning rate, EMA and counter follow a role's own updates: in 7 steps 3 of the student and 7 of the critic."""
    rates = {"learning_rate": 1e-3, "warmup_updates": 2, "lr_schedule": "linear", "lr_decay_updates": 4}
    role = TrainableConfig(**rates, ema_decay=0.5)
    one = trainer(moves=True, student_every=3, role=role)
    student, averages, rates = one.roles["student"], [], []
    average = {key: weight.clone() for key, weight in weights(student.network).items()}
    for step in range(7):
        metrics = one.step(step)
        if "student/learning_rate" in metrics:
            rates.append(metrics["student/learning_rate"])
            average = {key: 0.5 * average[key] + 0.5 * weight for key, weight in weights(student.network).items()}
        with student.ema_weights():
            averages.append(weights(student.network))
        assert_near(averages[-1], average, 1e-6)
    assert rates == pytest.approx([0.5e-3, 1e-3, 1e-3])
    assert (student.updates, one.roles["critic"].updates) == (3, 7)
    assert_same(averages[1], averages[2])


def test_the_gradient_of_a_batch_is_the_mean_over_its_samples():
    whole, alone = trainer(student_every=1), trainer(student_every=1)
    whole.step(0)
    batch, single = alone.loader.batch(0), []
    for part in batch.split(1):
        next(alone.method.step(part, 0, Streams(0, 0), ALONE)).value.backward()
        alone.roles["student"].step()
        single.append(alone.roles["student"].gradients[-1])
    assert len({float(gradient["proj_out.bias"].sum()) for gradient in single}) == 4
    total = {key: sum(gradient[key] for gradient in single) / 4 for key in single[0]}
    assert_near(total, whole.roles["student"].gradients[0], 1e-4)


def test_at_learning_rate_zero_no_role_moves():
    still = TrainableConfig(learning_rate=0.0, weight_decay=0.1)
    one = dmd2(DMD2Config(**SMALLEST, student_every=2, gan_weight=0.5), moves=True, role=still)
    before = {name: role.state_dict() for name, role in one.roles.items()}
    kept = {name: {key: value.clone() for key, value in state.items()} for name, state in before.items()}
    for step in range(3):
        one.step(step)
    for name, role in one.roles.items():
        ours = {key: value for key, value in role.state_dict().items() if key.startswith("weights/")}
        assert_same(ours, {key: kept[name][key] for key in ours})


@pytest.mark.slow
def test_the_same_seed_gives_the_same_run_and_another_gives_another():
    metrics = [dmd2(DMD2Config(**SMALLEST), seed=seed).step(0) for seed in (0, 0, 1)]
    assert metrics[0] == metrics[1] and metrics[0] != metrics[2]


# Wrong settings, before any weight is read.


def refused(tmp_path, capsys, *options: str) -> str:
    """Return the error message of a run that must be refused and must not write anything."""
    assert main([*RUN, "--output", str(tmp_path / "run"), *options]) == 2
    assert not (tmp_path / "run").exists()
    return capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--sampler.step-sigmas", "1", "0.5", "0.5", "0.25"), "sampler.step_sigmas must fall"),
        (("--sampler.step-sigmas", "1", "0.5"), "sampler.step_sigmas has 2 levels, but sampler.num_steps is 4"),
        (("--sampler.guidance-scale", "3"), "sampler.guidance_scale must be 1"),
        (("--algorithm.micro-batch", "0"), "algorithm.micro_batch"),
        (("--algorithm.student-every", "0"), "algorithm.student_every must be from 1"),
    ],
)
def test_wrong_settings_are_refused(tmp_path, capsys, options, message):
    assert message in refused(tmp_path, capsys, *options)


@pytest.mark.slow
@pytest.mark.parametrize("role", ["teacher", "critic"])
def test_roles_of_different_latents_are_refused(tmp_path, capsys, role):
    """The folder holds configs and no weights, so channels are compared before weights are read."""
    folder = tmp_path / "other"
    (folder / "transformer").mkdir(parents=True)
    shutil.copy(WAN / "model_index.json", folder)
    config = json.loads((WAN / "transformer" / "config.json").read_text())
    channels = config["in_channels"]
    (folder / "transformer" / "config.json").write_text(
        json.dumps(config | {"in_channels": channels + 1, "out_channels": channels + 1})
    )
    message = refused(tmp_path, capsys, f"--{role}.path", str(folder))
    assert "one latent space" in message and f"{channels + 1} ({role})" in message


@pytest.mark.slow
@pytest.mark.parametrize("method", ["finetune", "dance_grpo"])
@pytest.mark.parametrize("flag", ["--critic.learning-rate", "--teacher.precision"])
def test_settings_of_a_role_that_the_method_lacks_are_refused(tmp_path, capsys, method, flag):
    value = "bf16" if "precision" in flag else "1e-3"
    assert main([*SMALL[method], "--output", str(tmp_path / "run"), flag, value]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {flag} is a setting of ") and error.endswith(f", not of {method}\n")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_teacher_has_nothing_to_train(capsys, tmp_path):
    assert main([*RUN, "--output", str(tmp_path / "run"), "--teacher.learning-rate", "1e-3"]) == 2
    assert "--teacher.learning-rate is not known" in capsys.readouterr().err


@pytest.mark.slow
def test_a_small_run_of_the_program(tmp_path):
    """Run the tiny world from the command line with adapters over one base, and resume it."""
    options = [
        *RUN,
        *flags({"student.adapter.rank": 2, "critic.adapter.rank": 2, "steps": 2, "algorithm.batch-size": 2}),
    ]
    assert main([*options, "--output", str(tmp_path / "run")]) == 0
    assert main(["--resume", str(tmp_path / "run"), "--steps", "3"]) == 0
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert {"train/dmd_loss", "train/critic_loss", "train/student/grad_norm"} <= lines[0].keys()
    assert "train/dmd_loss" not in lines[1]


def test_captions_are_those_of_the_samples():
    one = trainer(student_every=1)
    calls = record_calls(one)
    one.step(0)
    assert set(one.loader.batch(0).prompts) <= set(CAPTIONS)
    assert all(torch.equal(text, one.loader.batch(0).cond["text"]) for text in calls["student"].text)


def test_a_rollout_ends_with_the_prediction_of_the_last_call():
    """Bit for bit what `predict_at` gives for that call."""
    student, batch = trainable("student"), small_batch(2)
    noise = torch.randn(2, *batch.latent_shape)
    drawn = torch.randn(3, 2, *batch.latent_shape)
    given = (student, noise, batch, FEW_STEPS)
    policy = Policy("cps", 1.0, FEW_STEPS.sigmas())
    made = rollout(*given, policy, range(3), lambda s: drawn[s])
    with torch.no_grad():
        assert torch.equal(made.x0, predict_at(*given, lambda s: drawn[s], 3))
    assert torch.equal(Rollout.cat([made, made]).take([3, 0]).states, made.states[[1, 0]])
    assert Rollout.cat([made]) is made


@pytest.mark.slow
def test_a_causal_student_predicts_the_chunks_of_noised_clips_in_one_masked_pass(monkeypatch):
    """Each chunk is noised to a step of its own, or is finished and then its own x0 (CausVid, arXiv:2412.07772)."""
    sampler = dataclasses.replace(FEW_STEPS, chunks=ChunkConfig(chunk_frames=1))
    model = CausalWanModel.load(WAN, torch.device("cpu"))
    student = CausalStudent("student", Backbone(model, ALONE, trained=True), TrainableConfig())
    method, seen = DMD2.__new__(DMD2), []
    method.config, method.student, method.sampler = DMD2Config(rollout="data"), student, sampler
    clips = torch.randn(64, *LATENT_SHAPE, generator=torch.Generator().manual_seed(1))
    batch = dataclasses.replace(small_batch(64), latents=clips)
    whole = CausalStudent.masked_velocity
    monkeypatch.setattr(CausalStudent, "masked_velocity", lambda *given: seen.append(given) or whole(*given))
    with torch.no_grad():
        x0 = method._sample(batch, Streams(0, 0), "student")
    ((_, x_t, sigma, _, chunks),) = seen
    noise = Streams(0, 0).noise("student noise", batch.sample_ids, batch.latent_shape)
    assert torch.equal(x_t, add_noise(clips, noise, sigma)) and chunks == sampler.chunks
    assert sorted({*sigma.flatten().tolist()}) == sorted(sampler.sigmas().tolist()) and sampler.sigmas()[-1] == 0
    finished = sigma == 0
    assert torch.equal(x0.movedim(2, 1)[finished], clips.movedim(2, 1)[finished])
    assert (sigma[:, 0] != sigma[:, 1]).any()  # chunks of one clip at different steps
    torch.testing.assert_close(x0, x0_from_velocity(x_t, whole(*seen[0]), sigma))
