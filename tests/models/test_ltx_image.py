"""LTX-Video with a condition image: sampled as by diffusers, trained by a method of each kind, and resumed."""

import json
from pathlib import Path

import image_runs
import numpy as np
import pytest
import torch
from diffusers import LTXImageToVideoPipeline
from helpers import ALONE, CPU, assert_near, assert_same, checkpoint_of, cut_off, flags, gradients
from ltx_folder import ltx_folder
from PIL import Image as Picture
from real_clips import write_exactly

from unified_trainer.__main__ import main
from unified_trainer.basics.requests import Image, Request
from unified_trainer.data.loader import make_batch
from unified_trainer.models.encoders import EncoderConfig
from unified_trainer.models.pipeline.family import pipeline_family
from unified_trainer.models.pipeline.latents import KNOWN
from unified_trainer.rewards.base import RewardConfig
from unified_trainer.rewards.reward import Reward
from unified_trainer.roles.backbone import Backbone
from unified_trainer.roles.role import Frozen, RoleConfig
from unified_trainer.sampling.solver import SamplerConfig, generate
from unified_trainer.tools.export.scheduler import euler_scheduler
from unified_trainer.tools.load_run import load_role
from unified_trainer.tools.sample.sample import videos, with_images

pytestmark = pytest.mark.slow

