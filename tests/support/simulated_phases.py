"""Bytes on the simulated device in the phases of a step: a rollout in four parts, its scoring, and what follows."""

import functools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest import mock

import simulated_npu
import torch
from helpers import flags
from torch import nn

from unified_trainer.__main__ import main
from unified_trainer.basics.requests import Request
from unified_trainer.basics.types import Batch, Rollout
from unified_trainer.methods.rl.rollouts import LocalRollouts
from unified_trainer.models import frozen_network
from unified_trainer.models.encoders import EncoderConfig
from unified_trainer.models.wan.codec import WanCodec
from unified_trainer.parallel.random import Streams
from unified_trainer.rewards.base import NetworkScorer, RewardConfig
from unified_trainer.rewards.hpsv3 import EMBEDDED, HPSv3
from unified_trainer.rewards.hpsv3_preprocessing import as_bytes
from unified_trainer.rewards.offloaded import OffloadedScorer
from unified_trainer.rewards.reward import Reward
from unified_trainer.run.offloaded_rollouts import OffloadedRollouts
from unified_trainer.run.registry import TINY

# Full training with an EMA and a reference.
TRAINED = {
    "method": "dance_grpo",
    "recipe": "tiny",
    "device": "npu",
    "validate-every": 0,
    "steps": 1,
    "sampler.num-steps": 3,
}
TRAINED |= {"video.frames": 5, "video.height": 32, "video.width": 32, "reward.kind": "sharpness", "reward.path": ""}
TRAINED |= {"algorithm.num-prompts": 2, "algorithm.num-samples": 2, "algorithm.prompts-per-update": 2}
TRAINED |= {"student.ema-decay": 0.5, "algorithm.kl-coefficient": 0.1}
SHAPE = (16, 1, 2, 2)  # of latents: 256 bytes
STATES = 4
NPU = "npu"


@contextmanager
def counted_bytes() -> Iterator[simulated_npu.Memory]:
    """Count the bytes of what is put on the device inside."""
    counts = simulated_npu.memory = simulated_npu.Memory()
    counts.counting = True
    try:
        yield counts
    finally:
        counts.counting = False


@contextmanager
def counted_moves() -> Iterator[list[int]]:
    """Count the bytes of each network that is copied to the device inside."""
    copy, moves = frozen_network._Stored.on_device, []

    def counted(stored):
        moves.append(sum(tensor.nbytes for tensor in stored.home))
        return copy(stored)

    frozen_network._Stored.on_device = counted
    try:
        yield moves
    finally:
        frozen_network._Stored.on_device = copy


class Colors(nn.Module):
    """A linear layer on the mean color, and a buffer that a state_dict leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1000)
        self.register_buffer("scale", torch.full((1,), 0.5), persistent=False)

    def score(self, video, _prompts):
        return (self.scale * self.layer(video.mean((2, 3, 4)))).square().mean(1)


@functools.cache
def whole_network() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return Colors().state_dict()


def step(place: str, *, offload: bool) -> dict[str, object]:
    """Make and score four samples; return bytes on the device at each sample, at each score and after them."""
    device = torch.device(NPU, 0)
    codec = WanCodec.load(TINY / "wan", device, EncoderConfig(offload=offload))
    colors = Colors()
    colors.load_state_dict(whole_network())
    scorer = NetworkScorer(colors.score, (colors,))
    if offload:
        scorer = OffloadedScorer.of(scorer, scorer.networks, device)
    else:
        colors.to(device)
    found: dict[str, object] = {"sample": [], "score": []}
    with counted_bytes() as memory, counted_moves() as moves:

        def now() -> int:
            return memory.now

        def sample(part: Batch, step: int, rng: Streams) -> Rollout:
            found["sample"].append(now())
            random = torch.Generator().manual_seed(part.sample_ids[0])
            states = torch.randn(len(part), STATES, *SHAPE, generator=random).to(NPU, non_blocking=True)
            return Rollout(states, torch.zeros(len(part), STATES - 1, device=NPU), states[:, -1] * 1)

        reward = Reward({"colors": scorer}, codec, RewardConfig(kind="colors", offload=offload))
        reward._part = functools.partial(_noted, reward._part, found["score"], now)
        ids = tuple(range(4))
        empty = codec.text_condition([{"text": torch.zeros(1, codec.text_shapes["text"][1])}] * 4)
        batch = Batch(Request.of([""] * 4), ids, ids, SHAPE, empty, empty)
        before = now()
        made = LocalRollouts(sample, reward, 1, place, score_last=offload).samples(batch, 0, Streams(0, 0))
        found["after"] = now() - before
        memory.peak = memory.now
        read = made.rollout.state(1, [2, 0])
        found["read"] = memory.peak - before - found["after"]
        found["rows"] = [read.raw.flatten()[i].item() for i in (0, -1)]
    found["sample"] = [one - before for one in found["sample"]]
    found["score"] = [one - before for one in found["score"]]
    found["moves"], found["scores"] = moves, made.scores.parts.raw.flatten().tolist()
    return found


def _noted(part, noted: list[int], now, *given):
    noted.append(now())
    return part(*given)


def offloaded(folder: Path) -> dict[str, int]:
    """Return the bytes on the device in a step with rollouts.offload: before, at the start of, and after its rollout.

    The network is that of a folder.
    """
    found: dict[str, int] = {}
    with counted_bytes() as memory, ExitStack() as patches:

        def noted(samples, before: str, after: str):
            def watched(*given):
                found[before] = memory.now
                try:
                    return samples(*given)
                finally:
                    found[after] = memory.now

            return watched

        for kind, names in ((OffloadedRollouts, ("before", "after")), (LocalRollouts, ("start", "end"))):
            patches.enter_context(mock.patch.object(kind, "samples", noted(kind.samples, *names)))
        settings = TRAINED | {"student.path": folder / "wan", "output": folder / "offloaded", "rollouts.offload": True}
        found["code"] = main(flags(settings))
    return found


def prepared() -> dict[str, object]:
    """Prepare three images for HPSv3 a second time: the waits, the operations in float64, and the first image."""
    images = torch.rand(3, 3, 48, 80, generator=torch.Generator().manual_seed(0))
    hpsv3 = HPSv3.load(EMBEDDED, "cpu", torch.float32)
    on_device = images.to(NPU)
    hpsv3.preprocessor.patches(as_bytes(on_device)[0])
    simulated_npu.waits.clear()
    simulated_npu.float64.clear()
    patches = [hpsv3.preprocessor.patches(image)[0] for image in as_bytes(on_device)]
    waits = [[*key, count] for key, count in simulated_npu.waits.items()]
    exact = hpsv3.preprocessor.patches(as_bytes(images)[0])[0]
    return {"waits": waits, "float64": len(simulated_npu.float64), "same": torch.equal(patches[0].raw, exact)}


def phases() -> dict[str, dict[str, object]]:
    """Return what was counted, by place of the rollout and whether VAE and scorer are offloaded."""
    kinds = [(place, offload) for place in ("device", "cpu") for offload in (False, True)]
    return {f"{place}, {'offloaded' if offload else 'there'}": step(place, offload=offload) for place, offload in kinds}
