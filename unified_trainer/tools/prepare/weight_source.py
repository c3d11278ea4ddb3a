"""The tensors of a folder or file that another program wrote: their shapes, and what reads each, with its scale."""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from unified_trainer.basics.errors import MissingFileError, UserError
from unified_trainer.basics.input_files import check_file
from unified_trainer.models.folder import listed_weights
from unified_trainer.models.tensor_file import names_before_rounding, opened, saved
from unified_trainer.tools.prepare.distributed_checkpoint import Stored, stored_tensors

WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")
PICKLES = ("*.pt", "*.pth", "*.ckpt", "*.bin")
INDEXES = ("*.safetensors.index.json", "*.bin.index.json")
# Where a folder of Wan's own code holds a component: a folder of its own, or one file.
NATIVE_FOLDERS = {"transformer": "high_noise_model", "transformer_2": "low_noise_model"}
NATIVE_FILES = {"text_encoder": "models_t5*.pth", "vae": "*VAE.pth"}
SCALES = {"scale_weight": 1.0, "weight_scale": 1.0, "weight_scale_inv": 1.0, "SCB": 1 / 127}  # a weight is times these
OF_ACTIVATIONS = ("scale_input", "input_scale", "scaled_fp8", "weight_format")  # and markers of fp8 and of int8
QUANTIZED, FORMATS = "_quantization_metadata", ("float8_", "int8")  # a header of ComfyUI, and the formats that are read
MOST, DEEPEST = 2**20, 100  # entries of all dictionaries of a file, and points in the name of one
WAY_OUT = "take a file of the same network in bf16, or in fp8 or int8 with one scale per tensor or row"
Pairs = Iterable[tuple[str, Stored]]


def read_source(source: Path, component: str) -> dict[str, Stored]:
    """Return what reads each tensor of a source, by its key without the names of wrappers; scales are multiplied in.

    `component` is the part of a folder of several. Raise UserError for a source that holds a key twice, and, naming
    file and key, for weights that are quantized in another way.
    """
    found: dict[str, Stored] = {}
    for key, stored in _folder(source, component) if source.is_dir() else _file(source):
        name = key
        for wrapper in WRAPPERS:
            name = name.replace(wrapper, "")
        if name in found:
            raise UserError(f"{source}: {name} is there twice, also as {key}")
        found[name] = stored
    return _scaled(found, source)


def _folder(source: Path, component: str) -> Pairs:
    parts = [source / part for part in (component, NATIVE_FOLDERS.get(component)) if part]
    folder = next((part for part in parts if part.is_dir()), source)
    if (folder / ".metadata").is_file():
        return stored_tensors(folder).items()
    own = sorted(folder.glob(NATIVE_FILES[component])) if component in NATIVE_FILES and folder == source else []
    files = own or sorted(folder.glob("*.safetensors")) or sorted(file for one in PICKLES for file in folder.glob(one))
    indexes = [] if own else sorted(index for one in INDEXES for index in folder.glob(one))
    if len(indexes) == 1:
        named = listed_weights(indexes[0])
        listed = [folder / name for name in sorted(set(named.values()))]
        if more := [file for file in files if file not in listed and file.suffix == listed[0].suffix]:
            raise UserError(f"{folder} holds several networks, by {indexes[0].name} and {_names(more)}: {ONE_FOLDER}")
        return _joined(listed, named, indexes[0])
    if not files or indexes:
        held = _names(sorted(folder.iterdir())) or "nothing"
        raise MissingFileError(f"{folder} holds neither .metadata nor files of one network, but {held}: check SOURCE")
    return _joined(files, {}, folder)


ONE_FOLDER = "give one file as SOURCE, or a folder of one network alone"


def _joined(files: list[Path], named: Mapping[str, str], place: Path) -> Iterator[tuple[str, Stored]]:
    """Yield the tensors of files, each from the file that an index names, where there is one."""
    homes: dict[str, Path] = {}
    for file in files:
        for key, stored in _file(file):
            if named.get(key, file.name) != file.name:
                continue
            if key in homes:
                raise UserError(f"{place} holds several networks, {_names(files)}, all with {key}: {ONE_FOLDER}")
            homes[key] = file
            yield key, stored
    if absent := sorted(named.keys() - homes.keys()):
        raise UserError(f"{place}: weight_map places {absent[0]} in {named[absent[0]]}, which lacks it; fetch it again")


def _names(files: list[Path]) -> str:
    return ", ".join(file.name for file in files[:8]) + (f" and {len(files) - 8} more" if len(files) > 8 else "")


def _file(file: Path) -> Pairs:
    check_file(file)
    with file.open("rb") as bytes_of:
        start = bytes_of.read(9)
    if start[:4] == b"GGUF" or file.suffix == ".gguf":
        raise UserError(f"{file} is a GGUF file, whose weights are quantized in blocks: {WAY_OUT}")
    if start == b"version h":
        raise UserError(f"{file} is a pointer of Git LFS, not weights: run `git lfs pull` in its repository")
    return _tensor_file(file) if file.suffix == ".safetensors" or start[8:] == b"{" else _torch_file(file)


