"""HunyuanVideo 1.5 with a condition image: sampled as by diffusers, trained, resumed and exported."""

import json
import shutil
from pathlib import Path

import image_runs
import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, HunyuanVideo15ImageToVideoPipeline
from forked import program
from helpers import ALONE, CPU, assert_near, assert_one_training, assert_same, checkpoint_of, cut_off, flags, gradients
from hunyuan15_folder import hunyuan15_folder
from PIL import Image as Picture
from real_clips import write_exactly
from torch.utils.flop_counter import FlopCounterMode

from unified_trainer.__main__ import main
from unified_trainer.basics.errors import UserError
from unified_trainer.basics.requests import Image, Request
from unified_trainer.data.loader import make_batch
from unified_trainer.models.encoders import EncoderConfig
from unified_trainer.models.pipeline.family import pipeline_family
from unified_trainer.parallel.meter import Meter
from unified_trainer.roles import blocks
from unified_trainer.roles.backbone import Backbone
from unified_trainer.roles.role import Frozen, RoleConfig
from unified_trainer.run.settings.command_line import parse
from unified_trainer.sampling.solver import SamplerConfig, generate
from unified_trainer.tools.export.scheduler import euler_scheduler
from unified_trainer.tools.load_run import load_role
from unified_trainer.tools.plan.architecture import architecture_of
from unified_trainer.tools.sample.sample import videos, with_images

pytestmark = pytest.mark.slow

HUNYUAN15 = pipeline_family("HunyuanVideo15ImageToVideoPipeline")
FRAMES, HEIGHT, WIDTH = 5, 64, 48  # the pipeline finds these sides for an image of this shape
PROMPTS = ('a picture of an "unknown word"', "a red circle moving left")
SAMPLER = SamplerConfig(num_steps=3, shift=5.0, guidance_scale=3.0, negative_prompt="a blue square")
SIZE = image_runs.SIZE | {"video.frames": FRAMES, "video.height": HEIGHT, "video.width": WIDTH}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return hunyuan15_folder(tmp_path_factory.mktemp("model") / "i2v", image=True)


@pytest.fixture(scope="module")
def table(tmp_path_factory) -> Path:
    """Two prompts with an image each, and beside them two clips with captions."""
    place, draw, rows = tmp_path_factory.mktemp("prompts"), np.random.default_rng(0), []
    for number, prompt in enumerate(PROMPTS):
        pixels = draw.integers(0, 255, (HEIGHT, WIDTH, 3), dtype=np.uint8)
        Picture.fromarray(pixels).save(place / f"{number}.png")
        rows.append(json.dumps({"prompt": prompt, "image": f"{number}.png"}))
        (place / "clips").mkdir(exist_ok=True)
        clip = draw.integers(0, 255, (FRAMES, HEIGHT, WIDTH, 3), dtype=np.uint8)
        write_exactly(place / "clips" / f"{number}.mkv", clip, 8)
        (place / "clips" / f"{number}.txt").write_text(prompt)
    (place / "prompts.jsonl").write_text("\n".join(rows))
    return place / "prompts.jsonl"


def words(method: str, folder: Path, table: Path, output: Path, **more: object) -> list[str]:
    data = {"data.path": table.parent / "clips"} if method == "finetune" else {"prompts": table}
    named = {"method": method, "student.path": folder, "output": output, "validation.prompts": table}
    return flags(
        named | data | SIZE | image_runs.OWN[method] | {key.replace("__", "."): value for key, value in more.items()}
    )


def sampled(pipeline, file: Path, prompt: str, **options: object) -> torch.Tensor:
    """What the pipeline makes of a prompt and an image: latents, or a video."""
    with Picture.open(file) as opened:
        made = pipeline(opened.copy(), prompt, num_frames=FRAMES, num_inference_steps=3, **options).frames
    return made if options["output_type"] == "latent" else made.movedim(1, 2)


def batch_of(codec, table: Path, count: int):
    requests = [Request(PROMPTS[i], (Image.read(table.parent / f"{i}.png", "the test"),)) for i in range(count)]
    ids = [*range(count)]
    shape = codec.latent_shape(FRAMES, HEIGHT, WIDTH)
    return make_batch(codec, requests, SAMPLER.negative_prompt, shape, prompt_ids=ids, sample_ids=ids)


def test_diffusers_samples_as_we_do(folder, table):
    """Both branches of guidance have the image; latents and pixels are equal up to rounding."""
    codec = HUNYUAN15.codec(folder, CPU, EncoderConfig())
    batch = batch_of(codec, table, 2)
    noise = torch.randn(2, *batch.latent_shape, generator=torch.Generator().manual_seed(1))
    teacher = Frozen("teacher", Backbone(HUNYUAN15.model(folder, "transformer"), ALONE), RoleConfig())
    ours = generate(teacher, noise, batch, SAMPLER, lambda _: noise)
    scheduler = euler_scheduler(SAMPLER, given=HUNYUAN15.given_levels(folder))
    pipeline = HunyuanVideo15ImageToVideoPipeline.from_pretrained(folder, scheduler=scheduler)
    pipeline.register_modules(guider=pipeline.guider.new(guidance_scale=SAMPLER.guidance_scale))
    given = {"negative_prompt": SAMPLER.negative_prompt}
    for row in range(2):
        first = {"file": table.parent / f"{row}.png", "prompt": PROMPTS[row], "latents": noise[[row]]}
        latents = sampled(pipeline, **first, **given, output_type="latent")
        torch.testing.assert_close(ours[[row]], latents, rtol=0, atol=1e-5)
    pixels = sampled(pipeline, **first, **given, output_type="pt")
    torch.testing.assert_close(codec.decode(ours)[[row]], pixels, rtol=0, atol=1e-5)


