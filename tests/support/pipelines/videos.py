"""Small random folders of the video pipelines of diffusers that match flows, by class name."""

import inspect
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
from diffusers import (
    AdaptiveProjectedGuidance,
    AnyFlowFARTransformer3DModel,
    AnyFlowTransformer3DModel,
    AutoencoderKLHunyuanVideo,
    AutoencoderKLMagvit,
    AutoencoderKLMochi,
    AutoencoderKLWan,
    ChronoEditTransformer3DModel,
    Cosmos3OmniTransformer,
    DiffusionPipeline,
    DPMSolverMultistepScheduler,
    EasyAnimateTransformer3DModel,
    FlowMapEulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    HeliosScheduler,
    HeliosTransformer3DModel,
    HunyuanVideoFramepackTransformer3DModel,
    HunyuanVideoTransformer3DModel,
    Kandinsky5Transformer3DModel,
    Kandinsky6Transformer3DModel,
    MochiTransformer3DModel,
    MotifVideoTransformer3DModel,
    SanaVideoTransformer3DModel,
    SanaWMTransformer3DModel,
    SkyReelsV2Transformer3DModel,
    UniPCMultistepScheduler,
    WanAnimateTransformer3DModel,
    WanTransformer3DModel,
    WanVACETransformer3DModel,
)
from diffusers.pipelines.cosmos import pipeline_cosmos3_omni
from diffusers.pipelines.hunyuan_video import pipeline_hunyuan_video_image2video
from diffusers.pipelines.kandinsky6 import pipeline_kandinsky6_ti2va
from diffusers.pipelines.ltx2.pipeline_ltx2_condition import LTX2VideoCondition
from diffusers.pipelines.ltx2.pipeline_ltx2_hdr_lora import LTX2HDRReferenceCondition
from diffusers.pipelines.ltx2.pipeline_ltx2_ic_lora import LTX2ReferenceCondition
from diffusers.pipelines.sana_wm import pipeline_sana_wm
from hunyuan15_folder import hunyuan15_folder
from ltx2_folder import ltx2_folder
from ltx_folder import ltx_folder
from PIL import Image
from tokenizers.processors import TemplateProcessing
from transformers import (
    CLIPImageProcessor,
    CLIPVisionConfig,
    CLIPVisionModel,
    CLIPVisionModelWithProjection,
    LlamaConfig,
    LlamaModel,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedTokenizerFast,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    SiglipImageProcessor,
    SiglipVisionConfig,
    SiglipVisionModel,
    T5Gemma2Encoder,
    T5Gemma2EncoderConfig,
    T5Gemma2TextConfig,
)

from pipelines import Small, small
from pipelines.text import (
    WIDTH,
    byte_tokenizer,
    clip_encoder,
    clip_tokenizer,
    decoder_sizes,
    gemma2,
    gemma_tokenizer,
    qwen25_vl,
    qwen_tokenizer,
    t5_encoder,
    t5_tokenizer,
    vision_marks,
)

PROMPT = "a red circle moves left"
SIZE = {"height": 32, "width": 48}
CALL = {"prompt": PROMPT, **SIZE, "num_frames": 5}
SHORT = {**CALL, "max_sequence_length": 16}
HEADS = {"num_attention_heads": 2, "attention_head_dim": 12}


def picture(seed: int = 0) -> Image.Image:
    """A picture of random colours."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (32, 48, 3), dtype=np.uint8))


def clip(frames: int = 5) -> list[Image.Image]:
    """Frames of random colours."""
    return [picture(seed) for seed in range(frames)]


def frames(seed: int = 0, count: int = 5) -> torch.Tensor:
    """A clip of random numbers [1, 3, count, 32, 48]."""
    return torch.rand(1, 3, count, 32, 48, generator=torch.Generator().manual_seed(seed))


def unipc() -> UniPCMultistepScheduler:
    """The scheduler of Wan's folders."""
    return UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)