def _tensor_file(file: Path) -> Pairs:
    def read(key: str) -> Tensor:
        with opened(file) as held:
            tensor: Tensor = held.get_tensor(key)
        return tensor

    if names_before_rounding(file):
        raise UserError(f"{file}: torchao rounded its weights, as an export with --quantize does: {WAY_OUT}")
    with opened(file) as held:
        if quantized := (held.metadata() or {}).get(QUANTIZED):
            for layer, settings in json.loads(quantized).get("layers", {}).items():
                _check_format(f"{file}: {layer} in {QUANTIZED} of its header", settings)
        return [(key, (tuple(held.get_slice(key).get_shape()), partial(read, key))) for key in held.offset_keys()]


def _torch_file(file: Path) -> Iterator[tuple[str, Stored]]:
    """Yield the tensors of a file of torch.save, with the keys of nested dictionaries joined by points."""
    waiting, seen = [("", saved(file))], 0
    while waiting:
        prefix, value = waiting.pop()
        if isinstance(value, Tensor):
            yield prefix, (tuple(value.shape), partial(_whole, file, prefix, value))
        elif isinstance(value, Mapping):
            seen += len(value)
            if seen > MOST or prefix.count(".") > DEEPEST:
                raise UserError(f"{file} holds no network: its dictionaries hold each other")
            named = ((key, inner) for key, inner in value.items() if isinstance(key, str))  # numbers: of optimizers
            waiting += [(f"{prefix}.{key}" if prefix else key, inner) for key, inner in named]


def _whole(file: Path, key: str, value: Tensor) -> Tensor:
    if not isinstance(value, DTensor):
        return value.detach()
    parts = zip(value.placements, value.device_mesh.shape, strict=True)
    if any(size > 1 and not placement.is_replicate() for placement, size in parts):
        raise UserError(
            f"{file}: {key} is the part that one rank has of a DTensor {[*value.shape]}, {value.placements}: save the "
            "whole, by get_model_state_dict with full_state_dict, or give a folder of torch.distributed.checkpoint"
        )
    return value.to_local().detach()


def _scaled(found: dict[str, Stored], source: Path) -> dict[str, Stored]:
    """Return the tensors that are no scales, each with its scale."""
    scales: dict[str, tuple[str, Stored]] = {}
    plain: dict[str, Stored] = {}
    for key, stored in found.items():
        layer, _, name = key.rpartition(".")
        weight = f"{layer}.weight"
        if name == "comfy_quant":
            _check_format(f"{source}: {key}", json.loads(bytes(stored[1]().tolist())))
        elif name in SCALES and weight in found:
            if weight in scales:
                raise UserError(f"{source}: {weight} has two scales, {scales[weight][0]} and {key}: {WAY_OUT}")
            scales[weight] = key, stored
        elif name not in OF_ACTIVATIONS:
            plain[key] = stored
    return {
        key: (shape, partial(_times, source, key, read, scales.get(key), bool(scales)))
        for key, (shape, read) in plain.items()
    }


def _check_format(place: str, settings: Mapping[str, object]) -> None:
    kind, more = str(settings.get("format")), settings.keys() - {"format", "full_precision_matrix_mult"}
    if more or not kind.startswith(FORMATS):
        raise UserError(f"{place}: quantized as {dict(settings)}: {WAY_OUT}")


def _times(
    source: Path, key: str, read: Callable[[], Tensor], scale: tuple[str, Stored] | None, others: bool
) -> Tensor:
    """Return a weight, times its scale in float32; UserError for a scale of blocks, and for integers without one."""
    weight = read()
    if type(weight) is not Tensor or weight.layout != torch.strided or weight.device.type != "cpu":
        raise UserError(f"{source}: {key} holds a value that is no dense tensor of numbers")
    kind, small = str(weight.dtype).removeprefix("torch."), weight.dtype.itemsize == 1
    if scale is None:
        if not weight.is_floating_point() or (small and others and weight.ndim > 1):
            raise UserError(f"{source}: {key} has type {kind} and no scale beside it: {WAY_OUT}")
        return weight
    name, (shape, factor) = scale
    if not small or weight.dtype in (torch.uint8, torch.bool) or weight.ndim < 2:
        raise UserError(f"{source}: {name} scales {key}, which has type {kind} and shape {[*weight.shape]}: {WAY_OUT}")
    rows = len(weight)
    if math.prod(shape) > 1 and (shape[0] != rows or math.prod(shape) > rows):
        raise UserError(f"{source}: {name} {[*shape]} scales blocks of {key} {[*weight.shape]}: {WAY_OUT}")
    numbers = factor().float() * SCALES[name.rpartition(".")[2]]
    return weight.float() * numbers.reshape(-1, *(1 for _ in weight.shape[1:]))
