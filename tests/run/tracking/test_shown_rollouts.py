"""Samples of training rollouts reach the run directory and the trackers, and change no number."""

import json
from contextlib import contextmanager
from dataclasses import replace

import pytest
from helpers import dance_grpo, tiny_codec

from unified_trainer.data.video_files import to_uint8
from unified_trainer.methods.dance_grpo import DanceGRPO, DanceGRPOConfig
from unified_trainer.methods.finetune import Finetune
from unified_trainer.run.settings.config import ConfigError, RunConfig, TrackingConfig, ValidationConfig
from unified_trainer.run.tracking import shown as shown_steps
from unified_trainer.run.tracking.external import ExternalTracker
from unified_trainer.run.tracking.shown import check_rollouts, show_steps
from unified_trainer.run.tracking.tracker import Tracker

GROUPS = DanceGRPOConfig(num_prompts=2, num_samples=2, prompts_per_update=1, rollout_batch=3, update_batch=1)
RUN = RunConfig(tracking=TrackingConfig(rollouts_every=2), validation=ValidationConfig(num_videos=4))


class Noted(ExternalTracker):
    """Notes its calls in `calls`."""

    def __init__(self) -> None:
        self.calls = []

    def log(self, step, metrics):
        self.calls.append((step, "metrics"))

    def log_rollouts(self, step, samples, contact_sheet):
        self.calls.append((step, [sample.row() for sample in samples], contact_sheet.is_file()))


@contextmanager
def tracked(folder, active=True):
    """Yield the tracker of a run, and what notes its calls."""
    with Tracker(folder, TrackingConfig(), {}, 5, 0, active) as tracker:
        noted = Noted()
        tracker._trackers.append(noted)
        yield tracker, noted


def of_steps(trainer) -> list[dict]:
    return [trainer.step(step) for step in range(3)]


@pytest.mark.slow
def test_they_are_those_that_training_learns_from_and_nothing_else_changes(tmp_path, monkeypatch):
    """Their rewards have the mean of the step's metric, their frames are those of its x0; all steps stay the same."""
    written = {}
    whole = shown_steps.write_samples
    monkeypatch.setattr(
        shown_steps,
        "write_samples",
        lambda folder, clips, *rest: written.update({folder: clips}) or whole(folder, clips, *rest),
    )
    expected, trainer = of_steps(dance_grpo(GROUPS)), dance_grpo(GROUPS)
    source, made = trainer.method.rollouts, []
    samples = source.samples
    monkeypatch.setattr(source, "samples", lambda *words: made.append(samples(*words)) or made[-1])
    with tracked(tmp_path) as (tracker, noted):
        show_steps(trainer.method, tiny_codec(), trainer.method.reward, RUN, tmp_path, tracker)
        metrics = of_steps(trainer)
    assert metrics == expected

    [(step, rows, sheet)] = noted.calls
    folder = tmp_path / "rollouts" / "step_2"
    assert step == 2 and sheet and [file.name for file in (tmp_path / "rollouts").iterdir()] == ["step_2"]
    assert [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()] == rows
    assert all((folder / row["video"]).is_file() for row in rows) and len(rows) == 4
    assert [row["prompt"] for row in rows] == list(made[1].batch.prompts)
    assert sum(row["reward"] for row in rows) / 4 == pytest.approx(metrics[1]["reward"], rel=1e-6)
    frames = to_uint8(tiny_codec().decode(made[1].rollout.end(range(4))))
    shown = written[folder]
    assert all(abs(a.astype(int) - b).max() <= 1 for a, b in zip(shown, frames, strict=True))  # rounding of a batch


def test_only_the_main_rank_shows_them_and_only_where_they_are_asked_for(tmp_path):
    trainer = dance_grpo(GROUPS)
    source, off = trainer.method.rollouts, replace(RUN, tracking=TrackingConfig())
    for run, active in ((RUN, False), (off, True)):
        with tracked(tmp_path, active) as (tracker, _):
            show_steps(trainer.method, tiny_codec(), trainer.method.reward, run, tmp_path, tracker)
        assert trainer.method.rollouts is source


@pytest.mark.slow
def test_a_full_disk_ends_nothing(tmp_path, capsys):
    (tmp_path / "rollouts").write_text("a file is in the way")
    trainer = dance_grpo(GROUPS)
    with tracked(tmp_path) as (tracker, noted):
        show_steps(trainer.method, tiny_codec(), trainer.method.reward, RUN, tmp_path, tracker)
        of_steps(trainer)
    assert "cannot be written" in capsys.readouterr().out and not noted.calls


def test_a_method_without_rollouts_and_a_run_that_would_show_none_are_refused():
    check_rollouts(RUN, DanceGRPO)
    check_rollouts(RunConfig(), Finetune)
    with pytest.raises(
        ConfigError, match=r"tracking\.rollouts_every 2: .* makes no rollouts and matches no teacher; set it to 0"
    ):
        check_rollouts(RUN, Finetune)
    with pytest.raises(ConfigError, match=r"validation\.num_videos"):
        check_rollouts(replace(RUN, validation=ValidationConfig(num_videos=0)), DanceGRPO)