def statistics(channels: int) -> dict[str, list[float]]:
    """Random means and deviations of a VAE's latents."""
    return {
        "latents_mean": (0.3 * torch.randn(channels)).tolist(),
        "latents_std": (0.5 + torch.rand(channels)).tolist(),
    }


def wan_vae(channels: int = 16, **sizes: Any) -> AutoencoderKLWan:
    """A VAE of 4 frames of 8 x 8 pixels."""
    common = {"dim_mult": [1] * 4, "num_res_blocks": 1, "temperal_downsample": [False, True, True]}
    return AutoencoderKLWan(base_dim=4, z_dim=channels, **common, **statistics(channels), **sizes)


def wide_vae() -> AutoencoderKLWan:
    """The VAE of TI2V-5B: 48 channels of 4 frames of 16 x 16 pixels."""
    sizes = {"in_channels": 12, "out_channels": 12, "patch_size": 2, "scale_factor_spatial": 16}
    return wan_vae(48, is_residual=True, decoder_base_dim=4, scale_factor_temporal=4, **sizes)


def wan_network(kind: type = WanTransformer3DModel, channels: int = 16, **sizes: Any) -> torch.nn.Module:
    """A network with the arguments of Wan's, of any class that shares them."""
    sizes = {"in_channels": channels, "out_channels": channels, "cross_attn_norm": True, "rope_max_seq_len": 16} | sizes
    return kind(patch_size=(1, 2, 2), **HEADS, text_dim=WIDTH, freq_dim=16, ffn_dim=32, num_layers=2, **sizes)


def wan(pipeline: str, network: Callable[[], torch.nn.Module] = wan_network, **parts: Any) -> DiffusionPipeline:
    """A pipeline of the parts that Wan's has; parts that are functions are called."""
    return getattr(diffusers, pipeline)(
        tokenizer=t5_tokenizer(512),
        text_encoder=t5_encoder(kind="umt5"),
        transformer=network(),
        **{
            name: make() if callable(make) else make
            for name, make in {"vae": wan_vae, "scheduler": unipc, **parts}.items()
        },
    )


