"""What reports read: curves, states, healthy ranges, settings and last metrics of run directories."""

import fcntl
import math
import os
from pathlib import Path

import pytest
from recorded_validations import HACKED, PLAIN
from run_folders import STEPS, make_run, metric_rows, training_row, validation_row

from unified_trainer.__main__ import main
from unified_trainer.tools.report.glossary import GROUPS, HEALTHY, OTHER, TOGETHER, documented_name, grouped, page
from unified_trainer.tools.report.healthy import bands, departures, held_out_metrics
from unified_trainer.tools.report.run_folder import RunFolderUnreadableError, find_runs, read_run, read_validations
from unified_trainer.tools.report.status import best_of, status_of
from unified_trainer.tools.report.tables import differing, last_metrics, phase_times, reward_parts, settings_of_run

pytestmark = pytest.mark.slow

METRICS = Path(__file__).parents[3] / "docs" / "metrics.md"


def test_the_page_of_metrics_is_generated():
    assert METRICS.read_text(encoding="utf-8") == page(), "run scripts/write_metrics_page.py"


def test_ranges_and_charts_name_metrics_of_the_page():
    names = {name for group in GROUPS.values() for name in group}
    assert HEALTHY.keys() <= names and TOGETHER.keys() <= names


def test_a_metric_is_of_its_most_literal_name():
    assert documented_name("reward/hpsv3_std_in_groups") == "reward/NAME_std_in_groups"
    assert documented_name("reward/retried") == "reward/retried" and documented_name("reward/x") == "reward/NAME"
    assert documented_name("student/high/grad_norm") == "ROLE/grad_norm" and documented_name("mine") is None


def test_the_loss_is_in_the_group_of_the_other_metrics_of_its_method():
    assert grouped({"loss", "policy_gap"}) == {"Policy update": ["loss", "policy_gap"]}
    assert grouped({"loss", "sample_power"}) == {"Distillation": ["sample_power", "loss"]}
    assert grouped({"loss"}) == {"Distillation": ["loss"]}
    assert grouped({"mine", "reward"}) == {"Reward and advantages": ["reward"], OTHER: ["mine"]}


def test_a_run_is_read_while_its_last_line_is_being_written(tmp_path):
    run = make_run(tmp_path / "run")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 11, "train/rew')
    record = read_run(run)
    assert record.step == STEPS and record.checkpoints == (STEPS,) and record.folder == run
    assert record.curves["reward"].steps == tuple(range(1, STEPS + 1))
    assert record.curves["validation/reward"].values == (2.0, 3.0)
    first, last = read_validations(run)
    assert (first.step, last.step) == (0, STEPS)
    assert [sample.video is not None for sample in last.samples] == [True, True, False, False]


@pytest.mark.parametrize(
    ("file", "text"),
    [("metrics.jsonl", "{\n{}\n"), ("metrics.jsonl", '{"x": 1}\n'), ("environment.jsonl", "[]\n")],
)
def test_a_damaged_file_is_named(tmp_path, file, text):
    run = make_run(tmp_path / "run", videos=0)
    (run / file).write_text(text)
    with pytest.raises(RunFolderUnreadableError, match=f"{file} is damaged"):
        read_run(run)


def state(run: Path) -> str:
    return status_of(read_run(run)).state


def test_the_states_of_runs(tmp_path):
    assert state(make_run(tmp_path / "finished", videos=0)) == "finished"
    assert state(make_run(tmp_path / "stopped", "--steps", "20", videos=0)) == "stopped"
    assert state(make_run(tmp_path / "failed", "--steps", "20", videos=0, checkpoint=5)) == "failed"
    killed = make_run(tmp_path / "killed", "--steps", "20", videos=0)
    lock = os.open(killed / ".lock", os.O_CREAT | os.O_RDWR)
    assert state(killed) == "failed"  # the lock's file alone is that of a killed process
    fcntl.flock(lock, fcntl.LOCK_EX)
    assert state(killed) == "running"
    os.close(lock)
    rows = [*metric_rows()[:-1], validation_row(STEPS, reward_hacking=1.0)]
    warned = make_run(tmp_path / "warned", videos=0, rows=rows)
    assert state(warned) == "finished" and status_of(read_run(warned)).hacking == (STEPS,)
    assert state(make_run(tmp_path / "hacked", "--hacking-monitor.action", "stop", videos=0, rows=rows)) == "hacked"


