"""Runs of two experts from the command line: folders, checkpoints, exports and refused settings."""

import json
import shutil

import pytest
import torch
from diffusers import WanPipeline, WanTransformer3DModel
from expert_world import change_index, expert_folder
from helpers import ALONE, SMALL, WAN, assert_same, checkpoint_of, cut_off, flags, metrics_of, refused, run
from peft import PeftModel
from safetensors.torch import load_file

from unified_trainer.__main__ import main
from unified_trainer.basics.requests import Request
from unified_trainer.models.wan.model import WanModel
from unified_trainer.run.registry import family_of
from unified_trainer.tools.load_run import load_role
from unified_trainer.tools.sample.sample import videos

pytestmark = pytest.mark.slow

MOVING = flags({"student.learning-rate": 1e-2, "student.warmup-updates": 0, "student.ema-decay": 0.5})
MOVING += flags({"algorithm.shift": 12})  # then 63% of the noise levels are above the boundary
COMPONENTS = {"high": "transformer", "low": "transformer_2"}
FILE = "diffusion_pytorch_model.safetensors"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The tiny world with a second transformer, boundary .875."""
    return expert_folder(tmp_path_factory.mktemp("experts") / "wan")


@pytest.fixture(scope="module")
def saved(tmp_path_factory, folder):
    """A short run of both experts, with different learning rates."""
    output = tmp_path_factory.mktemp("saved") / "run"
    rates = flags({"student.high.learning-rate": 2e-3, "student.path": folder})
    run("finetune", output, "--steps", "2", "--checkpoint-every", "1", *MOVING, *rates)
    return output


def held(output, kind: str = "weights", step: int = 2) -> dict[str, dict[str, torch.Tensor]]:
    """Return the tensors of each expert in a checkpoint."""
    found = checkpoint_of(output, step)
    prefixes = {expert: f"student/{kind}/{expert}/" for expert in COMPONENTS}
    return {
        expert: {key.removeprefix(prefix): value for key, value in found.items() if key.startswith(prefix)}
        for expert, prefix in prefixes.items()
    }


# Folders.


def test_the_folder_gives_the_number_of_networks(folder):
    family, path = family_of("student", str(folder))
    assert family.networks(path) == (("transformer", "transformer_2"), 0.875)
    assert family.networks(WAN) == (("transformer",), None)


def test_both_experts_learn_from_their_own_weights(saved, folder):
    for expert, component in COMPONENTS.items():
        before, after = load_file(folder / component / FILE), held(saved)[expert]
        assert before.keys() == after.keys()
        key = "proj_out.weight"
        assert 0 < float((after[key] - before[key]).abs().max()) < 0.05
    rates = {key for line in metrics_of(saved) for key in line if "learning_rate" in key}
    assert rates == {"train/student/high/learning_rate", "train/student/low/learning_rate"}


def test_one_network_becomes_two_experts(tmp_path):
    """Both experts start from the network, and each is trained at its own noise levels."""
    run("finetune", tmp_path / "run", "--steps", "2", "--student.boundary", "0.6", *MOVING)
    both, base = held(tmp_path / "run"), load_file(WAN / "transformer" / FILE)
    assert base.keys() == both["high"].keys() == both["low"].keys()
    assert not torch.equal(both["high"]["proj_out.weight"], both["low"]["proj_out.weight"])


def test_a_resumed_run_equals_the_uninterrupted_one(saved, tmp_path):
    straight = tmp_path / "straight"
    options = ("--student.boundary", "0.6", "--student.high.no-trained", *MOVING)
    run("finetune", straight, "--steps", "2", "--checkpoint-every", "1", *options)
    assert main(["--resume", str(cut_off(straight, tmp_path / "halved", 1))]) == 0
    assert metrics_of(tmp_path / "halved") == metrics_of(straight)
    assert_same(checkpoint_of(tmp_path / "halved", 2), checkpoint_of(straight, 2))
    assert not held(straight)["high"] and held(straight)["low"]


# Export, and runs that start from it.


def test_diffusers_loads_both_and_switches_at_our_boundary(saved, tmp_path):
    assert main(["export", str(saved), str(tmp_path / "out")]) == 0
    pipeline = WanPipeline.from_pretrained(tmp_path / "out")
    assert pipeline.config.boundary_ratio == 0.875
    for expert, network in (("high", pipeline.transformer), ("low", pipeline.transformer_2)):
        assert_same(dict(network.state_dict()), held(saved)[expert])
    about = json.loads((tmp_path / "out" / "unified_trainer.json").read_text())
    assert about["boundary"] == 0.875
    run("finetune", tmp_path / "next", "--student.path", str(tmp_path / "out"), "--student.learning-rate", "0")
    for expert in COMPONENTS:
        assert_same(held(tmp_path / "next", step=1)[expert], held(saved)[expert])


def test_the_pipeline_makes_the_video_that_sample_makes(saved, folder, tmp_path):
    """Expert and guidance scale are equal at every step; diffusers calls the low-noise expert's guidance_scale_2."""
    output = tmp_path / "run"
    scales = ["--sampler.guidance-scale", "4", "2", "--sampler.num-steps", "4", "--sampler.shift", "5"]
    run("finetune", output, "--init-from", str(saved), "--student.path", str(folder), *scales)
    assert main(["export", str(output), str(tmp_path / "out")]) == 0
    about = json.loads((tmp_path / "out" / "unified_trainer.json").read_text())
    assert "guidance_scale=4.0, guidance_scale_2=2.0" in about["how"]
    trained = load_role(str(output), "student", None, ALONE, causal=True)
    (ours,) = videos(trained, Request.of(["a red circle moving left"]), seed=3, batch=1)
    pipeline = WanPipeline.from_pretrained(tmp_path / "out")
    pipeline.set_progress_bar_config(disable=True)
    size = trained.run.video
    theirs = pipeline(
        "a red circle moving left",
        negative_prompt=trained.run.sampler.negative_prompt,
        height=size.height,
        width=size.width,
        num_frames=size.frames,
        num_inference_steps=4,
        guidance_scale=4.0,
        guidance_scale_2=2.0,
        max_sequence_length=16,
        generator=torch.Generator().manual_seed(3),
        output_type="pt",
    ).frames
    torch.testing.assert_close(theirs.transpose(1, 2), ours, rtol=0, atol=2e-3)


