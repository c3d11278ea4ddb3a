"""Bytes of tensors while code runs: really, or on fake tensors that have shapes and no memory."""

import gc
import warnings
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

DEVICE = torch.ops.prim.device.default  # every second operation on fake tensors, which makes no tensor


@contextmanager
def quiet_norms() -> Iterator[None]:
    """Silence torch's note that a norm of bf16 activations with float32 weights has no fused kernel on a CPU."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Mismatch dtype between input and weight")
        yield


@contextmanager
def undisturbed() -> Iterator[None]:
    """Run on one thread and collect no garbage: operations of a rehearsal are too small to divide, and traces many."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        torch.set_num_threads(threads)


class Bytes(NamedTuple):
    """Bytes of tensors that have an axis of samples, for each sample, and of all others."""

    fixed: int
    each: int

    def of(self, samples: int) -> int:
        """Return the bytes with so many samples."""
        return self.fixed + samples * self.each


class LiveBytes(TorchDispatchMode):
    """A mode that counts the storages that operations inside it make, until they are freed, and the FLOPs of products.

    Code that runs on `samples` of them, a number without a common factor with any other size, shows the bytes for every
    number: those of a storage are a multiple of it if it has an axis of samples. What a kernel needs while it runs, and
    what an allocator keeps, is not seen.
    """

    def __init__(self, samples: int = 1) -> None:
        super().__init__()
        self._samples, self._seen = samples, dict[int, weakref.ref[Any]]()
        self._fixed = self._each = 0
        self.flops = 0
        self.heights = {self.now}  # after each storage that was made

    @property
    def now(self) -> Bytes:
        """The bytes that are there now."""
        return Bytes(self._fixed, self._each)

    def peak(self, samples: int = 1) -> int:
        """Return the most that was there at a time, had there been so many samples."""
        return peak_of(self.heights, samples)

    def __torch_dispatch__(self, call: Any, _types: Any, arguments: Any = (), named: Any = None) -> Any:
        if call is DEVICE:
            return call(*arguments)
        for tensor in tree_leaves((arguments, named)):
            if isinstance(tensor, Tensor):  # what an operation reads and none made inside the mode was there before
                self._note(tensor, made=False)
        result = call(*arguments, **(named or {}))
        if formula := flop_registry.get(call.overloadpacket):
            self.flops += formula(*arguments, **(named or {}), out_val=result)
        is_view = any(value.alias_info is not None for value in call._schema.returns)
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._note(tensor, made=not is_view)
        return result

    def _note(self, tensor: Tensor, *, made: bool) -> None:
        """Remember a storage, and count it until it is freed if it was `made` inside."""
        storage = tensor.untyped_storage()
        known = self._seen.get(id(storage))
        if known is not None and known() is not None:  # the number of a freed storage may be that of a new one
            return
        size = storage.nbytes() if made else 0
        each, fixed = (size // self._samples, 0) if size % self._samples == 0 else (0, size)

        def freed(_reference: Any) -> None:
            self._fixed -= fixed
            self._each -= each

        self._seen[id(storage)] = weakref.ref(storage, freed)
        self._fixed += fixed
        self._each += each
        self.heights.add(self.now)


def peak_of(heights: Iterable[Bytes], samples: int) -> int:
    """Return the largest of these bytes with so many samples."""
    return max(one.of(samples) for one in heights)
