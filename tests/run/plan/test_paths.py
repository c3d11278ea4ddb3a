"""A student's path that is no pipeline folder, and the scheduler of one that is: what a run says about them."""

import json
import re

import pytest
from helpers import WAN, copy_of

from unified_trainer.basics.errors import UserError
from unified_trainer.run.plan.shift import note_scheduler
from unified_trainer.run.registry import family_of
from unified_trainer.sampling.solver import SamplerConfig

IMPORT = r"`python -m unified_trainer import-weights \S+ DIR --base PIPELINE`"


@pytest.mark.parametrize(
    ("files", "path", "said"),
    [
        ([], "", "is not there: it must be a diffusers pipeline folder, or a hub id"),
        (["wan.safetensors"], "wan.safetensors", rf"is one file: write a pipeline folder with its weights by {IMPORT}"),
        (
            ["model_index.json", "vae/config.json"],
            "vae",
            r"is one component of a pipeline: give the whole folder, .*model$",
        ),
        (["models_t5_umt5-xxl-enc-bf16.pth", "config.json"], "", rf"is a folder of Wan's own code: .* {IMPORT}"),
        (["low_noise_model/config.json"], "", rf"is a folder of Wan's own code: .* {IMPORT}"),
        (["config.json", "diffusion_pytorch_model.safetensors"], "", rf"holds weights without a pipeline: .* {IMPORT}"),
        (["adapter_config.json", "adapter_model.safetensors"], "", "is an adapter: give its base here"),
        (["config.yaml", "checkpoints/1/a"], "", "is a run: start trained roles from its weights with --init-from"),
        (["notes.txt"], "", r"must be a diffusers pipeline folder: \S+model_index\.json is missing"),
    ],
)
def test_a_path_that_is_no_pipeline_says_what_to_give(tmp_path, files, path, said):
    for name in files:
        file = tmp_path / "model" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    with pytest.raises(UserError, match=f"^student.path {tmp_path / 'model' / path} {said}"):
        family_of("student", str(tmp_path / "model" / path))


def test_a_path_that_is_a_link_to_nothing_is_named(tmp_path):
    (tmp_path / "model").symlink_to(tmp_path / "gone")
    with pytest.raises(UserError, match=r"model is a link to \S+gone, which is not there"):
        family_of("student", str(tmp_path / "model"))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"flow_shift": 3.0}, ""),
        ({"flow_shift": 5.0}, "sampler.shift is 3, but the model's scheduler has 5.000"),
        ({"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 7.0}, "sampler.shift is 3, .* has 7.000"),
        ({"_class_name": "FlowMatchLCMScheduler"}, "FlowMatchLCMScheduler, adds fresh noise .* --sampler.solver sde"),
    ],
)
def test_a_scheduler_of_other_levels_gets_a_note(tmp_path, change, said):
    note = note_scheduler(scheduled(tmp_path, change), 64, SamplerConfig(shift=3.0, solver="ode"))
    assert re.search(said, note) if said else note == ""
    assert "shift" not in note_scheduler(tmp_path, 64, SamplerConfig(shift=3.0, solver="ode"), chosen=True)


@pytest.mark.parametrize("predicted", ["epsilon", "v_prediction", "sample"])
def test_a_model_that_predicts_no_velocities_is_refused(tmp_path, predicted):
    folder = scheduled(tmp_path, {"_class_name": "LCMScheduler", "prediction_type": predicted})
    with pytest.raises(
        UserError, match=rf"scheduler_config\.json: prediction_type is {predicted}, but networks predict"
    ):
        note_scheduler(folder, 64, SamplerConfig())


def test_stated_levels_have_no_shift_to_differ_in(tmp_path):
    folder = scheduled(tmp_path, {"flow_shift": 5.0})
    assert note_scheduler(folder, 64, SamplerConfig(num_steps=2, step_sigmas=(1.0, 0.5), shift=1.0)) == ""


def scheduled(folder, change):
    copy_of(WAN / "scheduler", folder / "scheduler")
    file = folder / "scheduler" / "scheduler_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    return folder
