"""What received files would make the program do happens only after the user agreed: one test for each trick."""

import importlib._bootstrap_external as bootstrap
import importlib.util
import os
import shutil
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import yaml

from unified_trainer.__main__ import main
from unified_trainer.basics import plugins, trust
from unified_trainer.basics.errors import UserError
from unified_trainer.basics.plugins import load_object
from unified_trainer.basics.read_code import ReadModules
from unified_trainer.basics.trust import asking
from unified_trainer.run.settings.command_line import parse, read_reward

pytestmark = pytest.mark.slow  # seconds together

SCORE = "def score(videos, prompts):\n    return videos[:, 0].flatten(1).mean(1)\n"
EVIL = f"open('EXECUTED', 'w').close()\n{SCORE}"
URL, OTHER = "http://127.0.0.1:9", "http://127.0.0.2:9"


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """An empty folder where commands start, in which Python finds modules as `python -m` does."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setattr(plugins, "_MODULES", ReadModules(plugins._unread))
    (tmp_path / "home").mkdir()
    monkeypatch.chdir(tmp_path / "home")
    monkeypatch.syspath_prepend(str(tmp_path / "home"))
    before, path, finders = {*sys.modules}, [*sys.path], [*sys.meta_path]
    yield tmp_path / "home"
    sys.path[:], sys.meta_path[:] = path, finders
    for name in sys.modules.keys() - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", None)):
            del sys.modules[name]


def write(file: str, content: object) -> str:
    Path(file).parent.mkdir(parents=True, exist_ok=True)
    Path(file).write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    return file


def config(file: str = "received/config.yaml", **settings: object) -> str:
    return write(file, {"method": "dance_grpo", "recipe": "tiny", "device": "cpu"} | settings)


def scorer(kind: str, **settings: object) -> dict[str, object]:
    return {"scorers": {"mine": {"kind": kind, "weight": 0.5} | settings}}


def server(url: str, variable: str = "") -> dict[str, object]:
    return scorer("http", settings={"url": url} | ({"token_variable": variable} if variable else {}))


def question(*words: str) -> str:
    """The question that a command line is answered with; "" if its settings are taken."""
    with asking(words) as rest:
        try:
            parse(rest)
        except UserError as error:
            assert "you have not agreed" in str(error), error
            return str(error)
    return ""


def rows(text: str) -> list[tuple[str, str]]:
    """The settings of a question's table, with what each does."""
    return [tuple(line.split()[:2]) for line in text.splitlines()[2:-1]]


def pyc(source: str, beside: str) -> bytes:
    """A compiled file that Python takes for that of another source without looking at it."""
    code = compile(source, beside, "exec")
    return bytes(bootstrap._code_to_hash_pyc(code, importlib.util.source_hash(Path(beside).read_bytes()), False))


def tricked(words: Sequence[str], capsys) -> str:
    """The question that a real command ends with, before it does anything."""
    before = sorted(map(str, Path().rglob("*")))
    assert main([*words]) == 2
    assert sorted(map(str, Path().rglob("*"))) == before
    message = capsys.readouterr().err
    assert "add --trust" in message and "you have not agreed" in message
    return message


