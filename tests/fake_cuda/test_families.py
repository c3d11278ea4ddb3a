"""Two blocks of every published network at real size on a fake GPU: devices, dtypes, and kernels of attention.

A device that differs, or a number that is read from the device, is an error of the fake device.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from diffusers import (
    HunyuanVideo15Transformer3DModel,
    LTX2VideoTransformer3DModel,
    LTXVideoTransformer3DModel,
    QwenImageTransformer2DModel,
    SD3Transformer2DModel,
    WanTransformer3DModel,
)

if not torch.cuda.is_available():
    pytest.skip("needs the CUDA build of torch and a driver: make fake-cuda", allow_module_level=True)

from fake import CUDA, Kernels, fake_cuda, moved

from unified_trainer.basics.types import Condition
from unified_trainer.models.hunyuan15.codec import GLYPHS
from unified_trainer.models.hunyuan15.image_model import SIGLIP_TOKENS, ImageHunyuan15Model
from unified_trainer.models.hunyuan15.model import Hunyuan15Model
from unified_trainer.models.ltx.model import LtxModel
from unified_trainer.models.ltx2.layout import with_sound
from unified_trainer.models.ltx2.model import Ltx2Model
from unified_trainer.models.qwen_image.model import QwenImageModel
from unified_trainer.models.sd3.model import SD3Model
from unified_trainer.models.wan.configs import CLIP_TOKENS
from unified_trainer.models.wan.image_model import FirstFrameWanModel, ImageChannelsWanModel
from unified_trainer.models.wan.model import WanModel
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.roles.backbone import Backbone
from unified_trainer.roles.learner import Learner
from unified_trainer.roles.role import Trainable, TrainableConfig
from unified_trainer.tools.plan.architecture import PUBLISHED

LAYERS = 2
SD3_MEDIUM = {"sample_size": 128, "num_attention_heads": 24, "attention_head_dim": 64, "joint_attention_dim": 4096}
SD3_MEDIUM |= {"caption_projection_dim": 1536, "pooled_projection_dim": 2048, "pos_embed_max_size": 384}
SD3_MEDIUM |= {"qk_norm": "rms_norm", "dual_attention_layers": (0,)}  # of the first 13 of 24 blocks; here of one of two


@dataclass(frozen=True)
class Case:
    """A network and what a sample of it reads: shapes without the axis of samples."""

    network: type[Any]
    model: Callable[[Any], Any]
    config: dict[str, Any]
    latents: tuple[int, ...]
    condition: dict[str, tuple[int, ...]]
    attentions: int  # calls of a pass

    def student(self) -> Trainable:
        """The architecture with fewer blocks, trained in bf16."""
        sizes = {key: value for key, value in self.config.items() if not key.startswith("_")}
        with torch.device("meta"):
            network = moved(self.network(**sizes | {"num_layers": LAYERS}))
        backbone = Backbone(self.model(network), Mesh(CUDA), trained=True, half_passes=True)
        return Trainable("student", backbone, TrainableConfig(precision="bf16"))

    def inputs(self) -> tuple[torch.Tensor, torch.Tensor, Condition]:
        held = {key: torch.empty(2, *shape, device=CUDA) for key, shape in self.condition.items()}
        held |= {key: value.bool() for key, value in held.items() if key.endswith("_mask")}
        sigma = torch.empty(2, dtype=torch.float64)  # noise levels are on the CPU
        return torch.empty(2, *self.latents, device=CUDA), sigma, Condition(held)


def wan(name: str, model: type[WanModel], latents: tuple[int, ...], **held: tuple[int, ...]) -> Case:
    config, cond = PUBLISHED[f"Wan-AI/{name}-Diffusers"].transformer, {"text": (512, 4096), **held}
    attentions = LAYERS * (3 if "clip" in held else 2)
    return Case(WanTransformer3DModel, model, config, latents, cond, attentions)


def hunyuan15(kind: str, model: type[Hunyuan15Model], **held: tuple[int, ...]) -> Case:
    config = PUBLISHED[f"hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_{kind}"].transformer
    text = {"text": (1000, 3584), "text_mask": (1000,), "glyphs": (GLYPHS, 1472), "glyphs_mask": (GLYPHS,)}
    refined = LAYERS + 2  # with the attentions of the text's refiner
    return Case(HunyuanVideo15Transformer3DModel, model, config, (32, 31, 30, 52), text | held, refined)


def ltx(**held: tuple[int, ...]) -> Case:
    config, text = PUBLISHED["Lightricks/LTX-Video"].transformer, {"text": (128, 4096), "text_mask": (128,)}
    return Case(LTXVideoTransformer3DModel, LtxModel, config, (128, 21, 15, 22), text | held, 2 * LAYERS)


OF_480P, OF_5B = (16, 21, 60, 104), (48, 31, 44, 80)
CLIP = {"image": OF_480P, "clip": (CLIP_TOKENS, 1280)}
CASES = {
    "Wan2.1-T2V-14B": wan("Wan2.1-T2V-14B", WanModel, OF_480P),
    "Wan2.1-I2V-14B": wan("Wan2.1-I2V-14B-480P", ImageChannelsWanModel, OF_480P, **CLIP),
    "Wan2.2-T2V-A14B": wan("Wan2.2-T2V-A14B", WanModel, OF_480P),
    "Wan2.2-I2V-A14B": wan("Wan2.2-I2V-A14B", ImageChannelsWanModel, OF_480P, image=OF_480P),
    "Wan2.2-TI2V-5B of text": wan("Wan2.2-TI2V-5B", FirstFrameWanModel, OF_5B),
    "Wan2.2-TI2V-5B of an image": wan("Wan2.2-TI2V-5B", FirstFrameWanModel, OF_5B, image=(48, 1, 44, 80)),
    "Qwen-Image": Case(
        QwenImageTransformer2DModel,
        QwenImageModel,
        PUBLISHED["Qwen/Qwen-Image"].transformer,
        (16, 1, 166, 166),
        {"text": (512, 3584), "text_mask": (512,)},
        LAYERS,
    ),
    "SD3.5-medium": Case(
        SD3Transformer2DModel,
        SD3Model,
        SD3_MEDIUM,
        (16, 1, 128, 128),
        {"text": (333, 4096), "pooled": (2048,)},
        LAYERS + 1,
    ),
    "HunyuanVideo-1.5 of text": hunyuan15("t2v", Hunyuan15Model),
    "HunyuanVideo-1.5 of an image": hunyuan15(
        "i2v", ImageHunyuan15Model, image=(32, 1, 30, 52), siglip=(SIGLIP_TOKENS, 1152)
    ),
    "LTX-Video of text": ltx(),
    "LTX-Video of an image": ltx(image=(128, 1, 15, 22)),
    "LTX-2": Case(
        LTX2VideoTransformer3DModel,
        Ltx2Model,
        PUBLISHED["Lightricks/LTX-2"].transformer,
        with_sound((128, 16, 16, 24)),
        {"text": (1024, 3840), "sound_text": (1024, 3840)},
        6 * LAYERS,  # of video and sound: each by itself, with the text, and with the other
    ),
}


def passed(case: Case, role: Trainable, *, gradient: bool) -> Kernels:
    """What a pass launches."""
    with torch.set_grad_enabled(gradient), Kernels() as seen:
        velocity = role.velocity(*case.inputs())
    assert velocity.device == CUDA and velocity.dtype == torch.float32 and velocity.shape[1:] == case.latents
    return seen


@pytest.mark.parametrize("name", CASES)
def test_rollout_and_update_launch_the_same_kernels(name):
    """Without gradient and with it: as many kernels, the same calls of attention in bf16, and no cast of a weight."""
    case = CASES[name]
    with fake_cuda():
        role = case.student()
        passed(case, role, gradient=False)  # rounds the weights
        rollout, update = (passed(case, role, gradient=gradient) for gradient in (False, True))
    assert rollout.attention == update.attention and rollout.launched == update.launched
    assert rollout.casts == update.casts == []
    assert len(update.attention) == case.attentions
    for _, *tensors in update.attention:
        assert {dtype for dtype, *_ in tensors[:3]} == {torch.bfloat16}


@pytest.mark.parametrize("name", CASES)
def test_an_update_of_all_weights_stays_on_the_device(name):
    """Every weight that the velocity depends on has a gradient in float32, and the fused AdamW takes them all."""
    case = CASES[name]
    with fake_cuda():
        role = case.student()
        weights = role.backbones[""].weights("student")
        role.velocity(*case.inputs()).square().mean().backward()
        gradients = {key: p.grad for key, p in weights.items() if p.grad is not None}
        with Kernels() as seen:
            Learner("student", weights, role.config).step(1.0)
    assert {(one.device, one.dtype) for one in gradients.values()} == {(CUDA, torch.float32)}
    # In the last block of joint attention nothing reads the text that it returns; a text comes without an image.
    unread = (f"transformer_blocks.{LAYERS - 1}.", "image_embedder.")
    assert all(key.startswith(unread) for key in weights.keys() - gradients.keys())
    assert seen.updates == 1
