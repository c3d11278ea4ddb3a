"""The command import-weights: it writes a pipeline folder with the weights of a network that was trained elsewhere."""

import json
import math
import re
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import torch
import tyro
from diffusers.loaders.single_file_model import SINGLE_FILE_LOADABLE_CLASSES
from torch import Tensor

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.input_files import read_json
from unified_trainer.basics.terminal import say
from unified_trainer.basics.types import DTYPES
from unified_trainer.models.base import Family, VideoModel, name_in
from unified_trainer.models.folder import WEIGHTS, check_component, check_unrounded
from unified_trainer.models.layout import is_ignored, reading_config
from unified_trainer.models.pipeline.opening import component_class
from unified_trainer.models.sparse_attention import SparseAttentionConfig
from unified_trainer.models.tensor_file import write_tensors
from unified_trainer.run.registry import family_of
from unified_trainer.tools.output_folder import check_empty, link_or_copy, new_folder
from unified_trainer.tools.prepare.distributed_checkpoint import Stored
from unified_trainer.tools.prepare.weight_source import read_source

INDEX, GATE, FLAT = "model_index.json", ".to_gate_compress.", "patch_embedding"
TIED = {"shared.weight", "encoder.embed_tokens.weight"}  # two names of one weight of T5


def _pairs(words: str) -> list[tuple[str, str]]:
    listed = words.split()
    return list(zip(listed[::2], listed[1::2], strict=True))


# Parts of our names, each before what replaces it, in the order in which they are replaced.
VAE = _pairs("""mid_block.resnets.0 middle.0 mid_block.attentions.0 middle.1 mid_block.resnets.1 middle.2
.norm1. .residual.0. .conv1. .residual.2. .norm2. .residual.3. .conv2. .residual.6. conv_shortcut shortcut
down_blocks downsamples norm_out head.0 conv_out head.2 conv_in conv1 post_quant_conv conv2 quant_conv conv1""")
T5 = _pairs(""".layer.0.SelfAttention.relative_attention_bias .pos_embedding.embedding .layer.0.SelfAttention .attn
.layer.0.layer_norm .norm1 .layer.1.layer_norm .norm2 .layer.1.DenseReluDense.wi_0 .ffn.gate.0
.layer.1.DenseReluDense.wi_1 .ffn.fc1 .layer.1.DenseReluDense.wo .ffn.fc2 encoder.block. blocks.
encoder.final_layer_norm norm encoder.embed_tokens token_embedding shared token_embedding""")
FASTVIDEO = _pairs("""patch_embedding. patch_embedding.proj. text_embedder.linear_1 text_embedder.fc_in
text_embedder.linear_2 text_embedder.fc_out time_embedder.linear_1 time_embedder.mlp.fc_in
time_embedder.linear_2 time_embedder.mlp.fc_out time_proj time_modulation.linear
image_embedder.norm2 image_embedder.? .norm2. .self_attn_residual_norm.norm. ? norm2
.attn1. . to_out.0 to_out net.0.proj. fc_in. net.2. fc_out.""")
REPLACED = {"Wan's T5": T5, "FastVideo's": FASTVIDEO}


class Layout(NamedTuple):
    """Another program's names of weights: a table from ours to theirs, or a converter of diffusers."""

    name: str
    theirs: Mapping[str, str]
    converter: Callable[..., dict[str, Tensor]] | None = None

    def convert(self, held: Mapping[str, Any]) -> dict[str, Any]:
        """Return what is held by our names; keys of nothing keep theirs, behind a `?`."""
        if self.converter is None:
            known = set(self.theirs.values())
            made = {ours: held[theirs] for ours, theirs in self.theirs.items() if theirs in held}
            return made | {f"?{key}": value for key, value in held.items() if key not in known}
        made = self.converter(checkpoint=dict(held))
        return {key if key in self.theirs else f"?{key}": value for key, value in made.items() if value is not None}

    def known(self, held: Mapping[str, Stored]) -> int:
        """Return how many of our weights are held, by these names."""
        try:
            return len(self.theirs.keys() & self.convert(_outline(held)).keys())
        except (LookupError, ValueError, TypeError, RuntimeError):  # diffusers' converters check nothing
            return 0


Network = tuple[str, Layout, dict[str, Stored]]  # what stands before its keys, their names, and what reads each


