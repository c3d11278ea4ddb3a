"""Trackers: metrics, videos and prompts reach TensorBoard, Weights & Biases and a tracker of the user's own."""

import json
import shutil
import sys

import pytest
from forked import program
from helpers import ALONE, REPO, SMALL, environment
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb_file import history

from unified_trainer.__main__ import main
from unified_trainer.basics.errors import UserError
from unified_trainer.run.settings.config import TrackingConfig
from unified_trainer.run.tracking.external import check_tracking

sys.path.insert(0, str(REPO / "scripts"))
from make_golden_runs import RUNS

# A user's file: one JSON line for each call.
NOTES = """
import json

from unified_trainer.run.tracking.external import ExternalTracker


class Notes(ExternalTracker):
    def __init__(self, run):
        self.file = run.folder / "notes.jsonl"
        self.note(call="start", start=run.start, method=run.settings["method"])

    def note(self, **row):
        with self.file.open("a") as opened:
            opened.write(json.dumps(row) + "\\n")

    def log(self, step, metrics):
        self.note(call="log", step=step, names=sorted(metrics))

    def log_samples(self, step, samples, contact_sheet):
        videos = [sample.video is not None and sample.video.is_file() for sample in samples]
        prompts = [sample.prompt for sample in samples]
        self.note(call="samples", step=step, prompts=prompts, videos=videos, sheet=contact_sheet.is_file())

    def close(self, *, failed):
        self.note(call="close", failed=failed)


class Silent(Notes):
    log = ExternalTracker.log


number = 1
"""
WATCHED = ["--validate-every", "1", "--validation.num-videos", "1"]


@pytest.fixture
def notes(tmp_path):
    file = tmp_path / "notes.py"
    file.write_text(NOTES)
    return f"{file}:Notes"


