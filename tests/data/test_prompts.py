"""Prompts: the built-in ones do not leak, and a file says exactly which line is wrong."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers import tiny_codec
from PIL import Image

from unified_trainer.basics.errors import MissingFileError, UserError
from unified_trainer.basics.requests import Request
from unified_trainer.data.prompts import read_prompts, training_captions, validation_captions
from unified_trainer.data.tiny_world import HELD_OUT, SUBJECT_OF_CAPTION, SUBJECTS, TRAINING
from unified_trainer.models.prompt_lengths import cut_in_words
from unified_trainer.rewards.base import RewardConfig
from unified_trainer.rewards.scorers import check_prompts
from unified_trainer.tools.sample.sample import read_lines


def written(tmp_path, text: str):
    file = tmp_path / "prompts.txt"
    file.write_bytes(text.encode())
    return file


def test_training_never_sees_what_validation_asks():
    """No caption of validation is trained on, and the subjects held out altogether in no phrasing at all."""
    training, validation = training_captions(), validation_captions(len(SUBJECTS))
    assert len(set(training)) == len(training) and not set(training) & set(validation)
    assert {SUBJECT_OF_CAPTION[prompt] for prompt in training} == set(TRAINING)
    assert {SUBJECT_OF_CAPTION[prompt] for prompt in validation} == set(SUBJECTS)


def test_every_part_of_a_held_out_subject_is_seen_in_training():
    for part in ("color", "shape", "direction"):
        assert {getattr(subject, part) for subject in HELD_OUT} <= {getattr(subject, part) for subject in TRAINING}


@pytest.mark.parametrize("count", [2, 8, 48, 50])
def test_validation_asks_as_often_as_told_and_all_subjects_before_any_again(count):
    """The subjects held out altogether come first."""
    subjects = [SUBJECT_OF_CAPTION[prompt] for prompt in validation_captions(count)]
    assert len(subjects) == count and len(set(subjects)) == min(count, len(SUBJECTS))
    assert set(subjects[: len(HELD_OUT)]) <= set(HELD_OUT)
    assert validation_captions(50)[:count] == validation_captions(count)


@pytest.mark.parametrize(
    "text",
    ["one\ntwo words\n", "one\r\ntwo words\r\n", " one \ntwo words", "\ufeffone\ntwo words", "one\n\ntwo words\none\n"],
)
def test_one_prompt_a_line(tmp_path, text):
    assert read_prompts(written(tmp_path, text)).prompts == ("one", "two words")


def test_a_line_separator_of_unicode_is_part_of_a_prompt(tmp_path):
    assert read_prompts(written(tmp_path, "one\u2028and\x0ctwo\nthree")).prompts == ("one\u2028and\x0ctwo", "three")


@pytest.mark.parametrize(
    ("text", "note"),
    [
        ("one\ntwo\n", ""),
        ("one\n\ntwo\n  \n", "2 prompts; skipped 2 blank and 0 repeated lines"),
        ("one\ntwo\none \none\n", "2 prompts; skipped 0 blank and 2 repeated lines"),
    ],
)
def test_skipped_lines_are_counted_once(tmp_path, text, note):
    said = read_prompts(written(tmp_path, text)).note
    assert said.endswith(note) and bool(said) == bool(note)


ROWS = [{"caption": "short", "extended": "a long text"}, {"caption": "other", "extended": "another long text"}]


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
@pytest.mark.parametrize(("column", "expected"), [("", "short"), ("caption", "short"), ("extended", "a long text")])
def test_a_column_of_a_table(tmp_path, kind, column, expected):
    file = tmp_path / f"prompts.{kind}"
    if kind == "jsonl":
        file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    elif kind == "csv":
        file.write_text("caption,extended\n" + "".join(f'"{row["caption"]}",{row["extended"]}\n' for row in ROWS))
    else:
        pq.write_table(pa.Table.from_pylist(ROWS), file)
    read = read_prompts(file, column=column)
    assert read.prompts[0] == expected and len(read.prompts) == 2


@pytest.mark.parametrize(
    "content",
    [
        ["one", "two"],
        [{"caption": "one"}, {"caption": "two"}],  # videos2caption.json of DanceGRPO
        {"data": [{"caption": "one", "image_path": None}, {"caption": "two", "image_path": None}]},  # of FastVideo
        [{"path": "a.mp4", "cap": ["one"]}, {"path": "b.mp4", "cap": ["two"]}],  # FastVideo's lists of videos
    ],
)
def test_json_holds_texts_or_records(tmp_path, content):
    (tmp_path / "prompts.json").write_text(json.dumps(content))
    assert read_prompts(tmp_path / "prompts.json").prompts == ("one", "two")


def test_videos_with_captions_give_prompts(tmp_path):
    """Their names are the places of messages; a video without a caption counts as a blank line."""
    for name, caption in (("a", "one"), ("b", ""), ("deeper/c", "two")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.mp4").touch()
        (tmp_path / f"{name}.txt").write_text(caption)
    read = read_prompts(tmp_path)
    assert read.prompts == ("one", "two") and read.places[1].endswith("deeper/c.mp4")
    assert read.note.endswith("2 prompts; skipped 1 blank and 0 repeated lines")


def test_a_folder_of_parquet_files_keeps_the_other_columns_of_its_rows(tmp_path):
    """Images are named relative to the file that names them, and messages name that file."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        Image.new("RGB", (16, 16), (ord(name), 0, 0)).save(tmp_path / name / "first.png")
        row = {"prompt": name, "negative_prompt": f"not {name}", "image": "first.png"}
        pq.write_table(pa.Table.from_pylist([row]), tmp_path / name / "rows.parquet")
    read = read_prompts(tmp_path, images=8)
    assert [(request.text, request.negative) for request in read.requests] == [("a", "not a"), ("b", "not b")]
    for name, request in zip("ab", read.requests, strict=True):
        assert request.images[0].file == tmp_path / name / "first.png"
    assert "b/rows.parquet: " in read.places[1]
    (tmp_path / "b" / "first.png").unlink()
    with pytest.raises(UserError, match=r"b/rows\.parquet: .*first\.png"):
        read_prompts(tmp_path, images=8)


