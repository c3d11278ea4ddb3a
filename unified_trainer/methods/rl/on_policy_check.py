"""The on-policy check: replayed with the weights that made them, samples have the densities they were drawn with."""

import torch

from unified_trainer.basics.errors import UserError
from unified_trainer.methods.rl.replay import Replay
from unified_trainer.numerics.kernels import Policy
from unified_trainer.roles.role import Precision

# Largest rms per element by which the velocities of a worker may differ from the replay's. The log-ratio alone, a mean
# over elements, would not show another precision: rounding in bf16 is an rms of 1e-2, in fp32 of 1e-6.
VELOCITY_ERROR: dict[Precision, float] = {"fp32": 3e-3, "bf16": 0.1}
ROOM = 4  # the clip range that is advised, in log-ratios of rounding


class ReplayError(UserError, RuntimeError):
    """The replay of a rollout with the weights that made it differs from the rollout."""


class OnPolicyCheck:
    """Compares the first update of a run with its rollout, or samples of each worker with their replay."""

    def __init__(self, precision: Precision, policy: Policy) -> None:
        self.over = False  # whether later updates are not compared: weights have changed, or samples lag
        self._precision, self._policy = precision, policy
        self._largest = 0.0  # log-ratio, as a fraction of the clip range
        self._whose: str | None = None  # what the next message is about; None if there is nothing to say

    def update(self, replay: Replay, s: int) -> None:
        """Compare a replay of transition s in the run's first update; ReplayError beyond the clip range.

        In bf16 rollout and replay may round differently, because passes with gradient may take other kernels. Then only
        velocities that differ by more than VELOCITY_ERROR are an error.
        """
        if self.over:
            return
        largest, (low, high) = self._log_ratio(replay)
        half = self._precision == "bf16"
        if not (largest <= min(low, high) or (half and self._velocity_error(replay, s) <= VELOCITY_ERROR["bf16"])):
            raise ReplayError(
                f"the first update's log-ratio is {largest:.3g} with unchanged weights, above the clip range "
                f"{low:g}/{high:g}: rollout and replay differ. Set "
                "algorithm.update_batch equal to algorithm.rollout_batch, student.precision to fp32, or widen the range"
            )
        self._whose = self._whose or "before the first update"

    def worker(self, replay: Replay, s: int, maker: str, version: int) -> None:
        """Compare transition s of a worker with its replay; ReplayError beyond the clip range or VELOCITY_ERROR."""
        largest, (low, high) = self._log_ratio(replay)
        error = self._velocity_error(replay, s)
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

    def _velocity_error(self, replay: Replay, s: int) -> float:
        """Return the largest rms per element by which velocities of rollout and replay differ."""
        difference = torch.sqrt(2 * replay.kl_old.detach()) * self._policy.std(s)  # of the transition's mean
        return float((difference / self._policy.mean_gain(s)).max())
