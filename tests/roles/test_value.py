"""The value function: its head, its gradient, its experts, and an adapter on the student's base."""

import pytest
import torch
from helpers import ALONE, CPU, LATENT_SHAPE, WAN, assert_same, gradients, small_batch, small_model, weights

from unified_trainer.models.wan.model import WanModel
from unified_trainer.roles.adapter import AdapterConfig
from unified_trainer.roles.backbone import Backbone
from unified_trainer.roles.experts import ExpertPair
from unified_trainer.roles.role import Trainable, TrainableConfig
from unified_trainer.roles.value import Value

X_T = torch.randn(4, *LATENT_SHAPE, generator=torch.Generator().manual_seed(3))
SIGMA = torch.tensor([0.9, 0.2, 0.8, 0.1], dtype=torch.float64)


def value_role(config: TrainableConfig | None = None, *, seed: int = 0, head: float | None = None) -> Value:
    role = Value("value", Backbone(small_model(seed), ALONE, trained=True), config or TrainableConfig())
    if head is not None:
        role._heads[""].weight.data.fill_(head)
    return role


def test_every_value_is_0_before_the_first_update():
    value = value_role().value(X_T, SIGMA, small_batch(4).cond)
    assert torch.equal(value, torch.zeros(4))


def test_a_value_is_a_function_of_its_state_noise_level_and_prompt():
    role, cond = value_role(head=1.0), small_batch(4).cond
    values = role.value(X_T, SIGMA, cond)
    alone = role.value(X_T[2:3], SIGMA[2:3], cond.map(lambda x: x[2:3]))
    torch.testing.assert_close(values[2:3], alone)
    for changed in (
        role.value(X_T + 0.1, SIGMA, cond),
        role.value(X_T, SIGMA / 2, cond),
        role.value(X_T, SIGMA, cond.map(lambda x: x.flip(0))),
    ):
        assert not bool(torch.isclose(values, changed, rtol=1e-6).any())


def test_the_head_reads_the_mean_token_of_the_middle_block():
    role, cond = value_role(head=0.5), small_batch(4).cond
    with role.running() as model, model.features() as seen:
        model.velocity(X_T, SIGMA, cond)
    torch.testing.assert_close(role.value(X_T, SIGMA, cond), 0.5 * seen[0].mean(1).sum(1))


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_the_blocks_behind_the_features_do_not_run(recompute):
    """Value and gradient are those of a pass through all five blocks of the tiny world; the next pass runs them all."""
    network, cond = WanModel.load(WAN, CPU), small_batch(4).cond
    role = Value("value", Backbone(network, ALONE, trained=True, recompute=recompute), TrainableConfig())
    role._heads[""].weight.data.fill_(1.0)
    runs = []
    for number, block in enumerate(network.network.blocks):
        block.register_forward_hook(lambda _block, _inputs, _output, number=number: runs.append(number))
    found = []
    for value in (role.value, lambda *inputs: role.velocity_and_head(*inputs)[1]):
        values = value(X_T, SIGMA, cond)
        role.network.zero_grad()
        values.sum().backward()
        found.append((values.detach(), gradients(role.network)))
    assert runs[:3] == [0, 1, 2] and runs.count(3) == runs.count(4) == 1
    assert torch.equal(found[0][0], found[1][0])
    assert_same(found[0][1], found[1][1])
    assert not any(key.startswith(("blocks.3.", "blocks.4.")) for key in found[0][1])


def test_a_pass_that_fails_leaves_the_network_whole():
    role, cond = (
        Value("value", Backbone(WanModel.load(WAN, CPU), ALONE, trained=True), TrainableConfig()),
        small_batch(4).cond,
    )
    expected = role.velocity(X_T, SIGMA, cond)
    hook = role.network.blocks[1].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        role.value(X_T, SIGMA, cond)
    hook.remove()
    assert len(role.network.blocks) == 5 and torch.equal(role.velocity(X_T, SIGMA, cond), expected)


