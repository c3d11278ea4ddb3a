"""Bad inputs: each is one error of one line that names the file, and what is wrong with it. The table is cases.py."""

import json
import os
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from adapter_files import diffusers, peft
from bad_inputs import ABSENT, edit, refused
from cases import COLUMNS, CONTENTS, FIELDS, FLAGS, LONG, SCORES, SOUND_TEMPLATE
from clip_files import RAW, write_clips
from helpers import ALONE, CPU, HPSV3, LATENT_SHAPE, WAN, copy_of, flags, small_model
from pydantic import Field
from safetensors.torch import load_file, save_file

from unified_trainer.__main__ import main
from unified_trainer.basics.errors import UserError
from unified_trainer.basics.input_files import Schema, read_as, read_json, read_text, read_yaml
from unified_trainer.data.captioned import find_videos
from unified_trainer.data.parquet_files import read_stored_files
from unified_trainer.data.prompts import read_prompts
from unified_trainer.data.row_kinds import ClipRows
from unified_trainer.data.tables import read_texts
from unified_trainer.data.video_files import write_mp4
from unified_trainer.models.adapter_file import open_adapter
from unified_trainer.models.adapter_location import locate
from unified_trainer.models.encoders import EncoderConfig
from unified_trainer.models.wan.codec import WanCodec
from unified_trainer.models.wan.family import WAN as FAMILY
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.rewards import clip  # noqa: F401  (its schemas are looked at)
from unified_trainer.rewards.base import RewardConfig
from unified_trainer.rewards.hpsv3 import HPSv3
from unified_trainer.rewards.reward import VideoReward
from unified_trainer.rewards.scorers import _plain, check_prompts
from unified_trainer.run import train
from unified_trainer.run.plan.plan import check
from unified_trainer.run.registry import family_of, open_model
from unified_trainer.run.settings.command_line import parse, read_reward
from unified_trainer.run.settings.config import load_recipe
from unified_trainer.tools.sample.rollout_folder import ABOUT, VERSION, RolloutFolder

LAYER = "blocks.0.attn1.to_q"
FACTORS = {LAYER: (torch.ones(3, 24), torch.ones(24, 3))}
NETWORK = small_model().network
ROLLOUT = {"version": VERSION, "prompts": ["a"], "num_samples": 1, "batch": 1, "seed": 0, "base": "tiny"}
ROLLOUT["video"] = {"frames": 5, "height": 32, "width": 32}


class Size(Schema):
    """A field of every type."""

    width: int = Field(ge=1)
    scale: float = 1.0
    names: list[str] = Field(default=["a"], min_length=1)
    of: dict[str, int] = {}
    open: bool = False


# Sound inputs, and how they are read.


def nothing(folder):
    pass


def linked(source):
    """Make a folder whose JSON files are copies and whose weights are links, until one is spoilt."""

    def make(folder):
        for file in filter(Path.is_file, source.rglob("*")):
            copy = folder / file.relative_to(source)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.symlink_to(file)
            if file.suffix == ".json":
                own(copy)

    return make


def own(file):
    """Put a copy in place of a link."""
    data = file.read_bytes()
    file.unlink()
    file.write_bytes(data)


def written(name, content):
    return lambda folder: (folder / name).write_text(json.dumps(content))


def plan_model(folder, _=None):
    """Read what a run reads of a folder before any weight."""
    family, _ = family_of("student", str(folder))
    networks, _ = family.networks(folder)
    family.latent_shape(folder, 5, 32, 32)
    for component in networks:
        open_model("student", str(folder), component, causal=False)


def open_lora(path, _=None):
    place = locate(path, "student.adapter.path", None, FAMILY.experts, FAMILY.adapter_files)
    return open_adapter(place, NETWORK, FAMILY.experts, FAMILY.published_layer)


def stored_clips(folder, _=None):
    return read_stored_files(folder / "a.parquet", ClipRows(LATENT_SHAPE))


