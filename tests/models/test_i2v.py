"""Networks with a condition image: sampled as by diffusers, trained by every method, resumed and exported."""

import csv
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from cells import cells
from clip_files import write_clips
from diffusers import DiffusionPipeline, WanImageToVideoPipeline
from diffusers.utils import dynamic_modules_utils
from forked import program
from helpers import ALONE, OF_CLIPS, OF_SAMPLES, assert_one_training, assert_same, checkpoint_of, cut_off, flags
from i2v_folder import i2v_folder
from PIL import Image as Picture
from real_clips import quarters, read_clip, write_exactly
from safetensors.torch import save_file
from ti2v_folder import ti2v_folder
from torch.utils.flop_counter import FlopCounterMode

from unified_trainer.__main__ import main
from unified_trainer.api import Run
from unified_trainer.basics.errors import UserError
from unified_trainer.basics.requests import Image, Request
from unified_trainer.data.clips import VideoConfig
from unified_trainer.data.fastvideo import I2V
from unified_trainer.data.loader import make_batch
from unified_trainer.data.parquet import ParquetFirstFrames
from unified_trainer.data.parquet_files import read_stored_files
from unified_trainer.data.row_kinds import ClipRows
from unified_trainer.data.video_reader import to_video
from unified_trainer.models.adapter_file import open_adapter
from unified_trainer.models.adapter_location import locate
from unified_trainer.models.base import name_in
from unified_trainer.models.encoders import EncoderConfig
from unified_trainer.models.wan.configs import native_config
from unified_trainer.models.wan.family import WAN
from unified_trainer.models.wan.lora import published_layer
from unified_trainer.parallel.meter import Meter
from unified_trainer.rewards.pixels import first_frame_likeness
from unified_trainer.roles.backbone import Backbone
from unified_trainer.roles.experts import ExpertPair
from unified_trainer.roles.role import Frozen, RoleConfig
from unified_trainer.run.checkpoint.manifest import weights_digest
from unified_trainer.run.registry import METHODS
from unified_trainer.run.settings.command_line import parse
from unified_trainer.sampling.solver import SamplerConfig, generate
from unified_trainer.tools.export.scheduler import euler_scheduler
from unified_trainer.tools.load_run import load_role
from unified_trainer.tools.plan.architecture import architecture_of
from unified_trainer.tools.sample.sample import read_lines, videos, with_images
from unified_trainer.tools.serve.remote_student import RemoteStudent
from unified_trainer.tools.serve.serve import student_service
from unified_trainer.tools.serve.web_server import open_port, serving

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
    requests = [Request(PROMPTS[0], (Image.read(file, "the test"),))]
    batch = make_batch(codec, requests, SAMPLER.negative_prompt, shape, prompt_ids=[0], sample_ids=[0])
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
        SAMPLER.negative_prompt,
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
OWN["self_forcing"] = SINGLE | {"algorithm.student-every": 1, "sampler.chunks.chunk-frames": 1}
REFUSED = {
    "flow_dpo": "needs a student without condition images",
    "flow_map": "reads an image as channels, and no such network is a flow map",
    "long_self_forcing": "whose first latent frame must be the condition image",
    "streaming_tuning": "whose first latent frame must be the condition image",
}


def words(method: str, folder: Path, table: Path, output: Path, **more: object) -> list[str]:
    prompts = {} if method in OF_CLIPS else {"prompts": table}
    named = {"method": method, "student.path": folder, "output": output, "validation.prompts": table}
    named |= prompts | SIZE | OWN.get(method, SINGLE) | more
    return flags({key.replace("__", "."): value for key, value in named.items()})


RESUMED = ("finetune", "dmd2", "dance_grpo", "self_forcing")
MATRIX = [(KINDS[len(name) % 3], name) for name in METHODS if name not in REFUSED]
OF_IMAGES = cells(MATRIX, lambda cell: cell[:1], lambda kind, name: name in RESUMED)


@pytest.mark.parametrize(("kind", "method"), OF_IMAGES)
def test_every_method_trains_and_resumes_bit_for_bit(folders, table, tmp_path, kind, method):
    """One method of each kind resumes: the state of others holds no image either."""
    folder = folders[kind]
    assert main(words(method, folder, table, tmp_path / "whole", **{"checkpoint-every": 1})) == 0
    if method not in RESUMED:
        return
    assert main(["--resume", str(cut_off(tmp_path / "whole", tmp_path / "half", 1))]) == 0
    whole, half = (checkpoint_of(tmp_path / name, 2) for name in ("whole", "half"))
    assert_same(half, whole)


