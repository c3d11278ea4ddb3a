"""The scorer videoalign on a small random folder in the published layout, against transformers, peft and formulas."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import CPU
from peft import LoraConfig, inject_adapter_in_model
from torch import nn
from torch.nn.functional import interpolate
from transformers import Qwen2Tokenizer, Qwen2VLConfig, Qwen2VLForConditionalGeneration

from unified_trainer.basics.errors import UserError
from unified_trainer.rewards.base import RewardConfig
from unified_trainer.rewards.hpsv3_preprocessing import fit
from unified_trainer.rewards.scorers import check_prompts, check_reward, load_scorers
from unified_trainer.rewards.videoalign import TEXTS, frames_seen

pytestmark = pytest.mark.slow  # seconds together

BASE = Path(__file__).parents[1] / "golden" / "hpsv3" / "base"
TOKENS = ["<|VQ_reward|>", "<|MQ_reward|>", "<|TA_reward|>"]
STATISTICS = {
    "VQ_mean": 3.6757,
    "VQ_std": 2.2476,
    "MQ_mean": 1.1646,
    "MQ_std": 1.3811,
    "TA_mean": 2.8105,
    "TA_std": 2.5121,
}
CONFIG = {  # the published one has lora_r 64 and lora_alpha 128
    "data_config": {
        "meta_data": "train.csv", "data_dir": "data", "max_frame_pixels": 200704, "num_frames": None, "fps": 2.0,
        "eval_dim": ["VQ", "MQ", "TA"], "prompt_template_type": "detailed_special", "sample_type": "uniform",
    },
    "model_config": {
        "model_name_or_path": "Qwen/Qwen2-VL-2B-Instruct", "output_dim": 1, "use_special_tokens": True,
        "reward_token": "special",
    },
    "peft_lora_config": {"lora_enable": True, "lora_r": 2, "lora_alpha": 6, "use_rslora": False},
    "inference_config": STATISTICS,
}  # fmt: skip
PROMPTS = ["a dog {runs}", "two cats & a tree"]
VIDEO = torch.rand(2, 3, 9, 40, 72, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def theirs() -> nn.Module:
    """Transformers' network with peft's adapters, and a head."""
    torch.manual_seed(0)
    config = Qwen2VLConfig.from_pretrained(BASE)
    config.text_config.vocab_size = len(tokenizer())
    network = Qwen2VLForConditionalGeneration(config)
    network.rm_head = nn.Linear(config.text_config.hidden_size, 1, bias=False)
    layers = [name for name, one in network.named_modules() if isinstance(one, nn.Linear) and "language_model" in name]
    inject_adapter_in_model(LoraConfig(r=2, lora_alpha=6, target_modules=layers), network)
    for name, weight in network.named_parameters():
        if weight.ndim > 1:
            nn.init.normal_(weight, std=0.1 if "lora_" in name else 0.2)
    return network.requires_grad_(False).eval()


def tokenizer() -> Qwen2Tokenizer:
    read = Qwen2Tokenizer.from_pretrained(BASE)
    read.add_special_tokens({"extra_special_tokens": TOKENS}, replace_extra_special_tokens=False)
    return read


@pytest.fixture(scope="module")
def folder(theirs, tmp_path_factory) -> Path:
    """The layout of KwaiVGI/VideoReward, with the names of weights of transformers 4.45; an older step beside it."""
    out = tmp_path_factory.mktemp("videoreward")
    (out / "model_config.json").write_text(json.dumps(CONFIG))
    weights = {
        f"base_model.model.{name}".replace("model.model.language_model.", "model.model.").replace(
            "model.model.visual.", "model.visual."
        ): weight
        for name, weight in theirs.state_dict().items()
    }
    (out / "checkpoint-9").mkdir()
    tokenizer().save_pretrained(out / "checkpoint-12" / "tokenizer")
    torch.save(weights, out / "checkpoint-12" / "model.pth")
    return out


def reward(folder: Path, **settings) -> RewardConfig:
    own = {"base": str(BASE), "frame_rate": "4"} | settings
    return RewardConfig(kind="videoalign", path=str(folder), frames="all", settings=own)


def scores(folder: Path, video=VIDEO, prompts=PROMPTS, batch=64, **settings) -> torch.Tensor:
    config = replace(reward(folder, **settings), batch=batch)
    check_reward(config, video.shape[2])
    return load_scorers(config, CPU)[0]["videoalign"](video, prompts)


def patches(clip: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """VideoAlign's frames, resized as torchvision does bytes, in Qwen2-VL's patches as transformers 4.45 cuts."""
    small = interpolate((255 * clip).round(), (height, width), mode="bicubic", antialias=True).clamp(0, 255).round()
    mean, std = (
        np.array(values).reshape(3, 1, 1)
        for values in ([0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711])
    )
    pixels = (small.double().numpy() / 255 - mean) / std
    rows, columns = height // 14, width // 14
    tiles = pixels.reshape(len(clip) // 2, 2, 3, rows // 2, 2, 14, columns // 2, 2, 14)
    return torch.from_numpy(tiles.transpose(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(-1, 3 * 2 * 14 * 14)).float()


@torch.no_grad()
def test_a_score_is_the_sum_of_the_published_parts(theirs, folder):
    """Adapters unmerged, by peft; positions 0..n-1; the normalised numbers at the three tokens."""
    words, (height, width) = tokenizer(), fit(40, 72, 128 * 784, 200704, 28)
    network = theirs
    parts = []
    for clip, prompt in zip(VIDEO, PROMPTS, strict=True):
        seen = patches(clip[:, [0, 3, 5, 8]].movedim(0, 1), height, width)
        text = json.loads(TEXTS.read_text())["detailed_special"].format(text_prompt=prompt)
        turn = [{"type": "video", "video": "file.mp4"}, {"type": "text", "text": text}]
        template = json.loads((BASE / "chat_template.json").read_text())["chat_template"]
        chat = words.apply_chat_template(
            [{"role": "user", "content": turn}], chat_template=template, tokenize=False, add_generation_prompt=True
        )
        grid = torch.tensor([[2, height // 14, width // 14]])
        tokens = words(chat.replace("<|video_pad|>", "<|video_pad|>" * (len(seen) // 4)), return_tensors="pt")[
            "input_ids"
        ]
        embeds = network.model.language_model.embed_tokens(tokens)
        seen = network.model.visual(seen, grid_thw=grid).pooler_output
        embeds = embeds.masked_scatter((tokens == words.convert_tokens_to_ids("<|video_pad|>"))[..., None], seen)
        places = torch.arange(tokens.shape[1]).expand(3, 1, -1)
        hidden = network.model.language_model(inputs_embeds=embeds, position_ids=places).last_hidden_state
        at = [(tokens[0] == words.convert_tokens_to_ids(token)).nonzero().item() for token in TOKENS]
        assert at == sorted(at)
        raw = network.rm_head(hidden[0, at])[:, 0].tolist()
        parts.append(
            [
                (x - STATISTICS[f"{p}_mean"]) / STATISTICS[f"{p}_std"]
                for p, x in zip(("VQ", "MQ", "TA"), raw, strict=True)
            ]
        )
    expected = torch.tensor(parts)
    assert float(expected.std(0).min()) > 1e-3
    torch.testing.assert_close(scores(folder), expected.sum(1), atol=1e-4, rtol=1e-4)
    weighed = scores(folder, quality="0.5", motion="-2", alignment="0", batch=1)
    torch.testing.assert_close(weighed, expected @ torch.tensor([0.5, -2.0, 0.0]), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("frames", "rate", "seen"),
    [(81, 16, 10), (81, 24, 6), (33, 16, 4), (5, 16, 4), (3, 16, 2), (2, 8, 2), (200, 4, 100), (121, 24, 10)],
)
def test_two_frames_per_second_are_seen(frames, rate, seen):
    """Qwen2-VL's rule: an even number, 4 at least and no more than there are, the first and the last among them."""
    found = frames_seen(frames, 2 / rate)
    assert len(found) == seen and found[0] == 0 and found[-1] == frames - 1 and found == sorted({*found})


