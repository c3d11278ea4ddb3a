"""The experience buffer: which groups it gives by hand, what an update makes of them, checkpoints, and refusals."""

import dataclasses
from collections import deque

import pytest
import torch
from helpers import (
    ALONE,
    CAPTIONS,
    LATENT_SHAPE,
    ScriptedScorer,
    WatchedRollouts,
    assert_near,
    assert_same,
    dance_grpo,
    dance_ppo,
    tiny_codec,
)
from policy_case import CONFIG, ODE, REWARDS

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.requests import Request
from unified_trainer.basics.types import Rollout
from unified_trainer.data.batch_plan import BatchPlan
from unified_trainer.data.loader import Loader
from unified_trainer.data.prompts import Prompts
from unified_trainer.methods.dance_ppo import DancePPOConfig
from unified_trainer.methods.rl.buffer import BufferConfig, ExperienceBuffer, FreshRows
from unified_trainer.methods.rl.rollout_method import with_buffer
from unified_trainer.methods.rl.rollouts import STORED, ScoredSamples
from unified_trainer.parallel.random import Streams
from unified_trainer.rewards.reward import Scores
from unified_trainer.run.checkpoint import dcp
from unified_trainer.run.plan.plan import check
from unified_trainer.run.settings.command_line import parse
from unified_trainer.run.trainer import Trainer

MANY = tuple(f"{caption}, number {i}" for i in range(4) for caption in CAPTIONS)
PLAN = BatchPlan(4, 2, 2, 4, ("P", "n", "G", "micro"))  # four groups of two samples, in two updates
HALF = BufferConfig(share=0.5, order="newest")


class Numbered:
    """Samples whose x0 is 100 times the training step plus their id; their reward is their id."""

    uniform, check = True, None

    def __init__(self) -> None:
        self.asked, self.lowered = [], 0

    def samples(self, batch, step, rng) -> ScoredSamples:
        self.asked.append(batch.sample_ids)
        ids = torch.tensor(batch.sample_ids).float()
        x0 = (100 * step + ids).view(-1, 1, 1, 1, 1).expand(-1, *LATENT_SHAPE)
        scores = Scores(ids[:, None], {"of": ids}, ids[:, None])
        return ScoredSamples(batch, Rollout.from_x0(x0), scores, torch.full((len(batch),), step))

    def metrics(self) -> dict[str, float]:
        return {"asked": float(len(self.asked[-1]))}

    def lower_ahead(self) -> None:
        self.lowered += 1


def loader(captions=MANY, plan: BatchPlan = PLAN) -> Loader:
    return Loader(Prompts(Request.of(captions)), tiny_codec(), plan, LATENT_SHAPE, "", 0, ALONE)


def shown(samples: ScoredSamples) -> list[tuple[int, int]]:
    """Training step and id of each sample, as its x0 says."""
    return [divmod(int(x), 100) for x in samples.rollout.end(range(len(samples.batch)))[:, 0, 0, 0, 0].tolist()]


# Which groups.


def test_the_newest_groups_by_hand():
    """Half of the slots, one of each update: 1 and 2 in odd steps, 0 and 3 in even ones. Each group is used twice."""
    source, one = Numbered(), loader()
    buffer = ExperienceBuffer(source, HALF, one)
    for step, wanted in enumerate([(0, 0, 0, 0), (1, 0, 0, 1), (1, 2, 2, 1), (3, 2, 2, 3)]):
        batch = one.batch(step)
        samples = buffer.samples(batch, step, Streams(0, step))
        steps = [made for made in wanted for _ in range(2)]
        assert shown(samples) == list(zip(steps, range(8), strict=True))
        assert samples.batch.sample_ids == batch.sample_ids and samples.versions.tolist() == steps
        prompts = [one.batch(made).prompt_ids[i] for i, made in enumerate(steps)]
        assert samples.batch.prompt_ids == tuple(p + STORED * (step - m) for p, m in zip(prompts, steps, strict=True))
        assert samples.batch.prompts == tuple(MANY[p] for p in prompts)
        torch.testing.assert_close(samples.batch.cond["text"], tiny_codec().encode_text(samples.batch.prompts)["text"])
        assert samples.scores.parts[:, 0].tolist() == samples.scores.statistics["of"].tolist() == [*range(8)]
        assert samples.made_in == {i: made for i, made in enumerate(steps) if made < step}
        new = tuple(i for i, made in enumerate(steps) if made == step)
        assert source.asked[-1] == new and tuple(FreshRows(HALF, one).rows(step)[1]) == new
        groups = {0: 4, 1: 6, 2: 8, 3: 10}[step]
        assert buffer.metrics() == {"buffer_groups": groups, "asked": len(new)} | ({"buffer_age": 1} if step else {})


