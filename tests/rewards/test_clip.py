"""The CLIP scorer against transformers' own model and processor, on a small random folder."""

import copy
import dataclasses
import json
import re
from pathlib import Path

import pytest
import torch
from helpers import CPU, REPO, rewrite
from safetensors.torch import load_file, save_file
from small_clip import SIDE, save_clip
from torch import nn
from torch.nn.functional import cosine_similarity
from transformers import CLIPModel, CLIPTokenizer

from unified_trainer.basics.errors import UserError
from unified_trainer.rewards.aesthetic import load_head
from unified_trainer.rewards.clip import CLIP, special_tokens
from unified_trainer.rewards.frame_consistency import frame_consistency
from unified_trainer.rewards.reward import RewardConfig
from unified_trainer.rewards.scorers import check_prompts, check_reward, load_scorers

PROMPTS = ["a red circle", "blue square moves up", "a red circle"]
IMAGES = torch.rand(3, 3, 40, 56, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_clip(tmp_path_factory.mktemp("clip"))


@pytest.fixture(scope="module")
def clip(folder) -> CLIP:
    return CLIP.load(folder, CPU, torch.float32)


def copied(folder: Path, to: Path, **settings) -> Path:
    """Copy the folder with other settings of its processor."""
    to.mkdir()
    for file in folder.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    file = to / "preprocessor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    return to


@torch.no_grad()
def test_a_score_is_the_diagonal_of_transformers_logits(folder, clip):
    model, tokenizer = CLIPModel.from_pretrained(folder), CLIPTokenizer.from_pretrained(folder)
    inputs = tokenizer(PROMPTS, padding=True, return_tensors="pt")
    logits = model(**inputs, pixel_values=clip.pixels(IMAGES)).logits_per_image
    torch.testing.assert_close(clip.score(IMAGES, PROMPTS), logits.diagonal(), rtol=1e-5, atol=1e-5)
    assert len({*clip.score(IMAGES, PROMPTS).tolist()}) == 3


@torch.no_grad()
def test_a_score_depends_on_its_own_image_and_prompt_alone(clip):
    alone = torch.cat([clip.score(IMAGES[i : i + 1], PROMPTS[i : i + 1]) for i in range(3)])
    torch.testing.assert_close(clip.score(IMAGES, PROMPTS), alone, rtol=1e-5, atol=1e-5)
    assert clip.score(IMAGES[:1], ["another"]) != alone[0]


@torch.no_grad()
def test_as_a_reward_it_is_the_mean_over_frames(folder, clip):
    """Loaded by its kind, CLIP gives no features for a Frechet distance."""
    config = RewardConfig(kind="clip", path=str(folder), frames="all", batch=2)
    scorers, features = load_scorers(config, CPU)
    video = torch.stack([IMAGES, IMAGES.flip(0)]).movedim(1, 2)
    expected = torch.stack([clip.score(IMAGES, [prompt] * 3).mean() for prompt in PROMPTS[:2]])
    torch.testing.assert_close(scorers["clip"](video, PROMPTS[:2]), expected, rtol=1e-5, atol=1e-5)
    assert features is None


def test_a_score_has_the_gradient_of_its_image(clip):
    images = IMAGES.clone().requires_grad_()
    clip.score(images, PROMPTS)[1].backward()
    assert float(images.grad[1].abs().max()) > 0 and float(images.grad[[0, 2]].abs().max()) == 0


@torch.no_grad()
def test_a_long_prompt_is_cut_to_the_length_of_the_network(clip):
    words = "abcdefghijklmnopqrstuvw"
    assert clip.score(IMAGES[:1], [words]) == clip.score(IMAGES[:1], [words + " z"])


def test_sizes_as_older_folders_write_them(folder, clip, tmp_path):
    older = copied(folder, tmp_path / "older", size=SIDE, crop_size=SIDE)
    fixed = copied(folder, tmp_path / "fixed", size={"height": SIDE, "width": SIDE})
    assert torch.equal(CLIP.load(older, CPU, torch.float32).pixels(IMAGES), clip.pixels(IMAGES))
    squeezed = CLIP.load(fixed, CPU, torch.float32).pixels(IMAGES)
    assert squeezed.shape == (3, 3, SIDE, SIDE) and not torch.allclose(squeezed, clip.pixels(IMAGES), atol=0.1)


def test_position_ids_of_older_checkpoints_are_not_read(folder, tmp_path):
    older = copied(folder, tmp_path / "older")
    rewrite(
        older / "model.safetensors", lambda t: t.update({"text_model.embeddings.position_ids": torch.arange(24)[None]})
    )
    CLIP.load(older, CPU, torch.float32)
    rewrite(older / "model.safetensors", lambda t: t.update({"text_model.more": torch.zeros(1)}))
    with pytest.raises(ValueError, match=r"unexpected keys \['text_model.more'\]"):
        CLIP.load(older, CPU, torch.float32)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"resample": 2}, r"preprocessor_config\.json: resample must be 3, not 2"),
        ({"size": "32"}, "size.* must be a valid integer, not '32'"),
        ({"size": {"shortest_edge": 0}}, "must be greater than or equal to 1, not 0"),
        ({"size": {"longest_edge": 32}}, "neither shortest_edge nor height and width"),
        ({"crop_size": {"height": 32}}, "neither shortest_edge nor height and width"),
        ({"crop_size": [32, 32]}, "crop_size"),
        ({"image_mean": [0.5]}, "image_mean list must have at least 3 items"),
        ({"image_std": [0.5, 0.5, 0.0]}, r"image_std\.2 must be greater than 0"),
        ({"image_std": None}, "image_std must be a valid list"),
        ({"crop_size": 16}, r"crops to \(16, 16\), but the network sees 32 x 32"),
    ],
)
def test_wrong_settings_are_refused(folder, tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        CLIP.load(copied(folder, tmp_path / "other", **settings), CPU, torch.float32)


def test_a_folder_without_its_processor_is_refused(folder, tmp_path):
    bare = copied(folder, tmp_path / "bare")
    (bare / "preprocessor_config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"preprocessor_config\.json is missing"):
        CLIP.load(bare, CPU, torch.float32)


def test_wrong_inputs_are_refused(clip):
    with pytest.raises(ValueError, match=r"CLIP: prompt \d holds the special token <\|endoftext\|>"):
        clip.score(IMAGES[:1], ["a <|endoftext|> b"])
    with pytest.raises(ValueError, match=r"CLIP: image 1 spans .*, expected values in \[0, 1\]"):
        clip.score(torch.stack([IMAGES[0], IMAGES[1] + 1]), PROMPTS[:2])
    with pytest.raises(ValueError, match="CLIP: 3 images but 2 prompts"):
        clip.score(IMAGES, PROMPTS[:2])


# A head on the image features.

LAYERS = {0: (8, 6), 2: (6, 4), 3: (4, 1)}  # number: features in, out; dropouts have the other numbers


def head_file(file: Path, layers=LAYERS, **changes) -> Path:
    draw = torch.Generator().manual_seed(2)
    tensors = {
        f"layers.{number}.{part}": torch.randn(shape, generator=draw)
        for number, (into, out) in layers.items()
        for part, shape in (("weight", (out, into)), ("bias", (out,)))
    }
    save_file(tensors | changes, file)
    return file


@torch.no_grad()
def test_background_consistency_is_the_mean_likeness_to_the_frame_before_and_to_the_first(folder, clip):
    """VBench's loop over the frames of each video, in images that are scored two at a time."""
    config = RewardConfig(kind="background_consistency", path=str(folder), frames="all", batch=2)
    check_reward(config, 3)
    video = torch.stack([IMAGES, IMAGES[[1, 1, 0]]]).movedim(1, 2)
    got = load_scorers(config, CPU)[0]["background_consistency"](video, PROMPTS[:2])
    for of_video, expected in zip(got, ([0, 1, 2], [1, 1, 0]), strict=True):
        features = clip.features(IMAGES[expected])
        total = 0.0
        for i in (1, 2):
            likeness = [float(cosine_similarity(features[i], features[j], dim=0)) for j in (i - 1, 0)]
            total += sum(max(0.0, one) for one in likeness) / 2
        assert float(of_video) == pytest.approx(total / 2, abs=1e-6)
    with pytest.raises(UserError, match="needs at least 2 frames"):
        check_reward(dataclasses.replace(config, frames="first"), 3)


def test_frames_that_are_unlike_count_0():
    features = torch.tensor([[[1.0, 0.0], [-1.0, 0.0], [0.6, 0.8]]])
    assert float(frame_consistency(features)) == pytest.approx((0 + (0 + 0.6) / 2) / 2)


@torch.no_grad()
def test_an_aesthetic_score_is_the_head_of_normalized_features(folder, clip, tmp_path):
    """LAION's predictor by hand: the features of CLIPModel, divided by their length, through the linear layers."""
    settings = {"head": str(head_file(tmp_path / "head.safetensors"))}
    config = RewardConfig(kind="aesthetic", path=str(folder), frames="all", batch=2, settings=settings)
    check_reward(config, 2)
    scorers, _ = load_scorers(config, CPU)
    video = torch.stack([IMAGES, IMAGES.flip(0)]).movedim(1, 2)
    x = CLIPModel.from_pretrained(folder).get_image_features(pixel_values=clip.pixels(IMAGES)).pooler_output
    x = x / x.norm(dim=-1, keepdim=True)
    tensors = load_file(tmp_path / "head.safetensors")
    for number in LAYERS:
        x = x @ tensors[f"layers.{number}.weight"].T + tensors[f"layers.{number}.bias"]
    torch.testing.assert_close(scorers["aesthetic"](video, PROMPTS[:2]), x.mean().expand(2), rtol=1e-5, atol=1e-5)
    assert float(x.std()) > 0.001


def test_the_published_head_is_converted_by_the_command_of_the_guide(tmp_path, monkeypatch):
    """A file as LAION's: the state of a module `layers` with dropouts, saved by torch."""
    layers = nn.Sequential(nn.Linear(8, 6), nn.Dropout(), nn.Linear(6, 4), nn.Linear(4, 1))
    torch.save(nn.ModuleDict({"layers": layers}).state_dict(), tmp_path / "sac+logos+ava1-l14-linearMSE.pth")
    (code,) = re.findall(r'python -c "(.*?logos.*?)"', (REPO / "docs/rewards.md").read_text())
    monkeypatch.chdir(tmp_path)
    exec(code)
    rows = torch.randn(3, 8)
    torch.testing.assert_close(load_head(tmp_path / "head.safetensors", 8)(rows), layers.eval()(rows))


@pytest.mark.parametrize(
    ("layers", "changes", "message"),
    [
        ({0: (7, 1)}, {}, r"layers.0 has shape \[1, 7\], but gets 8 features"),
        ({0: (8, 6), 1: (5, 1)}, {}, r"layers.1 has shape \[1, 5\], but gets 6 features"),
        ({0: (8, 2)}, {}, "the last layer gives 2 numbers, expected one"),
        ({0: (8, 1)}, {"more": torch.zeros(1)}, "has the keys layers.0.bias, layers.0.weight, more; expected layers.N"),
        ({}, {"mlp.0.weight": torch.zeros(1)}, "has the keys mlp.0.weight; expected layers.N.weight"),
    ],
)
def test_a_head_that_does_not_fit_is_refused(tmp_path, layers, changes, message):
    with pytest.raises(UserError, match=message):
        load_head(head_file(tmp_path / "head.safetensors", layers, **changes), 8)


def test_folder_and_head_must_be_given(folder, tmp_path):
    (tmp_path / "text").write_text("no tensors")
    for path, head, message in (
        ("", "x", "reward.path must be the folder of a aesthetic scorer"),
        (str(folder), "", r"reward\.settings\.head must be given"),
        (str(folder), str(tmp_path / "none"), r"reward\.settings\.head .*none: no such file"),
    ):
        with pytest.raises(UserError, match=message):
            check_reward(RewardConfig(kind="aesthetic", path=path, settings={"head": head}), 1)
    with pytest.raises(UserError, match="is damaged or cut short"):
        load_head(tmp_path / "text", 8)


def test_prompts_that_are_cut_are_told_before_a_run(folder):
    words = "abcdefghijklmnopqrstuvw"
    (note,) = check_prompts(
        RewardConfig(kind="clip", path=str(folder)), (["a", words], lambda number: f"line {number}")
    )
    assert note.startswith("warning: 1 of 2 prompts are longer than the") and note.endswith("cuts them: line 1")
    assert "the scorer clip reads" in note


def test_a_token_that_pads_alone_is_text(clip):
    """Stable Diffusion 2's tokenizer pads with "!"; where the end token pads, it stays special."""
    assert clip.tokenizer.eos_token in special_tokens(clip.tokenizer)
    own = copy.deepcopy(clip.tokenizer)
    own.pad_token = "!"
    assert "!" not in special_tokens(own) and own.eos_token in special_tokens(own)
