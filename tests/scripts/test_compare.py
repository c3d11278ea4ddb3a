"""scripts/compare.py: intervals hold the truth as often as they say, ties are in words, and nothing runs twice."""

import csv
import itertools
import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import tyro
from helpers import ALONE, REPO

from unified_trainer.data.prompts import training_captions, validation_captions
from unified_trainer.run.plan.plan import check
from unified_trainer.run.settings import command_line

sys.path.insert(0, str(REPO / "scripts"))
import compare
from comparison_table import Claim, Row, around, markdown, number, verdict
from intervals import of_table

FILES = sorted((REPO / "scripts" / "comparisons").glob("*.toml"))
COMPARISONS = {file.stem: compare.Comparison.read(file) for file in FILES}


# Intervals.


def test_the_interval_of_two_seeds_and_two_prompts_by_hand():
    """Mean squares 9 of seeds, 16 of prompts and 4 of the rest: variance 21 / 4, and 1.2 degrees of freedom."""
    estimate = of_table(torch.tensor([[1.0, 3.0], [2.0, 8.0]]))
    half = math.tan(0.95 * math.pi / 2) * math.sqrt(21 / 4)  # Student's law of one degree is Cauchy's
    assert (estimate.low, estimate.mean, estimate.high) == pytest.approx((3.5 - half, 3.5, 3.5 + half))


def test_seeds_alone_have_students_interval_and_one_seed_has_none():
    estimate = of_table(torch.tensor([[1.0], [2.0], [3.0], [4.0]]))
    assert estimate.high - estimate.mean == pytest.approx(3.18245 * math.sqrt(5 / 3 / 4), rel=1e-5)  # t of 3 degrees
    single = of_table(torch.tensor([[1.0, 2.0]]))
    assert single.mean == 1.5 and math.isnan(single.low) and single.holds_zero


