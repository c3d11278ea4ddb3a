"""The tracker: lines or a bar that say how far a run is and what it came to, and metrics of a continued run."""

import errno
import io
import json
import re
from contextlib import contextmanager

import pytest
from helpers import metrics_of
from rich.console import Console

from unified_trainer.run.settings.config import TrackingConfig
from unified_trainer.run.tracking import tracker as tracking
from unified_trainer.run.tracking.external import ExternalTracker, RunInfo
from unified_trainer.run.tracking.tracker import Tracker
from unified_trainer.run.validation.report import ValidationSample

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
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert all(row["time"] > 1.7e9 for row in rows)
    assert metrics_of(tmp_path) == [
        {"step": 0, "a": 0.0},
        {"step": 1, "a": 0.5},
        {"step": 2, "a": 1.0},
        {"step": 3, "a": 9.0},
    ]


@pytest.mark.parametrize("line", [b"no json\n", b'{"a": 1}\n', b"[1]\n", b'{"step": "1"}\n', b"\xff\n"])
def test_a_damaged_line_of_metrics_is_left_out_and_said(tmp_path, line, capsys):
    """A resumed run is not held up by what people read; the file as it was is kept."""
    whole, file = b'{"step": 1, "a": 2.0}\n', tmp_path / "metrics.jsonl"
    file.write_bytes(line + whole)
    with tracker(tmp_path, start=1):
        pass
    assert file.read_bytes() == whole and (tmp_path / "metrics.damaged").read_bytes() == line + whole
    assert "metrics.jsonl: 1 damaged lines are left out; as it was it is" in capsys.readouterr().out


def test_empty_lines_and_nuls_in_metrics_are_left_out(tmp_path, capsys):
    """As a crash of the machine leaves them, also in front of the next line. They are nobody's: nothing is said."""
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(b'\n{"step": 1, "a": 2.0}\n\n\0\0\0\n\0\0{"step": 2, "a": 3.0}\r\n\0\0')
    with tracker(tmp_path, start=2):
        pass
    assert metrics_of(tmp_path) == [{"step": 1, "a": 2.0}, {"step": 2, "a": 3.0}]
    assert capsys.readouterr().out == "" and sorted(path.name for path in tmp_path.iterdir()) == [
        "metrics.jsonl",
        "trackers.json",
    ]


def test_a_validation_that_comes_again_is_in_the_metrics_once(tmp_path):
    """A run that was killed after a save and before the validation was added to the checkpoint."""
    with tracker(tmp_path) as one:
        for step in (1, 2):
            one.log(step, {"train/a": 1.0})
            one.log(step, {"validation/a": 2.0})
    with Tracker(tmp_path, TrackingConfig(), {}, 5, 2, True, unvalidated=2):
        pass
    assert [(row["step"], len(row), "validation/a" in row) for row in metrics_of(tmp_path)] == [
        (1, 2, False),
        (1, 2, True),
        (2, 2, False),
    ]


class Broken(ExternalTracker):
    """A tracker whose disk is full from its second row on."""

    rows = 0

    def log(self, step, metrics):
        Broken.rows += 1
        if Broken.rows == 2:
            raise OSError(errno.ENOSPC, "No space left on device")


def test_a_tracker_whose_disk_is_full_is_left_out_with_one_warning(tmp_path, capsys):
    with tracker(tmp_path) as one:
        one._trackers.append(Broken(RunInfo(tmp_path, {}, TrackingConfig(), 0)))
        for step in range(1, 5):
            one.log(step, {"a": 1.0})
    assert Broken.rows == 2 and len(metrics_of(tmp_path)) == 4
    assert capsys.readouterr().out.count("warning: tracker Broken failed and gets nothing before --resume") == 1


class Taking(ExternalTracker):
    """A tracker that cannot take lines back; `kept` outlives a start, as a server does."""

    def __init__(self, run):
        self.kept, self.fails = STORES.setdefault(type(self).__name__, []), False

    def log(self, step, metrics):
        if self.fails:
            raise OSError(errno.ECONNRESET, "the connection is gone")
        self.kept.append((step, metrics["train/a"]))

    def log_rollouts(self, step, samples, contact_sheet):
        self.kept.append(("rollouts", step, [sample.prompt for sample in samples], contact_sheet.name))


class Rewinding(Taking):
    def rewind(self, step, lines):
        self.kept[lines:], self.taken = [], lines


STORES: dict[str, list] = {}


@contextmanager
def fed(folder, start: int, kinds):
    """The tracker of a run, and its trackers by class."""
    STORES.clear() if not start else None
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(tracking, "tracker_classes", lambda config: kinds)
        with tracker(folder, start) as one:
            yield one, {type(each): each for each in one._trackers}


