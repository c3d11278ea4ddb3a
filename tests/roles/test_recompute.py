"""Recomputed activations: the same gradients, and the memory that was computed."""

import copy
from contextlib import nullcontext

import pytest
import torch
from helpers import ALONE, LATENT_SHAPE, assert_same, gradients, small_model
from torch.utils.checkpoint import CheckpointPolicy

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.types import Condition
from unified_trainer.models.wan.causal import CausalWanModel
from unified_trainer.models.wan.model import WanModel
from unified_trainer.numerics.chunks import ChunkConfig
from unified_trainer.roles.backbone import Backbone
from unified_trainer.roles.blocks import GRAPHS, compiles, may_compile, prepare_blocks, widest
from unified_trainer.roles.recompute import Recompute, selective_policy
from unified_trainer.roles.role import Trainable, TrainableConfig
from unified_trainer.tools.plan.network_size import frozen_config
from unified_trainer.tools.plan.passes import Network, pass_bytes
from unified_trainer.tools.plan.tracing import LiveBytes, quiet_norms

GIB = 2**30
WAYS = ("none", "selective", "full", Recompute("selective", full=1))


def causal_gradients(recompute) -> dict[str, torch.Tensor]:
    """The gradients of three chunks that attend to the cache, each with a graph."""
    backbone = Backbone(CausalWanModel(small_model().network), ALONE, trained=True, recompute=recompute)
    student, draw = Trainable("student", backbone, TrainableConfig()), torch.Generator().manual_seed(0)
    x, text = (
        torch.randn(2, LATENT_SHAPE[0], 3, *LATENT_SHAPE[2:], generator=draw),
        torch.randn(2, 4, 32, generator=draw),
    )
    sigma, cond, loss = torch.tensor([0.3, 0.9], dtype=torch.float64), Condition({"text": text}), torch.zeros(())
    with student.running() as model:
        cache = model.open_cache(ChunkConfig(1))
        for i in range(3):
            loss = loss + model.velocity_cached(x[:, :, i : i + 1], sigma, cond, cache).square().mean()
            model.append(x[:, :, i : i + 1], cond, cache)
    student.backward(loss, last=True)
    return gradients(student.network)


@pytest.mark.slow
def test_gradients_of_a_causal_student_are_equal_bit_for_bit():
    expected = causal_gradients("none")
    for recompute in WAYS[1:]:
        assert_same(causal_gradients(recompute), expected)


