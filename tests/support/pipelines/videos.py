"""Small random folders of the video pipelines of diffusers that match flows.

Each builds one class; a name of more words is a second folder of the class that its first word names.
"""

import inspect
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import diffusers as d
import numpy as np
import torch
import transformers
from diffusers import FlowMatchEulerDiscreteScheduler as Euler
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

from pipelines import Small, small
from pipelines import text as t

HEADS = {"num_attention_heads": 2, "attention_head_dim": 12}
TINY = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2}
TOWER = TINY | {"image_size": 28, "patch_size": 14}


def picture(seed: int = 0) -> Image.Image:
    """A picture of random colors."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (32, 48, 3), dtype=np.uint8))


def frames(seed: int = 0, count: int = 5) -> torch.Tensor:
    """A clip of random numbers [1, 3, count, 32, 48]."""
    return torch.rand(1, 3, count, 32, 48, generator=torch.Generator().manual_seed(seed))


def unipc() -> d.UniPCMultistepScheduler:
    """The scheduler of Wan's folders."""
    return d.UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)


def statistics(channels: int) -> dict[str, list[float]]:
    """Random means and deviations of a VAE's latents."""
    return {
        "latents_mean": (0.3 * torch.randn(channels)).tolist(),
        "latents_std": (0.5 + torch.rand(channels)).tolist(),
    }


def wan_vae(channels: int = 16, **sizes: Any) -> d.AutoencoderKLWan:
    """A VAE of 4 frames of 8 x 8 pixels."""
    common = {"dim_mult": [1] * 4, "num_res_blocks": 1, "temperal_downsample": [False, True, True]}
    return d.AutoencoderKLWan(base_dim=4, z_dim=channels, **common, **statistics(channels), **sizes)


def wide_vae() -> d.AutoencoderKLWan:
    """The VAE of TI2V-5B: 48 channels of 4 frames of 16 x 16 pixels."""
    sizes = {"in_channels": 12, "out_channels": 12, "patch_size": 2, "scale_factor_spatial": 16}
    return wan_vae(48, is_residual=True, decoder_base_dim=4, scale_factor_temporal=4, **sizes)


def wan_network(kind: type, channels: int = 16, **sizes: Any) -> torch.nn.Module:
    """A network with the arguments of Wan's, of any class that shares them."""
    sizes = {"in_channels": channels, "out_channels": channels, "cross_attn_norm": True, "rope_max_seq_len": 16} | sizes
    return kind(patch_size=(1, 2, 2), **HEADS, text_dim=t.WIDTH, freq_dim=16, ffn_dim=32, num_layers=2, **sizes)


def clip_processor(side: int = 28) -> transformers.CLIPImageProcessor:
    """Prepares a picture for a tower of CLIP."""
    return transformers.CLIPImageProcessor(size={"shortest_edge": side}, crop_size=side)


def wan(
    kind: type[d.DiffusionPipeline],
    network: type = d.WanTransformer3DModel,
    tower: str = "",
    *,
    vae: Callable[[], d.AutoencoderKLWan] = wan_vae,
    scheduler: Callable[[], Any] = unipc,
    second: bool = False,
    expand_timesteps: bool | None = None,
    **sizes: Any,
) -> d.DiffusionPipeline:
    """A pipeline of the components that Wan's has, with a tower of CLIP for pictures, or with two experts."""
    parts: dict[str, Any] = {}
    if expand_timesteps is not None:
        parts |= {"expand_timesteps": expand_timesteps}
    if second:
        parts |= {"transformer_2": wan_network(network, **sizes), "boundary_ratio": 0.9}
    if tower:
        config = transformers.CLIPVisionConfig(projection_dim=8, **TOWER)
        parts |= {"image_encoder": getattr(transformers, tower)(config), "image_processor": clip_processor()}
    return kind(
        tokenizer=t.t5_tokenizer(longest=512),
        text_encoder=t.t5_encoder(kind="umt5"),
        transformer=wan_network(network, **sizes),
        vae=vae(),
        scheduler=scheduler(),
        **parts,
    )


def helios(kind: type[d.DiffusionPipeline]) -> d.DiffusionPipeline:
    """A pipeline of Helios, whose network also reads the frames of before."""
    sizes = {"text_dim": t.WIDTH, "freq_dim": 16, "ffn_dim": 32, "num_layers": 2, "rope_dim": (4, 4, 4)}
    return kind(
        tokenizer=t.t5_tokenizer(longest=512),
        text_encoder=t.t5_encoder(kind="umt5"),
        transformer=d.HeliosTransformer3DModel(**HEADS, **sizes),
        vae=wan_vae(),
        scheduler=d.HeliosScheduler(stage_range=[0, 1], stages=1, use_dynamic_shifting=True),
    )


