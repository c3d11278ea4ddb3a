"""The program of the ranks of tests/parallel/test_half_ranks.py: `python half_ranks.py FOLDER` writes into FOLDER.

The test compares with the same functions on one rank.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from helpers import ALONE, CAPTIONS, LATENT_SHAPE, small_model, tiny_codec
from launch import fork_ranks

from unified_trainer.parallel.copy_queue import copy_queue
from unified_trainer.parallel.fsdp import full, is_sharded
from unified_trainer.parallel.mesh import Mesh, ParallelConfig
from unified_trainer.roles import blocks
from unified_trainer.roles.adapter import AdapterConfig
from unified_trainer.roles.backbone import Backbone
from unified_trainer.roles.role import Trainable, TrainableConfig
from unified_trainer.roles.value import Value
from unified_trainer.run.checkpoint import dcp as checkpoint
from unified_trainer.run.workers.weights import WeightSender, copy_parts

MESHES = {
    "sharded": ParallelConfig(),
    "replicated": ParallelConfig(replicate=2),
    "sequence": ParallelConfig(sequence=2),
}
CONFIG = TrainableConfig(
    precision="bf16",
    learning_rate=1e-3,
    max_grad_norm=0.01,
    ema_decay=0.5,
    moments="bf16",
    ema_device="cpu",
)
ADAPTER = AdapterConfig(rank=2)
SAMPLES, UPDATES = 4, 2


class Gathered(TorchDispatchMode):
    """Counts the bytes that this rank's all-gathers return."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, operation, _types, args=(), kwargs=None):
        if operation.namespace == "c10d" and operation._opname == "_allgather_base_":
            self.bytes += args[0].nbytes
        return operation(*args, **(kwargs or {}))


def student(mesh: Mesh, *, adapter: bool = False, half: bool = True, compile: bool = False) -> Trainable:
    config = TrainableConfig(**vars(CONFIG) | {"adapter": ADAPTER if adapter else AdapterConfig()})
    adapters = {"student": ADAPTER} if adapter else None
    how = {"adapters": adapters, "half": adapter, "half_passes": half, "compile": compile}
    role = Trainable("student", Backbone(small_model(), mesh, trained=True, **how), config)
    if adapter:  # B starts at zero, where A has no gradient
        for key, weight in role.weights.items():
            if "lora_B" in key:
                weight.data.fill_(0.1)
    return role


def asked(role: Trainable, sample: int) -> torch.Tensor:
    x_t = torch.randn(SAMPLES, *LATENT_SHAPE, generator=torch.Generator().manual_seed(0))[sample : sample + 1]
    return role.velocity(x_t, torch.tensor([0.1 + 0.2 * sample]), tiny_codec().encode_text([CAPTIONS[sample]]))


def loss_of(role: Trainable, sample: int) -> torch.Tensor:
    return (asked(role, sample) - 0.3 * sample).square().mean()


def learn(role: Trainable, mesh: Mesh) -> dict[str, torch.Tensor]:
    """What the updates over all samples give, one sample a backward pass: velocities, gradients, norms, state."""
    found, share = {}, SAMPLES // mesh.data_size
    mine = range(mesh.data_rank * share, (mesh.data_rank + 1) * share)
    for update in range(UPDATES):
        with torch.no_grad():
            found[f"velocity/{update}"] = mesh.gather(torch.cat([asked(role, sample) for sample in mine]))
        for sample in mine:
            role.backward(loss_of(role, sample) / share, last=sample == mine[-1])
        found |= {f"gradients/{update}/{key}": full(p.grad).clone() for key, p in role.weights.items()}
        found[f"norm/{update}"] = torch.tensor(role.step()["student/grad_norm"])
    return found | state(role)


def state(role: Trainable) -> dict[str, torch.Tensor]:
    return {f"state/{key}": full(value).clone() for key, value in role.state_dict().items()}


def gathered(mesh: Mesh, *, half: bool) -> torch.Tensor:
    """Bytes gathered in a pass with its backward pass; elements and number of the weights that are not sharded."""
    role, count = student(mesh, half=half), Gathered()
    with count:
        role.backward(loss_of(role, 0), last=True)
    whole = [p for p in role.weights.values() if not is_sharded(p)]
    return torch.tensor([count.bytes, sum(p.numel() for p in whole), len(whole)])


def gathered_for_values(mesh: Mesh) -> torch.Tensor:
    """Bytes gathered for a velocity, for a value of the same network, and in both for the weights of a block."""
    role = Value("value", Backbone(small_model(layers=4), mesh, trained=True), TrainableConfig())
    found, inputs = [], (torch.zeros(1, *LATENT_SHAPE), torch.tensor([0.5]), tiny_codec().encode_text(CAPTIONS[:1]))
    for one in (role.velocity, role.value):
        with torch.no_grad(), Gathered() as count:
            one(*inputs)
        found.append(count.bytes)
    prefetched = [len(block._get_fsdp_state()._states_to_forward_prefetch) for block in role.network.blocks]
    assert prefetched == [1, 1, 1, 0], prefetched
    return torch.tensor([*found, 4 * sum(p.numel() for p in role.network.blocks[3].parameters())])


