"""Reading model folders: a folder is read completely, or a UserError names the file that is wrong."""

import hashlib
import itertools
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
import transformers
from accelerate import init_empty_weights
from diffusers import ModelMixin
from pydantic import Field
from torch import nn

from unified_trainer.basics.errors import MissingFileError, NotFiniteError, UserError
from unified_trainer.basics.input_files import Schema, check_file, checked, declared, read_as, read_json
from unified_trainer.models.layout import arguments_of, check_layout, reading_config
from unified_trainer.models.tensor_file import floating_shapes, names_before_rounding, opened
from unified_trainer.parallel.fsdp import local_part, storage_device, to_local
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.parallel.reading import fill

M = TypeVar("M", bound=Any)  # a class of another library
TOKENIZERS = ("tokenizer.json", "spiece.model", "vocab.json")
OF_BYTES = "ByT5Tokenizer"  # has none of these files: its tokens are bytes
WEIGHTS = "diffusion_pytorch_model"
NAMING_CODE = ("tokenizer_config.json", "config.json")  # files whose `auto_map` names classes in .py files
SAMPLE = 4096  # bytes of each tensor that a fingerprint reads
TOGETHER = 16  # weights that are in memory in float32 while they are changed


class Change(Protocol):
    """A source of float32 changes that are added to weights while they are read."""

    @property
    def changed(self) -> set[str]:
        """The names of the weights that are changed."""

    def change(self, weight: str, shape: torch.Size, device: torch.device) -> torch.Tensor:
        """Return what is added to the whole of a weight, in float32."""


class TokenizerConfig(Schema):
    """tokenizer_config.json, as far as prompts depend on it; transformers reads the rest, and one text is tried."""

    tokenizer_class: str | None = None
    model_max_length: int | None = Field(None, ge=1)  # a number of 31 digits where there is no bound
    pad_token: str | dict[str, Any] | None = None  # may stand in special_tokens_map.json instead


class WeightIndex(Schema):
    """An index of several files of weights."""

    weight_map: dict[str, str]  # file by the name of the weight


def check_component(folder: Path, weights: str) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a component's weights, from the headers of its files.

    Raise UserError, naming the file, unless config and weights are there, whole, and of floating-point numbers. Of
    quantised weights only the names are known.
    """
    if is_quantised(folder):
        return dict.fromkeys(itertools.chain(*map(names_before_rounding, folder.glob(f"{weights}*.safetensors"))), ())
    return _held(folder, weights)[0]


def is_quantised(component: Path) -> bool:
    """Return whether a component's weights have few bits, by its config: diffusers and transformers write it there."""
    return bool(read_json(component / "config.json").get("quantization_config"))


def check_unrounded(*components: Path) -> None:
    """Raise UserError, naming the file, for a component whose weights have few bits, where weights are read."""
    for component in components:
        if is_quantised(component):
            raise UserError(
                f"{component / 'config.json'}: its weights are quantised (quantization_config), which are only "
                "sampled: give the folder of the weights that they were made of, such as an export without --quantize"
            )


def _held(folder: Path, weights: str) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
    """Return the shapes of a component's weights, and the file, by its index, of each that several files hold."""
    files = sorted(folder.glob(f"{weights}*.safetensors"))
    if not files:
        raise MissingFileError(f"{folder} holds no {weights}*.safetensors: half-written, or downloaded without weights")
    index = folder / f"{weights}.safetensors.index.json"
    named = listed_weights(index) if index.is_file() or index.is_symlink() else {}
    shapes, repeated = dict[str, tuple[int, ...]](), dict[str, str]()
    for file in files:
        for key, shape in floating_shapes(file).items():
            if named.get(key, file.name) == file.name:
                shapes[key] = shape
            else:
                repeated[key] = named[key]
    if absent := sorted(named.keys() - shapes.keys()):
        raise UserError(f"{index}: weight_map places {absent[0]} in {named[absent[0]]}, which lacks it; fetch it again")
    return shapes, repeated


def listed_weights(index: Path) -> dict[str, str]:
    """Return the file of each weight that an index names; UserError for an absent one."""
    listed = read_as(WeightIndex, index).weight_map
    for name in sorted(set(listed.values())):
        if "/" in name or not ((file := index.parent / name).is_file() or file.is_symlink()):
            raise MissingFileError(f"{index}: weight_map names {name}, which is not in this folder; fetch it again")
        check_file(file)
    return listed


