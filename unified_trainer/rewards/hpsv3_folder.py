"""The JSON files of an HPSv3 folder: which fields the scorer depends on, and what they may be."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Formatter
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator
from transformers import Qwen2VLConfig

from unified_trainer.basics.errors import MissingFileError, UserError
from unified_trainer.basics.input_files import Schema, checked, declared, read_as, read_json
from unified_trainer.models.folder import read_pretrained
from unified_trainer.models.layout import reading_config

REWARD_TOKEN = "<|Reward|>"
CHECKPOINT = "HPSv3.safetensors"
SETTINGS = "hpsv3.json"
EMBEDDING = "model.embed_tokens.weight"
FOLDER_FILES = (
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "preprocessor_config.json",
    "chat_template.json",
    SETTINGS,
    CHECKPOINT,
)
Size = Annotated[int, Field(ge=1, le=2**24)]
Layers = Annotated[int, Field(ge=1, le=1000)]  # more would take minutes to lay out


class PromptSettings(Schema):
    """hpsv3.json: the texts around a prompt, and the number of pixels."""

    instruction: str
    prompt_with_special_token: str
    pixels: int = Field(ge=28 * 28, le=2**26)

    @field_validator("instruction")
    @classmethod
    def _holds_the_prompt(cls, text: str) -> str:
        try:
            fields = [part[1:] for part in Formatter().parse(text) if part[1] is not None]
        except ValueError as error:
            raise ValueError(f"instruction is no text with a placeholder ({error})") from error
        if not fields or any(field != ("text_prompt", "", None) for field in fields):
            raise ValueError("instruction must hold the placeholder {text_prompt}, and no other one")
        return text

    @field_validator("prompt_with_special_token")
    @classmethod
    def _holds_the_token(cls, text: str) -> str:
        if text.count(REWARD_TOKEN) != 1:
            raise ValueError(f"prompt_with_special_token must hold {REWARD_TOKEN} once")
        return text.replace("{", "{{").replace("}", "}}")  # it is formatted with the instruction


class ImageStatistics(Schema):
    """preprocessor_config.json: mean and deviation of the channels of images in [0, 1]."""

    image_mean: Annotated[list[Annotated[float, Field(ge=0, le=1)]], Field(min_length=3, max_length=3)]
    image_std: Annotated[list[Annotated[float, Field(gt=0, le=1)]], Field(min_length=3, max_length=3)]


class TokenizerSettings(Schema):
    """tokenizer_config.json, as far as it changes the tokens of a text."""

    add_prefix_space: Literal[False] | None = None


class ChatTemplate(Schema):
    """chat_template.json."""

    chat_template: str = Field(min_length=1, max_length=2**16)


class Rope(Schema):
    """Rotary embeddings of the text model, in three sections."""

    mrope_section: Annotated[list[Size], Field(min_length=3, max_length=3)]
    rope_theta: float = Field(ge=100, le=1e9)
    rope_type: Literal["default"] = "default"


class VisionRope(Schema):
    """Rotary embeddings of the vision model."""

    rope_theta: float = Field(10000.0, ge=100, le=1e9)
    rope_type: Literal["axial"] = "axial"


class TextConfig(Schema):
    """Qwen2-VL's text model."""

    hidden_size: Size
    intermediate_size: Size
    num_hidden_layers: Layers
    num_attention_heads: Size
    num_key_value_heads: Size
    vocab_size: Size
    rms_norm_eps: float = Field(gt=0, lt=1)
    hidden_act: Literal["silu"] = "silu"
    rope_parameters: Rope
    max_position_embeddings: Size = 32768
    use_sliding_window: Literal[False] | None = None  # HPSv3 attends to everything before a token
    layer_types: list[Literal["full_attention"]] | None = None

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        for name, whole, part in (
            ("hidden_size", self.hidden_size, self.num_attention_heads),
            ("num_attention_heads", self.num_attention_heads, self.num_key_value_heads),
        ):
            if whole % part:
                raise ValueError(f"text_config.{name} is {whole}, and no multiple of the {part} heads")
        if self.layer_types is not None and len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(
                f"text_config.layer_types has {len(self.layer_types)} layers, but num_hidden_layers is "
                f"{self.num_hidden_layers}"
            )
        head, sections = self.hidden_size // self.num_attention_heads, sum(self.rope_parameters.mrope_section)
        if 2 * sections != head:
            raise ValueError(f"text_config.rope_parameters.mrope_section sums to {sections}, expected {head // 2}")
        return self


