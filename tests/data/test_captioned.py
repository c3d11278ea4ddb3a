"""Videos with captions: a folder, or a table in any of three formats; what is wrong is named."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers import tiny_codec
from PIL import Image
from real_clips import REAL, grays, quarters, read_clip, real_folder, write_exactly

from unified_trainer.basics.errors import UserError
from unified_trainer.data.captioned import find_videos
from unified_trainer.data.clips import VideoConfig
from unified_trainer.data.raw_clips import checked_videos, encode_videos, holds_videos
from unified_trainer.data.tables import TABLES
from unified_trainer.data.video_reader import VideoError, to_video

ROWS = [{"path": "b.mp4", "caption": "two, words"}, {"path": "deep/a.mp4", "caption": "one"}]


def write_table(file, rows) -> None:
    if file.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), file)
    elif file.suffix == ".csv":
        lines = [",".join(rows[0]), *(",".join(f'"{value}"' for value in row.values()) for row in rows)]
        file.write_text("\n".join(lines) + "\n")
    elif file.suffix == ".json":
        file.write_text(json.dumps(rows))
    else:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def folder_of(root):
    """Two empty video files, one of them with a caption beside it."""
    (root / "deep").mkdir(parents=True)
    for name in ("b.MP4", "deep/a.mp4", "notes.md"):
        (root / name).write_bytes(b"")
    (root / "deep" / "a.txt").write_text("a caption\nof two lines\n")
    return root


def test_a_folder_with_captions_beside(tmp_path):
    first, second = find_videos(folder_of(tmp_path / "videos"), "SOURCE")
    assert (first.name, first.captions) == ("b.MP4", ())
    assert (second.name, second.captions) == ("deep/a.mp4", ("a caption of two lines",))
    assert first.fault == "no caption: b.txt is missing or empty" and second.fault == ""


@pytest.mark.parametrize("suffix", TABLES)
def test_tables_name_files_below_their_folder(tmp_path, suffix):
    folder_of(tmp_path)
    write_table(tmp_path / f"clips{suffix}", ROWS)
    videos = find_videos(tmp_path / f"clips{suffix}", "SOURCE")
    assert [(one.name, one.captions, one.fault) for one in videos] == [
        ("b.mp4", ("two, words",), "no such file"),
        ("deep/a.mp4", ("one",), ""),
    ]
    (tmp_path / "elsewhere").mkdir()
    write_table(tmp_path / "elsewhere" / f"clips{suffix}", ROWS)
    assert find_videos(tmp_path, "SOURCE", tmp_path / "elsewhere" / f"clips{suffix}") == videos


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (
            "a.jsonl",
            '{"clip": "a.mp4", "caption": "a"}\n',
            r"line 1 has no column path or .*, only clip, caption",
        ),
        (
            "a.jsonl",
            '{"path": "a.mp4"}\n',
            r"a\.jsonl: line 1 has no column caption or text or prompt or cap or captions, only path",
        ),
        ("a.csv", "path,caption\n", r"a\.csv holds no videos"),
        ("a.jsonl", '{"path": 3, "caption": "b"}\n', "line 1 holds 3 instead of the path of a video"),
        ("a.tar", "no", r"a\.tar cannot be read as a \.tar file without compression"),
        ("a.parquet", "no", r"a\.parquet cannot be read"),
        ("a.zip", "", r"a\.zip is neither a folder of videos nor a table"),
    ],
)
def test_a_bad_source_is_named(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=message):
        find_videos(tmp_path / name, "SOURCE")


def test_an_empty_folder_and_an_absent_one_are_named(tmp_path):
    with pytest.raises(UserError, match=r"holds no videos \(\.avi,"):
        find_videos(tmp_path, "SOURCE")
    with pytest.raises(FileNotFoundError, match=r"SOURCE .*absent: no such file or folder"):
        find_videos(tmp_path / "absent", "SOURCE")


def test_a_bad_caption_is_a_fault_of_its_clip_alone(tmp_path):
    folder_of(tmp_path / "videos")
    for data, words in ((b"\xff", "is not UTF-8: byte 1"), (b"\0", "NUL"), ("\u200b".encode(), "invisible")):
        (tmp_path / "videos" / "b.txt").write_bytes(data)
        bad, good = find_videos(tmp_path / "videos", "SOURCE")
        assert bad.fault.startswith("its caption ") and words in bad.fault and good.fault == ""
    rows = [{"path": "b.MP4", "caption": value} for value in ("a\0b", 3, None)]
    (tmp_path / "videos" / "deep" / "a.txt").unlink()
    for row, words in zip(rows, ["holds a NUL", "holds 3 instead of a text", "no caption: b.txt is"], strict=True):
        table = [row, {"path": "deep/a.mp4", "caption": "one"}]
        (tmp_path / "videos" / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in table))
        bad, good = find_videos(tmp_path / "videos", "SOURCE")
        assert words in bad.fault and (good.captions, good.fault) == (("one",), "")


# Raw clips of a run.


def test_raw_clips_are_told_from_parquet(tmp_path):
    folder = folder_of(tmp_path / "videos")
    assert holds_videos(folder) and holds_videos(tmp_path / "x.csv") and holds_videos(tmp_path / "x.jsonl")
    assert not holds_videos(tmp_path / "x.parquet") and not holds_videos(tmp_path / "absent")
    (folder / "deep" / "rows.parquet").write_bytes(b"")
    assert not holds_videos(folder)


@pytest.mark.slow
def test_raw_clips_are_encoded_with_their_captions(tmp_path, codec):
    """Rows follow the names of the files, and equal what the codec makes of the decoded frames."""
    size = VideoConfig(5, 32, 32, 8)
    source = encode_videos(real_folder(tmp_path / "videos"), codec, size)
    assert source.prompts == tuple(REAL.values()) and source.encoded.shape == (3, 16, 2, 2, 2)
    for i, name in enumerate(REAL):
        one = codec.encode(to_video(read_clip(tmp_path / "videos" / f"{name}.mp4", size)))
        assert (source.latents([i]) == one).all()


def test_rows_name_the_conditions_of_clips(tmp_path):
    """An image or a clip takes the place of the first frame; rows of one clip that name others are a fault."""
    size = VideoConfig(5, 32, 32, 8)
    for name, seed in (("a", 0), ("b", 1), ("c", 2)):
        clip = np.random.default_rng(seed).integers(256, size=(5, 32, 32, 3)).astype(np.uint8)
        write_exactly(tmp_path / f"{name}.mkv", clip, 8)
    Image.fromarray(clip[3]).save(tmp_path / "d.png")
    rows = [{"path": "a.mkv", "caption": "one"}, {"path": "b.mkv", "caption": "two"}]

    def images(*conditions: object) -> tuple:
        named = [row | {"condition": name} for row, name in zip(rows, conditions, strict=False)]
        write_table(tmp_path / "rows.jsonl", named or rows)
        return encode_videos(tmp_path / "rows.jsonl", tiny_codec(), size, first_frames=True).images

    for index, (given,) in enumerate(images()):
        own = read_clip(tmp_path / f"{'ab'[index]}.mkv", size)[0]
        assert not given.is_clip and (np.array(given.picture(32, 32)) == own).all()
    assert all((np.array(image.picture(32, 32)) == clip[3]).all() for (image,) in images("d.png", "d.png"))
    (first, still), _ = images(["c.mkv", "d.png"], ["c.mkv", "d.png"])
    assert first.is_clip and all((np.array(x) == y).all() for x, y in zip(first.frames(5, 32, 32), clip, strict=True))
    assert [len(image.frames(5, 32, 32)) for image in (first, still)] == [5, 5]
    assert (np.array(still.frames(5, 32, 32)[4]) == clip[3]).all()
    with pytest.raises(UserError, match=r"c\.mkv is a clip, and this model takes an image"):
        first.picture(32, 32)
    with pytest.raises(UserError, match=r"the condition of a\.mkv: .*e\.png"):
        images("e.png", "d.png")
    write_table(tmp_path / "rows.jsonl", [rows[0] | {"condition": name} for name in ("c.mkv", "d.png")])
    with pytest.raises(VideoError, match=r"a\.mkv: its rows name different conditions"):
        encode_videos(tmp_path / "rows.jsonl", tiny_codec(), size, first_frames=True)
    write_exactly(tmp_path / "c.mkv", clip[:3], 8)
    with pytest.raises(VideoError, match=r"c\.mkv: too short"):
        images("c.mkv", "c.mkv")


def test_a_bad_raw_clip_is_named_before_anything_is_trained(tmp_path):
    write_exactly(tmp_path / "short.mkv", grays(3), 8)
    (tmp_path / "short.txt").write_text("too short")
    with pytest.raises(VideoError, match=r"data\.path .*short\.mkv: too short"):
        encode_videos(tmp_path, tiny_codec(), VideoConfig(5, 32, 32, 8))
    write_exactly(tmp_path / "a.mkv", quarters(5, 32, 32), 8)
    both = r"a\.mkv: no caption: a\.txt is missing or empty; .*short\.mkv: too short"
    with pytest.raises(VideoError, match=both):
        checked_videos(tmp_path, VideoConfig(5, 32, 32, 8))


def test_all_bad_raw_clips_are_named_up_to_a_number(tmp_path):
    for name in "abcdefghij":
        (tmp_path / f"{name}.mkv").write_bytes(b"no video")
    with pytest.raises(VideoError) as raised:
        checked_videos(tmp_path, VideoConfig(5, 32, 32, 8))
    said = str(raised.value)
    assert said.count("no caption") == 8 and "h.txt is missing" in said and said.endswith("; and 2 more")
    for name in "abcdefghij":
        (tmp_path / f"{name}.txt").write_text("a caption")
    with pytest.raises(VideoError) as raised:
        encode_videos(tmp_path, tiny_codec(), VideoConfig(5, 32, 32, 8))
    assert all(f"{name}.mkv: " in str(raised.value) for name in "abcdefgh") and str(raised.value).endswith("and 2 more")