def noted(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "notes.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_all_trackers_follow_a_run_and_its_continuation(run_folder, notes, tmp_path):
    """In processes of their own: trackers bring threads and warnings that are not ours."""
    tracking = {"tensorboard": True, "wandb": "offline", "wandb_tags": ["fox"], "wandb_group": "den", "custom": [notes]}
    tracking["rollouts_every"] = 1
    (tmp_path / "config.yaml").write_text(json.dumps({"tracking": tracking}))
    first = [
        "--trust",
        "--config",
        str(tmp_path / "config.yaml"),
        *SMALL["dance_grpo"],
        "--output",
        str(run_folder),
        *WATCHED,
    ]
    for words in (first, ["--resume", str(run_folder), "--steps", "2"]):
        done = program("-m", "unified_trainer", *words)
        assert done.returncode == 0, done.stderr
    rows = noted(run_folder)
    assert [(row["call"], row.get("step")) for row in rows] == [
        *[("start", None), ("log", 0), ("samples", 0), ("log", 1), ("log", 1), ("samples", 1), ("close", None)],
        *[("start", None), ("log", 2), ("log", 2), ("samples", 2), ("close", None)],
    ]
    assert [row["start"] for row in rows if row["call"] == "start"] == [0, 1] and rows[0]["method"] == "dance_grpo"
    samples = next(row for row in rows if row["call"] == "samples")
    assert samples["videos"] == [True, True] and samples["sheet"] and all(samples["prompts"])
    assert "train/seconds/rollout" in rows[3]["names"] and "validation/reward" in rows[1]["names"]

    events = b"".join(file.read_bytes() for file in sorted((run_folder / "tensorboard").iterdir()))
    shown = [f"{group}/{what}" for group in ("validation", "rollouts") for what in ("contact_sheet", "samples")]
    for name in ("train/reward", *shown, samples["prompts"][1]):
        assert name.encode() in events

    identity = json.loads((run_folder / "wandb.json").read_text())["id"]
    folders = sorted((run_folder / "wandb").glob("offline-run-*"))
    assert len(folders) == 1 and all(folder.name.endswith(f"-{identity}") for folder in folders)
    written = [(row["_step"], row["step"], "train/reward" in row) for row in history(run_folder)]
    assert written == [(0, 0, False), (1, 1, True), (2, 1, False), (3, 2, True), (4, 2, False)]
    for folder in folders:
        log = next(folder.glob("*.wandb")).read_bytes()
        assert b"validation/contact_sheet" in log and b"rollouts/videos" in log and b"den" in log and b"fox" in log
        assert b"\x12\x01*\x22\x04step" in log  # define_metric: the glob * has the x axis step
        media = [file.suffix for file in (folder / "files" / "media").rglob("*") if file.is_file()]
        assert {".mp4", ".png", ".json"} <= set(media)


# A start of a run that logs some steps: folder, steps done before, steps to log, and whether it is killed then.
STEPS = """
import os, signal, sys
from pathlib import Path

from unified_trainer.run.settings.config import TrackingConfig
from unified_trainer.run.tracking.tracker import Tracker

folder, start, last, killed = sys.argv[1:]
config = TrackingConfig(wandb="offline", tensorboard=True)
with Tracker(Path(folder), config, {}, 9, int(start), True) as tracker:
    for step in range(int(start) + 1, int(last) + 1):
        tracker.log(step, {"train/a": float(start)})
    if killed == "yes":
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_a_killed_run_that_goes_back_has_each_step_once(tmp_path):
    """Killed at step 5, it goes on from step 2: one folder of one id, and the values of the second start."""
    (tmp_path / "steps.py").write_text(STEPS)
    for words in ((0, 5, "yes"), (2, 6, "no")):
        program(tmp_path / "steps.py", tmp_path, *words)
    expected = [(step, 0.0 if step < 3 else 2.0) for step in range(1, 7)]
    rows = history(tmp_path)
    assert [(row["step"], row["train/a"]) for row in rows] == expected
    assert [row["_step"] for row in rows] == [*range(6)]
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    assert [(event.step, event.value) for event in board.Scalars("train/a")] == expected


@pytest.mark.slow
def test_trackers_get_what_a_distillation_compares(run_folder):
    words = [*RUNS["dmd2"].split(), "--steps", "1", "--tracking.rollouts-every", "1", "--output", str(run_folder)]
    done = program("-m", "unified_trainer", *words, "--tracking.tensorboard", "--tracking.wandb", "offline")
    assert done.returncode == 0, done.stderr
    events = b"".join(file.read_bytes() for file in (run_folder / "tensorboard").iterdir())
    assert b"matching/contact_sheet" in events and b"x_tau, tau" in events
    [log] = (run_folder / "wandb").glob("offline-run-*/*.wandb")
    assert b"matching/videos" in log.read_bytes() and b"matching/contact_sheet" in log.read_bytes()
    media = [file for file in log.parent.rglob("*.mp4") if "matching" in str(file)]
    assert len(media) == 5


# What cannot start is refused before any weight is read.


@pytest.mark.parametrize("package", ["wandb", "tensorboard"])
def test_a_missing_package_is_named(monkeypatch, package):
    monkeypatch.setitem(sys.modules, {"tensorboard": "torch.utils.tensorboard"}.get(package, package), None)
    config = TrackingConfig(tensorboard=package == "tensorboard", wandb="offline" if package == "wandb" else "off")
    with pytest.raises(UserError, match=rf"--tracking.{package} needs the package {package}: pip install"):
        check_tracking(config, ALONE)


@pytest.mark.slow
def test_wandb_without_a_login_is_refused_before_weights_are_read(run_folder, tmp_path, monkeypatch):
    """The student has configs and no weights: reading them would be the other error."""
    from helpers import WAN

    folder = tmp_path / "wan"
    shutil.copytree(WAN, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    for name in [name for name in environment() if name.startswith("WANDB_")]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    paths = ["--student.path", str(folder), "--output", str(run_folder)]
    done = program("-m", "unified_trainer", *SMALL["dance_grpo"], *paths, "--tracking.wandb", "online")
    assert done.returncode == 2 and "--tracking.wandb online: not logged in. Run `wandb login`" in done.stderr
    assert not run_folder.exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("absent.py:Notes", "--tracking.custom absent.py: no such file"),
        ("NOTES:Nothing", "defines no Nothing"),
        ("NOTES:number", "must be a class derived from unified_trainer.run.tracking.external.ExternalTracker"),
        ("notes.py", "must be package.module:NAME or path/to/file.py:NAME"),
    ],
)
def test_a_tracker_that_is_none_is_refused(notes, run_folder, capsys, name, message):
    words = ["--tracking.custom", name.replace("NOTES", notes.rpartition(":")[0]), "--output", str(run_folder)]
    assert main([*SMALL["dance_grpo"], *words]) == 2
    assert message in capsys.readouterr().err and not run_folder.exists()


@pytest.mark.slow
def test_a_tracker_that_fails_is_named_and_closed(notes, run_folder):
    words = ["--tracking.custom", notes.replace("Notes", "Silent"), "--output", str(run_folder)]
    with pytest.raises(NotImplementedError) as error:
        main([*SMALL["finetune"], *words])
    assert "while working on tracker Silent" in error.value.__notes__
    assert noted(run_folder)[-1] == {"call": "close", "failed": True}
