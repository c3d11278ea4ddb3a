"""Backbones: roles that share one network by adapters, each as if it had its own."""

from pathlib import Path

import pytest
import torch
from helpers import (
    ALONE,
    WAN,
    Calls,
    adapted,
    assert_near,
    assert_same,
    dmd2,
    gradients,
    small_batch,
    small_model,
    weights,
)
from peft import LoraConfig, get_peft_model, set_peft_model_state_dict
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy

from unified_trainer.methods.dmd2 import DMD2Config
from unified_trainer.models.wan.model import WanModel
from unified_trainer.roles.adapter import AdapterConfig
from unified_trainer.roles.backbone import Backbone
from unified_trainer.roles.critic import Critic
from unified_trainer.roles.recompute import Recompute, selective_policy
from unified_trainer.roles.role import Frozen, RoleConfig, Trainable, TrainableConfig
from unified_trainer.run.checkpoint import dcp as checkpoint
from unified_trainer.run.load_roles import load_roles
from unified_trainer.run.plan.roles import RolePlan, layout_for

pytestmark = pytest.mark.slow  # seconds together

X_T = torch.randn(2, 16, 2, 2, 2, generator=torch.Generator().manual_seed(3))
SIGMA = torch.tensor([0.9, 0.4], dtype=torch.float64)
TWO = {"student": AdapterConfig(rank=2), "critic": AdapterConfig(rank=3)}
TYPES = {"student": Trainable, "teacher": Frozen, "critic": Critic}


def roles_over(backbone: Backbone, **config):
    """Student, teacher and critic over one network."""
    trained = TrainableConfig(**config)
    student, critic = Trainable("student", backbone, trained), Critic("critic", backbone, trained)
    return student, Frozen("teacher", backbone, RoleConfig()), critic


def answer(role) -> torch.Tensor:
    return role.velocity(X_T, SIGMA, small_batch().cond)


def own(role) -> dict[str, torch.Tensor]:
    """The weights that a role trains."""
    return {key.removeprefix("weights/"): v for key, v in role.state_dict().items() if key.startswith("weights/")}


def plain() -> Trainable:
    return Trainable("student", Backbone(small_model(), ALONE, trained=True), TrainableConfig())


# Each role runs as it should.


def test_without_its_adapters_the_base_is_the_plain_network_bit_for_bit():
    student, teacher, critic = roles_over(adapted())
    expected = answer(plain()).detach()
    for role in (student, critic, teacher):
        assert torch.equal(answer(role).detach(), expected) is (role is teacher)
    assert torch.equal(answer(teacher), expected)
    assert not torch.equal(answer(student), answer(critic))


def test_fresh_adapters_change_nothing():
    """B starts at zero and A does not: all three roles agree, and the adapter can learn."""
    backbone = Backbone(small_model(), ALONE, adapters=TWO)
    student, teacher, critic = roles_over(backbone)
    assert torch.equal(answer(student), answer(teacher)) and torch.equal(answer(critic), answer(teacher))
    for key, weight in backbone.weights("student").items():
        assert bool(weight.any()) is ("lora_A" in key)


def test_fresh_adapters_are_the_same_everywhere_and_leave_torchs_generator_alone():
    torch.manual_seed(1)
    first = Backbone(small_model(), ALONE, adapters=TWO)
    state = torch.get_rng_state()
    torch.manual_seed(2)
    second = Backbone(small_model(), ALONE, adapters=TWO)
    torch.manual_seed(1)
    assert torch.equal(state, torch.get_rng_state())
    assert_same(first.weights("student"), second.weights("student"))
    equal = Backbone(small_model(), ALONE, adapters=dict.fromkeys(TWO, AdapterConfig(rank=2)))
    key = "blocks.0.attn1.to_q.lora_A.weight"
    assert not torch.equal(*(equal.weights(name)[key] for name in TWO))


@pytest.mark.parametrize(("alpha", "scale"), [(0.0, 1.0), (4.0, 2.0)])
def test_an_adapter_adds_alpha_over_rank_b_a(alpha, scale):
    backbone = Backbone(small_model(), ALONE, adapters={"student": AdapterConfig(2, alpha, ("blocks.0.attn1.to_q",))})
    assert list(backbone.weights("student")) == [f"blocks.0.attn1.to_q.lora_{x}.weight" for x in "AB"]
    a, b = backbone.weights("student").values()
    b.data.normal_()
    merged = small_model()
    merged.network.blocks[0].attn1.to_q.weight.data += scale * (b @ a).detach()
    expected = Frozen("teacher", Backbone(merged, ALONE), RoleConfig())
    torch.testing.assert_close(answer(roles_over(backbone)[0]).detach(), answer(expected), rtol=1e-4, atol=1e-5)


