"""Pipelines of diffusers that no family describes by hand: learned, sampled, decoded as by the pipeline itself."""

import json
import shutil
import sys
import tempfile
from pathlib import Path

import diffusers
import numpy as np
import pytest
import torch
import transformers
from helpers import CPU
from pipelines.comparison import Comparison
from pipelines.images import IMAGES
from pipelines.videos import VIDEOS
from safetensors.torch import load_file, save_file

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.requests import Image, Request
from unified_trainer.data.loader import conditions_of, make_batch
from unified_trainer.models.encoders import EncoderConfig
from unified_trainer.models.pipeline.codec import PipelineCodec
from unified_trainer.models.pipeline.family import images
from unified_trainer.models.pipeline.known import known
from unified_trainer.models.pipeline.latents import KNOWN
from unified_trainer.run.registry import family_of

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # warnings of diffusers about its own code

SMALL = IMAGES | VIDEOS
GOLDEN = {
    "FluxPipeline": (
        "latents: hidden_states [24, 64]; time: timestep = 1 sigma; "
        "velocity: output; prompt: encoder_hidden_states, pooled_projections; guidance in the network: guidance"
    ),
    "ZImagePipeline": (
        "latents: x [16, 1, 8, 12]; time: t = -1 sigma + 1; velocity: -output; prompt: cap_feats; "
        "guidance scale: the pipeline's + 1"
    ),
    "LuminaPipeline": (
        "latents: hidden_states [4, 8, 12]; time: timestep = -1 sigma + 1; "
        "velocity: -output; prompt: encoder_hidden_states, encoder_mask; "
        "guidance: the pipeline has a rule of its own, and uncond + w (cond - uncond) is used"
    ),
    "SanaPipeline": (
        "latents: hidden_states [8, 16, 24]; time: timestep = 1000 sigma; "
        "velocity: output; prompt: encoder_hidden_states, encoder_attention_mask; "
        "negative prompts are encoded unlike prompts"
    ),
    "QwenImagePipeline": (
        "latents: hidden_states [24, 64]; time: timestep = 1 sigma; "
        "velocity: output; prompt: encoder_hidden_states, encoder_hidden_states_mask; "
        "guidance keeps the norm of the conditional velocity"
    ),
    "StableDiffusion3Pipeline": (
        "latents: hidden_states [16, 8, 12]; time: timestep = 1000 sigma; "
        "velocity: output; prompt: encoder_hidden_states, pooled_projections"
    ),
    "MochiPipeline": (
        "latents: hidden_states [12, 2, 4, 6]; time: timestep = 1000 sigma; "
        "velocity: output; prompt: encoder_hidden_states, encoder_attention_mask"
    ),
    "SkyReelsV2ImageToVideoPipeline": (
        "latents: hidden_states [16, 2, 4, 6], with other channels behind them; time: timestep = 1000 sigma; "
        "velocity: output; prompt: encoder_hidden_states; image: encoder_hidden_states_image, "
        "channels behind the latents"
    ),
    "WanPipeline with a time per token": (
        "latents: hidden_states [48, 2, 2, 4]; time: timestep = 1000 sigma for each token; "
        "velocity: output; prompt: encoder_hidden_states"
    ),
    "LTXImageToVideoPipeline": (
        "latents: hidden_states [12, 16]; time: timestep = 1000 sigma for each token, another one for clean tokens; "
        "velocity: output; prompt: encoder_hidden_states, encoder_attention_mask; image: first latent frames"
    ),
    "WanImageToVideoPipeline with a time per token": (
        "latents: hidden_states [48, 2, 2, 4]; time: timestep = 1000 sigma for each token, another one for clean "
        "tokens; velocity: output; prompt: encoder_hidden_states; image: first latent frames"
    ),
}
ROUNDED = 2e-5  # a VAE of random weights enlarges the rounding of its latents


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory):
    """Writes the small folder of a pipeline, once."""
    root = tmp_path_factory.mktemp("pipelines")

    def written(name: str) -> Path:
        if not (root / name).exists():
            SMALL[name].write(root / name)
        return root / name

    return written


@pytest.fixture(scope="session")
def opened(folder_of):
    """Opens a pipeline beside the trainer's model and codec, once."""
    held: dict[str, Comparison] = {}

    def comparison(name: str) -> Comparison:
        if name not in held:
            held[name] = Comparison(folder_of(name), SMALL[name].call)
        return held[name]

    return comparison