SUBJECTS = {  # how a sound folder is made, how it is read once a file is spoilt, how a message names the file
    "fields": (written("size.json", {"width": 1}), lambda _, file: read_as(Size, file), "{}: "),
    "model": (linked(WAN), plan_model, "{}"),
    "codec": (linked(WAN), lambda folder, _: WanCodec.load(folder, CPU, EncoderConfig()), "{}"),
    "hpsv3": (linked(HPSV3), lambda folder, _: HPSv3.load(folder, CPU, torch.float32), "{}"),
    "adapter": (lambda folder: peft(folder, FACTORS, 1.0), open_lora, "{}"),
    "rollout": (written(ABOUT, ROLLOUT), lambda folder, _: RolloutFolder.read(folder), "{}"),
    "json": (nothing, lambda _, file: read_json(file), "{}"),
    "yaml": (nothing, lambda _, file: read_yaml(file, "--config"), "--config {}"),
    "recipe": (nothing, lambda _, file: load_recipe(str(file)), ""),
    "reward": (nothing, lambda _, file: read_reward(file), "{}"),
    "prompts": (nothing, lambda _, file: read_prompts(file, "--my.prompts"), "--my.prompts {}"),
    "videos": (nothing, lambda _, file: find_videos(file, "data.path"), "data.path {}"),
    "clips": (nothing, stored_clips, "data.path"),
}


def spoil(file, field, value):
    """Give a field of a file, or the whole file, a wrong value."""
    if os.path.islink(file):
        own(file)
    if callable(value):
        value(file)
    elif field:
        edit(file, field, value)
    elif value is not ABSENT:
        file.write_bytes(value if isinstance(value, bytes) else value.encode())
    elif os.path.exists(file):
        file.unlink()


@pytest.mark.slow
@pytest.mark.parametrize("subject", SUBJECTS)
def test_files(subject, tmp_path, subtests):
    make, read, place = SUBJECTS[subject]
    cases = [(file, *case) for file, rows in FIELDS.get(subject, {}).items() for case in rows]
    cases += [(file, "", *case) for file, *case in CONTENTS.get(subject, [])]
    for number, (file, field, value, words, *named) in enumerate(cases):
        with subtests.test(f"{file[:40]} {field} {value!r:.60}"):
            folder = tmp_path / str(number)
            folder.mkdir()
            make(folder)
            spoil(folder / file, field, value)
            said = place.format(folder / (named[0] if named else file))
            refused(lambda: read(folder, folder / file), said, words)  # noqa: B023


@pytest.mark.slow
@pytest.mark.parametrize("subject", [name for name in SUBJECTS if name in FIELDS])
def test_what_is_spoilt_was_sound(subject, tmp_path):
    make, read, _ = SUBJECTS[subject]
    make(tmp_path)
    read(tmp_path, tmp_path / "size.json")


def test_columns_of_clips(tmp_path, subtests):
    """Of latents and of text embeddings; named in the second row of three."""
    for columns, words in COLUMNS:
        with subtests.test(f"{columns!r:.60}"):
            file = write_clips(tmp_path / "a.parquet", text=[torch.ones(4, 32)] * 3, **columns)
            refused(lambda: stored_clips(tmp_path), "data.path", f"{file}", words)


def test_stored_clips_that_are_cut_have_two_columns_of_a_name_or_no_rows(tmp_path):
    file = write_clips(tmp_path / "a.parquet")
    whole, table = file.read_bytes(), pq.read_table(file)
    for keep in (0.1, 0.5, 0.9, 0.99):
        file.write_bytes(whole[: int(keep * len(whole))])
        refused(lambda: stored_clips(tmp_path), f"{file} is not whole parquet")
    pq.write_table(table.append_column("caption", table["caption"]), file)
    refused(lambda: stored_clips(tmp_path), f"{file} has several columns caption")
    pq.write_table(table[:0], file)
    refused(lambda: stored_clips(tmp_path), f"data.path {file}: its files hold no rows")


