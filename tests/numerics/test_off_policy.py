"""The proximal policy of samples of an older policy, by hand."""

import math

import pytest
import torch

from unified_trainer.numerics.objectives import diagnostics
from unified_trainer.numerics.off_policy import proximal_log_ratio

LAGS = torch.tensor([0, 1, 3])


@pytest.mark.parametrize(
    ("correction", "expected"),
    [
        ("none", [0, 0, 0]),
        ("decoupled", [0, 0.7, 0.7]),
        ("loglinear", [0, 0.5 * 0.1, 0.75 * 0.1]),
    ],
)
def test_the_proximal_policy_of_samples_of_lag_0_1_and_3(correction, expected):
    """A sample of lag 0 has none but the behavior policy, so that its loss is not corrected."""
    log_ratio = torch.full((3,), 0.1, dtype=torch.float64, requires_grad=True)
    proximal = proximal_log_ratio(correction, log_ratio, torch.full((3,), 0.7, dtype=torch.float64), LAGS)
    assert proximal.tolist() == pytest.approx(expected, rel=1e-12) and not proximal.requires_grad
    assert float(proximal[0].detach()) == 0


def test_loglinear_clips_where_the_whole_ratio_is_a_power_of_the_range():
    """The ratio to the proximal policy is r^(1 / (lag + 1)): the clip acts where r leaves (1 +- c)^(lag + 1)."""
    log_ratio = torch.linspace(-0.5, 0.5, 401, dtype=torch.float64)
    lag = torch.full((401,), 3)
    ratio = log_ratio - proximal_log_ratio("loglinear", log_ratio, torch.zeros_like(log_ratio), lag)
    stopped = diagnostics(ratio, torch.ones(401), clip_low=0.1, clip_high=0.1)["zero_gradient_fraction"]
    assert stopped == pytest.approx(float((log_ratio > 4 * math.log(1.1)).double().mean()))
