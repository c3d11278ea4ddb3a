"""What the ranks of tests/parallel/test_adapters.py do."""

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from adapter_files import ENDS
from helpers import WAN, weights

from unified_trainer.models.adapter_file import AdapterFile, open_adapter
from unified_trainer.models.adapter_location import locate
from unified_trainer.models.wan.family import WAN as FAMILY
from unified_trainer.models.wan.model import WanModel
from unified_trainer.parallel.mesh import Mesh, ParallelConfig
from unified_trainer.roles.adapter import AdapterConfig
from unified_trainer.roles.backbone import Backbone

MESHES = {
    "shard": ParallelConfig(),
    "replicate": ParallelConfig(replicate=2),
    "offload": ParallelConfig(offload_weights=True, offload_optimizer=True),
}


def read(path: Path) -> AdapterFile:
    network = WanModel.open(WAN, "transformer").network
    place = locate(path, "student.adapter.path", None, FAMILY.experts, FAMILY.adapter_files)
    return open_adapter(place, network, FAMILY.experts, FAMILY.published_layer)


def tensors(path: Path, mesh: Mesh) -> dict[str, torch.Tensor]:
    """All weights of a network that the adapter is merged into, and of one that starts with it."""
    file, found = read(path), {}
    for half in (False, True):
        network = Backbone(WanModel.open(WAN, "transformer"), mesh, merged=file, half=half).model.network
        found |= {f"merged {half}/{key}": weight for key, weight in weights(network).items()}
    config = {"student": AdapterConfig(4, 2.0, ENDS)}  # one row more than the file has
    backbone = Backbone(WanModel.open(WAN, "transformer"), mesh, adapters=config, starts={"student": file})
    return found | {f"started/{key}": weight for key, weight in weights(backbone.model.network).items()}


def work(path: Path, folder: Path) -> None:
    torch.set_num_threads(1)
    for name, config in MESHES.items():
        mesh = Mesh.join("cpu", config)
        found = tensors(path, mesh)
        save_file(found, folder / f"{name}-{mesh.rank}.safetensors")
    mesh.leave()
