"""A training run writes its own report when it is asked to."""

import pytest
from helpers import SMALL

import unified_trainer as ut
from unified_trainer.__main__ import main
from unified_trainer.run.settings.command_line import parse

pytestmark = pytest.mark.slow
SHORT = [*SMALL["finetune"], "--report", "--validate-every", "1", "--validation.num-videos", "1"]


def test_a_run_ends_with_its_report(run_folder):
    assert main([*SHORT, "--output", str(run_folder)]) == 0
    page = (run_folder / "report.html").read_text(encoding="utf-8")
    assert '<span class="state finished">' in page and "data:video/mp4;base64," in page and "student/grad_norm" in page


def test_a_report_that_cannot_be_written_is_a_warning(run_folder, capsys):
    run_folder.mkdir()
    (run_folder / "report.html").write_text("mine")
    assert main([*SHORT, "--validate-every", "0", "--output", str(run_folder)]) == 0
    assert "warning: no report: --out" in capsys.readouterr().out
    assert (run_folder / "report.html").read_text() == "mine"


def test_a_run_from_python_ends_with_its_report(run_folder):
    assert ut.train(parse([*SHORT, "--validate-every", "0", "--output", str(run_folder)])) == 0
    assert '<span class="state finished">' in (run_folder / "report.html").read_text(encoding="utf-8")
