"""Sparse attention: tiles, the choice of tiles, both branches and their gradients, the network and its folders."""

import importlib.machinery
import itertools
import json
import math
import shutil
import sys
import types
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from diffusers import DiffusionPipeline
from diffusers.utils import dynamic_modules_utils
from forked import program
from helpers import ALONE, WAN, assert_one_training, assert_same, checkpoint_of, cut_off, refused
from helpers import flags as words_of
from i2v_folder import i2v_folder
from safetensors.torch import load_file, save_file
from ti2v_folder import ti2v_folder

from unified_trainer.__main__ import main
from unified_trainer.basics.errors import UserError
from unified_trainer.basics.requests import Request
from unified_trainer.basics.types import Condition
from unified_trainer.basics.versions import install
from unified_trainer.models import sparse_attention
from unified_trainer.models.masked_attention import attend
from unified_trainer.models.sparse_attention import (
    ChunkTiles,
    SparseAttentionConfig,
    Tiles,
    attend_sparsely,
    flex_fine,
    kernel_fine,
    masked_fine,
    plain_fine,
)
from unified_trainer.models.wan.family import WAN as FAMILY
from unified_trainer.models.wan.model import WanModel
from unified_trainer.models.wan.sparse import SparseWanModel
from unified_trainer.parallel.meter import Meter
from unified_trainer.roles.adapter import AdapterConfig
from unified_trainer.roles.backbone import Backbone
from unified_trainer.tools.load_run import load_role
from unified_trainer.tools.plan.flops import pass_flops
from unified_trainer.tools.plan.network_size import frozen_config, measured, plain_pass
from unified_trainer.tools.sample.sample import videos

SMALL = SparseAttentionConfig(share=0.5, tile=(2, 2, 2))
GRID, TOKENS = (3, 4, 5), 60
SIZE = {"recipe": "tiny", "video.frames": 17, "video.height": 64, "video.width": 64, "sampler.num-steps": 2, "steps": 2}
SIZE |= {"validate-every": 0, "student.learning-rate": 1e-2, "student.path": "tiny", "method": "dmd2"}
SIZE |= {"algorithm.batch-size": 2, "algorithm.micro-batch": 2, "algorithm.student-every": 1}
SPARSE = {"student.sparse-attention.share": 0.7, "student.sparse-attention.tile": "2 2 2"}


def flags(settings):
    """Settings as flags; the tile is three words."""
    return [part for word in words_of(settings) for part in (word.split() if word == "2 2 2" else [word])]


def heads(seed=0, d=8, count=4, tokens=TOKENS):
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(2, tokens, 3, d, generator=draw, requires_grad=True) for _ in range(count)]


def one_chunk(config, share):
    """The tiles of a video whose frames are one chunk."""
    return ChunkTiles.of(config, [GRID], torch.ones(1, 1, dtype=torch.bool), share)


def sparse_model(config=SMALL, folder=WAN):
    model = SparseWanModel.open_with(folder, "transformer", config)
    model.read(ALONE)
    return model


def inputs():
    draw = torch.Generator().manual_seed(1)
    text = torch.randn(2, 7, 32, generator=draw)
    return torch.randn(2, 16, 5, 4, 4, generator=draw), torch.tensor([0.3, 0.7]), Condition({"text": text})


def test_tiles_are_numbered_in_order_and_the_last_ones_are_cut():
    """3 x 4 x 5 tokens in tiles of 2 x 2 x 2 are 2 x 2 x 3 tiles; their tokens are listed here by loops."""
    tiles = Tiles.of(SMALL, GRID)
    listed = [
        [(t, h, w) for t in range(a, min(a + 2, 3)) for h in range(b, min(b + 2, 4)) for w in range(c, min(c + 2, 5))]
        for a in range(0, 3, 2)
        for b in range(0, 4, 2)
        for c in range(0, 5, 2)
    ]
    assert tiles.sizes.tolist() == [len(tile) for tile in listed]
    assert one_chunk(SMALL, 0.5).kept.tolist() == [6] * 12
    x = torch.arange(TOKENS, dtype=torch.float32)[None, :, None, None] + 1
    padded = tiles.padded(x)[0, 0, :, 0].unflatten(0, (12, 8)).tolist()
    for row, tile in zip(padded, listed, strict=True):
        numbers = [t * 20 + h * 5 + w + 1.0 for t, h, w in tile]
        assert row == numbers + [0.0] * (8 - len(tile))
    means = [sum(row) / len(tile) for row, tile in zip(padded, listed, strict=True)]
    torch.testing.assert_close(tiles.means(x)[0, 0, :, 0], torch.tensor(means))