@pytest.mark.parametrize("share", [0.25, 0.5, 0.75])
@pytest.mark.parametrize("order", ["random", "newest"])
def test_draws_are_those_of_a_simulation_of_every_slot(share, order):
    """Each slot is a queue of `capacity` groups; a draw is a uniform number of seed, step and slot."""
    config, one = BufferConfig(share=share, capacity=3, order=order), loader()
    buffer, queues, several = ExperienceBuffer(Numbered(), config, one), [deque(maxlen=3) for _ in range(4)], 0
    for step in range(16):
        samples = buffer.samples(one.batch(step), step, Streams(7, step))
        count = int(4 * share) if step else 0
        places = [0, 2, 3, 1]  # first places of updates 0 and 1, then second places, the other way round
        stored = {places[(step + i * 4 // count) % 4] for i in range(count)}
        wanted = []
        for slot, queue in enumerate(queues):
            if slot not in stored:
                queue.append(step)
                wanted.append(step)
                continue
            several += len(queue) > 1
            newest = list(reversed(queue))
            u = Streams(7, step).uniform("buffer", [slot]).item() if order == "random" else 0.0
            wanted.append(newest[int(u * len(newest))])
        assert shown(samples) == [(made, 2 * slot + i) for slot, made in enumerate(wanted) for i in range(2)]
        assert buffer.metrics()["buffer_groups"] == sum(map(len, queues))
    assert several > 10


def test_samples_that_lag_too_far_are_drawn_no_more():
    """A slot then gives its two newest groups at most; the source makes samples less ahead."""
    source, one = Numbered(), loader()
    buffer = ExperienceBuffer(source, BufferConfig(share=0.5, capacity=3), one)
    buffer.lower_ahead()
    assert source.lowered == 1 and int(buffer.state_dict()["reach"]) == 2
    ages = set()
    for step in range(40):
        samples = buffer.samples(one.batch(step), step, Streams(0, step))
        ages |= {step - made for made, _ in shown(samples)}
    assert ages | {2} == {0, 1, 2, 3}  # slots are filled every other step, and in steps 0 and 1
    for _ in range(3):
        buffer.lower_ahead()
    assert int(buffer.state_dict()["reach"]) == 1


# What an update makes of them.


def trainer(buffer: BufferConfig | None = HALF, make=dance_grpo, **changes) -> Trainer:
    rest = {key: changes.pop(key) for key in ("moves", "captions", "seed", "sampler", "scorer") if key in changes}
    config = dataclasses.replace(changes.pop("config", CONFIG), **changes)
    one = make(config, **{"scorer": ScriptedScorer(REWARDS), "sampler": ODE} | rest)
    kept = None if buffer is None else with_buffer(one.method, buffer)
    return Trainer(one.method, one.roles, one.loader, one.mesh, seed=one.seed, buffer=kept)


def recorded(one: Trainer, role: str = "student") -> list[dict[str, torch.Tensor]]:
    return one.roles[role].gradients


class BySlot:
    """A scorer that gives each sample of a step the reward of its place, also where some are not made."""

    def __init__(self, one=None) -> None:
        self.ids = []

    def __call__(self, images, prompts):
        ids = [self.ids.pop(0) for _ in prompts]
        return torch.tensor([REWARDS[i] for i in ids])


def by_slot(buffer: BufferConfig | None, **changes) -> Trainer:
    """A trainer whose samples have the rewards of their places."""
    scorer = BySlot()
    one = trainer(None, scorer=scorer, **changes)
    source = one.method.rollouts

    class Told(WatchedRollouts):
        def samples(self, batch, step, rng):
            scorer.ids += batch.sample_ids
            return super().samples(batch, step, rng)

    one.method.sample_from(Told(source))
    kept = None if buffer is None else with_buffer(one.method, buffer)
    return Trainer(one.method, one.roles, one.loader, one.mesh, seed=one.seed, buffer=kept)


def mean(*parts: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: torch.stack([part[key] for part in parts]).mean(0) for key in parts[0]}


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"update_batch": 3, "best_of_n": 2},
        {"guard": True},
        {"init_same_noise": True, "captions": CAPTIONS[:1]},
        {"trajectories": "cpu", "rollout_batch": 3},
    ],
)
def test_an_update_is_the_mean_over_fresh_and_stored_groups(changes):
    """While the student does not move, a stored group has the gradient that it had when it was made, and ratio 1.

    With one prompt, the stored group and the fresh one of that prompt are still two groups, with two initial noises.
    """
    apart = by_slot(None, **changes, num_prompts=2, prompts_per_update=1)
    for step in range(2):
        apart.step(step)
    one = by_slot(HALF, **changes)
    first, second = (one.step(step) for step in range(2))
    groups = recorded(apart)  # slots 0 and 1 of step 0, then of step 1
    if "captions" not in changes:  # of one prompt, the two groups of a step are one
        assert_near(recorded(one)[0], mean(*groups[:2]), 1e-4)
        assert_near(recorded(one)[1], mean(groups[2], groups[1]), 1e-4)
    assert "buffer_age" not in first and (second["buffer_age"], second["buffer_groups"]) == (1, 3)
    assert second["log_ratio_abs_max"] < 1e-6
    assert second["approx_kl/lag_1"] < 1e-10  # the noise is that of the step that made them
    assert (second["lag"], second["lag_max"]) == (0.5, 1)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"correction": "decoupled"}, {"correction": "loglinear"}, {"guard": True}])
