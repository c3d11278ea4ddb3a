"""Runs that start from an adapter made elsewhere: merged or trained on, resumed, exported, with two experts."""

import re
import shutil

import pytest
import torch
import yaml
from adapter_files import by_hand, diffusers, factors, kohya, named, peft, published
from expert_world import expert_folder
from helpers import (
    ALONE,
    SMALL,
    WAN,
    assert_near,
    assert_same,
    checkpoint_of,
    cut_off,
    flags,
    metrics_of,
    refused,
    run,
    weights,
)
from safetensors.torch import load_file, save_file

from unified_trainer.__main__ import main
from unified_trainer.models.wan.model import WanModel
from unified_trainer.run.build import build
from unified_trainer.run.load_roles import load_roles
from unified_trainer.run.plan.roles import plan_roles
from unified_trainer.run.registry import method_named
from unified_trainer.run.settings.command_line import parse

pytestmark = pytest.mark.slow  # seconds together

RANK, ALPHA = 3, 2.0
BASE = load_file(WAN / "transformer" / "diffusion_pytorch_model.safetensors")
MOVING = flags({"student.learning-rate": 1e-2, "student.warmup-updates": 0})


@pytest.fixture(scope="module")
def given():
    return factors(WanModel.open(WAN, "transformer").network, RANK)


@pytest.fixture
def adapter(given, tmp_path):
    return diffusers(tmp_path / "adapter", given, ALPHA)


def loaded(*words: object, method: str = "finetune"):
    """The roles of a run, before its first step, and their plans."""
    settings = parse([*SMALL.get(method, ["--method", method]), *map(str, words)])
    plans = plan_roles(settings, method_named(method))
    return load_roles(plans, ALONE), plans


def base_of(role, expert="") -> dict[str, torch.Tensor]:
    with role.running(expert) as model:
        held = weights(model.network)
    return {key.replace(".base_layer.", "."): weight for key, weight in held.items() if ".lora_" not in key}


def expected(given, base=BASE) -> dict[str, torch.Tensor]:
    return by_hand(base, given, dict.fromkeys(given, ALPHA / RANK))


# What a role starts with.


def test_merged_weights_are_trained(adapter, given):
    roles, plans = loaded("--student.adapter.path", adapter, "--student.adapter.merge")
    assert_near(dict(roles["student"].weights), expected(given), 1e-6)
    assert plans["student"].config.adapter.rank == 0


def test_an_adapter_is_trained_on_with_its_rank_alpha_and_layers(adapter, given):
    roles, plans = loaded("--student.adapter.path", adapter)
    config = plans["student"].config.adapter
    assert (config.rank, config.alpha, set(config.layers)) == (RANK, ALPHA, {"to_q", "to_out.0", "net.2"})
    held = named(given, "{}", "lora_A.weight", "lora_B.weight")
    assert_near({key: p.detach() for key, p in roles["student"].weights.items()}, held, 1e-6)
    assert_same(base_of(roles["student"]), BASE)


def test_layers_of_some_blocks_are_selected_exactly(given, tmp_path):
    some = {layer: pair for layer, pair in given.items() if layer != "blocks.1.attn1.to_q"}
    roles, plans = loaded("--student.adapter.path", peft(tmp_path / "some", some, ALPHA))
    assert {key.rpartition(".lora_")[0] for key in roles["student"].weights} == some.keys()
    assert "to_q" not in plans["student"].config.adapter.layers


def test_a_new_adapter_on_merged_weights(adapter, given):
    roles, _ = loaded("--student.adapter.path", adapter, "--student.adapter.merge", "--student.adapter.rank", "2")
    assert_near(base_of(roles["student"]), expected(given), 1e-6)
    added = [p for key, p in roles["student"].weights.items() if "lora_B" in key]
    assert added and not any(bool(p.any()) for p in added) and added[0].shape[1] == 2