def llama_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """A tokenizer of bytes by which the first turns of HunyuanVideo's templates have as many tokens as it cuts off."""
    made = t.byte_tokenizer(pipeline_hunyuan_video_image2video.DEFAULT_PROMPT_TEMPLATE["template"], longest=256)
    marks = ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|begin_of_text|>", "<image>"]
    made.add_special_tokens({"additional_special_tokens": marks})
    made.add_tokens(["\n\n", "system", "assistant"])  # one token each in Llama's own vocabulary
    made._tokenizer.post_processor = TemplateProcessing(
        single="<|begin_of_text|> $A", special_tokens=[(marks[3], made.convert_tokens_to_ids(marks[3]))]
    )
    return made


def llama_config(words: transformers.PreTrainedTokenizerFast) -> transformers.LlamaConfig:
    """The sizes of a Llama of few layers."""
    sizes = {"num_hidden_layers": 4, "num_attention_heads": 2, "hidden_size": t.WIDTH, "intermediate_size": 32}
    return transformers.LlamaConfig(vocab_size=len(words), pad_token_id=words.pad_token_id, **sizes)


def llava(words: transformers.PreTrainedTokenizerFast) -> transformers.LlavaForConditionalGeneration:
    """A Llama that reads a picture as the 576 tokens of HunyuanVideo's template."""
    tower = transformers.CLIPVisionConfig(image_size=48, patch_size=2, **TINY)
    image = words.convert_tokens_to_ids("<image>")
    return transformers.LlavaForConditionalGeneration(
        transformers.LlavaConfig(
            vision_config=tower,
            text_config=llama_config(words),
            image_token_index=image,
            pad_token_id=words.pad_token_id,
        )
    )


def cropped() -> dict[str, Any]:
    """Prepares a picture for the tower of the text encoder."""
    return {"image_processor": clip_processor(48)}


def siglip() -> dict[str, Any]:
    """The tower of SigLIP, and what prepares a picture for it."""
    return {
        "image_encoder": transformers.SiglipVisionModel(transformers.SiglipVisionConfig(**TOWER)),
        "feature_extractor": siglip_processor(),
    }


def siglip_processor() -> transformers.SiglipImageProcessor:
    """Prepares a picture for a tower of SigLIP."""
    return transformers.SiglipImageProcessor(size={"height": 28, "width": 28})


def hunyuan_vae(channels: int = 4) -> d.AutoencoderKLHunyuanVideo:
    """A VAE of 4 frames of 8 x 8 pixels."""
    return d.AutoencoderKLHunyuanVideo(
        latent_channels=channels, block_out_channels=(8,) * 4, layers_per_block=1, norm_num_groups=4
    )


def hunyuan(
    kind: type[d.DiffusionPipeline],
    network: type = d.HunyuanVideoTransformer3DModel,
    reads: Callable[[Any], Any] | None = None,
    parts: Callable[[], dict[str, Any]] = dict,
    **sizes: Any,
) -> d.DiffusionPipeline:
    """A pipeline of HunyuanVideo, whose text encoder may read a picture too."""
    words = llama_tokenizer()
    sizes = {"in_channels": 4, "patch_size": 1, "guidance_embeds": True} | sizes
    return kind(
        text_encoder=reads(words) if reads else transformers.LlamaModel(llama_config(words)),
        tokenizer=words,
        transformer=network(
            out_channels=4,
            **HEADS,
            num_layers=2,
            num_single_layers=2,
            num_refiner_layers=1,
            patch_size_t=1,
            text_embed_dim=t.WIDTH,
            pooled_projection_dim=t.WIDTH,
            rope_axes_dim=(4, 4, 4),
            **sizes,
        ),
        vae=hunyuan_vae(),
        scheduler=Euler(shift=7.0),
        text_encoder_2=t.clip_encoder(longest=77),
        tokenizer_2=t.clip_tokenizer(77),
        **parts(),
    )


def opened(kind: type[d.DiffusionPipeline], write: Callable[[Path], Path], **parts: Any) -> d.DiffusionPipeline:
    """A pipeline of the components of a folder that another module writes."""
    with tempfile.TemporaryDirectory() as folder:
        made = d.DiffusionPipeline.from_pretrained(write(Path(folder))).components
    taken = inspect.signature(kind.__init__).parameters
    return kind(**{name: part for name, part in (made | parts).items() if name in taken})