@pytest.mark.parametrize("read", [read_text, read_yaml])
def test_paths_that_cannot_be_read(tmp_path, subtests, read):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "dangling").symlink_to(tmp_path / "nothing")
    (tmp_path / "file").write_text("")
    for path, words in (
        ("absent", "no such file"),
        (".", "it is a folder"),
        ("pipe", "it is a device or pipe"),
        ("loop", "Too many levels"),
        ("dangling", "is a link to"),
        ("file/inner", "no such file"),
        (LONG, "File name too long"),
        ("/".join(["x" * 100] * 50), "File name too long"),
        ("a\0b", "NUL"),
    ):
        with subtests.test(path[:40]):
            refused(lambda: read(tmp_path / path, "--config"), "--config ", words)  # noqa: B023


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_permissions(tmp_path):
    (tmp_path / "a.json").write_text("{}")
    (tmp_path / "a.json").chmod(0)
    refused(lambda: read_json(tmp_path / "a.json"), "a.json", "Permission denied")


WITHOUT_BOUNDS = {  # any number is sound, or what it counts is in the folder
    "rollout_folder.About": {"batch": "maximum", "num_samples": "maximum", "seed": "minimum, maximum"},
    "adapter_settings.AdapterSettings": {
        "r": "maximum",
        "layers_to_transform": "minimum, maximum",
        **dict.fromkeys(("lora_alpha", "rank_pattern", "alpha_pattern"), "minimum, maximum"),
    },
    "hpsv3_folder.NetworkConfig": {"image_token_id": "maximum"},
    "rollout_folder.RolloutSize": dict.fromkeys(("frames", "height", "width"), "maximum"),
    "folder.TokenizerConfig": {"model_max_length": "maximum"},
    "configs.VAEConfig": {"attn_scales": "minimum, maximum"},
    "forms.SampledAs": {"chunk_frames": "minimum, maximum"},
}


def missing_bounds(kind):
    """Return which bounds the numbers of a type in a JSON schema lack."""
    inner = [*kind.get("anyOf", ()), kind.get("items"), kind.get("additionalProperties")]
    missing = [end for one in inner if isinstance(one, dict) for end in missing_bounds(one)]
    if kind.get("type") in ("integer", "number") and "const" not in kind:
        missing += [end for end in ("minimum", "maximum") if not any(key.lower().endswith(end) for key in kind)]
    return missing


def test_every_number_of_a_file_has_bounds():
    schemas = [
        schema
        for schema in Schema.__subclasses__()
        if schema.__module__.startswith("unified_trainer.")  # and those that are made of a class's arguments are not
        and vars(sys.modules[schema.__module__]).get(schema.__name__) is schema
    ]
    missing = {}
    for schema in schemas:
        place = f"{schema.__module__.rpartition('.')[2]}.{schema.__name__}"
        ends = {name: missing_bounds(kind) for name, kind in schema.model_json_schema()["properties"].items()}
        missing[place] = {name: ", ".join(dict.fromkeys(what)) for name, what in ends.items() if what}
    assert {name: fields for name, fields in missing.items() if fields} == WITHOUT_BOUNDS


# Sound inputs of odd looks.


def test_sound_files_are_read(tmp_path):
    """Byte order mark, merge keys, aliases and plain values; an anchor of a key refers to no mapping."""
    file = tmp_path / "a.yaml"
    file.write_bytes("\ufeffa: &a {b: 1, c: null}\nd: {<<: *a, c: [1.5, yes, 'x']}\n".encode())
    assert read_yaml(file) == {"a": {"b": 1, "c": None}, "d": {"b": 1, "c": [1.5, True, "x"]}}
    file.write_text("&a b: *a\n")
    assert read_yaml(file) == {"b": "b"}
    (tmp_path / "a.json").write_text('{"a": [1]}')
    assert read_json(tmp_path / "a.json") == {"a": [1]}


def test_a_sound_template_is_taken(tmp_path):
    folder = copy_of(HPSV3, tmp_path / "hpsv3")
    edit(folder / "chat_template.json", "chat_template", SOUND_TEMPLATE)
    HPSv3.load(folder, CPU, torch.float32)


