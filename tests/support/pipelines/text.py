"""Small tokenizers of the classes that pipelines name, with vocabularies written here, and small text encoders."""

import inspect
import re
from collections.abc import Iterable
from typing import Any

import transformers
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing
from transformers import (
    ByT5Tokenizer,
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    Gemma2Config,
    Gemma2Model,
    GemmaConfig,
    GemmaForCausalLM,
    GemmaTokenizer,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    PaddleOCRVLProcessor,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Tokenizer,
    Qwen2VLImageProcessorPil,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3Model,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLModel,
    T5Config,
    T5EncoderModel,
    T5Tokenizer,
    UMT5Config,
    UMT5EncoderModel,
)

SAID = "a an the big small red green blue yellow circle square triangle moves left right up down picture of and cat dog"
CHAT_MARKS = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
CHAT = (
    "{% for turn in messages %}<|im_start|>{{ turn.role }}\n{% if turn.content is string %}{{ turn.content }}{% else %}"
    "{% for part in turn.content %}{% if part.type == 'text' %}{{ part.text }}"
    "{% elif part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WIDTH = 32  # of every text encoder here, unless its function is told another


def said(*places: Any) -> list[str]:
    """Return the words of captions, and those in the source of places that hold a template of prompts."""
    return sorted({*SAID.split(), *(word for place in places for word in re.findall(r"[A-Za-z]+", text_of(place)))})


def text_of(place: Any) -> str:
    """Return a text as it is, and the source of anything else."""
    return place if isinstance(place, str) else inspect.getsource(place)


def pairs(words: Iterable[str], end: str = "", space: str = "") -> tuple[list[str], list[tuple[str, str]]]:
    """Return the parts and the merges by which byte-pair encoding makes one token of each word and of " word"."""
    merges: dict[tuple[str, str], None] = {}
    for start in dict.fromkeys((space, "")):
        for word in words:
            letters = [*start, *word[:-1], word[-1] + end]
            for n in range(1, len(letters)):
                merges["".join(letters[:n]), letters[n]] = None
    return list(dict.fromkeys(map("".join, merges))), list(merges)


def numbered(*groups: Iterable[str]) -> dict[str, int]:
    """Return the number of each different part of a vocabulary."""
    return {part: n for n, part in enumerate(dict.fromkeys(part for group in groups for part in group))}


def qwen_tokenizer(*places: Any, longest: int = 512) -> Qwen2Tokenizer:
    """A tokenizer of bytes of Qwen2's class with a chat template, which knows the words in `places`."""
    parts, merges = pairs(said(*places), space="Ġ")
    made = Qwen2Tokenizer(
        vocab=numbered(["<|endoftext|>"], CHAT_MARKS, sorted(ByteLevel.alphabet()), parts),
        merges=merges,
        extra_special_tokens={"image_token": "<|image_pad|>"}
        | {mark.strip("<|>") + "_mark": mark for mark in CHAT_MARKS},
        model_max_length=longest,
        chat_template=CHAT,
    )
    made.padding_side = "right"
    return made


def byte_tokenizer(*places: Any, longest: int = 512, **marks: Any) -> PreTrainedTokenizerFast:
    """The same tokens after a mark of the start, in a tokenizer without a class of its own, as Llama 3's and GLM's."""
    made = qwen_tokenizer(*places)._tokenizer
    start = "<|im_start|>"
    made.post_processor = TemplateProcessing(single=f"{start} $A", special_tokens=[(start, made.token_to_id(start))])
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="<|endoftext|>",
        eos_token="<|endoftext|>",
        bos_token=start,
        model_max_length=longest,
        chat_template=CHAT,
        **marks,
    )


def clip_tokenizer(longest: int = 16) -> CLIPTokenizer:
    """A tokenizer of bytes of CLIP's class; the mark of the end has the highest number, as CLIP's networks ask."""
    parts, merges = pairs(said(), end="</w>")
    letters = sorted(ByteLevel.alphabet())
    marks = ["<|startoftext|>", "<|endoftext|>"]
    vocabulary = numbered(letters, [letter + "</w>" for letter in letters], parts, marks)
    return CLIPTokenizer(vocab=vocabulary, merges=merges, model_max_length=longest)


def t5_tokenizer(*places: Any, longest: int = 64) -> T5Tokenizer:
    """A tokenizer of T5's class: single letters cost more than words."""
    letters = "▁abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,:;!?-'\"()"
    vocabulary = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    vocabulary += [("▁" + word, -2.0) for word in said(*places) if len(word) > 1] + [
        (letter, -6.0) for letter in letters
    ]
    return T5Tokenizer(vocab=vocabulary, extra_ids=0, model_max_length=longest)


def gemma_tokenizer(*places: Any, longest: int = 512) -> GemmaTokenizer:
    """A tokenizer of Gemma's class, with bytes for letters that it does not know."""
    parts, merges = pairs(said(*places), space="▁")
    marks = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
    letters = [chr(n) for n in range(33, 127)]
    vocabulary = numbered(marks, [f"<0x{n:02X}>" for n in range(256)], ["▁", "\n"], letters, parts)
    made = GemmaTokenizer(vocab=vocabulary, merges=merges, model_max_length=longest)
    made._tokenizer.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 2)])
    return made


def byt5_tokenizer() -> ByT5Tokenizer:
    """ByT5's tokenizer, which needs no vocabulary."""
    return ByT5Tokenizer()