def test_roles_share_a_base_only_if_the_same_is_merged_into_it(adapter, given):
    ranks = ("--student.adapter.rank", "2", "--critic.adapter.rank", "2", "--recipe", "tiny")
    files = [f"--{role}.adapter.path={adapter}" for role in ("student", "teacher", "critic")]
    merge = ("--student.adapter.merge", "--critic.adapter.merge")
    roles, _ = loaded(*ranks, *files, *merge, method="dmd2")
    assert roles["teacher"].network is roles["student"].network is roles["critic"].network
    roles, plans = loaded(*ranks, files[1], method="dmd2")
    assert roles["student"].network is roles["critic"].network is not roles["teacher"].network
    assert_near(base_of(roles["teacher"]), expected(given), 1e-6)
    assert_same(base_of(roles["student"]), BASE)
    assert [name for name, plan in plans.items() if plan.merged] == ["teacher"]


@pytest.mark.parametrize("merge", [(), ("--student.adapter.merge",)])
def test_the_reference_has_the_adapter_that_the_student_starts_with(adapter, tmp_path, merge):
    words = [*SMALL["dance_grpo"], "--algorithm.kl-coefficient", "0.1", "--student.adapter.path", str(adapter), *merge]
    built = build(parse(words), ALONE)
    student, reference = built.trainer.roles["student"], built.trainer.method.update.kl._reference
    answers = []
    for role in (student, reference):
        with role.running() as model, torch.no_grad():
            answers.append(model.velocity(*model.example()))
    assert torch.equal(*answers)
    plain = WanModel.load(WAN, torch.device("cpu"))
    with torch.no_grad():
        assert not torch.allclose(plain.velocity(*plain.example()), answers[0], atol=1e-2)


def test_a_role_without_the_students_adapter_is_said(adapter, tmp_path):
    words = ["--method", "dmd2", "--recipe", "tiny", "--student.adapter.path", str(adapter), "--validate-every", "0"]
    built = build(parse(words), ALONE)
    said = "warning: teacher, critic without the student's adapter; set teacher.adapter.path if it shall have it"
    assert said in built.notes
    assert f"starts from {adapter}/pytorch_lora_weights.safetensors" in built.summary["student"]


# Several adapters.


@pytest.fixture
def other(tmp_path):
    """Factors of rank 2 on other layers too, and their file, of scale 1."""
    own = factors(WanModel.open(WAN, "transformer").network, 2, ("to_q", "ffn.net.0.proj"), seed=1)
    return own, kohya(tmp_path / "other", own, 2.0) / "musubi.safetensors"


def of_both(given, other, first, second, base=BASE):
    expected = by_hand(base, given, dict.fromkeys(given, first * ALPHA / RANK))
    return by_hand(expected, other, dict.fromkeys(other, second))


def test_a_list_of_adapters_is_merged_or_trained_on(adapter, given, other, tmp_path):
    own, file = other
    words = ("--student.adapters", f"{adapter}:0.8", f"{file}:0.125")
    roles, plans = loaded(*words, "--student.adapter.merge", "--student.adapter.rank", "2")
    assert_near(base_of(roles["student"]), of_both(given, own, 0.8, 0.125), 1e-6)
    digest = plans["student"].config.adapter.sha256
    roles, plans = loaded(*words)
    config = plans["student"].config.adapter
    assert (config.rank, config.alpha, config.sha256) == (RANK + 2, RANK + 2, digest)
    roles["student"].merge()
    assert_near(base_of(roles["student"]), of_both(given, own, 0.8, 0.125), 1e-6)
    roles, plans = loaded("--student.adapters", adapter, file, "--student.adapter.merge")
    assert_near(dict(roles["student"].weights), of_both(given, own, 1.0, 1.0), 1e-6)
    assert f"{plans['student'].config.adapter.sha256}:0.8:0.125" == digest
    exact = file.parent / "style:0.5"  # a path that is there has no factor
    file.replace(exact.with_suffix(exact.suffix + ".safetensors"))
    roles, _ = loaded("--student.adapters", f"{exact}.safetensors:2", "--student.adapter.merge")
    assert_near(dict(roles["student"].weights), of_both(given, own, 0.0, 2.0), 1e-6)
    roles, _ = loaded("--student.adapters", f"{exact}.safetensors", "--student.adapter.merge")
    assert_near(dict(roles["student"].weights), of_both(given, own, 0.0, 1.0), 1e-6)