CONFIGS = {  # settings of a received config, with the setting and the effect that are asked about
    "method": ({"method": "received/m.py:M"}, ("method", "run")),
    "families": ({"families": ["received/m.py:F"]}, ("families", "run")),
    "tracker": ({"tracking": {"custom": ["received/m.py:T"]}}, ("tracking.custom", "run")),
    "scorer": ({"reward": scorer("received/m.py:score")}, ("reward.scorers.mine.kind", "run")),
    "module of Python": ({"reward": scorer("os:system")}, ("reward.scorers.mine.kind", "run")),
    "key with dots": ({"reward.scorers.mine.kind": "received/m.py:score"}, ("reward.scorers.mine.kind", "run")),
    "first scorer": ({"reward": {"kind": "received/m.py:score"}}, ("reward.kind", "run")),
    "program": ({"reward": scorer("m.py:score", python="/bin/sh")}, ("reward.scorers.mine.python", "run")),
    "variables": (
        {"reward": scorer("m.py:score", python_variables=["HF_TOKEN"])},
        ("reward.scorers.mine.python_variables", "send"),
    ),
    "secret for code": (
        {"reward": scorer("m.py:score", settings={"api_key": "env:HF_TOKEN"})},
        ("reward.scorers.mine.settings.api_key", "send"),
    ),
    "file called False": ({"validation": {"i3d": False}}, ("validation.i3d", "run")),
    "TorchScript": ({"validation": {"i3d": "received/i3d.pt"}}, ("validation.i3d", "run")),
    "server": ({"reward": server(URL)}, ("reward.scorers.mine.settings.url", "contact")),
    "token": ({"reward": server(URL, "HF_TOKEN")}, ("reward.scorers.mine.settings.token_variable", "send")),
    "Ray": ({"ray": {"address": "10.0.0.7:6379"}, "launcher": "ray"}, ("ray.address", "contact")),
    "mirror": ({"checkpoint_mirror": "file:///tmp/mirror"}, ("checkpoint_mirror", "write")),
    "mirror with a hyphen": ({"checkpoint-mirror": "memory://mirror"}, ("checkpoint_mirror", "write")),
    "cache": ({"encoders": {"cache": "../elsewhere"}}, ("encoders.cache", "write")),
    "output": ({"output": "../elsewhere"}, ("output", "write")),
    "service": ({"tracking": {"wandb": "online", "wandb_entity": "them"}}, ("tracking.wandb", "send")),
}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("form", ["config", "run", "recipe", "base", "help"])
def test_a_received_file_is_asked_about_before_it_does_anything(name, form, capsys):
    """As --config, as the config.yaml of --resume, as a recipe, as the base of one, and for a help page."""
    settings, expected = CONFIGS[name]
    write("received/m.py", EVIL)
    write("received/i3d.pt", "no TorchScript")
    file = config(**settings)
    if form in ("recipe", "base"):
        if "method" in settings or "output" in settings:
            pytest.skip("no setting of a recipe")
        file = write("received/recipe.yaml", {"base": "tiny", "common": settings})
        file = write("received/above.yaml", {"base": "received/recipe.yaml"}) if form == "base" else file
    words = {"run": ["--resume", "received"], "recipe": ["--recipe", file], "base": ["--recipe", file]}
    words |= {"help": ["--config", file, "--help"]}
    message = tricked(words.get(form, ["--config", file]), capsys)
    assert expected in rows(message) and not Path("EXECUTED").exists()
    origin = "received/config.yaml" if form in ("config", "run", "help") else file
    assert all(line.endswith(origin) for line in message.splitlines()[2:-1])


@pytest.mark.parametrize("name", [name for name in CONFIGS if name not in ("method", "families", "tracker")])
def test_what_was_agreed_to_is_asked_no_more(name):
    write("received/m.py", SCORE)
    write("received/i3d.pt", "no TorchScript")
    file = config(**CONFIGS[name][0])
    assert question("--config", file) and not question("--config", file, "--trust")
    assert not question("--config", file) and trust._file().stat().st_mode & 0o077 == 0


def test_all_facts_are_in_one_table():
    write("received/m.py", SCORE)
    reward = {"scorers": {"a": scorer("received/m.py:score")["scorers"]["mine"], "b": server(URL)["scorers"]["mine"]}}
    text = question("--config", config(reward=reward, checkpoint_mirror="memory://m", prompts="received/prompts.txt"))
    assert rows(text) == [
        ("checkpoint_mirror", "write"),
        ("reward.scorers.a.kind", "run"),
        ("reward.scorers.b.settings.url", "contact"),
        ("prompts", "read"),  # listed, and not asked about by itself
    ]
    assert not question("--config", config(prompts="received/prompts.txt", student={"path": "received/model"}))


def test_a_flag_agrees_to_its_own_setting_alone():
    """A path word elsewhere on the command line, or another setting with the same value, is no agreement."""
    write("m.py", SCORE)
    file = config(reward=scorer("m.py:score"))
    for words in (["--prompts", "m.py:score"], ["--reward.kind", "m.py:score"], ["--validation.sets.mine", "m.py"]):
        assert ("reward.scorers.mine.kind", "run") in rows(question("--config", file, *words))
    assert not question("--config", file, "--reward.scorers.mine.kind", "m.py:score")
    assert not question("--config", file)  # remembered


