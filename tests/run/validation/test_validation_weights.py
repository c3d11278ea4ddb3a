"""Validation of one rank: which weights it samples with."""

import pytest
import torch
from helpers import ALONE, LATENT_SHAPE, reward_of, tiny_codec, trainable

from unified_trainer.basics.requests import Request
from unified_trainer.data.prompts import validation_captions
from unified_trainer.roles.role import TrainableConfig
from unified_trainer.run.settings.config import ValidationConfig
from unified_trainer.run.validation.report import Validation
from unified_trainer.sampling.solver import SamplerConfig

SAMPLER = SamplerConfig(num_steps=2, guidance_scale=1.0)


def measured(student, folder, *, ema: bool = True) -> dict[str, float]:
    config = ValidationConfig(num_samples=2, batch=2, num_videos=0, ema=ema)
    requests = Request.of(validation_captions(2))
    validation = Validation(config, tiny_codec(), reward_of(), None, SAMPLER, requests, LATENT_SHAPE, ALONE, 8.0)
    with student.sampling_weights(ema=validation.ema):
        validation.start(student, 0)
    return validation.finish(folder, 0).metrics


def test_validation_samples_with_the_ema_weights_unless_told_not_to(tmp_path):
    """A student that has moved away from its EMA measures as the student that it was, or as the one that it is."""
    averaged, moved, start = trainable(config=TrainableConfig(ema_decay=0.9)), trainable(seed=1), trainable()
    with torch.no_grad():
        for name, weight in averaged.weights.items():
            weight.copy_(moved.weights[name])
    before, after = measured(start, tmp_path), measured(moved, tmp_path)
    assert before["validation/reward"] != pytest.approx(after["validation/reward"], rel=1e-3)
    assert measured(averaged, tmp_path) == before
    assert measured(averaged, tmp_path, ema=False) == after


def test_a_validation_that_failed_leaves_nothing_for_the_next(tmp_path):
    """A loop in Python may go on after a scorer's failure in the second batch."""
    calls = []

    def fails_once(images, prompts):
        calls.append(len(prompts))
        if len(calls) == 2:
            raise OSError("the scorer's disk is full")
        return images.flatten(1).mean(1)

    config = ValidationConfig(num_samples=2, batch=1, num_videos=2)
    requests, student = Request.of(validation_captions(2)), trainable()
    reward = reward_of(fails_once)
    validation = Validation(config, tiny_codec(), reward, None, SAMPLER, requests, LATENT_SHAPE, ALONE, 8.0)
    with pytest.raises(OSError, match="disk is full"):
        validation.start(student, 0)
    validation.start(student, 0)
    first, second = (one.reward for one in validation.finish(tmp_path, 0).samples)
    assert first != second and calls == [1] * 4  # not twice that of the first batch
