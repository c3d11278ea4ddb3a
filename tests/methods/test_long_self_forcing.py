"""Self-forcing beyond the clip: windows, image latents, what teacher and critic see, and where gradient goes.

Chunks of two latent frames after a first one of its own; teacher and critic know three frames of the nine of a video.
"""

import dataclasses

import pytest
import torch
from chunk_world import CHUNKS, FRAMES, KNOWN, SAMPLER, trainer_of
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
from unified_trainer.methods.long_self_forcing import LongSelfForcing, LongSelfForcingConfig
from unified_trainer.methods.self_forcing import SelfForcing, SelfForcingConfig
from unified_trainer.numerics.chunks import ChunkConfig
from unified_trainer.parallel.random import Streams
from unified_trainer.run.trainer import Trainer
from unified_trainer.sampling.solver import SamplerConfig

pytestmark = pytest.mark.slow  # seconds together

CONFIG = LongSelfForcingConfig(batch_size=2, micro_batch=1, student_every=1, teacher_frames=KNOWN)
ENDS = (3, 5, 7, 9)


def trainer(config: LongSelfForcingConfig = CONFIG, sampler: SamplerConfig = SAMPLER, frames: int = FRAMES) -> Trainer:
    return trainer_of(LongSelfForcing, config, sampler, frames)


def end_of(one: Trainer, step: int) -> int:
    return one.method._draw_end(FRAMES, Streams(0, step))


def step_of(one: Trainer, end: int) -> int:
    """The first step whose window ends at this frame."""
    return next(step for step in range(100) if end_of(one, step) == end)


@pytest.mark.parametrize("gradient_frames", [2, 21])
def test_a_video_as_long_as_a_clip_is_self_forcing_bit_for_bit(gradient_frames):
    settings = {"batch_size": 2, "micro_batch": 1, "student_every": 1, "gradient_frames": gradient_frames}
    ours = trainer(LongSelfForcingConfig(**settings, teacher_frames=5), frames=5)
    theirs = trainer_of(SelfForcing, SelfForcingConfig(**settings), frames=5)
    assert ours.step(3) == theirs.step(3)
    for name in ("student", "critic"):
        assert_same(ours.roles[name].gradients[0], theirs.roles[name].gradients[0])


def test_windows_end_at_every_chunk_from_the_clips_length_on():
    one = trainer()
    counts = {end: sum(end_of(one, step) == end for step in range(200)) for end in range(FRAMES + 1)}
    assert {end for end, count in counts.items() if count} == {*ENDS}
    assert min(counts[end] for end in ENDS) > 30


@pytest.mark.parametrize("end", ENDS)
def test_no_call_sees_more_frames_than_it_knows(end):
    """Teacher and critic see whole clips alone; the student generates no frame after the window, and trains its end."""
    one = trainer()
    step = step_of(one, end)
    student, critic = Calls.of(one.roles["student"]), Calls.of(one.roles["critic"])
    teacher = Calls.of(one.method.matching.teacher)
    one.step(step)
    assert {x_t.shape[2] for x_t in teacher.x_t + critic.x_t} == {KNOWN}
    assert len(teacher.x_t) >= 2 and len(critic.x_t) >= 4
    with_graph = [student.x_t[i].shape[2] for i in student.where(graph=True)]
    assert with_graph == ([1, 2] if end == KNOWN else [2]) * 2  # of two micro-batches
    batch = one.loader.batch(step).split(1)[0]
    seen = dataclasses.replace(batch, latent_shape=(16, KNOWN, 2, 2))
    made = []
    one.method._window = lambda x0: made.append(x0.shape[2]) or x0
    one.method._sample(seen, Streams(0, step), "student", of_video=batch, stop=end)
    assert made == [end]


def test_the_image_latent_is_that_of_the_last_frame_before_the_window():
    """As one decode of all frames before it and one encode of one image make it; the window is left as it is."""
    method, codec = trainer().method, tiny_codec()
    x0 = torch.randn(2, 16, 7, 2, 2, generator=torch.Generator().manual_seed(3)).requires_grad_()
    window = method._window(x0)
    image = codec.encode(codec.decode(x0.detach()[:, :, :5])[:, :, -1:])
    assert window.shape == (2, 16, KNOWN, 2, 2)
    torch.testing.assert_close(window[:, :, :1], image)
    assert torch.equal(window[:, :, 1:], x0[:, :, 5:])
    (slope,) = torch.autograd.grad(window.sum(), x0)
    assert slope.sum((0, 1, 3, 4)).tolist() == [0] * 5 + [2 * 16 * 4] * 2
    assert method._window(x0[:, :, :KNOWN]) is not None and torch.equal(method._window(x0[:, :, :KNOWN]), x0[:, :, :3])


