"""Condition images as JSON: a PNG file in base64 for each."""

import base64
import binascii
import io
from collections.abc import Sequence

import numpy as np
from PIL import Image as Picture

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.pictures import open_picture, to_rgb
from unified_trainer.basics.requests import Image, Prompt

MOST_PIXELS = 2**24  # of one image


def images_to_json(images: Sequence[Image], height: int, width: int) -> list[str]:
    """Return images as JSON, as a video of this size has them; nothing is rounded."""
    return [_png(image.first(height, width)) for image in images]


def images_from_json(files: object, count: int) -> list[Image]:
    """Return the images that JSON holds, `count` of them; raise UserError unless each is a PNG file."""
    if not isinstance(files, list) or len(files) != count:
        raise UserError(f"images must be a list of {count} PNG files in base64, one for each prompt")
    return [_read(file, f"image {number + 1}") for number, file in enumerate(files)]


def prompts_with_images(prompts: Sequence[str], files: object) -> list[str]:
    """Return the prompts of a request with its images; without images if `files` is None."""
    if files is None:
        return list(prompts)
    images = images_from_json(files, len(prompts))
    return [Prompt(prompt, (image,)) for prompt, image in zip(prompts, images, strict=True)]


def _png(picture: Picture.Image) -> str:
    file = io.BytesIO()
    picture.save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def _read(file: object, name: str) -> Image:
    place = f"{name} is no PNG file in base64"
    try:
        content = io.BytesIO(base64.b64decode(file, validate=True))  # type: ignore[arg-type]
    except (binascii.Error, TypeError, ValueError) as error:
        raise UserError(f"{place}: {error}") from error
    with open_picture(content, place, ("PNG",), MOST_PIXELS) as opened:
        return Image.of(np.array(to_rgb(opened)))