def clip_tower(kind: type = CLIPVisionModel, side: int = 28, patch: int = 14) -> CLIPVisionModel:
    """The vision tower of CLIP."""
    sizes = {"intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "projection_dim": 20}
    return kind(CLIPVisionConfig(hidden_size=20, image_size=side, patch_size=patch, **sizes))


def clip_processor(side: int = 28) -> CLIPImageProcessor:
    """Prepares a picture for the tower."""
    return CLIPImageProcessor(size={"shortest_edge": side}, crop_size=side)


TOWER = {"image_encoder": clip_tower, "image_processor": clip_processor}
BESIDE = {"channels": 16, "in_channels": 36}  # latents, four channels of a mask, and latents of pictures
SEEN = {**BESIDE, "image_dim": 20, "added_kv_proj_dim": 24}
EXPERTS = {"transformer_2": wan_network, "boundary_ratio": 0.9}
WAN = {
    "WanPipeline": small(partial(wan, "WanPipeline"), **SHORT),
    "WanPipeline of two experts": small(partial(wan, "WanPipeline", **EXPERTS), **SHORT),
    "WanPipeline with a time per token": small(
        partial(wan, "WanPipeline", partial(wan_network, channels=48), vae=wide_vae, expand_timesteps=True), **SHORT
    ),
    "WanImageToVideoPipeline": small(
        partial(
            wan,
            "WanImageToVideoPipeline",
            partial(wan_network, **BESIDE),
            transformer_2=partial(wan_network, **BESIDE),
            boundary_ratio=0.9,
        ),
        **SHORT,
        image=picture(),
    ),
    "WanImageToVideoPipeline with CLIP": small(
        partial(wan, "WanImageToVideoPipeline", partial(wan_network, **SEEN), **TOWER), **CALL, image=picture()
    ),
    "WanImageToVideoPipeline with a last picture": small(
        partial(wan, "WanImageToVideoPipeline", partial(wan_network, **SEEN, pos_embed_seq_len=10), **TOWER),
        **CALL,
        image=picture(),
        last_image=picture(1),
    ),
    "WanImageToVideoPipeline with a time per token": small(
        partial(wan, "WanImageToVideoPipeline", partial(wan_network, channels=48), vae=wide_vae, expand_timesteps=True),
        **SHORT,
        image=picture(),
    ),
}


def skyreels(pipeline: str, seen: bool = False) -> DiffusionPipeline:
    """A pipeline of SkyReels V2."""
    forcing = "Forcing" in pipeline
    own = {"inject_sample_info": True} if forcing else {}
    sizes = {**SEEN, "added_kv_proj_dim": 24} if seen else {}
    network = partial(wan_network, SkyReelsV2Transformer3DModel, **sizes, **own)
    tower = {**TOWER, "image_encoder": partial(clip_tower, CLIPVisionModelWithProjection)} if seen else {}
    return wan(pipeline, network, **tower)


NINE = {**SHORT, "num_frames": 9}
SKYREELS = {
    "SkyReelsV2Pipeline": small(partial(skyreels, "SkyReelsV2Pipeline"), **SHORT),
    "SkyReelsV2ImageToVideoPipeline": small(
        partial(skyreels, "SkyReelsV2ImageToVideoPipeline", seen=True), **CALL, image=picture()
    ),
    "SkyReelsV2DiffusionForcingPipeline": small(partial(skyreels, "SkyReelsV2DiffusionForcingPipeline"), **NINE),
    "SkyReelsV2DiffusionForcingImageToVideoPipeline": small(
        partial(skyreels, "SkyReelsV2DiffusionForcingImageToVideoPipeline"), **NINE, image=picture()
    ),
    "SkyReelsV2DiffusionForcingVideoToVideoPipeline": small(
        partial(skyreels, "SkyReelsV2DiffusionForcingVideoToVideoPipeline"), **NINE, video=clip(), overlap_history=5
    ),
}


def llama_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of bytes by which the first turns of HunyuanVideo's templates have as many tokens as it cuts off."""
    made = byte_tokenizer(pipeline_hunyuan_video_image2video.DEFAULT_PROMPT_TEMPLATE["template"], longest=256)
    marks = ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|begin_of_text|>", "<image>"]
    made.add_special_tokens({"additional_special_tokens": marks})
    made.add_tokens(["\n\n", "system", "assistant"])  # one token each in Llama's own vocabulary
    made._tokenizer.post_processor = TemplateProcessing(
        single="<|begin_of_text|> $A", special_tokens=[(marks[3], made.convert_tokens_to_ids(marks[3]))]
    )
    return made


def llama_config(words: PreTrainedTokenizerFast) -> LlamaConfig:
    """The sizes of a Llama of few layers."""
    sizes = {"num_hidden_layers": 4, "num_attention_heads": 2, "hidden_size": WIDTH, "intermediate_size": 32}
    return LlamaConfig(vocab_size=len(words), pad_token_id=words.pad_token_id, **sizes)


def hunyuan_vae(channels: int = 4) -> AutoencoderKLHunyuanVideo:
    """A VAE of 4 frames of 8 x 8 pixels."""
    return AutoencoderKLHunyuanVideo(
        latent_channels=channels, block_out_channels=(8,) * 4, layers_per_block=1, norm_num_groups=4
    )


def hunyuan(
    pipeline: str, kind: type = HunyuanVideoTransformer3DModel, sizes: dict[str, Any] | None = None, **parts: Any
) -> DiffusionPipeline:
    """A pipeline of HunyuanVideo."""
    words = llama_tokenizer()
    network = {"in_channels": 4, "patch_size": 1, "guidance_embeds": True, **(sizes or {})}
    return getattr(diffusers, pipeline)(
        text_encoder=parts.pop("text_encoder", lambda words: LlamaModel(llama_config(words)))(words),
        tokenizer=words,
        transformer=kind(
            out_channels=4,
            **HEADS,
            num_layers=2,
            num_single_layers=2,
            num_refiner_layers=1,
            patch_size_t=1,
            text_embed_dim=WIDTH,
            pooled_projection_dim=WIDTH,
            rope_axes_dim=(4, 4, 4),
            **network,
        ),
        vae=hunyuan_vae(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=7.0),
        text_encoder_2=clip_encoder(longest=77),
        tokenizer_2=clip_tokenizer(77),
        **{name: make() for name, make in parts.items()},
    )


def llava(words: PreTrainedTokenizerFast) -> LlavaForConditionalGeneration:
    """A Llama that reads a picture as the 576 tokens of HunyuanVideo's template."""
    tower = clip_tower(side=48, patch=2).config
    image = words.convert_tokens_to_ids("<image>")
    return LlavaForConditionalGeneration(
        LlavaConfig(
            vision_config=tower,
            text_config=llama_config(words),
            image_token_index=image,
            pad_token_id=words.pad_token_id,
        )
    )


def siglip_tower(side: int = 28) -> dict[str, Callable[[], Any]]:
    """The vision tower of SigLIP and what prepares a picture for it."""
    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    return {
        "image_encoder": lambda: SiglipVisionModel(SiglipVisionConfig(image_size=side, patch_size=14, **sizes)),
        "feature_extractor": lambda: SiglipImageProcessor(size={"height": side, "width": side}),
    }


FRAMEPACK = {"patch_size": 2, "has_image_proj": True, "image_proj_dim": 8, "has_clean_x_embedder": True}
HUNYUAN = {
    "HunyuanVideoPipeline": small(partial(hunyuan, "HunyuanVideoPipeline"), **SHORT),
    "HunyuanVideoImageToVideoPipeline": small(
        partial(
            hunyuan,
            "HunyuanVideoImageToVideoPipeline",
            sizes={"in_channels": 9, "guidance_embeds": False, "image_condition_type": "latent_concat"},
            text_encoder=llava,
            image_processor=partial(clip_processor, 48),
        ),
        **NINE,
        image=picture(),
    ),
    "HunyuanVideoImageToVideoPipeline with a replaced frame": small(
        partial(
            hunyuan,
            "HunyuanVideoImageToVideoPipeline",
            sizes={"image_condition_type": "token_replace"},
            text_encoder=llava,
            image_processor=partial(clip_processor, 48),
        ),
        **SHORT,
        image=picture(),
    ),
    "HunyuanSkyreelsImageToVideoPipeline": small(
        partial(hunyuan, "HunyuanSkyreelsImageToVideoPipeline", sizes={"in_channels": 8}), **SHORT, image=picture()
    ),
    "HunyuanVideoFramepackPipeline": small(
        partial(
            hunyuan,
            "HunyuanVideoFramepackPipeline",
            HunyuanVideoFramepackTransformer3DModel,
            FRAMEPACK,
            **siglip_tower(),
        ),
        **SHORT,
        image=picture(),
        latent_window_size=3,
    ),
}


def opened(write: Callable[[Path], Path], pipeline: str = "", **parts: Any) -> DiffusionPipeline:
    """The pipeline of a folder that another module writes, or one of another class with its parts."""
    with tempfile.TemporaryDirectory() as folder:
        made = DiffusionPipeline.from_pretrained(write(Path(folder)))
    if not pipeline:
        return made
    kind = getattr(diffusers, pipeline)
    taken = inspect.signature(kind.__init__).parameters
    return kind(**{name: part for name, part in (made.components | parts).items() if name in taken})


TILES = {"prompt": PROMPT, "height": 64, "width": 96, "num_frames": 9}
IMAGE_15 = {"prompt": PROMPT, "num_frames": 5, "image": picture()}
OTHERS = {
    "HunyuanVideo15Pipeline": small(partial(opened, hunyuan15_folder), **CALL),
    "HunyuanVideo15ImageToVideoPipeline": small(partial(opened, partial(hunyuan15_folder, image=True)), **IMAGE_15),
    "LTXPipeline": small(partial(opened, ltx_folder), **TILES),
    "LTXImageToVideoPipeline": small(partial(opened, ltx_folder, "LTXImageToVideoPipeline"), **TILES, image=picture()),
    "LTXConditionPipeline": small(
        partial(opened, ltx_folder, "LTXConditionPipeline", scheduler=FlowMatchEulerDiscreteScheduler()),
        **TILES,
        image=picture(),
    ),
    "LTXI2VLongMultiPromptPipeline": small(
        partial(opened, ltx_folder, "LTXI2VLongMultiPromptPipeline", scheduler=FlowMatchEulerDiscreteScheduler()),
        **TILES,
        cond_image=picture(),
        decode_horizontal_tiles=1,
        decode_vertical_tiles=1,
    ),
    "LTX2Pipeline": small(partial(opened, ltx2_folder), **TILES),
    "LTX2ImageToVideoPipeline": small(
        partial(opened, ltx2_folder, "LTX2ImageToVideoPipeline"), **TILES, image=picture()
    ),
    "LTX2ConditionPipeline": small(
        partial(opened, ltx2_folder, "LTX2ConditionPipeline"),
        **TILES,
        conditions=LTX2VideoCondition(frames=frames()[:, :, 0], index=0, strength=1.0, crf=0),
    ),
    "LTX2InContextPipeline": small(
        partial(opened, ltx2_folder, "LTX2InContextPipeline"),
        **TILES,
        reference_conditions=LTX2ReferenceCondition(frames=frames(count=9)[0].movedim(0, 1)),
    ),
    "LTX2HDRPipeline": small(
        partial(opened, ltx2_folder, "LTX2HDRPipeline"),
        **TILES,
        reference_conditions=LTX2HDRReferenceCondition(frames=frames(count=9)[0].movedim(0, 1)),
    ),
}


def mochi() -> DiffusionPipeline:
    """A pipeline of Mochi."""
    network = MochiTransformer3DModel(
        patch_size=2,
        num_attention_heads=2,
        attention_head_dim=8,
        num_layers=3,
        pooled_projection_dim=16,
        in_channels=12,
        text_embed_dim=WIDTH,
        time_embed_dim=4,
        max_sequence_length=16,
    )
    widths = {f"{side}_block_out_channels": (32,) * 4 for side in ("encoder", "decoder")}
    return diffusers.MochiPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(invert_sigmas=True),
        vae=AutoencoderKLMochi(latent_channels=12, layers_per_block=(1,) * 5, **widths, **statistics(12)),
        text_encoder=t5_encoder(),
        tokenizer=t5_tokenizer(),
        transformer=network,
    )


