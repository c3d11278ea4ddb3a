"""The only module that names methods, families and rewards."""

import json
from pathlib import Path

import torch

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
from unified_trainer.rewards.scorers import check_reward, load_scorers  # noqa: F401  (build.py imports them from here)

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


def open_model(role: str, path: str, component: str, *, causal: bool) -> VideoModel:
    """A network of a role's path, chunk by chunk if it is to be causal; its weights are still to be read."""
    family, folder = family_of(role, path)
    if not causal:
        return family.model(folder, component)
    if family.causal is None:
        raise ValueError(f"{role}.path {path}: this family has no causal form; set sampler.chunks.chunk_frames 0")
    return family.causal(folder, component)
