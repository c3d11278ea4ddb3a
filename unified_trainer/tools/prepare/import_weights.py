"""The command import-weights: it writes a pipeline folder with the weights of a network that was trained elsewhere."""

import json
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro
from torch import Tensor

from unified_trainer.basics.errors import MissingFileError, UserError
from unified_trainer.basics.input_files import check_file, read_json
from unified_trainer.basics.terminal import say
from unified_trainer.basics.types import DTYPES
from unified_trainer.models.base import VideoModel
from unified_trainer.models.folder import listed_files
from unified_trainer.models.sparse_attention import SparseAttentionConfig
from unified_trainer.models.tensor_file import opened, saved
from unified_trainer.run.registry import family_of
from unified_trainer.tools.output_folder import check_empty, link_or_copy, new_folder
from unified_trainer.tools.prepare.distributed_checkpoint import Stored, stored_tensors

INDEX, WEIGHTS, GATE = "model_index.json", "diffusion_pytorch_model", ".to_gate_compress."
WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")
FIRST = "patch_embedding.weight"  # the weight by which a network is found among the keys of a source
# Diffusers' names of layers, and those of FastVideo's network: inside of a block, and outside of the blocks.
FASTVIDEO_INSIDE = {f"attn1.{name}": name for name in ("to_q", "to_k", "to_v", "norm_q", "norm_k")}
FASTVIDEO_INSIDE |= {"attn1.to_out.0": "to_out", "attn2.to_out.0": "attn2.to_out", "ffn.net.0.proj": "ffn.fc_in"}
FASTVIDEO_INSIDE |= {"ffn.net.2": "ffn.fc_out", "norm2": "self_attn_residual_norm.norm"}
FASTVIDEO_OUTSIDE = {
    "patch_embedding": "patch_embedding.proj",
    "condition_embedder.text_embedder.linear_1": "condition_embedder.text_embedder.fc_in",
    "condition_embedder.text_embedder.linear_2": "condition_embedder.text_embedder.fc_out",
    "condition_embedder.time_embedder.linear_1": "condition_embedder.time_embedder.mlp.fc_in",
    "condition_embedder.time_embedder.linear_2": "condition_embedder.time_embedder.mlp.fc_out",
    "condition_embedder.time_proj": "condition_embedder.time_modulation.linear",
    "condition_embedder.image_embedder.ff.net.0.proj": "condition_embedder.image_embedder.ff.fc_in",
    "condition_embedder.image_embedder.ff.net.2": "condition_embedder.image_embedder.ff.fc_out",
}
MOST, DEEPEST = 2**20, 100  # entries of all dictionaries of a file, and points in the name of one


def import_weights(
    source: Annotated[Path, tyro.conf.Positional],
    out: Annotated[Path, tyro.conf.Positional],
    base: str,
    part: str | None = None,
    component: str = "transformer",
    dtype: Literal["fp32", "bf16"] = "fp32",
) -> None:
    """Write a pipeline folder with a network that FastVideo, Self-Forcing, CausVid or Wan's own code wrote.

    Every weight must be known, present and of the base's shape; all other components are those of the base.

    Args:
        source: Distributed checkpoint, pipeline folder, folder of safetensors, or a .safetensors or .pt file.
        out: Folder to write; it must be empty or absent.
        base: Pipeline folder or hub id of the same architecture.
        part: Network of a source that holds several, by what stands before its keys: generator, generator_ema, ...
        component: Network of the pipeline that is replaced: transformer, or transformer_2 of low noise.
        dtype: Precision of the written weights.
    """
    check_empty(out)
    family, folder = family_of("base", base)
    if component not in (named := read_json(folder / INDEX)):
        raise UserError(f"--component {component}: {folder / INDEX} names no such network")
    held, prefix = _part(_read(source, component), source, part)
    sparse = any(GATE in key for key in held)
    if sparse and family.sparse is None:
        raise UserError(f"{source} holds gates of sparse attention, which the family of {folder} has not")
    model: VideoModel
    if sparse and family.sparse is not None:
        model = family.sparse(folder, component, SparseAttentionConfig(share=0.5))  # any share has the same weights
    else:
        model = family.model(folder, component)
    shapes = {key: weight.shape for key, weight in model.network.state_dict().items()}
    layout, names = _layout(shapes, held, family.published_layer)
    _must_fit(names, held, layout, source)
    weights = {}
    for name, ours in names.items():
        shape, read = held[name]
        if shape != shapes[ours]:  # before it takes memory
            raise UserError(f"{source}: {name} has shape {[*shape]}, but {ours} of {folder} {[*shapes[ours]]}")
        weight = read()
        dense = type(weight) is Tensor and (weight.layout, weight.device.type) == (torch.strided, "cpu")
        if not dense or not weight.is_floating_point() or not bool(weight.float().isfinite().all()):
            raise UserError(f"{source}: {name} holds a value that is no finite floating-point number")
        weights[ours] = weight.float()
    model.network.load_state_dict(weights, assign=True)
    with new_folder(out) as built:
        model.save(built, component, DTYPES[dtype], "10GB")
        for name, entry in named.items():
            if name != component and isinstance(entry, list) and entry[0] is not None:
                shutil.copytree(folder / name, built / name, copy_function=link_or_copy)
        named.pop("_name_or_path", None)
        (built / INDEX).write_text(json.dumps(named, indent=2) + "\n", encoding="utf-8")
    of_part = f" of {prefix.rstrip('.')}" if prefix else ""
    say(f"{out}: {len(weights)} weights{of_part} from {source}, by {layout} names" + ", with sparse attention" * sparse)


