"""An update whose gradient is not finite is skipped as if it had not been asked for, and the ranks agree on it."""

import math

import pytest
import torch
from helpers import ALONE, assert_same, trainable
from torch import nn

from unified_trainer.basics.errors import NotFiniteError
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.roles.learner import Learner, LearnerConfig
from unified_trainer.roles.role import TrainableConfig
from unified_trainer.roles.skipping import SkippingLearner
from unified_trainer.run.settings.config import TrackingConfig
from unified_trainer.run.tracking.tracker import Means, Tracker

SETTINGS = {"learning_rate": 0.1, "weight_decay": 0.1, "ema_decay": 0.75, "warmup_updates": 4}
CONFIG = LearnerConfig(skip_not_finite=2, **SETTINGS)
BAD = (math.nan, math.inf, -math.inf)


def weights() -> dict[str, nn.Parameter]:
    draw = torch.Generator().manual_seed(1)
    return {f"layer {i}": nn.Parameter(torch.randn(3, i + 1, generator=draw)) for i in range(2)}


def update(one: Learner, gradient: float = 1.0) -> dict[str, float]:
    for weight in one.weights.values():
        weight.grad = torch.full_like(weight, 0.5)
    one.weights["layer 1"].grad[1, 0] = gradient
    return one.step(one.gradient_norm())


def test_a_skipped_update_leaves_no_trace():
    """Four updates with skipped ones between them are the four updates alone, bit for bit, with their rates."""
    one, other = SkippingLearner("student", weights(), CONFIG), Learner("student", weights(), LearnerConfig(**SETTINGS))
    for number, bad in enumerate((*BAD, math.nan)):
        before = {key: value.clone() for key, value in one.state_dict().items()}
        assert update(one, bad) == {"student/not_finite_count": 1.0}
        assert_same(one.state_dict(), before)
        assert all(weight.grad is None for weight in one.weights.values()) and one.updates == number
        metrics = update(one, number)
        assert metrics == {**update(other, number), "student/not_finite_count": 0.0}
    assert_same(one.state_dict(), other.state_dict())


def test_one_more_in_succession_ends_the_run():
    one = SkippingLearner("student", weights(), CONFIG)
    update(one, math.nan), update(one, math.nan), update(one), update(one, math.nan), update(one, math.nan)
    with pytest.raises(NotFiniteError, match=r"gradient of layer 1 is not finite at update 1; .* student.skip_not_fin"):
        update(one, math.inf)


def test_a_rank_skips_what_another_one_skips(monkeypatch):
    elsewhere = [True, False]  # whether the gradient of another rank is not finite
    monkeypatch.setattr(Mesh, "any", lambda mesh, flag: elsewhere.pop(0) or flag)
    one = SkippingLearner("student", weights(), CONFIG, ALONE)
    assert update(one) == {"student/not_finite_count": 1.0} and one.updates == 0
    assert update(one)["student/not_finite_count"] == 0 and one.updates == 1


def test_a_role_has_the_learner_that_its_settings_say():
    for config, kind in ((TrainableConfig(), Learner), (TrainableConfig(skip_not_finite=1), SkippingLearner)):
        assert type(trainable(config=config).learners[""]) is kind


def test_the_updates_of_a_step_are_counted_and_those_of_a_run_told(tmp_path, capsys):
    counted = Means()
    for metrics in ({"a/not_finite_count": 1.0, "loss": 1.0}, {"a/not_finite_count": 1.0, "loss": 3.0}):
        counted.add(metrics)
    found = counted.over(ALONE)
    assert found == {"a/not_finite_count": 2.0, "loss": 2.0}
    for start in (0, 1):
        with Tracker(tmp_path, TrackingConfig(), {}, 2, start, True) as tracker:
            tracker.log(start + 1, {"train/a/not_finite_count": 2.0, "train/b/not_finite_count": 0.0}, advance=True)
            tracker.finish(start + 1)
    lines = capsys.readouterr().out
    assert "2 updates of a skipped, whose gradient was not finite" in lines
    assert "4 updates of a skipped" in lines and "of b skipped" not in lines
