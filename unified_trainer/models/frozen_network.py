"""A frozen network that takes memory of the device only while it is used."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from unified_trainer.parallel.device import can_pin

BUFFER = 2**30  # bytes of CPU memory that are copied at a time; torch rounds pinned memory up to a power of two
ALIGNED = 256  # bytes: where a weight begins in a buffer, as kernels want it
LAYOUTS = {nn.Conv2d: torch.channels_last, nn.Conv3d: torch.channels_last_3d}  # the layout of each kind of convolution


def channels_last(network: nn.Module) -> nn.Module:
    """Hold the weights of all convolutions of images and videos with channels last; their outputs are held so too."""
    for module in network.modules():
        for kind, layout in LAYOUTS.items():
            if isinstance(module, kind):
                module.weight.data = module.weight.data.contiguous(memory_format=layout)
    return network


class FrozenNetwork:
    """A frozen network that is read from its folder when it is first used, or by `load`.

    With `offload` its weights stay in CPU memory and are copied to the device for each use; from pinned memory, neither
    the program nor earlier work waits for the copy. A phase that uses a network often is itself a use, so that uses
    within it copy nothing. The weights in CPU memory never change, so that at the end nothing is copied back. A copy is
    a new tensor: a graph that was recorded during the use keeps it until the backward pass.
    """

    def __init__(
        self, read: Callable[[], nn.Module], device: torch.device, *, offload: bool, pinned: bool = True
    ) -> None:
        """`read` returns the network with its weights.

        Torch keeps pinned memory for later use: a network that is freed for good needs none.
        """
        self._read, self._device, self._pinned = read, device, pinned and can_pin(device)
        self._offload = offload and device.type != "cpu"
        self._network: nn.Module | None = None
        self._stored: _Stored | None = None
        self._uses = 0  # contexts that are open

    def load(self) -> nn.Module:
        """Return the network, which is read unless it is in memory."""
        if self._network is None:
            network = self._read().eval().requires_grad_(False)
            if self._offload:
                self._stored = _Stored(network, self._device, pinned=self._pinned)
            self._network = network if self._offload else network.to(self._device)
        return self._network

    @contextmanager
    def in_use(self) -> Iterator[Any]:
        """Give the network, with its weights on the device; a use within a use copies nothing."""
        network, stored = self.load(), self._stored
        if stored is not None and not self._uses:
            stored.put(stored.on_device())
        self._uses += 1
        try:
            yield network
        finally:
            self._uses -= 1
            if stored is not None and not self._uses:
                stored.put(stored.home)

    def free(self) -> None:
        """Remove the network from memory; the next use reads it again."""
        self._network = self._stored = None


class _Stored:
    """All parameters and buffers of a network in CPU memory, packed into few buffers."""

    def __init__(self, network: nn.Module, device: torch.device, *, pinned: bool) -> None:
        self._device = device
        self._slots: list[tuple[nn.Module, str, int]] = []  # module, name in it, number of the tensor
        numbers: dict[int, int] = {}  # tied weights have one number
        tensors: list[Tensor] = []
        for module in network.modules():
            held = {**dict(module.named_parameters(recurse=False)), **dict(module.named_buffers(recurse=False))}
            for name, tensor in held.items():
                if id(tensor) not in numbers:
                    numbers[id(tensor)] = len(tensors)
                    tensors.append(tensor)
                self._slots.append((module, name, numbers[id(tensor)]))
        self._places, sizes = _packed([tensor.nbytes for tensor in tensors])
        strides = [torch.empty_like(one, device="meta").stride() for one in tensors]  # dense, in the same order
        kinds = zip(tensors, strides, strict=True)
        self._types = [(one.dtype, one.shape, stride, isinstance(one, nn.Parameter)) for one, stride in kinds]
        self._buffers = [torch.empty(size, dtype=torch.uint8, pin_memory=pinned) for size in sizes]
        self.home = self._tensors(self._buffers)
        with torch.no_grad():
            for place, tensor in zip(self.home, tensors, strict=True):
                place.copy_(tensor)
        self.put(self.home)

    def on_device(self) -> list[Tensor]:
        """Return copies of the tensors on the device."""
        return self._tensors([buffer.to(self._device, non_blocking=True) for buffer in self._buffers])

    def put(self, tensors: list[Tensor]) -> None:
        """Let the network hold these tensors."""
        for module, name, number in self._slots:
            setattr(module, name, tensors[number])

    def _tensors(self, buffers: list[Tensor]) -> list[Tensor]:
        tensors: list[Tensor] = []
        for (number, start, size), (dtype, shape, stride, trained) in zip(self._places, self._types, strict=True):
            tensor = buffers[number][start : start + size].view(dtype).as_strided(shape, stride)
            tensors.append(nn.Parameter(tensor, requires_grad=False) if trained else tensor)
        return tensors


def _packed(sizes: list[int]) -> tuple[list[tuple[int, int, int]], list[int]]:
    """Return buffer, start and size of each tensor of these sizes, in order, and the sizes of the buffers."""
    places, buffers = list[tuple[int, int, int]](), [0]
    for size in sizes:
        if buffers[-1] and buffers[-1] + size > BUFFER:
            buffers.append(0)
        places.append((len(buffers) - 1, buffers[-1], size))
        buffers[-1] += -(-size // ALIGNED) * ALIGNED
    return places, buffers
