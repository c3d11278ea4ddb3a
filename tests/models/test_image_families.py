"""Qwen-Image, SD3.5, HunyuanVideo, LTX-Video, LTX-2: sampled as by diffusers, trained, resumed, exported."""

import json
import math
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cells import cells
from diffusers import (
    FlowMatchEulerDiscreteScheduler,
    HunyuanVideo15Pipeline,
    HunyuanVideo15Transformer3DModel,
    LTX2Pipeline,
    LTXPipeline,
    QwenImagePipeline,
    StableDiffusion3Pipeline,
)
from diffusers.pipelines.qwenimage.pipeline_qwenimage import calculate_shift
from forked import program
from helpers import (
    ALONE,
    OF_CLIPS,
    OF_SAMPLES,
    WAN,
    assert_near,
    assert_one_training,
    assert_same,
    checkpoint_of,
    cut_off,
    flags,
    gradients,
)
from hunyuan15_folder import hunyuan15_folder
from ltx2_folder import ltx2_folder
from ltx_folder import ltx_folder
from PIL import Image
from qwen_image_folder import qwen_image_folder
from real_clips import write_exactly
from sd3_folder import sd3_folder
from torch.utils.flop_counter import FlopCounterMode

from unified_trainer.__main__ import main
from unified_trainer.basics.errors import UserError
from unified_trainer.basics.requests import Request
from unified_trainer.data.loader import make_batch
from unified_trainer.models.base import Family
from unified_trainer.models.blueprint import frozen_config
from unified_trainer.models.diffusers_codec import DiffusersCodec
from unified_trainer.models.encoders import EncoderConfig
from unified_trainer.models.pipeline.calls import LONG
from unified_trainer.models.pipeline.codec import PipelineCodec
from unified_trainer.models.pipeline.family import pipeline_family
from unified_trainer.models.pipeline.hunyuan_video15 import with_masks
from unified_trainer.models.pipeline.known import known
from unified_trainer.models.pipeline.sound import Parts
from unified_trainer.numerics.flow import shift_sigma
from unified_trainer.parallel.meter import Meter
from unified_trainer.roles import blocks
from unified_trainer.roles.adapter import AdapterConfig
from unified_trainer.roles.backbone import Backbone, hold_in_bf16
from unified_trainer.roles.role import Frozen, RoleConfig, Trainable
from unified_trainer.run.plan.shift import note_scheduler, shift_of_size
from unified_trainer.run.registry import METHODS, family_of, method_named
from unified_trainer.run.settings.command_line import parse
from unified_trainer.sampling.solver import SamplerConfig, generate
from unified_trainer.tools.export.scheduler import euler_scheduler
from unified_trainer.tools.load_run import load_role
from unified_trainer.tools.plan.architecture import architecture_of
from unified_trainer.tools.plan.flops import pass_flops
from unified_trainer.tools.plan.network_size import measured, plain_pass
from unified_trainer.tools.plan.passes import decode_bytes, decode_flops
from unified_trainer.tools.sample.sample import videos

pytestmark = pytest.mark.slow

SIDES = (64, 32)
PROMPTS = ("a red circle moving left", 'a picture of an "unknown word" and a big blue square')
SIZE = {"recipe": "tiny", "video.height": SIDES[0], "video.width": SIDES[1], "steps": 2}
SIZE |= {"sampler.num-steps": 3, "validate-every": 0, "student.learning-rate": 1e-3, "student.warmup-updates": 0}
SINGLE = {"algorithm.batch-size": 2, "algorithm.micro-batch": 1}
GROUPS = {"algorithm.num-prompts": 2, "algorithm.num-samples": 2, "algorithm.prompts-per-update": 2}
GROUPS |= {"algorithm.rollout-batch": 2, "algorithm.update-batch": 2}
OWN = dict.fromkeys(("dmd2", "rcm"), SINGLE | {"algorithm.student-every": 1}) | {
    "ode_init": SINGLE | {"algorithm.teacher-steps": 3}
}
OWN |= dict.fromkeys(OF_SAMPLES, GROUPS)
OWN["dance_ppo"] = GROUPS | {"algorithm.num-samples": 1, "algorithm.num-prompts": 2}
CAUSAL = ("self_forcing", "long_self_forcing", "streaming_tuning")
TRAINED = [name for name in METHODS if name not in (*CAUSAL, "flow_dpo", "flow_map")]


QWEN_IMAGE, SD3 = pipeline_family("QwenImagePipeline"), pipeline_family("StableDiffusion3Pipeline")
LTX, HUNYUAN15 = pipeline_family("LTXPipeline"), pipeline_family("HunyuanVideo15Pipeline")
LTX2 = pipeline_family("LTX2Pipeline")
PATCH = 2  # latents of Qwen-Image along the sides of a token


