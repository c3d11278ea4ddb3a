"""Accelerators by name, from the vendors' data sheets; dense bf16 FLOP/s are in `parallel.device`."""

import re
from dataclasses import dataclass

from unified_trainer.basics.errors import UserError
from unified_trainer.parallel.device import peak_flops

# The name by which `peak_flops` knows the device, and as data sheets print them: memory in GB of 1e9 bytes and TB/s,
# dense TF32 in TFLOP/s (half of the figure with sparsity), and GB/s to other cards of the node in one direction
# (NVLink, or 16 lanes of PCIe).
DEVICES = {
    "H200": ("H200", 141, 4.8, 494, 450),  # NVIDIA H200 data sheet
    "H100": ("H100", 80, 3.35, 494, 450),  # NVIDIA H100 data sheet, SXM
    "H20": ("H20", 96, 4.0, 74, 450),  # NVIDIA H20 data sheet
    "GH200": ("GH200", 96, 4.0, 494, 450),  # NVIDIA GH200 data sheet, HBM3
    "B200": ("B200", 180, 8.0, 1125, 900),  # NVIDIA DGX B200 data sheet: 1440 GB and 64 TB/s in 8 devices
    "A100": ("A100", 80, 2.04, 156, 300),  # NVIDIA A100 data sheet, 80 GB, SXM
    "A100-40": ("A100", 40, 1.56, 156, 300),  # NVIDIA A100 data sheet, 40 GB, SXM
    "A40": ("A40", 48, 0.696, 74.8, 32),
    "L40S": ("L40S", 48, 0.864, 183, 32),
    "L40": ("L40", 48, 0.864, 90.5, 32),
    "A10": ("A10", 24, 0.6, 62.5, 32),
    "L4": ("L4", 24, 0.3, 60, 32),
    "RTX5090": ("RTX 5090", 32, 1.79, 104.8, 64),  # NVIDIA RTX Blackwell architecture white paper
    "RTX4090": ("RTX 4090", 24, 1.01, 82.6, 32),  # NVIDIA Ada architecture white paper, appendix A
    "RTX3090": ("RTX 3090", 24, 0.936, 35.6, 32),
    "MI300X": ("MI300X", 192, 5.3, 653.7, 448),  # AMD Instinct MI300X data sheet
}
NODE, NETWORK = 8, 50e9  # assumed: cards of a node, and bytes/s of each to other nodes (400 Gbit/s)
RESERVE = 3.0 * 2**30  # assumed: context, libraries, communication buffers and fragmentation


@dataclass(frozen=True)
class Hardware:
    """Equal devices."""

    count: int
    name: str
    memory: float  # bytes of one device
    flops: float  # dense bf16 FLOP/s of one device
    tf32: float  # dense TF32 FLOP/s
    bandwidth: float  # bytes/s of its memory
    link: float  # bytes/s that it sends to others of its node
    mfu: float | None = None  # share of its FLOP/s that networks reach; None estimates it from products and traffic

    @property
    def usable(self) -> float:
        return self.memory - RESERVE


def read_hardware(words: str) -> Hardware:
    """Read 8xH200, or H200 for one; UserError names the devices that are known."""
    match = re.fullmatch(r"(?:(\d+)\s*[x*])?\s*([\w-]+)", words.strip(), re.IGNORECASE)
    by_name = {name.lower(): name for name in DEVICES}
    card = by_name.get(match[2].lower()) if match else None
    if match is None or card is None or match[1] == "0":
        raise UserError(f"--hardware {words}: give a number and a device, such as 8xH200; have {', '.join(DEVICES)}")
    name, memory, bandwidth, tf32, link = DEVICES[card]
    flops = peak_flops(name) or 0.0
    return Hardware(int(match[1] or 1), card, memory * 1e9, flops, tf32 * 1e12, bandwidth * 1e12, link * 1e9)


def gib(size: float) -> str:
    """Return bytes in GiB, as text."""
    return f"{size / 2**30:.3g}"
