"""Tensors of condition images in memory: the least recently used ones go first."""

from collections.abc import Callable, Hashable, Mapping

from torch import Tensor

from unified_trainer.models.encoders import EncoderConfig


class ImageTensors:
    """A cache of what an encoder made of each image, on the CPU, within `encoders.cache_memory_gib`."""

    def __init__(self, config: EncoderConfig) -> None:
        self._room = int(config.cache_memory_gib * 2**30)
        self._held: dict[Hashable, Mapping[str, Tensor]] = {}  # the least recently used first
        self._used = 0  # bytes

    def get(self, key: Hashable, make: Callable[[], Mapping[str, Tensor]]) -> Mapping[str, Tensor]:
        """Return the tensors of a key, which are made unless they are held."""
        tensors = self._held.pop(key, None)
        if tensors is None:
            tensors = make()
            self._used += _bytes(tensors)
        self._held[key] = tensors
        while self._used > self._room:
            self._used -= _bytes(self._held.pop(next(iter(self._held))))
        return tensors


def _bytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())
