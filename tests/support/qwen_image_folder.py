"""A folder of the layout of Qwen-Image with small random networks and a tokenizer of words."""

import re
from pathlib import Path

import torch
from diffusers import (
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
)
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

# The turns in which the model reads a prompt, as QwenImagePipeline writes them.
TEMPLATE = (
    "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, spatial "
    "relationships of the objects and background:<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)
TURNS = ("<|im_start|>", "<|im_end|>")
WORD = r"\n|\w+|[^\w\s]"  # the template's first turn is 34 tokens, as with Qwen's own tokenizer
SAID = "a an big small red green blue yellow circle square triangle moving moves left right up down picture of and"


def tokenizer(text: str, word: str, longest: int, chat: str | None = None) -> PreTrainedTokenizerFast:
    """A tokenizer of the turns of a chat that knows the words of a text and of captions."""
    words = sorted({*re.findall(word, text), *SAID.split()})
    vocabulary = {word: number for number, word in enumerate(["<|endoftext|>", "[unknown]", *TURNS, *words])}
    made = Tokenizer(WordLevel(vocabulary, unk_token="[unknown]"))
    made.pre_tokenizer = Split(Regex(word), "removed", invert=True)
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        unk_token="[unknown]",
        pad_token="<|endoftext|>",
        additional_special_tokens=list(TURNS),
        model_max_length=longest,
        chat_template=chat,
    )


def qwen_image_folder(folder: Path) -> Path:
    """Write the folder: 16 latent channels of 8 x 8 pixels, tokens of 2 x 2 latents, texts of up to 24 tokens."""
    words = tokenizer(re.sub(r"<\|\w+\|>", "", TEMPLATE), WORD, 34 + 24)
    sizes = {"num_attention_heads": 2, "num_hidden_layers": 2, "hidden_size": 24, "intermediate_size": 32}
    rope = {"mrope_section": [2, 2, 2], "rope_type": "default", "type": "default"}
    text = sizes | {"num_key_value_heads": 2, "vocab_size": 64, "rope_scaling": rope, "rope_theta": 1e6}
    picture = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 24}
    assert len(words) <= 60
    with torch.random.fork_rng():
        torch.manual_seed(0)
        encoder = Qwen2_5_VLForConditionalGeneration(
            Qwen2_5_VLConfig(
                text_config=text,
                vision_config=picture,
                image_token_id=60,
                video_token_id=61,
                vision_start_token_id=62,
                vision_end_token_id=63,
            )
        )
        statistics = {"latents_mean": (0.3 * torch.randn(16)).tolist(), "latents_std": (0.5 + torch.rand(16)).tolist()}
        vae = AutoencoderKLQwenImage(
            base_dim=8,
            z_dim=16,
            dim_mult=[1, 2, 2, 2],
            num_res_blocks=1,
            temperal_downsample=[False, True, True],
            **statistics,
        )
        network = QwenImageTransformer2DModel(
            num_layers=2, attention_head_dim=12, num_attention_heads=2, joint_attention_dim=24, axes_dims_rope=(4, 4, 4)
        )
        for weight in network.parameters():
            if not weight.any():
                weight.data = 0.1 * torch.randn(weight.shape)
    scheduler = FlowMatchEulerDiscreteScheduler(
        base_image_seq_len=256,
        max_image_seq_len=8192,
        base_shift=0.5,
        max_shift=0.9,
        shift=1.0,
        shift_terminal=0.02,
        use_dynamic_shifting=True,
        time_shift_type="exponential",
    )
    QwenImagePipeline(
        scheduler=scheduler, vae=vae, text_encoder=encoder, tokenizer=words, transformer=network
    ).save_pretrained(folder)
    return folder
