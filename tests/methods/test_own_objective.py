"""Objectives in settings: by name with parameters of their own, from a file, from a package, through a resumed run."""

import re

import pytest
from helpers import REPO, SMALL, assert_same, checkpoint_of, cut_off, flags, refused, run

from unified_trainer.__main__ import main
from unified_trainer.basics.errors import UserError
from unified_trainer.numerics.objectives import OBJECTIVES, SAPO, Objective
from unified_trainer.run import registry
from unified_trainer.run.settings.command_line import parse, with_settings
from unified_trainer.run.settings.config import plain

pytestmark = pytest.mark.slow  # seconds together

KIND = "--algorithm.objective.kind"
(GUIDE,) = re.findall(
    r"```python\n# bounded.py\n(.*?)```", (REPO / "docs" / "extend.md").read_text(encoding="utf-8"), re.S
)


@pytest.mark.parametrize("method", ["dance_grpo", "dance_ppo", "distill_rl"])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_method_of_a_policy_takes_every_name(method, name):
    objective = parse(["--method", method, KIND, name]).algorithm.objective
    assert type(objective) is OBJECTIVES[name] and objective.kind == name


def test_a_name_brings_its_parameters_from_flags_and_from_a_file(tmp_path):
    run = parse(["--method", "dance_grpo", "--algorithm.objective.tau-pos=2", KIND, "sapo"])
    assert run.algorithm.objective == SAPO("sapo", tau_pos=2.0)
    saved = tmp_path / "config.yaml"
    saved.write_text("recipe: tiny\nmethod: dance_grpo\nalgorithm: {objective: {kind: dual_clip, dual_clip: 4}}\n")
    assert parse(["--config", str(saved)]).algorithm.objective == OBJECTIVES["dual_clip"]("dual_clip", dual_clip=4.0)
    # A name on the command line takes the place of the file's, whose parameters go with it.
    other = parse(["--config", str(saved), KIND, "clip"])
    assert plain(other)["algorithm"]["objective"] == {"kind": "clip"}
    assert with_settings(
        other, {"algorithm.objective": {"kind": "soft_clip", "alpha": 3}}, "here"
    ).algorithm.objective == (OBJECTIVES["soft_clip"]("soft_clip", alpha=3.0))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([KIND, "sappo"], r"algorithm\.objective\.kind 'sappo' is not known; did you mean sapo\?"),
        (
            ["--algorithm.objective.tau-pos", "2"],
            r"tau-pos is a setting of --algorithm\.objective\.kind sapo, not of clip",
        ),
        ([KIND, "sapo", "--algorithm.objective.alpha", "2"], r"alpha is a setting of .*kind soft_clip, not of sapo"),
        ([KIND, "sapo", "--algorithm.objective.tau-pos", "0"], r"algorithm\.objective\.tau_pos must be above 0, not 0"),
        ([KIND, "dual_clip", "--algorithm.objective.dual-clip", "1"], r"dual_clip must be above 1, not 1"),
        (
            [KIND, "unified_trainer.numerics.objectives:ratio"],
            r"no frozen dataclass derived from unified_trainer",
        ),
    ],
)
def test_a_wrong_objective_names_its_setting(words, message):
    with pytest.raises(UserError, match=message):
        parse(["--method", "dance_grpo", *words])


def test_a_method_without_a_policy_has_no_objective():
    with pytest.raises(UserError, match=r"kind is a setting of dance_grpo, dance_ppo, distill_rl"):
        parse(["--method", "dmd2", KIND, "sapo"])


@pytest.mark.slow
def test_the_objective_of_the_guide_trains_and_resumes_bit_for_bit(run_folder, monkeypatch):
    run_folder.mkdir(exist_ok=True)
    (run_folder / "bounded.py").write_text(GUIDE)
    monkeypatch.chdir(run_folder)
    more = [KIND, "bounded.py:Bounded", "--algorithm.objective.width", "2e-3", "--checkpoint-every", "1"]
    whole, halves = run_folder / "whole", run_folder / "halves"
    run("dance_grpo", whole, *more, "--steps", "3")
    assert main(["--resume", str(cut_off(whole, halves, 2))]) == 0
    assert_same(checkpoint_of(halves, 3), checkpoint_of(whole, 3))
    assert "width: 0.002" in (halves / "config.yaml").read_text()


def test_an_objective_of_a_received_config_is_asked_about_before_it_is_executed(tmp_path, monkeypatch, capsys):
    (tmp_path / "bounded.py").write_text(f"open('EXECUTED', 'w').close()\n{GUIDE}")
    (tmp_path / "config.yaml").write_text("method: dance_grpo\nalgorithm: {objective: {kind: 'bounded.py:Bounded'}}\n")
    monkeypatch.chdir(tmp_path)
    said = refused(capsys, "--config", "config.yaml")
    assert "algorithm.objective.kind" in said and "bounded.py:Bounded" in said and "--trust" in said
    assert not (tmp_path / "EXECUTED").exists()


def test_a_parameter_of_an_objective_is_a_number(tmp_path, monkeypatch):
    (tmp_path / "bounded.py").write_text(GUIDE.replace("width: Positive = 1e-3", 'file: str = "x"'))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"file is declared as <class 'str'>; a parameter of an objective is a number"):
        parse(["--method", "dance_grpo", KIND, "bounded.py:Bounded"])


BROKEN = {
    "is a function of nothing": "return advantage",
    "has another shape": "return (log_ratio * advantage).sum()",
    "is no tensor": "return 1.0",
}


@pytest.mark.parametrize("body", BROKEN.values(), ids=BROKEN)
def test_a_gain_that_cannot_be_trained_on_is_refused_before_a_weight_is_read(tmp_path, monkeypatch, capsys, body):
    (tmp_path / "broken.py").write_text(re.sub(r"return .*", body, GUIDE))
    monkeypatch.chdir(tmp_path)
    said = refused(capsys, *SMALL["dance_grpo"], *flags({"algorithm.objective.kind": "broken.py:Bounded"}))
    assert "algorithm.objective.kind broken.py:Bounded must return one gain per element" in said


def test_an_installed_package_offers_objectives_by_name(monkeypatch):
    offered = {"gate": "unified_trainer.numerics.objectives:SAPO"}
    monkeypatch.setattr(registry, "installed", lambda group: offered if group == "objectives" else {})
    made = registry.objective_of("gate")
    assert made == SAPO("gate") and isinstance(made, Objective)