def mochi(kind: type[d.DiffusionPipeline]) -> d.DiffusionPipeline:
    """A pipeline of Mochi."""
    network = d.MochiTransformer3DModel(
        patch_size=2,
        num_attention_heads=2,
        attention_head_dim=8,
        num_layers=3,
        pooled_projection_dim=16,
        in_channels=12,
        text_embed_dim=t.WIDTH,
        time_embed_dim=4,
        max_sequence_length=16,
    )
    widths = {f"{side}_block_out_channels": (32,) * 4 for side in ("encoder", "decoder")}
    return kind(
        scheduler=Euler(invert_sigmas=True),
        vae=d.AutoencoderKLMochi(latent_channels=12, layers_per_block=(1,) * 5, **widths, **statistics(12)),
        text_encoder=t.t5_encoder(),
        tokenizer=t.t5_tokenizer(),
        transformer=network,
    )


def kandinsky(kind: type[d.DiffusionPipeline], seen: bool = False) -> d.DiffusionPipeline:
    """A pipeline of Kandinsky 5; its processor needs torchvision, and its pipelines ask for text alone."""
    words = t.qwen_tokenizer(kind.__init__)
    network = d.Kandinsky5Transformer3DModel(
        in_visual_dim=16,
        in_text_dim=t.WIDTH,
        in_text_dim2=t.WIDTH,
        time_dim=16,
        out_visual_dim=16,
        model_dim=16,
        ff_dim=32,
        num_text_blocks=1,
        num_visual_blocks=2,
        axes_dims=(2, 2, 4),
        visual_cond=seen,
    )
    return kind(
        transformer=network,
        vae=hunyuan_vae(16),
        text_encoder=t.qwen25_vl(words),
        tokenizer=words,
        text_encoder_2=t.clip_encoder(longest=77),
        tokenizer_2=t.clip_tokenizer(77),
        scheduler=Euler(shift=5.0),
    )