@pytest.mark.parametrize(("method", "said"), REFUSED.items())
def test_a_method_that_makes_no_sense_says_why(folders, table, tmp_path, capsys, method, said):
    chunks = method in ("long_self_forcing", "streaming_tuning")
    more = {"sampler__chunks.chunk-frames": 1} if chunks else {"data__first-frame": True}
    assert main(words(method, folders["i2v"], table, tmp_path / "run", **more)) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "rank", "memory"), [*((kind, 0, "none") for kind in KINDS), ("i2v with clip", 2, "full")]
)
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


def test_published_sizes_of_networks_with_images_are_known():
    """Plan knows both models by their recipes."""
    for recipe, parameters in (("wan2.1-i2v-14b", 16_394_878_784), ("wan2.2-i2v-a14b", 14_288_901_184)):
        found = architecture_of("student", "", parse(["--method", "dmd2", "--recipe", recipe]))
        assert (found.size.parameters, found.latent_shape(81, 480, 832)) == (parameters, (16, 21, 60, 104))


def test_flops_with_tokens_of_clip_are_those_that_the_meter_counts(folders):
    model = WAN.model(folders["i2v with clip"], "transformer")
    model.read(ALONE)
    x, sigma, cond = model.example()
    tokens = x.shape[2:].numel() // 4
    counter, meter = FlopCounterMode(display=False), Meter(torch.device("cpu"))
    Backbone(model, ALONE)
    with counter, torch.no_grad(), meter.measure():
        model.velocity(x, sigma, cond)
    pairs = tokens * (tokens + cond["text"].shape[1] + cond["clip"].shape[1])
    attention = 4 * model.feature_size * len(model.blocks) * pairs
    assert meter.flops == counter.get_total_flops() + attention  # torch knows no attention of a CPU


def test_published_adapters_name_the_layers_of_clip():
    names = {
        "blocks.3.attn2.add_k_proj": "blocks.3.cross_attn.k_img",
        "blocks.3.attn2.add_v_proj": "blocks.3.cross_attn.v_img",
    }
    assert {layer: published_layer(layer) for layer in names} == names
    assert published_layer("condition_embedder.image_embedder.ff.net.2") == "img_emb.proj.3"


@pytest.mark.parametrize(("kind", "theirs"), [("ti2v", "ti2v"), ("i2v", "i2v"), ("i2v with clip", "i2v")])
def test_every_weight_has_a_name_in_wans_own_code(folders, kind, theirs):
    weights = dict(WAN.model(folders[kind], "transformer").network.named_parameters())
    names = {name_in(key, published_layer) for key in weights}
    assert None not in names and len(names) == len(weights)
    config = native_config(folders[kind] / "transformer", folders[kind])
    assert config["model_type"] == theirs and config["in_dim"] == weights["patch_embedding.weight"].shape[1]


def test_adapters_by_the_names_of_lightx2v_are_read(folders, tmp_path):
    """Those of I2V: factors on the layers of CLIP's tokens, and differences of norms and biases."""
    network, draw = WAN.model(folders["i2v with clip"], "transformer").network, torch.Generator().manual_seed(0)
    changed = {"blocks.0.attn2.add_k_proj": "blocks.0.cross_attn.k_img"}
    changed["condition_embedder.image_embedder.ff.net.2"] = "img_emb.proj.3"
    held, expected = {}, {}
    for ours, theirs in changed.items():
        rows, columns = network.get_submodule(ours).weight.shape
        down, up = torch.randn(3, columns, generator=draw), torch.randn(rows, 3, generator=draw)
        held |= {f"diffusion_model.{theirs}.lora_down.weight": down, f"diffusion_model.{theirs}.lora_up.weight": up}
        expected[f"{ours}.weight"] = up @ down
    for ours, key in (
        ("blocks.0.attn2.norm_added_k.weight", "blocks.0.cross_attn.norm_k_img.diff"),
        ("condition_embedder.image_embedder.norm1.bias", "img_emb.proj.0.diff_b"),
    ):
        expected[ours] = held[f"diffusion_model.{key}"] = torch.randn(network.get_parameter(ours).shape, generator=draw)
    save_file(held, tmp_path / "lightx2v.safetensors")
    place = locate(tmp_path / "lightx2v.safetensors", "student.adapter.path", None, WAN.experts, WAN.adapter_files)
    found = open_adapter(place, network, WAN.experts, WAN.published_layer)
    assert found.changed == expected.keys()
    for name, change in expected.items():
        torch.testing.assert_close(found.change(name, change.shape, torch.device("cpu")), change)


