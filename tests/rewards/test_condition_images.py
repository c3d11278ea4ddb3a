"""Scorers that ask for condition images: one answer in this process, in a Python of its own and behind a server."""

import socket
import sys
from copy import deepcopy

import numpy as np
import pytest
import torch
from helpers import CPU, tiny_codec
from PIL import Image as Picture

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.requests import Image, Prompt, Request
from unified_trainer.rewards.base import RewardConfig, ScorerConfig
from unified_trainer.rewards.image_json import prompts_with_images
from unified_trainer.rewards.offloaded import OffloadedScorer
from unified_trainer.rewards.reward import Reward
from unified_trainer.rewards.scorers import check_reward, load_scorers
from unified_trainer.tools.serve.serve_reward import reward_service
from unified_trainer.tools.serve.web_server import serving

FILE = """
import torch
from dataclasses import dataclass


def near(videos, prompts, images):
    if images is None:
        return videos.new_full((len(videos),), 7.0)
    assert images.shape == videos[:, :, 0].shape and images.dtype == torch.float32
    return videos.flatten(1).mean(1) + 10 * images.flatten(1).mean(1)


class Near:
    def __init__(self, settings):
        pass

    def __call__(self, videos, prompts, images=None):
        return near(videos, prompts, images)
"""
HERE = """

from unified_trainer.rewards.base import NetworkScorer
from unified_trainer.rewards.own_settings import ScorerSettings


@dataclass(frozen=True)
class Declared(ScorerSettings):
    def load(self, config, device):
        return NetworkScorer(near, (torch.nn.Linear(1, 1),))


@dataclass(frozen=True)
class OfLatents(ScorerSettings):
    of_latents = True

    def load(self, config, device):
        return near


def plain(images, prompts):
    return images.flatten(1).mean(1)
"""
VIDEO = torch.rand(3, 3, 2, 16, 24, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def file(tmp_path):
    (tmp_path / "here.py").write_text(FILE + HERE)
    (tmp_path / "own.py").write_text(FILE)
    return tmp_path


@pytest.fixture
def prompts(tmp_path) -> tuple[str, ...]:
    """Three prompts, the last two with one image, of another size than the videos."""
    draw, images = np.random.default_rng(0), []
    for number in range(2):
        Picture.fromarray(draw.integers(0, 255, (40, 30, 3), dtype=np.uint8)).save(tmp_path / f"{number}.png")
        images.append(Image.read(tmp_path / f"{number}.png", "the test"))
    return tuple(Request("a circle", (images[number],)).prompt for number in (0, 1, 1))


def scores(config: RewardConfig, prompts: tuple[str, ...]) -> torch.Tensor:
    check_reward(config, 2)
    one = Reward(load_scorers(config, CPU)[0], tiny_codec(), config)
    return one.total(one.parts(VIDEO, prompts, one.weights))


def expected(prompts: tuple[str, ...]) -> torch.Tensor:
    images = torch.stack([prompt.images[0].at(16, 24) for prompt in prompts])
    return VIDEO.flatten(1).mean(1) + 10 * images.flatten(1).mean(1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["here.py:near", "here.py:Near", "here.py:Declared", "own.py:near", "own.py:Near"])
def test_a_scorer_gets_the_image_of_each_video_at_its_size(file, prompts, kind):
    python = sys.executable if kind.startswith("own") else ""
    config = RewardConfig(kind=f"{file / kind}", python=python, frames="all", offload="Declared" in kind)
    assert torch.equal(scores(config, prompts), expected(prompts))
    assert scores(config, ("a circle",) * 3).tolist() == [7.0] * 3
    if "Declared" in kind:
        assert isinstance(load_scorers(config, CPU)[0]["Declared"], OffloadedScorer)


@pytest.mark.slow
@pytest.mark.parametrize("takes", [True, False])
def test_a_served_scorer_gets_them_bit_for_bit(file, prompts, takes):
    """A server that does not say that it takes images gets none."""
    here = RewardConfig(kind=f"{file / 'here.py'}:near", frames="all")
    one = Reward(load_scorers(here, CPU)[0], tiny_codec(), here)
    service = reward_service(
        "near", 1, lambda video, said: one.total(one.parts(video, tuple(said), one.weights)), CPU, 8, 0.0
    )
    service.about["images"] = takes
    with socket.create_server(("127.0.0.1", 0)) as listener, serving(service, listener) as url:
        far = ScorerConfig(kind="http", frames="all", batch=2, settings={"url": url})
        config = RewardConfig(scorers={"far": far})
        assert torch.equal(scores(config, prompts), expected(prompts) if takes else torch.full((3,), 7.0))
        assert scores(config, ("a circle",) * 3).tolist() == [7.0] * 3


def test_a_scorer_whose_videos_are_named_images_asks_for_none(file, prompts):
    config = RewardConfig(kind=f"{file / 'here.py'}:plain", frames="all")
    assert torch.equal(scores(config, prompts), VIDEO.flatten(1).mean(1))


def test_a_scorer_of_latents_that_asks_for_images_is_refused(file):
    with pytest.raises(UserError, match="reads latents, so it cannot ask for images"):
        load_scorers(RewardConfig(kind=f"{file / 'here.py'}:OfLatents", frames="all"), CPU)


def test_prompts_keep_their_images_between_processes(prompts):
    copy = deepcopy(prompts)
    assert copy == prompts == ("a circle",) * 3
    assert [prompt.images for prompt in copy] == [prompt.images for prompt in prompts]
    assert type(Request("a circle").prompt) is str and isinstance(copy[0], Prompt)


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (["aaaa"], "image 1 is no PNG file in base64"),
        (["!"], "image 1 is no PNG file in base64"),
        ([3], "image 1 is no PNG file in base64"),
        ([], "images must be a list of 1 PNG files"),
    ],
)
def test_images_of_a_request_that_are_none_are_named(files, said):
    with pytest.raises(UserError, match=said):
        prompts_with_images(["a"], files)