def kandinsky(pipeline: str, seen: bool) -> DiffusionPipeline:
    """A pipeline of Kandinsky 5; its processor needs torchvision, and its pipelines ask for text alone."""
    words = qwen_tokenizer(getattr(diffusers, pipeline).__init__)
    words.add_tokens("the")
    network = Kandinsky5Transformer3DModel(
        in_visual_dim=16,
        in_text_dim=WIDTH,
        in_text_dim2=WIDTH,
        time_dim=16,
        out_visual_dim=16,
        model_dim=16,
        ff_dim=32,
        num_text_blocks=1,
        num_visual_blocks=2,
        axes_dims=(2, 2, 4),
        visual_cond=seen,
    )
    return getattr(diffusers, pipeline)(
        transformer=network,
        vae=hunyuan_vae(16),
        text_encoder=qwen25_vl(words),
        tokenizer=words,
        text_encoder_2=clip_encoder(longest=77),
        tokenizer_2=clip_tokenizer(77),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=5.0),
    )


def sana(pipeline: str, **parts: Any) -> DiffusionPipeline:
    """A pipeline of SANA-Video."""
    kind = getattr(diffusers, pipeline)
    told = inspect.signature(kind.__call__).parameters["complex_human_instruction"].default
    words = gemma_tokenizer(" ".join(told))
    network = SanaVideoTransformer3DModel(
        **HEADS,
        num_layers=2,
        num_cross_attention_heads=2,
        cross_attention_head_dim=12,
        cross_attention_dim=24,
        caption_channels=WIDTH,
        sample_size=8,
        rope_max_seq_len=32,
    )
    return kind(
        tokenizer=words,
        text_encoder=gemma2(words),
        vae=wan_vae(),
        transformer=network,
        scheduler=parts.get("scheduler")
        or DPMSolverMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=8.0),
    )