def load_strictly(
    kind: type[M],
    folder: Path,
    weights: str = WEIGHTS,
    dtype: torch.dtype = torch.float32,
    schema: type[Schema] | None = None,
    inside: Callable[[str], str] = str,
    **options: Any,
) -> M:
    """Load a model that has exactly the keys and shapes of its config; all weights must be finite.

    Of a config of transformers, the fields that `schema` declares count, or without one all. `inside` gives the
    network's name of a key of the files. `options` are those of `from_pretrained`. Raise UserError naming the folder
    and the key.
    """
    fields = check_described(kind, folder, weights, (), schema, inside)
    own = {"config": kind.config_class.from_dict(fields)} if schema else {}
    with no_progress_bar(), reading_config(folder / "config.json", kind.__name__):
        model = read_pretrained(kind, folder, dtype=dtype, use_safetensors=True, **own, **options)
    state = model.state_dict()
    for key, file in _held(folder, weights)[1].items():
        with opened(folder / file) as held:
            state[inside(key)].copy_(held.get_tensor(key))
    for name, weight in state.items():
        if not bool(weight.isfinite().all()):
            raise NotFiniteError(f"{folder}: weight {name} holds a value that is not finite")
    return model


def read_pretrained(kind: type[M], folder: Path, **options: Any) -> Any:
    """Return `kind.from_pretrained(folder)`, which neither asks the hub nor runs a file of the folder.

    Every tokenizer, processor, config and model of another library is read here.
    """
    return kind.from_pretrained(folder, trust_remote_code=False, local_files_only=True, **options)


def read_tokenizer(kind: type[M], folder: Path, embedded: int | None = None) -> M:
    """Return the tokenizer of a folder, which pads texts and was tried on one.

    Raise UserError, naming the file, for one whose class is a .py file of the folder, for files that are no tokenizer
    of this kind, and for one of more tokens than the `embedded` ones of its network.
    """
    config = folder / "tokenizer_config.json"
    for name in (*TOKENIZERS, *NAMING_CODE, "special_tokens_map.json", "added_tokens.json"):
        file = folder / name
        if file.suffix == ".json" and file.is_file():
            settings = read_json(file)  # a damaged file is named here, and not by transformers
            if name in NAMING_CODE and settings.get("auto_map"):
                raise UserError(
                    f"{file} names Python code of its own (auto_map), which is never run here: take a tokenizer of "
                    "transformers, or remove auto_map if a class of transformers reads these files"
                )
    described = read_as(TokenizerConfig, config) if config.is_file() else TokenizerConfig()
    if described.tokenizer_class != OF_BYTES and not any((folder / name).is_file() for name in TOKENIZERS):
        raise MissingFileError(f"{folder} holds none of {', '.join(TOKENIZERS)}")
    with reading_config(config, "tokenizer"):
        tokenizer: Any = read_pretrained(kind, folder)
        if tokenizer.pad_token_id is None:
            raise UserError(f"{config}: pad_token is missing, with which prompts are padded to one length")
        if embedded is not None and len(tokenizer) > embedded:
            raise UserError(f"{config}: the tokenizer has {len(tokenizer)} tokens, but its network embeds {embedded}")
        tried = tokenizer(["a prompt"], padding="max_length", max_length=8, truncation=True, return_tensors="pt")
        if not {"input_ids", "attention_mask"} <= tried.keys():
            raise UserError(f"{config}: the tokenizer gives {', '.join(tried)}, not input_ids and attention_mask")
    return tokenizer


@contextmanager
def no_progress_bar() -> Iterator[None]:
    """Show no bar while transformers reads weights."""
    shown = transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers.utils.logging.enable_progress_bar()


def check_described(
    kind: Any,  # a network's class, of diffusers or transformers
    folder: Path,
    weights: str = WEIGHTS,
    spare: tuple[str, ...] = (),
    schema: type[Schema] | None = None,
    inside: Callable[[str], str] = str,
) -> dict[str, Any]:
    """Return the fields that a component's config has for `kind`, read no weight, and take no memory for any.

    Raise UserError, naming the file, for a config of another class, for values that the class cannot have, and unless
    it describes exactly the weights of the folder, but for names that end in one of `spare`, which may be there. The
    other arguments are those of `load_strictly`.
    """
    check_unrounded(folder)
    held = check_component(folder, weights)
    file = folder / "config.json"
    fields = read_json(file)
    if issubclass(kind, ModelMixin):
        if (name := fields.get("_class_name")) != kind.__name__:
            raise UserError(f"{file}: _class_name must be {kind.__name__}, not {name!r}")
        checked(arguments_of(kind), fields, str(file))
    elif schema is not None:
        fields = declared(schema, file)
    check_layout(kind, fields, folder, {inside(key): shape for key, shape in held.items()}, spare)
    return fields


def outline(kind: type[M], folder: Path, spare: tuple[str, ...] = ()) -> M:
    """Return the float32 model of a diffusers component without memory for its weights; buffers are computed.

    Raise UserError unless its config describes such a model with exactly the weights of the folder, but for those whose
    names end in one of `spare`.
    """
    fields = check_described(kind, folder, spare=spare)
    with init_empty_weights(include_buffers=False), reading_config(folder / "config.json", kind.__name__):
        return kind.from_config(fields)


