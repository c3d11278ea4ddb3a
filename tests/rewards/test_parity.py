"""200 odd prompts and 50 odd images through the scorers, against the processors that are published for them.

hpsv2, whose package pins old versions, is compared with its rule, and with its own tokenizer where that is installed:
`pip install --no-deps hpsv2==1.2.0`, and the file of words that its wheel lacks from its repository.
"""

import html
import importlib.util
import json
import re as plain
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import ftfy
import pytest
import regex
import torch
from helpers import CPU, REPO
from odd_inputs import PROMPTS, images
from PIL import Image
from small_clip import SIDE, save_clip
from torch.nn.functional import interpolate
from transformers import CLIPImageProcessorPil, CLIPTokenizer, Qwen2Tokenizer
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from unified_trainer.basics.errors import UserError
from unified_trainer.rewards.clip import CLIP
from unified_trainer.rewards.hpsv2 import HPSv2
from unified_trainer.rewards.hpsv3 import EMBEDDED, HPSv3
from unified_trainer.rewards.reward import RewardConfig
from unified_trainer.rewards.scorers import check_prompts

pytestmark = pytest.mark.slow  # seconds together

IMAGES = images()
PACKAGE = importlib.util.find_spec("hpsv2")
TOKENIZER = Path(*PACKAGE.submodule_search_locations, "src", "open_clip", "tokenizer.py") if PACKAGE else Path("absent")
WORDS_OF_HPSV2 = TOKENIZER.with_name("bpe_simple_vocab_16e6.txt.gz")
LENGTH = 24  # of save_clip's network


def bytes_as_letters() -> dict[int, str]:
    """The letters that GPT-2, and CLIP after it, write bytes with."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in shown]
    return {byte: chr(byte) for byte in shown} | {byte: chr(256 + i) for i, byte in enumerate(others)}


LETTERS = bytes_as_letters()
WORDS = [*LETTERS.values(), *(f"{letter}</w>" for letter in LETTERS.values()), "<|startoftext|>", "<|endoftext|>"]
VOCABULARY = {word: number for number, word in enumerate(WORDS)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A small CLIP whose tokenizer knows every byte."""
    out = save_clip(tmp_path_factory.mktemp("clip"), VOCABULARY)
    return out


@pytest.fixture(scope="module")
def clip(folder) -> CLIP:
    return CLIP.load(folder, CPU, torch.float32)


@pytest.fixture(scope="module")
def hpsv2(folder) -> HPSv2:
    return HPSv2.load(folder, CPU, torch.float32)


@pytest.fixture(scope="module")
def hpsv3() -> HPSv3:
    return HPSv3.load(EMBEDDED, "cpu", torch.float32)


def tokens(scorer: CLIP, prompt: str) -> list[int] | None:
    """Return what the network reads, None for a prompt that is refused."""
    try:
        return scorer._text([prompt])["input_ids"][0].tolist()
    except UserError as error:
        assert "holds the special token" in str(error)
        return None


def test_clip_and_pickscore_read_the_tokens_of_the_processor(folder, clip):
    """The call of PickScore's page, of prompts without special tokens."""
    processor = CLIPTokenizer.from_pretrained(folder)
    refused = 0
    for prompt in PROMPTS:
        found = tokens(clip, prompt)
        if found is None:
            refused += 1
            assert any(token in prompt for token in ("<|startoftext|>", "<|endoftext|>"))
        else:
            assert found == processor(prompt, padding=True, truncation=True, max_length=LENGTH)["input_ids"]
    assert refused == 3  # in capitals it is text


def cleaned_by_hpsv2(prompt: str) -> str:
    text = html.unescape(html.unescape(ftfy.fix_text(prompt))).strip()
    return regex.sub(r"\s+", " ", text).strip().lower()


def test_hpsv2_reads_the_tokens_of_its_packages_rule(hpsv2):
    """Pieces of the cleaned prompt, in bytes; the tokenizer has no merges. Special texts of either are refused."""
    pieces = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+", regex.IGNORECASE)
    special = ("<|startoftext|>", "<|endoftext|>", "<start_of_text>", "<end_of_text>")
    for prompt in PROMPTS:
        cleaned, expected = cleaned_by_hpsv2(prompt), [VOCABULARY["<|startoftext|>"]]
        for piece in pieces.findall(cleaned):
            letters = [LETTERS[byte] for byte in piece.encode()]
            expected += [VOCABULARY[letter] for letter in (*letters[:-1], f"{letters[-1]}</w>")]
        expected = [*expected[: LENGTH - 1], VOCABULARY["<|endoftext|>"]]
        found = tokens(hpsv2, prompt)
        assert (found is None) == any(token in cleaned for token in special), prompt
        assert found in (None, expected), prompt


@pytest.mark.skipif(not WORDS_OF_HPSV2.is_file(), reason=f"no hpsv2 with {WORDS_OF_HPSV2.name}")
def test_hpsv2_reads_the_tokens_of_its_package(tmp_path):
    spec = importlib.util.spec_from_file_location("hpsv2_tokenizer", TOKENIZER)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    theirs = module._tokenizer
    renamed = {"<start_of_text>": "<|startoftext|>", "<end_of_text>": "<|endoftext|>"}
    vocabulary = {renamed.get(word, word): number for word, number in theirs.encoder.items()}
    out = save_clip(tmp_path, vocabulary, list(theirs.bpe_ranks))
    scorer = HPSv2.load(out, CPU, torch.float32)
    for prompt in PROMPTS:
        found = tokens(scorer, prompt)
        assert found in (None, [49406, *theirs.encode(prompt)[: LENGTH - 2], 49407]), prompt


