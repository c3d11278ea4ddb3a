"""Starting from another run: weights are copied by role, all of them or none, and the description says so."""

import pytest
import torch
from helpers import ALONE, SMALL, WAN, assert_same, checkpoint_of, run, small_model, trainable

from unified_trainer.__main__ import main
from unified_trainer.roles.adapter import AdapterConfig
from unified_trainer.roles.backbone import Backbone
from unified_trainer.roles.role import Trainable, TrainableConfig
from unified_trainer.run.checkpoint import dcp as checkpoint
from unified_trainer.run.checkpoint.dcp import CheckpointError
from unified_trainer.run.checkpoint.init_from import initialise
from unified_trainer.run.plan.plan import check
from unified_trainer.run.settings.command_line import parse

pytestmark = pytest.mark.slow

SAMPLER = {"num_steps": 4, "solver": "sde", "shift": 5.0, "step_sigmas": [], "negative_prompt": ""}


def weights_of(role: Trainable) -> dict[str, torch.Tensor]:
    return {key: weight.detach() for key, weight in role.weights.items()}


def copies(role: Trainable) -> dict[str, torch.Tensor]:
    return {key: value.clone() for key, value in weights_of(role).items()}


def adapted(name: str = "student", rank: int = 2) -> Trainable:
    """A role that trains an adapter over a small network."""
    config = TrainableConfig(adapter=AdapterConfig(rank=rank))
    return Trainable(name, Backbone(small_model(), ALONE, adapters={name: config.adapter}), config)


def save(run_folder, *roles: Trainable, step: int = 1, **metadata):
    state = {f"{role.name}/{key}": value for role in roles for key, value in role.state_dict().items()}
    return checkpoint.save(run_folder / "checkpoints", step, state, ALONE, metadata)


@pytest.fixture
def moved(tmp_path):
    """A run whose student has EMA weights that differ from its weights; its critic has none."""
    student = trainable("student", TrainableConfig(ema_decay=0.5), seed=3)
    with torch.no_grad():
        student.network.proj_out.bias.add_(1)
    critic = trainable("critic", seed=4)
    save(tmp_path / "source", student, critic, sampler=SAMPLER)
    return tmp_path / "source", student, critic


def test_weights_are_copied_by_role(moved):
    source, student, critic = moved
    mine, weight_copy = trainable("student", seed=7), trainable("critic", seed=8)
    said = initialise({"student": weights_of(mine), "critic": weights_of(weight_copy)}, source, ALONE)
    assert_same(weights_of(mine), weights_of(student))
    assert_same(weights_of(weight_copy), weights_of(critic))
    assert said.startswith(f"student, critic from {source / 'checkpoints' / 'step_1'}")
    assert "trained for the sampler num_steps 4, solver sde, shift 5.0" in said


def test_a_role_that_the_run_lacks_stays_as_it_was_built_and_is_named(moved):
    source, student, _ = moved
    mine, new = trainable("student", seed=7), trainable("fresh", seed=8)
    before = copies(new)
    said = initialise({"student": weights_of(mine), "fresh": weights_of(new)}, source, ALONE)
    assert_same(weights_of(mine), weights_of(student))
    assert_same(weights_of(new), before)
    assert "fresh from its own path, the checkpoint has none" in said and "critic of the checkpoint is not used" in said


def test_ema_weights_in_place_of_the_weights(moved):
    """A role without EMA weights gives its weights."""
    source, student, critic = moved
    mine, weight_copy = trainable("student", seed=7), trainable("critic", seed=8)
    said = initialise({"student": weights_of(mine), "critic": weights_of(weight_copy)}, f"{source}:ema", ALONE)
    assert torch.equal(weights_of(mine)["proj_out.bias"] + 1, weights_of(student)["proj_out.bias"])
    assert_same(weights_of(weight_copy), weights_of(critic))
    assert said.startswith("student (EMA), critic from ")


def test_ema_weights_that_were_not_kept_are_an_error(moved):
    source, *_ = moved
    with pytest.raises(CheckpointError, match="holds no EMA weights of critic; leave :ema out"):
        initialise({"critic": weights_of(trainable("critic"))}, f"{source}@1:ema", ALONE)


def test_no_role_in_common_is_an_error(moved):
    source, *_ = moved
    with pytest.raises(CheckpointError, match="holds weights of critic, student, not of teacher"):
        initialise({"teacher": weights_of(trainable("teacher"))}, source, ALONE)


@pytest.mark.parametrize("change", ["shape", "more", "fewer"])
def test_another_architecture_overwrites_nothing(moved, change):
    """The student would fit; the critic does not, and so neither is touched."""
    source, *_ = moved
    mine, weight_copy = trainable("student", seed=7), trainable("critic", seed=8)
    own, other = weights_of(mine), weights_of(weight_copy)
    before = copies(mine)
    if change == "shape":
        other["proj_out.bias"] = torch.zeros(3)
        words = r"proj_out.bias of critic is \(16,\) in the checkpoint, \(3,\) in this run"
    elif change == "more":
        other["a.bias"] = torch.zeros(3)
        words = r"a.bias of critic is absent in the checkpoint, \(3,\) in this run"
    else:
        del other["proj_out.bias"]
        words = r"proj_out.bias of critic is \(16,\) in the checkpoint, absent in this run"
    with pytest.raises(CheckpointError, match=words):
        initialise({"student": own, "critic": other}, source, ALONE)
    assert_same(weights_of(mine), before)


@pytest.mark.parametrize("there", ["an adapter", "all weights"])
def test_an_adapter_is_not_all_weights(tmp_path, there):
    one, other = adapted(), trainable()
    if there == "all weights":
        one, other = other, one
    save(tmp_path, one)
    before = copies(other)
    with pytest.raises(CheckpointError, match=f"holds {there} of student.* export {tmp_path} DIR.*--student.path DIR"):
        initialise({"student": weights_of(other)}, tmp_path, ALONE)
    assert_same(weights_of(other), before)