def motif(pipeline: str, seen: bool = False) -> DiffusionPipeline:
    """A pipeline of Motif-Video."""
    words = gemma_tokenizer()
    tower = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    tower |= {"image_size": 28, "patch_size": 14}
    text = T5Gemma2TextConfig(**decoder_sizes(words, WIDTH, sliding_window=64), dropout_rate=0.0)
    network = MotifVideoTransformer3DModel(
        in_channels=33,
        out_channels=16,
        **HEADS,
        num_layers=2,
        num_single_layers=2,
        patch_size=1,
        text_embed_dim=WIDTH,
        image_embed_dim=8 if seen else None,
        rope_axes_dim=(4, 4, 4),
    )
    return getattr(diffusers, pipeline)(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=7.0),
        vae=wan_vae(),
        text_encoder=T5Gemma2Encoder(
            T5Gemma2EncoderConfig(text_config=text, vision_config=SiglipVisionConfig(**tower))
        ),
        tokenizer=words,
        transformer=network,
        guider=AdaptiveProjectedGuidance(),
        feature_extractor=siglip_tower()["feature_extractor"]() if seen else None,
    )


def qwen2_vl(words: Any) -> Qwen2VLForConditionalGeneration:
    """A language model of Qwen2-VL."""
    rope = {"mrope_section": [1, 1, 2], "rope_type": "default", "type": "default"}
    text = decoder_sizes(words, WIDTH) | {"rope_scaling": rope, "rope_theta": 1e6}
    tower = {"depth": 1, "embed_dim": 16, "hidden_size": WIDTH, "num_heads": 2, "mlp_ratio": 1}
    return Qwen2VLForConditionalGeneration(Qwen2VLConfig(text_config=text, vision_config=tower, **vision_marks(words)))