@pytest.mark.ranks
def test_two_ranks_train_as_one(folders, table, tmp_path):
    more = {"algorithm__micro-batch": 1, "student__adapter.rank": 2, "steps": 1}
    assert main(words("dmd2", folders["i2v"], table, tmp_path / "one", **more)) == 0
    two = words("dmd2", folders["i2v"], table, tmp_path / "two", device="cpu", **more)
    done = program("-m", "unified_trainer", *two, ranks=2)
    assert done.returncode == 0, done.stderr
    assert_one_training(tmp_path / "one", tmp_path / "two", 1)


def test_rows_of_one_text_and_other_images_are_other_samples(folders, table):
    """A batch keeps both apart, and guidance and caption dropout keep the image of each row."""
    images = [Image.read(table.parent / f"{number}.png", "the test") for number in range(2)]
    requests = [Request("a circle", (image,)) for image in images]
    assert len({*requests, Request("a circle", (Image.read(images[0].file, "the test"),))}) == 2
    codec = WAN.codec(folders["i2v"], torch.device("cpu"), EncoderConfig())
    shape = codec.latent_shape(FRAMES, HEIGHT, WIDTH)
    uncond = codec.encode_text([""])
    batch = make_batch(codec, requests, "", shape, prompt_ids=[0, 1], sample_ids=[0, 1])
    assert torch.equal(batch.cond["text"][0], batch.cond["text"][1])
    assert float((batch.cond["image"][0] - batch.cond["image"][1]).abs().max()) > 0.1
    assert torch.equal(batch.uncond["image"], batch.cond["image"])
    assert torch.equal(batch.uncond["text"], uncond["text"].expand(2, -1, -1))
    assert batch.cond.cat(batch.uncond).take([3])["image"].equal(batch.cond["image"][1:])


def test_a_table_that_cannot_be_used_names_its_row(folders, table, tmp_path, capsys):
    """An absent image, a file that holds none, rows without an image, and a scorer of the first frame alone."""
    (tmp_path / "bad.png").write_text("no image")
    row = '{"prompt": "a", "image": "bad.png"}'
    for text, said in (
        (row, f"line 1 {tmp_path / 'bad.png'}: cannot be read as an image"),
        (row.replace("bad", "absent"), f"line 1 {tmp_path / 'absent.png'}: no such file"),
        ('{"prompt": "a"}', "line 1 has 0 condition images, and the student takes 1"),
        (row.replace('"bad.png"', "3"), "line 1 holds 3 instead of a text"),
    ):
        (tmp_path / "prompts.jsonl").write_text(text)
        assert main(words("dmd2", folders["i2v"], tmp_path / "prompts.jsonl", tmp_path / "run")) == 2
        assert said in capsys.readouterr().err
    assert main(words("dance_grpo", folders["i2v"], table, tmp_path / "run", reward__frames="first")) == 2
    assert "scores the first frame alone" in capsys.readouterr().err
    assert main(words("dmd2", "tiny", table, tmp_path / "run", teacher__path=folders["i2v"])) == 2
    assert "needs a condition image, and the student's samples have none" in capsys.readouterr().err


def test_encoded_clips_of_ti2v_hold_their_first_frame(folders, table, tmp_path, capsys):
    """The first latent frame of a clip is that of its first frame alone; I2V needs more than latents."""
    codec = WAN.codec(folders["ti2v"], torch.device("cpu"), EncoderConfig())
    pixels = np.random.default_rng(1).integers(0, 255, (FRAMES, HEIGHT, WIDTH, 3), dtype=np.uint8)
    clip = to_video(pixels)
    encoded = codec.encode_images([(Image.of(pixels[0]),)], codec.latent_shape(FRAMES, HEIGHT, WIDTH))
    torch.testing.assert_close(codec.first_frames(codec.encode(clip))["image"], encoded["image"], rtol=0, atol=1e-5)
    for kind in ("ti2v", "i2v"):
        shape = WAN.latent_shape(folders[kind], FRAMES, HEIGHT, WIDTH)
        (tmp_path / kind).mkdir()
        write_clips(tmp_path / kind / "a.parquet", torch.randn(2, *shape))
        more = {"data__path": tmp_path / kind, "video__frames": FRAMES}
        assert main(words("finetune", folders[kind], table, tmp_path / f"{kind} run", **more)) == 2 * (kind == "i2v")
    assert "holds clips without the encoded first frames that the student needs" in capsys.readouterr().err
    losses = [json.loads(row) for row in (tmp_path / "ti2v run" / "metrics.jsonl").read_text().splitlines()]
    assert all(0 < row["train/loss"] < 10 for row in losses if "train/loss" in row) and losses


