"""The named tensors of a prompt: which shapes they may have, how they are padded and stacked, and how two differ."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from unified_trainer.basics.errors import UserError
from unified_trainer.models.base import Prompt

Shapes = Mapping[str, tuple[int, ...]]  # by name, the largest shape of each tensor of a prompt


def main_name(shapes: Shapes) -> str:
    """Return the name of the tensor with most elements, which holds floating-point numbers."""
    return max(shapes, key=lambda name: math.prod(shapes[name]))


def misfit(prompt: Prompt, shapes: Shapes) -> str:
    """Return why tensors cannot be those of a prompt with these largest shapes; empty if they can.

    All axes but the last may be shorter, and so may a vector that is as long as one of them: a mask of tokens.
    """
    if prompt.keys() != shapes.keys():
        return f"has tensors {', '.join(sorted(prompt)) or 'none'}, expected {', '.join(sorted(shapes))}"
    lengths = {size for shape in shapes.values() for size in shape[:-1]}
    for name, most in shapes.items():
        x, of_tokens = prompt[name], len(most) == 1 and most[0] in lengths
        least = (1,) if of_tokens else (1,) * (len(most) - 1) + most[-1:]
        fits = x.ndim == len(most) and all(a <= n <= b for a, n, b in zip(least, x.shape, most, strict=True))
        real = x.is_floating_point() or not (name == main_name(shapes) or x.is_complex())
        if not (fits and real and x.isfinite().all()):
            return f"has {name} {x.dtype} {[*x.shape]}, expected finite numbers {[*least]} to {[*most]}"
    return ""


def stack(prompts: Sequence[Prompt], shapes: Shapes) -> dict[str, Tensor]:
    """Return the tensors of all prompts, padded with zeros, floating-point ones in float32; UserError for a misfit."""
    if said := next(filter(None, (misfit(prompt, shapes) for prompt in prompts)), ""):
        raise UserError(f"a prompt {said}")
    stacked: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        rows = [prompt[name] for prompt in prompts]
        kinds = {torch.float32 if row.is_floating_point() else row.dtype for row in rows}
        if len(kinds) > 1:
            raise UserError(f"prompts have {name} of types {' and '.join(sorted(map(str, kinds)))}")
        stacked[name] = rows[0].new_zeros(len(rows), *shape, dtype=kinds.pop())
        for padded, row in zip(stacked[name], rows, strict=True):
            padded[tuple(map(slice, row.shape))] = row
    return stacked


def difference(own: Prompt, stored: Prompt) -> float:
    """Return the largest |stored - own| / |own|, but for zeros behind the end; infinite for other names or integers."""
    if own.keys() != stored.keys():
        return math.inf
    return float(torch.tensor([_difference(x, stored[name]) for name, x in own.items()]).max())  # NaN, if one is


def _difference(own: Tensor, stored: Tensor) -> float:
    inside = stored[tuple(map(slice, own.shape))] if stored.ndim == own.ndim else stored
    same = own.dtype == stored.dtype or (own.is_floating_point() and stored.is_floating_point())
    if not same or inside.shape != own.shape or inside.count_nonzero() != stored.count_nonzero():
        return math.inf
    apart = (inside.float() - own.float()).norm()
    return 0.0 if not apart else float(apart / own.float().norm()) if own.is_floating_point() else math.inf