def test_a_frozen_role_and_an_expert_have_a_list(adapter, given, other, two):
    own, file = other
    words = ("--teacher.adapters", f"{adapter}:0.5", file, "--recipe", "tiny")
    roles, _ = loaded(*words, method="dmd2")
    assert_near(base_of(roles["teacher"]), of_both(given, own, 0.5, 1.0), 1e-6)
    words = ("--student.high.adapters", f"{adapter}:0.5", file, "--student.low.adapters", f"{file}:-1")
    roles, _ = loaded("--student.path", two, *words, "--student.adapter.merge")
    assert_near(base_of(roles["student"], "high"), of_both(given, own, 0.5, 1.0), 1e-6)
    second = load_file(two / "transformer_2" / "diffusion_pytorch_model.safetensors")
    assert_near(base_of(roles["student"], "low"), of_both(given, own, 0.0, -1.0, second), 1e-6)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--student.adapters", "{}:much"), "student.adapters .*:much: no such file"),
        (("--student.adapters", "{}:nan"), "student.adapters .*:nan: no such file"),
        (("--student.adapters", "{}.no:0.5"), "student.adapters .*\\.no: no such file or folder"),
        (
            ("--student.adapters", "{}", "--student.adapter.path", "{}"),
            "student.adapter.path and student.adapters both",
        ),
        (("--student.high.adapters", "{}"), "settings of two experts, but tiny holds one network"),
    ],
)
def test_lists_that_cannot_be(words, said, adapter, capsys, run_folder):
    words = [word.format(adapter) for word in words]
    message = refused(capsys, *SMALL["finetune"], *words, "--output", run_folder)
    assert re.search(said, message), message


def test_layers_of_other_ranks_are_trained_on_with_the_largest(given, tmp_path):
    mixed = given | factors(WanModel.open(WAN, "transformer").network, 2, ("ffn.net.0.proj",))
    rank = {layer: 2 for layer in mixed if layer not in given}
    folder = peft(tmp_path / "mixed", mixed, ALPHA, rank_pattern=rank)
    roles, plans = loaded("--student.adapter.path", folder)
    assert plans["student"].config.adapter.rank == RANK
    roles["student"].merge()
    scales = {layer: ALPHA / len(down) for layer, (down, _) in mixed.items()}
    assert_near(base_of(roles["student"]), by_hand(BASE, mixed, scales), 1e-6)


# Two experts.


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return expert_folder(tmp_path_factory.mktemp("experts") / "wan")


@pytest.fixture
def files(given, tmp_path):
    """An adapter for each expert, and its factors."""
    other = factors(WanModel.open(WAN, "transformer").network, RANK, seed=1)
    high, low = kohya(tmp_path / "high", given, ALPHA), published(tmp_path / "low", other, ALPHA)
    return {"high": (high, given), "low": (low, other)}


def test_a_file_for_each_expert(two, files):
    words = [f"--student.{expert}.adapter.path={path}" for expert, (path, _) in files.items()]
    second = load_file(two / "transformer_2" / "diffusion_pytorch_model.safetensors")
    roles, _ = loaded("--student.path", two, *words, "--student.adapter.merge")
    for expert, base in (("high", BASE), ("low", second)):
        assert_near(base_of(roles["student"], expert), expected(files[expert][1], base), 1e-6)
    roles, _ = loaded("--student.path", two, *words)
    held = {key: p.detach() for key, p in roles["student"].weights.items()}
    for expert, (_, own) in files.items():
        mine = {key.removeprefix(f"{expert}/"): x for key, x in held.items() if key.startswith(expert)}
        assert_near(mine, named(own, "{}", "lora_A.weight", "lora_B.weight"), 1e-6)
    words = [word.replace("student", "teacher") for word in words]
    roles, _ = loaded("--teacher.path", two, "--recipe", "tiny", *words, method="dmd2")
    assert_near(base_of(roles["teacher"], "low"), expected(files["low"][1], second), 1e-6)


