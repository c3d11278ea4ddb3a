"""The program of a test of tests/run/workers/test_weights.py: weights straight from memory to memory.

NIXL polls in the process that made its agent until that ends: in the test process it would take a core from all later
tests.
"""

import os
import signal
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "support"))

from helpers import ALONE
from reader import Reader
from test_replica import ITEM, RUN, alone_and_sent, assert_close

from unified_trainer.run.build_worker import build_sampling
from unified_trainer.run.settings.workers import RayConfig
from unified_trainer.run.workers import cluster
from unified_trainer.run.workers.replica import Replica
from unified_trainer.run.workers.weights import WeightSender


def weights() -> dict[str, torch.Tensor]:
    return {
        "a": torch.arange(6.0).view(2, 3).t(),  # not contiguous
        "b": torch.tensor([1e-3, float("inf")], dtype=torch.bfloat16),
        "c": torch.tensor(7),
    }


def main() -> None:
    cluster.connect(RayConfig(), cores=2)
    import ray

    trained, sender = weights(), WeightSender(ALONE, "nixl")
    reader = ray.remote(Reader).options(num_cpus=0, max_restarts=-1, max_task_retries=-1).remote(trained)
    references, expected = [], []
    for version, oldest in ((0, 0), (1, 0), (2, 1)):  # the third one is written over the first one
        references.append(sender.send(version, trained, oldest))
        expected.append({name: weight.clone() for name, weight in trained.items()})
        trained["a"] += 1  # in place, as an optimizer does
        if version == 1:
            assert same(ray.get(reader.take.remote(references[0])), expected[0])
    memory = [buffer.data_ptr() for shared in sender._shared.values() for buffer, _ in shared]
    assert len(set(memory)) == 2 and sender.size == 64
    assert same(ray.get(reader.take.remote(references[2])), expected[2])
    os.kill(ray.get(reader.pid.remote()), signal.SIGKILL)
    assert same(ray.get(reader.take.remote(references[1])), expected[1])
    sender._shared[2][0][0][5] ^= 1
    try:
        ray.get(reader.take.remote(references[2]))
    except RuntimeError as error:
        assert "weights of version 2 were damaged" in str(error)
    else:
        raise AssertionError("damaged weights were taken")
    how = (build_sampling, RUN, str(Path.cwd()), 1, True, False)
    replica = ray.remote(Replica).options(num_cpus=2).remote(*how)
    expected, sent = alone_and_sent(*how, transport="nixl")
    _, made = ray.get(replica.make.remote(ITEM, sent))
    assert_close(made, expected)


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


if __name__ == "__main__":
    main()
