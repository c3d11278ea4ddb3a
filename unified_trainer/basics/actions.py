"""Actions: what a user does in each pixel frame of a video, such as the keys that are pressed."""

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float
from safetensors import SafetensorError
from safetensors.numpy import load_file

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.input_files import check_file

ACTIONS = "actions"  # their name in a condition, and the column of tables
SUFFIXES = (".npy", ".safetensors")


@dataclass(frozen=True, order=True)
class Actions:
    """The actions of a video; those of equal values are equal. An empty one is false: none are given."""

    sha256: str  # of shape and values
    values: Float[np.ndarray, "frames k"] = field(compare=False, repr=False)  # float32, a row for each pixel frame

    def __bool__(self) -> bool:
        return bool(self.sha256)

    def __len__(self) -> int:
        return len(self.values)

    @property
    def size(self) -> int:
        """The numbers in the action of a frame."""
        return self.values.shape[1]

    @classmethod
    def of(cls, values: Any, place: str) -> "Actions":
        """Return actions of an array or a list of lists; UserError, which begins with `place`, for anything else."""
        try:
            array = np.array(values, np.float32)
        except (TypeError, ValueError) as error:
            raise UserError(f"{place}: actions are a list of numbers for each frame ({error})") from error
        if array.ndim != 2 or 0 in array.shape:
            raise UserError(f"{place}: actions have the shape [frames, k], not {list(array.shape)}")
        if not np.isfinite(array).all():
            raise UserError(f"{place}: actions of frame {int((~np.isfinite(array)).any(1).argmax())} are not finite")
        return cls(hashlib.sha256(f"{array.shape}".encode() + array.tobytes()).hexdigest(), array)

    @classmethod
    def read(cls, given: Any, folder: Path, place: str) -> "Actions":
        """Return the actions of a cell of a table: a list of lists, as JSON too, or a file below its `folder`.

        A .safetensors file holds one tensor, or one of the name `actions`. Raise UserError, which begins with `place`,
        for what holds no actions; an empty cell has none.
        """
        if given is None or given == "":
            return NO_ACTIONS
        if not isinstance(given, str):
            return cls.of(given, place)
        file = folder / given
        if file.suffix not in SUFFIXES:
            raise UserError(f"{place}: {given!r} names no file of actions: have {', '.join(SUFFIXES)}")
        check_file(file, place)
        try:
            if file.suffix == ".npy":
                return cls.of(np.load(file, allow_pickle=False), f"{place} {file}")
            tensors = load_file(file)
        except (OSError, ValueError, EOFError, SafetensorError) as error:
            raise UserError(f"{place} {file} cannot be read: {error}") from error
        if len(tensors) > 1 and ACTIONS not in tensors:
            raise UserError(f"{place} {file} holds {', '.join(sorted(tensors))}: name one of them {ACTIONS}")
        return cls.of(tensors.get(ACTIONS, next(iter(tensors.values()), None)), f"{place} {file}")


NO_ACTIONS = Actions("", np.zeros((0, 0), np.float32))


def actions_fault(actions: Actions, size: int, frames: int) -> str:
    """Return what is wrong with the actions of a video of so many pixel frames for a student that takes some of a size.

    The size 0 is that of a student without actions.
    """
    if not size:
        way_out = "leave them out (column actions), or train with --student.action-size"
        return f"has actions, and the student takes none: {way_out}" if actions else ""
    if not actions:
        return f"has no actions, and the student takes {size} numbers for each frame: give them in a column actions"
    if (len(actions), actions.size) != (frames, size):
        return f"has actions {list(actions.values.shape)}, and the student takes {[frames, size]} (frames, numbers)"
    return ""