def test_the_best_value_is_the_lowest_frechet_distance_and_the_highest_reward(tmp_path):
    rows = [validation_row(0, frechet=9.0), validation_row(5, reward=7.0, frechet=3.0), validation_row(10, frechet=4.0)]
    run = read_run(make_run(tmp_path / "run", videos=0, rows=rows))
    frechet, reward = best_of(run, "frechet"), best_of(run, "reward")
    assert frechet and (frechet.first, frechet.last, frechet.best, frechet.best_step) == (9.0, 4.0, 3.0, 5)
    assert reward and (reward.best, reward.best_step) == (7.0, 5) and best_of(run, "nothing") is None


def test_points_outside_of_fixed_ranges_and_of_those_of_settings(tmp_path):
    rows = [training_row(1), training_row(2, skipped_updates=2.0), training_row(3, approx_kl=1e-3, skipped_updates=4.0)]
    run = read_run(make_run(tmp_path / "run", "--algorithm.clip-high", "5e-4", videos=0, rows=rows))
    found = {one.metric: one for one in departures(run)}
    assert found.keys() == {"skipped_updates", "approx_kl"}
    skipped, kl = found["skipped_updates"], found["approx_kl"]
    assert (skipped.band.outside, skipped.worst_step, skipped.worst_value, skipped.points) == ((2, 3), 3, 4.0, 3)
    assert kl.band.high == 5e-4 and kl.band.outside == (3,) and kl.band.words == "below 0.0005"


def test_ranges_around_the_first_value(tmp_path):
    """Drift 1.5 std of samples around .2 for a pixel statistic, half the first diversity, and fall .3 std of .5."""
    pixels = {"pixels/saturation_std": 0.1, "accuracy_std": 0.5}
    rows = [
        validation_row(0, **{**pixels, "pixels/saturation": 0.2, "pixels/diversity": 0.4, "accuracy": 0.8}),
        validation_row(5, **{**pixels, "pixels/saturation": 0.34, "pixels/diversity": 0.21, "accuracy": 0.66}),
        validation_row(10, **{**pixels, "pixels/saturation": 0.36, "pixels/diversity": 0.19, "accuracy": 0.64}),
    ]
    run = read_run(make_run(tmp_path / "run", videos=0, rows=rows))
    names = [f"validation/{name}" for name in ("pixels/saturation", "pixels/diversity", "accuracy")]
    found = [bands(run)[name] for name in names]
    assert [one.outside for one in found] == [(10,), (10,), (10,)]
    assert found[0].low == pytest.approx(0.05) and found[0].high == pytest.approx(0.35)
    assert found[1].low == pytest.approx(0.2) and found[1].high is None
    assert found[2].low == pytest.approx(0.65) and found[2].high is None


def test_of_recorded_runs_only_the_planted_shortcut_leaves_healthy_ranges(tmp_path):
    """The saturation of both drifts by more than 1.5 std: in the tiny world distances from its law are read instead."""
    departed = {}
    for name, (first, later) in {"plain": PLAIN, "planted": HACKED}.items():
        drifted = {"pixels/saturation": later["pixels/saturation"] + 0.02}
        rows = [validation_row(0, **first), validation_row(10, **later | drifted)]
        run = read_run(make_run(tmp_path / name, videos=0, rows=rows))
        departed[name] = {one.metric for one in departures(run)}
        bare = [{key: value for key, value in row.items() if "world/" not in key} for row in rows]
        others = {one.metric for one in departures(read_run(make_run(tmp_path / f"{name}-bare", videos=0, rows=bare)))}
        assert "validation/pixels/saturation" in others
    assert departed["plain"] == set()
    assert departed["planted"] >= {"validation/world/size", "validation/world/travel"}
    assert not [name for name in departed["planted"] if "pixels/" in name]


def test_a_range_of_means_counts_no_single_value(tmp_path):
    values = [0.5] * 7 + [1.4] * 8
    rows = [training_row(i + 1, critic_to_teacher_error=value) for i, value in enumerate(values)]
    band = bands(read_run(make_run(tmp_path / "run", videos=0, rows=rows)))["critic_to_teacher_error"]
    means = {step: sum(values[step - 8 : step]) / 8 for step in range(8, 16)}
    assert band.outside == tuple(step for step, mean in means.items() if mean > 1) == (12, 13, 14, 15)


