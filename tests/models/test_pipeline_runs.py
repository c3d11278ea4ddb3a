"""Runs of pipelines that no family was written for: from the command line to the export."""

import json
import re
from ast import literal_eval
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline, FlowMatchEulerDiscreteScheduler
from forked import program
from helpers import ALONE, assert_one_training, assert_same, checkpoint_of, cut_off, flags
from PIL import Image as Picture
from pipelines.images import IMAGES
from pipelines.videos import VIDEOS
from real_clips import write_exactly

from unified_trainer.__main__ import main
from unified_trainer.basics.requests import Request
from unified_trainer.models.blueprint import frozen_config
from unified_trainer.models.pipeline.blueprint import PipelineParts
from unified_trainer.models.pipeline.known import Known, known
from unified_trainer.models.pipeline.without_memory import WithoutMemory
from unified_trainer.run.settings.command_line import parse
from unified_trainer.tools.load_run import load_role
from unified_trainer.tools.plan import passes as plan_passes
from unified_trainer.tools.plan.tracing import peak_of
from unified_trainer.tools.sample.sample import read_lines, videos

pytestmark = pytest.mark.slow  # whole runs

PROMPTS = ("a red circle", "a blue square moving left over the green cat")
SIZE = {"video.height": 32, "video.width": 32, "sampler.num-steps": 2, "steps": 2, "checkpoint-every": 1}
SIZE |= {"validate-every": 0, "student.learning-rate": 1e-3, "student.warmup-updates": 0, "student.precision": "fp32"}
SIZE |= {"encoders.text_precision": "fp32", "device": "cpu"}
SINGLE = {"algorithm.batch-size": 2, "algorithm.micro-batch": 1, "algorithm.student-every": 1}
SINGLE |= {"teacher.precision": "fp32", "critic.precision": "fp32"}
GROUPS = {f"algorithm.{name}": 2 for name in ("num-prompts", "num-samples", "prompts-per-update", "rollout-batch")}
GROUPS |= {"algorithm.update-batch": 2, "algorithm.window.size": 0}
OWN = {
    "dmd2": SINGLE,
    "dance_grpo": GROUPS,
    "dance_ppo": GROUPS | {"algorithm.value-warmup-steps": 0, "value.precision": "fp32"},
}
REWARD = {"reward.path": "tiny", "reward.frames": "first"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Callable[[str], Path]:
    """Returns a small folder of a pipeline class, which is written once."""
    root = tmp_path_factory.mktemp("pipelines")

    def written(name: str) -> Path:
        if not (root / name).exists():
            {**IMAGES, **VIDEOS}[name].write(root / name)
        return root / name

    return written


def words(method: str, folder: Path, output: Path, **more: object) -> list[str]:
    prompts = output.parent / "prompts.txt"
    prompts.write_text("\n".join(PROMPTS))
    named = {"method": method, "student.path": folder, "output": output, "prompts": prompts} | SIZE | OWN[method]
    named |= {} if method == "dmd2" else REWARD
    named |= {"video.frames": 9} if folder.name in VIDEOS else {}
    return flags(named | {key.replace("__", "."): value for key, value in more.items()})


@pytest.mark.parametrize(
    ("name", "scale"),
    [
        ("FluxPipeline", 3.0),
        ("ZImagePipeline", 3.0),
        ("Lumina2Pipeline", 3.0),
        ("HunyuanVideoPipeline", 3.0),
        ("SkyReelsV2Pipeline", 3.0),
        ("SanaPipeline", 3.0),
    ],
)
def test_diffusers_samples_an_export_as_we_do(folder, tmp_path, name, scale):
    """With the arguments that the export says: the frames of `sample`."""
    run, out = tmp_path / "run", tmp_path / "out"
    more = {"sampler__guidance_scale": scale, "sampler__negative-prompt": "a green square"}
    given = words("dance_grpo", folder(name), run, student__adapter__rank=2, **more)
    assert main(given) == 0
    said = json.loads((run / "environment.jsonl").read_text().splitlines()[0])["pipeline"]
    assert "velocity: " in said and "time: " in said
    assert main(["export", str(run), str(out)]) == 0
    about = json.loads((out / "unified_trainer.json").read_text())
    arguments = about["how"].partition("sample with ")[2].partition(" and the run's")[0].partition(";")[0]
    named = {key: literal_eval(value) for key, value in (part.split("=") for part in arguments.split(", "))}
    role = load_role(str(run), "student", None, ALONE, causal=True)
    ours = torch.cat(list(videos(role, Request.of(PROMPTS[:1]), 5, 1)))
    pipeline = DiffusionPipeline.from_pretrained(out)
    assert isinstance(pipeline.scheduler, FlowMatchEulerDiscreteScheduler)
    size = {"height": 32, "width": 32} | ({"num_frames": 9} if name in VIDEOS else {})
    negative = {"negative_prompt": "a green square"} if scale != 1 else {}
    made = pipeline(
        PROMPTS[0],
        **size,
        **negative,
        **named,
        generator=torch.Generator().manual_seed(5),
        output_type="pt",
        return_dict=False,
    )[0]
    ours = ours[:, :, 0] if made.dim() == 4 else ours.transpose(1, 2)
    torch.testing.assert_close(made.float(), ours, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("name", "conditions"), [("WanVACEPipeline", 2), ("LucyEditPipeline", 1)])
@pytest.mark.parametrize("method", ["finetune", "dance_grpo"])
def test_condition_clips_train_and_diffusers_samples_the_export_as_we_do(folder, tmp_path, name, conditions, method):
    """A row of prompts, or of clips to train on, names a clip, and a mask for a pipeline that takes one."""
    clips = [np.random.default_rng(seed).integers(256, size=(9, 64, 96, 3)).astype(np.uint8) for seed in range(3)]
    clips.append(np.where(clips[2] > 127, 255, 0).astype(np.uint8)[:, :, :, :1].repeat(3, 3))
    for number, clip in enumerate(clips):
        write_exactly(tmp_path / f"{number}.mkv", clip, 16)
    rows = [{"path": f"{n}.mkv", "caption": text} for n, text in enumerate(PROMPTS)]
    rows = [row | {"condition": ["2.mkv", "3.mkv"][:conditions]} for row in rows]
    table = tmp_path / "rows.jsonl"
    table.write_text("\n".join(map(json.dumps, rows)))
    run, out = tmp_path / "run", tmp_path / "out"
    more = {"video.height": 64, "video.width": 96, "student.adapter.rank": 2, "sampler.guidance-scale": 3.0}
    if method == "finetune":
        named = {"method": method, "student.path": folder(name), "output": run, "video.frames": 9, "data.path": table}
        given = flags(named | SIZE | {"algorithm.batch-size": 2, "algorithm.micro-batch": 1} | more)
    else:
        given = words(method, folder(name), run, **{key.replace(".", "__"): value for key, value in more.items()})
        given[given.index("--prompts") + 1] = str(table)
    assert main(given) == 0
    before, after = checkpoint_of(run, 1), checkpoint_of(run, 2)
    assert any(not torch.equal(before[key], after[key]) for key in after if key.startswith("student/weights/"))
    assert main(["export", str(run), str(out)]) == 0
    role = load_role(str(run), "student", None, ALONE, causal=True)
    requests = read_lines([str(table)], images=16)[:1]
    ours = torch.cat(list(videos(role, requests, 5, 1)))
    pipeline = DiffusionPipeline.from_pretrained(out)
    frames = [[Picture.fromarray(frame) for frame in clip] for clip in clips[2 : 2 + conditions]]

    def sampled(*frames: list[Picture.Image]) -> torch.Tensor:
        made = pipeline(
            prompt=PROMPTS[0],
            negative_prompt="",
            **dict(zip(("video", "mask"), frames, strict=False)),
            height=64,
            width=96,
            num_frames=9,
            num_inference_steps=2,
            guidance_scale=3.0,
            generator=torch.Generator().manual_seed(5),
            output_type="pt",
        ).frames
        return made.float().transpose(1, 2)

    torch.testing.assert_close(sampled(*frames), ours, rtol=0, atol=1e-4)
    for place in range(conditions):  # and each clip matters
        others = [clip[::-1] if at == place else clip for at, clip in enumerate(frames)]
        assert (sampled(*others) - ours).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"condition": "short.mkv"}, r"short\.mkv: too short"),
        ({"condition": "none.mkv"}, r"none\.mkv"),
        ({}, r"0\.mkv names 0 conditions, and the student takes 1 to 2|has 0 condition images"),
        ({"condition": ["0.mkv"] * 3}, "names 3 conditions, and the student takes 1 to 2|has 3 condition images"),
        ({"condition": "text.mkv"}, r"text\.mkv: cannot be decoded"),
    ],
)
@pytest.mark.parametrize("method", ["finetune", "dance_grpo"])
def test_condition_clips_that_cannot_be_used_are_refused(folder, tmp_path, method, changed, said, capsys):
    for name, count in (("0", 9), ("short", 3)):
        write_exactly(tmp_path / f"{name}.mkv", np.zeros((count, 64, 96, 3), np.uint8), 16)
    (tmp_path / "text.mkv").write_text("no video")
    table = tmp_path / "rows.jsonl"
    table.write_text(json.dumps({"path": "0.mkv", "caption": "a circle"} | changed))
    named = {"method": method, "student.path": folder("WanVACEPipeline"), "output": tmp_path / "run"}
    named |= {"video.frames": 9, "prompts" if method == "dance_grpo" else "data.path": table}
    assert main(flags(named | SIZE | (REWARD if method == "dance_grpo" else {}))) != 0
    assert re.search(said, " ".join(capsys.readouterr().err.split()))


