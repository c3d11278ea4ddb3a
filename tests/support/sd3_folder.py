"""A folder of the layout of Stable Diffusion 3.5 with small random networks and tokenizers of words."""

from pathlib import Path

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import CLIPTextConfig, CLIPTextModelWithProjection, PreTrainedTokenizerFast, T5Config, T5EncoderModel

SAID = "a an big small red green blue yellow circle square triangle moving moves left right up down picture of and"


def tokenizer(longest: int, pad: str, start: str = "", **settings: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer of words that ends a text with <end>, and begins it with `start`."""
    names = dict.fromkeys([pad, "[unknown]", "<start>", *SAID.split(), "<end>"])  # CLIP looks for the highest id
    vocabulary = {word: number for number, word in enumerate(names)}
    made = Tokenizer(WordLevel(vocabulary, unk_token="[unknown]"))
    made.pre_tokenizer = Whitespace()
    marks = [(word, vocabulary[word]) for word in ("<start>", "<end>")]
    made.post_processor = TemplateProcessing(single=f"{start} $A <end>".strip(), special_tokens=marks)
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        unk_token="[unknown]",
        pad_token=pad,
        eos_token="<end>",
        model_max_length=longest,
        **settings,
    )


def sd3_folder(folder: Path) -> Path:
    """Write the folder: 16 latent channels of 8 x 8 pixels, tokens of 2 x 2 latents, texts of up to 10 and 14 tokens.

    The first of three blocks has an attention of the image alone, as half of those of SD3.5-M.
    """
    clip = {"vocab_size": 32, "intermediate_size": 16, "num_attention_heads": 2, "max_position_embeddings": 10}
    clip |= {"eos_token_id": 2}  # published files say so, and mean the highest id
    with torch.random.fork_rng():
        torch.manual_seed(0)
        encoders = [
            CLIPTextModelWithProjection(
                CLIPTextConfig(hidden_size=d, projection_dim=d, num_hidden_layers=layers, hidden_act=act, **clip)
            )
            for d, layers, act in ((8, 2, "quick_gelu"), (12, 3, "gelu"))
        ]
        t5 = T5EncoderModel(T5Config(vocab_size=32, d_model=24, d_kv=8, d_ff=16, num_layers=2, num_heads=2))
        vae = AutoencoderKL(
            down_block_types=["DownEncoderBlock2D"] * 4,
            up_block_types=["UpDecoderBlock2D"] * 4,
            block_out_channels=[8] * 4,
            layers_per_block=1,
            norm_num_groups=4,
            latent_channels=16,
            scaling_factor=1.5305,
            shift_factor=0.0609,
            use_quant_conv=False,
            use_post_quant_conv=False,
        )
        network = SD3Transformer2DModel(
            sample_size=16,
            num_layers=3,
            attention_head_dim=12,
            num_attention_heads=2,
            joint_attention_dim=24,
            caption_projection_dim=24,
            pooled_projection_dim=20,
            pos_embed_max_size=12,
            dual_attention_layers=(0,),
            qk_norm="rms_norm",
        )
        network.pos_embed.pos_embed += 0.1 * torch.randn(1, 144, 24)  # a folder's own table
        for weight in (*network.parameters(), *vae.parameters()):
            if not weight.any():
                weight.data = 0.1 * torch.randn(weight.shape)
    StableDiffusion3Pipeline(
        transformer=network,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=vae,
        text_encoder=encoders[0],
        tokenizer=tokenizer(10, "<end>", "<start>"),
        text_encoder_2=encoders[1],
        tokenizer_2=tokenizer(10, "!", "<start>"),
        text_encoder_3=t5,
        tokenizer_3=tokenizer(14, "<pad>"),
    ).save_pretrained(folder)
    return folder