def test_one_column_of_condition_images_is_read(tmp_path):
    """An empty one beside it is no choice; two that name images are."""
    Image.new("RGB", (16, 16)).save(tmp_path / "first.png")
    row = {"prompt": "a", "image": None, "images": ["first.png"]}
    (tmp_path / "prompts.json").write_text(json.dumps([row]))
    (request,) = read_prompts(tmp_path / "prompts.json", images=8).requests
    assert [image.file for image in request.images] == [tmp_path / "first.png"]
    (tmp_path / "prompts.json").write_text(json.dumps([row | {"condition": "first.png"}]))
    with pytest.raises(UserError, match="entry 1 fills the columns images and condition, of which one is read"):
        read_prompts(tmp_path / "prompts.json", images=8)


def test_a_folder_without_captions_is_refused(tmp_path):
    (tmp_path / "a.gif").touch()
    with pytest.raises(MissingFileError, match=r"without \.parquet files, videos and images"):
        read_prompts(tmp_path)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("prompts.yaml", "a\n", r"\.yaml is no ending of a file of prompts; have \.txt, \.json, "),
        ("prompts.json", "{", r"prompts\.json is not JSON"),
        ("prompts.json", '{"prompts": []}', "must hold a JSON list, or an object whose data is a list, not an object"),
        ("prompts.json", '["a", 3]', "entry 2 must be a text or an object, not a number"),
        ("prompts.json", '[{"cap": ["a", "b"]}]', r"entry 1 holds \['a', 'b'\] instead of a text"),
        ("prompts.txt", "", r"prompts\.txt is empty"),
        ("prompts.txt", "\n \n", r"prompts\.txt is empty"),
        ("prompts.jsonl", '{"prompt": "a"}\nnot json\n', r"prompts\.jsonl: line 2 is not JSON"),
        ("prompts.jsonl", '["a"]\n', r"line 1 must hold a JSON object, not a list"),
        ("prompts.jsonl", '{"other": "a"}\n', r"no column prompt or .* or prompt_en, only other"),
        ("prompts.jsonl", '{"prompt": null}\n', r"line 1 holds None instead of a text"),
        ("prompts.csv", "other\na\n", r"or prompt_en, only other: set prompts_column"),
        ("prompts.csv", "a,prompt\nb\n", r"row 1 holds None instead of a text"),
        ("prompts.parquet", "not parquet", r"prompts\.parquet cannot be read"),
    ],
)
def test_a_bad_file_is_named_with_its_line(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=message):
        read_prompts(tmp_path / name)


