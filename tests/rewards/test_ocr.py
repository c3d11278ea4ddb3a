"""The scorer ocr: the words of a prompt, drawn by PIL, are read back; wrong, missing and partial words score less."""

import functools
import importlib.util
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import CPU
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageDraw, ImageFont

from unified_trainer.basics.errors import UserError
from unified_trainer.rewards.base import RewardConfig, ScorerConfig
from unified_trainer.rewards.ocr import edit_distance, similarity, wanted_text
from unified_trainer.rewards.scorers import check_reward, load_scorers

WORDS = st.text(alphabet="abc ", max_size=6)


def drawn(text: str) -> torch.Tensor:
    """A frame with a text in it, [3, 48, 192]."""
    image = Image.new("RGB", (192, 48), "white")
    ImageDraw.Draw(image).text((10, 8), text, fill="navy", font=ImageFont.load_default(24))
    return torch.from_numpy(np.asarray(image).copy()).movedim(-1, 0) / 255


@pytest.mark.slow
def test_drawn_words_are_read():
    """One video, two prompts; the best of two frames counts, and the other one is empty. A pool reads the same."""
    config = RewardConfig(kind="ocr", frames="all", top_fraction=0.5, processes=0)
    check_reward(config, 2)
    scorer = load_scorers(config, CPU)[0]["ocr"]
    pooled = load_scorers(replace(config, processes=1), CPU)[0]["ocr"]
    video = torch.stack([drawn("Hello World"), drawn("")], 1)[None]
    scores = scorer(
        video.expand(2, -1, -1, -1, -1), ('a sign that says "hello world"', 'a sign that says "Hello Word"')
    )
    assert scores.tolist() == pytest.approx([1.0, 8 / 9])
    prompts = ('"hello world"', '"Hello Word"')
    assert torch.equal(pooled(video.expand(2, -1, -1, -1, -1), prompts), scores)
    pooled.scorer.close()
    with pytest.raises(UserError, match="OCR: the prompt has no words in double quotes to look for: 'a sign'"):
        scorer(video, ("a sign",))


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ('a sign "Hello World"', "helloworld"),
        ('"A" and "b c"', "abc"),
        ("a sign \u201cOpen\u201d and 'closed'", "open"),
    ],
)
def test_the_wanted_text_is_what_is_quoted(prompt, text):
    assert wanted_text(prompt) == text


@pytest.mark.parametrize("prompt", ["a sign", 'a sign ""', 'a sign " "', 'half a "quote'])
def test_a_prompt_without_a_text_is_refused(prompt):
    with pytest.raises(UserError, match="no words in double quotes"):
        wanted_text(prompt)


@pytest.mark.parametrize(
    ("seen", "wanted", "score"),
    [
        ("hello", "hello", 1.0),
        ("say HEL LO you", "hello", 1.0),
        ("hallo", "hello", 0.8),
        ("hell", "hello", 0.8),
        ("", "hello", 0.0),
        ("something else entirely", "abc", 0.0),
    ],
)
def test_the_measure_of_flow_grpo(seen, wanted, score):
    assert similarity(seen, wanted) == pytest.approx(score)


@given(left=WORDS, right=WORDS)
def test_the_edit_distance_is_the_recursive_one(left, right):
    @functools.cache
    def by_hand(i, j):
        if not i or not j:
            return i + j
        return min(by_hand(i - 1, j) + 1, by_hand(i, j - 1) + 1, by_hand(i - 1, j - 1) + (left[i - 1] != right[j - 1]))

    assert edit_distance(left, right) == by_hand(len(left), len(right))


def test_its_packages_are_named_before_training(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"reward: ocr needs rapidocr and onnxruntime: pip install -e '.*\[ocr\]'"):
        check_reward(RewardConfig(kind="ocr"), 1)
    with pytest.raises(UserError, match="ocr has no weights"):
        check_reward(RewardConfig(scorers={"ocr": ScorerConfig(path="x")}), 1)
