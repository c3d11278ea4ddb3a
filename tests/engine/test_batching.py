"""The queue that batches requests: every request is answered once, in time, and callers do not disturb each other.

The event loop has a clock of its own, which jumps to the next event: times are exact, and nothing waits.
"""

import asyncio
import itertools
import selectors
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unified_trainer.engine.batching import BatchQueue, QueueClosedError


class Jumping(selectors.DefaultSelector):
    """A selector that advances a clock instead of waiting."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list:
        assert timeout is not None, "everything waits, and nothing will happen"
        self.now += max(timeout, 0.0)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop with a virtual clock; a call beside it takes `seconds(requests)` of its time."""

    def __init__(self, seconds: Callable[[list], float]) -> None:
        self._clock, self._seconds = Jumping(), seconds
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now

    def run_in_executor(self, executor: object, call: Callable[[list], list], requests: list) -> asyncio.Future:
        done = self.create_future()
        self.call_later(self._seconds(requests), lambda: done.set_result(call(requests)))
        return done


def virtual(main: Callable[[], Coroutine[Any, Any, Any]], seconds: Callable[[list], float] = lambda _: 1.0) -> Any:
    """Run a coroutine to its end on a virtual clock."""
    with asyncio.Runner(loop_factory=lambda: VirtualLoop(seconds)) as runner:
        return runner.run(main())


