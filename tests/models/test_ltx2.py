"""LTX-2: a video and its sound in one tensor of latents; test_image_families.py has what families share."""

import json
import math
import shutil
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from diffusers import LTX2Pipeline
from helpers import ALONE, CPU, flags
from ltx2_folder import ltx2_folder
from real_clips import write_exactly

from unified_trainer.__main__ import main
from unified_trainer.basics.errors import UserError
from unified_trainer.basics.requests import Request
from unified_trainer.data.loader import make_batch
from unified_trainer.models.encoders import EncoderConfig
from unified_trainer.models.pipeline.codec import SoundCodec
from unified_trainer.models.pipeline.family import pipeline_family
from unified_trainer.models.pipeline.known import Known, known
from unified_trainer.models.pipeline.sound import FoundSound, Parts
from unified_trainer.roles.backbone import Backbone
from unified_trainer.roles.role import Frozen, RoleConfig
from unified_trainer.sampling.solver import SamplerConfig, generate
from unified_trainer.tools.export.scheduler import euler_scheduler

pytestmark = pytest.mark.slow

SIDES = (64, 32)
LTX2 = pipeline_family("LTX2Pipeline")
PROMPTS = ("a red circle", " a picture of a big blue square ")


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: ltx2_folder(root / name, newer=name == "LTX-2.3") for name in ("LTX-2", "LTX-2.3")}


@pytest.fixture
def folder(folders) -> Path:
    return folders["LTX-2"]


def codec_of(folder: Path) -> SoundCodec:
    return LTX2.codec(folder, CPU, EncoderConfig())


def sound_of(folder: Path, frames: int, height: int, width: int) -> FoundSound:
    """What was learned about the sound of a video of this size."""
    sound = known(folder).of_size((frames, height, width)).sound
    assert sound is not None
    return sound


def test_a_shape_tells_how_long_its_video_is(folder):
    """The latent frames behind the video's have room for the sound, and one fewer has not."""
    sound = sound_of(folder, 17, 96, 96)
    assert sound.latents.shape == (1, 1, round(17 / 24 * 25), 16)
    assert Known(folder).of_shape(sound.shape).size == (17, 96, 96)
    row = math.prod(sound.video) // sound.video[1]
    assert row > math.prod(sound.shape) - math.prod(sound.video) - math.prod(sound.latents.shape) >= 0
    with pytest.raises(UserError, match="makes no video with a sound of latents"):
        known(folder).of_shape((16, 1, 1, 1))


def test_the_noise_of_a_seed_is_that_of_the_pipeline(folder):
    """It draws the video's, then the sound's before its bands become channels; joined again, they are the whole."""
    sound, (first, second) = sound_of(folder, 9, 64, 32), (torch.Generator().manual_seed(7) for _ in range(2))
    noise = torch.randn(1, *sound.shape, generator=first)
    parts = sound.parts(noise)
    assert torch.equal(parts.video, torch.randn(1, 16, 2, 2, 1, generator=second))
    bands = torch.randn(1, 1, 9, 16, generator=second)
    assert torch.equal(sound.latents.packed(parts.sound), LTX2Pipeline._pack_audio_latents(bands))
    assert parts.rest.numel() > 0 and torch.equal(sound.joined(parts), noise)


def test_the_rest_of_the_latents_is_known(folder):
    """It is zero in data, so that at noise level sigma it is sigma times the noise, which is then its velocity."""
    model, sound = LTX2.model(folder, "transformer"), sound_of(folder, 9, 64, 32)
    model.read(ALONE)
    noise, _, cond = model.example(sound.shape, 2)
    parts, sigma = sound.parts(noise), torch.tensor([0.25, 0.9])
    noised = sound.joined(Parts(parts.video, parts.sound, parts.rest * sigma[:, None]))
    torch.testing.assert_close(sound.parts(model.velocity(noised, sigma, cond)).rest, parts.rest)
    whole = model.velocity(noised, torch.zeros(2), cond)  # where nothing is known any more
    assert bool(whole.isfinite().all())


def test_queries_and_keys_are_normalised_in_float32(folder):
    """Of a bf16 input and a float32 weight torch makes several kernels on CUDA."""
    model, seen = LTX2.model(folder, "transformer"), []
    model.read(ALONE)
    for norm in model.network.modules():
        if isinstance(norm, torch.nn.RMSNorm) and norm.weight is not None:
            norm.register_forward_hook(lambda _norm, inputs, _output: seen.append(inputs[0].dtype))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        model.velocity(*model.example())
    assert seen == [torch.float32] * 12 * len(model.blocks)