def test_an_interval_moves_and_scales_with_its_values_and_no_order_matters():
    table = torch.randn(4, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    base, other = of_table(table), of_table(5 - 2 * table.flip(0, 1))
    assert (other.low, other.high) == pytest.approx((5 - 2 * base.high, 5 - 2 * base.low))


@pytest.mark.slow
@pytest.mark.parametrize(("of_seeds", "of_prompts"), [(0, 0), (0.3, 0), (0, 0.5), (0.1, 0.3), (0.5, 0.5)])
@pytest.mark.parametrize("seeds", [4, 8])
def test_an_interval_of_95_percent_holds_the_truth_in_about_95_of_100(seeds, of_seeds, of_prompts):
    """Shares of right samples. An interval of one seed, over prompts, does not where seeds differ."""
    draw, held, of_one_seed = torch.Generator().manual_seed(1), 0, 0
    for _ in range(400):
        noise = torch.randn(seeds, 48, 11, generator=draw)
        seed, prompt = torch.randn(seeds, 1, 1, generator=draw), torch.randn(1, 48, 1, generator=draw)
        table = (noise + of_seeds * seed + of_prompts * prompt > 0).double().mean(2) - 0.5
        estimate, over_prompts = of_table(table), of_table(table[:1].T)
        held += estimate.low < 0 < estimate.high
        of_one_seed += over_prompts.low < 0 < over_prompts.high
    assert 0.92 <= held / 400 <= 0.99
    assert (of_one_seed / 400 < 0.85) == (of_seeds > 0)


# The table.


def values(*of_seeds: float) -> Row:
    """Return a row whose reward differs by .1 from the first prompt to the second."""
    return Row(
        {seed: {"reward": torch.tensor([value - 0.05, value + 0.05]).double()} for seed, value in enumerate(of_seeds)}
    )


@pytest.mark.parametrize(
    ("higher", "lower", "said"),
    [
        ((2.0, 2.1, 2.2), (1.0, 1.12, 1.21), "`a` against `b`, reward: higher, by .99 [.97, 1.01] (3 seeds)."),
        ((1.0, 1.12, 1.21), (2.0, 2.1, 2.2), "`a` against `b`, reward: **the claim fails**, it is lower, by -.99"),
        (
            (2.0, 1.0, 2.0),
            (1.0, 2.0, 1.5),
            "`a` against `b`, reward: a tie, because the interval of the difference holds",
        ),
        ((2.0,), (1.0, 2.0), "`a` against `b`, reward: not measured yet, since fewer than two seeds have both."),
    ],
)
def test_a_claim_holds_fails_or_is_a_tie(higher, lower, said):
    assert verdict(Claim("reward", "a", "b"), {"a": values(*higher), "b": values(*lower)}, 2).startswith(said)


def test_differences_are_paired_by_seed():
    """Seeds that differ by 10 from each other hide nothing if both arms share them; another order of them would."""
    same, other = values(0.0, 10.0, 20.0), values(20.0, 0.0, 10.0)
    above = values(1.0, 11.0, 21.01)
    assert "higher, by 1.00" in verdict(Claim("reward", "a", "b"), {"a": above, "b": same}, 2)
    assert "a tie" in verdict(Claim("reward", "a", "b"), {"a": above, "b": other}, 2)


def test_numbers_are_written_as_in_the_docs():
    assert [number(value, 2) for value in (0.05, -0.2, 1.5, -1.25, 10.0)] == [".05", "-.20", "1.50", "-1.25", "10.00"]


def test_rows_that_have_not_run_are_named():
    lines = markdown({"a": values(2.0, 2.0), "b": Row()}, [], {"reward": 1})
    assert lines[2] == "| `a` | 2 |  |  | 2.0 [1.4, 2.6] |"
    assert lines[-1] == "- Not measured yet: `b`."
    assert markdown({"b": Row()}, [Claim("reward", "b", "b")], {"reward": 1}) == ["Not measured yet."]


def test_a_page_without_marks_is_refused_by_name(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "a\n<!-- table of scripts/comparisons/x.toml -->\nold\n<!-- end of scripts/comparisons/x.toml -->\nb\n"
    )
    before, after = around(page, "x")
    assert before.startswith("a\n<!-- table") and after.endswith("-->\nb\n") and "old" not in before + after
    with pytest.raises(ValueError, match=r"page\.md: needs the lines .* of scripts/comparisons/y\.toml"):
        around(page, "y")


# Runs.

FILE = """
page = "page.md"
seeds = [0, 1]
compute = 1.0e12
measures = {reward = 2, frechet = 1, "train/loss" = 1}

[tuning]
seeds = [7]
lowest = "frechet"

[arms]
base = {flags = "--method base", steps = 4, shown = false}
a = {flags = "--method crd --a", start = "base", tune = {"--rate" = ["1", "2", "3"]}}
b = {run_of = "a", sampled = ":weights"}

[[claims]]
measure = "reward"
higher = "a"
lower = "b"
"""


class Machine:
    """Stands in for the program: a step takes 1e11 FLOPs, and the Frechet distance is least at rate 2."""

    def __init__(self, root: Path) -> None:
        self.root, self.commands = root, list[tuple[str, ...]]()

    def __call__(self, *words: str) -> None:
        self.commands.append(words)
        value = dict(itertools.pairwise(words))
        if words[0] == "evaluate":
            self.evaluate(words[1], Path(value["--output"]), Path(value["--prompts"]).read_text().splitlines())
            return
        folder, steps = Path(value.get("--output", value.get("--resume", ""))), int(value["--steps"])
        (folder / "checkpoints" / f"step_{steps}").mkdir(parents=True)
        (folder / "config.yaml").write_text(value.get("--rate", "0"))
        line = {"train/model_flops_per_second": 5e10, "train/seconds": 2.0, "train/loss": 3.0}
        (folder / "metrics.jsonl").write_text(f"{json.dumps(line)}\n" * steps)
        (folder / "environment.jsonl").write_text('{"git": {"commit": "0123456789", "dirty": true}}\n')

    def evaluate(self, checkpoint: str, output: Path, prompts: list[str]) -> None:
        rate = float(Path(checkpoint.partition(":")[0], "config.yaml").read_text())
        measures = {"reward": 0.0, "frechet": abs(rate - 2)}
        output.mkdir(parents=True)
        means = {name: {"own": {"mean": mean}} for name, mean in measures.items()}
        (output / "evaluation.json").write_text(json.dumps({"measures": means}))
        with (output / "samples.csv").open("w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(["prompt", "reward"])
            rows.writerows([prompt, i + sample] for i, prompt in enumerate(prompts) for sample in (0, 2))


@pytest.fixture
def machine(tmp_path, monkeypatch):
    marks = "<!-- table of scripts/comparisons/c.toml -->\n<!-- end of scripts/comparisons/c.toml -->\n"
    (tmp_path / "page.md").write_text(marks)
    (tmp_path / "c.toml").write_text(FILE)
    monkeypatch.setattr(compare, "REPO", tmp_path)
    monkeypatch.setattr(compare, "command", made := Machine(tmp_path))
    return made


def test_tuning_compute_and_table_and_what_has_finished_is_not_run_again(machine, capsys):
    compare.main(machine.root / "c.toml", machine.root / "runs")
    page = (machine.root / "page.md").read_text()
    trained = [words for words in machine.commands if words[0] != "evaluate"]
    of_a = [dict(itertools.pairwise(words)) for words in trained if "--a" in words]
    probe, *rest = of_a
    assert (probe["--steps"], probe["--seed"]) == ("5", "0") and "--rate" not in probe
    assert [(run["--seed"], run["--rate"], run["--steps"]) for run in rest] == [
        ("7", "1", "10"),
        ("7", "2", "10"),
        ("7", "3", "10"),
        ("0", "2", "10"),
        ("1", "2", "10"),
    ]
    assert {run["--init-from"].rpartition("-")[2] for run in rest} == {"0", "1", "7"}  # the start of the same seed
    assert len(trained) == 3 + 6 and len(machine.commands) == len(trained) + 3 + 4
    mean = 47 / 2 + 1  # of 48 prompts
    assert "| `a` | 2 | 10 | 1.40 | " + f"{mean:.2f} [" in page and "tuning chose `a` with `--rate 2`" in page
    assert "commit 01234567+" in page and "`a` against `b`, reward: a tie" in page
    assert page in ("", f"{page}") and page.count("<!-- end of") == 1
    done, machine.commands = machine.commands, []
    compare.main(machine.root / "c.toml", machine.root / "runs")
    assert done and not machine.commands and (machine.root / "page.md").read_text() == page


def test_tuning_reads_other_prompts_and_every_seed_has_its_own_noise(machine):
    compare.main(machine.root / "c.toml", machine.root / "runs")
    asked = [dict(itertools.pairwise(words)) for words in machine.commands if words[0] == "evaluate"]
    prompts = {of["--seeds"]: {*Path(of["--prompts"]).read_text().splitlines()} for of in asked}
    assert prompts.keys() == {"0", "1", "7"}
    assert prompts["0"] == prompts["1"] == {*validation_captions(48)} and prompts["7"] < {*training_captions()}
    assert not prompts["0"] & prompts["7"]
    assert all(int(of["--samples"]) * len(prompts[of["--seeds"]]) >= 512 for of in asked)


def test_a_stopped_run_is_resumed_and_other_settings_are_another_run(machine):
    compare.main(machine.root / "c.toml", machine.root / "runs", arms=("a",))
    (stopped,) = machine.root.glob("runs/base-*-1")
    (stopped / "checkpoints" / "step_4").rmdir()
    machine.commands = []
    compare.main(machine.root / "c.toml", machine.root / "runs", arms=("a",))
    assert machine.commands == [("--resume", str(stopped), "--steps", "4")]
    (machine.root / "c.toml").write_text(FILE.replace("steps = 4", "steps = 3"))
    machine.commands = []
    compare.main(machine.root / "c.toml", machine.root / "runs", arms=("a",))
    assert [words[words.index("--steps") + 1] for words in machine.commands if "base" in words] == ["3", "3", "3"]


def test_without_runs_the_page_says_so(machine):
    """By the words of the docs."""
    tyro.cli(compare.main, args=[str(machine.root / "c.toml"), "--no-run", "--output", str(machine.root / "runs")])
    assert not machine.commands
    assert (
        "Not measured yet.\n\n`python scripts/compare.py scripts/comparisons/c.toml` makes"
        in (machine.root / "page.md").read_text()
    )


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('start = "base"', 'start = "bas"', "bas is no arm"),
        ("seeds = [7]", "seeds = [1]", r"the seeds \[1\] tune and report"),
        ('measure = "reward"', 'measure = "rewards"', "a claim names rewards"),
        ("compute = 1.0e12", "", r"arms\.a needs steps"),
        ('run_of = "a"', 'run_of = "a", model = "tiny"', r"arms\.b needs one of"),
        ('lower = "b"', 'lower = "base"', "both must be shown"),
        ('flags = "--method base", steps = 4', 'model = "tiny"', r"arms\.a begins with"),
        ('lowest = "frechet"', 'lowest = "frechet"\nhighest = "reward"', "needs highest or lowest"),
        ('lowest = "frechet"', 'lowest = "distance"', "one of reward, frechet, train/loss"),
        ('[tuning]\nseeds = [7]\nlowest = "frechet"\n', "", r"arms\.a\.tune needs"),
    ],
)
def test_a_file_that_does_not_fit_is_refused(old, new, message, tmp_path):
    (tmp_path / "c.toml").write_text(FILE.replace(old, new, 1))
    with pytest.raises(ValueError, match=message):
        compare.Comparison.read(tmp_path / "c.toml")