def test_a_flag_replaces_a_received_value():
    file = config(reward=server(URL))
    assert not question("--config", file, "--reward.scorers.mine.settings.url", OTHER)
    assert question("--config", file)


def test_a_config_is_no_program_of_its_own(capsys):
    write("m.py", SCORE)
    assert not question("--config", config(reward=scorer("m.py:score")), "--trust")
    file = config(reward=scorer("m.py:score", python="./received/config.yaml"))
    write(file, f'#!/usr/bin/env -S sh -c "touch EXECUTED"\n{Path(file).read_text()}')
    Path(file).chmod(0o755)
    assert ("reward.scorers.mine.python", "run") in rows(tricked(["--config", file], capsys))


@pytest.mark.parametrize("change", ["url", "variable", "kind", "python"])
def test_a_secret_is_bound_to_its_receiver(change):
    """An agreed server, program or variable does not get along with another one."""
    write("m.py", SCORE)
    write("other.py", SCORE)
    both = {"reward": server(URL, "HF_TOKEN")}
    other = {"reward": server(OTHER, "HF_TOKEN")}
    if change == "variable":
        other = {"reward": server(URL, "HOME")}
    elif change in ("kind", "python"):
        given = {"python_variables": ["HF_TOKEN"]}
        both = {"reward": scorer("m.py:score", python="/bin/sh", **given)}
        other = {"reward": scorer("other.py:score", python="/bin/sh", **given)}
        if change == "python":
            other = {"reward": scorer("m.py:score", python=sys.executable, **given)}
    assert not question("--config", config(**both), "--trust")
    text = question("--config", config(**other))
    assert any(does == "send" for _, does in rows(text)) and not question("--config", config(**both))


def test_a_cached_pyc_beside_an_agreed_file_is_not_run():
    write("mine/red.py", SCORE)
    words = ["--config", config(reward=scorer("mine/red.py:score"))]
    assert not question(*words, "--trust")
    write(f"mine/__pycache__/red.{sys.implementation.cache_tag}.pyc", "")
    Path(f"mine/__pycache__/red.{sys.implementation.cache_tag}.pyc").write_bytes(pyc(EVIL, "mine/red.py"))
    with asking([]):
        load_object("mine/red.py:score", "reward.scorers.mine.kind")
    assert not Path("EXECUTED").exists()


@pytest.mark.parametrize("how", ["cached", "changed", "sourceless", "in a function", "package", "compiled package"])
def test_a_module_that_agreed_code_imports_is_part_of_it(home, how):
    """Beside red.py: it is run as it was agreed to, or not at all."""
    statement = {"in a function": "import importlib\nhelp = importlib.import_module('trick_beside')"}
    source = f"{statement.get(how, 'import trick_beside')}\n{SCORE}"
    if how == "sourceless":
        source = f"try:\n    import trick_beside\nexcept ImportError:\n    pass\n{SCORE}"
    write("red.py", source)
    package = "package" in how
    beside = write("trick_beside/__init__.py" if package else "trick_beside.py", "")
    if package:
        write(beside, "import trick_beside.inner\n")
        write("trick_beside/inner.py", "")
    if how == "sourceless":
        Path(beside).unlink()
    spec, key = "red.py:score", "reward.kind"
    with asking(["--trust"]):
        load_object(spec, key)
    assert not Path("EXECUTED").exists()
    for name in [name for name in sys.modules if "trick_beside" in name or "plugin_red" in name]:
        del sys.modules[name]
    importlib.invalidate_caches()
    if how in ("cached", "compiled package"):
        inner = "trick_beside/inner.py" if package else beside
        cache = Path(importlib.util.cache_from_source(str(home / inner)))
        cache.parent.mkdir(exist_ok=True)
        cache.write_bytes(pyc(EVIL, inner))
        with asking([]):
            load_object(spec, key)
    else:
        file = "trick_beside/inner.py" if package else beside
        if how == "sourceless":
            write("source", EVIL)
            (home / "trick_beside.pyc").write_bytes(pyc(EVIL, "source"))
        else:
            write(file, EVIL)
        with asking([]), pytest.raises(UserError, match="you have not agreed"):
            load_object(spec, key)
    assert not Path("EXECUTED").exists()


