"""Text embeddings that preprocess writes: they are used by the encoder that made them, and by no other."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from helpers import ALONE, CAPTIONS, CPU, WAN, flags, metrics_of

from unified_trainer.__main__ import main
from unified_trainer.basics.errors import MissingFileError, NotFiniteError, UserError
from unified_trainer.data.prompts import read_prompts
from unified_trainer.data.stored_prompts import use_stored_prompts
from unified_trainer.models.encoders import EncoderConfig
from unified_trainer.models.wan.codec import WanCodec

pytestmark = pytest.mark.slow  # seconds together

RUN = {"method": "ode_init", "video.frames": 5, "video.height": 32, "video.width": 32, "algorithm.teacher-steps": 2}
RUN |= {"algorithm.batch-size": 2, "validate-every": 0, "steps": 2}


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """The folder that preprocess writes of the four captions, in two files."""
    folder = tmp_path_factory.mktemp("texts")
    (folder / "prompts.txt").write_text("\n".join(CAPTIONS))
    assert main(["preprocess", str(folder / "prompts.txt"), str(folder / "out"), "--rows-per-file", "2"]) == 0
    return folder / "out"


def codec_of(tmp_path, **changes) -> WanCodec:
    return WanCodec.load(WAN, CPU, EncoderConfig(cache=str(tmp_path / "cache"), **changes))


def changed(texts, tmp_path, column: str, change, metadata=True):
    """Copy the first file with another value in its second row."""
    table = pq.read_table(texts / "clips-00000.parquet")
    place, values = table.column_names.index(column), table[column].to_pylist()
    values[1] = change(values[1])
    table = table.set_column(place, table.schema.field(place), pa.array(values, table.schema.field(place).type))
    pq.write_table(table if metadata else table.replace_schema_metadata(), tmp_path / "changed.parquet")
    return tmp_path / "changed.parquet"


def test_a_folder_of_files_is_read_in_the_order_of_their_names(texts, tmp_path):
    assert read_prompts(texts).prompts == CAPTIONS
    assert read_prompts(texts / "clips-00001.parquet").prompts == CAPTIONS[2:]
    with pytest.raises(MissingFileError, match=r"--prompts \S+: it is a folder without \.parquet files"):
        read_prompts(tmp_path)


def test_a_run_on_stored_embeddings_needs_no_text_encoder_and_changes_no_number(texts, tmp_path, monkeypatch, capsys):
    words = [*flags(RUN), "--output"]
    assert main([*words, str(tmp_path / "lines"), "--prompts", str(texts.parent / "prompts.txt")]) == 0
    assert "text embeddings of" not in capsys.readouterr().out
    monkeypatch.setattr(WanCodec, "_embed", lambda *_: pytest.fail("the text encoder was used"))
    assert main([*words, str(tmp_path / "stored"), "--prompts", str(texts)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "text embeddings of --prompts: used; the run's text encoder made them" in said
    assert "5 distinct prompts, 5 encoded before, 0 now" in said
    assert metrics_of(tmp_path / "stored") == metrics_of(tmp_path / "lines")


def test_only_wanted_prompts_of_a_fitting_encoder_are_taken(texts, tmp_path, monkeypatch):
    expected = codec_of(tmp_path / "a").encode_text([CAPTIONS[3]])["text"]
    monkeypatch.setattr(WanCodec, "_embed", lambda *_: pytest.fail("the text encoder was used"))
    taken = []
    remember = WanCodec.remember
    monkeypatch.setattr(
        WanCodec, "remember", lambda self, prompt, embedding: (taken.append(prompt), remember(self, prompt, embedding))
    )
    one = codec_of(tmp_path / "b")
    said = use_stored_prompts(texts, "--prompts", CAPTIONS[2:], one, ALONE)
    assert said.endswith("used; the run's text encoder made them") and taken == [*CAPTIONS[2:]]
    assert torch.equal(one.encode_text([CAPTIONS[3]])["text"], expected)
    other = codec_of(tmp_path / "c", text_precision="bf16")
    said = use_stored_prompts(texts, "--prompts", CAPTIONS, other, ALONE)
    assert "prompts of 2 files are encoded instead; another encoder made" in said and len(taken) == 2


def test_files_that_name_no_encoder_or_hold_no_embeddings_are_prompts_alone(texts, tmp_path, codec):
    bare = changed(texts, tmp_path, "caption", str.upper, metadata=False)
    assert read_prompts(bare).prompts == (CAPTIONS[0], CAPTIONS[1].upper())
    said = use_stored_prompts(bare, "--prompts", CAPTIONS, codec, ALONE)
    assert said.endswith(f"prompts of 1 files are encoded instead; another encoder made {bare}")
    pq.write_table(pa.table({"caption": ["a"]}), bare)
    assert use_stored_prompts(bare, "--prompts", ["a"], codec, ALONE) == ""


@pytest.mark.parametrize(
    ("column", "change", "error", "message"),
    [
        ("text_embedding_bytes", lambda data: data[:-4], UserError, "is damaged: text_embedding_bytes"),
        ("text_embedding_bytes", lambda data: None, UserError, "is damaged: text_embedding_bytes"),
        ("text_embedding_dtype", lambda kind: "no", UserError, "is damaged: text_embedding_bytes"),
        (
            "text_embedding_bytes",
            lambda data: np.full(len(data) // 4, np.nan, np.float32).tobytes(),
            NotFiniteError,
            "holds a value that is not finite",
        ),
        ("text_embedding_shape", lambda shape: [shape[0] * 2, shape[1] // 2], UserError, r"expected .* to \[16, 32\]"),
        ("text_embedding_shape", lambda shape: [1, *shape], UserError, r"\[1, 16, 32\], expected"),
        ("text_embedding_dtype", lambda kind: "int32", UserError, "has text torch.int32"),
    ],
)
def test_damage_is_named_with_file_and_row(texts, tmp_path, codec, column, change, error, message):
    file = changed(texts, tmp_path, column, change)
    with pytest.raises(error, match=rf"--prompts: \S+changed\.parquet: row 2 of row group 1 \(.*\).* {message}"):
        use_stored_prompts(file, "--prompts", CAPTIONS, codec, ALONE)