@pytest.mark.parametrize("one_base", [True, False])
def test_experts_as_adapters_are_folded_in_or_written_alone(one_base, folder, tmp_path):
    """For one base and for two, the merged folder and the adapters on their bases predict the same."""
    start = ("--student.boundary", "0.875") if one_base else ("--student.path", str(folder))
    run("finetune", tmp_path / "run", "--steps", "2", "--student.adapter.rank", "2", *start, *MOVING)
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "merged")]) == 0
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "alone"), "--adapter", "peft"]) == 0
    answers = {}
    for expert, component in COMPONENTS.items():
        start = WAN / "transformer" if one_base else folder / component
        base = WanTransformer3DModel.from_pretrained(start)
        before = velocity(base)
        PeftModel.from_pretrained(base, tmp_path / "alone" / component)
        merged = WanTransformer3DModel.from_pretrained(tmp_path / "merged" / component)
        answers[expert] = velocity(merged)
        torch.testing.assert_close(velocity(base), answers[expert], rtol=1e-4, atol=1e-5)
        assert not torch.allclose(answers[expert], before, atol=1e-4)
    assert not torch.allclose(answers["high"], answers["low"], atol=1e-4)


def test_published_adapters_are_what_diffusers_loads_into_each_transformer(folder, tmp_path):
    """Two files under Wan's names on the two bases predict what the merged folder does, alpha / rank included."""
    adapter = ("--student.adapter.rank", "2", "--student.adapter.alpha", "3", "--student.path", str(folder))
    run("finetune", tmp_path / "run", "--steps", "2", *adapter, *MOVING)
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "merged")]) == 0
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "alone"), "--adapter", "published"]) == 0
    pipeline = WanPipeline.from_pretrained(folder)
    for expert, component in COMPONENTS.items():
        file = f"{expert}_noise_model.safetensors"
        before = velocity(pipeline.components[component])
        second = component == "transformer_2"
        pipeline.load_lora_weights(
            tmp_path / "alone", weight_name=file, load_into_transformer_2=second, adapter_name=expert
        )
        merged = WanTransformer3DModel.from_pretrained(tmp_path / "merged" / component)
        torch.testing.assert_close(velocity(pipeline.components[component]), velocity(merged), rtol=1e-4, atol=1e-5)
        assert not torch.allclose(velocity(merged), before, atol=1e-4)
    keys = load_file(tmp_path / "alone" / file)
    assert "diffusion_model.blocks.0.self_attn.q.lora_down.weight" in keys
    assert keys["diffusion_model.blocks.0.ffn.0.alpha"] == 3


