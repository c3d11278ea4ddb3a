"""The batch that grows: sizes by Megatron's rule, each row once an epoch, any ranks, and what is refused."""

from dataclasses import replace
from itertools import accumulate

import pytest
from helpers import ALONE, LATENT_SHAPE, refused
from hypothesis import given
from hypothesis import strategies as st

from unified_trainer.basics.requests import Request
from unified_trainer.data.batch_plan import BatchPlan
from unified_trainer.data.loader import Loader
from unified_trainer.data.prompts import Prompts
from unified_trainer.data.ramp_up import RampUpConfig, ramped
from unified_trainer.parallel.mesh import Mesh, ParallelConfig

KEYS = ("P", "n", "G", "micro")
ROWS = 7
RISING = RampUpConfig(start=4, increment=4, samples=40)  # of groups of 2: updates of 2, 4, 6 prompts, then 8


def plan(updates: int = 1, num_samples: int = 2, prompts_per_update: int = 8) -> BatchPlan:
    return BatchPlan(updates * prompts_per_update, num_samples, prompts_per_update, 2, KEYS)


def loader(codec, ramp: RampUpConfig = RISING, mesh: Mesh = ALONE, updates: int = 1) -> Loader:
    rows = Prompts(Request.of(f"prompt {i}" for i in range(ROWS)))
    return Loader(rows, codec, ramped(plan(updates), ramp), LATENT_SHAPE, "", 0, mesh)


def megatron_sizes(start: int, increment: int, samples: int, whole: int, updates: int, steps: int) -> list[int]:
    """Samples of an update in each step, by Megatron's rule applied step by step to the samples seen so far."""
    increments, seen, sizes = (whole - start) // increment, 0, []
    for _ in range(steps):
        size = whole if seen > samples else min(whole, start + seen * increments // samples * increment)
        sizes.append(size)
        seen += updates * size
    return sizes


@st.composite
def rising(draw) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """The sizes of a plan and the settings of a batch that comes to them."""
    group, updates, count = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 5))
    start, increment = (group * draw(st.integers(1, 4)) for _ in range(2))
    return (updates, group, (start + count * increment) // group), (start, increment, draw(st.integers(1, 200)))


@given(rising())
def test_sizes_are_those_of_megatrons_rule(case):
    batch, ramp = plan(*case[0]), RampUpConfig(*case[1])
    grown, updates = ramped(batch, ramp), batch.prompts // batch.prompts_per_update
    whole = batch.prompts_per_update * batch.num_samples
    expected = megatron_sizes(ramp.start, ramp.increment, ramp.samples, whole, updates, 60)
    sizes = [grown.at(step).prompts_per_update * batch.num_samples for step in range(60)]
    assert sizes == expected
    assert {grown.at(step).prompts // grown.at(step).prompts_per_update for step in range(60)} == {updates}


@pytest.mark.slow
@given(rising())
def test_prompts_are_counted_step_by_step_and_back(case):
    grown = ramped(plan(*case[0]), RampUpConfig(*case[1]))
    before = [0, *accumulate(grown.at(step).prompts for step in range(40))]
    assert [grown.prompts_before(step) for step in range(41)] == before
    for step in range(1, 41):  # the fewest steps that have so many prompts
        assert grown.steps_for(before[step]) == step == grown.steps_for(before[step - 1] + 1)


def test_a_plan_without_a_rise_is_left_as_it_is():
    batch = plan()
    assert ramped(batch, RampUpConfig()) is batch and batch.at(5) is batch


@pytest.mark.parametrize("updates", [1, 2])
def test_each_row_once_in_an_epoch(codec, updates):
    one, steps = loader(codec, updates=updates), 12
    rows = [row for step in range(steps) for row in one.rows(step)[0][::2]]  # a group has two samples
    for start in range(0, len(rows) - ROWS, ROWS):
        assert sorted(rows[start : start + ROWS]) == [*range(ROWS)]
    sizes = [one.samples_at(step) for step in range(steps)]
    assert sizes[0] == 4 * updates and sizes[-1] == 16 * updates and sizes == sorted(sizes)
    assert len(set(one.prompts(2)[1:])) == min(ROWS, sum(sizes[:2]) // 2)


def test_ranks_hold_the_samples_of_one_rank_between_them(codec):
    for step in range(8):
        whole = [*zip(*loader(codec).rows(step), strict=True)]
        meshes = [replace(ALONE, rank=rank, size=2, config=ParallelConfig(replicate=2, shard=1)) for rank in (0, 1)]
        parts = [pair for mesh in meshes for pair in zip(*loader(codec, mesh=mesh).rows(step), strict=True)]
        assert sorted(parts, key=lambda pair: pair[1]) == whole


def test_a_step_is_known_without_the_steps_before(codec):
    forward = [loader(codec).rows(step) for step in range(8)]
    one = loader(codec)
    assert [one.rows(step) for step in reversed(range(8))][::-1] == forward


def test_ranks_that_divide_the_whole_batch_and_no_smaller_one_are_refused():
    grown = ramped(plan(num_samples=1), RampUpConfig(start=2, increment=2, samples=12))
    assert grown.table(2)["ranks"] == 2
    with pytest.raises(ValueError, match=r"4 ranks do not divide an update of 2 samples: set .* multiples of 4"):
        grown.table(4)
    groups = replace(ramped(plan(), RampUpConfig(start=4, increment=4, samples=12)), whole_groups=True)
    with pytest.raises(ValueError, match=r"8 ranks do not divide an update of 4 samples: set .* multiples of 16"):
        groups.table(8)


@pytest.mark.parametrize(
    ("ramp", "message"),
    [
        (RampUpConfig(start=4), "ramp_up.increment must be above 0"),
        (RampUpConfig(increment=4, samples=3), "ramp_up.start must be above 0"),
        (RampUpConfig(start=3, increment=1, samples=9), r"ramp_up.start must be a multiple of n \(2\), not 3"),
        (RampUpConfig(start=4, increment=3, samples=9), r"ramp_up.increment must be a multiple of n \(2\), not 3"),
        (RampUpConfig(start=4, increment=8, samples=9), r"must be the 16 samples of an update \(G\)"),
        (RampUpConfig(start=16, increment=4, samples=9), r"must be the 16 samples of an update \(G\)"),
        (RampUpConfig(start=20, increment=4, samples=9), r"must be the 16 samples of an update \(G\)"),
    ],
)
def test_sizes_that_do_not_come_to_the_batch_are_refused(ramp, message):
    with pytest.raises(ValueError, match=message):
        ramped(plan(), ramp)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("streaming_tuning --ramp-up.start 2 --ramp-up.increment 2 --ramp-up.samples 4", "continues samples"),
        (
            "dance_ppo --algorithm.num-prompts 4 --algorithm.prompts-per-update 4 --ramp-up.start 1 "
            "--ramp-up.increment 1 --ramp-up.samples 9",
            "ramp_up.start 1: algorithm.num_prompts x algorithm.num_samples must be at least 2",
        ),
    ],
)
def test_a_method_that_cannot_have_a_smaller_batch_refuses_it(flags, said, capsys, tmp_path):
    words = ["--method", *flags.split(), "--recipe", "tiny", "--device", "cpu", "--output", str(tmp_path / "run")]
    assert said in refused(capsys, *words)
    assert not (tmp_path / "run" / "config.yaml").exists()
