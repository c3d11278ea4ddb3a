"""What a run with compiled blocks says of them."""

import pytest
import torch
from helpers import SMALL

from unified_trainer.__main__ import main


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["True", "auto"])
def test_the_table_names_roles_that_compile_and_a_line_has_the_time_of_the_first_step(
    setting, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(torch, "compile", lambda block, **_: block)
    monkeypatch.setenv("CXX", "sh")  # a compiler that is on the PATH
    monkeypatch.setenv("COLUMNS", "200")
    words = ["--steps", "2", "--validate-every", "0", "--student.compile", setting, "--output", str(tmp_path / "run")]
    assert main([*SMALL["finetune"], *words]) == 0
    said = capsys.readouterr().out
    assert said.count("blocks compiled") == said.count("with the compilation of blocks") == (setting == "True")
    assert ("step 1 took" in said) == (setting == "True") and "step 2 took" not in said
