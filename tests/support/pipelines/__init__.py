"""Small random folders of the pipelines of diffusers, written by the tests with the real classes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline
from torch import nn


@dataclass(frozen=True)
class Small:
    """A small folder of one pipeline class, and a call of it that takes a second or two on one core."""

    write: Callable[[Path], None]
    """Writes the folder, always the same one."""
    call: Mapping[str, Any]
    """Arguments of the call apart from num_inference_steps, generator and output_type."""


def small(make: Callable[[], DiffusionPipeline], **call: Any) -> Small:
    """Return the small folder of the pipeline that `make` builds."""
    return Small(partial(save, make), call)


def save(make: Callable[[], DiffusionPipeline], folder: Path) -> None:
    """Write the pipeline that `make` builds under a fixed seed, without a weight that hides a part of a network."""
    strict = torch.are_deterministic_algorithms_enabled()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        torch.use_deterministic_algorithms(True)  # weights that a class leaves unwritten are nan, not chance
        try:
            pipeline = make()
        finally:
            torch.use_deterministic_algorithms(strict)
        for component in pipeline.components.values():
            if isinstance(component, nn.Module):
                enliven(component.eval())
                strengthen(component)
    pipeline.save_pretrained(folder)


@torch.no_grad()
def enliven(network: nn.Module) -> None:
    """Replace weights that are one number, as those of norms and of projections that begin at zero, by random ones."""
    for name, weight in (*network.named_parameters(), *network.named_buffers()):
        if not weight.is_floating_point() or not weight.numel():
            continue
        if weight.isnan().any():
            weight.copy_(0.5 * torch.randn(weight.shape))
        elif name.endswith(("running_mean", "running_var")) or (isinstance(weight, nn.Parameter) and is_one(weight)):
            level = weight.flatten()[0]
            weight.copy_((level if level else 1) * (1 if level else 0) + 0.1 * torch.randn(weight.shape).clamp(-3, 3))


@torch.no_grad()
def strengthen(network: nn.Module) -> None:
    """Raise small weights until a layer keeps the size of its input, so that a prompt shows in the picture."""
    for module in network.modules():
        if isinstance(module, nn.Embedding | nn.Linear | nn.Conv2d | nn.Conv3d) and module.weight.numel():
            size = 1.0 if isinstance(module, nn.Embedding) else module.weight[0].numel() ** -0.5
            module.weight.mul_(max(1.0, size / float(module.weight.std())))


def is_one(weight: torch.Tensor) -> bool:
    """Tell whether all elements of a weight are equal, and would stay so however many it had."""
    return bool((weight == weight.flatten()[0]).all()) and (weight.numel() > 1 or weight.item() in (0, 1))
