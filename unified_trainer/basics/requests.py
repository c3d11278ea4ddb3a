"""Requests: a text, condition images and actions, of which one sample is made."""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from PIL import Image as Picture
from torch import Tensor

from unified_trainer.basics.actions import NO_ACTIONS, Actions
from unified_trainer.basics.errors import UserError
from unified_trainer.basics.input_files import check_file
from unified_trainer.basics.pictures import open_picture, to_rgb

Pixels = np.ndarray  # uint8 [height, width, 3]


@dataclass(frozen=True, order=True)
class Image:
    """A condition image or clip: a file, or pixels in memory. Images of equal content are equal."""

    sha256: str  # of the file, or of shape and pixels
    file: Path | None = field(default=None, compare=False)
    pixels: Pixels | None = field(default=None, compare=False, repr=False)  # of a clip [frames, height, width, 3]
    # of the file of a clip: (file, frames, height, width) -> its pixels
    reader: Callable[[Path, int, int, int], Pixels] | None = field(default=None, compare=False, repr=False)

    @classmethod
    def read(cls, file: Path, place: str) -> "Image":
        """Return the image of a file; UserError, which begins with `place`, for one that holds no image."""
        check_file(file, place)
        with open_picture(file, f"{place} {file}") as opened:
            opened.verify()
            return cls(hashlib.sha256(file.read_bytes()).hexdigest(), file)

    @classmethod
    def of(cls, pixels: Pixels) -> "Image":
        """Return an image in memory."""
        digest = hashlib.sha256(f"{pixels.shape}".encode() + np.ascontiguousarray(pixels).tobytes())
        return cls(digest.hexdigest(), pixels=pixels)

    def picture(self, height: int, width: int) -> Picture.Image:
        """Return the image in RGB, scaled to cover height and width (Lanczos) and cropped around its center.

        UserError for a clip, and for a file that is gone or damaged, or that changed since it was first read.
        """
        if self.is_clip:
            raise UserError(f"{self.file or 'a condition'} is a clip, and this model takes an image: name an image")
        if self.file is None:
            assert self.pixels is not None  # an image has a file or pixels
            return cover(Picture.fromarray(self.pixels), height, width)
        self._check_unchanged(self.file)
        with open_picture(self.file, str(self.file)) as opened:
            return cover(to_rgb(opened), height, width)

    @property
    def is_clip(self) -> bool:
        """Whether it has frames."""
        return self.reader is not None or (self.pixels is not None and self.pixels.ndim == 4)

    def frames(self, count: int, height: int, width: int) -> list[Picture.Image]:
        """Return the first frames of a clip as `picture` returns an image, or an image for each of them.

        UserError for a file that `picture` would refuse, or with fewer frames.
        """
        if not self.is_clip:
            return [self.picture(height, width)] * count
        pixels = self.pixels
        if self.reader is not None:
            assert self.file is not None  # whose reader it is
            self._check_unchanged(self.file)
            pixels = self.reader(self.file, count, height, width)
        assert pixels is not None  # a clip has a reader or pixels
        return [cover(Picture.fromarray(frame), height, width) for frame in pixels[:count]]

    def first(self, height: int, width: int) -> Picture.Image:
        """Return what is shown of it: the image, or the first frame."""
        return self.frames(1, height, width)[0]

    def _check_unchanged(self, file: Path) -> None:
        check_file(file)
        if hashlib.sha256(file.read_bytes()).hexdigest() != self.sha256:
            raise UserError(f"{file} changed since the run read it first: restore it, or start again")

    def at(self, height: int, width: int) -> Float[Tensor, "3 h w"]:
        """Return `picture` as a tensor in [0, 1]."""
        return _to_tensor(self.picture(height, width))


def _to_tensor(picture: Picture.Image) -> Float[Tensor, "3 h w"]:
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1).float() / 255


