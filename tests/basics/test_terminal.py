"""Names and prompts that look like markup, emoji codes or control sequences are printed as they are."""

import os

import pytest
from helpers import SMALL

from unified_trainer.__main__ import main
from unified_trainer.basics.errors import UserError
from unified_trainer.basics.terminal import printable, say
from unified_trainer.run.exit_codes import exit_code
from unified_trainer.run.settings.config import TrackingConfig
from unified_trainer.run.tracking.tracker import Tracker
from unified_trainer.tools.progress import ItemProgress

HOSTILE = ("run[/bold]", "run[red]x", "[link=http://a]b[/link]", "a:smile:b", r"\[b]", "{task}", "%s", "x" * 200)


def by_say(name, folder):
    say(name)


def by_tracker(name, folder):
    with Tracker(folder, TrackingConfig(), {}, 1, 0, True) as tracker:
        tracker.say(name)


def by_progress(name, folder):
    ItemProgress(name, 1).say(name)


@pytest.mark.parametrize("way", [by_say, by_tracker, by_progress])
@pytest.mark.parametrize("name", HOSTILE)
def test_a_line_is_printed_as_it_is(way, name, tmp_path, capsys):
    way(name, tmp_path)
    assert capsys.readouterr().out == name + "\n"


@pytest.mark.parametrize("name", HOSTILE[:-1])
def test_a_table_shows_names_as_they_are(name, tmp_path, capsys):
    with Tracker(tmp_path, TrackingConfig(), {}, 1, 0, True) as tracker:
        tracker.table(name, {name: name})
    assert capsys.readouterr().out.count(name) == 3


def test_control_sequences_and_broken_bytes_are_shown_and_not_sent(tmp_path, capsys):
    name = os.fsdecode(b"a\x1b[2Jb\x07\rc\xff\tfilm \xc3\xa9")
    shown = "a\\x1b[2Jb\\x07\\rc\\udcff\tfilm é"
    assert printable(name) == shown
    assert printable("\x9b31m \u202e \u4f60 \U0001f600\n") == "\\x9b31m \u202e \u4f60 \U0001f600\n"

    def work() -> int:
        say(name)
        raise UserError(f"{name} is wrong")

    assert exit_code(work) == 2
    out, err = capsys.readouterr()
    assert out.expandtabs() == shown.expandtabs() + "\n"
    assert err == f"error: {shown} is wrong\n"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["run[/bold] :smile:"])
def test_commands_take_such_names(name, tmp_path, capsys, monkeypatch):
    """Train, sample, rollout, score, export and preprocess, each with the name in every path and prompt."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).parent.mkdir()
    (tmp_path / f"{name}.txt").write_text(f"{name} a red circle\na blue square\n")
    (tmp_path / f"{name}.yaml").write_text("reward:\n  kind: sharpness\n  path: ''\n")
    prompts = f"{name}.txt"
    commands = [
        [*SMALL["dance_grpo"], "--steps", "1", "--output", name, "--prompts", prompts, "--validation.prompts", prompts],
        ["--resume", name],
        ["sample", name, "--prompts", prompts, "--output", f"samples{name}"],
        ["rollout", name, "--prompts", prompts, "--num-samples", "2", "--output", f"rollouts{name}"],
        ["score", f"rollouts{name}", "--reward", f"{name}.yaml", "--name", "sharp"],
        ["export", name, f"export{name}", "--components", "none"],
        ["preprocess", prompts, f"encoded{name}"],
    ]
    for words in commands:
        assert main(words) == 0, capsys.readouterr().err
        assert name in capsys.readouterr().out.replace("\n", " "), words
    for words in (
        ["sample", f"no{name}", "--prompts", "a", "--output", "o"],
        ["--method", name],
        ["export", name, name],
    ):
        assert main(words) == 2
        assert name in capsys.readouterr().err
