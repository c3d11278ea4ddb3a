"""Wan2.1-1.3B's blocks at real size on a fake GPU: devices, dtypes, kernels of attention, and casts of weights."""

import pytest
import torch
from diffusers import WanTransformer3DModel

if not torch.cuda.is_available():
    pytest.skip("needs the CUDA build of torch and a driver: make fake-cuda", allow_module_level=True)

from fake import CUDA, Fused, Kernels, fake_cuda, moved

from unified_trainer.basics.types import Condition
from unified_trainer.models.wan.causal import CausalWanModel
from unified_trainer.models.wan.model import WanModel
from unified_trainer.numerics.chunks import ChunkConfig
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.roles import blocks
from unified_trainer.roles.backbone import Backbone
from unified_trainer.roles.role import Trainable, TrainableConfig

LAYERS = 2
LATENTS = {"480x832x81": (21, 60, 104), "240x416x53": (14, 30, 52)}


def student(model=WanModel, *, layers: int = LAYERS, compile: bool = False) -> Trainable:
    """The architecture of Wan2.1-1.3B with fewer blocks, trained in bf16."""
    with torch.device("meta"):
        network = moved(WanTransformer3DModel(num_layers=layers, num_attention_heads=12, ffn_dim=8960))
    backbone = Backbone(model(network), Mesh(CUDA), trained=True, half_passes=True, compile=compile)
    return Trainable("student", backbone, TrainableConfig(precision="bf16"))


def inputs(size: str, samples: int = 1) -> tuple[torch.Tensor, torch.Tensor, Condition]:
    x_t = torch.empty(samples, 16, *LATENTS[size], device=CUDA)
    sigma = torch.empty(samples, dtype=torch.float64)  # noise levels are on the CPU
    return x_t, sigma, Condition({"text": torch.empty(samples, 512, 4096, device=CUDA)})


def passed(role: Trainable, size: str, *, gradient: bool) -> Kernels:
    """What a pass launches."""
    with torch.set_grad_enabled(gradient), Kernels() as seen:
        velocity = role.velocity(*inputs(size))
    assert velocity.device == CUDA and velocity.dtype == torch.float32
    return seen


@pytest.mark.parametrize("size", LATENTS)
def test_a_pass_casts_no_weight_and_attends_in_bf16(size):
    """A device that differs, or a number that is read from the device, is an error of the fake device."""
    with fake_cuda():
        role = student()
        passed(role, size, gradient=True)  # rounds the weights
        seen = passed(role, size, gradient=True)
    assert seen.casts == []
    assert len(seen.attention) == 2 * LAYERS
    for _, query, key, value in seen.attention:
        assert {query[0], key[0], value[0]} == {torch.bfloat16} and query[1][1] == 12 and query[1][3] == 128


@pytest.mark.parametrize("size", LATENTS)
def test_rollout_and_update_attend_with_the_same_calls(size):
    """The same kernel, with the same shapes, dtypes and strides of its inputs, without gradient and with it."""
    with fake_cuda():
        role = student()
        passed(role, size, gradient=False)  # rounds the weights
        rollout, update = (passed(role, size, gradient=gradient) for gradient in (False, True))
    assert rollout.attention == update.attention
    assert rollout.launched == update.launched


def test_a_causal_student_with_a_cache_stays_on_the_device():
    with fake_cuda():
        role = student(CausalWanModel)
        x_t, sigma, cond = inputs("240x416x53")
        with role.running() as model, torch.no_grad(), Kernels() as seen:
            cache = model.open_cache(ChunkConfig(3))
            for first in (0, 3):
                chunk = x_t[:, :, first : first + 3]
                velocity = model.velocity_cached(chunk, sigma, cond, cache)
                model.append(chunk, cond, cache)
    assert velocity.device == CUDA and cache.seen == 6
    assert {part[0] for call in seen.attention for part in call[1:]} == {torch.bfloat16}


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
)  # Dynamo's question
@pytest.mark.parametrize(("size", "uncompiled", "compiled"), [("480x832x81", 510e9, 150e9), ("240x416x53", 90e9, 30e9)])
def test_the_bytes_of_a_pass(size, uncompiled, compiled, monkeypatch):
    """Of 30 blocks, from those of one and of two, after the weights were rounded: elementwise work and norms.

    The first bound is between what was counted with diffusers' attention and casts of weights (577 GB) and now. Each
    norm of queries and keys is one kernel. All blocks share one compiled graph.
    """
    counts, fused = [], Fused()
    monkeypatch.setattr(blocks, "BACKEND", fused)
    with fake_cuda():
        for layers in (1, 2):
            role = student(layers=layers)
            passed(role, "240x416x53", gradient=False)
            counts.append(passed(role, size, gradient=False))
        with torch.no_grad():  # torch compiles nothing while `Kernels` counts
            student(compile=True).velocity(*inputs(size))
    one, two = counts
    for name, launched, unfused, bound in (
        ("uncompiled", two.launched - one.launched, two.unfused - one.unfused, uncompiled),
        ("compiled", fused.launched, fused.unfused, compiled),
    ):
        kernels, whole = 2 * one.launched - two.launched + 30 * launched, 2 * one.unfused - two.unfused + 30 * unfused
        print(f"{size} {name}: {kernels} kernels, {whole / 1e9:.0f} GB")
        assert whole < bound
    assert two.norms - one.norms == 4
    assert fused.graphs == 1