def test_a_network_of_several_roles_keeps_no_more_than_each_of_them_allows():
    least = Recompute.least_memory
    assert least([]) == least([Recompute(), Recompute()]) == Recompute()
    assert least([Recompute(), Recompute("selective", 2), Recompute("selective", 5)]) == Recompute("selective", 5)
    assert least([Recompute("selective"), Recompute.of_setting("full", 3)]) == Recompute("selective", 3)
    assert Recompute.of_setting(2, 3) == Recompute("selective", 2)
    assert Recompute.of_setting(3, 3) == Recompute.of_setting(9, 3) == Recompute.of_setting("full", 3)
    assert [Recompute("selective", 2).of(block) for block in range(4)] == ["full", "full", "selective", "selective"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
def test_kept_activations_take_the_memory_that_was_computed():
    """Storages alive after a forward pass over 576 tokens in bf16, against the trace from which plans are made."""
    taken = {}
    for recompute in (Recompute("selective"), Recompute("selective", full=1), Recompute(full=2)):
        model = small_model()
        backbone = Backbone(model, ALONE, trained=True, recompute=recompute)
        student = Trainable("student", backbone, TrainableConfig(precision="bf16"))
        x, text, sigma = torch.randn(1, 16, 4, 12, 12), torch.randn(1, 16, 32), torch.tensor([0.5])
        with quiet_norms(), LiveBytes() as live:
            velocity = student.velocity(x, sigma, Condition({"text": text}))
            held = live.now.of(1)
        assert velocity.requires_grad
        config = frozen_config(dict(model.network.config))
        network = Network(WanModel, config, "bf16", False, len(model.blocks), trained=True, recompute=recompute)
        computed = pass_bytes(network, (16, 4, 12, 12), 16, 1, gradient=True, fresh=False).kept
        assert held == pytest.approx(computed, rel=0.1), recompute
        taken[recompute.others, recompute.full] = held
    assert taken["none", 2] < 0.6 * taken["selective", 1]
    assert taken["selective", 1] < taken["selective", 0]


def test_selective_keeps_the_masked_attention_of_compiled_blocks():
    kept = selective_policy(None, torch.ops.higher_order.flex_attention)
    assert kept == CheckpointPolicy.MUST_SAVE


class Named(torch.nn.Module):
    """A block that its network calls by name, as those of Qwen-Image, SD3 and LTX are; it returns two tensors."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 3)

    def forward(self, hidden_states, encoder_hidden_states, temb=None, scale: float = 2.0):
        hidden = torch.tanh(self.linear(hidden_states)) * scale + temb
        return encoder_hidden_states + hidden.mean(), hidden


@pytest.mark.parametrize("how", ["selective", "full", "compiled"])
def test_blocks_that_are_called_by_name(how, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda forward, **_: forward)
    plain, wrapped = Named(), Named()
    wrapped.load_state_dict(plain.state_dict())
    seen = []
    inputs_of = (lambda *inputs: seen.append(len(inputs)) or inputs) if how == "compiled" else None
    prepare_blocks([wrapped], Recompute("none" if how == "compiled" else how), nullcontext, inputs_of)
    draw = torch.Generator().manual_seed(0)
    x, text, temb = (torch.randn(2, 3, generator=draw) for _ in range(3))
    for block in (plain, wrapped):
        text_out, out = block(x, encoder_hidden_states=text, temb=temb)
        (text_out.sum() + out.square().sum()).backward()
    assert_same(gradients(wrapped), gradients(plain))
    assert seen == ([4] if how == "compiled" else [])  # all by position, with the defaults


def test_an_input_that_has_no_place_is_named():
    class Odd(torch.nn.Module):
        def forward(self, x, *, mask=None):
            return x

    block = Odd()
    prepare_blocks([block], Recompute("full"), nullcontext)
    with pytest.raises(TypeError, match="takes its inputs by position, but mask has none"):
        block(torch.zeros(1), mask=torch.zeros(1))


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (torch._dynamo.exc.FailOnRecompileLimitHit("limit"), f"compiled blocks need more than {GRAPHS} graphs"),
        (
            torch._dynamo.exc.Unsupported("a jump"),
            "a block cannot be compiled as one graph: set compile to false",
        ),
    ],
)
def test_what_cannot_be_compiled_is_an_error_with_a_way_out(error, message, monkeypatch):
    def graph(*_):
        raise error

    monkeypatch.setattr(torch, "compile", lambda *_, **__: graph)
    block = torch.nn.Linear(2, 2)
    prepare_blocks([block], Recompute(), nullcontext, lambda x: (x,))
    with pytest.raises(UserError, match=message):
        block(torch.zeros(1, 2))


@pytest.mark.parametrize("how", ["none", "selective", "full"])
def test_with_auto_what_cannot_be_compiled_runs_uncompiled(how, monkeypatch):
    """The reason is said once for all blocks, and gradients are those without compilation."""

    def graph(*_):
        raise torch._dynamo.exc.BackendCompilerFailed("no such compiler", RuntimeError("absent"), None)

    monkeypatch.setattr(torch, "compile", lambda *_, **__: graph)
    reasons: list[str] = []
    layers = [torch.nn.Linear(2, 2) for _ in range(2)]
    plain = [copy.deepcopy(layer) for layer in layers]
    prepare_blocks(
        layers, Recompute(how) if how != "full" else Recompute(full=2), nullcontext, lambda x: (x,), reasons.append
    )
    x = torch.ones(1, 2)
    for first, second in (layers, plain):
        second(first(x)).square().sum().backward()
    for layer, one in zip(layers, plain, strict=True):
        assert torch.equal(layer.weight.grad, one.weight.grad)
    (reason,) = reasons
    assert "They run uncompiled from here on" in reason


@pytest.mark.parametrize(
    ("setting", "kind", "compiler", "expected"),
    [
        ("auto", "cpu", "sh", False),
        ("auto", "cuda", "sh", True),
        ("auto", "cuda", "absent-compiler", False),
        ("auto", "npu", "sh", False),
        (True, "cpu", "sh", True),
        ("max_autotune", "cpu", "sh", True),
        (False, "cuda", "sh", False),
    ],
)
def test_auto_compiles_on_accelerators_with_a_compiler(setting, kind, compiler, expected, monkeypatch):
    monkeypatch.setenv("CC", compiler)
    monkeypatch.setenv("CXX", compiler)
    assert compiles(setting, kind) is expected
    assert may_compile(setting, kind) is (expected or compiler == "absent-compiler")
    assert widest([False, setting]) == setting
