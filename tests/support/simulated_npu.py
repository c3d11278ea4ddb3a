"""A simulated NPU for tests without one: tensors of a device of its own that compute on the CPU.

It refuses operations that mix its tensors with the CPU's, counts what would let the program wait for the device, and
counts operations in float64, which the kernels of an NPU refuse. A process that has called `install` has the device for
its whole life: use it in a process of its own. What only an NPU shows, such as times and kernels that it lacks, it does
not show.
"""

import sys
import types
import weakref
from collections import Counter
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from typing import Any

import torch
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from unified_trainer.parallel.meter import Meter

NAME = "npu"
READS = ("nonzero", "unique_consecutive", "_unique2", "unique_dim", "masked_select", "equal", "is_nonzero", "bincount")
INDEXING = ("index", "_unsafe_index", "index_put", "index_put_", "_index_put_impl_")
COPIES = ("_to_copy", "copy_", "set_", "_copy_from")

waits: Counter[tuple[str, str, str]] = Counter()  # by phase, kind and line of the package
float64: Counter[tuple[str, str]] = Counter()  # by operation and line of the package
_kept: list[object] = []  # what must live as long as the device


class Memory:
    """Bytes of the tensors of the device, while `counting`: those that are there now, and the most at a time."""

    def __init__(self) -> None:
        self.counting, self.now, self.peak = False, 0, 0
        self._users: Counter[int] = Counter()  # tensors of each storage
        self._sizes: dict[int, int] = {}  # of each storage with users

    def add(self, tensor: "DeviceTensor") -> None:
        if not self.counting:
            return
        storage = tensor.raw.untyped_storage()
        place = storage._cdata
        self._users[place] += 1
        if self._users[place] == 1:
            self._set(place, storage.nbytes())
        weakref.finalize(tensor, self._remove, place)

    def resize(self, storage: torch.UntypedStorage) -> None:
        if self._users[storage._cdata]:
            self._set(storage._cdata, storage.nbytes())

    def _set(self, place: int, size: int) -> None:
        self.now += size - self._sizes.get(place, 0)
        self._sizes[place] = size
        self.peak = max(self.peak, self.now)

    def _remove(self, place: int) -> None:
        self._users[place] -= 1
        if not self._users[place]:
            self.now -= self._sizes.pop(place)


memory = Memory()


class DeviceStorage:
    """What the package asks of the storage of a tensor of the device."""

    def __init__(self, raw: torch.UntypedStorage) -> None:
        self._raw = raw
        self.nbytes, self.data_ptr = raw.nbytes, raw.data_ptr

    def resize_(self, size: int) -> None:
        self._raw.resize_(size)
        memory.resize(self._raw)


class DeviceTensor(torch.Tensor):
    """A tensor of the simulated device; `raw` is its content."""

    @staticmethod
    def __new__(cls, raw: torch.Tensor) -> "DeviceTensor":
        return torch.Tensor._make_wrapper_subclass(
            cls,
            raw.shape,
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            device=torch.device(NAME, 0),
            requires_grad=False,
        )

    def __init__(self, raw: torch.Tensor) -> None:
        self.raw = raw
        memory.add(self)

    @classmethod
    def __torch_dispatch__(cls, op, types, args=(), kwargs=None):
        return _run(op, args, kwargs or {})

    def new_tensor(self, data: Any, *, dtype=None, device=None, requires_grad: bool = False) -> torch.Tensor:
        _wait("copy of a number to the device")
        return DeviceTensor(torch.tensor(data, dtype=dtype or self.dtype))

    def record_stream(self, _stream: object) -> None: ...

    def untyped_storage(self) -> DeviceStorage:
        return DeviceStorage(self.raw.untyped_storage())

    def tolist(self) -> Any:
        _wait("tolist")
        return self.raw.tolist()

    def __getitem__(self, index: Any) -> torch.Tensor:
        parts = index if isinstance(index, tuple) else (index,)
        if any(isinstance(part, list) for part in parts):
            _wait("index by a list")
            moved = tuple(DeviceTensor(torch.as_tensor(part)) if isinstance(part, list) else part for part in parts)
            index = moved if isinstance(index, tuple) else moved[0]
        return super().__getitem__(index)

    def __repr__(self) -> str:
        return f"DeviceTensor({self.raw})"


def install() -> None:
    """Register the device, under the name of an NPU, and a module torch_npu without content."""
    _setup_privateuseone_for_python_backend(NAME, backend_module=_Device())
    library = torch.library.Library("_", "IMPL")
    library.fallback(lambda op, *args, **kwargs: _run(op, args, kwargs), "PrivateUse1")
    library.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    _kept.append(library)
    for name in ("tensor", "as_tensor"):
        setattr(torch, name, _on_device(getattr(torch, name)))
    torch.empty = _pageable(torch.empty)
    module = types.ModuleType("torch_npu")
    module.__spec__ = ModuleSpec("torch_npu", None)
    module.__version__ = torch.__version__
    sys.modules["torch_npu"] = module


