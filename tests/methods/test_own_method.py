"""The guide of CONTRIBUTING.md, carried out literally: a method and a family, each in one file of one's own."""

import json
import re
import shutil

import pytest
import torch
from forked import program
from helpers import REPO, WAN, checkpoint_of, flags, metrics_of
from safetensors.torch import load_file

pytestmark = pytest.mark.slow

GUIDE = (REPO / "CONTRIBUTING.md").read_text(encoding="utf-8")
EXTEND = (REPO / "docs" / "extend.md").read_text(encoding="utf-8")
SMALL = flags(
    {"data.num-clips": 4, "algorithm.batch-size": 2, "algorithm.micro-batch": 1, "validation.num-samples": 2}
    | {"sampler.num-steps": 2, "checkpoint-every": 1, "validate-every": 0}
)


def from_guide(name: str, folder) -> None:
    """Write the file of that name from the guide's code block."""
    (block,) = re.findall(rf"```python\n# {name}\n(.*?)```", GUIDE + EXTEND, re.S)
    (folder / name).write_text(block)


def run(folder, *words: str, ranks: int = 1) -> str:
    """The program in a folder; it must end with code 0. Gives what it printed."""
    done = program("-m", "unified_trainer", *words, where=folder, ranks=ranks)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def journey(tmp_path_factory):
    """The commands of the guide below the method, run in order, with small settings."""
    folder = tmp_path_factory.mktemp("journey")
    from_guide("mutual.py", folder)
    (block,) = re.findall(r"```sh\n(python -m unified_trainer --method mutual.*?)```", GUIDE, re.S)
    for line in block.splitlines():
        words = line.split()[3:]
        first = words[0] == "--method"
        run(folder, *words, *(SMALL if first else []))
    return folder


def test_the_method_of_the_guide_trains_three_roles(journey):
    lines = [json.loads(line) for line in (journey / "runs/mutual/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    for role in ("student", "second", "third"):
        assert all(line[f"train/{role}/grad_norm"] > 0 for line in lines)
    assert lines[0]["train/third/learning_rate"] == 1e-4
    saved = checkpoint_of(journey / "runs/mutual", 6)
    assert {"student/weights", "second/weights", "third/weights", "method/gap"} <= {
        "/".join(key.split("/")[:2]) for key in saved
    }
    assert 0 < float(saved["method/gap"]) < 1


def test_it_resumes_bit_for_bit(journey):
    straight = journey / "runs/straight"
    words = ("--method", "mutual.py:Mutual", "--steps", "6", "--output", str(straight), "--third.learning-rate", "1e-4")
    run(journey, *words, *SMALL)
    ours, theirs = checkpoint_of(journey / "runs/mutual", 6), checkpoint_of(straight, 6)
    assert ours.keys() == theirs.keys()
    for key, value in ours.items():
        assert torch.equal(value, theirs[key]), key


def test_its_student_is_exported(journey):
    exported = load_file(journey / "mutual-student/transformer/diffusion_pytorch_model.safetensors")
    saved = checkpoint_of(journey / "runs/mutual", 6)
    for key, value in exported.items():
        assert torch.equal(value, saved[f"student/weights/{key}"]), key


def test_its_roles_have_flags_of_their_own_and_no_others(journey):
    helped = run(journey, "--method", "mutual.py:Mutual", "--help")
    assert "--third.learning-rate" in helped and "--algorithm.agreement" in helped
    assert "--teacher." not in helped and "--critic." not in helped


@pytest.mark.parametrize("ranks", [1, 2])
def test_preferences_are_learned_from_the_page_alone(tmp_path, ranks):
    """At the first step student and reference are equal: no pair is preferred. Then the student moves."""
    from_guide("online_dpo.py", tmp_path)
    (command,) = re.findall(r"```sh\npython -m unified_trainer (--method online_dpo.*?)\n```", EXTEND)
    small = {"algorithm.num-prompts": 2, "algorithm.prompts-per-update": 2, "algorithm.num-samples": 2}
    small |= {"steps": 2, "checkpoint-every": 1, "validate-every": 0, "student.learning-rate": 1e-3}
    run(tmp_path, *command.split(), *flags(small), ranks=ranks)
    first, second = metrics_of(tmp_path / "runs/dpo")
    assert first["train/preferred"] == 0 and first["train/reward"] != second["train/reward"]
    one, two = (checkpoint_of(tmp_path / "runs/dpo", step) for step in (1, 2))
    assert any(not torch.equal(one[key], two[key]) for key in one if key.startswith("student/weights/"))


@pytest.fixture(scope="module")
def two_stage(tmp_path_factory):
    """A pipeline folder of the guide's family."""
    folder = tmp_path_factory.mktemp("family")
    from_guide("twostage.py", folder)
    make = (
        "import torch, twostage\n"
        "torch.manual_seed(0)\n"
        "twostage.TwoStage().save_pretrained('model/unet')\n"
        "print('made')\n"
    )
    shutil.copytree(WAN, folder / "model", ignore=shutil.ignore_patterns("transformer"))
    index = json.loads((WAN / "model_index.json").read_text())
    index["_class_name"] = "TwoStagePipeline"
    index["unet"] = index.pop("transformer")
    (folder / "model/model_index.json").write_text(json.dumps(index))
    (folder / "make.py").write_text(make)
    made = program("make.py", where=folder)
    assert made.returncode == 0, made.stderr
    return folder


FAMILY = [
    *SMALL,
    "--families",
    "twostage.py:TWO_STAGE",
    "--recipe",
    "tiny",
    "--method",
    "dmd2",
    "--student.path",
    "model",
    "--steps",
    "2",
    "--algorithm.student-every",
    "1",
]
FAMILY += ["--algorithm.student-every", "1", "--sampler.num-steps", "2", "--algorithm.gan-weight", "0.01"]


def test_the_family_of_the_guide_trains_and_is_exported(two_stage):
    run(two_stage, *FAMILY, "--student.activation-memory", "full", "--output", "runs/one")
    saved = checkpoint_of(two_stage / "runs/one", 2)
    assert "student/weights/decoder.1.out.weight" in saved
    run(two_stage, "export", "runs/one", "out")
    index = json.loads((two_stage / "out/model_index.json").read_text())
    assert index["_class_name"] == "TwoStagePipeline" and (two_stage / "out/unet/config.json").is_file()


@pytest.mark.ranks
def test_the_family_of_the_guide_is_sharded_over_both_block_lists(two_stage):
    """Two ranks give the run of one rank; every block is a unit of its own."""
    run(two_stage, *FAMILY, "--output", "runs/two", "--device", "cpu", ranks=2)
    one = checkpoint_of(two_stage / "runs/one", 2)
    two = checkpoint_of(two_stage / "runs/two", 2)
    assert one.keys() == two.keys()
    for key, value in one.items():
        if "/weights/" in key:
            torch.testing.assert_close(two[key], value, rtol=1e-3, atol=1e-4, msg=key)
