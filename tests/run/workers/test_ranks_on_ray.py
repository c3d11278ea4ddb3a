"""Training processes of Ray that differ, or of which one fails, end as those of torchrun do."""

import re
from dataclasses import replace

import pytest
import torch
import unlike_on_ray
from helpers import SMALL, flags
from ray.exceptions import ActorDiedError, NodeDiedError, OutOfMemoryError, RayTaskError, WorkerCrashedError

from unified_trainer.basics.errors import UserError
from unified_trainer.run.settings.command_line import parse
from unified_trainer.run.settings.config import save
from unified_trainer.run.workers import launch

pytestmark = pytest.mark.ranks


def code_of(tmp_path, train) -> int | None:
    """What the launcher makes of two ranks."""
    settings = {"launcher": "ray", "ray.ranks": 2, "algorithm.update-batch": 2, "algorithm.rollout-batch": 2}
    run = parse([*SMALL["dance_grpo"], *flags(settings | {"output": tmp_path / "run", "device": "cpu"})])
    with launch._processes(run, {"CPU": 1}) as processes:
        code = launch._run(processes, train, run, [str(tmp_path)])
    assert not (tmp_path / "run").exists()
    return code


def ended(tmp_path, train) -> tuple[int | None, list[str]]:
    """What the launcher makes of two ranks, and what each of them said."""
    return code_of(tmp_path, train), [(tmp_path / str(rank)).read_text() for rank in range(2)]


def test_ranks_on_ray_that_differ_do_not_start(ray, tmp_path):
    code, texts = ended(tmp_path, unlike_on_ray.other_version)
    assert code == 2
    for rank, text in enumerate(texts):
        assert re.match(rf"error on rank {rank}: ranks diverged: the version of unified-trainer is .* 0 on", text), text


def test_a_rank_on_ray_that_fails_early_ends_the_others_and_nothing_starts_again(ray, tmp_path):
    """The thread of the other rank ends its process, which is no death that a new start could fix."""
    code, (first, second) = ended(tmp_path, unlike_on_ray.no_families)
    assert code == 2  # None would start all again
    assert second == "error on rank 1: no such family\n"
    assert first == "error on rank 0: rank 1 failed: no such family\n"


def test_an_error_of_a_card_starts_again_and_a_bug_does_not(ray, tmp_path):
    assert code_of(tmp_path, unlike_on_ray.card_fails) is None  # all start again
    with pytest.raises(KeyError, match="gone"):
        code_of(tmp_path, unlike_on_ray.code_fails)


def seats(prompts, worker, resume, least, minutes=30) -> int:
    """The processes of 5 cores that a run of four gets on 16 cores, beside a worker, with 2 samples of each prompt."""
    batch = {"algorithm.num-prompts": prompts, "algorithm.prompts-per-update": prompts}
    settings = {"ray.ranks": 4, "ray.least-ranks": least, "ray.timeout-minutes": minutes}
    run = replace(parse([*SMALL["dance_grpo"], *flags(batch | settings)]), resume=resume)
    with launch._seats(run, {"CPU": 5}, [{"CPU": worker}]) as group:
        return group.bundle_count


def test_a_run_continues_on_as_many_ranks_as_have_room_and_divide_its_batch(ray, tmp_path, monkeypatch, capsys):
    """As after the loss of a node with the fourth rank."""
    monkeypatch.setattr(launch, "LOOK", 0.01)
    assert seats(prompts=6, worker=1, resume=tmp_path, least=1) == 3
    assert "room for 3 of 4 training processes: the run goes on with them" in capsys.readouterr().err
    assert seats(prompts=2, worker=1, resume=tmp_path, least=1) == 2  # three do not divide four samples
    assert seats(prompts=6, worker=6, resume=tmp_path, least=1) == 2
    for resume, least in ((None, 1), (tmp_path, 0), (tmp_path, 4)):  # it begins, or must not shrink
        with pytest.raises(UserError, match="no room for 4 training processes"):
            seats(prompts=6, worker=1, resume=resume, least=least, minutes=0.001)


@pytest.mark.parametrize(
    ("error", "machine"),
    [
        (OutOfMemoryError("Task was killed due to the node running low on memory"), True),  # Ray's memory monitor
        (ActorDiedError(), True),
        (WorkerCrashedError(), True),
        (NodeDiedError("preempted"), True),
        (torch.distributed.DistBackendError("NCCL error: unhandled system error"), True),
        (RuntimeError("CUDA error: uncorrectable ECC error encountered"), True),
        (RuntimeError("CUDA error: device-side assert triggered"), False),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), False),
        (RuntimeError("shape mismatch"), False),
        (KeyError("gone"), False),
    ],
)
def test_faults_of_the_machine_and_of_the_code(error, machine):
    assert launch.of_machine(error) is machine
    assert launch.of_machine(RayTaskError("train", "trace", error)) is machine


def attempts(folder, script, restarts):
    """The exit code of a run whose attempts reach these steps, and then give these codes; and what each was given."""
    given = []

    def attempt(run):
        step, code = script[len(given)]
        given.append((run.resume, run.output))
        if step:
            (folder / "checkpoints" / f"step_{step}").mkdir(parents=True)
            save(replace(run, algorithm=replace(run.algorithm, num_prompts=24)), folder / "config.yaml")
        assert run.resume is None or run.algorithm.num_prompts == 24  # what the first attempt decided
        return code

    words = ["--output", str(folder), "--ray.restarts", str(restarts)]
    run = parse([*SMALL["dance_grpo"], *words])
    return launch._until_it_ends(attempt, run, folder), given


def test_restarts_are_left_again_after_a_new_checkpoint(tmp_path):
    """Three deaths with one restart: each attempt but the last saves a step. The first that saves none ends the run."""
    run = tmp_path / "run"
    code, given = attempts(run, [(1, None), (2, None), (3, None), (0, 0)], restarts=1)
    assert code == 0 and given == [(None, run), (run, None), (run, None), (run, None)]
    with pytest.raises(RuntimeError, match="died 2 times without a new checkpoint"):
        attempts(tmp_path / "other", [(1, None), (0, None), (0, None)], restarts=1)
    assert attempts(tmp_path / "wrong", [(0, 2)], restarts=1)[0] == 2


def test_ranks_of_a_node_follow_each_other():
    """Ray may seat them in any order; two of a node that share the weights would else be on two."""
    places = [("b", 1, "b, 1"), ("a", 2, "a, 2"), ("b", 3, "b, 3"), ("a", 4, "a, 4"), ("a", 5, "a, 5")]
    processes, seats = launch.by_node([pid for _, pid, _ in places], places)
    assert processes == [pid for _, pid, _ in seats] == [1, 3, 2, 4, 5]
