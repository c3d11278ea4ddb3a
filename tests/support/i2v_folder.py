"""Folders of the layouts of Wan2.1-I2V-14B and Wan2.2-I2V-A14B with small random networks."""

from pathlib import Path

import torch
from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanImageToVideoPipeline, WanTransformer3DModel
from helpers import WAN
from safetensors.torch import load_file, save_file
from transformers import (
    AutoTokenizer,
    CLIPImageProcessor,
    CLIPVisionConfig,
    CLIPVisionModel,
    UMT5EncoderModel,
)

LATENTS, CHANNELS, CLIP_WIDTH = 16, 36, 20


def i2v_folder(folder: Path, *, clip: bool = False) -> Path:
    """Write a folder of two experts, or of one network that also reads tokens of CLIP, as Wan2.1 has them."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        statistics = {
            "latents_mean": (0.3 * torch.randn(LATENTS)).tolist(),
            "latents_std": (0.5 + torch.rand(LATENTS)).tolist(),
        }
        vae = AutoencoderKLWan(
            base_dim=8,
            z_dim=LATENTS,
            dim_mult=[1, 2, 2, 2],
            num_res_blocks=1,
            temperal_downsample=[False, True, True],
            **statistics,
        )
        own = {"image_dim": CLIP_WIDTH, "added_kv_proj_dim": 24} if clip else {}
        networks = [
            WanTransformer3DModel(
                patch_size=(1, 2, 2),
                num_attention_heads=2,
                attention_head_dim=12,
                in_channels=CHANNELS,
                out_channels=LATENTS,
                text_dim=32,
                freq_dim=16,
                ffn_dim=32,
                num_layers=2,
                rope_max_seq_len=16,
                **own,
            )
            for _ in range(1 if clip else 2)
        ]
        for network in networks:
            _fill_zeros(network)
        settings = {"hidden_size": CLIP_WIDTH, "intermediate_size": 32, "num_hidden_layers": 3}
        settings |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
        encoder = CLIPVisionModel(CLIPVisionConfig(**settings)) if clip else None
    tokenizer = AutoTokenizer.from_pretrained(WAN / "tokenizer")
    if clip:
        tokenizer.model_max_length = 512  # the network takes the last 512 tokens for the text
    WanImageToVideoPipeline(
        tokenizer=tokenizer,
        text_encoder=UMT5EncoderModel.from_pretrained(WAN / "text_encoder"),
        vae=vae,
        scheduler=UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=5.0),
        transformer=networks[0],
        transformer_2=None if clip else networks[1],
        boundary_ratio=None if clip else 0.9,
        image_encoder=encoder,
        image_processor=CLIPImageProcessor(size={"shortest_edge": 28}, crop_size=28) if clip else None,
    ).save_pretrained(folder)
    if clip:
        name_as_published(folder / "image_encoder")
    return folder


def name_as_published(folder: Path) -> None:
    """Rename the weights of a vision tower to what earlier versions of transformers wrote."""
    weights = load_file(folder / "model.safetensors")
    named = {f"vision_model.{name.removeprefix('vision_model.')}": weight for name, weight in weights.items()}
    save_file(named, folder / "model.safetensors", {"format": "pt"})


def _fill_zeros(network: torch.nn.Module) -> None:
    """Draw the weights that begin as zeros, behind which the image could hide."""
    for weight in network.parameters():
        if not weight.any():
            weight.data = 0.1 * torch.randn(weight.shape)
