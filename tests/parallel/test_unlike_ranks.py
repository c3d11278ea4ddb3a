"""Ranks that were given other settings, prompts, places or code do not start, and one that fails ends the others."""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from helpers import ALONE, CPU, SMALL

from unified_trainer.basics.requests import Request
from unified_trainer.data.captioned import CaptionedVideo
from unified_trainer.data.prompts import PromptFile
from unified_trainer.parallel.agreement import assert_equal, differences, files_in_words
from unified_trainer.parallel.mesh import Mesh, RanksDivergedError
from unified_trainer.run.plan.data import Clips
from unified_trainer.run.plan.plan import check
from unified_trainer.run.settings.command_line import minutes_to_meet, parse

sys.path.insert(0, str(Path(__file__).parent))
import unlike_ranks

SECONDS = 30.0  # far below the 30 minutes of parallel.timeout_minutes, also on a busy machine


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    folder = tmp_path_factory.mktemp("unlike")
    unlike_ranks.run_all(folder)
    assert not (folder / "run").exists()
    return folder


def said(folder, case: str, code: int = 2) -> list[str]:
    """What each rank said, all of which ended with `code` within SECONDS."""
    texts = [(folder / f"{case}-{rank}").read_text() for rank in range(2)]
    for text in texts:
        found = re.search(r"\nended with (\d+) after ([\d.]+) s", text)
        assert found and int(found[1]) == code and float(found[2]) < SECONDS, text
    return texts


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("case", "differs"),
    [
        ("package", r"the code of unified_trainer is 1 files \(sha256 \w{12}\) on rank 0 and 1 files .* on rank 1"),
        (
            "scorer",
            r"the code of reward.kind red.py:score is 1 files \(sha256 \w{12}\) on rank 0 and 1 files .* on rank 1",
        ),
        ("settings", "seed is 0 on rank 0 and 1 on rank 1; student.learning_rate is 0.0 on rank 0 and 0.001 on rank 1"),
        ("output", r"output is /.*/0/run on rank 0 and /.*/1/run on rank 1"),
        ("prompts", r"prompts is 2 prompts \(sha256 \w{12}\) on rank 0 and 2 prompts \(sha256 \w{12}\) on rank 1"),
        ("version", "the version of unified-trainer is unified-trainer 0 on rank 0 and unified-trainer 1 on rank 1"),
    ],
)
def test_ranks_that_differ_do_not_start(reports, case, differs):
    for rank, text in enumerate(said(reports, case)):
        assert re.match(rf"error on rank {rank}: ranks diverged: {differs}", text), text


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("case", "error"), [("missing", "--validation.prompts first.txt: no such file"), ("tidy", "no such file")]
)
def test_a_rank_that_fails_tells_the_others_which_end_tidily(reports, case, error):
    """They leave their context: rank 0 has removed the run directory that it made."""
    first, second = said(reports, case)
    assert second.startswith(f"error on rank 1: {error}")
    assert f"error on rank 0: rank 1 failed: {error}" in first


@pytest.mark.ranks
def test_a_rank_that_fails_before_it_joins_tells_the_others(reports):
    """Rank 0 waits for it in the library; a thread ends the process."""
    first, second = ((reports / f"flag-{rank}").read_text() for rank in range(2))
    assert "error on rank 1: --no-such-flag" in second and "ended with 2" in second
    assert "error on rank 0: rank 1 failed: --no-such-flag" in first and "ended with" not in first


@pytest.mark.ranks
def test_a_bug_of_a_rank_ends_the_others(reports):
    first, second = ((reports / f"bug-{rank}").read_text() for rank in range(2))
    assert first == "error on rank 0: rank 1 failed: KeyError: 'gone'\n"
    assert "KeyError: 'gone'" in second


@pytest.mark.ranks
def test_a_rank_that_stands_still_is_named_by_the_others_and_ended(reports):
    """Rank 0 gives a collective up after 1.2 seconds; rank 1 waits for something else, and a thread ends it."""
    first, second = ((reports / f"still-{rank}").read_text() for rank in range(2))
    assert re.search(r"error on rank 0: rank 1 \(.+, process \d+\) did not come to where rank 0 waited for it\n", first)
    assert "ended with 2" in first and "Traceback" not in first
    assert re.search(r"error on rank 1: rank 0 failed: rank 1 \(.+\) did not come", second) and "ended" not in second


@pytest.mark.ranks
def test_a_rank_that_was_not_started_is_named_while_the_others_wait_and_at_the_end(reports):
    """After parallel.timeout_minutes, .03, in place of 30 minutes without a word."""
    first, second = said(reports, "absent")
    assert "waiting for rank 2 of 3\n" in first
    for text in (first, second):
        assert re.search(
            r"error on rank \d: rank 2 of 3 did not come within 0\.03 minutes \(parallel\.timeout_min", text
        )