def drawn_clips(folder: Path, count: int) -> Path:
    """A folder of different videos that move, with captions."""
    folder.mkdir()
    for number in range(count):
        still = quarters(FRAMES, HEIGHT, WIDTH) // (number + 1)
        moving = np.stack([np.roll(frame, 8 * shift, 1) for shift, frame in enumerate(still)])
        write_exactly(folder / f"{number}.mkv", moving, 8)
        (folder / f"{number}.txt").write_text(PROMPTS[number])
    return folder


ENCODED = {"video__frames": FRAMES, "video__fps": 8}


def preprocess_words(source: Path, out: Path, folder: Path) -> list[str]:
    size = {"model": folder, "recipe": "tiny", "video.frames": FRAMES, "video.height": HEIGHT, "video.width": WIDTH}
    return ["preprocess", str(source), str(out), *flags(size | {"video.fps": 8})]


@pytest.mark.parametrize("kind", KINDS[1:])
def test_encoded_clips_of_i2v_hold_what_is_encoded_of_their_first_frames(folders, tmp_path, kind):
    """As FastVideo reads its columns, in float32; a source of the files gives each row its own, in any order."""
    assert main(preprocess_words(drawn_clips(tmp_path / "in", 2), tmp_path / "out", folders[kind])) == 0
    codec = WAN.codec(folders[kind], torch.device("cpu"), EncoderConfig())
    shape = codec.latent_shape(FRAMES, HEIGHT, WIDTH)
    size = VideoConfig(FRAMES, HEIGHT, WIDTH, 8)
    firsts = [(Image.of(read_clip(tmp_path / "in" / f"{number}.mkv", size)[0].copy()),) for number in range(2)]
    expected = codec.encode_images(firsts, shape)
    assert {name: tuple(row.shape[1:]) for name, row in expected.tensors.items()} == WAN.image_tensors(
        folders[kind], shape
    )
    table = pq.read_table(tmp_path / "out" / "clips-00000.parquet")
    assert table.schema.remove_metadata().equals(I2V)
    rows = table.to_pylist()
    for name, column in {"image": "first_frame_latent", "clip": "clip_feature", "": "pil_image"}.items():
        for number, row in enumerate(rows):
            data, held, dtype = (row[f"{column}_{part}"] for part in ("bytes", "shape", "dtype"))
            if name not in expected.tensors:
                assert (data, held, dtype) == (b"", [], "")
                continue
            value = torch.frombuffer(bytearray(data), dtype=torch.float32).reshape(held)
            assert dtype == "float32" and torch.equal(value, expected[name][number])
    stored = read_stored_files(tmp_path / "out", ClipRows(shape, WAN.image_tensors(folders[kind], shape)))
    assert stored.image_note == ""
    cond = ParquetFirstFrames(stored, codec, lanes=1).condition([1, 0])
    assert cond.tensors.keys() == {"text", *expected.tensors}
    assert torch.equal(cond["text"], codec.encode_text(PROMPTS[1::-1])["text"])
    for name, value in expected.tensors.items():
        assert torch.equal(cond[name], value[[1, 0]])


