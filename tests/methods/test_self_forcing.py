"""Self-forcing: network calls, exits, the frames with gradient, and reinforcement learning of a causal student.

The tests record the student's calls: each is known by its number of frames and by whether it has a graph.
"""

import dataclasses

import pytest
import torch
from helpers import (
    ALONE,
    CAPTIONS,
    FEW_STEPS,
    Calls,
    RecordingCritic,
    RecordingStudent,
    assert_near,
    reward_of,
    reward_parts,
    setup_of,
    small_model,
    tiny_codec,
)

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.requests import Request
from unified_trainer.data.loader import Loader
from unified_trainer.data.prompts import Prompts
from unified_trainer.methods.dance_grpo import DanceGRPO, DanceGRPOConfig
from unified_trainer.methods.self_forcing import SelfForcing, SelfForcingConfig
from unified_trainer.models.wan.causal import CausalWanModel
from unified_trainer.numerics.chunks import ChunkConfig
from unified_trainer.parallel.random import Streams
from unified_trainer.roles.backbone import Backbone
from unified_trainer.roles.role import Frozen, RoleConfig, TrainableConfig
from unified_trainer.run.trainer import Trainer
from unified_trainer.sampling.solver import SamplerConfig, generate, predict_chunks

pytestmark = pytest.mark.slow  # seconds together

SHAPE = (16, 5, 2, 2)
CHUNKS = ChunkConfig(chunk_frames=2, independent_first_frame=True)
SAMPLER = dataclasses.replace(FEW_STEPS, chunks=CHUNKS)
CONFIG = SelfForcingConfig(batch_size=2, micro_batch=2, student_every=1)


def causal_student(*, checkpointing: bool = False, moves: bool = False) -> RecordingStudent:
    model = CausalWanModel(small_model().network)
    backbone = Backbone(model, ALONE, trained=True, recompute="full" if checkpointing else "none")
    return RecordingStudent("student", backbone, TrainableConfig(max_grad_norm=0.0), moves=moves)


def trainer(sampler: SamplerConfig = SAMPLER, *, checkpointing: bool = False, shape=SHAPE, **changes) -> Trainer:
    config = dataclasses.replace(CONFIG, **changes)
    student = causal_student(checkpointing=checkpointing)
    teacher = Frozen("teacher", Backbone(small_model(1), ALONE), RoleConfig())
    critic = RecordingCritic(
        "critic", Backbone(small_model(2), ALONE, trained=True), TrainableConfig(max_grad_norm=0.0)
    )
    method = SelfForcing(config, sampler, student=student, teacher=teacher, critic=critic)
    loader = Loader(Prompts(Request.of(CAPTIONS)), tiny_codec(), config.plan(), shape, "", 0, ALONE)
    return Trainer(method, {"student": student, "critic": critic}, loader, ALONE, seed=0)


def watched(one: Trainer, step: int = 0) -> tuple[list[int], list[bool]]:
    """Return frames and graph of every call of the student in one training step."""
    calls = Calls.of(one.roles["student"])
    one.step(step)
    return [x_t.shape[2] for x_t in calls.x_t], calls.graph


def plan(exits: list[int]) -> list[tuple[int, bool]]:
    """Return the expected calls: of each chunk those without graph, the one with graph, and the context pass.

    The last chunk has no context pass, because no chunk attends to it.
    """
    expected = []
    for (start, stop), last in zip([(0, 1), (1, 3), (3, 5)], exits, strict=True):
        expected += [(stop - start, False)] * last + [(stop - start, True), (stop - start, False)]
    return expected[:-1]


@pytest.mark.parametrize("step", range(4))
@pytest.mark.parametrize("same", [True, False])
def test_the_calls_are_those_of_the_plan(step, same):
    one = trainer(same_step_across_chunks=same)
    shared = Streams(0, step).shared
    draws = shared.integers(4, size=1).tolist() * 3 if same else shared.integers(4, size=3).tolist()
    frames, graph = watched(one, step)
    of_student = len(plan(draws))
    assert list(zip(frames, graph, strict=True))[:of_student] == plan(draws)
    assert not any(graph[of_student:])  # the critic's samples have no graph


