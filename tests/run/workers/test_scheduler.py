"""Work items through pools of workers that die, hang and raise; toy workers on a real Ray."""

import asyncio
import uuid
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy import ToyWorker, rollout_of, scores_of

from unified_trainer.basics.requests import Request
from unified_trainer.run.workers import scheduler as module
from unified_trainer.run.workers.scheduler import (
    DEATHS,
    KNOWN,
    Pool,
    Scheduler,
    ValidationBatch,
    WorkersLostError,
    WorkItem,
)


def item(step: int, first: int = 0, version: int = 0) -> WorkItem:
    return WorkItem(step, version, Request.of("ab"), (0, 1), (first, first + 1))


# The order of work, without Ray.


class Instant:
    """A worker whose answers are ready when the test says so."""

    def __init__(self) -> None:
        self.asked: list[tuple[WorkItem, asyncio.Future]] = []

    def request(self, one: WorkItem) -> list:
        taken, result = (asyncio.get_running_loop().create_future() for _ in range(2))
        self.asked.append((one, taken))
        result.set_result(one)
        return [taken, result]


async def settle() -> None:
    """Let everything run that can run."""
    for _ in range(10):
        turn = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_soon(turn.set_result, None)
        await turn


def test_work_of_earlier_steps_goes_first():
    async def order() -> list[int]:
        worker = Instant()
        pool = Pool("toy", [worker], 60.0)
        tasks = []
        for step in (3, 5, 4, 2, 2):
            tasks.append(asyncio.create_task(pool.run(item(step), lambda w, step=step: w.request(item(step)))))
            await settle()
        for _ in tasks:
            worker.asked[-1][1].set_result({})
            await settle()
        await asyncio.gather(*tasks)
        return [one.step for one, _ in worker.asked]

    assert asyncio.run(order()) == [3, 2, 2, 4, 5]


class Patient(Pool):
    """It asks no second worker, whatever time answers take."""

    def _patience(self) -> None:
        return None


@pytest.mark.slow
@given(st.lists(st.integers(0, 5), min_size=1, max_size=30), st.integers(1, 4), st.randoms(use_true_random=False))
@settings(max_examples=100, deadline=None)
def test_every_item_is_done_once_whatever_answers_first(steps, workers, random):
    """No worker has two items at a time; the answers come in any order."""

    async def run() -> list[WorkItem]:
        pool_of = [Instant() for _ in range(workers)]
        pool = Patient("toy", pool_of, 60.0)
        items = [item(step, first=2 * i) for i, step in enumerate(steps)]
        tasks = [asyncio.create_task(pool.run(one, lambda w, one=one: w.request(one))) for one in items]
        await settle()
        while not all(task.done() for task in tasks):
            open_calls = [taken for worker in pool_of for _, taken in worker.asked if not taken.done()]
            assert all(sum(not taken.done() for _, taken in worker.asked) <= 1 for worker in pool_of)
            random.choice(open_calls).set_result({})
            await settle()
        results = [await reference for _, (reference,) in await asyncio.gather(*tasks)]
        assert results == items
        return [one for worker in pool_of for one, _ in worker.asked]

    done = asyncio.run(run())
    assert sorted(one.sample_ids for one in done) == [(2 * i, 2 * i + 1) for i in range(len(steps))]


async def asked_in_turn(pool: Pool, workers: list[Instant], steps: int) -> None:
    """Let the workers do so many items, each at once."""
    for step in range(steps):
        task = asyncio.create_task(pool.run(item(step), lambda w, step=step: w.request(item(step))))
        await settle()
        next(taken for w in workers for _, taken in w.asked if not taken.done()).set_result({})
        await task


