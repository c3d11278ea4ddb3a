"""Quantised networks: rounding as torchao's, straight-through gradients, adapters, folders, and what is refused."""

import json
from dataclasses import replace

import pytest
import torch
from diffusers import WanTransformer3DModel
from helpers import ALONE, WAN, refused, small_model
from helpers import flags as words_of
from torch import nn
from torchao.float8.float8_linear import Float8Linear
from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale
from torchao.quantization import Float8Tensor, Int8Tensor, IntxUnpackedToInt8Tensor, PerRow

from unified_trainer.__main__ import main
from unified_trainer.basics.errors import UserError
from unified_trainer.models.aware_linear import straight_through
from unified_trainer.models.base import VideoModel
from unified_trainer.models.folder import outline
from unified_trainer.models.quantize import GROUP, check_sizes, linear_layers, quantise_folder, round_to, wrap
from unified_trainer.models.wan.family import WAN as FAMILY
from unified_trainer.models.wan.model import WanModel
from unified_trainer.roles.adapter import AdapterConfig
from unified_trainer.roles.backbone import Backbone
from unified_trainer.roles.role import Frozen, RoleConfig, Trainable, TrainableConfig
from unified_trainer.run.load_roles import load_roles
from unified_trainer.run.plan.roles import RolePlan, layout_for

pytestmark = pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
AWARE = ["--student.quantize", "int8", "--student.quantize-aware"]


def wide_model() -> WanModel:
    """The tiny model: widths of 96 and 288, which 16 and 32 divide."""
    return WanModel.load(WAN, ALONE.device)


def aware(model: VideoModel, kind: str = "int8", rank: int = 0, precision: str = "fp32") -> Trainable:
    """A student that rounds, with an adapter that is not zero if it has a rank."""
    adapter = AdapterConfig(rank=rank)
    mesh = wrap(model, kind, "aware", ALONE)
    backbone = Backbone(model, mesh, trained=True, adapters={"student": adapter} if rank else None)
    student = Trainable("student", backbone, TrainableConfig(precision=precision, adapter=adapter))
    with torch.no_grad():
        for i, (key, weight) in enumerate(student.weights.items()):
            if "lora_B" in key:
                nn.init.normal_(weight, std=0.1, generator=torch.Generator().manual_seed(i))
    return student