def _read(source: Path, component: str) -> dict[str, Stored]:
    """Return what reads each tensor of a source, by its key without the names of wrappers."""
    if source.is_dir():
        if (source / ".metadata").is_file():
            found = stored_tensors(source)
        else:
            folder = source / component if (source / INDEX).is_file() else source
            files = sorted(listed_files(folder, WEIGHTS) or [file.name for file in folder.glob("*.safetensors")])
            if not files:
                raise MissingFileError(f"{folder} holds neither .metadata nor *.safetensors: check SOURCE")
            found = {key: one for file in files for key, one in _tensor_file(folder / file).items()}
    elif source.suffix == ".safetensors":
        found = _tensor_file(source)
    else:
        found = _torch_file(source)
    named: dict[str, Stored] = {}
    for key, stored in found.items():
        name = key
        for wrapper in WRAPPERS:
            name = name.replace(wrapper, "")
        if name in named:
            raise UserError(f"{source}: {name} is there twice, also as {key}")
        named[name] = stored
    return named


def _tensor_file(file: Path) -> dict[str, Stored]:
    def read(key: str) -> Tensor:
        with opened(file) as held:
            tensor: Tensor = held.get_tensor(key)
        return tensor

    with opened(file) as held:
        return {key: (tuple(held.get_slice(key).get_shape()), partial(read, key)) for key in held.offset_keys()}


def _torch_file(file: Path) -> dict[str, Stored]:
    """Read the tensors of a file of torch.save, with the keys of nested dictionaries joined by points."""
    check_file(file)
    found: dict[str, Stored] = {}
    waiting, seen = [("", saved(file))], 0
    while waiting:
        prefix, value = waiting.pop()
        if isinstance(value, Tensor):
            found[prefix] = tuple(value.shape), value.detach
        elif isinstance(value, Mapping):
            seen += len(value)
            if seen > MOST or prefix.count(".") > DEEPEST:
                raise UserError(f"{file} holds no network: its dictionaries hold each other")
            named = ((key, inner) for key, inner in value.items() if isinstance(key, str))  # numbers: of optimizers
            waiting += [(f"{prefix}.{key}" if prefix else key, inner) for key, inner in named]
    return found


def _part(found: Mapping[str, Stored], source: Path, part: str | None) -> tuple[dict[str, Stored], str]:
    """Return the keys of one network without what stands before them, and that; UserError unless one is meant."""
    firsts = (FIRST, FIRST.replace(".weight", ".proj.weight"))
    prefixes = {key.removesuffix(first) for key in found for first in firsts if f".{key}".endswith(f".{first}")}
    words = {prefix: prefix.rstrip(".") or "(none)" for prefix in prefixes}
    if not prefixes:
        some = ", ".join(sorted(found)[:3]) or "no tensors"
        raise UserError(f"{source} holds no network of Wan: no key ends in {FIRST}; it holds {some}")
    chosen = [prefix for prefix in prefixes if part is None or part in (words[prefix], prefix.partition(".")[0])]
    if len(chosen) != 1:
        have = ", ".join(sorted(words.values()))
        asked = "several networks" if part is None else f"no single network {part}"
        raise UserError(f"{source} holds {asked}: name one by --part, of {have}")
    (own,) = chosen
    others = tuple(prefix for prefix in prefixes if len(prefix) > len(own))
    keys = [key for key in found if key.startswith(own) and not (others and key.startswith(others))]
    return {key.removeprefix(own): found[key] for key in keys}, own


def _layout(
    ours: Mapping[str, Any], held: Mapping[str, Stored], published: Callable[[str], str | None]
) -> tuple[str, dict[str, str]]:
    """Return the layout that has most of the keys, and its names of our weights."""
    layouts = {
        "diffusers'": {key: key for key in ours},
        "Wan's": {_renamed(key, published): key for key in ours},
        "FastVideo's": {_renamed(key, _fastvideo_layer): key for key in ours},
    }
    best = max(layouts, key=lambda layout: len(layouts[layout].keys() & held.keys()))
    return best, layouts[best]


def _renamed(key: str, layer_name: Callable[[str], str | None]) -> str:
    """Return another layout's name of a weight; parameters have no layer, and unnamed layers keep their name."""
    layer, _, kind = key.rpartition(".")
    whole, of_layer = layer_name(key), layer_name(layer)
    return whole or (f"{of_layer}.{kind}" if of_layer else key)


def _fastvideo_layer(layer: str) -> str | None:
    if not layer.startswith("blocks."):
        return FASTVIDEO_OUTSIDE.get(layer)
    _, number, inside = [*layer.split(".", 2), ""][:3]
    return f"blocks.{number}.{FASTVIDEO_INSIDE[inside]}" if inside in FASTVIDEO_INSIDE else None


def _must_fit(names: Mapping[str, str], held: Mapping[str, Stored], layout: str, source: Path) -> None:
    unknown, missing = sorted(held.keys() - names.keys()), sorted(names.keys() - held.keys())
    for what, keys in (("unknown key", unknown), ("missing key", missing)):
        if keys:
            more = f" and {len(keys) - 1} more" if len(keys) > 1 else ""
            raise UserError(
                f"{source}: {what} {keys[0]}{more}, by {layout} names: --base must be of the same architecture"
            )