def test_the_header_of_an_adapter_of_diffusers(tmp_path):
    file = next(diffusers(tmp_path / "diffusers", FACTORS, 1.0).glob("*.safetensors"))
    for header, words in (("[]", "must hold a JSON object"), ('{"transformer.r": "3"}', "r must be a valid integer")):
        save_file(load_file(file), file, metadata={"lora_adapter_metadata": header})
        refused(lambda: open_lora(file), f"{file}: lora_adapter_metadata in its header", words)


def test_lines_are_split_at_line_ends_alone(tmp_path):
    """A zero-width joiner within a prompt is part of it, as in an emoji of a family."""
    lines = ["a\u2028b", "c\x0cd", "e\x0bf", "g\x85h", "\U0001f468\u200d\U0001f469"]
    for end in ("\n", "\r\n", "\r"):
        (tmp_path / "mine.txt").write_bytes(("\ufeff" + end.join(lines)).encode())
        read = read_prompts(tmp_path / "mine.txt")
        assert list(read.prompts) == lines and read.note == ""
        assert [place.rpartition(": ")[2] for place in read.places] == [f"line {i}" for i in range(1, 6)]


def test_a_missing_video_is_a_fault_of_its_row(tmp_path):
    file = tmp_path / "clips.csv"
    for name, fault in (("", "no such file"), (f"{LONG}.mp4", "File name too long")):
        file.write_text(f"path,caption\n{name},a cat\n")
        (video,) = find_videos(file, "data.path")
        assert video.fault == fault
    assert read_texts(file, "data.path", ("caption",))[0][:2] == ("row 1", "a cat")


def test_large_types_and_dictionaries_are_sound(tmp_path):
    """As other writers of parquet choose them."""
    write_clips(
        tmp_path / "a.parquet",
        caption=pa.array(["a", "b", "c"]).dictionary_encode(),
        vae_latent_bytes=pa.array([row.numpy().tobytes() for row in RAW], pa.large_binary()),
        vae_latent_shape=pa.array([list(LATENT_SHAPE)] * 3, pa.large_list(pa.int32())),
        vae_latent_dtype=pa.array(["float32"] * 3, pa.large_string()),
    )
    assert stored_clips(tmp_path).captions == ("a", "b", "c")


# Scorers.


def test_scores(unchecked, subtests):
    for given, words in [*SCORES, (torch.ones(2, dtype=torch.complex64), "gave scores of type complex64")]:
        with subtests.test(repr(given)):
            reward = VideoReward({"mine": _plain(lambda video, prompts: given)}, RewardConfig(kind="mine"))  # noqa: B023
            refused(lambda: reward.parts(torch.zeros(2, 3, 1, 4, 4), ("a", "b"), ["mine"]), "reward: mine", words)  # noqa: B023


def test_special_tokens_of_a_scorer(tmp_path, subtests):
    """Found by the tokenizer alone: the folder's weights are not read, and are not even there."""
    (copy_of(HPSV3, tmp_path / "hpsv3") / "HPSv3.safetensors").write_bytes(b"")
    reward = RewardConfig(path=str(tmp_path / "hpsv3"))
    for kind, token in (("txt", "<|image_pad|>"), ("jsonl", "<|im_end|>"), ("csv", "<|Reward|>")):
        with subtests.test(kind):
            rows = ["a cat", f"a {token} dog"]
            lines = {"txt": rows, "csv": ["prompt", *rows], "jsonl": [json.dumps({"prompt": row}) for row in rows]}
            file = tmp_path / f"mine.{kind}"
            file.write_text("\n".join(lines[kind]))
            prompts, place = read_prompts(file, "--prompts").placed
            words = f"{file}: {'row' if kind == 'csv' else 'line'} 2 holds {token}"
            refused(lambda: check_prompts(reward, (prompts, place)), words)  # noqa: B023
            check_prompts(reward, (prompts[:1], place))


# The whole program.

GRPO = flags({"method": "dance_grpo", "recipe": "tiny", "steps": 1, "validate-every": 0})
FINETUNE = flags({"method": "finetune", "recipe": "tiny", "steps": 1, "validate-every": 0})


