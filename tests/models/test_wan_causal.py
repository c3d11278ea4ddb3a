"""The causal Wan: cached equals masked, the past has no gradient, and the weights are the bidirectional ones."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from diffusers import WanTransformer3DModel
from diffusers.models.transformers.transformer_wan import WanAttnProcessor
from helpers import ALONE, CPU, WAN, assert_near, assert_same, gradients
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from unified_trainer.basics.types import Condition
from unified_trainer.models.wan.causal import CausalWanModel
from unified_trainer.models.wan.model import WanModel
from unified_trainer.numerics.chunks import ChunkConfig
from unified_trainer.parallel.device import free_memory, require_memory
from unified_trainer.roles.adapter import AdapterConfig
from unified_trainer.roles.backbone import Backbone
from unified_trainer.roles.blocks import prepare_blocks
from unified_trainer.roles.recompute import Recompute

pytestmark = pytest.mark.slow  # seconds together

CHANNELS, HEIGHT, WIDTH = 4, 4, 6
CONFIG = {
    "patch_size": (1, 2, 2),
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "in_channels": CHANNELS,
    "out_channels": CHANNELS,
    "text_dim": 8,
    "freq_dim": 8,
    "ffn_dim": 16,
    "num_layers": 2,
    "rope_max_seq_len": 16,
}
TOKENS = HEIGHT // 2 * WIDTH // 2  # of a latent frame
# Latent frames, and how they are made.
CASES = [
    (6, ChunkConfig(2)),
    (3, ChunkConfig(1)),
    (7, ChunkConfig(3, independent_first_frame=True)),
    (8, ChunkConfig(2, window_frames=2)),
    (12, ChunkConfig(3, window_frames=6, sink_frames=3)),
    (9, ChunkConfig(2, independent_first_frame=True, window_frames=4, sink_frames=1)),
    (6, ChunkConfig(2, context_noise=0.25)),
]


def network(**changes) -> WanTransformer3DModel:
    """Always the same weights; attention that is far from uniform."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return WanTransformer3DModel(**CONFIG | changes)


def causal(**changes) -> CausalWanModel:
    return CausalWanModel(network(**changes))


def condition(batch: int, seed: int = 2) -> Condition:
    return Condition({"text": torch.randn(batch, 5, 8, generator=torch.Generator().manual_seed(seed))})


def latents(frames: int, batch: int = 2, seed: int = 3) -> torch.Tensor:
    return torch.randn(batch, CHANNELS, frames, HEIGHT, WIDTH, generator=torch.Generator().manual_seed(seed))