def test_an_expert_that_is_not_trained_has_its_adapter_merged(two, files):
    words = [f"--student.{expert}.adapter.path={path}" for expert, (path, _) in files.items()]
    roles, plans = loaded("--student.path", two, *words, "--student.high.no-trained", "--validate-every", "1")
    assert_near(base_of(roles["student"], "high"), expected(files["high"][1]), 1e-6)
    assert (list(plans["student"].merged), list(plans["student"].starts)) == (["high"], ["low"])


# What is refused before any weight is read.


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--student.adapter.rank=4"], "student.adapter.rank is 4, but .* has rank 3: leave it out; to train a new"),
        (["--student.adapter.alpha=4"], "student.adapter.alpha is 4, but .* has alpha 2: leave it out"),
        (["--student.adapter.layers", "to_q"], "student.adapter.layers to_q are not those of .*: leave them out"),
        (["--student.adapter.sha256=ab"], "changed: SHA-256 is .*, but student.adapter.sha256 is ab"),
        (["--student.high.adapter.path=x"], "settings of two experts, but tiny holds one network"),
    ],
)
def test_settings_that_contradict_the_file(adapter, words, said, capsys, run_folder):
    message = refused(capsys, *SMALL["finetune"], "--student.adapter.path", adapter, *words, "--output", run_folder)
    assert re.search(said, message), message
    assert not (run_folder / "config.yaml").exists()


def test_settings_for_a_file_need_one(capsys, run_folder):
    for word in ("--student.adapter.merge", "--student.adapter.sha256=ab"):
        said = refused(capsys, *SMALL["finetune"], word, "--output", run_folder)
        assert "student.adapter.sha256 and merge are for an adapter made elsewhere: set its path" in said


def test_a_teacher_of_one_network_has_no_experts(adapter, capsys, run_folder):
    words = ["--method", "dmd2", "--recipe", "tiny", "--teacher.low.adapter.path", str(adapter)]
    assert main([*words, "--output", str(run_folder)]) == 2
    said = "teacher.low.adapter.path is for a role with two experts, but teacher is one network"
    assert said in capsys.readouterr().err


def test_adapters_that_cannot_be_trained_on(given, tmp_path, capsys, run_folder):
    folder = published(tmp_path / "whole", given, ALPHA)
    held = load_file(folder / "wan.safetensors")
    bias = {"diffusion_model.blocks.0.self_attn.q.diff_b": torch.zeros(BASE["blocks.0.attn1.to_q.bias"].shape)}
    save_file(held | bias, folder / "wan.safetensors")
    said = refused(capsys, *SMALL["finetune"], "--student.adapter.path", folder, "--output", run_folder)
    assert "differences of whole weights (diffusion_model.blocks.0.self_attn.q.diff_b)" in said
    assert "set student.adapter.merge to add it" in said


def test_init_from_and_an_adapter_exclude_each_other(adapter, tmp_path, capsys):
    run("finetune", tmp_path / "first", "--student.adapter.rank", "3")
    words = ("--init-from", tmp_path / "first", "--student.adapter.path", adapter, "--output", tmp_path / "second")
    for more in ((), ("--student.adapter.merge",)):
        said = refused(capsys, *SMALL["finetune"], *words, *more)
        assert "adapters and --init-from both give the weights of student: leave one of them out" in said


# Whole runs.


def test_a_run_resumes_without_the_file_that_it_was_trained_on_from(adapter, tmp_path):
    words = ["--student.adapter.path", str(adapter), "--checkpoint-every", "1", *MOVING]
    run("finetune", tmp_path / "whole", "--steps", "2", *words)
    shutil.rmtree(adapter)
    assert main(["--resume", str(cut_off(tmp_path / "whole", tmp_path / "parts", 1))]) == 0
    assert_same(checkpoint_of(tmp_path / "parts", 2), checkpoint_of(tmp_path / "whole", 2))
    assert metrics_of(tmp_path / "parts") == metrics_of(tmp_path / "whole")
    assert main(["export", str(tmp_path / "parts"), str(tmp_path / "out")]) == 0


