"""Wan with actions: each latent frame sees those of its own pixel frames, in every kind of pass."""

import pytest
import torch
from helpers import assert_same, small_pipeline
from safetensors.torch import load_file, save_file
from test_wan_causal import assert_equal_to_rounding, cached, causal, condition, latents, levels, network

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.types import Condition
from unified_trainer.models.base import ActionForm
from unified_trainer.models.wan.actions import NEW, by_latent_frame, with_actions
from unified_trainer.models.wan.causal import CausalWanModel
from unified_trainer.models.wan.family import WAN
from unified_trainer.models.wan.model import WanModel
from unified_trainer.numerics.chunks import ChunkConfig

FORM = ActionForm(size=3, ratio=4)
CASES = [
    (6, ChunkConfig(2)),
    (7, ChunkConfig(3, independent_first_frame=True)),
    (9, ChunkConfig(2, independent_first_frame=True, window_frames=4, sink_frames=1)),
]


def acting(kind=CausalWanModel, *, zero: bool = False):
    model = with_actions(kind)(network(), None, FORM)
    if not zero:
        for weight in model._layer.parameters():
            weight.data = torch.randn(weight.shape, generator=torch.Generator().manual_seed(6))
    return model


def acted(frames: int, seed: int = 7) -> Condition:
    draw = torch.Generator().manual_seed(seed)
    actions = torch.randn(2, FORM.pixel_frames(frames), FORM.size, generator=draw)
    return condition(2).updated(Condition({"actions": actions}))


@pytest.mark.parametrize(("frames", "chunks"), CASES)
@torch.no_grad()
def test_cached_is_masked(frames, chunks):
    """With the actions of the whole video, and with those up to each chunk alone."""
    model, x_t, finished, sigma, cond = (
        acting(),
        latents(frames),
        latents(frames, seed=5),
        levels(frames, chunks),
        acted(frames),
    )
    masked = model.velocity_masked(x_t, sigma, cond, chunks, finished)
    assert_equal_to_rounding(cached(model, x_t, sigma, cond, chunks, finished)[0], masked)
    first = chunks.ranges(frames)[0][1]
    known = cond.window(0, first, frames)
    assert_equal_to_rounding(
        model.velocity_cached(x_t[:, :, :first], sigma[:, 0], known, model.open_cache(chunks)), masked[:, :, :first]
    )
    changed = model.velocity_masked(x_t, sigma, acted(frames, seed=8), chunks, finished)
    assert float((changed - masked).abs().amax((0, 1, 3, 4)).min()) > 1e-3


@torch.no_grad()
def test_one_chunk_of_all_frames_is_the_bidirectional_network():
    x, sigma, cond, everything = latents(5), torch.tensor([0.2, 0.7]), acted(5), ChunkConfig(5)
    reference, model = acting(WanModel).velocity(x, sigma, cond), acting()
    assert_equal_to_rounding(model.velocity(x, sigma, cond), reference)
    assert_equal_to_rounding(model.velocity_masked(x, sigma, cond, everything), reference)


@torch.no_grad()
def test_a_new_layer_changes_nothing():
    """Bit for bit with a noise level for each frame, and to rounding with one for all, which is embedded once."""
    x, cond, chunks = latents(4), acted(4), ChunkConfig(2)
    sigma = levels(4, chunks)
    ours, plain = acting(zero=True), causal()
    assert torch.equal(ours.velocity_masked(x, sigma, cond, chunks), plain.velocity_masked(x, sigma, cond, chunks))
    for kind in (WanModel, CausalWanModel):
        one, other = acting(kind, zero=True), kind(network())
        assert_equal_to_rounding(one.velocity(x, sigma[:, 0], cond), other.velocity(x, sigma[:, 0], cond))


def test_gradient_reaches_a_zero_layer():
    model = acting(WanModel, zero=True)
    model.velocity(latents(3), torch.tensor([0.2, 0.7]), acted(3)).square().sum().backward()
    for weight in model._layer.parameters():
        assert weight.grad.isfinite().all() and weight.grad.flatten(1 if weight.ndim > 1 else 0).any()


def test_a_latent_frame_has_the_actions_of_its_pixel_frames():
    cond = Condition({"actions": torch.arange(9.0).view(1, 9, 1) + 1})
    form = ActionForm(1, 4)
    assert by_latent_frame(cond, [0, 2], form).flatten().tolist() == [0, 0, 0, 1, 6, 7, 8, 9]


def test_a_window_begins_with_the_last_pixel_frame_of_its_first_latent_frame():
    cond = Condition({"text": torch.zeros(1, 2, 3), "actions": torch.arange(17.0).view(1, 17, 1)})
    part = cond.window(2, 4, frames=5)
    assert part["actions"].flatten().tolist() == [8, 9, 10, 11, 12]
    assert cond.window(0, 5, frames=5)["actions"].equal(cond["actions"])
    assert_same({"text": part["text"]}, {"text": cond["text"]})


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({}, "needs actions of size 3 for each frame"),
        ({"actions": torch.zeros(2, 17, 4)}, r"needs actions \[frames, 3\] of 9 frames or more, not \[17, 4\]"),
        ({"actions": torch.zeros(2, 8, 3)}, r"of 9 frames or more, not \[8, 3\]"),
    ],
)
def test_other_actions_are_refused(tensors, said):
    cond = condition(2).updated(Condition(tensors)) if tensors else condition(2)
    with pytest.raises(UserError, match=said):
        acting().velocity(latents(3), torch.tensor([0.2, 0.7]), cond)


@pytest.mark.parametrize("ratio", [4, 2])
def test_a_layer_of_another_ratio_than_the_vae_is_refused(ratio, tmp_path):
    """A layer that joins two pixel frames would count half of the frames that the VAE joins to a latent one."""
    folder = small_pipeline(tmp_path / "wan")
    file = next((folder / "transformer").glob("*.safetensors"))
    save_file(load_file(file) | {NEW[0]: torch.zeros(8, FORM.size, ratio)}, file)
    if ratio == 4:
        assert WAN.actions(folder, 0) == FORM
        return
    with pytest.raises(UserError, match="its layer of actions joins 2 pixel frames and its VAE 4: they do not belong"):
        WAN.actions(folder, 0)
