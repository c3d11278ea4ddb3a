"""Copies to and from pinned memory wait for each other, on a simulated device with streams."""

from collections.abc import Iterator

import pytest
import torch
from streams import DEVICE, SimulatedStream, SimulatedStreams

from unified_trainer.basics.types import Rollout
from unified_trainer.methods.rl import kept_rollout
from unified_trainer.methods.rl.kept_rollout import HostRollout, RolloutParts
from unified_trainer.parallel import copy_queue
from unified_trainer.parallel.copy_queue import CopyQueue


@pytest.fixture
def device(monkeypatch) -> Iterator[SimulatedStreams]:
    simulated = SimulatedStreams()
    monkeypatch.setattr(torch, "get_device_module", lambda _device: simulated)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda x, stream: simulated.record_stream(x, stream))
    monkeypatch.setattr(torch.UntypedStorage, "resize_", lambda storage, size: simulated.resize(storage, size))
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


def offload() -> None:
    """Offload a tensor during other work, and use it after that."""
    state = torch.ones(8, device=DEVICE) * 2
    with CopyQueue(DEVICE).offloaded([state, torch.ones(2)]):
        torch.ones(4, device=DEVICE) * 2
    state + 1


@pytest.mark.parametrize("work", [use, offload])
def test_every_access_of_what_is_in_pinned_memory_is_ordered(device, work):
    work()
    assert device.faults == []


@pytest.mark.parametrize(
    ("work", "stream", "lost", "fault"),
    [
        (use, "copies", "wait_stream", "copy_ does not wait"),
        (use, "sampling", "wait_stream", "add does not wait"),
        (use, "copies", "record_stream", "memory is freed"),
        (use, "sampling", "record_stream", "memory is freed"),
        (offload, "copies", "wait_stream", "copy_ does not wait"),
        (offload, "sampling", "wait_stream", "add does not wait"),
        (offload, "copies", "record_stream", "memory is freed"),
    ],
)
def test_each_wait_of_the_queue_is_needed(device, monkeypatch, work, stream, lost, fault):
    owner = SimulatedStream if lost == "wait_stream" else torch.Tensor
    whole = getattr(owner, lost)

    def without(one, other):
        waiting = one if lost == "wait_stream" else other
        if (waiting is device.current_stream()) != (stream == "sampling"):
            whole(one, other)

    monkeypatch.setattr(owner, lost, without)
    work()
    assert any(fault in found for found in device.faults)


def test_parts_of_offloaded_tensors_fill_blocks_of_pinned_memory(monkeypatch):
    """Three tensors of 5, 3 and 4 bytes in blocks of 4; a view takes all of its memory with it, which moves once."""
    monkeypatch.setattr(copy_queue, "BLOCK", 4)
    tensors = [torch.arange(size, dtype=torch.uint8) for size in (5, 3)] + [torch.ones(1, requires_grad=True)]
    before = [tensor.tolist() for tensor in tensors]
    sizes = []
    places = copy_queue._places
    monkeypatch.setattr(copy_queue, "_places", lambda *of: sizes.extend(len(p) for _, p in places(*of)) or places(*of))
    with CopyQueue(torch.device("cpu")).offloaded([tensors[0][1:3], *tensors]):
        assert [tensor.untyped_storage().nbytes() for tensor in tensors] == [0, 0, 0]
    assert [tensor.tolist() for tensor in tensors] == before
    assert sizes == [4, 1, 3, 4]


def test_a_program_that_reads_pinned_memory_does_not_wait(device):
    use().states[0].sum()
    assert any("sum does not wait" in found for found in device.faults)
