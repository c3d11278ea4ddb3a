"""A queue that answers the requests of many callers in batches."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

Request = TypeVar("Request")
Answer = TypeVar("Answer")


class QueueClosedError(RuntimeError):
    """A request was made of a queue that is closed, or was still waiting when it was closed."""


class BatchQueue(Generic[Request, Answer]):
    """Calls a function on lists of requests that several callers of one event loop make one by one.

    A batch starts once `size` requests wait, or `wait` seconds after the first of those that wait, and not before the
    batch in front of it has ended. It takes the requests that wait longest, `size` at most. The function runs in a
    thread of the queue's own, so that the event loop goes on.
    """

    def __init__(
        self, name: str, answer: Callable[[list[Request]], Sequence[Answer | Exception]], size: int, wait: float
    ) -> None:
        """`answer` returns an answer for each request, in order, or an exception for a request that has none.

        `name` is that of the queue in messages.
        """
        if size < 1 or not wait >= 0:
            raise ValueError(f"queue {name}: size must be at least 1 and wait not negative, not {size} and {wait}")
        self.name, self._answer, self._size, self._wait = name, answer, size, wait
        self._thread = ThreadPoolExecutor(1, name)
        self._waiting: dict[asyncio.Future[Answer], tuple[Request, float]] = {}  # with the time when it is due
        self._timer: asyncio.TimerHandle | None = None  # of the first that waits
        self._running: asyncio.Task[None] | None = None
        self._closed = False

    async def submit(self, request: Request) -> Answer:
        """Return the answer to a request.

        Raise the exception that stands in place of the answer, or what the function raised: the same object in every
        caller of the batch. Raise QueueClosedError if the queue is closed before the request's batch has started.
        """
        if self._closed:
            raise self._closed_error()
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Answer] = loop.create_future()
        self._waiting[answer] = (request, loop.time() + self._wait)
        self._schedule()
        try:
            return await answer
        finally:
            if self._waiting.pop(answer, None):  # the caller gave up: another request may now be the first
                self._schedule()

    async def close(self) -> None:
        """Refuse further requests, fail those that wait, and wait until the running batch has been answered."""
        self._closed = True
        waiting, self._waiting = self._waiting, {}
        self._schedule()
        for answer in waiting:
            if not answer.done():
                answer.set_exception(self._closed_error())
        if self._running is not None:
            await asyncio.wait([self._running])  # which a caller that gives up does not cancel
        self._thread.shutdown(wait=False)

    def _schedule(self) -> None:
        """Start a batch, or set the timer for the first request that waits; a running batch calls this at its end."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._running is not None or not self._waiting:
            return
        if len(self._waiting) >= self._size:
            self._start()
        else:
            _, due = next(iter(self._waiting.values()))
            self._timer = asyncio.get_running_loop().call_at(due, self._start)

    def _start(self) -> None:
        batch = {answer: self._waiting.pop(answer)[0] for answer in list(self._waiting)[: self._size]}
        self._running = asyncio.get_running_loop().create_task(self._run(batch))

    async def _run(self, batch: dict[asyncio.Future[Answer], Request]) -> None:
        found = await asyncio.get_running_loop().run_in_executor(self._thread, self._outcomes, list(batch.values()))
        for answer, outcome in zip(batch, found, strict=True):
            if answer.done():  # the caller gave up
                continue
            if isinstance(outcome, Exception):
                answer.set_exception(outcome)
            else:
                answer.set_result(outcome)
        self._running = None
        self._schedule()

    def _outcomes(self, requests: list[Request]) -> list[Answer | Exception]:
        """Return an answer or an exception for each request, whatever the function does."""
        try:
            found: list[Answer | Exception] = list(self._answer(requests))
            if len(found) != len(requests):
                raise ValueError(f"queue {self.name}: {len(found)} answers to {len(requests)} requests")
        except Exception as error:  # noqa: BLE001 - the callers raise it
            found = [error] * len(requests)
        return [_raisable(outcome) if isinstance(outcome, StopIteration) else outcome for outcome in found]

    def _closed_error(self) -> QueueClosedError:
        return QueueClosedError(f"queue {self.name} is closed")


def _raisable(error: StopIteration) -> RuntimeError:
    """Return an exception for a future, which refuses StopIteration: its callers would wait without end."""
    raised = RuntimeError("the function of a queue raised StopIteration")
    raised.__cause__ = error
    return raised
