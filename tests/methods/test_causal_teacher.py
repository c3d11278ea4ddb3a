"""Causal teachers: the ODE chunk by chunk, consistency with clean chunks, whole runs, and what is refused.

The oracles are written from arXiv:2602.02214 chunk by chunk: that of `ode_init` by masked passes over the finished
chunks, that of `consistency` by a KV cache. The methods do it the other way round.
"""

import dataclasses
import itertools
import json
import math
import shutil

import pytest
import torch
from forked import program
from helpers import (
    ALONE,
    CAPTIONS,
    FEW_STEPS,
    WAN,
    Calls,
    RecordingStudent,
    assert_near,
    checkpoint_of,
    flags,
    metrics_of,
    no_prompt,
    setup_of,
    small_batch,
    small_causal,
    tiny_codec,
)

from unified_trainer.__main__ import main
from unified_trainer.basics.errors import UserError
from unified_trainer.data.clips import Clips
from unified_trainer.data.loader import Loader
from unified_trainer.methods.consistency import Consistency, ConsistencyConfig
from unified_trainer.methods.ode_init import ODEInit, ODEInitConfig
from unified_trainer.numerics.chunks import ChunkConfig
from unified_trainer.numerics.flow import sigma_table
from unified_trainer.parallel.random import Streams
from unified_trainer.roles.backbone import Backbone
from unified_trainer.roles.causal import CausalFrozen
from unified_trainer.roles.role import RoleConfig, TrainableConfig
from unified_trainer.run.plan.plan import check
from unified_trainer.run.settings.command_line import parse
from unified_trainer.run.trainer import Trainer

SHAPE = (16, 5, 2, 2)
CHUNKS = ChunkConfig(chunk_frames=2, independent_first_frame=True)
RANGES = [(0, 1), (1, 3), (3, 5)]
SAMPLER = dataclasses.replace(FEW_STEPS, chunks=CHUNKS)
ODE = ODEInitConfig(batch_size=2, micro_batch=2, guidance_scale=3.0, teacher_steps=3, causal_teacher=True)
CD = ConsistencyConfig(batch_size=2, micro_batch=2, guidance_scale=3.0, teacher_steps=6, huber=0.1)
KEPT = TrainableConfig(max_grad_norm=0.0)


def student_of() -> RecordingStudent:
    return RecordingStudent("student", Backbone(small_causal(), ALONE, trained=True), KEPT)


def teacher_of() -> CausalFrozen:
    return CausalFrozen("teacher", Backbone(small_causal(1), ALONE), RoleConfig())


def random_latents(count: int = 2, seed: int = 2) -> torch.Tensor:
    return torch.randn(count, *SHAPE, generator=torch.Generator().manual_seed(seed))


def batch_of(count: int = 2):
    return dataclasses.replace(small_batch(count, latents=random_latents(count)), latent_shape=SHAPE)


def no_prompts(count: int):
    return no_prompt().map(lambda text: text.expand(count, -1, -1))


def consistency(*, silent: bool = False, **changes) -> Trainer:
    config, student = dataclasses.replace(CD, **changes), student_of()
    if silent:
        torch.nn.init.zeros_(student.network.proj_out.weight)
        torch.nn.init.zeros_(student.network.proj_out.bias)
    method = Consistency(config, SAMPLER, student=student, teacher=teacher_of())
    clips = Clips(tuple(CAPTIONS[i % 3] for i in range(8)), random_latents(8, 7))
    loader = Loader(clips, tiny_codec(), config.plan(), SHAPE, "", 0, ALONE)
    return Trainer(method, {"student": student}, loader, ALONE, seed=0)


# The ODE of a causal teacher.


