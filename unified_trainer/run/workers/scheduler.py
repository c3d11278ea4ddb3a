"""The actor that hands out work: it imports no model and never holds a tensor.

It leads every work item through the rollout workers and the reward workers, every batch of a validation to an
evaluation worker, and gives the work of a dead worker to another one. Its state is that of its open calls: Ray repeats
them from the process that made them when the scheduler itself has died and was started again.
"""

import asyncio
import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ray import ObjectRef, get_actor, kill
from ray.exceptions import ObjectLostError, RayActorError

from unified_trainer.basics.requests import Request

DEATHS = 5  # workers that may die of one work item before the run ends
KNOWN = 20  # calls after which it is known how long one takes
LAST = 2**62  # after the work of all steps

Costs = dict[str, float]  # seconds and counts of a piece of work, summed over work items
Call = Callable[[Any], list[ObjectRef]]  # asks a worker
Answer = tuple[Any, list[ObjectRef]]  # what a worker says, and references to its results
Made = tuple[list[ObjectRef], Costs, str]  # references to samples and scores, what they took, and who sampled


class WorkersLostError(RuntimeError):
    """No worker is left, or one work item ended several of them."""


@dataclass(frozen=True)
class WorkItem:
    """Samples that are made together: what one worker is given, and what is made again when it dies."""

    step: int
    version: int  # training steps that the weights have behind them
    requests: tuple[Request, ...]
    prompt_ids: tuple[int, ...]
    sample_ids: tuple[int, ...]

    @property
    def prompts(self) -> tuple[str, ...]:
        """The texts of the samples."""
        return tuple(request.prompt for request in self.requests)

    def __str__(self) -> str:
        return f"step {self.step + 1}, samples {self.sample_ids[0]} to {self.sample_ids[-1]}"


@dataclass(frozen=True)
class ValidationBatch:
    """Samples of a validation that an evaluation worker makes and measures together."""

    step: int
    version: int  # of the weights, which are not counted as those of work items
    start: int
    stop: int
    videos: int  # samples of a number below it are kept as video

    def __str__(self) -> str:
        return f"the validation of step {self.step}, samples {self.start} to {self.stop - 1}"


Work = WorkItem | ValidationBatch


