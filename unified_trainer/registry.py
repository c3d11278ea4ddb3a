"""The only module that names methods, families and rewards."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from unified_trainer.methods.base import Method
from unified_trainer.methods.consistency import Consistency, ConsistencyConfig
from unified_trainer.methods.dance_grpo import DanceGRPO, DanceGRPOConfig
from unified_trainer.methods.diffusion_nft import DiffusionNFT, DiffusionNFTConfig
from unified_trainer.methods.dmd2 import DMD2, DMD2Config
from unified_trainer.methods.finetune import Finetune, FinetuneConfig
from unified_trainer.methods.ode_init import ODEInit, ODEInitConfig
from unified_trainer.methods.reward_gradient import RewardGradient, RewardGradientConfig
from unified_trainer.methods.self_forcing import SelfForcing, SelfForcingConfig
from unified_trainer.models.base import Family, VideoModel
from unified_trainer.models.wan.family import WAN
from unified_trainer.rewards import pixels
from unified_trainer.rewards.clip import CLIP
from unified_trainer.rewards.hpsv3 import HPSv3
from unified_trainer.roles.reward import RewardConfig, Scorer, of_images
from unified_trainer.types import Video

Features = Callable[[Tensor], Tensor]  # images to rows that a Frechet distance compares
TINY = Path(__file__).parent / "assets" / "tiny"


METHODS: dict[str, tuple[type[Method], type]] = {
    "consistency": (Consistency, ConsistencyConfig),
    "dance_grpo": (DanceGRPO, DanceGRPOConfig),
    "diffusion_nft": (DiffusionNFT, DiffusionNFTConfig),
    "dmd2": (DMD2, DMD2Config),
    "finetune": (Finetune, FinetuneConfig),
    "ode_init": (ODEInit, ODEInitConfig),
    "reward_gradient": (RewardGradient, RewardGradientConfig),
    "self_forcing": (SelfForcing, SelfForcingConfig),
}
ALGORITHMS = {name: config for name, (_, config) in METHODS.items()}
FAMILIES: dict[str, Family] = {"WanPipeline": WAN}
# Scorers with weights, of single images; and of the pixels alone, with the number of frames that they need.
NETWORKS = ("hpsv3", "clip")
PIXELS: dict[str, tuple[Callable[[Video], Tensor], int]] = {
    "sharpness": (pixels.sharpness, 1),
    "motion_smoothness": (pixels.motion_smoothness, 3),
    "saturation": (pixels.saturation, 1),
    "dark_share": (pixels.dark_share, 1),
    "edge_density": (pixels.edge_density, 1),
    "motion_energy": (pixels.motion_energy, 2),
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def family_of(role: str, path: str) -> tuple[Family, Path]:
    """The family and the folder of a role's path; raises before any weight is read."""
    folder = TINY / "wan" if path == "tiny" else Path(path)
    index = folder / "model_index.json"
    if not index.is_file():
        raise FileNotFoundError(f"{index} is missing: {role}.path must be a diffusers pipeline folder")
    try:
        name = json.loads(index.read_text())["_class_name"]
    except (json.JSONDecodeError, KeyError) as error:
        raise ValueError(f"{index} is not a diffusers model index ({error!r})") from error
    if name not in FAMILIES:
        raise ValueError(f"{index}: {name} is not supported; have {', '.join(FAMILIES)}")
    return FAMILIES[name], folder


def check_reward(config: RewardConfig, frames: int) -> None:
    """Raise ValueError, naming the key, for a set that cannot be, of videos of so many frames; no weight is read."""
    config.check()
    for name, part in config.named().items():
        key = "reward" if name == config.kind else f"reward.scorers.{name}"
        if part.kind not in (*NETWORKS, *PIXELS):
            have = ", ".join((*NETWORKS, *PIXELS))
            raise ValueError(f"{key}.kind {part.kind} is no scorer; have {have}")
        if part.kind in NETWORKS:
            if not part.path or (part.path == "tiny" and part.kind != "hpsv3"):
                raise ValueError(f"{key}.path must be the folder of a {part.kind} scorer, not {part.path!r}")
            _check_device(part.device, key)
            continue
        if part.path or part.device:
            raise ValueError(f"{key}: {part.kind} has no weights; set {key}.path '' and leave {key}.device out")
        seen = {"first": 1, "every": -(-frames // part.frame_stride), "all": frames}[part.frames]
        if seen < PIXELS[part.kind][1]:
            raise ValueError(
                f"{key}: {part.kind} needs at least {PIXELS[part.kind][1]} frames of a video, but sees {seen}; set "
                f"{key}.frames all"
            )


def _check_device(device: str, key: str) -> None:
    try:
        torch.device(device or "cpu")
    except RuntimeError as error:
        raise ValueError(f"{key}.device {device!r} is no device that torch knows") from error


def load_hpsv3(path: str, precision: str, device: torch.device) -> HPSv3:
    return HPSv3.load(TINY / "hpsv3" if path == "tiny" else Path(path), device, DTYPES[precision])


def load_scorers(config: RewardConfig, device: torch.device) -> tuple[dict[str, Scorer], Features | None]:
    """The scorers of the set, held-out ones too, and the features of the first HPSv3 among them."""
    scorers: dict[str, Scorer] = {}
    features: Features | None = None
    for name, part in config.named().items():
        place = torch.device(part.device) if part.device else device
        if part.kind == "hpsv3":
            hpsv3 = load_hpsv3(part.path, part.precision, place)
            scorers[name] = of_images(_means(hpsv3), part.batch)
            features = features or hpsv3.features
        elif part.kind == "clip":
            scorers[name] = of_images(CLIP.load(Path(part.path), place, DTYPES[part.precision]).score, part.batch)
        else:
            scorers[name] = _without_prompts(PIXELS[part.kind][0])
    return scorers, features


def _means(hpsv3: HPSv3) -> Callable[[Tensor, list[str]], Tensor]:
    """Its mu; for images that take a gradient, with it."""
    return lambda images, prompts: (hpsv3.score_with_gradient if images.requires_grad else hpsv3.score)(
        images, prompts
    )[:, 0]


def _without_prompts(measure: Callable[[Video], Tensor]) -> Scorer:
    return lambda video, prompts: measure(video.float())


def open_model(role: str, path: str, component: str, *, causal: bool) -> VideoModel:
    """A network of a role's path, chunk by chunk if it is to be causal; its weights are still to be read."""
    family, folder = family_of(role, path)
    if not causal:
        return family.model(folder, component)
    if family.causal is None:
        raise ValueError(f"{role}.path {path}: this family has no causal form; set sampler.chunks.chunk_frames 0")
    return family.causal(folder, component)
