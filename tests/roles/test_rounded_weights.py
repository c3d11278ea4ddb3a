"""bf16 copies of weights: the bits of autocast, without its casts."""

import pytest
import torch
from helpers import ALONE, CAPTIONS, LATENT_SHAPE, assert_same, small_model, tiny_codec
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from unified_trainer.parallel.fsdp import ROUNDED
from unified_trainer.roles import backbone as backbones
from unified_trainer.roles import optimizer
from unified_trainer.roles.adapter import AdapterConfig
from unified_trainer.roles.backbone import Backbone
from unified_trainer.roles.recompute import Recompute
from unified_trainer.roles.role import Trainable, TrainableConfig
from unified_trainer.roles.rounded_weights import KINDS

pytestmark = pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")

ADAPTER = AdapterConfig(rank=2)
SIGMA = torch.tensor([0.3, 0.9])


class Casts(TorchDispatchMode):
    """Counts the copies of weights that operations make in another precision."""

    def __init__(self, role: Trainable) -> None:
        super().__init__()
        self._weights, self.count = {p.data_ptr() for p in role.network.parameters()}, 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.count += operation is torch.ops.aten._to_copy.default and args[0].data_ptr() in self._weights
        return operation(*args, **(kwargs or {}))


def student(*, kept: bool = True, adapter: bool = False, recompute="none") -> Trainable:
    """A student of bf16 passes: with copies of its weights, or with autocast's casts."""
    config = TrainableConfig(
        precision="bf16",
        learning_rate=1e-2,
        ema_decay=0.5,
        adapter=ADAPTER if adapter else AdapterConfig(),
    )
    with pytest.MonkeyPatch.context() as patches:
        if not kept:
            patches.setattr(backbones, "keep_rounded", lambda *_: None)
        network = Backbone(
            small_model(),
            ALONE,
            trained=True,
            adapters={"student": ADAPTER} if adapter else None,
            recompute=recompute,
            half=adapter,
            half_passes=True,
        )
    role = Trainable("student", network, config)
    with torch.no_grad():
        for i, (key, weight) in enumerate(role.weights.items()):
            if "lora_B" in key:  # it starts at zero, where A has no gradient
                nn.init.normal_(weight, generator=torch.Generator().manual_seed(i))
    return role


def velocity(role: Trainable, seed: int = 0) -> Tensor:
    x_t = torch.randn(2, *LATENT_SHAPE, generator=torch.Generator().manual_seed(seed))
    return role.velocity(x_t, SIGMA, tiny_codec().encode_text(CAPTIONS[:2]))


def learned(role: Trainable) -> dict[str, Tensor]:
    """Velocities and gradients of three updates, whose losses each take two passes, and velocities of the EMA."""
    found = {}
    for update in range(3):
        with torch.no_grad():
            found[f"sampled/{update}"] = velocity(role)
        role.backward(velocity(role).square().mean() + velocity(role, 1).pow(3).mean(), last=True)
        found |= {f"{update}/{key}": p.grad.clone() for key, p in role.weights.items() if p.grad is not None}
        role.step()
        with torch.no_grad(), role.ema_weights():
            found[f"ema/{update}"] = velocity(role)
    return found


def test_every_layer_that_autocast_rounds_can_have_copies():
    assert tuple(KINDS) == ROUNDED


@pytest.mark.slow
@pytest.mark.parametrize("adapter", [False, True], ids=["whole", "adapter"])
@pytest.mark.parametrize("recompute", ["none", "full", Recompute("selective", full=1)], ids=["none", "full", "mixed"])
def test_velocities_and_gradients_are_those_of_autocast_bit_for_bit(adapter, recompute):
    ours = learned(student(adapter=adapter, recompute=recompute))
    assert_same(ours, learned(student(kept=False, adapter=adapter, recompute=recompute)))
    assert not torch.equal(ours["sampled/0"], ours["sampled/2"])


@pytest.mark.parametrize("adapter", [False, True], ids=["whole", "adapter"])
def test_no_pass_casts_a_weight(adapter):
    """An update rounds the weights that it changed, at the next pass."""
    role = student(adapter=adapter)
    for _ in range(2):
        velocity(role).square().mean().backward()
        with Casts(role) as casts:
            velocity(role).square().mean().backward()
            with torch.no_grad():
                velocity(role)
        assert casts.count == 0
        role.step()
    with Casts(plain := student(kept=False, adapter=adapter)) as casts:
        velocity(plain)
    assert casts.count > 20


def test_gradients_and_state_stay_float32():
    role = student()
    role.backward(velocity(role).square().mean(), last=True)
    assert {p.grad.dtype for p in role.weights.values()} == {torch.float32}
    assert {p.dtype for p in role.network.parameters()} == {torch.float32}
    assert role.network.state_dict().keys() == small_model().network.state_dict().keys()


def test_a_fused_optimizer_changes_the_copies_too():
    """Torch's fused AdamW does not tell autograd that it changes the weights."""
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(optimizer, "optimizer_kernels", lambda *_: {"fused": True})
        ours, plain = student(), student(kept=False)
    assert_same(learned(ours), learned(plain))


def test_a_weight_that_changes_before_the_backward_pass_is_an_error():
    role = student()
    loss = velocity(role).square().mean()
    with torch.no_grad():
        role.network.proj_out.weight.mul_(2)
        velocity(role)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
