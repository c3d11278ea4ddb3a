"""Every script of examples/, run as a user would run it, on the tiny world and on a folder of one's own."""

import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
import yaml
from adapter_files import by_hand, factors, published
from forked import program, script
from helpers import CPU, HPSV3, REPO, WAN, free_port
from real_clips import real_folder
from safetensors.torch import load_file
from warm_ray import quick_ranks

from unified_trainer.models.wan.model import WanModel
from unified_trainer.rewards.base import RewardConfig, ScorerConfig
from unified_trainer.rewards.scorers import check_reward, load_scorers
from unified_trainer.run.settings.auto_resume import without_auto
from unified_trainer.run.settings.batch import starts_on
from unified_trainer.run.settings.command_line import parse

EXAMPLES = REPO / "examples"
SHORT = ["--steps", "1", "--validate-every", "1", "--validation.num-samples", "2", "--device", "cpu"]
SHORT += ["--video.frames", "5", "--video.height", "32", "--video.width", "32"]
GROUPS = ["--algorithm.num-prompts", "2", "--algorithm.num-samples", "2", "--algorithm.prompts-per-update", "2"]
PAIRS = ["--algorithm.batch-size", "2"]
WEIGHTS = "transformer/diffusion_pytorch_model.safetensors"
NODES = ["--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-id", "test"]


def run(*words: object, where: Path, started: bool = False, **environment: object) -> str:
    """Run a script; it must end with code 0. Gives what it printed.

    The Python and the torchrun that it starts are copies of this process, or real ones.
    """
    path = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    variables = os.environ | path | {name: str(value) for name, value in environment.items()}
    if started:
        words = [str(word) for word in words]
        done = subprocess.run(words, cwd=where, env=variables, text=True, capture_output=True, timeout=600)
    else:
        done = script(*words, where=where, variables=variables)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """A model, a reward and prompts outside the package: copies of the tiny ones, and subjects of no caption."""
    folder = tmp_path_factory.mktemp("own")
    shutil.copytree(WAN, folder / "model")
    shutil.copytree(HPSV3, folder / "reward")
    (folder / "prompts.txt").write_text("a red circle\na blue square\n\na green triangle\n")
    return {"MODEL": folder / "model", "REWARD": folder / "reward", "PROMPTS": folder / "prompts.txt"}


def test_every_script_is_tested_and_explained():
    scripts = {path.name for path in EXAMPLES.glob("*.sh")}
    assert scripts == set(re.findall(r"\w+\.sh", Path(__file__).read_text())) - {"install_torch.sh"}
    for path in EXAMPLES.glob("*.sh"):
        text = path.read_text()
        assert text.startswith("#!/usr/bin/env bash\n# ") and "set -euo pipefail" in text and os.access(path, os.X_OK)


def test_the_job_of_kuberay_starts_what_its_cluster_has_room_for():
    """Its command line is one of this program, which continues by itself; nodes have the cards of all ranks."""
    job = yaml.safe_load((EXAMPLES / "rayjob.yaml").read_text())["spec"]
    words = shlex.split(job["entrypoint"])
    run = parse(without_auto(words[3:]))
    assert words[:3] == ["python", "-m", "unified_trainer"] and run.launcher == "ray" and run.ray.address == "auto"
    assert job["backoffLimit"] > 0 and words[-2:] == ["--resume", "auto"]
    (group,) = job["rayClusterSpec"]["workerGroupSpecs"]
    (pod,) = group["template"]["spec"]["containers"]
    on_node = int(pod["resources"]["limits"]["nvidia.com/gpu"])
    assert run.ray.ranks == group["replicas"] * on_node and run.ray.least_ranks == on_node
    assert all(starts_on(run, ranks) for ranks in (run.ray.ranks, run.ray.least_ranks))


@pytest.mark.ranks
def test_try(tmp_path):
    run(EXAMPLES / "try.sh", *SHORT, *GROUPS, where=tmp_path, RANKS=2)
    assert (tmp_path / "runs" / "try-videos" / "0.mp4").is_file()