def packed(x: torch.Tensor) -> torch.Tensor:
    """Latents [b, c, 1, h, w] of Qwen-Image as tokens, each of 2 x 2 latents in the order c, dy, dx."""
    b, c, _, height, width = x.shape
    patches = x.reshape(b, c, height // PATCH, PATCH, width // PATCH, PATCH).permute(0, 2, 4, 1, 3, 5)
    return patches.reshape(b, height * width // PATCH**2, c * PATCH**2)


def unpacked(tokens: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """The latents [b, c, 1, h, w] of these tokens."""
    b, _, d = tokens.shape
    patches = tokens.view(b, height // PATCH, width // PATCH, d // PATCH**2, PATCH, PATCH).permute(0, 3, 1, 4, 2, 5)
    return patches.reshape(b, d // PATCH**2, 1, height, width)


@dataclass(frozen=True)
class Case:
    """A family of images, or of videos: its folder, and how its pipeline in diffusers is called."""

    family: Family
    write: Callable[[Path], Path]
    pipeline: Any
    guidance: str  # argument of its call; empty where its guider has it
    first: str  # a weight that every method trains
    published: str  # a model of the hub whose sizes are known
    parameters: int  # of its network
    pairs: Callable[[int, int], int]  # tokens and text rows -> queries times keys in its example
    frames: int = 1
    wrong: tuple[int, str] = (5, "makes images: set --video.frames 1 instead of 5")
    odd: str = "video.height must be a multiple of"  # for a height of 40
    unit: int = 16  # pixels of a token along its sides
    clips: bool = True  # whether it learns from clips
    packed: Callable[[torch.Tensor], torch.Tensor] = lambda x: x[:, :, 0]
    unpacked: Callable[..., torch.Tensor] = lambda x, *_: x[:, :, None]
    options: dict[str, object] = field(default_factory=dict)

    def sample(self, pipeline: Any, scale: float, *, own_guider: bool = False, **given: Any) -> torch.Tensor:
        """What the pipeline returns of both prompts: latents, images, or frames before channels."""
        size = {"height": SIDES[0], "width": SIDES[1]} | ({self.guidance: scale} if self.guidance else {})
        if not self.guidance:
            pipeline.vae.enable_slicing()  # diffusers decodes one video at a time
            guider = pipeline.guider if own_guider else pipeline.guider.new(guidance_scale=scale)
            pipeline.register_modules(guider=guider)
        return pipeline(list(PROMPTS), **size, **self.options, **given, return_dict=False)[0]


class SoundCase(Case):
    """A family whose latents hold a sound, which its pipeline takes and returns beside the video."""

    def sample(self, pipeline: Any, scale: float, *, own_guider: bool = False, **given: Any) -> torch.Tensor:
        """Latents of both, or videos; the pipeline scales the latents of a sound, and gives no normalised ones back."""
        mean, std = pipeline.audio_vae.latents_mean, pipeline.audio_vae.latents_std
        folder = Path(pipeline.config["_name_or_path"])
        layout = known(folder).of_size((self.frames, *SIDES)).sound
        if "latents" in given:
            held = layout.parts(given.pop("latents"))
            sound = layout.latents.packed(held.sound)
            given |= {"latents": held.video.flatten(2).transpose(1, 2), "audio_latents": sound * std + mean}
        size = {"height": SIDES[0], "width": SIDES[1], **self.family.guidance(folder, scale, EncoderConfig())}
        video, sound = pipeline(list(PROMPTS), **size, **self.options, **given, return_dict=False)
        if given["output_type"] != "latent":
            return video
        own = pipeline.vae
        centred = video - own.latents_mean.view(1, -1, 1, 1, 1)
        video = centred * own.config.scaling_factor / own.latents_std.view(1, -1, 1, 1, 1)
        sound = (sound.transpose(1, 2).flatten(2) - mean) / std
        rest = torch.zeros(len(video), math.prod(layout.shape) - video[0].numel() - sound[0].numel())
        return layout.joined(Parts(video, layout.latents.ours(sound), rest))


CASES = {
    "qwen-image": Case(
        QWEN_IMAGE,
        qwen_image_folder,
        QwenImagePipeline,
        "true_cfg_scale",
        "img_in.weight",
        "Qwen/Qwen-Image",
        20_430_401_088,
        pairs=lambda tokens, rows: 2 * (tokens + rows) ** 2,
        odd="it takes video.height 32 in place of 40",
        packed=packed,
        unpacked=unpacked,
    ),
    "sd3": Case(
        SD3,
        sd3_folder,
        StableDiffusion3Pipeline,
        "guidance_scale",
        "pos_embed.proj.weight",
        "stabilityai/stable-diffusion-3.5-medium",
        2_243_171_520,
        pairs=lambda tokens, rows: (
            3 * (tokens + rows) ** 2 + tokens**2
        ),  # one block has an attention of the image alone
        odd="have to be divisible by 16 but are 40",
    ),
    "hunyuan15": Case(
        HUNYUAN15,
        hunyuan15_folder,
        HunyuanVideo15Pipeline,
        "",
        "transformer_blocks.0.attn.to_q.lora_B.weight",
        "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v",
        8_326_608_160,
        pairs=lambda tokens, rows: 2 * (tokens + rows + 256 + 729) ** 2 + rows**2,  # one block refines the text
        frames=5,
        wrong=(4, "it takes video.frames 1 in place of 4"),
        odd="it takes video.height 32 in place of 40",
        packed=lambda x: x,
        unpacked=lambda x, *_: x,
        options={"num_frames": 5},
    ),
    "ltx": Case(
        LTX,
        ltx_folder,
        LTXPipeline,
        "guidance_scale",
        "transformer_blocks.0.attn1.to_q.lora_B.weight",
        "Lightricks/LTX-Video",
        1_923_385_472,
        pairs=lambda tokens, rows: 2 * tokens * (tokens + rows),  # of queries of the video alone
        frames=9,
        wrong=(4, "it takes video.frames 1 in place of 4"),
        odd="have to be divisible by 32 but are 40",
        unit=32,
        packed=lambda x: x.flatten(2).transpose(1, 2),
        unpacked=lambda x, height, width: x.unflatten(1, (-1, height, width)).movedim(-1, 1),
        options={"num_frames": 9},
    ),
    "ltx2": SoundCase(
        LTX2,
        ltx2_folder,
        LTX2Pipeline,
        "guidance_scale",
        "transformer_blocks.0.audio_attn1.to_q.lora_B.weight",
        "Lightricks/LTX-2",
        18_876_174_592,
        # the 9 tokens of the sound have half the width
        pairs=lambda tokens, rows: 2 * tokens * (tokens + rows) + 9 * (9 + rows) + 2 * tokens * 9,
        frames=9,
        wrong=(4, "it takes video.frames 1 in place of 4"),
        odd="have to be divisible by 32 but are 40",
        unit=32,
        clips=False,
        packed=lambda x: x,
        unpacked=lambda x, *_: x,
        options={"num_frames": 9},
    ),
}


KINDS = ("finetune", "dmd2", "dance_grpo")  # clips, samples against a teacher, and rewards


def families_of(method: str) -> list[str]:
    able = [name for name, case in CASES.items() if case.clips or method not in OF_CLIPS]
    if method in KINDS:
        return able
    able.remove("hunyuan15")  # its pipeline pads each text to 1985 tokens
    return [able[TRAINED.index(method) % len(able)]]


LEARNS = [(name, method) for method in TRAINED for name in families_of(method)]


@pytest.fixture(scope="session", params=list(CASES))
def case(request) -> Case:
    return CASES[request.param]


@pytest.fixture(scope="session")
def folders(tmp_path_factory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("models")
    return {one.family.pipelines[0]: one.write(place / name) for name, one in CASES.items()}


@pytest.fixture
def folder(case, folders) -> Path:
    return folders[case.family.pipelines[0]]


@pytest.fixture
def qwen(folders) -> Path:
    return folders["QwenImagePipeline"]


def codec_of(case: Case, folder: Path) -> DiffusersCodec:
    return case.family.codec(folder, torch.device("cpu"), EncoderConfig())


@pytest.fixture(scope="module")
def pictures(tmp_path_factory) -> Path:
    """A folder of two images with captions, of other sizes than the run's."""
    place = tmp_path_factory.mktemp("pictures")
    for number, prompt in enumerate(PROMPTS):
        pixels = torch.randint(0, 256, (80, 70 + number, 3), generator=torch.Generator().manual_seed(number))
        Image.fromarray(pixels.byte().numpy()).save(place / f"{number}.png")
        (place / f"{number}.txt").write_text(prompt)
    return place


@pytest.fixture(scope="module")
def clips(tmp_path_factory) -> Path:
    """A folder of two videos with captions."""
    place = tmp_path_factory.mktemp("clips")
    for number, prompt in enumerate(PROMPTS):
        write_exactly(
            place / f"{number}.mkv",
            np.random.default_rng(number).integers(256, size=(5, 80, 72, 3)).astype(np.uint8),
            8,
        )
        (place / f"{number}.txt").write_text(prompt)
    return place


@pytest.fixture
def data(case, pictures, clips) -> Path:
    return pictures if case.frames == 1 else clips


@pytest.fixture(scope="module")
def prompts(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("prompts") / "prompts.txt"
    file.write_text("\n".join(PROMPTS))
    return file


def model_of(family: Family, folder: Path):
    model = family.model(folder, "transformer")
    model.read(ALONE)
    return model


@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_diffusers_samples_as_we_do(case, folder, scale):
    """Latents and pixels, with prompts of different lengths and the pipeline's own rule of guidance."""
    codec = codec_of(case, folder)
    sampler = SamplerConfig(num_steps=4, shift=3.0, guidance_scale=scale, negative_prompt="a blue square")
    shape = codec.latent_shape(case.frames, *SIDES)
    noise = torch.randn(2, *shape, generator=torch.Generator().manual_seed(1))
    batch = make_batch(codec, Request.of(PROMPTS), sampler.negative_prompt, shape, prompt_ids=[0, 1], sample_ids=[0, 1])
    teacher = Frozen("teacher", Backbone(case.family.model(folder, "transformer"), ALONE), RoleConfig())
    ours = generate(teacher, noise, batch, sampler, lambda _: noise)
    scheduler = euler_scheduler(sampler, given=case.family.given_levels(folder))
    pipeline = case.pipeline.from_pretrained(folder, scheduler=scheduler)
    given = {"negative_prompt": [sampler.negative_prompt] * 2, "num_inference_steps": 4, "latents": case.packed(noise)}
    latents = case.unpacked(case.sample(pipeline, scale, **given, output_type="latent"), *shape[2:])
    torch.testing.assert_close(ours, latents, rtol=0, atol=1e-5)
    pixels = case.sample(pipeline, scale, **given, output_type="pt")
    torch.testing.assert_close(frames_of(codec.decode(ours)), pixels, rtol=0, atol=1e-5)


def frames_of(videos: torch.Tensor) -> torch.Tensor:
    """As diffusers has them: images, or frames before channels."""
    return videos.transpose(1, 2).squeeze(1)


def test_padding_of_a_prompt_is_masked(qwen):
    """The velocity is that of the unpadded embedding."""
    codec = codec_of(CASES["qwen-image"], qwen)
    model, padded = model_of(QWEN_IMAGE, qwen), codec.encode_text(PROMPTS)
    x, sigma, _ = model.example()
    text, mask = (f"encoder_hidden_states{end}" for end in ("", "_mask"))
    lengths = padded[mask].sum(1).tolist()
    assert lengths[0] != lengths[1] and padded[text].shape[1] > max(lengths)
    with torch.no_grad():
        for row, length in enumerate(lengths):
            alone = type(padded)({name: padded[name][row : row + 1, : int(length)] for name in (text, mask)})
            expected = model.velocity(x, sigma, alone)
            torch.testing.assert_close(model.velocity(x, sigma, padded.take([row])), expected, rtol=0, atol=1e-5)


def test_guidance_keeps_the_norm_of_every_token(qwen):
    cond, uncond = torch.randn(2, 2, 16, 1, 8, 4, generator=torch.Generator().manual_seed(0))
    model = model_of(QWEN_IMAGE, qwen)
    guided = model.guide(cond, uncond, torch.tensor([1.0, 4.0]))
    torch.testing.assert_close(packed(guided).norm(dim=-1), packed(cond).norm(dim=-1))
    torch.testing.assert_close(guided[0], cond[0])
    plain = uncond[1] + 4 * (cond[1] - uncond[1])
    assert float(torch.cosine_similarity(packed(guided[1:]), packed(plain[None]), dim=-1).min()) > 1 - 1e-5
    assert float((guided[1] - plain).abs().max()) > 0.5


def words(method: str, folder: Path, data: Path, output: Path, frames: int = 1, **more: object) -> list[str]:
    named = {"method": method, "student.path": folder, "output": output, "video.frames": frames}
    named |= {"video.fps": family_of("student", str(folder))[0].fps or 25} | SIZE | OWN.get(method, SINGLE)
    named |= {"data.path": data} if method in OF_CLIPS else {"prompts": data}
    return flags(named | {key.replace("__", "."): value for key, value in more.items()})


@pytest.mark.parametrize(("case", "method"), cells(LEARNS), indirect=["case"])
def test_every_method_trains_and_resumes_bit_for_bit(case, folder, prompts, data, tmp_path, method):
    """Each method with one of the families, and one of each kind with all. One, of many weights, trains adapters."""
    data = data if method in OF_CLIPS else prompts
    roles = [name for name, role in method_named(method).roles.items() if issubclass(role.kind, Trainable)]
    adapters = {f"{role}__adapter.rank": 2 for role in roles} if "lora" in case.first else {}
    more = {"sampler__guidance_scale": 3.0} if method in ("dance_grpo", "finetune") else {}
    more |= {"checkpoint-every": 1} | adapters
    given = words(method, folder, data, tmp_path / "whole", case.frames, **more)
    assert main(given) == 0
    first, whole = (checkpoint_of(tmp_path / "whole", step) for step in (1, 2))
    weight = f"student/weights/{case.first}"
    assert not torch.equal(first[weight], whole[weight])
    assert main(["--resume", str(cut_off(tmp_path / "whole", tmp_path / "half", 1))]) == 0
    assert_same(checkpoint_of(tmp_path / "half", 2), whole)


@pytest.mark.parametrize("sides", [(512, 512), (1328, 1328), (256, 256)])
def test_the_shift_of_a_size_is_the_pipelines_own(qwen, sides):
    """The level that diffusers makes of 1/2 by its shift of that many tokens."""
    tokens = QWEN_IMAGE.tokens(qwen, QWEN_IMAGE.latent_shape(qwen, 1, *sides))
    scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(qwen / "scheduler", shift_terminal=None)
    config = scheduler.config
    mu = calculate_shift(
        tokens, config.base_image_seq_len, config.max_image_seq_len, config.base_shift, config.max_shift
    )
    scheduler.set_timesteps(sigmas=[1.0, 0.5], mu=mu)
    shift = shift_of_size(qwen, tokens)
    assert float(scheduler.sigmas[1]) == pytest.approx(shift_sigma(0.5, shift), abs=1e-6)
    assert note_scheduler(qwen, tokens, SamplerConfig(shift=shift)) == "" and shift_of_size(WAN, tokens) == 3
    said = f"the model's scheduler has {shift:.3f} for samples of {tokens} tokens"
    assert said in note_scheduler(qwen, tokens, SamplerConfig(shift=9.0))


def test_levels_of_a_size_are_those_of_the_folders_scheduler(folders):
    """Of LTX-Video: shifted by the number of tokens, and stretched to a last level of 0.1; an export has them too."""
    folder, tokens = folders["LTXPipeline"], 1500
    scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(folder / "scheduler")
    mu = calculate_shift(tokens, 1024, 4096, 0.95, 2.05)
    scheduler.set_timesteps(sigmas=np.linspace(1, 1 / 5, 5), mu=mu)
    sampler = SamplerConfig(num_steps=5, shift=shift_of_size(folder, tokens), terminal=0.1)
    torch.testing.assert_close(sampler.sigmas().float(), scheduler.sigmas, rtol=0, atol=1e-6)
    given, own = euler_scheduler(sampler, given=True), euler_scheduler(sampler, given=False)
    given.set_timesteps(sigmas=np.linspace(1, 1 / 5, 5), mu=mu)
    own.set_timesteps(5)
    for exported in (given, own):
        torch.testing.assert_close(exported.sigmas, scheduler.sigmas, rtol=0, atol=1e-6)


def test_a_scheduler_whose_law_is_none_is_refused(tmp_path):
    (tmp_path / "scheduler").mkdir()
    config = {"use_dynamic_shifting": True, "base_image_seq_len": 256, "max_image_seq_len": 256}
    (tmp_path / "scheduler" / "scheduler_config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"max_image_seq_len must be more than base_image_seq_len, 256, not 256"):
        shift_of_size(tmp_path, 1024)


def test_methods_that_make_no_sense_say_why(case, folder, prompts, tmp_path, capsys):
    """There is no causal form, frames are whole latents, and sides are whole tokens."""
    more, (frames, wrong) = {"sampler__chunks.chunk-frames": 1}, case.wrong
    for method, changes, said in (
        ("self_forcing", more, "has no causal form"),
        ("ode_init", more, "has no causal form"),
        ("dmd2", {"video__frames": frames}, wrong),
        ("dmd2", {"video__height": 40}, case.odd),
    ):
        assert main(words(method, folder, prompts, tmp_path / "run", case.frames, **changes)) == 2
        assert said in capsys.readouterr().err


@pytest.mark.parametrize("command", [[], ["plan"]])
def test_roles_of_two_families_are_refused(folders, prompts, tmp_path, capsys, command):
    """Also where their latents have as many channels: a network cannot read the conditions of another family."""
    more = {"teacher__path": folders["StableDiffusion3Pipeline"]}
    given = words("dmd2", folders["QwenImagePipeline"], prompts, tmp_path / "run", **more)
    assert main([*command, *given]) == 2
    assert "teacher.path is of the family of StableDiffusion3Pipeline, which cannot read" in capsys.readouterr().err


def test_an_image_of_more_tokens_than_positions_is_refused(folders):
    with pytest.raises(UserError, match=r"192 x 208: ValueError: Width \(13\) cannot be greater"):
        SD3.latent_shape(folders["StableDiffusion3Pipeline"], 1, 192, 208)


@pytest.mark.parametrize(
    ("name", "field"),
    [("sd3", "joint_attention_dim"), ("sd3", "pooled_projection_dim"), ("hunyuan15", "text_embed_2_dim")],
)
def test_text_encoders_of_another_network_are_refused(folders, tmp_path, name, field):
    """Before any weight is read."""
    shutil.copytree(folders[CASES[name].family.pipelines[0]], tmp_path / "odd")
    file = tmp_path / "odd" / "transformer" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {field: 96}))
    with pytest.raises(UserError, match="Pipeline cannot be called"):
        codec_of(CASES[name], tmp_path / "odd")


@pytest.mark.parametrize("case", ["sd3", "hunyuan15", "ltx", "ltx2"], indirect=True)
def test_tiles_are_those_of_the_vae(case, folder):
    """Larger frames are decoded in tiles that overlap, smaller ones whole; `plan` counts a tile's memory."""
    size, side = 4 * case.unit, 6 * case.unit
    whole, tiled = codec_of(case, folder), case.family.codec(folder, torch.device("cpu"), EncoderConfig(vae_tile=size))
    small, large = (
        torch.randn(1, *whole.latent_shape(case.frames, n, n), generator=torch.Generator().manual_seed(n))
        for n in (size, side)
    )
    assert torch.equal(tiled.decode(small), whole.decode(small))
    assert tiled.decode(large).shape == whole.decode(large).shape == (1, 3, case.frames, side, side)
    assert not torch.allclose(tiled.decode(large), whole.decode(large), atol=1e-4)
    if case.family in (LTX, LTX2):  # the layers of its small decoder hold less than its video
        return
    vae = frozen_config(json.loads((folder / "vae" / "config.json").read_text()))
    shape = whole.latent_shape(1, 2 * size, size)
    in_tiles, at_once = (
        decode_bytes(case.family.blueprint(folder).vae, vae, shape, 1, half=False, gradient=False, tile=tile)
        for tile in (size, 0)
    )
    assert 0.1 < in_tiles / at_once < 0.9


def test_a_network_that_reads_where_a_step_ends_is_refused(folders):
    config = json.loads((folders["HunyuanVideo15Pipeline"] / "transformer" / "config.json").read_text())
    with torch.device("meta"):
        network = HunyuanVideo15Transformer3DModel.from_config(config | {"use_meanflow": True})
    with pytest.raises(UserError, match="distilled to few steps and reads where each step ends"):
        with_masks(network)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"guidance_rescale": 0.7}, "guidance: ClassifierFreeGuidance has a rule of its own"),
        ({"_class_name": "AdaptiveProjectedMixGuidance"}, "guidance: AdaptiveProjectedMixGuidance has a rule"),
        ({"_class_name": "AdaptiveProjectedGuidance"}, "guidance is projected"),
    ],
)
def test_guidance_by_a_rule_of_its_own_is_said(folders, tmp_path, change, said):
    shutil.copytree(folders["HunyuanVideo15Pipeline"], tmp_path / "odd")
    file, size = tmp_path / "odd" / "guider" / "guider_config.json", (5, *SIDES)
    assert "rule of its own" not in HUNYUAN15.describe(folders["HunyuanVideo15Pipeline"], size)
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    index = json.loads((tmp_path / "odd" / "model_index.json").read_text())
    index["guider"][1] = change.get("_class_name", index["guider"][1])
    (tmp_path / "odd" / "model_index.json").write_text(json.dumps(index))
    assert said in HUNYUAN15.describe(tmp_path / "odd", size)


def test_a_decoder_with_noise_of_its_own_gives_a_sample_one_video(folders, tmp_path):
    """In any batch, in slices, and whatever the state of torch's generator is, which stays as it is."""
    whole, slices = (
        LTX.codec(ltx_folder(tmp_path / "noisy", noisy=True), torch.device("cpu"), EncoderConfig(vae_slicing=slicing))
        for slicing in (False, True)
    )
    quiet = codec_of(CASES["ltx"], folders["LTXPipeline"])
    latents = torch.randn(3, *whole.latent_shape(9, *SIDES), generator=torch.Generator().manual_seed(0))
    state, videos = torch.get_rng_state(), whole.decode(latents)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(1)
    for codec in (whole, slices):
        torch.testing.assert_close(codec.decode(latents[1:]), videos[1:], rtol=0, atol=1e-5)
    assert not torch.allclose(quiet.decode(latents), videos, atol=1e-2)


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("transformer/config.json", {"caption_channels": 96}),
        ("transformer/config.json", {"cross_attention_dim": 8}),
        ("transformer/config.json", {"out_channels": 8}),
        ("transformer/config.json", {"patch_size": 2}),
        ("vae/config.json", {"patch_size": 2}),
        ("vae/config.json", {"latent_channels": 8}),
    ],
)
def test_components_that_do_not_fit_each_other_are_refused(folders, tmp_path, file, change):
    shutil.copytree(folders["LTXPipeline"], tmp_path / "odd")
    (tmp_path / "odd" / file).write_text(json.dumps(json.loads((tmp_path / "odd" / file).read_text()) | change))
    with pytest.raises(
        UserError, match=r"LTXPipeline (cannot be called|makes no videos of this size)|vae has another|but by config"
    ):
        LTX.latent_shape(tmp_path / "odd", 9, *SIDES)
        LTX.codec(tmp_path / "odd", torch.device("cpu"), EncoderConfig())