def clip_encoder(projected: bool = False, width: int = WIDTH, longest: int = 16, **sizes: Any) -> CLIPTextModel:
    """A text encoder of CLIP."""
    words = clip_tokenizer()
    config = CLIPTextConfig(
        vocab_size=len(words),
        bos_token_id=words.bos_token_id,
        eos_token_id=words.eos_token_id,
        pad_token_id=words.pad_token_id,
        hidden_size=width,
        projection_dim=width,
        intermediate_size=width,
        num_attention_heads=2,
        num_hidden_layers=2,
        max_position_embeddings=longest,
        **sizes,
    )
    return (CLIPTextModelWithProjection if projected else CLIPTextModel)(config)


def t5_encoder(width: int = WIDTH, kind: str = "t5", **sizes: Any) -> T5EncoderModel:
    """A text encoder of T5, or of UMT5."""
    config, network = {"t5": (T5Config, T5EncoderModel), "umt5": (UMT5Config, UMT5EncoderModel)}[kind]
    sizes = {"vocab_size": 384, "d_kv": 8, "d_ff": 37, "num_layers": 2, "num_heads": 4} | sizes
    return network(config(d_model=width, relative_attention_num_buckets=8, feed_forward_proj="gated-gelu", **sizes))


def decoder_sizes(tokenizer: Any, width: int, **sizes: Any) -> dict[str, Any]:
    """Return the sizes that the configs of language models share."""
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 1024,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    } | sizes


def qwen3(tokenizer: Any, width: int = WIDTH, head: bool = False, **sizes: Any) -> Qwen3Model:
    """A language model of Qwen3, with its head or without."""
    return (Qwen3ForCausalLM if head else Qwen3Model)(Qwen3Config(**decoder_sizes(tokenizer, width, **sizes)))


def gemma2(tokenizer: Any, width: int = WIDTH) -> Gemma2Model:
    """A language model of Gemma 2."""
    return Gemma2Model(Gemma2Config(**decoder_sizes(tokenizer, width, sliding_window=64)))


def gemma(tokenizer: Any, width: int = WIDTH) -> GemmaForCausalLM:
    """A language model of the first Gemma."""
    return GemmaForCausalLM(GemmaConfig(**decoder_sizes(tokenizer, width)))


def named(model: str, tokenizer: Any, width: int = WIDTH, config: str = "", **sizes: Any) -> Any:
    """A language model of transformers by the name of its class, whose config has no parts."""
    made = getattr(transformers, config or model.replace("ForCausalLM", "Config"))
    return getattr(transformers, model)(made(**decoder_sizes(tokenizer, width, **sizes)))


def vision_marks(tokenizer: Any) -> dict[str, int]:
    """Return the numbers of the tokens by which a language model of Qwen finds pictures."""
    names = {"vision_start": "vision_start", "vision_end": "vision_end", "image": "image_pad", "video": "video_pad"}
    return {f"{key}_token_id": tokenizer.convert_tokens_to_ids(f"<|{mark}|>") for key, mark in names.items()}


def qwen25_vl(tokenizer: Any, width: int = WIDTH) -> Qwen2_5_VLForConditionalGeneration:
    """A language model of Qwen2.5-VL with its tower for pictures."""
    sizes = decoder_sizes(tokenizer, width)
    sizes["num_attention_heads"] = 4
    rope = {"mrope_section": [1, 1, 2], "rope_type": "default", "type": "default"}
    tower = {"depth": 2, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": width}
    tower |= {"fullatt_block_indexes": [1], "window_size": 28}
    text = sizes | {"rope_scaling": rope, "rope_theta": 1e6}
    return Qwen2_5_VLForConditionalGeneration(
        Qwen2_5_VLConfig(text_config=text, vision_config=tower, **vision_marks(tokenizer))
    )


def qwen3_vl(tokenizer: Any, width: int = WIDTH, head: bool = False, layers: int = 2) -> Qwen3VLModel:
    """A language model of Qwen3-VL with its tower for pictures, with its head or without."""
    rope = {"mrope_section": [2, 1, 1], "rope_type": "default", "mrope_interleaved": True, "rope_theta": 1e6}
    text = decoder_sizes(tokenizer, width, num_hidden_layers=layers) | {"rope_parameters": rope}
    tower = {"depth": 2, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": width}
    tower |= {"patch_size": 16, "num_position_embeddings": 64, "deepstack_visual_indexes": [0]}
    config = Qwen3VLConfig(text_config=text, vision_config=tower, **vision_marks(tokenizer))
    return (Qwen3VLForConditionalGeneration if head else Qwen3VLModel)(config)


def picture_processor(tokenizer: Qwen2Tokenizer, patch: int = 14) -> PaddleOCRVLProcessor:
    """A processor of prompts with pictures of up to 16 tokens.

    The processors of Qwen2-VL and Qwen3-VL ask for torchvision, for videos. This one of transformers gives the same
    tokens and the same patches of pictures without it.
    """
    pictures = Qwen2VLImageProcessorPil(
        patch_size=patch, size={"shortest_edge": (2 * patch) ** 2, "longest_edge": (8 * patch) ** 2}
    )
    return PaddleOCRVLProcessor(pictures, tokenizer, chat_template=CHAT)


def mistral3(tokenizer: Any, width: int = WIDTH, **sizes: Any) -> Mistral3ForConditionalGeneration:
    """A language model of Mistral 3 with its tower for pictures."""
    tower = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    tower |= {"model_type": "pixtral", "image_size": 28, "patch_size": 14}
    text = {"model_type": "mistral", "sliding_window": None, **decoder_sizes(tokenizer, width, **sizes)}
    return Mistral3ForConditionalGeneration(Mistral3Config(text_config=text, vision_config=tower))