def test_two_experts_in_the_layout_of_wans_own_code(saved, tmp_path):
    assert main(["export", str(saved), str(tmp_path / "out"), "--layout", "wan"]) == 0
    for expert, component in COMPONENTS.items():
        weights = load_file(tmp_path / "out" / f"{expert}_noise_model" / FILE)
        assert torch.equal(weights["blocks.0.ffn.2.bias"], held(saved)[expert]["blocks.0.ffn.net.2.bias"]), component


@torch.no_grad()
def velocity(network) -> torch.Tensor:
    model = WanModel(network)
    return model.velocity(*model.example())


def test_init_from_initialises_both_or_says_why_not(saved, folder, tmp_path, capsys):
    path = ("--student.path", str(folder))
    run("finetune", tmp_path / "next", *path, "--init-from", str(saved), "--student.learning-rate", "0")
    for expert in COMPONENTS:
        assert_same(held(tmp_path / "next", step=1)[expert], held(saved)[expert])
    one_of_two = ("--student.high.no-trained", *path)
    for options, here in (((), "one network"), (one_of_two, "the low noise expert")):
        message = refused(capsys, *SMALL["finetune"], "--output", tmp_path / "refused", "--init-from", saved, *options)
        assert f"holds the high and low noise expert of student, this run trains {here}" in message
        assert f"export {saved} DIR` and start from --student.path DIR" in message


def test_a_frozen_expert_is_exported_unchanged(folder, tmp_path):
    run("finetune", tmp_path / "run", "--student.path", str(folder), "--student.low.no-trained", *MOVING)
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    assert_same(load_file(tmp_path / "out" / "transformer_2" / FILE), load_file(folder / "transformer_2" / FILE))
    written, before = (load_file(f / "transformer" / FILE) for f in (tmp_path / "out", folder))
    assert not torch.equal(written["proj_out.weight"], before["proj_out.weight"])


# Any role.


@pytest.mark.parametrize("two", [("teacher",), ("student",), ("student", "teacher", "critic")])
def test_dmd2_with_experts_in_any_role(two, folder, tmp_path):
    """A teacher with two experts and a student with one, the reverse, and all roles with two."""
    paths = {name: str(folder) if name in two else "tiny" for name in ("student", "teacher", "critic")}
    small = {"data.num-clips": 4, "algorithm.batch-size": 2, "algorithm.micro-batch": 1, "steps": 2}
    small |= {"algorithm.student-every": 1, "validate-every": 0, "validation.num-samples": 2}
    small |= {"video.frames": 5, "video.height": 32, "video.width": 32}
    options = flags(
        {"method": "dmd2", "recipe": "tiny", "output": tmp_path / "run"}
        | small
        | {f"{k}.path": v for k, v in paths.items()}
    )
    assert main([*options, "--student.adapter.rank", "2"]) == 0
    keys = checkpoint_of(tmp_path / "run", 2)
    for name in ("student", "critic"):
        experts = {one for one in COMPONENTS if any(key.startswith(f"{name}/weights/{one}/") for key in keys)}
        assert experts == (set(COMPONENTS) if name in two else set())


