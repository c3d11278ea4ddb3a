"""The position in data: whatever batches a run is continued with, each row of an epoch comes once, in its order."""

import dataclasses
import json

import pytest
from helpers import ALONE, LATENT_SHAPE, SMALL, refused, tiny_codec
from hypothesis import given, settings
from hypothesis import strategies as st

from unified_trainer.__main__ import main
from unified_trainer.basics.requests import Request
from unified_trainer.data.batch_plan import BatchPlan, Position
from unified_trainer.data.loader import Loader
from unified_trainer.data.prompts import Prompts
from unified_trainer.data.ramp_up import RampUpConfig, ramped
from unified_trainer.run.checkpoint import manifest

KEYS = ("P", "n", "G", "micro")
NEVER = RampUpConfig()
KINDS = ("shuffled", "in file order", "stored")


class Stored(Prompts):
    """Rows of files with row groups of 3, 5 and 4 rows, read from `lanes` of them at a time."""

    row_groups = (3, 5, 4)

    def __init__(self, lanes: int) -> None:
        super().__init__(Request.of(f"prompt {i}" for i in range(12)))
        self.lanes = lanes

    def prefetch(self, indices): ...
    def trajectory(self, indices): ...
    def condition(self, indices): ...
    def to_encode(self, rows): ...
    def close(self): ...


def loader(kind, prompts, lanes=1, samples=1, ramp=NEVER) -> Loader:
    source = Stored(lanes) if kind == "stored" else Prompts(Stored(1).requests)
    plan = ramped(BatchPlan(prompts, samples, prompts, 1, KEYS), ramp)
    return Loader(source, tiny_codec(), plan, LATENT_SHAPE, "", 3, ALONE, shuffle=kind != "in file order")


def rows_of(one: Loader, step: int) -> list[int]:
    return one.rows(step)[0][:: one.samples_per_prompt]


PARTS = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 3), st.integers(0, 6)), min_size=1, max_size=5)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(st.sampled_from(KINDS), PARTS, st.booleans())
def test_any_batches_over_resumes_take_each_row_of_an_epoch_once(kind, parts, grows):
    """`parts` are starts of a run: prompts of a step, samples of a prompt, and steps. The first batch may grow."""
    rows, step, held = [], 0, None
    for number, (prompts, samples, steps) in enumerate(parts):
        ramp = RampUpConfig(samples, samples, 9) if grows and number == 0 and prompts > 1 else NEVER
        one = loader(kind, prompts, min(prompts, 2 + number % 2), samples, ramp)
        if held is not None:
            one.go_on(Position(**json.loads(held)))
        assert [rows_of(one, step)] == [rows_of(one, step)]  # asked for again, as workers do ahead
        for _ in range(steps):
            rows += rows_of(one, step)
            step += 1
        held = json.dumps(dataclasses.asdict(one.position(step)))
        assert one.position(step).prompts == len(rows)
    for start in range(0, len(rows), 12):
        epoch = rows[start : start + 12]
        assert len({*epoch}) == len(epoch)
    if kind != "stored":  # whose order mixes the row groups of a batch
        whole = loader(kind, 1)
        assert rows == [row for k in range(len(rows)) for row in rows_of(whole, k)]


def test_the_rest_of_an_epoch_of_row_groups_is_laid_out_for_the_new_batch():
    """Of 4 lanes, half of the batch has 2: no step alternates between row groups of different lanes."""
    before, after = loader("stored", 4, lanes=2), loader("stored", 2, lanes=1)
    after.go_on(before.position(1))
    groups = [sum(row >= edge for edge in (3, 8)) for step in range(1, 5) for row in rows_of(after, step)]
    assert groups == sorted(groups, key=groups.index)  # one after the other


@pytest.mark.parametrize("rows", [12, 20])
def test_epochs_count_the_rows_that_were_taken(rows):
    plan = BatchPlan(4, 1, 4, 1, KEYS)
    later = dataclasses.replace(BatchPlan(3, 1, 3, 1, KEYS), begun=dataclasses.replace(plan.begun, step=2, prompts=8))
    steps = later.steps_for(rows)
    assert steps == 2 + -(-(rows - 8) // 3) and later.prompts_before(steps) >= rows > later.prompts_before(steps - 1)


# Whole runs.


def taken(monkeypatch, *words: str) -> list[list[int]]:
    """The rows of each training step of a run."""
    steps: list[list[int]] = []
    batch = Loader.batch

    def noted(self, step):
        steps.append(rows_of(self, step))
        return batch(self, step)

    with monkeypatch.context() as patched:
        patched.setattr(Loader, "batch", noted)
        assert main([*words]) == 0
    return steps


@pytest.mark.slow
def test_a_run_goes_on_with_the_next_row_and_an_old_one_asks_for_a_checkpoint(tmp_path, monkeypatch, capsys):
    run, changed = tmp_path / "run", ("--algorithm.batch-size", "4", "--allow", "algorithm.batch_size")
    small = [*SMALL["finetune"], "--data.num-clips", "12", "--data.no-shuffle", "--output", str(run)]
    assert taken(monkeypatch, *small, "--steps", "1", "--validate-every", "0") == [[0, 1]]
    folder = run / "checkpoints" / "step_1"
    held, _ = manifest.read(folder)
    old = {key: value for key, value in held.items() if key not in ("crc32", manifest.POSITION)}
    (folder / manifest.FILE).write_text(manifest.as_text(old))
    said = refused(capsys, "--resume", str(run), "--steps", "2", *changed)
    assert f"--allow algorithm.batch_size: {folder} is of an earlier version" in said
    assert taken(monkeypatch, "--resume", str(run), "--steps", "2") == [[2, 3]]  # as --resume ... --steps 2 says
    after = taken(monkeypatch, "--resume", str(run), "--epochs", "1", *changed)
    assert after == [[4, 5, 6, 7], [8, 9, 10, 11]]
