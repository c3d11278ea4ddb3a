"""The samples of student and teacher side by side: what the ratios are, and when the teacher is measured."""

import json

import pytest
import torch
from helpers import ALONE, LATENT_SHAPE, frozen, tiny_codec, trainable

from unified_trainer.basics.requests import Request
from unified_trainer.data.tiny_world import SUBJECT_OF_CAPTION, draw_clip, render
from unified_trainer.data.tiny_world_measures import DISTANCES
from unified_trainer.run.guards.distillation import LOOKS, DistillationGuard, DistillationGuardConfig
from unified_trainer.run.guards.teacher_probe import TeacherProbe
from unified_trainer.sampling.solver import SamplerConfig

pytestmark = pytest.mark.slow

CONFIG = DistillationGuardConfig(teacher_prompts=2, teacher_steps=2)
SAME = SamplerConfig(num_steps=2, shift=5.0, solver="ode", guidance_scale=2.0)  # the teacher's own
PROMPTS = ("a red circle moving left", "a blue square moving up", "a third that is not used")


def probe(sampler: SamplerConfig = SAME, *, seed: int = 0, batch: int = 3, teacher: int = 0) -> TeacherProbe:
    parts = (tiny_codec(), frozen("teacher", seed=teacher), 2.0, sampler, Request.of(PROMPTS), LATENT_SHAPE, ALONE)
    return TeacherProbe(CONFIG, *parts, seed=seed, batch=batch, ema=True)


def test_a_student_that_is_its_teacher_has_ratios_of_one():
    """Also in other batches, whose last one is smaller."""
    assert probe().run(trainable()) == {f"{name}_to_teacher": 1.0 for name in LOOKS}
    whole, parts = (probe(batch=batch, teacher=1).run(trainable()) for batch in (4, 3))
    assert whole == pytest.approx(parts, rel=1e-5)
    assert all(abs(value - 1) > 1e-3 for value in whole.values())


def test_samples_scaled_by_two_have_four_times_the_power(monkeypatch):
    one = probe()
    one.run(trainable())
    generated = one._generate

    def doubled(*arguments):
        x0, video = generated(*arguments)
        return 2 * x0, video / 2

    monkeypatch.setattr(one, "_generate", doubled)
    ratios = one.run(trainable())
    expected = {"power": 4.0, "saturation": 0.5, "motion": 0.5, "diversity": 0.5}
    assert ratios == pytest.approx({f"{name}_to_teacher": value for name, value in expected.items()})


def test_the_teacher_is_measured_once_and_kept_in_the_checkpoint(monkeypatch):
    roles, original = [], TeacherProbe._measure

    def measure(self, role, sampler):
        roles.append(role.name)
        return original(self, role, sampler)

    monkeypatch.setattr(TeacherProbe, "_measure", measure)
    first, resumed, other = probe(), probe(), probe(seed=1)
    ratios = first.run(trainable())
    assert first.run(trainable()) == ratios and roles == ["teacher", "student", "student"]
    roles.clear()
    for one in (resumed, other):
        one.load_state(json.loads(json.dumps(first.state)))
    assert resumed.run(trainable()) == ratios and roles == ["student"]
    other.run(trainable())  # its noise is another one
    assert roles == ["student", "teacher", "student"]


def test_in_the_tiny_world_its_own_measures_are_compared(monkeypatch):
    """The teacher draws real clips here, and the student the same ones, a frozen one, or one clip for each prompt."""
    clips = [
        draw_clip(SUBJECT_OF_CAPTION[one], torch.Generator().manual_seed(i)) for i, one in enumerate(PROMPTS[:2] * 2)
    ]
    real = render([clips[i] for i in (0, 2, 1, 3)])  # two of each prompt
    frozen_clips, alike = real[:, :, :1].expand_as(real), real[[0, 0, 2, 2]]
    shown = {"teacher": real}

    def made(self, role, sampler, samples):
        return torch.ones(len(samples), *LATENT_SHAPE), shown[role.name][samples]

    monkeypatch.setattr(TeacherProbe, "_generate", made)
    ratios = {}
    for name, video in (("same", real), ("frozen", frozen_clips), ("alike", alike)):
        shown["student"] = video
        ratios[name] = probe(batch=3).run(trainable())
    assert ratios["same"] == {
        **{f"{name}_to_teacher": 0.0 for name in DISTANCES},
        **{f"{name}_to_teacher": 1.0 for name in ("power", "diversity")},
    }
    assert ratios["frozen"]["world/travel_to_teacher"] > 3 and ratios["alike"]["diversity_to_teacher"] < 1e-3
    shown["teacher"], shown["student"] = frozen_clips, real  # nearer to the law than the teacher
    assert probe().run(trainable())["world/travel_to_teacher"] < -3
    guard = DistillationGuard(CONFIG)
    alarms = [guard.after_validation(step, ratios[name]) for step, name in enumerate(("same", "frozen", "alike"))]
    assert alarms[0] is None
    assert alarms[1] and "world/travel of the samples +" in alarms[1].why and "saturation" not in alarms[1].why
    assert alarms[2] and "diversity of the samples" in alarms[2].why