LTX = pipeline_family("LTXImageToVideoPipeline")
FRAMES, HEIGHT, WIDTH = 17, 64, 32
PROMPTS = ["a picture of a circle", "a red circle moving left"]
SAMPLER = SamplerConfig(num_steps=3, shift=3.0, terminal=0.1, guidance_scale=3.0, negative_prompt="a blue square")
SIZE = image_runs.SIZE | {"video.frames": FRAMES, "video.height": HEIGHT, "video.width": WIDTH, "video.fps": 25}
OWN = image_runs.OWN | {"finetune": image_runs.SINGLE | {"data.first-frame": True}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return ltx_folder(tmp_path_factory.mktemp("model") / "ltx", image=True)


@pytest.fixture(scope="module")
def codec(folder):
    return LTX.codec(folder, CPU, EncoderConfig())


@pytest.fixture(scope="module")
def clips() -> np.ndarray:
    """Two clips; their first frames are condition images."""
    return np.random.default_rng(0).integers(0, 255, (2, FRAMES, HEIGHT, WIDTH, 3), dtype=np.uint8)


@pytest.fixture(scope="module")
def batch(codec, clips):
    requests = [Request(prompt, (Image.of(clip[0]),)) for prompt, clip in zip(PROMPTS, clips, strict=True)]
    shape = codec.latent_shape(FRAMES, HEIGHT, WIDTH)
    return make_batch(codec, requests, SAMPLER.negative_prompt, shape, prompt_ids=[0, 1], sample_ids=[0, 1])


@pytest.fixture(scope="module")
def table(tmp_path_factory, clips) -> Path:
    """Both prompts with their images, and beside them the clips with captions."""
    place, rows = tmp_path_factory.mktemp("prompts"), []
    (place / "clips").mkdir()
    for number, (prompt, clip) in enumerate(zip(PROMPTS, clips, strict=True)):
        Picture.fromarray(clip[0]).save(place / f"{number}.png")
        rows.append(json.dumps({"prompt": prompt, "image": f"{number}.png"}))
        write_exactly(place / "clips" / f"{number}.mkv", clip, 25)
        (place / "clips" / f"{number}.txt").write_text(prompt)
    (place / "prompts.jsonl").write_text("\n".join(rows))
    return place / "prompts.jsonl"


def noise_of(batch) -> torch.Tensor:
    return torch.randn(2, *batch.latent_shape, generator=torch.Generator().manual_seed(1))


def test_diffusers_samples_as_we_do(folder, codec, batch):
    """Latents and pixels, also with the image's latents in the first frame of the noise, where diffusers wants them."""
    noise, image = noise_of(batch), batch.cond[KNOWN]
    teacher = Frozen("teacher", Backbone(LTX.model(folder, "transformer"), ALONE), RoleConfig())
    ours = generate(teacher, noise, batch, SAMPLER, lambda _: noise)
    torch.testing.assert_close(ours[:, :, :1], image)
    scheduler = euler_scheduler(SAMPLER, given=LTX.given_levels(folder))
    pipeline = LTXImageToVideoPipeline.from_pretrained(folder, scheduler=scheduler)
    given = {"num_frames": FRAMES, "height": HEIGHT, "width": WIDTH}
    given |= {"num_inference_steps": 3, "guidance_scale": 3.0, "negative_prompt": [SAMPLER.negative_prompt] * 2}
    given["latents"] = torch.cat([image, noise[:, :, 1:]], 2).flatten(2).transpose(1, 2)
    latents = pipeline(None, PROMPTS, **given, output_type="latent").frames
    torch.testing.assert_close(ours.flatten(2).transpose(1, 2), latents, rtol=0, atol=1e-5)
    pixels = pipeline(None, PROMPTS, **given, output_type="pt").frames
    torch.testing.assert_close(codec.decode(ours).movedim(1, 2), pixels, rtol=0, atol=1e-5)


def test_the_first_latent_of_a_clip_is_that_of_its_first_frame(codec, clips, batch):
    """So that stored clips have their condition images too."""
    video = torch.from_numpy(clips).movedim(-1, 1).float() / 255
    first = codec.first_frames(codec.encode(video))[KNOWN]
    torch.testing.assert_close(first, batch.cond[KNOWN], rtol=0, atol=1e-5)


def test_a_reward_of_the_first_frame_sees_that_of_the_whole_video(codec, batch):
    """A decoded frame depends on later latents, so that the first latent alone has another first frame."""
    latents, seen = noise_of(batch), []

    def score(videos, prompts):
        seen.append(videos)
        return torch.zeros(len(videos))

    reward = Reward({"mine": score}, codec, RewardConfig(kind="mine", frames="first"))
    reward.score(latents, tuple(PROMPTS))
    first, alone = (codec.decode(x)[:, :, 0] for x in (latents, latents[:, :, :2]))
    torch.testing.assert_close(seen[0][:, :, 0], first)
    assert float((first - alone).abs().max()) > 1e-2


def test_queries_and_keys_are_normalised_in_float32(folder, batch):
    """Of a bf16 input and a float32 weight torch makes several kernels on CUDA."""
    model, seen = LTX.model(folder, "transformer"), []
    model.read(ALONE)
    for norm in model.network.modules():
        if isinstance(norm, torch.nn.RMSNorm):
            norm.register_forward_hook(lambda _norm, inputs, _output: seen.append(inputs[0].dtype))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        model.velocity(noise_of(batch), torch.tensor([0.3, 0.9]), batch.cond)
    assert seen == [torch.float32] * 4 * len(model.blocks)


def test_recomputed_blocks_give_the_same_gradient(folder, batch):
    found = []
    for kind in ("none", "full", "selective"):
        backbone = Backbone(LTX.model(folder, "transformer"), ALONE, trained=True, recompute=kind)
        with backbone.running("student") as model:
            model.velocity(noise_of(batch), torch.tensor([0.3, 0.9]), batch.cond)[:, :, 1:].square().mean().backward()
        found.append(gradients(backbone.model.network))
    for other in found[1:]:
        assert_near(other, found[0])


def settings(method: str, folder: Path, table: Path, output: Path) -> dict[str, object]:
    data = {"data.path": table.parent / "clips"} if method == "finetune" else {"prompts": table}
    named = {"method": method, "student.path": folder, "output": output, "validation.prompts": table}
    return named | data | SIZE | OWN[method]


@pytest.mark.parametrize("method", OWN)
def test_methods_train_adapters_and_resume_bit_for_bit(folder, table, tmp_path, method):
    assert main(flags(settings(method, folder, table, tmp_path / "whole"))) == 0
    first, whole = (checkpoint_of(tmp_path / "whole", step) for step in (1, 2))
    weight = "student/weights/transformer_blocks.0.attn1.to_q.lora_B.weight"
    assert not torch.equal(first[weight], whole[weight])
    assert main(["--resume", str(cut_off(tmp_path / "whole", tmp_path / "half", 1))]) == 0
    assert_same(checkpoint_of(tmp_path / "half", 2), whole)


def test_encoded_clips_hold_their_images(folder, table, tmp_path, capsys):
    """A training on what `preprocess` wrote has the loss of one on the videos; validations need images of their own."""
    size = {name: value for name, value in SIZE.items() if name.startswith("video") or name == "recipe"}
    clips, encoded = tmp_path / "clips", tmp_path / "encoded"
    clips.mkdir()
    for name in ("0.mkv", "0.txt"):  # of several the order differs
        (clips / name).symlink_to(table.parent / "clips" / name)
    assert main(["preprocess", str(clips), str(encoded), *flags(size | {"student.path": folder})]) == 0
    losses = []
    for data in (clips, encoded):
        run = tmp_path / f"run on {data.name}"
        given = settings("finetune", folder, table, run) | {"data.path": data, "steps": 1, "algorithm.batch-size": 1}
        assert main(flags(given)) == 0
        losses.append(json.loads((run / "metrics.jsonl").read_text().splitlines()[0])["train/loss"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    given = {key: value for key, value in given.items() if key != "validation.prompts"}
    assert main(flags(given | {"output": tmp_path / "shown", "validate-every": 1})) == 2
    assert "condition images, and the student takes 1" in capsys.readouterr().err


def test_diffusers_samples_an_export_as_we_do(folder, batch, table, tmp_path):
    """Its scheduler and merged weights; the pipeline gets the noise with the image's latents in the first frame."""
    run, out = tmp_path / "run", tmp_path / "out"
    assert main(flags(settings("finetune", folder, table, run) | {"sampler.guidance-scale": 3.0})) == 0
    role = load_role(str(run), "student", None, ALONE, causal=True)
    ours = torch.cat(list(videos(role, with_images(role, [str(table)], []), 5, 2)))
    assert main(["export", str(run), str(out)]) == 0
    pipeline = LTXImageToVideoPipeline.from_pretrained(out)
    noise = torch.randn(1, *batch.latent_shape, generator=torch.Generator().manual_seed(5))
    given = {"num_frames": FRAMES, "height": HEIGHT, "width": WIDTH, "negative_prompt": ""}
    given |= {"num_inference_steps": 3, "guidance_scale": 3.0, "output_type": "pt"}
    given["latents"] = torch.cat([batch.cond[KNOWN][:1], noise[:, :, 1:]], 2).flatten(2).transpose(1, 2)
    made = pipeline(None, PROMPTS[0], **given).frames
    torch.testing.assert_close(ours[:1].movedim(1, 2), made, rtol=0, atol=2e-5)
