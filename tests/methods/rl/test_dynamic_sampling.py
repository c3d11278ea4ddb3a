"""Dynamic sampling replaces groups of equal rewards by further prompts, and prompts are drawn by their failures."""

import dataclasses

import pytest
import torch
from helpers import (
    ALONE,
    CAPTIONS,
    LATENT_SHAPE,
    SMALL,
    StubbornScorer,
    WatchedRollouts,
    assert_near,
    assert_same,
    checkpoint_of,
    dance_grpo,
    flags,
    metrics_of,
    reward_of,
    run,
    setup_of,
    tiny_codec,
)

from unified_trainer.__main__ import main
from unified_trainer.basics.errors import UserError
from unified_trainer.basics.requests import Request
from unified_trainer.basics.types import Rollout
from unified_trainer.data.batch_plan import BatchPlan
from unified_trainer.data.loader import Loader
from unified_trainer.data.prompts import Prompts
from unified_trainer.methods.dance_grpo import DanceGRPOConfig
from unified_trainer.methods.rl.dynamic_sampling import with_replacement
from unified_trainer.methods.rl.groups import Groups
from unified_trainer.methods.rl.rollouts import ScoredSamples
from unified_trainer.parallel.random import Streams
from unified_trainer.rewards.reward import Scores
from unified_trainer.sampling.solver import SamplerConfig

pytestmark = pytest.mark.slow

MANY = tuple(f"{caption}, number {i}" for i in range(2) for caption in CAPTIONS)
PLAN = BatchPlan(3, 2, 3, 6, ("P", "n", "G", "micro"))
CONFIG = DanceGRPOConfig(
    num_prompts=2, num_samples=3, prompts_per_update=2, rollout_batch=6, update_batch=6, timestep_fraction=1.0
)


@dataclasses.dataclass
class EqualRewards:
    """Samples whose x0 and reward are their id, but 0 is the reward of some prompts."""

    prompts: set[int]
    uniform: bool = True

    def samples(self, batch, step, rng) -> ScoredSamples:
        ids = zip(batch.prompt_ids, batch.sample_ids, strict=True)
        rewards = torch.tensor([0.0 if prompt in self.prompts else float(i) for prompt, i in ids])
        x0 = torch.tensor(batch.sample_ids).float().view(-1, 1, 1, 1, 1).expand(-1, *LATENT_SHAPE)
        scores = Scores(rewards[:, None], {"of": rewards}, rewards[:, None])
        made = Rollout.from_x0(x0)
        return ScoredSamples(batch, made, scores, torch.full((len(batch),), step))

    def metrics(self) -> dict[str, float]:
        return {}


def loader(plan: BatchPlan = PLAN, captions=MANY) -> Loader:
    return Loader(Prompts(Request.of(captions)), tiny_codec(), plan, LATENT_SHAPE, "", 0, ALONE)


def resampled(rounds: int, equal) -> tuple[ScoredSamples, dict[str, float], list[int]]:
    """Resample three prompts with two samples each; prompts in `equal` get equal rewards.

    Return the samples, the metrics, and the number of samples collected in each round.
    """
    one, config = loader(), dataclasses.replace(CONFIG, dynamic_sampling_rounds=rounds)
    made = WatchedRollouts(EqualRewards(equal))
    source = with_replacement(made, config, reward_of(), one)
    samples = source.samples(one.batch(0), 0, Streams(0, 0))
    return samples, source.metrics(), [len(part.batch) for part in made.seen]


def first_prompts() -> list[int]:
    return list(dict.fromkeys(loader().batch(0).prompt_ids))


# Dynamic sampling.


