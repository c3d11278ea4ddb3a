"""A discrete-event simulation of one run: training ranks, rollout workers and reward workers, step by step.

A training step is described by the seconds of its phases (`Load`), and the GPUs that share it by a `Placement`. At step
k the trainer publishes weights version k, asks with that version for every work item up to step k + ahead that nobody
was asked for yet, waits for the items of step k, and trains. Items of earlier steps are made and scored first. Equal
arguments give an equal result.
"""

import heapq
import math
import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from unified_trainer.basics.errors import UserError


@dataclass(frozen=True)
class Load:
    """The work of one training step, in seconds of one GPU."""

    samples: int  # over all ranks
    item: int  # samples of a work item, at most
    rollout: float  # per sample: all network calls
    reward: float  # per sample: decoding and scoring
    train: float  # per sample: forward and backward passes of all trained transitions
    fixed: float = 0.0  # per step, on every rank at once: prompts, optimizer and all that does not depend on samples
    publish: float = 0.0  # per step: gather the weights and put them where workers find them; none without workers
    fetch: float = 0.0  # of a worker's first item of each weights version: copy the weights


@dataclass(frozen=True)
class Placement:
    """How GPUs are divided; without rollout workers every rank makes and scores its own samples."""

    ranks: int
    workers: int = 0
    reward_workers: int = 0  # 0: a rollout worker scores its own items
    ahead: int = 0

    @property
    def pools(self) -> dict[str, int]:
        """The GPUs of each pool."""
        return {"training": self.ranks, "rollout": self.workers, "reward": self.reward_workers}

    def check(self, load: Load) -> None:
        """Raise UserError for numbers that the engine refuses."""
        if self.ranks < 1 or min(self.workers, self.reward_workers, self.ahead) < 0:
            raise UserError(f"{self}: at least 1 rank is needed, and no other number may be negative")
        if not self.workers and (self.ahead or self.reward_workers):
            raise UserError(f"{self}: samples ahead of training and reward workers need rollout workers")
        if load.samples < 1 or load.item < 1 or load.samples % self.ranks:
            raise UserError(f"{load.samples} samples in items of {load.item} do not divide over {self.ranks} ranks")


@dataclass(order=True)
class Item:
    """A work item: samples that are made together."""

    step: int
    number: int
    samples: int = field(compare=False)
    version: int = field(compare=False)  # training steps that its weights have behind them
    begin: float = field(compare=False, default=math.nan)  # when a worker took it


@dataclass(frozen=True)
class Timeline:
    """A simulated run."""

    ends: list[float]  # when each training step ended
    items: list[Item]  # in the order in which they were finished
    busy: dict[str, float]  # GPU-seconds of each pool: training, rollout, reward; waiting is not counted
    placement: Placement

    @property
    def step_seconds(self) -> float:
        """Mean time of a step; the first steps fill the pipeline and the last ones empty it, and are left out."""
        first, last = 2 * self.placement.ahead, len(self.ends) - 1 - self.placement.ahead
        return (self.ends[last] - self.ends[first]) / (last - first)

    @property
    def utilisation(self) -> dict[str, float]:
        """Share of its time in which each pool works: its mean work in a step over its GPUs and `step_seconds`."""
        work = {pool: seconds / len(self.ends) for pool, seconds in self.busy.items()}
        return {pool: work[pool] / (size * self.step_seconds) for pool, size in self.placement.pools.items() if size}


def simulate(load: Load, placement: Placement, steps: int, jitter: float = 0.0, seed: int = 0) -> Timeline:
    """Simulate the first `steps` training steps, at least 3 ahead + 2.

    With `jitter` j the time of each work item, and of its scoring, is multiplied by a uniform number in [1 - j, 1 + j].
    """
    placement.check(load)
    if steps < 3 * placement.ahead + 2 or not 0 <= jitter < 1:
        raise UserError(f"{steps} steps with ahead {placement.ahead} and jitter {jitter:g} cannot be simulated")
    clock = _Clock(load, jitter, seed)
    if not placement.workers:
        return _colocated(load, placement.ranks, steps, clock)
    pools = _Pools(placement, work_items(load, placement.ranks), clock)
    train = load.train * load.samples / placement.ranks
    ends, end, asked = [], 0.0, 0
    for step in range(steps):
        begin = end + load.fixed + load.publish
        pools.advance(begin)
        while asked < min(step + placement.ahead + 1, steps):
            pools.request(begin, asked, version=step)
            asked += 1
        end = max(begin, pools.finish(step)) + train
        ends.append(end)
    training = placement.ranks * steps * (load.fixed + load.publish + train)
    return Timeline(ends, pools.finished, {"training": training, **pools.busy}, placement)


