"""Runs of pipelines that no family was written for: from the command line to the export."""

import json
from ast import literal_eval
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from diffusers import DiffusionPipeline, FlowMatchEulerDiscreteScheduler
from helpers import ALONE, flags
from pipelines.images import IMAGES
from pipelines.videos import VIDEOS

from unified_trainer.__main__ import main
from unified_trainer.basics.requests import Request
from unified_trainer.tools.load_run import load_role
from unified_trainer.tools.sample.sample import videos

PROMPTS = ("a red circle", "a blue square moving left over the green cat")
SIZE = {"video.height": 32, "video.width": 32, "sampler.num-steps": 2, "steps": 2, "checkpoint-every": 1}
SIZE |= {"validate-every": 0, "student.learning-rate": 1e-3, "student.warmup-updates": 0, "student.precision": "fp32"}
SIZE |= {"encoders.text_precision": "fp32", "device": "cpu"}
SINGLE = {"algorithm.batch-size": 2, "algorithm.micro-batch": 1, "algorithm.student-every": 1}
GROUPS = {f"algorithm.{name}": 2 for name in ("num-prompts", "num-samples", "prompts-per-update", "rollout-batch")}
GROUPS |= {"algorithm.update-batch": 2, "algorithm.window.size": 0}
OWN = {"dmd2": SINGLE, "dance_grpo": GROUPS, "dance_ppo": GROUPS | {"algorithm.value-warmup-steps": 0}}
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
        ("Lumina2Pipeline", 1.0),
        ("HunyuanVideoPipeline", 3.0),
        ("SkyReelsV2Pipeline", 3.0),
        ("SanaPipeline", 1.0),
    ],
)
def test_diffusers_samples_an_export_as_we_do(folder, tmp_path, name, scale):
    """With the arguments that the export says: the frames of `sample`."""
    run, out = tmp_path / "run", tmp_path / "out"
    given = words("dance_grpo", folder(name), run, sampler__guidance_scale=scale, student__adapter__rank=2)
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
    negative = {"negative_prompt": ""} if scale != 1 else {}
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
    torch.testing.assert_close(made.float(), ours, rtol=0, atol=2e-5)