def test_positions_in_seconds_bind_the_rate_of_frames(folders, prompts, tmp_path, capsys):
    given = words("dmd2", folders["LTXPipeline"], prompts, tmp_path / "run", 9, video__fps=16)
    encoded = {"recipe": "tiny", "student.path": folders["LTXPipeline"], "video.frames": 9, "video.fps": 16}
    for command in (
        given,
        ["plan", *given, "--hardware", "H100"],
        ["plan", "--recipe", "ltx-video", "--method", "dmd2", "--hardware", "H100", "--video.fps", "16"],
        ["preprocess", str(prompts), str(tmp_path / "encoded"), *flags(encoded)],
    ):
        assert main(command) == 2
        assert "video.fps must be 25, not 16: the positions of this model's tokens are" in capsys.readouterr().err


@pytest.mark.parametrize("case", ["qwen-image", "sd3"], indirect=True)
def test_images_of_a_folder_are_clips_of_one_frame(folder, pictures, tmp_path, capsys):
    """preprocess encodes them, and a training on the encoded ones has the losses of one on the images."""
    for name in ("0.png", "0.txt"):
        (tmp_path / "one").mkdir(exist_ok=True)
        (tmp_path / "one" / name).symlink_to(pictures / name)
    size = {"video.height": SIDES[0], "video.width": SIDES[1], "video.frames": 1, "student.path": folder}
    assert (
        main(["preprocess", str(tmp_path / "one"), str(tmp_path / "encoded"), *flags({"recipe": "tiny"} | size)]) == 0
    )
    losses = []
    for data in ("one", "encoded"):
        run = tmp_path / f"run on {data}"
        more = {"algorithm__batch-size": 1, "steps": 1}
        assert main(words("finetune", folder, tmp_path / data, run, **more)) == 0
        losses.append(json.loads((run / "metrics.jsonl").read_text().splitlines()[0])["train/loss"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert main(words("finetune", WAN, pictures, tmp_path / "of a video", video__frames=5)) == 2
    assert "an image is no video of the 5 frames of video.frames" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
@pytest.mark.parametrize(
    ("case", "memory"), cells(product(CASES, ["full", "selective", "compiled"])), indirect=["case"]
)
def test_recomputed_and_compiled_blocks_give_the_same_gradient(case, folder, monkeypatch, memory, unchecked):
    monkeypatch.setattr(blocks, "BACKEND", "aot_eager")
    codec = codec_of(case, folder)
    cond, found = codec.encode_text(PROMPTS), []
    x = torch.randn(2, *codec.latent_shape(case.frames, *SIDES), generator=torch.Generator().manual_seed(0))
    for kind in ("none", memory):
        how = {"compile": True} if kind == "compiled" else {"recompute": kind}
        backbone = Backbone(case.family.model(folder, "transformer"), ALONE, trained=True, **how)
        with backbone.running("student") as model:
            model.velocity(x, torch.tensor([0.3, 0.9]), cond).square().mean().backward()
        found.append(gradients(backbone.model.network))
    unused = {name: found[1].pop(name) for name in found[1].keys() - found[0].keys()}
    last = f"transformer_blocks.{len(backbone.model.blocks) - 1}."
    assert all(last in name and not bool(x.any()) for name, x in unused.items())  # of the last text
    assert_near(found[1], found[0])


@pytest.mark.ranks
def test_two_ranks_share_the_weights(case, folder, prompts, tmp_path):
    more = {"student__adapter.rank": 2, "critic__adapter.rank": 2, "video__frames": case.frames}
    assert main(words("dmd2", folder, prompts, tmp_path / "one", **more)) == 0
    given = words("dmd2", folder, prompts, tmp_path / "two", device="cpu", **more)
    done = program("-m", "unified_trainer", *given, ranks=2)
    assert done.returncode == 0, done.stderr
    assert_one_training(tmp_path / "one", tmp_path / "two", 2)


# Adapters of all, and all weights of an image and of a video with sound.
EXPORTED = [*((name, 2) for name in CASES), ("qwen-image", 0), ("ltx2", 0)]


@pytest.mark.parametrize(("case", "rank"), EXPORTED, indirect=["case"])
def test_diffusers_samples_an_export_as_we_do(case, folder, prompts, data, tmp_path, rank):
    """Up to rounding; a published adapter is loaded on the base, and samples are images."""
    more = {"student__adapter.rank": rank, "sampler__guidance-scale": 3.0, "validate-every": 2}
    more |= {"student__adapter.alpha": 4} if rank else {}
    more |= {"validation__prompts": prompts, "validation.num-samples": 2}
    run, learnt = tmp_path / "run", ("dance_grpo", prompts)
    if case.clips:
        learnt, more = ("finetune", data), more | {"reward.path": ""}
    assert main(words(learnt[0], folder, learnt[1], run, case.frames, **more)) == 0
    shown = run / "validation" / "step_2"
    kind = "png" if case.frames == 1 else "mp4"
    assert sorted(file.name for file in shown.iterdir()) == [
        f"0.{kind}",
        f"1.{kind}",
        "contact_sheet.png",
        "samples.jsonl",
    ]
    assert (
        main(["sample", str(run), "--output", str(tmp_path / "shown"), "--prompts", str(prompts), "--seed", "5"]) == 0
    )
    role = load_role(str(run), "student", None, ALONE, causal=True)
    ours = frames_of(torch.cat(list(videos(role, Request.of(PROMPTS), 5, 2))))
    if kind == "png":
        with Image.open(tmp_path / "shown" / "1.png") as opened:
            picture = torch.from_numpy(np.array(opened)).permute(2, 0, 1) / 255
        torch.testing.assert_close(picture, ours[1], rtol=0, atol=1 / 255)
    assert main(["export", str(run), str(tmp_path / "out")]) == 0
    about = json.loads((tmp_path / "out" / "unified_trainer.json").read_text())
    given = case.family.guidance(folder, 3.0, EncoderConfig())
    guidance = ", ".join(f"{name}={scale}" for name, scale in given.items())
    guidance = guidance if case.guidance else "the scale in guider/guider_config.json"
    assert f"num_inference_steps=3, {guidance} and the run's negative_prompt" in about["how"]
    assert (
        f"pipeline_tag: text-to-{'image' if kind == 'png' else 'video'}" in (tmp_path / "out" / "README.md").read_text()
    )
    made = [case.pipeline.from_pretrained(tmp_path / "out")]
    if rank:
        assert main(["export", str(run), str(tmp_path / "lora"), "--adapter", "published"]) == 0
        scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(tmp_path / "out" / "scheduler")
        made.append(case.pipeline.from_pretrained(folder, scheduler=scheduler))
        if case.family is HUNYUAN15:  # its pipeline has no load_lora_weights
            made[1].transformer.load_lora_adapter(tmp_path / "lora", weight_name="model.safetensors")
        else:
            made[1].load_lora_weights(tmp_path / "lora", weight_name="model.safetensors")
    for pipeline, own_guider in zip(made, (True, False), strict=False):
        noise = [torch.Generator().manual_seed(5 + i) for i in range(2)]
        given = {"negative_prompt": [""] * 2, "num_inference_steps": 3, "generator": noise, "output_type": "pt"}
        pixels = case.sample(pipeline, 3.0, own_guider=own_guider, **given)
        torch.testing.assert_close(pixels, ours, rtol=0, atol=2e-5)


def planned_pass(case: Case, folder: Path, model, inputs):
    """The FLOPs that `plan` counts for a pass over inputs."""
    x, _, cond = inputs
    config = frozen_config(json.loads((folder / "transformer" / "config.json").read_text()))
    return plain_pass(case.family.blueprint(folder).model, config, tuple(x.shape[1:]), text_rows(cond))


def text_rows(cond) -> int:
    return next(x.shape[1] for x in cond.tensors.values() if x.ndim == 3)


def test_flops_of_meter_and_plan_are_those_that_torch_counts(case, folder):
    model = model_of(case.family, folder)
    x, sigma, cond = model.example()
    counter, meter = FlopCounterMode(display=False), Meter(torch.device("cpu"))
    Backbone(model, ALONE)
    with counter, torch.no_grad(), meter.measure():
        model.velocity(x, sigma, cond)
    tokens = case.family.tokens(folder, tuple(x.shape[1:]))
    attention = 4 * 24 * case.pairs(tokens, text_rows(cond))  # torch knows no attention of a CPU
    assert (meter.tokens, meter.flops) == (tokens, counter.get_total_flops() + attention)
    plain = planned_pass(case, folder, model, (x, sigma, cond))
    planned = pass_flops(measured(model), plain)
    assert (planned.forward, planned.attention, plain.tokens) == (meter.flops, attention, meter.tokens)


def test_sizes_of_an_adapter_and_of_weights_in_fp32_are_those_of_a_role(case, folder):
    model = model_of(case.family, folder)
    size, rounded = measured(model), model_of(case.family, folder).network.requires_grad_(False)
    hold_in_bf16(rounded)
    assert size.small == sum(p.numel() for p in rounded.parameters() if p.dtype == torch.float32)
    assert (len(size.kinds) == 1) == (case.family is not SD3)  # Stable Diffusion's last block has fewer layers
    backbone = Backbone(model, ALONE, trained=False, adapters={"role": AdapterConfig(rank=2)})
    assert size.adapter(2) == sum(p.numel() for p in backbone.weights("role").values())
    meter, inputs = Meter(torch.device("cpu")), model.example()
    with meter.measure(), backbone.running("role"):
        model.velocity(*inputs).square().mean().backward()
    assert meter.flops == pass_flops(size, planned_pass(case, folder, model, inputs), rank=2).trained


def test_flops_of_encoders_and_decoder_are_those_of_the_layers_that_run(case, folder):
    """A tower of vision and a head of the vocabulary do not; torch counts the middle's attention of the VAE too."""
    codec, ran = codec_of(case, folder), list[int]()

    def note(layer, inputs, _output):
        ran.append(2 * inputs[0].numel() // layer.in_features * layer.weight.numel())

    def listen(*encoders):
        for layer in (layer for encoder in encoders for layer in encoder.modules() if type(layer) is torch.nn.Linear):
            layer.register_forward_hook(note)

    codec.encode_text(PROMPTS[1:])
    if isinstance(codec, PipelineCodec):
        with codec._calling(codec._text_networks()) as pipeline:
            listen(*(pipeline.pipe.components[name] for name in codec._text_networks()))
            pipeline.call([LONG], codec._facts.size, Image.new("RGB", (64, 64)), stop=True)
        vae = codec._parts["vae"]
    else:
        with codec._text_encoder.in_use() as encoder:
            listen(encoder)
            codec.embed(encoder, LONG)
        vae = codec._vae
    blueprint = case.family.blueprint(folder)
    assert blueprint.encode_flops() == sum(ran)
    kind, config = blueprint.vae, json.loads((folder / "vae" / "config.json").read_text())
    with vae.in_use() as vae, FlopCounterMode(display=False) as counter, torch.no_grad():
        kind.decoded(vae, torch.zeros(1, *(shape := codec.latent_shape(case.frames, *SIDES))))
    counted = decode_flops(kind, frozen_config(config), shape, half=False)
    assert counted == pytest.approx(counter.get_total_flops(), rel=0.03)


def test_plan_knows_the_sizes_of_a_folder_and_of_the_published_model(case, folder, prompts, tmp_path, capsys):
    given, shape = words("dance_grpo", folder, prompts, tmp_path / "run", case.frames), (case.frames, *SIDES)
    run = parse(given)
    found, model = architecture_of("student", str(folder), run), model_of(case.family, folder)
    codec = codec_of(case, folder)
    assert found.size.parameters == sum(p.numel() for p in model.network.parameters())
    assert found.size.blocks == tuple(sum(p.numel() for p in block.parameters()) for block in model.blocks)
    assert found.blueprint.text_shapes == codec.text_shapes
    latents = case.family.latent_shape(folder, *shape)
    assert found.latent_shape(*shape) == latents
    assert found.plain_pass(latents).tokens == case.family.tokens(folder, latents)
    published = architecture_of("student", case.published, run)
    assert published.size.parameters == case.parameters
    for wrong, said in (((case.wrong[0], 512, 512), case.wrong[1]), ((case.frames, 40, 512), case.odd)):
        with pytest.raises(UserError, match=re.escape(said)):
            published.latent_shape(*wrong)
    assert main(["plan", *given, "--hardware", "2xH100"]) == 0
    assert main(["plan", *given, "--hardware", "H100", "--sampler.chunks.chunk-frames", "1"]) == 2
    assert "has no causal form" in capsys.readouterr().err


def test_a_prompt_of_more_tokens_than_the_text_encoder_reads_is_told(case, folder):
    longest, numbers = codec_of(case, folder).cut([PROMPTS[1], "word " * 4096])
    assert numbers == [1] and 0 < longest < 4096