def test_the_last_step_only():
    frames, graph = watched(trainer(last_step_only=True))
    assert list(zip(frames, graph, strict=True))[:14] == plan([3, 3, 3])
    assert len(frames) == 28


def test_only_chunks_at_the_end_have_gradient():
    """The last three of five frames are trained: the chunk at [1, 3) begins before them and is not."""
    frames, graph = watched(trainer(last_step_only=True, gradient_frames=3))
    assert [i for i, has in enumerate(graph) if has] == [13]
    assert frames[13] == 2


def test_the_mean_is_over_the_trained_frames():
    one = trainer(gradient_frames=2)
    mask = one.method._trained_frames(torch.zeros(1, *SHAPE))
    assert mask.flatten().tolist() == [False, False, False, True, True]
    assert trainer().method._trained_frames(torch.zeros(1, *SHAPE)) is None


@pytest.mark.parametrize(("gradient_frames", "with_graph"), [(2, [13]), (3, [13]), (4, [8, 13]), (5, [3, 8, 13])])
def test_a_chunk_is_trained_from_its_first_gradient_frame(gradient_frames, with_graph):
    """Chunks at frames 0, 1 and 3 of 5; a chunk that starts exactly gradient_frames before the end is trained."""
    _, graph = watched(trainer(last_step_only=True, gradient_frames=gradient_frames))
    assert [i for i, has in enumerate(graph) if has] == with_graph


def test_the_mean_is_over_the_chunks_that_have_a_graph():
    """Frames 1 and 2 are one chunk: with 3 gradient frames it starts too early, although it ends late enough."""
    frames = {2: [3, 4], 3: [3, 4], 4: [1, 2, 3, 4]}
    for gradient_frames, trained in frames.items():
        mask = trainer(gradient_frames=gradient_frames).method._trained_frames(torch.zeros(1, *SHAPE))
        assert mask.flatten().nonzero().flatten().tolist() == trained


def test_exits_are_uniform():
    method = trainer().method
    exits = [method.config.exits(method.student, method.sampler, 5, Streams(0, step))[0] for step in range(400)]
    counts = torch.bincount(torch.tensor(exits), minlength=4)
    assert counts.min() > 70 and counts.max() < 130


def test_recomputed_activations_give_the_same_gradient():
    gradients = []
    for checkpointing in (False, True):
        one = trainer(checkpointing=checkpointing, last_step_only=True)
        one.step(0)
        gradients.append(one.roles["student"].gradients[0])
    assert_near(gradients[1], gradients[0], 1e-5)


@pytest.mark.parametrize("micro_batch", [1, 2])
def test_the_gradient_does_not_depend_on_the_micro_batch(micro_batch):
    one, whole = trainer(micro_batch=micro_batch, batch_size=4), trainer(micro_batch=4, batch_size=4)
    one.step(0)
    whole.step(0)
    for name in ("student", "critic"):
        assert_near(one.roles[name].gradients[0], whole.roles[name].gradients[0], 2e-5)


def test_a_rollout_repeats_for_its_seed_and_differs_between_samples():
    one = trainer()
    batch = one.loader.batch(0)
    first, again = (one.method._generate(batch, Streams(0, 0), "student").detach() for _ in range(2))
    assert torch.equal(first, again)
    assert not torch.allclose(first[0], first[1])
    assert not torch.allclose(first, one.method._generate(batch, Streams(0, 1), "student"))


