"""Damaged run directories: runs and report say which one cannot be read, and go on with the others."""

import os
import shutil
from pathlib import Path

import pytest
from run_folders import STEPS, make_run

from unified_trainer.__main__ import main

pytestmark = pytest.mark.slow


def over(text: str):
    return lambda file: file.write_text(text)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def binary(file: Path) -> None:
    file.write_bytes(bytes(range(256)) * 4)


def fifo(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def folder_there(file: Path) -> None:
    file.unlink()
    file.mkdir()


def broken_link(file: Path) -> None:
    file.unlink()
    file.symlink_to("absent")


def circle(file: Path) -> None:
    file.unlink()
    file.symlink_to(file.name)


def device(file: Path) -> None:
    file.unlink()
    file.symlink_to("/dev/zero")


ANY = {"binary": binary, "fifo": fifo, "folder": folder_there, "broken link": broken_link, "circle": circle}
ANY |= {"device": device}
DEEP = "[" * 100_000
CONFIGS = {
    "empty": "",
    "a list": "- 1\n",
    "int of nothing": "seed: !!int ''\n",
    "bool of maybe": "seed: !!bool maybe\n",
}
CONFIGS |= {
    "a date": "seed: 2026-01-01\n",
    "an object": "seed: !!python/object:os.system {}\n",
    "a tab": "seed:\t- x\n",
}
CONFIGS |= {"huge hex": f"steps: 0x{'f' * 10_000}\n", "in itself": "a: &a [*a]\n", "deep": f"a: {DEEP}\n"}
CONFIGS |= {"steps of text": "method: dance_grpo\nsteps: many\n", "a number": "3\n", "method of list": "method: [a]\n"}
METRICS = {"a list": "[]\n", "no step": '{"train/loss": 1}\n', "step of text": '{"step": "a"}\n', "deep": f"{DEEP}\n"}
METRICS |= {"huge step": f'{{"step": {"9" * 30}, "train/loss": 1}}\n', "time of text": '{"step": 1, "time": "late"}\n'}
METRICS |= {"endless": '{"step": 1, "train/loss": 1e999, "time": 1e999}\n', "text": '{"step": 1, "train/loss": "x"}\n'}
METRICS |= {"negative": '{"step": -5, "train/loss": 1}\n', "truth": '{"step": true, "train/loss": 1}\n'}
STARTS = {"a list": "[]\n", "nothing in it": "{}\n", "time of number": '{"time": 3, "step": 0}\n', "deep": f"{DEEP}\n"}
STARTS |= {"git of text": '{"time": "t", "step": 0, "git": "abc"}\n'}
STARTS |= {"versions of list": '{"time": "t", "step": 0, "versions": [1]}\n'}
SAMPLES = {"a list": "[]\n", "nothing in it": "{}\n", "deep": f"{DEEP}\n"}
SAMPLES |= {"scores of text": '{"sample": 0, "seed": 1, "prompt": "a", "reward": 1, "scores": "x", "video": null}\n'}
FILES = {"config.yaml": CONFIGS, "metrics.jsonl": METRICS, "environment.jsonl": STARTS}
FILES |= {"validation/step_0/samples.jsonl": SAMPLES, ".lock": {"text": "x"}}
FILES |= {f"checkpoints/step_{STEPS}/manifest.json": {"a list": "[]\n", "nothing in it": "{}\n", "deep": DEEP}}
DAMAGES = [(file, name, damage) for file in FILES for name, damage in ANY.items()]
DAMAGES += [(file, name, over(text)) for file, texts in FILES.items() for name, text in texts.items()]
DAMAGES += [(file, "cut", cut) for file in ("config.yaml",)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    root = tmp_path_factory.mktemp("whole") / "runs"
    make_run(root / "good", videos=0)
    make_run(root / "bad", videos=0)
    return root


@pytest.mark.parametrize(
    ("file", "damage"),
    [(file, damage) for file, _, damage in DAMAGES],
    ids=[f"{file}-{name}" for file, name, _ in DAMAGES],
)
def test_the_other_runs_go_on(whole, tmp_path, capsys, file, damage):
    root = tmp_path / "runs"
    shutil.copytree(whole, root)
    (root / "bad" / file).touch()
    damage(root / "bad" / file)
    assert main(["runs", str(root)]) == 0
    said = capsys.readouterr().out
    assert "good" in said and "bad" in said
    code = main(["report", str(root / "good"), str(root / "bad"), "--out", str(tmp_path / "page.html")])
    said = capsys.readouterr()
    assert code == 0 and (tmp_path / "page.html").is_file(), said.err
    assert main(["report", str(root / "bad"), "--out", str(tmp_path / "alone.html")]) in (0, 2)
    assert capsys.readouterr().err.count("\n") <= 1
