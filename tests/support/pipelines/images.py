"""Small folders of pipelines that make images. Latents of 8 x 12, so that a swap of height and width shows."""

from collections.abc import Callable
from functools import partial
from typing import Any

import diffusers as d
import numpy as np
from diffusers import FlowMatchEulerDiscreteScheduler as Euler
from diffusers.pipelines.flux2.system_messages import SYSTEM_MESSAGE
from diffusers.pipelines.nucleusmoe_image.pipeline_nucleusmoe_image import DEFAULT_SYSTEM_PROMPT
from PIL import Image
from transformers import (
    GlmConfig,
    GlmImageConfig,
    GlmImageForConditionalGeneration,
    GlmImageImageProcessorPil,
    GlmImageProcessor,
    GlmModel,
    T5GemmaConfig,
    T5GemmaModuleConfig,
)
from transformers.models.t5gemma.modeling_t5gemma import T5GemmaEncoder

from pipelines import Small, small
from pipelines import text as t

PICTURE = Image.fromarray((40 * np.arange(64 * 96 * 3).reshape(64, 96, 3) ** 2 % 251).astype(np.uint8))
HALF = Image.fromarray((255 * (np.arange(64 * 96).reshape(64, 96) % 96 < 48)).astype(np.uint8))
SIZE = {"height": 64, "width": 96}
PROMPT = "a red circle moves left"
CALL = {"prompt": PROMPT, **SIZE}
SHIFT_BY_SIZE = {
    "use_dynamic_shifting": True,
    "base_shift": 0.5,
    "max_shift": 1.15,
    "base_image_seq_len": 256,
    "max_image_seq_len": 4096,
}


def vae(channels: int = 16, levels: int = 4, **sizes: Any) -> d.AutoencoderKL:
    """An autoencoder of images: 2 ** (levels - 1) pixels a latent, by default as that of FLUX.1 and SD3."""
    return d.AutoencoderKL(**vae_sizes(channels, levels), **{"scaling_factor": 0.3611, "shift_factor": 0.1159} | sizes)


def vae_sizes(channels: int, levels: int) -> dict[str, Any]:
    """Return the sizes that the autoencoders of images share."""
    return {
        "down_block_types": ["DownEncoderBlock2D"] * levels,
        "up_block_types": ["UpDecoderBlock2D"] * levels,
        "block_out_channels": [8] * levels,
        "layers_per_block": 1,
        "norm_num_groups": 4,
        "latent_channels": channels,
        "use_quant_conv": False,
        "use_post_quant_conv": False,
    }


def flux_network(**sizes: Any) -> d.FluxTransformer2DModel:
    """FLUX.1's network with a block of each kind, and with the guidance as an input."""
    given = {"in_channels": 64, "num_layers": 1, "num_single_layers": 1, "guidance_embeds": True} | sizes
    heads = {"attention_head_dim": 16, "num_attention_heads": 2, "axes_dims_rope": (4, 6, 6)}
    return d.FluxTransformer2DModel(joint_attention_dim=t.WIDTH, pooled_projection_dim=t.WIDTH, **heads, **given)


def flux_parts(**sizes: Any) -> dict[str, Any]:
    """Return the components of FLUX.1."""
    return {
        "scheduler": Euler(shift=3.0, **SHIFT_BY_SIZE),
        "vae": vae(),
        "text_encoder": t.clip_encoder(),
        "tokenizer": t.clip_tokenizer(),
        "text_encoder_2": t.t5_encoder(),
        "tokenizer_2": t.t5_tokenizer(),
        "transformer": flux_network(**sizes),
    }


def flux() -> d.FluxPipeline:
    """FLUX.1 dev."""
    return d.FluxPipeline(**flux_parts())


