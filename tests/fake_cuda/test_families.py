"""Two blocks of every published network at real size on a fake GPU: devices, dtypes, and kernels of attention.

A device that differs, or a number that is read from the device, is an error of the fake device.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import WanTransformer3DModel

if not torch.cuda.is_available():
    pytest.skip("needs the CUDA build of torch and a driver: make fake-cuda", allow_module_level=True)

from fake import CUDA, Kernels, fake_cuda, moved

from unified_trainer.basics.types import Condition
from unified_trainer.models.pipeline.known import known
from unified_trainer.models.wan.configs import CLIP_TOKENS
from unified_trainer.models.wan.image_model import FirstFrameWanModel, ImageChannelsWanModel
from unified_trainer.models.wan.model import WanModel
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.roles.backbone import Backbone
from unified_trainer.roles.learner import Learner
from unified_trainer.roles.role import Trainable, TrainableConfig
from unified_trainer.run.registry import family_of
from unified_trainer.tools.plan.architecture import published, published_folder

LAYERS = 2


@dataclass(frozen=True)
class Case:
    """A network and what a sample of it reads: shapes without the axis of samples."""

    network: type[Any]
    model: Callable[[Any], Any]
    config: dict[str, Any]
    latents: tuple[int, ...]
    condition: dict[str, tuple[tuple[int, ...], torch.dtype]]
    attentions: int  # calls of a pass

    def student(self) -> Trainable:
        """The architecture with fewer blocks, trained in bf16."""
        sizes = {key: value for key, value in self.config.items() if not key.startswith("_")}
        with torch.device("meta"):
            network = moved(self.network(**sizes | {"num_layers": LAYERS}))
        backbone = Backbone(self.model(network), Mesh(CUDA), trained=True, half_passes=True)
        return Trainable("student", backbone, TrainableConfig(precision="bf16"))

    def inputs(self) -> tuple[torch.Tensor, torch.Tensor, Condition]:
        held = {key: torch.empty(2, *shape, dtype=dtype, device=CUDA) for key, (shape, dtype) in self.condition.items()}
        sigma = torch.empty(2, dtype=torch.float64)  # noise levels are on the CPU
        return torch.empty(2, *self.latents, device=CUDA), sigma, Condition(held)


def wan(name: str, model: type[WanModel], latents: tuple[int, ...], **held: tuple[int, ...]) -> Callable[[Path], Case]:
    attentions, shapes = LAYERS * (3 if "clip" in held else 2), {"text": (512, 4096), **held}
    config = published()[f"Wan-AI/{name}-Diffusers"]["transformer"]
    condition = {key: (shape, torch.float32) for key, shape in shapes.items()}
    return lambda folder: Case(WanTransformer3DModel, model, config, latents, condition, attentions)


def learned(
    name: str, size: tuple[int, int, int], attentions: int, kind: str = "", **changes: object
) -> Callable[[Path], Case]:
    """The case of a pipeline, of another class than the published one with `kind`, and with changes of the network.

    It is learned with fewer blocks too, which takes seconds in place of minutes.
    """

    def case(folder: Path) -> Case:
        shutil.copytree(published_folder(name), folder, dirs_exist_ok=True)
        config, index = folder / "transformer" / "config.json", folder / "model_index.json"
        sizes = json.loads(config.read_text()) | {"num_layers": LAYERS} | changes
        config.write_text(json.dumps(sizes))
        index.write_text(json.dumps(json.loads(index.read_text()) | ({"_class_name": kind} if kind else {})))
        family, _ = family_of("student", str(folder))
        facts, model = known(folder).of_size(size), family.blueprint(folder).model
        arguments = {**facts.arguments.text, **facts.arguments.images}
        condition = {key: (argument.shape, argument.dtype) for key, argument in arguments.items()}
        return Case(model.network_class, model, sizes, facts.shape, condition, attentions)

    return case


OF_480P, OF_5B = (16, 21, 60, 104), (48, 31, 44, 80)
CLIP = {"image": OF_480P, "clip": (CLIP_TOKENS, 1280)}
HUNYUAN, LTX = "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p", "Lightricks/LTX-Video"
CASES = {
    "Wan2.1-T2V-14B": wan("Wan2.1-T2V-14B", WanModel, OF_480P),
    "Wan2.1-I2V-14B": wan("Wan2.1-I2V-14B-480P", ImageChannelsWanModel, OF_480P, **CLIP),
    "Wan2.2-T2V-A14B": wan("Wan2.2-T2V-A14B", WanModel, OF_480P),
    "Wan2.2-I2V-A14B": wan("Wan2.2-I2V-A14B", ImageChannelsWanModel, OF_480P, image=OF_480P),
    "Wan2.2-TI2V-5B of text": wan("Wan2.2-TI2V-5B", FirstFrameWanModel, OF_5B),
    "Wan2.2-TI2V-5B of an image": wan("Wan2.2-TI2V-5B", FirstFrameWanModel, OF_5B, image=(48, 1, 44, 80)),
    "Qwen-Image": learned("Qwen/Qwen-Image", (1, 1328, 1328), LAYERS),
    "SD3.5-medium": learned(  # blocks with a second attention are the first 13 of 24, and here one of two
        "stabilityai/stable-diffusion-3.5-medium", (1, 1024, 1024), LAYERS + 1, dual_attention_layers=(0,)
    ),
    # with the attentions of the text's refiner
    "HunyuanVideo-1.5 of text": learned(f"{HUNYUAN}_t2v", (121, 480, 832), LAYERS + 2),
    "HunyuanVideo-1.5 of an image": learned(f"{HUNYUAN}_i2v", (121, 480, 832), LAYERS + 2),
    "LTX-Video of text": learned(LTX, (161, 480, 704), 2 * LAYERS),
    "LTX-Video of an image": learned(LTX, (161, 480, 704), 2 * LAYERS, "LTXImageToVideoPipeline"),
    # of video and sound: each by itself, with the text, and with the other
    "LTX-2": learned("Lightricks/LTX-2", (121, 512, 768), 6 * LAYERS),
}


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory):
    """A case, for both tests: a pipeline is learned once."""
    return CASES[request.param](tmp_path_factory.mktemp("folder"))


def passed(case: Case, role: Trainable, *, gradient: bool) -> Kernels:
    """What a pass launches."""
    with torch.set_grad_enabled(gradient), Kernels() as seen:
        velocity = role.velocity(*case.inputs())
    assert velocity.device == CUDA and velocity.dtype == torch.float32 and velocity.shape[1:] == case.latents
    return seen


def test_rollout_and_update_launch_the_same_kernels(case):
    """Without gradient and with it: as many kernels, the same calls of attention in bf16, and no cast of a weight."""
    with fake_cuda():
        role = case.student()
        passed(case, role, gradient=False)  # rounds the weights
        rollout, update = (passed(case, role, gradient=gradient) for gradient in (False, True))
    assert rollout.attention == update.attention and rollout.launched == update.launched
    assert rollout.casts == update.casts == []
    assert len(update.attention) == case.attentions
    for _, *tensors in update.attention:
        assert {dtype for dtype, *_ in tensors[:3]} == {torch.bfloat16}


def test_an_update_of_all_weights_stays_on_the_device(case):
    """Every weight that the velocity depends on has a gradient in float32, and the fused AdamW takes them all."""
    with fake_cuda():
        role = case.student()
        weights = role.backbones[""].weights("student")
        role.velocity(*case.inputs()).square().mean().backward()
        gradients = {key: p.grad for key, p in weights.items() if p.grad is not None}
        with Kernels() as seen:
            Learner("student", weights, role.config).step(1.0)
    assert {(one.device, one.dtype) for one in gradients.values()} == {(CUDA, torch.float32)}
    # In the last block of joint attention nothing reads the text that it returns.
    assert all(key.startswith(f"transformer_blocks.{LAYERS - 1}.") for key in weights.keys() - gradients.keys())
    assert seen.updates == 1
