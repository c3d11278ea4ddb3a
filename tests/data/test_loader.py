"""The loader: every prompt once an epoch, a new order each epoch, a function of the step, the ranks a partition."""

import pytest
import torch
from helpers import ALONE, CPU, LATENT_SHAPE

from unified_trainer.basics.requests import Request
from unified_trainer.data.batch_plan import BatchPlan
from unified_trainer.data.clips import Clips
from unified_trainer.data.loader import Loader, make_batch
from unified_trainer.data.prompts import Prompts
from unified_trainer.parallel.mesh import Mesh

WORDS = ("red", "green", "blue", "yellow", "left", "right")
PROMPTS = tuple(f"a {word} circle" for word in WORDS)


def loader(codec, prompts=2, num_samples=1, seed=0, mesh=ALONE, source=None, per_update=None, shuffle=True) -> Loader:
    plan = BatchPlan(prompts, num_samples, per_update or prompts, 1, ("P", "n", "G", "micro"))
    return Loader(source or Prompts(Request.of(PROMPTS)), codec, plan, LATENT_SHAPE, "", seed, mesh, shuffle=shuffle)


def epochs(codec, per_step: int, count: int, seed: int = 0) -> list[tuple[str, ...]]:
    """The prompts of `count` epochs, epoch by epoch."""
    one = loader(codec, per_step, seed=seed)
    steps = count * len(PROMPTS) // per_step
    flat = [prompt for step in range(steps) for prompt in one.batch(step).prompts]
    return [tuple(flat[i : i + len(PROMPTS)]) for i in range(0, len(flat), len(PROMPTS))]


@pytest.mark.parametrize("per_step", [1, 2, 4])
def test_every_prompt_once_before_any_comes_again(codec, per_step):
    """Also with 4 prompts a step of 6, where a step reaches into the next epoch."""
    for epoch in epochs(codec, per_step, 2):
        assert sorted(epoch) == sorted(PROMPTS)


def test_every_epoch_and_every_seed_has_its_own_order(codec):
    orders = epochs(codec, 2, 3) + epochs(codec, 2, 3, seed=1)
    assert len(set(orders)) == len(orders)


def test_a_batch_is_a_function_of_the_step_alone(codec):
    """Asked again, out of order, by another loader: the same. So a resumed run needs no cursor."""
    first, second = loader(codec), loader(codec)
    forward = [first.batch(step) for step in range(4)]
    backward = [second.batch(step) for step in reversed(range(4))][::-1]
    for one, other in zip(forward, backward, strict=True):
        assert (one.prompts, one.prompt_ids, one.sample_ids) == (other.prompts, other.prompt_ids, other.sample_ids)
        assert torch.equal(one.cond["text"], other.cond["text"])


@pytest.mark.parametrize("shuffle", [True, False])
def test_an_epoch_has_each_clip_with_one_of_its_captions(codec, shuffle):
    """Drawn by seed and epoch: every caption in time, equal by rank and after a restart, all encoded ahead."""
    clip_of = (0, 0, 1, 2, 2, 2)
    source = Clips(PROMPTS, torch.arange(3.0).view(3, 1, 1, 1, 1).expand(3, *LATENT_SHAPE), clip_of=clip_of)
    one = loader(codec, 3, source=source, shuffle=shuffle)
    batches = [one.batch(step) for step in range(12)]
    assert all(sorted(clip_of[row] for row in batch.prompt_ids) == [0, 1, 2] for batch in batches)
    assert {row for batch in batches for row in batch.prompt_ids} == set(range(6))
    for batch in batches:
        assert batch.latents[:, 0, 0, 0, 0].tolist() == [clip_of[row] for row in batch.prompt_ids]
    assert loader(codec, 3, source=source, shuffle=shuffle).batch(7).prompt_ids == batches[7].prompt_ids
    assert set(one.prompts(12)[1:]) == set(PROMPTS) and len(one.prompts(1)) == 4


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_the_prompts_of_a_run_are_known_ahead(codec, steps):
    """The negative prompt and those of the steps' batches, each once, as far as the steps go."""
    drawn = {prompt for step in range(steps) for prompt in loader(codec, 2).batch(step).prompts}
    negative, *known = loader(codec, 2).prompts(steps)
    assert negative == "" and set(known) == drawn and len(known) == len(drawn)


def test_a_run_that_may_draw_any_prompt_knows_all_ahead(codec):
    for more in ({"by_failures": True}, {"further": True}):
        plan = BatchPlan(2, 1, 2, 8, ("a", "b", "c", "d"), **more)
        one = Loader(Prompts(Request.of(PROMPTS)), codec, plan, LATENT_SHAPE, "", 0, ALONE)
        assert one.prompts(1) == ["", *PROMPTS]


