"""The tensors of a checkpoint of torch.distributed.checkpoint; its metadata, which is a pickle, is read as data.

No class is looked up and nothing is called: the opcodes of the pickle make plain records of the names below alone.
"""

import io
import math
import pickletools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.input_files import check_file
from unified_trainer.models.tensor_file import saved

FLOATS = {name: getattr(torch, name) for name in ("float64", "float32", "float16", "bfloat16")}
OTHERS = ("int64", "int32", "int16", "int8", "uint8", "bool", "float8_e4m3fn", "float8_e5m2")  # never read
RECORDS = (
    *("Metadata", "StorageMeta", "MetadataIndex", "TensorProperties", "_MEM_FORMAT_ENCODING"),
    *("TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata"),
)
OF_TORCH_2_0 = "torch.distributed._shard.sharded_tensor.metadata"
NAMES = {
    *(("torch.distributed.checkpoint.metadata", name) for name in RECORDS),
    *((OF_TORCH_2_0, name) for name in ("TensorProperties", "MEM_FORMAT_ENCODING")),
    *(("torch", name) for name in ("Size", *FLOATS, *OTHERS)),
    *((module, name) for module in ("pathlib", "pathlib._local") for name in ("Path", "PosixPath", "PurePosixPath")),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
}
# The number of values that an opcode takes from the stack, None for all after the mark; and opcodes that push a value.
TAKEN = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3, "TUPLE": None, "APPEND": 1, "APPENDS": None}
TAKEN |= {"SETITEM": 2, "SETITEMS": None, "BUILD": 1, "NEWOBJ": 2, "REDUCE": 2, "STACK_GLOBAL": 2}
VALUES = ("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "SHORT_BINUNICODE", "BINUNICODE")
CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
MOST = 2**27  # bytes of metadata; those of 14 billion parameters on 64 ranks, with their moments, have 2^25
LARGEST = 2**48  # offset or size
Stored = tuple[tuple[int, ...], Callable[[], Tensor]]


@dataclass(eq=False)
class _Record:
    """A name, with the arguments and the state of the object that a pickle would make of it."""

    name: str
    arguments: Any = None
    state: Any = None


class _Pairs(list):
    """The keys and values of a dictionary: nothing is hashed before it was looked at."""


def stored_tensors(folder: Path) -> dict[str, Stored]:
    """Return the shape of each tensor of a checkpoint, and what reads it, in this process alone.

    Raise UserError, naming the file, for metadata that are damaged or name anything but the records of tensors.
    """
    file = folder / ".metadata"
    check_file(file)
    if file.stat().st_size > MOST:
        raise UserError(f"{file} has {file.stat().st_size} bytes, more than the {MOST} that are read")
    try:
        return dict(_tensors(_plain(file.read_bytes()), folder))
    except (ValueError, LookupError, TypeError) as error:
        said = str(error)[:200]
        raise UserError(f"{file} is no metadata of a distributed checkpoint of tensors ({said})") from error


def _plain(content: bytes) -> Any:
    """Return what a pickle holds as records, pairs, lists, tuples, texts and numbers."""
    stack, marks, memo = list[Any](), list[int](), dict[int, Any]()
    value: Any
    for code, value, _ in pickletools.genops(content):
        kind, taken = code.name, list[Any]()
        if kind in TAKEN:
            count = TAKEN[kind]
            start = marks.pop() if count is None else len(stack) - count
            taken = stack[start:]
            del stack[start:]
        match kind:
            case "MARK":
                marks.append(len(stack))
            case "EMPTY_DICT" | "EMPTY_LIST":
                stack.append(_Pairs() if kind == "EMPTY_DICT" else [])
            case "EMPTY_TUPLE" | "TUPLE1" | "TUPLE2" | "TUPLE3" | "TUPLE":
                stack.append(tuple(taken))
            case "APPEND" | "APPENDS":
                _of(list, stack[-1]).extend(taken)
            case "SETITEM" | "SETITEMS":
                _of(_Pairs, stack[-1]).extend(zip(taken[::2], taken[1::2], strict=True))
            case "GLOBAL" | "STACK_GLOBAL":
                module, name = value.split(" ", 1) if kind == "GLOBAL" else (_of(str, one) for one in taken)
                if (module, name) not in NAMES:
                    raise ValueError(f"it names {module}.{name}")
                stack.append(_Record(name))
            case "NEWOBJ" | "REDUCE":
                stack.append(_Record(_of(_Record, taken[0]).name, taken[1]))
            case "BUILD":
                _of(_Record, stack[-1]).state = taken[0]
            case "MEMOIZE" | "BINPUT" | "LONG_BINPUT":
                memo[len(memo) if kind == "MEMOIZE" else value] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[value])
            case "STOP":
                return stack[-1]
            case _ if kind in VALUES or kind in CONSTANTS:
                stack.append(CONSTANTS.get(kind, value))
            case _ if kind not in ("PROTO", "FRAME"):
                raise ValueError(f"it has the opcode {kind}")