@pytest.mark.parametrize("name", ["absent.txt", "absent.jsonl", "absent.parquet", "folder/absent"])
def test_a_name_of_a_file_is_never_a_prompt(name):
    with pytest.raises(MissingFileError, match="no such file"):
        read_lines(["a red circle moving left", name])
    assert read_lines(["a red circle moving left"]) == [Request("a red circle moving left")]


def test_a_folder_of_videos_beside_is_no_prompt(tmp_path, monkeypatch):
    """Nor is a text too long for a name a file."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "clips").mkdir()
    (tmp_path / "clips" / "a.mp4").touch()
    (tmp_path / "clips" / "a.txt").write_text("one")
    assert read_lines(["clips", "x " * 300]) == list(Request.of(["one", "x " * 300]))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"absent\.txt: no such file"):
        read_prompts(tmp_path / "absent.txt")


@pytest.mark.parametrize("kind", ["jsonl", "csv"])
def test_a_row_may_have_its_own_negative_prompt(tmp_path, kind):
    """Rows that differ in it are not the same; an empty one is that of the run."""
    rows = [("one", "red"), ("one", ""), ("two", "blue"), ("two", "blue")]
    lines = [json.dumps({"prompt": text, "negative_prompt": negative}) for text, negative in rows]
    table = "\n".join(["prompt,negative_prompt", *map(",".join, rows)] if kind == "csv" else lines)
    (tmp_path / f"a.{kind}").write_text(table)
    read = read_prompts(tmp_path / f"a.{kind}")
    assert [(request.text, request.negative) for request in read.requests] == rows[:3]
    assert len({request.identity for request in read.requests}) == 3


@pytest.mark.parametrize("text", ["a.mp4\nb/c.MOV\n", "x/y.png\n\na cat\nb.jpg\n"])
def test_paths_are_no_prompts(tmp_path, text):
    with pytest.raises(UserError, match=r"prompts\.txt: line 1 is the path of a video or an image, as most are"):
        read_prompts(written(tmp_path, text))
    assert read_prompts(written(tmp_path, f"{text}a dog\na cow\nphoto of IMG_1.jpg\na fox")).prompts


def test_prompts_that_the_text_encoder_cuts_are_counted_with_their_lines(tmp_path):
    """They have equal embeddings if they are equal up to there; a prompt of just the length is not cut."""
    codec = tiny_codec()
    longest, _ = codec.cut([])
    fits = "a red circle " + "moving " * (longest - 4)  # and the end token
    file = read_prompts(written(tmp_path, f"{fits}\na dog\n{fits} left\n{fits} right\n"))
    assert codec.cut(file.prompts) == (longest, [2, 3])
    _, other, left, right = codec.encode_text(file.prompts)["text"]
    assert (left == right).all() and not (other == left).all()
    note = cut_in_words(codec.cut, *file.placed, "the text encoder")
    assert note.startswith(f"warning: 2 of 4 prompts are longer than the {longest} tokens that the text encoder reads")
    assert "prompts.txt: line 3" in note and note.endswith("prompts.txt: line 4")
    assert cut_in_words(codec.cut, file.prompts[:2], str, "the text encoder") == ""


def test_a_prompt_without_quotes_is_refused_before_an_ocr_run(tmp_path):
    file = read_prompts(written(tmp_path, 'a sign "open"\na dog\n'))
    with pytest.raises(UserError, match=r"prompts\.txt: line 2 has no words in double quotes, which the scorer ocr"):
        check_prompts(RewardConfig(kind="ocr"), file.placed)
    assert check_prompts(RewardConfig(kind="ocr"), (file.prompts[:1], str)) == []