def test_a_module_of_a_folder_without_init_is_agreed_to_in_its_folder(home, monkeypatch):
    write("trick_space/inner.py", SCORE)
    with asking(["--trust"]):
        load_object("trick_space.inner:score", "reward.kind")
    with asking([]):
        load_object("trick_space.inner:score", "reward.kind")
    for name in ("trick_space", "trick_space.inner"):
        del sys.modules[name]
    write("elsewhere/trick_space/inner.py", EVIL)
    monkeypatch.syspath_prepend(str(home / "elsewhere"))
    with asking([]), pytest.raises(UserError, match="you have not agreed"):
        load_object("trick_space.inner:score", "reward.kind")
    assert not Path("EXECUTED").exists()


@pytest.mark.parametrize("change", ["content", "place", "setting", "object"])
def test_an_agreement_is_bound_to_content_place_setting_and_object(change):
    write("received/m.py", f"{SCORE}other = score\n")
    file = config(reward=scorer("received/m.py:score"))
    assert not question("--config", file, "--trust") and not question("--config", file)
    if change == "content":
        write("received/m.py", f"{SCORE}other = score\n\n")
    elif change == "place":
        shutil.copytree("received", "moved")
        file = config("moved/config.yaml", reward=scorer("moved/m.py:score"))
    elif change == "setting":
        file = config(reward={"kind": "received/m.py:score"})
    else:
        file = config(reward=scorer("received/m.py:other"))
    assert question("--config", file)


def test_an_agreed_place_with_another_program_is_asked_about():
    program = Path(write("venv/python", "#!/bin/sh\n"))
    program.chmod(0o755)
    write("m.py", SCORE)
    file = config(reward=scorer("m.py:score", python="venv/python"))
    assert not question("--config", file, "--trust") and not question("--config", file)
    program.write_text("#!/bin/sh\ntouch EXECUTED\n")
    assert rows(question("--config", file))[0] == ("reward.scorers.mine.python", "run")


def test_agreed_torchscript_is_loaded_from_the_bytes_that_were_agreed_to():
    from unified_trainer.run.validation.distances import I3D

    write("i3d.pt", "no TorchScript")
    assert not question("--config", config(validation={"i3d": "i3d.pt"}), "--trust")
    with asking([]):
        with pytest.raises(UserError, match="must be I3D as TorchScript"):
            I3D.load(Path("i3d.pt"), "--validation.i3d", torch.device("cpu"), (5, 32, 32), 1)
        write("i3d.pt", "changed")
        with pytest.raises(UserError, match="you have not agreed"):
            I3D.load(Path("i3d.pt"), "--validation.i3d", torch.device("cpu"), (5, 32, 32), 1)


@pytest.mark.parametrize("link", ["checkpoints", "checkpoints/step_2", "validation", "rollouts/step_1"])
def test_a_linked_folder_of_a_received_run_is_asked_about(link, capsys):
    write("mine/step_9/weights", "mine")
    config("received/config.yaml")
    Path("received", link).parent.mkdir(exist_ok=True)
    Path("received", link).symlink_to(Path("mine").absolute())
    message = tricked(["--resume", "received"], capsys)
    assert rows(message)[0] == ("resume", "write") and str(Path("mine").absolute()) in message
    assert not question("--resume", "received", "--trust") and not question("--resume", "received")
    Path("received", link).unlink()
    Path("received", link).symlink_to(Path("state").absolute())
    Path("state").mkdir()
    assert question("--resume", "received")


def test_a_link_within_a_run_is_no_question():
    """As Weights & Biases writes one."""
    config("received/config.yaml")
    write("received/wandb/run-1/log", "")
    Path("received/wandb/latest-run").symlink_to("run-1")
    assert not question("--resume", "received")


def test_commands_agree_to_the_scorers_of_their_command_lines():
    """They are flags of other names than their settings: serve-reward --reward, evaluate --held-out."""
    from unified_trainer.tools.evaluate.evaluate import common_reward
    from unified_trainer.tools.serve.serve_reward import _served

    write("m.py", SCORE)
    with asking(["serve-reward", "--reward", "m.py:score"]):
        _, settings = _served("m.py:score", "")
        assert load_object(settings.kind, "reward.kind")
    file = write("reward.yaml", {"reward": {"kind": "saturation"}})
    with asking(["evaluate", "--held-out", "m.py:score", "--reward", file]):
        held_out = common_reward((), Path(file), ["m.py:score"]).scorers["score"]
        assert load_object(held_out.kind, "reward.scorers.score.kind")


