"""Flow matching: the inputs of the network, the loss in closed form, and gradients for any micro-batch."""

import pytest
import torch
from helpers import ALONE, CAPTIONS, Calls, assert_near, finetune, tiny_codec, trainable

from unified_trainer.basics.requests import Request
from unified_trainer.data.loader import Loader
from unified_trainer.data.prompts import Prompts
from unified_trainer.methods.finetune import Finetune, FinetuneConfig
from unified_trainer.numerics.chunks import ChunkConfig
from unified_trainer.numerics.flow import unshift_sigma
from unified_trainer.parallel.random import Streams
from unified_trainer.sampling.solver import SamplerConfig

WHOLE = {"batch_size": 8, "micro_batch": 8}


def trainer(clips: int = 8, seed: int = 0, **config):
    return finetune(FinetuneConfig(**WHOLE | config), clips=clips, seed=seed)


def gradient(**config) -> dict[str, torch.Tensor]:
    one = trainer(**config)
    one.step(0)
    return one.roles["student"].gradients[0]


def silenced(one):
    """Make the network predict velocity 0 for every input."""
    with torch.no_grad():
        one.roles["student"].network.proj_out.weight.zero_()
        one.roles["student"].network.proj_out.bias.zero_()
    return one


@pytest.mark.parametrize("micro_batch", [4, 2, 1])
def test_the_gradient_does_not_depend_on_the_micro_batch(micro_batch):
    """1 x 8, 2 x 4 and 8 x 1 draw the same noise, levels and dropout, and divide by the same number."""
    assert_near(gradient(micro_batch=micro_batch, caption_dropout=0.5), gradient(caption_dropout=0.5))


def test_one_update_a_step():
    one = trainer(micro_batch=2)
    one.step(0)
    one.step(1)
    assert len(one.roles["student"].gradients) == 2


@pytest.mark.parametrize("micro_batch", [8, 2])
def test_the_loss_of_a_silent_network(micro_batch):
    """With velocity 0, loss = mean (noise - x0)^2 with noise = (x_t - (1 - sigma) x0) / sigma of the inputs."""
    one = silenced(trainer(micro_batch=micro_batch))
    calls = Calls.of(one.roles["student"])
    metrics = one.step(3)
    x0, x_t, sigma = one.loader.batch(3).latents, torch.cat(calls.x_t), torch.cat(calls.sigma).view(-1, 1, 1, 1, 1)
    noise = (x_t - (1 - sigma) * x0) / sigma
    assert metrics["loss"] == pytest.approx(float((noise - x0).square().mean()), rel=1e-4)


def test_the_gradient_of_the_bias_of_a_silent_network():
    """proj_out adds b to every velocity channel: d loss / d b_c = -2 mean over the channel (noise - x0) / channels."""
    one = silenced(trainer())
    calls = Calls.of(one.roles["student"])
    one.step(0)
    x0, sigma = one.loader.batch(0).latents, calls.sigma[0].view(-1, 1, 1, 1, 1)
    target = (calls.x_t[0] - (1 - sigma) * x0) / sigma - x0
    expected = -2 * target.mean((0, 2, 3, 4)) / 16
    got = one.roles["student"].gradients[0]["proj_out.bias"]
    torch.testing.assert_close(got.double(), expected, rtol=1e-3, atol=1e-5)


def noise_of_inputs(step: int) -> torch.Tensor:
    one = trainer(caption_dropout=0.0)
    calls = Calls.of(one.roles["student"])
    one.step(step)
    sigma = calls.sigma[0].view(-1, 1, 1, 1, 1)
    return (calls.x_t[0] - (1 - sigma) * one.loader.batch(step).latents) / sigma


def test_noise_is_new_for_every_sample_and_step():
    """Independent normals of 128 elements correlate by less than 5 / sqrt(128) = .44."""
    noise = torch.cat([noise_of_inputs(step) for step in range(2)]).flatten(1)
    assert float((torch.corrcoef(noise) - torch.eye(len(noise))).abs().max()) < 0.44


def test_noise_levels_are_shifted_uniform_and_one_per_sample():
    """unshift(sigma) is uniform, so its mean over 64 samples is .5 +- 3 sqrt(1 / 12 / 64) = .11."""
    one = trainer(shift=5.0)
    calls = Calls.of(one.roles["student"])
    for step in range(8):
        one.step(step)
    u = unshift_sigma(torch.cat(calls.sigma), 5.0)
    assert len(set(u.tolist())) == 64
    assert abs(float(u.mean()) - 0.5) < 0.11
    assert float(u.min()) < 0.1 and float(u.max()) > 0.9


def dropped(fraction: float, steps: int, seed: int = 0) -> torch.Tensor:
    """Return which samples of each step were trained on the negative prompt."""
    one = trainer(caption_dropout=fraction, seed=seed)
    calls = Calls.of(one.roles["student"])
    for step in range(steps):
        one.step(step)
    rows = []
    for step, text in enumerate(calls.text):
        batch = one.loader.batch(step)
        without = (text == batch.uncond["text"]).flatten(1).all(1)
        assert bool(((text == batch.cond["text"]).flatten(1).all(1) != without).all())
        rows.append(without)
    return torch.stack(rows)


def test_caption_dropout_hits_other_samples_in_other_steps():
    """The dropped samples must not repeat every epoch; with 8 clips each step is an epoch."""
    rows = dropped(0.5, 12)
    assert len({tuple(row) for row in rows[:6].tolist()}) == 6
    assert not rows.all(0).any() and rows.any(0).all()
    assert not torch.equal(rows[:2], dropped(0.5, 2, seed=1))


@pytest.mark.parametrize(("fraction", "low", "high"), [(0.0, 0, 0), (0.25, 0.1, 0.4), (1.0, 1, 1)])
def test_caption_dropout_has_its_fraction(fraction, low, high):
    assert low <= float(dropped(fraction, 8).float().mean()) <= high


def test_clips_are_trained_with_their_own_captions():
    one = trainer(caption_dropout=0.0)
    calls = Calls.of(one.roles["student"])
    one.step(2)
    assert torch.equal(calls.text[0], one.loader.batch(2).cond["text"])


def test_diffusion_forcing_draws_a_noise_level_for_every_chunk_of_every_sample():
    """Frames of one chunk share a level; 3 chunks of 8 samples have 24, and the chunks of a sample are independent."""
    chunks = ChunkConfig(chunk_frames=2, independent_first_frame=True)
    config, sampler = FinetuneConfig(**WHOLE, forcing="diffusion"), SamplerConfig(chunks=chunks)
    shape = (16, 5, 2, 2)
    source = Loader(Prompts(Request.of(CAPTIONS * 2)), tiny_codec(), config.plan(), shape, "", 0, ALONE)
    method = Finetune(config, sampler, student=trainable())
    sigma, weight = method._noise_levels(source.batch(0), Streams(0, 0))
    assert sigma.shape == (8, 5) and weight == 1
    assert torch.equal(sigma[:, 1], sigma[:, 2]) and torch.equal(sigma[:, 3], sigma[:, 4])
    assert len(set(sigma[:, [0, 1, 3]].flatten().tolist())) == 24