def _tensors(metadata: Any, folder: Path) -> Iterator[tuple[str, Stored]]:
    top, places = _fields(metadata, "Metadata"), dict[Any, tuple[Path, int, int]]()
    for index, info in _of(_Pairs, top["storage_data"]):
        at, place = _fields(index, "MetadataIndex"), _fields(info, "_StorageInfo")
        file, start, length = _of(str, place["relative_path"]), _number(place["offset"]), _number(place["length"])
        if file != Path(file).name or place.get("transform_descriptors"):
            raise ValueError("it names files of other folders, or compressed ones")
        if at.get("offset") is not None:  # of a tensor
            places[_of(str, at["fqn"]), _size(at["offset"])] = folder / file, start, length
    for key, entry in _by_name(top["state_dict_metadata"]).items():
        if _of(_Record, entry).name != "BytesStorageMetadata":
            held = _fields(entry, "TensorStorageMetadata")
            size, properties = _size(held["size"]), _of(tuple, _of(_Record, held["properties"]).state)
            chunks = [_fields(chunk, "ChunkStorageMetadata") for chunk in _of(list, held["chunks"])]
            parts = [(_size(chunk["offsets"]), _size(chunk["sizes"])) for chunk in chunks]
            within = all(i + n <= most for part in parts for i, n, most in zip(*part, size, strict=True))
            if not within:
                raise ValueError(f"a part of {key} lies outside of it")
            stored = [(*part, *places[key, part[0]]) for part in parts]
            yield key, (size, partial(_read, folder, key, size, _of(_Record, properties[0]).name, stored))


def _read(folder: Path, key: str, size: tuple[int, ...], dtype: str, parts: list[tuple[Any, ...]]) -> Tensor:
    """Read a tensor of floating-point numbers from its parts; an element that no part holds is not a number."""
    if dtype not in FLOATS:
        raise UserError(f"{folder}: {key} has type {dtype}, but weights are floating-point numbers")
    tensor = torch.full(size, math.nan, dtype=FLOATS[dtype])
    for offsets, sizes, file, start, length in parts:
        check_file(file)
        with file.open("rb") as opened:
            opened.seek(start)
            held = saved(file, io.BytesIO(opened.read(min(length, file.stat().st_size))))
        if type(held) is not Tensor or _kind(held) != (sizes, *_kind(tensor)[1:]):
            raise UserError(f"{file} does not hold {key} as .metadata describes it: fetch it again")
        tensor[tuple(slice(i, i + n) for i, n in zip(offsets, sizes, strict=True))] = held
    return tensor


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.layout, tensor.device


def _fields(record: Any, name: str) -> dict[str, Any]:
    """Return the fields of a record; ValueError for one of another name."""
    if _of(_Record, record).name != name:
        raise ValueError(f"it holds {record.name} in place of {name}")
    return _by_name(record.state)


def _by_name(pairs: Any) -> dict[str, Any]:
    return {_of(str, name): value for name, value in _of(_Pairs, pairs)}


def _size(record: Any) -> tuple[int, ...]:
    (numbers,) = _of(tuple, _of(_Record, record).arguments)
    return tuple(map(_number, _of(tuple, numbers)))


def _number(value: Any) -> int:
    number: int = _of(int, value)
    if not 0 <= number < LARGEST:
        raise ValueError("a number of it is out of range")
    return number


def _of(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise TypeError(f"it holds {type(value).__name__} in place of {kind.__name__}")
    return value
