"""Reading model folders: a folder is read completely, or a UserError names the file that is wrong."""

import json
from pathlib import Path
from typing import Any, TypeVar

import torch
from accelerate import init_empty_weights
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageReader

from unified_trainer.errors import MissingFileError, NotFiniteError, UserError
from unified_trainer.parallel.fsdp import storage_device, to_local
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.parallel.reading import fill

M = TypeVar("M")
WEIGHTS = "diffusion_pytorch_model"


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON object; raise UserError, naming the file, if it is missing, unreadable or something else."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise MissingFileError(f"{file} is missing") from error
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UserError(f"{file} cannot be read as JSON ({error}); fetch or write it again") from error
    if not isinstance(content, dict):
        raise UserError(f"{file} must hold a JSON object, not a {type(content).__name__}")
    return content


def check_component(folder: Path, weights: str) -> None:
    """Raise UserError, naming the file, unless config and weights are there and whole."""
    if not (folder / "config.json").is_file():
        raise MissingFileError(f"{folder / 'config.json'} is missing: not a folder that save_pretrained has finished")
    read_json(folder / "config.json")
    files = sorted(folder.glob(f"{weights}*.safetensors"))
    if not files:
        raise MissingFileError(f"{folder} holds no {weights}*.safetensors: half-written, or downloaded without weights")
    for file in files:
        try:
            with safe_open(file, "pt"):
                pass
        except (SafetensorError, OSError) as error:
            raise UserError(f"{file} is damaged or cut short ({error}): fetch or write it again") from error


def load_strictly(
    kind: type[M],
    folder: Path,
    weights: str = WEIGHTS,
    spare: tuple[str, ...] = (),
    dtype: torch.dtype = torch.float32,
) -> M:
    """Load a model that has exactly the keys and shapes of its config; all weights must be finite.

    Keys that end in one of `spare` may be there and are not read. Raise UserError naming the folder and the key.
    """
    check_component(folder, weights)
    model, info = kind.from_pretrained(folder, dtype=dtype, output_loading_info=True)
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        _refuse(folder, what, [str(key) for key in info[what] if not str(key).endswith(spare)])
    for name, weight in model.state_dict().items():
        if not bool(weight.isfinite().all()):
            raise NotFiniteError(f"{folder}: weight {name} holds a value that is not finite")
    return model


def outline(kind: type[M], folder: Path) -> M:
    """Return the float32 model of a diffusers component without memory for its weights; buffers are computed."""
    check_component(folder, WEIGHTS)
    with init_empty_weights(include_buffers=False):
        return kind.from_config(kind.load_config(folder))


def read_weights(network: nn.Module, folder: Path, mesh: Mesh) -> None:
    """Read the weights of an outline, each rank its own shards; as strict as `load_strictly`.

    Weights that already have memory (of adapters) stay as they are.
    """
    _check_one_set(folder)
    inside = {key: key.replace(".base_layer.", ".") for key, weight in network.state_dict().items() if weight.is_meta}
    held = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    spare = network._keys_to_ignore_on_load_unexpected or []
    empty = {key: weight for key, weight in network.state_dict().items() if key in inside}
    _refuse(folder, "missing_keys", sorted(set(inside.values()) - held.keys()))
    unexpected = sorted(held.keys() - set(inside.values()))
    _refuse(folder, "unexpected_keys", [key for key in unexpected if not any(word in key for word in spare)])
    shapes = {key: (held[inside[key]].size, weight.shape) for key, weight in empty.items()}
    _refuse(folder, "mismatched_keys", [f"{inside[key]} {a} {b}" for key, (a, b) in shapes.items() if a != b])
    device = storage_device(mesh)
    weights = {key: torch.empty_like(weight, device=device) for key, weight in empty.items()}
    fill({inside[key]: weight for key, weight in weights.items()}, folder, mesh)
    bad = [inside[key] for key, weight in weights.items() if not bool(to_local(weight).isfinite().all())]
    if mesh.any(bool(bad)):
        name = bad[0] if bad else "that another rank holds"
        raise NotFiniteError(f"{folder}: weight {name} holds a value that is not finite")
    network.load_state_dict(weights, assign=True, strict=False)


def _refuse(folder: Path, what: str, keys: list[str]) -> None:
    if keys:
        raise UserError(f"{folder}: {what.replace('_', ' ')} {sorted(keys)[:5]}")


def _check_one_set(folder: Path) -> None:
    """Refuse a folder that holds its weights twice, as a second variant: which to read would be a guess."""
    found = {file.name for file in folder.glob("*.safetensors")}
    index = folder / f"{WEIGHTS}.safetensors.index.json"
    listed = {f"{WEIGHTS}.safetensors"}
    if index.is_file():
        files = read_json(index).get("weight_map")
        if not isinstance(files, dict):
            raise UserError(f"{index}: weight_map is missing; fetch or write it again")
        listed = set(files.values())
    if found != listed:
        raise UserError(f"{folder} must hold exactly {sorted(listed)}, but holds {sorted(found)}")
