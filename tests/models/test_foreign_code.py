"""Folders that bring Python code: it is neither run nor asked about, and one message says so."""

import builtins
import json

import pytest
import torch
from helpers import CPU, HPSV3, SMALL, WAN, copy_of
from transformers import AutoTokenizer, CLIPTokenizer, PreTrainedTokenizerFast, Qwen2Tokenizer, Qwen2VLConfig

from unified_trainer.__main__ import main
from unified_trainer.basics.errors import UserError
from unified_trainer.models.encoders import EncoderConfig
from unified_trainer.models.folder import read_pretrained, read_tokenizer
from unified_trainer.models.wan.codec import WanCodec

CODE = """
from pathlib import Path
from transformers import PreTrainedTokenizerFast
Path({mark!r}).touch()
class Own(PreTrainedTokenizerFast):
    pass
"""
FILES = ("tokenizer_config.json", "config.json")


@pytest.fixture
def mark(tmp_path, monkeypatch):
    """A file that the code of `hostile` folders would write; nobody may ask either."""

    def question(*words: object) -> str:
        raise AssertionError(f"asked {words}")

    monkeypatch.setattr(builtins, "input", question)
    yield tmp_path / "mark"
    assert not (tmp_path / "mark").exists()


def hostile(folder, mark, file: str):
    """Adds code to a folder, and its name to a config of it."""
    (folder / "own.py").write_text(CODE.format(mark=str(mark)))
    settings = json.loads((folder / file).read_text()) if (folder / file).exists() else {}
    named = {"AutoTokenizer": ["own.Own", "own.Own"], "AutoConfig": "own.Own", "AutoModel": "own.Own"}
    settings |= {"auto_map": named, "tokenizer_class": "Own"}
    (folder / file).write_text(json.dumps(settings))
    return folder


@pytest.mark.parametrize("kind", [AutoTokenizer, CLIPTokenizer, Qwen2Tokenizer])
@pytest.mark.parametrize("file", FILES)
def test_a_tokenizer_with_code_is_refused(kind, file, tmp_path, mark):
    folder = hostile(copy_of(WAN / "tokenizer", tmp_path / "tokenizer"), mark, file)
    with pytest.raises(UserError, match=rf"{file} names Python code of its own \(auto_map\), which is never run here"):
        read_tokenizer(kind, folder)


def test_without_the_check_code_is_not_run_either(tmp_path, mark):
    """The second lock: `trust_remote_code=False` reaches transformers."""
    folder = hostile(copy_of(WAN / "tokenizer", tmp_path / "tokenizer"), mark, FILES[0])
    with pytest.raises(ValueError, match="trust_remote_code"):
        read_pretrained(AutoTokenizer, folder)


def test_code_beside_a_config_of_a_known_class_is_not_run(tmp_path, mark):
    folder = hostile(copy_of(HPSV3, tmp_path / "hpsv3"), mark, "config.json")
    assert isinstance(read_pretrained(Qwen2VLConfig, folder), Qwen2VLConfig)


def test_code_beside_weights_is_not_run(tmp_path, mark):
    folder = copy_of(WAN, tmp_path / "wan")
    for part in ("text_encoder", "vae", "transformer"):
        hostile(folder / part, mark, "config.json")
    codec = WanCodec.load(folder, CPU, EncoderConfig())
    assert torch.equal(
        *(one.prompts(["a red circle"])[0]["text"] for one in (codec, WanCodec.load(WAN, CPU, EncoderConfig())))
    )


def test_a_tokenizer_without_code_is_read():
    assert isinstance(read_tokenizer(AutoTokenizer, WAN / "tokenizer"), PreTrainedTokenizerFast)


@pytest.mark.slow
def test_a_run_ends_with_the_message(tmp_path, mark, run_folder, capsys):
    folder = copy_of(WAN, tmp_path / "wan")
    hostile(folder / "tokenizer", mark, FILES[0])
    assert main([*SMALL["finetune"], "--student.path", str(folder), "--output", str(run_folder)]) == 2
    assert "tokenizer_config.json names Python code of its own" in capsys.readouterr().err
    assert not run_folder.exists()
