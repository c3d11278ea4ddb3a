"""What the ranks of tests/parallel/test_expert_ranks.py do.

The test compares with the same functions on one rank.
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from expert_world import MOVES, ROLES, networks, trainer, trajectory
from helpers import Calls, small_batch

from unified_trainer.parallel.mesh import Mesh, ParallelConfig
from unified_trainer.roles.role import Trainable
from unified_trainer.run.checkpoint import dcp as checkpoint

# One sample at a time: in every pass that is not shared by all samples, one rank has none for an expert that must run.
ONE = {"micro_batch": 1}
CASES: dict[str, tuple[str, dict]] = {
    "finetune": ("finetune", {"two": ROLES, **ONE}),
    "dmd2": ("dmd2", {"two": ROLES, **ONE}),
    "self_forcing": ("self_forcing", {"two": ROLES, **ONE}),
    "dance_grpo": ("dance_grpo", {"two": ROLES}),
    "experts over one base": ("dmd2", {"two": ROLES, "equal": True, "adapters": True, **ONE}),
    "experts over two bases": ("finetune", {"two": ROLES, "adapters": True, **ONE}),
    "one of them frozen": ("dmd2", {"two": ROLES, "frozen": ("high",), "rollout": "data", **ONE}),
    "one of them offloaded": ("finetune", {"two": ROLES, "frozen": ("low",), **ONE}),
    "teacher and critic alone": ("dmd2", {"two": ("teacher", "critic"), **ONE}),
    "one expert a step": ("dmd2", {"two": ROLES, "expert_balance": "equal", **ONE}),
}
MESHES = {
    "sharded": (ParallelConfig(), tuple(case for case in CASES if case != "one of them offloaded")),
    "replicated": (ParallelConfig(replicate=2), ("finetune",)),
    "sequence": (ParallelConfig(sequence=2), ("dance_grpo",)),
    "kept gathered": (ParallelConfig(reshard_after_forward=False), ("dmd2",)),
    "offloaded": (ParallelConfig(offload_weights=True, offload_optimizer=True), ("finetune",)),
    "frozen one offloaded": (ParallelConfig(), ("one of them offloaded",)),
}
STEPS = 2
SAVED = "finetune"


def made(case: str, mesh: Mesh):
    method, options = CASES[case]
    offload = mesh.size > 1 and case == "one of them offloaded"
    return trainer(method, mesh=mesh, moves=True, role=MOVES, offload=offload, **options)


def refused(mesh: Mesh, work) -> str:
    try:
        work()
    except RuntimeError as error:
        return str(error)
    mesh.barrier()
    return ""


def disagreements(mesh: Mesh) -> list[str]:
    """Return the errors of ranks that split one role at different levels, or run different experts of it."""
    levels = torch.tensor([0.7, 0.7], dtype=torch.float64)
    x_t = torch.randn(2, 16, 3, 1, 3, generator=torch.Generator().manual_seed(0))
    apart = Trainable("student", networks("student", mesh, (0, 1), boundary=0.6 + 0.2 * mesh.rank), MOVES)

    def ask_for_one() -> None:
        with apart.running(("high", "low")[mesh.rank]):
            pass

    return [
        refused(mesh, lambda: apart.velocity(x_t, levels, small_batch().cond)),
        refused(mesh, ask_for_one),
    ]


def passes(mesh: Mesh) -> torch.Tensor:
    """Passes of each expert when this rank's samples are all on one side, the other rank's on the other; and rows."""
    role = Trainable("student", networks("student", mesh, (0, 1)), MOVES)
    calls = [Calls.of(type("One", (), {"network": backbone.model.network})) for backbone in role._backbones.values()]
    levels = torch.full((2,), (0.9, 0.1)[mesh.rank], dtype=torch.float64)
    x_t = torch.randn(2, 16, 3, 1, 3, generator=torch.Generator().manual_seed(0))
    role.velocity(x_t, levels, small_batch().cond).sum().backward()
    role.velocity(x_t, torch.full((2,), 0.9), small_batch().cond)
    return torch.tensor([[len(x) for x in call.x_t] + [0] * (2 - len(call.x_t)) for call in calls])


def work(folder: Path) -> None:
    torch.set_num_threads(1)
    first = Mesh.join("cpu")
    tensors = {}
    for name, (config, cases) in MESHES.items():
        mesh = Mesh.join("cpu", config)
        for case in cases:
            one = made(case, mesh)
            tensors |= {f"{name}/{case}/{key}": value for key, value in trajectory(one, STEPS).items()}
            if (name, case) == ("sharded", SAVED):
                checkpoint.save(folder / "checkpoints", STEPS, one.tensors(), mesh)
    tensors["passes"] = first.all_gather_cpu(passes(first)[None])
    words = disagreements(first)
    if first.is_main:
        save_file({key: value.contiguous() for key, value in tensors.items()}, folder / "tensors.safetensors")
        (folder / "words.txt").write_text("\n".join(words))
    first.barrier()