@pytest.mark.parametrize(
    ("known", "gradient_frames", "stop", "trained"),
    [
        (3, 21, 3, None),
        (3, 21, 7, [False, True, True]),
        (5, 21, 5, None),
        (5, 21, 9, [False, True, True, True, True]),
        (5, 3, 9, [False, False, False, True, True]),
        (5, 3, 5, [False, False, False, True, True]),
    ],
)
def test_the_loss_is_of_the_windows_whole_chunks(known, gradient_frames, stop, trained):
    one = trainer(dataclasses.replace(CONFIG, teacher_frames=known, gradient_frames=gradient_frames))
    mask = one.method._trained_frames(torch.zeros(1, 16, known, 2, 2), stop=stop)
    assert (mask if mask is None else mask.flatten().tolist()) == trained


def test_a_chunk_that_is_cut_by_the_window_is_context():
    """Chunks of two without a first one of its own: of the three frames behind the image the first is half a chunk."""
    sampler = dataclasses.replace(SAMPLER, chunks=ChunkConfig(chunk_frames=2))
    one = trainer(dataclasses.replace(CONFIG, teacher_frames=4), sampler, frames=8)
    mask = one.method._trained_frames(torch.zeros(1, 16, 4, 2, 2), stop=8)
    assert mask.flatten().tolist() == [False, False, True, True]


def test_the_window_does_not_depend_on_the_micro_batch():
    one, whole = trainer(), trainer(dataclasses.replace(CONFIG, micro_batch=2))
    step = step_of(one, 7)
    left, right = one.step(step), whole.step(step)
    assert left["dmd_loss"] == pytest.approx(right["dmd_loss"], rel=1e-4)


@pytest.mark.parametrize(
    ("config", "chunks", "message"),
    [
        ({}, ChunkConfig(), r"sampler\.chunks\.chunk_frames must be at least 1"),
        ({"teacher_frames": 3}, ChunkConfig(chunk_frames=3), r"teacher_frames must be whole chunks .* not 3: set 6$"),
        ({"teacher_frames": 1}, ChunkConfig(chunk_frames=1), r"teacher_frames must .* not 1: set 2$"),
        ({"teacher_frames": 21}, ChunkConfig(chunk_frames=3, independent_first_frame=True), "not 21: set 19 or 22$"),
        ({"gan_weight": 0.1}, CHUNKS, r"gan_weight must be 0 where windows"),
    ],
)
def test_settings_that_cannot_be_are_refused(config, chunks, message):
    config = LongSelfForcingConfig(**config)
    with pytest.raises(UserError, match=message):
        config.check(setup_of(dataclasses.replace(FEW_STEPS, chunks=chunks)))


@pytest.mark.ranks
def test_a_run_resumes_bit_for_bit_and_is_that_of_two_ranks(tmp_path):
    words = flags(
        {"method": "long_self_forcing", "recipe": "tiny", "student.path": small_pipeline(tmp_path / "model")}
        | {"video.frames": 13, "video.height": 32, "video.width": 32, "algorithm.teacher-frames": 2, "steps": 4}
        | {"algorithm.batch-size": 2, "algorithm.micro-batch": 1, "algorithm.student-every": 1, "device": "cpu"}
        | {"sampler.num-steps": 2, "checkpoint-every": 1, "keep-last": 9, "validate-every": 0}
    )
    assert main([*words, "--output", str(tmp_path / "one")]) == 0
    assert main(["--resume", str(cut_off(tmp_path / "one", tmp_path / "half", 3))]) == 0
    assert_same(checkpoint_of(tmp_path / "half", 4), checkpoint_of(tmp_path / "one", 4))
    done = program("-m", "unified_trainer", *words, "--output", tmp_path / "two", ranks=2)
    assert done.returncode == 0, done.stderr
    assert_one_training(tmp_path / "one", tmp_path / "two", 4)
