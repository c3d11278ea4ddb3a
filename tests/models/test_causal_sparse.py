"""Sparse attention of causal students: cached equals masked, tiles stay in their chunks, and runs and exports agree."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from diffusers import DiffusionPipeline
from diffusers.utils import dynamic_modules_utils
from forked import program
from helpers import ALONE, CPU, WAN, assert_one_training, assert_same, checkpoint_of, cut_off, metrics_of
from helpers import flags as words_of
from test_wan_causal import assert_equal_to_rounding, cached, causal, condition, latents, levels, loss_of, network

from unified_trainer.__main__ import main
from unified_trainer.basics.errors import UserError
from unified_trainer.basics.requests import Request
from unified_trainer.models.sparse_attention import (
    ChunkTiles,
    SparseAttentionConfig,
    attend_sparsely,
    flex_fine,
    masked_fine,
    where_equal,
)
from unified_trainer.models.wan.causal_sparse import CausalSparseWanModel
from unified_trainer.models.wan.family import WAN as FAMILY
from unified_trainer.models.wan.sparse import SparseWanModel
from unified_trainer.numerics.chunks import ChunkConfig
from unified_trainer.tools.load_run import load_role
from unified_trainer.tools.sample.sample import of_length, videos

SMALL = SparseAttentionConfig(share=0.5, tile=(2, 2, 2))  # of 3 frames of 4 x 6 tokens: 12 tiles, of which 6 are cut
CASES = [  # latent frames and chunks; windows and sinks of whole chunks
    (6, ChunkConfig(2)),
    (7, ChunkConfig(3, independent_first_frame=True)),
    (8, ChunkConfig(2, window_frames=2)),
    (12, ChunkConfig(3, window_frames=6, sink_frames=3)),
    (10, ChunkConfig(3, independent_first_frame=True, window_frames=4, sink_frames=1)),
    (6, ChunkConfig(2, context_noise=0.25)),
]
ROLLING = ChunkConfig(2, window_frames=4, sink_frames=2, rolling_sink=True)


def sparse(config=SMALL, kind=CausalSparseWanModel):
    """Gates far from zero, so that the coarse branch counts."""
    model, draw = kind(network(patch_size=(1, 1, 1)), None, config, CPU), torch.Generator().manual_seed(6)
    for block in model.blocks:
        for weight in block.get_submodule("to_gate_compress").parameters():
            weight.data = torch.randn(weight.shape, generator=draw)
    return model


@torch.no_grad()
def test_all_tiles_and_no_gate_are_the_dense_network():
    dense = causal(patch_size=(1, 1, 1))
    model = CausalSparseWanModel(network(patch_size=(1, 1, 1)), None, SMALL, CPU)
    x, cond, chunks = latents(6), condition(2), ChunkConfig(2, window_frames=4, sink_frames=2)
    sigma = levels(6, chunks)
    passes = (
        lambda one: one.velocity(x, sigma[:, 0], cond),
        lambda one: one.velocity_masked(x, sigma, cond, chunks, x),
        lambda one: cached(one, x, sigma, cond, chunks, x)[0],
    )
    for run in passes:
        model.share = 0.0
        assert_equal_to_rounding(run(model), run(dense))
        model.share = 0.5
        assert float((run(model) - run(dense)).abs().max()) > 1e-3


@pytest.mark.parametrize("tile", [(2, 2, 2), (4, 3, 1)])
@pytest.mark.parametrize(("frames", "chunks"), CASES)
@torch.no_grad()
def test_cached_is_masked(frames, chunks, tile):
    """A chunk that attends to a cache is that chunk of the pass over [clean | noisy]; at the context's level, of x."""
    model, cond = sparse(SparseAttentionConfig(share=0.7, tile=tile)), condition(2)
    x_t, finished, sigma = latents(frames), latents(frames, seed=5), levels(frames, chunks)
    one_by_one, _ = cached(model, x_t, sigma, cond, chunks, finished)
    assert_equal_to_rounding(one_by_one, model.velocity_masked(x_t, sigma, cond, chunks, finished))
    other = model.velocity_masked(x_t, sigma, cond, chunks, finished + 1)
    assert float((other - one_by_one).abs().max()) > 1e-2  # the past matters
    sigma = torch.full((2, frames), chunks.context_noise, dtype=torch.float64)
    one_by_one, _ = cached(model, x_t, sigma, cond, chunks, x_t)
    assert_equal_to_rounding(one_by_one, model.velocity_masked(x_t, sigma, cond, chunks))


