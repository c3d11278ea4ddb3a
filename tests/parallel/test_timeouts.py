"""Every group of ranks waits as long as parallel.timeout_minutes says, and no longer."""

import json
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
from launch import fork_ranks

from unified_trainer.parallel.mesh import Mesh, ParallelConfig

pytestmark = pytest.mark.ranks

MINUTES = 7.0  # the default of gloo is 30


def note_timeouts(folder: Path, config: ParallelConfig) -> None:
    mesh = Mesh.join("cpu", config)
    axes = {
        f"{name} {axis}": held
        for name, held in (("weights", mesh.weights), ("samples", mesh.samples))
        for axis in held.mesh_dim_names
    }
    groups = {name: held.get_group(name.split()[1]) for name, held in axes.items()}
    members = {name: dist.get_process_group_ranks(group) for name, group in groups.items()}
    groups |= {"world": dist.group.WORLD, "control": mesh.control_group, "thread": mesh.for_thread().control_group}
    seconds = {
        name: group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for name, group in groups.items()
    }
    (folder / str(mesh.rank)).write_text(json.dumps([seconds, members]))
    mesh.barrier()
    mesh.leave()


@pytest.mark.parametrize(
    ("config", "members"),
    [
        (
            ParallelConfig(replicate=2, sequence=2, timeout_minutes=MINUTES),
            {"weights replicate": [1, 3], "weights shard": [0, 1], "samples data": [1, 3], "samples sequence": [0, 1]},
        ),
        (
            ParallelConfig(timeout_minutes=MINUTES),
            {"weights shard": [0, 1, 2, 3], "samples data": [0, 1, 2, 3], "samples sequence": [1]},
        ),
    ],
)
def test_every_group_of_the_mesh_has_the_timeout(tmp_path, config, members):
    """`init_device_mesh` gave those of FSDP and of sequence ranks the default of the backend."""
    fork_ranks(4, note_timeouts, tmp_path, config)
    for rank in range(4):
        seconds, own = json.loads((tmp_path / str(rank)).read_text())
        assert set(seconds.values()) == {timedelta(minutes=MINUTES).total_seconds()}, seconds
        assert rank != 1 or own == members
