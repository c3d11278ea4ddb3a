"""Hub ids in place of folders: what is downloaded, pinned, resumed, and said without a connection."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from helpers import ALONE, REPO, SMALL, WAN, copy_of, files_of, rewrite, run
from hub_server import COMMIT, OLD, cache_of, hub
from huggingface_hub import constants
from transformers import CLIPConfig, CLIPModel

from unified_trainer.__main__ import main
from unified_trainer.basics.errors import MissingFileError, UserError
from unified_trainer.models.hub import is_hub_id
from unified_trainer.rewards.scorers import load_scorers
from unified_trainer.run.plan.downloads import fetched
from unified_trainer.run.registry import family_of
from unified_trainer.run.settings.command_line import parse
from unified_trainer.tools.sample.sample import read_lines

pytestmark = pytest.mark.slow  # seconds together

ID = "me/tiny-wan"
REST = {f"{name}/config.json" for name in ("text_encoder", "vae")} | {
    "text_encoder/model.safetensors",
    "vae/diffusion_pytorch_model.safetensors",
    "tokenizer/tokenizer.json",
    "tokenizer/tokenizer_config.json",
    "scheduler/scheduler_config.json",
}
NETWORK = {"model_index.json", "transformer/config.json", "transformer/diffusion_pytorch_model.safetensors"}


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache of the hub, and no connection."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "cache"


@pytest.fixture
def online(cache, monkeypatch):
    """Serve repositories; returns the list of files that are downloaded."""
    with hub(served := {}) as (address, asked):
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", address)
        template = f"{address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        yield served, asked


def repository(folder: Path) -> Path:
    """The tiny world as repositories are: with second copies of weights, other formats and pictures."""
    copy_of(WAN, folder)
    network = folder / "transformer" / "diffusion_pytorch_model"
    for suffix in (".bin", ".fp16.safetensors", "-00001-of-00002.fp16.safetensors", ".onnx"):
        network.with_name(network.name + suffix).write_text("of no use")
    for name in ("README.md", "Wan2.1_VAE.pth", "assets/clip.mp4", "original/model.safetensors"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("of no use")
    (folder / "text_encoder" / "pytorch_model.bin").write_text("of no use")
    return folder


def settings(*words: str, method: str = "finetune"):
    return parse([*SMALL[method], *words])


def test_what_is_a_hub_id(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ids = ("Wan-AI/Wan2.1-T2V-1.3B-Diffusers", "me/x@main", "me/x@v1.0", f"me/x@{COMMIT}", "me/x@refs/pr/1")
    assert all(is_hub_id(one) for one in ids)
    assert not any(is_hub_id(one) for one in ("", "tiny", "wan", "/me/x", "./me/x", "../x", "a/b/c", "me/x@", "me/x y"))
    (tmp_path / "me" / "x").mkdir(parents=True)
    assert not is_hub_id("me/x")  # a folder here


def test_only_the_files_that_a_run_needs_are_downloaded(online, tmp_path):
    served, asked = online
    served[ID] = {COMMIT: repository(tmp_path / "repository")}
    pinned = fetched(settings("--student.path", ID), ALONE)
    assert pinned.student.path == f"{ID}@{COMMIT}"
    assert sorted(asked) == sorted(NETWORK | REST)
    _, folder = family_of("student", pinned.student.path)
    assert files_of(folder) == {name: (WAN / name).read_bytes() for name in NETWORK | REST}
    asked.clear()
    assert fetched(pinned, ALONE) == pinned
    assert asked == []


def test_a_chat_template_beside_a_tokenizer_is_downloaded(online, tmp_path):
    """Newer repositories have it in a file of its own, without which a prompt has no turns of a chat."""
    served, asked = online
    served[ID] = {COMMIT: repository(tmp_path / "repository")}
    (tmp_path / "repository" / "tokenizer" / "chat_template.jinja").write_text("{{ messages }}")
    fetched(settings("--student.path", ID), ALONE)
    assert {*asked} == NETWORK | REST | {"tokenizer/chat_template.jinja"}


def test_nothing_is_downloaded_for_a_run_that_lacks_a_setting(online, tmp_path, capsys, run_folder):
    served, asked = online
    served[ID] = {COMMIT: repository(tmp_path / "repository")}
    words = ["--method", "finetune", "--student.path", ID, "--output", str(run_folder)]
    assert main([*words, "--recipe", "wan2.1-1.3b"]) == 2
    assert "needs --data.path" in capsys.readouterr().err and asked == []
    assert main(words) == 2
    assert f"--student.path {ID}@{COMMIT} needs a recipe: add --recipe" in capsys.readouterr().err
    assert asked and not [name for name in asked if not name.endswith(".json")]


def test_a_teacher_needs_its_networks_alone(online, tmp_path):
    served, asked = online
    served[ID] = {COMMIT: repository(tmp_path / "repository")}
    run = parse(["--method", "dmd2", "--recipe", "tiny", "--teacher.path", ID])
    fetched(run, ALONE)
    assert {name for name in asked if not name.endswith("/config.json")} == {
        "model_index.json",
        "transformer/diffusion_pytorch_model.safetensors",
    }


def test_one_rank_of_a_node_downloads(online, tmp_path):
    """Another one finds the cache filled after it waited, or says what is missing."""
    served, asked = online
    served[ID] = {COMMIT: repository(tmp_path / "repository")}
    with pytest.raises(MissingFileError, match="the hub's cache lacks it"):
        fetched(settings("--student.path", ID), replace(ALONE, first_on_node=False))
    assert asked == []
    first = fetched(settings("--student.path", ID), ALONE)
    asked.clear()
    assert fetched(settings("--student.path", ID), replace(ALONE, first_on_node=False)) == first
    assert asked == []


def test_a_run_is_pinned_to_the_commit_it_started_with(online, tmp_path, monkeypatch):
    served, asked = online
    served[ID] = {OLD: repository(tmp_path / "old")}
    folder = tmp_path / "run"
    run("finetune", folder, "--student.path", ID)
    assert yaml.safe_load((folder / "config.yaml").read_text())["student"]["path"] == f"{ID}@{OLD}"
    new = repository(tmp_path / "new")
    rewrite(new / "transformer" / "diffusion_pytorch_model.safetensors", lambda held: held["proj_out.bias"].add_(1))
    served[ID] = {OLD: tmp_path / "old", COMMIT: new}
    asked.clear()
    assert main(["--resume", str(folder), "--steps", "2"]) == 0
    assert asked == []
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert main(["--resume", str(folder), "--steps", "3"]) == 0
    assert main(["export", str(folder), str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "vae" / "config.json").is_file()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    run("finetune", tmp_path / "again", "--student.path", ID)
    assert yaml.safe_load((tmp_path / "again" / "config.yaml").read_text())["student"]["path"] == f"{ID}@{COMMIT}"


def test_a_filled_cache_needs_no_connection(cache):
    """Also one that another program filled, which lists no files."""
    cache_of(cache, ID, WAN)
    pinned = fetched(settings("--student.path", f"{ID}@main"), ALONE)
    assert pinned.student.path == f"{ID}@{COMMIT}"
    assert family_of("student", pinned.student.path)[1].name == COMMIT


def test_without_a_connection_the_command_is_said(cache, capsys, run_folder):
    words = [*SMALL["finetune"], "--output", str(run_folder), "--student.path"]
    assert main([*words, "Wan-AI/Wan2.1-T2V-1.3B-Diffusers@v1"]) == 2
    said = capsys.readouterr().err
    assert "student.path Wan-AI/Wan2.1-T2V-1.3B-Diffusers@v1 is not here, and HF_HUB_OFFLINE is set" in said
    assert "`hf download Wan-AI/Wan2.1-T2V-1.3B-Diffusers --revision v1 --include model_index.json " in said
    assert "--include '*/*model-*-of-*.safetensors'" in said and "--exclude '*.fp16.*'" in said
    assert str(cache) in said and "HF_HOME" in said and not run_folder.exists()


def test_a_hub_that_cannot_be_reached(cache, capsys, monkeypatch, run_folder):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)  # between its attempts
    assert main([*SMALL["finetune"], "--output", str(run_folder), "--student.path", ID]) == 2
    assert "the hub cannot be reached and its cache lacks it" in capsys.readouterr().err
    cache_of(cache, ID, WAN)
    assert fetched(settings("--student.path", ID), ALONE).student.path == f"{ID}@{COMMIT}"


@pytest.mark.parametrize(
    ("absent", "named"),
    [("transformer/diffusion_pytorch_model.safetensors", "transformer"), ("tokenizer/tokenizer.json", "tokenizer")],
)
def test_a_cache_of_a_part_is_said_before_anything_is_loaded(cache, absent, named):
    names = {name for name in NETWORK | REST if not name.startswith("tokenizer" if "tokenizer" in absent else absent)}
    cache_of(cache, ID, WAN, names=tuple(names))
    with pytest.raises(MissingFileError, match=f"of {named} the cache holds a part.*--include 'transformer/\\*model"):
        fetched(settings("--student.path", ID), ALONE)


def test_repositories_and_revisions_that_are_not_there(online, tmp_path):
    served, _ = online
    served[ID] = {COMMIT: WAN}
    with pytest.raises(UserError, match=r"me/none is not here, .* has no such repository.*hf auth login"):
        fetched(settings("--student.path", "me/none"), ALONE)
    with pytest.raises(UserError, match=f"{ID} has no revision v7 on the hub"):
        fetched(settings("--student.path", f"{ID}@v7"), ALONE)


# Prompts.

DATA = "hf://datasets/me/prompts"


def test_prompts_of_a_data_set(online, tmp_path, capsys):
    """The file alone is downloaded, the run keeps its commit, and other commands read it."""
    served, asked = online
    (tmp_path / "set" / "data").mkdir(parents=True)
    (tmp_path / "set" / "data" / "train.txt").write_text("a red circle moving left\na blue square moving up\n")
    (tmp_path / "set" / "data" / "test.csv").write_text("prompt\na green triangle moving right\n")
    served["me/prompts"] = {COMMIT: tmp_path / "set"}
    folder, test = tmp_path / "run", f"{DATA}@main/data/test.csv"
    run("dance_grpo", folder, "--prompts", f"{DATA}/data/train.txt", "--validation.sets.test", test)
    saved = yaml.safe_load((folder / "config.yaml").read_text())
    assert saved["prompts"] == f"{DATA}@{COMMIT}/data/train.txt"
    assert saved["validation"]["sets"]["test"] == f"{DATA}@{COMMIT}/data/test.csv"
    assert sorted(asked) == ["data/test.csv", "data/train.txt"]
    assert main(["--resume", str(folder), "--steps", "2"]) == 0
    assert read_lines([test])[0].text == "a green triangle moving right"
    capsys.readouterr()


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("hf://datasets/me/prompts/none.txt", "the data set on the hub has no such file"),
        ("hf://datasets/me/none/a.txt", "no such repository"),
        ("hf://me/prompts/a.txt", "write a file on the hub as hf://datasets/owner/name/file"),
    ],
)
def test_files_of_data_sets_that_are_not_there(online, tmp_path, path, said):
    served, _ = online
    (tmp_path / "a.txt").write_text("a red circle moving left\n")
    served["me/prompts"] = {COMMIT: tmp_path}
    with pytest.raises(UserError, match=f"--validation.prompts {path}.*{said}"):
        fetched(settings("--validation.prompts", path), ALONE)


def test_a_data_set_without_a_connection(cache):
    with pytest.raises(MissingFileError, match=r"`hf download me/prompts --repo-type dataset --include a.txt`"):
        fetched(settings("--validation.prompts", f"{DATA}/a.txt"), ALONE)


# Scorers and import-hpsv3.


def clip_folder(folder: Path) -> Path:
    config = CLIPConfig(
        text_config={"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2},
        vision_config={"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2},
    )
    CLIPModel(config).save_pretrained(folder)
    for name in ("pytorch_model.bin", "README.md", "flax_model.msgpack"):
        (folder / name).write_text("of no use")
    return folder


def test_a_clip_scorer_from_the_hub(online, tmp_path):
    served, asked = online
    served["me/clip"] = {COMMIT: clip_folder(tmp_path / "clip")}
    run = settings("--reward.scorers.clip.path", "me/clip", method="dance_grpo")
    pinned = fetched(run, ALONE)
    assert pinned.reward.scorers["clip"].path == f"me/clip@{COMMIT}"
    assert pinned.reward.path == run.reward.path
    assert sorted(asked) == ["config.json", "model.safetensors"]
    with pytest.raises(MissingFileError, match=rf"{COMMIT}/preprocessor_config\.json is missing"):
        load_scorers(pinned.reward, torch.device("cpu"))  # the folder is found, and read
    own = settings(
        "--reward.scorers.mine.kind", "my.py:score", "--reward.scorers.mine.path", "me/x", method="dance_grpo"
    )
    assert fetched(own, ALONE) == own  # a path of a kind of one's own is its own affair


def test_import_hpsv3_fetches_both_parts(online, tmp_path):
    golden = REPO / "tests" / "golden" / "hpsv3"
    base = copy_of(golden / "base", tmp_path / "base")
    (base / "model-00001-of-00005.safetensors").write_text("of no use")
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    shutil.copyfile(golden / "HPSv3.safetensors", checkpoint / "HPSv3.safetensors")
    (checkpoint / "README.md").write_text("of no use")
    served, asked = online
    served |= {"Qwen/Qwen2-VL-7B-Instruct": {OLD: base}, "MizzenAI/HPSv3": {COMMIT: checkpoint}}
    assert main(["import-hpsv3", "--out", str(tmp_path / "fetched")]) == 0
    assert "HPSv3.safetensors" in asked and not {"README.md", "model-00001-of-00005.safetensors"} & {*asked}
    given = ["--base", str(golden / "base"), "--checkpoint", str(golden / "HPSv3.safetensors")]
    assert main(["import-hpsv3", "--out", str(tmp_path / "given"), *given]) == 0
    ours, theirs = files_of(tmp_path / "fetched"), files_of(tmp_path / "given")
    said = yaml.safe_load(ours.pop("hpsv3.json"))
    assert said.pop("sources") == {
        "base": f"Qwen/Qwen2-VL-7B-Instruct@{OLD}",
        "checkpoint": f"MizzenAI/HPSv3@{COMMIT}",
    }
    assert said == yaml.safe_load(theirs.pop("hpsv3.json")) and ours == theirs


def test_import_hpsv3_without_a_connection(cache, tmp_path, capsys):
    assert main(["import-hpsv3", "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert "`hf download Qwen/Qwen2-VL-7B-Instruct --include config.json " in said and not (tmp_path / "out").exists()
