"""Rollout workers of several devices: two ranks over gloo against one process, and what happens when a rank dies."""

import os
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
from helpers import ALONE, CAPTIONS, SMALL, flags, metrics_of
from ray.exceptions import RayActorError
from test_runs import title

from unified_trainer.__main__ import main
from unified_trainer.basics.errors import UserError
from unified_trainer.basics.requests import Request
from unified_trainer.methods.rl.rollouts import Sampling
from unified_trainer.parallel.fsdp import is_sharded
from unified_trainer.run.build_worker import build_sampling
from unified_trainer.run.settings.command_line import parse
from unified_trainer.run.workers import replica as module
from unified_trainer.run.workers.replica import Replica, ReplicaSender
from unified_trainer.run.workers.scheduler import WorkItem
from unified_trainer.run.workers.weights import WeightSender
from unified_trainer.run.workers.workers import Worker

pytestmark = pytest.mark.ranks

REPLICA = {"rollouts.workers": 1, "rollouts.reward-workers": 1, "rollouts.ranks": 2}
GRPO = [*SMALL["dance_grpo"], *flags({"device": "cpu", "algorithm.rollout-batch": 2})]
SIZE = {"video.frames": 9, "video.height": 48, "video.width": 48}  # 27 tokens: ranks have 14 and 13
# The ranks hold a frozen base in bf16 and an adapter, and make chunks with guidance.
ADAPTER = {"student.precision": "bf16", "student.adapter.rank": 2, "sampler.guidance-scale": 3}
ADAPTER |= {"sampler.chunks.chunk-frames": 1, "algorithm.clip-low": 0.01, "algorithm.clip-high": 0.01}
RUN = parse([*GRPO, *flags(REPLICA | SIZE | ADAPTER)])
ITEM = WorkItem(3, 1, Request.of(CAPTIONS[:2]), (0, 1), (4, 5))


def faulty(run, mesh, *how) -> Sampling:
    """What ranks hold, of which the second follows the file `fault` of the working directory once, while it samples."""
    sampling = build_sampling(run, mesh, *how)
    assert mesh.config.sequence == 2 and all(is_sharded(weight) for weight in sampling.weights.values())

    def sample(*arguments):
        if mesh.rank == 1 and (file := Path("fault")).exists():
            fault = file.read_text()
            file.unlink()
            if fault == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ArithmeticError("no samples")
        return sampling.sample(*arguments)

    return replace(sampling, sample=sample)


def alone_and_sent(*how, transport="object_store"):
    """What one process makes with weights that training sends, and these weights as they are sent to a replica."""
    folder, alone = Path.cwd(), Worker(*how)
    os.chdir(folder)
    trained = {name: 1.1 * weight.detach() + 0.01 for name, weight in alone._sampling.weights.items()}
    _, expected = alone.make(ITEM, WeightSender(ALONE).pack(1, trained, 1))
    return expected, ReplicaSender(ALONE, transport).send(1, trained, 1)


def assert_close(made, expected) -> None:
    assert np.abs(expected["x0"]).max() > 0.1
    for field, own in expected.items():
        assert made[field] == pytest.approx(own, rel=1e-5, abs=1e-5)


@pytest.fixture
def ranks(warm):
    """The ranks of replicas that run."""
    return lambda: [process for process in warm.processes() if "ray::ReplicaRank" in title(process)]


@pytest.fixture
def replica(ray, ranks, tmp_path):
    how = (faulty, RUN, str(tmp_path), torch.get_num_threads(), True, False)
    actor = ray.remote(Replica).options(num_cpus=2, max_restarts=-1).remote(*how)
    ray.get(actor.ready.remote())
    own = ranks()
    yield actor
    own += ranks()
    ray.kill(actor)
    assert not psutil.wait_procs(own, timeout=30)[1]


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
def test_a_replica_makes_the_samples_of_one_device_and_starts_again_without_a_rank(ray, ranks, replica, tmp_path):
    """With weights that training sends; a rank dies while it samples, and then one raises."""
    expected, sent = alone_and_sent(build_sampling, RUN, str(tmp_path), torch.get_num_threads(), True, False)
    (name, _), made = ray.get(replica.make.remote(ITEM, sent))
    assert_close(made, expected)
    before = ranks()
    (tmp_path / "fault").write_text("die")
    with pytest.raises(RayActorError):
        ray.get(replica.make.remote(ITEM, sent))
    assert not psutil.wait_procs(before, timeout=30)[1]  # the other rank ends too
    (again, _), repeated = ray.get(replica.make.options(max_task_retries=-1).remote(ITEM, sent))
    assert again != name  # so that training checks its samples
    assert all(np.array_equal(made[field], repeated[field]) for field in made)
    (tmp_path / "fault").write_text("raise")
    with pytest.raises(ArithmeticError, match="no samples"):
        ray.get(replica.make.remote(ITEM, sent))


