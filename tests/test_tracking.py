"""The tracker: text is printed as it is, and a continued run drops the lines that it writes again."""

import json

import pytest

from unified_trainer.config import TrackingConfig
from unified_trainer.errors import UserError
from unified_trainer.tracking import Tracker

TEXT = "runs/[bold]a[/] :smile: [red]"


def tracker(folder, start: int = 0) -> Tracker:
    return Tracker(folder, TrackingConfig(), {}, 5, start, True)


def test_brackets_in_a_message_or_a_table_are_no_markup(tmp_path, capsys):
    with tracker(tmp_path) as one:
        one.say(TEXT)
        one.table(TEXT, {TEXT: TEXT})
        one.log(1, {"train/loss": 1.0}, advance=True)
    said = capsys.readouterr().out
    assert said.count(TEXT) == 4


def test_a_continued_run_drops_the_lines_after_its_checkpoint(tmp_path):
    with tracker(tmp_path) as one:
        for step in range(4):
            one.log(step, {"a": step / 2})
    file = tmp_path / "metrics.jsonl"
    file.write_text(file.read_text() + '{"step": 4, "a"')  # cut by a kill
    with tracker(tmp_path, start=2) as one:
        one.log(3, {"a": 9.0})
    assert [json.loads(line) for line in file.read_text().splitlines()] == [
        {"step": 0, "a": 0.0},
        {"step": 1, "a": 0.5},
        {"step": 2, "a": 1.0},
        {"step": 3, "a": 9.0},
    ]


@pytest.mark.parametrize("line", ["no json\n", '{"a": 1}\n', "[1]\n"])
def test_damaged_metrics_are_named(tmp_path, line):
    (tmp_path / "metrics.jsonl").write_text(line)
    with pytest.raises(UserError, match=r"metrics\.jsonl is damaged"):
        tracker(tmp_path, start=1)