def easyanimate(pipeline: str, channels: int = 4) -> DiffusionPipeline:
    """A pipeline of EasyAnimate."""
    words = qwen_tokenizer()
    sides = {
        side: [f"Spatial{kind}{side.title()}Block3D" for kind in ("", *["Temporal"] * 3)] for side in ("down", "up")
    }
    return getattr(diffusers, pipeline)(
        vae=AutoencoderKLMagvit(
            latent_channels=4,
            block_out_channels=[8] * 4,
            layers_per_block=1,
            norm_num_groups=2,
            spatial_group_norm=False,
            **{f"{side}_block_types": blocks for side, blocks in sides.items()},
        ),
        text_encoder=qwen2_vl(words),
        tokenizer=words,
        transformer=EasyAnimateTransformer3DModel(
            num_attention_heads=2,
            attention_head_dim=16,
            in_channels=channels,
            out_channels=4,
            patch_size=2,
            sample_width=16,
            sample_height=16,
            num_layers=2,
            mmdit_layers=2,
            time_embed_dim=8,
            text_embed_dim=WIDTH,
            resize_inpaint_mask_directly=False,  # its other way asks for a setting that the VAE has not
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=5.0),
    )


def helios_network() -> HeliosTransformer3DModel:
    """The network of Helios."""
    sizes = {"text_dim": WIDTH, "freq_dim": 16, "ffn_dim": 32, "num_layers": 2, "rope_dim": (4, 4, 4)}
    return HeliosTransformer3DModel(**HEADS, **sizes)


