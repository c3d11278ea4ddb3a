"""This script measures steps outside of a policy's window against 200 Euler steps, on the model of the tiny world.

    python scripts/measure_outside.py

Guidance 3, shift 3, 20 steps, kernel dance in a window of 4 transitions from 0, 4, 8 and 12 on. It prints a markdown
table: distance of the samples to those of 200 Euler steps with equal noise, relative to the size of these.
"""

import sys
from dataclasses import replace

import numpy as np
import torch
import tyro

from unified_trainer.basics.requests import Request
from unified_trainer.data.loader import make_batch
from unified_trainer.models.encoders import EncoderConfig
from unified_trainer.models.wan.codec import WanCodec
from unified_trainer.models.wan.model import WanModel
from unified_trainer.numerics.kernels import Policy
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.roles.backbone import Backbone
from unified_trainer.roles.role import Frozen, RoleConfig
from unified_trainer.run.registry import TINY
from unified_trainer.sampling.outside_window import OutsideWindow, dpm_solver_2m, euler
from unified_trainer.sampling.solver import SamplerConfig, rollout

SAMPLER = SamplerConfig(num_steps=20, shift=3.0, guidance_scale=3.0)
CAPTIONS = ("a red circle moving left", "a blue square moving up", "a green triangle moving down")
FIRST, SIZE, CALLS, FINER = (0, 4, 8, 12), 4, (6, 8, 10, 12, 16), 12
SOLVERS = {"Euler": euler, "DPM-Solver++ (2M)": dpm_solver_2m}


def main(seed: int = 0) -> None:
    """Print the table.

    Args:
        seed: seed of all noise
    """
    torch.set_num_threads(1)
    cpu, sigmas, ids = torch.device("cpu"), SAMPLER.sigmas(), list(range(len(CAPTIONS)))
    role = Frozen("student", Backbone(WanModel.open(TINY / "wan", "transformer"), Mesh(cpu)), RoleConfig())
    codec = WanCodec.load(TINY / "wan", cpu, EncoderConfig())
    batch = make_batch(codec, Request.of(CAPTIONS), "", codec.latent_shape(17, 64, 64), prompt_ids=ids, sample_ids=ids)
    generator = torch.Generator().manual_seed(seed)
    noise, *drawn = torch.randn(SAMPLER.num_steps, len(ids), *batch.latent_shape, generator=generator)
    policy, windows = Policy("dance", 0.3, sigmas), [range(first, first + SIZE) for first in FIRST]

    def ends(outside: list[OutsideWindow]) -> torch.Tensor:
        parts = zip(windows, outside, strict=True)
        given = (role, noise, batch, SAMPLER, policy)
        return torch.stack([rollout(*given, own, drawn.__getitem__, outside=steps).x0 for own, steps in parts])

    exact = ends([finer(sigmas, window) for window in windows])
    sys.stdout.write(f"| calls | {' | '.join(SOLVERS)} |\n| --- |{' --- |' * len(SOLVERS)}\n")
    for calls in CALLS:
        steps = [OutsideWindow.of_calls(sigmas, window, calls) for window in windows]
        made = [ends([replace(each, solve=solver) for each in steps]) for solver in SOLVERS.values()]
        errors = [float((x0 - exact).norm() / exact.norm()) for x0 in made]
        sys.stdout.write(f"| {calls} | {' | '.join(f'{error:.3f}' for error in errors)} |\n")


def finer(sigmas: torch.Tensor, window: range) -> OutsideWindow:
    """Return 12 Euler steps for each of the sampler's outside of the window."""
    last = SAMPLER.num_steps
    before = np.linspace(0, window.start, FINER * window.start + 1)
    after = np.linspace(window.stop, last, FINER * (last - window.stop) + 1)
    levels = [torch.from_numpy(np.interp(at, range(last + 1), sigmas)) for at in (before, after)]
    return OutsideWindow(levels[0], levels[1], euler)


if __name__ == "__main__":
    tyro.cli(main)