def test_a_model_of_images_refuses_a_clip(folder, tmp_path, capsys):
    write_exactly(tmp_path / "0.mkv", np.zeros((9, 32, 32, 3), np.uint8), 16)
    table = tmp_path / "rows.jsonl"
    table.write_text(json.dumps({"prompt": "a circle", "image": "0.mkv"}))
    given = words("dance_grpo", folder("HunyuanSkyreelsImageToVideoPipeline"), tmp_path / "run")
    given[given.index("--prompts") + 1] = str(table)
    assert main(given) != 0
    assert "0.mkv is a clip, and this model takes an image" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("name", "method", "rank"),
    [
        ("FluxPipeline", "dmd2", 0),
        ("FluxPipeline", "dance_grpo", 2),
        ("FluxPipeline", "dance_ppo", 2),
        ("HunyuanVideoPipeline", "dmd2", 2),
        ("HunyuanVideoPipeline", "dance_grpo", 0),
    ],
)
def test_a_run_resumes_bit_for_bit(folder, tmp_path, name, method, rank):
    """Also with recomputation: its weights are those of a run that keeps all activations."""
    roles = {"dmd2": ("student", "critic"), "dance_ppo": ("student", "value")}.get(method, ("student",))
    more = {f"{role}__adapter__rank": rank for role in roles}
    more |= {f"{role}__activation-memory": "selective" for role in roles}
    assert main(words(method, folder(name), tmp_path / "whole", **more)) == 0
    first, whole = (checkpoint_of(tmp_path / "whole", step) for step in (1, 2))
    for role in roles:
        weights = [key for key in whole if key.startswith(f"{role}/weights/")]
        assert weights and any(not torch.equal(first[key], whole[key]) for key in weights)
    assert main(["--resume", str(cut_off(tmp_path / "whole", tmp_path / "half", 1))]) == 0
    assert_same(checkpoint_of(tmp_path / "half", 2), whole)