class Told(Instant):
    """A worker that says when it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = asyncio.Event()

    def request(self, one: WorkItem) -> list:
        self.begun.set()
        return super().request(one)


@pytest.mark.parametrize("first", ["straggler", "spare"])
def test_a_straggler_is_helped_by_a_free_worker_and_the_first_answer_counts(first):
    """Work that waits for a worker comes before; both workers are free again in the end."""

    async def run() -> None:
        slow, spare = Told(), Told()
        pool = Pool("toy", [slow], 60.0)
        await asked_in_turn(pool, [slow], KNOWN)  # a call takes no time
        spare.begun.clear()
        pool._release(spare)
        task = asyncio.create_task(pool.run(item(90), lambda w: w.request(item(90))))
        await spare.begun.wait()  # because the other one does not answer
        calls = {"straggler": slow.asked[-1], "spare": spare.asked[-1]}
        assert [one.step for one, _ in calls.values()] == [90, 90] and not task.done()
        calls[first][1].set_result({"by": first})
        assert (await task)[0] == {"by": first}
        assert len(pool._idle) == 1
        next(taken for _, taken in calls.values() if not taken.done()).set_result({})
        await settle()
        assert sorted(map(id, pool._idle)) == sorted(map(id, (slow, spare))) and not pool._tasks

    asyncio.run(run())


def test_nobody_is_asked_twice_before_it_is_known_how_long_a_call_takes():
    async def run() -> None:
        workers = [Instant(), Instant()]
        pool = Pool("toy", workers, 60.0)
        await asked_in_turn(pool, workers, KNOWN - 1)
        assert pool._patience() is None
        await asked_in_turn(pool, workers, 1)
        assert 0 < pool._patience() < 60

    asyncio.run(run())


def test_a_worker_that_comes_when_nobody_waits_any_more_is_free():
    """The straggler answers at the same time."""

    async def run() -> None:
        pool = Pool("toy", [Instant()], 60.0)
        (worker,) = pool._idle
        pool._idle.clear()
        turn = asyncio.create_task(pool._free(0))
        await settle()
        pool._release(worker)
        turn.cancel()
        await settle()
        assert pool._idle == [worker]

    asyncio.run(run())


class Called:
    """A method of a worker as Ray calls it, in this process: it answers at once."""

    def __init__(self, method) -> None:
        self.method = method

    def options(self, **_) -> "Called":
        return self

    def remote(self, *arguments) -> list:
        told, result = asyncio.get_running_loop().create_future(), self.method(*arguments)
        told.set_result(result[0])
        return [told, result[1]]


def test_an_item_waits_for_its_weights_and_is_made_once(tmp_path, unchecked, monkeypatch):
    toy = ToyWorker(str(tmp_path))
    workers = {"toy": SimpleNamespace(make=Called(toy.make), score=Called(toy.score))}
    monkeypatch.setattr(module, "get_actor", workers.__getitem__)

    async def run() -> None:
        scheduler = Scheduler(["toy"], [], [], 60.0, 2)
        late = [asyncio.create_task(scheduler.make(item(0, version=3))) for _ in range(2)]  # of a sequence group
        await settle()
        assert not late[0].done() and not late[1].done()
        published = asyncio.create_task(scheduler.publish(3, 1, [4.0], 0, 0))
        await settle()
        assert not late[0].done()  # the other rank has not sent its part
        other = asyncio.create_task(scheduler.publish(3, 0, [3.0], 0, 0))
        (first, *_), (second, *_) = await asyncio.gather(*late)
        assert first[0] is second[0]  # the same samples
        assert_right([item(0)], [first], 7.0)
        again, *_ = await scheduler.make_again(item(0, version=3))
        assert again[0] is not first[0] and np.array_equal(again[0]["x0"], first[0]["x0"])
        assert not published.done()  # an open call, which Ray repeats after a restart
        later = asyncio.create_task(scheduler.publish(9, 0, [8.0], 9, 9))  # forgets version 3
        await asyncio.gather(published, other)
        assert not later.done()
        forgotten = asyncio.create_task(scheduler.make(item(9, version=3)))
        await settle()
        assert not forgotten.done()
        for task in (forgotten, later):
            task.cancel()

    asyncio.run(run())


# Deaths, hangs and exceptions, on Ray.


@pytest.fixture
def group(ray, tmp_path):
    """Start toy workers and a scheduler: group(rollout workers, reward workers, timeout)."""
    started = []

    def start(rollout: int, reward: int = 0, timeout: float = 60.0, evaluation: int = 0):
        kind, names = ray.remote(ToyWorker), [str(uuid.uuid4()) for _ in range(rollout + reward + evaluation)]
        workers = [kind.options(name=name, num_cpus=0, max_restarts=-1).remote(str(tmp_path)) for name in names]
        ray.get([worker.ready.remote() for worker in workers])
        options = {"num_cpus": 0, "max_concurrency": 1000, "name": str(uuid.uuid4())}
        pools = (names[:rollout], names[rollout : rollout + reward], names[rollout + reward :])
        scheduler = ray.remote(Scheduler).options(**options).remote(*pools, timeout, 1)
        started.extend([*workers, scheduler])
        return scheduler

    yield start
    for actor in started:
        ray.kill(actor)


def publish(ray, scheduler, version: int, weights: float, step: int = 0, oldest: int = 0) -> None:
    scheduler.publish.remote(version, 0, [ray.put(weights)], step, oldest)


def made(ray, scheduler, items) -> list:
    replies = [scheduler.make.remote(one) for one in items]
    return [ray.get(references) for references, *_ in ray.get(replies)]


def assert_right(items, results, weights: float) -> None:
    for one, (rollout, scores) in zip(items, results, strict=True):
        expected = rollout_of(one, weights)
        assert np.array_equal(rollout["x0"], expected["x0"]) and np.array_equal(scores, scores_of(one, expected))


@pytest.mark.slow
@pytest.mark.parametrize("pools", [(1, 0), (2, 0), (2, 1)])
def test_results_do_not_depend_on_workers_or_deaths(ray, group, tmp_path, pools):
    """Workers die while they make and while they score, are restarted, and no result is lost or changed."""
    for step, name in enumerate(["make", "score", "make"]):
        (tmp_path / f"{name}-{step}").write_text("die")
    scheduler, items = group(*pools), [item(step, first) for step in range(4) for first in (0, 2)]
    publish(ray, scheduler, 0, 0.5)
    assert_right(items, made(ray, scheduler, items), 0.5)
    assert ray.get(scheduler.deaths.remote()) == 3 and not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_worker_that_hangs_is_restarted(ray, group, tmp_path):
    (tmp_path / "score-0").write_text("hang")
    scheduler = group(2, timeout=3.0)  # the other one takes the work while the first starts again
    publish(ray, scheduler, 0, 2.0)
    assert_right([item(0)], made(ray, scheduler, [item(0)]), 2.0)
    assert ray.get(scheduler.deaths.remote()) == 1


@pytest.mark.slow
def test_an_exception_reaches_who_asked_and_the_worker_goes_on(ray, group, tmp_path):
    (tmp_path / "score-1").write_text("raise")
    scheduler = group(1)
    publish(ray, scheduler, 0, 2.0)
    with pytest.raises(ArithmeticError, match="score of step 1"):
        made(ray, scheduler, [item(1)])
    assert_right([item(2)], made(ray, scheduler, [item(2)]), 2.0)
    assert ray.get(scheduler.deaths.remote()) == 0


@pytest.mark.slow
def test_an_item_that_ends_every_worker_ends_the_run(ray, group, tmp_path):
    (tmp_path / "make-0").write_text("always-die")
    scheduler = group(2)
    publish(ray, scheduler, 0, 2.0)
    with pytest.raises(WorkersLostError, match=rf"{DEATHS} rollout workers died.* step 1, samples 0 to 1"):
        made(ray, scheduler, [item(0)])
    assert_right([item(1)], made(ray, scheduler, [item(1)]), 2.0)


@pytest.mark.slow
def test_workers_that_cannot_start_again_end_the_run(ray, group, tmp_path):
    (tmp_path / "make-0").write_text("always-die")
    scheduler = group(1)
    (tmp_path / "start").write_text("fail")
    publish(ray, scheduler, 0, 2.0)
    with pytest.raises(WorkersLostError, match="no rollout worker could be started again"):
        made(ray, scheduler, [item(0)])


@pytest.mark.slow
def test_the_validation_of_a_worker_that_dies_is_made_again(ray, group, tmp_path):
    """By the other worker, or by the same one after its restart."""
    (tmp_path / "measure-4").write_text("die")
    scheduler = group(1, evaluation=2)
    published = scheduler.publish_validation.remote(0, 0, [ray.put(2.0)])
    batches = [ValidationBatch(4, 0, start, start + 2, 0) for start in (0, 2, 4)]
    replies = ray.get([scheduler.validate.remote(one) for one in batches])
    assert [ray.get(measured).tolist() for measured, _ in replies] == [[0, 2], [4, 6], [8, 10]]
    assert [took for _, took in replies] == [{"calls": 1.0}] * 3
    assert ray.get(scheduler.deaths.remote()) == 1
    scheduler.forget_validation.remote(0)
    ray.get(published)  # answers when its weights are forgotten
