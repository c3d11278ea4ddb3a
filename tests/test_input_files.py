"""Bad JSON, YAML and text files: each is one error of one line with file, and line, byte or field."""

import os

import pytest
from bad_inputs import refused
from pydantic import Field

from unified_trainer.basics.input_files import Schema, read_as, read_json, read_text, read_yaml
from unified_trainer.run.settings.command_line import read_reward
from unified_trainer.run.settings.config import load_recipe

LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 9)
)
DEEP = 200_000

NO_JSON = {
    "empty": (b"", "is empty"),
    "spaces": (b" \n\t", "is empty"),
    "list": (b"[]", "not a list"),
    "text": (b'"a"', "not a text"),
    "number": (b"3", "not a number"),
    "null": (b"null", "not null"),
    "true": (b"true", "not true or false"),
    "cut": (b'{"a": 1', "line 1"),
    "comma": (b'{"a": 1,}', "line 1"),
    "single quotes": (b"{'a': 1}", "line 1"),
    "comment": (b'{"a": 1} // end', "is not JSON"),
    "two objects": (b"{}{}", "is not JSON"),
    "YAML": (b"a: 1\n", "is not JSON"),
    "HTML": (b"<html>404</html>", "is not JSON"),
    "pointer of Git LFS": (b"version https://git-lfs.github.com/spec/v1\n", "is not JSON"),
    "control character": (b'{"a": "\x01"}', "is not JSON"),
    "NULs": (bytes(64), "is not JSON"),
    "digits": (b'{"a": ' + b"9" * 5000 + b"}", "is not JSON"),
    "deep": (b"[" * DEEP, "nested too deeply"),
    "latin-1": (b'{"a": "caf\xe9"}', "byte 11, in line 1, is 0xe9"),
    "latin-1 in line 3": (b'{"a":\n\n"\xff"}', "byte 9, in line 3, is 0xff"),
    "UTF-16": ('{"a": 1}'.encode("utf-16"), "byte 1"),
    "surrogate": (b'{"a": "\xed\xa0\x80"}', "byte 8"),
    "mark": (b"\xef\xbb\xbf{}", "byte order mark"),
}


@pytest.mark.parametrize("case", NO_JSON)
def test_json(tmp_path, case):
    data, said = NO_JSON[case]
    (tmp_path / "config.json").write_bytes(data)
    refused(lambda: read_json(tmp_path / "config.json"), str(tmp_path / "config.json"), said)


NO_YAML = {
    "empty": (b"", "is empty"),
    "comment": (b"# nothing\n", "is empty"),
    "list": (b"- a\n", "not a list"),
    "text": (b"words", "not a text"),
    "zero": (b"0", "not a number"),
    "false": (b"false", "not true or false"),
    "null": (b"null", "not null"),
    "tab": (b"a:\n\t- b", "line 2"),
    "open": (b"a: [1, 2", "is not valid YAML"),
    "indent": (b"a: 1\n b: 2\n", "line 2"),
    "two documents": (b"a: 1\n---\nb: 2\n", "line 2"),
    "NUL": (b"a: 1\0", "is not valid YAML"),
    "latin-1": (b"a: caf\xe9\n", "byte 7, in line 1, is 0xe9"),
    "UTF-16": ("a: 1".encode("utf-16"), "byte 1"),
    "twice": (b"steps: 1\nsteps: 2\n", "the key steps stands there twice"),
    "twice within": (b"a:\n  b: 1\n  b: 2\n", "line 3: the key b stands there twice"),
    "number as a key": (b"1: a\n", "line 1: the key '1' is no text"),
    "truth as a key": (b"a: 1\nyes: 2\n", "line 2: the key 'yes' is no text"),
    "null as a key": (b"~: a\n", "is no text"),
    "list as a key": (b"? [a]\n: b\n", "is no text"),
    "date": (b"a: 2020-01-01\n", "line 1: '2020-01-01' is a timestamp"),
    "impossible date": (b"a: 2020-99-99\n", "timestamp"),
    "bytes": (b"a: !!binary aGk=\n", "line 1"),
    "object": (b"a: !!python/object/apply:os.system [id]\n", "could not determine a constructor"),
    "name": (b"a: !!python/name:os.system ''\n", "line 1"),
    "own tag": (b"a: !thing 1\n", "thing"),
    "no number": (b"a: !!int abc\n", "is not valid YAML"),
    "unknown alias": (b"a: *b\n", "is not valid YAML"),
    "alias of itself": (b"a: &a [*a]\n", "an alias refers to what it is in"),
    "mapping of itself": (b"&a b: *a\n", ""),
    "laughs": (LAUGHS.encode(), "more than 10000 keys and values"),
    "long": (b"a: [" + b"1, " * 10_001 + b"1]\n", "more than 10000 keys and values"),
    "large": (b"#" * 2**20 + b"\na: 1\n", "1.0 MiB"),
    "deep": (b"[" * 1000, "nested too deeply"),
}


