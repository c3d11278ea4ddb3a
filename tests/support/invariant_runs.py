"""Small whole runs of every method: a network of two blocks, videos of nine tokens, three training steps.

A cell is a method, a variant of its student and a change that must not show in what is trained. AdamW's eps is 1 in all
of them: with the default one, a gradient that is rounding alone moves a weight as far as any other.
"""

import functools
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from clip_files import write_clips
from helpers import cut_off, flags, small_pipeline

from unified_trainer.__main__ import main
from unified_trainer.methods.rl.rollout_config import RolloutConfig
from unified_trainer.roles.role import TrainableConfig
from unified_trainer.run.registry import method_named
from unified_trainer.run.settings.command_line import parse

STEPS = 3
SHAPE = (16, 3, 1, 3)  # nine tokens, which two sequence ranks do not divide
ALWAYS = {
    "recipe": "tiny", "device": "cpu", "video.frames": 9, "video.height": 16, "video.width": 48, "steps": STEPS,
    "checkpoint-every": 1, "keep-last": 9, "validate-every": 0, "validation.num-samples": 2, "sampler.num-steps": 3,
}  # fmt: skip
SCORED = {"reward.kind": "sharpness", "reward.path": ""}
PARTS = {"algorithm.batch-size": 4, "algorithm.micro-batch": 4}
GROUPS = {"algorithm.num-prompts": 4, "algorithm.num-samples": 2, "algorithm.prompts-per-update": 2}
ROLLED = {"algorithm.rollout-batch": 4, "algorithm.update-batch": 4}
SMALLER = {"algorithm.micro-batch": 1, "algorithm.update-batch": 1, "algorithm.rollout-batch": 2}
OF = {  # what a method needs, or what gives it something to do
    "dance_ppo": {"algorithm.num-samples": 1, "algorithm.noise-range": "0 1"},
    "distill_rl": {"algorithm.noise-range": "0 1"},
    "long_self_forcing": {"algorithm.teacher-frames": 2},
    "streaming_tuning": {"algorithm.teacher-frames": 2},
}
VARIANTS = {
    "all weights": {},
    "LoRA": {"student.adapter.rank": 2},
    "high expert": {"student.boundary": 0.8, "student.low.no-trained": True},
    "low expert": {"student.boundary": 0.8, "student.high.no-trained": True},
}
# Levels of three steps: 1, .91 and .71.
REFUSED = {
    ("flow_map", "high expert"): "student.low.trained must be True",
    ("distill_rl", "high expert"): "the last step of the sampler lies wholly in the expert of student",
    ("dance_ppo", "low expert"): "algorithm.noise_range lies wholly in the expert of student",
    ("distill_rl", "low expert"): "algorithm.noise_range lies wholly in the expert of student",
    ("reward_gradient", "high expert"): "last_calls lies wholly in the expert of student",
}


@dataclass(frozen=True)
class Change:
    """What must not show: sizes of passes, a stop after some step, the number of ranks and their mesh."""

    sizes: tuple[str, ...] = ()
    stop: int = 0
    ranks: int = 1
    mesh: tuple[tuple[str, int], ...] = ()

    @property
    def flags(self) -> dict[str, object]:
        return {f"algorithm.{name}": SMALLER[f"algorithm.{name}"] for name in self.sizes} | dict(self.mesh)


CHANGES = {
    "micro-batch": Change(("micro-batch", "update-batch")),
    "rollout batch": Change(("rollout-batch",)),
    "stop 1": Change(stop=1),
    "stop 2": Change(stop=2),
    "two ranks": Change(ranks=2),
    "sequence ranks": Change(ranks=2, mesh=(("parallel.sequence", 2),)),
    "replicated shards": Change(ranks=4, mesh=(("parallel.replicate", 2),)),
    # Of the suite, which has no time for each alone.
    "passes and a stop": Change(("micro-batch", "update-batch", "rollout-batch"), stop=1),
}


def of_rollouts(method: str) -> bool:
    return issubclass(method_named(method).config_class, RolloutConfig)


@functools.cache
def world(folder: Path) -> dict[str, object]:
    """The network and the clips that all runs below a folder share."""
    random = torch.Generator().manual_seed(3)
    preferred, rejected = (torch.randn(6, *SHAPE, generator=random) for _ in range(2))
    captions = [f"clip {i}" for i in range(6)]
    return {
        "student.path": small_pipeline(folder / "wan"),
        "data.path": write_clips(folder / "preferred.parquet", preferred, caption=captions),
        "data.rejected": write_clips(folder / "rejected.parquet", rejected, caption=captions),
    }


def words(folder: Path, method: str, variant: str, change: Change) -> list[str]:
    """The flags of a run; ranks and stops are no flags."""
    made, kind = world(folder), method_named(method).config_class
    rolled = of_rollouts(method)
    sizes = (GROUPS | ROLLED if rolled else PARTS) | OF.get(method, {}) | {"student.path": made["student.path"]}
    before = parse(line(method, ALWAYS | sizes))
    given: dict[str, object] = {"student.ema-decay": 0.5}
    given |= SCORED if rolled or method == "reward_gradient" else {}
    given |= {"data.path": made["data.path"]} if before.trains_on == "clips" else {}
    given |= {"data.rejected": made["data.rejected"]} if kind.needs_pairs else {}
    for name, role in before.roles.items():
        if name in method_named(method).roles and isinstance(role, TrainableConfig):
            given |= {f"{name}.eps": 1, f"{name}.learning-rate": 1e-2}
    changed = {key: value for key, value in change.flags.items() if key in sizes or key.startswith("parallel")}
    return line(method, ALWAYS | sizes | given | VARIANTS[variant] | changed)


def line(method: str, settings: dict[str, object]) -> list[str]:
    return ["--method", method, *(word for part in flags(settings) for word in part.split(" "))]


def start(folder: Path, method: str, variant: str, name: str = "") -> Path:
    """Run it below the folder, on the ranks of this process, and stop and go on if that is the change."""
    change = CHANGES[name] if name else Change()
    out = folder / ", ".join((method, variant, name))
    code = main([*words(folder, method, variant, change), "--output", str(out)])
    if not code and change.stop:
        out = stopped(out, change.stop)
        code = main(["--resume", str(out)])
    assert code == 0, out.name
    return out


def stopped(run: Path, step: int, name: str = "cut") -> Path:
    """A copy of a run as it was when this step was saved."""
    copy = cut_off(run, run.with_name(f"{run.name}, {name}"), step)
    for later in range(step + 1, STEPS + 1):
        shutil.rmtree(copy / "checkpoints" / f"step_{later}", ignore_errors=True)
    return copy


def work(folder: Path, cells: list[tuple[str, str, str]], ports: list[int]) -> None:
    """What the ranks of a test do; they meet anew for each run."""
    torch.set_num_threads(1)
    for cell, port in zip(cells, ports, strict=True):
        os.environ["MASTER_PORT"] = str(port)
        start(folder, *cell)
