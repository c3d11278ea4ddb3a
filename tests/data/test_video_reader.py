"""Reading videos: which frames are taken, how they are turned, scaled and cropped, and what is said of bad files."""

from fractions import Fraction

import av
import numpy as np
import pytest
from odd_media import turned
from PIL import Image
from real_clips import grays, quarters, read_clip, real_video, write_exactly

from unified_trainer.data.captioned import CaptionedVideo
from unified_trainer.data.clips import VideoConfig
from unified_trainer.data.video_files import write_mp4
from unified_trainer.data.video_reader import VideoError, read_clips, to_video


def colors(clip: np.ndarray) -> list[str]:
    """Return the colors of the quarters of the last frame: above left and right, below left and right."""
    names = {(255, 0, 0): "red", (0, 255, 0): "green", (0, 0, 255): "blue", (255, 255, 255): "white"}
    _, height, width, _ = clip.shape
    found = []
    for row in (height // 4, 3 * height // 4):
        for column in (width // 4, 3 * width // 4):
            near = [name for color, name in names.items() if np.abs(clip[-1, row, column] - np.array(color)).max() < 12]
            found += near or ["?"]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["mkv", "mp4"])
@pytest.mark.parametrize(
    ("fps", "expected"),
    [
        (24, [0, 1, 2, 3, 4]),
        (8, [0, 3, 6, 9, 12]),
        (16, [0, 1, 3, 4, 6]),  # at 0, 62.5, 125, 187.5 and 250 ms, where a frame lasts 41.7 ms
        (10, [0, 2, 4, 7, 9]),
        (48, [0, 0, 1, 1, 2]),
    ],
)
def test_frames_are_those_on_show_at_the_sampled_moments(tmp_path, suffix, fps, expected):
    """Matroska rounds time stamps to milliseconds, mp4 does not."""
    file = write_exactly(tmp_path / f"a.{suffix}", grays(24), 24)
    clip = read_clip(file, VideoConfig(5, 16, 16, fps))
    assert clip.shape == (5, 16, 16, 3) and (clip[:, 0, 0, 0] // 5).tolist() == expected


def test_a_video_of_just_enough_frames_is_enough(tmp_path):
    file = write_exactly(tmp_path / "a.mkv", grays(17), 8)
    assert len(read_clip(file, VideoConfig(17, 16, 16, 8))) == 17
    with pytest.raises(
        VideoError, match=r"a\.mkv: too short: 2\.12 s are 17 frames at 8 per second, not the 21 of video\.frames"
    ):
        read_clip(file, VideoConfig(21, 16, 16, 8))


def test_frames_at_uneven_times(tmp_path):
    """Frames begin at 0, 100 and 500 ms, the last one lasts 40 ms: at 10 per second that is 0, 1, 1, 1, 1, 2."""
    with av.open(str(tmp_path / "a.mkv"), "w") as container:
        stream = container.add_stream("ffv1", rate=25)
        stream.pix_fmt, stream.height, stream.width = "bgr0", 16, 16
        stream.codec_context.time_base = Fraction(1, 1000)
        for gray, time in zip(grays(3), (0, 100, 500), strict=True):
            picture = av.VideoFrame.from_ndarray(np.ascontiguousarray(gray), format="rgb24").reformat(format="bgr0")
            picture.pts, picture.time_base = time, Fraction(1, 1000)
            container.mux(stream.encode(picture))
        container.mux(stream.encode())
    clip = read_clip(tmp_path / "a.mkv", VideoConfig(6, 16, 16, 10))
    assert (clip[:, 0, 0, 0] // 5).tolist() == [0, 1, 1, 1, 1, 2]


def test_orientation_color_and_time_of_a_compressed_file(tmp_path):
    """H.264 in yuv420p, as videos come: the quarters keep place and color, and the last frames are the last."""
    frames = quarters(9, 64, 96)
    frames[5:] = frames[5:, ::-1]
    write_mp4(frames, tmp_path / "a.mp4", 8)
    size = VideoConfig(5, 64, 96, 8)
    assert colors(read_clip(tmp_path / "a.mp4", size)) == ["red", "green", "blue", "white"]
    assert colors(read_clip(tmp_path / "a.mp4", VideoConfig(9, 64, 96, 8))) == ["blue", "white", "red", "green"]
    video = to_video(read_clip(tmp_path / "a.mp4", size))
    assert video.shape == (1, 3, 5, 64, 96) and float(video[0, :, -1, 10, 10].round().tolist()[0]) == 1
    assert video[0, :, 0, 16, 72].round().tolist() == [0, 1, 0]  # above right: green


@pytest.mark.parametrize(("matrix", "dst"), [(1, "ITU709"), (6, "ITU601")])
def test_the_color_matrix_of_the_file_counts(tmp_path, matrix, dst):
    with av.open(str(tmp_path / "a.mp4"), "w") as container:
        stream = container.add_stream("libx264", rate=8)
        stream.pix_fmt, stream.height, stream.width = "yuv420p", 64, 96
        stream.codec_context.colorspace = matrix
        for frame in quarters(1, 64, 96):
            picture = av.VideoFrame.from_ndarray(frame, format="rgb24").reformat(format="yuv420p", dst_colorspace=dst)
            picture.colorspace = matrix
            container.mux(stream.encode(picture))
        container.mux(stream.encode())
    assert colors(read_clip(tmp_path / "a.mp4", VideoConfig(1, 64, 96, 8))) == ["red", "green", "blue", "white"]


@pytest.mark.parametrize(
    ("matrix", "expected"),
    [
        ((0, 1, -1, 0), ["blue", "red", "white", "green"]),  # by 90 degrees clockwise: a phone held upright
        ((0, -1, 1, 0), ["green", "white", "red", "blue"]),
        ((-1, 0, 0, -1), ["white", "blue", "green", "red"]),
        ((-1, 0, 0, 1), ["green", "red", "white", "blue"]),  # a mirror, as of a phone's front camera
        ((1, 0, 0, -1), ["blue", "white", "red", "green"]),
        ((0, 1, 1, 0), ["red", "blue", "green", "white"]),
        ((0, -1, -1, 0), ["white", "green", "blue", "red"]),
    ],
)
def test_frames_are_turned_and_mirrored_as_the_file_says(tmp_path, matrix, expected):
    assert colors(read_clip(turned(tmp_path / "a.mp4", *matrix), VideoConfig(1, 64, 64, 8))) == expected


@pytest.mark.parametrize(("height", "width"), [(32, 96), (96, 32)])
def test_the_middle_of_a_longer_side_is_kept(tmp_path, height, width):
    frames = np.zeros((1, 96, 96, 3), np.uint8)
    frames[:, 32:64, 32:64] = 200
    frames = frames[:, 48 - height // 2 : 48 + height // 2, 48 - width // 2 : 48 + width // 2]
    clip = read_clip(write_exactly(tmp_path / "a.mkv", frames, 8), VideoConfig(1, 32, 32, 8))
    assert (clip == 200).all()
    half = read_clip(write_exactly(tmp_path / "a.mkv", frames, 8), VideoConfig(1, 16, 16, 8))
    assert (half[0, 4:-4, 4:-4] == 200).all() and half.min() > 180  # bicubic filters reach over the edge


def test_pixels_that_are_not_square_are_stretched():
    """176 x 144 pixels of 128 : 117 fill 192 x 144: half a pixel is cropped left and right, and no row."""
    clip = read_clip(real_video("carphone_pristine"), VideoConfig(1, 144, 192, 8))
    with av.open(str(real_video("carphone_pristine"))) as container:
        frame = next(container.decode(video=0)).to_image()
    whole = np.asarray(frame.resize((192, 144), Image.Resampling.BICUBIC)).astype(int)
    assert np.abs(clip[0] - whole).mean() < 1.5
    assert np.abs(clip[0, 3:] - whole[:-3]).mean() > 3  # three rows too high, as if pixels were square


def test_fine_patterns_are_smoothed(tmp_path):
    """Stripes of one pixel become gray; without antialiasing they would become all black, or broad stripes."""
    frames = np.zeros((1, 64, 64, 3), np.uint8)
    frames[:, :, ::2] = 255
    clip = read_clip(write_exactly(tmp_path / "a.mkv", frames, 8), VideoConfig(1, 16, 16, 8))
    assert np.abs(clip[0, :, 2:-2].astype(int) - 127).max() < 8


def test_real_videos_of_any_rate_and_shape_become_clips():
    for name in ("bikes", "carphone_pristine"):  # 640 x 272 at 25 per second; 176 x 144 at 29.97, pixels 128 : 117
        clip = read_clip(real_video(name), VideoConfig(17, 64, 64, 8))
        assert clip.shape == (17, 64, 64, 3) and clip.std() > 20


def test_bad_files_are_named(tmp_path):
    size = VideoConfig(5, 32, 32, 8)
    (tmp_path / "text.mp4").write_text("no video")
    (tmp_path / "cut.mp4").write_bytes(real_video("bikes").read_bytes()[:20000])
    (tmp_path / "empty.mp4").write_bytes(b"")
    for name in ("text", "cut", "empty"):
        with pytest.raises(VideoError, match=rf"{name}\.mp4: cannot be decoded \(Invalid data"):
            read_clip(tmp_path / f"{name}.mp4", size)
    with av.open(str(tmp_path / "sound.mp4"), "w") as container:
        stream = container.add_stream("aac", rate=8000, layout="mono")
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 8000), np.float32), format="fltp", layout="mono")
        frame.sample_rate = 8000
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
    with pytest.raises(VideoError, match=r"sound\.mp4: holds no video"):
        read_clip(tmp_path / "sound.mp4", size)
    with av.open(str(tmp_path / "raw.mp4"), "w", format="h264") as container:
        stream = container.add_stream("libx264", rate=8)
        stream.pix_fmt, stream.height, stream.width = "yuv420p", 32, 32
        container.mux(stream.encode(av.VideoFrame.from_ndarray(quarters(1, 32, 32)[0], format="rgb24")))
        container.mux(stream.encode())
    with pytest.raises(VideoError, match=r"raw\.mp4: cannot be decoded \(Invalid argument\)"):
        read_clip(tmp_path / "raw.mp4", size)


@pytest.mark.parametrize("workers", [1, 3])
def test_clips_come_in_order_each_with_its_video(tmp_path, workers):
    files = [write_exactly(tmp_path / f"{i}.mkv", grays(8)[i : i + 5], 8) for i in range(4)]
    videos = [CaptionedVideo(file.name, file, ("a caption",)) for file in files]
    videos.insert(2, CaptionedVideo("absent.mkv", tmp_path / "absent.mkv", ("a caption",)))
    read = list(read_clips(videos, VideoConfig(5, 16, 16, 8), workers))
    assert [video for video, _ in read] == videos
    assert isinstance(read[2][1], VideoError) and str(read[2][1]).endswith("absent.mkv: no such file")
    assert [int(clip.frames[0, 0, 0, 0]) // 5 for _, clip in read if not isinstance(clip, VideoError)] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "text",
    [
        "ffconcat version 1.0\nfile real.mp4\n",
        "#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nreal.mp4\n#EXT-X-ENDLIST\n",
    ],
    ids=["concat", "hls"],
)
def test_a_list_of_files_is_no_video(tmp_path, text):
    """FFmpeg would open the files that it names."""
    write_mp4(np.zeros((9, 32, 32, 3), np.uint8), tmp_path / "real.mp4", 8.0)
    size = VideoConfig(frames=1, height=32, width=32)
    assert read_clip(tmp_path / "real.mp4", size).shape == (1, 32, 32, 3)
    (tmp_path / "list.mp4").write_text(text)
    with pytest.raises(VideoError, match="cannot be decoded"):
        read_clip(tmp_path / "list.mp4", size)


def test_an_image_is_scaled_as_a_frame_is(tmp_path):
    """Bicubic and antialiased, as the frames of videos: an edge has none of Lanczos' second lobes."""
    edge = np.zeros((32, 32, 3), np.uint8)
    edge[:, 16:] = 200
    Image.fromarray(edge).save(tmp_path / "a.png")
    small = read_clip(tmp_path / "a.png", VideoConfig(1, 16, 16, 8))[0]
    assert (small == np.asarray(Image.fromarray(edge).resize((16, 16), Image.Resampling.BICUBIC))).all()
    assert (small != np.asarray(Image.fromarray(edge).resize((16, 16), Image.Resampling.LANCZOS))).any()
