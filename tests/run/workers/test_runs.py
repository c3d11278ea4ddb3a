"""Whole runs with workers on Ray: the same numbers as in one process, whatever dies."""

import json
import os
import signal
import subprocess
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
from events import one_ends
from forked import program
from helpers import REPO, SMALL, assert_same, checkpoint_of, environment, flags, metrics_of, read_until
from i2v_folder import i2v_folder
from PIL import Image
from warm_ray import Warm

from unified_trainer.__main__ import main

pytestmark = pytest.mark.ranks

OF_WORKERS = ("train/worker_deaths", "train/weights_gib", "train/samples_gib", "validation/worker_deaths")
ON_CPU = ["--device", "cpu", "--algorithm.rollout-batch", "2"]
GRPO = [*SMALL["dance_grpo"], *ON_CPU, "--steps", "3"]
NFT = ["--method", "diffusion_nft", *GRPO[2:], "--algorithm.old-decay-rise", "0.1", "--sampler.guidance-scale", "1"]
# Adapters, and a causal student in bf16 that is sampled chunk by chunk.
LORA = [*GRPO, *flags({"student.adapter.rank": 2})]
CAUSAL = [
    *GRPO,
    *flags({"student.precision": "bf16"}),
    *flags({"sampler.chunks.chunk-frames": 1, "algorithm.clip-low": 0.01, "algorithm.clip-high": 0.01}),
]
RUNS = {"dance_grpo": GRPO, "adapter": LORA, "causal": CAUSAL, "diffusion_nft": NFT}


def run(words: list[str], output: Path, **settings: object) -> Path:
    """A run in this process."""
    assert main([*words, "--output", str(output), *flags(settings)]) == 0
    return output


def assert_equal_runs(left: Path, right: Path, step: int = 3) -> None:
    """Bit for bit: every metric but those of the workers, and every tensor of the last checkpoint.

    Validations come first: beside training they are written later.
    """
    rows = [sorted(metrics_of(one), key=lambda row: "train/reward" in row) for one in (left, right)]
    kept = [[{k: v for k, v in row.items() if k not in OF_WORKERS} for row in one] for one in rows]
    assert kept[0] == kept[1]
    assert_same(checkpoint_of(left, step), checkpoint_of(right, step))


ENDED_BY_RAY = "accesses the Ray's worker after it is shutdown. The process will exit"
ENDING_THE_SCHEDULER = """
from pathlib import Path

import ray

def end_scheduler():
    for scheduler in Path(__file__).parent.glob("scheduler"):
        scheduler.unlink()
        for name in ray.util.list_named_actors():
            if name.startswith("scheduler"):
                ray.kill(ray.get_actor(name), no_restart=False)
"""
DYING = f"""
import os, signal
{ENDING_THE_SCHEDULER}
def score(video, prompts):
    end_scheduler()
    for death in Path(__file__).parent.glob("death-*"):  # the next one, which is then over
        death.unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    return video.flatten(1).mean(1)
"""


@pytest.fixture
def dying(tmp_path):
    """A scorer that ends its process once for each death that is planned, or the scheduler: dying(3), dying(0, ...)."""
    (tmp_path / "scorer.py").write_text(DYING)

    def plan(deaths: int, *, scheduler: bool = False) -> None:
        for name in [f"death-{number}" for number in range(deaths)] + ["scheduler"] * scheduler:
            (tmp_path / name).touch()

    plan.flags = ["--reward.scorers.mean.kind", f"{tmp_path / 'scorer.py'}:score"]
    plan.over = lambda: not [*tmp_path.glob("death-*"), *tmp_path.glob("scheduler")]
    return plan


@pytest.mark.parametrize("kind", RUNS)
def test_workers_change_no_number(ray, tmp_path, dying, kind):
    """Two rollout workers and a reward worker, which dies at work, against one process; else one worker.

    With adapters the scheduler dies while it waits for a worker.
    """
    words = [*RUNS[kind], *dying.flags]
    alone = run(words, tmp_path / "alone")
    deaths = 1 if kind == "dance_grpo" else 0
    dying(deaths, scheduler=kind == "adapter")
    settings = {"rollouts.workers": 2 if deaths else 1, "rollouts.reward-workers": int(kind == "dance_grpo")}
    there = run(words, tmp_path / "workers", **settings)
    assert dying.over()
    assert_equal_runs(alone, there)


