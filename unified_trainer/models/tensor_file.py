"""Files of tensors: errors name the file, types are checked from the header alone, and the umask decides who reads.

They are safetensors, or what torch.save wrote, of which no code is run.
"""

import io
import json
import re
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.input_files import check_file

SAVED = (".pt", ".pth", ".bin", ".ckpt")  # files of torch.save
FLOATING = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")
# Keys of files that are no weights: tables that networks compute themselves, states of other libraries, tokenizers.
NO_WEIGHT = re.compile(
    r"(^|\.)(position_ids|inv_freq|freqs\w*|rope\w*(\.\w+)*|(pos_embedder\.)(seq|dim_\w+_range)|_extra_state|spiece_model)$"
)


def write_tensors(file: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file, with the permissions that any new file has there.

    Raises OSError or SafetensorError if it cannot be written.
    """
    file.touch()
    mode = file.stat().st_mode
    held = {name: x.contiguous() for name, x in tensors.items()}
    save_file(held, file, dict(metadata) if metadata else None)  # it replaces the file by one of mode 0600
    file.chmod(mode)


@contextmanager
def opened(file: Path) -> Iterator[Any]:
    """Open a safetensors file, or one of torch.save by the same calls; UserError if it is missing or cannot be read."""
    check_file(file)
    if file.suffix in SAVED:
        yield _as_safetensors(file, file.stat().st_mtime_ns)
        return
    try:
        with safe_open(file, "pt") as held:
            yield held
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file} is damaged or cut short ({error}): fetch or write it again") from error


def floating_shapes(file: Path) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor, from the header alone.

    Raise UserError, naming the tensor, unless all but those of `NO_WEIGHT` hold floating-point numbers.
    """
    with opened(file) as held:
        keys = list(held.offset_keys())
        refuse_other_types(file, held, (key for key in keys if not NO_WEIGHT.search(key)))
        return {key: tuple(held.get_slice(key).get_shape()) for key in keys}


def names_before_rounding(file: Path) -> list[str]:
    """Return the names of the weights that torchao wrote in parts; none of other files."""
    with opened(file) as held:
        return list(json.loads((held.metadata() or {}).get("tensor_names", "[]")))


def refuse_other_types(file: Path, held: Any, keys: Iterable[str]) -> None:
    """Raise UserError unless these tensors of an open file hold floating-point numbers."""
    for key in keys:
        if (kind := held.get_slice(key).get_dtype()) not in FLOATING:
            raise UserError(f"{file}: {key} has type {kind}, but weights are floating-point numbers")


def saved(file: Path, content: io.BytesIO | None = None) -> Any:
    """Return what torch.save wrote into a file, or into `content` of it: tensors, numbers, texts and containers.

    Raise UserError, naming the file, for everything else, and for compressed tensors, which may fill the memory.
    """
    try:
        with io.BytesIO(content.getvalue()) if content else file.open("rb") as held:
            zipped = held.read(4) == b"PK\x03\x04"  # else of torch before 1.6, which compresses nothing
            if zipped:
                with zipfile.ZipFile(held) as opened:
                    if any(entry.compress_type for entry in opened.infolist()):
                        raise ValueError("it is compressed")
        return torch.load(content or file, map_location="cpu", weights_only=True, mmap=zipped and content is None)
    except Exception as error:
        if named := re.search(r"GLOBAL (\S+)", str(error)):
            raise UserError(
                f"{file} is no file of tensors alone: its pickle names {named[1]}, which is never run here. If you "
                "trust the file, load it by torch.load with weights_only=False and save its dictionary of tensors alone"
            ) from error
        said = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"
        raise UserError(f"{file} is no file of tensors that torch.save wrote ({said})") from error


@lru_cache(maxsize=2)
def _as_safetensors(file: Path, _written: int) -> Any:
    """Return what torch.save wrote as `safe_open` does: tensors by dotted names, and its other values as the header."""
    held = dict(_flat(saved(file)))
    tensors = {key: value for key, value in held.items() if isinstance(value, Tensor)}
    header = {key: str(value) for key, value in held.items() if key not in tensors}

    def part(key: str) -> SimpleNamespace:
        kind = str(tensors[key].dtype).removeprefix("torch.").replace("float", "f").upper()
        return SimpleNamespace(get_shape=lambda: list(tensors[key].shape), get_dtype=lambda: kind)

    calls = {"offset_keys": lambda: list(tensors), "get_tensor": tensors.__getitem__, "metadata": lambda: header}
    return SimpleNamespace(get_slice=part, **calls)


def _flat(value: object, name: str = "") -> Iterator[tuple[str, object]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flat(inner, f"{name}.{key}".removeprefix("."))
    else:
        yield name, value
