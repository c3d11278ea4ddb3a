"""Gradients of several losses on the trained weights of one role, apart from its updates."""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from unified_trainer.numerics.flow import widest
from unified_trainer.parallel.fsdp import is_sharded, to_local
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.roles.role import Trainable

Pass = Callable[[], Float[Tensor, ""]]  # computes a loss with its graph


def gradient_products(role: Trainable, losses: Sequence[Sequence[Pass]], mesh: Mesh) -> Float[Tensor, "t t"]:
    """Return the inner products of the losses' gradients on the role's trained weights, float64 on the CPU.

    Each loss is the sum of its passes, which run here, forward and backward, one graph at a time. Gradients are means
    over ranks, as in an update; each rank multiplies its shards, and one collective adds them. A rank keeps its shards
    of all gradients meanwhile. Call it between updates: RuntimeError if a weight has a gradient; none is left.
    """
    if any(p.grad is not None for p in role.weights.values()):
        raise RuntimeError(f"gradients of {role.name} are measured before the passes of an update, not among them")
    gradients = [_gradient(role, passes) for passes in losses]
    # How many ranks hold an element, within one copy of the sharded weights.
    copies = {key: 1.0 if is_sharded(p) else mesh.size / mesh.config.replicate for key, p in role.weights.items()}
    own = torch.stack([torch.stack([_product(one, other, copies) for other in gradients]) for one in gradients])
    return mesh.all_gather_cpu(own[None]).sum(0) / mesh.config.replicate  # each copy of the weights adds the same


def _gradient(role: Trainable, passes: Sequence[Pass]) -> dict[str, Tensor]:
    """Return this rank's shards of the gradient by weight, and take it from the weights."""
    for number, one in enumerate(passes, 1):
        role.backward(one(), last=number == len(passes))
    found = {key: to_local(p.grad) for key, p in role.weights.items() if p.grad is not None}
    for p in role.weights.values():
        p.grad = None
    return found


def _product(one: dict[str, Tensor], other: dict[str, Tensor], copies: dict[str, float]) -> Float[Tensor, ""]:
    shared = [key for key in one if key in other]
    parts = [(one[key] * other[key]).sum(dtype=widest(one[key].device)) / copies[key] for key in shared]
    return torch.stack(parts).cpu().double().sum() if parts else torch.zeros((), dtype=torch.float64)