@pytest.mark.parametrize("memory", ["none", "full"])
def test_recomputation_changes_no_weight(folder, tmp_path, memory):
    ways = {"kept": memory, "again": "selective"}
    for way, kept in ways.items():
        more = {f"{role}__activation-memory": kept for role in ("student", "critic")}
        assert main(words("dmd2", folder("FluxPipeline"), tmp_path / way, steps=1, **more)) == 0
    assert_same(*(checkpoint_of(tmp_path / way, 1) for way in ways))


def test_what_is_learned_does_not_follow_from_the_precision_of_who_asks(folder):
    plain = Known(folder("FluxPipeline")).any()
    with torch.autocast("cpu", torch.bfloat16):
        assert str(Known(folder("FluxPipeline")).any()) == str(plain)


def test_plan_traces_a_block_of_each_list(folder, monkeypatch):
    """FLUX has blocks of two kinds: a few of each give the memory of all, and of those up to the middle one.

    The trace holds for any number of samples: one over two of them gives the same bytes.
    """
    path = folder("FluxPipeline")
    shape = known(path).of_size((1, 32, 32)).latents.shape
    config = json.loads((path / "transformer" / "config.json").read_text()) | {"num_layers": 3, "num_single_layers": 4}
    kind = PipelineParts(path)
    for layers in (7, 4):
        network = plan_passes.Network(kind, frozen_config(config), "fp32", False, layers, trained=True)
        for gradient in (True, False):
            how = {"text_tokens": 16, "gradient": gradient, "fresh": False}
            found = plan_passes.pass_bytes(network, shape, samples=2, **how)
            traced = plan_passes._trace(network, tuple(range(layers)), latent=shape, alone=False, **how).heights
            monkeypatch.setattr(plan_passes, "_samples", lambda _: 2)
            plan_passes._trace.cache_clear()
            plan_passes.pass_bytes.cache_clear()
            assert plan_passes.pass_bytes(network, shape, samples=2, **how) == found
            monkeypatch.undo()
            whole = [peak_of(heights, 2) for heights in traced[:3]]
            assert [found.peak, found.kept, found.backward] == pytest.approx(whole, rel=0.02)