def test_a_stored_sample_counts_as_one_made_ahead_with_the_same_versions(changes):
    """The source that hands over the very same samples, versions and noise without a buffer gives the same bits."""
    clip = {"clip_low": 1e-2, "clip_high": 1e-2}
    one = by_slot(BufferConfig(share=0.5, capacity=2), moves=True, **clip, **changes)
    watched = WatchedRollouts(one.method.rollouts)
    one.method.sample_from(watched)
    metrics = [one.step(step) for step in range(4)]

    class Handed:
        uniform, check = True, None

        def samples(self, batch, step, rng):
            return watched.seen[step]

        def metrics(self):
            return {}

        def lower_ahead(self):
            pass

    other = trainer(None, moves=True, **clip, **changes)
    other.method.sample_from(Handed())
    for step in range(4):
        found = other.step(step)
        assert found == {name: value for name, value in metrics[step].items() if not name.startswith("buffer")}
    for ours, theirs in zip(recorded(one), recorded(other), strict=True):
        assert_same(ours, theirs)
    lagging = [value for name, value in metrics[3].items() if name.startswith("approx_kl/lag_") and name[-1] != "0"]
    assert lagging and all(value > metrics[3]["approx_kl/lag_0"] for value in lagging)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"update_batch": 2}, {"rollout_batch": 3}, {"trajectories": "cpu"}])
def test_the_numbers_do_not_depend_on_how_samples_are_divided(changes):
    plain, divided = (by_slot(BufferConfig(share=0.5), moves=True, **each) for each in ({}, changes))
    for step in range(3):
        assert divided.step(step) == pytest.approx(plain.step(step), rel=2e-2, abs=1e-6)
    for ours, theirs in zip(recorded(divided), recorded(plain), strict=True):
        assert_near(ours, theirs, 1e-3)


@pytest.mark.slow
def test_dynamic_sampling_stores_the_groups_that_came_in_place_of_equal_ones():
    """Slot 1 of step 0 is made again, with id 4 + 8; the next step trains on it again, with the noise of that id."""
    rewards = (*REWARDS[:4], 1.0, 1.0, 1.0, 1.0, *REWARDS[:4])
    one = trainer(HALF, scorer=ScriptedScorer(rewards), dynamic_sampling_rounds=1, captions=MANY)
    watched = WatchedRollouts(one.method.rollouts)
    one.method.sample_from(watched)
    first, second = (one.step(step) for step in range(2))
    assert first["resampled_groups"] == 1
    made, again = watched.seen
    assert made.batch.sample_ids[4:] == again.batch.sample_ids[4:] == (12, 13, 14, 15)
    assert torch.equal(made.rollout.x0[4:], again.rollout.x0[4:])
    assert again.batch.requests[4:] == made.batch.requests[4:]
    assert second["approx_kl/lag_1"] < 1e-10 and second["frac_zero_std_groups"] == 0


@pytest.mark.slow
def test_a_stored_group_is_no_further_failure_of_its_prompt():
    """All groups fail; in step 1 the fresh one alone is counted."""
    one = trainer(HALF, failure_below=100.0, captions=MANY)
    for step in range(2):
        one.step(step)
    assert int(one.loader.state_dict()["failures"].sum()) == 3


@pytest.mark.slow
def test_ppo_values_stored_samples_anew():
    config = DancePPOConfig(num_prompts=4, prompts_per_update=4, rollout_batch=4, update_batch=4, timestep_fraction=1.0)
    one = trainer(HALF, make=dance_ppo, config=config, scorer=ScriptedScorer((1.0, 2.0, 4.0, 3.0, 0.0, 5.0)))
    _, second = (one.step(step) for step in range(2))
    assert second["approx_kl/lag_1"] < 1e-10 and second["reward"] == pytest.approx((2 + 3 + 0 + 5) / 4)