def animate_network() -> WanAnimateTransformer3DModel:
    """The network of Wan-Animate, which also reads a pose and a face."""
    return wan_network(
        WanAnimateTransformer3DModel,
        **{**SEEN, "latent_channels": 16},
        motion_encoder_channel_sizes={"4": 16, "8": 16, "16": 16},
        motion_encoder_size=16,
        motion_style_dim=8,
        motion_dim=4,
        motion_encoder_dim=16,
        face_encoder_hidden_dim=16,
        face_encoder_num_heads=2,
        inject_face_latents_blocks=2,
    )


def flow_map_network(kind: type, **sizes: Any) -> torch.nn.Module:
    """A network of AnyFlow, which is told the time at which a step ends."""
    return wan_network(kind, gate_value=0.25, deltatime_type="r", **sizes)


SANA = {
    "prompt": PROMPT,
    "height": 32,
    "width": 64,
    "frames": 5,
    "max_sequence_length": 16,
    "use_resolution_binning": False,
}


def cosmos3() -> DiffusionPipeline:
    """A pipeline of Cosmos 3 without what judges prompts and videos."""
    words = qwen_tokenizer(pipeline_cosmos3_omni._SYSTEM_PROMPT_VIDEO)
    network = Cosmos3OmniTransformer(
        head_dim=12,
        hidden_size=24,
        intermediate_size=32,
        latent_channel=16,
        latent_patch_size=2,
        patch_latent_dim=64,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_hidden_layers=2,
        rope_axes_dim=[2, 2, 2],
        vocab_size=len(words),
    )
    return diffusers.Cosmos3OmniPipeline(
        transformer=network, text_tokenizer=words, vae=wan_vae(), scheduler=unipc(), enable_safety_checker=False
    )


def kandinsky6() -> DiffusionPipeline:
    """A pipeline of Kandinsky 6 without its sound."""
    words = qwen_tokenizer(pipeline_kandinsky6_ti2va._PROMPT_TEMPLATE)
    network = Kandinsky6Transformer3DModel(
        in_text_dim=WIDTH,
        in_text_dim2=WIDTH,
        time_dim=16,
        model_dim=16,
        ff_dim=32,
        num_text_blocks=1,
        num_visual_blocks=2,
        axes_dims=(2, 2, 4),
        model_dim_a=16,
        time_dim_a=16,
        ff_dim_a=32,
        axes_dims_a=(2, 2, 4),
        visual_token_type_num_embeddings=2,
    )
    return diffusers.Kandinsky6TI2VAPipeline(
        transformer=network,
        vae=hunyuan_vae(16),
        text_encoder=qwen25_vl(words),
        tokenizer=words,
        text_encoder_2=clip_encoder(longest=77),
        tokenizer_2=clip_tokenizer(77),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=5.0),
    )


def sana_wm() -> DiffusionPipeline:
    """A pipeline of SANA-WM, whose camera moves."""
    words = gemma_tokenizer(" ".join(pipeline_sana_wm.DEFAULT_CHI_PROMPT))
    network = SanaWMTransformer3DModel(
        in_channels=16,
        num_layers=2,
        hidden_size=48,
        num_attention_heads=2,
        softmax_every_n=2,
        linear_head_dim=24,
        chunk_plucker_post_attn_blocks=2,
        image_size=64,
        caption_channels=WIDTH,
    )
    return diffusers.SanaWMPipeline(
        tokenizer=words,
        text_encoder=gemma2(words),
        vae=opened(ltx2_folder).vae,
        transformer=network,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=5.0),
    )