def _on_device(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def made(data: Any, *args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
        if not _is_device(device):
            return make(data, *args, device=device, **kwargs)
        if isinstance(data, DeviceTensor):
            return data.to(kwargs.get("dtype", data.dtype))
        return make(data, *args, **kwargs).to(device)

    return made


def _pageable(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The device cannot pin memory; a copy from it is then no copy that nothing waits for, but it is counted as one."""
    return lambda *args, pin_memory=False, **kwargs: make(*args, **kwargs)


def _is_device(device: Any) -> bool:
    return device is not None and torch.device(device).type == NAME


def _line() -> str:
    """Name the innermost line of the package."""
    frame = sys._getframe()
    while frame is not None:
        _, package, module = frame.f_code.co_filename.rpartition("/unified_trainer/")
        if package:
            return f"{module}:{frame.f_lineno}"
        frame = frame.f_back
    return "not of the package"


def _wait(kind: str) -> None:
    meter = Meter.current()
    waits[meter._open[-1][0] if meter and meter._open else "no phase", kind, _line()] += 1


def _mapped(change: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Arguments or results of an operation with their tensors changed; torch's own tree_map takes half of a run."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, (list, tuple)):
        return type(value)([_mapped(change, one) for one in value])
    return {key: _mapped(change, one) for key, one in value.items()} if isinstance(value, dict) else value


def _tensors(value: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    _mapped(lambda x: found.append(x) or x, value)
    return found


def _raw(x: torch.Tensor) -> torch.Tensor:
    return x.raw if isinstance(x, DeviceTensor) else x


def _wrapped(x: torch.Tensor) -> torch.Tensor:
    return x if isinstance(x, DeviceTensor) else DeviceTensor(x)


def _run(op: Any, args: tuple, kwargs: dict) -> Any:
    tensors = _tensors((args, kwargs))
    own = [x for x in tensors if isinstance(x, DeviceTensor)]
    name = op._schema.name.split("::")[1]
    if own and name not in COPIES + INDEXING and any(x.ndim for x in tensors if not isinstance(x, DeviceTensor)):
        raise RuntimeError(f"Expected all tensors to be on the same device: {op}")
    to = kwargs.get("device")
    _count_waits(name, str(op), args, kwargs, bool(own))
    plain = {key: value for key, value in kwargs.items() if key not in ("device", "pin_memory")}
    if to is not None and not _is_device(to):
        plain["device"] = to
    elif to is not None:
        plain["device"] = torch.device("cpu")
    found = op(*_mapped(_raw, args), **_mapped(_raw, plain))
    if name == "is_pinned":
        return False
    if name == "copy_":
        return args[0]
    here = _is_device(to) if to is not None else bool(own)
    if not here:
        return found
    if any(x.dtype == torch.float64 for x in (*own, *_tensors(found))):
        float64[str(op), _line()] += 1
    if name.endswith("_") and not name.endswith("__") and args and isinstance(args[0], DeviceTensor):
        return args[0]
    if op._schema.is_mutable and "out" in kwargs:
        return kwargs["out"]
    return _mapped(_wrapped, found)


def _count_waits(name: str, full_name: str, args: tuple, kwargs: dict, own: bool) -> None:
    if own and (name == "_local_scalar_dense" or name in READS):
        _wait(f"read by {name}")
    elif own and name == "repeat_interleave" and "Tensor" in full_name:
        _wait("read by repeat_interleave")
    elif own and name in INDEXING:
        index = [x for x in args[1] if x is not None]
        if any(x.dtype in (torch.bool, torch.uint8) for x in index):
            _wait("index by a mask")
        if any(x.ndim and not isinstance(x, DeviceTensor) for x in index):
            _wait("index of the CPU")
    elif name == "_to_copy" and kwargs.get("device") is not None:
        source, to = isinstance(args[0], DeviceTensor), _is_device(kwargs["device"])
        if source and not to:
            _wait("copy to the CPU")
        elif to and not source and not kwargs.get("non_blocking"):
            _wait("copy to the device")
    elif name == "copy_":
        to, source = (isinstance(x, DeviceTensor) for x in args[:2])
        non_blocking = kwargs.get("non_blocking") or (len(args) > 2 and args[2])
        if source and not to and not non_blocking:
            _wait("copy to the CPU")
        elif to and not source and not non_blocking:
            _wait("copy to the device")


class _Nothing:
    """A stream, event or context that does nothing."""

    device_index = 0

    def __init__(self, *_args: Any, **_kwargs: Any) -> None: ...

    def __enter__(self) -> "_Nothing":
        return self

    def __exit__(self, *_error: object) -> None: ...

    def synchronize(self) -> None: ...

    def wait_stream(self, _stream: object) -> None: ...

    def wait_event(self, _event: object) -> None: ...

    def record(self, _stream: object = None) -> None: ...

    def record_event(self, _event: object = None) -> "_Nothing":
        return self

    def query(self) -> bool:
        return True

    def elapsed_time(self, _event: object) -> float:
        return 1.0


class _Device:
    """The functions of a device's module that torch and the package call."""

    device = Stream = Event = _Nothing

    def is_available(self) -> bool:
        return True

    is_initialized = is_available

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def set_device(self, _device: object) -> None: ...

    def synchronize(self, *_args: object) -> None: ...

    def get_device_name(self, _device: object = None) -> str:
        return "simulated"

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def memory_allocated(self, _device: object = None) -> int:
        return 2**30

    max_memory_allocated = memory_reserved = memory_allocated

    def mem_get_info(self, _device: object = None) -> tuple[int, int]:
        return 8 * 2**30, 16 * 2**30

    def manual_seed(self, _seed: int) -> None: ...

    manual_seed_all = manual_seed

    def _is_in_bad_fork(self) -> bool:
        return False

    def get_rng_state(self, _device: object = None) -> torch.Tensor:
        return torch.zeros(8, dtype=torch.uint8)

    def set_rng_state(self, _state: torch.Tensor, _device: object = None) -> None: ...

    def current_stream(self, _device: object = None) -> _Nothing:
        return _Nothing()

    def stream(self, _stream: object) -> _Nothing:
        return _Nothing()