@pytest.mark.parametrize("rank", ["0", "2"])
def test_a_run_on_merged_weights_resumes_with_the_same_file(adapter, given, tmp_path, capsys, rank):
    merge = ["--student.adapter.path", str(adapter), "--student.adapter.merge", "--student.adapter.rank", rank]
    words = [*merge, "--checkpoint-every", "1", *MOVING]
    run("finetune", tmp_path / "whole", "--steps", "2", *words)
    resume = ["--resume", str(cut_off(tmp_path / "whole", tmp_path / "parts", 1))]
    (file,) = adapter.iterdir()
    whole = file.read_bytes()
    held = load_file(file)
    held["transformer.blocks.0.attn1.to_q.lora_A.weight"][0, 0] += 1e-3
    save_file(held, file)
    assert main(resume) == 2
    assert f"{file} changed: SHA-256 is" in capsys.readouterr().err
    file.unlink()
    assert main(resume) == 2
    assert f"student.adapter.path {adapter}" in capsys.readouterr().err
    file.write_bytes(whole)
    assert main(resume) == 0
    assert_same(checkpoint_of(tmp_path / "parts", 2), checkpoint_of(tmp_path / "whole", 2))
    assert main(["export", str(tmp_path / "parts"), str(tmp_path / "out")]) == 0
    trained = checkpoint_of(tmp_path / "parts", 2)
    prefix = "student/weights/"
    own = {key.removeprefix(prefix): value for key, value in trained.items() if key.startswith(prefix)}
    if rank != "0":
        layers = {key.partition(".lora_")[0] for key in own}
        pairs = {layer: (own[f"{layer}.lora_A.weight"], own[f"{layer}.lora_B.weight"]) for layer in layers}
        own = by_hand(expected(given), pairs, dict.fromkeys(pairs, 1.0))
        capsys.readouterr()
        assert main(["export", str(tmp_path / "parts"), str(tmp_path / "alone"), "--adapter", "peft"]) == 2
        assert "which is merged into its base" in capsys.readouterr().err
        assert not (tmp_path / "alone").exists()
    assert_near(load_file(tmp_path / "out" / "transformer" / "diffusion_pytorch_model.safetensors"), own, 1e-5)


@pytest.mark.parametrize("layout", ["peft", "published"])
def test_what_export_writes_is_trained_on(tmp_path, layout):
    """A second run starts with the velocity that the first one ended with."""
    words = ["--student.adapter.rank", "2", "--student.adapter.alpha", "3", "--steps", "2", *MOVING]
    run("finetune", tmp_path / "first", *words)
    assert main(["export", str(tmp_path / "first"), str(tmp_path / "out"), "--adapter", layout]) == 0
    roles, plans = loaded("--student.adapter.path", tmp_path / "out")
    config = plans["student"].config.adapter
    assert (config.rank, config.alpha) == (2, 3.0)
    saved = checkpoint_of(tmp_path / "first", 2)
    for key, weight in roles["student"].weights.items():
        assert torch.equal(weight, saved[f"student/weights/{key}"]), key
    run("finetune", tmp_path / "second", "--student.adapter.path", str(tmp_path / "out"), *MOVING)
    file = yaml.safe_load((tmp_path / "second" / "config.yaml").read_text())["student"]["adapter"]
    assert file["rank"] == 2 and len(file["sha256"]) == 64
    again = ["--config", str(tmp_path / "second" / "config.yaml"), "--output", str(tmp_path / "third")]
    assert main(again) == 0
    assert_same(checkpoint_of(tmp_path / "third", 1), checkpoint_of(tmp_path / "second", 1))


def test_experts_go_through_an_export(two, tmp_path):
    words = ["--student.path", str(two), "--student.adapter.rank", "2", *MOVING, "--algorithm.shift", "12"]
    run("finetune", tmp_path / "first", *words)
    saved = checkpoint_of(tmp_path / "first", 1)
    for layout in ("peft", "published"):
        assert main(["export", str(tmp_path / "first"), str(tmp_path / layout), "--adapter", layout]) == 0
        roles, _ = loaded("--student.path", two, "--student.adapter.path", tmp_path / layout)
        for key, weight in roles["student"].weights.items():
            assert torch.equal(weight, saved[f"student/weights/{key}"]), key
