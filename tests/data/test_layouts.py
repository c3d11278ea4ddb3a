"""Sets of videos as people keep them: each layout of docs/data.md gives the same two clips with their captions."""

import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers import tiny_codec
from real_clips import grays, quarters, write_exactly

from unified_trainer.basics.errors import UserError
from unified_trainer.data.captioned import find_videos, left_out
from unified_trainer.data.clips import VideoConfig
from unified_trainer.data.epoch_order import one_of_each
from unified_trainer.data.prompts import read_prompts
from unified_trainer.data.raw_clips import checked_videos, encode_videos, holds_videos
from unified_trainer.data.video_reader import VideoError, read_video

SIZE = VideoConfig(1, 16, 16, 8)
CAPTIONS = {"a": "a \u201csign\u201d, lit", "b": "two blue squares"}
WORDS = {(caption,) for caption in CAPTIONS.values()}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The bytes of two videos of one color."""
    folder = tmp_path_factory.mktemp("made")
    return {
        n: write_exactly(folder / f"{n}.mp4", np.full((2, 16, 16, 3), 60 + 90 * i, np.uint8), 8).read_bytes()
        for i, n in enumerate("ab")
    }


def put(folder, made) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in made.items():
        (folder / f"{name}.mp4").write_bytes(data)
    return folder


def rows(path="file_name", text="text", folder="", value=lambda caption: caption):
    return [{path: f"{folder}{name}.mp4", text: value(caption)} for name, caption in CAPTIONS.items()]


def lines_of(rows) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def fastvideo(folder, made):
    put(folder / "videos", made)
    (folder / "videos2caption.json").write_text(json.dumps(rows("path", "cap", value=lambda caption: [caption])))


def diffsynth(folder, made):
    put(folder / "clips", made)
    texts = "".join(f'clips/{name}.mp4,"{caption}"\n' for name, caption in CAPTIONS.items())
    (folder / "metadata.csv").write_text(f"video,prompt\n{texts}")


def finetrainers(folder, made):
    put(folder / "videos", made)
    (folder / "videos.txt").write_text("".join(f"videos/{name}.mp4\n" for name in CAPTIONS))
    (folder / "prompts.txt").write_text("\n".join(CAPTIONS.values()))


def musubi_tuner(folder, made):
    put(folder, made)
    (folder / "clips.jsonl").write_text(lines_of(rows("video_path", "caption", f"{folder}/")))
    return folder / "clips.jsonl"


def diffusion_pipe(folder, made):
    put(folder, made)
    captions = {f"{name}.mp4": [caption] for name, caption in CAPTIONS.items()}
    (folder / "captions.json").write_text(json.dumps(captions))


def videofolder(folder, made):
    put(folder / "train", made)
    (folder / "train" / "metadata.jsonl").write_text(lines_of(rows()))


def hf_parquet(folder, made):
    (folder / "data").mkdir(parents=True)
    table = [{"video": {"bytes": made[name], "path": f"{name}.mp4"}, "text": CAPTIONS[name]} for name in made]
    pq.write_table(pa.Table.from_pylist(table), folder / "data" / "train-00000-of-00001.parquet", row_group_size=1)


def bytes_parquet(folder, made):
    folder.mkdir()
    table = [{"video": made[name], "caption": CAPTIONS[name]} for name in made]
    pq.write_table(pa.Table.from_pylist(table), folder / "x.parquet")


def webdataset(folder, made):
    folder.mkdir()
    with tarfile.open(folder / "00000.tar", "w") as tar:
        texts = {"a.txt": CAPTIONS["a"], "b.json": json.dumps({"caption": CAPTIONS["b"]}), "._a.mp4": "\0\5"}
        parts = {f"{name}.mp4": data for name, data in made.items()}
        parts |= {name: text.encode() for name, text in texts.items()}
        for name, data in parts.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))


def sidecars(folder, made):
    put(folder / "deep", made)
    for (name, caption), ending in zip(CAPTIONS.items(), ("txt", "caption"), strict=True):
        (folder / "deep" / f"{name}.{ending}").write_text(caption)


LAYOUTS = [
    fastvideo,
    diffsynth,
    finetrainers,
    musubi_tuner,
    diffusion_pipe,
    videofolder,
    hf_parquet,
    bytes_parquet,
    webdataset,
    sidecars,
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
def test_a_layout_is_read(tmp_path, layout, made):
    """Both clips with their own captions and pixels, also where the folder is read for its prompts."""
    source = layout(tmp_path / "set", made) or tmp_path / "set"
    videos = checked_videos(source, SIZE)
    assert [video.captions for video in videos] == [(caption,) for caption in CAPTIONS.values()]
    assert holds_videos(source) and left_out(source) == ""
    dark, light = (read_video(video, SIZE).frames.mean() for video in videos)
    assert abs(dark - 60) < 4 and abs(light - 150) < 4
    assert read_prompts(source).prompts == tuple(CAPTIONS.values())


@pytest.mark.parametrize(("layout", "file"), [(webdataset, "00000.tar"), (bytes_parquet, "x.parquet")])
def test_a_file_of_videos_is_a_source_itself(tmp_path, layout, file, made):
    layout(tmp_path / "set", made)
    assert holds_videos(tmp_path / "set" / file)
    assert {video.captions for video in find_videos(tmp_path / "set" / file, "SOURCE")} == WORDS


def test_damage_inside_a_file_names_its_place(tmp_path, made):
    webdataset(tmp_path / "set", {"a": made["a"], "b": b"no video"})
    with pytest.raises(VideoError, match=r"set/00000\.tar/b\.mp4: cannot be decoded"):
        read_video(find_videos(tmp_path / "set", "SOURCE")[1], SIZE)


def test_linked_folders_count_once_and_hidden_files_not_at_all(tmp_path, made):
    """A link to a folder inside changes no name, a circle of links ends, and what a file system adds is left out."""
    inside, outside = put(tmp_path / "set" / "real", made), put(tmp_path / "else", made)
    (tmp_path / "set" / "again").symlink_to(inside)
    (tmp_path / "set" / "linked").symlink_to(outside)
    (tmp_path / "set" / "other").symlink_to(outside)
    (outside / "back").symlink_to(tmp_path / "set")
    (inside / "._a.mp4").write_bytes(b"\0\5")
    put(inside / ".cache", made)
    (inside / "c.gif").write_bytes(b"")
    (inside / "captions.tsv").write_bytes(b"")
    names = [video.name for video in find_videos(tmp_path / "set", "SOURCE")]
    assert names == ["linked/a.mp4", "linked/b.mp4", "real/a.mp4", "real/b.mp4"]
    assert left_out(tmp_path / "set").endswith("files of other endings are left out: 1 .gif, 1 .tsv")


def test_two_spellings_are_one_video_and_its_rows_are_captions(tmp_path, made):
    put(tmp_path, made)
    (tmp_path / "clips.csv").write_text("path,caption\n./a.mp4,one\na.mp4,two\nb.mp4,three\nx/../a.mp4,one\n")
    videos = find_videos(tmp_path / "clips.csv", "SOURCE")
    assert [(video.name, video.captions) for video in videos] == [("a.mp4", ("one", "two")), ("b.mp4", ("three",))]
    assert videos[0].rows == [("a.mp4", "one"), ("a.mp4#2", "two")]


def test_columns_that_settings_name(tmp_path, made):
    put(tmp_path, made)
    (tmp_path / "clips.csv").write_text("clip,short,long\na.mp4,one,the one\nb.mp4,two,the two\n")
    with pytest.raises(UserError, match=r"clips\.csv: row 1 has no column path .*: set data\.columns"):
        find_videos(tmp_path / "clips.csv", "SOURCE")
    videos = find_videos(tmp_path / "clips.csv", "SOURCE", columns=("clip", "short", "long"))
    assert [video.captions for video in videos] == [("one", "the one"), ("two", "the two")]


def test_several_clips_of_one_video(tmp_path):
    """A row's clip begins at its start; one that its end cuts short is refused."""
    write_exactly(tmp_path / "a.mkv", np.stack([np.full((16, 16, 3), 20 * i, np.uint8) for i in range(12)]), 8)
    table = [{"path": "a.mkv", "caption": "x", "start": start} for start in (0, 0.25, "0.75")]
    table.append({"path": "a.mkv", "caption": "x", "start": 1, "end": 1.1})
    odd = [{"start": "soon"}, {"start": -1}, {"start": "nan"}, {"start": 0.5, "end": 0.5}, {"start": 0.3, "end": 0}]
    (tmp_path / "clips.jsonl").write_text(lines_of([*table, *({"path": "a.mkv", "caption": "x"} | row for row in odd)]))
    *clips, short = find_videos(tmp_path / "clips.jsonl", "SOURCE")[: -len(odd)]
    wrong = find_videos(tmp_path / "clips.jsonl", "SOURCE")[-len(odd) :]
    assert [clip.name for clip in clips] == ["a.mkv", "a.mkv@0.25", "a.mkv@0.75"]
    size = VideoConfig(3, 16, 16, 8)
    grays = [read_video(clip, size).frames.mean((1, 2, 3)).round() for clip in clips]
    assert [row.tolist() for row in grays] == [[20 * i for i in range(first, first + 3)] for first in (0, 2, 6)]
    with pytest.raises(VideoError, match=r"too short: 3 frames go beyond 1\.1 s"):
        read_video(short, size)
    assert ["is not in seconds" in video.fault for video in wrong] == [True] * len(odd)


