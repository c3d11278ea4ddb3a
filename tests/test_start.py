"""The start of the program: which packages it imports before it needs them, and Ctrl-C meanwhile."""

import json
import os
import signal
import subprocess
import sys

import pytest
from helpers import REPO

from unified_trainer.__main__ import COMMANDS, command_named
from unified_trainer.rewards.scorers import MODULES
from unified_trainer.run.registry import METHODS, method_named
from unified_trainer.tools import help_pages, overview

HEAVY = ("accelerate", "av", "diffusers", "peft", "plotly", "pyarrow", "ray", "transformers")
LOADED = """
import json, sys
from unified_trainer.__main__ import main
code = main(sys.argv[1:]) if sys.argv[1:] else None
print(json.dumps([code, sorted(sys.modules)]))
"""
# Ctrl-C while a package is imported: the first import of it sends the signal.
INTERRUPTED_IMPORT = """
import os, runpy, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # also where the tests were started with Ctrl-C ignored
class Finder:
    def find_spec(name, path, target=None):
        if name == PACKAGE:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder)
runpy.run_module("unified_trainer", run_name="__main__", alter_sys=True)
"""


def python(code: str, *words: str) -> "subprocess.CompletedProcess[str]":
    environment = os.environ | {"PYTHONPATH": str(REPO)}
    return subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, env=environment)


@pytest.mark.parametrize(
    ("words", "code"), [((), None), (("--help",), 0), (("--version",), 0), (("exprt",), 2), (("finetune",), 2)]
)
def test_the_program_starts_without_torch(words, code):
    ended, loaded = json.loads(python(LOADED, *words).stdout.splitlines()[-1])
    assert ended == code
    assert [name for name in (*HEAVY, "torch", "numpy") if name in loaded] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ("--method", "dance_grpo", "--no-such-flag", "1"),
        ("--method", "dmd2", "--help"),
        ("runs", "--no-such-flag"),
    ],
)
def test_settings_need_torch_alone(words):
    """Neither the packages of models nor torch's sharding, which takes half a second."""
    ended, loaded = json.loads(python(LOADED, *words).stdout.splitlines()[-1])
    assert ended == (0 if "--help" in words else 2)
    allowed = {"av", "pyarrow"} if words[0] == "runs" else set()  # it reads what a run has written
    assert [name for name in {*HEAVY, "torch.distributed.tensor"} - allowed if name in loaded] == []


@pytest.mark.slow
@pytest.mark.parametrize("command", ["plan", "train"])
def test_a_start_imports_the_scorer_that_the_recipe_names_alone(command, tmp_path):
    """Besides that of `ocr`, whose time `plan` has, and of pixels, which all validations measure."""
    words = ["--method", "dmd2", "--recipe", "tiny", "--student.path", "tiny", "--validate-every", "0"]
    words += [] if command == "plan" else ["--steps", "1", "--output", str(tmp_path / "run")]
    ended, loaded = json.loads(python(LOADED, *[command][command == "train" :], *words).stdout.splitlines()[-1])
    unread = {f"unified_trainer.rewards.{module}" for module in {*MODULES.values()} - {"pixels", "ocr", "hpsv3"}}
    unread |= {"transformers.models.vit.modeling_vit", "plotly", "ray", "starlette", "torchao"}
    unread |= {"diffusers.pipelines.wan"} if command == "plan" else set()
    assert ended == 0 and not unread & {*loaded}


@pytest.mark.parametrize(
    ("package", "ended"),
    [
        ("rich", (-signal.SIGINT, "", "")),
        ("torch", (-signal.SIGINT, "", "")),
        pytest.param("transformers", (130, "", "stopped\n"), marks=pytest.mark.slow),  # imported by its first user
    ],
)
def test_ctrl_c_during_the_imports_ends_the_program_without_a_traceback(package, ended, tmp_path):
    words = ("--method", "finetune", "--data.path", "tiny", "--output", str(tmp_path / "run"))
    done = python(f"PACKAGE = {package!r}\n{INTERRUPTED_IMPORT}", *words)
    assert (done.returncode, done.stdout, done.stderr) == ended


@pytest.mark.parametrize("name", METHODS)
def test_the_overview_says_of_a_method_what_its_own_page_says(name):
    assert overview.summary(METHODS[name]) == help_pages.summary(method_named(name))


@pytest.mark.parametrize("name", COMMANDS)
def test_the_overview_says_of_a_command_what_its_own_page_says(name):
    assert overview.summary(COMMANDS[name]) == help_pages.summary(command_named(name))