# Wrong settings, refused before any weight is read.

DANCE, TUNE = SMALL["dance_grpo"], SMALL["finetune"]
DMD = flags({"method": "dmd2"})
ONE_EXPERT = ("--student.boundary", "0.5", "--student.low.no-trained")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ((*TUNE, "--student.boundary", "1.5"), "student.boundary must be at least 0 and below 1, not 1.5"),
        (
            (*TUNE, "--student.high.learning-rate", "0.1"),
            "student.high and student.low are settings of two experts, but tiny",
        ),
        ((*DMD, "--teacher.boundary", "0.5"), "teacher.boundary: tiny holds one network"),
        (
            (*TUNE, *ONE_EXPERT, "--student.high.no-trained"),
            "student.high.trained and student.low.trained are both off",
        ),
        ((*TUNE, "--student.boundary", "0.5", "--student.low.offload"), "set --student.low.no-trained"),
        ((*TUNE, "--sampler.guidance-scale", "3", "2"), "(3.0, 2.0) is for two experts, but student is one network"),
        ((*DMD, "--algorithm.guidance-scale", "3", "2"), "but teacher is one network: give one number"),
        ((*TUNE, "--student.expert-balance", "equal"), "student.expert_balance must be mixed: it chooses between two"),
        (
            (*DMD, "--critic.boundary", "0.99", "--critic.expert-balance", "equal"),
            "critic.expert_balance equal needs noise levels on both sides of the boundary, but the high-noise expert "
            "has 0% of them",
        ),
        (
            (*DMD, *ONE_EXPERT[:2], "--student.high.no-trained"),
            "sampler.step_sigmas lies wholly in the expert of student that is not trained: noise levels 1, 0.9375, "
            "0.8333",
        ),
        (
            (
                *DANCE,
                "--sampler.shift",
                "5",
                "--student.boundary",
                "0.85",
                "--student.low.no-trained",
                "--algorithm.window.size",
                "1",
            ),
            "algorithm.window lies wholly in the expert of student that is not trained: noise levels 0.8333, boundary "
            "0.85",
        ),
    ],
)
def test_wrong_settings_of_experts_are_refused(options, expected, tmp_path, capsys):
    message = refused(capsys, *options, "--output", tmp_path / "run")
    assert expected in message
    assert not (tmp_path / "run").exists()


def test_an_incomplete_folder_is_refused_by_name(folder, tmp_path, capsys):
    broken = tmp_path / "wan"

    def message_after(change) -> str:
        shutil.rmtree(broken, ignore_errors=True)
        shutil.copytree(folder, broken)
        change()
        message = refused(capsys, *TUNE, "--student.path", broken, "--output", tmp_path / "run")
        assert not (tmp_path / "run").exists()
        return message

    def reshaped() -> None:
        file = broken / "transformer_2" / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"num_layers": 2}))

    assert "boundary_ratio is 0.875, but no transformer_2 is named" in message_after(
        lambda: change_index(broken, transformer_2=[None, None])
    )
    assert f"{broken / 'transformer_2' / 'config.json'} is missing" in message_after(
        lambda: shutil.rmtree(broken / "transformer_2")
    )
    assert "must be of one shape, but num_layers is 5 and 2" in message_after(reshaped)
    assert "boundary_ratio must be less than 1, not 875" in message_after(
        lambda: change_index(broken, boundary_ratio=875)
    )
    assert "set student.boundary" in message_after(lambda: change_index(broken, boundary_ratio=None))
    assert "transformer_2" in message_after(lambda: (broken / "transformer_2" / FILE).unlink())


def test_a_folder_without_a_boundary_takes_that_of_the_role(folder, tmp_path):
    silent = tmp_path / "wan"
    shutil.copytree(folder, silent)
    change_index(silent, boundary_ratio=None)
    run("finetune", tmp_path / "run", "--student.path", str(silent), "--student.boundary", "0.7")
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    assert json.loads((tmp_path / "out" / "model_index.json").read_text())["boundary_ratio"] == 0.7
