"""Accelerators by name: memory of one device, from the vendors' data sheets; FLOP/s are in `parallel.device`."""

import re
from dataclasses import dataclass

from unified_trainer.basics.errors import UserError
from unified_trainer.parallel.device import peak_flops

GB = 1e9
# Memory as data sheets print it, in GB of 1e9 bytes, and the name by which `peak_flops` knows the device.
DEVICES = {
    "H200": (141, "H200"),  # NVIDIA H200 data sheet
    "H100": (80, "H100"),  # NVIDIA H100 data sheet, SXM
    "H20": (96, "H20"),  # NVIDIA H20 data sheet
    "GH200": (96, "GH200"),  # NVIDIA GH200 data sheet, HBM3
    "B200": (180, "B200"),  # NVIDIA DGX B200 data sheet: 1440 GB in 8 devices
    "A100": (80, "A100"),  # NVIDIA A100 data sheet, 80 GB
    "A100-40": (40, "A100"),  # NVIDIA A100 data sheet, 40 GB
    "A40": (48, "A40"),
    "L40S": (48, "L40S"),
    "L40": (48, "L40"),
    "A10": (24, "A10"),
    "L4": (24, "L4"),
    "RTX4090": (24, "RTX 4090"),
    "RTX3090": (24, "RTX 3090"),
    "MI300X": (192, "MI300X"),  # AMD Instinct MI300X data sheet
}
RESERVE = 3.0 * 2**30  # assumed: context, libraries, communication buffers and fragmentation


@dataclass(frozen=True)
class Hardware:
    """Equal devices."""

    count: int
    name: str
    memory: float  # bytes of one device
    flops: float  # dense bf16 FLOP/s of one device

    @property
    def usable(self) -> float:
        return self.memory - RESERVE


def read_hardware(words: str) -> Hardware:
    """Read 8xH200, or H200 for one; UserError names the devices that are known."""
    match = re.fullmatch(r"(?:(\d+)\s*[x*])?\s*([\w-]+)", words.strip(), re.IGNORECASE)
    by_name = {name.lower(): name for name in DEVICES}
    found = by_name.get(match[2].lower()) if match else None
    if match is None or found is None or match[1] == "0":
        raise UserError(f"--hardware {words}: give a number and a device, such as 8xH200; have {', '.join(DEVICES)}")
    memory, name = DEVICES[found]
    return Hardware(int(match[1] or 1), found, memory * GB, peak_flops(name) or 0.0)
