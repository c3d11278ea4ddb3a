"""The program of the ranks of tests/parallel/test_image_ranks.py: `python image_ranks.py FOLDER` writes into FOLDER.

The test compares with the same functions on one rank.
"""

import sys
import warnings
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from helpers import ALONE, CPU
from i2v_folder import i2v_folder
from ti2v_folder import ti2v_folder

from unified_trainer.basics.requests import Image, Request
from unified_trainer.basics.types import Batch
from unified_trainer.data.loader import make_batch
from unified_trainer.models.encoders import EncoderConfig
from unified_trainer.models.wan.family import WAN
from unified_trainer.parallel.fsdp import full
from unified_trainer.parallel.mesh import Mesh, ParallelConfig
from unified_trainer.roles import blocks
from unified_trainer.roles.backbone import Backbone
from unified_trainer.roles.role import Trainable, TrainableConfig

KINDS = ("ti2v", "i2v")
SIZE = (9, 64, 64)  # frames, height, width: two ranks divide the second latent frame


def folders(root: Path) -> dict[str, Path]:
    """A folder of each kind: per-token noise levels, and image channels with tokens of CLIP."""
    return {"ti2v": ti2v_folder(root / "ti2v"), "i2v": i2v_folder(root / "i2v", clip=True)}


def batch_of(folder: Path) -> Batch:
    """Two samples, of one text and two images."""
    codec = WAN.codec(folder, CPU, EncoderConfig())
    draw = np.random.default_rng(0)
    images = [Image.of(draw.integers(0, 255, (64, 64, 3), dtype=np.uint8)) for _ in range(2)]
    requests = [Request("a red circle", (image,)) for image in images]
    shape = codec.latent_shape(*SIZE)
    return make_batch(codec, requests, codec.encode_text([""]), shape, prompt_ids=[0, 1], sample_ids=[0, 1])


def found(folder: Path, mesh: Mesh, *, compile: bool = False) -> dict[str, torch.Tensor]:
    """The velocities of a student, and its gradients."""
    name = WAN.networks(folder)[0][0]
    backbone = Backbone(WAN.model(folder, name), mesh, trained=True, compile=compile)
    role, batch = Trainable("student", backbone, TrainableConfig()), batch_of(folder)
    x_t = torch.randn(2, *batch.latent_shape, generator=torch.Generator().manual_seed(0))
    velocity = role.velocity(x_t, torch.tensor([0.3, 0.9]), batch.cond)
    role.backward((velocity - 1).square().mean(), last=True)
    gradients = {f"gradients/{key}": full(p.grad).clone() for key, p in role.weights.items() if p.grad is not None}
    return gradients | {"velocity": velocity.detach()}


def work(root: Path) -> None:
    warnings.simplefilter("ignore")  # of Dynamo about itself
    blocks.BACKEND = "aot_eager"
    mesh, tensors = Mesh.join("cpu", ParallelConfig(sequence=2)), {}
    for kind in KINDS:
        cases = {"shared": (mesh, False), "shared and compiled": (mesh, True)}
        if mesh.is_main:
            cases["compiled"] = ALONE, True
        for case, (where, compile) in cases.items():
            values = found(root / kind, where, compile=compile)
            tensors |= {f"{kind}/{case}/{key}": value for key, value in values.items()}
    if mesh.is_main:
        save_file({key: value.contiguous() for key, value in tensors.items()}, root / "tensors.safetensors")
    mesh.barrier()


if __name__ == "__main__":
    work(Path(sys.argv[1]))
