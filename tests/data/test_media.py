"""Facts of videos and images: each is found and treated as the table says, and what is converted looks as it should."""

import json
from dataclasses import replace

import av
import numpy as np
import pytest
from helpers import REPO
from odd_media import CLEAR, HLG, MADE, PQ, QUARTERS, h264, moving, picture, signals, spoilt, write
from PIL import Image, ImageCms
from real_clips import grays, read_clip, write_exactly

from unified_trainer.__main__ import main
from unified_trainer.basics.requests import Image as ConditionImage
from unified_trainer.data.clips import VideoConfig
from unified_trainer.data.media import DamagedError, Fact, VideoError, summary
from unified_trainer.data.video_reader import inspect_clip

FIVE = VideoConfig(5, 64, 64, 8)
ONE = replace(FIVE, frames=1)


def test_the_table_of_the_docs_is_the_one_of_the_program():
    page = (REPO / "docs" / "data.md").read_text()
    rows = "".join(f"| {fact.about} | {fact.becomes} | {fact.how} |\n" for fact in Fact)
    assert f"| fact | the clip is | how |\n| --- | --- | --- |\n{rows}\n" in page


@pytest.mark.parametrize("fact", Fact, ids=lambda fact: fact.name)
def test_each_fact_is_found_and_treated_as_the_table_says(tmp_path, fact):
    file = MADE[fact](tmp_path)
    size = ONE if file.suffix == ".jpg" else replace(FIVE, fps=16 if fact is Fact.SLOW else 8)
    if fact in (Fact.HOLE, Fact.FLAGGED):
        size = replace(FIVE, frames=9 if fact is Fact.FLAGGED else 5)
    if fact.becomes in ("refused", "damaged"):
        with pytest.raises(DamagedError if fact.becomes == "damaged" else VideoError) as caught:
            inspect_clip(file, size)
        assert str(caught.value).startswith(f"{file}: {fact.how}")
    else:
        clip = inspect_clip(file, size)
        assert fact in clip.facts and clip.frames.dtype == np.uint8
        assert not fact.counted or f"1 used (1 {fact.counted}" in summary([clip.facts & {fact}])


def test_a_plain_video_has_no_facts(tmp_path):
    assert inspect_clip(write_exactly(tmp_path / "a.mkv", QUARTERS, 8), FIVE).facts == frozenset()
    picture(tmp_path / "a.png", QUARTERS[0])
    assert inspect_clip(tmp_path / "a.png", ONE).facts == frozenset()


# HDR and wide gamuts.


def flat(*colors: tuple[float, float, float], frames: int = 1) -> np.ndarray:
    """Return frames of vertical bars of these signals."""
    return np.broadcast_to(np.repeat(np.array(colors), 16, 0), (frames, 16, 16 * len(colors), 3))


def bars(clip: np.ndarray) -> np.ndarray:
    return clip[0, 8, 8::16].astype(int)


@pytest.mark.parametrize(
    ("transfer", "signal", "gray"),
    [
        (HLG, 0.75, 255),  # white
        (HLG, 0.5, 141),  # E = 1/12: 1.099 (1/12 / .265)^.45 - .099 = .554
        (PQ, 0.508078, 255),  # 100 cd/m2
        (PQ, 0.2994, 98),  # 10 cd/m2: .1^(1/2.4) = .383
        (1, 0.5, 128),  # BT.2020 in SDR
    ],
)
def test_a_gray_of_hdr_is_the_gray_that_the_standard_says(tmp_path, transfer, signal, gray):
    file = signals(tmp_path / "a.mkv", flat((signal,) * 3), transfer)
    clip = read_clip(file, VideoConfig(1, 16, 16, 8))
    assert np.abs(clip.astype(int) - gray).max() <= 1


@pytest.mark.parametrize(
    ("transfer", "primaries", "red"),
    [
        (HLG, 9, (0.6274, 0.0691, 0.0164)),  # BT.709's red in linear BT.2020, by BT.2087
        (HLG, 2, (0.6274, 0.0691, 0.0164)),  # HDR of no primaries has these
        (1, 9, (0.6274, 0.0691, 0.0164)),
        (1, 12, (0.8225, 0.0332, 0.0171)),  # in P3
        (HLG, 1, (1.0, 0.0, 0.0)),
    ],
)
def test_red_of_a_wide_gamut_is_red(tmp_path, transfer, primaries, red):
    light = np.array(red)
    hlg, bt709 = np.sqrt(3 * 0.25 * light), np.where(light < 0.018, 4.5 * light, 1.099 * light**0.45 - 0.099)
    encoded = tuple(hlg if transfer == HLG else bt709)
    clip = read_clip(signals(tmp_path / "a.mkv", flat(encoded), transfer, primaries), VideoConfig(1, 16, 16, 8))
    r, g, b = bars(clip)[0]
    assert r > 245 and g < 12 and b < 12


