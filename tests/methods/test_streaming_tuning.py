"""Streaming tuning: the windows of a stream, its KV cache, its prompts, and where gradient goes.

Chunks of two latent frames after a first one of its own; teacher and critic know three frames of the nine of a stream.
"""

import dataclasses
import itertools

import pytest
import torch
from chunk_world import CHUNKS, FRAMES, KNOWN, SAMPLER, causal_student, trainer_of
from forked import program
from helpers import (
    FEW_STEPS,
    Calls,
    assert_one_training,
    assert_same,
    checkpoint_of,
    cut_off,
    flags,
    setup_of,
    small_pipeline,
    tiny_codec,
)

from unified_trainer.__main__ import main
from unified_trainer.basics.errors import UserError
from unified_trainer.methods.self_forcing import SelfForcing, SelfForcingConfig
from unified_trainer.methods.streaming_tuning import StreamingTuning, StreamingTuningConfig, Windows
from unified_trainer.numerics.chunks import ChunkConfig
from unified_trainer.parallel.random import Streams
from unified_trainer.run.trainer import Trainer
from unified_trainer.sampling.solver import SamplerConfig, next_chunks, recomputed_cache

pytestmark = pytest.mark.slow  # seconds together

CONFIG = StreamingTuningConfig(batch_size=2, micro_batch=1, student_every=1, teacher_frames=KNOWN, prompt_switch=0.0)
WINDOWED = dataclasses.replace(CHUNKS, window_frames=3, sink_frames=1)


def trainer(config: StreamingTuningConfig = CONFIG, sampler: SamplerConfig = SAMPLER, frames: int = FRAMES) -> Trainer:
    return trainer_of(StreamingTuning, config, sampler, frames)


def after(one: Trainer, steps: int) -> Trainer:
    for step in range(steps):
        one.step(step)
    return one


def random(*shape: int, seed: int = 3) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_a_stream_as_long_as_a_clip_is_self_forcing_bit_for_bit():
    settings = {"batch_size": 2, "micro_batch": 1, "student_every": 1, "gradient_frames": 2}
    ours = trainer(StreamingTuningConfig(**settings, teacher_frames=5), frames=5)
    theirs = trainer_of(SelfForcing, SelfForcingConfig(**settings), frames=5)
    assert ours.step(3) == theirs.step(3)
    for name in ("student", "critic"):
        assert_same(ours.roles[name].gradients[0], theirs.roles[name].gradients[0])


@pytest.mark.parametrize(("count", "student_every"), [(3, 5), (5, 5), (4, 6), (6, 4), (2, 2), (1, 5)])
def test_every_window_is_reached_in_order_and_the_student_updates_in_each(count, student_every):
    windows = Windows(ChunkConfig(chunk_frames=1), 5 + 4 * (count - 1), 5, student_every)
    numbers = [windows.number(step) for step in range(count * student_every * 7)]
    assert windows.count == count and numbers[:count] == [*range(count)]
    assert all(later in (0, before + 1) for before, later in itertools.pairwise(numbers))
    assert {*numbers[::student_every]} == {*range(count)}


def test_what_a_window_generates_attends_to_and_keeps():
    """Chunks of three, clips of seven, a cache of a sink and five frames: the second chunk is cut in it."""
    windows = Windows(ChunkConfig(chunk_frames=3, window_frames=6, sink_frames=1), 15, 6, 1)
    assert (windows.count, windows.added) == (4, 3)
    assert [(one.start, one.stop) for one in map(windows.at, range(4))] == [(0, 6), (6, 9), (9, 12), (12, 15)]
    first, third = windows.at(0), windows.at(2)
    assert first.chunks == [(0, 3), (3, 6)] and third.chunks == [(9, 12)]
    assert first.cached == [] and third.cached == [0, 4, 5, 6, 7, 8]
    assert third.kept == [0, 4, 5, 6, 7, 8]
    narrow = dataclasses.replace(windows, chunks=ChunkConfig(chunk_frames=3, window_frames=3)).at(2)
    assert narrow.cached == [6, 7, 8] and narrow.kept == [4, 5, 6, 7, 8]


