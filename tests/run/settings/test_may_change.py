"""Which settings --resume may change: those whose field, or a section above it, is marked."""

from dataclasses import dataclass, field
from typing import Annotated

import pytest

from unified_trainer.basics.ranges import MAY_CHANGE, Count
from unified_trainer.run.settings.command_line import parse
from unified_trainer.run.settings.settings import may_change, settings_of


@dataclass(frozen=True)
class Section:
    marked: Annotated[Count, MAY_CHANGE] = 1
    other: Count = 1


@dataclass(frozen=True)
class Tree:
    section: Section = field(default_factory=Section)
    whole: Annotated[Section, MAY_CHANGE] = field(default_factory=Section)
    entries: dict[str, Section] = field(default_factory=lambda: {"name": Section()})


def test_a_marked_field_or_a_field_of_a_marked_section_may_change():
    keys = [setting.key for setting in settings_of(Tree())]
    marked = ["section.marked", "whole.marked", "whole.other", "entries.name.marked"]
    assert [key for key in keys if may_change(Tree(), key)] == marked and len(keys) == 6
    assert not may_change(Tree(), "absent") and not may_change(Tree(), "entries.absent.marked")
    assert may_change(Tree(), "whole.absent")  # as an older version wrote it


def test_a_mark_changes_neither_type_nor_range():
    (marked, other) = settings_of(Section())
    assert (marked.kind, marked.limits) == (other.kind, other.limits)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("key", "may"),
    [
        ("steps", True),
        ("keep_last", True),
        ("validation.seed", True),
        ("parallel.shard", True),
        ("reward.timeout", True),
        ("encoders.offload", True),
        ("rollouts.workers", True),
        ("algorithm.update_batch", True),
        ("seed", False),
        ("method", False),
        ("reward.scorers.mean.weight", False),
        ("encoders.text_precision", False),
        ("rollouts.ahead", False),
        ("student.learning_rate", False),
        ("algorithm.eta", False),
    ],
)
def test_settings_that_change_no_step_may_change(key, may):
    run = parse(["--method", "dance_grpo", "--reward.scorers.mean.weight", "2"])
    assert may_change(run, key) == may and key in {setting.key for setting in settings_of(run)}