def test_training_on_encoded_clips_of_i2v_is_training_on_the_videos(folders, table, tmp_path, capsys):
    """Bit for bit, of one clip, whose order cannot differ; files without its first frame and runs that would need its
    pixels are refused."""
    folder, clips = folders["i2v with clip"], drawn_clips(tmp_path / "in", 1)
    assert main(preprocess_words(clips, tmp_path / "out", folder)) == 0
    for name, path in (("raw", clips), ("stored", tmp_path / "out")):
        assert main(words("finetune", folder, table, tmp_path / name, data__path=path, **ENCODED)) == 0
    assert_same(checkpoint_of(tmp_path / "stored", 2), checkpoint_of(tmp_path / "raw", 2))
    more = ENCODED | {"data__path": tmp_path / "out"}
    assert main(words("finetune", folder, "", tmp_path / "run", validate_every=1, **more)) == 2
    assert "encoded clips hold no images for validations: set --validation.prompts" in capsys.readouterr().err
    file = tmp_path / "out" / "clips-00000.parquet"
    rows = pq.read_table(file)
    empty = pa.array([[]], rows.schema.field("clip_feature_shape").type)
    pq.write_table(
        rows.set_column(rows.schema.get_field_index("clip_feature_shape"), "clip_feature_shape", empty), file
    )
    assert main(words("finetune", folder, table, tmp_path / "run", **more)) == 2
    assert "clip_feature_shape () of type float32, the student takes (5, 20)" in capsys.readouterr().err
    pq.write_table(rows.drop_columns(["first_frame_latent_bytes"]), file)
    assert main(words("finetune", folder, table, tmp_path / "run", **more)) == 2
    assert "without the encoded first frames that the student needs (columns first_frame_latent_bytes)" in (
        capsys.readouterr().err
    )


def test_validations_show_the_images_and_sample_takes_one(folders, table, tmp_path, capsys):
    """`--image` is the image of all prompts, as a column is; a table with images in some rows is refused."""
    run, shown = tmp_path / "run", {"validate_every": 1, "validation__num-samples": 2, "reward__frames": "all"}
    assert main(words("dmd2", folders["ti2v"], table, run, steps=1, **shown)) == 0
    rows = [json.loads(line) for line in (run / "validation" / "step_1" / "samples.jsonl").read_text().splitlines()]
    assert [row["images"] for row in rows] == [[str(table.parent / f"{i}.png")] for i in range(2)]
    with Picture.open(run / "validation" / "step_1" / "contact_sheet.png") as opened:
        sheet = np.array(opened)
    side = sheet.shape[1] // (1 + FRAMES)  # the image stands before the frames
    image = picture(table.parent / "0.png").convert("RGB").resize((side, side), Picture.Resampling.NEAREST)
    top = sheet.shape[0] // 2 - side
    assert np.array_equal(sheet[top : top + side, :side], np.array(image))
    both = tmp_path / "both.jsonl"
    both.write_text("\n".join(json.dumps({"prompt": text, "image": str(table.parent / "0.png")}) for text in PROMPTS))
    for name, given in (("flag", [*PROMPTS, "--image", str(table.parent / "0.png")]), ("column", [str(both)])):
        assert main(["sample", str(run), "--output", str(tmp_path / name), "--prompts", *given]) == 0
    flag, column = ((tmp_path / name / "contact_sheet.png").read_bytes() for name in ("flag", "column"))
    assert flag == column
    both.write_text(both.read_text() + '\n{"prompt": "a"}')
    asked = ["sample", str(run), "--output", str(tmp_path / "mixed"), "--prompts"]
    for given, said in (
        ([str(both)], "some samples of a batch have a condition image and others have none"),
        (["a", "--image", "absent.png"], "--image absent.png: no such file"),
    ):
        assert main([*asked, *given]) == 2
        assert said in capsys.readouterr().err