async def at(time: float, call: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    loop = asyncio.get_running_loop()
    reached = loop.create_future()
    loop.call_at(time, reached.set_result, None)
    await reached
    return await call()


# Random schedules.

# Times are whole, but for those at which callers give up (a quarter later) and the queue is closed (a half later): what
# happens first is always known.


@dataclass(frozen=True)
class Caller:
    arrives: int
    patience: int | None  # the caller gives up after it, and a quarter
    refused: bool  # an exception stands in place of its answer


@dataclass(frozen=True)
class Schedule:
    callers: list[Caller]
    size: int
    wait: int
    seconds: list[int]  # of each batch in turn, repeated
    fails: list[bool]  # whether the function raises, likewise
    closes: int | None


SCHEDULES = st.builds(
    Schedule,
    callers=st.lists(
        st.builds(Caller, st.integers(0, 20), st.none() | st.integers(0, 8), st.booleans()), min_size=1, max_size=14
    ),
    size=st.integers(1, 5),
    wait=st.integers(0, 6),
    seconds=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    fails=st.lists(st.sampled_from([False, False, True]), min_size=1, max_size=4),
    closes=st.none() | st.integers(0, 25),
)


class FailedBatchError(Exception):
    """Raised for a batch, which it numbers."""


@dataclass
class Trace:
    """The batches of a schedule with the times of their start and end, and the outcome of every caller."""

    batches: list[tuple[float, float, list[int]]] = field(default_factory=list)
    outcomes: dict[int, Any] = field(default_factory=dict)


def run(schedule: Schedule) -> Trace:
    trace, seconds = Trace(), itertools.cycle(schedule.seconds)

    def duration(requests: list[int]) -> float:
        now, took = asyncio.get_running_loop().time(), next(seconds)
        trace.batches.append((now, now + took, requests))
        return took

    def answer(requests: list[int]) -> list[str | Exception]:
        number = len(trace.batches) - 1
        if schedule.fails[number % len(schedule.fails)]:
            raise FailedBatchError(number)
        return [KeyError(i) if schedule.callers[i].refused else f"answer {i}" for i in requests]

    async def main() -> None:
        queue = BatchQueue("tested", answer, schedule.size, schedule.wait)

        async def call(i: int) -> None:
            assert i not in trace.outcomes
            patience = schedule.callers[i].patience
            try:
                async with asyncio.timeout(None if patience is None else patience + 0.25):
                    trace.outcomes[i] = await queue.submit(i)
            except (TimeoutError, KeyError, FailedBatchError, QueueClosedError) as error:
                trace.outcomes[i] = error

        calls = [at(caller.arrives, lambda i=i: call(i)) for i, caller in enumerate(schedule.callers)]
        closing = [] if schedule.closes is None else [at(schedule.closes + 0.5, queue.close)]
        await asyncio.gather(*calls, *closing)
        await queue.close()

    virtual(main, duration)
    return trace


@settings(max_examples=300)
@given(SCHEDULES)
def test_random_schedules(schedule):
    trace = run(schedule)
    callers, batched = schedule.callers, [i for _, _, batch in trace.batches for i in batch]
    assert trace.outcomes.keys() == set(range(len(callers)))  # nobody is lost, and `call` saw nobody twice
    assert len(batched) == len(set(batched))
    closed = float("inf") if schedule.closes is None else schedule.closes + 0.5
    gives_up = [float("inf") if one.patience is None else one.arrives + one.patience + 0.25 for one in callers]

    started: dict[int, tuple[int, float, float]] = {}  # of each caller: number, start and end of its batch
    free = 0.0  # when the batch in front has ended
    for number, (start, end, batch) in enumerate(trace.batches):
        arrived = [callers[i].arrives for i in batch]
        due, full = arrived[0] + schedule.wait, len(batch) == schedule.size
        assert arrived == sorted(arrived) and len(batch) <= schedule.size
        assert start == max(free, min(due, arrived[-1]) if full else due)
        assert start < closed and all(start < gives_up[i] for i in batch)
        free = end
        started |= {i: (number, start, end) for i in batch}

    for i, outcome in trace.outcomes.items():
        number, start, end = started.get(i, (None, float("inf"), float("inf")))
        if gives_up[i] < min(end, closed if i not in started else end):
            assert isinstance(outcome, TimeoutError)
        elif i not in started:  # it was waiting, or came too late
            assert isinstance(outcome, QueueClosedError)
        elif schedule.fails[number % len(schedule.fails)]:
            assert isinstance(outcome, FailedBatchError) and outcome.args == (number,)
        elif callers[i].refused:
            assert isinstance(outcome, KeyError) and outcome.args == (i,)
        else:
            assert outcome == f"answer {i}"
        if number is not None:  # those that waited longer, and had not given up, are in this batch or were before
            earlier = [j for j, one in enumerate(callers) if one.arrives < callers[i].arrives and gives_up[j] > start]
            assert all(started[j][1] <= start for j in earlier)


# Its promises, one by one.


def test_a_full_batch_starts_at_once_and_the_rest_when_the_first_of_them_is_due():
    trace = run(Schedule([Caller(t, None, False) for t in (0, 1, 2, 3, 5)], 3, 5, [1], [False], None))
    assert trace.batches == [(2.0, 3.0, [0, 1, 2]), (8.0, 9.0, [3, 4])]


def test_requests_wait_for_the_batch_in_front():
    trace = run(Schedule([Caller(t, None, False) for t in (0, 1, 2, 3)], 2, 0, [9], [False], None))
    assert trace.batches == [(0.0, 9.0, [0]), (9.0, 18.0, [1, 2]), (18.0, 27.0, [3])]


def test_a_caller_that_gives_up_leaves_the_queue_and_its_batch():
    """The first one is no longer waited for; the fourth one's answer is computed, and reaches nobody."""
    callers = [Caller(0, 2, False), Caller(1, None, False), Caller(5, None, False), Caller(6, 2, False)]
    trace = run(Schedule(callers, 4, 6, [5], [False], None))
    assert trace.batches == [(7.0, 12.0, [1, 2, 3])]
    assert isinstance(trace.outcomes[0], TimeoutError) and isinstance(trace.outcomes[3], TimeoutError)
    assert (trace.outcomes[1], trace.outcomes[2]) == ("answer 1", "answer 2")


def test_a_fault_reaches_every_caller_of_its_batch_and_nobody_else():
    trace = run(Schedule([Caller(t, None, False) for t in (0, 0, 5)], 2, 1, [1], [True, False], None))
    assert isinstance(trace.outcomes[0], FailedBatchError) and trace.outcomes[1] is trace.outcomes[0]
    assert trace.outcomes[2] == "answer 2"


def test_an_exception_in_place_of_an_answer_reaches_its_caller_alone():
    trace = run(Schedule([Caller(0, None, i == 1) for i in range(3)], 3, 1, [1], [False], None))
    assert [trace.outcomes[i] for i in (0, 2)] == ["answer 0", "answer 2"]
    assert isinstance(trace.outcomes[1], KeyError)


def test_closing_answers_the_running_batch_and_fails_what_waits():
    trace = run(Schedule([Caller(t, None, False) for t in (0, 1, 3)], 1, 0, [4], [False], 2))
    assert trace.outcomes[0] == "answer 0" and len(trace.batches) == 1
    assert [str(trace.outcomes[i]) for i in (1, 2)] == ["queue tested is closed"] * 2


@pytest.mark.parametrize("answers", [["one"], ["one", "two", "three"], []])
def test_another_number_of_answers_is_a_fault(answers):
    async def main():
        queue = BatchQueue("tested", lambda _: answers, 2, 1.0)
        return await asyncio.gather(queue.submit("a"), queue.submit("b"), return_exceptions=True)

    for error in virtual(main):
        assert str(error) == f"queue tested: {len(answers)} answers to 2 requests"


def test_stop_iteration_does_not_leave_its_callers_waiting():
    """A future refuses this exception."""

    async def main():
        raising = BatchQueue("raising", lambda _: [next(iter([]))], 1, 0.0)
        returning = BatchQueue("returning", lambda _: [StopIteration()], 1, 0.0)
        return await asyncio.gather(raising.submit("a"), returning.submit("b"), return_exceptions=True)

    for error in virtual(main):
        assert isinstance(error, RuntimeError) and isinstance(error.__cause__, StopIteration)


def test_who_gives_up_closing_does_not_cancel_the_running_batch():
    async def main():
        queue = BatchQueue("tested", list, 1, 0.0)
        asked = asyncio.create_task(queue.submit("a"))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(at(1, queue.close), 2.0)
        return await asked

    assert virtual(main, lambda _: 5.0) == "a"


def test_the_function_runs_in_one_thread_beside_the_loop():
    """The function waits for what only the event loop can do."""
    free, threads = threading.Event(), []

    def answer(requests):
        assert free.wait(60)
        threads.append(threading.current_thread())
        return requests

    async def main():
        queue = BatchQueue("tested", answer, 1, 0.0)
        calls = asyncio.gather(*(queue.submit(i) for i in range(3)))
        asyncio.get_running_loop().call_soon(free.set)
        answers = await calls
        await queue.close()
        return answers

    assert asyncio.run(main()) == [0, 1, 2]
    assert len(set(threads)) == 1 and threads[0] is not threading.main_thread()


@pytest.mark.parametrize(("size", "wait"), [(0, 1.0), (1, -1.0), (1, float("nan"))])
def test_sizes_start_at_one_and_no_wait_is_negative(size, wait):
    with pytest.raises(ValueError, match="queue tested: size must be at least 1 and wait not negative"):
        BatchQueue("tested", list, size, wait)