@pytest.mark.parametrize("name", ["LTX-2", "LTX-2.3"])
@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_video_and_sound_are_those_of_the_pipeline(folders, name, scale):
    """From the same latents of both, down to pixels and waves, and with guidance."""
    codec = codec_of(folders[name])
    sampler = SamplerConfig(num_steps=3, shift=3.0, guidance_scale=scale, negative_prompt="a triangle")
    shape = codec.latent_shape(9, *SIDES)
    noise = torch.randn(2, *shape, generator=torch.Generator().manual_seed(1))
    batch = make_batch(codec, Request.of(PROMPTS), sampler.negative_prompt, shape, prompt_ids=[0, 1], sample_ids=[0, 1])
    teacher = Frozen("teacher", Backbone(LTX2.model(folders[name], "transformer"), ALONE), RoleConfig())
    ours = generate(teacher, noise, batch, sampler, lambda _: noise)
    sound = sound_of(folders[name], 9, *SIDES)
    assert float(sound.parts(ours).rest.abs().max()) < 1e-7
    pipeline = LTX2Pipeline.from_pretrained(folders[name], scheduler=euler_scheduler(sampler, given=True))
    mean, std = pipeline.audio_vae.latents_mean, pipeline.audio_vae.latents_std
    parts = sound.parts(noise)
    video, heard = pipeline(
        list(PROMPTS),
        [sampler.negative_prompt] * 2,
        *SIDES,
        9,
        num_inference_steps=3,
        latents=parts.video.flatten(2).transpose(1, 2),
        audio_latents=sound.latents.packed(parts.sound) * std + mean,
        output_type="pt",
        return_dict=False,
        **LTX2.guidance(folders[name], scale, EncoderConfig()),
    )
    torch.testing.assert_close(codec.decode(ours).transpose(1, 2), video, rtol=0, atol=1e-5)
    torch.testing.assert_close(codec.sound(ours), heard, rtol=0, atol=1e-5)
    assert codec.sample_rate == pipeline.vocoder.config.output_sampling_rate and float(heard.std()) > 0.01


def test_the_connectors_are_part_of_the_text_encoder(folder, tmp_path):
    """Other weights of them are another encoder, and they leave memory with it."""
    shutil.copytree(folder, tmp_path / "other")
    codec, other = codec_of(folder), ltx2_folder(tmp_path / "other", seed=1)
    assert codec.text_fingerprint != codec_of(other).text_fingerprint
    codec.encode_ahead(PROMPTS, ALONE)
    assert codec._parts["connectors"]._network is codec._parts["text_encoder"]._network is None
    assert codec.encode_text(PROMPTS)["audio_encoder_hidden_states"].shape == (2, 1024, 24)


def changed(folder: Path, place: Path, file: str, change: dict[str, object]) -> Path:
    """Return a copy of the folder with other values in a component's config."""
    shutil.copytree(folder, place)
    config = place / file / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | change))
    return place


def test_a_side_that_the_decoder_cannot_pad_is_refused(folder, tmp_path, capsys):
    """Published decoders pad by reflection, so that a frame and the last of its tiles have two latents a side."""
    odd = changed(folder, tmp_path / "odd", "vae", {"decoder_spatial_padding_mode": "reflect"})
    with pytest.raises(
        UserError, match=r"nearest size that it makes: --video\.frames 9 --video\.height 64 --video\.width 64"
    ):
        LTX2.latent_shape(odd, 9, 64, 32)
    tiled = LTX2.codec(odd, CPU, EncoderConfig(vae_tile=128))
    for width, fits in ((192, True), (224, False)):
        latents = torch.zeros(1, *tiled.latent_shape(9, 64, width))
        if fits:
            assert tiled.decode(latents).shape == (1, 3, 9, 64, width)
            continue
        assert codec_of(odd).decode(latents).shape == (1, 3, 9, 64, width)
        with pytest.raises(UserError, match=r"the last of 224: set another encoders\.vae_tile than 128, or 0"):
            tiled.decode(latents)
    sized = {"recipe": "tiny", "student.path": odd, "video.frames": 9, "video.height": 64, "video.width": 224}
    given = flags(sized | {"video.fps": 24, "method": "dance_grpo", "encoders.vae-tile": 128})
    assert main(["plan", *given, "--hardware", "H100"]) == 2
    assert "the last of 224: set another encoders.vae_tile than 128, or 0" in capsys.readouterr().err