@pytest.mark.slow
def test_own_model(tmp_path, own):
    run(EXAMPLES / "own_model.sh", *SHORT, *GROUPS, where=tmp_path, RANKS=1, RECIPE="tiny", **own)
    assert (tmp_path / "runs" / "rl-student" / "model_index.json").is_file()
    settings = (tmp_path / "runs" / "rl" / "config.yaml").read_text()
    assert all(str(path) in settings for path in own.values())


@pytest.mark.ranks
def test_own_model_lora_prompts_and_reward_function(tmp_path, own):
    """Only files of one's own are needed; the adapter that is exported has moved from where it started."""
    network = WanModel.open(WAN, "transformer").network
    base = load_file(WAN / "transformer/diffusion_pytorch_model.safetensors")
    given = factors(network)
    start = by_hand(base, given, dict.fromkeys(given, 2.0 / 3))
    (tmp_path / "my_reward.py").write_text("def score(videos, prompts):\n    return videos[:, 0].flatten(1).mean(1)\n")
    files = {"MODEL": own["MODEL"], "LORA": published(tmp_path / "lora", given, 2.0), "PROMPTS": own["PROMPTS"]}
    files |= {"REWARD": "my_reward.py:score", "RECIPE": "tiny", "RANKS": 2}
    run(EXAMPLES / "own_model.sh", *SHORT, *GROUPS, where=tmp_path, **files)
    metrics = [json.loads(line) for line in (tmp_path / "runs/rl/metrics.jsonl").read_text().splitlines()]
    assert {"train/reward/score", "validation/reward/score"} <= {key for line in metrics for key in line}
    exported = load_file(tmp_path / "runs/rl-student/transformer/diffusion_pytorch_model.safetensors")
    for layer in given:
        moved, adapter = (
            float((one[f"{layer}.weight"] - start[f"{layer}.weight"]).abs().max()) for one in (exported, base)
        )
        assert 0 < moved < 0.1 * adapter
    assert len(list((tmp_path / "runs/rl-videos").glob("*.mp4"))) == 3


@pytest.mark.ranks
def test_distil_then_rl_and_compare(tmp_path, own):
    """The flags of both trainings differ, so the script runs with those that they share."""
    sizes = ["--sampler.num-steps", "2", *SHORT]
    run(EXAMPLES / "distill_then_rl.sh", *sizes, where=tmp_path, RANKS=2, RECIPE="tiny", **own)
    assert (tmp_path / "runs" / "dmd2-rl-student" / "transformer" / "config.json").is_file()
    pair = ["runs/dmd2:ema", "runs/dmd2-rl", own["PROMPTS"]]
    said = run(EXAMPLES / "compare.sh", *pair, where=tmp_path, SAMPLES=1)
    assert re.search(r"[+-][\d.e-]+ \[[+-][\d.e-]+, [+-][\d.e-]+\]", said), said  # a difference with its interval
    found = json.loads((tmp_path / "runs/compare/evaluation.json").read_text())
    (reward,) = (one for one in found["differences"] if one["measure"] == "reward")
    assert reward["left"] == "dmd2@1:ema" and reward["right"] == "dmd2-rl@1"
    assert reward["interval"][0] <= reward["difference"] <= reward["interval"][1]
    assert all(row["interval"] for row in found["measures"]["reward"].values())


@pytest.mark.ranks
def test_own_videos(tmp_path, own):
    """The teacher that is distilled is the fine-tuned model; the captions of the videos are the prompts."""
    real_folder(tmp_path / "videos")
    files = {"MODEL": own["MODEL"], "REWARD": own["REWARD"], "VIDEOS": tmp_path / "videos", "RECIPE": "tiny"}
    few = ["--sampler.num-steps", "2", "--checkpoint-every", "0"]
    run(EXAMPLES / "own_videos.sh", *SHORT, *few, where=tmp_path, RANKS=1, **files)
    runs = tmp_path / "runs"
    student = yaml.safe_load((runs / "sft-dmd2" / "config.yaml").read_text())["student"]["path"]
    assert student == "runs/sft-model" and (runs / "sft-student" / "model_index.json").is_file()
    tuned, given = (load_file(folder / WEIGHTS) for folder in (runs / "sft-model", own["MODEL"]))
    assert any(not torch.equal(tuned[key], given[key]) for key in given)
    assert len(list((runs / "sft-videos").glob("*.mp4"))) == 3