@pytest.mark.parametrize("case", NO_YAML)
def test_yaml(tmp_path, case):
    data, said = NO_YAML[case]
    (tmp_path / "mine.yaml").write_bytes(data)
    if case != "mapping of itself":
        refused(lambda: read_yaml(tmp_path / "mine.yaml", "--config"), f"--config {tmp_path / 'mine.yaml'}", said)
    else:  # an anchor of a key: valid, and no reference to the mapping
        assert read_yaml(tmp_path / "mine.yaml") == {"b": "b"}


def test_sound_files_are_read(tmp_path):
    """Byte order mark, merge keys, aliases and plain values."""
    (tmp_path / "a.yaml").write_bytes("\ufeffa: &a {b: 1, c: null}\nd: {<<: *a, c: [1.5, yes, 'x']}\n".encode())
    assert read_yaml(tmp_path / "a.yaml") == {"a": {"b": 1, "c": None}, "d": {"b": 1, "c": [1.5, True, "x"]}}
    (tmp_path / "a.json").write_text('{"a": [1]}')
    assert read_json(tmp_path / "a.json") == {"a": [1]}


def unreadable(folder, case):
    """A path that cannot be read, and what the error says."""
    file = folder / "file"
    if case == "folder":
        file.mkdir()
        return file, "it is a folder"
    if case == "pipe":
        os.mkfifo(file)
        return file, "it is a device or pipe"
    if case == "loop":
        file.symlink_to(file)
        return file, "Too many levels"
    if case == "dangling":
        file.symlink_to(folder / "nothing")
        return file, "no such file"
    if case == "below a file":
        file.write_text("")
        return file / "inner", "no such file"
    if case == "long name":
        return folder / ("x" * 300), "File name too long"
    if case == "long path":
        return folder / "/".join(["x" * 100] * 50), "File name too long"
    if case == "NUL":
        return folder / "a\0b", "NUL"
    return file, "no such file"


CASES = ("absent", "folder", "pipe", "loop", "dangling", "below a file", "long name", "long path", "NUL")


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("read", [read_text, read_yaml])
def test_paths(tmp_path, case, read):
    file, said = unreadable(tmp_path, case)
    refused(lambda: read(file, "--config"), "--config ", said)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_permissions(tmp_path):
    (tmp_path / "a.json").write_text("{}")
    (tmp_path / "a.json").chmod(0)
    refused(lambda: read_json(tmp_path / "a.json"), "a.json", "Permission denied")


class Size(Schema):
    width: int = Field(ge=1)
    scale: float = 1.0
    names: list[str] = Field(default=["a"], min_length=1)
    open: bool = False


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{}", "width is missing"),
        ('{"width": 0}', "width must be greater than or equal to 1, not 0"),
        ('{"width": "1"}', "width must be a valid integer, not '1'"),
        ('{"width": 1.5}', "width must be a valid integer, not 1.5"),
        ('{"width": true}', "width must be a valid integer, not True"),
        ('{"width": null}', "width must be a valid integer, not None"),
        ('{"width": [1]}', "width must be a valid integer, not [1]"),
        ('{"width": 1, "scale": NaN}', "scale must be a finite number"),
        ('{"width": 1, "scale": 1e999}', "scale must be a finite number"),
        ('{"width": 1, "scale": "1"}', "scale must be a valid number"),
        ('{"width": 1, "names": []}', "names list must have at least 1 item"),
        ('{"width": 1, "names": "a"}', "names must be a valid list"),
        ('{"width": 1, "names": ["a", 2]}', "names.1 must be a valid string, not 2"),
        ('{"width": 1, "open": 1}', "open must be a valid boolean"),
        ('{"width": 1, "open": "' + "x" * 500 + '"}', "xxx..."),
    ],
)
def test_fields(tmp_path, content, said):
    (tmp_path / "size.json").write_text(content)
    refused(lambda: read_as(Size, tmp_path / "size.json"), f"{tmp_path / 'size.json'}: ", said)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("base: [tiny]", "base must name another recipe"),
        ("base: absent", "absent"),
        ("base: FILE", "base must name another recipe"),
        ("common: 3", "common must hold keys and values"),
        ("common: [steps]", "common must hold keys and values"),
        ("fits: tiny", "fits must hold keys and values"),
        ("finetune: null", "finetune must hold keys and values"),
    ],
)
def test_recipes(tmp_path, content, said):
    file = tmp_path / "mine.yaml"
    file.write_text(content.replace("FILE", str(file)))
    refused(lambda: load_recipe(str(file)), said)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("common: {}", "section reward"),
        ("reward: 3", "section reward"),
        ("reward: [clip]", "section reward"),
        ("reward: {}", "names no scorer"),
        ("reward: {weight: 2}", "names no scorer"),
        ("reward: {wait: 2}", "wait"),
        ("reward: {path: tiny, weight: heavy}", "weight"),
        ("reward: {path: tiny, frames: some}", "frames"),
    ],
)
def test_rewards_of_a_file(tmp_path, content, said):
    (tmp_path / "reward.yaml").write_text(content)
    refused(lambda: read_reward(tmp_path / "reward.yaml"), str(tmp_path / "reward.yaml"), said)
