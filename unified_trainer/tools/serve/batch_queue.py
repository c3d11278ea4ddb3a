"""Dynamic batching: requests that wait in a queue are worked on together. It knows no network."""

import threading
import time
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Job = TypeVar("Job")
Result = TypeVar("Result")
FULL = 64  # batches that may wait


class BusyError(Exception):
    """The queue is full: another request may find room later."""


@dataclass(eq=False)
class Queued(Generic[Job, Result]):
    """A job that waits for its result."""

    job: Job
    kind: Hashable  # only jobs of one kind are worked on together
    size: int
    queued: float  # seconds on the queue's clock
    future: "Future[Result]" = field(default_factory=Future)


class BatchQueue(Generic[Job, Result]):
    """Requests in the order in which they came, and which of them are worked on next.

    A batch is the first request and, in order, those of its kind that fit into `limit` together. It is due when it is
    full, or `wait` seconds after its first request was queued. A request larger than `limit` is a batch of its own.
    Times are given, so that the queue can be tested without waiting.
    """

    def __init__(self, limit: int, wait: float) -> None:
        self.limit, self.wait = limit, wait
        self._waiting: list[Queued[Job, Result]] = []

    @property
    def waiting(self) -> int:
        """The sum of the sizes of the requests that wait."""
        return sum(request.size for request in self._waiting)

    def put(self, request: Queued[Job, Result]) -> None:
        """Add a request at the end."""
        self._waiting.append(request)

    def due_in(self, now: float) -> float | None:
        """Return the seconds until the next batch is due, 0 if it is, and None for an empty queue."""
        if not self._waiting:
            return None
        _, full = self._next()
        return 0.0 if full else max(0.0, self._waiting[0].queued + self.wait - now)

    def take(self) -> list[Queued[Job, Result]]:
        """Remove and return the next batch; [] for an empty queue."""
        batch, _ = self._next() if self._waiting else ([], False)
        taken = {*batch}
        self._waiting = [request for request in self._waiting if request not in taken]
        return batch

    def take_all(self) -> list[Queued[Job, Result]]:
        """Remove and return all requests."""
        waiting, self._waiting = self._waiting, []
        return waiting

    def _next(self) -> tuple[list[Queued[Job, Result]], bool]:
        """Return the next batch as it is now, and whether no further request can join it."""
        batch, total = [], 0
        for request in self._waiting:
            if request.kind == self._waiting[0].kind:
                if batch and total + request.size > self.limit:
                    return batch, True
                batch.append(request)
                total += request.size
        return batch, total >= self.limit


class Batcher(Generic[Job, Result]):
    """A thread that works on queued jobs in batches; results and exceptions reach those who wait for them."""

    def __init__(self, work: Callable[[Sequence[Job]], Sequence[Result]], limit: int, wait: float) -> None:
        """Start the thread. `work` returns one result for each of its jobs; `wait` is in seconds."""
        self._work, self.limit, self._queue = work, limit, BatchQueue[Job, Result](limit, wait)
        self._changed, self._closed = threading.Condition(), False
        self._at_work: list[Queued[Job, Result]] = []
        self.given_up: Future[Exception] = Future()  # why, once `give_up` was called
        self._thread = threading.Thread(target=self._run, name="batcher", daemon=True)
        self._thread.start()

    def submit(self, job: Job, kind: Hashable, size: int) -> "Future[Result]":
        """Queue a job; the future has its result, or the exception that it raised.

        Raise BusyError if as much as `FULL` batches waits already.
        """
        request = Queued[Job, Result](job, kind, size, time.monotonic())
        with self._changed:
            if self.given_up.done():
                raise self.given_up.result()
            if self._closed:
                raise RuntimeError("the batcher is closed")
            if (waiting := self._queue.waiting) >= FULL * self._queue.limit:
                raise BusyError(f"the queue is full, {waiting} videos wait: ask again later, or use a further server")
            self._queue.put(request)
            self._changed.notify()
        return request.future

    def close(self) -> None:
        """Refuse further jobs, and return when those in the queue are done, or at once after `give_up`."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if not self.given_up.done():
            self._thread.join()

    def give_up(self, error: Exception) -> None:
        """End with work that does not return: all who wait, and all who come later, get the error."""
        with self._changed:
            if self.given_up.done():
                return
            self._closed = True
            queued = [request for request in self._queue.take_all() if request.future.set_running_or_notify_cancel()]
            for request in (*self._at_work, *queued):
                request.future.set_exception(error)
            self.given_up.set_result(error)

    def _run(self) -> None:
        while batch := self._wait_for_batch():
            outcomes = self._outcomes(batch)
            with self._changed:
                if self.given_up.done():
                    return  # all who wait were answered
                self._at_work = []
                for request, outcome in zip(batch, outcomes, strict=True):
                    if isinstance(outcome, Exception):
                        request.future.set_exception(outcome)
                    else:
                        request.future.set_result(outcome)

    def _outcomes(self, batch: Sequence[Queued[Job, Result]]) -> list[Result | Exception]:
        """Return the result of each request of a batch, or its exception.

        A batch that fails is worked on again one by one: a fault of one request is none of the others.
        """
        try:
            results = self._work([request.job for request in batch])
            return [result for _, result in zip(batch, results, strict=True)]
        except Exception as error:  # noqa: BLE001 - those who wait raise it
            if len(batch) == 1 or self.given_up.done():
                return [error] * len(batch)
            return [outcome for request in batch for outcome in self._outcomes([request])]

    def _wait_for_batch(self) -> list[Queued[Job, Result]]:
        """Return the next batch when it is due, which then is at work; [] when the queue is closed and empty."""
        with self._changed:
            while True:
                while (due := self._queue.due_in(time.monotonic())) != 0.0 and not self._closed:
                    self._changed.wait(due)
                taken = self._queue.take()
                self._at_work = [request for request in taken if request.future.set_running_or_notify_cancel()]
                if self._at_work or not taken:
                    return self._at_work