def test_workers_read_condition_images_and_actions(ray, tmp_path):
    """A rollout, a reward and an evaluation worker against one process; the reward looks at the image of each row.

    The layer of actions is zero at first: rollouts of the second step depend on what the first one trained.
    """
    draw, rows = np.random.default_rng(0), []
    for number in range(2):
        Image.fromarray(draw.integers(0, 255, (40, 50, 3), dtype=np.uint8)).save(tmp_path / f"{number}.png")
        acts = draw.normal(size=(5, 3)).tolist()
        rows.append(json.dumps({"prompt": "a circle", "image": f"{number}.png", "actions": acts}))
    table = tmp_path / "prompts.jsonl"
    table.write_text("\n".join(rows))
    size = {"video.frames": 5, "video.height": 64, "video.width": 64, "sampler.num-steps": 2, "steps": 2}
    groups = {"algorithm.num-prompts": 2, "algorithm.num-samples": 2, "algorithm.prompts-per-update": 2}
    reward = {"reward.kind": "first_frame_likeness", "reward.path": "", "reward.frames": "all"}
    named = {"student.path": i2v_folder(tmp_path / "model", clip=True), "prompts": table, "validation.prompts": table}
    checked = {"validate-every": 2, "validation.num-samples": 2, "student.learning-rate": 1e-3}
    named["student.action-size"] = 3
    words = ["--method", "dance_grpo", "--recipe", "tiny", *flags(size | groups | reward | named | checked), *ON_CPU]
    alone = run(words, tmp_path / "alone")
    workers = {f"rollouts.{kind}": 1 for kind in ("workers", "reward-workers", "evaluation-workers")}
    assert_equal_runs(alone, run(words, tmp_path / "there", **workers), 2)
    trained = checkpoint_of(alone, 2)["student/weights/condition_embedder.action_proj.weight"]
    assert trained.any()


def test_ahead_of_training_a_run_is_a_function_of_its_settings(ray, tmp_path, dying):
    """One worker, with a scheduler that dies, against a run that goes on with two, of which one dies."""
    words = [*GRPO, *dying.flags, *flags({"rollouts.ahead": 1})]
    dying(0, scheduler=True)
    first = run(words, tmp_path / "first", **{"rollouts.workers": 1})
    lag = [row.get("train/lag") for row in metrics_of(first)]
    assert lag == [None, 1.0, 1.0]  # the first step, and the step after it, take the weights that the run starts with
    second = run(words, tmp_path / "second", **{"rollouts.workers": 1, "steps": 1})
    dying(1)
    assert main(["--resume", str(second), "--steps", "3", *flags({"rollouts.workers": 2})]) == 0
    assert dying.over()
    assert_equal_runs(first, second)
    present = run([*GRPO, *dying.flags], tmp_path / "present")
    assert metrics_of(present)[2] != metrics_of(first)[2]  # older weights make other samples


def test_a_double_buffer_of_super_batches_with_stored_samples_is_a_function_of_its_settings(ray, tmp_path):
    """Two steps to a super-batch, the next one under way, and half of the groups stored; the other run is resumed."""
    how = {"super-batch": 2, "ahead": 2, "buffer.share": 0.5, "buffer.capacity": 2}
    words = [*GRPO, *flags({f"rollouts.{name}": value for name, value in how.items()})]
    first = run(words, tmp_path / "first", **{"rollouts.workers": 1, "steps": 5})
    lag = [row.get("train/lag") for row in metrics_of(first)]
    assert lag[0] is None and lag[1] == 1.0 and lag[4] > 2  # made by the weights of step 2, some groups stored
    second = run(words, tmp_path / "second", **{"rollouts.workers": 1, "steps": 3})
    assert main(["--resume", str(second), "--steps", "5", *flags({"rollouts.workers": 2})]) == 0
    assert_equal_runs(first, second, 5)