def test_what_ran_before_runs_again():
    backbone = adapted()
    student, teacher, critic = roles_over(backbone)
    inside, alone = [], [answer(role).detach() for role in (student, critic)]
    with student.running():
        inside.append(answer(critic).detach())
        with pytest.raises(KeyError), critic.running():
            raise KeyError
        inside.append(backbone.model.velocity(X_T, SIGMA, small_batch().cond).detach())
    assert torch.equal(inside[0], alone[1]) and torch.equal(inside[1], alone[0])
    assert torch.equal(answer(teacher), answer(plain()).detach())


# Gradients.


def split(backbone: Backbone) -> dict[str, dict[str, torch.Tensor]]:
    """The gradients, role by role; the base has none."""
    found = gradients(backbone.model.network)
    parts = {name: {k.replace(f".{name}.", "."): g for k, g in found.items() if f".{name}." in k} for name in TWO}
    assert sum(map(len, parts.values())) == len(found)
    return parts


def taught(name: str, **config) -> dict[str, torch.Tensor]:
    """The gradient of one role alone."""
    backbone = adapted(**config)
    answer(Trainable(name, backbone, TrainableConfig())).square().mean().backward()
    return split(backbone)[name]


def test_no_gradient_leaks_into_the_other_adapter_or_the_base():
    backbone = adapted()
    student, teacher, critic = roles_over(backbone)
    answer(student).square().mean().backward()
    assert split(backbone)["critic"] == {} and len(split(backbone)["student"]) == len(own(student))
    backbone.model.network.zero_grad()
    answer(critic).square().mean().backward()
    assert split(backbone)["student"] == {}
    assert not answer(teacher).requires_grad


@pytest.mark.parametrize("checkpointing", [False, True])
def test_switching_between_forward_and_backward_leaves_the_gradients_right(checkpointing):
    """Recomputed activations are those of the adapter that ran then, whatever runs in between or at the time."""
    backbone = adapted(checkpointing=checkpointing)
    student, teacher, critic = roles_over(backbone)
    losses = [answer(role).square().mean() for role in (student, critic)]
    answer(teacher)
    with critic.running():
        losses[0].backward()
    with student.running():
        losses[1].backward()
    for name, found in split(backbone).items():
        assert_near(found, taught(name), 1e-6)


def test_recomputing_gives_the_gradients_of_a_whole_step():
    """Student, teacher, critic and discriminator in one step of DMD2, with and without recomputation."""
    config = DMD2Config(batch_size=2, micro_batch=1, guidance_scale=2.0, student_every=1, gan_weight=0.5)
    exact, recomputed = (dmd2(config, shared=True, checkpointing=checkpointing) for checkpointing in (False, True))
    for one in (exact, recomputed):
        one.step(0)
    for name in TWO:
        assert_near(recomputed.roles[name].gradients[0], exact.roles[name].gradients[0], 1e-5)


def test_recomputation_really_happens():
    """One more forward pass of each block, in the backward pass."""
    counts = []
    for checkpointing in (False, True):
        backbone = adapted(checkpointing=checkpointing)
        student, _, _ = roles_over(backbone)
        ran = []
        backbone.model.blocks[0].attn1.register_forward_hook(lambda *_, ran=ran: ran.append(1))
        answer(student).square().mean().backward()
        counts.append(len(ran))
    assert counts == [1, 2]


def test_an_update_moves_its_own_adapter_alone():
    backbone = adapted()
    student, _, critic = roles_over(backbone, learning_rate=1e-2)
    before = weights(backbone.model.network)
    answer(student).square().mean().backward()
    student.step()
    moved = {key for key, value in weights(backbone.model.network).items() if not torch.equal(value, before[key])}
    assert moved == {key for key in before if ".student." in key}
    assert student.updates == 1 and critic.updates == 0


def test_the_average_is_of_the_adapter():
    backbone = adapted()
    student, _, critic = roles_over(backbone, learning_rate=1e-2, ema_decay=0.5)
    start = {key: value.clone() for key, value in own(student).items()}
    answer(student).square().mean().backward()
    student.step()
    moved, others = {key: value.clone() for key, value in own(student).items()}, weights(critic.network)
    with student.ema_weights():
        assert_near(own(student), {key: (start[key] + moved[key]) / 2 for key in start}, 1e-6)
    assert_same(own(student), moved)
    assert_same(weights(critic.network), others)


# Names, and what a checkpoint keeps.


def test_the_names_are_pefts():
    """peft loads these names into a model with such an adapter, and diffusers loads them as transformer.*."""
    backbone = adapted()
    student, _, _ = roles_over(backbone)
    mine = {key: value.clone() for key, value in own(student).items()}
    lora = LoraConfig(r=2, lora_alpha=2, target_modules=list(WanModel.adapter_layers))
    wrapped = get_peft_model(small_model().network, lora)
    result = set_peft_model_state_dict(wrapped, {f"base_model.model.{key}": value for key, value in mine.items()})
    assert not result.unexpected_keys and not [key for key in result.missing_keys if "lora_" in key]
    peer = small_model()
    peer.network.load_lora_adapter({f"transformer.{k}": v for k, v in mine.items()}, prefix="transformer")
    expected = answer(student).detach()
    for network in (wrapped.get_base_model(), peer.network):
        loaded = WanModel(network).velocity(X_T, SIGMA, small_batch().cond)
        torch.testing.assert_close(loaded.detach(), expected, rtol=1e-5, atol=1e-6)


