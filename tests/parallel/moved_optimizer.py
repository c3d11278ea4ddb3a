"""AdamW with weights or moments in CPU memory, on the simulated NPU, in a process of its own: writes what it finds."""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import simulated_npu
import torch
from torch import nn

from unified_trainer.roles import optimizer
from unified_trainer.roles.optimizer import AdamW, MovedAdamW

CPU = torch.device("cpu")
OPTIONS = {"betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
SIZE = 64  # of each of the weights, of which a bucket holds two
WEIGHTS = 6


def trained(weights_on: torch.device, place: torch.device | None, moments: str) -> dict[str, object]:
    """Three updates: where weights and moments lie, their values, and the most bytes on the device beside them."""
    draw = torch.Generator().manual_seed(1)
    weights = {f"{i}": nn.Parameter(torch.randn(SIZE, generator=draw).to(weights_on)) for i in range(WEIGHTS)}
    if place is None:
        one = AdamW(weights, **OPTIONS, moments=moments)
    else:
        one = MovedAdamW(weights, device=NPU, place=place, **OPTIONS, moments=moments)
    extra = []
    for update in range(3):
        for p in weights.values():
            p.grad = torch.randn(SIZE, generator=draw).to(weights_on)
        before = simulated_npu.memory.now
        simulated_npu.memory.peak = before
        one.step(0.1, update)
        extra.append(simulated_npu.memory.peak - before)
    state = {key: value for key, value in one.state().items() if not key.endswith("/step")}
    return {
        "weights": {p.device.type for p in weights.values()},
        "moments": {value.device.type for value in state.values()},
        "values": [x.detach().cpu().float().tolist() for x in (*weights.values(), *state.values())],
        "extra": extra[-1],
    }


if __name__ == "__main__":
    simulated_npu.install()
    NPU = torch.device("npu", 0)
    optimizer.BUCKET = 2 * SIZE
    simulated_npu.memory.counting = True
    found = {}
    for moments in ("fp32", "bf16"):
        plain = trained(NPU, None, moments)
        for name, (weights_on, place) in {"moments": (NPU, CPU), "weights": (CPU, NPU)}.items():
            moved = trained(weights_on, place, moments)
            found[f"{name} {moments}"] = {
                "same": moved["values"] == plain["values"],
                "places": [sorted(moved["weights"]), sorted(moved["moments"])],
                "extra": moved["extra"],
            }
    Path(sys.argv[1]).write_text(json.dumps(found), encoding="utf-8")
