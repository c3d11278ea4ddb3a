"""docs/hardware.md holds what `plan` says: every recipe and card is there, and one row is computed again."""

import sys

import pytest
from helpers import REPO

sys.path.insert(0, str(REPO / "scripts"))
import write_hardware_page as page

TEXT = page.PAGE.read_text(encoding="utf-8")


def test_the_page_has_every_recipe_method_and_card():
    assert TEXT.startswith(page.HEAD)
    for recipe in (*page.CAUSAL, *page.OTHERS):
        section = TEXT.partition(f"## {recipe}\n")[2].partition("\n## ")[0]
        assert [f"| `{method}` |" in section for method in page.METHODS] == [
            method in page.methods(recipe) for method in page.METHODS
        ]
        assert all(f"8 x {name}" in section for name in page.CARDS)


@pytest.mark.slow
def test_a_row_is_what_plan_says_now():
    """If this fails, run scripts/write_hardware_page.py."""
    found = page.planned("wan2.1-1.3b", "dmd2", 8)
    cells = " | ".join(page.cell(found, name) for name in page.CARDS)
    assert f"| `dmd2` | 81 x 480 x 832 | {cells} |" in TEXT