@pytest.mark.ranks
def test_a_wrong_address_of_rank_0_is_named(reports):
    first, second = said(reports, "elsewhere")
    assert re.search(r"rank 1 of 2 cannot reach rank 0 at 127\.0\.0\.1:\d+ yet", second)
    assert re.search(
        r"error on rank 1: rank 1 of 2 cannot reach rank 0 at 127\.0\.0\.1:\d+ after 0\.03 minutes", second
    )
    assert "error on rank 0: rank 1 of 2 did not come within 0.03 minutes" in first


@pytest.mark.ranks
def test_the_group_of_the_saver_has_the_timeout_of_the_settings(reports):
    """0.02 minutes are 1.2 seconds; the other rank never comes, and stays longer."""
    assert 1.0 < float((reports / "savers-0").read_text().split()[1]) < SECONDS


def test_the_time_to_meet_is_read_before_anything_else(tmp_path):
    """A wrong value is the parser's to name."""
    saved = tmp_path / "config.yaml"
    saved.write_text("parallel: {timeout_minutes: 5.0}")
    assert minutes_to_meet(["--method", "dmd2"]) == 30
    assert (
        minutes_to_meet(["--parallel.timeout-minutes", "7"]) == minutes_to_meet(["--parallel.timeout_minutes=7"]) == 7
    )
    assert minutes_to_meet(["--resume", str(tmp_path)]) == minutes_to_meet(["--config", str(saved)]) == 5
    assert minutes_to_meet(["--resume", str(tmp_path), "--parallel.timeout-minutes", "7"]) == 7
    for wrong in ("x", "0", "nan", "-1"):
        assert minutes_to_meet([f"--parallel.timeout-minutes={wrong}"]) == 30
    assert minutes_to_meet(["--resume", "absent"]) == minutes_to_meet(["--resume"]) == 30


def test_differences_name_item_values_and_ranks():
    rows = [{"a": "1", "b": "x"}, {"a": "1", "b": "y"}, {"a": "1", "b": "x"}, {"a": "1"}]
    assert differences(rows) == ["b is x on ranks 0, 2 and y on rank 1 and absent on rank 3"]
    assert differences(rows[:1] * 5) == []
    many = [{str(i): str(rank) for i in range(12)} for rank in range(20)]
    found = differences(many)
    assert len(found) == 9 and found[-1] == "and 4 more"
    long = differences([{"a": "v" * 200}, {"a": "w"}])[0]
    assert re.fullmatch(r"a is v{80}\.\.\. \(sha256 \w{12}\) on rank 0 and w on rank 1", long)


class TwoRanks(Mesh):
    """A mesh of two ranks that gathers what this one and another have."""

    def all_gather_cpu(self, rows):
        other = rows.clone()
        other[0, 0] += 1
        return rows.new_tensor([rows[0].tolist(), other[0].tolist()])

    def all_gather_text(self, text):
        return [text, json.dumps(json.loads(text) | {"b": "3"})]


def test_a_digest_that_differs_is_an_error():
    with pytest.raises(RanksDivergedError, match="ranks diverged: b is 2 on rank 0 and 3 on rank 1"):
        assert_equal(TwoRanks(CPU, 0, 2), {"a": "1", "b": "2"})
    assert_equal(ALONE, {"a": "1"})


def test_what_a_run_reads_is_compared(tmp_path):
    """Prompts by contents, files by name and size; the folder that they are in may be another on each node."""
    plan = check(parse(SMALL["dance_grpo"]), ALONE)
    found = plan.compared()
    assert {"prompts", "validation.prompts", "student.adapter", "student.path"} <= found.keys()
    assert re.fullmatch(r"1 files of \d+ bytes \(sha256 \w{12}\)", found["student.path"])
    files = [plan.prompts | {"--prompts": PromptFile(Request.of(texts))} for texts in ("ab", "ba")]
    first, second = (replace(plan, prompts=prompts).compared()["prompts"] for prompts in files)
    assert first != second

    def data(folder: str, size: int, caption: str) -> str:
        file = tmp_path / folder / "a.mp4"
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(b"x" * size)
        return replace(plan, clips=Clips(videos=(CaptionedVideo("a", file, (caption,)),))).compared()["data.path"]

    assert data("one", 3, "a") == data("two", 3, "a")
    assert len({data("one", 3, "a"), data("one", 4, "a"), data("one", 3, "b")}) == 3
    assert files_in_words([]) == files_in_words([]) != files_in_words([], ["a"])
