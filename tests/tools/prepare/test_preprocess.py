"""preprocess: FastVideo's columns, latents and embeddings of the codec, resuming, and what is skipped or refused."""

import json
import os
import signal
import subprocess

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from helpers import ALONE, CPU, REPO, WAN, command, copy_of, environment, files_of, metrics_of
from real_clips import REAL, quarters, read_clip, real_folder, write_exactly

from unified_trainer.__main__ import main
from unified_trainer.basics.errors import UserError
from unified_trainer.data.clips import VideoConfig
from unified_trainer.data.fastvideo import I2V, T2V, TEXT_ENCODER, TEXT_ONLY, t2v_row
from unified_trainer.data.negative_prompt import use_negative_prompt
from unified_trainer.data.tiny_world import TRAINING, check_attributes, draw_clip, render
from unified_trainer.data.video_files import to_uint8, write_mp4
from unified_trainer.data.video_reader import to_video
from unified_trainer.models.encoders import EncoderConfig
from unified_trainer.models.wan.codec import WanCodec
from unified_trainer.tools.prepare.clip_folder import ClipFolder
from unified_trainer.tools.prepare.preprocess import preprocess

pytestmark = pytest.mark.slow  # seconds together

SIZE = VideoConfig(5, 32, 32, 8)
SHORT = ["--method", "finetune", "--steps", "1", "--validate-every", "0", "--algorithm.micro-batch", "1"]
SHORT += ["--video.frames", "5", "--video.height", "32", "--video.width", "32"]
SMALL = ["--workers", "2", "--video.frames", "5", "--video.height", "32", "--video.width", "32", "--video.fps", "8"]


def called(*words: object) -> int:
    return main(["preprocess", *map(str, words), *SMALL])


def refused(capsys, *words: object) -> str:
    capsys.readouterr()
    assert called(*words) == 2
    return capsys.readouterr().err


