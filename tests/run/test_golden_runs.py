"""Short runs of every method give the metrics of tests/golden/runs.json, which scripts/make_golden_runs.py writes.

Losses and gradient norms must agree to 1e-4. Runs without AVX and oneDNN's newer instructions differ by at most 1e-5
there, and by 2e-4 in rewards and other values that follow from samples. A mean of log-ratios of both signs cancels: it
differs by 1e-8 from one processor to another.
"""

import json
import re
import sys

import pytest
from helpers import REPO

from unified_trainer.run.registry import METHODS

sys.path.insert(0, str(REPO / "scripts"))
import make_golden_runs

RUNS = json.loads(make_golden_runs.FILE.read_text(encoding="utf-8"))
EXACT = re.compile(
    r"step|.*(frac_\w+_groups|resampled_groups|failed_groups|_updates|_advantage|learning_rate|window_first|transitions_\w+|old_decay)"
)
LOSSES = re.compile(r".*(loss|grad_norm|sample_power)")


def test_every_method_has_a_golden_run():
    assert {flags[flags.index("--method") + 1] for flags in (run["flags"] for run in RUNS.values())} == set(METHODS)


def test_the_file_holds_the_runs_of_its_script():
    assert {name: run["flags"] for name, run in RUNS.items()} == {
        name: flags.split() for name, flags in make_golden_runs.RUNS.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_golden_run_keeps_its_numbers(name, run_folder):
    expected, found = RUNS[name]["metrics"], make_golden_runs.metrics_of(RUNS[name]["flags"], run_folder)
    assert [row.keys() for row in found] == [row.keys() for row in expected]
    for step, row in zip(found, expected, strict=True):
        for key, value in row.items():
            if EXACT.fullmatch(key.removeprefix("train/")):
                assert step[key] == value, key
            else:
                tolerance, least = 1e-4 if LOSSES.fullmatch(key) else 1e-3, 1e-7 if key.endswith("log_ratio") else 1e-8
                assert step[key] == pytest.approx(value, rel=tolerance, abs=least), (row["step"], key)
