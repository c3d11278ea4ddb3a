"""The names of other trainers in docs/running.md: every flag of ours beside them exists and takes a value."""

import re

import pytest
from helpers import REPO, flags

from unified_trainer.methods import METHODS
from unified_trainer.run.registry import method_named
from unified_trainer.run.settings.command_line import parse
from unified_trainer.run.settings.config import flat, plain, run_class
from unified_trainer.run.settings.flags import choices
from unified_trainer.run.settings.settings import settings_of

pytestmark = pytest.mark.slow  # seconds together

PAGE = (REPO / "docs" / "running.md").read_text(encoding="utf-8")
SECTION = PAGE.split("### Names of other trainers")[1].split("\n## ")[0]
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")] for line in SECTION.splitlines() if line.startswith("| `")
]


def methods_with(key: str) -> list[str]:
    """The methods that have a setting."""
    return [name for name in METHODS if key in {s.key for s in settings_of(run_class(method_named(name))())}]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0].replace("`", "")[:40])
def test_each_flag_of_the_table_is_parsed_and_changes_its_setting(row):
    named = re.findall(r"--([\w.-]+)(?: (-?\w+))?", row[1])
    assert named, row
    for flag, value in named:
        if flag in ("resume", "init-from"):  # they need a run: tests/run/test_length.py continues some
            continue
        flag = flag.replace("NAME", "mine")
        key, off = flag.replace("-", "_"), ""
        if key.rpartition(".")[2].startswith("no_"):
            key, off = key.replace("no_", ""), "no"
        if key.startswith("validation.sets."):
            method, given = "dance_grpo", {flag: "tiny"}
        else:
            method = methods_with(key)[0]
            given = {flag: True} if off else {flag: _value(method, key, value)}
        run = parse(["--method", method, *flags(given)])
        before = flat(plain(parse(["--method", method]))).get(key)
        after = flat(plain(run))[key]
        assert after != before or str(after) == value, flag


def _value(method: str, key: str, given: str) -> object:
    """The value that the page gives, or one of the setting's type that is not its own."""
    setting = {s.key: s for s in settings_of(parse(["--method", method]))}[key]
    if given and given != "N":
        return given
    if setting.switch:
        return True
    if named := choices(setting.kind):
        return next(choice for choice in named if choice != setting.default)
    if setting.kind in (int, float):
        return 0.5 if "ratio" in key else setting.default + 1
    return "prompts.txt"
