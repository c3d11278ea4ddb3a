"""Training processes on Ray: one actor for each device, started anew from the newest checkpoint when one dies."""

import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import ray
import torch
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy
from torch.distributed import DistError

from unified_trainer.basics.errors import UserError
from unified_trainer.parallel.device import RAY_RESOURCES
from unified_trainer.run.checkpoint import manifest
from unified_trainer.run.exit_codes import INTERRUPTED
from unified_trainer.run.settings.batch import starts_on
from unified_trainer.run.settings.command_line import parse
from unified_trainer.run.settings.config import RunConfig
from unified_trainer.run.stop_signal import heard
from unified_trainer.run.workers import cluster
from unified_trainer.run.workers.group import worker_needs
from unified_trainer.run.workers.workers import cause, place

# Settings and command line -> exit code, or None for a process that ended because another one did.
Train = Callable[[RunConfig, Sequence[str]], int | None]
Place = tuple[str, int, str]  # id of the node, process id, and both in words
LOOK = 1.0  # seconds between two looks at the processes
OF_MACHINE = ("CUDA error", "CUBLAS_STATUS", "NCCL error", "NPU error", "HCCL error", "ECC error")  # in its message
OF_CODE = ("device-side assert", "out of memory")
LAST_WORDS = 60.0  # seconds that other processes get after the first one ended with an error


class TrainingProcess:
    """One rank. `train` runs in the main thread of its process, where signals are handled."""

    def address(self) -> tuple[str, int]:
        """Return this machine's address and a free port, where the ranks can meet."""
        with socket.socket() as free:
            free.bind(("", 0))
            return ray.util.get_node_ip_address(), free.getsockname()[1]

    def where(self) -> Place:
        """Return where this process runs."""
        return ray.get_runtime_context().get_node_id(), os.getpid(), place()

    def train(
        self, train: Train, run: RunConfig, argv: Sequence[str], folder: str, environment: dict[str, str], threads: int
    ) -> int | None:
        """Train in the working directory of the run, with as many CPU threads, and return what `train` returns."""
        os.chdir(folder)
        os.environ.update(environment)
        torch.set_num_threads(threads)
        return train(run, argv)


def launch(train: Train, run: RunConfig, folder: Path, argv: Sequence[str]) -> int:
    """Run `ray.ranks` training processes and return the exit code of the run in `folder`.

    When one dies by a fault of its machine, all end and start again from the newest checkpoint.
    """
    try:
        kind = _device(run)
        own: cluster.Needs = {"CPU": run.ray.cpus, **cluster.devices(kind, 1)}
        others, least = worker_needs(run, kind), min(_numbers_of_ranks(run))
        cluster.wait_for_room(run.ray, [*[own] * least, *others])
        return _until_it_ends(partial(_attempt, train, own, others, argv), run, folder)
    finally:
        ray.shutdown()


def _until_it_ends(attempt: Callable[[RunConfig], int | None], run: RunConfig, folder: Path) -> int:
    """Return the exit code of the first attempt that gives one; None is a fault of the machine, after which all start.

    `ray.restarts` in a row may bring no new checkpoint: so many are left again after each that does.
    """
    left, reached = run.ray.restarts, _newest_step(folder)
    while (ended := attempt(run)) is None:
        if (step := _newest_step(folder)) > reached:
            left, reached = run.ray.restarts, step
        if not left:
            raise RuntimeError(
                f"training processes died {run.ray.restarts + 1} times without a new checkpoint; see what is said above"
            )
        _say(f"a training process died; all start again from the newest checkpoint, {left} restarts are left")
        left -= 1
        if run.resume is None and (folder / "config.yaml").is_file():  # with what its files and its ranks decided
            run = replace(parse(["--resume", str(folder)]), ray=run.ray)
        run = replace(run, allow=())
    return ended


def _attempt(
    train: Train, needs: cluster.Needs, others: Sequence[cluster.Needs], argv: Sequence[str], run: RunConfig
) -> int | None:
    """Start the training processes, and return the exit code of the run, or None for a fault of the machine."""
    try:
        with _processes(run, needs, others) as processes:
            return _run(processes, train, run, argv)
    except RayError as error:  # also of a process that died while it started
        _raise_unless_of_machine(error)
        return None


def _newest_step(folder: Path) -> int:
    """Return the training steps of the newest checkpoint in a run directory, 0 without one."""
    return max(map(manifest.step_of, manifest.folders(folder / "checkpoints")), default=0)


def of_machine(error: Exception) -> bool:
    """Return whether an error is a fault of a machine, which a new start may not meet: not of the code or settings.

    All that Ray itself raises is one, such as a process that its memory monitor or a lost node ended; and an error of
    CUDA, NCCL and their like, but for memory that does not suffice and for an assertion of a kernel.
    """
    raised = cause(error)
    if isinstance(raised, torch.OutOfMemoryError) or any(words in str(raised) for words in OF_CODE):
        return False
    return isinstance(raised, (RayError, DistError)) or any(words in str(raised) for words in OF_MACHINE)


def _raise_unless_of_machine(error: Exception) -> None:
    """Say the first line of a fault of a machine; raise any other error as it was raised in its process."""
    if not of_machine(error):
        raise cause(error) from error
    _say(f"{type(cause(error)).__name__}: {str(cause(error)).strip().splitlines()[0]}")


