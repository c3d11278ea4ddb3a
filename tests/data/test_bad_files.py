"""Bad prompts, captions and tables: each is one error of one line with file and line or row."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from bad_inputs import refused
from helpers import HPSV3, copy_of

from unified_trainer.data.captioned import find_videos
from unified_trainer.data.prompts import read_prompts
from unified_trainer.data.tables import read_columns
from unified_trainer.rewards.base import RewardConfig
from unified_trainer.rewards.scorers import check_prompts

TEXTS = {
    "empty": (b"", "is empty"),
    "blank lines": (b"\n \n\r\n\t\n", "is empty"),
    "mark alone": (b"\xef\xbb\xbf\n", "is empty"),
    "latin-1": (b"one\ntwo\ncaf\xe9\n", "is not UTF-8: byte 12, in line 3, is 0xe9"),
    "UTF-16": ("one\n".encode("utf-16"), "is not UTF-8: byte 1"),
    "binary": (b"\x89PNG\r\n\x1a\n", "is not UTF-8: byte 1"),
    "NUL": (b"one\nt\0wo\n", "line 2 holds a NUL"),
    "NULs alone": (b"one\n\0\0\0\n", "line 2 holds a NUL"),
    "zero-width space": ("one\ntwo\n\u200b\n".encode(), "line 3 holds invisible characters alone"),
    "zero-width joiners": ("one\n\u200d \u200c\u2060\n".encode(), "line 2 holds invisible characters alone"),
    "marks": ("one\n\ufeff\ufeff\n".encode(), "line 2 holds invisible characters alone"),
    "controls": (b"one\n\x01\x02\n", "line 2 holds invisible characters alone"),
    "direction": ("\u202e\n".encode(), "line 1 holds invisible characters alone"),
}


@pytest.mark.parametrize("case", TEXTS)
def test_texts(tmp_path, case):
    data, said = TEXTS[case]
    (tmp_path / "mine.txt").write_bytes(data)
    refused(lambda: read_prompts(tmp_path / "mine.txt", "--validation.prompts"), "--validation.prompts", said)


def test_lines_are_split_at_line_ends_alone(tmp_path):
    """A zero-width joiner within a prompt is part of it, as in an emoji of a family."""
    lines = ["a\u2028b", "c\x0cd", "e\x0bf", "g\x85h", "i\rj", "\U0001f468\u200d\U0001f469"]
    (tmp_path / "mine.txt").write_bytes(("\ufeff" + "\r\n".join(lines)).encode())
    read = read_prompts(tmp_path / "mine.txt")
    assert list(read.prompts) == lines and read.note == ""
    assert [place.rpartition(": ")[2] for place in read.places] == [f"line {i}" for i in range(1, 7)]


TABLES = {
    "no JSON": ("jsonl", b'{"prompt": "a"}\nb\n', "line 2 is not JSON"),
    "list": ("jsonl", b"[1]\n", "line 1 must hold a JSON object, not a list"),
    "no column": ("jsonl", b'{"prompt": "a"}\n\n{"words": "b"}\n', "line 3 has no column prompt"),
    "mixed columns": ("jsonl", b'{"text": "a"}\n{"caption": "b"}\n', "line 2 has no column text, only caption"),
    "no columns": ("jsonl", b"{}\n", "line 1 has no column prompt"),
    "null": ("jsonl", b'{"prompt": null}\n', "line 1 holds None instead of a text"),
    "number": ("jsonl", b'{"prompt": 3}\n', "line 1 holds 3 instead of a text"),
    "texts": ("jsonl", b'{"prompt": ["a"]}\n', "line 1 holds ['a'] instead of a text"),
    "surrogate": ("jsonl", b'{"prompt": "\\ud83d"}\n', "line 1 holds half of a surrogate pair"),
    "NUL": ("jsonl", b'{"prompt": "a\\u0000"}\n', "line 1 holds a NUL"),
    "invisible": ("jsonl", b'{"prompt": "\\u200b"}\n', "line 1 holds invisible characters alone"),
    "deep": ("jsonl", b"[" * 100_000, "line 1 is nested too deeply"),
    "latin-1": ("jsonl", b'{"prompt": "caf\xe9"}\n', "byte 16, in line 1"),
    "nothing": ("jsonl", b"\n", "is empty"),
    "empty": ("csv", b"", "is empty"),
    "header alone": ("csv", b"prompt\n", "is empty"),
    "other header": ("csv", b"words\na\n", "row 1 has no column prompt"),
    "column twice": ("csv", b"prompt,prompt\na,b\n", "a column name stands twice"),
    "missing value": ("csv", b"path,prompt\na\n", "row 1 holds None"),
    "more values": ("csv", b"prompt\na, b\n", "row 1 has more values than the first line has columns"),
    "open quote": ("csv", b'prompt\n"a\n', "line 2"),
    "after a quote": ("csv", b'prompt\n"a"b\n', "line 2"),
    "long value": ("csv", b"prompt\n" + b"x" * 200_000, "field larger than field limit"),
    "NUL in csv": ("csv", b"prompt\na\0\n", ""),
    "latin-1 in csv": ("csv", b"prompt\ncaf\xe9\n", "byte 11, in line 2"),
    "no parquet": ("parquet", b"PAR1", "cannot be read"),
    "empty parquet": ("parquet", b"", "cannot be read"),
    "text as parquet": ("parquet", b"one\ntwo\n", "cannot be read"),
}


@pytest.mark.parametrize("case", TABLES)
def test_tables(tmp_path, case):
    kind, data, said = TABLES[case]
    (tmp_path / f"mine.{kind}").write_bytes(data)
    refused(lambda: read_prompts(tmp_path / f"mine.{kind}"), f"--prompts {tmp_path / 'mine'}.{kind}", said)


COLUMNS = {
    "numbers": (pa.array([1, 2]), "column prompt holds int64"),
    "dates": (pa.array([1, 2], pa.timestamp("ns")), "column prompt holds timestamp[ns]"),
    "truths": (pa.array([True, False]), "column prompt holds bool"),
    "bytes": (pa.array([b"a", b"b"]), "column prompt holds binary"),
    "lists": (pa.array([["a"], ["b"]]), "column prompt holds list"),
    "nulls": (pa.array([None, None]), "column prompt holds null"),
    "a null": (pa.array(["a", None]), "row 2 holds None"),
    "a NUL": (pa.array(["a", "b\0"]), "row 2 holds a NUL"),
    "no rows": (pa.array([], pa.string()), "is empty"),
    "no UTF-8": (pa.Array.from_buffers(pa.string(), 1, pa.array([b"\xff"]).buffers()), "cannot be read"),
}


@pytest.mark.parametrize("case", COLUMNS)
def test_columns_of_parquet(tmp_path, case):
    values, said = COLUMNS[case]
    pq.write_table(pa.table({"prompt": values}), tmp_path / "mine.parquet")
    refused(lambda: read_prompts(tmp_path / "mine.parquet"), f"{tmp_path / 'mine.parquet'}", said)


def test_a_column_twice_in_parquet(tmp_path):
    pq.write_table(pa.table([pa.array(["a"]), pa.array(["b"])], names=["prompt", "prompt"]), tmp_path / "a.parquet")
    refused(lambda: read_prompts(tmp_path / "a.parquet"), "has several columns prompt")


@pytest.mark.parametrize("name", ["absent.txt", "absent.csv", "absent.parquet", "x" * 300 + ".txt", "folder"])
def test_files_that_are_not_there(tmp_path, name):
    (tmp_path / "folder").mkdir()
    refused(lambda: read_prompts(tmp_path / name), f"--prompts {tmp_path / name}")


@pytest.mark.parametrize("kind", ["txt", "jsonl", "csv"])
@pytest.mark.parametrize("token", ["<|image_pad|>", "<|im_end|>", "<|Reward|>"])
def test_special_tokens_of_a_scorer(tmp_path, kind, token):
    """Found by the tokenizer alone: the folder's weights are not read, and are not even there."""
    (copy_of(HPSV3, tmp_path / "hpsv3") / "HPSv3.safetensors").write_bytes(b"")
    file = tmp_path / f"mine.{kind}"
    rows = ["a cat", f"a {token} dog"]
    written = {"txt": rows, "csv": ["prompt", *rows], "jsonl": [json.dumps({"prompt": row}) for row in rows]}
    file.write_text("\n".join(written[kind]))
    reward = RewardConfig(path=str(tmp_path / "hpsv3"))
    prompts, place = read_prompts(file, "--prompts").placed
    said = f"{file}: {'row' if kind == 'csv' else 'line'} 2 holds {token}"
    refused(lambda: check_prompts(reward, (prompts, place)), said)
    check_prompts(reward, (prompts[:1], place))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"path,caption\n", "holds no videos"),
        (b"path,caption\na.mp4,one\na.mp4,two\n", "names a.mp4 more than once"),
        (b"path\na.mp4\n", "no column caption"),
        (b"caption\na\n", "no column path"),
        (b"path,caption\n,a\n", ""),
        (b"path,caption\na.mp4,\xff\n", "is not UTF-8"),
    ],
)
def test_tables_of_videos(tmp_path, content, said):
    (tmp_path / "clips.csv").write_bytes(content)
    if said:
        refused(lambda: find_videos(tmp_path / "clips.csv", "data.path"), f"data.path {tmp_path / 'clips.csv'}", said)
    else:
        assert find_videos(tmp_path / "clips.csv", "data.path")[0].fault == "no such file"


@pytest.mark.parametrize(("caption", "said"), [(b"\xff", "UTF-8"), (b"\0", "NUL"), (b"\xe2\x80\x8b", "invisible")])
def test_captions_beside_videos(tmp_path, caption, said):
    (tmp_path / "a.mp4").write_bytes(b"")
    (tmp_path / "a.txt").write_bytes(caption)
    refused(lambda: find_videos(tmp_path, "data.path"), str(tmp_path / "a.txt"), said)


def test_a_video_with_a_name_that_is_too_long_has_a_fault(tmp_path):
    (tmp_path / "clips.csv").write_text(f"path,caption\n{'x' * 300}.mp4,a cat\n")
    (video,) = find_videos(tmp_path / "clips.csv", "data.path")
    assert video.fault == "File name too long"
    assert read_columns(tmp_path / "clips.csv", "data.path", ("caption",)) == [("row 1", ("a cat",))]
