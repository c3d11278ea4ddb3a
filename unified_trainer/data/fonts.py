"""Fonts for prompts on pictures: one that has every character of a text, if there is one on this machine."""

import functools
import unicodedata
from pathlib import Path
from typing import TypeAlias

from PIL import ImageFont, features

SIZE = 12  # pixels
FOLDERS = (
    Path("/usr/share/fonts"),
    Path("/usr/local/share/fonts"),
    Path("~/.fonts").expanduser(),
    Path("~/.local/share/fonts").expanduser(),
)
STYLES = ("Bold", "Italic", "Oblique", "Mono", "Condensed", "Light", "Thin", "Black", "Serif")  # taken last
SUFFIXES = (".ttf", ".otf", ".ttc")
UNUSED = "\U0010ffff"  # a character that no font has: it is drawn as every missing one

Font: TypeAlias = ImageFont.FreeTypeFont


def plain_font() -> Font:
    """Return the font that comes with Pillow, for text in Latin letters."""
    return ImageFont.load_default(SIZE)


def font_for(text: str) -> Font | None:
    """Return a font in which this text reads right, or None: then a drawing would show boxes or loose letters."""
    printed = (
        character for character in text if unicodedata.category(character)[0] not in "ZC"
    )  # no spaces, no controls
    characters = frozenset(printed)
    if not features.check_feature("raqm") and any(map(_needs_shaping, characters)):
        return None
    return _font_with(characters, FOLDERS)


@functools.cache
def _font_with(characters: frozenset[str], folders: tuple[Path, ...]) -> Font | None:
    if _has_all(plain_font(), characters):
        return plain_font()
    for file in _files(folders):
        try:
            font = ImageFont.truetype(str(file), SIZE)
            if _has_all(font, characters):
                return font
        except OSError:  # no font, or one of fixed sizes
            continue
    return None


@functools.cache
def _files(folders: tuple[Path, ...]) -> list[Path]:
    """List the font files, upright sans-serif ones first."""
    files = [file for folder in folders for file in folder.rglob("*") if file.suffix.lower() in SUFFIXES]
    return sorted(files, key=lambda file: (any(style in file.stem for style in STYLES), "Sans" not in file.stem, file))


def _has_all(font: Font, characters: frozenset[str]) -> bool:
    missing = _drawn(font, UNUSED)
    return all(_drawn(font, character) != missing for character in characters)


def _drawn(font: Font, character: str) -> tuple[tuple[int, int], bytes]:
    mask = font.getmask(character)
    return mask.size, bytes(mask)


def _needs_shaping(character: str) -> bool:
    """Return whether a letter is written from right to left, or joins others: only Raqm draws such text right."""
    return unicodedata.bidirectional(character) in ("R", "AL") or unicodedata.category(character) in ("Mn", "Mc")
