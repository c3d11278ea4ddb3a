"""Video files and contact sheets: frame rates, and prompts in any script."""

from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
from fontTools.fontBuilder import FontBuilder
from fontTools.pens.ttGlyphPen import TTGlyphPen
from PIL import Image

from unified_trainer.data import fonts
from unified_trainer.data.video_files import LINES, TEXT_HEIGHT, Row, contact_sheet, write_mp4

FRAMES = np.zeros((7, 64, 96, 3), np.uint8)
WIDTH, HEIGHT = 6 * 192, 128  # of a row: six frames, twice as large
CHINESE = "狐狸"
MARKUP = "<b>fox</b> & 狐"


def font_of(characters: str, file: Path) -> None:
    """Write a font whose characters are solid squares, each of another size."""
    names = {ord(one): f"square{i}" for i, one in enumerate(characters, 2)}
    builder = FontBuilder(1000, isTTF=True)
    builder.setupGlyphOrder([".notdef", *names.values()])
    builder.setupCharacterMap(names)
    glyphs = {}
    for i, name in enumerate([".notdef", *names.values()]):
        pen, size = TTGlyphPen(None), 500 + 100 * i
        pen.moveTo((0, 0))
        for corner in ((0, size), (size, size), (size, 0)):
            pen.lineTo(corner)
        pen.closePath()
        glyphs[name] = pen.glyph()
    builder.setupGlyf(glyphs)
    builder.setupHorizontalMetrics({name: (1000, 0) for name in glyphs})
    builder.setupHorizontalHeader(ascent=1000, descent=0)
    builder.setupNameTable({"familyName": "Squares", "styleName": "Regular"})
    builder.setupOS2()
    builder.setupPost()
    builder.save(file)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The only place that is searched for fonts."""
    place = tmp_path / "fonts"
    place.mkdir()
    monkeypatch.setattr(fonts, "FOLDERS", (place,))
    return place


def sheet(tmp_path, *prompts: str) -> np.ndarray:
    contact_sheet([Row(FRAMES, "step 4", prompt) for prompt in prompts], tmp_path / "sheet.png")
    with Image.open(tmp_path / "sheet.png") as picture:
        return np.asarray(picture)


def text_of(picture: np.ndarray) -> np.ndarray:
    """Where the prompt of a sheet of one row has ink."""
    return (picture[TEXT_HEIGHT : len(picture) - HEIGHT] < 128).all(2)


@pytest.mark.parametrize(
    ("fps", "rate"), [(8.0, Fraction(8)), (16.0, Fraction(16)), (24000 / 1001, Fraction(24000, 1001))]
)
def test_a_file_has_its_frame_rate(tmp_path, fps, rate):
    write_mp4(FRAMES, tmp_path / "0.mp4", fps)
    with av.open(str(tmp_path / "0.mp4")) as video:
        stream = video.streams.video[0]
        assert stream.average_rate == rate and len(list(video.decode(stream))) == 7


def test_a_row_is_as_high_as_its_text(tmp_path, folder):
    picture = sheet(tmp_path, "a fox", "a fox runs " * 50)
    assert picture.shape == (2 * HEIGHT + (2 + 1 + 3) * TEXT_HEIGHT, WIDTH, 3)
    assert not (tmp_path / "sheet.html").exists()


def test_a_prompt_that_is_too_long_is_cut(tmp_path, folder):
    picture = sheet(tmp_path, "a fox runs " * 200)
    assert len(picture) == HEIGHT + (1 + LINES) * TEXT_HEIGHT


def test_text_without_spaces_is_broken_anywhere(tmp_path, folder):
    assert len(sheet(tmp_path, "fox" * 100)) == HEIGHT + 3 * TEXT_HEIGHT


def test_a_prompt_without_a_font_is_beside_the_picture(tmp_path, folder):
    """No box is drawn: the picture says where to look, the same for any such prompt; a user's text is no markup."""
    one, other = sheet(tmp_path, CHINESE), sheet(tmp_path, MARKUP)
    assert np.array_equal(one, other) and text_of(one).any()
    page = (tmp_path / "sheet.html").read_text(encoding="utf-8")
    assert 'src="sheet.png"' in page and "&lt;b&gt;fox&lt;/b&gt; &amp; 狐" in page
    assert f"height:{HEIGHT + 2 * TEXT_HEIGHT}px" in page


def test_a_font_that_has_the_characters_is_found(tmp_path, folder):
    font_of("狐", folder / "half.ttf")
    (folder / "broken.ttf").write_bytes(b"no font")
    font_of(CHINESE, folder / "whole.ttf")
    picture = sheet(tmp_path, CHINESE)
    assert not (tmp_path / "sheet.html").exists()
    assert Path(fonts.font_for(CHINESE).path).name == "whole.ttf"
    ink = text_of(picture)
    assert ink[:, :12].any() and ink[:, 14:26].any() and not ink[:, 30:].any()


def test_letters_that_join_need_raqm(folder, monkeypatch):
    font_of("ثعلب", folder / "arabic.ttf")
    assert fonts.font_for("ثعلب") is not None
    monkeypatch.setattr(fonts.features, "check_feature", lambda name: False)
    assert fonts.font_for("ثعلب") is None and fonts.font_for("fox") is not None
