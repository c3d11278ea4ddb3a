"""The KL that rounding alone makes: measured by a step's first update, and the least KL that can be kept."""

import dataclasses
import math
import re

import pytest
from helpers import SMALL, dance_grpo, flags, metrics_of, refused

from unified_trainer.__main__ import main
from unified_trainer.basics.errors import UserError
from unified_trainer.methods.dance_grpo import DanceGRPOConfig
from unified_trainer.methods.rl.policy import PolicyConfig
from unified_trainer.numerics.objectives import CISPO, GSPO, SAPO, SoftClip, Unclipped

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight:UserWarning"),  # RMSNorm in bf16
]

FLOOR = "train/approx_kl_floor"
CONFIG = DanceGRPOConfig(
    num_prompts=2, num_samples=2, prompts_per_update=2, rollout_batch=4, update_batch=4, clip_low=1e-2, clip_high=1e-2
)
BF16 = {"student.precision": "bf16", "student.learning-rate": 1e-3}


def trained(folder, **settings: object) -> list[dict[str, float]]:
    assert main([*SMALL["dance_grpo"], *flags(settings), "--output", str(folder)]) == 0
    return metrics_of(folder)


def test_the_floor_is_the_kl_of_the_first_update(tmp_path):
    """Two updates of one prompt each: the floor is that of the first prompt, the mean holds the second update too.

    One update of both prompts is made with unchanged weights, so that its KL is the floor. In fp32 there is no row.
    """
    (two,) = trained(tmp_path / "two", **BF16, **{"algorithm.prompts-per-update": 1})
    assert 0 < 100 * two[FLOOR] < two["train/approx_kl"]
    (one,) = trained(tmp_path / "one", **BF16)
    assert one[FLOOR] == one["train/approx_kl"] < 100 * two[FLOOR]
    (exact,) = trained(tmp_path / "exact", **{"algorithm.prompts-per-update": 1})
    assert FLOOR not in exact


@pytest.mark.parametrize(
    ("name", "more"),
    [("kl_target", {"algorithm.kl-coefficient": 0.1}), ("trust_region", {"algorithm.correction": "dppo"})],
)
def test_a_kl_to_keep_below_the_floor_is_refused_before_any_weight_changes(tmp_path, capsys, name, more):
    below = more | {f"algorithm.{name.replace('_', '-')}": 1e-30, "student.precision": "bf16"}
    said = refused(capsys, *SMALL["dance_grpo"], *flags(below), "--output", tmp_path / "run")
    assert f"algorithm.{name} 1e-30 is below the rounding of student.precision bf16" in said and said.count("\n") == 1
    assert "set it above that" in said and metrics_of(tmp_path / "run") == []
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_what_is_above_the_floor_is_kept():
    """0 is no KL to keep."""
    floor = 1.9e-7  # measured in bf16 at 480 x 832
    PolicyConfig(kl_target=math.nextafter(floor, 1)).check_above(floor)
    PolicyConfig().check_above(floor)
    with pytest.raises(ValueError, match=r"algorithm\.kl_target 1\.9e-07 is below .* a KL of 1\.9e-07"):
        PolicyConfig(kl_target=floor).check_above(floor)


@pytest.mark.parametrize(
    ("key", "changes"),
    [
        ("clip_low", {"clip_low": 1e-12}),
        ("clip_high", {"clip_high": 1e-12, "objective": CISPO()}),
        ("clip_high", {"clip_high": 1e-12, "objective": GSPO(), "guard": True}),
        ("clip_velocity", {"clip_velocity": 1e-9}),
    ],
)
def test_a_clip_range_below_the_noise_floor_is_refused_in_the_first_update(key, changes):
    """Whatever objective clips. Samples are replayed as they were made, so that no log-ratio shows the rounding."""
    one = dance_grpo(dataclasses.replace(CONFIG, **changes))
    with pytest.raises(UserError, match=rf"algorithm\.{key} 1e-\d+ is below the log-ratio noise floor") as said:
        one.step(0)
    assert not one.roles["student"].gradients
    floor = float(re.search(r"by ([\d.e-]+), and", str(said.value))[1])
    assert 1e-12 < floor < 1e-7  # the sum of mean and noise is rounded to float32
    wide = dance_grpo(dataclasses.replace(CONFIG, **changes | {key: 1e-2})).step(0)
    assert max(value for name, value in wide.items() if name.startswith("log_ratio_noise_floor")) < 1e-2


@pytest.mark.parametrize("objective", [Unclipped(), SoftClip(), SAPO()])
def test_an_objective_without_a_clip_range_has_none_below_the_floor(objective):
    one = dance_grpo(dataclasses.replace(CONFIG, clip_low=1e-12, objective=objective))
    one.method.update.on_policy._log_ratio = lambda replay: (0.0, replay.clip)
    one.step(0)
    assert len(one.roles["student"].gradients) == 1


def test_a_trust_region_below_the_floor_is_refused_in_float32_too():
    one = dance_grpo(dataclasses.replace(CONFIG, correction="dppo", trust_region=1e-30))
    with pytest.raises(UserError, match=r"algorithm\.trust_region 1e-30 is below the rounding of .* fp32"):
        one.step(0)