def drawn(folder, count: int):
    """A folder of videos that differ in one color."""
    folder.mkdir()
    for i in range(count):
        write_exactly(folder / f"{i}.mkv", quarters(5, 32, 32) // (i + 1), 8)
        (folder / f"{i}.txt").write_text(f"video {i}")
    return folder


def rows_of(folder) -> list[dict[str, object]]:
    """The rows of all files, in order."""
    return [row for file in sorted(folder.glob("*.parquet")) for row in pq.read_table(file).to_pylist()]


def tensor(row, name: str) -> torch.Tensor:
    """Read a tensor as FastVideo does: in float32 and the given shape."""
    assert row[f"{name}_dtype"] == "float32"
    return torch.from_numpy(np.frombuffer(row[f"{name}_bytes"], np.float32).reshape(row[f"{name}_shape"]).copy())


@pytest.fixture(scope="module")
def videos(tmp_path_factory):
    return real_folder(tmp_path_factory.mktemp("videos") / "clips")


@pytest.fixture(scope="module")
def encoded(videos, tmp_path_factory):
    """The folder that preprocess writes of the three real videos."""
    out = tmp_path_factory.mktemp("encoded") / "out"
    assert called(videos, out) == 0
    return out


@pytest.mark.parametrize("kind", ["t2v", "i2v", "text_only"])
def test_columns_are_those_of_fastvideo(kind):
    """The golden file was written from the schemas of FastVideo 0.2.1."""
    golden = json.loads((REPO / "tests" / "golden" / "fastvideo_schema.json").read_text())[kind]
    schema = {"t2v": T2V, "i2v": I2V, "text_only": TEXT_ONLY}[kind]
    assert [[field.name, str(field.type)] for field in schema] == golden


def test_files_have_the_columns_and_name_their_text_encoder(encoded, codec):
    schema = pq.read_schema(encoded / "clips-00000.parquet")
    assert schema.remove_metadata().equals(T2V)
    assert schema.metadata == {TEXT_ENCODER.encode(): codec.text_fingerprint.encode()}
    assert pq.read_metadata(encoded / "clips-00000.parquet").row_group(0).column(1).compression == "ZSTD"


def test_rows_hold_raw_latents_and_embeddings_without_padding(videos, encoded, codec):
    rows = rows_of(encoded)
    assert [(row["id"], row["caption"]) for row in rows] == [(f"{name}.mp4", text) for name, text in REAL.items()]
    for row in rows:
        clip = to_video(read_clip(videos / row["file_name"], SIZE))
        raw, embedding = tensor(row, "vae_latent"), tensor(row, "text_embedding")
        assert torch.equal(codec.normalise(raw[None]), codec.encode(clip))
        text = codec.encode_text([row["caption"]])["text"][0]
        assert torch.equal(embedding, text[: len(embedding)]) and not text[len(embedding) :].any()
        assert 0 < len(embedding) < len(text)
        about = {name: row[name] for name in ("media_type", "width", "height", "num_frames", "duration_sec", "fps")}
        assert about == {
            "media_type": "video",
            "width": 32,
            "height": 32,
            "num_frames": 2,
            "duration_sec": 0.625,
            "fps": 8.0,
        }


def test_the_latents_show_the_video(tmp_path, codec):
    """Clips of the tiny world, written as H.264: what is decoded again shows their colors, shapes and directions."""
    (tmp_path / "in").mkdir()
    draw = torch.Generator().manual_seed(0)
    subjects = TRAINING[:8]
    for i, frames in enumerate(to_uint8(render([draw_clip(subject, draw) for subject in subjects]))):
        write_mp4(frames, tmp_path / "in" / f"{i}.mp4", 8)
        (tmp_path / "in" / f"{i}.txt").write_text(subjects[i].caption())
    assert main(["preprocess", str(tmp_path / "in"), str(tmp_path / "out")]) == 0  # the tiny world's own size
    rows = rows_of(tmp_path / "out")
    assert [row["caption"] for row in rows] == [subject.caption() for subject in subjects]
    video = codec.decode(codec.normalise(torch.stack([tensor(row, "vae_latent") for row in rows])))
    assert check_attributes(video, subjects)["all"].all()


@pytest.mark.parametrize("source", ["raw", "parquet"])
def test_finetune_trains_on_videos_and_on_what_preprocess_wrote(videos, encoded, run_folder, source):
    words = [*SHORT, "--data.path", str(videos if source == "raw" else encoded), "--algorithm.batch-size", "3"]
    assert main([*words, "--output", str(run_folder)]) == 0
    (row,) = metrics_of(run_folder)
    assert 0 < row["train/loss"] < 10


def test_a_run_on_a_bad_video_names_it_and_writes_nothing(run_folder, tmp_path, capsys):
    folder = drawn(tmp_path / "in", 2)
    (folder / "1.mkv").write_bytes(b"")
    assert main([*SHORT, "--data.path", str(folder), "--output", str(run_folder)]) == 2
    assert "1.mkv: cannot be decoded" in capsys.readouterr().err and not run_folder.exists()


def test_the_negative_prompt_is_kept_and_used(tmp_path, codec, monkeypatch):
    """A codec that is given it needs no text encoder; one with another encoder, or another prompt, does not take it."""
    (tmp_path / "settings.yaml").write_text("sampler: {negative_prompt: a blue square}\n")
    out = tmp_path / "out"
    assert called(drawn(tmp_path / "in", 1), out, "--config", tmp_path / "settings.yaml") == 0
    expected = codec.encode_text(["a blue square"])["text"]
    fresh = WanCodec.load(WAN, CPU, EncoderConfig(cache=str(tmp_path / "cache")))
    monkeypatch.setattr(WanCodec, "_embed", lambda *_: pytest.fail("the text encoder was used"))
    assert use_negative_prompt(out, "a blue square", fresh)
    assert torch.equal(fresh.encode_text(["a blue square"])["text"], expected)
    assert "1 encoded before, 0 now" in fresh.encode_ahead(["a blue square"], ALONE)
    assert not use_negative_prompt(out, "a red square", fresh)
    half = WanCodec.load(WAN, CPU, EncoderConfig(text_precision="bf16"))
    assert not use_negative_prompt(out, "a blue square", half) and not use_negative_prompt(tmp_path, "", half)
    (out / "negative_prompt.safetensors").write_bytes(b"no")
    with pytest.raises(UserError, match=r"negative_prompt\.safetensors is damaged .*: remove it"):
        use_negative_prompt(out, "a blue square", half)


def test_a_run_takes_the_negative_prompt_beside_its_clips(encoded, run_folder, codec, monkeypatch):
    taken = []
    monkeypatch.setattr(WanCodec, "remember", lambda self, prompt, embedding: taken.append((prompt, embedding)))
    words = [*SHORT, "--data.path", str(encoded), "--algorithm.batch-size", "3"]
    assert main([*words, "--output", str(run_folder)]) == 0
    ((prompt, embedding),) = taken
    assert prompt == "" and torch.equal(embedding["text"], codec.prompts([""])[0]["text"])


def test_prompts_alone_become_padded_embeddings(tmp_path, codec):
    (tmp_path / "prompts.txt").write_text("a red circle moving left\na blue square\n")
    assert called(tmp_path / "prompts.txt", tmp_path / "out") == 0
    rows = rows_of(tmp_path / "out")
    assert pq.read_schema(tmp_path / "out" / "clips-00000.parquet").remove_metadata().equals(TEXT_ONLY)
    assert [row["caption"] for row in rows] == ["a red circle moving left", "a blue square"]
    for row in rows:
        assert torch.equal(tensor(row, "text_embedding"), codec.encode_text([row["caption"]])["text"][0])
    (tmp_path / "prompts.txt").write_text("a red circle moving left\na third one\na blue square\n")
    assert called(tmp_path / "prompts.txt", tmp_path / "out") == 0
    assert [row["caption"] for row in rows_of(tmp_path / "out")][2:] == ["a third one"]


def test_several_captions_of_a_clip_are_rows(tmp_path):
    """Each has the latents of the clip and its own embedding; a caption that is added later is one more row."""
    drawn(tmp_path / "in", 2)
    texts = [TRAINING[i].caption() for i in range(3)]
    for captions in (texts[:2], texts):
        (tmp_path / "in" / "captions.json").write_text(json.dumps({"0.mkv": captions}))
        assert called(tmp_path / "in", tmp_path / "out") == 0
    rows = {row["id"]: row for row in rows_of(tmp_path / "out")}
    assert {name: row["caption"] for name, row in rows.items()} == {
        "0.mkv": texts[0],
        "0.mkv#2": texts[1],
        "0.mkv#3": texts[2],
        "1.mkv": "video 1",
    }
    same = [tensor(rows[name], "vae_latent") for name in ("0.mkv", "0.mkv#2", "0.mkv#3")]
    assert torch.equal(same[0], same[1]) and torch.equal(same[0], same[2])
    assert rows["0.mkv"]["text_embedding_bytes"] != rows["0.mkv#2"]["text_embedding_bytes"]


def test_bad_videos_are_listed_and_skipped(tmp_path, capsys):
    folder = drawn(tmp_path / "in", 3)
    (folder / "1.txt").unlink()
    (folder / "2.mkv").write_bytes((folder / "2.mkv").read_bytes()[:400])
    assert called(folder, tmp_path / "out") == 0
    said = capsys.readouterr().out
    assert (
        "1 clip in" in said
        and "1 of them new" in said
        and "clips per second" in said
        and "3 clips: 1 used, 1 damaged, 1 left out (skipped.jsonl); " in said
    )
    lines = [json.loads(line) for line in (tmp_path / "out" / "skipped.jsonl").read_text().splitlines()]
    assert [line["file"] for line in lines] == ["1.mkv", "2.mkv"]
    assert lines[0]["reason"] == "no caption: 1.txt is missing or empty"
    (folder / "1.txt").write_text("now it has one")
    (folder / "2.mkv").unlink()
    assert called(folder, tmp_path / "out") == 0
    assert [row["caption"] for row in rows_of(tmp_path / "out")] == ["video 0", "now it has one"]
    assert not (tmp_path / "out" / "skipped.jsonl").exists()


def test_a_strict_call_ends_at_the_first_bad_video(tmp_path, capsys):
    folder = drawn(tmp_path / "in", 3)
    (folder / "1.mkv").write_bytes(b"")
    assert "1.mkv: cannot be decoded" in refused(capsys, folder, tmp_path / "out", "--strict")
    assert [row["id"] for row in rows_of(tmp_path / "out")] == ["0.mkv"]


def test_no_usable_video_is_an_error(tmp_path, capsys):
    folder = drawn(tmp_path / "in", 1)
    (folder / "0.txt").unlink()
    assert "none of the 1 videos could be used" in refused(capsys, folder, tmp_path / "out")


@pytest.mark.parametrize("made", [1, 4])
def test_an_interrupted_call_is_continued(tmp_path, monkeypatch, made):
    """After `made` clips; every row is there once, in order, as of a call that nothing interrupted."""
    folder = drawn(tmp_path / "in", 5)
    assert called(folder, tmp_path / "whole", "--rows-per-file", 2) == 0
    encode, count = WanCodec.encode_raw, iter(range(made))

    def interrupted(self, video):
        if next(count, None) is None:
            raise KeyboardInterrupt
        return encode(self, video)

    monkeypatch.setattr(WanCodec, "encode_raw", interrupted)
    with pytest.raises(KeyboardInterrupt):
        preprocess(folder, tmp_path / "out", rows_per_file=2, device="cpu", settings=tuple(SMALL[2:]))
    assert len(rows_of(tmp_path / "out")) == made and not list((tmp_path / "out").glob("*.tmp"))
    monkeypatch.setattr(WanCodec, "encode_raw", encode)
    assert called(folder, tmp_path / "out", "--rows-per-file", 2) == 0
    assert rows_of(tmp_path / "out") == rows_of(tmp_path / "whole")


def test_a_killed_call_keeps_its_finished_files_and_is_continued(tmp_path):
    """Killed when the first file is there: it stays as it is, and all files become those of a whole call."""
    folder, out = drawn(tmp_path / "in", 24), tmp_path / "out"
    words = ["preprocess", str(folder), str(out), *SMALL, "--rows-per-file", "4"]
    process = subprocess.Popen(command(*words), env=environment(), stdout=subprocess.PIPE, text=True)
    assert any("clips-00000.parquet is complete" in line for line in process.stdout)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    first = (out / "clips-00000.parquet").read_bytes()
    assert len(rows_of(out)) < 24
    assert main(words) == 0
    assert (out / "clips-00000.parquet").read_bytes() == first
    assert main(["preprocess", str(folder), str(tmp_path / "whole"), *SMALL, "--rows-per-file", "4"]) == 0
    files, expected = files_of(out), files_of(tmp_path / "whole")
    assert files.keys() == expected.keys() and len(files) == 8
    assert all(files[name] == expected[name] for name in files if name.endswith(".parquet"))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--video.frames", "9"], "holds other encoded clips: their video.frames is 5, now 9; choose another folder"),
        (["--video.fps", "4"], "their video.fps is 8.0, now 4.0"),
        (["--video.height", "40"], "video.height must be a multiple of 16 for this VAE, not 40: set 32 or 48"),
        (["--rows-per-file", "0"], "--rows-per-file must be from 1 to 1000000, not 0"),
        (["--recipe", "wan2.1-1.3b"], "preprocess needs --model"),
        (["--captions", "absent.csv"], "--captions absent.csv: no such file"),
    ],
)
def test_other_settings_and_wrong_ones_are_refused(videos, encoded, capsys, flags, message):
    before = files_of(encoded)
    capsys.readouterr()
    assert main(["preprocess", str(videos), str(encoded), *SMALL, *flags]) == 2
    assert message in capsys.readouterr().err and files_of(encoded) == before


