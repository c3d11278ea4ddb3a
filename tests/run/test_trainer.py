"""The trainer: accumulation, the lockstep of micro-batches, metrics of all of them, and methods it has never seen."""

from typing import ClassVar

import pytest
import torch
from helpers import (
    ALONE,
    CPU,
    LATENT_SHAPE,
    Recorder,
    assert_near,
    assert_same,
    finetune,
    gradients,
    trainable,
    weights,
)

from unified_trainer.basics.requests import Request
from unified_trainer.data.loader import Loader
from unified_trainer.data.prompts import Prompts
from unified_trainer.methods.base import Loss, Method, SingleUpdateConfig, trained
from unified_trainer.methods.finetune import FinetuneConfig
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.roles.role import Trainable, TrainableConfig
from unified_trainer.run.tracking.tracker import Means
from unified_trainer.run.trainer import Trainer
from unified_trainer.sampling.solver import SamplerConfig

X_T = torch.randn(4, *LATENT_SHAPE, generator=torch.Generator().manual_seed(2))


def velocity(role: Trainable, batch) -> torch.Tensor:
    """The role's velocity of fixed latents: of each sample its own."""
    return role.velocity(X_T[list(batch.sample_ids)], torch.full((len(batch),), 0.5), batch.cond)


CONFIG = SingleUpdateConfig(batch_size=4, micro_batch=2)  # four prompts a step, in parts of two


def trainer(codec, method, **roles) -> Trainer:
    loader = Loader(
        Prompts(Request.of(("red", "blue", "green", "yellow"))), codec, CONFIG.plan(), LATENT_SHAPE, "", 0, ALONE
    )
    return Trainer(method, roles, loader, ALONE, seed=0)


# Accumulation.


@pytest.mark.parametrize("micro_batch", [4, 1])
def test_a_step_gives_the_same_gradient_in_any_parts(micro_batch):
    def gradient(micro: int):
        one = finetune(FinetuneConfig(batch_size=8, micro_batch=micro))
        one.step(0)
        return one.roles["student"].gradients[0]

    assert_near(gradient(micro_batch), gradient(8))


def test_a_step_gives_the_same_metrics_in_any_parts():
    losses = [finetune(FinetuneConfig(batch_size=8, micro_batch=micro)).step(0)["loss"] for micro in (8, 2, 1)]
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-5)


def test_ranks_compare_their_points_once_before_each_pass_after_each_loss_and_at_the_end(monkeypatch):
    """Parts of a step share the comparison after a loss. docs/scale.md says why there is one before each pass."""
    points: list[str] = []
    monkeypatch.setattr(Mesh, "assert_same", lambda _, point: points.append(point))
    finetune(FinetuneConfig(batch_size=4, micro_batch=1)).step(0)
    of_loss = ["loss of student, with a step after it", "end of the step"]
    assert points == ["pass of student with gradient"] * 4 + of_loss


def test_an_update_starts_from_no_gradient():
    """The second step's gradient is its own: nothing of the first is left."""
    one, other = (finetune(FinetuneConfig(batch_size=4, micro_batch=2)) for _ in range(2))
    one.step(0)
    one.step(1)
    other.step(1)
    assert_same(one.roles["student"].gradients[1], other.roles["student"].gradients[0])


# Lockstep.


class Scripted(Method):
    """Yields, for the part that starts with sample 0 or 2, the losses that `scripts` holds for it."""

    config_class = SingleUpdateConfig
    roles: ClassVar = {"student": trained(), "other": trained()}

    def step(self, batch, step, rng, mesh):
        for loss in self.scripts[batch.sample_ids[0]]:
            self.told.append(batch.sample_ids[0])
            yield Loss(value=velocity(self.student, batch).mean(), **{"role": "student"} | loss)


def scripted(codec, first, second) -> Trainer:
    roles = {"student": Recorder(), "other": Recorder()}
    method = Scripted(CONFIG, SamplerConfig(), **roles, scripts={0: first, 2: second}, told=[])
    return trainer(codec, method, **roles)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ([{}], []),
        ([], [{}]),
        ([{}, {}], [{}]),
        ([{"role": "student"}], [{"role": "other"}]),
        ([{"step_after": True}], [{"step_after": False}]),
    ],
)
def test_parts_that_disagree_are_an_error(codec, first, second):
    with pytest.raises(RuntimeError, match="Scripted: micro-batches disagree on the next loss"):
        scripted(codec, first, second).step(0)


def test_all_parts_give_a_loss_before_any_gives_its_next(codec):
    one = scripted(codec, [{"step_after": False}, {}], [{"step_after": False}, {}])
    one.step(0)
    assert one.method.told == [0, 2, 0, 2]
    assert len(one.roles["student"].gradients) == 1