def velocity(role: Trainable | Frozen) -> torch.Tensor:
    return role.velocity(*next(iter(role.backbones.values())).model.example(samples=2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_is_that_of_torchaos_tensors(dtype):
    """Bit for bit, also for a row of zeros, so that a student computes as its export."""
    weight = 0.02 * torch.randn(96, 288, generator=torch.Generator().manual_seed(0)).to(dtype)
    weight[3] = 0
    whole = per_tensor_amax_to_scale(weight.abs().max())
    held = {
        "int8": Int8Tensor.from_hp(weight, PerRow()),
        "int4": IntxUnpackedToInt8Tensor.from_hp(weight, (1, GROUP), torch.int4),
        "fp8": Float8Tensor.from_hp(weight, granularity=PerRow(), hp_value_lb=1e-12),
        "nvfp4": NVFP4Tensor.to_nvfp4(weight, per_tensor_scale=whole),
    }
    for kind, tensor in held.items():
        assert torch.equal(round_to(kind, weight), tensor.dequantize()), kind
        assert 0 < float((round_to(kind, weight) - weight).norm() / weight.norm()) < 0.12


@pytest.mark.parametrize("kind", ["int8", "int4", "fp8", "nvfp4"])
def test_rounded_inputs_of_a_sample_do_not_depend_on_the_others(kind):
    x = torch.randn(3, 5, 64, generator=torch.Generator().manual_seed(0))
    scaled = x * torch.tensor([1.0, 100.0, 0.01])[:, None, None]
    assert torch.equal(round_to(kind, scaled, inputs=True)[:1], round_to(kind, x[:1], inputs=True))
    assert torch.equal(round_to(kind, x, inputs=True), x) == (kind == "int4")


def test_gradients_pass_straight_through():
    x = torch.randn(4, 32, requires_grad=True)
    rounded = straight_through(x, round_to("int4", x.detach()))
    rounded.square().sum().backward()
    assert torch.equal(rounded, round_to("int4", x.detach()))
    assert torch.equal(x.grad, 2 * rounded)


@pytest.mark.parametrize("rank", [0, 2])
def test_an_aware_student_computes_as_its_rounded_weights_with_and_without_gradient(rank):
    """With an adapter, the sum of weight and adapter is rounded: as a network that was merged and then rounded."""
    student = aware(wide_model(), "int4", rank)
    with_gradient = velocity(student)
    with torch.no_grad():
        assert torch.equal(velocity(student), with_gradient)
    plain = wide_model()
    backbone = Backbone(plain, ALONE, trained=True, adapters={"student": AdapterConfig(rank=rank)} if rank else None)
    other = Trainable("student", backbone, student.config)
    assert [*other.weights] == [*student.weights]  # names, as in checkpoints
    for key, weight in other.weights.items():
        weight.data.copy_(student.weights[key])
    unrounded = velocity(other).detach()
    if rank:
        other.merge()
    with torch.no_grad():
        for layer in linear_layers(plain).values():
            layer.weight.copy_(round_to("int4", layer.weight))
        torch.testing.assert_close(velocity(other), with_gradient, rtol=1e-4, atol=1e-5)
    assert float((with_gradient.detach() - unrounded).norm() / unrounded.norm()) > 0.01
    student.backward(with_gradient.square().mean(), last=True)
    assert all(p.grad is not None and bool(p.grad.any()) for key, p in student.weights.items() if "blocks.0" in key)
    assert student.weights[next(iter(student.weights))].dtype == torch.float32


def test_passes_in_bf16_round_the_weights_that_ranks_gather_in_bf16():
    """FSDP gathers the weights in bf16, so that a rank alone rounds them to it first."""
    student, half = (aware(wide_model(), precision="bf16") for _ in range(2))
    with torch.no_grad():
        for layer in linear_layers(next(iter(half.backbones.values())).model).values():
            layer.weight.copy_(layer.weight.bfloat16().float())
        assert torch.equal(velocity(student), velocity(half))


def test_a_frozen_role_computes_in_int8():
    plan = RolePlan(
        Frozen, RoleConfig(path="tiny", quantize="int8"), "tiny", layout_for("t", Frozen, RoleConfig(), "tiny")
    )
    plain = replace(plan, config=RoleConfig(path="tiny"))
    roles = load_roles({"teacher": plan, "other": plain}, ALONE)
    layers = linear_layers(next(iter(roles["teacher"].backbones.values())).model)
    assert {type(layer.weight.data) for layer in layers.values()} == {Int8Tensor}
    assert type(roles["teacher"].network.proj_out.weight.data) is torch.Tensor
    off = velocity(roles["teacher"]) - velocity(roles["other"])
    assert 1e-4 < float(off.norm() / velocity(roles["other"]).norm()) < 0.02
    assert "weights of the blocks int8" in roles["teacher"].precision


def test_products_of_a_trained_role_are_fp8_in_its_blocks_alone():
    model = small_model()
    names = [key for key, _ in model.network.named_parameters()]
    wrap(model, "fp8", "products", ALONE)
    assert {type(layer) for layer in linear_layers(model).values()} == {Float8Linear}
    assert type(model.network.proj_out) is nn.Linear
    assert [key for key, _ in model.network.named_parameters()] == names


def test_a_size_that_does_not_divide_is_named():
    with pytest.raises(UserError, match=r"student\.quantize int4: layer blocks\.0\..* has 24 inputs .* by 32 and 1"):
        check_sizes(small_model(), "int4", "student.quantize")


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_a_written_folder_reads_back_and_is_not_trained(tmp_path, kind):
    source = WanModel(WanTransformer3DModel.from_pretrained(WAN / "transformer"))
    layers = linear_layers(source)
    (tmp_path / "transformer").mkdir()
    quantise_folder(source.network.requires_grad_(False), layers, tmp_path / "transformer", kind)
    (tmp_path / "model_index.json").write_text('{"_class_name": "WanPipeline"}')
    read = FAMILY.model(tmp_path, "transformer")
    read.read(ALONE)
    with torch.no_grad():
        assert torch.equal(read.velocity(*read.example()), source.velocity(*source.example()))
    with pytest.raises(UserError, match="its weights are quantised"):
        outline(type(source.network), tmp_path / "transformer")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--student.quantize", "int4"], "student.quantize int4: no weight of so few bits is trained"),
        (["--student.quantize-aware"], "student.quantize_aware needs student.quantize"),
        (["--critic.quantize", "int8", "--critic.quantize-aware"], "critic.quantize_aware: the student alone"),
        (["--teacher.quantize", "int4"], "teacher.quantize int4: a frozen role has int8 or fp8"),
        (["--teacher.quantize", "fp8"], "teacher.quantize fp8: cpu has no products of fp8"),
        (["--student.quantize", "fp8"], "student.quantize fp8: cpu has no products of fp8"),
        (
            ["--student.sparse-attention.share", "0.5", *AWARE],
            "export --quantize writes no flow map",
        ),
    ],
)
def test_what_cannot_be_quantised_is_refused(tmp_path, capsys, words, said):
    assert main(["--method", "dmd2", "--device", "cpu", "--output", str(tmp_path / "run"), *words]) == 2
    assert said in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_run_that_rounds_resumes_and_is_exported(tmp_path, monkeypatch, capsys):
    """Rollout and replay round alike, so the ratio is 1; the checkpoint holds plain weights; evaluate reads int8."""
    monkeypatch.chdir(tmp_path)
    small = words_of({"device": "cpu", "validate-every": 0, "video.frames": 5, "video.height": 32, "video.width": 32})
    small += ["--sampler.num-steps", "2"]
    run = ["--method", "dance_grpo", *small, *AWARE, "--student.adapter.rank", "2", "--output", "run"]
    assert main([*run, "--steps", "1"]) == 0
    assert main(["export", "run", "plain", "--dtype", "bf16"]) == 0
    assert main(["export", "run", "int8", "--dtype", "bf16", "--quantize", "int8"]) == 0
    assert "quantization_config" in json.loads((tmp_path / "int8/transformer/config.json").read_text())
    capsys.readouterr()
    prompt = ["--prompts", "a red circle moving left", "--device", "cpu", "--sampler.num-steps", "2"]
    assert main(["evaluate", "plain", "int8", "run", *prompt]) == 0
    for words in (
        ["merge", "int8", "out", "--adapters", "none"],
        ["extract-adapter", "int8", "out", "--base", "tiny"],
        ["extract-adapter", "tiny", "out", "--base", "int8"],
        ["import-weights", "plain", "out", "--base", "int8"],
        ["export", "run", "out", "--base", "int8"],
    ):
        assert "int8/transformer/config.json: its weights are quantised" in refused(capsys, *words)
    assert "torchao rounded its weights" in refused(capsys, "import-weights", "int8", "out", "--base", "tiny")
    assert not (tmp_path / "out").exists()
    assert main(["--method", "finetune", "--student.path", "int8", "--device", "cpu", "--recipe", "tiny"]) == 2
    assert "its weights are quantised" in " ".join(capsys.readouterr().err.split())
