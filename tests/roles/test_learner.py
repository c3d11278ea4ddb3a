"""An optimizer in one kernel for many weights, as on an accelerator, updates as the one of a CPU does."""

import pytest
import torch
from helpers import CPU, assert_same
from torch import nn

from unified_trainer.parallel.device import optimizer_kernels
from unified_trainer.roles import optimizer
from unified_trainer.roles.learner import Learner, LearnerConfig

CONFIG = LearnerConfig(learning_rate=0.1, weight_decay=0.1, max_grad_norm=0.5, ema_decay=0.75)


def weights() -> dict[str, nn.Parameter]:
    draw = torch.Generator().manual_seed(1)
    return {f"layer {i}": nn.Parameter(torch.randn(3, i + 1, generator=draw)) for i in range(4)}


def trained(kernels, monkeypatch, updates: int) -> dict[str, torch.Tensor]:
    """The state after some updates; after every one a new learner goes on from a copy of it."""
    monkeypatch.setattr(optimizer, "optimizer_kernels", lambda device: kernels)
    state = Learner("student", weights(), CONFIG).state_dict()
    for update in range(updates):
        one = Learner("student", weights(), CONFIG)
        own = one.state_dict()
        for key, value in state.items():
            own[key].copy_(value)
        one.updates = int(state["updates"])
        for weight in one.weights.values():
            weight.grad = (weight.detach() - update).sin()
        one.step(one.gradient_norm())
        state = {key: value.clone() for key, value in one.state_dict().items()}
    return state


@pytest.mark.parametrize("kernels", [{"fused": True}, {"foreach": True}])
def test_one_kernel_updates_as_many(monkeypatch, kernels):
    many, one = (trained(chosen, monkeypatch, 3) for chosen in ({}, kernels))
    assert many.keys() == one.keys() and int(one["updates"]) == 3 and float(one["optimizer/layer 0/step"]) == 3
    for key in many:
        torch.testing.assert_close(one[key], many[key], rtol=1e-6, atol=1e-7)


def test_a_cpu_keeps_its_order_of_rounding():
    assert optimizer_kernels(CPU) == {}
    assert optimizer_kernels(torch.device("cuda")) == {"fused": True}
    assert optimizer_kernels(torch.device("xpu")) == {"foreach": True}


def test_the_average_is_the_formula_weight_by_weight(monkeypatch):
    one = Learner("student", weights(), CONFIG)
    start = {key: weight.detach().clone() for key, weight in one.weights.items()}
    for weight in one.weights.values():
        weight.grad = torch.ones_like(weight)
    one.step(one.gradient_norm())
    expected = {f"ema/{key}": start[key].lerp(one.weights[key].detach(), 0.25) for key in start}
    assert_same({key: one.state_dict()[key] for key in expected}, expected)
