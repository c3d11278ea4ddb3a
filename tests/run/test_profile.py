"""--profile: one step is traced, and no number changes."""

import json

import pytest
from helpers import SMALL, metrics_of

from unified_trainer.__main__ import main


@pytest.mark.slow
def test_a_step_is_traced_and_changes_no_number(tmp_path):
    words = [*SMALL["finetune"], "--steps", "3", "--validate-every", "0"]
    for name, more in (("plain", []), ("traced", ["--profile"]), ("last", ["--profile", "--profile-step", "9"])):
        assert main([*words, "--output", str(tmp_path / name), *more]) == 0
    assert metrics_of(tmp_path / "traced") == metrics_of(tmp_path / "plain")
    assert not (tmp_path / "plain" / "profile").exists()
    for name, step in (("traced", 2), ("last", 3)):
        (file,) = (tmp_path / name / "profile").iterdir()
        assert file.name == f"step_{step}_rank_0.json"
        named = {event.get("name") for event in json.loads(file.read_text())["traceEvents"]}
        assert {"aten::addmm", "aten::mm"} & named  # the step's own operations
