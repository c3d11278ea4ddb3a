"""Votes: ballots without names, and how they are counted."""

import json
from pathlib import Path

import pytest
from evaluations import NAMES, PLAN, evaluated

from unified_trainer.__main__ import main
from unified_trainer.basics.errors import UserError
from unified_trainer.numerics.bootstrap import wilson_interval
from unified_trainer.tools.evaluate.vote_count import count

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    folder = tmp_path_factory.mktemp("evaluated") / "out"
    evaluated(folder)
    return folder


def key_of(output: Path) -> str:
    (file,) = output.glob("votes-*.json")
    return file.stem.removeprefix("votes-")


def ballots(output: Path) -> list[dict]:
    return json.loads((output / f"votes-{key_of(output)}.json").read_text(encoding="utf-8"))["ballots"]


def votes_file(tmp_path: Path, output: Path, given: list[tuple[str, int, str]], name: str = "votes.csv") -> Path:
    file = tmp_path / name
    lines = "".join(f"{key_of(output)},{voter},{pair},{vote}\n" for voter, pair, vote in given)
    file.write_text(f"key,voter,pair,vote\n{lines}", encoding="utf-8")
    return file


def for_second(ballot: dict) -> str:
    """The vote for the second checkpoint."""
    return "right" if ballot["right"] == NAMES[1] else "left"


def test_there_is_a_ballot_for_the_first_sample_of_every_prompt_and_seed(output):
    rows = ballots(output)
    assert {(row["prompt"], row["seed"]) for row in rows} == {(p, s) for p in PLAN.prompts for s in PLAN.seeds}
    assert {row["left"] for row in rows} == {row["right"] for row in rows} == {*NAMES}
    assert [row["prompt"] for row in rows] != sorted((row["prompt"] for row in rows), key=PLAN.prompts.index)


def test_the_page_does_not_say_which_is_which(output):
    page = (output / "votes.html").read_text(encoding="utf-8")
    assert not [name for name in NAMES if name in page]


def test_the_order_follows_from_the_seed(tmp_path, output):
    evaluated(tmp_path / "same")
    evaluated(tmp_path / "other", seed=1)
    assert ballots(tmp_path / "same") == ballots(output) != ballots(tmp_path / "other")


def test_a_page_holds_as_many_ballots_as_fit(tmp_path):
    evaluated(tmp_path / "out", limit=9000)
    page = (tmp_path / "out" / "votes.html").read_text(encoding="utf-8")
    assert 1 <= page.count('"left":') < len(ballots(tmp_path / "out"))


def test_votes_are_those_for_a_checkpoint_and_not_for_a_side(tmp_path, output):
    """The second wins both seeds of two prompts, loses one of the third and ties there: (1 + 1 + 1/4) / 3."""
    rows = ballots(output)
    given = []
    for i, row in enumerate(rows):
        at = PLAN.prompts.index(row["prompt"])
        if at < 2:
            given.append(("me", i, for_second(row)))
        elif at == 2:
            other = {"left": "right", "right": "left"}[for_second(row)]
            given.append(("me", i, "tie" if row["seed"] == 7 else other))
    (found,) = count(output, [votes_file(tmp_path, output, given)], 0.95)
    assert (found.first, found.second) == NAMES
    assert (found.wins, found.losses, found.ties, found.prompts, found.voters) == (4, 1, 1, 3, 1)
    assert found.win_rate == pytest.approx(0.75)
    assert found.interval == wilson_interval(found.win_rate, 3, 0.95)
    assert json.loads((output / "votes.json").read_text())["preferences"][0]["wins"] == 4


def test_the_last_vote_of_a_voter_on_a_pair_counts_and_voters_add_up(tmp_path, output):
    vote = for_second(ballots(output)[0])
    files = [
        votes_file(tmp_path, output, [("me", 0, "tie"), ("me", 0, vote)], "mine.csv"),
        votes_file(tmp_path, output, [("you", 0, "tie")], "yours.csv"),
    ]
    (found,) = count(output, files, 0.95)
    assert (found.wins, found.ties, found.voters, found.win_rate) == (1, 1, 2, 0.75)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is no file of votes: its first line must be key,voter,pair,vote"),
        ("a,b\n", "is no file of votes"),
        ("key,voter,pair,vote\nKEY,me,0\n", "line 2 has 3 values, not 4"),
        ("key,voter,pair,vote\nKEY,me,0,left\nabc,me,0,left\n", "line 3 is of another evaluation"),
        ("key,voter,pair,vote\n../KEY,me,0,left\n", "line 2 is of another evaluation"),
        ("key,voter,pair,vote\nKEY,me,0,both\n", "the vote must be left, right or tie, not 'both'"),
        ("key,voter,pair,vote\nKEY,me,8,left\n", "pair 8 is none of the 8"),
        ("key,voter,pair,vote\nKEY,me,-1,left\n", "pair -1 is none of the 8"),
    ],
)
def test_wrong_files_are_refused(tmp_path, output, text, said):
    file = tmp_path / "votes.csv"
    file.write_text(text.replace("KEY", key_of(output)))
    with pytest.raises(UserError, match=said):
        count(output, [file], 0.95)


def test_the_command_counts(tmp_path, output, capsys):
    file = votes_file(tmp_path, output, [("me", 0, "tie")])
    assert main(["evaluate", "--votes", str(file), "--output", str(output)]) == 0
    assert "0.500" in capsys.readouterr().out
    assert main(["evaluate", "--votes", str(file), "--output", str(tmp_path)]) == 2
    assert "evaluation.json is missing" in capsys.readouterr().err