def test_a_group_of_equal_rewards_is_replaced_in_its_place():
    first = first_prompts()
    samples, metrics, made = resampled(3, {first[1]})
    new = loader().further(0, 0, 1)[0]
    assert samples.batch.prompt_ids == (first[0], first[0], new, new, first[2], first[2])
    assert samples.batch.prompts[2] == MANY[new] and new not in first
    assert samples.batch.sample_ids == (0, 1, 8, 9, 4, 5)  # the noise of new samples is new
    assert samples.scores.parts[:, 0].tolist() == samples.scores.statistics["of"].tolist() == [0, 1, 8, 9, 4, 5]
    assert samples.rollout.x0[:, 0, 0, 0, 0].tolist() == [0, 1, 8, 9, 4, 5]
    text = tiny_codec().encode_text([MANY[new]])["text"][0]
    torch.testing.assert_close(samples.batch.cond["text"][2], text)
    assert made == [6, 2] and metrics == {"resampled_groups": 1}


def test_until_none_is_left_or_the_rounds_are_over():
    """With equal rewards everywhere each round draws three other prompts, until the eight prompts are used up."""
    everything = set(range(len(MANY)))
    for rounds, drawn in ((0, []), (1, [6]), (2, [6, 4]), (9, [6, 4])):
        samples, metrics, made = resampled(rounds, everything)
        assert made == [6, *drawn]
        assert metrics == ({"resampled_groups": sum(drawn) / 2} if rounds else {})
        assert len(set(samples.batch.sample_ids)) == 6
    left = {*first_prompts(), *loader().further(0, 0, 3)}
    assert set(samples.batch.prompt_ids) & left  # with no prompt left, a group stays


def test_nothing_is_drawn_while_all_groups_differ():
    samples, metrics, made = resampled(5, set())
    assert made == [6] and samples.batch.sample_ids == (0, 1, 2, 3, 4, 5) and metrics == {"resampled_groups": 0}


def test_further_prompts_are_others_in_every_call():
    one = loader()
    for step in range(4):
        further = one.further(step, 0, 99)
        assert sorted(further + list(dict.fromkeys(one.batch(step).prompt_ids))) == list(range(8))
        assert one.further(step, 2, 2) == further[2:4]
    assert one.further(0, 0, 5) != one.further(1, 0, 5)


def test_the_update_trains_on_the_new_group():
    """The gradient is that of a step that never had the group of equal rewards."""

    def trained(**changes):
        first = dance_grpo(CONFIG).loader.batch(0).prompts[0]
        one = dance_grpo(dataclasses.replace(CONFIG, **changes), scorer=StubbornScorer({first}))
        return one, one.step(0)

    one, metrics = trained(dynamic_sampling_rounds=1)
    other, without = trained()
    assert (metrics["frac_zero_std_groups"], metrics["resampled_groups"], without["frac_zero_std_groups"]) == (
        0,
        1,
        0.5,
    )
    left = other.roles["student"].gradients[0]
    both = one.roles["student"].gradients[0]
    prompt = one.loader.further(0, 0, 1)[0]
    other.loader.batch = lambda step: one.loader.batch_of([prompt] * 3, [6, 7, 8])
    other.method.config = dataclasses.replace(CONFIG, num_prompts=1, prompts_per_update=1)
    other.step(0)
    new = other.roles["student"].gradients[1]
    assert_near(both, {key: (left[key] + new[key]) / 2 for key in both}, 1e-4)


# Prompts drawn by failures.

BY_FAILURES = BatchPlan(1, 2, 1, 2, ("algorithm.num_prompts", "n", "G", "micro"), by_failures=True)


def test_prompts_are_drawn_by_their_failures():
    """Counts (3, 0, 1) give probabilities (4, 1, 2) / 7; the standard deviation over 1400 draws is below .0135."""
    one = loader(BY_FAILURES, MANY[:3])
    one.note_failures([0, 2])
    one.note_failures([0])
    one.note_failures([0])
    drawn = torch.tensor([one._rows(step)[0] for step in range(1400)])
    frequencies = torch.bincount(drawn, minlength=3) / 1400
    torch.testing.assert_close(frequencies, torch.tensor([4.0, 1.0, 2.0]) / 7, rtol=0, atol=0.045)