class VisionConfig(Schema):
    """Qwen2-VL's vision model."""

    depth: Layers
    embed_dim: Size
    hidden_size: Size
    num_heads: Size
    in_channels: Literal[3] = 3
    hidden_act: Literal["quick_gelu"] = "quick_gelu"
    patch_size: int = Field(ge=1, le=256)
    spatial_merge_size: int = Field(ge=1, le=16)
    temporal_patch_size: int = Field(ge=1, le=16)
    mlp_ratio: int = Field(4, ge=1, le=64)
    rope_parameters: VisionRope | None = None

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if self.embed_dim % (4 * self.num_heads):
            raise ValueError(
                f"vision_config.embed_dim is {self.embed_dim}, and no multiple of 4 x num_heads ({self.num_heads})"
            )
        return self


class BaseConfig(Schema):
    """config.json of the base model, in the layout of any version of transformers."""

    model_type: Literal["qwen2_vl"]


class NetworkConfig(Schema):
    """config.json."""

    model_type: Literal["qwen2_vl"]
    image_token_id: int = Field(ge=0)
    text_config: TextConfig
    vision_config: VisionConfig

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        text, vision = self.text_config, self.vision_config
        if self.image_token_id >= text.vocab_size:
            raise ValueError(f"image_token_id is {self.image_token_id}, and no token of {text.vocab_size}")
        if vision.hidden_size != text.hidden_size:
            raise ValueError(
                f"vision_config.hidden_size is {vision.hidden_size}, but text_config.hidden_size {text.hidden_size}"
            )
        return self


def base_config(base: Path, shapes: Mapping[str, Sequence[int]], checkpoint: Path) -> Qwen2VLConfig:
    """Return the config of a base model's folder with a checkpoint's number of embeddings; UserError names the file."""
    file = base / "config.json"
    read_as(BaseConfig, file)
    with reading_config(file, Qwen2VLConfig.__name__):
        config = read_pretrained(Qwen2VLConfig, base)
    if EMBEDDING not in shapes:
        raise UserError(f"{checkpoint}: missing {EMBEDDING}; this is not a checkpoint of a reward on Qwen2-VL")
    config.text_config.vocab_size = shapes[EMBEDDING][0]
    checked(NetworkConfig, config.to_dict(), str(file))
    return config


def network_config(folder: Path) -> Qwen2VLConfig:
    """Return the config of a folder's network: of config.json, the fields that are declared here and no others.

    Raise UserError, naming file and field, for a folder that `import-hpsv3` cannot have written.
    """
    check_folder(folder)
    fields = declared(NetworkConfig, folder / "config.json")
    # The scorer generates no text; Qwen's own tokens of begin and end may be outside a smaller vocabulary.
    fields["text_config"] |= {"bos_token_id": None, "eos_token_id": None}
    with reading_config(folder / "config.json", Qwen2VLConfig.__name__):
        return Qwen2VLConfig.from_dict(fields)


def check_folder(folder: Path) -> None:
    """Raise UserError, naming file and field, for a folder that `import-hpsv3` cannot have written."""
    missing = [name for name in FOLDER_FILES if not (folder / name).is_file()]
    if missing:
        raise MissingFileError(
            f"{folder}: missing {', '.join(missing)}; write the folder with "
            f"`python -m unified_trainer import-hpsv3 --base DIR --checkpoint {CHECKPOINT} --out {folder}`"
        )
    for name in FOLDER_FILES[:-1]:
        read_json(folder / name)  # a damaged file is named here, and not by transformers
    read_as(TokenizerSettings, folder / "tokenizer_config.json")
    read_as(NetworkConfig, folder / "config.json")
