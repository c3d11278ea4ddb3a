"""This script measures options of flow_map and consistency against the exact teacher of tests/support/exact_world.py.

    python scripts/measure_options.py [--seeds 0 1 2 3]

Every row is the Frechet distance of 1200 samples to the templates: mean and standard deviation over training seeds. The
noises of the samples are the same for all rows and seeds. A run takes seconds on one thread.
"""

import argparse
import copy
import dataclasses
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

from exact_world import (
    ALONE,
    CLASSES,
    EACH,
    SHAPE,
    ClassCodec,
    Model,
    Posterior,
    distance,
    pretrained,
    role,
    templates,
)

from unified_trainer.basics.types import Condition
from unified_trainer.data.clips import Clips
from unified_trainer.data.loader import Loader
from unified_trainer.methods.base import Method
from unified_trainer.methods.consistency import Consistency, ConsistencyConfig
from unified_trainer.methods.flow_map import FlowMap, FlowMapConfig
from unified_trainer.models.flow_map import end_of
from unified_trainer.roles.backbone import Backbone
from unified_trainer.roles.role import Frozen, RoleConfig, Trainable, TrainableConfig
from unified_trainer.run.trainer import Trainer
from unified_trainer.sampling.solver import SamplerConfig

WIDTH = 128  # of the layers of the exact world's network


class FlowMapNetwork(nn.Module):
    """The pretrained network with a layer of t - r, which starts at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.span = copy.deepcopy(pretrained()), nn.Linear(16, WIDTH)
        self.layers = self.base.layers
        nn.init.zeros_(self.span.weight)
        nn.init.zeros_(self.span.bias)

    def forward(self, x_t: Tensor, sigma: Tensor, label: Tensor, span: Tensor) -> Tensor:
        base, turns = self.base, torch.arange(1, 9) * torch.pi / 2
        waves, spans = sigma[:, None] * turns, span[:, None] * turns
        h = base.layers[0](torch.cat([x_t.flatten(1), waves.sin(), waves.cos(), base.label(label)], 1))
        h = nn.functional.silu(h + self.span(torch.cat([spans.sin(), spans.cos() - 1], 1)))
        for layer in base.layers[1:]:
            h = nn.functional.silu(layer(h))
        return base.out(h).view_as(x_t)


class FlowMapModel(Model):
    """The exact world's model with a second noise level."""

    def velocity(self, x_t: Tensor, sigma: Tensor, cond: Condition) -> Tensor:
        return self.network(x_t, sigma.float(), cond["label"], (sigma - end_of(sigma, cond)).float())


def trained(method: Method, student: Trainable, seed: int, steps: int) -> None:
    """Train a student on the clips of the exact world."""
    captions = tuple(f"class {i // EACH}" for i in range(CLASSES * EACH)) * 8
    clips = Clips(captions, templates().repeat(8, 1, 1, 1, 1))
    loader = Loader(clips, ClassCodec(), method.config.plan(), SHAPE, "", 0, ALONE)
    trainer = Trainer(method, {"student": student}, loader, ALONE, seed=seed)
    for step in range(steps):
        trainer.step(step)


def optimizer(steps: int, **given: bool) -> TrainableConfig:
    return TrainableConfig(learning_rate=2e-3, lr_schedule="linear", lr_decay_updates=steps, **given)


def teacher() -> Frozen:
    return role(Frozen, "teacher", Posterior(), RoleConfig())


def flow_map(seed: int, power: float, draws: int) -> list[float]:
    """Return the distances in 1, 2 and 4 steps."""
    config = FlowMapConfig(96, 96, guidance_scale=1.0, power=power, level_draws=draws)
    backbone = Backbone(FlowMapModel(FlowMapNetwork()), ALONE, trained=True)
    student = Trainable("student", backbone, optimizer(600, flow_map=True))
    sampler = SamplerConfig(num_steps=4, shift=5.0, guidance_scale=1.0)
    trained(FlowMap(config, sampler, student=student, teacher=teacher()), student, seed, 600)
    return [distance(student, dataclasses.replace(sampler, num_steps=count)) for count in (1, 2, 4)]


def consistency(seed: int, distance_of: str, huber: float) -> list[float]:
    """Return the distance in one step."""
    of_teacher = {"teacher_steps": 8, "teacher_shift": 1.0}
    config = ConsistencyConfig(96, 96, guidance_scale=1.0, **of_teacher, distance=distance_of, huber=huber)
    student = role(Trainable, "student", copy.deepcopy(pretrained()), optimizer(300))
    sampler = SamplerConfig(num_steps=1, shift=1.0, solver="sde", guidance_scale=1.0)
    trained(Consistency(config, sampler, student=student, teacher=teacher()), student, seed, 300)
    return [distance(student, sampler)]


ROWS: dict[str, Callable[[int], list[float]]] = {
    "| flow_map, p 0, one draw | 1, 2, 4 |": lambda seed: flow_map(seed, 0.0, 1),
    "| flow_map, p 0, two draws | 1, 2, 4 |": lambda seed: flow_map(seed, 0.0, 2),
    "| flow_map, p 1, one draw | 1, 2, 4 |": lambda seed: flow_map(seed, 1.0, 1),
    "| flow_map, p 1, two draws | 1, 2, 4 |": lambda seed: flow_map(seed, 1.0, 2),
    "| consistency, element, c .01 | 1 |": lambda seed: consistency(seed, "element", 0.01),
    "| consistency, element, c 1 | 1 |": lambda seed: consistency(seed, "element", 1.0),
    "| consistency, vector, c 5.4e-4 | 1 |": lambda seed: consistency(seed, "vector", 5.4e-4),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3])
    seeds = parser.parse_args().seeds
    torch.set_num_threads(1)
    console = Console(soft_wrap=True)
    for name, measure in ROWS.items():
        columns = zip(*(measure(seed) for seed in seeds), strict=True)
        cells = [(statistics.mean(column), statistics.stdev(column)) for column in columns]
        console.print(f"{name} {', '.join(f'{mean:.2f} ± {spread:.2f}' for mean, spread in cells)} |", highlight=False)


if __name__ == "__main__":
    main()