def work_items(load: Load, ranks: int) -> list[int]:
    """Return the samples of each work item of a step: every rank cuts its own share."""
    share = load.samples // ranks
    return ranks * [min(load.item, share - start) for start in range(0, share, load.item)]


def _colocated(load: Load, ranks: int, steps: int, clock: "_Clock") -> Timeline:
    sizes, train = work_items(load, ranks), load.train * load.samples / ranks
    own = len(sizes) // ranks
    ends, end, busy, finished = [], 0.0, 0.0, []
    for step in range(steps):
        begin = slowest = end + load.fixed
        for rank in range(ranks):
            now = begin
            for number in range(rank * own, (rank + 1) * own):
                finished.append(Item(step, number, sizes[number], step, now))
                now += sum(clock.seconds(finished[-1]))
            slowest, busy = max(slowest, now), busy + now - begin
        end = slowest + train
        busy += ranks * (load.fixed + train)
        ends.append(end)
    return Timeline(ends, finished, {"training": busy}, Placement(ranks))


@dataclass(frozen=True)
class _Clock:
    """The seconds that work items take."""

    load: Load
    jitter: float
    seed: int

    def seconds(self, item: Item) -> tuple[float, float]:
        """Return the seconds of an item's rollout and of its scoring."""
        draw = random.Random(f"{self.seed}/{item.step}/{item.number}")
        rollout, reward = (1 + self.jitter * draw.uniform(-1, 1) for _ in range(2))
        return rollout * item.samples * self.load.rollout, reward * item.samples * self.load.reward


class _Pools:
    """The rollout workers and reward workers, and the items that wait for one."""

    def __init__(self, placement: Placement, sizes: list[int], clock: _Clock) -> None:
        self.finished: list[Item] = []
        self.busy = {"rollout": 0.0, "reward": 0.0}
        self._sizes, self._clock = sizes, clock
        self._scored_apart = placement.reward_workers > 0
        self._idle = deque((worker, -1) for worker in range(placement.workers))  # with the weights version it holds
        self._idle_rewards = placement.reward_workers
        self._asked: list[Item] = []
        self._rolled_out: list[Item] = []
        self._events: list[tuple[float, int, Iterator[float]]] = []  # when, in which order, and what goes on then
        self._order = 0
        self._missing: dict[int, int] = {}  # items of each step that are not finished
        self._ready: dict[int, float] = {}  # when the last item of each step was

    def request(self, now: float, step: int, version: int) -> None:
        self._missing[step] = len(self._sizes)
        for number, samples in enumerate(self._sizes):
            heapq.heappush(self._asked, Item(step, number, samples, version))
        self._start(now)

    def advance(self, until: float) -> None:
        while self._events and self._events[0][0] <= until:
            self._next()

    def finish(self, step: int) -> float:
        """Go on until all items of a step are finished, and return when that was."""
        while self._missing[step]:
            self._next()
        return self._ready[step]

    def _next(self) -> None:
        now, _, work = heapq.heappop(self._events)
        self._resume(now, work)
        self._start(now)

    def _resume(self, now: float, work: Iterator[float]) -> None:
        for until in work:
            heapq.heappush(self._events, (until, self._order, work))
            self._order += 1
            return

    def _start(self, now: float) -> None:
        """Give waiting items to idle workers."""
        while self._idle and self._asked:
            self._resume(now, self._roll_out(now, heapq.heappop(self._asked), *self._idle.popleft()))
        while self._idle_rewards and self._rolled_out:
            self._resume(now, self._score(now, heapq.heappop(self._rolled_out)))

    def _roll_out(self, now: float, item: Item, worker: int, held: int) -> Iterator[float]:
        item.begin = now
        rollout, reward = self._clock.seconds(item)
        seconds = rollout + (self._clock.load.fetch if held != item.version else 0.0)
        seconds += 0.0 if self._scored_apart else reward
        yield now + seconds
        self.busy["rollout"] += seconds
        self._idle.append((worker, item.version))
        if self._scored_apart:
            heapq.heappush(self._rolled_out, item)
        else:
            self._done(now + seconds, item)

    def _score(self, now: float, item: Item) -> Iterator[float]:
        self._idle_rewards -= 1
        _, seconds = self._clock.seconds(item)
        yield now + seconds
        self.busy["reward"] += seconds
        self._idle_rewards += 1
        self._done(now + seconds, item)

    def _done(self, now: float, item: Item) -> None:
        self.finished.append(item)
        self._missing[item.step] -= 1
        self._ready[item.step] = now