FLOW_MAP = partial(FlowMapEulerDiscreteScheduler, shift=5.0)
EULER = partial(FlowMatchEulerDiscreteScheduler, shift=5.0)
PATH = np.stack([np.eye(4, dtype=np.float32)] * 9)
PATH[:, 2, 3] = np.arange(9) / 10
MORE = {
    "Cosmos3OmniPipeline": small(cosmos3, **CALL),
    "Kandinsky6TI2VAPipeline": small(kandinsky6, **SHORT, sample_audio=False),
    "Kandinsky6TI2VAPipeline with a picture": small(kandinsky6, **SHORT, sample_audio=False, image=picture()),
    "SanaWMPipeline": small(
        sana_wm, **TILES, image=picture(), c2w=PATH, intrinsics=[48.0, 48.0, 24.0, 16.0], max_sequence_length=16
    ),
    "Kandinsky5T2VPipeline": small(partial(kandinsky, "Kandinsky5T2VPipeline", False), **SHORT),
    "Kandinsky5I2VPipeline": small(
        partial(kandinsky, "Kandinsky5I2VPipeline", True), **SHORT | {"num_frames": 17}, image=picture()
    ),
    "SanaVideoPipeline": small(partial(sana, "SanaVideoPipeline"), **SANA),
    "SanaImageToVideoPipeline": small(
        partial(sana, "SanaImageToVideoPipeline", scheduler=EULER()), **SANA, image=picture()
    ),
    "ChronoEditPipeline": small(
        partial(
            wan,
            "ChronoEditPipeline",
            partial(wan_network, ChronoEditTransformer3DModel, **SEEN),
            **TOWER,
            scheduler=EULER,
        ),
        **CALL,
        image=picture(),
    ),
    "HeliosPipeline": small(
        partial(
            wan,
            "HeliosPipeline",
            helios_network,
            scheduler=partial(HeliosScheduler, stage_range=[0, 1], stages=1, use_dynamic_shifting=True),
        ),
        **SHORT,
        num_latent_frames_per_chunk=2,
    ),
    "MotifVideoPipeline": small(partial(motif, "MotifVideoPipeline"), **SHORT),
    "MotifVideoImage2VideoPipeline": small(
        partial(motif, "MotifVideoImage2VideoPipeline", seen=True), **SHORT, image=picture()
    ),
    "WanVACEPipeline": small(
        partial(wan, "WanVACEPipeline", partial(wan_network, WanVACETransformer3DModel, vace_layers=[0, 1])),
        **SHORT,
        video=clip(),
        mask=[Image.new("L", (48, 32), 255 * (n % 2)) for n in range(5)],
    ),
    "WanVideoToVideoPipeline": small(
        partial(wan, "WanVideoToVideoPipeline"), **{k: v for k, v in SHORT.items() if k != "num_frames"}, video=clip()
    ),
    "WanAnimatePipeline": small(
        partial(wan, "WanAnimatePipeline", animate_network, **TOWER),
        prompt=PROMPT,
        **SIZE,
        image=picture(),
        pose_video=clip(),
        face_video=[picture(seed).resize((32, 32)) for seed in range(5)],
        segment_frame_length=5,
    ),
    "LucyEditPipeline": small(
        partial(
            wan,
            "LucyEditPipeline",
            partial(wan_network, in_channels=96, out_channels=48),
            vae=wide_vae,
            scheduler=EULER,
            expand_timesteps=True,
        ),
        **SHORT | {"height": 64, "width": 96},
        video=clip(),
    ),
    "EasyAnimatePipeline": small(partial(easyanimate, "EasyAnimatePipeline"), **CALL, negative_prompt=""),
    "EasyAnimateInpaintPipeline": small(
        partial(easyanimate, "EasyAnimateInpaintPipeline", 12),
        **CALL,
        negative_prompt="",
        video=frames(),
        mask_video=(frames(1)[:, :1] > 0.5).float(),
    ),
    "AnyFlowPipeline": small(
        partial(wan, "AnyFlowPipeline", partial(flow_map_network, AnyFlowTransformer3DModel), scheduler=FLOW_MAP),
        **SHORT,
    ),
    "AnyFlowFARPipeline": small(
        partial(
            wan,
            "AnyFlowFARPipeline",
            partial(flow_map_network, AnyFlowFARTransformer3DModel, chunk_partition=(1, 1, 1)),
            scheduler=FLOW_MAP,
        ),
        **NINE,
    ),
}


VIDEOS: dict[str, Small] = {
    **MORE,
    **WAN,
    **SKYREELS,
    **HUNYUAN,
    **OTHERS,
    "MochiPipeline": small(mochi, **{**SHORT, "num_frames": 7}),
}
