"""Wan2.2-TI2V-5B from text: its folder is sampled as by diffusers, trained, resumed and exported."""

import pytest
import torch
from diffusers import DiffusionPipeline, FlowMatchEulerDiscreteScheduler, WanPipeline
from diffusers.utils import dynamic_modules_utils
from forked import program
from helpers import ALONE, assert_one_training, assert_same, checkpoint_of, cut_off, flags
from ti2v_folder import ti2v_folder

from unified_trainer.__main__ import main
from unified_trainer.basics.requests import Request
from unified_trainer.run.settings.command_line import parse
from unified_trainer.tools.load_run import load_role
from unified_trainer.tools.plan.architecture import architecture_of
from unified_trainer.tools.sample.sample import videos

pytestmark = pytest.mark.slow

PROMPTS = ["a red circle moving left", "blue square moves up"]
SIZE = {"recipe": "tiny", "video.frames": 5, "video.height": 64, "video.width": 32, "sampler.num-steps": 3, "steps": 2}
SIZE |= {"validate-every": 0, "student.learning-rate": 1e-3, "student.warmup-updates": 0}
SINGLE = {"algorithm.batch-size": 2, "algorithm.micro-batch": 1}
GROUPS = {"algorithm.num-prompts": 2, "algorithm.num-samples": 2, "algorithm.prompts-per-update": 2}
GROUPS |= {"algorithm.rollout-batch": 2, "algorithm.update-batch": 2}
CLIPS = {"data.num-clips": 2, "video.frames": 17, "video.height": 64, "video.width": 64}
MATCHING = SINGLE | {"algorithm.student-every": 1}
# One method of each kind: clips, matching a teacher, chunks in two lengths, rewards. Of a family others ask the same.
OWN = {"finetune": SINGLE | CLIPS, "dmd2": MATCHING, "self_forcing": MATCHING}
OWN |= {"long_self_forcing": MATCHING | {"video.frames": 13, "algorithm.teacher-frames": 2}}
OWN |= {"dance_grpo": GROUPS, "reward_gradient": SINGLE}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return ti2v_folder(tmp_path_factory.mktemp("models") / "ti2v")


def words(method: str, folder, output, **more: object) -> list[str]:
    named = {"method": method, "student.path": folder, "output": output} | SIZE | OWN[method] | more
    return flags({key.replace("__", "."): value for key, value in named.items()})


@pytest.mark.parametrize("method", OWN)
def test_every_kind_of_method_trains_and_resumes_bit_for_bit(folder, tmp_path, method):
    assert main(words(method, folder, tmp_path / "whole", **{"checkpoint-every": 1})) == 0
    assert main(["--resume", str(cut_off(tmp_path / "whole", tmp_path / "half", 1))]) == 0
    whole, half = (checkpoint_of(tmp_path / name, 2) for name in ("whole", "half"))
    assert_same(half, whole)
    assert whole["student/weights/patch_embedding.weight"].shape == (24, 48, 1, 2, 2)


@pytest.mark.ranks
def test_two_ranks_share_the_weights(folder, tmp_path):
    assert main(words("dmd2", folder, tmp_path / "one")) == 0
    done = program("-m", "unified_trainer", *words("dmd2", folder, tmp_path / "two", device="cpu"), ranks=2)
    assert done.returncode == 0, done.stderr
    assert_one_training(tmp_path / "one", tmp_path / "two", 2)


@pytest.mark.parametrize(("rank", "memory"), [(0, "none"), (2, "full")])
def test_diffusers_samples_an_export_as_we_do(folder, tmp_path, monkeypatch, rank, memory):
    """Bit for bit with pipeline.py, but for an adapter that is merged; up to rounding with diffusers' own pipeline.

    Diffusers' pipeline gives each token a time.
    """
    monkeypatch.setattr(dynamic_modules_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(tmp_path / "modules")
    more = {"student__adapter.rank": rank, "student__activation-memory": memory, "sampler__guidance-scale": 3.0}
    assert main(words("finetune", folder, tmp_path / "run", **more)) == 0
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    role = load_role(str(tmp_path / "run"), "student", None, ALONE, causal=True)
    ours = torch.cat(list(videos(role, Request.of(PROMPTS), 5, 2)))
    pipelines = [
        DiffusionPipeline.from_pretrained(tmp_path / "out", custom_pipeline="pipeline", trust_remote_code=True),
        WanPipeline.from_pretrained(tmp_path / "out"),
    ]
    assert pipelines[1].config.expand_timesteps
    assert isinstance(pipelines[1].scheduler, FlowMatchEulerDiscreteScheduler)
    size = {"num_frames": 17, "height": 64, "width": 64, "num_inference_steps": 3, "guidance_scale": 3.0}
    size["max_sequence_length"] = pipelines[1].tokenizer.model_max_length  # the tiny world's prompts are short
    made = []
    for pipeline, options in zip(pipelines, ({}, size), strict=True):
        noise = [torch.Generator().manual_seed(5 + i) for i in range(2)]
        made.append(pipeline(PROMPTS, generator=noise, output_type="pt", **options).frames.movedim(1, 2))
    assert torch.equal(made[0], ours) or rank
    torch.testing.assert_close(made[0], ours, rtol=0, atol=2e-5)
    assert float(ours.std()) > 0.01
    torch.testing.assert_close(made[1], ours, rtol=0, atol=2e-5)


def test_the_published_sizes_are_known(folder):
    run = parse(["--method", "dmd2", "--recipe", "wan2.2-ti2v-5b"])
    found = architecture_of("student", "", run)
    assert "Wan-AI/Wan2.2-TI2V-5B-Diffusers" in found.source
    assert found.size.parameters == 4_999_787_712 and found.vae_weights == 704_688_668
    assert found.latent_shape(121, 704, 1280) == (48, 31, 44, 80)
    given = ["--method", "finetune", "--recipe", "tiny", "--student.path", str(folder), "--video.width", "64"]
    assert main(["plan", *given, "--hardware", "H100"]) == 0