class Pool:
    """Workers of one kind, of which any can do any work; work of earlier steps goes first."""

    def __init__(self, kind: str, workers: list[Any], timeout: float) -> None:
        """A worker that takes longer than `timeout` seconds for a work item is restarted."""
        self._kind, self._timeout = kind, timeout
        self._idle, self._alive, self._order = list(workers), len(workers), 0
        self._restarting = 0
        self._waiting: list[tuple[int, int, asyncio.Future[Any]]] = []
        self._tasks: set[asyncio.Task[Any]] = set()  # that nobody waits for
        self._took: deque[float] = deque(maxlen=1000)  # seconds of the last calls
        self.deaths = 0

    async def run(self, item: Work, call: Call) -> Answer:
        """Return what a worker says of `call`, and references to its results; raise what the worker raises.

        `call` asks a worker and returns references: first to what it says, then to the results. WorkersLostError if no
        worker is left or DEATHS of them died of this item.
        """
        for _ in range(DEATHS):
            worker = await self._free(item.step)
            if (answer := await self._first(asyncio.create_task(self._ask(worker, call)), call)) is not None:
                return answer
        raise WorkersLostError(
            f"{DEATHS} {self._kind} workers died, or took more than {self._timeout:g} s, at {item}: the device may "
            "lack memory (lower algorithm.rollout_batch, or validation.batch), or be slow (raise "
            "rollouts.timeout_minutes)"
        )

    async def _first(self, asked: asyncio.Task[Answer | None], call: Call) -> Answer | None:
        """Return what a worker answers, or another one that is free and asked too if the first takes very long.

        Both would give the same samples. None if each that was asked died.
        """
        asking = {asked}
        if not (await asyncio.wait(asking, timeout=self._patience()))[0]:
            spare = asyncio.create_task(self._free(LAST))
            if spare in (await asyncio.wait({asked, spare}, return_when=asyncio.FIRST_COMPLETED))[0]:
                asking.add(asyncio.create_task(self._ask(await spare, call)))
            else:
                spare.cancel()
        self._tasks |= asking
        for task in asking:
            task.add_done_callback(self._tasks.discard)
        while asking:
            done, asking = await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                if (answer := task.result()) is not None:
                    return answer
        return None

    async def _ask(self, worker: Any, call: Call) -> Answer | None:
        """Return what a worker says and its results, or None if it died; then it joins the others again or starts."""
        begun = asyncio.get_running_loop().time()
        told, *results = call(worker)
        try:
            said = await asyncio.wait_for(_answer(told), self._timeout)
        except TimeoutError:
            kill(worker, no_restart=False)
            self._restart(worker)
            return None
        except RayActorError:
            self._restart(worker)
            return None
        except Exception:
            self._release(worker)
            raise
        self._took.append(asyncio.get_running_loop().time() - begun)
        self._release(worker)
        return said, results

    def _patience(self) -> float | None:
        """Return the seconds after which a free worker is asked too: twice the 99th percentile so far, if known."""
        if len(self._took) < KNOWN:
            return None
        return 2 * sorted(self._took)[len(self._took) * 99 // 100]

    async def _free(self, step: int) -> Any:
        if not self._alive:
            raise WorkersLostError(f"no {self._kind} worker could be started again")
        if self._idle:
            return self._idle.pop(0)
        turn: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._order += 1
        heapq.heappush(self._waiting, (step, self._order, turn))
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # a worker came at the same time
                self._release(turn.result())
            raise

    def _release(self, worker: Any) -> None:
        while self._waiting:
            turn = heapq.heappop(self._waiting)[2]
            if not turn.done():
                turn.set_result(worker)
                return
        self._idle.append(worker)

    def _restart(self, worker: Any) -> None:
        """Let the worker join the others again when Ray has restarted it."""
        self.deaths += 1
        task = asyncio.create_task(self._rejoin(worker))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _rejoin(self, worker: Any) -> None:
        started = asyncio.ensure_future(_answer(worker.ready.options(max_task_retries=-1).remote()))
        self._restarting += 1
        while not (await asyncio.wait([started], timeout=self._timeout))[0]:
            if self._restarting == self._alive:
                self._fail(f"no {self._kind} worker started again within {self._timeout:g} s: the cluster has no room")
        self._restarting -= 1
        if (error := started.exception()) is None:
            self._release(worker)
            return
        self._alive -= 1  # its start failed: it does not come back
        if not self._alive:
            self._fail(f"no {self._kind} worker could be started again: {error}")

    def _fail(self, why: str) -> None:
        while self._waiting:
            turn = heapq.heappop(self._waiting)[2]
            if not turn.done():
                turn.set_exception(WorkersLostError(why))


async def _answer(reference: ObjectRef) -> Any:
    return await reference


class Published:
    """Weights in use, by version: each training rank sends a part of them."""

    def __init__(self, ranks: int) -> None:
        self._ranks, self._oldest = ranks, 0
        self._parts: dict[int, dict[int, ObjectRef]] = {}  # by version and rank
        self._changed = asyncio.Condition()

    async def add(self, version: int, rank: int, part: ObjectRef, oldest: int) -> None:
        """Take a rank's part of a version, forget those before `oldest`, and return when this version is forgotten."""
        self._parts.setdefault(version, {})[rank] = part
        await self.forget(oldest)
        async with self._changed:
            await self._changed.wait_for(lambda: version < self._oldest)

    async def forget(self, oldest: int) -> None:
        """Forget the versions before `oldest`."""
        async with self._changed:
            self._oldest = max(self._oldest, oldest)
            self._parts = {version: parts for version, parts in self._parts.items() if version >= self._oldest}
            self._changed.notify_all()

    async def whole(self, version: int) -> list[ObjectRef]:
        """Return the parts of a version once all ranks have sent theirs."""
        async with self._changed:
            await self._changed.wait_for(lambda: len(self._parts.get(version, {})) == self._ranks)
            return [part for _, part in sorted(self._parts[version].items())]


class Scheduler:
    """Knows the weights of the versions in use and makes every work item once, whoever asks for it."""

    def __init__(
        self, rollout: list[str], reward: list[str], evaluation: list[str], timeout: float, ranks: int
    ) -> None:
        """Take the names of the workers of each kind; without reward workers the rollout workers score.

        `ranks` training processes each send a part of the weights.
        """
        self._makers = Pool("rollout", list(map(get_actor, rollout)), timeout)
        self._scorers = Pool("reward", list(map(get_actor, reward)), timeout) if reward else self._makers
        self._evaluators = Pool("evaluation", list(map(get_actor, evaluation)), timeout)
        self._made: dict[WorkItem, asyncio.Task[Made]] = {}
        self._weights, self._validated = Published(ranks), Published(ranks)

    async def ready(self) -> None:
        """Answer once the scheduler has started."""

    async def publish(self, version: int, rank: int, part: list[ObjectRef], step: int, oldest: int) -> None:
        """Take a rank's part of a version; forget those older than `oldest` and the samples of steps before `step`.

        The call answers when the version is forgotten: an open call is repeated after a restart, with its weights.
        """
        self._made = {item: task for item, task in self._made.items() if item.step >= step}
        await self._weights.add(version, rank, part[0], oldest)

    async def publish_validation(self, version: int, rank: int, part: list[ObjectRef]) -> None:
        """Take a rank's part of the weights that evaluation workers get; it answers as `publish` does."""
        await self._validated.add(version, rank, part[0], version)

    async def forget_validation(self, version: int) -> None:
        """Forget the weights of a validation whose results are there."""
        await self._validated.forget(version + 1)

    async def make(self, item: WorkItem) -> Made:
        """Return references to the samples and the scores of a work item, what parts of it took, and who sampled."""
        if item not in self._made:
            self._made[item] = asyncio.create_task(self._make(item))
        return await self._made[item]

    async def make_again(self, item: WorkItem) -> Made:
        """Make a work item whose results were lost with the machine that held them."""
        self._made.pop(item, None)
        return await self.make(item)

    async def deaths(self) -> int:
        """Return how many workers have died so far."""
        return sum(pool.deaths for pool in {self._makers, self._scorers, self._evaluators})

    async def validate(self, item: ValidationBatch) -> tuple[ObjectRef, Costs]:
        """Return a reference to what was measured of a batch, and the worker's seconds by phase."""
        weights = await self._validated.whole(item.version)
        took, (measured,) = await self._evaluators.run(item, _asking("measure", item, *weights))
        return measured, took

    async def end(self) -> None:
        """Answer the open calls of weights and work items, so that Ray repeats none; the run is over."""
        for task in self._made.values():
            task.cancel()
        for weights in (self._weights, self._validated):
            await weights.forget(LAST)

    async def _make(self, item: WorkItem) -> Made:
        weights = await self._weights.whole(item.version)
        while True:
            (maker, made), (rollout,) = await self._makers.run(item, _asking("make", item, *weights))
            try:
                scored, (scores,) = await self._scorers.run(item, _asking("score", item, rollout))
            except ObjectLostError:  # with the machine that made the samples
                continue
            return [rollout, scores], made | scored, maker


def _asking(method: str, item: Work, *given: ObjectRef) -> Call:
    """Return what asks a worker for a piece of work; one of its two answers is what it says."""
    return lambda worker: getattr(worker, method).options(num_returns=2).remote(item, *given)