@torch.no_grad()
def test_a_fault_that_lets_tiles_cross_chunks_is_found(monkeypatch):
    """Tiles over all frames of a masked pass as if they were one chunk: what the cached pass cannot have."""
    model, cond, x, chunks = sparse(), condition(2), latents(6), ChunkConfig(3)
    sigma, right = levels(6, chunks), ChunkTiles.of
    one_by_one, _ = cached(model, x, sigma, cond, chunks, x)

    def crossing(config, parts, sees, share):
        if len(sees) == 1:
            return right(config, parts, sees, share)
        whole = (sum(t for t, _, _ in parts), *parts[0][1:])
        return right(config, [whole], torch.ones(1, 1, dtype=torch.bool), share)

    monkeypatch.setattr(ChunkTiles, "of", crossing)
    wrong = model.velocity_masked(x, sigma, cond, chunks, x)
    assert float((wrong - one_by_one).abs().max()) > 1e-3


@torch.no_grad()
def test_a_video_in_one_chunk_is_that_of_the_bidirectional_network():
    model, plain = sparse(), sparse(kind=SparseWanModel)
    x, sigma, cond, everything = latents(5), torch.tensor([0.2, 0.7]), condition(2), ChunkConfig(5)
    reference = plain.velocity(x, sigma, cond)
    assert_equal_to_rounding(model.velocity(x, sigma, cond), reference)
    assert_equal_to_rounding(model.velocity_masked(x, sigma, cond, everything), reference)
    assert_equal_to_rounding(model.velocity_cached(x, sigma, cond, model.open_cache(everything)), reference)


def test_the_gradient_to_a_noisy_chunk_is_that_of_the_masked_pass():
    """Finished chunks are constants in both, so that all of it goes through the chunk's own tokens."""
    model, cond, chunks = sparse(), condition(2), ChunkConfig(2, window_frames=4, sink_frames=2)
    x, finished, sigma = latents(8), latents(8, seed=5), levels(8, chunks)
    found = []
    for run in (
        lambda x: cached(model, x, sigma, cond, chunks, finished)[0],
        lambda x: model.velocity_masked(x, sigma, cond, chunks, finished),
    ):
        noisy = x.clone().requires_grad_()
        found.append(torch.autograd.grad(loss_of(run(noisy)), noisy)[0])
    assert found[1].abs().max() > 0
    torch.testing.assert_close(*found, rtol=0, atol=1e-5 * float(found[1].abs().max()))


@torch.no_grad()
def test_a_rolling_sink_is_turned_before_its_tiles_are_chosen():
    """With one block the cache is a video's start: the same keys at frames 0 to 3, in the same chunks."""
    model = CausalSparseWanModel(network(patch_size=(1, 1, 1), num_layers=1), None, SMALL, CPU)
    cond, past, start = condition(2), latents(10), model.open_cache(ChunkConfig(2))
    cache = model.open_cache(ROLLING)
    for begin in range(0, 10, 2):
        model.append(past[:, :, begin : begin + 2], cond, cache)
    for chunk in cache.past:
        model.append(past[:, :, list(chunk.frames)], cond, start)
    x, sigma = latents(2, seed=7), torch.tensor([0.3, 0.9])
    assert_equal_to_rounding(*(model.velocity_cached(x, sigma, cond, one) for one in (cache, start)))