def import_weights(
    source: Annotated[Path, tyro.conf.Positional],
    out: Annotated[Path, tyro.conf.Positional],
    base: str,
    part: str | None = None,
    component: str = "transformer",
    dtype: Literal["fp32", "bf16"] = "fp32",
) -> None:
    """Write a pipeline folder with a network, a VAE or a text encoder that another program wrote.

    FastVideo, Self-Forcing, CausVid, rCM, Wan's own code, ComfyUI and single files that diffusers converts are read.
    Every weight must be known, present and of the base's shape; all other components are those of the base.

    Args:
        source: Distributed checkpoint, pipeline folder, folder of weights, or a file of safetensors or torch.save.
        out: Folder to write; it must be empty or absent.
        base: Pipeline folder or hub id of the same architecture.
        part: Network of a source that holds several, by what stands before its keys: generator, generator_ema, ...
        component: Part of the pipeline that is replaced: transformer, transformer_2 of low noise, vae, text_encoder.
        dtype: Precision of the written weights.
    """
    check_empty(out)
    family, folder = family_of("--base", base)
    named = read_json(folder / INDEX)
    entry = named.get(component)
    if not isinstance(entry, list) or None in entry:
        raise UserError(f"--component {component}: {folder / INDEX} names no such component")
    place = folder / component
    if (place / "config.json").is_file():
        check_unrounded(place)
    _check_config(source, place)
    found = read_source(source, component)
    model: VideoModel | None = None
    sparse = any(GATE in key for key in found if key.startswith(part or ""))
    if sparse and family.sparse is None:
        raise UserError(f"{source} holds gates of sparse attention, which the family of {folder} has not")
    if sparse and family.sparse is not None:
        any_share = SparseAttentionConfig(share=0.5)  # the weights are the same
        model = family.sparse(folder, component, any_share, False)
    elif component in family.networks(folder)[0]:
        model = family.model(folder, component)
    shapes = _shapes(model, place)
    network = prefix, layout, _ = _chosen(found, shapes, _layouts(place, family, shapes), source, part)
    kind = component_class(folder / INDEX, *entry) if model is None else type(model.network)
    weights = _weights(network, shapes, kind, source, place)
    with new_folder(out) as built:
        if model is not None:
            model.network.load_state_dict(weights, assign=True)
            model.save(built, component, DTYPES[dtype])
        else:
            ignored = shutil.ignore_patterns("*.safetensors*", "*.bin*")
            shutil.copytree(place, built / component, ignore=ignored, copy_function=link_or_copy)
            held = {name: weight.to(DTYPES[dtype]) for name, weight in weights.items()}
            write_tensors(built / component / f"{_stem(place)}.safetensors", held, {"format": "pt"})
        for name, other in named.items():
            if name != component and isinstance(other, list) and other[0] is not None:
                shutil.copytree(folder / name, built / name, copy_function=link_or_copy)
        named.pop("_name_or_path", None)
        (built / INDEX).write_text(json.dumps(named, indent=2) + "\n", encoding="utf-8")
    of_part = f" of {prefix.rstrip('.')}" if prefix else ""
    by = f"by {layout.name} names" + ", with sparse attention" * sparse
    say(f"{out}: {len(weights)} weights{of_part} from {source}, {by}")


def _stem(place: Path) -> str:
    return WEIGHTS if any(place.glob(f"{WEIGHTS}*.safetensors")) else "model"


