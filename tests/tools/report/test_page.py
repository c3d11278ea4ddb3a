"""The page: it is whole in one file, holds the text of users as text, and is no larger than asked for."""

import json
import re
from pathlib import Path

import pytest
from run_folders import PROMPTS, STEPS, make_run, metric_rows, sample_row, training_row, write_lines

from unified_trainer.__main__ import main
from unified_trainer.tools.report.page import MARK, check_out
from unified_trainer.tools.report.run_folder import read_validations
from unified_trainer.tools.report.sample_videos import within

pytestmark = pytest.mark.slow


def write(tmp_path: Path, *runs: Path, flags: tuple[str, ...] = ()) -> str:
    out = tmp_path / "page" / "report.html"
    assert main(["report", *map(str, runs), "--out", str(out), *flags]) == 0
    return out.read_text(encoding="utf-8")


def data_of(page: str) -> dict:
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)[1])


def test_the_page_is_whole_and_asks_no_network(tmp_path):
    page = write(tmp_path, make_run(tmp_path / "run"))
    ours = page[: page.index("<script>")] + page[page.rindex("<script>") :]  # without the library's text
    assert not re.search(r"""(?:src|href)\s*=\s*["'](?!#|data:)""", ours) and "default-src 'none'" in ours
    assert "plotly.js v" in page and len(page) < 8e6


def test_text_of_users_is_text(tmp_path):
    page = write(tmp_path, make_run(tmp_path / "<b>run&"))
    assert "<b>run" not in page and "&lt;b&gt;run&amp;" in page
    assert PROMPTS[1] not in page and "<i>h</i>" not in page
    rows = data_of(page)["samples"]["rows"]
    assert [row["prompt"] for row in rows] == list(PROMPTS[:2])  # as they were, read back
    cards = re.search(r'data-cards="([^"]*)"', page)[1]
    assert "<" not in cards and len(re.findall("<script", page)) == 4


def test_curves_and_samples_are_those_of_the_run(tmp_path):
    run = make_run(tmp_path / "run", rows=[*metric_rows(), training_row(STEPS + 1, mine=float("nan"))])
    data = data_of(write(tmp_path, run))
    charts = {chart["title"]: chart for group in data["groups"] for chart in group["charts"]}
    (reward,) = charts["reward"]["traces"]
    assert reward["steps"] == list(range(1, STEPS + 2)) and reward["values"][0] == pytest.approx(2.1)
    assert {trace["label"] for trace in charts["seconds by phase"]["traces"]} == {"seconds/rollout", "seconds/update"}
    assert charts["mine"]["traces"][0]["values"] == [None]
    assert charts["skipped_updates"]["traces"][0]["band"] == {"low": None, "high": 0.0, "words": "at most 0"}
    samples = data["samples"]
    assert samples["steps"] == [0, STEPS] and len(data["videos"]) == 4
    card = samples["rows"][1]["cards"]["0"][str(STEPS)]
    assert card["scores"] == {"reward": 2.0, "hpsv3": 3.0, "clip": -1.0} and card["sample"] == 1
    shown = data["videos"][card["video"]]
    assert shown.startswith("data:video/mp4;base64,")


def test_best_and_worst_by_every_scorer(tmp_path):
    page = write(tmp_path, make_run(tmp_path / "run", videos=3))
    found = [json.loads(text.replace("&#34;", '"')) for text in re.findall(r'data-cards="([^"]*)"', page)]
    ranked = {one["scorer"]: ([c["sample"] for c in one["best"]], [c["sample"] for c in one["worst"]]) for one in found}
    assert ranked == {"reward": ([2], [0]), "hpsv3": ([2], [0]), "clip": ([0], [2])}  # none without a video
    assert all(isinstance(card["video"], int) for one in found for card in (*one["best"], *one["worst"]))
    assert "best and worst of 4 samples by reward" in page and "the samples with a video by clip" in page


def test_samples_over_training_are_those_that_every_validation_filmed(tmp_path):
    """Best and worst samples differ from step to step: their row would have gaps."""
    run = make_run(tmp_path / "run")
    last = run / "validation" / f"step_{STEPS}"
    (last / "3.mp4").write_bytes((last / "0.mp4").read_bytes())
    names = ["0.mp4", "1.mp4", None, "3.mp4"]
    write_lines(last / "samples.jsonl", [sample_row(i, STEPS, name) for i, name in enumerate(names)])
    page = write(tmp_path, run)
    assert [row["sample"] for row in data_of(page)["samples"]["rows"]] == [0, 1]
    assert len(data_of(page)["videos"]) == 5 and "&#34;sample&#34;: 3" in page


def test_rows_of_absent_roles_are_left_out(tmp_path):
    alone, other = make_run(tmp_path / "one"), make_run(tmp_path / "two")
    with (other / "config.yaml").open("a") as file:
        file.write("critic: {learning_rate: 1.0e-5}\n")
    page = write(tmp_path, alone)
    assert "student.learning_rate" in page and "student.high." not in page
    page = write(tmp_path, alone, other)
    assert "All settings are equal." in page
    assert page.index('id="samples"') < page.index("All settings are equal.")


def test_runs_are_compared(tmp_path):
    runs = [make_run(tmp_path / name, "--seed", str(i)) for i, name in enumerate(("a/x", "b/x"))]
    page = write(tmp_path, *runs)
    data = data_of(page)
    assert data["runs"] == ["a/x", "b/x"]
    (reward,) = (c for group in data["groups"] for c in group["charts"] if c["title"] == "reward")
    assert [trace["run"] for trace in reward["traces"]] == [0, 1]
    assert data["samples"]["rows"][0]["cards"].keys() == {"0", "1"}
    assert "2 seeds: a/x, b/x" in page and re.search(r'id="differing">.*?<code>seed</code>', page, re.S)


def test_videos_in_the_middle_are_left_out_first(tmp_path):
    run = make_run(tmp_path / "run", rows=metric_rows())
    for step in (2, 4, 6, 8):
        (run / "validation" / f"step_{step}").symlink_to(run / "validation" / "step_0")
    validations = read_validations(run)
    size = sum(file.stat().st_size for file in (run / "validation" / "step_0").glob("*.mp4"))
    steps = [[one.step for one in within(validations, int(count * size))[0]] for count in (6.5, 4.5, 3.5, 2.5)]
    assert steps == [[0, 2, 4, 6, 8, 10], [0, 4, 8, 10], [0, 6, 10], [0, 10]]
    assert within(validations, size)[1] == 1  # a sample less, of the first and the last
    page = write(tmp_path, run, flags=("--video-megabytes", "0"))
    assert [len(data_of(page)["videos"]), "12 videos did not fit" in page] == [0, True]


def test_another_programs_file_stays(tmp_path, capsys):
    run, page = make_run(tmp_path / "run", videos=0), tmp_path / "mine.html"
    page.write_text("mine")
    assert main(["report", str(run), "--out", str(page)]) == 2 and page.read_text() == "mine"
    assert main(["report", str(run), "--out", str(run / "config.yaml")]) == 2
    assert main(["report", str(run), str(run), "--out", str(tmp_path / "new.html")]) == 2
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "new.html")]) == 2
    said = "".join(capsys.readouterr())
    for words in ("is no report", "must end in .html", "the same run is named twice", "is no run directory"):
        assert words in said
    assert not (tmp_path / "new.html").exists()
    page.write_text(MARK)
    check_out(page)


def test_a_run_without_any_metric_has_a_page(tmp_path):
    run = make_run(tmp_path / "run", videos=0, rows=[])
    page = write(tmp_path, run)
    assert "has written no videos yet" in page and data_of(page)["groups"] == []