def states_by_hand(noise: torch.Tensor, batch, levels: list[float]) -> tuple[dict[float, torch.Tensor], torch.Tensor]:
    """Euler steps of each chunk in masked passes that see the ends of earlier chunks, and noise in place of later."""
    teacher, end, w = teacher_of(), noise.clone(), ODE.guidance_scale
    states = {level: torch.empty_like(noise) for level in levels}
    for start, stop in RANGES:
        own, x = slice(start, stop), noise.clone()
        for sigma, sigma_next in itertools.pairwise([*levels, 0.0]):
            states[sigma][:, :, own] = x[:, :, own]
            at = torch.full((2,), sigma, dtype=torch.float64)
            c = teacher.masked_velocity(x, at, batch.cond, CHUNKS, end)
            u = teacher.masked_velocity(x, at, no_prompts(2), CHUNKS, end)
            x = x + (sigma_next - sigma) * (u + w * (c - u))
        end[:, :, own] = x[:, :, own]
    return states, end


def test_each_chunk_follows_the_teachers_ode_after_the_ends_of_earlier_chunks():
    batch, noise = batch_of(), random_latents(seed=5)
    ode, teacher = ODE.teacher_ode(SAMPLER), teacher_of()
    calls = Calls.of(teacher)
    solved = ode.solve(teacher, noise, batch)
    steps = ode.sigmas[:-1].tolist()
    # Of a chunk: cond and uncond in one call for each step, and one that writes the cache, for all but the last.
    assert [len(x) for x in calls.x_t] == [4] * (3 * len(steps) + 2) and not any(calls.graph)
    states, end = states_by_hand(noise, batch, steps)
    levels = SAMPLER.sigmas()[:-1].tolist()
    assert solved.sigmas.tolist() == levels
    torch.testing.assert_close(solved.end, end, rtol=1e-4, atol=1e-5)
    for i, level in enumerate(levels):
        torch.testing.assert_close(solved.states[:, i], states[level], rtol=1e-4, atol=1e-5)


def test_a_chunk_ends_where_its_noise_and_the_chunks_before_it_say():
    """Other noise in the last chunk moves no earlier one: a causal student can know the end of each."""
    batch, noise, ode = batch_of(), random_latents(seed=5), ODE.teacher_ode(SAMPLER)
    other = torch.cat([noise[:, :, :3], -noise[:, :, 3:]], 2)
    one, two = (ode.solve(teacher_of(), x, batch).end for x in (noise, other))
    assert torch.equal(one[:, :, :3], two[:, :, :3]) and not torch.allclose(one[:, :, 3:], two[:, :, 3:])


def test_ode_init_regresses_each_chunk_to_that_end():
    """Half the squared error of masked passes that see the ends, with the chunks at other levels in each call."""
    student, batch, rng = student_of(), batch_of(), Streams(3, 0)
    method = ODEInit(ODE, SAMPLER, student=student, teacher=teacher_of())
    noise, levels = rng.noise("noise", [0, 1], SHAPE), SAMPLER.sigmas()[:-1].tolist()
    states, end = states_by_hand(noise, batch, ODE.teacher_ode(SAMPLER).sigmas[:-1].tolist())
    for offset, loss in enumerate(method.step(batch, 0, rng, ALONE)):
        x, sigma = torch.empty_like(noise), torch.empty(2, SHAPE[1], dtype=torch.float64)
        for i, (start, stop) in enumerate(RANGES):
            sigma[:, start:stop] = level = levels[(offset + i) % len(levels)]
            x[:, :, start:stop] = states[level][:, :, start:stop]
        x0 = x - sigma[:, None, :, None, None].float() * student.masked_velocity(x, sigma, batch.cond, CHUNKS, end)
        torch.testing.assert_close(loss.value, 0.5 * (x0 - end).square().mean(), rtol=1e-4, atol=0)


# Consistency with clean chunks.


def levels_of(rng: Streams) -> tuple[torch.Tensor, torch.Tensor]:
    """The noise levels [2, chunks] of both sides of the teacher's step, of each chunk of each sample."""
    table = sigma_table(CD.teacher_steps, CD.teacher_shift).tolist()
    rows = [[math.floor(u * CD.teacher_steps) for u in rng.uniform(f"level {i}", [0, 1]).tolist()] for i in range(3)]
    both = [[[table[row + k] for row in chunk] for chunk in rows] for k in (0, 1)]
    return tuple(torch.tensor(side, dtype=torch.float64).T for side in both)