class Failing:
    """A rank that cannot start."""

    def __init__(self) -> None:
        raise UserError("the model does not fit")

    def make(self) -> None: ...


def lost() -> None:
    raise RuntimeError("Connection closed by peer")


def broken() -> None:
    raise ArithmeticError("no samples")


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda ray: ray.remote(num_cpus=0)(lost), SystemExit, "1"),
        (lambda ray: ray.remote(num_cpus=0)(broken), ArithmeticError, "no samples"),
        (lambda ray: ray.remote(num_cpus=0)(Failing).remote().make, RayActorError, "the model does not fit"),
    ],
    ids=["lost", "broken", "failing"],
)
def test_a_leader_ends_if_a_rank_is_lost_and_raises_what_no_restart_mends(ray, monkeypatch, call, error, words):
    """A collective may fail because a rank has died before Ray says that it has."""

    def end(code):
        raise SystemExit(code)

    monkeypatch.setattr(module.os, "_exit", end)
    leader = object.__new__(Replica)
    leader._ranks = [SimpleNamespace(make=call(ray))]
    with pytest.raises(error, match=words):
        leader._first_of("make")


def test_ranks_have_the_devices_of_their_leader(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    first, second = module.environments(2, "10.0.0.1", 29500)
    assert first["CUDA_VISIBLE_DEVICES"] == second["CUDA_VISIBLE_DEVICES"] == "2,5"
    assert (first["LOCAL_RANK"], second["LOCAL_RANK"]) == ("0", "1")


@pytest.mark.parametrize(
    ("changes", "sequence"),
    [
        ({}, 1),  # a branch of guidance on each of two ranks
        ({"rollouts.ranks": 4}, 2),
        ({"rollouts.ranks": 3}, 3),
        ({"sampler.guidance-scale": 1}, 2),
        ({"sampler.chunks.chunk-frames": 1}, 2),
    ],
)
def test_each_half_of_the_ranks_has_a_branch_of_guidance(changes, sequence):
    run = parse([*GRPO, *flags(REPLICA | {"sampler.guidance-scale": 3} | changes)])
    assert run.sequence_of_workers == sequence


KILLING = """
from pathlib import Path

import psutil
from test_runs import title

def score(video, prompts):
    for death in Path(__file__).parent.glob("death"):
        death.unlink()
        own = psutil.Process().parents()[1].children(recursive=True)  # all that the tests have started
        ranks = [process for process in own if "ray::ReplicaRank" in title(process)]
        assert len(ranks) == 2
        ranks[0].kill()
    return video.flatten(1).mean(1)
"""


def test_a_run_with_a_replica_is_that_of_one_process_within_rounding(ray, ranks, tmp_path, capsys):
    """One of its two ranks is killed; training replays samples from before and after, and their log-ratios pass.

    Each rank has a branch of guidance, where those of the replica above share the tokens of a sample.
    """
    (tmp_path / "scorer.py").write_text(KILLING)
    own = {"steps": 2, "sampler.guidance-scale": 3, "reward.scorers.mean.kind": f"{tmp_path / 'scorer.py'}:score"}
    words = [*GRPO, *flags(own)]
    assert main([*words, "--output", str(tmp_path / "alone")]) == 0
    (tmp_path / "death").touch()
    assert main([*words, "--output", str(tmp_path / "there"), *flags(REPLICA)]) == 0
    assert not (tmp_path / "death").exists()
    said = capsys.readouterr().out
    assert said.count("largest log-ratio of the rollout worker on node ") == 1
    rows = metrics_of(tmp_path / "there")
    assert rows[-1]["train/worker_deaths"] == 1
    for expected, row in zip(metrics_of(tmp_path / "alone"), rows, strict=True):
        assert {key: row[key] for key in expected} == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert not psutil.wait_procs(ranks(), timeout=30)[1]