class Network(torch.nn.Module):
    """Repeats its input, and counts its calls in a cache."""

    runs = 0

    def forward(self, x: torch.Tensor, times: torch.Tensor, cache: list[int] | None = None) -> torch.Tensor:
        type(self).runs += 1
        if cache is not None:
            cache[0] += 1
        return torch.cat([x] * (len(times) if cache is None else cache[0]))


class Masked(torch.nn.Module):
    sizes: ClassVar[list[tuple[int, ...]]] = []

    def forward(self, x, mask):
        self.sizes.append((len(x[mask]), len(x[~mask]), len(x[x[:, 0] > 0])))
        return torch.cat([x[mask], x[~mask]])


def test_answers_follow_from_shapes_whole_numbers_and_caches():
    """A second call of equal shapes does not run the network, and a network that writes to its inputs always runs."""
    network, x = WithoutMemory().prepare(Network()), torch.ones(2, 3)
    two = network(x, torch.ones(2, dtype=torch.int64))
    again = network(x + 1, torch.ones(2, dtype=torch.int64))
    assert two.shape == again.shape == (4, 3) and not torch.equal(two, again) and Network.runs == 1
    network(x, torch.zeros(2, dtype=torch.int64))
    assert Network.runs == 2
    cache = [0]
    assert [len(network(x, torch.ones(1), cache)) for _ in range(3)] == [2, 4, 6]


class Block(torch.nn.Module):
    runs = 0

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, width, device="meta")

    def forward(self, x: torch.Tensor, cache: list[int]) -> torch.Tensor:
        type(self).runs += 1
        cache[0] += cache[0] > 0
        return self.layer(x)


class Blocks(torch.nn.Module):
    def __init__(self, *widths: int) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(map(Block, widths))

    def forward(self, x: torch.Tensor, cache: list[int]) -> torch.Tensor:
        return torch.cat([block(x, cache) for block in self.blocks], 1)