@pytest.mark.ranks
def test_streaming(tmp_path):
    sizes = [*SHORT, *PAIRS, "--algorithm.micro-batch", "1"]
    run(EXAMPLES / "streaming.sh", *sizes, where=tmp_path, RANKS=2, FRAMES=21)
    assert (tmp_path / "runs" / "streamed" / "0.mp4").is_file()


@pytest.mark.slow
def test_streaming_after_causvid(tmp_path):
    """With a folder of clips the second stage is dmd2 on them, noised chunk by chunk."""
    real_folder(tmp_path / "clips")
    few = ["--algorithm.batch-size", "1", "--algorithm.micro-batch", "1", "--steps", "1", "--validate-every", "0"]
    few += ["--video.frames", "5", "--video.height", "32", "--video.width", "32", "--device", "cpu"]
    run(EXAMPLES / "streaming.sh", *few, where=tmp_path, RANKS=1, FRAMES=9, CLIPS=tmp_path / "clips")
    second = yaml.safe_load((tmp_path / "runs" / "student" / "config.yaml").read_text())
    assert (second["method"], second["algorithm"]["rollout"]) == ("dmd2", "data")
    assert (tmp_path / "runs" / "streamed" / "0.mp4").is_file()


# Two nodes, both on this machine.


def test_the_job_of_slurm_asks_for_cores_and_gives_them_to_its_ranks():
    """Slurm gives a task one core by default, and srun does not take the number from sbatch."""
    text = (EXAMPLES / "slurm.sh").read_text()
    cores, cards = (int(re.search(rf"#SBATCH --{name} (\d+)", text)[1]) for name in ("cpus-per-task", "gpus-per-node"))
    assert cores >= 4 * cards and 'srun --cpus-per-task "$SLURM_CPUS_PER_TASK"' in text


@pytest.mark.ranks
def test_two_launchers_make_one_run(tmp_path):
    """Slurm's own commands stand in: srun starts the command on both nodes, scontrol names the first host."""
    programs = tmp_path / "bin"
    programs.mkdir()
    scripts = {
        "scontrol": "echo localhost; seq -f elsewhere-%g 10000",  # more names than a pipe holds
        "srun": '[ "$2" = 16 ]; shift 2; ("$@" --output runs/two) & "$@" --output runs/two; wait $!',
    }
    for name, text in scripts.items():
        (programs / name).write_text(f"#!/usr/bin/env bash\nset -e\n{text}\n")
        (programs / name).chmod(0o755)
    slurm = {
        "SLURM_JOB_NUM_NODES": 2,
        "SLURM_JOB_NODELIST": "nodes[1-2]",
        "SLURM_JOB_ID": 7,
        "SLURM_CPUS_PER_TASK": 16,
        "GPUS": 1,
        "PORT": free_port(),
    }
    path = f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    words = ["--method", "dance_grpo", *SHORT, *GROUPS]
    with quick_ranks() as variables:
        slurm |= {"PATH": path, "PYTHON_EXEC": variables["PYTHON_EXEC"]}
        said = run(EXAMPLES / "slurm.sh", *words, where=tmp_path, started=True, **slurm)
    assert said.count("ranks: 2 on cpu") == 1
    assert (tmp_path / "runs" / "two" / "checkpoints" / "step_1").is_dir()


@pytest.mark.ranks
def test_a_loop_of_ones_own_in_python_on_two_ranks(tmp_path):
    done = program(EXAMPLES / "own_loop.py", "runs/own", where=tmp_path, ranks=2)
    assert done.returncode == 0, done.stderr
    said = done.stdout
    lines = re.findall(r"^step (\d+): reward (\S+), gradient norm \S+$", said, re.M)
    rewards = {int(step): float(reward) for step, reward in lines}
    assert list(rewards) == list(range(5, 5 * len(rewards) + 5, 5)) and len(rewards) >= 2
    assert said.count("videos (2, 3, 17, 64, 64) of its last checkpoint") == 1
    best = max(rewards, key=lambda step: rewards[step])
    assert (tmp_path / "runs" / "own" / "checkpoints" / f"step_{best}" / "manifest.json").is_file()