def test_several_losses_of_one_move_add_up(codec):
    """The mean over parts of the sum over losses: twice the same loss is twice the gradient."""
    twice = scripted(codec, [{"step_after": False}, {}], [{"step_after": False}, {}])
    once = scripted(codec, [{}], [{}])
    twice.step(0)
    once.step(0)
    doubled = {key: 2 * value for key, value in once.roles["student"].gradients[0].items()}
    assert_near(twice.roles["student"].gradients[0], doubled, 1e-6)


def test_metrics_are_averaged_over_parts_and_maxima_stay_maxima(codec):
    first, second = ({"metrics": {"loss": value, "ratio_max": torch.tensor(value)}} for value in (1.0, 4.0))
    metrics = scripted(codec, [first], [second]).step(0)
    assert metrics["loss"] == 2.5 and metrics["ratio_max"] == 4.0


def test_an_average_counts_every_value_once():
    means = Means()
    means.add({"a": 1.0, "b": 5.0, "empty": torch.tensor([])})
    means.add({"a": torch.tensor([4.0, 7.0]), "top_max": torch.tensor([1.0, 3.0])})
    means.add({"top_max": 2.0})
    assert means.over(ALONE) == {"a": 4.0, "b": 5.0, "top_max": 3.0}
    assert Means().over(ALONE) == {}


# A method from outside the package: a student, and a critic that learns the student's velocity.


class StudentAndCritic(Method):
    """The critic learns the student's velocity; every second step the student learns to be small, first."""

    config_class = SingleUpdateConfig
    roles: ClassVar = {"student": trained(), "critic": trained()}

    def step(self, batch, step, rng, mesh):
        if step % 2 == 0:
            loss = velocity(self.student, batch).square().mean()
            yield Loss("student", loss, metrics={"student_loss": loss.detach()})
        with torch.no_grad():
            target = velocity(self.student, batch)
        loss = (velocity(self.critic, batch) - target).square().mean()
        yield Loss("critic", loss, metrics={"critic_loss": loss.detach()})


def student_and_critic(codec) -> Trainer:
    config = TrainableConfig(learning_rate=1e-2, warmup_updates=4, ema_decay=0.5)
    roles = {
        "student": trainable("student", config),
        "critic": trainable("critic", config, seed=1),
    }
    return trainer(codec, StudentAndCritic(CONFIG, SamplerConfig(), **roles), **roles)


def test_each_role_has_its_own_clock(codec):
    """Five steps: the student moves in steps 0, 2, 4; its learning rate and average do not run on without it."""
    one = student_and_critic(codec)
    rows = [one.step(step) for step in range(5)]
    assert (one.roles["student"].updates, one.roles["critic"].updates) == (3, 5)
    assert [row["critic/learning_rate"] for row in rows] == pytest.approx([0.0025, 0.005, 0.0075, 0.01, 0.01])
    assert [row.get("student/learning_rate") for row in rows] == [0.0025, None, 0.005, None, pytest.approx(0.0075)]
    assert "student_loss" not in rows[1] and "student_loss" in rows[2]
    assert rows[4]["critic_loss"] < rows[0]["critic_loss"]


def test_the_average_stands_still_while_the_student_does(codec):
    one = student_and_critic(codec)
    one.step(0)
    before = {key: value.clone() for key, value in one.tensors().items() if key.startswith("student/")}
    one.step(1)
    assert_same({key: value for key, value in one.tensors().items() if key.startswith("student/")}, before)


def test_the_critic_sees_the_moved_student(codec):
    """The critic's gradient in step 0 is that of a student after its move."""
    one, moved = student_and_critic(codec), student_and_critic(codec)
    one.roles["critic"] = one.method.critic = Recorder()
    one.step(0)
    critic, batch = Recorder(), one.loader.batch(0)
    target = velocity(one.roles["student"], batch).detach()
    (velocity(critic, batch) - target).square().mean().backward()
    assert_near(one.roles["critic"].gradients[0], gradients(critic.network), 1e-4)
    assert not torch.equal(target, velocity(moved.roles["student"], batch).detach())


def test_a_loss_of_one_role_leaves_the_other_without_gradient(codec):
    one = student_and_critic(codec)
    before = weights(one.roles["student"].network)
    one.step(1)
    assert_same(weights(one.roles["student"].network), before)
    assert all(p.grad is None for p in one.roles["student"].network.parameters())


def test_checkpoints_hold_every_role(codec):
    keys = student_and_critic(codec).tensors().keys()
    assert {key.split("/")[0] for key in keys} == {"student", "critic"}
    for kind in ("weights", "optimizer", "ema", "updates"):
        assert any(key.startswith(f"critic/{kind}") for key in keys)


def test_a_mesh_of_one_gathers_itself():
    rows = torch.arange(4.0).view(2, 2)
    assert torch.equal(Mesh(CPU).gather(rows), rows)
    assert ALONE.any(True) and not ALONE.any(False) and ALONE.is_main
