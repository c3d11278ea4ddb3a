"""The pipeline of an export: the code of its README.md makes the very videos of `sample`, for every kind of export."""

import ast
import functools
import inspect
import json
import os
import re
import subprocess
import sys
import typing
from pathlib import Path

import diffusers
import numpy as np
import pytest
import torch
import yaml
from diffusers import DiffusionPipeline, FlowMatchEulerDiscreteScheduler, WanPipeline
from diffusers.utils import dynamic_modules_utils
from expert_world import expert_folder
from helpers import ALONE, WAN, copy_of, files_of, flags, run

from unified_trainer.__main__ import main
from unified_trainer.basics.requests import Request
from unified_trainer.models.wan import exported_pipeline
from unified_trainer.tools.load_run import load_role
from unified_trainer.tools.sample.sample import of_length, videos

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight:UserWarning"),  # RMSNorm in bf16
    pytest.mark.filterwarnings("ignore:`torch_dtype` is deprecated:FutureWarning"),  # the name in every version
]

OTHERS = [folder for folder in os.environ.get("DIFFUSERS_FOLDERS", "").split(os.pathsep) if folder]
MOVING = {"student.learning-rate": 1e-2, "student.warmup-updates": 0}
ADAPTER = MOVING | {"student.adapter.rank": 2, "student.adapter.alpha": 3}
PROMPTS = ["a red circle moving left", "blue square moves up"]
FEW = {"num_steps": 4, "solver": "sde", "guidance_scale": 1.0, "shift": 5.0}
CHUNKS = {"chunk_frames": 1, "window_frames": 3, "sink_frames": 1, "context_noise": 0.1}
SIZE = {"frames": 9, "height": 32, "width": 32}
SAMPLERS = {
    "ode": {"num_steps": 3, "solver": "ode", "guidance_scale": 3.0, "negative_prompt": "a green triangle"},
    "sde": FEW,
    "uneven": FEW | {"step_sigmas": [0.95, 0.6, 0.5, 0.2]},
    "causal": FEW | {"chunks": {"chunk_frames": 1}},
    "causal with guidance": FEW | {"guidance_scale": 2.0, "chunks": CHUNKS},
    "causal after a first frame": FEW
    | {"solver": "ode", "chunks": {"chunk_frames": 2, "independent_first_frame": True, "window_frames": 3}},
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Runs of one network and of two experts, with all weights trained or an adapter."""
    root = tmp_path_factory.mktemp("runs")
    two = {"student.path": expert_folder(root / "two-wan")}
    run("finetune", root / "whole", *flags(MOVING))
    run("finetune", root / "adapter", *flags(ADAPTER))
    run("finetune", root / "experts", *flags(ADAPTER | two))
    run("finetune", root / "split", *flags(ADAPTER | {"student.boundary": 0.8}))
    return root


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    """The folder of this test: diffusers copies pipelines into its cache, and code is run, there."""
    monkeypatch.setattr(dynamic_modules_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(tmp_path / "modules")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def with_sampler(folder, to, **settings):
    """Copy a run and change its settings: its weights fit any sampler and any size."""
    copied = copy_of(folder, to)
    config = yaml.safe_load((copied / "config.yaml").read_text())
    for section, values in ({"video": SIZE} | settings).items():
        config[section] |= values
    (copied / "config.yaml").write_text(yaml.safe_dump(config))
    return copied


def sampled(folder, seed: int, frames: int = 0, prompts=PROMPTS) -> torch.Tensor:
    one = load_role(str(folder), "student", None, ALONE, causal=True)
    one = of_length(one, frames, None, None, len(prompts))
    return torch.cat(list(videos(one, Request.of(prompts), seed, len(prompts))))


def exported(folder, *words: str):
    assert main(["export", str(folder), "out", *words]) == 0
    return functools.partial(DiffusionPipeline.from_pretrained, "out", custom_pipeline="pipeline")


def piped(pipeline, seed: int, prompts=PROMPTS, **options) -> torch.Tensor:
    generators = [torch.Generator().manual_seed(seed + i) for i in range(len(prompts))]
    return pipeline(list(prompts), generator=generators, output_type="pt", **options).frames.movedim(1, 2)


def run_readme(folder) -> np.ndarray:
    """Run the code of an export's README.md and return its frames."""
    (code,) = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    names: dict[str, object] = {}
    exec(code, names)
    return names["frames"]


# One network, every sampler.


@pytest.mark.parametrize("name", SAMPLERS)
def test_every_sampler_gives_the_same_bits(runs, place, name):
    """For one prompt and for several, in batches of the same size."""
    folder = with_sampler(runs / "whole", place / "run", sampler=SAMPLERS[name])
    pipeline = exported(folder)(trust_remote_code=True)
    ours, theirs = sampled(folder, 5), piped(pipeline, 5)
    assert torch.equal(ours, theirs)
    for prompts in (PROMPTS[:1], [*PROMPTS, "something else"]):
        assert torch.equal(sampled(folder, 5, prompts=prompts), piped(pipeline, 5, prompts))
    assert float(ours.std()) > 0.01 and not torch.equal(theirs, piped(pipeline, 6))
    WanPipeline.from_pretrained("out")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_longer_video_moves_a_rolling_sink(runs, place, precision):
    sampler = FEW | {"guidance_scale": 2.0, "chunks": CHUNKS | {"rolling_sink": True}}
    folder = with_sampler(runs / "whole", place / "run", sampler=sampler, student={"precision": precision})
    ours = sampled(folder, 5, frames=33)
    assert torch.equal(ours, piped(exported(folder)(trust_remote_code=True), 5, num_frames=33))
    fixed = with_sampler(folder, place / "fixed", sampler=FEW | {"guidance_scale": 2.0, "chunks": CHUNKS})
    assert not torch.equal(ours, sampled(fixed, 5, frames=33))


def test_a_longer_video_of_a_causal_student(runs, place):
    """It attends to the past of the run, as `sample` does; afterwards the network is the bidirectional one again."""
    folder = with_sampler(runs / "whole", place / "run", sampler=SAMPLERS["causal"])
    pipeline = exported(folder)(trust_remote_code=True)
    before = [block.attn1.processor for block in pipeline.transformer.blocks]
    assert torch.equal(sampled(folder, 5, frames=17), piped(pipeline, 5, num_frames=17))
    assert [block.attn1.processor for block in pipeline.transformer.blocks] == before
    assert not pipeline.transformer.rope._forward_pre_hooks
    with pytest.raises(ValueError, match=r"num_frames must be 4k \+ 1 .* multiples of 16, not 16, 32 and 32"):
        pipeline(PROMPTS, num_frames=16)
    with pytest.raises(ValueError, match="3 latent frames are no multiple of chunk_frames, 2"):
        pipeline.sampler = exported_pipeline.Sampler(**{**vars(pipeline.sampler), "chunk_frames": 2})
        pipeline(PROMPTS, num_frames=9)


@pytest.mark.parametrize("name", ["sde", "causal with guidance"])
def test_half_precision(runs, place, name):
    """Passes in bf16 make the same bits; weights in bf16 differ by their rounding. Afterwards no norm has a hook."""
    folder = with_sampler(runs / "whole", place / "run", sampler=SAMPLERS[name], student={"precision": "bf16"})
    ours = sampled(folder, 5)
    pipeline = exported(folder)(trust_remote_code=True)
    assert torch.equal(piped(pipeline, 5), ours)
    assert not any(layer._forward_pre_hooks for layer in pipeline.transformer.modules())
    (place / "out").rename("whole")
    half = exported(folder, "--dtype", "bf16")(trust_remote_code=True, dtype={"transformer": torch.bfloat16})
    assert half.transformer.dtype == torch.bfloat16
    difference = (ours - piped(half, 5)).abs().max()
    assert 0 < float(difference) < 0.3  # .04 to .22, by noise and the bf16 instructions that the CPU has


def test_the_code_of_the_model_card_names_the_precision_of_the_encoders(runs, place):
    half = {"text_precision": "bf16", "vae_precision": "bf16"}
    folder = with_sampler(runs / "whole", place / "run", sampler=FEW, encoders=half)
    exported(folder)
    frames = torch.from_numpy(run_readme(place / "out"))
    assert torch.equal(sampled(folder, 0, prompts=PROMPTS[:1])[0].movedim(0, 3), frames)


# Adapters and experts.


@pytest.mark.parametrize(
    ("kind", "adapter"), [("adapter", "merge"), ("adapter", "peft"), ("experts", "published"), ("split", "peft")]
)
def test_the_code_of_the_model_card(runs, place, kind, adapter):
    """It runs as it is, and its video is that of `sample` up to float32 rounding in the sum of base and adapter."""
    scale = 2.0 if kind == "adapter" else [2.0, 1.0]
    folder = with_sampler(runs / kind, place / "run", sampler=FEW | {"guidance_scale": scale})
    base = runs / "two-wan" if kind == "experts" else WAN
    (place / base.name).symlink_to(base)
    exported(folder, "--adapter", adapter)
    frames = torch.from_numpy(run_readme(place / "out"))
    difference = (sampled(folder, 0, prompts=PROMPTS[:1])[0].movedim(0, 3) - frames).abs().max()
    assert float(difference) < 1e-5


def test_diffusers_loads_the_peft_export(runs, place):
    """`load_lora_weights` of WanPipeline reads the file of diffusers, with alpha and rank from its metadata."""
    exported(runs / "adapter", "--adapter", "peft")
    pipeline = WanPipeline.from_pretrained(WAN)
    pipeline.load_lora_weights("out")
    role = load_role(str(runs / "adapter"), "student", None, ALONE, causal=False).role
    with role.running() as model, torch.no_grad():
        expected = model.velocity(*model.example())
        model.network = pipeline.transformer
        torch.testing.assert_close(model.velocity(*model.example()), expected, rtol=0, atol=1e-5)
        pipeline.disable_lora()
        assert float((model.velocity(*model.example()) - expected).abs().max()) > 1e-3


# Other versions of diffusers.


def test_the_constructor_has_annotations_that_diffusers_reads_from_0_35_on():
    """Up to 0.36 it takes a class or a typing.Union for the type of a component, and finds none in `X | None`."""
    parameters = dict(inspect.signature(exported_pipeline.TrainedWanPipeline.__init__, eval_str=True).parameters)
    del parameters["self"]
    kinds = {name: parameter.annotation for name, parameter in parameters.items()}
    assert all(inspect.isclass(kind) or typing.get_origin(kind) is typing.Union for kind in kinds.values()), kinds
    ast.parse(Path(exported_pipeline.__file__).read_text(), feature_version=(3, 10))


@pytest.mark.skipif(
    not OTHERS, reason="DIFFUSERS_FOLDERS names no folders of `pip install --target ... diffusers==...`"
)
@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize(
    ("kind", "name", "words"),
    [
        ("whole", "sde", ()),
        ("whole", "causal with guidance", ()),
        ("whole", "ode", ("--dtype", "bf16")),
        ("adapter", "sde", ("--adapter", "peft")),
        ("split", "sde", ("--adapter", "published")),
    ],
)
def test_the_code_of_the_model_card_runs_on_other_versions(runs, place, other, kind, name, words):
    folder = with_sampler(runs / kind, place / "run", sampler=SAMPLERS[name])
    (place / "wan").symlink_to(WAN)
    exported(folder, *words)
    (code,) = re.findall(r"```python\n(.*?)```", (place / "out" / "README.md").read_text(), re.DOTALL)
    code += "\nimport diffusers, numpy\nprint(diffusers.__file__)\nnumpy.save('frames.npy', frames)"
    told = os.environ | {"PYTHONPATH": other, "HF_HOME": str(place / "cache"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=told, capture_output=True, text=True, cwd=place)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(other)
    expected = sampled(folder, 0, prompts=PROMPTS[:1])[0].movedim(0, 3).numpy()
    assert np.abs(np.load("frames.npy") - expected).max() < (0.3 if "bf16" in words else 1e-4)


# The shipped files.


def test_an_export_of_an_export_leaves_it_as_it_is(runs, place):
    """The components of the base are hard links; the sampler beside them is written anew."""
    for name in ("causal", "uneven"):
        with_sampler(runs / "whole", place / name, sampler=SAMPLERS[name])
    exported(place / "causal")
    before = files_of(place / "out")
    assert main(["export", "uneven", "again", "--base", "out"]) == 0
    assert files_of(place / "out") == before
    sampler = json.loads((place / "again" / "scheduler" / "sampler.json").read_text())
    assert sampler["chunk_frames"] == 0 and len(sampler["sigmas"]) == 5


@pytest.mark.parametrize("adapter", ["peft", "published"])
def test_an_adapter_brings_its_scheduler(runs, place, adapter):
    exported(with_sampler(runs / "adapter", place / "run", sampler=SAMPLERS["ode"]), "--adapter", adapter)
    scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained("out", subfolder="scheduler")
    scheduler.set_timesteps(3)
    levels = json.loads((place / "out" / "scheduler" / "sampler.json").read_text())["sigmas"]
    torch.testing.assert_close(scheduler.sigmas.double(), torch.tensor(levels, dtype=torch.float64), rtol=0, atol=1e-6)


def test_the_shipped_file_is_the_packages_and_needs_no_more_than_diffusers_does(runs, place):
    exported(runs / "whole", "--components", "none")
    text = (place / "out" / "pipeline.py").read_text()
    assert text == Path(exported_pipeline.__file__).read_text()
    imported = set(re.findall(r"^(?:from|import) (\w+)", text, re.MULTILINE))
    assert imported == {
        "functools",
        "itertools",
        "math",
        "collections",
        "dataclasses",
        "pathlib",
        "PIL",
        "safetensors",
        "torch",
        "transformers",
        "diffusers",
        "typing",
    }
    assert f"runs on diffusers 0.35 to {diffusers.__version__}" in (place / "out" / "README.md").read_text()
