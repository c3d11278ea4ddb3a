"""Safetensors files: errors name the file, types are checked from the header alone, and the umask decides who reads."""

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.input_files import check_file

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
    """Open a safetensors file; UserError, naming it, if it is missing or cannot be read."""
    check_file(file)
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


def refuse_other_types(file: Path, held: Any, keys: Iterable[str]) -> None:
    """Raise UserError unless these tensors of an open file hold floating-point numbers."""
    for key in keys:
        if (kind := held.get_slice(key).get_dtype()) not in FLOATING:
            raise UserError(f"{file}: {key} has type {kind}, but weights are floating-point numbers")