def _shapes(model: VideoModel | None, place: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes that a component of the base has."""
    if model is None:
        return check_component(place, _stem(place))
    return {key: tuple(weight.shape) for key, weight in model.network.state_dict().items()}


def _layouts(place: Path, family: Family, shapes: Mapping[str, Any]) -> list[Layout]:
    """Return the layouts in which other programs write a component; one that fits as well as an earlier one is not."""
    config, same = read_json(place / "config.json"), {key: key for key in shapes}
    layouts = [Layout("the base's", same)]
    layouts += [Layout("the base's", same | dict.fromkeys(TIED & shapes.keys(), name)) for name in sorted(TIED)]
    layouts += [Layout("Wan's", {key: name_in(key, family.published_layer) or key for key in shapes})]
    layouts += [Layout(name, {key: _replaced(key, parts) for key in shapes}) for name, parts in REPLACED.items()]
    layouts += [Layout("Wan's VAE", {key: _replaced(_flat_vae(key, config), VAE) for key in shapes})]
    kept = SINGLE_FILE_LOADABLE_CLASSES.get(str(config.get("_class_name")), {}).get("checkpoint_mapping_fn")
    return [*layouts, *([Layout("the original code's", same, partial(kept, config=config))] if kept else [])]


def _check_config(source: Path, place: Path) -> None:
    """Raise UserError if a config beside the weights has another value than the base's for a field of both."""
    files = [source / place.name / "config.json", source / "config.json"]
    file = next((file for file in files if file.is_file()), place / "config.json")
    ours, theirs = read_json(place / "config.json"), read_json(file)
    if "num_heads" in theirs:  # of Wan's own code, whose folder holds the config of its transformer
        theirs["num_attention_heads"] = theirs["num_heads"]
    for key in sorted(ours.keys() & theirs.keys()) if "_class_name" in ours.keys() & theirs.keys() else ():
        if not key.startswith("_") and None not in (ours[key], theirs[key]) and ours[key] != theirs[key]:
            raise UserError(
                f"{file}: {key} is {theirs[key]}, but {ours[key]} in {place / 'config.json'}: --base must be of the "
                "same architecture"
            )


def _outline(held: Mapping[str, Stored]) -> dict[str, Tensor]:
    return {key: torch.empty(shape, device="meta") for key, (shape, _) in held.items()}


def _chosen(
    found: Mapping[str, Stored], shapes: Mapping[str, Any], layouts: Sequence[Layout], source: Path, part: str | None
) -> Network:
    """Return the network of a source; UserError unless it is the only one, or `part` names it."""
    rest, networks = dict(found), list[Network]()
    counts = Counter(key[: end + 1] for key in found for end in (-1, *(i for i, c in enumerate(key) if c == ".")))
    for prefix in sorted((one for one, count in counts.items() if 4 * count >= len(shapes)), key=len, reverse=True):
        held = {key.removeprefix(prefix): stored for key, stored in rest.items() if key.startswith(prefix)}
        known = [layout.known(held) for layout in layouts]
        if 2 * max(known) >= len(shapes):
            networks.append((prefix, layouts[known.index(max(known))], held))
            rest = {key: stored for key, stored in rest.items() if not key.startswith(prefix)}
    words = {prefix: prefix.rstrip(".") or "(none)" for prefix, *_ in networks}
    if not networks:
        some = ", ".join(sorted(found)[:3]) or "no tensors"
        adapter = "; it is an adapter: name it by --student.adapter.path" * any("lora_" in key for key in found)
        raise UserError(
            f"{source} holds no network with the weights of --base, such as {', '.join(sorted(shapes)[:2])}, in any "
            f"layout that is read; it holds {some}{adapter}"
        )
    chosen = [one for one in networks if part is None or part in (words[one[0]], one[0].partition(".")[0])]
    if len(chosen) != 1:
        have = ", ".join(sorted(words.values()))
        asked = "several networks" if part is None else f"no single network {part}"
        raise UserError(f"{source} holds {asked}: name one by --part, of {have}")
    return chosen[0]


def _weights(
    network: Network, shapes: Mapping[str, tuple[int, ...]], kind: Any, source: Path, place: Path
) -> dict[str, Tensor]:
    """Return the finite float32 weights by our names; UserError for keys and shapes that are not the base's."""
    _, layout, found = network
    names, spare = set(layout.theirs.values()), TIED if TIED & shapes.keys() else set[str]()
    ignored = {key for key in found.keys() - names if key in spare or is_ignored(key, kind)}
    held = {key: stored for key, stored in found.items() if key not in ignored}
    with reading_config(source, f"{layout.name} {kind.__name__}"):
        outline = layout.convert(_outline(held))
    unknown = sorted(key[1:] for key in outline if key.startswith("?") and not is_ignored(key[1:], kind))
    missing = sorted(layout.theirs[key] for key in shapes.keys() - outline.keys())
    for what, keys in (("unknown key", unknown), ("missing key", missing)):
        if keys:
            more = f" and {len(keys) - 1} more" if len(keys) > 1 else ""
            raise UserError(
                f"{source}: {what} {keys[0]}{more}, by {layout.name} names: --base must be of the same architecture"
            )
    for ours, wanted in shapes.items():
        given = tuple(outline[ours].shape)
        flat = ours.startswith(FLAT) and given == (wanted[0], math.prod(wanted[1:]))  # rCM multiplies patches by it
        if given != wanted and not flat:  # before it takes memory
            theirs = layout.theirs[ours]
            raise UserError(f"{source}: {theirs} has shape {[*given]}, but {ours} of {place.parent} {[*wanted]}")
    if layout.converter is None:
        values = layout.convert({key: read for key, (_, read) in held.items()})
    else:
        before, after = (sum(x.numel() for x in made.values()) for made in (_outline(held), outline))
        if before != after:  # such as connectors of LTX-2, which are another component
            say(f"{source}: diffusers' converter makes {after} numbers of {place.name} from the {before} of this part")
        values = layout.convert({key: read() for key, (_, read) in held.items()})
    weights = {}
    for ours, wanted in shapes.items():
        value = values.pop(ours)
        weight = value if isinstance(value, Tensor) else value()
        weights[ours] = torch.empty(wanted)  # not the memory of the file or of another key
        weights[ours].copy_(weight.reshape(wanted))
        if not bool(weights[ours].isfinite().all()):
            raise UserError(f"{source}: {layout.theirs[ours]} holds a value that is no finite floating-point number")
    return weights


def _flat_vae(key: str, config: Mapping[str, Any]) -> str:
    """Number the layers of a block of Wan's VAE one after the other, and in Wan2.1 those of all decoder blocks."""
    layers, nested = config.get("num_res_blocks", 2), config.get("is_residual")

    def place(found: re.Match[str]) -> str:
        side, block, number = found[1], int(found[2]), found[3]
        place = int(number) if number else layers + (side == "up")
        of_all = block * (layers + 2) + place
        return f"{side}samples.{block}.{side}samples.{place}." if nested else f"{side}samples.{of_all}."

    return re.sub(r"(down|up)_blocks\.(\d+)\.(?:resnets\.(\d+)|\w+samplers?(?:\.0)?)\.", place, key)


def _replaced(key: str, parts: Sequence[tuple[str, str]]) -> str:
    for ours, theirs in parts:
        key = key.replace(ours, theirs)
    return key