def levels(frames: int, chunks: ChunkConfig, batch: int = 2) -> torch.Tensor:
    """One noise level for each chunk of each sample, by frame."""
    ranges = chunks.ranges(frames)
    drawn = torch.rand(batch, len(ranges), dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    return drawn.repeat_interleave(torch.tensor([stop - start for start, stop in ranges]), 1)


def cached(model, x_t, sigma, cond, chunks, finished):
    """All chunks one after the other, each attending to the finished ones; the velocity, and the cache after."""
    cache, parts = model.open_cache(chunks), []
    for start, stop in chunks.ranges(x_t.shape[2]):
        parts.append(model.velocity_cached(x_t[:, :, start:stop], sigma[:, start], cond, cache))
        model.append(finished[:, :, start:stop], cond, cache)
    return torch.cat(parts, 2), cache


def assert_equal_to_rounding(one, other):
    """Float32: 1e-6 of the largest value."""
    torch.testing.assert_close(one, other, rtol=0, atol=1e-6 * float(other.detach().abs().max()))


# The same weights


def test_a_bidirectional_checkpoint_loads_strictly():
    """The tiny world's transformer: the same keys and weights, and bidirectionally the same network."""
    plain, ours = WanModel.load(WAN, CPU), CausalWanModel.load(WAN, CPU)
    assert_same(ours.network.state_dict(), plain.network.state_dict())
    assert {key for key, _ in ours.network.named_parameters()} == {key for key, _ in plain.network.named_parameters()}
    x, sigma = torch.randn(2, 16, 3, 4, 4), torch.tensor([0.3, 0.9])
    cond = Condition({"text": torch.randn(2, 7, plain.network.config.text_dim)})
    with torch.no_grad():
        assert_equal_to_rounding(ours.velocity(x, sigma, cond), plain.velocity(x, sigma, cond))


@pytest.mark.parametrize("patch", [(1, 1, 1), (1, 2, 2)])
def test_one_chunk_of_all_frames_is_the_bidirectional_network(patch):
    model, plain = causal(patch_size=patch), WanModel(network(patch_size=patch))
    x, sigma, cond = latents(5), torch.tensor([0.2, 0.7]), condition(2)
    reference = plain.velocity(x, sigma, cond)
    everything = ChunkConfig(5)
    assert_equal_to_rounding(model.velocity(x, sigma, cond), reference)
    assert_equal_to_rounding(model.velocity_masked(x, sigma, cond, everything), reference)
    assert_equal_to_rounding(model.velocity_masked(x, sigma[:, None].expand(2, 5), cond, everything), reference)
    assert_equal_to_rounding(model.velocity_cached(x, sigma, cond, model.open_cache(everything)), reference)


def test_a_rollout_leaves_nothing_behind():
    """The bidirectional forward, and another rollout, after one."""
    model, cond, chunks, x = causal(), condition(2), ChunkConfig(2), latents(4)
    sigma = levels(4, chunks)
    before, first = model.velocity(x, sigma[:, 0], cond), cached(model, x, sigma, cond, chunks, x)[0]
    assert torch.equal(model.velocity(x, sigma[:, 0], cond), before)
    assert torch.equal(cached(model, x, sigma, cond, chunks, x)[0], first)


@pytest.mark.parametrize(("changes", "names"), [({"patch_size": (2, 2, 2)}, "patch_size")])
def test_a_network_that_cannot_be_causal(changes, names):
    with pytest.raises(ValueError, match=names):
        causal(**changes)


# Cached and masked


@pytest.mark.parametrize("patch", [(1, 1, 1), (1, 2, 2)])
@pytest.mark.parametrize(("frames", "chunks"), CASES)
@torch.no_grad()
def test_cached_is_teacher_forcing(frames, chunks, patch):
    """A chunk that attends to a cache is that chunk of the pass over [clean | noisy], at a level of its own."""
    model, cond = causal(patch_size=patch), condition(2)
    x_t, finished, sigma = latents(frames), latents(frames, seed=5), levels(frames, chunks)
    one_by_one, _ = cached(model, x_t, sigma, cond, chunks, finished)
    assert_equal_to_rounding(one_by_one, model.velocity_masked(x_t, sigma, cond, chunks, finished))
    other = model.velocity_masked(x_t, sigma, cond, chunks, finished + 1)
    assert float((other - one_by_one).abs().max()) > 1e-2  # the past matters


@pytest.mark.parametrize(("frames", "chunks"), CASES)
@torch.no_grad()
def test_cached_is_block_causal_at_the_context_noise(frames, chunks):
    """Chunks at the context's own level are what later chunks attend to."""
    model, cond, x = causal(), condition(2), latents(frames)
    sigma = torch.full((2, frames), chunks.context_noise, dtype=torch.float64)
    one_by_one, _ = cached(model, x, sigma, cond, chunks, x)
    assert_equal_to_rounding(one_by_one, model.velocity_masked(x, sigma, cond, chunks))
    assert_equal_to_rounding(one_by_one, model.velocity_masked(x, sigma[:, 0], cond, chunks))


@torch.no_grad()
def test_no_chunk_sees_a_later_one():
    model, cond, chunks, x = causal(), condition(2), ChunkConfig(2), latents(6)
    sigma, changed = levels(6, chunks), latents(6)
    changed[:, :, 2:4] += 1
    before, after = (model.velocity_masked(y, sigma, cond, chunks) for y in (x, changed))
    assert torch.equal(before[:, :, :2], after[:, :, :2])
    for start in (2, 4):
        assert float((before - after)[:, :, start : start + 2].abs().max()) > 1e-2


@torch.no_grad()
def test_every_frame_has_its_own_noise_level():
    model, cond, x = causal(), condition(2), latents(4)
    chunks = ChunkConfig(1)
    sigma = levels(4, chunks)
    changed = sigma.clone()
    changed[1, 2] = 1 - changed[1, 2]
    before, after = (model.velocity_masked(x, level, cond, chunks) for level in (sigma, changed))
    moved = (before - after).abs().amax((1, 3, 4))
    assert not moved[0].any() and not moved[1, :2].any() and (moved[1, 2:] > 1e-3).all()


@torch.no_grad()
def test_three_samples_are_three_times_one():
    frames, chunks = 9, ChunkConfig(3, window_frames=6, sink_frames=3)
    model, x_t, finished, sigma = causal(), latents(frames, 3), latents(frames, 3, 5), levels(frames, chunks, 3)
    together, _ = cached(model, x_t, sigma, condition(3), chunks, finished)
    masked = model.velocity_masked(x_t, sigma, condition(3), chunks, finished)
    for i in range(3):
        own = slice(i, i + 1)
        cond = condition(3).map(lambda text, own=own: text[own])
        alone, _ = cached(model, x_t[own], sigma[own], cond, chunks, finished[own])
        assert_equal_to_rounding(together[own], alone)
        assert_equal_to_rounding(masked[own], alone)


# The cache


def test_residents_roll_behind_the_sink():
    model, cond, chunks = causal(), condition(1), ChunkConfig(3, window_frames=6, sink_frames=3)
    cache, residents, sink = model.open_cache(chunks), [], []
    for i in range(5):
        model.append(latents(3, 1, seed=i), cond, cache)
        residents.append(cache.resident)
        sink.append(cache.past[0].own)
        assert cache.seen == 3 * (i + 1)
        assert all(part.shape[1] == len(c.frames) * TOKENS for c in cache.past for pair in c.own for part in pair)
    first = [0, 1, 2]
    assert residents == [first, [*range(6)], [*first, 6, 7, 8], [*first, 9, 10, 11], [*first, 12, 13, 14]]
    assert all(one is sink[0] for one in sink)  # never copied, never written


@torch.no_grad()
def test_what_fell_out_is_forgotten_and_the_sink_is_not():
    """With one block, keys and values are of their own frame alone."""
    model, cond, x = causal(num_layers=1), condition(1), latents(6, 1)
    changed = x.clone()
    changed[:, :, :2] += 1
    for sink in (0, 2):
        chunks = ChunkConfig(2, window_frames=2 + sink, sink_frames=sink)
        before, after = (cached(model, x, levels(6, chunks, 1), cond, chunks, y)[0] for y in (x, changed))
        assert not torch.equal(before[:, :, 2:4], after[:, :, 2:4])
        assert torch.equal(before[:, :, 4:], after[:, :, 4:]) == (sink == 0)


@torch.no_grad()
def test_keys_are_turned_to_their_absolute_frame():
    """Channel pair i of frame p is turned by p / 10000^(2i / d); with one token per frame only the frame's turns."""
    chunks = ChunkConfig(2, window_frames=4, sink_frames=2)
    model, raw = causal(num_layers=1, patch_size=(1, HEIGHT, WIDTH)), []
    model.blocks[0].attn1.norm_k.register_forward_hook(lambda _module, _inputs, out: raw.append(out))
    cache = model.open_cache(chunks)
    for i in range(4):
        model.append(latents(2, 1, seed=i), condition(1), cache)
    time_channels = model._positions._rope.t_dim
    rates = 10000 ** (-torch.arange(0, time_channels, 2, dtype=torch.float64) / time_channels)
    assert [chunk.frames for chunk in cache.past] == [(0, 1), (6, 7)]
    for chunk, unturned in zip(cache.past, (raw[0], raw[3]), strict=True):
        pairs = torch.view_as_complex(unturned.double().reshape(2, 2, -1, 2))
        angles = torch.tensor(chunk.frames)[:, None] * rates
        pairs[..., : len(rates)] *= torch.polar(torch.ones_like(angles), angles)[:, None]
        expected = torch.view_as_real(pairs).flatten(2)
        torch.testing.assert_close(chunk.own[0][0][0].double(), expected, rtol=0, atol=1e-5)


@torch.no_grad()
def test_the_same_chunk_further_on_is_another_one():
    model, cond, x = causal(), condition(1), latents(2, 1, 7)
    here, there = (model.open_cache(ChunkConfig(2)) for _ in range(2))
    for cache in (here, there):
        model.append(latents(2, 1), cond, cache)
    sigma = torch.tensor([0.5])
    first = model.velocity_cached(x, sigma, cond, here)
    assert torch.equal(model.velocity_cached(x, sigma, cond, there), first)
    there.seen = 4
    assert float((model.velocity_cached(x, sigma, cond, there) - first).abs().max()) > 1e-3


@torch.no_grad()
def test_generation_goes_on_to_the_last_position():
    """Far longer than the window, and a clear end."""
    model, cond, chunks = causal(), condition(1), ChunkConfig(2, window_frames=4, sink_frames=2)
    cache, sigma = model.open_cache(chunks), torch.tensor([1.0])
    for i in range(8):
        assert model.velocity_cached(latents(2, 1, i), sigma, cond, cache).isfinite().all()
        model.append(latents(2, 1, i), cond, cache)
    further = latents(2, 1)
    for call in (
        lambda: model.velocity_cached(further, sigma, cond, cache),
        lambda: model.append(further, cond, cache),
        lambda: model.velocity_masked(latents(18, 1), sigma, cond, ChunkConfig(1)),
    ):
        with pytest.raises(ValueError, match=r"latent frame 17 is beyond the 16 positions .*rope_max_seq_len"):
            call()
    assert cache.seen == 16


# A rolling sink

ROLLING = [
    ChunkConfig(2, window_frames=4, sink_frames=2, rolling_sink=True),
    ChunkConfig(3, window_frames=5, sink_frames=1, rolling_sink=True),  # the sink is a part of a cut chunk
    ChunkConfig(2, independent_first_frame=True, window_frames=4, sink_frames=1, rolling_sink=True),
]


@pytest.mark.parametrize("chunks", ROLLING)
@torch.no_grad()
def test_a_rolling_sink_is_as_far_as_at_the_start_of_a_video(chunks):
    """With one block, keys are of their own frame alone: the frames of the cache, from 0 on, are a video's start."""
    model, cond, frames = causal(num_layers=1), condition(2), chunks.window_frames
    cache, start, past = model.open_cache(chunks), model.open_cache(ChunkConfig(1)), latents(13)
    for begin, stop in chunks.ranges(9 if chunks.chunk_frames == 3 or chunks.independent_first_frame else 10):
        model.append(past[:, :, begin:stop], cond, cache)
    own = [pair for chunk in cache.past for part in chunk.own for pair in part]
    assert cache.seen > frames == len(cache.resident)
    for frame in cache.resident:
        model.append(past[:, :, frame : frame + 1], cond, start)
    x, sigma = latents(chunks.chunk_frames, seed=7), torch.tensor([0.3, 0.9])
    assert_equal_to_rounding(*(model.velocity_cached(x, sigma, cond, one) for one in (cache, start)))
    fixed = model.open_cache(replace(chunks, rolling_sink=False))
    fixed.past, fixed.seen = cache.past, cache.seen
    moved = model.velocity_cached(x, sigma, cond, cache) - model.velocity_cached(x, sigma, cond, fixed)
    assert float(moved.abs().max()) > 1e-4
    after = [pair for chunk in cache.past for part in chunk.own for pair in part]
    assert all(one is other for one, other in zip(own, after, strict=True))  # kept where they were: no error adds up


@torch.no_grad()
def test_turned_keys_are_those_of_a_frame_further_on():
    """By every number of frames, also none, which changes no bit; values stay."""
    model, cond, chunks = causal(num_layers=1), condition(1), ROLLING[0]
    cache, x = model.open_cache(chunks), latents(2, 1)
    model.append(x, cond, cache)
    ((key, value),) = cache.past[0].own
    for by in (0, 1, 5, 14):
        there = model.open_cache(chunks)
        there.seen = by
        model.append(x, cond, there)
        cache.seen = by + chunks.window_frames
        ((turned, same),) = cache.attended()[0].own
        torch.testing.assert_close(turned, there.past[0].own[0][0], rtol=0, atol=2e-6 if by else 0)
        assert same is value and cache.past[0].own[0][0] is key


@torch.no_grad()
def test_a_rolling_sink_stays_until_the_video_outgrows_the_window():
    model, cond, x = causal(), condition(2), latents(6)
    rolling = ROLLING[0]
    sigma = levels(6, rolling)
    plain, _ = cached(model, x, sigma, cond, replace(rolling, rolling_sink=False), x)
    assert torch.equal(cached(model, x, sigma, cond, rolling, x)[0], plain)
    assert_equal_to_rounding(model.velocity_masked(x, sigma, cond, rolling, x), plain)
    with pytest.raises(ValueError, match=r"rolling_sink cannot be in one masked pass .*window_frames to 6 or more"):
        model.velocity_masked(latents(8), levels(8, rolling), cond, rolling)


# Text


class Counter:
    """How often the projections of the text's keys and values were called, by block."""

    def __init__(self, model: CausalWanModel) -> None:
        self.calls = [0] * len(model.blocks)
        for layer, block in enumerate(model.blocks):
            for projection in (block.attn2.to_k, block.attn2.to_v):
                projection.register_forward_hook(lambda *_args, layer=layer: self._count(layer))

    def _count(self, layer: int) -> None:
        self.calls[layer] += 1


def test_text_is_projected_once_per_rollout_and_anew_where_there_is_gradient():
    model, cond, chunks, x = causal(), condition(2), ChunkConfig(2), latents(6)
    counter = Counter(model)
    with torch.no_grad():
        for expected in (2, 4):
            cached(model, x, levels(6, chunks), cond, chunks, x)
            assert counter.calls == [expected] * 2
    cache = model.open_cache(chunks)
    model.append(x[:, :, :2], cond, cache)
    model.velocity_cached(x[:, :, 2:4], torch.tensor([0.5, 0.5]), cond, cache).square().mean().backward()
    assert counter.calls == [4 + 4] * 2
    for block in model.blocks:
        assert block.attn2.to_k.weight.grad.abs().max() > 0 and block.attn2.to_v.weight.grad.abs().max() > 0


# Gradients


class Masked(WanAttnProcessor):
    """diffusers' attention with a dense mask."""

    def __init__(self, mask: torch.Tensor) -> None:
        super().__init__()
        self.mask = mask

    def __call__(self, attn, x, encoder, _mask, rotary_emb):
        return super().__call__(attn, x, encoder, self.mask, rotary_emb)


def without_gradient_before(tokens: int):
    """A forward hook: the first tokens' output is a constant."""
    return lambda _module, _inputs, out: torch.cat([out[:, :tokens].detach(), out[:, tokens:]], 1)


def loss_of(velocity, seed=9):
    return (velocity * torch.randn(velocity.shape, generator=torch.Generator().manual_seed(seed))).mean()


def checkpointed(model, on):
    if on:
        prepare_blocks(model.blocks, Recompute.of_setting("full", len(model.blocks)), nullcontext)
    return model


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_gradient_is_that_of_a_detached_context(checkpointing):
    """The gradient of every weight, text projections too, is that of diffusers' forward over [context | chunk]."""
    model, cond, chunks, x = checkpointed(causal(), checkpointing), condition(2), ChunkConfig(2), latents(6)
    cache = model.open_cache(chunks)
    for start in (0, 2):
        model.append(x[:, :, start : start + 2], cond, cache)
    ours = model.velocity_cached(x[:, :, 4:], torch.tensor([0.6, 0.9]), cond, cache)
    model.append(x[:, :, 4:], cond, cache)  # the rollout goes on before the backward pass
    loss_of(ours).backward()

    plain = network()
    frame = torch.arange(6) // 2
    mask = (frame[:, None] >= frame).repeat_interleave(TOKENS, 0).repeat_interleave(TOKENS, 1)
    for block in plain.blocks:
        block.attn1.processor = Masked(mask)
        for part in (block.attn1.norm_k, block.attn1.to_v):
            part.register_forward_hook(without_gradient_before(4 * TOKENS))
    time = torch.cat([torch.zeros(2, 4 * TOKENS), torch.tensor([[600.0], [900.0]]).expand(2, 2 * TOKENS)], 1)
    reference = plain(x, time, cond["text"], return_dict=False)[0][:, :, 4:]
    loss_of(reference).backward()
    assert_equal_to_rounding(ours, reference)
    assert_near(gradients(model.network), gradients(plain))


def rollout(model, x, sigma, cond, chunks, with_gradient):
    """Every chunk's velocity taken as its finished state, as a student that learns from itself does."""
    cache, parts = model.open_cache(chunks), []
    for i, (start, stop) in enumerate(chunks.ranges(x.shape[2])):
        own = x[:, :, start:stop]
        with torch.set_grad_enabled(with_gradient(i)):
            parts.append(own - model.velocity_cached(own, sigma[:, start], cond, cache))
        model.append(parts[-1].detach(), cond, cache)
    return parts


@pytest.mark.parametrize("chunks", [ChunkConfig(2), ChunkConfig(2, window_frames=4, sink_frames=2), ROLLING[0]])
def test_recomputed_activations_attend_to_what_was_there(chunks):
    """At the backward pass the cache is at the end of the rollout, its frames others than a chunk saw."""
    grads = []
    for checkpointing in (False, True):
        model = checkpointed(causal(), checkpointing)
        parts = rollout(model, latents(10), levels(10, chunks), condition(2), chunks, lambda _i: True)
        loss_of(torch.cat(parts, 2)).backward()
        grads.append(gradients(model.network))
    assert_near(*grads, tolerance=1e-6)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_chunk_gives_no_gradient_to_an_earlier_one(checkpointing):
    """d loss(last chunk) / d keys and values of earlier chunks is exactly none."""
    model, cond, chunks, x = checkpointed(causal(), checkpointing), condition(2), ChunkConfig(2), latents(6)
    x = x.requires_grad_()
    parts = rollout(model, x, levels(6, chunks), cond, chunks, lambda _i: True)
    loss_of(parts[-1]).backward()
    assert not x.grad[:, :, :4].any() and x.grad[:, :, 4:].any()
    alone = gradients(model.network)
    model.network.zero_grad()
    loss_of(rollout(model, x.detach(), levels(6, chunks), cond, chunks, lambda i: i == 2)[-1]).backward()
    assert_same(gradients(model.network), alone)


def test_the_cache_holds_nothing_that_wants_gradient():
    model, cond, x = causal(), condition(2), latents(2).requires_grad_()
    cache = model.open_cache(ChunkConfig(2))
    model.append(x, cond, cache)
    pairs = [*cache.past[0].own, *(pair for own in cache.text for pair in own)]
    assert len(pairs) == 4 and not any(part.requires_grad for pair in pairs for part in pair)


def test_a_call_without_append_leaves_the_cache_alone():
    model, cond, x = causal(), condition(2), latents(2)
    cache = model.open_cache(ChunkConfig(2))
    model.append(x, cond, cache)
    before = [part.clone() for pair in cache.past[0].own for part in pair]
    model.velocity_cached(latents(2, seed=8), torch.tensor([0.5, 0.5]), cond, cache)
    assert cache.seen == 2 and all(
        torch.equal(a, b) for a, b in zip(before, [p for pair in cache.past[0].own for p in pair], strict=True)
    )


# With what wraps the network


def test_adapters_act_and_learn_in_both_passes():
    backbone = Backbone(causal(), ALONE, adapters={"student": AdapterConfig(rank=2)}, recompute="full")
    for key, weight in backbone.weights("student").items():
        torch.nn.init.normal_(weight, std=0.5) if "lora_B" in key else None
    cond, chunks, x, finished = condition(2), ChunkConfig(2), latents(4), latents(4, seed=5)
    sigma = levels(4, chunks)
    with backbone.running("student") as model:
        ours, _ = cached(model, x, sigma, cond, chunks, finished)
        assert_equal_to_rounding(ours, model.velocity_masked(x, sigma, cond, chunks, finished))
    with backbone.running("nobody") as model, torch.no_grad():
        assert float((cached(model, x, sigma, cond, chunks, finished)[0] - ours).abs().max()) > 1e-2
    loss_of(ours).backward()
    for key, weight in backbone.weights("student").items():
        assert weight.grad.abs().max() > 0, key


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")  # as in parallel/fsdp.py
def test_sharded_blocks_give_the_same_gradients():
    """FSDP2 over one rank: its hooks gather the weights for every pass, and for every recomputation."""
    chunks, grads = ChunkConfig(2, window_frames=4, sink_frames=2), []
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        for sharded in (False, True):
            model = checkpointed(causal(), True)
            if sharded:
                mesh = init_device_mesh("cpu", (1,))
                for block in model.blocks:
                    fully_shard(block, mesh=mesh)
                fully_shard(model.network, mesh=mesh)
            parts = rollout(model, latents(8), levels(8, chunks), condition(2), chunks, lambda i: i > 0)
            loss_of(torch.cat(parts, 2)).backward()
            grads.append(gradients(model.network))
    finally:
        torch.distributed.destroy_process_group()
    assert_near(*grads, tolerance=1e-6)


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # RMSNorm under autocast
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_precision_and_memory_of_the_cache(dtype):
    """Keys and values are kept as attention takes them, and the figure is what they weigh."""
    chunks = ChunkConfig(2, window_frames=4, sink_frames=2)
    model, cond, x, sigma = causal(), condition(2), latents(8), levels(8, chunks)
    exact = model.velocity_masked(x, sigma, cond, chunks, x)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        rough, cache = cached(model, x, sigma, cond, chunks, x)
        masked = model.velocity_masked(x, sigma, cond, chunks, x)
    error = 1e-6 if dtype == torch.float32 else 2e-2  # bfloat16 has eight bits: 4e-3 in each product
    for one in (rough, masked):
        torch.testing.assert_close(one, exact, rtol=0, atol=error * float(exact.abs().max()))
    parts = [part for chunk in cache.past for pair in chunk.own for part in pair]
    assert {part.dtype for part in parts} == {dtype}
    assert {part.dtype for (pair,) in cache.text for part in pair} == {dtype}
    held = sum(part.untyped_storage().nbytes() for part in parts)
    assert held == 2 * model.cache_bytes((CHANNELS, 8, HEIGHT, WIDTH), chunks, dtype)


def test_memory_of_wan_1_3b():
    """30 blocks, 1,536 wide, 21 latent frames of 30 x 52 tokens: 5.6 GiB in bfloat16, and 1.6 with a window of 6."""
    with torch.device("meta"):
        large = network(num_attention_heads=12, attention_head_dim=128, num_layers=30, rope_max_seq_len=1024)
    model, shape = CausalWanModel(large), (16, 21, 60, 104)
    whole = 2 * 30 * 21 * 1560 * 1536
    assert model.cache_bytes(shape, ChunkConfig(3), torch.bfloat16) == 2 * whole
    assert model.cache_bytes(shape, ChunkConfig(3), torch.float32) == 4 * whole
    assert (
        model.cache_bytes(shape, ChunkConfig(3, window_frames=6, sink_frames=3), torch.bfloat16) == 2 * whole * 6 / 21
    )


def test_more_frames_than_positions_are_refused_before_any_pass():
    with pytest.raises(ValueError, match="latent frame 16 is beyond the 16 positions"):
        causal().cache_bytes((CHANNELS, 17, HEIGHT, WIDTH), ChunkConfig(1, window_frames=2), torch.float32)


def test_a_cache_that_does_not_fit_is_refused():
    require_memory(1, CPU, "the cache", "fewer frames")
    with pytest.raises(ValueError, match=r"the cache needs \d+\.\d+ GiB, but cpu has \d+\.\d+ free: fewer frames"):
        require_memory(free_memory(CPU) * 2, CPU, "the cache", "fewer frames")
