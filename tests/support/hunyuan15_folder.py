"""Folders of the layout of HunyuanVideo 1.5 with small random networks; the tokenizer of Qwen is one of words."""

from pathlib import Path

import torch
from diffusers import (
    AutoencoderKLHunyuanVideo15,
    ClassifierFreeGuidance,
    FlowMatchEulerDiscreteScheduler,
    HunyuanVideo15ImageToVideoPipeline,
    HunyuanVideo15Pipeline,
    HunyuanVideo15Transformer3DModel,
)
from i2v_folder import name_as_published
from qwen_image_folder import tokenizer
from transformers import (
    ByT5Tokenizer,
    Qwen2_5_VLTextConfig,
    Qwen2_5_VLTextModel,
    SiglipImageProcessor,
    SiglipVisionConfig,
    SiglipVisionModel,
    T5Config,
    T5EncoderModel,
)

# The system's turn, as HunyuanVideo15Pipeline writes it: the blanks count.
SYSTEM = "        ".join(
    (
        "You are a helpful assistant. Describe the video by detailing the following aspects: ",
        "1. The main content and theme of the video. ",
        "2. The color, shape, size, texture, quantity, text, and spatial relationships of the objects. ",
        "3. Actions, events, behaviors temporal relationships, physical movement changes of the objects. ",
        "4. background environment, light, style and atmosphere. ",
        "5. camera angles, movements, and transitions used in the video.",
    )
)
WORD = r"\n|\w+|[^\w\s]| +(?= )| (?=\d)"  # the first turns are 108 tokens, as with Qwen's own tokenizer
CHAT = (  # as Qwen's own for turns of text
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def hunyuan15_folder(folder: Path, *, image: bool = False) -> Path:
    """Write the folder, of text or of text and an image.

    It has 8 latent channels of 4 frames of 16 x 16 pixels, texts of up to 24 tokens and 24 bytes.
    """
    words = tokenizer(f'{SYSTEM}\nuser system assistant "', WORD, 24, CHAT)
    rope = {"mrope_section": [2, 2, 2], "rope_type": "default", "type": "default"}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        encoder = Qwen2_5_VLTextModel(
            Qwen2_5_VLTextConfig(
                vocab_size=len(words),
                hidden_size=24,
                intermediate_size=32,
                num_hidden_layers=3,
                num_attention_heads=2,
                num_key_value_heads=2,
                rope_scaling=rope,
                rope_theta=1e6,
            )
        )
        sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 2, "num_heads": 2}
        glyphs = T5EncoderModel(T5Config(vocab_size=384, feed_forward_proj="gated-gelu", **sizes))
        vae = AutoencoderKLHunyuanVideo15(latent_channels=8, block_out_channels=[16] * 5, layers_per_block=1)
        network = HunyuanVideo15Transformer3DModel(
            in_channels=17,
            out_channels=8,
            num_layers=2,
            num_refiner_layers=1,
            attention_head_dim=12,
            num_attention_heads=2,
            text_embed_dim=24,
            text_embed_2_dim=16,
            image_embed_dim=8,
            rope_axes_dim=(4, 4, 4),
            target_size=64,
            task_type="i2v" if image else "t2v",
        )
        for weight in network.parameters():
            if not weight.any():
                weight.data = 0.1 * torch.randn(weight.shape)
        sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
        siglip = SiglipVisionModel(SiglipVisionConfig(image_size=28, patch_size=14, **sizes)) if image else None
    kind, more = HunyuanVideo15Pipeline, {}
    if image:
        processor = SiglipImageProcessor(size={"height": 28, "width": 28})
        kind, more = HunyuanVideo15ImageToVideoPipeline, {"image_encoder": siglip, "feature_extractor": processor}
    kind(
        text_encoder=encoder,
        tokenizer=words,
        transformer=network,
        vae=vae,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=5.0),
        text_encoder_2=glyphs,
        tokenizer_2=ByT5Tokenizer(model_max_length=24),
        guider=ClassifierFreeGuidance(guidance_scale=6.0),
        **more,
    ).save_pretrained(folder)
    if image:
        name_as_published(folder / "image_encoder")
    return folder
