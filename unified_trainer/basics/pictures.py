"""Opening images, which others may have made: in the listed formats alone, and up to a number of pixels."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path

from PIL import Image

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