def flux2_parts(guidance: bool, width: int) -> dict[str, Any]:
    """Return the components that FLUX.2 and its small relative share."""
    sizes = {"in_channels": 128, "num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16}
    network = d.Flux2Transformer2DModel(
        num_attention_heads=2, joint_attention_dim=width, axes_dims_rope=(4, 4, 4, 4), guidance_embeds=guidance, **sizes
    )
    return {
        "scheduler": Euler(shift=3.0, **SHIFT_BY_SIZE),
        "vae": d.AutoencoderKLFlux2(**vae_sizes(32, 4)),
        "transformer": network,
    }


def flux2() -> d.Flux2Pipeline:
    """FLUX.2 dev: features of layers 10, 20 and 30 of Mistral 3. The tokenizer alone stands for the processor."""
    words = t.qwen_tokenizer(SYSTEM_MESSAGE)
    encoder = t.mistral3(words, 8, num_hidden_layers=30)
    return d.Flux2Pipeline(text_encoder=encoder, tokenizer=words, **flux2_parts(True, 3 * 8))


def flux2_klein() -> d.Flux2KleinPipeline:
    """FLUX.2 Klein."""
    return d.Flux2KleinPipeline(**klein_parts())


def z_image_parts() -> dict[str, Any]:
    """Return the components of Z-Image."""
    words = t.qwen_tokenizer()
    network = d.ZImageTransformer2DModel(
        in_channels=16,
        dim=32,
        n_layers=2,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
        cap_feat_dim=t.WIDTH,
        axes_dims=[8, 4, 4],
        axes_lens=[1024, 32, 32],
    )
    text = {"text_encoder": t.qwen3(words), "tokenizer": words}
    return {"scheduler": Euler(shift=3.0), "vae": vae(), "transformer": network, **text}


def z_image() -> d.ZImagePipeline:
    """Z-Image: lists of samples and of prompts' features, time that runs forward."""
    return d.ZImagePipeline(**z_image_parts())


def chroma_parts() -> dict[str, Any]:
    """Return the components of Chroma."""
    network = d.ChromaTransformer2DModel(
        in_channels=64,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=t.WIDTH,
        axes_dims_rope=(4, 6, 6),
        approximator_hidden_dim=32,
        approximator_layers=1,
        approximator_num_channels=16,
    )
    words = {"text_encoder": t.t5_encoder(), "tokenizer": t.t5_tokenizer()}
    return {"scheduler": Euler(**SHIFT_BY_SIZE), "vae": vae(), "transformer": network, **words}


def chroma() -> d.ChromaPipeline:
    """Chroma: FLUX.1 without pooled features, whose levels of the blocks come from a small network."""
    return d.ChromaPipeline(**chroma_parts())


def qwen_vae(levels: int = 4, **sizes: Any) -> d.AutoencoderKLQwenImage:
    """Qwen-Image's autoencoder of frames, with a mean and a deviation for each channel."""
    return d.AutoencoderKLQwenImage(
        base_dim=8,
        z_dim=16,
        dim_mult=[1, 2, 2, 2, 2][:levels],
        num_res_blocks=1,
        temperal_downsample=[False, True, True, False][: levels - 1],
        latents_mean=[0.1 * n - 0.5 for n in range(16)],
        latents_std=[0.5 + 0.05 * n for n in range(16)],
        **sizes,
    )


def qwen_network(**sizes: Any) -> d.QwenImageTransformer2DModel:
    """Qwen-Image's network."""
    heads = {"num_layers": 2, "attention_head_dim": 16, "num_attention_heads": 2, "axes_dims_rope": (4, 6, 6)}
    return d.QwenImageTransformer2DModel(joint_attention_dim=t.WIDTH, **heads, **sizes)


def qwen_image_parts(pipeline: type[d.DiffusionPipeline]) -> dict[str, Any]:
    """Return the components of the pipelines of Qwen-Image."""
    words = t.qwen_tokenizer(pipeline)
    shifts = SHIFT_BY_SIZE | {"max_shift": 0.9, "max_image_seq_len": 8192, "shift_terminal": 0.02}
    return {
        "scheduler": Euler(**shifts),
        "vae": qwen_vae(),
        "text_encoder": t.qwen25_vl(words),
        "tokenizer": words,
        "transformer": qwen_network(),
    }


def qwen_image() -> d.QwenImagePipeline:
    """Qwen-Image."""
    return d.QwenImagePipeline(**qwen_image_parts(d.QwenImagePipeline))


def stable_diffusion_3_parts() -> dict[str, Any]:
    """Return the components of Stable Diffusion 3.5, whose first block has an attention of the image alone."""
    network = d.SD3Transformer2DModel(
        sample_size=16,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=t.WIDTH,
        caption_projection_dim=32,
        pooled_projection_dim=24,
        pos_embed_max_size=12,
        dual_attention_layers=(0,),
        qk_norm="rms_norm",
    )
    clips = {
        "text_encoder": t.clip_encoder(True, 8),
        "tokenizer": t.clip_tokenizer(),
        "text_encoder_2": t.clip_encoder(True, 16, hidden_act="gelu"),
        "tokenizer_2": t.clip_tokenizer(),
    }
    clips |= {"text_encoder_3": t.t5_encoder(), "tokenizer_3": t.t5_tokenizer()}
    autoencoder = vae(scaling_factor=1.5305, shift_factor=0.0609)
    return {"transformer": network, "scheduler": Euler(shift=3.0), "vae": autoencoder, **clips}


def stable_diffusion_3() -> d.StableDiffusion3Pipeline:
    """Stable Diffusion 3.5."""
    return d.StableDiffusion3Pipeline(**stable_diffusion_3_parts())


def deep_vae() -> d.AutoencoderDC:
    """SANA's autoencoder: here 4 pixels a latent."""
    blocks = {"attention_head_dim": 4, "latent_channels": 8, "in_channels": 3}
    for side in ("encoder", "decoder"):
        blocks[f"{side}_block_types"] = ("ResBlock", "ResBlock", "EfficientViTBlock")
        blocks[f"{side}_block_out_channels"] = (8, 8, 16)
        blocks[f"{side}_qkv_multiscales"] = ((), (), (5,))
        blocks[f"{side}_layers_per_block"] = (1, 1, 1)
    return d.AutoencoderDC(scaling_factor=0.41407, **blocks)


def sana_parts(pipeline: type[d.DiffusionPipeline]) -> dict[str, Any]:
    """Return the components of the pipelines of SANA."""
    words = t.gemma_tokenizer(pipeline)
    network = d.SanaTransformer2DModel(
        in_channels=8,
        out_channels=8,
        num_layers=2,
        num_attention_heads=2,
        attention_head_dim=8,
        num_cross_attention_heads=2,
        cross_attention_head_dim=8,
        cross_attention_dim=16,
        caption_channels=t.WIDTH,
        sample_size=16,
    )
    text = {"tokenizer": words, "text_encoder": t.gemma2(words)}
    return {**text, "vae": deep_vae(), "transformer": network, "scheduler": Euler(shift=3.0)}


def sana() -> d.SanaPipeline:
    """SANA: linear attention over latents of a deep autoencoder."""
    return d.SanaPipeline(**sana_parts(d.SanaPipeline))


def lumina2() -> d.Lumina2Pipeline:
    """Lumina 2: time is 1 - sigma and the output is turned."""
    words = t.gemma_tokenizer(d.Lumina2Pipeline)
    network = d.Lumina2Transformer2DModel(
        sample_size=8,
        in_channels=16,
        hidden_size=32,
        num_layers=2,
        num_refiner_layers=1,
        num_attention_heads=2,
        num_kv_heads=1,
        multiple_of=16,
        axes_dim_rope=(8, 4, 4),
        axes_lens=(300, 32, 32),
        cap_feat_dim=t.WIDTH,
    )
    text = {"tokenizer": words, "text_encoder": t.gemma2(words)}
    return d.Lumina2Pipeline(transformer=network, scheduler=Euler(shift=6.0), vae=vae(), **text)


def lumina() -> d.LuminaPipeline:
    """Lumina-Next: twice as many channels leave the network as enter it."""
    words = t.gemma_tokenizer(d.LuminaPipeline)
    network = d.LuminaNextDiT2DModel(
        sample_size=8,
        in_channels=4,
        hidden_size=32,
        num_layers=2,
        num_attention_heads=2,
        num_kv_heads=1,
        multiple_of=16,
        cross_attention_dim=t.WIDTH,
    )
    text = {"tokenizer": words, "text_encoder": t.gemma(words)}
    return d.LuminaPipeline(transformer=network, scheduler=Euler(), vae=vae(4, scaling_factor=0.13025), **text)


def cogview4_parts(channels: int = 16) -> dict[str, Any]:
    """Return the components of the pipelines of CogView 4."""
    words = t.byte_tokenizer()
    words.padding_side = "left"
    network = d.CogView4Transformer2DModel(
        in_channels=channels,
        out_channels=16,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        text_embed_dim=t.WIDTH,
        time_embed_dim=32,
        condition_dim=8,
        rope_axes_dim=(8, 8),
        sample_size=8,
    )
    shifts = {"use_dynamic_shifting": True, "base_shift": 0.25, "max_shift": 0.75, "base_image_seq_len": 256}
    return {
        "tokenizer": words,
        "text_encoder": GlmModel(GlmConfig(**t.decoder_sizes(words, t.WIDTH))),
        "vae": vae(scaling_factor=1.0, shift_factor=None),
        "transformer": network,
        "scheduler": Euler(time_shift_type="linear", **shifts),
    }


def cogview4() -> d.CogView4Pipeline:
    """CogView 4: the time is that before the shift."""
    return d.CogView4Pipeline(**cogview4_parts())


def aura_flow() -> d.AuraFlowPipeline:
    """AuraFlow."""
    network = d.AuraFlowTransformer2DModel(
        sample_size=8,
        in_channels=4,
        num_mmdit_layers=1,
        num_single_dit_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=t.WIDTH,
        caption_projection_dim=32,
        pos_embed_max_size=64,
    )
    text = {"tokenizer": t.t5_tokenizer(), "text_encoder": t.t5_encoder(kind="umt5")}
    autoencoder = vae(4, scaling_factor=0.13025, shift_factor=None)
    return d.AuraFlowPipeline(vae=autoencoder, transformer=network, scheduler=Euler(shift=1.73), **text)


def hidream() -> d.HiDreamImagePipeline:
    """HiDream-I1: four text encoders, experts, and images of as many latents as 128 x 128 whatever size is asked."""
    network = d.HiDreamImageTransformer2DModel(
        patch_size=2,
        in_channels=16,
        out_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        caption_channels=[t.WIDTH, t.WIDTH],
        text_emb_dim=24,
        num_routed_experts=4,
        num_activated_experts=2,
        axes_dims_rope=(8, 4, 4),
        max_resolution=(128, 128),
        llama_layers=[0, 1],
    )
    words = t.byte_tokenizer()
    encoders = {
        "text_encoder": t.clip_encoder(True, 8, longest=248),
        "tokenizer": t.clip_tokenizer(248),
        "text_encoder_2": t.clip_encoder(True, 16, hidden_act="gelu", longest=248),
        "tokenizer_2": t.clip_tokenizer(248),
        "text_encoder_3": t.t5_encoder(),
        "tokenizer_3": t.t5_tokenizer(),
        "text_encoder_4": t.named("LlamaForCausalLM", words),
        "tokenizer_4": words,
    }
    return d.HiDreamImagePipeline(scheduler=Euler(shift=3.0), vae=vae(levels=2), transformer=network, **encoders)


def ovis() -> d.OvisImagePipeline:
    """Ovis-Image: FLUX.1's blocks with gated layers, after Qwen3."""
    words = t.qwen_tokenizer(d.OvisImagePipeline)
    network = d.OvisImageTransformer2DModel(
        in_channels=64,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=t.WIDTH,
        axes_dims_rope=(4, 6, 6),
    )
    text = {"text_encoder": t.qwen3(words), "tokenizer": words}
    return d.OvisImagePipeline(scheduler=Euler(**SHIFT_BY_SIZE), vae=vae(), transformer=network, **text)


def bria() -> d.BriaPipeline:
    """Bria 3.2: features of T5 are cut to the prompt's length."""
    network = d.BriaTransformer2DModel(
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=t.WIDTH,
        axes_dims_rope=[0, 8, 8],
    )
    text = {"text_encoder": t.t5_encoder(), "tokenizer": t.t5_tokenizer()}
    autoencoder = vae(4, scaling_factor=0.13025, shift_factor=0.0)
    return d.BriaPipeline(transformer=network, scheduler=Euler(**SHIFT_BY_SIZE), vae=autoencoder, **text)


def wan_vae() -> d.AutoencoderKLWan:
    """The autoencoder of frames of Wan 2.2's small model: 16 pixels a latent."""
    return d.AutoencoderKLWan(
        base_dim=8,
        decoder_base_dim=8,
        z_dim=16,
        dim_mult=[1, 2, 2, 2],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
        is_residual=True,
        in_channels=12,
        out_channels=12,
        patch_size=2,
        scale_factor_spatial=16,
    )


def bria_fibo() -> d.BriaFiboPipeline:
    """Bria Fibo: each block is given the features of a layer of its own of SmolLM3. Empty prompts are token 128000."""
    words = t.byte_tokenizer()
    encoder = t.named("SmolLM3ForCausalLM", words, 16, vocab_size=128001, head_dim=4, num_key_value_heads=4)
    network = d.BriaFiboTransformer2DModel(
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        text_encoder_dim=16,
        axes_dims_rope=[0, 8, 8],
    )
    return d.BriaFiboPipeline(
        transformer=network,
        scheduler=Euler(**SHIFT_BY_SIZE),
        vae=wan_vae(),
        text_encoder=encoder,
        tokenizer=words,
    )


def prx() -> d.PRXPipeline:
    """PRX, with the encoder of T5 Gemma."""
    words = t.gemma_tokenizer(longest=24)
    network = d.PRXTransformer2DModel(
        in_channels=16, context_in_dim=t.WIDTH, hidden_size=32, mlp_ratio=2.0, num_heads=2, depth=2, axes_dim=[8, 8]
    )
    sizes = {"layer_types": ["full_attention"] * 2, "query_pre_attn_scalar": 8, "dropout_rate": 0.0}
    config = T5GemmaModuleConfig(**t.decoder_sizes(words, t.WIDTH, **sizes))
    encoder = T5GemmaEncoder(config)
    encoder.config = T5GemmaConfig(encoder=config, decoder=config)  # published folders hold the whole model's
    return d.PRXPipeline(
        transformer=network, scheduler=Euler(shift=3.0), text_encoder=encoder, tokenizer=words, vae=vae()
    )


def hunyuan_image() -> d.HunyuanImagePipeline:
    """HunyuanImage 2.1: Qwen2.5-VL, ByT5 for quoted words, guidance as components."""
    words = t.qwen_tokenizer(d.HunyuanImagePipeline)
    network = d.HunyuanImageTransformer2DModel(
        in_channels=8,
        out_channels=8,
        num_layers=1,
        num_single_layers=1,
        num_refiner_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        patch_size=(1, 1),
        text_embed_dim=t.WIDTH,
        text_embed_2_dim=24,
        rope_axes_dim=(8, 8),
    )
    autoencoder = d.AutoencoderKLHunyuanImage(
        in_channels=3,
        out_channels=3,
        latent_channels=8,
        block_out_channels=(32, 32, 32),
        layers_per_block=1,
        spatial_compression_ratio=4,
        sample_size=64,
        scaling_factor=0.75289,
    )
    guiders = {name: d.AdaptiveProjectedMixGuidance() for name in ("guider", "ocr_guider")}
    text = {"text_encoder": t.qwen25_vl(words), "tokenizer": words}
    text |= {"text_encoder_2": t.t5_encoder(24), "tokenizer_2": t.byt5_tokenizer()}
    return d.HunyuanImagePipeline(scheduler=Euler(shift=5.0), vae=autoencoder, transformer=network, **text, **guiders)


def kandinsky5_parts(pipeline: type[d.DiffusionPipeline], conditioned: bool) -> dict[str, Any]:
    """Return the components of Kandinsky 5's image pipelines. A tokenizer stands for the processor of pictures."""
    words = t.qwen_tokenizer(pipeline)
    network = d.Kandinsky5Transformer3DModel(
        in_visual_dim=16,
        in_text_dim=t.WIDTH,
        in_text_dim2=16,
        time_dim=32,
        out_visual_dim=16,
        patch_size=(1, 2, 2),
        model_dim=32,
        ff_dim=64,
        num_text_blocks=1,
        num_visual_blocks=2,
        axes_dims=(4, 6, 6),
        visual_cond=conditioned,
        attention_type="regular",
    )
    return {
        "transformer": network,
        "vae": vae(),
        "text_encoder": t.qwen25_vl(words),
        "tokenizer": words,
        "text_encoder_2": t.clip_encoder(width=16, longest=77),
        "tokenizer_2": t.clip_tokenizer(77),
        "scheduler": Euler(shift=5.0),
    }


def kandinsky5() -> d.Kandinsky5T2IPipeline:
    """Kandinsky 5 from text: latents with channels last."""
    return d.Kandinsky5T2IPipeline(**kandinsky5_parts(d.Kandinsky5T2IPipeline, False))


def krea2() -> d.Krea2Pipeline:
    """Krea 2: features of three layers of Qwen3-VL."""
    words = t.qwen_tokenizer(d.Krea2Pipeline)
    network = d.Krea2Transformer2DModel(
        in_channels=64,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=32,
        timestep_embed_dim=16,
        text_hidden_dim=t.WIDTH,
        num_text_layers=3,
        text_num_attention_heads=2,
        text_num_key_value_heads=1,
        text_intermediate_size=32,
        num_layerwise_text_blocks=1,
        num_refiner_text_blocks=1,
        axes_dims_rope=(4, 6, 6),
    )
    return d.Krea2Pipeline(
        scheduler=Euler(**SHIFT_BY_SIZE),
        vae=qwen_vae(),
        text_encoder=t.qwen3_vl(words),
        tokenizer=words,
        transformer=network,
        text_encoder_select_layers=(0, 1, 2),
    )


def longcat_parts(pipeline: type[d.DiffusionPipeline]) -> dict[str, Any]:
    """Return the components of LongCat-Image: prompts of 512 tokens. A tokenizer stands for the processor."""
    words = t.qwen_tokenizer(pipeline)
    network = d.LongCatImageTransformer2DModel(
        in_channels=64,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=t.WIDTH,
        pooled_projection_dim=t.WIDTH,
        axes_dims_rope=[4, 6, 6],
    )
    text = {"text_encoder": t.qwen25_vl(words), "tokenizer": words, "text_processor": words}
    return {"scheduler": Euler(**SHIFT_BY_SIZE), "vae": vae(), "transformer": network, **text}


def longcat_image() -> d.LongCatImagePipeline:
    """LongCat-Image from text."""
    return d.LongCatImagePipeline(**longcat_parts(d.LongCatImagePipeline))


def flux_kontext() -> d.FluxKontextPipeline:
    """FLUX.1 Kontext: tokens of a picture follow those of the sample."""
    return d.FluxKontextPipeline(**flux_parts())


def flux_fill() -> d.FluxFillPipeline:
    """FLUX.1 Fill: 64 channels of the sample, 64 of the masked picture, 256 of the mask."""
    return d.FluxFillPipeline(**flux_parts(in_channels=384, out_channels=64))


def flux_control() -> d.FluxControlPipeline:
    """FLUX.1 Canny and Depth: 64 channels of the sample and 64 of the control picture."""
    return d.FluxControlPipeline(**flux_control_parts())


def cogview4_control() -> d.CogView4ControlPipeline:
    """CogView 4 with the channels of a control picture behind those of the sample."""
    return d.CogView4ControlPipeline(**cogview4_parts(32))


def qwen_image_edit() -> d.QwenImageEditPipeline:
    """Qwen-Image-Edit: the picture is seen by the language model, and its tokens follow those of the sample."""
    parts = qwen_image_parts(d.QwenImageEditPipeline) | {"vae": qwen_vae(5)}  # for fewer tokens
    return d.QwenImageEditPipeline(processor=t.picture_processor(parts["tokenizer"]), **parts)


def qwen_image_edit_plus() -> d.QwenImageEditPlusPipeline:
    """Qwen-Image-Edit-2509, with several pictures."""
    parts = qwen_image_parts(d.QwenImageEditPlusPipeline) | {"vae": qwen_vae(5)}  # for fewer tokens
    return d.QwenImageEditPlusPipeline(processor=t.picture_processor(parts["tokenizer"]), **parts)


def kandinsky5_edit() -> d.Kandinsky5I2IPipeline:
    """Kandinsky 5 from a picture, whose latents and a mask stand in channels beside the sample's."""
    parts = kandinsky5_parts(d.Kandinsky5I2IPipeline, True)
    return d.Kandinsky5I2IPipeline(**parts | {"tokenizer": t.picture_processor(parts["tokenizer"])})


def longcat_image_edit() -> d.LongCatImageEditPipeline:
    """LongCat-Image-Edit."""
    parts = longcat_parts(d.LongCatImageEditPipeline)
    return d.LongCatImageEditPipeline(**parts | {"text_processor": t.picture_processor(parts["tokenizer"])})


def ernie_image() -> d.ErnieImagePipeline:
    """ERNIE-Image: FLUX.2's autoencoder, and features of Mistral 3."""
    words = t.byte_tokenizer()
    network = d.ErnieImageTransformer2DModel(
        hidden_size=32,
        num_attention_heads=2,
        num_layers=2,
        ffn_hidden_size=64,
        text_in_dim=t.WIDTH,
        rope_axes_dim=(4, 6, 6),
    )
    autoencoder = d.AutoencoderKLFlux2(**vae_sizes(32, 4))
    return d.ErnieImagePipeline(
        transformer=network,
        vae=autoencoder,
        text_encoder=t.mistral3(words).model,
        tokenizer=words,
        scheduler=Euler(shift=4.0),
    )


def nucleus() -> d.NucleusMoEImagePipeline:
    """Nucleus-Image: experts, and features of the eighth layer of Qwen3-VL from the end."""
    words = t.qwen_tokenizer(DEFAULT_SYSTEM_PROMPT)
    network = d.NucleusMoEImageTransformer2DModel(
        in_channels=64,
        out_channels=16,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=t.WIDTH,
        axes_dims_rope=(4, 6, 6),
        moe_enabled=True,
        num_experts=4,
        dense_moe_strategy="leave_first_block_dense",
        capacity_factors=[2.0, 2.0],
    )
    return d.NucleusMoEImagePipeline(
        transformer=network,
        scheduler=Euler(**SHIFT_BY_SIZE),
        vae=qwen_vae(),
        text_encoder=t.qwen3_vl(words, head=True, layers=8),
        processor=t.picture_processor(words, 16),
    )


def visual_cloze() -> d.VisualClozeGenerationPipeline:
    """VisualCloze: FLUX.1 Fill on a grid of pictures."""
    parts = flux_parts(in_channels=384, out_channels=64)
    parts["tokenizer_2"] = t.t5_tokenizer("A grid layout with rows and columns displaying images", longest=96)
    return d.VisualClozeGenerationPipeline(resolution=64, **parts)


def qwen_image_layered() -> d.QwenImageLayeredPipeline:
    """Qwen-Image-Layered: several images with transparency of one picture."""
    parts = qwen_image_parts(d.QwenImageLayeredPipeline)
    parts["transformer"] = qwen_network(use_additional_t_cond=True, use_layer3d_rope=True)
    parts["vae"] = qwen_vae(input_channels=4)
    return d.QwenImageLayeredPipeline(processor=t.picture_processor(parts["tokenizer"]), **parts)


def joy_image_edit() -> d.JoyImageEditPipeline:
    """JoyImage-Edit: pictures as frames before the sample, and images of about 1024 x 1024 pixels whatever is asked."""
    words = t.qwen_tokenizer(d.JoyImageEditPipeline)
    network = d.JoyImageEditTransformer3DModel(
        hidden_size=32, num_attention_heads=2, text_dim=t.WIDTH, num_layers=2, rope_dim_list=[4, 6, 6]
    )
    return d.JoyImageEditPipeline(
        scheduler=Euler(shift=4.0),
        vae=wan_vae(),
        text_encoder=t.qwen3_vl(words, head=True),
        tokenizer=words,
        transformer=network,
        processor=t.picture_processor(words, 16),
    )


def dreamlite_parts(pipeline: type[d.DiffusionPipeline]) -> dict[str, Any]:
    """Return the components of DreamLite: a U-Net, and an autoencoder without a distribution."""
    words = t.qwen_tokenizer(pipeline)
    network = d.DreamLiteUNetModel(
        sample_size=8,
        down_block_types=("DreamLiteCrossAttnNoSelfAttnDownBlock2D", "DreamLiteCrossAttnDownBlock2D"),
        up_block_types=("DreamLiteCrossAttnUpBlock2D", "DreamLiteUpBlock2D"),
        block_out_channels=(16, 32),
        cross_attention_dim=t.WIDTH,
        attention_head_dim=8,
        layers_per_block=1,
        norm_num_groups=8,
    )
    blocks = {"num_encoder_blocks": (1, 1, 1, 1), "num_decoder_blocks": (1, 1, 1, 1)}
    blocks |= {"encoder_block_out_channels": (8, 8, 8, 8), "decoder_block_out_channels": (8, 8, 8, 8)}
    return {
        "text_encoder": t.qwen3_vl(words, head=True),
        "tokenizer": words,
        "processor": t.picture_processor(words, 16),
        "vae": d.AutoencoderTiny(**blocks),
        "unet": network,
        "scheduler": Euler(shift=3.0),
    }


def dreamlite() -> d.DreamLitePipeline:
    """DreamLite."""
    return d.DreamLitePipeline(**dreamlite_parts(d.DreamLitePipeline))


def dreamlite_mobile() -> d.DreamLiteMobilePipeline:
    """DreamLite of few steps, without guidance."""
    return d.DreamLiteMobilePipeline(**dreamlite_parts(d.DreamLiteMobilePipeline))


def qwen_image_21() -> d.QwenImage21Pipeline:
    """Qwen-Image 2.1: one sequence of text and image, four channels of pixels, 16 pixels a latent."""
    words = t.qwen_tokenizer(d.QwenImage21Pipeline)
    autoencoder = d.AutoencoderKLQwenImage21(
        base_dim=8,
        decoder_base_dim=8,
        z_dim=8,
        dim_mult=[1, 2, 2, 2, 2],
        num_res_blocks=1,
        latents_mean=[0.1 * n for n in range(8)],
        latents_std=[0.5 + 0.1 * n for n in range(8)],
    )
    network = d.QwenImage21Transformer2DModel(
        in_channels=8,
        out_channels=8,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        context_in_dim=t.WIDTH,
        axes_dims_rope=(4, 6, 6),
    )
    return d.QwenImage21Pipeline(
        scheduler=Euler(shift=3.0),
        vae=autoencoder,
        text_encoder=t.qwen3_vl(words, head=True),
        processor=t.picture_processor(words, 16),
        transformer=network,
    )


def bria_fibo_2() -> d.BriaFibo2Pipeline:
    """Bria Fibo 2: six bundles of three layers each of a Qwen3-VL of 36 layers."""
    words = t.qwen_tokenizer(d.BriaFibo2Pipeline)
    network = d.BriaFibo2Transformer2DModel(
        in_channels=32,
        dim=32,
        n_layers=6,
        n_refiner_layers=1,
        n_heads=2,
        cap_feat_dim=3 * 16,
        injection_layer_ids=(1, 2, 3, 4, 5),
        perceiver_num_layers=1,
        min_num_gist_tokens=4,
        max_num_gist_tokens=8,
        gist_step=4,
        gist_min_text_len=4,
        gist_max_text_len=32,
        axes_dims=(4, 6, 6),
        axes_lens=(512, 32, 32),
    )
    return d.BriaFibo2Pipeline(
        transformer=network,
        scheduler=Euler(shift=3.0),
        vae=d.AutoencoderKLFlux2(**vae_sizes(32, 4)),
        text_encoder=t.qwen3_vl(words, 16, head=True, layers=36),
        processor=t.picture_processor(words, 16),
    )


def ideogram_4() -> d.Ideogram4Pipeline:
    """Ideogram 4: two networks, with the prompt and without, and thirteen layers of a Qwen3-VL of 36."""
    words = t.qwen_tokenizer(d.Ideogram4Pipeline)
    sizes = {"num_layers": 2, "attention_head_dim": 16, "num_attention_heads": 2, "intermediate_size": 64}
    sizes |= {"adaln_dim": 16, "llm_features_dim": 13 * 16, "mrope_section": (4, 2, 2)}
    networks = [d.Ideogram4Transformer2DModel(in_channels=128, **sizes) for _ in range(2)]
    return d.Ideogram4Pipeline(
        scheduler=Euler(shift=3.0),
        vae=d.AutoencoderKLFlux2(**vae_sizes(32, 4)),
        text_encoder=t.qwen3_vl(words, 16, layers=36),
        tokenizer=words,
        transformer=networks[0],
        unconditional_transformer=networks[1],
    )


def prx_pixel() -> d.PRXPixelPipeline:
    """PRX on pixels: no autoencoder, and noise of twice the deviation."""
    words = t.qwen_tokenizer(longest=24)
    sizes = {"hidden_size": 32, "mlp_ratio": 2.0, "num_heads": 2, "depth": 2, "axes_dim": [8, 8], "patch_size": 8}
    network = d.PRXTransformer2DModel(
        in_channels=3, context_in_dim=t.WIDTH, bottleneck_size=16, resolution_embeds=True, **sizes
    )
    text = {"text_encoder": t.qwen3(words), "tokenizer": words, "prompt_max_tokens": 24}
    return d.PRXPixelPipeline(transformer=network, scheduler=Euler(shift=3.0), **text)


def again(pipeline: type[d.DiffusionPipeline], parts: Callable[[], dict[str, Any]], **call: Any) -> tuple[str, Small]:
    """Return the line of a pipeline that is another call of the components of a pipeline above."""
    return pipeline.__name__, small(lambda: pipeline(**parts()), **call)


def flux_control_parts() -> dict[str, Any]:
    """Return the components of FLUX.1 Canny and Depth."""
    return flux_parts(in_channels=128, out_channels=64)


def klein_parts() -> dict[str, Any]:
    """Return the components of FLUX.2 Klein: features of layers 9, 18 and 27 of Qwen3."""
    words = t.qwen_tokenizer()
    encoder = t.qwen3(words, 8, head=True, num_hidden_layers=27)
    return {"text_encoder": encoder, "tokenizer": words, **flux2_parts(False, 3 * 8)}


def hunyuan_image_refiner() -> d.HunyuanImageRefinerPipeline:
    """The refiner of HunyuanImage 2.1: latents of a picture in channels beside the sample's, in frames."""
    words = t.qwen_tokenizer(d.HunyuanImageRefinerPipeline)
    network = d.HunyuanImageTransformer2DModel(
        in_channels=32,
        out_channels=16,
        num_layers=1,
        num_single_layers=1,
        num_refiner_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        patch_size=(1, 1, 1),
        text_embed_dim=t.WIDTH,
        rope_axes_dim=(4, 6, 6),
        guidance_embeds=True,
    )
    autoencoder = d.AutoencoderKLHunyuanImageRefiner(
        latent_channels=8, block_out_channels=(32, 32, 32, 32), layers_per_block=1, spatial_compression_ratio=8
    )
    text = {"text_encoder": t.qwen25_vl(words), "tokenizer": words}
    return d.HunyuanImageRefinerPipeline(scheduler=Euler(shift=4.0), vae=autoencoder, transformer=network, **text)


def glm_image() -> d.GlmImagePipeline:
    """GLM-Image: a language model draws tokens of the picture first, then ByT5 reads quoted words."""
    marks = {"image_token": "<|image|>", "grid_bos_token": "<|grid|>", "grid_eos_token": "<|/grid|>"}
    words = t.byte_tokenizer(extra_special_tokens=marks)
    sizes = t.decoder_sizes(words, t.WIDTH, vision_vocab_size=64, eos_token_id=99)  # no token of a picture ends one
    sizes |= {"rope_parameters": {"mrope_section": (2, 1, 1), "rope_type": "default", "rope_theta": 1e4}}
    tower = {"depth": 1, "hidden_size": 32, "num_heads": 2, "image_size": 32, "patch_size": 8, "intermediate_size": 32}
    codes = {"embed_dim": 32, "num_embeddings": 64, "latent_channels": 32}
    numbers = {"image_start_token_id": 62, "image_end_token_id": 63}
    config = GlmImageConfig(
        text_config=sizes,
        vision_config=tower,
        vq_config=codes,
        image_token_id=words.convert_tokens_to_ids("<|image|>"),
        **numbers,
    )
    network = d.GlmImageTransformer2DModel(
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        text_embed_dim=t.WIDTH,
        time_embed_dim=32,
        condition_dim=8,
        prior_vq_quantizer_codebook_size=64,
    )
    statistics = {"latents_mean": [0.1 * n for n in range(16)], "latents_std": [0.5 + 0.1 * n for n in range(16)]}
    return d.GlmImagePipeline(
        tokenizer=t.byt5_tokenizer(),
        processor=GlmImageProcessor(GlmImageImageProcessorPil(patch_size=8), words, chat_template=t.CHAT),
        text_encoder=t.t5_encoder(),
        vision_language_encoder=GlmImageForConditionalGeneration(config),
        vae=vae(**statistics),
        transformer=network,
        scheduler=Euler(**SHIFT_BY_SIZE),
    )


FROM = CALL | {"image": PICTURE, "max_sequence_length": 24}
INSIDE = FROM | {"mask_image": HALF}
KONTEXT = {"max_area": 64 * 96, "_auto_resize": False}
QWEN = partial(qwen_image_parts, d.QwenImagePipeline)

IMAGES: dict[str, Small] = {
    "FluxPipeline": small(flux, **CALL, max_sequence_length=16),
    "Flux2Pipeline": small(flux2, **CALL, max_sequence_length=96),
    "Flux2KleinPipeline": small(flux2_klein, **CALL, max_sequence_length=24),
    "ZImagePipeline": small(z_image, **CALL, max_sequence_length=24),
    "ChromaPipeline": small(chroma, **CALL, max_sequence_length=16),
    "QwenImagePipeline": small(qwen_image, **CALL, max_sequence_length=24),
    "StableDiffusion3Pipeline": small(stable_diffusion_3, **CALL, max_sequence_length=16),
    "SanaPipeline": small(sana, **CALL, max_sequence_length=24, use_resolution_binning=False),
    "Lumina2Pipeline": small(lumina2, **CALL, max_sequence_length=64),
    "LuminaPipeline": small(lumina, **CALL, max_sequence_length=24),
    "CogView4Pipeline": small(cogview4, **CALL, max_sequence_length=24),
    "AuraFlowPipeline": small(aura_flow, **CALL, max_sequence_length=16),
    "HiDreamImagePipeline": small(hidream, **CALL, max_sequence_length=16),
    "OvisImagePipeline": small(ovis, **CALL, max_sequence_length=32),
    "BriaPipeline": small(bria, **CALL, max_sequence_length=16),
    "BriaFiboPipeline": small(bria_fibo, **CALL, max_sequence_length=24),
    "PRXPipeline": small(prx, **CALL, use_resolution_binning=False),
    "HunyuanImagePipeline": small(hunyuan_image, **CALL),
    "Kandinsky5T2IPipeline": small(kandinsky5, **CALL, max_sequence_length=32),
    "Krea2Pipeline": small(krea2, **CALL, max_sequence_length=32),
    "LongCatImagePipeline": small(longcat_image, **CALL, enable_prompt_rewrite=False),
    "FluxKontextPipeline": small(
        flux_kontext, **CALL, image=PICTURE, max_area=64 * 96, _auto_resize=False, max_sequence_length=16
    ),
    "FluxFillPipeline": small(flux_fill, **CALL, image=PICTURE, mask_image=HALF, max_sequence_length=16),
    "FluxControlPipeline": small(flux_control, **CALL, control_image=PICTURE, max_sequence_length=16),
    "CogView4ControlPipeline": small(cogview4_control, **CALL, control_image=PICTURE, max_sequence_length=24),
    "QwenImageEditPipeline": small(qwen_image_edit, **CALL, image=PICTURE),
    "QwenImageEditPlusPipeline": small(qwen_image_edit_plus, **CALL, image=[PICTURE, HALF.convert("RGB")]),
    "Kandinsky5I2IPipeline": small(kandinsky5_edit, **CALL, image=PICTURE, max_sequence_length=64),
    "LongCatImageEditPipeline": small(longcat_image_edit, prompt=PROMPT, image=PICTURE),
    "ErnieImagePipeline": small(ernie_image, **CALL),
    "NucleusMoEImagePipeline": small(nucleus, **CALL, max_sequence_length=96),
    "VisualClozeGenerationPipeline": small(
        visual_cloze,
        task_prompt="the big dog and the small cat",
        content_prompt=PROMPT,
        image=[[PICTURE, PICTURE.rotate(180)], [PICTURE.rotate(90, expand=True).resize((96, 64)), None]],
        max_sequence_length=96,
    ),
    "QwenImageLayeredPipeline": small(qwen_image_layered, prompt=PROMPT, image=PICTURE.convert("RGBA"), layers=2),
    "JoyImageEditPipeline": small(joy_image_edit, **CALL, image=PICTURE),
    "DreamLitePipeline": small(dreamlite, **CALL, max_sequence_length=24),
    "DreamLiteMobilePipeline": small(dreamlite_mobile, **CALL, max_sequence_length=24),
    "QwenImage21Pipeline": small(qwen_image_21, **CALL),
    "BriaFibo2Pipeline": small(bria_fibo_2, **CALL),
    "Ideogram4Pipeline": small(ideogram_4, **CALL, max_sequence_length=32, guidance_scale=3.0, guidance_schedule=None),
    "PRXPixelPipeline": small(prx_pixel, **CALL, use_resolution_binning=False),
    "HunyuanImageRefinerPipeline": small(hunyuan_image_refiner, **CALL, image=PICTURE),
    "GlmImagePipeline": small(glm_image, **CALL | {"prompt": PROMPT + ' "up"'}),
}
IMAGES |= dict(
    (
        again(d.FluxImg2ImgPipeline, flux_parts, **FROM),
        again(d.FluxInpaintPipeline, flux_parts, **INSIDE),
        again(d.FluxKontextInpaintPipeline, flux_parts, **INSIDE, **KONTEXT),
        again(d.FluxControlImg2ImgPipeline, flux_control_parts, **FROM, control_image=PICTURE),
        again(d.FluxControlInpaintPipeline, flux_control_parts, **INSIDE, control_image=PICTURE),
        again(d.ChromaImg2ImgPipeline, chroma_parts, **FROM),
        again(d.Flux2KleinKVPipeline, klein_parts, **FROM),
        again(d.Flux2KleinInpaintPipeline, klein_parts, **INSIDE),
        again(d.StableDiffusion3Img2ImgPipeline, stable_diffusion_3_parts, **FROM),
        again(d.StableDiffusion3InpaintPipeline, stable_diffusion_3_parts, **INSIDE),
        again(d.StableDiffusion3PAGPipeline, stable_diffusion_3_parts, **CALL),
        again(d.StableDiffusion3PAGImg2ImgPipeline, stable_diffusion_3_parts, **FROM),
        again(d.ZImageImg2ImgPipeline, z_image_parts, **FROM),
        again(d.ZImageInpaintPipeline, z_image_parts, **INSIDE),
        again(d.QwenImageImg2ImgPipeline, QWEN, **FROM),
        again(d.QwenImageInpaintPipeline, QWEN, **INSIDE),
        again(d.SanaPAGPipeline, partial(sana_parts, d.SanaPipeline), **CALL, use_resolution_binning=False),
    )
)
