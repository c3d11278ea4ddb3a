"""Teacher and critic see the actions of a window's own frames, and a stream keeps those that it began with."""

import chunk_world
import pytest
import torch
from chunk_world import KNOWN, trainer_of
from helpers import CAPTIONS

from unified_trainer.basics.actions import Actions
from unified_trainer.basics.requests import Prompt
from unified_trainer.methods.long_self_forcing import LongSelfForcing, LongSelfForcingConfig
from unified_trainer.methods.streaming_tuning import StreamingTuning, StreamingTuningConfig

pytestmark = pytest.mark.slow

SETTINGS = {"batch_size": 2, "micro_batch": 1, "student_every": 1, "teacher_frames": KNOWN}


@pytest.fixture
def seen_by(monkeypatch):
    """A function that makes a trainer whose rows have actions 100 row + frame, and a list of what its scores see."""
    frames = torch.arange(33.0)[:, None]  # of nine latent frames
    given = [Actions.of((frames + 100 * row).numpy(), "row") for row in range(len(CAPTIONS))]
    prompts = [Prompt(text, (), actions) for text, actions in zip(CAPTIONS, given, strict=True)]
    monkeypatch.setattr(chunk_world, "CAPTIONS", prompts)

    def made(method, config):
        one, seen = trainer_of(method, config), []
        inner = one.method.matching.direction

        def direction(x0, batch, rng):
            assert torch.equal(batch.cond["actions"], batch.uncond["actions"])
            seen.append((str(batch.prompts[0]), batch.cond["actions"].flatten()))
            return inner(x0, batch, rng)

        monkeypatch.setattr(one.method.matching, "direction", direction)
        return one, seen

    return made


@pytest.mark.parametrize("switch", [0.0, 1.0])
def test_windows_of_a_stream(seen_by, switch):
    one, seen = seen_by(StreamingTuning, StreamingTuningConfig(**SETTINGS, prompt_switch=switch))
    for step in range(4):
        one.step(step)
    for number, (_, actions) in enumerate(seen):
        first = seen[number % 2][1][0]  # two micro-batches a step
        assert (actions - first).tolist() == list(range(8 * (number // 2), 8 * (number // 2) + 9))
    assert (len({text for text, _ in seen}) > 2) == bool(switch)


def test_a_window_of_a_longer_video(seen_by, monkeypatch):
    one, seen = seen_by(LongSelfForcing, LongSelfForcingConfig(**SETTINGS))
    monkeypatch.setattr(one.method, "_draw_end", lambda frames, rng: 7)
    one.step(0)
    assert [(actions % 100).tolist() for _, actions in seen] == [list(range(16, 25))] * 2
