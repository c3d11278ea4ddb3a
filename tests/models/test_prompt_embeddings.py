"""A prompt is encoded once: its embedding from memory or from disk is that of the encoder, bit for bit."""

import os
import shutil
import time
import weakref
from pathlib import Path

import pytest
import torch
from helpers import ALONE, CAPTIONS, CPU, SMALL, WAN, files_of
from safetensors.torch import load_file, save_file
from transformers import UMT5EncoderModel

from unified_trainer.__main__ import main
from unified_trainer.basics.errors import UserError
from unified_trainer.models import diffusers_codec, prompt_embeddings
from unified_trainer.models.encoders import EncoderConfig
from unified_trainer.models.prompt_embeddings import LEFT, Counts, PromptEmbeddings
from unified_trainer.models.wan.codec import WanCodec
from unified_trainer.parallel.device import use_tf32

pytestmark = pytest.mark.slow  # seconds together

PROMPTS = [*CAPTIONS, "a red circle moving left", ""]
DISTINCT = 5


@pytest.fixture
def loads(monkeypatch):
    """The text encoders that were read, as weak references."""
    read, found = diffusers_codec.load_strictly, []

    def counted(kind, *args, **options):
        network = read(kind, *args, **options)
        if kind is UMT5EncoderModel:
            found.append(weakref.ref(network))
        return network

    monkeypatch.setattr(diffusers_codec, "load_strictly", counted)
    return found


def opened(folder: Path | None = None, path: Path = WAN, **settings) -> WanCodec:
    """A codec of its own, with embeddings in a folder, or only in memory."""
    return WanCodec.load(path, CPU, EncoderConfig(cache=str(folder or ""), **settings))


def text(codec: WanCodec, prompts=PROMPTS) -> torch.Tensor:
    return codec.encode_text(prompts)["text"]


def test_embeddings_are_those_of_one_padded_pass(codec):
    """The text encoder's own output for all prompts at once, zero behind the last token of each."""
    tokens = codec._tokenizer(PROMPTS, padding="max_length", max_length=16, truncation=True, return_tensors="pt")
    encoder = codec._text_encoder.load()
    with torch.no_grad():
        whole = encoder(tokens.input_ids, tokens.attention_mask).last_hidden_state * tokens.attention_mask[..., None]
    torch.testing.assert_close(text(codec), whole, rtol=0, atol=1e-6)
    assert (whole == 0).all(-1).any() and (whole != 0).any(-1).all(0)[0]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_memory_and_disk_change_no_bit(tmp_path, precision, loads):
    anew = text(opened(cache_memory_gib=0, text_precision=precision))
    remembering = opened(text_precision=precision)
    for _ in range(2):
        assert torch.equal(text(remembering), anew)
    assert len(loads) == 2
    for before in (0, DISTINCT):  # the second one finds all on disk
        one = opened(tmp_path, text_precision=precision, cache_memory_gib=0)
        said = one.encode_ahead(PROMPTS, ALONE)
        assert said.startswith(
            f"text encoder: 5 distinct prompts, {before} encoded before, {DISTINCT - before} now, not in memory; "
        )
        assert torch.equal(text(one), anew)
        assert torch.equal(text(one, ["green", PROMPTS[1]])[1], anew[1])


def test_a_prompt_s_embedding_does_not_depend_on_the_batch():
    alone = torch.cat([text(opened(), [prompt]) for prompt in PROMPTS])
    assert torch.equal(text(opened()), alone)


def test_the_text_encoder_is_read_only_for_prompts_without_embedding(tmp_path, loads):
    first = opened(tmp_path)
    assert not loads
    first.encode_ahead(PROMPTS, ALONE)
    text(first)
    assert len(loads) == 1 and loads[0]() is None, "it is still in memory"
    second = opened(tmp_path, cache_memory_gib=0)
    second.encode_ahead(PROMPTS, ALONE)
    text(second)
    assert len(loads) == 1
    text(second, ["a new prompt"])
    assert len(loads) == 2


# The bounds.


def encoding(asked: list[str], size: int = 4):
    """An encoder of `size` tokens of one float32 number, which notes what it is asked."""

    def encode(prompts):
        for prompt in prompts:
            asked.append(prompt)
            yield {"text": torch.full((size, 1), float(prompt))}

    return encode


def of_size(asked, folder="", memory=1.0, disk=1.0) -> PromptEmbeddings:
    config = EncoderConfig(cache=str(folder), cache_memory_gib=memory, cache_disk_gib=disk)
    return PromptEmbeddings(encoding(asked), "an encoder", {"text": (4, 1)}, config)


