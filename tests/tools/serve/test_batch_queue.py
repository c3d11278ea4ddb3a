"""Dynamic batching: no request is lost or doubled, batches are whole and in time, exceptions reach all who wait."""

import random
import threading
from concurrent.futures import wait

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unified_trainer.tools.serve.batch_queue import FULL, Batcher, BatchQueue, BusyError, Request

# Schedules: requests of some kind and size after a pause, times the worker needs for a batch, limit and waiting time.
ARRIVALS = st.lists(st.tuples(st.integers(0, 8), st.sampled_from("ab"), st.integers(1, 6)), min_size=1, max_size=25)
WORK = st.lists(st.integers(0, 10), min_size=1, max_size=8)


@pytest.mark.slow
@settings(max_examples=300)
@given(arrivals=ARRIVALS, work=WORK, limit=st.integers(1, 8), patience=st.integers(0, 6))
def test_every_schedule_is_served(arrivals, work, limit, patience):
    """A simulated worker takes batches when they are due; time is counted in whole units."""
    queue, clock, to_come = BatchQueue(limit, patience), 0.0, []
    for pause, kind, size in arrivals:
        clock += pause
        to_come.append(Request(len(to_come), kind, size, clock))
    everything, served, now, free_since = list(to_come), [], 0.0, 0.0
    while len(served) < len(everything):
        while to_come and to_come[0].queued <= now:
            queue.put(to_come.pop(0))
        due = queue.due_in(now)
        if due != 0:  # the worker is idle until the batch is due or another request comes
            events = [now + due] if due is not None else []
            now = min(events + [one.queued for one in to_come[:1]])
            continue
        waiting = [one for one in everything if one.queued <= now and one not in served]
        batch = queue.take()
        assert batch and batch[0] is waiting[0]  # the oldest
        assert len({one.kind for one in batch}) == 1
        assert len(batch) == 1 or sum(one.size for one in batch) <= limit
        of_kind = [one for one in waiting if one.kind == batch[0].kind]
        assert batch == of_kind[: len(batch)]  # in order, and nothing in between is left out
        if len(batch) < len(of_kind):
            assert sum(one.size for one in batch) + of_kind[len(batch)].size > limit
        assert now <= max(batch[0].queued + patience, free_since)  # an idle worker starts in time
        served += batch
        now += work[len(served) % len(work)]
        free_since = now
    assert sorted(one.job for one in served) == list(range(len(everything))) and queue.due_in(now) is None


def test_the_wait_is_counted_from_the_first_request():
    queue = BatchQueue(4, 10.0)
    assert queue.due_in(0.0) is None and queue.take() == []
    first, second = Request("a", "k", 1, 1.0), Request("b", "k", 2, 8.0)
    queue.put(first)
    assert queue.due_in(3.0) == 8.0
    queue.put(second)
    assert queue.due_in(9.0) == 2.0 and queue.due_in(20.0) == 0.0
    queue.put(Request("c", "other", 4, 9.0))
    assert queue.due_in(9.0) == 2.0  # another kind fills no batch
    queue.put(Request("d", "k", 1, 9.0))
    assert queue.due_in(9.0) == 0.0 and [one.job for one in queue.take()] == ["a", "b", "d"]
    assert [one.job for one in queue.take()] == ["c"]


def test_threads_get_their_own_results():
    """Forty threads, sizes and pauses by a seed: each gets the result of its job, and the work is done in batches."""
    batches: list[list[int]] = []

    def square(jobs):
        batches.append(list(jobs))
        return [job * job for job in jobs]

    batcher, results = Batcher(square, 8, 0.002), {}

    def client(seed):
        draw = random.Random(seed)
        for i in range(5):
            job = 100 * seed + i
            results[job] = batcher.submit(job, draw.randrange(2), draw.randint(1, 4)).result(timeout=30)

    threads = [threading.Thread(target=client, args=(seed,)) for seed in range(40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    batcher.close()
    assert results == {100 * seed + i: (100 * seed + i) ** 2 for seed in range(40) for i in range(5)}
    assert sorted(job for batch in batches for job in batch) == sorted(results)
    assert max(map(len, batches)) > 1


@pytest.mark.parametrize("answers", [KeyError("wrong"), []], ids=["raises", "gives too few results"])
def test_an_exception_is_that_of_the_request_with_the_fault_and_the_next_batch_is_served(answers):
    """A batch that fails is worked on again one by one."""

    def work(jobs):
        if "bad" not in jobs:
            return jobs
        if isinstance(answers, list):
            return answers
        raise answers

    batcher = Batcher(work, 2, 60.0)
    good, bad = [batcher.submit(job, "k", 1) for job in ("good", "bad")]
    assert good.result(timeout=30) == "good"
    assert type(bad.exception(timeout=30)) is (ValueError if isinstance(answers, list) else KeyError)
    more = [batcher.submit(job, "k", 1) for job in ("c", "d")]
    assert [future.result(timeout=30) for future in more] == ["c", "d"]
    batcher.close()


def test_a_full_queue_refuses_what_comes():
    go, begun = threading.Event(), threading.Event()

    def work(jobs):
        begun.set()
        assert go.wait(30)
        return jobs

    batcher = Batcher(work, 2, 0.0)
    futures = [batcher.submit(0, "k", 2)]
    assert begun.wait(30)
    futures += [batcher.submit(i, "k", 2) for i in range(1, FULL + 1)]
    with pytest.raises(BusyError, match=f"the queue is full, {2 * FULL} videos wait"):
        batcher.submit(-1, "k", 1)
    go.set()
    assert [future.result(timeout=30) for future in futures] == list(range(FULL + 1))
    assert batcher.submit(-1, "k", 1).result(timeout=30) == -1
    batcher.close()


def test_closing_finishes_what_waits_and_refuses_more():
    batcher = Batcher(lambda jobs: jobs, 100, 60.0)
    futures = [batcher.submit(i, "k", 1) for i in range(5)]
    assert futures[3].cancel()
    batcher.close()  # does not wait for a minute
    assert wait(futures, timeout=0).not_done == set()
    assert [futures[i].result() for i in (0, 1, 2, 4)] == [0, 1, 2, 4]
    with pytest.raises(RuntimeError, match="closed"):
        batcher.submit(5, "k", 1)


def test_a_batch_that_nobody_waits_for_is_not_worked_on():
    seen = []
    batcher = Batcher(lambda jobs: seen.append(jobs) or jobs, 2, 60.0)
    assert batcher.submit("a", "k", 1).cancel()
    batcher.close()
    assert seen == []


def test_work_that_does_not_return_is_given_up():
    """Those in the batch at work, behind it and later get the error; the late result is dropped."""
    go, begun, late = threading.Event(), threading.Event(), TimeoutError("too late")

    def work(jobs):
        begun.set()
        go.wait(30)
        return jobs

    batcher = Batcher(work, 1, 0.0)
    first = batcher.submit("a", "k", 1)
    assert begun.wait(30)
    second = batcher.submit("b", "k", 1)
    batcher.give_up(late)
    batcher.give_up(KeyError("once only"))
    assert first.exception(timeout=0) is late and second.exception(timeout=0) is late
    assert batcher.given_up.result(timeout=0) is late
    with pytest.raises(TimeoutError, match="too late"):
        batcher.submit("c", "k", 1)
    batcher.close()  # does not wait for the work
    go.set()
    batcher._thread.join(30)
    assert not batcher._thread.is_alive()
