"""What a model card says of a run's scorers."""

from dataclasses import replace

import pytest

from unified_trainer.run.settings.command_line import parse
from unified_trainer.tools.export.model_card import _reward


@pytest.mark.parametrize(
    ("method", "said"), [("dance_grpo", "hpsv3 (weight 1)"), ("dmd2", "measured only: hpsv3 (weight 1)")]
)
def test_a_reward_that_nothing_learnt_from_is_measured_only(method, said):
    run = parse(["--method", method, "--recipe", "tiny"])
    assert _reward(run) == said
    assert (_reward(replace(run, validate_every=0)) == "") == (method == "dmd2")