def test_blocks_that_are_alike_answer_once():
    """Of each width and shape one block runs; those that write to an input, as to a cache of keys, all run."""
    network = WithoutMemory().prepare(Blocks(3, 3, 5, 3))
    for x, cache, runs in ((torch.ones(2, 3), [0], 2), (torch.ones(4, 3), [0], 4), (torch.ones(2, 3), [1], 8)):
        assert network(x, cache).shape == (len(x), 14) and Block.runs == runs


def test_a_known_mask_picks_as_many_tokens_as_it_has():
    """As Hunyuan-Image sorts its texts; a mask that follows from floats may pick any number, and here picks all."""
    network = WithoutMemory().prepare(Masked())
    assert [len(network(torch.ones(3, 2), torch.tensor([True, known, False]))) for known in (True, False)] == [3, 3]
    assert network.sizes == [(2, 1, 3), (1, 2, 3)]


@pytest.mark.filterwarnings("ignore:Mismatch dtype")  # of torch, about norms
def test_an_adapter_that_was_trained_in_bf16_is_exported(folder, tmp_path):
    """It is compared in float32; diffusers reads it, and merged it is in the weights."""
    run = tmp_path / "run"
    more = {"student__precision": "bf16", "student__adapter__rank": 2, "student__learning-rate": 1e-2, "steps": 1}
    assert main(words("dance_grpo", folder("FluxPipeline"), run, **more)) == 0
    assert main(["export", str(run), str(tmp_path / "merged"), "--components", "none"]) == 0
    assert main(["export", str(run), str(tmp_path / "peft"), "--adapter", "peft"]) == 0
    assert not (tmp_path / "merged" / "model_index.json").exists()
    pipeline = DiffusionPipeline.from_pretrained(folder("FluxPipeline"))
    pipeline.load_lora_weights(tmp_path / "peft")
    pipeline.fuse_lora()
    pipeline.unload_lora_weights()
    merged = type(pipeline.transformer).from_pretrained(tmp_path / "merged" / "transformer").state_dict()
    weights = pipeline.transformer.state_dict()
    assert weights.keys() == merged.keys()
    for key, weight in merged.items():
        torch.testing.assert_close(weights[key], weight, msg=key)


@pytest.mark.parametrize("name", ["FluxPipeline", "HunyuanVideoPipeline"])
def test_two_ranks_share_the_weights(folder, tmp_path, name):
    more = {"student__adapter__rank": 2, "critic__adapter__rank": 2, "parallel__shard": 1}
    assert main(words("dmd2", folder(name), tmp_path / "one", **more)) == 0
    given = words("dmd2", folder(name), tmp_path / "two", **more | {"parallel__shard": 2})
    done = program("-m", "unified_trainer", *given, ranks=2)
    assert done.returncode == 0, done.stderr
    assert_one_training(tmp_path / "one", tmp_path / "two", 2)


def test_a_general_recipe_gives_way_and_names_what_it_lacks(folder, tmp_path, capsys):
    """The size is the pipeline's own, or it is asked for; `plan` says what was learned."""
    flux = words("dmd2", folder("FluxPipeline"), tmp_path / "run")
    run = parse([word for word in flux if word not in ("--video.height", "--video.width", "32")])
    pipeline = DiffusionPipeline.from_pretrained(folder("FluxPipeline"))
    side = pipeline.default_sample_size * pipeline.vae_scale_factor
    assert (run.recipe, run.video.frames, run.video.height, run.video.width) == ("general-images", 1, side, side)
    assert parse(flux).video.height == 32
    assert parse(words("dmd2", folder("HunyuanVideoPipeline"), tmp_path / "run")).recipe == "general-videos"
    assert main(["plan", *flux, "--hardware", "2xH100"]) == 0
    said = capsys.readouterr().out
    assert "latents: hidden_states [4, 64]" in " ".join(said.split()) and "fits 2 x H100" in said