# Checkpoints.


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"dynamic_sampling_rounds": 1, "captions": MANY}, {"trajectories": "cpu"}])
def test_a_run_continues_from_its_checkpoint_bit_for_bit(tmp_path, changes):
    """Stored samples of several steps, and a reward that makes some groups equal."""

    def coarse(images, prompts):
        return (30 * images.float().flatten(1).mean(1)).round()

    def new():
        config = BufferConfig(share=0.5, capacity=3)
        return trainer(config, moves=True, num_prompts=4, num_samples=2, scorer=coarse, **changes)

    straight = new()
    metrics = [straight.step(step) for step in range(6)]
    half = new()
    for step in range(3):
        half.step(step)
    dcp.save(tmp_path / "checkpoints", 3, half.tensors(), ALONE)
    again = new()
    assert again.resume(tmp_path) == (3, [])
    again.method.update.on_policy.over = True
    assert [again.step(step) for step in (3, 4, 5)] == metrics[3:]
    assert_same(again.tensors(), straight.tensors())
    assert len({row["buffer_age"] for row in metrics[1:]}) > 2
    if changes.get("dynamic_sampling_rounds"):
        assert sum(row["resampled_groups"] for row in metrics) > 0


@pytest.mark.parametrize("captions", [tuple(caption.upper() for caption in MANY), CAPTIONS[:1]])
def test_a_buffer_whose_prompts_have_changed_says_so(captions):
    one = loader()
    buffer = ExperienceBuffer(Numbered(), HALF, one)
    buffer.samples(one.batch(0), 0, Streams(0, 0))
    other = loader(captions)
    again = ExperienceBuffer(Numbered(), HALF, other)
    again._columns = buffer._columns
    with pytest.raises(UserError, match="the prompts are not those of the samples in the experience buffer"):
        again.samples(other.batch(1), 1, Streams(0, 1))


def test_a_buffer_that_is_off_is_not_there():
    one = trainer(None)
    assert not [key for key in one.tensors() if "buffer" in key]
    assert BufferConfig().slots(5, 8, 2) == set()


# Settings.

GROWING = ["--ramp-up.start", "16", "--ramp-up.increment", "16", "--ramp-up.samples", "64"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            ["--rollouts.buffer.share", ".3"],
            r"share 0\.3 of algorithm\.num_prompts \(16\) must be whole groups.*: 0\.0625, ",
        ),
        (["--rollouts.buffer.capacity", "8"], r"buffer\.order need rollouts\.buffer\.share above 0"),
        (["--rollouts.buffer.share", ".01"], r"share 0\.01 of algorithm\.num_prompts"),
        (["--rollouts.buffer.share", "1"], r"rollouts\.buffer\.share"),
        (
            ["--rollouts.buffer.share", ".5", "--algorithm.window.size", "1"],
            r"share must be 0 with a window that moves",
        ),
        (
            ["--rollouts.buffer.share", ".5", *GROWING],
            r"share must be 0 where ramp_up lets the batch grow",
        ),
        (
            ["--rollouts.buffer.share", ".5", "--reward.statistics-every", "2"],
            r"share needs reward\.statistics_every 1",
        ),
        (["--rollouts.super-batch", "2"], r"rollouts\.super_batch needs rollouts\.workers above 0"),
        (["--method", "dmd2", "--rollouts.buffer.share", ".5"], r"share must be 0 for dmd2, which makes no rollouts"),
    ],
)
def test_a_wrong_setting_names_its_key(given, message):
    with pytest.raises((UserError, SystemExit), match=message):
        check(parse([*([] if "--method" in given else ["--method", "dance_grpo"]), *given]), ALONE)


@pytest.mark.parametrize(
    ("plan", "ranks", "fitting"),
    [
        (BatchPlan(8, 4, 8, 8, ("P",) * 4), 2, {2, 4, 6}),  # four whole groups on each rank
        (BatchPlan(4, 4, 1, 4, ("P",) * 4), 2, {1, 2, 3}),  # every group on both ranks
        (BatchPlan(8, 4, 4, 8, ("P",) * 4), 2, {2, 4, 6}),  # two updates of two groups on each rank
        (BatchPlan(16, 4, 8, 8, ("P",) * 4), 8, {8}),  # two updates of one group on each rank
        (BatchPlan(2, 2, 2, 2, ("P",) * 4), 4, set()),  # one sample on each rank
    ],
)
def test_every_rank_makes_equally_many_samples(plan, ranks, fitting):
    updates, steps = plan.prompts // plan.prompts_per_update, range(1, plan.prompts + 1)
    found = set()
    for n in range(1, plan.prompts):
        config = BufferConfig(share=n / plan.prompts)
        if all(plan.is_even(config.slots(step, plan.prompts, updates), ranks) for step in steps):
            found.add(n)
    assert found == fitting