def test_a_checkpoint_of_adapters_comes_back(tmp_path):
    """Weights, moments, averages and counters of both adapters and the discriminator; nothing of the base."""
    config = DMD2Config(batch_size=2, micro_batch=2, guidance_scale=2.0, student_every=1, gan_weight=0.5)
    role = TrainableConfig(learning_rate=1e-3, ema_decay=0.5)
    first, second = (dmd2(config, shared=True, moves=True, role=role) for _ in range(2))
    first.step(0)
    checkpoint.save(tmp_path / "checkpoints", 1, first.tensors(), ALONE)
    assert not [key for key in first.tensors() if "base_layer" in key]
    assert second.resume(tmp_path) == (1, [])
    assert_same(second.tensors(), first.tensors())
    assert first.step(1) == second.step(1)
    assert_same(second.tensors(), first.tensors())


# Which roles share.


class Products(TorchDispatchMode):
    """Counts matrix products and attentions that are computed forwards, of those that are worth keeping."""

    count = 0

    def __torch_dispatch__(self, call, _types, arguments=(), named=None):
        self.count += selective_policy(None, call, *arguments) is CheckpointPolicy.MUST_SAVE
        return call(*arguments, **(named or {}))


@pytest.mark.parametrize("adapters", [None, TWO])
def test_kept_products_are_not_computed_again(adapters):
    """Nor is anything that is learnt another: bit for bit, with or without adapters."""
    found = {}
    for name, settings in {
        "kept": {},
        "recomputed": {"recompute": "full"},
        "between": {"recompute": "selective"},
        "both": {"recompute": Recompute("selective", full=1)},
    }.items():
        backbone = Backbone(small_model(), ALONE, trained=adapters is None, adapters=adapters, **settings)
        student = Trainable("student", backbone, TrainableConfig())
        loss = answer(student).square().mean()
        with Products() as again:
            student.backward(loss, last=True)
        found[name] = again.count, gradients(backbone.model.network)
    assert found["kept"][0] == found["between"][0] < found["both"][0] < found["recomputed"][0]
    for name in ("between", "both", "recomputed"):
        assert_same(found[name][1], found["kept"][1])


def loaded(student_rank=2, critic_rank=2, paths=("tiny", "tiny", "tiny"), recompute="none"):
    configs = {
        "student": TrainableConfig(adapter=AdapterConfig(student_rank), activation_memory=recompute),
        "teacher": RoleConfig(),
        "critic": TrainableConfig(adapter=AdapterConfig(critic_rank)),
    }
    plans = {
        name: RolePlan(kind, configs[name], path, layout_for(name, kind, configs[name], path))
        for (name, kind), path in zip(TYPES.items(), paths, strict=True)
    }
    return load_roles(plans, ALONE)


def test_three_roles_of_one_path_are_one_network():
    roles = loaded()
    assert len({id(role.network) for role in roles.values()}) == 1
    assert {name: type(role) for name, role in roles.items()} == TYPES
    base = {key: p.requires_grad for key, p in roles["student"].network.named_parameters() if ".lora_" not in key}
    assert not any(base.values())


def test_a_full_student_and_an_adapter_critic_on_the_teachers_base():
    roles = loaded(student_rank=0)
    assert roles["teacher"].network is roles["critic"].network is not roles["student"].network
    assert all(p.requires_grad for p in roles["student"].network.parameters())
    assert not any(p.requires_grad for k, p in roles["teacher"].network.named_parameters() if ".lora_" not in k)
    calls = Calls.of(roles["student"])
    x_t, batch = torch.randn(1, *tiny_shape()), small_batch(1)
    loss = roles["critic"].velocity(x_t, SIGMA[:1], batch.cond).square().mean()
    loss.backward()
    assert calls.x_t == [] and gradients(roles["student"].network) == {}


def tiny_shape() -> tuple[int, ...]:
    return 16, 2, 2, 2


def test_full_weights_are_never_shared():
    roles = loaded(student_rank=0, critic_rank=0)
    assert len({id(role.network) for role in roles.values()}) == 3


def test_roles_of_other_paths_do_not_share(tmp_path):
    other = tmp_path / "wan"
    other.symlink_to(Path(WAN).absolute())
    roles = loaded(paths=("tiny", "tiny", str(other)))
    assert roles["student"].network is roles["teacher"].network is not roles["critic"].network


@pytest.mark.parametrize(
    "adapter",
    [AdapterConfig(rank=2, layers=("to_nothing",)), AdapterConfig(rank=-1), AdapterConfig(2, 0.0, ("norm2",))],
)
def test_an_adapter_that_cannot_be_names_its_key(adapter):
    with pytest.raises(ValueError, match=r"student\.adapter cannot be put on this model"):
        Backbone(small_model(), ALONE, adapters={"student": adapter})