def test_evaluation_workers_change_no_number(ray, tmp_path, dying, capsys):
    """One, which dies at work, against validations in the training process. Training loads no scorer."""
    validated = {"validate-every": 2, "validation.num-samples": 4, "validation.batch": 2, "validation.num-videos": 1}
    small = flags(validated | {"student.ema-decay": 0.5, "student.learning-rate": 1e-3, "device": "cpu", "steps": 2})
    words = [*SMALL["finetune"], *small, *dying.flags]
    alone = run(words, tmp_path / "alone")
    dying(1)
    there = run(words, tmp_path / "workers", **{"rollouts.evaluation-workers": 1})
    assert dying.over() and "evaluation worker 0" in capsys.readouterr().out
    rows = [{row["step"]: row for row in metrics_of(one) if "validation/reward/mean" in row} for one in (alone, there)]
    assert [row.pop("validation/worker_deaths") for row in rows[1].values()] == [1.0, 1.0]
    assert rows[0] == rows[1] and list(rows[1]) == [0, 2]
    assert rows[0][0]["validation/reward/mean"] != rows[0][2]["validation/reward/mean"]
    assert_same(checkpoint_of(alone, 2), checkpoint_of(there, 2))
    for name in ("samples.jsonl", "contact_sheet.png"):
        files = [one / "validation" / "step_2" / name for one in (alone, there)]
        assert files[0].read_bytes() == files[1].read_bytes()


# The program in processes of its own.


def test_adapters_go_straight_from_memory_to_memory(ray, warm, tmp_path, dying):
    """To two workers ahead of training, of which one dies, in a run that began with weights in Ray's object store.

    NIXL polls in every process: in this one it would take a core from all later tests. When a worker dies, NIXL or Ray
    sometimes ends the training process by a fault of its own; then the run continues from its checkpoint.
    """
    words = [*LORA, *dying.flags, *flags({"rollouts.ahead": 1})]
    alone = run(words, tmp_path / "alone", **{"rollouts.workers": 1})
    there = run(words, tmp_path / "nixl", **{"rollouts.workers": 1, "steps": 1})
    dying(1)
    direct = {"steps": 3, "rollouts.workers": 2, "rollouts.transport": "nixl"}
    for _ in range(3):
        with started(warm, ["--resume", str(there)], **direct) as one:
            _, said = one.communicate(timeout=300)
        if one.returncode != -signal.SIGSEGV and ENDED_BY_RAY not in said:
            break
    assert one.returncode == 0, said
    assert dying.over()
    assert_equal_runs(alone, there)


WAITING = f"""
{ENDING_THE_SCHEDULER}
def score(video, prompts):
    end_scheduler()
    name = "held" if "held out" in prompts else "calls"
    for there, mode in (("begun", "wb"), (name, "rb")):
        with (Path(__file__).parent / there).open(mode, buffering=0) as pipe:
            pipe.read(1) if mode == "rb" else pipe.write(name[:1].encode())
    return video.flatten(1).mean(1)
"""


@pytest.fixture
def waiting(tmp_path):
    """A scorer whose calls, and those of validations of the prompt "held out", begin with a byte from a pipe each."""
    (tmp_path / "waiting.py").write_text(WAITING)
    (tmp_path / "held.txt").write_text("held out\n")
    pipes = {}
    for name in ("begun", "calls", "held"):
        os.mkfifo(tmp_path / name)
        pipes[name] = os.open(tmp_path / name, os.O_RDWR)

    def begun(calls: int) -> bytes:
        """Wait for so many calls, and return which they are: c of training, h of validations."""
        return b"".join(os.read(pipes["begun"], 1) for _ in range(calls))

    def go(name: str, calls: int = 1000) -> None:
        os.write(pipes[name], b"x" * calls)

    yield SimpleNamespace(begun=begun, go=go, flags=["--reward.scorers.mean.kind", f"{tmp_path / 'waiting.py'}:score"])
    for pipe in pipes.values():
        os.close(pipe)