def test_no_tile_has_tokens_of_two_chunks_and_each_row_keeps_its_share():
    """Chunks of 1, 3 and 3 frames of 3 x 5 tokens; the last one sees itself and the first."""
    sees = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]], dtype=torch.bool)
    tiles = ChunkTiles.of(SMALL, [(1, 3, 5), (3, 3, 5), (3, 3, 5)], sees, 0.7)
    chunk = torch.tensor([0] * 15 + [1] * 45 + [2] * 45)
    owners = [{int(c) for c in chunk[tiles.keys.of_token == tile]} for tile in range(len(tiles.keys.sizes))]
    assert all(len(owner) == 1 for owner in owners)
    counts = [sum(owner == {c} for owner in owners) for c in range(3)]
    assert counts == [6, 12, 12]
    rows = torch.tensor([6, 18, 18]).repeat_interleave(torch.tensor(counts))  # tiles that each tile of queries sees
    assert tiles.seen.sum(1).tolist() == rows.tolist()
    assert tiles.kept.tolist() == [math.ceil(0.3 * seen) for seen in rows.tolist()]
    last = ChunkTiles.of(SMALL, [(1, 3, 5), (3, 3, 5)], torch.ones(1, 2, dtype=torch.bool), 0.7)
    assert last.seen is None and last.kept.tolist() == [6] * 12 and len(last.keys.sizes) == 18


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("sees", [[[1, 1, 1]], [[1, 0, 0], [1, 1, 0], [1, 0, 1]]])
def test_flex_attention_gives_what_the_mask_gives(sees, monkeypatch):
    """More keys than queries, and rows that keep different numbers of tiles."""
    monkeypatch.setattr(torch.nn.attention.flex_attention, "_validate_device", lambda *_parts: None)
    tiles = ChunkTiles.of(SMALL, [(1, 3, 5), (3, 3, 5), (2, 3, 5)], torch.tensor(sees, dtype=torch.bool), 0.6)
    draw = torch.Generator().manual_seed(0)
    own = 30 if len(sees) == 1 else 90
    parts = [torch.randn(2, n, 3, 16, generator=draw, requires_grad=True) for n in (own, 90, 90, own)]
    up, found = torch.randn(parts[0].shape, generator=draw), []
    for fine in (masked_fine, flex_fine):
        out = attend_sparsely(*parts, tiles, fine)
        found.append((out, *torch.autograd.grad(out, parts, up)))
    for ours, flex in zip(*found, strict=True):
        torch.testing.assert_close(flex, ours, rtol=0, atol=1e-5)


def test_kernels_compute_passes_without_a_cache_alone():
    x, past = torch.zeros(1, 4, 1, 2), torch.ones(1, 8, 1, 2)
    fine = where_equal(lambda *_: torch.full_like(x, 1), lambda *_: torch.full_like(x, 2))
    tiles, order = ChunkTiles.of(SMALL, [(1, 2, 2)], torch.ones(1, 1, dtype=torch.bool), 0.5), torch.zeros(1, 1, 1, 1)
    assert fine(x, x, x, order.int(), tiles).eq(1).all() and fine(x, past, past, order.int(), tiles).eq(2).all()


def test_windows_that_cut_a_chunk_are_refused():
    """Those are refused, and no others, that leave a part of a chunk in the cache of a long video."""
    for chunk, first, window, sink in itertools.product((1, 2, 3), (False, True), range(8), range(5)):
        chunks = ChunkConfig(chunk, independent_first_frame=first, window_frames=window, sink_frames=sink)
        if window < chunk + sink:
            continue
        ranges = chunks.ranges(18 * chunk + first)
        parts = [
            {start <= frame < stop and frame in seen for frame in range(start, stop)}
            for seen in chunks.visible_frames(18 * chunk + first)
            for start, stop in ranges
        ]
        whole = all(len(part) == 1 for part in parts)
        try:
            chunks.check_whole()
        except UserError as error:
            assert not whole and "sampler.chunks." in str(error), chunks
        else:
            assert whole, chunks
    for call in (lambda one: sparse().open_cache(one), lambda one: sparse().velocity_masked(*masked_inputs(), one)):
        with pytest.raises(UserError, match=r"window_frames must be the sink and whole chunks .* multiple of 2 frames"):
            call(ChunkConfig(2, window_frames=3))


def masked_inputs():
    return latents(4), levels(4, ChunkConfig(2)), condition(2)


@torch.no_grad()
def test_the_share_of_a_pass_counts_the_pairs_computed():
    """Chunks of 2 frames of 4 x 6 tokens have 6 tiles of 8; of 6, 12 and 18 tiles seen, 3, 6 and 9 are kept."""
    model, (x, sigma, cond) = sparse(), (latents(6), levels(6, ChunkConfig(2)), condition(2))
    model.velocity_masked(x, sigma, cond, ChunkConfig(2))
    coarse = 6 * (6 + 12 + 18)
    assert model.pass_share["attn1"] * (144**2 + 18**2) == 48 * 8 * (3 + 6 + 9) + coarse
    cached(model, x, sigma, cond, ChunkConfig(2), x)  # the last pass is an append, which reads the text's cache too
    assert model.pass_share["attn1"] * (48**2 + 6**2) == 48 * 8 * 9 + 6 * 18
    assert model.pass_share["attn2.to_k"] == 0


def test_a_sparse_folder_opens_as_a_causal_student_and_not_as_a_dense_one(tmp_path):
    model = FAMILY.sparse(WAN, "transformer", SMALL, True)
    model.read(ALONE)
    assert isinstance(model, CausalSparseWanModel) and model.share == 0.5
    model.save(tmp_path, "transformer", torch.float32)
    (tmp_path / "model_index.json").write_bytes((WAN / "model_index.json").read_bytes())
    with pytest.raises(UserError, match=r"--student\.sparse-attention\.share"):
        FAMILY.causal(tmp_path, "transformer")


