"""Keys and passwords are named, not given: nothing that is stored or printed holds one."""

import json

import pytest
import torch
from helpers import CPU, run
from hypothesis import given
from hypothesis import strategies as st

from unified_trainer.__main__ import main
from unified_trainer.basics.errors import UserError
from unified_trainer.basics.secrets import NAMES, masked
from unified_trainer.rewards.base import RewardConfig
from unified_trainer.rewards.scorers import load_scorers
from unified_trainer.rewards.wire import check_server
from unified_trainer.run.tracking.environment import environment

LONG = ["api_key", "openai_api_key", "token", "hf_token", "password", "client_secret"]
SHORT = ["pwd", "db_pwd", "pass", "user.pass", "auth", "proxy-auth", "bearer", "api-key", "x-api-key", "apikey"]
# A scorer that needs a key, as a class and as declared settings.
SCORERS = """
from dataclasses import dataclass
import torch
from unified_trainer.rewards.own_settings import ScorerSettings

class Plain:
    def __init__(self, settings):
        self.key = settings["settings"]["api_key"]
    def __call__(self, videos, prompts):
        return [float(len(self.key))] * len(videos)

@dataclass(frozen=True)
class Declared(ScorerSettings):
    api_key: str
    def load(self, config, device):
        return lambda videos, prompts: torch.full((len(videos),), float(len(self.api_key)))
"""


@pytest.fixture
def own(tmp_path):
    (tmp_path / "own.py").write_text(SCORERS)
    (tmp_path / "key").write_text("sk-four\n")
    return tmp_path / "own.py"


@pytest.mark.parametrize("name", ["Plain", "Declared"])
@pytest.mark.parametrize("where", ["env:MODEL_KEY", "file:{}/key"])
def test_a_scorer_gets_the_key_and_the_settings_keep_its_name(own, monkeypatch, name, where):
    monkeypatch.setenv("MODEL_KEY", "sk-four")
    config = RewardConfig(kind=f"{own}:{name}", settings={"api_key": where.format(own.parent)})
    scorer = load_scorers(config, CPU)[0][name]
    assert list(scorer(torch.zeros(1, 3, 1, 2, 2), ["a"])) == [len("sk-four")]


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("sk-four", "reward.settings.api_key would be stored in the run: give env:NAME"),
        ("env:ABSENT_KEY", "reward.settings.api_key: the environment has no ABSENT_KEY"),
        ("file:/absent/key", "reward.settings.api_key file:/absent/key: [Errno 2]"),
    ],
)
def test_a_key_that_is_given_or_not_there_is_one_line(own, tmp_path, capsys, value, said):
    words = ["--reward.kind", f"{own}:Plain", "--reward.path", "", "--reward.settings.api_key", value]
    assert main(["--method", "dance_grpo", *words, "--output", str(tmp_path / "run")]) == 2
    line = capsys.readouterr().err
    assert said in line and line.count("\n") == 1 and "sk-four" not in line
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_run_holds_no_key(own, tmp_path, monkeypatch):
    monkeypatch.setenv("MODEL_KEY", "sk-four")
    words = ["--reward.kind", f"{own}:Plain", "--reward.path", "", "--reward.settings.api_key", "env:MODEL_KEY"]
    run("dance_grpo", tmp_path / "run", *words)
    stored = [file for file in (tmp_path / "run").rglob("*") if file.is_file()]
    assert len(stored) > 5 and not any(b"sk-four" in file.read_bytes() for file in stored)
    assert main(["report", str(tmp_path / "run"), "--out", str(tmp_path / "page.html")]) == 0
    assert "sk-four" not in (tmp_path / "page.html").read_text()


def test_the_command_in_environment_and_messages_shows_no_password(monkeypatch, capsys):
    from unified_trainer.parallel.mesh import Mesh

    noted = environment(["--x", "https://me:hunter2@host/a"], 0, 0, Mesh.alone("cpu"))
    assert "https://***@host/a" in noted["command"] and "hunter2" not in json.dumps(noted)
    assert main(["evaluate", "http://me:hunter2@host"]) == 2
    said = capsys.readouterr().err
    assert "hunter2" not in said and "***@host" in said


@given(st.from_regex(r"[a-z0-9.-]{1,12}(:[0-9]{1,5})?(/[a-z@]{0,8})?", fullmatch=True))
def test_an_address_without_password_stays(address):
    url = f"http://{address}"
    assert masked(url) == url and masked(f"x http://u:p@{address} y") == f"x http://***@{address} y"


@pytest.mark.parametrize("name", [*LONG, *SHORT])
def test_names_of_keys(name):
    assert NAMES.search(name)


NONE = ["max_tokens", "token_variable", "key", "keyframes", "monkey", "tokenizer", "bypass", "author", "passes"]


@pytest.mark.parametrize("name", NONE)
def test_names_that_are_none(name):
    assert not NAMES.search(name)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://h/a?token=abc&n=3", "http://h/a?token=***&n=3"),
        ("http://h?n=3&api_key=a.b-c", "http://h?n=3&api_key=***"),
        ("s3://b/k?X-Amz-Signature=00ff&X-Amz-Security-Token=q%2F&x=1", None),
        ("https://h/#access_token=abc", "https://h/#access_token=***"),
        ("https://blob/x?sv=1&SIG=abc", "https://blob/x?sv=1&SIG=***"),
        ("http://u:p@h/a?pwd=abc", "http://***@h/a?pwd=***"),
        ("http://h/a?tokens=3&monkey=4", "http://h/a?tokens=3&monkey=4"),
    ],
)
def test_keys_in_the_query_of_an_address_are_not_shown(url, shown):
    amazon = "s3://b/k?X-Amz-Signature=***&X-Amz-Security-Token=***&x=1"
    assert masked(url) == (shown or amazon)


def test_an_address_with_a_key_is_not_stored():
    with pytest.raises(UserError, match="holds a password or key, which the run would store") as caught:
        check_server("http://host:80/a?token=hunter2", 1.0)
    assert "hunter2" not in str(caught.value)
