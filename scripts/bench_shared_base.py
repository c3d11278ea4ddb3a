"""This script compares the peak memory of roles that share one base network by adapters with that of one role.

    python scripts/bench_shared_base.py

Each setting runs two training steps in a process of its own, on one random Wan transformer that is much larger than
everything else. Measured is the highest resident memory above that of the process before any network was made.
"""

import resource
import subprocess
import sys
from pathlib import Path

import torch
from diffusers import WanTransformer3DModel
from rich.console import Console
from rich.table import Table

from unified_trainer.data.clips import Clips
from unified_trainer.data.loader import Loader
from unified_trainer.methods.dmd2 import DMD2, DMD2Config
from unified_trainer.methods.finetune import Finetune, FinetuneConfig
from unified_trainer.models.encoders import EncoderConfig
from unified_trainer.models.wan.codec import WanCodec
from unified_trainer.models.wan.model import WanModel
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.roles.adapter import AdapterConfig
from unified_trainer.roles.backbone import Backbone
from unified_trainer.roles.critic import Critic
from unified_trainer.roles.role import Frozen, RoleConfig, Trainable, TrainableConfig
from unified_trainer.run.registry import TINY
from unified_trainer.run.trainer import Trainer
from unified_trainer.sampling.solver import SamplerConfig

ADAPTER, SAMPLES, SHAPE = AdapterConfig(rank=16), 2, (16, 2, 4, 4)
MESH = Mesh(torch.device("cpu"))
FEW_STEPS = SamplerConfig(num_steps=4, solver="sde", guidance_scale=1.0)
SETTINGS = {
    "finetune": "one role, all weights",
    "finetune adapter": "one role, adapter",
    "dmd2 adapter": "three roles, adapters over one base",
    "dmd2": "three roles, three networks",
}


def backbone(*, trained: bool = False, adapters: tuple[str, ...] = ()) -> Backbone:
    network = WanTransformer3DModel(
        patch_size=(1, 1, 1),
        num_attention_heads=8,
        attention_head_dim=64,
        in_channels=SHAPE[0],
        out_channels=SHAPE[0],
        text_dim=32,
        freq_dim=64,
        ffn_dim=2048,
        num_layers=14,
        rope_max_seq_len=16,
    )
    return Backbone(WanModel(network), MESH, trained=trained, adapters=dict.fromkeys(adapters, ADAPTER))


def trainer(method: str, adapter: bool) -> Trainer:
    config = TrainableConfig()
    if method == "finetune":
        settings = FinetuneConfig(batch_size=SAMPLES, micro_batch=SAMPLES)
        student = Trainable("student", backbone(trained=True, adapters=("student",) if adapter else ()), config)
        roles = {"student": student}
        algorithm = Finetune(settings, FEW_STEPS, student=student)
    else:
        settings = DMD2Config(batch_size=SAMPLES, micro_batch=SAMPLES, student_every=1)
        if adapter:
            owners = dict.fromkeys(("student", "teacher", "critic"), backbone(adapters=("student", "critic")))
        else:
            owners = {name: backbone(trained=name != "teacher") for name in ("student", "teacher", "critic")}
        roles = {
            "student": Trainable("student", owners["student"], config),
            "critic": Critic("critic", owners["critic"], config),
        }
        algorithm = DMD2(settings, FEW_STEPS, teacher=Frozen("teacher", owners["teacher"], RoleConfig()), **roles)
    clips = Clips(tuple(f"clip {i}" for i in range(SAMPLES)), torch.randn(SAMPLES, *SHAPE))
    codec = WanCodec.load(TINY / "wan", MESH.device, EncoderConfig())
    loader = Loader(clips, codec, settings.plan(), SHAPE, "", 0, MESH)
    return Trainer(algorithm, roles, loader, MESH, seed=0)


def resident() -> float:
    """Return the resident memory now, in MiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def measure(setting: str) -> float:
    """Return the highest resident memory above that of the start, in MiB."""
    WanCodec.load(TINY / "wan", MESH.device, EncoderConfig()).encode_text(["warm up"])
    before = resident()
    method, *adapter = setting.split()
    one = trainer(method, bool(adapter))
    for step in range(2):
        one.step(step)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10 - before


def main() -> None:
    peaks = {}
    for setting in SETTINGS:
        done = subprocess.run([sys.executable, __file__, setting], capture_output=True, text=True, check=True)
        peaks[setting] = float(done.stdout.splitlines()[-1])
    weights = sum(p.numel() for p in backbone().model.network.parameters()) * 4 / 2**20
    table = Table("setting", "peak, MiB", "against one adapter", title=f"network of {weights:.0f} MiB")
    for setting, peak in peaks.items():
        table.add_row(SETTINGS[setting], f"{peak:.0f}", f"{peak / peaks['finetune adapter']:.2f}")
    Console().print(table)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        sys.stdout.write(f"{measure(' '.join(sys.argv[1:]))}\n")
    else:
        main()