def test_a_value_that_is_no_number_is_outside(tmp_path):
    rows = [training_row(1, skipped_updates=math.nan)]
    (one,) = departures(read_run(make_run(tmp_path / "run", videos=0, rows=rows)))
    assert one.band.outside == (1,) and math.isnan(one.worst_value)


def test_held_out_scorers_and_reward_parts(tmp_path):
    flags = ("--reward.scorers.pixels.kind", "pixels", "--reward.scorers.pixels.weight", "0")
    rows = [validation_row(0, **{"reward/pixels": 0.5}), validation_row(10, **{"reward/pixels": 0.25})]
    run = read_run(make_run(tmp_path / "run", *flags, videos=0, rows=rows))
    assert held_out_metrics(run) == {"validation/accuracy", "validation/reward/pixels"}
    parts = {part.name: part for part in reward_parts(run)}
    assert [name for name, part in parts.items() if part.held_out] == ["pixels", "accuracy", "frechet"]
    assert (parts["pixels"].first, parts["pixels"].last, parts["hpsv3"].std) == (0.5, 0.25, 1.0)


def test_phase_times_leave_the_first_step_out(tmp_path):
    rows = [training_row(1, **{"seconds/update": 99.0, "peak_memory_gib_max": 7.0}), training_row(2), training_row(3)]
    times = phase_times(read_run(make_run(tmp_path / "run", videos=0, rows=rows)))
    assert times.seconds == {"update": 2.0, "rollout": 1.0} and times.total == 3.0
    assert times.rates["peak_memory_gib_max"] == 7.0


def test_settings_that_differ_from_the_recipe(tmp_path):
    run = read_run(make_run(tmp_path / "run", "--algorithm.eta", "0.5", videos=0))
    found = {row.key: (row.value, row.recipe) for row in settings_of_run(run).rows if row.differs}
    assert found == {"steps": (STEPS, 72), "algorithm.eta": (0.5, 1.0)}
    (run.folder / "config.yaml").write_text("method: mine.py:Mine\nsteps: 3\n")
    other = settings_of_run(read_run(run.folder))
    assert "mine.py:Mine is not in this package" in other.note and not any(row.differs for row in other.rows)


def test_last_metrics_and_their_spread_over_seeds(tmp_path):
    def one(name: str, *flags: str, reward: float) -> Path:
        return make_run(tmp_path / name, *flags, videos=0, rows=[training_row(1), validation_row(10, reward=reward)])

    folders = [one("a", reward=1.0), one("b", "--seed", "1", reward=3.0), one("c", "--steps", "20", reward=9.0)]
    runs = [read_run(folder) for folder in folders]
    assert differing(runs) == {"steps": [10, 10, 20], "seed": [0, 1, 0]}
    last = last_metrics(runs)
    assert last.groups == ((0, 1),) and last.values["validation/reward"] == (1.0, 3.0, 9.0)
    (spread,) = last.spread["validation/reward"]
    assert spread == (2.0, pytest.approx(math.sqrt(2)))
    assert "validation/reward_std" not in last.values


def test_the_command_runs_lists_every_run_below_a_folder(tmp_path, capsys):
    make_run(tmp_path / "x" / "one", videos=0)
    damaged = make_run(tmp_path / "two", "--method", "dmd2", videos=0)
    (damaged / "metrics.jsonl").write_text("{\n")
    wrong = make_run(tmp_path / "three", "--method", "dmd2", videos=0)
    (wrong / "config.yaml").write_text("{: [\n")
    assert find_runs(tmp_path) == [tmp_path / "three", tmp_path / "two", tmp_path / "x" / "one"]
    assert main(["runs", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    (row,) = [line for line in lines if "x/one" in line]
    for words in ("dance_grpo", "finished", "10/10", "3, best 3 @ 10", "40, best 40 @ 10"):
        assert words in row
    for name in ("two", "three"):
        assert any(name in line and "unreadable" in line for line in lines)
    assert main(["runs", str(tmp_path / "x" / "one" / "validation")]) == 2
