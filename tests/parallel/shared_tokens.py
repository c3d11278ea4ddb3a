"""Networks of pipelines whose tokens two ranks, or four, share, beside the same on one rank.

The program of the ranks of tests/parallel/test_shared_tokens.py: `python shared_tokens.py FOLDER` writes into FOLDER.
"""

import os
import sys
import warnings
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import diffusers
import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from helpers import ALONE
from pipelines import save
from pipelines.images import IMAGES, flux_parts
from pipelines.videos import VIDEOS

from unified_trainer.basics.types import Condition
from unified_trainer.models.pipeline.arguments import ROWS
from unified_trainer.models.pipeline.facts import Facts
from unified_trainer.models.pipeline.known import known
from unified_trainer.models.pipeline.model import PipelineModel
from unified_trainer.parallel.fsdp import full
from unified_trainer.parallel.mesh import Mesh, ParallelConfig
from unified_trainer.roles import blocks
from unified_trainer.roles.backbone import Backbone
from unified_trainer.roles.role import Trainable, TrainableConfig

SHORT = 7  # tokens of a text, where its length is that of its tensors


@dataclass(frozen=True)
class Kind:
    """A pipeline and a way to run its network; all have an odd number of tokens of the sample or of what is joined."""

    pipeline: str
    size: tuple[int, int, int] = (1, 48, 48)
    how: dict[str, Any] = field(default_factory=dict)
    cut: bool = False  # whether texts have SHORT tokens
    times: bool = False  # whether each token has a time of its own


RECOMPUTED = {"recompute": "full"}
KINDS = {
    "flux": Kind("FluxPipeline", how={"compile": True, "recompute": "selective"}),
    "flux2": Kind("Flux2KleinPipeline"),
    "chroma": Kind("ChromaPipeline", how=RECOMPUTED),
    "qwen-image": Kind("QwenImagePipeline", how=RECOMPUTED, cut=True),
    "sd3": Kind("StableDiffusion3Pipeline", how={"recompute": "selective"}, cut=True),
    "z-image": Kind("ZImagePipeline"),
    "ltx": Kind("LTXPipeline", (17, 96, 32), RECOMPUTED),
    "ltx with a time per token": Kind("LTXPipeline", (17, 96, 32), times=True),
    "hunyuan15": Kind("HunyuanVideo15Pipeline", (9, 48, 48), RECOMPUTED, cut=True),
    "hunyuan": Kind("HunyuanVideoPipeline", (9, 48, 48)),
    "aura-flow": Kind("AuraFlowPipeline"),
    "bria": Kind("BriaPipeline"),
    "cogview4": Kind("CogView4Pipeline"),
    "longcat": Kind("LongCatImagePipeline"),
    "lumina2": Kind("Lumina2Pipeline"),
    "ovis": Kind("OvisImagePipeline"),
}
OF_FOUR = {"flux of four heads": Kind("FluxPipeline", how=RECOMPUTED)}


def kinds(ranks: int) -> dict[str, Kind]:
    """Return the kinds of so many ranks, by name."""
    return KINDS if ranks == 2 else OF_FOUR


def prepare(root: Path, ranks: int) -> None:
    """Write the folders and learn from them, once for all ranks that are copies of this process."""
    for kind in kinds(ranks).values():
        folder = root / str(ranks) / kind.pipeline
        if not folder.exists():
            save(four_heads, folder) if ranks == 4 else (IMAGES | VIDEOS)[kind.pipeline].write(folder)
        known(folder).of_size(kind.size)


def four_heads() -> diffusers.DiffusionPipeline:
    """Return FLUX.1 with four heads, and with three blocks of each kind."""
    sizes = {"in_channels": 64, "num_layers": 3, "num_single_layers": 3, "guidance_embeds": True}
    heads = {"attention_head_dim": 8, "num_attention_heads": 4, "axes_dims_rope": (4, 2, 2)}
    network = diffusers.FluxTransformer2DModel(joint_attention_dim=32, pooled_projection_dim=32, **heads, **sizes)
    return diffusers.FluxPipeline(**flux_parts() | {"transformer": network})


def condition_of(kind: Kind, facts: Facts, cond: Condition) -> Condition:
    """Return a condition of texts of several lengths; their masks are of zeros and ones."""
    held = dict(cond.tensors)
    for name, argument in facts.arguments.text.items():
        if "mask" in name:
            held[name] = torch.ones_like(held[name])
            held[name][-1, 3:5] = 0
        if kind.cut and held[name].ndim > 1 and len(argument.shape) + ("mask" in name) == 2:
            held[name] = held[name][:, :SHORT]
        if argument.listed and facts.arguments.counted is None:
            held[name + ROWS] = torch.tensor([SHORT, 40])
    return Condition(held)


def found(folder: Path, kind: Kind, mesh: Mesh, **how: Any) -> dict[str, torch.Tensor]:
    """The velocities of a student, its gradients, that of its input, and the features of passes that go on or end."""
    facts = known(folder).of_size(kind.size)
    backbone = Backbone(PipelineModel.open(folder, "transformer"), mesh, trained=True, **how)
    role, tokens = Trainable("student", backbone, TrainableConfig()), facts.latents.native[0]
    if kind.times:
        time, times = facts.times[0].name, torch.linspace(0, 1, tokens)
        backbone.model.network.register_forward_pre_hook(
            lambda _network, inputs, named: (
                inputs,
                named | {time: named[time][:, None] * times},
            ),
            with_kwargs=True,
        )
    x_t, _, cond = backbone.model.example(facts.latents.shape, 2)
    sigma, cond = torch.tensor([0.3, 0.9]), condition_of(kind, facts, cond)
    velocity = role.velocity(x_t.requires_grad_(), sigma, cond)
    role.backward((velocity - 1).square().mean(), last=True)
    weights = {f"gradients/{key}": p for key, p in role.weights.items()}  # compiled blocks give zeros in place of none
    tensors = {key: full(p.detach() * 0 if p.grad is None else p.grad).clone() for key, p in weights.items()}
    tensors |= {"gradients/x_t": x_t.grad, "velocity": velocity.detach()}
    for alone in (False, True) if facts.arguments.counted is None and facts.tokens.first is not None else ():
        with torch.no_grad(), backbone.model.features(alone=alone) as seen:
            role.velocity(x_t, sigma, cond)
        tensors[f"features/{alone}"] = seen[0]
    return tensors


def work(root: Path) -> None:
    warnings.simplefilter("ignore")  # of Dynamo about itself
    diffusers.logging.set_verbosity_error()
    blocks.BACKEND = "aot_eager"
    ranks = int(os.environ["WORLD_SIZE"])
    mesh, tensors = Mesh.join("cpu", ParallelConfig(sequence=ranks)), {}
    for name, kind in kinds(ranks).items():
        run = partial(found, root / str(ranks) / kind.pipeline, kind)
        tensors |= {f"{name}/shared/{key}": value for key, value in run(mesh, **kind.how).items()}
        if mesh.is_main:
            tensors |= {f"{name}/one/{key}": value for key, value in run(ALONE).items()}
    if mesh.is_main:
        save_file({key: value.contiguous() for key, value in tensors.items()}, root / f"{ranks}.safetensors")
    mesh.barrier()


if __name__ == "__main__":
    work(Path(sys.argv[1]))