def test_ray_starts_the_ranks_and_a_rank_may_die(warm, tmp_path, waiting):
    """Two ranks, an evaluation worker, and a rollout worker that reads weights from the first rank.

    One rank is killed in the second step, while the validation of step 0 is under way, and then the scheduler. Against
    two ranks without Ray.
    """
    validated = {"validate-every": 3, "validation.num-samples": 2, "validation.batch": 1, "validation.num-videos": 0}
    words = [*GRPO, *waiting.flags, "--algorithm.update-batch", "1", "--checkpoint-every", "1"]
    words += flags(validated | {"validation.prompts": tmp_path / "held.txt"})
    reference, there = tmp_path / "reference", tmp_path / "ray"
    settings = {"launcher": "ray", "ray.ranks": 2, "rollouts.workers": 1, "rollouts.evaluation-workers": 1}
    with started(warm, [*words, "--output", str(there)], **settings, **{"rollouts.transport": "nixl"}) as one:
        waiting.go("calls", 2)  # two work items of two samples are a step
        assert sorted(waiting.begun(4)) == sorted(b"cchc")  # the fourth call is in step 2, after its checkpoint
        assert (there / "checkpoints" / "step_1").is_dir()
        next(p for p in warm.processes() if "TrainingProcess" in title(p)).kill()
        (tmp_path / "scheduler").touch()
        waiting.go("calls")
        waiting.go("held")
        said, errors = one.communicate(timeout=300)
    assert one.returncode == 0, said + errors
    assert "a training process died; all start again from the newest checkpoint" in errors
    assert not (tmp_path / "scheduler").exists()
    done = program("-m", "unified_trainer", *words, "--output", reference, ranks=2)
    assert done.returncode == 0, done.stderr
    assert_equal_runs(reference, there)


def test_a_request_to_stop_leaves_a_checkpoint_and_no_process(warm, tmp_path):
    words, before = [*GRPO, "--steps", "500", "--output", str(tmp_path / "run")], warm.processes()
    with started(warm, words, **{"rollouts.workers": 1, "rollouts.ahead": 1}) as one:
        read_until(one, "step 1/")
        own = warm.processes() - before
        assert any("ray::Worker" in title(p) for p in own)
        one.send_signal(signal.SIGINT)
        said, errors = one.communicate(timeout=120)
    assert one.returncode == 0 and "continue with" in said, said + errors
    assert not psutil.wait_procs(own, timeout=30)[1]
    saved = len(metrics_of(tmp_path / "run"))
    assert (tmp_path / "run" / "checkpoints" / f"step_{saved}").is_dir()


# A scorer whose second call ends when its process has got a signal.
PATIENT = """
import os, signal
calls = []
def score(videos, prompts):
    calls.append(1)
    if len(calls) == 2:
        came, wake = os.pipe()
        os.set_blocking(wake, False)
        signal.set_wakeup_fd(wake)
        open({begun!r}, "w").close()
        os.read(came, 1)
    return videos[:, 0].flatten(1).mean(1)
"""


def test_a_rank_on_ray_ends_the_step_of_a_slow_scorer(warm, tmp_path):
    """SIGTERM to the program reaches the training process while it scores step 2, which is then saved."""
    begun, there = tmp_path / "begun", tmp_path / "run"
    os.mkfifo(begun)
    (tmp_path / "red.py").write_text(PATIENT.format(begun=str(begun)))
    scored = ["--reward.kind", f"{tmp_path / 'red.py'}:score", "--reward.path", "", "--validate-every", "0"]
    words = [*SMALL["dance_grpo"], "--device", "cpu", "--steps", "9", "--output", str(there), *scored]
    with started(warm, words, launcher="ray") as one:
        begun.read_bytes()  # until the scorer opens it
        one.send_signal(signal.SIGTERM)
        errors = one.communicate(timeout=120)[1]
    assert one.returncode == 0, errors
    assert len(metrics_of(there)) == 2 and checkpoint_of(there, 2)


def test_a_killed_program_leaves_no_worker(warm, tmp_path):
    """Workers and Ray's servers end; two small agents of Ray take a minute longer."""
    words, before = [*GRPO, "--steps", "500", "--output", str(tmp_path / "run")], warm.processes()
    with started(warm, words, **{"rollouts.workers": 1}) as one:
        read_until(one, "step 1/")
        own = [p for p in warm.processes() - before if "Agent" not in title(p)]
        assert any("ray::Worker" in title(p) for p in own)
        os.kill(one.pid, signal.SIGKILL)
        assert not psutil.wait_procs(own, timeout=60)[1]


