"""Relative paths in config.yaml: a run is continued and sampled from another folder than that of its start."""

import json

import pytest
from bad_inputs import refused
from helpers import ALONE, WAN, checkpoint
from run_folders import make_run, parsed, write_lines
from safetensors.torch import load_file

from unified_trainer.__main__ import main
from unified_trainer.run.settings import config as settings
from unified_trainer.run.settings.command_line import parse
from unified_trainer.run.settings.config import is_edited
from unified_trainer.run.tracking.environment import environment
from unified_trainer.tools.load_run import load_role

FLAGS = ("--recipe", "tiny", "--prompts", "texts/own.txt", "--student.path", "models/own")


@pytest.fixture
def moved(tmp_path, monkeypatch):
    """A run that was started in the folder start, seen from the folder elsewhere."""
    start, elsewhere = tmp_path / "start", tmp_path / "elsewhere"
    for folder in (start / "texts", start / "models", elsewhere):
        folder.mkdir(parents=True)
    (start / "texts" / "own.txt").write_text("a red circle\na blue square\n")
    (start / "models" / "own").symlink_to(WAN)
    monkeypatch.chdir(elsewhere)
    parsed.cache_clear()
    run = make_run(start / "run", *FLAGS, videos=0)
    write_lines(run / "environment.jsonl", [{"step": 0, "folder": str(start)}])
    return run


@pytest.mark.slow
def test_paths_of_a_run_are_found_from_the_folder_of_its_start(moved):
    start, run = moved.parent, parse(["--resume", str(moved)])
    assert (run.prompts, run.student.path) == (str(start / "texts" / "own.txt"), str(start / "models" / "own"))
    assert (run.reward.path, run.data.path, run.validation.prompts) == ("tiny", "tiny", "tiny")
    assert settings.check_resumable(run, moved / "config.yaml") == []
    assert parse(["--config", str(moved / "config.yaml")]).prompts == run.prompts


@pytest.mark.slow
def test_config_keeps_its_relative_paths(moved):
    before = (moved / "config.yaml").read_text()
    settings.save(parse(["--resume", str(moved)]), moved / "config.yaml")
    assert (moved / "config.yaml").read_text() == before and not is_edited(before)
    other = parse(["--resume", str(moved), "--prompts", "new.txt", "--allow", "prompts"])
    settings.save(other, moved / "config.yaml")
    assert (moved / "config.yaml").read_text() != before
    assert settings.flat(settings.plain(other))["prompts"] == "new.txt"


@pytest.mark.slow
def test_the_present_folder_comes_first_and_then_the_newest_start(moved, tmp_path):
    again = tmp_path / "again"
    (again / "texts").mkdir(parents=True)
    (again / "texts" / "own.txt").write_text("a green triangle\n")
    lines = (moved / "environment.jsonl").read_text() + json.dumps({"folder": str(again)}) + "\n{torn"
    (moved / "environment.jsonl").write_text(lines)
    run = parse(["--resume", str(moved)])
    assert run.prompts == str(again / "texts" / "own.txt")
    assert run.student.path == str(moved.parent / "models" / "own")
    (tmp_path / "elsewhere" / "texts").symlink_to(again / "texts")
    assert parse(["--resume", str(moved)]).prompts == "texts/own.txt"


@pytest.mark.slow
def test_a_lost_path_is_named_with_its_file_its_folders_and_the_way_out(moved, capsys):
    (moved.parent / "texts" / "own.txt").unlink()
    assert main(["--resume", str(moved), "--steps", "11"]) == 2
    said = capsys.readouterr().err
    for part in (
        "--prompts texts/own.txt: no such file",
        f"{moved / 'config.yaml'} has it as prompts: texts/own.txt, relative to the folder where the run was started",
        f"looked for in {moved.parents[1] / 'elsewhere'}, {moved.parent}",
        "--prompts PATH --allow prompts",
    ):
        assert part in said
    assert said.count("\n") == 3 and "holds no complete checkpoint" in said  # the other fault of this folder


@pytest.mark.slow
def test_a_role_is_loaded_from_elsewhere(moved):
    weights = load_file(next((WAN / "transformer").glob("*.safetensors")))
    metadata = {"method": "dance_grpo", "sampler": None}
    tensors = {f"student/weights/{key}": value + 1 for key, value in weights.items()}
    checkpoint.save(moved / "checkpoints", 11, tensors, ALONE, metadata)
    loaded = load_role(str(moved), "student", None, ALONE, causal=True)
    assert (loaded.role.weights["proj_out.bias"] == weights["proj_out.bias"] + 1).all()
    (moved.parent / "models" / "own").unlink()
    (moved.parent / "environment.jsonl").write_text("")
    refused(
        lambda: load_role(str(moved), "student", None, ALONE, causal=True),
        f"{moved / 'config.yaml'} has it as student.path: models/own",
        "also take --base DIR",
    )


def test_a_start_notes_its_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert environment([], 0, 0, ALONE)["folder"] == str(tmp_path)
