"""The documents name the metrics that runs write."""

import json
import re
from pathlib import Path

import pytest
from rules import each

REPO = Path(__file__).parents[2]
METRICS = REPO / "docs" / "metrics.md"
GOLDEN_RUNS = REPO / "tests" / "golden" / "runs.json"  # {run: {"metrics": [{metric: value}, ...]}}

# Placeholders of docs/metrics.md: a scorer or statistic, the number of a transition, a lag, a trained role or expert.
PLACEHOLDERS = {"NAME": r"[\w-]+", "S": r"\d+", "LAG": r"\d+", "ROLE": r"[a-z_]+(?:/(?:high|low))?"}
COLUMNS = 5  # metric; definition; unit, range; healthy; what to do otherwise


def _files(place: Path) -> list[Path]:
    kinds = {".md", ".py", ".sh", ".yaml"}
    return [place] if place.is_file() else sorted(path for path in place.rglob("*") if path.suffix in kinds)


def metric_rows() -> list[list[str]]:
    """Return the cells of every row of the tables in docs/metrics.md."""
    lines = METRICS.read_text(encoding="utf-8").splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| `")]
    assert rows, f"{METRICS} has no table of metrics"
    return rows


def documented_metrics() -> list[str]:
    """Return the names in the first column of docs/metrics.md, with their placeholders."""
    return [name for row in metric_rows() for name in re.findall(r"`([^`]+)`", row[0])]


def documented_pattern() -> re.Pattern[str]:
    """Return the expression that a documented metric matches as a whole.

    NAME, S and ROLE stand for whole parts of a name or parts before `_`, as in `reward/NAME_std` and `approx_kl/S`.
    """

    def expression(name: str) -> str:
        words = re.split(r"(\bNAME|\bS\b|LAG\b|\bROLE\b)", name)
        return "".join(PLACEHOLDERS.get(word) or re.escape(word) for word in words)

    return re.compile("|".join(expression(name) for name in documented_metrics()))


def undocumented(names: set[str]) -> list[str]:
    """Return the metrics, with or without the prefix `train/`, that docs/metrics.md does not define."""
    pattern = documented_pattern()
    return sorted(name for name in names - {"step"} if not pattern.fullmatch(name.removeprefix("train/")))


def test_every_row_of_metrics_is_complete():
    assert [row for row in metric_rows() if len(row) != COLUMNS or not all(row)] == []


def test_placeholders_stand_for_names():
    known = {"reward/hpsv3", "train/approx_kl/3", "student/grad_norm", "student/high/grad_norm", "validation/reward"}
    known |= {"train/ess/lag_12", "ess"}
    known |= {"validation/reward/hpsv3_std", "train/reward/hpsv3_std_in_groups", "validation/pixels/saturation"}
    assert undocumented(known) == []
    assert undocumented({"approx_kl/x", "ess/lag_", "train/nonsense"}) == ["approx_kl/x", "ess/lag_", "train/nonsense"]


def test_every_metric_of_the_golden_runs_is_documented():
    if not GOLDEN_RUNS.is_file():
        pytest.skip(f"{GOLDEN_RUNS.relative_to(REPO)} is absent")
    runs = json.loads(GOLDEN_RUNS.read_text(encoding="utf-8"))
    found = {name for run in runs.values() for row in run["metrics"] for name in row}
    assert undocumented(found) == []


TEXTS = [
    path for at in ("README.md", "Dockerfile", "docs", "examples", "unified_trainer") for path in _files(REPO / at)
]
LAUNCHED = r"torchrun (?:\\\n *)?-(?:[^`\n]|\\\n)*"  # a command of torchrun, over its lines
COMMANDS = [(path.name, found) for path in TEXTS for found in re.findall(LAUNCHED, path.read_text(encoding="utf-8"))]
STARTS = [(name, found) for name, found in COMMANDS if re.search(r"-m unified_trainer|\.py", found)]


@each(STARTS, str)
def test_torchrun_waits_for_a_step(_, command):
    """By itself it kills its ranks 30 s after SIGTERM."""
    assert "--shutdown-timeout " in command


def test_every_failure_names_its_tests():
    """docs/scale.md: the table of what happens when something dies."""
    page = (REPO / "docs" / "scale.md").read_text(encoding="utf-8")
    table = page.partition("### What happens when something dies")[2].partition("###")[0]
    rows = [line for line in table.splitlines() if line.startswith("|")][2:]
    files = (REPO / "tests").rglob("test_*.py")
    tests = {name for file in files for name in re.findall(r"^def (test_\w+)", file.read_text(encoding="utf-8"), re.M)}
    for row in rows:
        names = re.findall(r"`(test_\w+)`", row)
        assert names and set(names) <= tests, row


def test_metrics_of_the_troubleshooting_page_are_documented():
    """A symptom is confirmed by a metric that runs write: names with an underscore in its second column."""
    lines = (REPO / "docs" / "troubleshooting.md").read_text(encoding="utf-8").splitlines()
    cells = [line.split(" | ")[1] for line in lines if line.startswith("| ") and line.count(" | ") == 2]
    named = {name for cell in cells for name in re.findall(r"`([a-z]+(?:[_/][a-z]+)+)`", cell)}
    settings = {"max_grad_norm"}
    assert len(named) > 15 and undocumented(named - settings) == []


def test_the_number_of_pipelines_in_readme_is_that_of_the_rows_that_train():
    """docs/models.md, which `make pipelines` writes."""
    page = (REPO / "docs" / "models.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in page.splitlines()]
    rows = [cells for cells in rows if re.match(r"`\w+Pipeline", cells[0])]
    methods = ("dmd2", "dance_grpo", "diffusion_nft", "reward_gradient", "finetune")
    trained = {re.findall(r"\w+", name)[0] for name, _, _, trained in rows if trained.startswith(methods)}
    said = re.findall(r"(\d+) classes of diffusers [\d.]+ train", (REPO / "README.md").read_text(encoding="utf-8"))
    assert trained and said == [str(len(trained))]
