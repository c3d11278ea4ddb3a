"""The commands of README, start and running, in their order and in one folder: each finds what earlier ones wrote.

Training commands are shortened (fewer steps and samples); commands with the names of real models stop before their
weights are read, in folders that hold the configs of those models.
"""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from forked import program
from helpers import ALONE, HPSV3, REPO
from real_clips import real_folder
from recipe_folders import model_folder

from unified_trainer.__main__ import COMMANDS, main
from unified_trainer.run.plan.plan import check
from unified_trainer.run.settings.command_line import parse

MODELS = {"Wan2.1-T2V-1.3B-Diffusers": "wan2.1-1.3b", "Wan2.2-T2V-A14B-Diffusers": "wan2.2-a14b"}
STEPS = {"20": "1", "40": "2", "100": "1", "500": "2"}  # in a page: here
SHORT = ["--checkpoint-every", "1", "--validate-every", "1"]
SHORT += ["--validation.num-samples", "2", "--validation.num-videos", "1"]
SMALL = ["--video.frames", "5", "--video.height", "32", "--video.width", "32"]
CLIPS = ["--data.num-clips", "4"]  # of the tiny world, whose size is that of the video
GROUPS = ["--algorithm.num-prompts", "2", "--algorithm.num-samples", "2", "--algorithm.prompts-per-update", "2"]
PAIRS = ["--algorithm.batch-size", "2"]


PAGES = ("README.md", "docs/start.md", "docs/running.md")


def readme_lines() -> list[str]:
    """The lines of the pages' shell blocks behind the installation, continuations joined."""
    return lines_of("\n".join((REPO / page).read_text(encoding="utf-8") for page in PAGES), 1)


def lines_of(text: str, first: int = 0) -> list[str]:
    """The commands of a text's shell blocks from a number on."""
    blocks = re.findall(r"```sh\n(.*?)```", text, re.S)[first:]
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]


def shortened(words: list[str]) -> list[str]:
    """The flags of a training command, with fewer steps, samples and clips; a resumed run has its sizes."""
    if "--steps" in words:
        at = words.index("--steps") + 1
        words[at] = STEPS[words[at]]
    if "--validation.num-samples" in words:
        words[words.index("--validation.num-samples") + 1] = "4"
    if "--resume" in words or "--config" in words:
        return words
    length = [] if "--epochs" in words or "--steps" in words else ["--steps", "1"]
    if "--ramp-up.start" in words:  # of 8 samples, by 8
        return [*SHORT, "--algorithm.batch-size", "16", *CLIPS, *words]
    return [
        *length,
        *SHORT,
        *(GROUPS if "dance_grpo" in words else PAIRS),
        *(CLIPS if "finetune" in words else SMALL),
        *words,
    ]


def run(line: str) -> None:
    """Run one line of a page."""
    words = shlex.split(line, comments=True)
    if "unified_trainer" not in words:
        installed = {**os.environ, "PATH": f"{Path(sys.prefix) / 'bin'}:{os.environ['PATH']}"}
        subprocess.run(["bash", "-c", line], check=True, env=installed)
        return
    ranks, words = words[0] == "torchrun", words[words.index("unified_trainer") + 1 :]
    words = [re.sub("@200", "@1", word) for word in words]
    if words[0] in ("import-hpsv2", "import-hpsv3"):
        return  # they read 4 and 17 GB that are no part of this repository; tests/rewards run it on a small one
    if words[0] == "push":
        return  # it needs a hub; tests/tools/export/test_push.py has one
    if words[0] == "preprocess":
        assert main(words[:3]) == 0  # on the tiny world instead of a real model
    elif words[0] == "plan":  # tests/tools/plan/test_plan.py has the real one
        assert main([re.sub(r"wan2.*", "tiny", word) for word in words]) == 0
    elif any(model in words for model in MODELS):
        repeats = "repeat within a training step"  # there are three clips and two prompts
        assert [note for note in check(parse(words), ALONE).notes if repeats not in note] == []
    elif words[0] in COMMANDS or "--help" in words:
        assert main(words) == 0, line
    elif ranks:
        done = program("-m", "unified_trainer", *shortened(words), where=Path.cwd(), ranks=2)
        assert done.returncode == 0, done.stderr
    else:
        assert main(shortened(words)) == 0, line


def test_the_checkpoints_of_the_evaluation_are_those_of_readme():
    """Its pages' names of runs are outputs of README's commands, and a step is one that the run keeps."""
    readme = (REPO / "README.md").read_text(encoding="utf-8")
    made = dict(re.findall(r"unified_trainer --method (\w+).* --output runs/([\w-]+)", readme))
    methods = {folder: method for method, folder in made.items()}
    page = (REPO / "docs" / "tools.md").read_text(encoding="utf-8")
    section = page[page.index("## Evaluation") : page.index("## Serving a student")]
    named = set(re.findall(r"runs/([\w-]+)(?:@(\d+))?", section))
    assert {folder for folder, _ in named} == {"dmd2", "dmd2-rl"} == {*methods} - {"own"}
    for folder, step in named:
        run_of = parse(["--method", methods[folder]])
        kept = range(run_of.steps, 0, -run_of.checkpoint_every)[: run_of.keep_last]
        assert not step or int(step) in kept


@pytest.mark.ranks
def test_the_commands_run_from_top_to_bottom(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name, recipe in MODELS.items():
        model_folder(tmp_path / name, recipe)
    (tmp_path / "hpsv3").symlink_to(HPSV3)
    real_folder(tmp_path / "clips")
    for file in ("prompts.txt", "held_out.txt"):
        (tmp_path / file).write_text("a cat\na dog\n")
    for line in readme_lines():
        run(line)
    assert (tmp_path / "dmd2-student" / "model_index.json").is_file()
    assert len(list((tmp_path / "videos").glob("*.mp4"))) == 9
    assert (tmp_path / "streamed" / "0.mp4").is_file()
    assert (tmp_path / "encoded" / "clips-00000.parquet").is_file()


@pytest.mark.slow
def test_own_videos_lead_to_a_causal_student(tmp_path, monkeypatch):
    """The commands of docs/own_videos.md for a causal student, from the fine-tuning on, with the tiny world's model."""
    monkeypatch.chdir(tmp_path)
    real_folder(tmp_path / "clips")
    steps, causal = (REPO / "docs" / "own_videos.md").read_text(encoding="utf-8").split("## A causal student")
    lines = [*lines_of(steps)[:2], *lines_of(causal)]
    assert [shlex.split(line)[0] for line in lines] == [
        "torchrun",
        "python",
        "torchrun",
        "torchrun",
        "python",
        "python",
    ]
    for line in lines:
        line = line.replace("wan2.1-1.3b", "tiny").replace("Wan2.1-T2V-1.3B-Diffusers", "tiny").replace("241", "21")
        line = line.replace("chunk-frames 3", "chunk-frames 1")  # latent frames of the tiny world's self_forcing
        words = shlex.split(line)
        words = words[words.index("unified_trainer") + 1 :]
        small = ["--steps", "1", *SHORT, *SMALL, *PAIRS] if words[0] == "--method" else []
        assert main([*words, *small]) == 0, line
    assert (tmp_path / "streamed" / "0.mp4").is_file() and (tmp_path / "causal-student").is_dir()
    assert (tmp_path / "runs" / "sft-causal" / "config.yaml").read_text().count("sft-model") == 1
