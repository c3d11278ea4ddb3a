"""Which weights make the samples of which step, with a scheduler that answers at once."""

import dataclasses
import math
import queue
import threading

import numpy as np
import pytest
from helpers import ALONE, CAPTIONS, LATENT_SHAPE, tiny_codec, trainable

from unified_trainer.basics.requests import Request
from unified_trainer.data.batch_plan import BatchPlan
from unified_trainer.data.loader import Loader
from unified_trainer.data.prompts import Prompts
from unified_trainer.methods.rl.buffer import BufferConfig, ExperienceBuffer, FreshRows
from unified_trainer.parallel.random import Streams
from unified_trainer.run.workers.group import WorkerGroup
from unified_trainer.run.workers.rollouts import RemoteRollouts
from unified_trainer.run.workers.weights import WeightSender

PLAN = BatchPlan(2, 2, 2, 4, ("P", "n", "G", "micro"))


@dataclasses.dataclass
class Now:
    """A method of an actor that answers at once."""

    ray: object
    function: object

    def remote(self, *words):
        return self.ray.put(self.function(*words))


class InstantScheduler:
    """Makes samples that say which weights made them: the first weight of the version."""

    def __init__(self, ray) -> None:
        self.ray, self.weights, self.items, self.maker = ray, {}, [], "worker 1"
        self.published = threading.Condition()
        self.publish, self.make, self.deaths = (Now(ray, one) for one in (self._publish, self._make, lambda: 0))

    def _publish(self, version, rank, references, step, oldest):
        assert version not in self.weights and rank == 0 and oldest <= version <= step
        with self.published:
            self.weights[version] = self.ray.get(references[0]).buffers[0]
            self.published.notify_all()

    def _make(self, item):
        self.items.append(item)
        with self.published:
            assert self.published.wait_for(lambda: item.version in self.weights, timeout=60)
        first = self.weights[item.version][:4].view(np.float32)[0]
        count = len(item.prompts)
        x0 = np.full((count, *LATENT_SHAPE), first, dtype=np.float32)
        none = x0[:, None][:, :0]
        rollout = {"states": none, "log_probs": np.zeros((count, 0)), "x0": x0}
        scores = {"parts": np.zeros((count, 1), np.float32), "statistics": {}, "thumbnails": np.zeros((count, 1))}
        return [self.ray.put(rollout), self.ray.put(scores)], {"worker_seconds/rollout": 0.5}, self.maker


class Run:
    """Training steps that add 1 to the first weight, with samples from workers."""

    def __init__(
        self,
        ray,
        ahead: int,
        plan: BatchPlan = PLAN,
        check_every: int = 0,
        trajectories: str = "device",
        super_batch: int = 1,
        buffer: BufferConfig | None = None,
    ) -> None:
        self.student, self.scheduler = trainable(), InstantScheduler(ray)
        early = ahead + super_batch - 1
        self.loader = Loader(Prompts(Request.of(CAPTIONS)), tiny_codec(), plan, LATENT_SHAPE, "", 0, ALONE, ahead=early)
        group, self.sender = WorkerGroup(self.scheduler, {}), WeightSender(ALONE)
        how = {"size": 3, "ahead": ahead, "check_every": check_every, "trajectories": trajectories}
        how["super_batch"] = super_batch
        rows = self.loader if buffer is None else FreshRows(buffer, self.loader)
        self.rollouts = RemoteRollouts(group, self.student, rows, ALONE, self.sender, **how)
        self.rollouts.check = self.check
        self.first = next(iter(self.student.weights.values())).data.view(-1)
        self.start = float(self.first[0])
        self.checks: list[tuple[str, int, int]] = []  # who made the samples that were checked, samples, version

    def step(self, step: int) -> int:
        """The version that made the samples of this step; it must be that of the weights that they show."""
        batch = self.loader.batch(step)
        samples = self.rollouts.samples(batch, step, Streams(0, step))
        assert samples.batch is batch
        (version,) = samples.versions.unique().tolist()
        shown = samples.rollout.end(range(len(batch))).unique().tolist()
        assert shown == [pytest.approx(self.start + version)]
        assert float(self.first[0]) == pytest.approx(self.start + step)
        self.first[0] += 1
        return version

    def check(self, samples, rng: Streams, maker: str) -> None:
        """The student has the weights that made the samples."""
        (version,) = samples.versions.unique().tolist()
        assert samples.rollout.end(range(len(samples.batch))).unique().tolist() == [float(self.first[0])]
        self.checks.append((maker, len(samples.batch), version))


