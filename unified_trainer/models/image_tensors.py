"""Tensors of condition images in memory: the least recently used ones go first."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.requests import Image
from unified_trainer.basics.types import Condition, Latents, PerFrame, PerSample
from unified_trainer.models.base import Shape
from unified_trainer.models.encoders import EncoderConfig


def of_tower(key: str) -> str:
    """Return the name, in a vision tower of transformers 5, of a weight that files of earlier versions may hold."""
    return key.removeprefix("vision_model.")


def image_of(cond: Condition) -> Tensor:
    """Return the latents of a condition's image; UserError where it has none."""
    if "image" not in cond.tensors:
        raise UserError(
            "this network needs a condition image for each sample: give prompts as a table (.jsonl, .csv or .parquet) "
            "with the columns prompt and image"
        )
    return cond["image"]


def to_first_frames(
    v: Latents, x_t: Latents, sigma: PerSample | PerFrame, known: Float[Tensor, "b c f h w"]
) -> Latents:
    """Return velocities `v` with those of known first latent frames: (x_t - known) / sigma.

    x_t - sigma velocity is then the image at every step. Flow-matching losses are 0 there if the data begin with it.
    """
    frames = known.shape[2]
    levels = sigma.to(x_t).view(len(sigma), 1, -1, 1, 1)[:, :, :frames]
    to_known = (x_t[:, :, :frames] - known) / levels
    return torch.cat([to_known, v[:, :, frames:]], 2)


class ImageTensors:
    """A cache of what an encoder made of each image, on the CPU, within `encoders.cache_memory_gib`."""

    def __init__(self, config: EncoderConfig) -> None:
        self._room = int(config.cache_memory_gib * 2**30)
        self._held: dict[Hashable, Mapping[str, Tensor]] = {}  # the least recently used first
        self._used = 0  # bytes

    def condition(
        self,
        images: Sequence[tuple[Image, ...]],
        latent_shape: Shape,
        encode: Callable[[tuple[Image, ...], Shape], Mapping[str, Tensor]],
    ) -> Condition:
        """Return the condition, on the CPU, of samples with images, as `encode` makes a row of them.

        UserError where some samples have more images than others.
        """
        if len({len(images_of_request) for images_of_request in images}) > 1:
            raise UserError("some samples of a batch have a condition image and others have none: give each row one")
        rows = [self.get((given, latent_shape), partial(encode, given, latent_shape)) for given in images]
        return Condition({name: torch.stack([row[name] for row in rows]) for name in rows[0]})

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