def test_highlights_are_rolled_off_and_shadows_stay(tmp_path):
    """Bars of 25, 100, 400 and 1000 cd/m2: the last is the peak, 255, and darker ones keep their order and place."""
    nits = np.array([25, 100, 400, 1000])
    root = (nits / 10000) ** 0.1593017578125
    encoded = ((0.8359375 + 18.8515625 * root) / (1 + 18.6875 * root)) ** 78.84375
    file = signals(tmp_path / "a.mkv", flat(*((value,) * 3 for value in encoded)), PQ)
    dark, white, bright, peak = bars(read_clip(file, VideoConfig(1, 16, 64, 8)))[:, 0]
    assert dark == round(255 * 0.25 ** (1 / 2.4)) and peak == 255 and 200 < white < bright < 255


# Transparency, fields, bits and modes.


def test_what_is_transparent_is_white_in_videos_and_images(tmp_path):
    write(tmp_path / "a.mov", CLEAR, "png", "rgba", given="rgba")
    clips = [read_clip(tmp_path / "a.mov", FIVE)]
    half = CLEAR[0].copy()
    half[..., 3] = 127 + CLEAR[0, ..., 3] // 255 * 128
    for name, pixels in (("a.png", CLEAR[0]), ("b.webp", CLEAR[0]), ("c.png", half)):
        picture(tmp_path / name, pixels, lossless=True)
        clips.append(read_clip(tmp_path / name, ONE))
    picture(tmp_path / "d.png", CLEAR[0])
    clips.append(np.array(ConditionImage.read(tmp_path / "d.png", "image").picture(64, 64))[None])
    for clip in clips:
        above = clip[0, 16, 16].tolist()
        assert above in ([255, 255, 255], [255, 128, 128]) and clip[0, 48, 16].tolist() == [0, 0, 255]
    assert clips[3][0, 16, 16].tolist() == [255, 128, 128]


def test_a_palette_and_a_color_may_be_transparent(tmp_path):
    Image.fromarray(QUARTERS[0]).save(tmp_path / "a.png", transparency=(255, 0, 0))
    paletted = Image.fromarray(QUARTERS[0]).quantize(4)
    paletted.save(tmp_path / "b.png", transparency=paletted.getpixel((0, 0)))
    for name in ("a.png", "b.png"):
        assert (read_clip(tmp_path / name, ONE)[0] == 255).all(-1).mean() > 0.45  # of four quarters, one was white


def test_an_interlaced_frame_is_one_field(tmp_path):
    """Odd lines are of another moment."""
    frames = np.zeros((5, 64, 64, 3), np.uint8)
    frames[:, ::2] = 200
    file = write(tmp_path / "a.mp4", frames, "libx264", "yuv444p", more={"x264-params": "tff=1:qp=0"})
    assert np.abs(read_clip(file, FIVE).astype(int) - 200).max() < 4


@pytest.mark.parametrize("full", [1, 2])
def test_both_ranges_reach_black_and_white(tmp_path, full):
    frames = np.repeat(np.array([0, 255], np.uint8), 32)[None, :, None, None] * np.ones((2, 1, 64, 3), np.uint8)
    with av.open(str(tmp_path / "a.mp4"), "w") as container:
        stream = container.add_stream("libx264", rate=8, options={"qp": "0"})
        stream.pix_fmt, stream.height, stream.width, stream.codec_context.color_range = "yuv420p", 64, 64, full
        for frame in frames:
            made = av.VideoFrame.from_ndarray(frame, format="rgb24")
            container.mux(stream.encode(made.reformat(format="yuv420p", dst_color_range=full)))
        container.mux(stream.encode())
    assert read_clip(tmp_path / "a.mp4", ONE)[0, [8, 56], 8, 0].tolist() in ([0, 255], [0, 253])


def test_sixteen_bits_are_scaled_not_clipped(tmp_path):
    ramp = np.linspace(0, 65535, 64 * 64).reshape(64, 64).astype(np.uint16)
    clip = read_clip(picture(tmp_path / "a.png", ramp), ONE)
    assert np.abs(clip[0, ..., 0] - ramp / 257).max() < 0.51
    Image.fromarray(ramp).save(tmp_path / "b.png", transparency=0)
    assert read_clip(tmp_path / "b.png", ONE)[0, 0, 0].tolist() == [255, 255, 255]
    deep = write(tmp_path / "c.mkv", np.repeat(ramp[None, ..., None], 3, -1), "ffv1", "gbrp16le", given="rgb48le")
    assert np.abs(read_clip(deep, ONE)[0, ..., 0] - ramp / 257).max() < 1.5


def test_a_profile_says_what_the_colors_are(tmp_path):
    """A profile that calls the first channel green; one that is damaged or of sRGB changes nothing."""
    srgb = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    swapped = srgb.replace(b"rXYZ", b"????").replace(b"gXYZ", b"rXYZ").replace(b"????", b"gXYZ")
    swapped = swapped.replace("sRGB".encode("utf-16-be"), "mine".encode("utf-16-be"))
    red = np.zeros((64, 64, 3), np.uint8) + np.array([255, 0, 0], np.uint8)
    expected = {"own": (swapped, [0, 255, 0]), "srgb": (srgb, [255, 0, 0]), "bad": (b"profile" * 30, [255, 0, 0])}
    for name, (profile, color) in expected.items():
        file = picture(tmp_path / f"{name}.png", red, icc_profile=profile)
        assert np.abs(read_clip(file, ONE)[0, 9, 9].astype(int) - color).max() < 3