def plain_rollout(student, past, frames, batch, noise, drawn, ranges, chunks) -> list[torch.Tensor]:
    """Self-Forcing's rollout behind finished frames, written from the paper: past chunks one by one, then new ones."""
    sigmas = SAMPLER.sigmas()
    with student.running() as model:
        cache = model.open_cache(chunks)
    starts = [start for start, _ in CHUNKS.ranges(frames[-1] + 1)]
    for start, stop in zip(starts, [*starts[1:], frames[-1] + 1], strict=True):
        rows = [i for i, frame in enumerate(frames) if start <= frame < stop]
        if rows:
            cache.seen = frames[rows[0]]
            model.append(past[:, :, rows], batch.cond, cache)
    made = []
    for start, stop in ranges:
        x = noise[:, :, start:stop]
        for s in range(4):
            velocity = model.velocity_cached(x, sigmas[s].expand(len(x)), batch.cond, cache)
            x0 = x - float(sigmas[s]) * velocity
            x = (1 - float(sigmas[s + 1])) * x0 + float(sigmas[s + 1]) * drawn[s][:, :, start:stop]
        made.append(x0)
        model.append(x0, batch.cond, cache)
    return made


@torch.no_grad()
@pytest.mark.parametrize("chunks", [CHUNKS, WINDOWED, dataclasses.replace(WINDOWED, rolling_sink=True)])
def test_recached_chunks_are_those_of_a_plain_rollout(chunks):
    """The frames that the window holds, under the new prompt, then two chunks."""
    student, batch, sampler = causal_student(), trainer().loader.batch(1), dataclasses.replace(SAMPLER, chunks=chunks)
    frames = chunks.visible_frames(7)[-1]
    past, noise, drawn = random(2, 16, len(frames), 2, 2), random(2, 16, 4, 2, 2), random(4, 2, 16, 4, 2, 2, seed=4)
    ranges, exits = [(0, 2), (2, 4)], [3, 3]
    cache = recomputed_cache(student, past, frames, batch, sampler, lambda s: past, exits)
    made = [*next_chunks(cache, noise, sampler, lambda s: drawn[s], ranges, exits)]
    for ours, theirs in zip(
        made, plain_rollout(student, past, frames, batch, noise, drawn, ranges, chunks), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_a_recomputed_cache_is_that_of_a_rollout():
    """Where no frame has left the window: also the masked pass over the same clean frames, which has no cache."""
    student, batch = causal_student(), trainer().loader.batch(0)
    past, x_t, sigma = random(2, 16, 5, 2, 2), random(2, 16, 2, 2, 2, seed=4), SAMPLER.sigmas()[1]
    in_order = student.open_cache(batch.cond, batch.uncond, CHUNKS, 1.0, SAMPLER.sigmas())
    for start, stop in CHUNKS.ranges(5):
        in_order.append(past[:, :, start:stop])
    again = recomputed_cache(student, past, range(5), batch, SAMPLER, lambda s: past, [3])
    assert torch.equal(again.velocity(x_t, sigma), in_order.velocity(x_t, sigma))
    whole = torch.cat([past, x_t], 2)
    masked = student.masked_velocity(whole, sigma.expand(2), batch.cond, CHUNKS, whole)[:, :, 5:]
    torch.testing.assert_close(again.velocity(x_t, sigma), masked, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_the_past_is_noised_to_the_context_noise():
    """By the noise of its own frames."""
    student, batch = causal_student(), trainer().loader.batch(0)
    chunks = dataclasses.replace(CHUNKS, context_noise=0.3)
    past, noise, x_t = random(2, 16, 3, 2, 2), random(2, 16, 3, 2, 2, seed=5), random(2, 16, 2, 2, 2, seed=4)
    sampler = dataclasses.replace(SAMPLER, chunks=chunks)
    noisy = recomputed_cache(student, past, range(3), batch, sampler, lambda s: noise, [3])
    in_order = student.open_cache(batch.cond, batch.uncond, chunks, 1.0, SAMPLER.sigmas())
    for start, stop in CHUNKS.ranges(3):
        in_order.append((0.7 * past + 0.3 * noise)[:, :, start:stop])
    sigma = SAMPLER.sigmas()[1]
    torch.testing.assert_close(noisy.velocity(x_t, sigma), in_order.velocity(x_t, sigma))


def test_a_stream_goes_on_behind_the_frames_that_it_has():
    """Each step generates the chunks of its window alone, with gradient; teacher and critic see whole clips."""
    one = trainer()
    calls = {name: Calls.of(role) for name, role in one.roles.items()} | {
        "teacher": Calls.of(one.method.matching.teacher)
    }
    kept = []
    for step in range(5):
        one.step(step)
        kept.append(one.method._past.clone())
        student = calls["student"]
        with_graph = [student.x_t[i].shape[2] for i in student.where(graph=True)]
        assert with_graph == ([1, 2] if step in (0, 4) else [2]) * 2, step  # of two micro-batches
        student.x_t.clear(), student.graph.clear()
    assert {x_t.shape[2] for name in ("teacher", "critic") for x_t in calls[name].x_t} == {KNOWN}
    assert torch.equal(kept[1][:, :, :3], kept[0][:, :, :3]) and torch.equal(kept[2][:, :, :5], kept[1][:, :, :5])
    assert float(kept[2][:, :, 5:].abs().min()) > 0
    assert torch.equal(kept[3], kept[2])  # a stream that has ended keeps nothing further
    assert not torch.equal(kept[4], kept[3])


def test_the_sink_and_the_newest_frames_are_kept():
    """Frames 0 to 2 after the first window; 0, 3 and 4 after the second."""
    one = after(trainer(sampler=dataclasses.replace(SAMPLER, chunks=WINDOWED)), 1)
    before = one.method._past.clone()
    assert before.shape[2] == 3 and one.method.windows.at(2).kept == [0, 3, 4]
    one.step(1)
    same = (one.method._past == before).flatten(3).all(3).all(0).all(0)
    assert same.tolist() == [True, False, False]


def test_gradient_reaches_the_windows_chunks_alone():
    one = after(trainer(), 2)
    batch = one.loader.batch(2)
    past = one.method._past[:, :, :5].clone().requires_grad_()
    seen = dataclasses.replace(batch, latent_shape=(16, KNOWN, 2, 2))
    added = one.method._continue(past, seen, one.method.windows.at(2), Streams(0, 2), "student")
    assert added.shape[2] == 2 and added.requires_grad
    (slope,) = torch.autograd.grad(added.sum(), past, allow_unused=True)
    assert slope is None
    other = one.method._continue(past.detach() + 1, seen, one.method.windows.at(2), Streams(0, 2), "student")
    assert not torch.allclose(added, other)


def test_a_window_begins_with_the_image_before_it():
    """Of the clip that was seen in the step before; clips of six and chunks of two leave one finished frame between."""
    sampler = dataclasses.replace(SAMPLER, chunks=ChunkConfig(chunk_frames=2))
    one, codec = trainer(dataclasses.replace(CONFIG, teacher_frames=4), sampler, frames=8), tiny_codec()
    first, past = random(2, 16, 1, 2, 2), random(2, 16, 4, 2, 2, seed=4)
    before = one.method._before(first, past, one.method.windows.at(1))
    clip = torch.cat([first, past[:, :, 1:]], 2)
    assert before.shape[2] == 2 and torch.equal(before[:, :, 1:], past[:, :, 3:])
    torch.testing.assert_close(before[:, :, :1], codec.encode(codec.decode(clip[:, :, :3])[:, :, -1:]))
    mask = one.method._trained_frames(torch.zeros(1, 16, 4, 2, 2), window=one.method.windows.at(1))
    assert mask.flatten().tolist() == [False, False, True, True]
    assert one.method._trained_frames(torch.zeros(1, 16, 4, 2, 2), window=one.method.windows.at(0)) is None
    after(one, 2)
    assert torch.equal(
        one.method._past[:, :, :4], after(trainer(one.method.config, sampler, frames=8), 1).method._past[:, :, :4]
    )
    assert not torch.equal(one.method._first, one.method._past[:, :, 2:3])  # an image latent, and no frame


@pytest.mark.parametrize("prompt_switch", [0.0, 1.0])
def test_prompts_are_those_of_the_step_where_they_began_or_changed(prompt_switch):
    one, switches = trainer(dataclasses.replace(CONFIG, prompt_switch=prompt_switch)), set()
    for begun in range(0, 80, 4):
        batches = [one.loader.batch(step) for step in range(begun, begun + 4)]
        shown = [one.method._prompted(batch, step, Streams(0, step)) for step, batch in enumerate(batches, begun)]
        changes = [i for i in range(1, 4) if shown[i].prompt_ids != shown[i - 1].prompt_ids]
        assert shown[0] is batches[0] and len(changes) <= (prompt_switch > 0)
        for i, each in enumerate(shown):
            since = changes[0] if changes and changes[0] <= i else 0
            assert (each.prompts, each.sample_ids) == (batches[since].prompts, batches[since].sample_ids)
            assert torch.equal(each.cond["text"], batches[since].cond["text"])
        switches |= {*changes}
    assert switches == ({1, 2, 3} if prompt_switch else set())


def test_a_switch_changes_later_frames_and_not_earlier_ones():
    whole, switched = trainer(), trainer(dataclasses.replace(CONFIG, prompt_switch=1.0))
    same = [whole.step(step) == switched.step(step) for step in range(3)]
    switch = same.index(False)
    begun = whole.method.windows.at(switch).start
    frames = whole.method.windows.at(3).kept
    left, right = whole.method._past, switched.method._past
    assert switch in (1, 2) and frames == [*range(7)]
    assert torch.equal(left[:, :, :begun], right[:, :, :begun])
    assert float((left - right)[:, :, begun : begun + 2].abs().max()) > 1e-3


def test_the_stream_does_not_depend_on_the_micro_batch():
    one, whole = after(trainer(), 1), after(trainer(dataclasses.replace(CONFIG, micro_batch=2)), 1)
    torch.testing.assert_close(one.method._past, whole.method._past, rtol=1e-4, atol=1e-5)
    assert one.step(1)["dmd_loss"] == pytest.approx(whole.step(1)["dmd_loss"], rel=1e-3)


def test_a_bidirectional_student_is_refused():
    with pytest.raises(UserError, match=r"sampler\.chunks\.chunk_frames must be at least 1"):
        CONFIG.check(setup_of(FEW_STEPS))


@pytest.mark.ranks
def test_a_run_resumes_bit_for_bit_also_on_another_number_of_ranks(tmp_path):
    """The last step continues streams that the checkpoint before it holds."""
    words = flags(
        {"method": "streaming_tuning", "recipe": "tiny", "student.path": small_pipeline(tmp_path / "model")}
        | {"video.frames": 13, "video.height": 32, "video.width": 32, "algorithm.teacher-frames": 2, "steps": 3}
        | {"algorithm.batch-size": 2, "algorithm.micro-batch": 1, "algorithm.student-every": 1, "device": "cpu"}
        | {"algorithm.prompt-switch": 1, "sampler.num-steps": 2, "checkpoint-every": 1, "keep-last": 9}
        | {"validate-every": 0}
    )
    assert main([*words, "--output", str(tmp_path / "one")]) == 0
    assert main(["--resume", str(cut_off(tmp_path / "one", tmp_path / "half", 2))]) == 0
    assert_same(checkpoint_of(tmp_path / "half", 3), checkpoint_of(tmp_path / "one", 3))
    done = program("-m", "unified_trainer", *words, "--output", tmp_path / "two", ranks=2)
    assert done.returncode == 0, done.stderr
    assert_one_training(tmp_path / "one", tmp_path / "two", 3)
    kept = [checkpoint_of(tmp_path / run, 2)["method/past"] for run in ("one", "two")]
    assert len(kept[0]) == 2 and not torch.equal(kept[0][0], kept[0][1])
    torch.testing.assert_close(kept[1], kept[0], rtol=1e-3, atol=1e-4)
    assert main(["--resume", str(cut_off(tmp_path / "two", tmp_path / "rest", 2))]) == 0
    assert_one_training(tmp_path / "one", tmp_path / "rest", 3)