def test_a_batch_of_three_is_three_batches_of_one():
    student, batch = causal_student(), trainer(batch_size=3, micro_batch=3).loader.batch(0)
    noise = torch.randn(3, *SHAPE)
    drawn = torch.randn(5, 3, *SHAPE)
    whole = generate(student, noise, batch, SAMPLER, lambda s: drawn[s])
    for i, part in enumerate(batch.split(1)):
        alone = generate(student, noise[i : i + 1], part, SAMPLER, lambda s, i=i: drawn[s][i : i + 1])
        torch.testing.assert_close(alone, whole[i : i + 1], rtol=1e-4, atol=1e-5)


def test_a_chunk_does_not_depend_on_later_noise():
    student, batch = causal_student(), trainer().loader.batch(0)
    noise, drawn = torch.randn(2, *SHAPE), torch.randn(5, 2, *SHAPE)
    other = noise.clone()
    other[:, :, 3:] = 0
    left, right = (predict_chunks(student, x, batch, SAMPLER, lambda s: drawn[s], [1, 1, 1]) for x in (noise, other))
    torch.testing.assert_close(left[:, :, :3], right[:, :, :3])
    assert not torch.allclose(left[:, :, 3:], right[:, :, 3:])


def test_context_noise_changes_later_chunks():
    student, batch = causal_student(), trainer().loader.batch(0)
    noisy = dataclasses.replace(SAMPLER, chunks=dataclasses.replace(CHUNKS, context_noise=0.3))
    noise, drawn = torch.randn(2, *SHAPE), torch.randn(5, 2, *SHAPE)
    clean, other = (
        predict_chunks(student, noise, batch, sampler, lambda s: drawn[s], [1, 1, 1]) for sampler in (SAMPLER, noisy)
    )
    assert torch.equal(clean[:, :, :1], other[:, :, :1])
    assert not torch.allclose(clean[:, :, 1:], other[:, :, 1:])


def test_reinforcement_learning_replays_a_causal_rollout():
    """The rollout attends to a KV cache, the replay to the finished clip in one masked pass; they agree to rounding."""
    config = DanceGRPOConfig(
        num_prompts=2,
        num_samples=2,
        prompts_per_update=2,
        rollout_batch=4,
        update_batch=4,
        timestep_fraction=1.0,
        clip_low=1e-3,
        clip_high=1e-3,
    )
    student = causal_student()
    loader = Loader(Prompts(Request.of(CAPTIONS)), tiny_codec(), config.plan(), SHAPE, "", 0, ALONE)
    parts = reward_parts(DanceGRPO, config, SAMPLER, student, reward_of(), loader)
    method = DanceGRPO(config, SAMPLER, student=student, **parts)
    calls = Calls.of(student)
    metrics = Trainer(method, {"student": student}, loader, ALONE, seed=0).step(0)
    assert 0 <= metrics["log_ratio_abs_max"] < 1e-5
    assert any(float(value.abs().max()) > 0 for value in student.gradients[0].values())
    # Four calls and a context pass for each chunk but the last, then three transitions, clean and noisy.
    assert [x_t.shape[2] for x_t in calls.x_t] == [1] * 5 + [2] * 9 + [10] * 3


@pytest.mark.parametrize(
    ("sampler", "message"),
    [(FEW_STEPS, "chunk_frames"), (dataclasses.replace(SAMPLER, guidance_scale=3.0), "guidance_scale")],
)
def test_a_wrong_sampler_names_its_key(sampler, message):
    with pytest.raises(ValueError, match=message):
        CONFIG.check(setup_of(sampler))


@pytest.mark.parametrize(("gradient_frames", "fits"), [(2, False), (3, True)])
def test_gradient_frames_hold_at_least_a_chunk(gradient_frames, fits):
    """With fewer frames than a chunk has, no chunk would be trained."""
    sampler = dataclasses.replace(FEW_STEPS, chunks=ChunkConfig(chunk_frames=3))
    config = SelfForcingConfig(gradient_frames=gradient_frames)
    if fits:
        config.check(setup_of(sampler))
        return
    with pytest.raises(UserError, match=r"at least sampler\.chunks\.chunk_frames \(3\).* not 2"):
        config.check(setup_of(sampler))