def test_a_list_of_paths_without_captions_or_with_too_few_is_named(tmp_path, made):
    finetrainers(tmp_path / "set", made)
    (tmp_path / "set" / "prompts.txt").write_text("one")
    with pytest.raises(UserError, match=r"videos\.txt has 2 lines, and prompts\.txt 1: write one for each"):
        find_videos(tmp_path / "set", "SOURCE")
    (tmp_path / "set" / "prompts.txt").unlink()
    assert {video.fault[:10] for video in find_videos(tmp_path / "set", "SOURCE")} == {"no caption"}
    with pytest.raises(UserError, match=r"--prompts .*videos\.txt: line 1 is the path of a video or an image"):
        read_prompts(tmp_path / "set" / "videos.txt")


def test_the_caption_of_a_video_named_video_is_no_list(tmp_path, made):
    put(tmp_path, {"video": made["a"]})
    (tmp_path / "video.txt").write_text("a caption")
    assert find_videos(tmp_path, "SOURCE")[0].captions == ("a caption",)


def test_a_bad_caption_in_a_tar_file_is_a_fault_of_its_clip(tmp_path, made):
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for name, data in {"a.mp4": made["a"], "a.json": b"{", "b.mp4": made["b"], "b.txt": b"two"}.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    bad, good = find_videos(tmp_path / "a.tar", "SOURCE")
    assert bad.fault.startswith("a.json is not JSON") and (good.captions, good.fault) == (("two",), "")


