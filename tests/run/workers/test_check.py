"""Workers that compute otherwise than training, or with other weights, are found by a replay of their samples."""

import dataclasses
import threading
from pathlib import Path

import pytest
import torch
from helpers import ALONE, SMALL, flags

from unified_trainer.methods.rl.on_policy_check import ReplayError
from unified_trainer.methods.rl.rollouts import Sampling
from unified_trainer.run.build import build
from unified_trainer.run.build_worker import build_sampling
from unified_trainer.run.settings.command_line import parse
from unified_trainer.run.workers.group import WorkerGroup, placed, worker_needs
from unified_trainer.run.workers.rollouts import RemoteRollouts
from unified_trainer.run.workers.weights import WeightSender
from unified_trainer.run.workers.workers import Worker

pytestmark = pytest.mark.slow

NO_GPU = {"rollouts.workers": 1, "rollouts.gpus": 0, "rollouts.reward-workers": 1}
FAST = [*SMALL["dance_grpo"], *flags({"device": "cpu", "student.learning-rate": 3e-3})]
PPO = [*SMALL["dance_ppo"], *FAST[-4:]]
CAUSAL = [*FAST, *flags({"sampler.chunks.chunk-frames": 1, "algorithm.clip-low": 0.01, "algorithm.clip-high": 0.01})]


def right(run, *how) -> Sampling:
    return build_sampling(run, *how)


def other_precision(run, *how) -> Sampling:
    sampling = build_sampling(run, *how)
    role = sampling.sample.args[2]
    role.config = dataclasses.replace(role.config, precision="bf16")
    return sampling


def other_attention(run, *how) -> Sampling:
    """One head of one layer attends to nothing."""
    sampling = build_sampling(run, *how)
    block = sampling.sample.args[2].network.blocks[0]

    def without_a_head(_module, _arguments, result):
        result[..., : result.shape[-1] // 4] = 0
        return result

    block.attn1.register_forward_hook(without_a_head)
    return sampling


def stale_weights(run, *how) -> Sampling:
    """What is sent does not reach the network."""
    sampling = build_sampling(run, *how)
    return dataclasses.replace(sampling, weights={key: weight.clone() for key, weight in sampling.weights.items()})


class Here:
    """A scheduler with one worker, in this process."""

    def __init__(self, ray, worker: Worker) -> None:
        self.ray, self.worker, self.weights, self.published = ray, worker, {}, threading.Condition()
        self.publish, self.make, self.deaths = self, self, self

    def remote(self, *words):
        """`publish`, `make` or `deaths`, by the number of arguments."""
        if not words:
            return self.ray.put(0)
        if len(words) > 1:
            with self.published:
                self.weights[words[0]] = self.ray.get(words[2][0])
                self.published.notify_all()
            return self.ray.put(None)
        with self.published:
            assert self.published.wait_for(lambda: words[0].version in self.weights, timeout=60)
        (maker, _), rollout = self.worker.make(words[0], self.weights[words[0].version])
        _, scores = self.worker.score(words[0], rollout)
        return self.ray.put(([self.ray.put(rollout), self.ray.put(scores)], {}, maker))


def trainer_with(ray, words: list[str], fault, ahead: int):
    """A run of a worker whose network is built by `fault`."""
    run = parse(words)
    trainer = build(run, ALONE).trainer
    worker = Worker(fault, run, str(Path.cwd()), torch.get_num_threads(), True, True)
    group, how = WorkerGroup(Here(ray, worker), {}), {"size": 2, "ahead": ahead, "check_every": 1}
    student = trainer.roles["student"]
    sender = WeightSender(ALONE, rounded=student.bf16_weights)
    trainer.method.sample_from(RemoteRollouts(group, student, trainer.loader, ALONE, sender, **how))
    return trainer


def test_a_worker_without_a_device_of_its_own_computes_on_the_cpu(ray):
    """On a machine with CUDA it would see the first device, which Ray has not counted."""
    run = dataclasses.replace(parse([*FAST, *flags(NO_GPU)]), device="cuda")
    sampler, scorer = worker_needs(run, "cuda")
    assert sampler == {"CPU": 1.0} and scorer == {"CPU": 1.0, "GPU": 1.0}
    assert placed(run, scorer).device == "cuda"
    worker = Worker(right, placed(run, sampler), str(Path.cwd()), torch.get_num_threads(), True, False)
    assert worker._sampling.device.type == "cpu"


@pytest.mark.parametrize("words", [FAST, PPO, CAUSAL], ids=["dance_grpo", "dance_ppo", "causal"])
@pytest.mark.parametrize("ahead", [0, 1])
def test_a_right_worker_passes(ray, words, ahead):
    """A message says so once, and the student keeps the weights that it had."""
    trainer, said = trainer_with(ray, words, right, ahead), []
    for step in range(3):
        trainer.step(step)
        said += [message for message in trainer.messages if message.startswith("on-policy check")]
    (message,) = said
    assert message.startswith("on-policy check: largest log-ratio of the rollout worker on node ")
    assert float(message.split()[-5].rstrip("%")) < 0.1


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize("fault", [other_precision, other_attention])
def test_a_worker_that_computes_otherwise_is_named(ray, fault):
    trainer = trainer_with(ray, FAST, fault, 1)
    with pytest.raises(ReplayError, match=r"rollout worker on node \S+, process \d+ differ .* of version 0: .* differ"):
        trainer.step(0)
    assert trainer.roles["student"].updates == 0


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_worker_with_stale_weights_is_named(ray, ahead):
    """The first samples that lag behind the weights sent are those of version 1."""
    trainer = trainer_with(ray, FAST, stale_weights, ahead)
    for step in range(1 + ahead):
        trainer.step(step)
    before = {key: weight.detach().clone() for key, weight in trainer.roles["student"].weights.items()}
    with pytest.raises(ReplayError, match="of version 1: the log-ratio is"):
        trainer.step(1 + ahead)
    assert all(torch.equal(weight, before[key]) for key, weight in trainer.roles["student"].weights.items())