@pytest.mark.ranks
def test_two_nodes_of_ray(tmp_path):
    """The second node is started first and waits; the first one runs the program with a rank and a worker."""
    settings = {"HEAD": "127.0.0.1", "PORT": free_port(), "RAY_AUTH_TOKEN": "0a" * 32, "RAY_OPTIONS": "--num-cpus 1"}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    shared = {**os.environ, "PATH": path, **{name: str(value) for name, value in settings.items()}}
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "env": shared | {"NODE": "1"}}
    second = subprocess.Popen([str(EXAMPLES / "ray.sh")], cwd=tmp_path, **quiet)
    try:
        words = ["--method", "dance_grpo", *SHORT, *GROUPS, "--rollouts.workers", "1", "--output", "runs/two"]
        said = run(EXAMPLES / "ray.sh", *words, where=tmp_path, started=True, **settings, NODE=0)
    finally:
        for process in [*psutil.Process(second.pid).children(recursive=True), second]:
            process.kill()
        second.wait()
    assert "ranks: 1 on cpu" in said and "worker 0" in said
    assert (tmp_path / "runs" / "two" / "checkpoints" / "step_1").is_dir()


# In the place of the package, which needs transformers 4: the mean color of images of 8 bits, with the prompt's length.
STAND_IN = """
import numpy as np
import torch


class HPSv3RewardInferencer:
    def __init__(self, checkpoint_path, device):
        assert (checkpoint_path, device) == ("HPSv3.safetensors", "cpu")

    def reward(self, images, prompts):
        if "fails" in prompts:
            raise RuntimeError("no memory")
        mu = [np.asarray(image).mean() / 255 + len(prompt) for image, prompt in zip(images, prompts)]
        return torch.tensor([[one, 0.1] for one in mu])
"""


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["float32", "uint8"])
def test_serve_hpsv3(tmp_path, encoding):
    """The server speaks the protocol without this package; its scores are those of the class hpsv3."""
    (tmp_path / "hpsv3.py").write_text(STAND_IN)
    started = [sys.executable, str(EXAMPLES / "serve_hpsv3.py"), "HPSv3.safetensors", "0", "cpu"]
    path = {"PYTHONPATH": str(tmp_path)}
    with subprocess.Popen(started, stdout=subprocess.PIPE, env={**os.environ, **path}, text=True) as server:
        try:
            settings = {"url": server.stdout.readline().split()[-1], "name": "hpsv3-1.0.0", "encoding": encoding}
            config = RewardConfig(scorers={"official": ScorerConfig(kind="http", frames="all", settings=settings)})
            check_reward(config, 3)
            score = load_scorers(config, CPU)[0]["official"]
            video = torch.rand(2, 3, 3, 8, 8, generator=torch.Generator().manual_seed(0))
            expected = ((255 * video).round() / 255).flatten(1).mean(1) + torch.tensor([1.0, 2.0])
            torch.testing.assert_close(score(video, ("a", "bc")), expected, rtol=1e-5, atol=0)
            with pytest.raises(ConnectionError, match=r"(?s)code 500: Traceback .*RuntimeError: no memory"):
                score(video, ("a", "fails"))
        finally:
            server.terminate()


def test_the_checker_of_actions_tells_moves_apart():
    world = runpy.run_path(str(EXAMPLES / "tiny_actions.py"))
    generator = torch.Generator().manual_seed(1)
    clips = [world["draw_acted"](generator, 17) for _ in range(8)]
    assert all(bool(world["obeyed"](clip.render(), clip.moves).all()) for clip in clips)
    others = torch.cat([world["obeyed"](clip.render(), (clip.moves + 1) % 5) for clip in clips])
    assert others.float().mean() < 0.2  # at an edge two moves may be one