@pytest.mark.parametrize("method", image_runs.OWN)
def test_methods_train_adapters_and_resume_bit_for_bit(folder, table, tmp_path, method):
    assert main(words(method, folder, table, tmp_path / "whole")) == 0
    first, whole = (checkpoint_of(tmp_path / "whole", step) for step in (1, 2))
    weight = "student/weights/transformer_blocks.0.attn.to_q.lora_B.weight"
    assert not torch.equal(first[weight], whole[weight])
    assert main(["--resume", str(cut_off(tmp_path / "whole", tmp_path / "half", 1))]) == 0
    assert_same(checkpoint_of(tmp_path / "half", 2), whole)


@pytest.mark.ranks
def test_two_ranks_train_as_one(folder, table, tmp_path):
    assert main(words("dmd2", folder, table, tmp_path / "one", steps=1)) == 0
    two = words("dmd2", folder, table, tmp_path / "two", device="cpu", steps=1)
    done = program("-m", "unified_trainer", *two, ranks=2)
    assert done.returncode == 0, done.stderr
    assert_one_training(tmp_path / "one", tmp_path / "two", 1)


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
def test_recomputed_and_compiled_blocks_give_the_same_gradient(folder, table, monkeypatch, unchecked):
    """Of all weights, those that read the image too."""
    monkeypatch.setattr(blocks, "BACKEND", "aot_eager")
    batch, found = batch_of(HUNYUAN15.codec(folder, CPU, EncoderConfig()), table, 2), []
    x = torch.randn(2, *batch.latent_shape, generator=torch.Generator().manual_seed(0))
    for how in ({"recompute": "none"}, {"recompute": "full", "compile": True}):
        backbone = Backbone(HUNYUAN15.model(folder, "transformer"), ALONE, trained=True, **how)
        with backbone.running("student") as model:
            model.velocity(x, torch.tensor([0.3, 0.9]), batch.cond).square().mean().backward()
        found.append(gradients(backbone.model.network))
    assert bool(found[0]["image_embedder.linear_1.weight"].any())
    assert_near({name: found[1][name] for name in found[0]}, found[0])


def test_diffusers_samples_an_export_as_we_do(folder, table, tmp_path):
    """Of merged weights, and of the base with the published adapter."""
    run = tmp_path / "run"
    assert main(words("finetune", folder, table, run, sampler__guidance_scale=3.0)) == 0
    role = load_role(str(run), "student", None, ALONE, causal=True)
    ours = torch.cat(list(videos(role, with_images(role, [str(table)], []), 5, 2)))
    assert main(["export", str(run), str(tmp_path / "out")]) == 0
    assert main(["export", str(run), str(tmp_path / "lora"), "--adapter", "published"]) == 0
    assert "pipeline_tag: image-to-video" in (tmp_path / "out" / "README.md").read_text()
    scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(tmp_path / "out" / "scheduler")
    merged = HunyuanVideo15ImageToVideoPipeline.from_pretrained(tmp_path / "out")
    adapted = HunyuanVideo15ImageToVideoPipeline.from_pretrained(folder, scheduler=scheduler, guider=merged.guider)
    adapted.transformer.load_lora_adapter(tmp_path / "lora", weight_name="model.safetensors")
    for pipeline in (merged, adapted):
        given = {"negative_prompt": "", "generator": torch.Generator().manual_seed(5), "output_type": "pt"}
        made = sampled(pipeline, table.parent / "0.png", PROMPTS[0], **given)
        torch.testing.assert_close(made, ours[:1], rtol=0, atol=2e-5)


def test_flops_are_those_that_the_meter_counts(folder):
    """The image's tokens are rows of their own layers, and keys of every block."""
    model = HUNYUAN15.model(folder, "transformer")
    model.read(ALONE)
    counter, meter = FlopCounterMode(display=False), Meter(torch.device("cpu"))
    Backbone(model, ALONE)
    x, sigma, cond = model.example()
    with counter, torch.no_grad(), meter.measure():
        model.velocity(x, sigma, cond)
    text, glyphs, image = (
        cond[name].shape[1] for name in ("encoder_hidden_states", "encoder_hidden_states_2", "image_embeds")
    )
    tokens = HUNYUAN15.tokens(folder, tuple(x.shape[1:]))
    attention = 4 * 24 * (2 * (tokens + text + glyphs + image) ** 2 + text**2)
    assert meter.flops == counter.get_total_flops() + attention  # torch knows no attention of a CPU


def test_plan_knows_the_sizes_of_a_folder(folder):
    own = architecture_of("student", str(folder), parse(["--method", "dmd2", "--recipe", "hunyuanvideo-1.5-i2v"]))
    embedder = next(part for part in own.plain_pass((8, 1, 4, 4)).parts if part.module == "image_embedder.linear_1")
    assert (
        embedder.products == 2 * 4 * own.size.matrices[embedder.module].weights
        and own.family.attention_heads(own.folder) == 2
    )


def test_folders_that_cannot_be_are_refused(folder, table, tmp_path, capsys):
    """An image encoder of another width, and samples without images."""
    shutil.copytree(folder, tmp_path / "odd")
    file = tmp_path / "odd" / "transformer" / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"image_embed_dim": 9}))
    with pytest.raises(UserError, match="HunyuanVideo15ImageToVideoPipeline cannot be called"):
        HUNYUAN15.codec(tmp_path / "odd", CPU, EncoderConfig())
    (tmp_path / "prompts.txt").write_text(PROMPTS[0])
    assert main(words("dmd2", folder, tmp_path / "prompts.txt", tmp_path / "run")) == 2
    assert "line 1 has 0 condition images, and the student takes 1" in capsys.readouterr().err
