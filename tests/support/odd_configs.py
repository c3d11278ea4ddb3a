"""Odd values in the fields of the tiny world's configs: what is made of each, without starting a program.

A case is a file, a field of it and a value. It is `refused` (one UserError of one line with the name of the file), has
`no effect` (every number that the networks compute is the same), `changes numbers`, or ends in another `exception`.
"""

import hashlib
import inspect
import json
import random
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from helpers import ALONE, CPU, HPSV3, WAN
from transformers import PreTrainedConfig, Qwen2Tokenizer, Qwen2VLConfig, UMT5Config
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLTextConfig, Qwen2VLVisionConfig

from unified_trainer.basics.errors import UserError
from unified_trainer.models.encoders import EncoderConfig
from unified_trainer.models.wan.codec import WanCodec
from unified_trainer.rewards.hpsv3 import HPSv3
from unified_trainer.run.registry import family_of, open_model

SECONDS = 20  # that one case may take
ODD = ("x", "", None, [], [1], ["x"], {}, {"a": 1}, True, False, -1, 0, 2.5, 10**12, 1e30)
IN_A_LIST = ("x", None, -1e30, 1e30, {})  # in place of the first item of a list
NO_FIELD = "frobnicate"
OF_TOKENIZERS = (
    *("pad_token", "unk_token", "eos_token", "bos_token", "cls_token", "sep_token", "mask_token", "model_max_length"),
    *("padding_side", "truncation_side", "model_input_names", "extra_special_tokens", "additional_special_tokens"),
    *("added_tokens_decoder", "chat_template", "tokenizer_class", "backend", "tokenizer_file", "processor_class"),
    *("clean_up_tokenization_spaces", "split_special_tokens", "model_specific_special_tokens", "do_lower_case"),
    *("add_prefix_space", "add_bos_token", "add_eos_token", "pad_token_type_id", "auto_map", "errors", "name_or_path"),
)
OF_TRANSFORMERS = ("torch_dtype", "attn_implementation", "quantization_config", "auto_map", "tie_word_embeddings")
OF_ROPE = ("rope_scaling", "rope_theta", "rope_parameters.rope_type", "rope_parameters.factor", "rope_parameters.type")


def wan_transformer(folder: Path) -> list[torch.Tensor]:
    """Open a folder as a run does, and predict a velocity."""
    family, _ = family_of("student", str(folder))
    (component, *_), _ = family.networks(folder)
    family.latent_shape(folder, 5, 32, 32)
    model = open_model("student", str(folder), component, causal=False)
    model.read(ALONE)
    with torch.no_grad():
        return [model.velocity(*model.example())]


def wan_codec(folder: Path) -> list[torch.Tensor]:
    """Open a folder's encoders as a run does, encode a prompt and a video, and decode latents."""
    family, _ = family_of("student", str(folder))
    family.networks(folder)
    shape = family.latent_shape(folder, 5, 32, 32)
    codec = WanCodec.load(folder, CPU, EncoderConfig())
    draw = torch.Generator().manual_seed(0)
    video = codec.decode(torch.randn(1, *shape, generator=draw))
    return [codec.prompts(["a red circle moving left"])[0]["text"], video, codec.encode(video)]


def hpsv3(folder: Path) -> list[torch.Tensor]:
    """Load the scorer, and score two images."""
    scorer = HPSv3.load(folder, CPU, torch.float32)
    images = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    return [scorer.score(images, ["a red circle", "a longer prompt about a blue square"])]


@dataclass(frozen=True)
class Config:
    """A file whose fields are changed, and what a run makes of its folder."""

    name: str
    source: Path  # the sound folder
    file: str
    load: Callable[[Path], list[torch.Tensor]]
    declared: tuple[str, ...]  # fields that the class has which reads it

    def fields(self) -> list[str]:
        held = [name for name, _ in _leaves(json.loads((self.source / self.file).read_text()))]
        return list(dict.fromkeys((*held, *self.declared, NO_FIELD)))