@contextmanager
def _processes(run: RunConfig, needs: cluster.Needs, others: Sequence[cluster.Needs] = ()) -> Iterator[list[Any]]:
    """Start the training processes, all or none, and leave room for `others`; end them with the context."""
    actors = []
    with _seats(run, needs, others) as group:
        try:
            for number in range(group.bundle_count):
                seat = PlacementGroupSchedulingStrategy(group, number)
                environment = {"env_vars": cluster.forwarded()}
                options = {**cluster.options(needs), "scheduling_strategy": seat, "runtime_env": environment}
                actors.append(ray.remote(TrainingProcess).options(**options).remote())
            yield actors
        finally:
            for actor in actors:
                ray.kill(actor)


@contextmanager
def _seats(run: RunConfig, needs: cluster.Needs, others: Sequence[cluster.Needs]) -> Iterator[PlacementGroup]:
    """Wait for a placement group of `ray.ranks` processes, or of fewer where the cluster has no more room for a run."""
    left, size, group = 60 * run.ray.timeout_minutes, 0, None
    try:
        while group is None or not group.wait(LOOK):
            if left <= 0:
                raise UserError(
                    f"no room for {size} training processes with {dict(needs)} each within ray.timeout_minutes "
                    f"({run.ray.timeout_minutes:g}): the cluster has {ray.available_resources()} left"
                )
            ranks = next((n for n in _numbers_of_ranks(run) if cluster.has_room([*[needs] * n, *others])), size)
            if (ranks := ranks or run.ray.ranks) != size:  # a lost node is seen after its processes have died
                if group is not None:
                    remove_placement_group(group)
                group, size = placement_group([dict(needs)] * ranks, strategy="PACK"), ranks
            else:
                left -= LOOK
        if size != run.ray.ranks:
            _say(f"the cluster has room for {size} of {run.ray.ranks} training processes: the run goes on with them")
        yield group
    finally:
        if group is not None:
            remove_placement_group(group)


def _numbers_of_ranks(run: RunConfig) -> list[int]:
    """Return the numbers of training processes that may run, largest first: fewer than `ray.ranks` only to continue."""
    least = run.ray.least_ranks if run.resume else 0
    fewer = [ranks for ranks in range(run.ray.ranks - 1, least - 1, -1) if starts_on(run, ranks)] if least else []
    return [run.ray.ranks, *fewer]


def _run(processes: list[Any], train: Train, run: RunConfig, argv: Sequence[str]) -> int | None:
    """Return the exit code of the run, or None if a process died that neither a request nor a failed rank has ended."""
    processes, places = by_node(processes, ray.get([process.where.remote() for process in processes]))
    for number, (_, pid, words) in enumerate(places):
        _say(f"training process {number}: {words}, process {pid}")
    address, port = ray.get(processes[0].address.remote())
    shared = {"WORLD_SIZE": str(len(processes)), "MASTER_ADDR": address, "MASTER_PORT": str(port), "LOCAL_RANK": "0"}
    pending = [
        process.train.remote(
            train, run, list(argv), str(Path.cwd()), shared | {"RANK": str(rank)}, torch.get_num_threads()
        )
        for rank, process in enumerate(processes)
    ]
    codes: list[int] = []
    died, passed = False, 0.0
    with _stop_signals(places) as asked:
        while pending and not (died or passed > LAST_WORDS):
            done, pending = ray.wait(pending, timeout=LOOK)
            passed += LOOK if any(codes) and not done else 0.0
            for reference in done:
                try:
                    code = ray.get(reference)
                    codes += [] if code is None else [code]
                except RayError as error:
                    _raise_unless_of_machine(error)
                    died = True
    if any(codes):  # the failed rank told the others, and a process that did not end by itself was ended
        return max(codes)
    if not asked and (died or not codes):
        return None
    return INTERRUPTED if died else 0


def by_node(processes: Sequence[Any], places: Sequence[Place]) -> tuple[list[Any], list[Place]]:
    """Return processes and places in an order in which those of a node follow each other, as ranks of torchrun do.

    Shards of one copy of the weights are on ranks that follow each other.
    """
    nodes = [node for node, *_ in places]
    order = sorted(range(len(nodes)), key=lambda number: nodes.index(nodes[number]))
    return [processes[number] for number in order], [places[number] for number in order]


@contextmanager
def _stop_signals(places: Sequence[Place]) -> Iterator[list[int]]:
    """Pass Ctrl-C, SIGTERM and SIGHUP on to the training processes; yield the list of those that came.

    They get SIGTERM, which asks them to save and end, and SIGKILL for a second Ctrl-C.
    """
    asked: list[int] = []

    def note(number: int, _frame: object) -> None:
        asked.append(number)
        passed = signal.SIGKILL if asked.count(signal.SIGINT) > 1 else signal.SIGTERM
        for node, pid, _ in places:
            there = NodeAffinitySchedulingStrategy(node, soft=False)
            ray.remote(_signal).options(num_cpus=0, scheduling_strategy=there).remote(pid, passed)

    previous = {number: signal.signal(number, note) for number in heard()}
    try:
        yield asked
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _signal(pid: int, number: int) -> None:
    os.kill(pid, number)


def _device(run: RunConfig) -> str:
    """Return the kind of device of the run; auto is what the cluster has."""
    if run.device != "auto":
        return run.device
    there = ray.cluster_resources()
    return next((kind for kind, name in RAY_RESOURCES.items() if there.get(name)), "cpu")


def _say(words: str) -> None:
    sys.stderr.write(f"{words}\n")
