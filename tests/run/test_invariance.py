"""What a run trains depends on neither the sizes of its passes, nor a stop, nor its ranks: for every method.

The suite runs a part of the cells, with changes of passes and a stop at once; `--all-cells` (`make invariance`) runs
each cell alone.
"""

import functools
import itertools
import sys
from pathlib import Path

import invariant_runs
import pytest
import torch
from cells import methods
from helpers import OF_CLIPS, REPO, checkpoint_of, free_port, metrics_of, refused
from invariant_runs import CHANGES, REFUSED, STEPS, VARIANTS, Change, start, words

from unified_trainer.__main__ import main
from unified_trainer.data.loader import Loader
from unified_trainer.run.registry import METHODS

sys.path.insert(0, str(REPO / "tests" / "parallel"))
from launch import fork_ranks

pytestmark = pytest.mark.slow
TOLERANCE = 1e-4  # of the largest value of a kind of tensors: weights, moments, averages of a role

# Every method in one variant: half of them with all weights, and with these where a variant is refused.
OTHERS = itertools.cycle(name for name in VARIANTS if name != "all weights")
TURNS = {method: "all weights" if at % 2 else next(OTHERS) for at, method in enumerate(METHODS)}
TURNS |= dict.fromkeys((method for method, variant in TURNS.items() if (method, variant) in REFUSED), "all weights")
SUITE = {(method, variant, "passes and a stop") for method, variant in TURNS.items()}
# Those whose ranks no test in tests/parallel compares.
OF_RANKS = ("consistency", "diffusion_nft", "distill_rl", "flow_map", "ode_init", "reward_gradient", "streaming_tuning")
SUITE |= {
    (method, "all weights", change)
    for method, change in zip(OF_RANKS, itertools.cycle(("two ranks", "sequence ranks")), strict=False)
}


def changes_something(method: str, name: str) -> bool:
    return name != "rollout batch" or invariant_runs.of_rollouts(method)


ALL = {
    cell
    for cell in itertools.product(METHODS, VARIANTS, CHANGES)
    if cell[2] != "passes and a stop" and changes_something(cell[0], cell[2])
}


def pytest_generate_tests(metafunc):
    if "cell" in metafunc.fixturenames:
        every = metafunc.config.getoption("--all-cells")
        cells = sorted(cell for cell in (ALL if every else SUITE) if cell[:2] not in REFUSED)
        kind = "ranked" if "ranked" in metafunc.fixturenames else "alone"
        chosen = [cell for cell in cells if (CHANGES[cell[2]].ranks > 1) == (kind == "ranked")]
        metafunc.parametrize("cell", chosen, ids=map(", ".join, chosen))
        metafunc.module.CHOSEN[kind] = chosen


CHOSEN: dict[str, list[tuple[str, str, str]]] = {}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def plain(folder):
    """The run of a method and a variant that nothing changed."""
    return functools.cache(lambda method, variant: start(folder, method, variant))


@pytest.fixture(scope="module")
def ranked(folder):
    """All cells of several ranks were run by them, each number of ranks started once."""
    invariant_runs.world(folder)
    for count in sorted({CHANGES[cell[2]].ranks for cell in CHOSEN["ranked"]}):
        cells = [cell for cell in CHOSEN["ranked"] if CHANGES[cell[2]].ranks == count]
        fork_ranks(count, invariant_runs.work, folder, cells, [free_port() for _ in cells])
    return folder


def kind_of(key: str) -> str:
    """student/weights of student/weights/blocks.0.ffn.weight."""
    return "/".join(key.split("/")[:2])


def assert_one_training(one: Path, other: Path) -> None:
    ours, theirs = checkpoint_of(one, STEPS), checkpoint_of(other, STEPS)
    assert ours.keys() == theirs.keys()
    largest: dict[str, float] = {}
    for key, value in theirs.items():
        largest[kind_of(key)] = max(largest.get(kind_of(key), 0.0), float(value.abs().max()))
    for key, value in theirs.items():
        bound = TOLERANCE * largest[kind_of(key)] if value.is_floating_point() else 0
        torch.testing.assert_close(ours[key], value, rtol=0, atol=bound, msg=lambda text, key=key: f"{key}: {text}")
    for row, expected in zip(metrics_of(one), metrics_of(other), strict=True):
        assert row == pytest.approx(expected, rel=1e-2, abs=1e-3)


def test_passes_and_stops_change_nothing_that_is_trained(cell, folder, plain):
    assert_one_training(start(folder, *cell), plain(*cell[:2]))


@pytest.mark.ranks
def test_ranks_change_nothing_that_is_trained(cell, ranked, plain):
    assert_one_training(ranked / ", ".join(cell), plain(*cell[:2]))


@pytest.mark.parametrize(("method", "variant"), REFUSED)
def test_what_cannot_be_trained_with_one_expert_is_refused(method, variant, folder, capsys):
    said = refused(capsys, *words(folder, method, variant, Change()))
    assert REFUSED[method, variant] in said


def rows_of(monkeypatch, *words: str) -> list[int]:
    """The prompts or clips that the training steps of a run take."""
    rows: list[int] = []
    batch = Loader.batch

    def noted(self, step):
        rows.extend(self.rows(step)[0][:: self.samples_per_prompt])
        return batch(self, step)

    with monkeypatch.context() as patched:
        patched.setattr(Loader, "batch", noted)
        assert main([*words]) == 0
    return rows


@pytest.mark.parametrize("method", methods())
def test_another_batch_on_resume_goes_on_with_the_next_row(method, folder, plain, monkeypatch, capsys):
    """Of whatever batches, a run takes the rows of one order: one more step of the whole batch is two of half of it."""
    size = "num-prompts" if invariant_runs.of_rollouts(method) else "batch-size"
    changed = [f"--algorithm.{size}", "2", "--allow", f"algorithm.{size.replace('-', '_')}"]
    whole, half = (invariant_runs.stopped(plain(method, "all weights"), 2, name) for name in ("whole", "half"))
    if method == "streaming_tuning":
        assert "needs a new run, with --init-from" in refused(capsys, "--resume", half, *changed)
        return
    expected = rows_of(monkeypatch, "--resume", str(whole))
    found = rows_of(monkeypatch, "--resume", str(half), "--steps", "4", *changed)
    of_clips = method in OF_CLIPS  # four are left of an epoch of six; their order is that of reading
    assert (sorted(found) == sorted(expected) if of_clips else found == expected) and len(set(expected)) == 4
