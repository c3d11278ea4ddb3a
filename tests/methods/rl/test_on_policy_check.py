"""The on-policy check of a run's first update: what is rounding, and what is an error."""

import pytest
import torch

from unified_trainer.methods.rl.on_policy_check import OnPolicyCheck, ReplayError
from unified_trainer.methods.rl.replay import Replay
from unified_trainer.numerics.kernels import Policy

CLIP = 1e-3
POLICY = Policy("dance", 0.5, torch.tensor([0.9, 0.6, 0.0], dtype=torch.float64))
GAIN, STD = POLICY.mean_gain(0), POLICY.std(0)


def replay(ratio: float, velocity_error: float) -> Replay:
    """A replay whose velocities differ by an rms of `velocity_error`: KL = (gain error)^2 / (2 std^2)."""
    kl = (GAIN * velocity_error) ** 2 / (2 * STD**2)
    one = torch.ones(1, dtype=torch.float64)
    return Replay(ratio * one, ratio * one, kl * one, None, (CLIP, CLIP), torch.zeros(1, dtype=torch.int64), 0 * one, 1)


def test_rounding_in_bf16_beyond_the_clip_range_is_said_and_not_an_error():
    """Of the largest log-ratio, 5 clip ranges: 20 times the range is 4 times the rounding."""
    check = OnPolicyCheck("bf16", POLICY)
    check.update(replay(5e-4, 0.01), 0)
    check.update(replay(5e-3, 0.09), 0)
    (message,) = check.messages()
    assert "before the first update is 5e+02% of the clip range, by rounding in bf16" in message
    assert "Multiply the clip range by 20, so that it is 4 times the rounding" in message
    assert not check.messages()


def test_within_the_clip_range_there_is_no_advice():
    check = OnPolicyCheck("bf16", POLICY)
    check.update(replay(5e-4, 0.01), 0)
    (message,) = check.messages()
    assert message.endswith("is 50% of the clip range")


@pytest.mark.parametrize(("precision", "error"), [("fp32", 0.09), ("bf16", 0.11), ("bf16", float("nan"))])
def test_velocities_that_rounding_does_not_explain_are_an_error(precision, error):
    with pytest.raises(ReplayError, match=r"log-ratio is 0\.005 with unchanged weights, above the clip range"):
        OnPolicyCheck(precision, POLICY).update(replay(5e-3, error), 0)