@pytest.mark.slow
@pytest.mark.parametrize(("ahead", "trajectories"), [(0, "device"), (1, "cpu"), (3, "device")])
def test_samples_are_always_as_many_steps_old(ray, ahead, trajectories):
    run = Run(ray, ahead, trajectories=trajectories)
    assert [run.step(step) for step in range(6)] == [max(0, step - ahead) for step in range(6)]
    steps = [item.step for item in run.scheduler.items]
    assert steps == sorted([*range(6 + ahead)] * 2)  # two work items of three and one sample, each asked for once
    assert [len(item.prompts) for item in run.scheduler.items[:2]] == [3, 1]
    metrics = run.rollouts.metrics()  # of four samples in two work items, with scores of 4 + 8 bytes and no states
    assert metrics["worker_seconds/rollout"] == 1.0 and metrics["worker_samples_per_second"] == 4.0
    assert metrics["samples_gib"] * 2**30 == 4 * (4 * math.prod(LATENT_SHAPE) + 4 + 8)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ahead", "size", "expected"),
    [(0, 3, [0, 0, 0, 3, 3, 3, 6, 6]), (1, 2, [0, 0, 1, 1, 3, 3, 5, 5]), (2, 2, [0, 0, 0, 0, 2, 2, 4, 4])],
)
def test_a_super_batch_is_made_by_the_weights_of_one_step(ray, ahead, size, expected):
    """With `ahead` equal to its size, the next one is asked for as this one begins: a double buffer."""
    run, asked = Run(ray, ahead, super_batch=size), []
    for step in range(8):
        assert run.step(step) == expected[step]
        asked.append(max(item.step for item in run.scheduler.items))
    if ahead == size:
        assert asked == [3, 3, 5, 5, 7, 7, 9, 9]


@pytest.mark.slow
@pytest.mark.parametrize("stopped", [1, 2, 3, 4])
def test_a_resumed_run_makes_the_super_batches_under_way_again(ray, stopped):
    one, other, resumed = (Run(ray, 2, super_batch=2, check_every=1) for _ in range(3))
    expected = [one.step(step) for step in range(8)]
    for step in range(stopped):
        other.step(step)
    resumed.first[0] += stopped
    for name, tensor in (filled := resumed.rollouts.state_dict()).items():
        tensor.copy_(other.rollouts.state_dict()[name])
    resumed.rollouts.load_state_dict(filled)
    assert [resumed.step(step) for step in range(stopped, 8)] == expected[stopped:]


@pytest.mark.slow
def test_failures_decide_the_prompts_of_a_super_batch_before_it_is_asked_for(ray):
    run = Run(ray, 2, dataclasses.replace(PLAN, by_failures=True), super_batch=2)
    for step in range(8):
        run.step(step)
        run.loader.note_failures([step % 3] * 20)
    asked = [(item.step, item.version) for item in run.scheduler.items]
    assert len({*asked}) * 2 == len(asked)  # two work items of each step, none asked for once more


