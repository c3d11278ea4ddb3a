"""What is computed of samples: against the formulas that validation uses, and what pairing and seeds are."""

from dataclasses import replace

import pytest
import torch
from evaluations import BOOTSTRAP, PLAN, measured

from unified_trainer.data.tiny_world import HELD_OUT
from unified_trainer.data.tiny_world_measures import world_distances
from unified_trainer.numerics.frechet import frechet_distance
from unified_trainer.rewards.pixels import diversity
from unified_trainer.tools.evaluate.measures import sign_of, summarise
from unified_trainer.tools.evaluate.plan import Plan

NONE = [{}, {}]  # no features to compare with


def of_seed(rows: list[dict], seed: int, name: str) -> list[float]:
    return [row[name] for row in rows if row["seed"] == seed]


def test_a_mean_is_over_all_samples_and_its_spread_over_seeds(tmp_path):
    one = measured(tmp_path)
    found = summarise([one], PLAN, BOOTSTRAP, [one.real]).measures["reward"][0]
    means = [sum(values) / len(values) for seed in PLAN.seeds for values in [of_seed(one.rows, seed, "reward")]]
    assert found.by_seed == pytest.approx(means)
    assert found.mean == pytest.approx(sum(means) / 2)
    assert found.std_over_seeds == pytest.approx(abs(means[0] - means[1]) / 2**0.5)


def test_a_common_shift_is_known_exactly_although_prompts_differ(tmp_path):
    """Prompts differ by 1 from each to the next: the mean is uncertain, its difference on the same samples is not."""
    summary = summarise([measured(tmp_path), measured(tmp_path, shift=0.25)], PLAN, BOOTSTRAP, NONE)
    (one,) = (one for one in summary.differences if one.measure == "reward")
    assert (one.left, one.right) == (0, 1)
    assert (one.difference, *one.interval) == pytest.approx((0.25, 0.25, 0.25))
    low, high = summary.measures["reward"][1].interval
    assert high - low > 1


def test_a_checkpoint_does_not_differ_from_itself(tmp_path):
    summary = summarise([measured(tmp_path), measured(tmp_path)], PLAN, BOOTSTRAP, NONE)
    assert {one.difference for one in summary.differences} == {0}
    assert {one.interval for one in summary.differences} == {(0, 0), None}


def test_samples_of_a_prompt_are_not_resampled_apart(tmp_path):
    """Each sample given ten times makes nothing more certain."""
    one, plan = measured(tmp_path), Plan(PLAN.prompts, 20, PLAN.seeds, 8, 1, 4)
    many = measured(tmp_path, plan)
    values = {(row["seed"], row["prompt"], row["sample"]): row["reward"] for row in one.rows}
    for row in many.rows:
        row["reward"] = values[row["seed"], row["prompt"], row["sample"] % 2]
    few, repeated = (
        summarise([rows], plan, BOOTSTRAP, NONE).measures["reward"][0] for rows, plan in ((one, PLAN), (many, plan))
    )
    assert repeated.interval == pytest.approx(few.interval)


def test_diversity_is_that_of_validation(tmp_path):
    one = measured(tmp_path, shift=0.5)
    found = summarise([one], PLAN, BOOTSTRAP, [one.real]).measures["pixels/diversity"][0]
    parts = one.tensors["thumbnails"].split(PLAN.size)
    ids = tuple(row["prompt"] for row in one.rows[: PLAN.size])
    assert found.by_seed == pytest.approx([diversity(part, ids) for part in parts])
    everything = diversity(one.tensors["thumbnails"], tuple((row["seed"], row["prompt"]) for row in one.rows))
    assert found.mean == pytest.approx(everything)
    assert found.interval[0] < found.mean < found.interval[1]


def test_one_sample_of_a_prompt_has_no_diversity_and_one_prompt_no_interval(tmp_path):
    plan = Plan(("one",), 1, (0,), 8, 1, 4)
    summary = summarise([measured(tmp_path, plan)], plan, BOOTSTRAP, NONE)
    assert "pixels/diversity" not in summary.measures
    found = summary.measures["reward"][0]
    assert (found.interval, found.std_over_seeds) == (None, None)


