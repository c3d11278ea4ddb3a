"""VBench's subject consistency: DINO's network, its images and the measure, written out for a small network."""

import dataclasses
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from helpers import CPU, REPO, rewrite
from safetensors.torch import load_file
from torch.nn.functional import conv2d, cosine_similarity, gelu, grid_sample, layer_norm, linear
from transformers import ViTConfig, ViTModel

from unified_trainer.basics.errors import UserError
from unified_trainer.rewards.reward import RewardConfig
from unified_trainer.rewards.scorers import check_reward, load_scorers
from unified_trainer.rewards.subject_consistency import DINO

SIDE, PATCH, WIDTH, HEADS, LAYERS = 32, 8, 16, 2, 2
POOLER = ("pooler.dense.weight", "pooler.dense.bias")
SHAPES = [(32, 32), (40, 72), (90, 32), (32, 36)]
MEAN = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)
STD = torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder as published ones are: its config names another epsilon, and its pooler is random."""
    out = tmp_path_factory.mktemp("dino")
    torch.manual_seed(0)
    layers = {"num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "layer_norm_eps": 1e-12}
    sizes = {"hidden_size": WIDTH, "intermediate_size": 24, "image_size": SIDE, "patch_size": PATCH}
    network = ViTModel(ViTConfig(**sizes, **layers))
    for weight in network.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    for token in (network.embeddings.cls_token, network.embeddings.position_embeddings):
        token.data[:, 0] *= 1e-3  # its variance is about epsilon
    network.save_pretrained(out)
    return out


@pytest.fixture(scope="module")
def dino(folder) -> DINO:
    return DINO.load(folder, CPU, torch.float32)


def drawn(count: int, shape: tuple[int, int]) -> torch.Tensor:
    return torch.rand(count, 3, *shape, generator=torch.Generator().manual_seed(1))


def sampled(grid, rows: int, columns: int, mode: str, margin: float) -> torch.Tensor:
    """Sample a grid at rows x columns points as if there were `margin` more of each, the edges repeated."""
    y, x = (2 * (torch.arange(n) + 0.5) / (n + margin) - 1 for n in (rows, columns))
    places = torch.stack([x.expand(rows, columns), y[:, None].expand(rows, columns)], -1)
    places = places.expand(len(grid), rows, columns, 2)
    return grid_sample(grid, places, mode=mode, padding_mode="border", align_corners=False)


def resized(images) -> torch.Tensor:
    height, width = images.shape[2:]
    shape = [int(SIDE * length / min(height, width)) for length in (height, width)]
    return (sampled(images, *shape, "bilinear", 0) - MEAN) / STD


def class_tokens(folder: Path, images) -> torch.Tensor:
    """DINO's network by its formulas, from the names in the file."""
    weights = load_file(folder / "model.safetensors")

    def through(name: str, x) -> torch.Tensor:
        weight, bias = weights[f"{name}.weight"], weights[f"{name}.bias"]
        return layer_norm(x, (WIDTH,), weight, bias, 1e-6) if "norm" in name else linear(x, weight, bias)

    embedded = "embeddings.patch_embeddings.projection"
    grid = conv2d(resized(images), weights[f"{embedded}.weight"], weights[f"{embedded}.bias"], stride=PATCH)
    first, positions = weights["embeddings.position_embeddings"].split([1, (SIDE // PATCH) ** 2], 1)
    positions = positions.unflatten(1, (SIDE // PATCH, -1)).movedim(-1, 1)
    if images.shape[2] != images.shape[3]:
        positions = sampled(positions, *grid.shape[2:], "bicubic", 0.1)
    tokens = (grid + positions).flatten(2).mT
    x = torch.cat([(weights["embeddings.cls_token"] + first).expand(len(x := tokens), -1, -1), x], 1)
    for number in range(LAYERS):
        layer = f"encoder.layer.{number}"
        normed = through(f"{layer}.layernorm_before", x)
        q, k, v = (
            through(f"{layer}.attention.attention.{name}", normed).unflatten(-1, (HEADS, -1)).movedim(2, 1)
            for name in ("query", "key", "value")
        )
        weighed = (q @ k.mT / (WIDTH // HEADS) ** 0.5).softmax(-1) @ v
        x = x + through(f"{layer}.attention.output.dense", weighed.movedim(1, 2).flatten(2))
        wide = gelu(through(f"{layer}.intermediate.dense", through(f"{layer}.layernorm_after", x)))
        x = x + through(f"{layer}.output.dense", wide)
    return through("layernorm", x)[:, 0]


@pytest.mark.parametrize("shape", SHAPES)
@torch.no_grad()
def test_features_are_the_class_tokens_of_dino(folder, dino, shape):
    images = drawn(2, shape)
    expected = class_tokens(folder, images)
    torch.testing.assert_close(dino.pixels(images), resized(images), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(
        dino.features(images), expected / expected.norm(dim=-1, keepdim=True), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("shape", SHAPES[:2])
@torch.no_grad()
def test_a_score_is_the_mean_likeness_to_the_frame_before_and_to_the_first(folder, shape):
    """VBench's loop over the frames of each video, in images that are scored two at a time."""
    config = RewardConfig(kind="subject_consistency", path=str(folder), frames="all", batch=2)
    check_reward(config, 3)
    images = drawn(3, shape)
    video = torch.stack([images, images[[1, 1, 0]]]).movedim(1, 2)
    got = load_scorers(config, CPU)[0]["subject_consistency"](video, ["a", "b"])
    for of_video, frames in zip(got, (images, images[[1, 1, 0]]), strict=True):
        tokens, total = class_tokens(folder, frames), 0.0
        for i in (1, 2):
            likeness = [float(cosine_similarity(tokens[i], tokens[j], dim=0)) for j in (i - 1, 0)]
            total += sum(max(0.0, one) for one in likeness) / 2
        assert float(of_video) == pytest.approx(total / 2, abs=1e-5)
    with pytest.raises(UserError, match="needs at least 2 frames"):
        check_reward(dataclasses.replace(config, frames="first"), 3)


def test_a_feature_has_the_gradient_of_its_image(dino):
    images = drawn(3, (40, 72)).requires_grad_()
    dino.features(images)[1].sum().backward()
    assert float(images.grad[1].abs().max()) > 0 and float(images.grad[[0, 2]].abs().max()) == 0


@torch.no_grad()
def test_a_folder_needs_no_pooler(folder, dino, tmp_path):
    """Nor the names of older versions of transformers: these are the network's own."""
    bare = Path(shutil.copytree(folder, tmp_path / "bare"))
    rewrite(bare / "model.safetensors", lambda t: [t.pop(name) for name in POOLER])
    own = Path(shutil.copytree(bare, tmp_path / "own"))
    rewrite(own / "model.safetensors", lambda t: (t.clear(), t.update(dino.state_dict())))
    images = drawn(1, (40, 72))
    for other in (bare, own):
        assert torch.equal(DINO.load(other, CPU, torch.float32).features(images), dino.features(images))


def test_wrong_folders_and_images_are_refused(folder, dino, tmp_path):
    other = Path(shutil.copytree(folder, tmp_path / "other"))
    for changes, message in (({"model_type": "clip"}, "model_type must be 'vit'"), ({"image_size": 0}, "image_size")):
        (other / "config.json").write_text(json.dumps(json.loads((folder / "config.json").read_text()) | changes))
        with pytest.raises(UserError, match=message):
            DINO.load(other, CPU, torch.float32)
    shutil.copy(folder / "config.json", other)
    rewrite(other / "model.safetensors", lambda t: t.pop("layernorm.bias"))
    with pytest.raises(UserError, match=r"missing keys \['layernorm.bias'\]"):
        DINO.load(other, CPU, torch.float32)
    with pytest.raises(ValueError, match=r"DINO: image 1 spans .*, expected values in \[0, 1\]"):
        dino.features(drawn(2, (32, 32)) + torch.tensor([0.0, 1.0]).view(2, 1, 1, 1))


def test_a_published_pickle_is_converted_by_the_command_of_the_guide(folder, dino, tmp_path, monkeypatch):
    torch.save(load_file(folder / "model.safetensors"), tmp_path / "pytorch_model.bin")
    shutil.copy(folder / "config.json", tmp_path)
    (code,) = re.findall(r'python -c "(.*?pytorch_model\.bin.*?)"', (REPO / "docs/rewards.md").read_text())
    monkeypatch.chdir(tmp_path)
    exec(code)
    images = drawn(1, (32, 32))
    assert torch.equal(DINO.load(tmp_path, CPU, torch.float32).features(images), dino.features(images))
