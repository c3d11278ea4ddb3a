"""Values of a network's arguments: tensors, lists, and arguments that hold others by name."""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

Size = tuple[int, int, int]  # frames, height and width in pixels
Place = tuple[int, int]  # a dimension, and how many of its first channels are meant; less than 0: of its last


def flat(arguments: Mapping[str, Any], samples: int) -> dict[str, Any]:
    """Return arguments with those apart that hold others by name, or tensors of all samples: "a/b" is a[b]."""
    apart: dict[str, Any] = {}
    for name, value in arguments.items():
        if isinstance(value, Mapping) and value:
            apart |= flat({f"{name}/{key}": one for key, one in value.items()}, samples)
        elif of_tensors(value) and all(x.dim() > 2 and len(x) == samples for x in value):
            apart |= {f"{name}/{place}": x for place, x in enumerate(value)}
        else:
            apart[name] = value
    return apart


def nested(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments that `flat` took apart as they were."""
    whole: dict[str, Any] = {}
    for name, value in arguments.items():
        head, _, rest = name.partition("/")
        whole[head] = whole.get(head, {}) | {rest: value} if rest else value
    for head in {name.partition("/")[0] for name in arguments if "/" in name}:
        parts = whole[head]
        numbered = all(key.isdecimal() for key in parts)
        whole[head] = [parts[key] for key in sorted(parts, key=int)] if numbered else nested(parts)
    return whole


def of_tensors(value: Any) -> bool:
    """Whether a value is a list of tensors."""
    return isinstance(value, (list, tuple)) and bool(value) and all(isinstance(one, Tensor) for one in value)


def stacked(value: Any) -> Tensor:
    """Return a list of tensors as one."""
    return torch.stack(list(value)) if isinstance(value, (list, tuple)) else value


def made_of(output: Any, place: int = 0) -> Any:
    """Return what a network makes: its output, that at a place of several, or the `sample` of an object."""
    if isinstance(output, (Tensor, list)):
        return output
    return output[place] if isinstance(output, tuple) else output.sample


def on_device(value: Any, device: torch.device) -> Any:
    """Return a value with all tensors on a device that it holds, in lists, mappings and dataclasses too."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, (list, tuple)):
        return type(value)([on_device(one, device) for one in value])
    if isinstance(value, Mapping):
        return {name: on_device(one, device) for name, one in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{field.name: on_device(vars(value)[field.name], device) for field in fields(value)})
    return value


def same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one shape are equal, up to rounding."""
    return bool(torch.allclose(a.double(), b.double(), atol=1e-4, rtol=1e-4))


def rows_of(value: Any) -> int | None:
    """Return the number of rows or items of an argument; None if it has none."""
    return len(value) if isinstance(value, (list, tuple)) or (isinstance(value, Tensor) and value.dim()) else None


def part(x: Tensor, place: Place | None) -> Tensor:
    """Return the first or the last channels of a dimension; the whole where there is no place."""
    dim, count = place or (0, len(x))
    return x.narrow(dim, 0 if count > 0 else x.shape[dim] + count, abs(count))


def wider(value: Tensor, part: Tensor) -> list[Place]:
    """Return the dimension in which a tensor is larger than the part, if that is one, and the part's size there."""
    if value.dim() != part.dim():
        return []
    other = [dim for dim in range(value.dim()) if value.shape[dim] != part.shape[dim]]
    return [(dim, part.shape[dim]) for dim in other if len(other) == 1 and dim and value.shape[dim] > part.shape[dim]]


def differ(a: Any, b: Any, *, row: bool = False) -> bool:
    """Whether two arguments differ, or with `row` those of the first sample; by more than a device's rounding."""
    a, b = (None if isinstance(x, Mapping) else x for x in (a, b))  # what `flat` leaves of them is empty
    if a is None or b is None:
        return a is not b
    if row:
        a, b = a[0], b[0]
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape != b.shape or not same(a.cpu(), b.cpu())
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) != len(b) or any(differ(x, y) for x, y in zip(a, b, strict=True))
    return type(a) is not type(b) or (isinstance(a, (int, float, str, np.ndarray)) and bool(np.any(a != b)))
