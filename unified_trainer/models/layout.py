"""Networks of diffusers and transformers as their configs describe them: laid out without memory, before any weight.

What a library says against a config is one UserError that names the file; an error of this package stays what it is.
"""

import functools
import inspect
import json
import re
import types
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import torch
from diffusers import ModelMixin
from pydantic import Field, create_model
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.input_files import Schema
from unified_trainer.models.tensor_file import NO_WEIGHT

T = TypeVar("T")
PACKAGE = __name__.partition(".")[0]
PLAIN = (bool, int, float, str, type(None))
SAID = 300  # characters of a library's message
SHOWN = 5  # weights that a message names


class TooManyWeightsError(ValueError):
    """A config describes many times the weights that its file holds."""


@dataclass(frozen=True)
class Layout:
    """The weights of a network by name: their shapes, and the first name of each, which tied weights share."""

    shapes: dict[str, tuple[int, ...]]
    first: dict[str, str]


@contextmanager
def reading_config(file: Path, what: str) -> Iterator[None]:
    """Turn what another library raises while it makes `what` of a config into a UserError that names the file.

    What this package's own code raises is a bug and passes; so do a lack of memory and the file system's errors.
    """
    try:
        yield
    except (UserError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        of_a_file = isinstance(error, OSError) and error.errno is not None
        if of_a_file or (_of_this_package(error) and not isinstance(error, TooManyWeightsError)):
            raise
        said = " ".join(str(error).split())[:SAID]
        raise UserError(
            f"{file}: no {what} can be made of it ({type(error).__name__}: {said}): fetch or write it again"
        ) from error


def _of_this_package(error: Exception) -> bool:
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    return place is not None and str(place.tb_frame.f_globals.get("__name__")).partition(".")[0] == PACKAGE


@functools.cache
def arguments_of(kind: type[ModelMixin]) -> type[Schema]:
    """Return the fields of a diffusers config: the arguments of the class, with the types that it declares for them.

    An argument whose default is None may be null, whatever type it declares.
    """
    hints = get_type_hints(kind.__init__)
    fields: dict[str, Any] = {
        f"field_{number}": (_type_of(argument, hints.get(name, Any)), Field(argument.default, alias=name))
        for number, (name, argument) in enumerate(inspect.signature(kind.__init__).parameters.items())
        if argument.kind in (argument.POSITIONAL_OR_KEYWORD, argument.KEYWORD_ONLY) and name != "self"
    }
    return create_model(kind.__name__, __base__=Schema, **fields)


def _type_of(argument: inspect.Parameter, hint: Any) -> Any:
    return _in_json(hint) | None if argument.default is None else _in_json(hint)


def _in_json(hint: Any) -> Any:
    """Return the type that an argument has in a JSON file; Any for one that JSON does not have."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return functools.reduce(lambda kind, other: kind | other, map(_in_json, parts))
    if origin in (tuple, list):
        kinds = [_in_json(part) for part in parts if part is not Ellipsis]
        return list[functools.reduce(lambda kind, other: kind | other, kinds)]  # type: ignore[misc]
    return hint if hint in PLAIN else Any


def check_layout(
    kind: Any,  # a network's class, of diffusers or transformers
    fields: Mapping[str, Any],
    folder: Path,
    held: Mapping[str, tuple[int, ...]],
    spare: tuple[str, ...] = (),
) -> None:
    """Raise UserError unless a config's fields describe a network of exactly the weights that the folder holds.

    `held` has their shapes. Names that end in one of `spare` may be held and are not read. No memory is
    taken for weights, and a config of more weights than are held is refused before all of it is laid out.
    """
    file = folder / "config.json"
    with reading_config(file, kind.__name__):
        layout = _layout(kind, json.dumps(fields), 2 * len(held) + 2)
    present = {layout.first[name] for name in held if name in layout.first}
    missing = [name for name in layout.shapes if layout.first[name] not in present]
    unexpected = [
        name for name in held.keys() - layout.shapes.keys() if not name.endswith(spare) and not is_ignored(name, kind)
    ]
    unlike = [
        f"{name} {list(held[name])} {list(layout.shapes[name])}"
        for name in held.keys() & layout.shapes.keys()
        if held[name] != layout.shapes[name]
    ]
    for what, names in (("missing", missing), ("unexpected", unexpected), ("mismatched", unlike)):
        if names:
            raise UserError(
                f"{file} describes another network than the weights beside it: {what} keys {sorted(names)[:SHOWN]}; "
                "fetch the folder again"
            )


def is_ignored(key: str, kind: Any) -> bool:
    """Return whether files of a network of this class may hold such a key, of which the network has no weight."""
    return any(re.search(word, key) for word in (NO_WEIGHT, *(kind._keys_to_ignore_on_load_unexpected or ())))


@functools.lru_cache(maxsize=32)
def _layout(kind: Hashable, fields: str, most: int) -> Layout:
    network = without_memory(lambda: _made(kind, json.loads(fields)), most)
    first: dict[int, str] = {}
    state = network.state_dict(keep_vars=True)
    named = {name: first.setdefault(id(weight), name) for name, weight in state.items()}
    return Layout({name: tuple(weight.shape) for name, weight in state.items()}, named)


def _made(kind: Any, fields: dict[str, Any]) -> Any:
    if issubclass(kind, ModelMixin):
        return kind.from_config(fields)
    return kind(kind.config_class.from_dict(fields))


def without_memory(make: Callable[[], T], most: int) -> T:
    """Return the network that `make` returns, without memory for weights and buffers.

    Raise TooManyWeightsError as soon as it has more than `most`: a config can name layers without end.
    """
    count = 0

    def counted(module: nn.Module, name: str, weight: nn.Parameter | None) -> None:
        nonlocal count
        count += weight is not None
        if count > most:
            raise TooManyWeightsError(f"it has more than {most} weights, many times those of the file")

    hook = register_module_parameter_registration_hook(counted)
    try:
        with torch.device("meta"):
            return make()
    finally:
        hook.remove()