def _leaves(content: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in content.items():
        yield prefix + name, value
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{name}.")


def _arguments(kind: type) -> tuple[str, ...]:
    return tuple(inspect.signature(kind.__init__).parameters)[1:]


def _typed(kind: type[PreTrainedConfig], prefix: str = "") -> tuple[str, ...]:
    return tuple(f"{prefix}{name}" for name in (*(one.name for one in fields(kind)), *OF_TRANSFORMERS))


CONFIGS = (
    Config("index", WAN, "model_index.json", wan_transformer, ("expand_timesteps", "transformer_2")),
    Config("transformer", WAN, "transformer/config.json", wan_transformer, _arguments(WanTransformer3DModel)),
    Config("vae", WAN, "vae/config.json", wan_codec, _arguments(AutoencoderKLWan)),
    Config("text encoder", WAN, "text_encoder/config.json", wan_codec, _typed(UMT5Config)),
    Config("tokenizer", WAN, "tokenizer/tokenizer_config.json", wan_codec, OF_TOKENIZERS),
    Config(
        "hpsv3",
        HPSV3,
        "config.json",
        hpsv3,
        (
            *_typed(Qwen2VLConfig),
            *_typed(Qwen2VLTextConfig, "text_config."),
            *(f"text_config.{name}" for name in OF_ROPE),
            *_typed(Qwen2VLVisionConfig, "vision_config."),
        ),
    ),
    Config("hpsv3 tokenizer", HPSV3, "tokenizer_config.json", hpsv3, (*OF_TOKENIZERS, *_arguments(Qwen2Tokenizer))),
    Config("hpsv3 prompt", HPSV3, "hpsv3.json", hpsv3, ()),
    Config("hpsv3 images", HPSV3, "preprocessor_config.json", hpsv3, ("size", "do_resize")),
)


def cases(config: Config) -> list[tuple[str, Any]]:
    """Return every field of a file with every odd value that it does not hold."""
    content = json.loads((config.source / config.file).read_text())
    held = dict(_leaves(content))
    found = []
    for field in config.fields():
        values = list(ODD)
        if isinstance(held.get(field), list) and held[field]:
            values += [[odd, *held[field][1:]] for odd in IN_A_LIST]
        found += [(field, value) for value in values if field not in held or repr(held[field]) != repr(value)]
    return found


def sample(config: Config, count: int) -> list[tuple[str, Any]]:
    """Return `count` cases, each of another field as far as there are as many; always the same ones."""
    every = cases(config)
    random.Random(config.name).shuffle(every)
    first = {field: number for number, (field, _) in reversed([*enumerate(every)])}
    return sorted(every, key=lambda one: first[one[0]] != every.index(one))[:count]


def copied(config: Config, folder: Path) -> Path:
    """Copy a folder: the changed file is a copy, all others are links."""
    for file in config.source.rglob("*"):
        copy = folder / file.relative_to(config.source)
        if file.is_file():
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.symlink_to(file)
    (folder / config.file).unlink()
    shutil.copyfile(config.source / config.file, folder / config.file)
    return folder


def changed(content: dict[str, Any], field: str, value: Any) -> dict[str, Any]:
    """Return a JSON object with another value of a field, named a.b.c; objects around it are made."""
    first, dot, rest = field.partition(".")
    inner = content.get(first)
    return content | {first: changed(inner if isinstance(inner, dict) else {}, rest, value) if dot else value}


def digest(tensors: list[torch.Tensor]) -> str:
    sha = hashlib.sha256()
    for one in tensors:
        sha.update(f"{one.dtype} {tuple(one.shape)}".encode() + one.contiguous().numpy().tobytes())
    return sha.hexdigest()


def outcome(config: Config, folder: Path, field: str, value: Any, sound: str) -> tuple[str, str]:
    """Return what is made of a value, and what was said of it; `sound` is the digest of the sound folder."""
    file = folder / config.file
    held = json.loads((config.source / config.file).read_text())
    file.write_text(json.dumps(changed(held, field, value)))
    try:
        with _at_most(SECONDS):
            found = digest(config.load(folder))
    except UserError as error:
        said = str(error)
        return ("refused" if "\n" not in said and _names(said, config, folder) else "worded badly"), said
    except Exception as error:  # noqa: BLE001 - what it is is the result
        return "exception", f"{type(error).__name__}: {error}"
    return ("no effect" if found == sound else "changes numbers"), ""


def _names(said: str, config: Config, folder: Path) -> bool:
    """Return whether a message names the file, or a file that it must fit."""
    return any(str(folder / part) in said for part in (config.file, str(Path(config.file).parent)))


@contextmanager
def _at_most(seconds: int) -> Iterator[None]:
    """Raise TimeoutError in what takes longer; in the main thread only."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"it took more than {seconds} s")

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