def test_evaluate_and_serve_take_images(folders, table, tmp_path, capsys):
    """Both measure and make what the student does; rows of one text are two prompts; others are refused."""
    rows = table.read_text().splitlines()
    rows.append(rows[0].replace("0.png", "1.png"))
    table = table.with_name("three.jsonl")
    table.write_text("\n".join(rows))
    more = {"reward__frames": "all", "reward__kind": "first_frame_likeness", "reward__path": "", "steps": 1}
    run = tmp_path / "run"
    assert main(words("dmd2", folders["i2v"], table, run, **more)) == 0
    loaded = load_role(str(run), "student", None, ALONE, causal=True)
    codec = loaded.codec()
    digest = weights_digest(loaded.metadata, "student", ema=False)
    service = student_service("served", loaded, codec, 2, 0.0, digest, (1, 1))
    with open_port("127.0.0.1", 0) as listener, serving(service, listener) as url:
        asked = ["evaluate", str(run), f"{run},num_steps=1", "--output", str(tmp_path / "out"), "--batch", "2"]
        assert main([*asked, "--prompts", str(table)]) == 0
        with open(tmp_path / "out" / "samples.csv") as opened:
            scores = [float(row["reward"]) for row in csv.DictReader(opened)]
        for page in ("evaluation.html", "votes.html"):
            assert (tmp_path / "out" / page).read_text(encoding="utf-8").count('"data:image/jpeg;base64,') == 3
        assert main([*asked, "--prompts", str(table), "--video-megabytes", "0"]) == 0
        assert "data:image/jpeg" not in (tmp_path / "out" / "evaluation.html").read_text(encoding="utf-8")
        requests = read_lines([str(table)], images=True)
        ours = torch.cat(list(videos(loaded, requests, 0, 2)))
        images = torch.stack([request.images[0].at(HEIGHT, WIDTH) for request in requests])
        assert scores[:3] == pytest.approx(first_frame_likeness(ours, images).tolist(), abs=1e-6)
        client, files = RemoteStudent(url), [table.with_name(f"{number}.png") for number in (0, 1, 1)]
        texts = [request.text for request in requests]
        assert torch.equal(client.sample(texts, batch=2, images=files), ours)
        with pytest.raises(UserError, match=r"served takes 1 condition images, not 0 .*send images, a PNG file"):
            client.sample(texts)
        assert main([*asked, "--prompts", PROMPTS[0]]) == 2
    with Run.resume(run, {"validate_every": 1}) as again:
        assert torch.equal(again.sample(texts, images=files, batch=2, ema=False), ours)
        rewards = again.score(ours, texts, images=files)["reward"]
        assert rewards.tolist() == pytest.approx(first_frame_likeness(ours, images).tolist(), abs=1e-6)
        with pytest.raises(UserError, match=r"takes 1 condition images, not 0 .*give images, one for each prompt"):
            again.sample(texts)
        with pytest.raises(UserError, match="3 prompts but 2 images"):
            again.score(ours, texts, images=files[:2])
    assert "run@1 takes 1 condition images, not 0" in capsys.readouterr().err
    other = [
        "evaluate",
        str(run),
        "tiny",
        "--recipe",
        "tiny",
        "--output",
        str(tmp_path / "out"),
        "--prompts",
        str(table),
    ]
    assert main(other) == 2
    assert "tiny takes 0 condition images, not 1" in capsys.readouterr().err


def test_rollout_scores_the_videos_of_sample(folders, table, tmp_path):
    """Each prompt has its image; the likeness of a video to it is a reward, and a folder of other images is refused."""
    more = {"reward__frames": "all", "reward__kind": "first_frame_likeness", "reward__path": ""}
    assert main(words("dmd2", folders["i2v"], table, tmp_path / "run", **more)) == 0
    named = {"prompts": table, "output": tmp_path / "out", "seed": 5}
    asked = ["rollout", str(tmp_path / "run"), *flags(named)]
    assert main(asked) == 0
    role = load_role(str(tmp_path / "run"), "student", None, ALONE, causal=True)
    ours = torch.cat(list(videos(role, with_images(role, [str(table)], []), 5, 2)))
    rows = [json.loads(line) for line in (tmp_path / "out" / "scores" / "run.jsonl").read_text().splitlines()]
    images = torch.stack([Image.read(table.parent / f"{i}.png", "the test").at(HEIGHT, WIDTH) for i in range(2)])
    assert [row["reward"] for row in rows] == pytest.approx(first_frame_likeness(ours, images).tolist(), abs=1e-5)
    (tmp_path / "reward.yaml").write_text("reward: {kind: first_frame_likeness, frames: all, batch: 8}\n")
    again = ["score", str(tmp_path / "out"), "--reward", str(tmp_path / "reward.yaml"), "--name", "again"]
    assert main(again) == 0
    scored = [json.loads(line) for line in (tmp_path / "out" / "scores" / "again.jsonl").read_text().splitlines()]
    assert [row["reward"] for row in scored] == [row["reward"] for row in rows]
    swapped = table.with_name("swapped.jsonl")
    swapped.write_text(table.read_text().replace("0.png", "x.png").replace("1.png", "0.png").replace("x.png", "1.png"))
    assert main([word.replace(str(table), str(swapped)) for word in asked]) == 2


def test_conditions_that_rows_name_are_not_left_out_of_encoded_clips(folders, tmp_path, capsys):
    """Such clips hold their first frames, and runs on the videos themselves would read the named ones."""
    folder = drawn_clips(tmp_path / "in", 1)
    row = {"path": "0.mkv", "caption": "a circle", "condition": "0.mkv"}
    (folder / "rows.jsonl").write_text(json.dumps(row))
    assert main(preprocess_words(folder / "rows.jsonl", tmp_path / "out", folders[KINDS[1]])) == 2
    assert "encoded clips hold their first frames: leave the column condition out" in capsys.readouterr().err
