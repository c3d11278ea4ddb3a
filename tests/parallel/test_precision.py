"""Weights and passes in half precision, and everything that stays in float32."""

import json
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from helpers import (
    ALONE,
    CAPTIONS,
    LATENT_SHAPE,
    REPO,
    WAN,
    assert_near,
    environment,
    run,
    small_model,
    tiny_codec,
)
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode

from unified_trainer.models.wan.model import WanModel
from unified_trainer.roles.adapter import AdapterConfig
from unified_trainer.roles.backbone import Backbone
from unified_trainer.roles.role import Frozen, RoleConfig, Trainable, TrainableConfig

HALF = RoleConfig(precision="bf16")


def asked(role) -> torch.Tensor:
    x_t = torch.randn(2, *LATENT_SHAPE, generator=torch.Generator().manual_seed(0))
    return role.velocity(x_t, torch.tensor([0.3, 0.9]), tiny_codec().encode_text(CAPTIONS[:2]))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize("model", [small_model, lambda: WanModel.open(WAN, "transformer")], ids=["there", "read"])
def test_held_weights_give_the_bits_of_rounded_ones(model):
    """Autocast rounds the weights of linear and convolutional layers in every pass: held so, nothing changes."""
    rounded, held = (Frozen("teacher", Backbone(model(), ALONE, half=half), HALF) for half in (False, True))
    assert torch.equal(asked(rounded), asked(held))
    assert not torch.equal(asked(held), asked(Frozen("teacher", Backbone(model(), ALONE), RoleConfig())))
    kinds = {type(module).__name__ for module in held.network.modules() for p in module.parameters(False) if is_half(p)}
    assert kinds == {"Linear", "Conv3d"}
    whole = {word for key, p in held.network.named_parameters() if not is_half(p) for word in key.split(".")}
    assert {"norm_q", "norm_k", "norm2", "scale_shift_table"} <= whole


def is_half(weight: torch.Tensor) -> bool:
    return weight.dtype == torch.bfloat16


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
def test_what_is_trained_stays_whole():
    """An adapter over a base in half precision: its weights, its gradients and its moments are float32."""
    adapter = AdapterConfig(rank=2)
    backbone = Backbone(small_model(), ALONE, adapters={"student": adapter}, half=True)
    student = Trainable("student", backbone, TrainableConfig(precision="bf16", adapter=adapter))
    student.backward(asked(student).square().mean(), last=True)
    gradients = {p.grad.dtype for p in student.weights.values() if p.grad is not None}
    student.step()
    held = {value.dtype for key, value in student.state_dict().items() if "/step" not in key and key != "updates"}
    assert gradients == held == {torch.float32}
    assert is_half(backbone.model.blocks[0].attn1.to_q.base_layer.weight)
    assert asked(student).dtype == torch.float32


class Casts(TorchDispatchMode):
    """Weak references to the bf16 copies of weights that operations make."""

    def __init__(self, weights: set[int]) -> None:
        super().__init__()
        self.weights, self.made = weights, []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        out = operation(*args, **(kwargs or {}))
        if operation is torch.ops.aten._to_copy.default and args[0].data_ptr() in self.weights:
            self.made.append(weakref.ref(out))
        return out


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
def test_a_pass_without_gradient_keeps_no_copy_of_the_weights():
    """Autocast's cache would hold them until the pass ends, also those of weights that FSDP has freed by then."""
    student = Trainable("student", Backbone(small_model(), ALONE, trained=True), TrainableConfig(precision="bf16"))
    x_t, cond = torch.randn(2, *LATENT_SHAPE), tiny_codec().encode_text(CAPTIONS[:2])
    with torch.no_grad(), student.running() as model:
        with Casts({p.data_ptr() for p in student.network.parameters()}) as casts:
            model.velocity(x_t, torch.tensor([0.3, 0.9]), cond)
        assert len(casts.made) > 20
        assert not [cast for cast in casts.made if cast() is not None]


def test_a_role_says_its_precision():
    assert Frozen("t", Backbone(small_model(), ALONE, half=True), HALF).precision == "weights bf16, passes bf16"
    assert Frozen("t", Backbone(small_model(), ALONE), HALF).precision == "weights fp32, passes bf16"


@pytest.mark.slow
def test_a_run_says_on_what_and_in_which_precision_it_runs(run_folder, capsys):
    run("finetune", run_folder)
    said = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "ranks: 1 on cpu = replicate 1 x shard 1 x sequence 1" in said
    for row in ("student tiny: 0.74 M parameters, weights fp32, passes fp32;", "text encoder fp32", "VAE fp32"):
        assert row in said, row
    assert "precision: gradients and their sums over ranks, optimizers, " in said


def compiled(file: Path) -> tuple[dict[str, torch.Tensor], dict[str, dict]]:
    """Gradients, and what was counted, of roles with compiled blocks and without."""
    words = [sys.executable, str(Path(__file__).parent / "compiled.py"), str(file)]
    done = subprocess.run(words, cwd=REPO, env=environment(), capture_output=True, text=True, timeout=300)
    assert file.is_file(), done.stderr
    return load_file(file), json.loads(file.with_suffix(".json").read_text())


@pytest.mark.slow
def test_compiled_blocks_learn_what_they_did(tmp_path):
    """For whole networks, adapters, causal students with a growing cache, and sparse ones with a rising share.

    The sums are in another order.

    Inductor's kernels round in bf16 where uncompiled blocks do, so that a replay gives a rollout's densities. Every
    graph is made in the first step. With selective recomputation a graph keeps less than without, and more than the
    inputs alone that full recomputation keeps.
    """
    found, counted = compiled(tmp_path / "gradients.safetensors")
    for case in ("whole", "none", "full", "adapters", "causal", "rounded", "sparse", "causal sparse"):
        plain, ours = (
            {key.removeprefix(prefix): value for key, value in found.items() if key.startswith(prefix)}
            for prefix in (f"{case}/plain/", f"{case}/compiled/")
        )
        assert_near(ours, plain, 5e-6)
        assert counted[f"{case}/compiled"]["graphs"][1] == 0, case
        assert counted[f"{case}/compiled"]["graphs"][0] <= 8, case  # fewer than blocks and chunks together
    full, selective, none = (counted[f"{case}/compiled"]["kept"] for case in ("full", "whole", "none"))
    assert 2 * full < selective < 0.8 * none
    assert found["inductor/compiled"].equal(found["inductor/plain"])
