"""The reference of a KL: its weights, that they do not change, and the KL in the reward."""

import shutil

import pytest
import torch
from helpers import ALONE, SMALL, assert_same, checkpoint_of, cut_off, flags, frozen, metrics_of, run, small_model
from policy_case import REWARDS, SDE, Case, divergence, log_ratios

from unified_trainer.__main__ import main
from unified_trainer.numerics.kl import AdaptiveKL
from unified_trainer.roles.backbone import Backbone
from unified_trainer.roles.role import Frozen, Trainable, TrainableConfig
from unified_trainer.roles.weight_copy import WeightCopy
from unified_trainer.run.build import build
from unified_trainer.run.settings.command_line import parse

KINDS = ["exact", "kl", "abs", "mse", "low_var_kl"]
KL = ["--algorithm.kl-coefficient", "0.1"]
ADAPTER = ["--student.adapter.rank", "2"]
CAUSAL = ["--sampler.chunks.chunk-frames", "1", "--sampler.guidance-scale", "1"]


def built(*options: str):
    """Return the trainer of the small run, as the program builds it."""
    return build(parse([*SMALL["dance_grpo"], *KL, *options]), ALONE).trainer


def reference_of(trainer) -> Frozen:
    return trainer.method.update.kl._reference


def velocity(role, trainer) -> torch.Tensor:
    batch = trainer.loader.batch(0)
    x_t = torch.randn(len(batch), *batch.latent_shape, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        return role.velocity(x_t, torch.full((len(batch),), 0.5), batch.cond)


# In the reward.


@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["ode", "sde"])
@pytest.mark.parametrize("kind", KINDS)
def test_kl_in_the_reward(kind, sampler):
    """Groups compare the reward minus 2 x the mean KL of the sample's transitions."""
    reference = frozen("reference", seed=1)
    changes = {"sampler": SDE} if sampler == "sde" else {}
    case = Case(reference=reference, kl_estimate=kind, kl_in="reward", kl_coefficient=2.0, update_batch=4, **changes)
    penalties = []

    def loss(now, then):
        with torch.no_grad():
            penalties.append(divergence(kind, then, case.steps(reference)).mean(1))
        groups = (torch.tensor(REWARDS) - 2.0 * penalties[0]).reshape(2, 4)
        advantage = ((groups - groups.mean(1, keepdim=True)) / groups.std(1, keepdim=True)).flatten()
        return -(advantage[:, None] * log_ratios(now, then)).mean()

    expected = case.expected(loss)
    assert float(penalties[0].std()) > 1e-4  # else the test shows nothing
    for key, gradient in case.gradient.items():
        torch.testing.assert_close(gradient, expected[key], rtol=2e-3, atol=2e-3 * float(expected[key].abs().max()))
    assert case.metrics["kl"] == pytest.approx(float(penalties[0].mean()), rel=1e-3)
    assert case.metrics["reward"] == pytest.approx(sum(REWARDS) / 8)


def test_one_kl_counts_once():
    """A KL in the reward is not in the loss: at a negligible coefficient the gradient is that without a KL."""
    far = Case(reference=frozen("reference", seed=1), kl_in="reward", kl_coefficient=1e-12)
    assert_same(far.gradient, Case().gradient)


# An adaptive coefficient.


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["exact", "low_var_kl"])
@pytest.mark.parametrize("where", ["loss", "reward"])
def test_the_coefficient_follows_the_kl(where, kind):
    """The coefficient starts at .5 and changes after each update of 8 samples by the rule of MATH.md."""
    changes = {"kl_estimate": kind, "kl_in": where, "kl_coefficient": 0.5, "kl_target": 1e-3, "kl_horizon": 100.0}
    case = Case(reference=frozen("reference", seed=1), **changes)
    assert case.metrics["kl_coefficient"] == 0.5 and case.metrics["kl"] > 1.2e-3
    expected = 0.5 * (1 + 0.2 * 8 / 100)
    assert case.one.method.update.kl.coefficient == pytest.approx(expected, rel=1e-12)
    case.one.step(1)
    rule = AdaptiveKL(expected, 1e-3, 100.0)
    rule.update(case.metrics["kl"], 8)  # far above the target: both changes are at the bound
    assert case.one.method.update.kl.coefficient == pytest.approx(rule.coefficient, rel=1e-12)


def test_an_update_uses_the_coefficient_before_its_own_change():
    fixed = Case(reference=frozen("reference", seed=1), kl_coefficient=0.5)
    adaptive = Case(reference=frozen("reference", seed=1), kl_coefficient=0.5, kl_target=1e-3, kl_horizon=10.0)
    assert_same(adaptive.gradient, fixed.gradient)


# Its weights.


@pytest.mark.slow
def test_there_is_no_reference_without_a_kl():
    trainer = build(parse(SMALL["dance_grpo"]), ALONE).trainer
    assert reference_of(trainer) is None and not trainer.copies


