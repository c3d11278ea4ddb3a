"""Small folders of video pipelines open without a network, sample a finite video twice the same, and follow a prompt.

The suite tries unlike ones; `--all-pipelines` tries each.
"""

import pytest
import torch
from diffusers import DiffusionPipeline
from pipelines.videos import VIDEOS
from torch import nn

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # warnings of diffusers about its own code

UNLIKE = (
    "WanPipeline with a time per token",
    "WanAnimatePipeline",
    "HunyuanVideoImageToVideoPipeline",
    "LTXConditionPipeline",
    "MotifVideoImage2VideoPipeline",
    "Kandinsky6TI2VAPipeline with a picture",
)
OTHER = "a green square moves right"  # as many tokens


def pytest_generate_tests(metafunc):
    metafunc.parametrize("name", VIDEOS if metafunc.config.getoption("--all-pipelines") else UNLIKE)


def test_a_small_folder_of_a_video_pipeline_samples(name, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    small = VIDEOS[name]
    small.write(tmp_path)
    pipeline = DiffusionPipeline.from_pretrained(tmp_path)
    assert type(pipeline).__name__ == name.split()[0]
    networks = [part for part in pipeline.components.values() if isinstance(part, nn.Module)]
    weights = [weight for network in networks for weight in network.parameters() if weight.numel() > 1]
    assert not any((weight == weight.flatten()[0]).all() for weight in weights)  # a weight of zeros would hide others
    video, again, other = (sampled(pipeline, **small.call | change) for change in ({}, {}, {"prompt": OTHER}))
    assert video.isfinite().all() and video.std() > 0.05
    assert torch.equal(video, again)
    assert not torch.allclose(video, other, atol=1e-3)


def sampled(pipeline: DiffusionPipeline, **call: object) -> torch.Tensor:
    """Return the video of a call of two steps, of any layout."""
    pipeline.set_progress_bar_config(disable=True)
    rest = {"num_inference_steps": 2, "output_type": "pt", "return_dict": False}
    return torch.as_tensor(pipeline(**call, **rest, generator=torch.Generator().manual_seed(0))[0]).float()
