"""Bad files that a command line names: one line, exit code 2, and nothing is written."""

import json

import pytest
from bad_inputs import ABSENT, edit, refused
from clip_files import write_clips
from helpers import HPSV3, WAN, copy_of, flags

from unified_trainer.__main__ import main
from unified_trainer.basics.errors import UserError
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.run import train
from unified_trainer.run.plan.plan import check
from unified_trainer.run.settings.command_line import parse
from unified_trainer.tools.sample.rollout_folder import ABOUT, VERSION, RolloutFolder

GRPO = flags({"method": "dance_grpo", "recipe": "tiny", "steps": 1, "validate-every": 0})
FINETUNE = flags({"method": "finetune", "recipe": "tiny", "steps": 1, "validate-every": 0})
LONG = "x" * 300


def written(folder, name, content: str | bytes):
    file = folder / name
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return file


def run_like(folder):
    (folder / "checkpoints").mkdir()
    return written(folder, "config.yaml", "").parent


def model(folder, file, field, value):
    edit(copy_of(WAN, folder / "wan") / file, field, value)
    return ["--student.path", str(folder / "wan")]


def reward(folder, file, field, value):
    edit(copy_of(HPSV3, folder / "hpsv3") / file, field, value)
    return ["--reward.path", str(folder / "hpsv3")]


# Each makes files in a folder and returns flags; the line that is printed holds the texts.
CASES = {
    "config empty": (lambda f: ["--config", str(written(f, "a.yaml", ""))], ["--config", "a.yaml is empty"]),
    "config list": (lambda f: ["--config", str(written(f, "a.yaml", "- a"))], ["a.yaml must hold keys"]),
    "config latin-1": (lambda f: ["--config", str(written(f, "a.yaml", b"a: \xff"))], ["byte 4"]),
    "config too long": (lambda f: ["--config", LONG], ["--config", "File name too long"]),
    "config of a folder": (lambda f: ["--config", str(f)], ["--config", "it is a folder"]),
    "recipe too long": (lambda f: ["--recipe", f"{LONG}.yaml"], ["--recipe", "File name too long"]),
    "recipe list": (lambda f: ["--recipe", str(written(f, "a.yaml", "[]"))], ["--recipe", "not a list"]),
    "resume too long": (lambda f: ["--resume", LONG], [LONG[:100], "File name too long"]),
    "init-from too long": (lambda f: ["--init-from", LONG], [LONG[:100], "File name too long"]),
    "output too long": (lambda f: ["--output", LONG], [LONG[:100], "File name too long"]),
    "prompts too long": (lambda f: ["--prompts", LONG], ["--prompts", "File name too long"]),
    "prompts of a folder": (lambda f: ["--prompts", str(f)], ["--prompts", "it is a folder"]),
    "prompts latin-1": (lambda f: ["--prompts", str(written(f, "a.txt", b"\xff"))], ["a.txt is not UTF-8: byte 1"]),
    "prompts invisible": (lambda f: ["--prompts", str(written(f, "a.txt", "a\n\u200b\n"))], ["a.txt: line 2 holds"]),
    "prompts special": (
        lambda f: ["--prompts", str(written(f, "a.txt", "a\nb <|image_pad|>\n"))],
        ["--prompts", "a.txt: line 2 holds <|image_pad|>, a special token of the scorer hpsv3"],
    ),
    "validation special": (
        lambda f: ["--validation.prompts", str(written(f, "a.txt", "<|Reward|>\n"))],
        ["--validation.prompts", "a.txt: line 1 holds <|Reward|>"],
    ),
    "student too long": (lambda f: ["--student.path", LONG], ["File name too long"]),
    "student is a run": (
        lambda f: ["--student.path", str(run_like(f))],
        ["is a run: start trained roles from its weights with --init-from", "export"],
    ),
    "student index list": (
        lambda f: ["--student.path", str(written(f, "model_index.json", "[]").parent)],
        ["model_index.json must hold a JSON object, not a list"],
    ),
    "student class": (
        lambda f: model(f, "transformer/config.json", "_class_name", "FluxTransformer2DModel"),
        ["transformer/config.json: _class_name must be 'WanTransformer3DModel'"],
    ),
    "student deviation": (lambda f: model(f, "vae/config.json", "latents_std", [0.0] * 16), ["latents_std.0 must be"]),
    "student boundary": (
        lambda f: model(f, "model_index.json", "boundary_ratio", "0.9"),
        ["model_index.json: boundary_ratio must be a valid number, not '0.9'"],
    ),
    "reward too long": (lambda f: ["--reward.path", LONG], ["File name too long"]),
    "reward placeholder": (
        lambda f: reward(f, "hpsv3.json", "instruction", "Mark it"),
        ["hpsv3.json: instruction must hold the placeholder {text_prompt}"],
    ),
    "reward template": (
        lambda f: reward(f, "chat_template.json", "chat_template", "{% for %}"),
        ["chat_template.json: chat_template fails"],
    ),
}