@pytest.mark.parametrize(("share", "kept"), [(0.0, 12), (0.5, 6), (0.75, 3), (0.7, 4), (0.99, 1)])
def test_the_share_says_how_many_tiles_are_kept(share, kept):
    assert SMALL.kept(12, share) == kept


def test_the_share_rises_linearly_with_the_updates():
    config = SparseAttentionConfig(share=0.8, warmup_updates=4)
    assert [round(config.share_at(n), 9) for n in (0, 1, 2, 4, 9)] == [0, 0.2, 0.4, 0.8, 0.8]
    assert SMALL.share_at(0) == 0.5


def test_all_tiles_and_no_gate_are_dense_attention():
    query, key, value = heads(count=3)
    tiles = one_chunk(SMALL, 0.0)
    ours = attend_sparsely(query, key, value, torch.zeros_like(value), tiles, masked_fine)
    dense = attend(query, key, value, None)
    torch.testing.assert_close(ours, dense, rtol=0, atol=1e-6)
    up = torch.randn_like(dense)
    for a, b in zip(*(torch.autograd.grad(out, (query, key, value), up) for out in (ours, dense)), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


def test_the_tiles_of_highest_score_are_attended_to_and_equal_scores_take_the_first():
    """Keys of tile i are s_i e_0 and all queries e_0: the score of tile i is s_i / sqrt(d). Values tell the tiles."""
    tiles = one_chunk(SMALL, 0.75)  # keeps 3 of 12
    strength = torch.tensor([0.0, 5, 1, 5, 2, 0, 3, 1, 1, 3, 0, 0])
    unit = torch.eye(12)[:1]
    query = unit.expand(TOKENS, -1)[None, :, None]
    key = (strength[tiles.keys.of_token][:, None] * unit)[None, :, None]
    value = torch.eye(12)[tiles.keys.of_token][None, :, None]
    out = attend_sparsely(query, key, value, torch.zeros_like(value), tiles, masked_fine)
    assert out[0, :, 0].ne(0).all(0).nonzero().flatten().tolist() == [1, 3, 6]
    assert out[0, :, 0].ne(0).any(0).sum() == 3
    weights = torch.exp(strength / math.sqrt(12)) * tiles.keys.sizes * torch.tensor([i in (1, 3, 6) for i in range(12)])
    torch.testing.assert_close(out[0, 7, 0], weights / weights.sum())


def test_the_gradient_of_the_gate_is_the_coarse_branch():
    """The output is gate * coarse + fine, so the gradient of its sum to the gate is the coarse branch."""
    query, key, value, gate = heads()
    tiles = one_chunk(SMALL, 0.5)
    out = attend_sparsely(query, key, value, gate, tiles, masked_fine)
    (gradient,) = torch.autograd.grad(out.sum(), gate)
    one_hot = torch.nn.functional.one_hot(tiles.keys.of_token, 12).float()
    mean = one_hot.T / one_hot.sum(0)[:, None]
    means = [torch.einsum("tn,bnhd->bhtd", mean, part) for part in (query, key, value)]
    coarse = ((means[0] @ means[1].transpose(2, 3)) / math.sqrt(8)).softmax(-1) @ means[2]
    torch.testing.assert_close(gradient, torch.einsum("nt,bhtd->bnhd", one_hot, coarse), rtol=0, atol=1e-5)


@pytest.fixture
def stand_in(monkeypatch):
    """The operations of fastvideo-kernel 0.3.5 by their names, with its arguments and layouts, on a CPU by loops."""

    T = torch.Tensor

    def rows(q: T, index: T, count: T, sizes: T):
        """Sample, head, slots of a tile of queries, and slots of the tokens that it attends to."""
        whole = q.shape[2] // len(sizes)
        for b, h, tile in itertools.product(range(len(q)), range(q.shape[1]), range(len(sizes))):
            kept = index[b, h, tile, : int(count[b, h, tile])].tolist()
            places = [i * whole + j for i in kept for j in range(int(sizes[i]))]
            yield b, h, slice(tile * whole, (tile + 1) * whole), places

    @torch.library.custom_op("fastvideo_kernel::block_sparse_attn_triton", mutates_args=())
    def operation(q: T, k: T, v: T, index: T, count: T, sizes: T) -> tuple[T, T]:
        out = torch.empty_like(q)
        for b, h, own, places in rows(q, index, count, sizes):
            out[b, h, own] = (q[b, h, own] @ k[b, h, places].T / math.sqrt(q.shape[3])).softmax(-1) @ v[b, h, places]
        return out, q.new_zeros(q.shape[:3])

    @torch.library.custom_op("fastvideo_kernel::backward", mutates_args=())
    def backward(up: T, q: T, k: T, v: T, index: T, count: T, sizes: T) -> tuple[T, T, T]:
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for b, h, own, places in rows(q, index, count, sizes):
            weight = (q[b, h, own] @ k[b, h, places].T / math.sqrt(q.shape[3])).softmax(-1)
            along = up[b, h, own] @ v[b, h, places].T
            scores = weight * (along - (along * weight).sum(-1, keepdim=True)) / math.sqrt(q.shape[3])
            dv[b, h, places] += weight.T @ up[b, h, own]
            dq[b, h, own] = scores @ k[b, h, places]
            dk[b, h, places] += scores.T @ q[b, h, own]
        return dq, dk, dv

    operation.register_fake(lambda q, k, v, index, count, sizes: (torch.empty_like(q), q.new_empty(q.shape[:3])))
    backward.register_fake(lambda up, q, k, v, *_: tuple(map(torch.empty_like, (q, k, v))))
    operation.register_autograd(
        lambda ctx, up, _: (*backward(up.contiguous(), *ctx.saved_tensors), None, None, None),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )
    module = types.ModuleType("fastvideo_kernel.block_sparse_attn")
    module.block_sparse_attn_triton = module.block_sparse_attn_sm90 = operation
    module._is_sm90, module._get_sm90_ops = (lambda: False), (lambda: (None, None))
    package = types.ModuleType("fastvideo_kernel")
    package.__spec__ = importlib.machinery.ModuleSpec("fastvideo_kernel", None)
    monkeypatch.setitem(sys.modules, "fastvideo_kernel", package)
    monkeypatch.setitem(sys.modules, "fastvideo_kernel.block_sparse_attn", module)


def test_a_dense_folder_opens_with_gates_of_zero():
    dense = WanModel.load(WAN, ALONE.device)
    model = sparse_model()
    model.share = 0.0
    assert torch.equal(model.velocity(*inputs()), dense.velocity(*inputs()))
    model.share = 0.7
    assert not torch.allclose(model.velocity(*inputs()), dense.velocity(*inputs()), atol=1e-3)
    model.velocity(*inputs()).square().mean().backward()
    gates = {key: p for key, p in model.network.named_parameters() if "to_gate_compress" in key}
    assert len(gates) == 2 * len(model.blocks)
    assert all(p.eq(0).all() and p.grad.ne(0).any() for p in gates.values())


@pytest.mark.slow
@pytest.mark.parametrize("memory", ["selective", "full"])
def test_recomputation_changes_nothing(memory):
    def gradients(recompute):
        model = sparse_model()
        backbone = Backbone(model, ALONE, trained=True, recompute=recompute)
        with backbone.running(""):
            model.velocity(*inputs()).square().mean().backward()
        return {key: p.grad for key, p in model.network.named_parameters() if p.grad is not None}

    assert_same(gradients(memory), gradients("none"))


def test_an_adapter_trains_the_gates_beside_it():
    model = sparse_model()
    backbone = Backbone(model, ALONE, adapters={"student": AdapterConfig(rank=2)})
    weights = backbone.weights("student")
    with backbone.running("student"):
        model.velocity(*inputs()).square().mean().backward()
    gates = [key for key in weights if "to_gate_compress" in key]
    assert len(gates) == 2 * len(model.blocks) and all(weights[key].grad.ne(0).any() for key in gates)
    assert sum(".lora_B." in key for key in weights) == 10 * len(model.blocks)
    assert model.network.blocks[0].attn1.to_q.base_layer.weight.grad is None


@pytest.mark.slow
def test_flops_of_the_meter_are_those_of_the_sizes_of_the_dense_network():
    model = sparse_model()
    backbone, meter = Backbone(model, ALONE, trained=True), Meter(torch.device("cpu"))
    with meter.measure(), backbone.running(""):
        model.velocity(*inputs()).square().mean().backward()
    dense = FAMILY.model(WAN, "transformer")
    size = replace(measured(dense), gates=1)
    pairs = SMALL.pairs((5, 4, 4), [(5, 4, 4)], 0.5)
    assert pairs == 80 * 80 // 2 + 12 * 12
    config = frozen_config(dict(dense.network.config))
    plain = plain_pass(type(dense), config, inputs()[0].shape[1:], 7).scaled({"attn1": Fraction(pairs, 80 * 80)})
    assert meter.flops == 2 * pass_flops(size, plain).trained
    assert size.parameters == backbone.parameters


def test_a_folder_with_some_gates_and_a_sparse_folder_for_a_dense_role_are_refused(tmp_path):
    folder = tmp_path / "sparse"
    shutil.copytree(WAN, folder)
    (file,) = (folder / "transformer").glob("*.safetensors")
    weights = load_file(file)
    save_file(weights | {"blocks.0.to_gate_compress.weight": torch.zeros(96, 96)}, file)
    with pytest.raises(UserError, match=r"blocks\.0\.to_gate_compress\.bias is absent"):
        SparseWanModel.open_with(folder, "transformer", SMALL)
    with pytest.raises(UserError, match=r"--student\.sparse-attention\.share"):
        FAMILY.model(folder, "transformer")


def test_ti2v_is_dense_without_a_share_with_and_without_an_image_and_i2v_is_refused(tmp_path):
    folder = ti2v_folder(tmp_path / "ti2v")
    model, dense = sparse_model(folder=folder), FAMILY.model(folder, "transformer")
    dense.read(ALONE)
    x, sigma, cond = dense.example()
    model.share = 0.0
    for more in ({}, {"image": x[:, :, :1]}):
        request = Condition({**cond.tensors, **more})
        assert torch.equal(model.velocity(x, sigma, request), dense.velocity(x, sigma, request))
    with pytest.raises(UserError, match="reads an image as channels"):
        SparseWanModel.open_with(i2v_folder(tmp_path / "i2v"), "transformer", SMALL)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"student.sparse-attention.tile": "2 2 2"}, "set student.sparse_attention.share"),
        (SPARSE | {"method": "dance_grpo", "student.sparse-attention.warmup-updates": 4}, "cannot rise"),
    ],
)
def test_settings_that_cannot_work_are_refused(tmp_path, capsys, words, message):
    given = {key: value for key, value in (SIZE | words).items()}
    if given["method"] != "dmd2":
        given = {key: value for key, value in given.items() if not key.startswith("algorithm")}
    assert main(flags(given | {"output": tmp_path / "run"})) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 2])
