"""The family of all pipelines of diffusers that no other family opens."""

import inspect
from collections.abc import Mapping
from pathlib import Path

import diffusers
import torch

from unified_trainer.basics.input_files import read_json
from unified_trainer.models.base import Family, Shape
from unified_trainer.models.encoders import EncoderConfig
from unified_trainer.models.pipeline.blueprint import blueprint
from unified_trainer.models.pipeline.calls import SIZES
from unified_trainer.models.pipeline.codec import JointCodec, PipelineCodec, SoundCodec
from unified_trainer.models.pipeline.known import known
from unified_trainer.models.pipeline.model import open_model
from unified_trainer.models.pipeline.sequence import heads_of


def latent_shape(folder: Path, frames: int, height: int, width: int) -> Shape:
    """Return the shape of latents; UserError for a size that the pipeline does not make."""
    return known(folder).of_size((frames, height, width)).shape


def images(folder: Path) -> tuple[int, int]:
    """Return the fewest and the most condition images of a sample."""
    found = known(folder).any().arguments
    return (1, max(1, len(clips(folder)))) if found.images or found.joint else (0, 0)


def clips(folder: Path) -> tuple[str, ...]:
    """Return the arguments of the call that take the condition clips of a sample."""
    return known(folder).pipeline.clips


def networks(folder: Path) -> tuple[tuple[str, ...], float | None]:
    """Return the networks, of high noise first, and the level at which they meet."""
    index = read_json(folder / "model_index.json")
    level = index.get("boundary_ratio")
    return tuple(known(folder).pipeline.networks), level if isinstance(level, float) else None


def open_codec(folder: Path, device: torch.device, config: EncoderConfig) -> PipelineCodec:
    """Open text encoders and VAE."""
    facts = known(folder).any()
    kind = SoundCodec if facts.sound else JointCodec if facts.arguments.joint else PipelineCodec
    return kind.load(folder, device, config)


def attention_heads(folder: Path) -> int:
    """Return the heads that sequence ranks divide; 1 where they cannot share tokens."""
    pipeline = known(folder).pipeline
    return heads_of(pipeline.pipe.components[pipeline.networks[0]])


def guidance(folder: Path, scale: float, config: EncoderConfig) -> Mapping[str, float]:
    """Return the arguments of the call that guide with w; several pipelines write cond + (w - 1) (cond - uncond)."""
    facts = known(folder).any()
    given = dict(facts.no_guidance)
    own = "true_cfg_scale" if "true_cfg_scale" in given else "" if facts.guidance else "guidance_scale"
    if facts.guidance:  # the scale of the call is the one in the network
        del given["guidance_scale"]
        given |= {} if config.embedded_guidance is None else {"guidance_scale": config.embedded_guidance}
    return given | {name: scale - facts.rule.more for name in (own, f"audio_{own}") if name in given}


def general_recipe(folder: Path) -> tuple[str, Mapping[str, int]]:
    """Return the recipe of images or of videos, and the size that the pipeline's call or its attributes name."""
    pipeline = known(folder).pipeline
    held, size = vars(pipeline.pipe), dict[str, int]()
    if {"default_sample_size", "vae_scale_factor"} <= held.keys() and isinstance(held["default_sample_size"], int):
        size |= dict.fromkeys(("height", "width"), held["default_sample_size"] * held["vae_scale_factor"])
    for name in SIZES.keys() & pipeline.names.keys():
        given = pipeline.names[name].default
        size |= {"frames" if name == "num_frames" else name: given} if isinstance(given, int) else {}
    return "general-videos" if pipeline.makes_videos else "general-images", size


def pipeline_family(name: str) -> Family:
    """Return the family of a pipeline class of diffusers, which learns from the pipeline's own call."""
    kind = getattr(diffusers, name)
    rate = inspect.signature(kind.__call__).parameters.get("frame_rate")
    has_guider = "guider" in inspect.signature(kind.__init__).parameters
    return Family(
        pipelines=(name,),
        model=open_model,
        # a codec of each class: roles of two classes read no conditions of each other
        codec=lambda folder, device, config: open_codec(folder, device, config),
        latent_channels=lambda folder: known(folder).any().latents.shape[0],
        latent_shape=latent_shape,
        tokens=lambda folder, shape: known(folder).of_shape(shape).tokens.count,
        attention_heads=attention_heads,
        networks=networks,
        images=images,
        clips=clips,
        sound=lambda folder: known(folder).any().sound is not None,
        latents_hold_image=lambda folder: known(folder).any().latents_hold_image,
        guider="guider/guider_config.json" if has_guider else "",
        fps=None if rate is None else float(rate.default),
        given_levels=lambda folder: known(folder).any().given_levels,
        guidance=guidance,
        general_recipe=general_recipe,
        blueprint=blueprint,
        describe=lambda folder, size: str(known(folder).of_size(size)),
    )
