"""The KL that rounding alone makes: measured by a step's first update, and the least KL that can be kept."""

import math

import pytest
from helpers import SMALL, flags, metrics_of, refused

from unified_trainer.__main__ import main
from unified_trainer.methods.rl.policy import PolicyConfig

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight:UserWarning"),  # RMSNorm in bf16
]

FLOOR = "train/approx_kl_floor"
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