@pytest.mark.slow
@pytest.mark.parametrize(("ahead", "super_batch"), [(1, 1), (2, 2)])
def test_workers_make_no_samples_in_place_of_stored_ones(ray, ahead, super_batch):
    """A slot of two is stored from step 1 on; what is made ahead is what the buffer asks for."""
    config = BufferConfig(share=0.5, order="newest")
    run = Run(ray, ahead, super_batch=super_batch, buffer=config)
    buffer = ExperienceBuffer(run.rollouts, config, run.loader)
    for step in range(6):
        samples = buffer.samples(run.loader.batch(step), step, Streams(0, step))
        made = [max(0, at // super_batch * super_batch - ahead) for at in (step, max(0, step - 1))]
        slots = [made[1], made[0]] if config.slots(step, 2, 1) == {0} else [made[0], made[1]]
        assert samples.versions.tolist() == [slots[0]] * 2 + [slots[1]] * 2
        shown = samples.rollout.end(range(4))[:, 0, 0, 0, 0].tolist()
        assert shown == pytest.approx([run.start + version for version in samples.versions.tolist()])
        run.first[0] += 1
    counts = {}
    for item in run.scheduler.items:
        counts[item.step] = counts.get(item.step, 0) + len(item.prompts)
    assert counts.pop(0) == 4 and set(counts.values()) == {2}


@pytest.mark.slow
def test_samples_of_the_next_step_come_to_this_machine_while_this_one_trains(ray, monkeypatch):
    """Nobody asks for step 1 yet: its two work items are fetched as those of step 0 are."""
    fetched, made = queue.Queue(), {}
    monkeypatch.setattr(ray, "wait", lambda references, **how: fetched.put((references[0], how["fetch_local"])))
    run = Run(ray, 1)
    run.scheduler.make = Now(
        ray, lambda item: made.setdefault(item.step, []).append(x := run.scheduler._make(item)) or x
    )
    run.step(0)
    seen, asked = {}, set()
    while len(asked) < 4 or not asked <= seen.keys():  # another test's thread may fetch what is its own
        seen |= [fetched.get(timeout=60)]
        asked = {references[0] for parts in made.values() for references, *_ in parts}
    assert [len(parts) for parts in made.values()] == [2, 2] and all(seen[one] for one in asked)


@pytest.mark.slow
@pytest.mark.parametrize("fails", [False, True])
def test_training_goes_on_while_its_weights_are_packed(ray, monkeypatch, fails):
    """They are sent as they were when the step began; what fails then is raised before their samples are waited for."""
    run, trained, send = Run(ray, 1), threading.Event(), WeightSender.send

    def late(sender, version, *how):
        assert version == 0 or trained.wait(60)
        if version and fails:
            raise OSError("no room")
        return send(sender, version, *how)

    monkeypatch.setattr(WeightSender, "send", late)
    run.step(0)
    monkeypatch.setattr(run.scheduler, "make", Now(ray, lambda item: ([ray.put(0)], {}, "")))  # of step 2
    assert run.step(1) == 0
    assert run.scheduler.weights.keys() == {0}
    trained.set()
    if fails:
        with pytest.raises(OSError, match="no room"):
            run.step(2)
    else:
        run.rollouts._packing.shutdown()
        assert run.scheduler.weights[1][:4].view(np.float32)[0] == pytest.approx(run.start + 1)


@pytest.mark.slow
@pytest.mark.parametrize("stopped", [1, 2, 4])
def test_a_resumed_run_makes_the_samples_under_way_again(ray, stopped):
    """With the weights that they were asked for with, which the checkpoint holds."""
    one, other = Run(ray, 2), Run(ray, 2)
    expected = [one.step(step) for step in range(6)]
    for step in range(stopped):
        other.step(step)
    state = {name: tensor.clone() for name, tensor in other.rollouts.state_dict().items()}
    resumed = Run(ray, 2)
    resumed.first[0] += stopped
    filled = resumed.rollouts.state_dict()
    assert filled.keys() == state.keys()
    for name, tensor in filled.items():
        tensor.copy_(state[name])
    resumed.rollouts.load_state_dict(filled)
    assert [resumed.step(step) for step in range(stopped, 6)] == expected[stopped:]


@pytest.mark.slow
def test_ahead_can_be_lowered_and_a_checkpoint_remembers_it(ray):
    """What was asked for keeps its weights; later samples are one step younger."""
    run = Run(ray, 2)
    versions = [run.step(step) for step in range(3)]
    run.rollouts.lower_ahead()
    state = {name: tensor.clone() for name, tensor in run.rollouts.state_dict().items()}
    versions += [run.step(step) for step in range(3, 7)]
    assert versions == [0, 0, 0, 1, 2, 4, 5]
    resumed = Run(ray, 2)
    resumed.first[0] += 3
    for name, tensor in (filled := resumed.rollouts.state_dict()).items():
        tensor.copy_(state[name])
    resumed.rollouts.load_state_dict(filled)
    assert [resumed.step(step) for step in range(3, 7)] == versions[3:]


@pytest.mark.slow
def test_further_samples_of_a_step_have_the_present_weights(ray):
    run = Run(ray, 1)
    run.step(0)
    run.step(1)
    further = run.loader.batch_of([0, 0], [8, 9])
    run.loader.batch(2)
    samples = run.rollouts.samples(run.loader.batch(2), 2, Streams(0, 2))
    assert samples.versions.tolist() == [1] * 4
    assert run.rollouts.samples(further, 2, Streams(0, 2)).versions.tolist() == [2, 2]


@pytest.mark.slow
@pytest.mark.parametrize(("check_every", "checked"), [(0, [0]), (1, range(7)), (3, [0, 3, 6])])
@pytest.mark.parametrize("ahead", [0, 2])
def test_a_worker_is_checked_with_its_first_samples_and_every_few_steps(ray, ahead, check_every, checked):
    """One work item of three samples, with the weights that made it."""
    run = Run(ray, ahead, check_every=check_every)
    versions = [run.step(step) for step in range(7)]
    assert run.checks == [("worker 1", 3, versions[step]) for step in checked]


@pytest.mark.slow
def test_a_worker_that_was_started_again_is_checked(ray):
    run = Run(ray, 1)
    for step in range(4):
        run.scheduler.maker = "worker 1" if step < 2 else "worker 2"
        run.step(step)
    assert [maker for maker, *_ in run.checks] == ["worker 1", "worker 2"]  # step 2 was ordered in step 1


@pytest.mark.slow
def test_prompts_drawn_by_failures_are_known_ahead(ray):
    """The batch of a step is what the workers were asked for two steps before, whatever failed meanwhile."""
    run = Run(ray, 2, dataclasses.replace(PLAN, by_failures=True))
    for step in range(8):
        run.step(step)
        run.loader.note_failures([step % 3] * 20)
    asked = {}
    for item in run.scheduler.items:
        asked[item.step] = asked.get(item.step, ()) + item.prompt_ids
    for step in range(8):
        now = Run(ray, 2, dataclasses.replace(PLAN, by_failures=True)).loader
        for before in range(step):
            now.note_failures([before % 3] * 20)
        assert now.batch(step).prompt_ids == asked[step]


def test_failures_count_as_many_steps_later():
    """A loader that looks two steps ahead draws by the failures up to two steps before."""
    plan = dataclasses.replace(PLAN, by_failures=True)
    ahead, late, now = (
        Loader(Prompts(Request.of(CAPTIONS)), tiny_codec(), plan, LATENT_SHAPE, "", 0, ALONE, ahead=a)
        for a in (2, 0, 0)
    )
    differ = 0
    for step in range(20):
        assert ahead.rows(step) == late.rows(step)
        differ += ahead.rows(step) != now.rows(step)
        for one, failed in ((ahead, step), (now, step), (late, step - 2)):
            if failed >= 0:
                one.note_failures([failed % 3])
    assert differ and ahead.state_dict()["failures_2_ago"].equal(late.state_dict()["failures"])
