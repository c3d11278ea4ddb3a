"""Prompts: the built-in ones do not leak, and a file says exactly which line is wrong."""

import pytest

from unified_trainer.data.prompts import read_prompts, training_prompts, validation_prompts
from unified_trainer.data.tiny_world import HELD_OUT, SUBJECT_OF_CAPTION, SUBJECTS, TRAINING


def written(tmp_path, text: str):
    file = tmp_path / "prompts.txt"
    file.write_bytes(text.encode())
    return file


def test_training_never_sees_what_validation_asks():
    """No caption of validation is trained on, and the subjects held out altogether in no phrasing at all."""
    training, validation = training_prompts(), validation_prompts(len(SUBJECTS))
    assert len(set(training)) == len(training) and not set(training) & set(validation)
    assert {SUBJECT_OF_CAPTION[prompt] for prompt in training} == set(TRAINING)
    assert {SUBJECT_OF_CAPTION[prompt] for prompt in validation} == set(SUBJECTS)


def test_every_part_of_a_held_out_subject_is_seen_in_training():
    for part in ("color", "shape", "direction"):
        assert {getattr(subject, part) for subject in HELD_OUT} <= {getattr(subject, part) for subject in TRAINING}


@pytest.mark.parametrize("count", [2, 8, 48, 50])
def test_validation_asks_as_often_as_told_and_all_subjects_before_any_again(count):
    """The subjects held out altogether come first."""
    subjects = [SUBJECT_OF_CAPTION[prompt] for prompt in validation_prompts(count)]
    assert len(subjects) == count and len(set(subjects)) == min(count, len(SUBJECTS))
    assert set(subjects[: len(HELD_OUT)]) <= set(HELD_OUT)
    assert validation_prompts(50)[:count] == validation_prompts(count)


@pytest.mark.parametrize("text", ["one\ntwo words\n", "one\r\ntwo words\r\n", " one \ntwo words"])
def test_one_prompt_a_line(tmp_path, text):
    assert read_prompts(written(tmp_path, text)) == ("one", "two words")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("one\n\ntwo\n", "prompts.txt: line 2 is blank; remove it"),
        ("one\n  \n", "prompts.txt: line 2 is blank"),
        ("one\ntwo\none \n", r"prompts.txt: line 3 repeats line 1 \('one'\); remove one"),
        ("", "prompts.txt is empty"),
    ],
)
def test_a_bad_file_is_named_with_its_line(tmp_path, text, message):
    with pytest.raises(ValueError, match=message):
        read_prompts(written(tmp_path, text))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"absent\.txt: no such file"):
        read_prompts(tmp_path / "absent.txt")
