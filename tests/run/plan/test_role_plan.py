"""What the plan of a role knows of its weights, before any is read."""

import pytest
from bad_inputs import refused
from helpers import ALONE, WAN, checkpoint
from safetensors.torch import load_file

from unified_trainer.roles.role import Trainable
from unified_trainer.run.checkpoint.init_from import shapes_of
from unified_trainer.run.load_roles import load_roles
from unified_trainer.run.plan.plan import check
from unified_trainer.run.plan.roles import plan_roles, weight_shapes
from unified_trainer.run.registry import method_named
from unified_trainer.run.settings.command_line import parse

ADAPTER = ("--student.adapter.rank", "2")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Run directories with one checkpoint each: all weights of the tiny student, some others, an adapter."""
    root = tmp_path_factory.mktemp("runs")
    whole = load_file(next((WAN / "transformer").glob("*.safetensors")))
    bias = {"proj_out.bias": whole["proj_out.bias"][:3]}
    name = "blocks.0.attn1.to_q.lora_A.weight"
    for run, weights in (("whole", whole), ("other", whole | bias), ("adapter", {name: whole["proj_out.weight"][:2]})):
        tensors = {f"student/weights/{key}": value for key, value in weights.items()}
        checkpoint.save(root / run / "checkpoints", 1, tensors, ALONE, {"sampler": None})
    return root


@pytest.mark.parametrize(
    ("run", "flags", "named"),
    [
        (
            "whole",
            ADAPTER,
            ("holds all weights of student, this run trains an adapter", "export", "--student.path DIR"),
        ),
        ("adapter", (), ("holds an adapter of student, this run trains all weights", "export")),
        ("other", (), ("proj_out.bias of student is (3,) in the checkpoint, (16,) in this run: it is another model",)),
        ("whole", ("--student.boundary", "0.5"), ("holds one network of student", "high and low noise expert")),
    ],
)
def test_a_checkpoint_of_other_weights_is_refused_by_the_plan(runs, run, flags, named):
    words = ["--method", "finetune", "--recipe", "tiny", "--init-from", str(runs / run), *flags]
    refused(lambda: check(parse(words), ALONE), *named)


def test_a_checkpoint_of_the_same_weights_passes(runs):
    assert check(parse(["--method", "finetune", "--recipe", "tiny", "--init-from", str(runs / "whole")]), ALONE)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "flags"),
    [
        ("dance_ppo", ()),
        ("dmd2", ADAPTER),
        ("dance_grpo", (*ADAPTER, "--student.boundary", "0.5", "--student.low.no-trained")),
        ("self_forcing", ("--critic.boundary", "0.5")),
    ],
)
def test_planned_shapes_are_those_of_the_loaded_roles(method, flags):
    run = parse(["--method", method, "--recipe", "tiny", *flags])
    plans = plan_roles(run, method_named(method))
    loaded = {name: role for name, role in load_roles(plans, ALONE).items() if isinstance(role, Trainable)}
    assert {name: weight_shapes(name, plans[name]) for name in loaded} == {
        name: shapes_of(role.weights) for name, role in loaded.items()
    }
