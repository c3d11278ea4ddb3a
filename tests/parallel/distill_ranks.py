"""What the ranks of tests/parallel/test_distill_ranks.py do.

The test compares with the same functions on one rank.
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
sys.path.insert(0, str(Path(__file__).parents[1] / "methods"))

from helpers import assert_same
from test_distill_rl import ALL, TILT, trainer

from unified_trainer.parallel.fsdp import full
from unified_trainer.parallel.mesh import Mesh, ParallelConfig
from unified_trainer.run.checkpoint import dcp as checkpoint
from unified_trainer.run.trainer import Trainer

MESHES = {"sharded": ParallelConfig(), "replicated": ParallelConfig(replicate=2)}
SAVED = "sharded"  # the mesh whose first step is saved, and resumed from


def made(mesh: Mesh) -> Trainer:
    """All terms with a tilt; two updates of the critic for each of the student."""
    settings = {"critic_updates": 2, "update_batch": 1, "clip_low": 0.01, "clip_high": 0.01}
    return trainer(**ALL, **settings, tilt=TILT, moves=True, mesh=mesh)


def step_of(one: Trainer, step: int) -> dict[str, torch.Tensor]:
    """Run a training step; return its metrics, the gradients of its updates, and the state after it."""
    for role in one.roles.values():
        role.gradients.clear()
    found = {f"metrics/{key}": torch.tensor(value).double() for key, value in one.step(step).items()}
    for name, role in one.roles.items():
        for i, gradients in enumerate(role.gradients):
            found |= {f"gradients/{name}/{i}/{key}": gradient for key, gradient in gradients.items()}
    return found | {f"state/{key}": full(value).detach().clone() for key, value in one.tensors().items()}


def work(folder: Path) -> None:
    torch.set_num_threads(1)
    tensors = {}
    for name, config in MESHES.items():
        mesh = Mesh.join("cpu", config)
        one = made(mesh)
        found = {"0": step_of(one, 0)}
        if name == SAVED:
            checkpoint.save(folder / "checkpoints", 1, one.tensors(), mesh)
            found["1"] = step_of(one, 1)
            again = made(mesh)
            assert again.resume(folder) == (1, [])
            assert_same(step_of(again, 1), found["1"])
            tensors["resumed"] = torch.ones(1)
        tensors |= {f"{name}/{step}/{key}": value for step, part in found.items() for key, value in part.items()}
    if mesh.is_main:
        save_file({key: value.contiguous() for key, value in tensors.items()}, folder / "tensors.safetensors")
    mesh.leave()