# The files.


def test_every_comparison_has_its_place_in_the_docs():
    for name, comparison in COMPARISONS.items():
        around(REPO / comparison.page, name)
        assert len(comparison.seeds) in (4, 8) and comparison.claims


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPARISONS)
def test_the_flags_of_every_row_are_a_run(name, monkeypatch):
    """Also those that tuning tries."""
    comparison = COMPARISONS[name]
    sampler = {"num_steps": 4, "solver": "sde", "shift": 5.0, "guidance_scale": 1.0}
    for arm in comparison.arms.values():
        if not arm.flags:
            continue
        start = comparison.arms[arm.start].flags if arm.start else ""
        causal = "self_forcing" in start or "chunk-frames" in start
        trained = sampler | ({"chunks": {"chunk_frames": 1}} if causal else {}) if start else None
        monkeypatch.setattr(command_line, "trained_sampler", lambda spec, trained=trained: trained)
        flags = [*arm.flags.split(), *comparison.extra.split(), *(["--init-from", "a"] if start else [])]
        for tried in [[], *([flag, value] for flag, ways in arm.tune.items() for value in ways)]:
            run = command_line.parse([*flags, *tried])
            check(replace(run, init_from=None), ALONE)  # the run that it starts from is not made here


@pytest.mark.slow
def test_a_comparison_of_two_steps_from_end_to_end(tmp_path, monkeypatch):
    """Two methods at the compute of two steps of the first: runs, samples and table are real."""
    from forked import PROGRAM, program

    def ran(*words: str) -> None:
        done = program(*PROGRAM, *words)
        assert done.returncode == 0, done.stderr

    few = "--algorithm.num-prompts 2 --algorithm.num-samples 2 --algorithm.prompts-per-update 2"
    (tmp_path / "few.toml").write_text(f"""
page = "page.md"
seeds = [0, 1]
extra = "{few}"
measures = {{reward = 2, frechet = 1, "train/loss" = 3}}
arms.crd = {{flags = "--method crd", steps = 2}}
""")
    marks = "<!-- table of scripts/comparisons/few.toml -->\n<!-- end of scripts/comparisons/few.toml -->\n"
    (tmp_path / "page.md").write_text(marks)
    monkeypatch.setattr(compare, "command", ran)
    monkeypatch.setattr(compare, "REPO", tmp_path)
    monkeypatch.setattr(compare, "SAMPLES", 4)
    monkeypatch.setattr(compare, "PROMPTS", 2)
    compare.main(tmp_path / "few.toml", tmp_path / "runs")
    row = next(line for line in (tmp_path / "page.md").read_text().splitlines() if line.startswith("| `crd`"))
    _, name, seeds, steps, flops, reward, frechet, loss, _ = (cell.strip() for cell in row.split("|"))
    assert (name, seeds, steps) == ("`crd`", "2", "2")
    assert 0 < float(flops) < 0.1 and all("[" in cell for cell in (reward, frechet, loss))
