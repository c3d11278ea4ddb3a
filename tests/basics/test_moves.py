"""Code of a user's own that imports a module from where it lay before is told where it is now, in one line."""

import importlib
import subprocess
from importlib.util import find_spec

import pytest
from helpers import REPO, refused

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.moves import moves, naming_moves
from unified_trainer.basics.plugins import load_object

METHOD = """\
from unified_trainer.methods.finetune import Finetune
class Mine(Finetune):
    pass
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Write a file of the user's own into the present folder, and return what loading it from there gives."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))

    def load(source: str) -> object:
        (tmp_path / "mine.py").write_text(source + METHOD)
        return load_object(f"{tmp_path}/mine.py:Mine", "--method")

    return load


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "from unified_trainer.rl.policy import PolicyConfig\n",
            "mine.py imports unified_trainer.rl.policy, which is unified_trainer.methods.rl.policy now",
        ),
        (
            "from unified_trainer.rl import (\n    policy,\n)\n",
            "mine.py imports unified_trainer.rl.policy, which is unified_trainer.methods.rl.policy now",
        ),
        ("import unified_trainer.rl\n", "mine.py imports unified_trainer.rl, which is unified_trainer.methods.rl now"),
        (
            "import unified_trainer.config as settings\n",
            "mine.py imports unified_trainer.config, which is unified_trainer.run.settings.config now",
        ),
        (
            "from unified_trainer import Method, ranges\n",
            "mine.py imports unified_trainer.ranges, which is unified_trainer.basics.ranges now",
        ),
        (
            "from unified_trainer.sampling import SamplerConfig\n",
            "mine.py imports SamplerConfig of unified_trainer.sampling, "
            "which is in unified_trainer.sampling.solver now",
        ),
        (
            "from unified_trainer.rl.term_ledger import TermLedger\n",
            "mine.py imports unified_trainer.rl.term_ledger, which is gone: distill_rl adds its terms with the weights "
            "of its settings",
        ),
        (
            "from unified_trainer.ranges import NonNegative\nfrom unified_trainer.types import Batch\n"
            "from unified_trainer.ranges import Count\n",
            "mine.py imports unified_trainer.ranges, which is unified_trainer.basics.ranges now; and "
            "unified_trainer.types, which is unified_trainer.basics.types now",
        ),
    ],
)
def test_one_line_says_where_it_is(own, source, message):
    with pytest.raises(UserError) as error:
        own(source)
    assert str(error.value) == message


def test_the_file_that_a_file_imports_is_named(own, tmp_path):
    (tmp_path / "helper_of_mine.py").write_text("from unified_trainer.plugins import load_object\n")
    with pytest.raises(UserError, match=r"^helper_of_mine\.py imports unified_trainer\.plugins, which is"):
        own("import helper_of_mine\n")


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("import unified_trainer.rl_policy\n", "unified_trainer.rl_policy"),
        ("import unified_trainer.ranges_of_mine\nif 0:\n    import unified_trainer.ranges\n", "ranges_of_mine"),
        ("import absent_package\nfrom unified_trainer.rl import policy\n", "absent_package"),
        ("from unified_trainer.methods.base import Absent\n", "Absent"),
    ],
)
def test_what_has_not_moved_keeps_its_traceback(own, source, name):
    with pytest.raises(ImportError, match=name) as error:
        own(source)
    assert not isinstance(error.value, UserError)


def test_a_file_may_know_both_places(own):
    assert own("try:\n    from unified_trainer.ranges import Count\nexcept ImportError:\n    Count = int\n")


def test_the_program_ends_with_this_line(own, tmp_path, capsys):
    (tmp_path / "mine.py").write_text("from unified_trainer.rl.policy import PolicyConfig\n" + METHOD)
    said = refused(capsys, "--method", "mine.py:Mine", "--output", tmp_path / "run")
    expected = "mine.py imports unified_trainer.rl.policy, which is unified_trainer.methods.rl.policy now"
    assert " ".join(said.split()) == f"error: {expected}"
    for flags in (
        ("--method", "finetune", "--families", "mine.py:Mine"),
        ("--method", "dance_grpo", "--reward.kind", "mine.py:Mine"),
        ("--method", "finetune", "--tracking.custom", "mine.py:Mine"),
    ):
        assert expected in " ".join(refused(capsys, *flags, "--output", tmp_path / "run").split())


def test_an_installed_module_is_named(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "moved_package.py").write_text("import unified_trainer.types\n")
    with pytest.raises(UserError, match=r"moved_package\.py imports unified_trainer\.types, which is"):
        load_object("moved_package:score", "--reward.kind")


# The table.


def test_everything_is_where_the_table_says():
    for old, became in moves().items():
        module, _, name = old.partition(":")
        there = became.rpartition(" now")[0].rpartition(" ")[2]
        if "gone" in became:
            assert not find_named(module), old
        elif name:
            assert name in vars(importlib.import_module(there)), old
            assert not (find_named(module) and name in vars(importlib.import_module(f"unified_trainer.{module}"))), old
        else:
            assert find_spec(there) and not find_named(module), old


def find_named(module: str) -> bool:
    path = REPO / "unified_trainer" / module.replace(".", "/")
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=REPO, capture_output=True, text=True, check=True).stdout


def test_the_table_has_every_module_of_the_history():
    """From the commit on that gave reinforcement learning a folder."""
    try:
        began = git("log", "--diff-filter=A", "--format=%H", "--", "unified_trainer/rl/__init__.py").split()
    except (OSError, subprocess.CalledProcessError):
        began = []
    if not began:
        pytest.skip("a checkout without its history")
    first = git("ls-tree", "-r", "--name-only", began[-1], "unified_trainer")
    added = git(
        "log", "--no-renames", "--diff-filter=A", "--name-only", "--format=", f"{began[-1]}..", "unified_trainer"
    )
    files = {file for file in (*first.split(), *added.split()) if file.endswith(".py")}
    modules = {file.removeprefix("unified_trainer/").removesuffix(".py").replace("/", ".") for file in files}
    modules = {module.removesuffix(".__init__") for module in modules} - {"__init__"}
    assert len(modules) > 500
    assert {module for module in modules if not find_named(module)} == {old for old in moves() if ":" not in old}


def test_nothing_is_read_while_all_is_well(monkeypatch):
    monkeypatch.setattr("unified_trainer.basics.moves.moves", lambda: pytest.fail("read"))
    with naming_moves():
        pass
