"""Copies of a rollout to and from pinned memory wait for each other, on a simulated device with streams."""

from collections.abc import Iterator

import pytest
import torch
from streams import DEVICE, SimulatedStream, SimulatedStreams

from unified_trainer.basics.types import Rollout
from unified_trainer.methods.rl import kept_rollout
from unified_trainer.methods.rl.kept_rollout import HostRollout, RolloutParts
from unified_trainer.parallel.copy_queue import CopyQueue


@pytest.fixture
def device(monkeypatch) -> Iterator[SimulatedStreams]:
    simulated = SimulatedStreams()
    monkeypatch.setattr(torch, "get_device_module", lambda _device: simulated)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda x, stream: simulated.record_stream(x, stream))
    queue = CopyQueue(DEVICE)
    monkeypatch.setattr(kept_rollout, "copy_queue", lambda _device: queue)
    with simulated:
        yield simulated


def use() -> HostRollout:
    """Keep two parts of a rollout, and read rows of both."""
    parts = RolloutParts("cpu", 4)
    for _ in range(2):
        states = torch.ones(2, 4, 2, 1, 2, 2, device=DEVICE) * 2
        parts.add(Rollout(states, torch.ones(2, 3, device=DEVICE), states[:, -1] * 2))
    del states
    kept = parts.joined()
    for number in range(4):
        (kept.state(number, [3, 0]) + kept.end([3, 0])).sum()
    return kept


def test_every_access_of_a_rollout_in_pinned_memory_is_ordered(device):
    use()
    assert device.faults == []


@pytest.mark.parametrize(
    ("stream", "lost", "fault"),
    [
        ("copies", "wait_stream", "copy_ does not wait"),
        ("sampling", "wait_stream", "add does not wait"),
        ("copies", "record_stream", "memory is freed"),
        ("sampling", "record_stream", "memory is freed"),
    ],
)
def test_each_wait_of_the_queue_is_needed(device, monkeypatch, stream, lost, fault):
    owner = SimulatedStream if lost == "wait_stream" else torch.Tensor
    whole = getattr(owner, lost)

    def without(one, other):
        waiting = one if lost == "wait_stream" else other
        if (waiting is device.current_stream()) != (stream == "sampling"):
            whole(one, other)

    monkeypatch.setattr(owner, lost, without)
    use()
    assert any(fault in found for found in device.faults)


def test_a_program_that_reads_pinned_memory_does_not_wait(device):
    use().states[0].sum()
    assert any("sum does not wait" in found for found in device.faults)