def test_the_loss_is_the_distance_of_two_predictions_given_the_clean_chunks():
    """Sample by sample and chunk by chunk, over KV caches of the clean chunks; d as in test_consistency.py."""
    one, batch, rng = consistency(), batch_of(), Streams(3, 0)
    student, teacher, c = one.roles["student"], one.method.teacher, CD.huber
    noise, (sigmas, nexts) = rng.noise("noise", [0, 1], SHAPE), levels_of(rng)
    total = 0.0
    for row in range(2):
        cond = batch.cond.take([row])
        roles = {"c": (teacher, cond), "u": (teacher, no_prompt()), "s": (student, cond), "t": (student, cond)}
        caches = {key: role.open_cache(at, at, CHUNKS, 1.0, sigmas[0]) for key, (role, at) in roles.items()}
        for i, (start, stop) in enumerate(RANGES):
            clean, sigma, sigma_next = batch.latents[row : row + 1, :, start:stop], sigmas[row, i], nexts[row, i]
            x = (1 - sigma.float()) * clean + sigma.float() * noise[row : row + 1, :, start:stop]
            c_v, u_v = (caches[key].velocity(x, sigma) for key in "cu")
            x_next = x + (sigma_next - sigma).float() * (u_v + CD.guidance_scale * (c_v - u_v))
            d = x - sigma.float() * caches["s"].velocity(x, sigma)
            d = d - (x_next - sigma_next.float() * caches["t"].velocity(x_next, sigma_next))
            total += ((d**2 + c**2).sqrt() - c).sum() / noise.numel()
            for cache in caches.values():
                cache.append(clean)
    (loss,) = one.method.step(batch, 0, rng, ALONE)
    torch.testing.assert_close(loss.value, total, rtol=1e-4, atol=0)


def test_the_gradient_of_the_bias_of_a_silent_student():
    """With velocity 0, d = (sigma - sigma') v of the teacher, and d L / d b_c = -mean of sigma d / sqrt(d^2 + c^2).

    The mean is over all elements, and its sum over those of channel c: b_c moves x0 by -sigma, and not the target.
    """
    one, batch, rng = consistency(silent=True), batch_of(), Streams(3, 0)
    (loss,) = one.method.step(batch, 0, rng, ALONE)
    loss.value.backward()
    sigma, sigma_next = (CHUNKS.by_frame(side.unbind(1), SHAPE[1]) for side in levels_of(rng))
    noise, wide = rng.noise("noise", [0, 1], SHAPE), sigma[:, None, :, None, None].float()
    x = (1 - wide) * batch.latents + wide * noise
    cond, uncond = (
        one.method.teacher.masked_velocity(x, sigma, at, CHUNKS, batch.latents) for at in (batch.cond, no_prompts(2))
    )
    v = uncond + CD.guidance_scale * (cond - uncond)
    d = (sigma - sigma_next)[:, None, :, None, None].float() * v
    expected = -(wide * d / (d**2 + CD.huber**2).sqrt()).sum((0, 2, 3, 4)) / d.numel()
    got = one.roles["student"].network.proj_out.bias.grad
    torch.testing.assert_close(got.reshape(-1, 16).sum(0), expected, rtol=1e-4, atol=1e-7)


def test_the_gradient_does_not_depend_on_the_micro_batch():
    whole, split = consistency(batch_size=4, micro_batch=4), consistency(batch_size=4, micro_batch=1)
    whole.step(0)
    split.step(0)
    assert_near(split.roles["student"].gradients[0], whole.roles["student"].gradients[0])


# Whole runs.