@pytest.fixture
def changed(folder_of, tmp_path):
    """Copies the small folder of a pipeline and changes keys of one of its JSON files."""

    def copy(name: str, file: str, **keys: object) -> Path:
        folder = Path(tempfile.mkdtemp(dir=tmp_path))
        shutil.copytree(folder_of(name), folder, dirs_exist_ok=True)
        (folder / file).write_text(json.dumps(json.loads((folder / file).read_text()) | keys))
        return folder

    return copy


@pytest.fixture(autouse=True, scope="module")
def quiet():
    """Leave out what diffusers and transformers say of the long prompts that a pipeline is tried with."""
    before = diffusers.logging.get_verbosity(), transformers.logging.get_verbosity()
    diffusers.logging.set_verbosity_error()
    transformers.logging.set_verbosity_error()
    yield
    diffusers.logging.set_verbosity(before[0])
    transformers.logging.set_verbosity(before[1])


@pytest.mark.parametrize("name", GOLDEN)
def test_a_pipeline_is_learned_and_the_trainer_makes_what_it_makes(opened, name):
    made = opened(name)
    assert type(made.pipeline).__name__ == name.split()[0]
    assert str(made.facts) == GOLDEN[name]
    latents, pixels = made.difference()
    assert latents < 1e-5
    assert pixels < ROUNDED
    assert made.walks[0][1].std() > 0.05  # frames that are not one color
    assert made.batch_difference() < 1e-5
    assert made.gradient_difference() < 0.02
    assert made.decoding_difference() < ROUNDED


def test_samples_of_a_batch_have_times_of_their_own(opened):
    assert opened("SanaPipeline").batch_difference() < 1e-5


def test_clips_are_encoded_as_by_the_vae(opened):
    """Qwen-Image's has a mean and a deviation for each channel."""
    assert opened("QwenImagePipeline").decoding_difference() < ROUNDED


def test_the_first_latent_of_a_clip_is_that_of_its_first_frame(opened, changed):
    """So that stored clips have their condition images too; LTX-Video's pipeline does not scale those of images."""
    folder = changed("LTXImageToVideoPipeline", "vae/config.json", scaling_factor=1.0)
    ltx = Comparison(folder, SMALL["LTXImageToVideoPipeline"].call)
    for made in (opened("WanImageToVideoPipeline with a time per token"), ltx):
        clip = torch.randint(256, (1, 3, *made.size), generator=torch.Generator().manual_seed(0))
        latents = made.codec.encode(clip / 255)
        image = Image.of(clip[0, :, 0].movedim(0, -1).to(torch.uint8).numpy())
        encoded = made.codec.encode_images([(image,)], made.facts.latents.shape)
        torch.testing.assert_close(made.codec.first_frames(latents)[KNOWN], encoded[KNOWN], rtol=0, atol=1e-5)
    with pytest.raises(UserError, match="needs the first frames of clips, not their latents"):
        opened("LTXImageToVideoPipeline").codec.first_frames(latents)


@pytest.mark.parametrize("name", ["StableDiffusion3Pipeline", "QwenImagePipeline", "LTXImageToVideoPipeline"])
def test_larger_frames_are_decoded_in_tiles_of_the_size_that_was_asked_for(opened, name):
    whole = opened(name).codec
    unit = opened(name).size[1] // opened(name).facts.latents.shape[2]
    tiled = PipelineCodec.load(whole.folder, CPU, EncoderConfig(vae_tile=4 * unit, vae_slicing=True))
    small, large = (
        torch.randn(2, *whole.latent_shape(opened(name).size[0], side, side)) for side in (4 * unit, 6 * unit)
    )
    with torch.no_grad():
        torch.testing.assert_close(tiled.decode(small), whole.decode(small), rtol=0, atol=ROUNDED)
        assert (tiled.decode(large) - whole.decode(large)).abs().max() > 1e-3
    with pytest.raises(UserError, match=rf"encoders\.vae_tile must be a multiple of {4 * unit}, or 0, not 8"):
        PipelineCodec.load(whole.folder, CPU, EncoderConfig(vae_tile=8))


def test_another_condition_makes_another_velocity(opened):
    """All tensors of the conditions reach the network, or the comparisons above would compare little."""
    made = opened("SkyReelsV2ImageToVideoPipeline")
    x, sigma, cond = made.model.example(made.facts.latents.shape)
    before = made.model.velocity(x, sigma, cond)
    for name in cond.tensors:
        other = cond.updated(type(cond)({name: cond[name].roll(1, -1)}))
        assert not made.model.velocity(x, sigma, other).allclose(before, atol=1e-4), name


