"""rCM: both losses of the student in one update, the schedule of the critic, and a resumed run."""

import dataclasses

import pytest
import torch
from helpers import (
    ALONE,
    FEW_STEPS,
    SMALL,
    assert_near,
    assert_same,
    checkpoint_of,
    cut_off,
    dmd2,
    metrics_of,
    setup_of,
)

from unified_trainer.__main__ import main
from unified_trainer.methods.consistency import Consistency, ConsistencyConfig
from unified_trainer.methods.dmd2 import DMD2, DMD2Config
from unified_trainer.methods.rcm import RCM, RCMConfig
from unified_trainer.numerics.chunks import ChunkConfig
from unified_trainer.parallel.random import Streams

SHARED = {"batch_size": 4, "micro_batch": 4, "guidance_scale": 2.0}
CONFIG = RCMConfig(**SHARED, student_every=2, consistency_weight=0.3, teacher_steps=6)


def losses_of(one, method, batch) -> list:
    """Return the losses of another method with the roles of a trainer, on the same batch."""
    roles = {name: vars(one.method).get(name, one.method.matching.critic) for name in method.roles}
    config = {
        Consistency: ConsistencyConfig(**SHARED, teacher_steps=6),
        DMD2: DMD2Config(**SHARED, student_every=2),
    }[method]
    return list(method(config, FEW_STEPS, **roles).step(batch, 0, Streams(0, 0), ALONE))


def test_the_student_learns_from_both_losses_in_one_update():
    one = dmd2(CONFIG, kind=RCM)
    batch, student = one.loader.batch(0), one.roles["student"]
    (consistency,), (matching, critic) = losses_of(one, Consistency, batch), losses_of(one, DMD2, batch)
    first, second, third = one.method.step(batch, 0, Streams(0, 0), ALONE)
    assert [(loss.role, loss.step_after) for loss in (first, second, third)] == [
        ("student", False),
        ("student", True),
        ("critic", True),
    ]
    torch.testing.assert_close(first.value, 0.3 * consistency.value)
    assert torch.equal(second.value, matching.value) and torch.equal(third.value, critic.value)
    weights = dict(student.network.named_parameters())
    total = torch.autograd.grad(0.3 * consistency.value + matching.value, list(weights.values()), allow_unused=True)
    expected = {name: value for name, value in zip(weights, total, strict=True) if value is not None}
    metrics = one.step(0)
    (gradient,) = student.gradients
    assert_near({name: gradient[name] for name in expected}, expected, 1e-4)
    assert metrics["consistency_loss"] == pytest.approx(consistency.value.item(), rel=1e-4)


def test_a_step_of_the_critic_alone_has_no_consistency():
    one = dmd2(CONFIG, kind=RCM)
    assert [loss.role for loss in one.method.step(one.loader.batch(0), 1, Streams(0, 0), ALONE)] == ["critic"]


def test_a_causal_student_is_refused():
    sampler = dataclasses.replace(FEW_STEPS, chunks=ChunkConfig(chunk_frames=1))
    with pytest.raises(ValueError, match=r"sampler\.chunks\.chunk_frames must be 0 for rcm"):
        CONFIG.check(setup_of(sampler))


@pytest.mark.slow
def test_a_resumed_run_is_the_run_that_was_never_stopped(tmp_path):
    small = [
        "--method",
        "rcm",
        *SMALL["finetune"][2:],
        "--algorithm.student-every",
        "2",
        "--student.learning-rate",
        "0.01",
    ]
    straight, halved = tmp_path / "straight", tmp_path / "halved"
    assert main([*small, "--output", str(straight), "--steps", "3", "--checkpoint-every", "1"]) == 0
    assert main(["--resume", str(cut_off(straight, halved, 2))]) == 0
    assert metrics_of(halved) == metrics_of(straight)
    assert_same(checkpoint_of(halved, 3), checkpoint_of(straight, 3))
