"""Further sets of validation prompts: each is measured as by a run of these prompts, and nothing else changes."""

import pytest
from helpers import ALONE, SMALL, assert_same, checkpoint_of, metrics_of, run

from unified_trainer.__main__ import main
from unified_trainer.basics.errors import UserError
from unified_trainer.run.plan.plan import check
from unified_trainer.run.settings.command_line import parse
from unified_trainer.run.settings.config import check_resumable

SHOWN = ["--validate-every", "1", "--validation.num-videos", "1", "--validation.batch", "2"]
PREFIX = "validation/sets/of_colors/"


@pytest.fixture
def colors(tmp_path):
    file = tmp_path / "colors.txt"
    file.write_text("a yellow square moving left\nblue circle moves down\n")
    return str(file)


def last_of(folder) -> dict[str, float]:
    row = metrics_of(folder)[-1]
    return {key: value for key, value in row.items() if key.startswith("validation/") and "seconds" not in key}


@pytest.mark.slow
def test_a_set_is_measured_as_by_a_run_of_its_prompts(tmp_path, colors):
    run("dance_grpo", tmp_path / "plain", *SHOWN)
    run("dance_grpo", tmp_path / "sets", *SHOWN, "--validation.sets.of-colors", colors)
    run("dance_grpo", tmp_path / "alone", *SHOWN, "--validation.prompts", colors)
    assert_same(*(checkpoint_of(tmp_path / name, 1) for name in ("sets", "plain")))
    plain, both, alone = (last_of(tmp_path / name) for name in ("plain", "sets", "alone"))
    assert {key: value for key, value in both.items() if not key.startswith(PREFIX)} == plain
    of_set = {key.replace(PREFIX, "validation/"): value for key, value in both.items() if key.startswith(PREFIX)}
    assert of_set == {key: value for key, value in alone.items() if key != "validation/reward_hacking"}
    assert of_set["validation/reward"] != plain["validation/reward"]
    shown = (tmp_path / "sets/validation/step_1/of_colors/samples.jsonl").read_text()
    assert shown == (tmp_path / "alone/validation/step_1/samples.jsonl").read_text()
    assert (tmp_path / "sets/validation/step_1/of_colors/0.mp4").is_file()


@pytest.mark.slow
def test_sets_and_held_out_scorers_may_change_when_a_run_is_resumed(tmp_path, colors):
    held_out = ["--reward.scorers.dark.kind", "dark_share", "--reward.scorers.dark.weight", "0"]
    run("dance_grpo", tmp_path / "run", *SHOWN, *held_out)
    again = ["--resume", str(tmp_path / "run"), "--steps"]
    more = ["--reward.scorers.sharpness.weight", "0", "--reward.scorers.dark.scale", "2"]
    assert main([*again, "2", "--validation.sets.of-colors", colors, *more]) == 0
    measured = last_of(tmp_path / "run")
    assert {f"{PREFIX}reward", "validation/reward/sharpness", f"{PREFIX}reward/sharpness"} <= measured.keys()
    assert main([*again, "3", "--validation.sets.of-colors", ""]) == 0
    measured = last_of(tmp_path / "run")
    assert "validation/reward/sharpness" in measured and not any(key.startswith(PREFIX) for key in measured)
    with pytest.raises(UserError, match=r"cannot change reward\.scorers\.dark\.weight"):
        check_resumable(parse([*again, "4", "--reward.scorers.dark.weight", "1"]), tmp_path / "run" / "config.yaml")


def test_a_set_that_cannot_be_is_refused_by_its_name(tmp_path, colors):
    words = [*SMALL["dance_grpo"], "--validate-every", "1"]
    with pytest.raises(UserError, match=r"--validation\.sets\.lost \S+: no such file"):
        check(parse([*words, "--validation.sets.lost", str(tmp_path / "lost.txt")]), ALONE)
    workers = ["--rollouts.evaluation-workers", "1", "--validation.sets.of-colors", colors]
    with pytest.raises(UserError, match=r"validation\.sets needs rollouts\.evaluation_workers 0"):
        check(parse([*words, *workers]), ALONE)