def sent(role: Trainable, mesh: Mesh) -> dict[str, torch.Tensor]:
    """What a worker copies from the parts of both ranks, the bytes of each part, and those gathered to pack them."""
    rounded = role.bf16_weights
    with Gathered() as count:
        part = WeightSender(mesh, rounded=rounded).pack(7, role.weights, 7)
    parts = [part] * mesh.size
    dist.all_gather_object(parts, part)
    held = {name: torch.full(weight.shape, torch.nan) for name, weight in role.weights.items()}
    held |= {name: held[name].bfloat16() for name in rounded}
    copy_parts(parts, held)
    sizes = [sum(buffer.nbytes for buffer in one.buffers) for one in parts]
    return {f"weights/{name}": weight for name, weight in held.items()} | {"bytes": torch.tensor([*sizes, count.bytes])}


def compiled(mesh: Mesh) -> dict[str, torch.Tensor]:
    """What a student of compiled blocks gives, and the number of its graphs."""
    blocks.BACKEND = "aot_eager"  # Inductor's kernels round otherwise
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    found = learn(student(mesh, compile=True), mesh)
    return found | {"graphs": torch.tensor(torch._dynamo.utils.counters["stats"]["unique_graphs"] - before)}


def in_halves(mesh: Mesh, *, adapter: bool) -> dict[str, torch.Tensor]:
    """What a student gives before its first update while its float32 shards are elsewhere, and what it gives then.

    `bytes` are those of the shards, and those left of them meanwhile.
    """
    role = student(mesh, adapter=adapter)
    (backbone,) = role.backbones.values()
    with torch.no_grad(), backbone.in_halves() as shards:
        sizes = [sum(shard.nbytes for shard in shards)]
        with copy_queue(mesh.device).offloaded(shards), Gathered() as count:
            first = asked(role, 0)
            sizes += [sum(shard.untyped_storage().nbytes() for shard in shards), count.bytes]
    with torch.no_grad():
        assert torch.equal(asked(role, 0), first)
    return learn(role, mesh) | {"bytes": torch.tensor(sizes)}


def load(role: Trainable, folder: Path, mesh: Mesh) -> dict[str, torch.Tensor]:
    held = role.state_dict()
    checkpoint.load(folder, {f"student/{key}": value for key, value in held.items()}, mesh)
    role.load_state_dict(held)
    return state(role)


def save(role: Trainable, root: Path, mesh: Mesh) -> None:
    checkpoint.save(root, UPDATES, {f"student/{key}": value for key, value in role.state_dict().items()}, mesh)


def work(folder: Path) -> None:
    torch.set_num_threads(1)
    first = Mesh.join("cpu")
    tensors = {}
    for name, config in MESHES.items():
        mesh = Mesh.join("cpu", config)
        for kind in ("whole", "adapter"):
            if kind == "whole" or name == "sharded":
                role = student(mesh, adapter=kind == "adapter")
                tensors |= {f"{name}/{kind}/{key}": value for key, value in learn(role, mesh).items()}
                tensors |= {f"{name}/{kind}/sent/{key}": value for key, value in sent(role, mesh).items()}
                if name == "sharded":
                    save(role, folder / "two" / kind, mesh)
        if name != "replicated":
            tensors |= {f"{name}/compiled/{key}": value for key, value in compiled(mesh).items()}
    for kind in ("whole", "adapter"):
        found = in_halves(first, adapter=kind == "adapter")
        tensors |= {f"halves/{kind}/{key}": value for key, value in found.items()}
    tensors["gathered/half"], tensors["gathered/float"] = gathered(first, half=True), gathered(first, half=False)
    tensors["gathered/values"] = gathered_for_values(first)
    back = load(student(first), folder / "one" / f"step_{UPDATES}", first)
    tensors |= {f"back/{key}": value for key, value in back.items()}
    if first.is_main:
        save_file({key: value.contiguous() for key, value in tensors.items()}, folder / "tensors.safetensors")
    first.barrier()


def alone(folder: Path, kind: str = "whole") -> dict[str, torch.Tensor]:
    """The same on one rank, which saves too."""
    role = student(ALONE, adapter=kind == "adapter")
    found = learn(role, ALONE)
    save(role, folder / "one", ALONE)
    return found


if __name__ == "__main__":
    fork_ranks(2, work, Path(sys.argv[1]))