SMALL = {"recipe": "tiny", "validate-every": 0, "student.learning-rate": 1e-3, "sampler.chunks.chunk-frames": 1}
SMALL |= {"algorithm.batch-size": 4, "algorithm.micro-batch": 1}
FEW_FRAMES = ["--video.frames", "5", "--video.height", "32", "--video.width", "32"]
ODE_RUN = ["--algorithm.causal-teacher", "--algorithm.teacher-steps", "2", "--sampler.num-steps", "2"]
RUNS = {
    "ode_init": ODE_RUN + FEW_FRAMES,
    "consistency": ["--data.num-clips", "6"],
}


def words_of(method: str) -> list[str]:
    return ["--method", method, *flags(SMALL), *RUNS[method]]


@pytest.mark.slow
def test_a_resumed_run_is_the_run_without_a_stop(tmp_path):
    for name, steps in (("whole", "2"), ("part", "1")):
        assert main([*words_of("consistency"), "--output", str(tmp_path / name), "--steps", steps]) == 0
    assert main(["--resume", str(tmp_path / "part"), "--steps", "2"]) == 0
    assert metrics_of(tmp_path / "part") == metrics_of(tmp_path / "whole")
    one, other = (checkpoint_of(tmp_path / name, 2) for name in ("whole", "part"))
    assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.ranks
@pytest.mark.parametrize("method", RUNS)
def test_two_ranks_train_as_one(method, tmp_path):
    for ranks in (1, 2):
        call = [*words_of(method), "--steps", "2", "--output", tmp_path / str(ranks)]
        done = program("-m", "unified_trainer", *call, ranks=ranks)
        assert done.returncode == 0, done.stderr
    one, two = (metrics_of(tmp_path / str(ranks)) for ranks in (1, 2))
    for name in ("train/loss", "train/student/grad_norm"):
        assert [row[name] for row in two] == pytest.approx([row[name] for row in one], rel=1e-4)


# What is refused, and said, before a weight is read.


def plan_of(method: str, *words: object):
    return check(parse([*words_of(method), *map(str, words)]), ALONE)


@pytest.fixture
def exported(tmp_path):
    """Return a function that makes a folder whose sampler has these chunks; it holds no weights."""

    def folder(chunk_frames: int):
        out = tmp_path / f"exported-{chunk_frames}"
        shutil.copytree(WAN, out, ignore=shutil.ignore_patterns("*.safetensors"))
        content = {"chunk_frames": chunk_frames, "independent_first_frame": False, "guidance_scale": [1.0, 1.0]}
        (out / "scheduler" / "sampler.json").write_text(json.dumps(content))
        return out

    return folder


@pytest.mark.parametrize("method", RUNS)
def test_the_teacher_must_be_causal_in_the_students_chunks(exported, method):
    for chunk_frames in (0, 2):
        with pytest.raises(UserError, match=r"must be a causal model of the student's chunks: .* chunk_frames=1"):
            plan_of(method, "--teacher.path", exported(chunk_frames))
    plan = plan_of(method, "--teacher.path", exported(1))
    assert plan.roles["teacher"].kind is CausalFrozen and not [note for note in plan.notes if "causal" in note]


@pytest.mark.parametrize("method", RUNS)
def test_a_teacher_that_may_not_be_causal_is_a_warning(method):
    """A base model has no sampler.json."""
    (note,) = [note for note in plan_of(method).notes if "causal" in note]
    assert note.startswith("warning: nothing in teacher.path tiny says that it is a causal model")


def test_a_bidirectional_teacher_needs_no_chunks(exported):
    plan = check(parse(["--method", "ode_init", *flags(SMALL), "--teacher.path", str(exported(0))]), ALONE)
    assert not issubclass(plan.roles["teacher"].kind, CausalFrozen)


@pytest.mark.parametrize(
    ("config", "sampler", "message"),
    [
        (ODE, FEW_STEPS, "algorithm.causal_teacher needs a causal student"),
        (CD, dataclasses.replace(FEW_STEPS, chunks=ChunkConfig(1, context_noise=0.1)), "context_noise must be 0"),
    ],
)
def test_a_wrong_setting_names_its_key(config, sampler, message):
    with pytest.raises(UserError, match=message):
        config.check(setup_of(sampler))