def test_adapters_are_copied_and_their_ranks_compared(tmp_path):
    one, same = adapted(), adapted()
    with torch.no_grad():
        for weight in weights_of(one).values():
            weight.normal_()
    save(tmp_path, one)
    initialise({"student": weights_of(same)}, tmp_path, ALONE)
    assert_same(weights_of(same), weights_of(one))
    with pytest.raises(CheckpointError, match=r"is \(2, 24\) in the checkpoint, \(3, 24\) in this run"):
        initialise({"student": weights_of(adapted(rank=3))}, tmp_path, ALONE)


def test_damage_is_found_before_anything_is_overwritten(moved):
    source, *_ = moved
    (file,) = (source / "checkpoints" / "step_1" / "critic" / "weights").iterdir()
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
    mine, weight_copy = trainable("student", seed=7), trainable("critic", seed=8)
    before = copies(mine)
    with pytest.raises(CheckpointError, match=r"critic/weights/.* is damaged.*choose another step with .*source@STEP"):
        initialise({"student": weights_of(mine), "critic": weights_of(weight_copy)}, source, ALONE)
    assert_same(weights_of(mine), before)
    initialise({"student": weights_of(mine)}, source, ALONE)  # the critic's file is not read for it


# Whole runs.


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A run with checkpoints of steps 1 and 2, with EMA weights."""
    folder = tmp_path_factory.mktemp("saved") / "run"
    moving = ["--student.ema-decay", "0.5", "--student.learning-rate", "1e-3"]
    run("dance_grpo", folder, "--steps", "2", "--checkpoint-every", "1", *moving)
    return folder


@pytest.mark.parametrize(
    ("method", "spec", "kind", "step"),
    [
        ("dance_grpo", "", "weights", 2),
        ("finetune", "", "weights", 2),
        ("finetune", "@1", "weights", 1),
        ("finetune", "@1:ema", "ema", 1),
    ],
)
def test_weights_are_copied_and_nothing_else(saved, run_folder, capsys, method, spec, kind, step):
    """With learning rate 0 the weights after a step are those copied; counter and moments start anew."""
    frozen = ["--student.learning-rate", "0", "--student.warmup-updates", "0", "--student.ema-decay", "0.5"]
    run(method, run_folder, "--init-from", f"{saved}{spec}", *frozen)
    copied, source = checkpoint_of(run_folder, 1), checkpoint_of(saved, step)
    for key in source:
        if f"/{kind}/" in key:
            assert torch.equal(copied[key.replace(f"/{kind}/", "/weights/")], source[key]), key
            assert torch.equal(copied[key.replace(f"/{kind}/", "/ema/")], source[key]), key
    assert int(copied["student/updates"]) == 1
    assert f"from {saved / 'checkpoints' / f'step_{step}'}; trained for the sampler" in capsys.readouterr().out


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """A run of finetune, whose student fits any sampler."""
    folder = tmp_path_factory.mktemp("tuned") / "run"
    run("finetune", folder, "--steps", "1")
    return folder


def test_a_teacher_that_stays_at_the_base_is_named(tuned, saved):
    def notes(*words: object) -> str:
        return " ".join(check(parse([*map(str, words)]), ALONE).notes)

    distil = ["--method", "dmd2", "--init-from"]
    assert "warning: teacher and critic keep the weights of tiny, the student starts from " in notes(*distil, tuned)
    assert f"export {tuned}@1 DIR, then --student.path DIR without --init-from" in notes(*distil, f"{tuned}@1")
    assert notes(*distil, tuned, "--recipe", "tiny", "--teacher.path", WAN, "--critic.path", WAN) == ""
    assert "warning" not in notes(*distil, saved)  # a student of few steps is no teacher
    causal = ["--method", "self_forcing", "--init-from", tuned]
    assert "note: teacher and critic keep the weights of tiny, the student starts from " in notes(*causal)
    assert "note" not in notes(*causal, "--recipe", "tiny", "--teacher.path", WAN, "--critic.path", WAN)
    assert notes("--method", "dance_grpo", "--init-from", tuned) == ""


def test_starting_from_nothing_is_refused(tmp_path, run_folder, capsys):
    words = [*SMALL["dance_grpo"], "--output", str(run_folder), "--init-from", str(tmp_path / "absent")]
    assert main(words) == 2
    assert "absent holds no complete checkpoint" in capsys.readouterr().err
    assert not run_folder.exists()


def test_starting_from_a_step_that_is_not_there_is_refused(saved, run_folder, capsys):
    words = [*SMALL["dance_grpo"], "--output", str(run_folder), "--init-from", f"{saved}@7"]
    assert main(words) == 2
    assert "has no checkpoint of step 7; it has 1, 2" in capsys.readouterr().err
    assert not run_folder.exists()


def test_samples_that_are_under_way_are_no_role(tmp_path):
    """The weights that make samples ahead of training are named in no list of roles, and are not copied."""
    student = trainable("student", seed=3)
    state = {f"student/{key}": value for key, value in student.state_dict().items()}
    state |= {"rollouts/weights/1/bias": torch.zeros(2), "rollouts/step": torch.tensor(1)}
    checkpoint.save(tmp_path / "checkpoints", 1, state, ALONE, {"sampler": SAMPLER})
    mine = trainable("student", seed=7)
    assert "not used" not in initialise({"student": weights_of(mine)}, tmp_path, ALONE)
    with pytest.raises(CheckpointError, match="step_1 holds weights of student, not of teacher"):
        initialise({"teacher": weights_of(mine)}, tmp_path, ALONE)