@pytest.fixture
def program(tmp_path, capsys, monkeypatch):
    """Ends in one line that holds all words, and writes nothing."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")

    def ends(argv, words):
        capsys.readouterr()
        assert main(argv) == 2
        shown = capsys.readouterr().err
        assert shown.startswith("error") and shown.count("\n") == 1, shown
        assert [text for text in words if text not in shown] == [], shown
        assert [*(tmp_path / "work").iterdir()] == []

    return ends


@pytest.mark.slow
def test_flags(tmp_path, program, subtests):
    for number, (words, spoilt, *said) in enumerate(FLAGS):
        with subtests.test(f"{words[:60]} {spoilt}"):
            folder = tmp_path / str(number)
            (folder / "run" / "checkpoints").mkdir(parents=True)
            for name, source in (("wan", WAN), ("hpsv3", HPSV3)):
                linked(source)(folder / name)
            if spoilt:
                spoil(folder / spoilt[0], *spoilt[1:])
            program([*GRPO, *words.replace("FOLDER", str(folder)).split()], said)


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
        write_mp4(np.zeros((9, 32, 32, 3), np.uint8), folder / f"{i}.mp4", 8)
        (folder / f"{i}.txt").write_text(caption)
    return folder, f"data.path: the caption of {folder / f'{number}.mp4'} holds <|image_pad|>"


@pytest.mark.slow
def test_special_tokens_in_captions(tmp_path, program, monkeypatch, subtests):
    """They are found before anything is loaded, where the caption is scored, and pass where it is not."""
    monkeypatch.setattr(train, "build", _stop_after_the_plan)
    for case, (source, number, given, scored) in enumerate(
        (
            ("parquet", 1, [*SCORED, "--validation.prompts", ""], True),
            ("folder", 1, [*SCORED, "--validation.prompts", ""], True),
            ("parquet", 2, [*SCORED, "--validation.prompts", ""], False),  # validation takes two
            ("parquet", 1, SCORED, False),  # validation has prompts of its own
            ("folder", 1, [], False),  # nothing is scored
        )
    ):
        with subtests.test(source, number=number, scored=scored):
            (tmp_path / str(case)).mkdir()
            path, said = clips_with(tmp_path / str(case), source, number)
            size = ["--video.frames", "5", "--video.height", "32", "--video.width", "32"]
            words = [said if scored else "the plan is sound"]
            program([*FINETUNE, *size, "--data.path", str(path), *given], words)


def _stop_after_the_plan(run, mesh, output, mirror):
    check(run, mesh)
    raise UserError("the plan is sound")


ENVIRONMENT = {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}


def test_environment(program, monkeypatch, subtests):
    bad = [(name, "abc") for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK")]
    bad += [("RANK", value) for value in ("", "1.5", "-1", "1e3", "\u00b2")]
    for name, value in bad:
        with subtests.test(f"{name}={value}"), monkeypatch.context() as patch:
            for variable, text in (ENVIRONMENT | {name: value}).items():
                patch.setenv(variable, text)
            refused(lambda: Mesh.join("cpu"), f"environment variable {name} must be an integer")
    for name, value in (("WORLD_SIZE", "0"), ("RANK", "2"), ("RANK", "abc")):
        with subtests.test(f"{name}={value} of a run"), monkeypatch.context() as patch:
            for variable, text in (ENVIRONMENT | {name: value}).items():
                patch.setenv(variable, text)
            program(GRPO, [name])


def test_compiled_blocks_need_a_compiler(tmp_path, monkeypatch):
    """Without one the run ends before its folder is made, not in the first step."""
    monkeypatch.chdir(tmp_path)
    run = parse([*FINETUNE, "--student.compile", "True"])
    monkeypatch.setenv("CXX", "sh")  # stands for one that is there
    assert check(run, ALONE).roles["student"].config.compile is True
    monkeypatch.setenv("CXX", "absent-compiler")
    words = ("student.compile", "absent-compiler", "apt-get install", "--student.compile False")
    refused(lambda: check(run, ALONE), *words)