def test_each_epoch_has_one_caption_of_each_clip():
    """The draw is a function of seed and epoch, keeps the order, and takes every caption in time."""
    clip_of = (0, 0, 0, 1, 2, 2)

    def drawn(epoch, seed=1):
        return one_of_each(epoch, order=lambda _: np.arange(6)[::-1], clip_of=clip_of, seed=seed).tolist()

    orders = [drawn(epoch) for epoch in range(40)]
    assert all([clip_of[row] for row in order] == [2, 1, 0] for order in orders)
    assert {row for order in orders for row in order} == set(range(6)) and orders[7] == drawn(7)
    assert orders != [drawn(epoch, 2) for epoch in range(40)]


def test_clips_with_several_captions_are_encoded_once(tmp_path):
    put(tmp_path, {})
    for name, frames in (("a", quarters(5, 32, 32)), ("b", grays(5))):
        write_exactly(tmp_path / f"{name}.mkv", frames, 8)
    (tmp_path / "captions.json").write_text('{"a.mkv": ["one", "two"], "b.mkv": "three"}')
    source = encode_videos(tmp_path, tiny_codec(), VideoConfig(5, 32, 32, 8))
    assert (source.prompts, source.clip_of, len(source.encoded)) == (("one", "two", "three"), (0, 0, 1), 2)
    a, also_a, b = source.latents([0, 1, 2])
    assert (a == also_a).all() and not (a == b).all()