def test_failures_are_forgotten():
    """With a half-life of two steps, failures of three, two and no steps ago count 2^-1.5, 2^-1 and 1."""
    config = dataclasses.replace(CONFIG, failure_below=1.0, failure_half_life=2)
    one = loader(dataclasses.replace(BY_FAILURES, failures_kept=config.plan().failures_kept), MANY[:3])
    for rows in ([0], [0], [], [2]):
        one.note_failures(rows)
    expected = torch.tensor([2**-1.5 + 2**-1, 0.0, 1.0], dtype=torch.float64)
    torch.testing.assert_close(one.state_dict()["failures"], expected)
    assert CONFIG.plan().failures_kept == 1
    assert loader(BY_FAILURES, MANY[:3]).state_dict()["failures"].dtype == torch.int64  # as checkpoints have it


def test_a_half_life_needs_a_threshold():
    with pytest.raises(UserError, match=r"algorithm\.failure_half_life needs algorithm\.failure_below"):
        dataclasses.replace(CONFIG, failure_half_life=2).check(setup_of(SamplerConfig(num_steps=4, guidance_scale=1.0)))


def test_a_batch_has_no_prompt_twice():
    one = loader(dataclasses.replace(BY_FAILURES, prompts=3, prompts_per_update=3), MANY[:3])
    one.note_failures([1] * 50)
    assert all(sorted(one._rows(step)) == [0, 1, 2] for step in range(5))


def test_too_many_prompts_are_refused():
    with pytest.raises(ValueError, match=r"algorithm\.num_prompts must be at most the 3 prompts .* not 4"):
        loader(dataclasses.replace(BY_FAILURES, prompts=4, prompts_per_update=4), MANY[:3])


def test_a_failure_is_a_group_below_the_threshold():
    """Two prompts get 0.5 for every sample, which is not below 0.5; the means of the others are as scored."""
    stubborn = set(CAPTIONS[:2])
    one = dance_grpo(
        dataclasses.replace(CONFIG, num_prompts=4, prompts_per_update=4, failure_below=10.0, reward_threshold=-1.0),
        scorer=StubbornScorer(stubborn),
    )
    metrics = one.step(0)
    assert one.loader.state_dict()["failures"].tolist() == [1, 1, 1, 1] and metrics["failed_groups"] == 1
    one.method.groups = Groups(dataclasses.replace(one.method.config, failure_below=0.5), one.method.reward, one.loader)
    batch = one.loader.batch(1)
    one.method.sample_from(watched := WatchedRollouts(one.method.rollouts))
    one.step(1)
    parts = watched.seen[0].scores.parts[:, 0]
    means = {p: parts[[i for i, q in enumerate(batch.prompt_ids) if q == p]].mean() for p in range(4)}
    expected = [1 + int(means[p] < 0.5) for p in range(4)]
    assert one.loader.state_dict()["failures"].tolist() == expected
    assert expected[:2] == [1, 1]  # 0.5 is not below 0.5


def test_counts_go_into_the_checkpoint(tmp_path):
    """Four steps give the same metrics and checkpoint as two and two."""
    options = flags(
        {
            "algorithm.failure-below": 2.8,
            "algorithm.failure-half-life": 3,
            "algorithm.dynamic-sampling-rounds": 1,
            "student.learning-rate": 1e-3,
            "steps": 4,
        }
    )
    straight, halved = tmp_path / "straight", tmp_path / "halved"
    run("dance_grpo", straight, *options)
    run("dance_grpo", halved, *options, "--steps", "2")
    assert main(["--resume", str(halved), "--steps", "4"]) == 0
    assert metrics_of(halved) == metrics_of(straight)
    held = checkpoint_of(straight, 4)
    assert_same(checkpoint_of(halved, 4), held)
    failed = sum(line["train/failed_groups"] * 2 * 0.5 ** ((4 - line["step"]) / 3) for line in metrics_of(straight))
    assert float(held["loader/failures"].sum()) == pytest.approx(failed) and failed > 0


def test_failures_are_not_counted_by_default():
    assert loader().state_dict() == {} and "--algorithm.failure-below" not in SMALL["dance_grpo"]