def test_a_schedule_that_matches_no_flow_is_refused(changed):
    for name in ("EDMEulerScheduler", "SCMScheduler"):
        folder = changed("SanaPipeline", "scheduler/scheduler_config.json", _class_name=name)
        with pytest.raises(UserError, match=rf"scheduler_config.json: {name} is no scheduler of flow matching"):
            known(folder).of_size((1, 64, 96))


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("StableDiffusion3Img2ImgPipeline", "starts from a noised image or clip, at the level of its strength"),
        ("StableDiffusion3PAGPipeline", "calls its network on more rows than samples without guidance"),
    ],
)
def test_steps_of_another_kind_are_refused_by_what_they_do(folder_of, kind, said):
    with pytest.raises(UserError, match=f"{kind} {said}"):
        known(folder_of(kind)).of_size((1, 64, 96))


def test_a_class_that_is_no_pipeline_is_refused(changed):
    folder = changed("SanaPipeline", "model_index.json", _class_name="SanaTransformer2DModel")
    with pytest.raises(UserError, match=r"model_index\.json: SanaTransformer2DModel is no pipeline of diffusers"):
        family_of("student", str(folder))


def test_a_component_of_another_library_is_not_imported(changed, tmp_path, monkeypatch):
    (tmp_path / "ran_by_folder.py").write_text("raise SystemExit('code of the folder ran')")
    monkeypatch.syspath_prepend(tmp_path)
    folder = changed("SanaPipeline", "model_index.json", text_encoder=["ran_by_folder", "Encoder"])
    with pytest.raises(UserError, match=r"ran_by_folder\.Encoder is no class of diffusers .* or transformers"):
        known(folder).of_size((1, 64, 96))
    assert "ran_by_folder" not in sys.modules


def test_several_frames_of_an_image_pipeline_are_refused(folder_of):
    with pytest.raises(UserError, match=r"SanaPipeline makes images: set --video\.frames 1 instead of 5"):
        known(folder_of("SanaPipeline")).of_size((5, 64, 96))


def test_prompts_that_are_padded_without_a_mask_are_passed_alone(opened):
    """Padded prompts would be other prompts, so that a batch of the network is a pass for each sample."""
    made = opened("CogView4Pipeline")
    assert made.facts.arguments.counted is not None
    assert made.difference()[1] < ROUNDED and made.batch_difference() == 0


def test_a_folder_that_lacks_a_weight_is_refused(changed):
    folder = changed("SanaPipeline", "model_index.json")
    file = folder / "vae" / "diffusion_pytorch_model.safetensors"
    weights = load_file(file)
    del weights["decoder.conv_in.bias"]
    save_file(weights, file, {"format": "pt"})
    with pytest.raises(UserError, match=r"vae lacks decoder\.conv_in\.bias"):
        Comparison(folder, SMALL["SanaPipeline"].call)


def test_an_editing_model_reads_the_prompt_with_its_image(folder_of):
    """Each branch of guidance has its prompt encoded with the image of its row, and no prompt is encoded alone."""
    folder = folder_of("QwenImageEditPipeline")
    made = Comparison(folder, {"height": 64, "width": 64})
    assert made.facts.arguments.joint and images(folder) == (1, 1)
    assert made.difference()[1] < ROUNDED
    shape, pictures = made.facts.latents.shape, [Image.of(np.full((64, 64, 3), shade, np.uint8)) for shade in (0, 200)]
    requests = [Request(text, (picture,)) for text in ("a cat", "") for picture in pictures]
    batch = make_batch(made.codec, requests, "", shape, prompt_ids=[*range(4)], sample_ids=[*range(4)])
    text = batch.cond["encoder_hidden_states"]
    assert len(text.unique(dim=0)) == 4 and torch.equal(batch.uncond["encoder_hidden_states"], text[[2, 3, 2, 3]])
    with pytest.raises(UserError, match="together with its image, so that prompts alone cannot be encoded"):
        made.codec.encode_text(["a cat"])
    with pytest.raises(UserError, match="needs a condition image for each prompt"):
        conditions_of(made.codec, [Request("a cat")], shape)


def test_a_size_that_a_pipeline_raises_an_error_for_gets_one_near_it(folder_of):
    """The pipeline says what divides height and width, and nothing of frames."""
    with pytest.raises(UserError, match=r"divisible by 32.*\n.*--video.frames 5 --video.height 32 --video.width 64$"):
        known(folder_of("SanaVideoPipeline")).of_size((6, 40, 64))
