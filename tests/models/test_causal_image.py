"""Causal Wan with a condition image: cached equals masked, and the image is the first frame, or channels of each."""

import pytest
import torch
from test_wan_causal import CASES, CHANNELS, CONFIG, HEIGHT, WIDTH, assert_equal_to_rounding, cached, latents, levels

from unified_trainer.basics.types import Condition
from unified_trainer.models.wan.attention import TEXT_TOKENS
from unified_trainer.models.wan.causal_image import CausalFirstFrameWanModel, CausalImageChannelsWanModel
from unified_trainer.models.wan.image_model import FirstFrameWanModel, ImageChannelsWanModel
from unified_trainer.numerics.chunks import ChunkConfig
from unified_trainer.numerics.flow import x0_from_velocity

pytestmark = pytest.mark.slow

KINDS = ("first frame", "channels", "channels and clip")


def networks(kind: str):
    """The causal and the bidirectional model with the same weights, none of them zero."""
    from diffusers import WanTransformer3DModel

    own = {} if kind == "first frame" else {"in_channels": 2 * CHANNELS + 4}
    own |= {"image_dim": 6, "added_kv_proj_dim": 24} if kind == "channels and clip" else {}
    with torch.random.fork_rng():
        torch.manual_seed(1)
        network = WanTransformer3DModel(**CONFIG | own)
        for weight in network.parameters():
            if not weight.any():
                weight.data = 0.1 * torch.randn(weight.shape)
    models = CausalFirstFrameWanModel, FirstFrameWanModel
    if kind != "first frame":
        models = CausalImageChannelsWanModel, ImageChannelsWanModel
    other = WanTransformer3DModel(**CONFIG | own)
    other.load_state_dict(network.state_dict())
    return models[0](network), models[1](other)


def condition(kind: str, frames: int, seed: int = 2) -> Condition:
    draw = torch.Generator().manual_seed(seed)
    held = {"text": torch.randn(2, TEXT_TOKENS if "clip" in kind else 5, 8, generator=draw)}
    held["image"] = torch.randn(2, CHANNELS, 1 if kind == "first frame" else frames, HEIGHT, WIDTH, generator=draw)
    if "clip" in kind:
        held["clip"] = torch.randn(2, 5, 6, generator=draw)
    return Condition(held)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_one_chunk_of_all_frames_is_the_bidirectional_network(kind):
    model, plain = networks(kind)
    x, sigma, cond, everything = latents(5), torch.tensor([0.2, 0.7]), condition(kind, 5), ChunkConfig(5)
    reference = plain.velocity(x, sigma, cond)
    assert_equal_to_rounding(model.velocity(x, sigma, cond), reference)
    assert_equal_to_rounding(model.velocity_masked(x, sigma, cond, everything), reference)
    assert_equal_to_rounding(model.velocity_cached(x, sigma, cond, model.open_cache(everything)), reference)
    other = plain.velocity(x, sigma, condition(kind, 5, seed=3))
    assert float((other - reference)[:, :, 1:].abs().max()) > 1e-2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("frames", "chunks"), CASES)
@torch.no_grad()
def test_cached_is_teacher_forcing(kind, frames, chunks):
    """Also where finished chunks are noised: the known frame is clean, whatever stands there."""
    model, _ = networks(kind)
    x_t, finished, sigma, cond = (
        latents(frames),
        latents(frames, seed=5),
        levels(frames, chunks),
        condition(kind, frames),
    )
    one_by_one, _ = cached(model, x_t, sigma, cond, chunks, finished)
    assert_equal_to_rounding(one_by_one, model.velocity_masked(x_t, sigma, cond, chunks, finished))
    if kind != "first frame":
        return
    changed = finished.clone()
    changed[:, :, 0] += 1
    assert torch.equal(cached(model, x_t, sigma, cond, chunks, changed)[0], one_by_one)
    x0 = x0_from_velocity(x_t[:, :, :1], one_by_one[:, :, :1], sigma[:, 0])
    torch.testing.assert_close(x0, cond["image"], rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_later_chunks_see_the_image(kind):
    model, _ = networks(kind)
    chunks, x, sigma = ChunkConfig(1), latents(3), levels(3, ChunkConfig(1))
    one, other = (cached(model, x, sigma, condition(kind, 3, seed), chunks, x)[0] for seed in (2, 3))
    both = condition(kind, 3, 2).tensors | {"image": condition(kind, 3, 3)["image"]}
    third = cached(model, x, sigma, Condition(both), chunks, x)[0]
    for changed in (other, third):
        assert float((changed - one)[:, :, 1:].abs().max()) > 1e-3


def test_gradients_of_a_masked_pass_are_finite_and_reach_no_known_frame():
    """Clean frames at noise level 0 do not divide by it."""
    model, _ = networks("first frame")
    x, clean = latents(4).requires_grad_(), latents(4, seed=5).requires_grad_()
    sigma, cond = levels(4, ChunkConfig(2)), condition("first frame", 4)
    model.velocity_masked(x, sigma, cond, ChunkConfig(2), clean)[:, :, 1:].square().sum().backward()
    assert x.grad.isfinite().all() and clean.grad.isfinite().all()
    assert not x.grad[:, :, 0].any() and not clean.grad[:, :, 0].any()
    assert x.grad[:, :, 1:].any() and clean.grad[:, :, 1].any()
