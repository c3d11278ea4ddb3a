"""The digest of the code that a run computes with: of the package and of the user's own files, none of which is run."""

import sys

import pytest

from unified_trainer.basics.errors import UserError
from unified_trainer.run.settings import code
from unified_trainer.run.settings.code import check_code_of_workers, code_of
from unified_trainer.run.settings.config import RunConfig, TrackingConfig

PACKAGE = "the code of unified_trainer"


def test_a_byte_of_any_module_changes_the_digest(tmp_path, monkeypatch):
    (tmp_path / "inner").mkdir()
    for name in ("a.py", "inner/b.py"):
        (tmp_path / name).write_text("x = 1\n")
    monkeypatch.setattr(code, "PACKAGE", tmp_path)
    before = code_of(RunConfig())
    assert before == code_of(RunConfig()) and before[PACKAGE].startswith("2 files (sha256 ")
    (tmp_path / "inner" / "notes.txt").write_text("no code")
    assert code_of(RunConfig()) == before
    (tmp_path / "inner" / "b.py").write_text("x = 2\n")
    assert code_of(RunConfig()) != before


def test_own_files_and_modules_are_read_and_not_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "mine.py").write_text("raise SystemExit\n")
    (tmp_path / "other_package").mkdir()
    for name in ("__init__", "trackers"):
        (tmp_path / "other_package" / f"{name}.py").write_text("raise SystemExit\n")
    custom = ("mine.py:One", "other_package.trackers:Two", "other_package:Three", "absent:Four", "gone.py:Five")
    found = code_of(RunConfig(tracking=TrackingConfig(custom=custom)))
    assert found.keys() == {PACKAGE} | {f"the code of tracking.custom {spec}" for spec in custom[:3]}
    assert "other_package" not in sys.modules
    (tmp_path / "other_package" / "trackers.py").write_text("raise SystemExit  # changed\n")
    again = code_of(RunConfig(tracking=TrackingConfig(custom=custom)))
    changed = {f"the code of tracking.custom {spec}" for spec in custom[1:3]}  # a package counts whole
    assert {key for key in found if again[key] != found[key]} == changed


def test_a_worker_with_other_code_is_named():
    own = {PACKAGE: "9 files (sha256 a)", "the code of method m.py:M": "1 files (sha256 b)"}
    check_code_of_workers(own, {"rollout worker 0 (node 1)": dict(own)})
    workers = {"rollout worker 0 (node 1)": own, "reward worker 1 (node 2)": own | {PACKAGE: "9 files (sha256 c)"}}
    with pytest.raises(
        UserError, match=r"^reward worker 1 \(node 2\) has other code than training: the code of unified"
    ):
        check_code_of_workers(own, workers)