def test_the_frechet_distance_is_to_the_samples_of_the_reference(tmp_path):
    rows = [measured(tmp_path), measured(tmp_path, shift=1.0)]
    found = summarise(rows, PLAN, BOOTSTRAP, [rows[0].features] * 2).measures["frechet"]
    halves = [[part.flatten(0, 1) for part in row.tensors["features/frechet"].split(PLAN.size)] for row in rows]
    expected = [frechet_distance(left, right) for left, right in zip(halves[1], halves[0], strict=True)]
    assert found[1].by_seed == pytest.approx(expected)
    assert found[0].mean == pytest.approx(0, abs=1e-5)
    assert "frechet" not in summarise(rows, PLAN, BOOTSTRAP, NONE).measures  # no real clips are known


def test_it_is_to_real_clips_where_there_are_some(tmp_path):
    one = measured(tmp_path)
    drawn = torch.randn(one.features["frechet"].shape, generator=torch.Generator().manual_seed(5))
    one.tensors["real features/frechet"] = drawn
    found = summarise([one], PLAN, BOOTSTRAP, [one.real]).measures["frechet"][0]
    parts = (one.tensors[name][: PLAN.size].flatten(0, 1) for name in ("features/frechet", "real features/frechet"))
    assert found.by_seed[0] == pytest.approx(frechet_distance(*parts))


def test_speed_is_the_median_of_batches_without_the_first(tmp_path):
    measures = summarise([measured(tmp_path)], PLAN, BOOTSTRAP, NONE).measures
    assert measures["samples_per_second"][0].mean == 2
    assert measures["network_calls"][0].mean == 4
    cold = replace(measured(tmp_path), seconds=[9.0])
    measures = summarise([measured(tmp_path), cold], PLAN, BOOTSTRAP, NONE).measures
    assert "samples_per_second" not in measures and "network_calls" in measures


def test_a_scorer_that_repeats_the_reward_or_a_pixel_statistic_has_no_row(tmp_path):
    one = measured(tmp_path)
    rows = [row | {"reward/hpsv3": row["reward"], "reward/dark": 0.5, "pixels/dark": 0.5} for row in one.rows]
    measures = summarise([replace(one, rows=rows)], PLAN, BOOTSTRAP, NONE).measures
    assert {"reward", "reward/clip", "pixels/dark"} <= measures.keys()
    assert not {"reward/hpsv3", "reward/dark"} & measures.keys()
    other = [row | {"reward/dark": 0.4} for row in rows]
    assert (
        "reward/dark" in summarise([replace(one, rows=rows), replace(one, rows=other)], PLAN, BOOTSTRAP, NONE).measures
    )


def test_attributes_of_the_tiny_world_are_compared_with_its_law_for_each_seed(tmp_path):
    plan = replace(PLAN, prompts=tuple(subject.caption() for subject in HELD_OUT[: len(PLAN.prompts)]))
    one = measured(tmp_path, plan)
    names = [f"drawn/{name}" for name in ("size", "x", "y", "travel")]
    rows = [row | {name: 12.0 + row["seed"] + row["sample"] + i for i, name in enumerate(names)} for row in one.rows]
    measures = summarise([replace(one, rows=rows)], plan, BOOTSTRAP, NONE).measures
    captions = [plan.prompts[row["prompt"]] for row in rows[: plan.size]]
    for number, seed in enumerate(plan.seeds):
        own = {name: torch.tensor([row[name] for row in rows if row["seed"] == seed]) for name in names}
        for name, value in world_distances(own, captions).items():
            assert measures[name][0].by_seed[number] == value
    assert measures["world/size"][0].interval is None and measures["drawn/size"][0].interval is not None
    assert "world/size" not in summarise([one], plan, BOOTSTRAP, NONE).measures


@pytest.mark.parametrize(
    ("name", "sign"),
    [
        ("reward", 1),
        ("reward/clip", 1),
        ("accuracy/color", 1),
        ("frechet", -1),
        ("pixels/saturation", 0),
        ("world/size", -1),
        ("world/diversity", 0),
    ],
)
def test_signs(name, sign):
    assert sign_of(name) == sign