POINTS = "[unified_trainer.methods]\ntrick = trick_pack:M\n[unified_trainer.scorers]\ntrick = trick_pack:score\n"


NAMED = [{"method": "trick"}, {"reward": scorer("trick")}, {"reward": {"scorers": {"trick": {"weight": 1.0}}}}]


@pytest.mark.parametrize("settings", NAMED)
def test_a_name_of_an_installed_package_is_code_too(settings):
    """Also where a scorer's name is its kind."""
    write("trick_pack.py", EVIL)
    write("trick_pack-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: trick-pack\nVersion: 1.0\n")
    write("trick_pack-1.0.dist-info/entry_points.txt", POINTS)
    assert rows(question("--config", config(**settings)))[0][1] == "run" and not Path("EXECUTED").exists()


def test_a_file_of_a_reward_is_asked_about(capsys):
    """As score, rollout, evaluate and serve-reward read it."""
    write("received/m.py", EVIL)
    file = write("received/reward.yaml", {"reward": scorer("received/m.py:score")})
    with asking(["score", "--reward", file]), pytest.raises(UserError, match="you have not agreed"):
        read_reward(Path(file))
    assert "reward.scorers.mine.kind" in tricked(["serve-reward", "--reward", file], capsys)


def test_families_of_received_rollouts_are_asked_about():
    from unified_trainer.run.registry import add_families

    write("received/m.py", EVIL)
    with asking(["score", "received"]), pytest.raises(UserError, match="you have not agreed"):
        add_families(["received/m.py:F"])
    assert not Path("EXECUTED").exists()


def test_a_text_that_a_users_own_method_takes_is_asked_about():
    """Its class says what is a text; the method itself is agreed to."""
    write("own.py", OWN_METHOD)
    with_command = config(method="own.py:Own", algorithm={"command": "touch EXECUTED", "batch_size": 2})
    assert rows(question("--config", with_command)) == [("method", "run")]
    plain = config("plain.yaml", method="own.py:Own", algorithm={"batch_size": 2})
    assert not question("--config", plain, "--trust") and not question("--config", plain)
    assert rows(question("--config", with_command)) == [("algorithm.command", "send")]


OWN_METHOD = """
from dataclasses import dataclass
from unified_trainer.methods.finetune import Finetune

@dataclass(frozen=True)
class Config(Finetune.config_class):
    command: str = ""

class Own(Finetune):
    config_class = Config
"""


def test_a_table_shows_no_control_character_and_no_password():
    text = question("--config", config(checkpoint_mirror="s3://me:hidden@bucket/\x1b[2Jx"))
    assert "\x1b" not in text and "hidden" not in text and "\\x1b" in text
    words = ["--config", config(checkpoint_mirror="s3://me:hidden@bucket"), "--trust"]
    with asking(words) as rest, pytest.raises(UserError, match="the address holds a password"):
        parse(rest)
    assert "hidden" not in trust._file().read_text()


def test_garbage_in_place_of_a_fact_is_no_traceback():
    for value in ({"reward": scorer(["a"])}, {"families": "x"}, {"method": ["os:system"]}, {"tracking": {"custom": 3}}):
        with asking([]), suppress(UserError):
            parse(["--config", config(**value)])


def test_a_program_in_python_is_asked_nothing():
    write("red.py", f"import trick_other\n{SCORE}")
    write("trick_other.py", "VALUE = 1\n")
    assert load_object("red.py:score", "reward.kind") and sys.modules["trick_other"].VALUE == 1
    assert not trust._file().exists() and not os.path.exists("__pycache__")


def test_the_answers_are_readable():
    config(checkpoint_mirror="memory://m")
    assert not question("--config", "received/config.yaml", "--trust")
    digest, _, words = trust._file().read_text().strip().partition(" ")
    assert len(digest) == 64 and words == "'checkpoint_mirror': write 'memory://m'"
