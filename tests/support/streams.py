"""A simulated device with streams, which finds accesses of memory that no wait puts in order; it computes nothing.

Its tensors are on "meta". Each of its operations runs on the current stream, after those before it on this stream and
after all that the program did before; operations of CPU tensors alone are the program's own.
"""

import weakref
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

DEVICE = torch.device("meta")
Clock = defaultdict[int, int]  # by stream: how many of its operations are done


class SimulatedStream:
    """A stream of the device; number 0 is the program itself."""

    def __init__(self, number: int) -> None:
        self.number, self.clock = number, Clock(int)

    def wait_stream(self, other: "SimulatedStream") -> None:
        self.join(other)

    def join(self, other: "SimulatedStream") -> None:
        for number, time in other.clock.items():
            self.clock[number] = max(self.clock[number], time)


class Access(NamedTuple):
    stream: int
    time: int
    writes: bool


class SimulatedStreams(TorchDispatchMode):
    """What `torch.get_device_module` returns for the device; within it, operations are recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.faults: list[str] = []
        self._numbers = iter(range(1000))
        self.program, self._current = self.Stream(), self.Stream()
        self._accesses: dict[int, list[Access]] = {}  # by memory
        self._recorded: dict[int, set[int]] = {}  # by memory of the device: streams that its release waits for
        self._owners: dict[int, SimulatedStream] = {}  # by memory

    def Stream(self, _device: object = None) -> SimulatedStream:
        return SimulatedStream(next(self._numbers))

    def current_stream(self, _device: object = None) -> SimulatedStream:
        return self._current

    @contextmanager
    def stream(self, stream: SimulatedStream) -> Iterator[None]:
        before, self._current = self._current, stream
        yield
        self._current = before

    def record_stream(self, x: torch.Tensor, stream: SimulatedStream) -> None:
        self._recorded[_memory(x)].add(stream.number)

    def resize(self, storage: torch.UntypedStorage, size: int) -> None:
        """Free memory of the device, or allocate it again: the current stream may still use what was there before."""
        place, stream = storage._cdata, self._current
        if not size:
            self._free(place, self._owners[place], True)
        else:
            time = stream.clock[stream.number]
            self._accesses[place], self._recorded[place] = [Access(stream.number, time, True)], set()
            self._owners[place] = stream

    def __torch_dispatch__(self, op: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name = op._schema.name
        inputs = [x for x in tree_iter((args, kwargs)) if isinstance(x, torch.Tensor)]
        found = args[0] if name == "aten::copy_" else op(*args, **kwargs or {})
        outputs = [x for x in tree_iter(found) if isinstance(x, torch.Tensor)]
        stream = self._current if any(x.device == DEVICE for x in (*inputs, *outputs)) else self.program
        for x in outputs:
            if _memory(x) not in self._accesses:
                self._allocate(x, stream)
        if not op.is_view and name != "aten::empty":
            stream.join(self.program)
            stream.clock[stream.number] += 1
            written = {_memory(x) for x in outputs}
            for place in written | {_memory(x) for x in inputs}:
                self._access(place, stream, name, writes=place in written)
        return found

    def _allocate(self, x: torch.Tensor, stream: SimulatedStream) -> None:
        place = _memory(x)
        self._accesses[place], self._recorded[place], self._owners[place] = [], set(), stream
        weakref.finalize(x.untyped_storage(), self._free, place, stream, x.device == DEVICE)

    def _access(self, place: int, stream: SimulatedStream, name: str, *, writes: bool) -> None:
        for before in self._accesses.setdefault(place, []):
            if (writes or before.writes) and stream.clock[before.stream] < before.time:
                self.faults.append(f"{name} does not wait for an access by another stream")
        self._accesses[place].append(Access(stream.number, stream.clock[stream.number], writes))

    def _free(self, place: int, owner: SimulatedStream, on_device: bool) -> None:
        """Memory of the device is used again by the stream that allocated it; torch looks after pinned memory."""
        recorded = self._recorded.pop(place)
        for access in self._accesses.pop(place):
            late = owner.clock[access.stream] < access.time and access.stream not in recorded
            if on_device and access.stream != owner.number and late:
                self.faults.append("memory is freed while another stream may use it")


def _memory(x: torch.Tensor) -> int:
    return x.untyped_storage()._cdata
