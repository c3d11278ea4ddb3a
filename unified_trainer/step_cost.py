"""The cost of a training step as metrics: seconds by phase, rates and memory."""

import torch

from unified_trainer.meter import Meter
from unified_trainer.parallel.device import device_name, peak_flops, peak_memory
from unified_trainer.parallel.mesh import Mesh


def step_cost(meter: Meter, mesh: Mesh, samples: int) -> dict[str, float]:
    """Return the cost of a training step: this rank's seconds, and rates and memory over all ranks (collective).

    `samples` are those of the step, over all ranks.
    """
    seconds, device = meter.seconds(), mesh.device
    total, peak = sum(seconds.values()), peak_flops(device_name(device)) or 0.0
    own = torch.tensor([[meter.tokens, meter.flops, peak, peak_memory(device)]], dtype=torch.float64)
    tokens, flops, peaks, memory = mesh.all_gather_cpu(own).unbind(1)
    cost = {"seconds": total, **{f"seconds/{name}": spent for name, spent in seconds.items()}}
    cost["samples_per_second"] = samples / total
    cost["tokens_per_second"] = float(tokens.sum()) / total
    cost["model_flops_per_second"] = float(flops.sum()) / total
    if bool((peaks > 0).all()):
        cost["mfu"] = cost["model_flops_per_second"] / float(peaks.sum())
    return cost | {"peak_memory_gib_max": float(memory.max())}
