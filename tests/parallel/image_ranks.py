"""Networks that read images, whose tokens two ranks share.

The program of the ranks of tests/parallel/test_image_ranks.py: `python image_ranks.py FOLDER` writes into FOLDER.

The test compares with the same functions on one rank.
"""

import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from helpers import ALONE, CAPTIONS, CPU
from i2v_folder import i2v_folder
from ti2v_folder import ti2v_folder

from unified_trainer.basics.requests import Image, Request
from unified_trainer.basics.types import Batch
from unified_trainer.data.loader import make_batch
from unified_trainer.models.base import Family
from unified_trainer.models.encoders import EncoderConfig
from unified_trainer.models.wan.family import WAN
from unified_trainer.parallel.fsdp import full
from unified_trainer.parallel.mesh import Mesh, ParallelConfig
from unified_trainer.roles import blocks
from unified_trainer.roles.backbone import Backbone
from unified_trainer.roles.role import Trainable, TrainableConfig


@dataclass(frozen=True)
class Kind:
    family: Family
    write: Callable[[Path], Path]
    size: tuple[int, int, int]  # frames, height, width: two ranks share an odd number of tokens
    first: str  # part of the name of a weight that makes tokens
    images: bool = False
    compiled: bool = True

    @property
    def cases(self) -> tuple[str, ...]:
        """All kinds are compiled on one rank in tests/models, and one of each way to share tokens here."""
        return (
            "shared",
            *(("shared and compiled",) if self.compiled else ()),
            *(("compiled",) if self.family is WAN else ()),
        )


KINDS = {
    "ti2v": Kind(WAN, ti2v_folder, (9, 64, 64), "patch_embedding", images=True),  # noise levels of each token
    "i2v": Kind(WAN, partial(i2v_folder, clip=True), (9, 64, 64), "patch_embedding", images=True),
}


def folders(root: Path) -> None:
    for name, kind in KINDS.items():
        kind.write(root / name)


def batch_of(folder: Path) -> Batch:
    """Two samples, of one text and two images or of two texts;"""
    kind = KINDS[folder.name]
    codec, (_, *sides) = kind.family.codec(folder, CPU, EncoderConfig()), kind.size
    draw = np.random.default_rng(0)
    images = [Image.of(draw.integers(0, 255, (*sides, 3), dtype=np.uint8)) for _ in range(2)]
    text = 'a red circle that says "one"'
    requests = [Request(text, (image,)) for image in images] if kind.images else Request.of(CAPTIONS[:2])
    shape = codec.latent_shape(*kind.size)
    return make_batch(codec, requests, "", shape, prompt_ids=[0, 1], sample_ids=[0, 1])


def found(folder: Path, mesh: Mesh, *, compile: bool = False) -> dict[str, torch.Tensor]:
    """The velocities of a student, its gradients, that of its input, and the tokens of the middle block."""
    family = KINDS[folder.name].family
    backbone = Backbone(family.model(folder, family.networks(folder)[0][0]), mesh, trained=True, compile=compile)
    role, batch = Trainable("student", backbone, TrainableConfig()), batch_of(folder)
    x_t = torch.randn(2, *batch.latent_shape, generator=torch.Generator().manual_seed(0))
    velocity = role.velocity(x_t.requires_grad_(), torch.tensor([0.3, 0.9]), batch.cond)
    role.backward((velocity - 1).square().mean(), last=True)
    weights = {f"gradients/{key}": p for key, p in role.weights.items()}  # compiled blocks give zeros in place of none
    gradients = {key: full(p.detach() * 0 if p.grad is None else p.grad).clone() for key, p in weights.items()}
    with torch.no_grad(), backbone.model.features() as seen:
        role.velocity(x_t, torch.tensor([0.3, 0.9]), batch.cond)
    return gradients | {"gradients/x_t": x_t.grad, "velocity": velocity.detach(), "features": seen[0]}


def work(root: Path) -> None:
    warnings.simplefilter("ignore")  # of Dynamo about itself
    blocks.BACKEND = "aot_eager"
    mesh, tensors = Mesh.join("cpu", ParallelConfig(sequence=2)), {}
    for name, kind in KINDS.items():
        for case in kind.cases:
            if mesh.is_main or case.startswith("shared"):
                where = mesh if case.startswith("shared") else ALONE
                values = found(root / name, where, compile=case.endswith("compiled"))
                tensors |= {f"{name}/{case}/{key}": value for key, value in values.items()}
    if mesh.is_main:
        save_file({key: value.contiguous() for key, value in tensors.items()}, root / "tensors.safetensors")
    mesh.barrier()


if __name__ == "__main__":
    work(Path(sys.argv[1]))
