"""Seconds of a training step and hours of a run on a card, from the work that the ranks do and the card's data sheet.

docs/performance.md compares them with an H200. Products and elementwise traffic of a network follow one another;
traffic between ranks runs beside them, and only what takes longer is waited for. Optimizer steps, checkpoints,
compilation and reading of weights and data take no time.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields

from unified_trainer.models.base import Shape
from unified_trainer.rewards.base import ScorerConfig
from unified_trainer.rewards.ocr import KIND as OCR
from unified_trainer.rewards.scorer_pool import processes_of
from unified_trainer.roles.recompute import Recompute
from unified_trainer.tools.plan.architecture import Architecture
from unified_trainer.tools.plan.flops import PassFLOPs, score_flops
from unified_trainer.tools.plan.hardware import NETWORK, NODE, Hardware
from unified_trainer.tools.plan.passes import decode_flops

PRODUCTS = 0.6  # of the dense bf16 peak in matrix products and attention; an H200 took 2 to 10% longer, compiled
TRAFFIC = 0.9  # assumed: of the memory's bandwidth in elementwise work
CONVOLUTIONS = 0.16  # of the peak in the VAE, at the precision of its convolutions; an H200's in bf16
CORES = "waiting for scorers on CPU cores"
LINKS = 0.7  # assumed: of the bandwidth between cards
PUBLISHED = {  # device hours of headline runs by recipe and method, and who published them
    ("wan2.1-1.3b", "dmd2"): "768 H200 hours (FastVideo: 4,000 steps at 61 x 448 x 832, sparse attention, 64 cards)",
    ("wan2.1-1.3b", "self_forcing"): "under 128 H100 hours (Self-Forcing, arXiv:2506.08009: 64 cards)",
}


@dataclass(frozen=True)
class Work:
    """Work of one rank: FLOPs by what limits them, and bytes of elementwise work."""

    products: float = 0.0
    traffic: float = 0.0
    repeated: float = 0.0  # FLOPs of activations that are computed again
    repeated_traffic: float = 0.0
    decoded: float = 0.0  # FLOPs of the VAE in bf16
    decoded_fp32: float = 0.0
    scored: float = 0.0
    on_cores: float = 0.0  # seconds of a rank's processes that score on CPU cores

    def __add__(self, other: "Work") -> "Work":
        return Work(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def times(self, factor: float) -> "Work":
        return Work(*(factor * getattr(self, f.name) for f in fields(self)))

    def seconds(self, card: Hardware) -> dict[str, float]:
        """Return the seconds by kind of work; with an MFU, products and traffic together reach it."""

        def network(flops: float, traffic: float) -> float:
            if card.mfu is not None:
                return flops / (card.mfu * card.flops)
            return flops / (PRODUCTS * card.flops) + traffic / (TRAFFIC * card.bandwidth)

        convolutions = self.decoded / card.flops + self.decoded_fp32 / card.tf32
        return {
            "networks": network(self.products, self.traffic),
            "recomputation": network(self.repeated, self.repeated_traffic),
            "VAE": convolutions / CONVOLUTIONS,
            "scorers": self.scored / (PRODUCTS * card.flops),
            CORES: self.on_cores,
        }


def pass_work(flops: PassFLOPs, recompute: Recompute, layers: int, *, gradient: bool) -> Work:
    """Return the work of a pass: with gradient, also of its backward pass and of what that computes again."""
    if not gradient:
        return Work(flops.forward, flops.traffic)
    share = 1.0 if recompute.others == "selective" else min(recompute.full, layers) / layers
    again = Work(repeated=flops.recompute, repeated_traffic=share * flops.traffic)
    return Work(flops.trained + flops.flash, flops.traffic + flops.traffic_back) + again


def decode_work(model: Architecture, latent: Shape, samples: int, *, half: bool, gradient: bool) -> Work:
    """Return the work of decoding latents; a backward pass takes twice the forward one."""
    flops = samples * (3 if gradient else 1) * decode_flops(model.blueprint.vae, model.vae, latent, half=half)
    return Work(decoded=flops) if half else Work(decoded_fp32=flops)


def score_work(scorers: Iterable[ScorerConfig], frames: int, samples: int, ranks: int, *, gradient: bool) -> Work:
    """Return the work of HPSv3, and of `ocr` on the cores that `ranks` share; that of other scorers is not known."""
    scored, on_cores = 0, 0.0
    for scorer in scorers:
        seen = math.ceil(frames / scorer.stride(frames))
        scored += seen * (scorer.kind == "hpsv3" and scorer.path != "tiny")
        on_cores += seen * OCR.cpu_seconds / max(1, processes_of(scorer, OCR, ranks)) if scorer.kind == OCR.name else 0
    return Work(scored=samples * scored * score_flops() * (3 if gradient else 1), on_cores=samples * on_cores)


def seconds_sent(inside: float, across: float, card: Hardware) -> float:
    """Return the seconds for bytes that a rank sends inside its group of shards and across groups."""
    return inside / LINKS / card.link + across / LINKS / (NETWORK if card.count > NODE else card.link)