@pytest.mark.parametrize("part", ["audio_vae", "vocoder"])
def test_a_folder_without_weights_of_the_sound_is_refused(folder, tmp_path, part):
    """At the start of a run, which reads them when it first decodes a sound."""
    shutil.copytree(folder, tmp_path / "half")
    (tmp_path / "half" / part / "diffusion_pytorch_model.safetensors").unlink()
    with pytest.raises(UserError, match=f"{part} holds no diffusion_pytorch_model"):
        codec_of(tmp_path / "half")


@pytest.fixture
def words(folder, tmp_path) -> list[str]:
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS))
    named = {"recipe": "tiny", "student.path": folder, "video.height": SIDES[0], "video.width": SIDES[1]}
    return flags(named | {"video.frames": 9, "video.fps": 24})


def test_samples_are_written_with_their_sound(words, tmp_path):
    run, shown = tmp_path / "run", tmp_path / "shown"
    given = {"method": "dmd2", "prompts": tmp_path / "prompts.txt", "output": run, "sampler.num-steps": 2}
    given |= {"steps": 1, "validate-every": 0}
    assert main([*words, *flags(given | {"algorithm.batch-size": 2, "algorithm.micro-batch": 1})]) == 0
    assert main(["sample", str(run), "--output", str(shown), "--prompts", str(tmp_path / "prompts.txt")]) == 0
    for number in range(2):
        with av.open(str(shown / f"{number}.mp4")) as file:
            sound = file.streams.audio[0]
            assert (sound.name, sound.rate, sound.codec_context.layout.name) == ("aac", 24000, "stereo")
            values = np.concatenate([frame.to_ndarray() for frame in file.decode(sound)], 1)
        assert values.shape[1] >= 7920 and float(values.std()) > 0.01  # 33 frames of a mel spectrogram of 10 ms
        with av.open(str(shown / f"{number}.mp4")) as file:
            assert len(list(file.decode(video=0))) == 9


@pytest.mark.parametrize("command", ["train", "plan", "preprocess"])
def test_clips_are_refused_because_their_sound_is_not_read(words, tmp_path, capsys, command):
    clips = tmp_path / "clips"
    clips.mkdir()
    pixels = np.random.default_rng(0).integers(256, size=(9, *SIDES, 3)).astype(np.uint8)
    write_exactly(clips / "0.mkv", pixels, 24)
    (clips / "0.txt").write_text(PROMPTS[0])
    given = {
        "train": [*words, *flags({"method": "finetune", "data.path": clips, "output": tmp_path / "run"})],
        "plan": ["plan", *words, "--method", "finetune", "--hardware", "H100"],
        "preprocess": ["preprocess", str(clips), str(tmp_path / "encoded"), *words],
    }
    assert main(given[command]) == 2
    assert "sound" in capsys.readouterr().err


@pytest.mark.parametrize(("key", "ranks"), [("parallel.sequence", 2), ("rollouts.ranks", 4)])
def test_ranks_that_would_share_tokens_are_refused(capsys, key, ranks):
    """Two ranks of a worker share no tokens: each has a branch of guidance."""
    workers = flags({"rollouts.workers": 2, "rollouts.reward-workers": 1, key: ranks})
    given = ["plan", "--recipe", "ltx-2", "--method", "dance_grpo", "--hardware", "8xH200"]
    assert main([*given, *workers]) == 2
    assert f"{key}: student.path is of a family whose tokens 2 ranks cannot share" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("file", "change", "said"),
    [
        ("transformer", {"audio_in_channels": 8}, "LTX2Pipeline cannot be called"),
        ("transformer", {"caption_channels": 12}, "LTX2Pipeline cannot be called"),
        ("connectors", {"caption_channels": 12}, "LTX2Pipeline cannot be called"),
        ("connectors", {"video_connector_num_learnable_registers": 5}, "LTX2Pipeline cannot be called"),
        ("vae", {"latent_channels": 32}, "latents_mean is"),
        ("audio_vae", {"latent_channels": 2}, "LTX2Pipeline cannot be called"),
        ("vocoder", {"hidden_channels": 64}, "vocoder"),
    ],
)
def test_folders_of_another_kind_are_refused(folder, tmp_path, file, change, said):
    odd = changed(folder, tmp_path / "odd", file, change)
    with pytest.raises(UserError, match=said):
        LTX2.latent_shape(odd, 9, *SIDES)
        codec_of(odd)
