"""The command import-hpsv2: it writes the folder that the scorer hpsv2 reads, from an OpenCLIP checkpoint."""

import re
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import CLIPConfig, CLIPModel, CLIPTokenizer

from unified_trainer.basics.errors import MissingFileError, UserError
from unified_trainer.basics.input_files import read_as
from unified_trainer.basics.terminal import say
from unified_trainer.models import hub
from unified_trainer.models.folder import read_pretrained, read_tokenizer
from unified_trainer.models.layout import reading_config
from unified_trainer.models.tensor_file import floating_shapes, write_tensors
from unified_trainer.rewards.clip import SETTINGS, NetworkConfig
from unified_trainer.tools.output_folder import check_empty, new_folder

BASE = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"  # hub id
BASE_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", SETTINGS)
LAYER = re.compile(r"(visual\.)?transformer\.resblocks\.(\d+)\.(.+)")
IN_LAYER = {"ln_1": "layer_norm1", "ln_2": "layer_norm2", "attn.out_proj": "self_attn.out_proj"}
IN_LAYER |= {"mlp.c_fc": "mlp.fc1", "mlp.c_proj": "mlp.fc2"}
NAMES = {
    "visual.class_embedding": "vision_model.embeddings.class_embedding",
    "visual.positional_embedding": "vision_model.embeddings.position_embedding.weight",
    "visual.conv1.weight": "vision_model.embeddings.patch_embedding.weight",
    "visual.ln_pre.weight": "vision_model.pre_layrnorm.weight",
    "visual.ln_pre.bias": "vision_model.pre_layrnorm.bias",
    "visual.ln_post.weight": "vision_model.post_layernorm.weight",
    "visual.ln_post.bias": "vision_model.post_layernorm.bias",
    "token_embedding.weight": "text_model.embeddings.token_embedding.weight",
    "positional_embedding": "text_model.embeddings.position_embedding.weight",
    "ln_final.weight": "text_model.final_layer_norm.weight",
    "ln_final.bias": "text_model.final_layer_norm.bias",
    "logit_scale": "logit_scale",
}
TRANSPOSED = {"visual.proj": "visual_projection.weight", "text_projection": "text_projection.weight"}


def import_hpsv2(out: Path, checkpoint: Path, base: Path = Path(BASE)) -> None:
    """Make a folder for the scorer hpsv2 from the checkpoint of HPSv2 or HPSv2.1 and its base model's files.

    Args:
        out: Folder to write; it must be empty or absent.
        checkpoint: The official checkpoint as a safetensors file; docs/rewards.md has the line that converts it.
        base: Folder or hub id of CLIP ViT-H/14 as transformers has it: config, tokenizer and image settings; its
            weights are not read.
    """
    check_empty(out)
    if hub.is_hub_id(str(base)):
        base = hub.download(str(base), "--base", BASE_FILES)
    missing = [str(path) for path in (base / "config.json", base / SETTINGS, checkpoint) if not path.is_file()]
    if missing:
        raise MissingFileError(f"import-hpsv2 needs {', '.join(missing)}; check --base and --checkpoint")
    read_as(NetworkConfig, base / "config.json")
    tokenizer = read_tokenizer(CLIPTokenizer, base)
    with reading_config(base / "config.json", CLIPConfig.__name__):
        config = read_pretrained(CLIPConfig, base)
    floating_shapes(checkpoint)
    tensors = converted(load_file(checkpoint))
    _check(tensors, config, base, checkpoint)
    with new_folder(out) as folder:
        tokenizer.save_pretrained(folder)
        config.save_pretrained(folder)
        shutil.copyfile(base / SETTINGS, folder / SETTINGS)
        write_tensors(folder / "model.safetensors", tensors)
    say(f"wrote {out}: --reward.scorers.hpsv2.path {out}")


def converted(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors of OpenCLIP's names by those of transformers' CLIPModel; unknown names stay."""
    named: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name in TRANSPOSED:
            named[TRANSPOSED[name]] = tensor.T.contiguous()
        elif match := LAYER.fullmatch(name):
            tower = "vision_model" if match[1] else "text_model"
            named |= _of_layer(f"{tower}.encoder.layers.{match[2]}", match[3], tensor)
        else:
            named[NAMES.get(name, name)] = tensor.clone()
    return named


def _of_layer(layer: str, name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Return a tensor of a layer by its new name; that of the input projection is cut into query, key and value."""
    if name in ("attn.in_proj_weight", "attn.in_proj_bias"):
        end = name.rpartition("_")[2]
        return {
            f"{layer}.self_attn.{q}_proj.{end}": part.clone() for q, part in zip("qkv", tensor.chunk(3), strict=True)
        }
    module, _, end = name.rpartition(".")
    return {f"{layer}.{IN_LAYER.get(module, module)}.{end}": tensor.clone()}


def _check(tensors: Mapping[str, Tensor], config: CLIPConfig, base: Path, checkpoint: Path) -> None:
    """Raise UserError unless the tensors are those of the network that the base's config describes."""
    with torch.device("meta"):
        wanted = {name: list(value.shape) for name, value in CLIPModel(config).state_dict().items()}
    shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
    for name in sorted(wanted.keys() | shapes.keys()):
        if wanted.get(name) != shapes.get(name):
            raise UserError(
                f"{checkpoint}: {name} has shape {shapes.get(name)}, but the network of {base} {wanted.get(name)}; use "
                "the base model that the checkpoint was trained from"
            )