@pytest.mark.parametrize("orientation", range(1, 9))
def test_an_image_is_turned_and_mirrored_by_exif(tmp_path, orientation):
    expected = {1: "rgbw", 2: "grwb", 3: "wbgr", 4: "bwrg", 5: "rbgw", 6: "brwg", 7: "wgbr", 8: "gwrb"}[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    clip = inspect_clip(picture(tmp_path / "a.png", QUARTERS[0], exif=exif), ONE)
    names = {(255, 0, 0): "r", (0, 255, 0): "g", (0, 0, 255): "b", (255, 255, 255): "w"}
    assert "".join(names[tuple(clip.frames[0, y, x].tolist())] for y in (16, 48) for x in (16, 48)) == expected
    assert (Fact.TURNED in clip.facts) == (orientation > 1)


def test_the_first_frame_of_an_animation_is_the_image(tmp_path):
    for name in ("a.png", "a.webp"):
        first, *rest = (Image.fromarray(frame) for frame in grays(9, 64, 64)[4:])
        first.save(tmp_path / name, save_all=True, append_images=rest, lossless=True)
        clip = inspect_clip(tmp_path / name, ONE)
        assert (clip.frames == 20).all()


# Damage.


def test_damaged_bytes_are_found(tmp_path):
    """Of copies with 16 other bytes, nearly all that look different are refused: the decoder reports them."""
    size, seeds = VideoConfig(9, 64, 64, 8), range(30)
    sound = read_clip(h264(tmp_path / "a.mp4"), size)
    refused, wrong = 0, 0
    for seed in seeds:
        (tmp_path / "b.mp4").write_bytes((tmp_path / "a.mp4").read_bytes())
        try:
            wrong += not np.array_equal(read_clip(spoilt(tmp_path / "b.mp4", seed), size), sound)
        except VideoError:
            refused += 1
    assert refused > 10 and wrong <= 0.1 * refused


def test_motion_jpeg_may_raise_and_a_cut_video_is_whole(tmp_path):
    """A video that is cut within an open group of pictures starts with references to frames that are not there."""
    write(tmp_path / "a.avi", moving(9), "mjpeg", "yuvj420p")
    data = bytearray((tmp_path / "a.avi").read_bytes())
    data[len(data) // 3 : len(data) // 3 + 400] = b"\xff\xd9" * 200
    (tmp_path / "a.avi").write_bytes(data)
    with pytest.raises(DamagedError):
        read_clip(tmp_path / "a.avi", VideoConfig(9, 64, 64, 8))
    more = {"x264-params": "open-gop=1:keyint=8:bframes=3:b-adapt=0:scenecut=0"}
    write(tmp_path / "whole.mkv", moving(33), "libx264", "yuv420p", more=more)
    with av.open(str(tmp_path / "whole.mkv")) as whole, av.open(str(tmp_path / "cut.mkv"), "w") as cut:
        target = cut.add_stream_from_template(whole.streams.video[0])
        started = False
        for packet in whole.demux(video=0):
            started |= packet.is_keyframe and packet.pts is not None and packet.pts > 900
            if started and packet.dts is not None:
                packet.stream = target
                cut.mux(packet)
    assert len(read_clip(tmp_path / "cut.mkv", FIVE)) == 5


# The command.


@pytest.mark.slow
def test_one_line_at_the_end_counts_all(tmp_path, capsys):
    folder = tmp_path / "in"
    folder.mkdir()
    for number, fact in enumerate((Fact.TURNED, Fact.HDR, Fact.FLAGGED, Fact.ENCRYPTED)):
        (folder / f"{number}").mkdir()
        MADE[fact](folder / f"{number}").with_suffix(".txt").write_text("a caption")
    size = ["--video.frames", "9", "--video.height", "32", "--video.width", "32", "--video.fps", "8"]
    assert main(["preprocess", str(folder), str(tmp_path / "out"), *size]) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    used = "2 used (1 turned or mirrored, 1 converted from HDR)"
    assert line.startswith(f"4 clips: {used}, 1 damaged, 1 left out (skipped.jsonl); 2 clips in")
    skipped = [json.loads(line) for line in (tmp_path / "out" / "skipped.jsonl").read_text().splitlines()]
    assert [row["file"] for row in skipped] == ["2/a.mp4", "3/a.mp4"]
    assert skipped[0]["reason"].startswith("damaged: ") and skipped[1]["reason"] == "encrypted: decrypt it"
    assert main(["preprocess", str(folder), str(tmp_path / "strict"), *size, "--strict"]) == 2
    assert "2/a.mp4: damaged: the decoder reports it" in capsys.readouterr().err