RUN = {"recipe": "tiny", "video.frames": 17, "video.height": 64, "video.width": 64, "sampler.num-steps": 2, "steps": 2}
RUN |= {"validate-every": 0, "student.learning-rate": 1e-2, "method": "self_forcing", "device": "cpu"}
RUN |= {"algorithm.batch-size": 2, "algorithm.micro-batch": 2, "algorithm.student-every": 1}
RUN |= {"student.sparse-attention.share": 0.7, "student.sparse-attention.tile": "2 2 2"}
RUN |= {"sampler.chunks.chunk-frames": 2, "sampler.chunks.independent-first-frame": True}
RUN |= {"sampler.chunks.window-frames": 3, "sampler.chunks.sink-frames": 1}


def flags(settings):
    """Settings as flags; the tile is three words."""
    return [part for word in words_of(settings) for part in (word.split() if word == "2 2 2" else [word])]


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, {"sampler.chunks.rolling-sink": True}])
def test_a_run_resumes_bit_for_bit_and_its_export_is_sampled_alike(tmp_path, monkeypatch, capsys, more):
    """Also a video of twice the run's length, which outgrows the window."""
    more = RUN | more | {"student.sparse-attention.warmup-updates": 1, "checkpoint-every": 1}
    assert main(flags(more | {"output": tmp_path / "whole"})) == 0
    assert "student.sparse_attention: plain torch, which computes all pairs of tokens" in capsys.readouterr().out
    assert main(["--resume", str(cut_off(tmp_path / "whole", tmp_path / "half", 1))]) == 0
    whole = checkpoint_of(tmp_path / "whole", 2)
    assert_same(checkpoint_of(tmp_path / "half", 2), whole)
    assert whole["student/weights/blocks.0.to_gate_compress.weight"].ne(0).any()

    monkeypatch.setattr(dynamic_modules_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(tmp_path / "modules")
    assert main(["export", str(tmp_path / "whole"), str(tmp_path / "out")]) == 0
    role = load_role(str(tmp_path / "whole"), "student", None, ALONE, causal=True)
    pipe = DiffusionPipeline.from_pretrained(tmp_path / "out", custom_pipeline="pipeline", trust_remote_code=True)
    for frames in (17, 33):
        ours = torch.cat(list(videos(of_length(role, frames, None, None, 1), [Request("a red circle")], 5, 1)))
        noise = torch.Generator().manual_seed(5)
        theirs = pipe(["a red circle"], generator=[noise], num_frames=frames, output_type="pt").frames
        torch.testing.assert_close(theirs.transpose(1, 2), ours, rtol=0, atol=1e-4)
    with pytest.raises(UserError, match="window_frames must be the sink and whole chunks"):
        of_length(role, 33, 4, 1, 1)
    pipe.sampler = replace(pipe.sampler, window_frames=4)
    with pytest.raises(ValueError, match="cuts a chunk"):
        pipe(["a red circle"], num_frames=33)


@pytest.mark.slow
def test_reinforcement_learning_replays_its_rollout(tmp_path, capsys):
    """The on-policy check compares the cached rollout with the masked replay before the first update."""
    own = {key: value for key, value in RUN.items() if not key.startswith("algorithm")}
    own |= {"method": "dance_grpo", "steps": 1, "sampler.num-steps": 3, "student.learning-rate": 1e-4}
    own |= {"algorithm.num-prompts": 2, "algorithm.num-samples": 2, "algorithm.prompts-per-update": 2}
    own |= {"algorithm.rollout-batch": 4, "algorithm.update-batch": 2, "output": tmp_path / "run"}
    assert main(flags(own)) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "on-policy check" in line]
    assert float(line.split(" is ")[1].split("%")[0]) < 10, line
    assert all(row["train/student/grad_norm"] > 0 for row in metrics_of(tmp_path / "run"))


@pytest.mark.ranks
def test_two_sequence_ranks_learn_what_one_does(tmp_path):
    own = RUN | {"steps": 1, "student.learning-rate": 1e-4}
    assert main(flags(own | {"output": tmp_path / "one"})) == 0
    two = flags(own | {"parallel.sequence": 2, "output": tmp_path / "two"})
    done = program("-m", "unified_trainer", *two, ranks=2)
    assert done.returncode == 0, done.stderr
    assert_one_training(tmp_path / "one", tmp_path / "two", 1)
