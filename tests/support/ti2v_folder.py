"""A folder of the layout of Wan2.2-TI2V-5B with small random networks."""

from pathlib import Path

import torch
from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanPipeline, WanTransformer3DModel
from helpers import WAN
from transformers import AutoTokenizer, UMT5EncoderModel


def ti2v_folder(folder: Path) -> Path:
    """Write the folder: 48 latent channels of 16 x 16 pixels, patches of 2 x 2 latents, one time for each token."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        statistics = {"latents_mean": (0.3 * torch.randn(48)).tolist(), "latents_std": (0.5 + torch.rand(48)).tolist()}
        vae = AutoencoderKLWan(
            base_dim=8,
            decoder_base_dim=8,
            z_dim=48,
            dim_mult=[1, 2, 2, 2],
            num_res_blocks=1,
            temperal_downsample=[False, True, True],
            is_residual=True,
            in_channels=12,
            out_channels=12,
            patch_size=2,
            scale_factor_temporal=4,
            scale_factor_spatial=16,
            **statistics,
        )
        network = WanTransformer3DModel(
            patch_size=(1, 2, 2),
            num_attention_heads=2,
            attention_head_dim=12,
            in_channels=48,
            out_channels=48,
            text_dim=32,
            freq_dim=16,
            ffn_dim=32,
            num_layers=2,
            rope_max_seq_len=16,
        )
    WanPipeline(
        tokenizer=AutoTokenizer.from_pretrained(WAN / "tokenizer"),
        text_encoder=UMT5EncoderModel.from_pretrained(WAN / "text_encoder"),
        vae=vae,
        scheduler=UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=5.0),
        transformer=network,
        expand_timesteps=True,
    ).save_pretrained(folder)
    return folder
