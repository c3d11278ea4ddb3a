"""Small folders of image pipelines open without a network, make an image twice the same, and follow the prompt.

The suite tries unlike ones; `--all-pipelines` tries each.
"""

import pytest
import torch
from diffusers import DiffusionPipeline
from pipelines import text
from pipelines.images import IMAGES
from torch import nn

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # warnings of diffusers about its own code

UNLIKE = ("FluxPipeline", "ZImagePipeline", "StableDiffusion3Pipeline", "FluxFillPipeline", "NucleusMoEImagePipeline")
OTHER = "a blue cat and the big green dog move right down"
TOKENIZERS = (text.qwen_tokenizer, text.byte_tokenizer, text.clip_tokenizer, text.t5_tokenizer, text.gemma_tokenizer)


def pytest_generate_tests(metafunc):
    if "name" in metafunc.fixturenames:
        metafunc.parametrize("name", IMAGES if metafunc.config.getoption("--all-pipelines") else UNLIKE)


def test_a_small_folder_of_an_image_pipeline_samples(name, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    small = IMAGES[name]
    small.write(tmp_path)
    pipeline = DiffusionPipeline.from_pretrained(tmp_path)
    assert type(pipeline).__name__ == name
    networks = [part for part in pipeline.components.values() if isinstance(part, nn.Module)]
    weights = [weight for network in networks for weight in network.parameters() if weight.numel() > 1]
    assert not any((weight == weight.flatten()[0]).all() for weight in weights)  # a weight of zeros would hide others
    prompt = "content_prompt" if "content_prompt" in small.call else "prompt"
    image, again, other = (sampled(pipeline, **small.call | change) for change in ({}, {}, {prompt: OTHER}))
    assert image.isfinite().all() and image.std() > 0.05
    assert torch.equal(image, again)
    assert not torch.allclose(image, other, atol=1e-3, rtol=0)


def sampled(pipeline: DiffusionPipeline, **call: object) -> torch.Tensor:
    """Return the image of a call of two steps; some pipelines encode a picture by the noise of the process."""
    pipeline.set_progress_bar_config(disable=True)
    rest = {"num_inference_steps": 2, "output_type": "pt", "return_dict": False}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        image = pipeline(**call, **rest, generator=torch.Generator().manual_seed(0))[0]
    return torch.stack([*image]) if isinstance(image, list) else image


@pytest.mark.parametrize("make", TOKENIZERS)
def test_a_tokenizer_from_its_files_gives_prompts_tokens_of_their_own(make, tmp_path):
    words = make()
    words.save_pretrained(tmp_path)
    opened = type(words).from_pretrained(tmp_path)
    prompts = ("a red circle", "a red square", "a red circle moves left", "zebra")
    tokens = [tuple(opened(prompt).input_ids) for prompt in prompts]
    assert tokens == [tuple(words(prompt).input_ids) for prompt in prompts]
    assert len(set(tokens)) == len(prompts) and len(tokens[0]) < len(tokens[2])