def test_captions_are_for_a_folder(tmp_path, capsys):
    (tmp_path / "clips.csv").write_text("path,caption\na.mp4,a\n")
    message = refused(capsys, tmp_path / "clips.csv", tmp_path / "out", "--captions", tmp_path / "clips.csv")
    assert "--captions is for a folder of videos" in message and not (tmp_path / "out").exists()


def test_another_encoder_is_refused(videos, encoded, capsys, tmp_path):
    wan = copy_of(WAN, tmp_path / "wan")
    assert called(videos, encoded, "--recipe", "tiny", "--model", wan) == 0  # a copy is the same model
    config = json.loads((wan / "vae" / "config.json").read_text())
    (wan / "vae" / "config.json").write_text(json.dumps(config | {"latents_mean": [0.5] * 16}))
    assert "their vae is 'wan fp32" in refused(capsys, videos, encoded, "--recipe", "tiny", "--model", wan)


def test_a_refusal_of_the_first_video_binds_no_settings(tmp_path, capsys):
    folder = drawn(tmp_path / "in", 2)
    (folder / "0.txt").unlink()
    assert "0.txt is missing" in refused(capsys, folder, tmp_path / "out", "--strict")
    assert called(folder, tmp_path / "out", "--sampler.negative-prompt", "blurred") == 0
    assert "1 left out" in capsys.readouterr().out
    assert "their negative_prompt is 'blurred'" in refused(capsys, folder, tmp_path / "out")