def test_a_score_has_a_gradient_to_its_own_video(folder):
    video = VIDEO.clone().requires_grad_()
    exact = scores(folder, video)
    exact[1].backward()
    assert float(video.grad[0].abs().max()) == 0 < float(video.grad[1].abs().max())
    torch.testing.assert_close(exact.detach(), scores(folder), atol=0.02, rtol=0.02)


def test_the_prompt_is_the_published_one():
    """With its blanks at the ends of lines; each token stands in it once."""
    text = json.loads(TEXTS.read_text())["detailed_special"]
    assert [text.count(token) for token in TOKENS] == [1, 1, 1] and text.count("{") == text.count("{text_prompt}") == 1
    assert len(text) == 3997
    assert "Quality:**  \n" in text and "lowest possible. \n" in text and "acceptable.  \n" in text


@pytest.mark.parametrize(
    ("section", "change", "message"),
    [
        ("data_config", {"prompt_template_type": "simple"}, "prompt_template_type must be 'detailed_special'"),
        ("data_config", {"sample_type": "multi_pts"}, "sample_type must be 'uniform'"),
        ("data_config", {"num_frames": 8}, "num_frames"),
        ("model_config", {"output_dim": 3}, "output_dim must be 1"),
        ("peft_lora_config", {"use_rslora": True}, "use_rslora must be False"),
        ("peft_lora_config", {"lora_r": 4}, "no factors of rank lora_r, 4"),
        ("inference_config", {"MQ_std": 0}, "MQ_std"),
        ("inference_config", None, "VQ_mean is missing"),
    ],
)
def test_another_config_is_refused(folder, tmp_path, section, change, message):
    other = dict(CONFIG)
    config = {section: CONFIG[section] | change} if change else {}
    other.pop(section)
    shutil.copytree(folder, tmp_path / "other")
    (tmp_path / "other" / "model_config.json").write_text(json.dumps(other | config))
    with pytest.raises(UserError, match=message):
        scores(tmp_path / "other")


