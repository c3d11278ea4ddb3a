"""A folder of the layout of LTX-2 with small random networks and a tokenizer of words."""

from pathlib import Path

import torch
from diffusers import (
    AutoencoderKLLTX2Audio,
    AutoencoderKLLTX2Video,
    FlowMatchEulerDiscreteScheduler,
    LTX2Pipeline,
    LTX2VideoTransformer3DModel,
)
from diffusers.pipelines.ltx2 import LTX2TextConnectors, LTX2Vocoder, LTX2VocoderWithBWE
from sd3_folder import tokenizer
from transformers import Gemma3Config, Gemma3ForConditionalGeneration

LENGTH = 16  # tokens of a text
NEWER = {"gated_attn": True, "cross_attn_mod": True, "audio_gated_attn": True, "audio_cross_attn_mod": True}
NEWER |= {"use_prompt_embeddings": False, "perturbed_attn": True}
PROJECTIONS = {"per_modality_projections": True, "proj_bias": True, "video_hidden_dim": 24, "audio_hidden_dim": 12}
PROJECTIONS |= {"video_gated_attn": True, "audio_gated_attn": True}


def ltx2_folder(folder: Path, *, newer: bool = False, seed: int = 0) -> Path:
    """Write the folder: 16 latent channels of 8 frames of 32 x 32 pixels, one band of sound in them, short texts.

    With `newer` its networks are of the form of LTX-2.3: an embedding of a text has 24 channels for the video and 12
    for the sound, and gates and levels enter the attention.
    """
    layers = {"hidden_size": 24, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2}
    text = layers | {"vocab_size": 32, "num_key_value_heads": 1, "head_dim": 8, "sliding_window": 8}
    config = Gemma3Config(text_config=text, vision_config=layers | {"image_size": 28}, mm_tokens_per_image=4)
    audio_width = 12 if newer else 24
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        gemma = Gemma3ForConditionalGeneration(config)
        connectors = LTX2TextConnectors(
            caption_channels=24,
            text_proj_in_factor=3,
            video_connector_num_attention_heads=2,
            video_connector_attention_head_dim=12,
            video_connector_num_layers=1,
            video_connector_num_learnable_registers=8,
            audio_connector_num_attention_heads=2,
            audio_connector_attention_head_dim=audio_width // 2,
            audio_connector_num_layers=1,
            audio_connector_num_learnable_registers=8,
            rope_type="split",
            **(PROJECTIONS if newer else {}),
        )
        vae = AutoencoderKLLTX2Video(
            latent_channels=16,
            block_out_channels=(8, 8, 8, 8),
            decoder_block_out_channels=(8, 16, 32),
            layers_per_block=(1,) * 5,
            decoder_layers_per_block=(1,) * 4,
            decoder_causal=False,
            decoder_spatial_padding_mode="zeros",  # others pad no width of one latent
            spatial_compression_ratio=32,
            temporal_compression_ratio=8,
            scaling_factor=1.25,
        )
        audio_vae = AutoencoderKLLTX2Audio(
            base_channels=16, ch_mult=(1, 1, 1), num_res_blocks=1, latent_channels=1, resolution=16
        )
        for part in (vae, audio_vae):
            part.latents_mean += 0.3 * torch.randn(16)
            part.latents_std += 0.5 * torch.rand(16)
        small = {"hidden_channels": 32, "resnet_kernel_sizes": [3], "resnet_dilations": [[1]]}
        if newer:
            enlarging = {f"bwe_{name}": value for name, value in small.items()}
            vocoder = LTX2VocoderWithBWE(**small | {"hidden_channels": 64}, **enlarging)
        else:
            vocoder = LTX2Vocoder(**small)
        network = LTX2VideoTransformer3DModel(
            in_channels=16,
            out_channels=16,
            num_attention_heads=2,
            attention_head_dim=12,
            cross_attention_dim=24,
            audio_in_channels=16,
            audio_out_channels=16,
            audio_num_attention_heads=2,
            audio_attention_head_dim=6,
            audio_cross_attention_dim=12,
            num_layers=2,
            caption_channels=24,
            rope_type="split",
            **(NEWER if newer else {}),
        )
        for weight in (*network.parameters(), *vae.parameters(), *audio_vae.parameters()):
            if not weight.any():
                weight.data = 0.1 * torch.randn(weight.shape)
    scheduler = {"base_shift": 0.95, "max_shift": 2.05, "base_image_seq_len": 1024, "shift_terminal": 0.1}
    LTX2Pipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, **scheduler),
        vae=vae,
        audio_vae=audio_vae,
        text_encoder=gemma,
        tokenizer=tokenizer(LENGTH, "<pad>", padding_side="left"),  # as Gemma's
        connectors=connectors,
        transformer=network,
        vocoder=vocoder,
    ).save_pretrained(folder)
    return folder