def ends_in_one_line(capsys, argv, named):
    assert main(argv) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("error: ") and shown.count("\n") == 1, shown
    assert [text for text in named if text not in shown] == [], shown


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_flags(tmp_path, capsys, monkeypatch, case):
    make, named = CASES[case]
    (tmp_path / "files").mkdir()
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    ends_in_one_line(capsys, [*GRPO, *make(tmp_path / "files")], named)
    assert [*(tmp_path / "work").iterdir()] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "named"),
    [(LONG, "File name too long"), ("absent", "does not exist"), ("absent.csv", "no such file")],
)
def test_clips(tmp_path, capsys, monkeypatch, path, named):
    monkeypatch.chdir(tmp_path)
    ends_in_one_line(capsys, [*FINETUNE, "--data.path", path], [path[:100], named])
    assert [*tmp_path.iterdir()] == []


SPECIAL = "b <|image_pad|>"
SCORED = ["--validate-every", "1", "--validation.num-samples", "2"]


def clips_with(folder, source, number):
    """Three clips, one of which has a special token in its caption, and where the message says that it is."""
    captions = ["a", "c", "d"]
    captions[number] = SPECIAL
    if source == "parquet":
        file = write_clips(folder / "a.parquet", caption=captions)
        return file, f"data.path: {file}: row {number + 1} ('clip{number}') holds <|image_pad|>"
    for i, caption in enumerate(captions):
        written(folder, f"{i}.mp4", b"")
        written(folder, f"{i}.txt", caption)
    return folder, f"data.path: the caption of {folder / f'{number}.mp4'} holds <|image_pad|>"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "number", "flags", "scored"),
    [
        ("parquet", 1, [*SCORED, "--validation.prompts", ""], True),
        ("folder", 1, [*SCORED, "--validation.prompts", ""], True),
        ("parquet", 2, [*SCORED, "--validation.prompts", ""], False),  # validation takes two
        ("parquet", 1, SCORED, False),  # validation has prompts of its own
        ("folder", 1, [], False),  # nothing is scored
    ],
)
def test_special_tokens_in_captions(tmp_path, capsys, monkeypatch, source, number, flags, scored):
    """They are found before anything is loaded, where the caption is scored, and pass where it is not."""
    (tmp_path / "clips").mkdir()
    (tmp_path / "work").mkdir()
    path, said = clips_with(tmp_path / "clips", source, number)
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setattr(train, "build", _stop_after_the_plan)
    words = [*FINETUNE, "--video.frames", "5", "--video.height", "32", "--video.width", "32", "--data.path", str(path)]
    ends_in_one_line(capsys, [*words, *flags], [said if scored else "the plan is sound"])
    assert [*(tmp_path / "work").iterdir()] == []


def _stop_after_the_plan(run, mesh, output):
    check(run, mesh)
    raise UserError("the plan is sound")


ENVIRONMENT = {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}


@pytest.mark.parametrize("name", ["WORLD_SIZE", "RANK", "LOCAL_RANK"])
@pytest.mark.parametrize("value", ["abc", "", "1.5", "-1", "1e3", "\u00b2"])
def test_environment(monkeypatch, name, value):
    for one, text in (ENVIRONMENT | {name: value}).items():
        monkeypatch.setenv(one, text)
    refused(lambda: Mesh.join("cpu"), f"environment variable {name} must be an integer")


@pytest.mark.parametrize(("name", "value"), [("WORLD_SIZE", "0"), ("RANK", "2"), ("RANK", "abc")])
def test_environment_of_a_run(tmp_path, capsys, monkeypatch, name, value):
    monkeypatch.chdir(tmp_path)
    for one, text in (ENVIRONMENT | {name: value}).items():
        monkeypatch.setenv(one, text)
    assert main(GRPO) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("error") and shown.count("\n") == 1 and name in shown, shown
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("compiler", ["absent-compiler", "sh"])  # the second stands for one that is there
def test_compiled_blocks_need_a_compiler(tmp_path, monkeypatch, compiler):
    """Without one the run ends before its folder is made, not in the first step."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CXX", compiler)
    run = parse([*FINETUNE, "--student.compile"])
    if compiler == "sh":
        assert check(run, Mesh.join("cpu")).roles["student"].config.compile
    else:
        refused(
            lambda: check(run, Mesh.join("cpu")), "student.compile", compiler, "apt-get install", "--student.no-compile"
        )


SIZE = {"frames": 5, "height": 32, "width": 32}
SOUND = {"version": VERSION, "prompts": ["a"], "num_samples": 1, "batch": 1, "seed": 0, "video": SIZE, "base": "tiny"}


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("version", 99, "has version 99"),
        ("version", ABSENT, "has version None"),
        ("prompts", [], "prompts list must have at least 1 item"),
        ("prompts", [3], "prompts.0 must be a valid string"),
        ("prompts", "a", "prompts must be a valid list"),
        ("num_samples", 0, "num_samples must be greater"),
        ("batch", "8", "batch must be a valid integer"),
        ("seed", None, "seed must be a valid integer"),
        ("video", [5, 32, 32], "video must be"),
        ("video.frames", ABSENT, "video.frames is missing"),
        ("video.width", -32, "video.width must be greater"),
        ("base", ABSENT, "base is missing"),
        ("families", "mine.py:MINE", "families must be a valid list"),
    ],
)
def test_rollouts(tmp_path, field, value, said):
    written(tmp_path, ABOUT, json.dumps(SOUND))
    assert RolloutFolder.read(tmp_path).samples == [(0, "a")]
    edit(tmp_path / ABOUT, field, value)
    refused(lambda: RolloutFolder.read(tmp_path), str(tmp_path / ABOUT), said)