def test_a_run_resumes_bit_for_bit_and_its_export_is_sampled_alike(tmp_path, monkeypatch, capsys, rank):
    """The share rises in the first update; the export has FastWan's names, and its pipeline.py samples as we do."""
    more = SPARSE | {
        "student.sparse-attention.warmup-updates": 1,
        "student.ema-decay": 0.5,
        "student.adapter.rank": rank,
    }
    assert main(flags(SIZE | more | {"output": tmp_path / "whole", "checkpoint-every": 1})) == 0
    line = "student.sparse_attention: plain torch, which computes all pairs of tokens."
    assert f"{line} The kernels of fastvideo-kernel do not run: the device is cpu" in capsys.readouterr().out
    assert main(["--resume", str(cut_off(tmp_path / "whole", tmp_path / "half", 1))]) == 0
    whole = checkpoint_of(tmp_path / "whole", 2)
    assert_same(checkpoint_of(tmp_path / "half", 2), whole)
    gate = "blocks.0.to_gate_compress.weight"
    assert whole[f"student/weights/{gate}"].ne(0).any() and f"student/ema/{gate}" in whole
    assert not any("gate" in key for key in whole if key.startswith("critic/"))

    monkeypatch.setattr(dynamic_modules_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(tmp_path / "modules")
    out = tmp_path / "out"
    assert main(["export", str(tmp_path / "whole"), str(out), "--layout", "wan"]) == 2
    assert "--layout wan has no name for blocks.0.to_gate_compress" in capsys.readouterr().err and not out.exists()
    said = refused(capsys, "export", tmp_path / "whole", out, "--quantize", "int8")
    assert "diffusers would drop its own layers in silence" in said and not out.exists()
    assert main(["export", str(tmp_path / "whole"), str(out)]) == 0
    (file,) = (out / "transformer").glob("*.safetensors")
    assert gate in load_file(file)
    assert json.loads((out / "scheduler" / "sampler.json").read_text())["sparse_share"] == 0.7
    role = load_role(str(tmp_path / "whole"), "student", None, ALONE, causal=True)
    ours = torch.cat(list(videos(role, [Request("a red circle")], 5, 1)))
    pipeline = DiffusionPipeline.from_pretrained(out, custom_pipeline="pipeline", trust_remote_code=True)
    theirs = pipeline(["a red circle"], generator=[torch.Generator().manual_seed(5)], output_type="pt").frames
    torch.testing.assert_close(theirs.transpose(1, 2), ours, rtol=0, atol=1e-4)
    again = SIZE | SPARSE | {"student.path": out, "teacher.path": "tiny", "steps": 1}
    assert main(flags(again | {"critic.path": "tiny", "output": tmp_path / "again"})) == 0


RANKS = SIZE | SPARSE | {"device": "cpu", "student.learning-rate": 1e-4, "steps": 1}


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    output = tmp_path_factory.mktemp("one") / "run"
    assert main(flags(RANKS | {"output": output})) == 0
    return output


@pytest.mark.ranks
@pytest.mark.parametrize("mesh", [{}, {"parallel.sequence": 2}])
def test_two_ranks_learn_what_one_does(one_rank, tmp_path, mesh):
    done = program("-m", "unified_trainer", *flags(RANKS | mesh | {"output": tmp_path / "two"}), ranks=2)
    assert done.returncode == 0, done.stderr
    assert_one_training(one_rank, tmp_path / "two", 1)


def test_the_kernels_get_padded_tiles_and_give_what_the_mask_gives(stand_in):
    tiles = one_chunk(SMALL, 0.5)
    parts = heads(d=16)
    up = torch.randn_like(parts[0])
    found = []
    for fine in (masked_fine, kernel_fine()):
        out = attend_sparsely(*parts, tiles, fine)
        found.append((out, *torch.autograd.grad(out, parts, up)))
    for ours, kernels in zip(*found, strict=True):
        torch.testing.assert_close(kernels, ours, rtol=0, atol=1e-5)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("tile", [(2, 2, 2), (4, 4, 4), (5, 5, 3)])
def test_flex_attention_gives_what_the_mask_gives(tile, monkeypatch):
    """Tiles of 8, 64 and 75 slots, cut at the ends: in blocks of 64, 64 and 128."""
    monkeypatch.setattr(torch.nn.attention.flex_attention, "_validate_device", lambda *_parts: None)
    tiles = one_chunk(SparseAttentionConfig(share=0.5, tile=tile), 0.5)
    parts = heads(d=16)
    up = torch.randn_like(parts[0])
    found = []
    for fine in (masked_fine, flex_fine):
        out = attend_sparsely(*parts, tiles, fine)
        found.append((out, *torch.autograd.grad(out, parts, up)))
    for ours, flex in zip(*found, strict=True):
        torch.testing.assert_close(flex, ours, rtol=0, atol=1e-5)


def test_an_accelerator_never_gets_the_mask_of_all_pairs():
    assert plain_fine(torch.device("cuda")) is flex_fine and plain_fine(torch.device("cpu")) is masked_fine
    with pytest.raises(UserError, match=r"sparse_attention\.share: mps has neither FlexAttention nor the kernels"):
        plain_fine(torch.device("mps"))
    assert "torch 2.12 and Python 3.12" in SparseAttentionConfig(share=0.5).lacks_kernel("cuda", 64)


@pytest.mark.slow
def test_passes_in_bf16_run_on_the_kernels_where_they_can(stand_in, monkeypatch):
    """With their tile and head sizes, on a device that has them: here the stand-in, for heads of 24 channels."""
    config = SparseAttentionConfig(share=0.5)
    monkeypatch.setattr(sparse_attention, "has_sparse_kernels", lambda kind: kind == "cpu")
    assert config.lacks_kernel("cuda", 64) == "the device is cuda"
    assert SMALL.lacks_kernel("cpu", 64) == "sparse_attention.tile is 2 2 2, and they take 4 4 4"
    assert config.lacks_kernel("cpu", 24) == "the heads have 24 channels, and they take 64 or 128"
    assert config.lacks_kernel("cpu", 64) == ""
    plain = sparse_model(config)
    monkeypatch.setattr(sparse_attention, "KERNEL_HEADS", (24,))
    model = sparse_model(config)
    with torch.profiler.profile(acc_events=True) as profile:
        assert torch.equal(model.velocity(*inputs()), plain.velocity(*inputs()))
    assert not any("fastvideo_kernel" in event.name for event in profile.events())
    with torch.autocast("cpu", torch.bfloat16), torch.profiler.profile(acc_events=True) as profile:
        ours, theirs = model.velocity(*inputs()), plain.velocity(*inputs())
    runs = [event for event in profile.events() if event.name == "fastvideo_kernel::block_sparse_attn_triton"]
    assert len(runs) == len(model.blocks)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0.05)
    monkeypatch.delitem(sys.modules, "fastvideo_kernel")
    assert install("fastvideo") in config.lacks_kernel("cpu", 24)
