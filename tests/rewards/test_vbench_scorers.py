"""VBench's imaging quality and dynamic degree, of examples/vbench_scorers.py, by their formulas."""

import importlib.util
import math

import pytest
import torch
from helpers import CPU, REPO
from torch.nn.functional import conv2d, gelu, group_norm, layer_norm, linear

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.plugins import load_object
from unified_trainer.rewards.reward import RewardConfig
from unified_trainer.rewards.scorers import check_reward, load_scorers

FILE = REPO / "examples" / "vbench_scorers.py"
MUSIQ = load_object(f"{FILE}:MUSIQ", "reward.kind", "MUSIQ")
GLOBALS = MUSIQ.forward.__globals__
dynamic_degree, shrunk = GLOBALS["dynamic_degree"], GLOBALS["shrunk"]
SHAPES = {  # of the published file
    "conv_root.weight": (64, 3, 7, 7),
    "block1.conv2.weight": (64, 64, 3, 3),
    "block1.conv_proj.weight": (256, 64, 1, 1),
    "block1.gn3.bias": (256,),
    "embedding.weight": (384, 16384),
    "transformer_encoder.posembed_input.position_emb": (1, 100, 384),
    "transformer_encoder.scaleembed_input.scale_emb": (3, 384),
    "transformer_encoder.cls": (1, 1, 384),
    "transformer_encoder.transformer.encoderblock_13.attention.query.weight": (384, 384),
    "transformer_encoder.transformer.encoderblock_0.mlp.fc1.weight": (1152, 384),
    "transformer_encoder.encoder_norm.weight": (384,),
    "head.weight": (1, 384),
}


@pytest.fixture(scope="module")
def weights() -> dict:
    torch.manual_seed(0)
    network = MUSIQ()
    for weight in network.parameters():
        torch.nn.init.normal_(weight, 1.0 if weight.ndim == 1 else 0.0, 0.05)
    return network.state_dict()


