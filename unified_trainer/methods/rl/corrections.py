"""Corrections by name: each gives the center of the clip range and the weight of each transition of an update."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from unified_trainer.basics.types import PerSample
from unified_trainer.methods.rl.replay import Replay, ReplayStats
from unified_trainer.numerics.importance_weight import WeightDensity, importance_weight
from unified_trainer.numerics.off_policy import Proximal, proximal_log_ratio
from unified_trainer.numerics.trust_region import leaves_trust_region

CorrectionName = Literal["none", "decoupled", "loglinear", "truncated", "vtrace", "dppo"]


class Correction:
    """No correction: ratios are to the policy of the rollout, and every transition has weight 1."""

    needs_start = False  # whether it reads log-densities of the start of the training step
    compares_densities = False  # whether it needs log-ratios, not the guarded ones
    of_values = False  # whether it corrects the targets of a value function

    def proximal(self, log_ratio: PerSample, start: PerSample, lag: Tensor) -> PerSample:
        """Return the log-ratio of the proximal to the behavior policy, without gradient."""
        return proximal_log_ratio("none", log_ratio, start, lag)

    def weight(self, replay: Replay, advantage: PerSample) -> PerSample:
        """Return the factor of each transition's gain, without gradient."""
        return torch.ones_like(replay.proximal)

    def metrics(self, stats: ReplayStats) -> Mapping[str, float]:
        """Return the metrics of one update."""
        return {}


@dataclass(frozen=True)
class AroundProximal(Correction):
    """The clip range is around a proximal policy, and a gain has the weight of that policy to the behavior policy.

    Samples of lag 0 have the behavior policy as proximal policy, and weight 1.
    """

    kind: Proximal
    density: WeightDensity
    largest: float
    needs_start: bool
    compares_densities = True

    def proximal(self, log_ratio: PerSample, start: PerSample, lag: Tensor) -> PerSample:
        return proximal_log_ratio(self.kind, log_ratio, start, lag)

    def weight(self, replay: Replay, advantage: PerSample) -> PerSample:
        return importance_weight(replay.proximal, replay.elements, self.density, self.largest)

    def metrics(self, stats: ReplayStats) -> Mapping[str, float]:
        if not bool(stats.lag.any()):
            return {}
        truncated = (stats.weight >= self.largest).double().mean()
        return {"importance_weight": float(stats.weight.mean()), "importance_weight_truncated": float(truncated)}


class VTrace(Correction):
    """Value targets and advantages of old samples are those of V-trace; the gain is not changed."""

    of_values = True


@dataclass(frozen=True)
class FlowDPPO(Correction):
    """A transition has no gradient once the policy has left the trust region where its advantage pushes it."""

    bound: float  # KL per element

    def weight(self, replay: Replay, advantage: PerSample) -> PerSample:
        leaves = leaves_trust_region(replay.ratio.detach(), advantage, replay.kl_old, self.bound)
        return super().weight(replay, advantage).masked_fill(leaves, 0.0)

    def metrics(self, stats: ReplayStats) -> Mapping[str, float]:
        return {"trust_region_left": float((stats.weight == 0).double().mean())}


def correction_named(
    name: CorrectionName, *, density: WeightDensity, largest: float, trust_region: float
) -> Correction:
    """Return the correction of a setting, with the parameters that it reads."""
    if name == "none":
        return Correction()
    if name == "vtrace":
        return VTrace()
    if name == "dppo":
        return FlowDPPO(trust_region)
    return AroundProximal(name, density, largest, needs_start=name == "decoupled")