@contextmanager
def started(warm: Warm, words: list[str], **settings: object):
    """The program in a process of its own, which ends with the test."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = [str(warm.python), "-m", "unified_trainer", *words, *flags(settings)]
    one = subprocess.Popen(command, cwd=REPO, env=environment(), **pipes)
    try:
        yield one
    finally:
        one.kill()
        one.communicate()


def title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:  # it has ended
        return ""


# Several nodes.


@pytest.mark.kill
@pytest.mark.parametrize(
    ("more", "cores", "deaths"),
    [({}, 1, 1), ({"rollouts.ranks": 2, "rollouts.reward-workers": 2}, 3, 2)],
    ids=["worker", "replica"],
)
def test_a_node_may_be_lost(warm, tmp_path, waiting, more, cores, deaths):
    """Two nodes on this machine, each with room for what samples and scores; the second one goes in the middle.

    Then another one joins, on which it starts again: two calls are under way at once.
    """
    from ray.cluster_utils import Cluster

    words, there, before = [*GRPO, "--steps", "6", *waiting.flags], tmp_path / "there", warm.processes()
    with nodes(Cluster, cores) as (cluster, second):
        settings = {"ray.address": cluster.address, "rollouts.workers": 2} | more
        with started(warm, [*words, "--output", str(there)], **settings) as one:
            waiting.go("calls", 4)  # two steps
            waiting.begun(6)  # both workers are at work on the third
            own = [p.pid for p in warm.processes() - before if "ray::Worker" in title(p)]
            cluster.remove_node(second, allow_graceful=False)
            assert len(own) == 2 and one_ends(own, 60)  # it takes no byte any more
            assert one.poll() is None and len(metrics_of(there)) == 2
            waiting.go("calls", 1)  # of the worker that is left, which then makes the lost samples
            waiting.begun(1)
            cluster.add_node(num_cpus=cores)
            waiting.go("calls", 1)
            waiting.begun(2)  # of the next step, by two workers
            waiting.go("calls")
            said, errors = one.communicate(timeout=240)
    assert one.returncode == 0, said + errors
    assert metrics_of(there)[-1]["train/worker_deaths"] == deaths
    alone = run(words, tmp_path / "alone")
    if not more:
        assert_equal_runs(alone, there, step=6)
    for expected, row in zip(metrics_of(alone), metrics_of(there), strict=True):
        assert {key: row[key] for key in expected} == pytest.approx(expected, rel=1e-4, abs=1e-6)


@pytest.mark.kill
def test_a_run_goes_on_without_the_node_of_a_lost_rank(warm, tmp_path, waiting):
    """Two ranks on a node each; the second node goes in step 2. One rank goes on from step 1, within rounding."""
    from ray.cluster_utils import Cluster

    words, there = [*GRPO, *waiting.flags, "--algorithm.update-batch", "1"], tmp_path / "there"
    with nodes(Cluster) as (cluster, second):
        settings = {"launcher": "ray", "ray.ranks": 2, "ray.least-ranks": 1, "ray.address": cluster.address}
        settings |= {"checkpoint-every": 1, "validate-every": 0}
        with started(warm, [*words, "--output", str(there)], **settings) as one:
            waiting.go("calls", 2)  # step 1
            waiting.begun(4)  # both ranks are in step 2
            assert (there / "checkpoints" / "step_1").is_dir()
            own = [p.pid for p in warm.processes() if "TrainingProcess" in title(p)]
            cluster.remove_node(second, allow_graceful=False)
            assert len(own) == 2 and one_ends(own, 60)
            waiting.go("calls")
            said, errors = one.communicate(timeout=240)
    assert one.returncode == 0, said + errors
    assert "the cluster has room for 1 of 2 training processes: the run goes on with them" in errors
    alone = run([*words, "--validate-every", "0"], tmp_path / "alone")
    for expected, row in zip(metrics_of(alone), metrics_of(there), strict=True):
        assert row == pytest.approx(expected, rel=1e-3, abs=1e-6)


@contextmanager
def nodes(kind, cores: int = 1):
    """A cluster of two nodes with so many cores each, and its second node."""
    before = dict(os.environ)
    often = {"RAY_health_check_period_ms": "300"}  # a lost node is noticed after five checks, by default 3 s apart
    os.environ.update(environment(RAY_AUTH_MODE="disabled", RAY_USAGE_STATS_ENABLED="0", **often))
    cluster = kind(initialize_head=True, head_node_args={"num_cpus": cores, "include_dashboard": False})
    try:
        yield cluster, cluster.add_node(num_cpus=cores)
    finally:
        cluster.shutdown()
        os.environ.clear()
        os.environ.update(before)
