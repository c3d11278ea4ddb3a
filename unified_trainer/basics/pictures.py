"""Opening images, which others may have made: in listed formats, up to a number of pixels, and as they are shown."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from io import BytesIO
from pathlib import Path

import numpy as np
from PIL import Image, ImageCms, ImageOps

from unified_trainer.basics.errors import UserError

FORMATS = ("PNG", "JPEG", "WEBP", "BMP")  # Pillow's readers of others start programs, or hold many images
MOST_PIXELS = 2**27
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)  # MOST_PIXELS decides


@contextmanager
def open_picture(
    source: Path | BytesIO, place: str, formats: Sequence[str] = FORMATS, most: int = MOST_PIXELS
) -> Iterator[Image.Image]:
    """Open an image, which is decoded within the context.

    Raise UserError, which begins with `place`, for another format, more pixels than `most`, and whatever else keeps it
    from being decoded: damage makes the decoders raise exceptions of many kinds.
    """
    try:
        with Image.open(source, formats=formats) as opened:
            if opened.width * opened.height > most:
                raise ValueError(f"{opened.width} x {opened.height} pixels, more than {most}")
            yield opened
    except Exception as error:
        raise UserError(f"{place}: cannot be read as an image of {', '.join(formats)} ({error})") from error


def to_rgb(picture: Image.Image) -> Image.Image:
    """Return an image as it is shown, in RGB of 8 bits: turned as its Exif says, in sRGB by its profile, on white."""
    shown, clear = ImageOps.exif_transpose(picture), picture.has_transparency_data
    if shown.mode.startswith("I;16"):  # whose values Pillow would clip at 255
        pixels = np.asarray(shown)
        shown = Image.fromarray((pixels / 257).round().astype(np.uint8))
        if clear:
            shown.putalpha(Image.fromarray(255 * (pixels != picture.info["transparency"]).astype(np.uint8)))
    if clear or shown.mode not in ("L", "CMYK"):
        shown = shown.convert("RGBA" if clear else "RGB")
    if profile := picture.info.get("icc_profile"):
        with suppress(OSError, ImageCms.PyCMSError):  # a profile that is damaged, or made for other pixels
            own, srgb = ImageCms.ImageCmsProfile(BytesIO(profile)), ImageCms.createProfile("sRGB")
            shown = ImageCms.profileToProfile(shown, own, srgb, outputMode="RGBA" if clear else "RGB") or shown
    if clear:
        shown = Image.alpha_composite(Image.new("RGBA", shown.size, "white"), shown)
    return shown.convert("RGB")