def values(rows) -> list[float]:
    return [float(row["text"][0, 0]) for row in rows]


def test_the_least_recently_used_prompt_leaves_memory():
    asked: list[str] = []
    one = of_size(asked, memory=2 * 16 / 2**30)
    for prompts in (["1", "2"], ["1"], ["3"], ["1"], ["2"], ["2", "1", "2"]):
        assert values(one.rows(prompts)) == [float(prompt) for prompt in prompts]
    assert asked == ["1", "2", "3", "2"]
    assert one._used == 2 * 16 and len(one._memory) == 2


def test_prompts_beyond_the_disk_s_bound_are_encoded_when_they_are_drawn(tmp_path):
    asked: list[str] = []
    known = {"folder": tmp_path, "memory": 0.0, "disk": 2 * 16 / 2**30}
    assert of_size(asked, **known).encode_ahead(["1", "2", "3", "4"], ALONE) == Counts(0, 2, 2)
    assert of_size(asked, **known).encode_ahead(["1", "2", "3", "4"], ALONE) == Counts(2, 0, 2)
    assert len(files_of(tmp_path)) == 2
    asked.clear()
    assert values(of_size(asked, **known).rows(["1", "2", "3", "4"])) == [1, 2, 3, 4]
    assert asked == ["3", "4"] and len(files_of(tmp_path)) == 2


# The files.


def test_what_a_killed_run_left_goes_and_what_is_being_written_stays(tmp_path):
    one = of_size([], folder=tmp_path)
    one.encode_ahead(["1"], ALONE)
    (stored,) = tmp_path.rglob("*.safetensors")
    left, written = (stored.with_suffix(f".{name}.tmp") for name in ("left", "written"))
    for file in (left, written):
        file.touch()
    os.utime(left, (time.time() - LEFT - 60,) * 2)
    one.encode_ahead(["1"], ALONE)
    assert not left.exists() and written.exists() and stored.exists()


def test_another_encoder_s_embeddings_are_not_taken(tmp_path, loads):
    """One weight changes and every size stays; or the tokenizer's length, the precision, or the rounding to TF32."""
    path, cache = tmp_path / "wan", tmp_path / "cache"
    shutil.copytree(WAN, path)
    before = opened(cache, path)
    before.encode_ahead(PROMPTS, ALONE)
    file = path / "text_encoder" / "model.safetensors"
    weights = load_file(file)
    weights["encoder.final_layer_norm.weight"][0] *= 2
    save_file(weights, file, {"format": "pt"})
    after = opened(cache, path)
    assert "0 encoded before, 5 now" in after.encode_ahead(PROMPTS, ALONE)
    assert torch.equal(text(after), text(opened(path=path))) and not torch.equal(text(after), text(before))
    assert "0 encoded before, 5 now" in opened(cache, path, text_precision="bf16").encode_ahead(PROMPTS, ALONE)
    use_tf32("all")
    rounded = opened(cache, path)
    use_tf32("convolutions")
    assert "0 encoded before, 5 now" in rounded.encode_ahead(PROMPTS, ALONE)
    settings = path / "tokenizer" / "tokenizer_config.json"
    settings.write_text(settings.read_text().replace("16", "15"))
    assert "0 encoded before, 5 now" in opened(cache, path).encode_ahead(PROMPTS, ALONE)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-3])


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-2] ^= 1
    file.write_bytes(content)


def empty(file: Path) -> None:
    file.write_bytes(b"")


def without_checksum(file: Path) -> None:
    save_file(load_file(file), file)


def swap(file: Path) -> None:
    other = next(one for one in file.parents[1].rglob("*.safetensors") if one != file)
    file.write_bytes(other.read_bytes())


def holds(embedding: torch.Tensor, name: str = "text"):
    """Return a damage: the file holds this embedding, with its checksum."""

    def change(file: Path) -> None:
        about = {"prompt": "2", "crc32": prompt_embeddings._crc32({name: embedding})}
        save_file({name: embedding}, file, about)

    return change


CHANGED = [torch.full((4, 1), torch.nan), torch.ones(4, 3), torch.ones(4), torch.ones(0, 1), torch.ones(4, 1).int()]


