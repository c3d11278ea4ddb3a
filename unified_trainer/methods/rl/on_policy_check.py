"""The on-policy check: replayed with the weights that made them, samples have the densities they were drawn with."""

import torch

from unified_trainer.basics.errors import UserError
from unified_trainer.methods.rl.replay import Replay
from unified_trainer.roles.role import Precision

# Largest rms per element by which the velocities of a worker may differ from the replay's. The log-ratio alone, a mean
# over elements, would not show another precision: rounding in bf16 is an rms of 1e-2, in fp32 of 1e-6.
VELOCITY_ERROR: dict[Precision, float] = {"fp32": 3e-3, "bf16": 0.1}
ROOM = 4  # the clip range that is advised, in log-ratios of rounding


class ReplayError(UserError, RuntimeError):
    """The replay of a rollout with the weights that made it differs from the rollout."""


class OnPolicyCheck:
    """Compares the first update of a run with its rollout, or samples of each worker with their replay."""

    def __init__(self, precision: Precision) -> None:
        self.over = False  # whether later updates are not compared: weights have changed, or samples lag
        self._precision, self._largest = precision, 0.0  # the largest log-ratio, as a fraction of the clip range
        self._whose: str | None = None  # what the next message is about; None if there is nothing to say

    def update(self, replay: Replay, gain: float, std: float) -> None:
        """Compare a replay of the run's first update; ReplayError beyond the clip range.

        In bf16 rollout and replay may round differently, because passes with gradient may take other kernels. Then only
        velocities that differ by more than VELOCITY_ERROR are an error. `gain` and `std` are those of `worker`.
        """
        if self.over:
            return
        largest, (low, high) = self._log_ratio(replay)
        half = self._precision == "bf16"
        if not (largest <= min(low, high) or (half and _velocity_error(replay, gain, std) <= VELOCITY_ERROR["bf16"])):
            raise ReplayError(
                f"the first update's log-ratio is {largest:.3g} with unchanged weights, above the clip range "
                f"{low:g}/{high:g}: rollout and replay differ. Set "
                "algorithm.update_batch equal to algorithm.rollout_batch, student.precision to fp32, or widen the range"
            )
        self._whose = self._whose or "before the first update"

    def worker(self, replay: Replay, gain: float, std: float, maker: str, version: int) -> None:
        """Compare a worker's samples with their replay; ReplayError beyond the clip range or VELOCITY_ERROR.

        `gain` is the derivative of the transition's mean by the velocity, and `std` its standard deviation.
        """
        largest, (low, high) = self._log_ratio(replay)
        error = _velocity_error(replay, gain, std)
        if not (largest <= min(low, high) and error <= VELOCITY_ERROR[self._precision]):
            raise ReplayError(
                f"samples of the rollout worker on {maker} differ from their replay with the same weights, of version "
                f"{version}: the log-ratio is {largest:.3g} (clip range {low:g}/{high:g}), and velocities differ by "
                f"{error:.2g} rms (at most {VELOCITY_ERROR[self._precision]:g}). The worker computes with another "
                "precision, library or device, or its weights are not those that it was sent"
            )
        if not self.over:
            self._whose = f"of the rollout worker on {maker}"

    def messages(self) -> tuple[str, ...]:
        """Say once in a run how far replays are from their rollouts; nothing is left to compare in updates."""
        self.over, whose = True, self._whose
        if whose is None:
            return ()
        self._whose = None
        advice = ""
        if self._largest > 1:
            advice = (
                f", by rounding in bf16. Multiply the clip range by {ROOM * self._largest:.2g}, so that it is {ROOM} "
                "times the rounding, or set algorithm.update_batch equal to algorithm.rollout_batch"
            )
        return (f"on-policy check: largest log-ratio {whose} is {100 * self._largest:.2g}% of the clip range{advice}",)

    def _log_ratio(self, replay: Replay) -> tuple[float, tuple[float, float]]:
        largest = replay.ratio.detach().abs().max().item()
        self._largest = max(self._largest, largest / min(replay.clip))
        return largest, replay.clip


def _velocity_error(replay: Replay, gain: float, std: float) -> float:
    """Return the largest rms per element by which velocities of rollout and replay differ."""
    return float((torch.sqrt(2 * replay.kl_old.detach()) * std / gain).max())
