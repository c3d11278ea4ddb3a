"""SwanLab: what a run logs there, how it continues, and what is refused; a stand-in takes the package's arguments."""

import json
import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest
from helpers import ALONE

from unified_trainer.basics.errors import UserError
from unified_trainer.run.settings.config import TrackingConfig
from unified_trainer.run.tracking.external import RunInfo, SwanLab, check_tracking
from unified_trainer.run.tracking.tracker import Tracker
from unified_trainer.run.validation.report import ValidationSample

SAMPLE = ValidationSample(0, 7, "a red fox", 1.5, {"mean": 1.5}, {}, None)


class AuthenticationError(Exception):
    """As swanlab.exceptions has it."""


class Experiment:
    """What swanlab.init returns; notes the calls in `calls`."""

    id, url = "fox1", "https://swanlab.cn/@den/fox1"

    def __init__(self, calls) -> None:
        self.calls = calls

    def log(self, data, step=None):
        self.calls.append(("log", data, step))

    def finish(self, state="success", error=None, async_log_timeout=None):
        self.calls.append(("finish", state, error))


@pytest.fixture
def swanlab(monkeypatch):
    """A module with the arguments that a run gives to swanlab 0.10.3; `calls` are those made, `key` the login."""
    module = ModuleType("swanlab")
    module.calls, module.key, module.fault = [], "a key", None
    module.exceptions = SimpleNamespace(AuthenticationError=AuthenticationError)

    def login(api_key=None, relogin=False, host=None, save=False, timeout=10):
        if module.key is None:
            raise AuthenticationError("No API key provided")
        return True

    def init(*, log_dir=None, mode=None, workspace=None, project=None, name=None, id=None, resume=None, config=None):
        if module.fault is not None:
            raise module.fault
        module.calls.append(("init", mode, workspace, project, name, id, resume, config, log_dir))
        return Experiment(module.calls)

    module.login, module.init = login, init
    module.Text = lambda content, caption=None: ("text", content)
    module.Image = lambda data_or_path, mode=None, caption=None, file_type=None, size=None: ("image", data_or_path)
    monkeypatch.setitem(sys.modules, "swanlab", module)
    return module


def test_a_run_and_its_continuation_are_one_experiment(swanlab, tmp_path):
    config, settings = TrackingConfig(swanlab="online", swanlab_workspace="den"), {"seed": 0}
    check_tracking(config, ALONE)
    for start in (0, 1):
        with Tracker(tmp_path, config, settings, 2, start, True) as tracker:
            tracker.log(start + 1, {"train/loss": 0.5})
    log_dir, first = str(tmp_path / "swanlab"), ("init", "online", "den", "unified-trainer", tmp_path.name)
    assert swanlab.calls == [
        (*first, None, None, settings, log_dir),
        ("log", {"train/loss": 0.5}, 1),
        ("finish", "success", None),
        (*first, "fox1", "allow", settings, log_dir),
        ("log", {"train/loss": 0.5}, 2),
        ("finish", "success", None),
    ]
    assert json.loads((tmp_path / "swanlab.json").read_text()) == {"id": "fox1", "url": Experiment.url}


def test_samples_and_pictures_of_validations_and_rollouts(swanlab, tmp_path):
    tracker = SwanLab(RunInfo(tmp_path, {}, TrackingConfig(swanlab="offline"), 0))
    tracker.log_samples(4, [SAMPLE], None)
    tracker.log_rollouts(5, [SAMPLE, SAMPLE], tmp_path / "sheet.png")
    tracker.log_rollouts(6, [replace(SAMPLE, shows="g")], tmp_path / "sheet.png")
    row, compared = (json.dumps(sample.row()) for sample in (SAMPLE, replace(SAMPLE, shows="g")))
    assert swanlab.calls[1:] == [
        ("log", {"validation/samples": ("text", row)}, 4),
        (
            "log",
            {
                "rollouts/samples": ("text", f"{row}\n{row}"),
                "rollouts/contact_sheet": ("image", str(tmp_path / "sheet.png")),
            },
            5,
        ),
        (
            "log",
            {"matching/samples": ("text", compared), "matching/contact_sheet": ("image", str(tmp_path / "sheet.png"))},
            6,
        ),
    ]
    assert not (tmp_path / "swanlab.json").exists()


def test_an_experiment_of_a_run_that_failed_is_crashed(swanlab, tmp_path):
    with pytest.raises(ZeroDivisionError), Tracker(tmp_path, TrackingConfig(swanlab="offline"), {}, 2, 0, True):
        raise ZeroDivisionError
    assert swanlab.calls[-1] == ("finish", "crashed", "an exception ended the run")


def test_what_cannot_start_is_refused_with_the_way_out(swanlab, tmp_path, monkeypatch):
    online = TrackingConfig(swanlab="online")
    swanlab.key = None
    with pytest.raises(UserError, match=r"--tracking\.swanlab online: No API key provided\nRun `swanlab login`"):
        check_tracking(online, ALONE)
    check_tracking(TrackingConfig(swanlab="offline"), ALONE)
    swanlab.fault = RuntimeError("no connection")
    with pytest.raises(UserError, match=r"--tracking\.swanlab online: no connection"):
        SwanLab(RunInfo(tmp_path, {}, online, 0))
    monkeypatch.setitem(sys.modules, "swanlab", None)
    with pytest.raises(UserError, match=r"--tracking\.swanlab needs the package swanlab: pip install"):
        check_tracking(online, ALONE)