def test_special_texts_are_refused_before_a_run_as_the_scorer_reads_them(folder):
    for kind, prompt in (("clip", "a <|endoftext|>"), ("hpsv2", "A &lt;|EndOfText|&gt;"), ("hpsv2", "<end_of_text>")):
        with pytest.raises(UserError, match=r"line 0 holds <\|?end_?of_?text\|?>, a special token of the scorer"):
            check_prompts(RewardConfig(kind=kind, path=str(folder)), ([prompt], lambda number: f"line {number}"))
    check_prompts(RewardConfig(kind="hpsv2", path=str(folder)), (["a &lt; b"], str))


def test_clip_pickscore_and_aesthetic_see_the_pixels_of_the_processor(folder, clip):
    """The processor rounds to 8 bits after each axis, which differs by half of 1 / 255 each, the first one resized."""
    processor = CLIPImageProcessorPil.from_pretrained(folder)
    for image in IMAGES:
        theirs = processor([image], return_tensors="pt", input_data_format="channels_first")["pixel_values"]
        ours = clip.pixels(image[None] / 255)
        assert ours.shape == theirs.shape == (1, 3, SIDE, SIDE)
        assert float((ours - theirs).abs().max()) < 1.3 / 255 / min(clip.std), image.shape


def test_hpsv2_sees_the_pixels_of_its_packages_rule(hpsv2):
    """Longer side to the network's, bicubic and antialiased in floats, in the middle of black."""
    for image in IMAGES:
        pixels, longest = image[None] / 255, max(image.shape[1:])
        height, width = (max(1, round(length * SIDE / longest)) for length in image.shape[1:])
        seen = torch.zeros(1, 3, SIDE, SIDE)
        above, left = (SIDE - height) // 2, (SIDE - width) // 2
        small = interpolate(pixels, (height, width), mode="bicubic", antialias=True)
        seen[:, :, above : above + height, left : left + width] = small
        mean, std = (torch.tensor(values).view(3, 1, 1) for values in (hpsv2.mean, hpsv2.std))
        torch.testing.assert_close(hpsv2.pixels(pixels), (seen - mean) / std)


def test_hpsv3_sees_the_patches_of_qwens_processor(hpsv3):
    """Of bytes they are equal to float32 rounding."""
    own = hpsv3.preprocessor
    fewest, most = own.pixels
    processor = Qwen2VLImageProcessorPil(min_pixels=fewest, max_pixels=most, image_mean=own.mean, image_std=own.std)
    for image in IMAGES:
        patches, grid = own.patches(image.float())
        theirs = processor([Image.fromarray(image.movedim(0, -1).numpy())], return_tensors="pt")
        assert [list(grid)] == theirs["image_grid_thw"].tolist()
        torch.testing.assert_close(patches, theirs["pixel_values"], rtol=0, atol=1e-5)


def test_hpsv3_writes_the_chat_of_transformers(hpsv3):
    """The template runs on every prompt itself; prompts with special tokens are refused."""
    own, tokenizer = hpsv3.preprocessor, Qwen2Tokenizer.from_pretrained(EMBEDDED)
    template = json.loads((EMBEDDED / "chat_template.json").read_text())["chat_template"]
    settings = json.loads((EMBEDDED / "hpsv3.json").read_text())
    refused = 0
    for prompt in PROMPTS:
        if any(token in prompt for token in tokenizer.get_added_vocab()):
            refused += 1
            with pytest.raises(UserError, match="special token"):
                own.refuse([prompt], 1)
            continue
        own.refuse([prompt], 1)
        text = settings["instruction"].format(text_prompt=prompt) + settings["prompt_with_special_token"]
        turn = [{"type": "image", "image": "file.png"}, {"type": "text", "text": text}]
        chat = tokenizer.apply_chat_template(
            [{"role": "user", "content": turn}], chat_template=template, tokenize=False, add_generation_prompt=True
        )
        assert own.text(prompt, 3) == chat.replace("<|image_pad|>", "<|image_pad|>" * 3), prompt
        assert own.encode([prompt], [3])[0][0].tolist() == tokenizer(own.text(prompt, 3))["input_ids"]
    assert refused >= 4


def test_image_reward_gets_prompts_as_they_are_and_frames_as_bytes(monkeypatch):
    """The file of the guide hands its package what was given; the package itself is compared in its own Python."""
    (code,) = plain.findall(r"```python\n# image_reward\.py\n(.*?)```", (REPO / "docs/rewards.md").read_text(), plain.S)
    seen = []
    package = SimpleNamespace(load=lambda *_, **__: SimpleNamespace(score=lambda *given: seen.append(given) or 1.0))
    functional = ModuleType("torchvision.transforms.functional")
    functional.to_pil_image = lambda image: Image.fromarray(image.movedim(0, -1).numpy())
    for name in ("torchvision", "torchvision.transforms"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "torchvision.transforms.functional", functional)
    monkeypatch.setitem(sys.modules, "ImageReward", package)
    made: dict = {}
    exec(code, made)
    scorer = made["Score"]({"path": "folder", "device": "cpu"})
    for number, prompt in enumerate(PROMPTS):
        image = IMAGES[number % len(IMAGES)]
        assert scorer(image[None, :, None] / 255, [prompt]) == [1.0]
        given, picture = seen.pop()
        assert given == prompt
        assert (
            picture.size == (image.shape[2], image.shape[1])
            and picture.tobytes() == image.movedim(0, -1).numpy().tobytes()
        )
