"""A folder of the layout of LTX-Video with small random networks and a tokenizer of words."""

from pathlib import Path

import torch
from diffusers import (
    AutoencoderKLLTXVideo,
    FlowMatchEulerDiscreteScheduler,
    LTXImageToVideoPipeline,
    LTXPipeline,
    LTXVideoTransformer3DModel,
)
from sd3_folder import tokenizer
from transformers import T5Config, T5EncoderModel


def ltx_folder(folder: Path, *, noisy: bool = False, image: bool = False) -> Path:
    """Write the folder, of text or of text and an image.

    It has 16 latent channels of 8 frames of 32 x 32 pixels, and texts of up to 14 tokens.
    Its decoder takes a time and, if `noisy`, adds noise between its layers, as that of LTX-Video 0.9.1.
    """
    with torch.random.fork_rng():
        torch.manual_seed(0)
        t5 = T5EncoderModel(T5Config(vocab_size=32, d_model=24, d_kv=8, d_ff=16, num_layers=2, num_heads=2))
        vae = AutoencoderKLLTXVideo(
            latent_channels=16,
            block_out_channels=(8, 8, 8),
            down_block_types=("LTXVideoDownBlock3D",) * 3,
            decoder_block_out_channels=(8, 16, 32),
            layers_per_block=(1,) * 4,
            decoder_layers_per_block=(1,) * 4,
            spatio_temporal_scaling=(True,) * 3,
            decoder_spatio_temporal_scaling=(True,) * 3,
            decoder_inject_noise=(noisy,) * 4,
            upsample_residual=(True,) * 3,
            upsample_factor=(2,) * 3,
            timestep_conditioning=True,
            scaling_factor=1.0 if image else 1.25,  # the pipeline of images does not scale an image's latents
        )
        vae.latents_mean += 0.3 * torch.randn(16)
        vae.latents_std += 0.5 * torch.rand(16)
        network = LTXVideoTransformer3DModel(
            in_channels=16,
            out_channels=16,
            num_attention_heads=2,
            attention_head_dim=12,
            cross_attention_dim=24,
            num_layers=2,
            caption_channels=24,
        )
        for weight in (*network.parameters(), *vae.parameters()):
            if not weight.any():
                weight.data = 0.1 * torch.randn(weight.shape)
    scheduler = {"base_shift": 0.95, "max_shift": 2.05, "base_image_seq_len": 1024, "shift_terminal": 0.1}
    kind = LTXImageToVideoPipeline if image else LTXPipeline
    kind(
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, **scheduler),
        vae=vae,
        text_encoder=t5,
        tokenizer=tokenizer(14, "<pad>"),
        transformer=network,
    ).save_pretrained(folder)
    return folder
