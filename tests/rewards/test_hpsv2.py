"""The scorer hpsv2 and its import, against OpenCLIP's network as torch's own layers compute it."""

import re

import pytest
import torch
from helpers import CPU
from safetensors.torch import save_file
from small_clip import SIDE, save_clip
from torch import nn
from torch.nn.functional import cosine_similarity
from transformers import CLIPTokenizer

from unified_trainer.__main__ import main
from unified_trainer.rewards.hpsv2 import HPSv2
from unified_trainer.rewards.reward import RewardConfig
from unified_trainer.rewards.scorers import load_scorers

WIDTH, HEADS, LAYERS, PATCH, WORDS, LENGTH, OUT = 16, 2, 2, 8, 54, 24, 8  # of save_clip
PROMPTS = ["a red circle", "blue square moves up"]
IMAGES = torch.rand(2, 3, 40, 56, generator=torch.Generator().manual_seed(0))


class Block(nn.Module):
    """A layer as OpenCLIP writes it."""

    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.mlp = nn.ModuleDict({"c_fc": nn.Linear(WIDTH, 2 * WIDTH), "c_proj": nn.Linear(2 * WIDTH, WIDTH)})

    def forward(self, x, mask=None):
        seen = self.ln_1(x)
        x = x + self.attn(seen, seen, seen, need_weights=False, attn_mask=mask)[0]
        hidden = self.mlp["c_fc"](self.ln_2(x))
        return x + self.mlp["c_proj"](hidden * torch.sigmoid(1.702 * hidden))  # the activation of save_clip's config


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.resblocks = nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(self, x, mask=None):
        for block in self.resblocks:
            x = block(x, mask)
        return x


class Visual(nn.Module):
    def __init__(self):
        super().__init__()
        self.class_embedding = nn.Parameter(torch.randn(WIDTH))
        self.positional_embedding = nn.Parameter(torch.randn((SIDE // PATCH) ** 2 + 1, WIDTH))
        self.proj = nn.Parameter(torch.randn(WIDTH, OUT))
        self.conv1 = nn.Conv2d(3, WIDTH, PATCH, PATCH, bias=False)
        self.ln_pre, self.ln_post, self.transformer = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), Tower()

    def forward(self, pixels):
        patches = self.conv1(pixels).flatten(2).movedim(1, 2)
        x = torch.cat([self.class_embedding.expand(len(pixels), 1, -1), patches], 1) + self.positional_embedding
        return self.ln_post(self.transformer(self.ln_pre(x))[:, 0]) @ self.proj


class OpenCLIP(nn.Module):
    def __init__(self):
        super().__init__()
        self.visual, self.transformer = Visual(), Tower()
        self.token_embedding, self.ln_final = nn.Embedding(WORDS, WIDTH), nn.LayerNorm(WIDTH)
        self.positional_embedding = nn.Parameter(torch.randn(LENGTH, WIDTH))
        self.text_projection = nn.Parameter(torch.randn(WIDTH, OUT))
        self.logit_scale = nn.Parameter(torch.tensor(2.0))

    def text(self, tokens):
        """The features of one prompt, whose last token is its end."""
        mask = torch.full((tokens.shape[1],) * 2, float("-inf")).triu(1)
        x = self.token_embedding(tokens) + self.positional_embedding[: tokens.shape[1]]
        return self.ln_final(self.transformer(x, mask)[:, -1]) @ self.text_projection


@pytest.fixture(scope="module")
def theirs():
    torch.manual_seed(1)
    network = OpenCLIP().eval().requires_grad_(False)
    for name, value in network.named_parameters():
        if ".ln_" in f".{name}" or name.endswith("bias"):
            value += 0.3 * torch.randn_like(value)
    return network


@pytest.fixture(scope="module")
def folder(theirs, tmp_path_factory):
    root = tmp_path_factory.mktemp("hpsv2")
    base = save_clip(root / "base")
    save_file(theirs.state_dict(), root / "HPS.safetensors")
    words = ["--base", str(base), "--checkpoint", str(root / "HPS.safetensors"), "--out", str(root / "out")]
    assert main(["import-hpsv2", *words]) == 0
    return root / "out"


@torch.no_grad()
def test_a_score_is_the_cosine_of_openclips_features(theirs, folder):
    scorer = HPSv2.load(folder, CPU, torch.float32)
    tokens = CLIPTokenizer.from_pretrained(folder)
    seen = theirs.visual(scorer.pixels(IMAGES))
    said = torch.cat([theirs.text(tokens(prompt, return_tensors="pt")["input_ids"]) for prompt in PROMPTS])
    torch.testing.assert_close(scorer.score(IMAGES, PROMPTS), cosine_similarity(seen, said), rtol=1e-4, atol=1e-5)
    scorers, _ = load_scorers(RewardConfig(kind="hpsv2", path=str(folder)), CPU)
    torch.testing.assert_close(scorers["hpsv2"](IMAGES[:, :, None], PROMPTS), scorer.score(IMAGES, PROMPTS))


def test_the_whole_image_is_seen_on_black(folder):
    """64 x 32 pixels become the middle 32 x 16 of the network's 32 x 32; a flat image stays flat."""
    scorer = HPSv2.load(folder, CPU, torch.float32)
    seen = scorer.fit(torch.full((1, 3, 64, 32), 0.5))
    assert seen.shape == (1, 3, SIDE, SIDE)
    assert float(seen[..., :8].abs().max()) == float(seen[..., 24:].abs().max()) == 0
    torch.testing.assert_close(seen[..., 8:24], torch.full((1, 3, 32, 16), 0.5))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("visual.proj"), "visual_projection.weight has shape None"),
        (lambda t: t.update(more=torch.zeros(2)), r"more has shape \[2\]"),
        (lambda t: t.update(logit_scale=torch.tensor(2)), "HPS.safetensors.* logit_scale"),
    ],
    ids=["missing", "more", "whole number"],
)
def test_another_checkpoint_is_refused(theirs, folder, tmp_path, capsys, change, message):
    tensors = theirs.state_dict()
    change(tensors)
    save_file(tensors, tmp_path / "HPS.safetensors")
    words = ["--base", str(folder), "--checkpoint", str(tmp_path / "HPS.safetensors"), "--out", str(tmp_path / "out")]
    assert main(["import-hpsv2", *words]) == 2
    assert re.search(message, " ".join(capsys.readouterr().err.split()))
    assert not (tmp_path / "out").exists()