@pytest.mark.parametrize(
    "damage", [cut, flip, empty, without_checksum, swap, holds(torch.ones(4, 1), "embedding"), *map(holds, CHANGED)]
)
def test_a_damaged_file_is_written_again(tmp_path, damage):
    asked: list[str] = []
    of_size(asked, tmp_path).encode_ahead(["1", "2"], ALONE)
    whole = files_of(tmp_path)
    damage(of_size(asked)._file(tmp_path, "2"))
    assert files_of(tmp_path) != whole
    assert values(of_size(asked, tmp_path).rows(["1", "2"])) == [1, 2]
    assert asked == ["1", "2", "2"]
    assert of_size(asked, tmp_path).encode_ahead(["1", "2"], ALONE) == Counts(1, 1, 0)
    assert of_size(asked, tmp_path).encode_ahead(["1", "2"], ALONE) == Counts(2, 0, 0)


@pytest.mark.parametrize("embedding", CHANGED)
def test_an_embedding_of_another_encoder_is_not_stored(tmp_path, embedding):
    with pytest.raises(UserError, match=r"a prompt has text .* \[.*\], expected finite numbers \[1, 1\] to \[4, 1\]"):
        of_size([], tmp_path).store("a", {"text": embedding})
    assert not files_of(tmp_path)


def test_a_writer_that_is_killed_leaves_no_embedding(tmp_path, monkeypatch):
    """It ends in the middle of a file, as by a signal: nothing after that runs."""

    def killed(file, tensors, metadata):
        write(file, tensors, metadata)
        cut(file)
        raise KeyboardInterrupt

    write, asked = prompt_embeddings.write_tensors, []
    monkeypatch.setattr(prompt_embeddings, "write_tensors", killed)
    with pytest.raises(KeyboardInterrupt):
        of_size(asked, tmp_path).encode_ahead(["1"], ALONE)
    assert not list(tmp_path.rglob("*.safetensors")) and list(tmp_path.rglob("*.tmp"))
    monkeypatch.setattr(prompt_embeddings, "write_tensors", write)
    assert of_size(asked, tmp_path).encode_ahead(["1"], ALONE) == Counts(0, 1, 0)
    assert values(of_size(asked, tmp_path).rows(["1"])) == [1] and asked == ["1", "1"]


def test_a_folder_that_takes_no_file_is_named(tmp_path):
    one = of_size([], tmp_path / "cache")
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(UserError, match=r"cache.*cannot be written .*set encoders\.cache to another folder"):
        one.encode_ahead(["1"], ALONE)


# The run.


def said(capsys, *flags: str, code: int = 0) -> str:
    capsys.readouterr()
    assert main(list(flags)) == code
    captured = capsys.readouterr()
    return captured.out + captured.err


def test_a_run_keeps_its_embeddings_and_may_share_them(run_folder, tmp_path, capsys, loads):
    """Two prompts a step, two of validation, and the negative one; without a new prompt no text encoder is read."""
    out = said(capsys, *SMALL["dance_grpo"], "--validate-every", "1", "--output", str(run_folder))
    assert "text encoder: 5 distinct prompts, 0 encoded before, 5 now, not in memory; embeddings in " in out
    assert len(files_of(run_folder / "prompt_embeddings")) == 5 and len(loads) == 1
    assert "5 encoded before, 2 now" in said(capsys, "--resume", str(run_folder), "--steps", "2")
    moved = tmp_path / "embeddings"
    (run_folder / "prompt_embeddings").rename(moved)
    shared = ("--encoders.cache", str(moved), "--encoders.offload")
    other = ("--output", str(tmp_path / "other"), "--validate-every", "1", "--steps", "2")
    loads.clear()
    assert "7 encoded before, 0 now" in said(capsys, *SMALL["dance_grpo"], *other, *shared) and not loads
    resume = ("--resume", str(run_folder), "--steps", "3", *shared)
    assert "7 encoded before, 2 now" in said(capsys, *resume)
    resume = ("--resume", str(run_folder), "--steps", "4", *shared)
    refused = said(capsys, *resume, "--encoders.text-precision", "bf16", code=2)
    assert "cannot change encoders.text_precision: 'fp32' -> 'bf16'" in refused


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (("--encoders.cache", __file__), "test_prompt_embeddings.py cannot be written into (File exists)"),
    ],
)
def test_settings_that_cannot_be_are_refused(flags, expected, run_folder, capsys, loads):
    assert expected in said(capsys, *SMALL["dance_grpo"], "--output", str(run_folder), *flags, code=2)
    assert not run_folder.exists() and not loads