def kandinsky6(kind: type[d.DiffusionPipeline]) -> d.DiffusionPipeline:
    """A pipeline of Kandinsky 6 without its sound."""
    words = t.qwen_tokenizer(pipeline_kandinsky6_ti2va._PROMPT_TEMPLATE)
    network = d.Kandinsky6Transformer3DModel(
        in_text_dim=t.WIDTH,
        in_text_dim2=t.WIDTH,
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
    return kind(
        transformer=network,
        vae=hunyuan_vae(16),
        text_encoder=t.qwen25_vl(words),
        tokenizer=words,
        text_encoder_2=t.clip_encoder(longest=77),
        tokenizer_2=t.clip_tokenizer(77),
        scheduler=Euler(shift=5.0),
    )


def sana(kind: type[d.DiffusionPipeline], scheduler: Callable[[], Any]) -> d.DiffusionPipeline:
    """A pipeline of SANA-Video."""
    told = inspect.signature(kind.__call__).parameters["complex_human_instruction"].default
    words = t.gemma_tokenizer(" ".join(told))
    network = d.SanaVideoTransformer3DModel(
        **HEADS,
        num_layers=2,
        num_cross_attention_heads=2,
        cross_attention_head_dim=12,
        cross_attention_dim=24,
        caption_channels=t.WIDTH,
        sample_size=8,
        rope_max_seq_len=32,
    )
    return kind(
        tokenizer=words,
        text_encoder=t.gemma2(words),
        vae=wan_vae(),
        transformer=network,
        scheduler=scheduler(),
    )


def sana_wm(kind: type[d.DiffusionPipeline]) -> d.DiffusionPipeline:
    """A pipeline of SANA-WM, whose camera moves."""
    words = t.gemma_tokenizer(" ".join(pipeline_sana_wm.DEFAULT_CHI_PROMPT))
    network = d.SanaWMTransformer3DModel(
        in_channels=16,
        num_layers=2,
        hidden_size=48,
        num_attention_heads=2,
        softmax_every_n=2,
        linear_head_dim=24,
        chunk_plucker_post_attn_blocks=2,
        image_size=64,
        caption_channels=t.WIDTH,
    )
    return kind(
        tokenizer=words,
        text_encoder=t.gemma2(words),
        vae=opened(d.LTX2Pipeline, ltx2_folder).vae,
        transformer=network,
        scheduler=Euler(shift=5.0),
    )


def motif(kind: type[d.DiffusionPipeline], seen: bool = False) -> d.DiffusionPipeline:
    """A pipeline of Motif-Video."""
    words = t.gemma_tokenizer()
    text = transformers.T5Gemma2TextConfig(**t.decoder_sizes(words, t.WIDTH, sliding_window=64), dropout_rate=0.0)
    network = d.MotifVideoTransformer3DModel(
        in_channels=33,
        out_channels=16,
        **HEADS,
        num_layers=2,
        num_single_layers=2,
        patch_size=1,
        text_embed_dim=t.WIDTH,
        image_embed_dim=8 if seen else None,
        rope_axes_dim=(4, 4, 4),
    )
    return kind(
        scheduler=Euler(shift=7.0),
        vae=wan_vae(),
        text_encoder=transformers.T5Gemma2Encoder(
            transformers.T5Gemma2EncoderConfig(text_config=text, vision_config=transformers.SiglipVisionConfig(**TOWER))
        ),
        tokenizer=words,
        transformer=network,
        guider=d.AdaptiveProjectedGuidance(),
        feature_extractor=siglip_processor() if seen else None,
    )


def qwen2_vl(words: Any) -> transformers.Qwen2VLForConditionalGeneration:
    """A language model of Qwen2-VL."""
    rope = {"mrope_section": [1, 1, 2], "rope_type": "default", "type": "default"}
    text = t.decoder_sizes(words, t.WIDTH) | {"rope_scaling": rope, "rope_theta": 1e6}
    tower = {"depth": 1, "embed_dim": 16, "hidden_size": t.WIDTH, "num_heads": 2, "mlp_ratio": 1}
    config = transformers.Qwen2VLConfig(text_config=text, vision_config=tower, **t.vision_marks(words))
    return transformers.Qwen2VLForConditionalGeneration(config)


def easyanimate(kind: type[d.DiffusionPipeline], channels: int = 4) -> d.DiffusionPipeline:
    """A pipeline of EasyAnimate."""
    words = t.qwen_tokenizer()
    sides = {
        side: [f"Spatial{kind}{side.title()}Block3D" for kind in ("", *["Temporal"] * 3)] for side in ("down", "up")
    }
    return kind(
        vae=d.AutoencoderKLMagvit(
            latent_channels=4,
            block_out_channels=[8] * 4,
            layers_per_block=1,
            norm_num_groups=2,
            spatial_group_norm=False,
            **{f"{side}_block_types": blocks for side, blocks in sides.items()},
        ),
        text_encoder=qwen2_vl(words),
        tokenizer=words,
        transformer=d.EasyAnimateTransformer3DModel(
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
            text_embed_dim=t.WIDTH,
            resize_inpaint_mask_directly=False,  # its other way asks for a setting that the VAE has not
        ),
        scheduler=Euler(shift=5.0),
    )


def cosmos3(kind: type[d.DiffusionPipeline]) -> d.DiffusionPipeline:
    """A pipeline of Cosmos 3 without its check of prompts and videos."""
    words = t.qwen_tokenizer(pipeline_cosmos3_omni._SYSTEM_PROMPT_VIDEO)
    network = d.Cosmos3OmniTransformer(
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
    return kind(
        transformer=network, text_tokenizer=words, vae=wan_vae(), scheduler=unipc(), enable_safety_checker=False
    )


PROMPT = {"prompt": "a red circle moves left"}
SIZE = {"height": 32, "width": 48}
CALL = PROMPT | SIZE | {"num_frames": 5}
DIVIDED = {"width": 64}  # by patches of a VAE of 16 x 16 pixels
SQUARE = {"height": 64, "width": 64}
TEXT = {"max_sequence_length": 16}
SHORT = CALL | TEXT
LONG = CALL | {"max_sequence_length": 32}  # with the end of a template
NINE = SHORT | {"num_frames": 9}
LARGE = CALL | {"height": 64, "width": 96, "num_frames": 9}
SANA = PROMPT | {"height": 32, "width": 64, "frames": 5, "max_sequence_length": 16, "use_resolution_binning": False}
SEEN = {"image": picture()}
CLIP = [picture(seed) for seed in range(5)]
FACE = [frame.resize((32, 32)) for frame in CLIP]
MASK = [Image.new("L", (48, 32), 255 * (n % 2)) for n in range(5)]
FORWARD = np.stack([np.eye(4)] * 9) + np.arange(9)[:, None, None] * (np.arange(16).reshape(4, 4) == 11) / 10
CAMERA = {"c2w": FORWARD, "intrinsics": [48.0, 48.0, 24.0, 16.0]}
SHIFTED = partial(Euler, shift=5.0)
FLOW_MAP = partial(d.FlowMapEulerDiscreteScheduler, shift=5.0)
BESIDE = {"channels": 16, "in_channels": 36}  # latents, four channels of a mask, and latents of pictures
READ = BESIDE | {"image_dim": 8, "added_kv_proj_dim": 24}  # tokens of CLIP
WIDE = {"channels": 48, "vae": wide_vae, "expand_timesteps": True}
FACES = {
    "latent_channels": 16,
    "motion_encoder_channel_sizes": {"4": 16, "8": 16, "16": 16},
    "motion_encoder_size": 16,
    "motion_style_dim": 8,
    "motion_dim": 4,
    "motion_encoder_dim": 16,
    "face_encoder_hidden_dim": 16,
    "face_encoder_num_heads": 2,
    "inject_face_latents_blocks": 2,
}
FRAMEPACK = {"patch_size": 2, "has_image_proj": True, "image_proj_dim": 8, "has_clean_x_embedder": True}
CONCATENATED = {"in_channels": 9, "guidance_embeds": False, "image_condition_type": "latent_concat"}
FORCING = {"network": d.SkyReelsV2Transformer3DModel, "inject_sample_info": True}
DPM = partial(d.DPMSolverMultistepScheduler, prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=8.0)
FIRST = LTX2VideoCondition(frames=frames()[:, :, 0], index=0, crf=0)  # compressing a picture would ask for PyAV
SHOWN = LTX2ReferenceCondition(frames=frames(count=9)[0].movedim(0, 1))
BRIGHT = LTX2HDRReferenceCondition(frames=frames(count=9)[0].movedim(0, 1))
WHOLE = {"cond_image": picture(), "decode_horizontal_tiles": 1, "decode_vertical_tiles": 1}
MASKED = {"video": frames(), "mask_video": (frames(1)[:, :1] > 0.5).float()}


def built(
    name: str, make: Callable[..., d.DiffusionPipeline], call: dict[str, Any], *given: Any, **sizes: Any
) -> tuple[str, Small]:
    """Return a name with the small folder that `make` builds of the class in its first word, and with its call."""
    return name, small(partial(make, getattr(d, name.split()[0]), *given, **sizes), **call)


VIDEOS: dict[str, Small] = dict(
    [
        built("WanPipeline", wan, SHORT),
        built("WanPipeline of two experts", wan, SHORT, second=True),
        built("WanPipeline with a time per token", wan, SHORT | DIVIDED, **WIDE),
        built("WanImageToVideoPipeline", wan, SHORT | SEEN, second=True, **BESIDE),
        built("WanImageToVideoPipeline with CLIP", wan, CALL | SEEN, tower="CLIPVisionModel", **READ),
        built(
            "WanImageToVideoPipeline with a last picture",
            wan,
            CALL | SEEN | {"last_image": picture(1)},
            tower="CLIPVisionModel",
            pos_embed_seq_len=10,
            **READ,
        ),
        built("WanImageToVideoPipeline with a time per token", wan, SHORT | DIVIDED | SEEN, **WIDE),
        built("WanVideoToVideoPipeline", wan, PROMPT | SIZE | TEXT | {"video": CLIP}),
        built(
            "WanVACEPipeline",
            wan,
            SHORT | {"video": CLIP, "mask": MASK},
            d.WanVACETransformer3DModel,
            vace_layers=[0, 1],
        ),
        built(
            "WanAnimatePipeline",
            wan,
            PROMPT | SIZE | SEEN | {"pose_video": CLIP, "face_video": FACE, "segment_frame_length": 5},
            d.WanAnimateTransformer3DModel,
            "CLIPVisionModel",
            **READ,
            **FACES,
        ),
        built(
            "LucyEditPipeline",
            wan,
            SHORT | {"height": 64, "width": 96, "video": CLIP},
            scheduler=SHIFTED,
            in_channels=96,
            **WIDE,
        ),
        built("ChronoEditPipeline", wan, CALL | SEEN, d.ChronoEditTransformer3DModel, "CLIPVisionModel", **READ),
        built("SkyReelsV2Pipeline", wan, SHORT, d.SkyReelsV2Transformer3DModel),
        built(
            "SkyReelsV2ImageToVideoPipeline",
            wan,
            CALL | SEEN,
            d.SkyReelsV2Transformer3DModel,
            "CLIPVisionModelWithProjection",
            **READ,
        ),
        built("SkyReelsV2DiffusionForcingPipeline", wan, NINE, **FORCING),
        built("SkyReelsV2DiffusionForcingImageToVideoPipeline", wan, NINE | SEEN, **FORCING),
        built(
            "SkyReelsV2DiffusionForcingVideoToVideoPipeline",
            wan,
            NINE | {"video": CLIP, "overlap_history": 5},
            **FORCING,
        ),
        built("AnyFlowPipeline", wan, SHORT, d.AnyFlowTransformer3DModel, scheduler=FLOW_MAP, gate_value=0.25),
        built(
            "AnyFlowFARPipeline",
            wan,
            NINE,
            d.AnyFlowFARTransformer3DModel,
            scheduler=FLOW_MAP,
            chunk_partition=(1, 1, 1),
        ),
        built("HeliosPipeline", helios, SHORT | {"num_latent_frames_per_chunk": 2}),
        built("HunyuanVideoPipeline", hunyuan, SHORT),
        built("HunyuanVideoImageToVideoPipeline", hunyuan, NINE | SEEN, reads=llava, parts=cropped, **CONCATENATED),
        built(
            "HunyuanVideoImageToVideoPipeline with a replaced frame",
            hunyuan,
            SHORT | SEEN,
            reads=llava,
            parts=cropped,
            image_condition_type="token_replace",
        ),
        built("HunyuanSkyreelsImageToVideoPipeline", hunyuan, SHORT | SEEN, in_channels=8),
        built(
            "HunyuanVideoFramepackPipeline",
            hunyuan,
            SHORT | SEEN | {"latent_window_size": 3},
            d.HunyuanVideoFramepackTransformer3DModel,
            parts=siglip,
            **FRAMEPACK,
        ),
        built("HunyuanVideo15Pipeline", opened, CALL, hunyuan15_folder),
        built(
            "HunyuanVideo15ImageToVideoPipeline",
            opened,
            CALL | SQUARE | SEEN,  # it takes no size, and makes squares of this picture
            partial(hunyuan15_folder, image=True),
        ),
        built("LTXPipeline", opened, LARGE, ltx_folder),
        built("LTXImageToVideoPipeline", opened, LARGE | SEEN, ltx_folder),
        built("LTXConditionPipeline", opened, LARGE | SEEN, ltx_folder, scheduler=Euler()),
        built("LTXI2VLongMultiPromptPipeline", opened, LARGE | WHOLE, ltx_folder, scheduler=Euler()),
        built("LTX2Pipeline", opened, LARGE | TEXT, ltx2_folder),
        built("LTX2Pipeline of its newer form", opened, LARGE | TEXT, partial(ltx2_folder, newer=True)),
        built("LTX2ImageToVideoPipeline", opened, LARGE | TEXT | SEEN, ltx2_folder),
        built("LTX2ConditionPipeline", opened, LARGE | TEXT | {"conditions": FIRST}, ltx2_folder),
        built("LTX2InContextPipeline", opened, LARGE | TEXT | {"reference_conditions": SHOWN}, ltx2_folder),
        built("LTX2HDRPipeline", opened, LARGE | TEXT | {"reference_conditions": BRIGHT}, ltx2_folder),
        built("MochiPipeline", mochi, SHORT | {"num_frames": 7}),
        built("Kandinsky5T2VPipeline", kandinsky, LONG),
        built("Kandinsky5I2VPipeline", kandinsky, LONG | SEEN | {"num_frames": 17}, seen=True),
        built("Kandinsky6TI2VAPipeline", kandinsky6, LONG | {"sample_audio": False}),
        built("Kandinsky6TI2VAPipeline with a picture", kandinsky6, LONG | SEEN | {"sample_audio": False}),
        built("SanaVideoPipeline", sana, SANA, DPM),
        built("SanaImageToVideoPipeline", sana, SANA | SEEN, SHIFTED),
        built("SanaWMPipeline", sana_wm, LARGE | SEEN | CAMERA | TEXT),
        built("MotifVideoPipeline", motif, SHORT),
        built("MotifVideoImage2VideoPipeline", motif, SHORT | SEEN, seen=True),
        built("EasyAnimatePipeline", easyanimate, CALL | {"negative_prompt": ""}),
        built("EasyAnimateInpaintPipeline", easyanimate, CALL | {"negative_prompt": ""} | MASKED, channels=12),
        built("Cosmos3OmniPipeline", cosmos3, CALL),
    ]
)