@pytest.mark.slow
def test_for_a_student_of_full_weights_it_is_another_network_with_equal_weights():
    trainer = built()
    student, reference = trainer.roles["student"], reference_of(trainer)
    assert type(reference) is Frozen and reference.network is not student.network
    assert torch.equal(velocity(reference, trainer), velocity(student, trainer))
    assert trainer.tensors().keys() == {key for key in trainer.tensors() if key.startswith("student/")}


@pytest.mark.slow
def test_for_an_adapter_it_is_the_base_with_the_adapter_off():
    trainer = built(*ADAPTER)
    student, reference = trainer.roles["student"], reference_of(trainer)
    assert reference.network is student.network
    before = velocity(student, trainer)
    with torch.no_grad():
        for weight in student.weights.values():
            weight.add_(0.1)
    assert torch.equal(velocity(reference, trainer), before)
    assert not torch.allclose(velocity(student, trainer), before)


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ADAPTER], ids=["full", "adapter"])
def test_with_init_from_it_is_the_initialised_student(options, tmp_path):
    """It copies the trained weights or the adapter and keeps them when the student changes; the base is shared."""
    run("dance_grpo", tmp_path / "source", *options, "--student.learning-rate", "0.01")
    trainer = built(*options, "--init-from", str(tmp_path / "source"))
    student, reference = trainer.roles["student"], reference_of(trainer)
    base = velocity(reference, trainer)
    trainer.init_from(str(tmp_path / "source"))
    loaded = velocity(student, trainer)
    assert not torch.allclose(loaded, base, atol=1e-3)
    assert torch.equal(velocity(reference, trainer), loaded)
    assert (reference.network is student.network) == bool(options)
    with torch.no_grad():
        for weight in student.weights.values():
            weight.add_(0.1)
    assert torch.equal(velocity(reference, trainer), loaded)


def test_a_weight_copy_is_a_copy_or_an_average():
    source = Trainable("student", Backbone(small_model(1), ALONE, trained=True), TrainableConfig())
    weight_copy = WeightCopy("old", Backbone(small_model(2), ALONE), TrainableConfig())
    before = {key: weight.clone() for key, weight in weight_copy.state_dict().items()}
    weight_copy.update_from(source, 0.75)
    for key, weight in weight_copy.state_dict().items():
        updated = source.weights[key.removeprefix("copied/")].detach()
        torch.testing.assert_close(weight, 0.75 * before[key] + 0.25 * updated)
    weight_copy.update_from(source)
    assert_same(
        {key.removeprefix("copied/"): weight for key, weight in weight_copy.state_dict().items()},
        {key: weight.detach() for key, weight in source.weights.items()},
    )


def test_a_weight_copy_looks_each_weight_up_once(monkeypatch):
    """Its work is linear in the number of weights: the names of all weights are made once, not for each of them."""
    source = Trainable("student", Backbone(small_model(1), ALONE, trained=True), TrainableConfig())
    weight_copy = WeightCopy("old", Backbone(small_model(2), ALONE), TrainableConfig())
    weights, made = source.weights, []
    monkeypatch.setattr(Trainable, "weights", property(lambda _: made.append(1) or weights))
    weight_copy.update_from(source)
    assert made == [1]


# Resuming.


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [ADAPTER, [*CAUSAL, "--algorithm.kl-in", "reward"]],
    ids=["adapter", "causal"],
)
def test_a_resumed_run_keeps_its_reference(options, tmp_path):
    """The resumed run equals the uninterrupted one bit for bit, also when the run of --init-from is gone."""
    source, straight, halved = (tmp_path / name for name in ("source", "straight", "halved"))
    more = flags({"algorithm.kl-target": 1e-6, "algorithm.kl-horizon": 10, "student.learning-rate": 1e-3})
    options = [*options, *KL, *more]
    run("dance_grpo", source, *options, "--student.learning-rate", "0.01")
    run("dance_grpo", straight, *options, "--init-from", str(source), "--steps", "3", "--checkpoint-every", "1")
    shutil.rmtree(source)
    assert main(["--resume", str(cut_off(straight, halved, 2))]) == 0
    assert metrics_of(halved) == metrics_of(straight)
    assert_same(checkpoint_of(halved, 3), checkpoint_of(straight, 3))
    lines = metrics_of(straight)
    assert lines[0]["train/kl"] < 1e-9 and lines[2]["train/kl"] > 100 * lines[0]["train/kl"]
    assert lines[2]["train/kl_coefficient"] != lines[0]["train/kl_coefficient"]


@pytest.mark.slow
def test_resuming_with_another_init_from_is_refused(tmp_path, capsys):
    run("dance_grpo", tmp_path / "run")
    assert main(["--resume", str(tmp_path / "run"), "--steps", "2", "--init-from", str(tmp_path / "run")]) == 2
    assert "cannot change init_from" in capsys.readouterr().err
