"""Networks with a condition image: sampled as by diffusers, trained by every method, resumed and exported."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline, WanImageToVideoPipeline
from diffusers.utils import dynamic_modules_utils
from helpers import ALONE, OF_CLIPS, OF_SAMPLES, assert_same, checkpoint_of, flags
from i2v_folder import i2v_folder
from PIL import Image as Picture
from ti2v_folder import ti2v_folder

from unified_trainer.__main__ import main
from unified_trainer.basics.requests import Image, Request
from unified_trainer.data.loader import make_batch
from unified_trainer.models.encoders import EncoderConfig
from unified_trainer.models.wan.family import WAN
from unified_trainer.roles.backbone import Backbone
from unified_trainer.roles.experts import ExpertPair
from unified_trainer.roles.role import Frozen, RoleConfig
from unified_trainer.run.registry import METHODS
from unified_trainer.sampling.solver import SamplerConfig, generate
from unified_trainer.tools.export.scheduler import euler_scheduler
from unified_trainer.tools.load_run import load_role
from unified_trainer.tools.sample.sample import videos, with_images

pytestmark = pytest.mark.slow

FRAMES, HEIGHT, WIDTH = 5, 64, 64
KINDS = ("ti2v", "i2v", "i2v with clip")
PROMPTS = ("a red circle moving left", "blue square moves up")
SAMPLER = SamplerConfig(num_steps=3, shift=5.0, guidance_scale=3.0, negative_prompt="a blue square")


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("models")
    made = [ti2v_folder(place / "0"), i2v_folder(place / "1"), i2v_folder(place / "2", clip=True)]
    return dict(zip(KINDS, made, strict=True))


@pytest.fixture(scope="module")
def table(tmp_path_factory) -> Path:
    """Two prompts with an image each, of the size of the videos and of another one."""
    place, draw = tmp_path_factory.mktemp("prompts"), np.random.default_rng(0)
    rows = []
    for number, (prompt, size) in enumerate(zip(PROMPTS, ((HEIGHT, WIDTH), (100, 90)), strict=True)):
        pixels = draw.integers(0, 255, (*size, 3), dtype=np.uint8)
        Picture.fromarray(pixels).save(place / f"{number}.png")
        rows.append(json.dumps({"prompt": prompt, "image": f"{number}.png"}))
    (place / "prompts.jsonl").write_text("\n".join(rows))
    return place / "prompts.jsonl"


def picture(file: Path) -> Picture.Image:
    with Picture.open(file) as opened:
        return opened.copy()


def teacher_of(folder: Path) -> Frozen:
    names, boundary = WAN.networks(folder)
    networks = [Backbone(WAN.model(folder, name), ALONE) for name in names]
    return Frozen("teacher", ExpertPair(*networks, boundary) if boundary else networks[0], RoleConfig())


@pytest.mark.parametrize("kind", KINDS)
def test_diffusers_samples_as_we_do(folders, table, kind):
    """Both branches of guidance have the image; latents and pixels are equal up to rounding."""
    folder, file = folders[kind], table.parent / "0.png"
    codec = WAN.codec(folder, torch.device("cpu"), EncoderConfig())
    shape = codec.latent_shape(FRAMES, HEIGHT, WIDTH)
    noise = torch.randn(1, *shape, generator=torch.Generator().manual_seed(1))
    uncond = codec.encode_text([SAMPLER.negative_prompt])
    requests = [Request(PROMPTS[0], (Image.read(file, "the test"),))]
    batch = make_batch(codec, requests, uncond, shape, prompt_ids=[0], sample_ids=[0])
    ours = generate(teacher_of(folder), noise, batch, SAMPLER, lambda _: noise)
    pipeline = WanImageToVideoPipeline.from_pretrained(folder, scheduler=euler_scheduler(SAMPLER, given=False))
    options = {"height": HEIGHT, "width": WIDTH, "num_frames": FRAMES, "num_inference_steps": SAMPLER.num_steps}
    options |= {"guidance_scale": SAMPLER.guidance_scale, "negative_prompt": SAMPLER.negative_prompt}
    options |= {
        "prompt": PROMPTS[0],
        "image": picture(file),
        "latents": noise,
        "max_sequence_length": codec.text_tokens,
    }
    latents = pipeline(**options, output_type="latent").frames
    torch.testing.assert_close(ours, latents, rtol=0, atol=1e-5)
    pixels = pipeline(**options, output_type="pt").frames.movedim(1, 2)
    torch.testing.assert_close(codec.decode(ours), pixels, rtol=0, atol=1e-5)
    other = make_batch(
        codec,
        [Request(PROMPTS[0], (Image.read(table.parent / "1.png", "the test"),))],
        uncond,
        shape,
        prompt_ids=[0],
        sample_ids=[0],
    )
    changed = generate(teacher_of(folder), noise, other, SAMPLER, lambda _: noise)
    assert float((changed - ours)[:, :, 1:].abs().max()) > 0.01  # frames that no image gives


SIZE = {"recipe": "tiny", "video.frames": FRAMES, "video.height": HEIGHT, "video.width": WIDTH, "sampler.num-steps": 3}
SIZE |= {"steps": 2, "validate-every": 0, "student.learning-rate": 1e-3, "student.warmup-updates": 0}
SINGLE = {"algorithm.batch-size": 2, "algorithm.micro-batch": 1}
GROUPS = {"algorithm.num-prompts": 2, "algorithm.num-samples": 2, "algorithm.prompts-per-update": 2}
GROUPS |= {"algorithm.rollout-batch": 2, "algorithm.update-batch": 2}
REWARD = {"reward.frames": "all"}
OWN = {"dmd2": SINGLE | {"algorithm.student-every": 1}, "reward_gradient": SINGLE | REWARD}
OWN |= {"ode_init": SINGLE | {"algorithm.teacher-steps": 3}}
OWN |= dict.fromkeys(OF_SAMPLES, GROUPS | REWARD)
OWN["dance_ppo"] = OWN["dance_ppo"] | {"algorithm.num-samples": 1, "algorithm.num-prompts": 2}
OWN |= dict.fromkeys(OF_CLIPS, SINGLE | {"data.num-clips": 2, "video.frames": 17, "data.first-frame": True})
REFUSED = {
    "flow_dpo": "pairs of clips have two first frames",
    "self_forcing": "a causal student takes no condition image",
}


def words(method: str, folder: Path, table: Path, output: Path, **more: object) -> list[str]:
    prompts = {} if method in OF_CLIPS else {"prompts": table}
    named = {"method": method, "student.path": folder, "output": output, "validation.prompts": table}
    named |= prompts | SIZE | OWN.get(method, SINGLE) | more
    return flags({key.replace("__", "."): value for key, value in named.items()})


@pytest.mark.parametrize("method", [name for name in METHODS if name not in REFUSED])
def test_every_method_trains_and_resumes_bit_for_bit(folders, table, tmp_path, method):
    folder = folders[KINDS[len(method) % 3]]
    assert main(words(method, folder, table, tmp_path / "whole")) == 0
    assert main(words(method, folder, table, tmp_path / "half", steps=1)) == 0
    assert main(["--resume", str(tmp_path / "half"), "--steps", "2"]) == 0
    whole, half = (checkpoint_of(tmp_path / name, 2) for name in ("whole", "half"))
    assert_same(half, whole)


@pytest.mark.parametrize(("method", "said"), REFUSED.items())
def test_a_method_that_makes_no_sense_says_why(folders, table, tmp_path, capsys, method, said):
    more = {"sampler__chunks.chunk-frames": 1} if method == "self_forcing" else {"data__first-frame": True}
    assert main(words(method, folders["i2v"], table, tmp_path / "run", **more)) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rank", "memory"), [(0, "none"), (2, "full")])
def test_an_export_makes_the_videos_of_sample(folders, table, tmp_path, monkeypatch, kind, rank, memory):
    """Bit for bit by pipeline.py, unless an adapter was merged; up to rounding by WanImageToVideoPipeline."""
    monkeypatch.setattr(dynamic_modules_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(tmp_path / "modules")
    more = {"student__adapter.rank": rank, "student__activation-memory": memory, "sampler__guidance-scale": 3.0}
    more |= {"sampler__solver": "ode", "reward__path": "", "reward__frames": "first"}
    assert main(words("finetune", folders[kind], table, tmp_path / "run", **more)) == 0
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    role = load_role(str(tmp_path / "run"), "student", None, ALONE, causal=True)
    ours = torch.cat(list(videos(role, with_images(role, [str(table)], []), 5, 2)))
    pipelines = [
        DiffusionPipeline.from_pretrained(tmp_path / "out", custom_pipeline="pipeline", trust_remote_code=True),
        WanImageToVideoPipeline.from_pretrained(tmp_path / "out"),
    ]
    pictures = [picture(table.parent / f"{number}.png") for number in range(2)]
    noise = [torch.Generator().manual_seed(5 + number) for number in range(2)]
    made = pipelines[0](list(PROMPTS), image=pictures, generator=noise, output_type="pt").frames.movedim(1, 2)
    torch.testing.assert_close(made, ours, rtol=0, atol=2e-5 if rank else 0)
    size = {"num_frames": 17, "height": HEIGHT, "width": WIDTH, "num_inference_steps": 3, "guidance_scale": 3.0}
    size["max_sequence_length"] = pipelines[1].tokenizer.model_max_length
    noise = torch.Generator().manual_seed(5)
    made = pipelines[1](pictures[0], PROMPTS[0], generator=noise, output_type="pt", **size).frames.movedim(1, 2)
    torch.testing.assert_close(made, ours[:1], rtol=0, atol=2e-5)