def quality(weights, image) -> float:
    """MUSIQ by its formulas, patch by patch, for an image of [3, h, w] (arXiv:2108.05997)."""

    def conv(name, x, stride=1):
        weight = weights[f"{name}.weight"]
        flat = weight.flatten(1)
        weight = (weight - flat.mean(1).view(-1, 1, 1, 1)) / (flat.std(1).view(-1, 1, 1, 1) + 1e-5)
        width = max(weight.shape[-1] - stride, 0)
        padded = torch.nn.functional.pad(x, (width // 2, width - width // 2) * 2)
        return conv2d(padded, weight, stride=stride)

    def norm(name, x, eps):
        return group_norm(x, 32, weights[f"{name}.weight"], weights[f"{name}.bias"], eps)

    def through(name, x):
        if "norm" in name:
            return layer_norm(x, (384,), weights[f"{name}.weight"], weights[f"{name}.bias"], 1e-6)
        return linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"])

    encoder, tokens = "transformer_encoder", [weights["transformer_encoder.cls"][0]]
    for scale, longest in enumerate((224, 384, max(image.shape[1:]))):
        size = [round(length * longest / max(image.shape[1:])) for length in image.shape[1:]]
        copy = torch.nn.functional.interpolate(2 * image[None] - 1, size, mode="bicubic")[0]
        rows, columns = (math.ceil(length / 32) for length in size)
        whole = torch.zeros(3, 32 * rows, 32 * columns)
        top, left = ((32 * count - length) // 2 for count, length in zip((rows, columns), size, strict=True))
        whole[:, top : top + size[0], left : left + size[1]] = copy
        for row in range(rows):
            for column in range(columns):
                x = whole[None, :, 32 * row : 32 * row + 32, 32 * column : 32 * column + 32]
                x = norm("gn_root", conv("conv_root", x, 2), 1e-6).relu()
                x = torch.nn.functional.pad(x, (0, 1, 0, 1)).unfold(2, 3, 2).unfold(3, 3, 2).amax((-1, -2))
                y = norm("block1.gn1", conv("block1.conv1", x), 1e-4).relu()
                y = norm("block1.gn2", conv("block1.conv2", y), 1e-4).relu()
                y = norm("block1.gn3", conv("block1.conv3", y), 1e-4)
                x = (y + norm("block1.gn_proj", conv("block1.conv_proj", x), 1e-4)).relu()
                token = through("embedding", x[0].permute(1, 2, 0).flatten())
                place = 10 * (10 * row // rows) + 10 * column // columns
                token = token + weights[f"{encoder}.posembed_input.position_emb"][0, place]
                tokens.append((token + weights[f"{encoder}.scaleembed_input.scale_emb"][scale])[None])
    x = torch.cat(tokens)
    for number in range(14):
        layer = f"{encoder}.transformer.encoderblock_{number}"
        seen = through(f"{layer}.norm1", x)
        q, k, v = (
            through(f"{layer}.attention.{name}", seen).view(-1, 6, 64).movedim(1, 0)
            for name in ("query", "key", "value")
        )
        mixed = (q @ k.mT / 8).softmax(-1) @ v
        x = x + through(f"{layer}.attention.out", mixed.movedim(0, 1).flatten(1))
        x = x + through(f"{layer}.mlp.fc2", gelu(through(f"{layer}.mlp.fc1", through(f"{layer}.norm2", x))))
    return float(through("head", through(f"{encoder}.encoder_norm", x[0])))


@pytest.mark.slow
@torch.no_grad()
def test_imaging_quality_is_musiqs_number_over_100(weights, tmp_path):
    """Of a file as it is published, of two frames, whose mean it is; the names and shapes are the published ones."""
    assert {name: tuple(weights[name].shape) for name in SHAPES} == SHAPES
    assert sum(weight.numel() for weight in weights.values()) == 27_125_825
    torch.save(weights, tmp_path / "musiq.pth")
    config = RewardConfig(kind=f"{FILE}:ImagingQuality", path=str(tmp_path / "musiq.pth"), frames="all")
    check_reward(config, 2)
    video = torch.rand(1, 3, 2, 20, 70, generator=torch.Generator().manual_seed(0))
    video[:, :, 1] *= 0.2
    found = float(load_scorers(config, CPU)[0]["ImagingQuality"](video, ["a"]))
    each = [quality(weights, video[0, :, i]) for i in (0, 1)]
    assert abs(each[0] - each[1]) > 1e-3
    assert found == pytest.approx(sum(each) / 200, abs=1e-5)


def test_large_frames_are_shrunk_as_vbench_does():
    images = torch.rand(1, 3, 600, 1000, generator=torch.Generator().manual_seed(0))
    assert shrunk(images).shape == (1, 3, 307, 512)  # int(307.2)
    assert shrunk(images[..., :512, :512]).shape == (1, 3, 512, 512)


@pytest.mark.parametrize(
    ("flows", "moves"),
    [([7, 7, 0, 0, 0, 0, 0, 0], 1), ([7, 0, 0, 0, 0, 0, 0, 0], 0), ([5.9] * 8, 0), ([6.1] * 8, 1)],
)
def test_a_video_moves_if_a_quarter_of_its_frames_do(flows, moves):
    """At a shorter side of 256 and 24 frames per second: every third of 25 frames is seen, 9, of which 2 must move.

    5% of the pixels have the flow, in a direction of their own, and others none.
    """
    shown, left = [], list(flows)

    def flow(first, second):
        shown.extend(zip(first[:, 0, 0, 0].tolist(), second[:, 0, 0, 0].tolist(), strict=True))
        found = torch.zeros(len(first), 2, *first.shape[2:])
        count = int(0.05 * found[0, 0].numel())
        for one in found:
            length = left.pop(0)
            one.flatten(1)[:, :count] = torch.tensor([[0.6 * length], [-0.8 * length]])
        return found

    video = torch.linspace(0, 1, 25).view(1, 1, 25, 1, 1).expand(1, 3, 25, 256, 300)
    assert dynamic_degree(video, 24.0, flow, 3).tolist() == [moves]
    expected = [2 * i / 24 - 1 for i in range(0, 25, 3)]
    assert [first for first, _ in shown] == pytest.approx(expected[:-1])
    assert [second for _, second in shown] == pytest.approx(expected[1:])


def test_frames_are_filled_to_multiples_of_8_and_must_be_large_enough():
    sizes = []

    def flow(first, second):
        sizes.append(first.shape)
        return torch.zeros(len(first), 2, *first.shape[2:])

    dynamic_degree(torch.rand(2, 3, 9, 130, 136), 8.0, flow, 64)
    assert sizes == [(16, 3, 136, 136)]
    with pytest.raises(UserError, match="frames of 100x136 are below the 128 pixels"):
        dynamic_degree(torch.rand(1, 3, 9, 100, 136), 8.0, flow, 64)


def test_wrong_settings_are_refused(weights, tmp_path):
    (tmp_path / "other.pth").touch()
    dynamic = {"kind": f"{FILE}:DynamicDegree", "path": str(tmp_path / "other.pth"), "settings": {"frame_rate": "8"}}
    cases = [
        ({"kind": f"{FILE}:ImagingQuality", "path": "absent.pth"}, r"reward\.path.*no such file"),
        (dynamic | {"frames": "every"}, r"reward\.frames must be all, not every"),
        (dynamic | {"frames": "all", "precision": "bf16"}, r"reward\.precision must be fp32"),
        (dynamic | {"frames": "all", "settings": {}}, r"frame_rate must be given"),
    ]
    if importlib.util.find_spec("torchvision") is None:
        cases.append((dynamic | {"frames": "all"}, "needs RAFT of torchvision; run `pip install torchvision`"))
    for settings, message in cases:
        with pytest.raises(UserError, match=message):
            check_reward(RewardConfig(**settings), 9)
    torch.save({"head.weight": weights["head.weight"]}, tmp_path / "part.pth")
    config = RewardConfig(kind=f"{FILE}:ImagingQuality", path=str(tmp_path / "part.pth"))
    with pytest.raises(UserError, match=r"part\.pth does not fit: .*Missing key"):
        load_scorers(config, CPU)