def cover(
    picture: Picture.Image, height: int, width: int, pixel: float = 1.0, kernel: int = Picture.Resampling.LANCZOS
) -> Picture.Image:
    """Scale a picture, whose pixels are `pixel` times as wide as high, to cover a size; crop it around its center."""
    scale = max(width / (picture.width * pixel), height / picture.height)
    own_width, own_height = min(width / scale / pixel, picture.width), min(height / scale, picture.height)
    left, top = (picture.width - own_width) / 2, (picture.height - own_height) / 2
    return picture.resize((width, height), kernel, (left, top, left + own_width, top + own_height))


class Prompt(str):
    """The text of a request, with its condition images for the scorers that ask for them, and its actions.

    It is equal by its text.
    """

    __slots__ = ("actions", "images")
    images: tuple[Image, ...]
    actions: Actions

    def __new__(cls, text: str, images: tuple[Image, ...], actions: Actions = NO_ACTIONS) -> "Prompt":
        made = super().__new__(cls, text)
        made.images, made.actions = images, actions
        return made

    def __getnewargs__(self) -> tuple[str, tuple[Image, ...], Actions]:  # type: ignore[override]
        return str(self), self.images, self.actions


def with_image_files(prompts: Sequence[str], files: Sequence[str | Path]) -> list[str]:
    """Return prompts, each with the condition image of its file; as they are where there are no files.

    Raise UserError for another number of files than of prompts, and for one that holds no image.
    """
    if not files:
        return list(prompts)
    if len(files) != len(prompts):
        raise UserError(f"{len(prompts)} prompts but {len(files)} images, expected one image for each")
    images = [Image.read(Path(file), "image") for file in files]
    return [Prompt(prompt, (image,)) for prompt, image in zip(prompts, images, strict=True)]


def identity_of(prompt: str) -> tuple[str, tuple[Image, ...]]:
    """Return the text of a prompt and its condition images: equal for samples of equal requests alone."""
    return str(prompt), prompt.images if isinstance(prompt, Prompt) else ()


def first_images(prompts: Sequence[str], height: int, width: int) -> Float[Tensor, "b 3 h w"] | None:
    """Return the first condition image of each prompt, or frame of a clip, in [0, 1]; None if a prompt has none."""
    images = [prompt.images[0] for prompt in prompts if isinstance(prompt, Prompt) and prompt.images]
    if len(images) < len(prompts) or not images:
        return None
    at = {image: _to_tensor(image.first(height, width)) for image in {*images}}
    return torch.stack([at[image] for image in images])


@dataclass(frozen=True, order=True)
class Request:
    """A text, condition images and actions, of which one sample is made. Requests of equal content are equal."""

    text: str
    images: tuple[Image, ...] = ()
    negative: str = ""  # prompt of the unconditional branch of guidance; empty: that of the run
    actions: Actions = NO_ACTIONS

    @property
    def prompt(self) -> str:
        """The text for a reward: a `Prompt` where there are images or actions."""
        return Prompt(self.text, self.images, self.actions) if self.images or self.actions else self.text

    @property
    def identity(self) -> str:
        """The text, the negative prompt, and the digests of images and actions: equal for equal requests alone."""
        negative = f"\0\0{self.negative}" if self.negative else ""
        actions = f"\0\0\0{self.actions.sha256}" if self.actions else ""
        return self.text + "".join(f"\0{image.sha256}" for image in self.images) + negative + actions

    @property
    def files(self) -> dict[str, list[str]]:
        """The files of the images under the name `images`; empty where there are none."""
        names = [str(image.file) for image in self.images if image.file is not None]
        return {"images": names} if names else {}

    def pictures(self, height: int, width: int) -> tuple[Pixels, ...]:
        """Return the images, and first frames of clips, as a video of this size has them."""
        return tuple(np.array(image.first(height, width)) for image in self.images)

    @classmethod
    def of(cls, texts: Iterable[str]) -> tuple["Request", ...]:
        """Return a request for each text, with the images and actions of a `Prompt`."""
        given = [text if isinstance(text, Prompt) else Prompt(text, ()) for text in texts]
        return tuple(cls(str(text), text.images, actions=text.actions) for text in given)
