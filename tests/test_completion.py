"""Completion in a shell: commands, flags and named values, each where it may stand."""

import subprocess

import pytest

from unified_trainer.__main__ import main

ASK = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=()
$(complete -p unified-trainer | sed "s/.*-F \\([^ ]*\\).*/\\1/")
printf "%s\\n" "${COMPREPLY[@]}"
"""


@pytest.mark.slow
def test_a_shell_completes_commands_flags_and_values(tmp_path, capsys):
    with pytest.raises(SystemExit):  # of tyro
        main(["--tyro-print-completion", "bash"])
    script = tmp_path / "complete.bash"
    script.write_text(capsys.readouterr().out)
    cases = [(["pla"], "plan"), (["--method", "dm"], "dmd2"), (["--student.compi"], "--student.compile")]
    cases += [(["plan", "--hardw"], "--hardware"), (["plan", "--validation.no"], "--validation.no-ema")]
    cases += [(["--steps", "3", "--recipe", "tiny-"], "tiny-base"), (["sample", "--student.compi"], "")]
    for words, wanted in cases:
        ask = ["bash", "-c", ASK, "bash", str(script), "unified-trainer", *words]
        assert subprocess.run(ask, capture_output=True, text=True, check=False).stdout.strip() == wanted, words