def test_a_folder_of_something_else_is_refused(videos, capsys, tmp_path):
    (tmp_path / "notes.txt").write_text("notes")
    assert "exists and is no folder of encoded clips" in refused(capsys, videos, tmp_path)
    assert [*files_of(tmp_path)] == ["notes.txt"]


def test_another_caption_of_a_finished_clip_is_refused(tmp_path, capsys):
    folder = drawn(tmp_path / "in", 2)
    assert called(folder, tmp_path / "out") == 0
    (folder / "1.txt").write_text("another caption")
    assert "holds 1.mkv with another caption" in refused(capsys, folder, tmp_path / "out")


def test_files_have_row_groups_of_modest_size(tmp_path):
    """Of 64 small rows a group has 8; rows of more than 8 MiB are a group each."""
    for size, rows, expected in ((10, 70, [[8] * 8, [6]]), (2**21 + 1, 3, [[1, 1, 1]])):
        folder = tmp_path / str(size)
        folder.mkdir()
        written = ClipFolder(folder, T2V, 64)
        row = t2v_row("a", "a caption", torch.zeros(1, 1, 1, size), SIZE)
        complete = [written.add(row | {"id": str(i)}) for i in range(rows)]
        written.finish()
        assert [i for i, file in enumerate(complete) if file] == ([63] if rows > 63 else [])
        files = [pq.read_metadata(file) for file in sorted(folder.glob("*"))]
        assert [[file.row_group(i).num_rows for i in range(file.num_row_groups)] for file in files] == expected


def test_a_damaged_file_is_named(tmp_path):
    (tmp_path / "clips-00000.parquet").write_bytes(b"PAR1")
    with pytest.raises(UserError, match=r"clips-00000\.parquet is damaged .*: remove it, and its rows are made again"):
        ClipFolder(tmp_path, T2V, 64).captions()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full on this system")
def test_a_full_disk_is_an_error_that_says_so(tmp_path):
    (tmp_path / "clips.parquet.tmp").symlink_to("/dev/full")
    written = ClipFolder(tmp_path, T2V, 1)
    (tmp_path / "clips.parquet.tmp").symlink_to("/dev/full")
    with pytest.raises(UserError, match=r"cannot be written \(.*: free space, and call again"):
        written.add(t2v_row("a", "a caption", torch.randn(1, 1, 1, 2**20), SIZE))
    written.finish()
    assert not list(tmp_path.glob("*.parquet"))