def test_a_checkpoint_that_is_none_is_refused(folder, tmp_path):
    whole = torch.load(folder / "checkpoint-12" / "model.pth")
    shutil.copytree(folder, tmp_path / "other")
    file = tmp_path / "other" / "checkpoint-12" / "model.pth"
    for change, message in (
        ({"base_model.model.rm_head.weight": None}, r"missing rm_head\.weight"),
        ({"base_model.model.extra": torch.zeros(1)}, "unexpected extra"),
        ({"base_model.model.lm_head.lora_A.default.weight": torch.zeros(1)}, r"unexpected lm_head\.lora_A"),
        ({"base_model.model.model.embed_tokens.weight": None}, r"missing model\.embed_tokens\.weight"),
    ):
        torch.save({key: value for key, value in (whole | change).items() if value is not None}, file)
        with pytest.raises(UserError, match=message):
            scores(tmp_path / "other")
    file.unlink()
    with pytest.raises(UserError, match=r"model\.pth is missing"):
        scores(tmp_path / "other")
    shutil.rmtree(tmp_path / "other" / "checkpoint-12")
    (tmp_path / "other" / "checkpoint-9").rmdir()
    with pytest.raises(UserError, match=r"checkpoint-N/model\.pth is missing"):
        check_prompts(reward(tmp_path / "other"), (["a"], str))


def test_wrong_settings_and_prompts_are_refused_before_weights(folder):
    config = reward(folder)
    for changed, message in (
        (replace(config, frames="every"), r"reward\.frames must be all, not every"),
        (replace(config, settings={"base": str(BASE)}), r"settings\.frame_rate must be given"),
        (reward(folder, quality="0", motion="0", alignment="0"), "nothing is scored"),
        (replace(config, path=""), r"reward\.path must be the folder"),
        (reward(folder, base=str(folder)), r"reward\.settings\.base .*config\.json: no such file"),
    ):
        with pytest.raises(UserError, match=message):
            check_reward(changed, 9)
    with pytest.raises(UserError, match="needs at least 2 frames"):
        check_reward(config, 1)
    with pytest.raises(UserError, match=r"line 0 holds <\|MQ_reward\|>"):
        check_prompts(config, (["a <|MQ_reward|>"], lambda number: f"line {number}"))
    with pytest.raises(ValueError, match="VideoAlign: image 0 spans"):
        scores(folder, VIDEO * 2)
    assert math.isfinite(float(scores(folder, VIDEO[:1], PROMPTS[:1])))