def check_new_layers(network: nn.Module, folder: Path, new: tuple[str, ...]) -> None:
    """Raise UserError unless a folder holds none, or all in their shapes, of the weights whose names end in `new`."""
    held = {key: shape for key, shape in check_component(folder, WEIGHTS).items() if key.endswith(new)}
    own = {key: tuple(p.shape) for key, p in network.named_parameters() if key.endswith(new)}
    if held and held != own:
        wrong = sorted(key for key in own.keys() | held.keys() if own.get(key) != held.get(key))
        raise UserError(f"{folder}: {wrong[0]} is {held.get(wrong[0], 'absent')}, not {own.get(wrong[0], 'absent')}")


def read_weights(
    network: nn.Module, folder: Path, mesh: Mesh, merged: Change | None = None, new: tuple[str, ...] = ()
) -> None:
    """Read the weights of an outline, each rank its own shards; all must be finite.

    What `merged` gives is added in float32, and the sum is rounded once to the precision of the weight. Parameters that
    already have memory (of adapters) stay as they are; buffers that the network saves are read. Weights whose names end
    in one of `new` are zero if the folder has none.
    """
    _check_one_set(folder)
    saved, tables = network.state_dict(), dict(network.named_buffers())
    empty = {key: weight for key, weight in saved.items() if weight.is_meta or key in tables}
    inside = {key: key.replace(".base_layer.", ".") for key in empty}
    device = storage_device(mesh)
    weights = {key: torch.empty_like(weight, device=device) for key, weight in empty.items()}
    changed = sorted(key for key in weights if merged is not None and inside[key] in merged.changed)
    held, repeated = _held(folder, WEIGHTS)
    absent = {key for key, name in inside.items() if name.endswith(new) and name not in held}
    for key in absent:
        to_local(weights[key]).zero_()
    fill(
        {inside[key]: weight for key, weight in weights.items() if key not in {*changed, *absent}},
        folder,
        mesh,
        repeated,
    )
    for first in range(0, len(changed), TOGETHER):
        some = changed[first : first + TOGETHER]
        exact = {key: torch.zeros_like(empty[key], device=device, dtype=torch.float32) for key in some}
        fill({inside[key]: weight for key, weight in exact.items() if key not in absent}, folder, mesh, repeated)
        for key, weight in exact.items():
            assert merged is not None  # it names the weights that are changed
            change = merged.change(inside[key], weight.shape, device)
            to_local(weight).add_(local_part(change, weight))
            to_local(weights[key]).copy_(to_local(weight))
    bad = [inside[key] for key, weight in weights.items() if not bool(to_local(weight).isfinite().all())]
    if mesh.any(bool(bad)):
        name = bad[0] if bad else "that another rank holds"
        raise NotFiniteError(f"{folder}: weight {name} holds a value that is not finite")
    network.load_state_dict(weights, assign=True, strict=False)


def fingerprint(*folders: Path) -> str:
    """Return a SHA-256 of what these folders hold: equal for copies of a model, different for different weights.

    Configs and tokenizer files are read whole; of safetensors files the header, and of each tensor 4 KiB in its middle,
    so that a text encoder of 23 GB takes milliseconds. Names of folders and times of files do not count.
    """
    digest = hashlib.sha256()
    for number, folder in enumerate(folders):
        for file in sorted(
            path for kind in ("*.json", "*.jinja", "*.model", "*.safetensors") for path in folder.glob(kind)
        ):
            for part in (f"{number}/{file.name}".encode(), *_read_sample(file)):
                digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


def _read_sample(file: Path) -> Iterator[bytes]:
    if file.suffix != ".safetensors":
        yield file.read_bytes()
        return
    with file.open("rb") as opened:  # eight bytes: the length of the header, then JSON, then the tensors
        header = opened.read(int.from_bytes(opened.read(8), "little"))
        yield header
        start = opened.tell()
        tensors = {name: entry for name, entry in json.loads(header).items() if name != "__metadata__"}
        for _, entry in sorted(tensors.items()):
            first, end = entry["data_offsets"]
            opened.seek(start + max(first, (first + end - SAMPLE) // 2))
            yield opened.read(min(SAMPLE, end - first))


def _check_one_set(folder: Path) -> None:
    """Refuse a folder that holds its weights twice, as a second variant: which to read would be a guess."""
    held = {file.name for file in folder.glob("*.safetensors")}
    index = folder / f"{WEIGHTS}.safetensors.index.json"
    listed = set(listed_weights(index).values()) if index.is_file() else {f"{WEIGHTS}.safetensors"}
    if held != listed:
        raise UserError(f"{folder} must hold exactly {sorted(listed)}, but holds {sorted(held)}")