def test_a_tracker_gets_each_line_once_whatever_came_between(tmp_path):
    """After a start from an earlier checkpoint, a connection that failed, and a tracker that is asked for later."""
    with fed(tmp_path, 0, [Taking, Rewinding]) as (one, _):
        for step in (1, 2, 3, 4):
            one.log(step, {"train/a": 0.0})
    with fed(tmp_path, 2, [Taking, Rewinding]) as (one, _):  # steps 3 and 4 come again
        for step in (3, 4, 5):
            one.log(step, {"train/a": 1.0})
        assert STORES["Taking"] == [(1, 0.0), (2, 0.0), (3, 0.0), (4, 0.0), (5, 1.0)]
        assert STORES["Rewinding"] == [(1, 0.0), (2, 0.0), (3, 1.0), (4, 1.0), (5, 1.0)]
    with fed(tmp_path, 5, [Taking, Rewinding]) as (one, trackers):
        trackers[Taking].fails = True
        one.log(6, {"train/a": 2.0})
        one.rewind(5)  # within the run
        one.log(6, {"train/a": 3.0})
        one.log(7, {"train/a": 3.0})
    late = type("Late", (Taking,), {})
    folder = tmp_path / "rollouts" / "step_7"
    folder.mkdir(parents=True)
    (folder / "contact_sheet.png").touch()
    sample = ValidationSample(0, 0, "a prompt", None, {}, {}, None)
    (folder / "samples.jsonl").write_text(json.dumps(sample.row()) + "\n")
    with fed(tmp_path, 7, [Taking, Rewinding, late]):
        pass
    shown, ends = ("rollouts", 7, ["a prompt"], "contact_sheet.png"), [(6, 3.0), (7, 3.0)]
    lines = [(row["step"], row["train/a"]) for row in metrics_of(tmp_path)]
    assert STORES["Rewinding"] == lines == [(1, 0.0), (2, 0.0), (3, 1.0), (4, 1.0), (5, 1.0), *ends]
    assert STORES["Late"] == [*lines[:6], shown, lines[6]]
    assert STORES["Taking"][5:] == [lines[5], shown, lines[6]]


def test_a_run_of_an_earlier_version_gives_nothing_twice(tmp_path):
    with fed(tmp_path, 0, []) as (one, _):
        one.log(1, {"train/a": 0.0})
    (tmp_path / tracking.TAKEN).unlink()
    with fed(tmp_path, 1, [Taking]) as (one, _):
        one.log(2, {"train/a": 0.0})
    assert STORES["Taking"] == [(2, 0.0)]


# Without a terminal.


def test_a_training_step_is_a_line_with_time_numbers_and_the_time_left(tmp_path, capsys):
    with tracker(tmp_path) as one:
        one.show_phase("rollout 1/2")
        for step in (1, 2):
            one.log(step, {"train/reward": step / 2, "train/secret": 7.0, "train/seconds": 3.25}, advance=True)
    lines = capsys.readouterr().out.splitlines()
    number = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  step %s/5  reward %s  3.25 s  ETA \d:\d\d:\d\d"
    assert len(lines) == 2
    for line, step, reward in zip(lines, ("1", "2"), ("0.5", "1"), strict=True):
        assert re.fullmatch(number % (step, reward), line), line


def test_the_last_line_compares_the_first_validation_with_the_last(tmp_path, capsys):
    """Also those of the run before it was continued."""
    with tracker(tmp_path) as one:
        for step, reward in ((0, 2.81), (1, 3.5), (2, 4.0)):
            one.log(step, {"validation/reward": reward, "validation/accuracy": 0.5 + step / 10})
    with tracker(tmp_path, start=2) as one:
        one.log(3, {"train/reward": 1.0}, advance=True)
        one.log(3, {"validation/reward": 4.5, "validation/accuracy": 0.94})
        one.finish(3)
    last = capsys.readouterr().out.splitlines()[-1]
    assert "3/5 steps done; validation of step 0 -> 3: reward 2.810 -> 4.500, accuracy 0.500 -> 0.940;" in last
    assert str(tmp_path) in last


def test_a_run_without_validations_says_where_things_are(tmp_path, capsys):
    with tracker(tmp_path) as one:
        one.log(1, {"train/loss": 1.0}, advance=True)
        one.finish(1)
    assert capsys.readouterr().out.splitlines()[-1] == (
        f"1/5 steps done; metrics, checkpoints and videos in {tmp_path}"
    )


# With a terminal.


def bar(tmp_path, monkeypatch, width: int) -> str:
    """The progress bar's last line in a terminal of this width, after 12 steps."""
    terminal = Console(force_terminal=True, width=width, file=io.StringIO(), color_system=None, legacy_windows=False)
    monkeypatch.setattr(tracking, "console", lambda quiet: terminal)
    with Tracker(tmp_path, TrackingConfig(), {}, 20, 0, True) as one:
        one.log(0, {"validation/reward": 4.5, "validation/accuracy": 0.94})
        for step in range(1, 13):
            one.log(step, {"train/reward": float(step), "train/seconds": 1.0}, advance=True)
        one.show_phase("rollout 3/8, step 1/2")
        one._progress.refresh()
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", terminal.file.getvalue())
    return [line for line in re.split(r"[\r\n]+", text) if line.strip()][-1]


def test_the_bar_shows_the_phase_the_validation_and_smoothed_training_values(tmp_path, monkeypatch):
    """The mean of the rewards 3 to 12, the last ten, is 7.5."""
    line = bar(tmp_path, monkeypatch, 120)
    assert re.search(r"12/20 \d:\d\d:\d\d +rollout 3/8, step 1/2 +val reward 4.5 accuracy 0.94; reward 7.5", line), line


def test_a_narrow_terminal_cuts_the_end_of_the_line(tmp_path, monkeypatch):
    line = bar(tmp_path, monkeypatch, 60)
    assert "12/20" in line and "rollout 3/8, step 1/2" in line and line.rstrip().endswith("…")
    assert len(line) <= 60
