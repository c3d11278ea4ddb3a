"""Bytes of tensors while code runs: really, or on fake tensors that have shapes and no memory."""

import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

DEVICE = torch.ops.prim.device.default  # every second operation on fake tensors, which makes no tensor


@contextmanager
def quiet_norms() -> Iterator[None]:
    """Silence torch's note that a norm of bf16 activations with float32 weights has no fused kernel on a CPU."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Mismatch dtype between input and weight")
        yield


class LiveBytes(TorchDispatchMode):
    """A mode that counts the storages that operations inside it make, until they are freed; the rest is not counted.

    What a kernel needs while it runs, and what an allocator keeps, is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.peak = 0
        self._seen: dict[int, weakref.ref[Any]] = {}

    def ignore(self, *tensors: Tensor) -> None:
        """Leave out storages that were there before."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._seen[id(storage)] = weakref.ref(storage)

    def __torch_dispatch__(self, call: Any, _types: Any, arguments: Any = (), named: Any = None) -> Any:
        if call is DEVICE:
            return call(*arguments)
        for tensor in tree_leaves((arguments, named)):
            if isinstance(tensor, Tensor):
                self._known(tensor)
        result = call(*arguments, **(named or {}))
        is_view = any(value.alias_info is not None for value in call._schema.returns)
        note = self._known if is_view else self._add
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                note(tensor)
        return result

    def _known(self, tensor: Tensor) -> None:
        """A storage that an operation reads and none made inside the mode was there before."""
        storage = tensor.untyped_storage()
        if self._of(storage) is None:
            self._seen[id(storage)] = weakref.ref(storage)

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if self._of(storage) is not None:
            return
        size, key = storage.nbytes(), id(storage)

        def freed(_reference: Any) -> None:
            self.now -= size

        self._seen[key] = weakref.ref(storage, freed)
        self.now += size
        self.peak = max(self.peak, self.now)

    def _of(self, storage: Any) -> Any:
        """Return the storage if it was seen before; the number of a freed one may be that of a new one."""
        reference = self._seen.get(id(storage))
        return None if reference is None else reference()