def test_a_network_that_holds_its_blocks_elsewhere_runs_them_all():
    """Its value is the same; a family whose network is a wrapper has it so."""
    model, cond = WanModel.load(WAN, CPU), small_batch(4).cond
    role = Value("value", Backbone(model, ALONE, trained=True), TrainableConfig())
    role._heads[""].weight.data.fill_(1.0)
    expected, runs = role.value(X_T, SIGMA, cond), []
    model.network.blocks[4].register_forward_hook(lambda *_: runs.append(4))
    held = torch.nn.Module()
    held.blocks = model.network.blocks
    del model.network.blocks
    model.network.add_module("held", held)
    model.network.__class__ = type(
        "Wrapped", (type(model.network),), {"blocks": property(lambda self: self.held.blocks)}
    )
    assert torch.equal(role.value(X_T, SIGMA, cond), expected) and runs == [4]


def test_the_gradient_ends_at_the_features():
    """The middle block of two is the last one: only what follows the blocks has no gradient."""
    role = value_role(head=1.0)
    role.value(X_T, SIGMA, small_batch(4).cond).sum().backward()
    without = {key for key, p in role.network.named_parameters() if p.grad is None}
    assert without and {key.split(".")[0] for key in without} <= {"proj_out", "scale_shift_table", "norm_out"}
    assert role._heads[""].weight.grad is not None and "value.weight" in role.weights


def test_each_expert_has_a_head_of_its_own():
    own = [Backbone(small_model(seed), ALONE, trained=True) for seed in (0, 1)]
    both, cond = Value("value", ExpertPair(*own, 0.5), TrainableConfig()), small_batch(4).cond
    for expert, size in (("high", 1.0), ("low", 2.0)):
        both._heads[expert].weight.data.fill_(size)
    values = both.value(X_T, SIGMA, cond)
    for seed, size, rows in ((0, 1.0, [0, 2]), (1, 2.0, [1, 3])):
        alone = value_role(seed=seed, head=size)
        expected = alone.value(X_T[rows], SIGMA[rows], cond.map(lambda x, rows=rows: x[rows]))
        torch.testing.assert_close(values[rows], expected)
    assert {"high/value.weight", "low/value.weight"} <= set(both.weights)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_an_adapter_on_the_students_base(checkpointing):
    """Neither the base nor the student's adapter moves; a value does not depend on the student's adapter."""
    config = TrainableConfig(adapter=AdapterConfig(rank=2), learning_rate=0.1)
    adapters = {"student": config.adapter, "value": config.adapter}
    backbone = Backbone(small_model(), ALONE, adapters=adapters, recompute="full" if checkpointing else "none")
    student, role, cond = Trainable("student", backbone, config), Value("value", backbone, config), small_batch(4).cond
    role._heads[""].weight.data.fill_(1.0)
    before = weights(backbone.model.network)
    for _ in range(2):  # the first one moves only B, which starts at zero
        role.backward(role.value(X_T, SIGMA, cond).square().sum(), last=True)
        assert not any(".student." in key for key in gradients(backbone.model.network))
        role.step()
    after = weights(backbone.model.network)
    mine = {key for key in before if ".value." in key}
    assert mine and all(not torch.equal(before[key], after[key]) for key in mine)
    assert_same(*({key: side[key] for key in before if key not in mine} for side in (before, after)))
    values = role.value(X_T, SIGMA, cond)
    for key, weight in student.weights.items():
        if "lora_B" in key:
            weight.data.fill_(0.3)
    assert torch.equal(role.value(X_T, SIGMA, cond), values)


def test_the_head_is_in_the_state():
    role = value_role(head=0.7)
    assert torch.equal(role.state_dict()["weights/value.weight"], torch.full((1, role._heads[""].in_features), 0.7))
    assert "optimizer/value.bias/exp_avg" in role.state_dict()
