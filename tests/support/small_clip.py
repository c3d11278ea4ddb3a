"""A small random CLIP folder."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from transformers import CLIPConfig, CLIPImageProcessorPil, CLIPModel, CLIPTokenizer

SIDE = 32
LETTERS = [*"abcdefghijklmnopqrstuvwxyz"]


def save_clip(out: Path, words: Mapping[str, int] | None = None, merges: Sequence[tuple[str, str]] = ()) -> Path:
    """Save what transformers saves: a model of two layers, a tokenizer, by default of letters, a processor of 32 x 32.

    The tokenizer's last two words are its begin and end.
    """
    if words is None:
        known = [*LETTERS, *(f"{letter}</w>" for letter in LETTERS), "<|startoftext|>", "<|endoftext|>"]
        words = {word: i for i, word in enumerate(known)}
    tokenizer = CLIPTokenizer(vocab=dict(words), merges=list(merges))
    tokenizer.save_pretrained(out)
    small = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    ends = {"bos_token_id": len(words) - 2, "eos_token_id": len(words) - 1, "pad_token_id": len(words) - 1}
    text = small | ends | {"vocab_size": len(words), "max_position_embeddings": 24}
    vision = small | {"image_size": SIDE, "patch_size": 8}
    torch.manual_seed(0)
    CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=8)).save_pretrained(out)
    size = {"size": {"shortest_edge": SIDE}, "crop_size": {"height": SIDE, "width": SIDE}}
    CLIPImageProcessorPil(**size).save_pretrained(out)
    return out