def test_a_group_is_the_samples_of_one_prompt(codec):
    batch = loader(codec, prompts=2, num_samples=3).batch(0)
    assert batch.prompts == (batch.prompts[0],) * 3 + (batch.prompts[3],) * 3
    assert batch.prompt_ids == (batch.prompt_ids[0],) * 3 + (batch.prompt_ids[3],) * 3
    assert batch.prompt_ids[0] != batch.prompt_ids[3]
    assert batch.sample_ids == (0, 1, 2, 3, 4, 5)


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_ranks_hold_the_batch_between_them(codec, ranks):
    """Every sample on one rank, with the prompt and id it has in a run of one rank."""
    whole = loader(codec, prompts=4, num_samples=4, per_update=2).batch(3)
    expected = dict(zip(whole.sample_ids, zip(whole.prompts, whole.prompt_ids, strict=True), strict=True))
    held = {}
    for rank in range(ranks):
        part = loader(codec, prompts=4, num_samples=4, per_update=2, mesh=Mesh(CPU, rank, ranks)).batch(3)
        assert len(part) == len(whole) // ranks
        assert not held.keys() & set(part.sample_ids)
        held |= dict(zip(part.sample_ids, zip(part.prompts, part.prompt_ids, strict=True), strict=True))
    assert held == expected


def test_clips_bring_their_own_latents(codec):
    encoded = torch.arange(6.0).view(6, 1, 1, 1, 1).expand(6, *LATENT_SHAPE).contiguous()
    batch = loader(codec, prompts=3, source=Clips(PROMPTS, encoded)).batch(1)
    assert [PROMPTS[int(value)] for value in batch.latents[:, 0, 0, 0, 0]] == list(batch.prompts)
    assert loader(codec).batch(0).latents is None


def test_a_batch_splits_and_keeps_its_rows_together(codec):
    latents = torch.randn(3, *LATENT_SHAPE)
    prompts = list(PROMPTS[:3])
    batch = make_batch(
        codec,
        Request.of(prompts),
        "",
        LATENT_SHAPE,
        prompt_ids=[5, 6, 7],
        sample_ids=[0, 1, 2],
        latents=latents,
    )
    parts = batch.split(2)
    assert [len(part) for part in parts] == [2, 1]
    assert parts[1].prompts == (PROMPTS[2],) and parts[1].prompt_ids == (7,) and parts[1].sample_ids == (2,)
    assert torch.equal(parts[1].latents, latents[2:])
    assert torch.equal(parts[1].cond["text"], batch.cond["text"][2:])
    assert len(parts[0].cond) == len(parts[0].uncond) == 2


def test_conditions_are_those_of_the_prompts(codec):
    """Each distinct prompt is encoded once and handed to its rows; uncond is the negative prompt on every row."""
    prompts = [PROMPTS[1], PROMPTS[0], PROMPTS[1]]
    batch = make_batch(
        codec,
        Request.of(prompts),
        "green",
        LATENT_SHAPE,
        prompt_ids=[1, 0, 1],
        sample_ids=[0, 1, 2],
    )
    alone = codec.encode_text([*prompts, "green"])["text"]
    torch.testing.assert_close(batch.cond["text"], alone[:3])
    torch.testing.assert_close(batch.uncond["text"], alone[3:].expand(3, -1, -1))
    assert not torch.equal(batch.cond["text"][0], batch.cond["text"][1])


@pytest.mark.parametrize("per_step", [2, 4])
def test_without_shuffling_every_epoch_is_in_the_order_of_the_file(codec, per_step):
    """Also as workers ask for it, steps ahead, and for a source that is read row group by row group."""
    one = loader(codec, per_step, shuffle=False)
    rows = [row for step in range(6) for row in one.rows(step)[0]]
    assert rows == [row % len(PROMPTS) for row in range(6 * per_step)]
    assert [one.rows(step, early=2) for step in range(6)] == [one.rows(step) for step in range(6)]
    assert loader(codec, per_step, seed=1, shuffle=False).rows(3) == one.rows(3)


def test_further_prompts_without_shuffling_follow_the_batch(codec):
    plan = BatchPlan(2, 1, 2, 8, ("a", "b", "c", "d"), further=True)
    one = Loader(Prompts(Request.of(PROMPTS)), codec, plan, LATENT_SHAPE, "", 0, ALONE, shuffle=False)
    assert one.rows(1)[0] == [2, 3] and one.further(1, 0, 9) == [4, 5, 0, 1] and one.further(1, 1, 2) == [5, 0]


def test_a_request_may_have_its_own_negative_prompt(codec):
    """Others have that of the run, and both are known ahead."""
    requests = (Request("a red circle"), Request("a blue circle", negative="a red circle moving left"))
    one = loader(codec, source=Prompts(requests), shuffle=False)
    batch = one.batch(0)
    expected = codec.encode_text(["", "a red circle moving left"])["text"]
    assert torch.equal(batch.uncond["text"], expected)
    assert set(one.prompts(1)) == {"", "a red circle", "a blue circle", "a red circle moving left"}
