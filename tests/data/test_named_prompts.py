"""Prompts of a matrix of changing length, a pooled vector, a mask and a number are kept, stored and read again."""

import math
from dataclasses import replace

import pyarrow.parquet as pq
import pytest
import torch
from helpers import ALONE, CAPTIONS, CPU, LATENT_SHAPE, WAN, metrics_of, tiny_codec
from real_clips import quarters, write_exactly
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from unified_trainer.__main__ import main
from unified_trainer.basics.errors import UserError
from unified_trainer.basics.types import Condition
from unified_trainer.data.fastvideo import T2V, TEXT, TEXT_ENCODER, columns_of, with_text
from unified_trainer.data.negative_prompt import FILE, use_negative_prompt
from unified_trainer.data.parquet import ParquetClips
from unified_trainer.data.parquet_files import read_stored_files
from unified_trainer.data.row_kinds import ClipRows
from unified_trainer.data.stored_prompts import use_stored_prompts
from unified_trainer.models.encoders import EncoderConfig
from unified_trainer.models.prompt_embeddings import PromptEmbeddings
from unified_trainer.models.prompt_tensors import difference, main_name, stack
from unified_trainer.models.wan import family
from unified_trainer.models.wan.codec import WanCodec
from unified_trainer.run import registry

SHAPES = {"attention_mask": (16,), "hidden_states": (16, 32), "length": (), "pooled": (4,)}
SIZE = ["--video.frames", "5", "--video.height", "32", "--video.width", "32"]


class NamedCodec(WanCodec):
    """The tiny world's codec, whose network reads one matrix that is made of several tensors."""

    def __init__(self, folder, device, config):
        super().__init__(folder, device, config)
        self.text_shapes = SHAPES
        self._embeddings = PromptEmbeddings(self._embed, f"{self._identity()} named", SHAPES, config)

    def _embed(self, prompts):
        for made in super()._embed(prompts):
            text = made["text"]
            mask = torch.arange(len(text)) != 1  # also inside a prompt
            yield {
                "hidden_states": text,
                "pooled": text.mean(0)[:4],
                "attention_mask": mask,
                "length": torch.tensor(len(text)),
            }

    def text_condition(self, prompts):
        made = stack(prompts, self.text_shapes)
        text = made["hidden_states"] * made["attention_mask"][..., None]
        text[:, 0, :4] += made["pooled"]
        return Condition({"text": text})


def opened(cache="", **settings) -> NamedCodec:
    return NamedCodec.load(WAN, CPU, EncoderConfig(cache=str(cache), **settings))


def without_encoder(monkeypatch) -> None:
    monkeypatch.setattr(WanCodec, "_embed", lambda *_: pytest.fail("the text encoder was used"))


def assert_equal(own, other) -> None:
    assert own.keys() == other.keys()
    for name, x in own.items():
        assert x.dtype == other[name].dtype and torch.equal(x, other[name]), name


@pytest.fixture
def named(monkeypatch):
    """Let the tiny world's folders be of a family with the codec of several tensors."""
    monkeypatch.setitem(registry.FAMILIES, "WanPipeline", replace(family.WAN, codec=NamedCodec.load))


# In memory and on disk.


def test_conditions_are_padded_and_what_cannot_be_is_refused():
    short, long = opened().prompts(["a", CAPTIONS[0]])
    made = stack([short, long], SHAPES)
    assert {name: (*x.shape[1:],) for name, x in made.items()} == SHAPES and made["attention_mask"].dtype == torch.bool
    rows = len(short["hidden_states"])
    assert rows < len(long["hidden_states"]) and torch.equal(made["hidden_states"][0, :rows], short["hidden_states"])
    assert not made["hidden_states"][0, rows:].any() and not made["attention_mask"][0, rows:].any()
    assert main_name(SHAPES) == "hidden_states"
    for changed, said in (
        (
            {name: x for name, x in short.items() if name != "pooled"},
            "has tensors attention_mask, hidden_states, length, exp",
        ),
        (short | {"more": torch.ones(1)}, "has tensors attention_mask, .*, more, pooled, expected"),
        (short | {"pooled": torch.ones(3)}, r"has pooled torch.float32 \[3\], expected finite numbers \[4\] to \[4\]"),
        (short | {"pooled": torch.full((4,), math.nan)}, "has pooled torch.float32"),
        (short | {"pooled": torch.ones(4, dtype=torch.complex64)}, "has pooled torch.complex64"),
        (
            short | {"attention_mask": torch.ones(17).bool()},
            r"has attention_mask .* \[17\], expected .* to \[16\]",
        ),
        (
            short | {"hidden_states": torch.ones(3, 31)},
            r"has hidden_states .* \[3, 31\], expected .* to \[16, 32\]",
        ),
        (short | {"hidden_states": torch.ones(3, 32).long()}, "has hidden_states torch.int64"),
        (short | {"attention_mask": torch.ones(3).long()}, r"attention_mask of types torch\.bool and torch\.int64"),
    ):
        with pytest.raises(UserError, match=said):
            stack([long, changed], SHAPES)


def test_files_keep_all_tensors_and_their_types(tmp_path, monkeypatch):
    made = opened(tmp_path, text_precision="bf16")
    made.encode_ahead(CAPTIONS, ALONE)
    own = made.prompts(CAPTIONS)
    without_encoder(monkeypatch)
    for one, other in zip(opened(tmp_path, text_precision="bf16").prompts(CAPTIONS), own, strict=True):
        assert_equal(one, other)


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        lambda held: {name: x for name, x in held.items() if name != "pooled"},
        lambda held: held | {"more": torch.ones(1)},
        lambda held: held | {"attention_mask": ~held["attention_mask"]},
        lambda held: held | {"pooled": held["pooled"].flip(0)},
        lambda held: {"embedding": held["hidden_states"]},  # an earlier version's
    ],
)
def test_a_file_of_other_tensors_is_never_used(tmp_path, change):
    one = opened(tmp_path)
    one.encode_ahead(["a"], ALONE)
    file = one._embeddings._file(tmp_path, "a")
    (own,) = one.prompts(["a"])
    save_file(change(load_file(file)), file, metadata_of(file))
    assert_equal(opened(tmp_path).prompts(["a"])[0], own)
    assert "0 encoded before, 1 now" in opened(tmp_path).encode_ahead(["a"], ALONE)
    assert_equal(load_file(file), own)


def metadata_of(file) -> dict[str, str]:
    with safe_open(file, "pt") as held:
        return held.metadata()


def test_what_was_made_elsewhere_is_remembered_unless_it_cannot_be(tmp_path, monkeypatch):
    (own,) = opened().prompts([CAPTIONS[0]])
    without_encoder(monkeypatch)
    opened(tmp_path).remember(CAPTIONS[0], own)
    one = opened(tmp_path)
    assert_equal(one.prompts([CAPTIONS[0]])[0], own)
    with pytest.raises(UserError, match="a prompt has tensors hidden_states, expected attention_mask, hidden_states"):
        one.remember("another", {"hidden_states": own["hidden_states"]})


def test_the_difference_is_that_of_the_worst_tensor():
    (own,) = opened().prompts([CAPTIONS[0]])
    padded = {name: x[0] for name, x in stack([own], SHAPES).items()}
    assert difference(own, own) == difference(own, padded) == 0
    assert difference(own, padded | {"pooled": 1.5 * own["pooled"]}) == pytest.approx(0.5)
    assert difference(own | {"pooled": torch.zeros(4)}, padded | {"pooled": torch.zeros(4)}) == 0
    for other in (
        {"hidden_states": own["hidden_states"]},
        padded | {"attention_mask": ~padded["attention_mask"]},
        own | {"attention_mask": own["attention_mask"][[1, 0, *range(2, own["length"])]]},
        own | {"length": own["length"].float()},
        own | {"length": own["length"] - 1},
        own | {"attention_mask": own["attention_mask"][:-1]},
        own | {"pooled": own["pooled"][None]},
        own | {"hidden_states": torch.cat([own["hidden_states"]] * 2)},
    ):
        assert difference(own, other) == math.inf


# In parquet files.


@pytest.fixture
def encoded(named, tmp_path):
    """What preprocess writes of two videos for this family."""
    (tmp_path / "in").mkdir()
    for i, caption in enumerate(CAPTIONS[:2]):
        write_exactly(tmp_path / "in" / f"{i}.mkv", quarters(5, 32, 32) // (i + 1), 8)
        (tmp_path / "in" / f"{i}.txt").write_text(caption)
    words = ["--workers", "1", "--video.fps", "8", *SIZE]
    assert main(["preprocess", str(tmp_path / "in"), str(tmp_path / "out"), *words]) == 0
    return tmp_path / "out"


def clips(folder, codec) -> tuple[ParquetClips, str]:
    """Return the clips of a folder, and what is said of their text."""
    one = ParquetClips(read_stored_files(folder, ClipRows(LATENT_SHAPE)), codec, 1)
    return one, one.check_text(ALONE)


@pytest.mark.slow
def test_encoded_clips_hold_all_tensors_and_training_needs_no_text_encoder(encoded, tmp_path, monkeypatch, codec):
    own = opened()
    expected, whole = own.encode_text(CAPTIONS[:2])["text"], tiny_codec()
    (file,) = encoded.glob("*.parquet")
    row = pq.read_table(file).to_pylist()[0]
    assert row["attention_mask_dtype"] == "bool" and row["pooled_shape"] == [4]
    assert (row["length_dtype"], row["length_shape"]) == ("int64", [])
    assert row[TEXT[1]] == [*own.prompts([CAPTIONS[0]])[0]["hidden_states"].shape]
    columns = {*columns_of("pooled"), *columns_of("attention_mask"), *columns_of("length"), *TEXT}
    read = read_stored_files(encoded, ClipRows(LATENT_SHAPE))
    assert read.text == columns and read.row_groups[0].size > read_stored_size(file, columns)

    one, said = clips(encoded, whole)  # of one matrix
    assert "captions are encoded instead; files and text encoder do not share attention_mask_bytes" in said
    assert one.condition([0]) is None
    without_encoder(monkeypatch)
    one, said = clips(encoded, opened())
    assert said.endswith("used; the run's text encoder made them")
    assert torch.equal(one.condition([1, 0])["text"], expected[[1, 0]])
    words = ["--method", "finetune", "--data.path", str(encoded), "--algorithm.batch-size", "2", "--steps", "2", *SIZE]
    assert main([*words, "--validate-every", "0", "--output", str(tmp_path / "run")]) == 0
    assert len(metrics_of(tmp_path / "run")) == 2


def read_stored_size(file, columns) -> int:
    """Return the bytes of the columns of prompts in the first row group."""
    group = pq.read_metadata(file).row_group(0)
    parts = [group.column(i) for i in range(group.num_columns)]
    return sum(p.total_uncompressed_size for p in parts if p.path_in_schema.split(".")[0] in columns)


@pytest.mark.slow
def test_damage_of_a_further_tensor_is_named_with_file_and_row(encoded):
    (file,) = encoded.glob("*.parquet")
    table = pq.read_table(file)
    for column, value, said in (
        ("pooled_bytes", b"123", "is damaged: pooled_bytes"),
        ("pooled_shape", [3], "is damaged: pooled_bytes"),
        ("pooled_dtype", "object", "is damaged: pooled_bytes"),
        ("pooled_bytes", b"\0\0\xc0\x7f" * 4, "pooled_bytes holds a value that is not finite"),
    ):
        place, kind = table.column_names.index(column), table.schema.field(column)
        values = [table[column].to_pylist()[0], value]
        pq.write_table(table.set_column(place, kind, [values]), file)
        one, _ = clips(encoded, opened())
        with pytest.raises(UserError, match=rf"clips-00000\.parquet: row 2 \('1\.mkv'\).*{said}"):
            one.condition([0, 1])
    pq.write_table(table.set_column(place, "pooled_bytes", [["a", "b"]]), file)
    with pytest.raises(UserError, match="column pooled_bytes holds string, expected binary"):
        clips(encoded, opened())


@pytest.mark.slow
def test_the_negative_prompt_and_prompts_alone_are_stored_too(encoded, named, tmp_path, monkeypatch, codec):
    own = opened()
    (tmp_path / "prompts.txt").write_text("\n".join(CAPTIONS))
    assert main(["preprocess", str(tmp_path / "prompts.txt"), str(tmp_path / "texts")]) == 0
    expected = own.encode_text(["", *CAPTIONS])["text"]
    assert use_stored_prompts(tmp_path / "texts", "--prompts", CAPTIONS, codec, ALONE).endswith("clips-00000.parquet")
    without_encoder(monkeypatch)
    one = opened()
    assert use_negative_prompt(encoded, "", one)
    said = use_stored_prompts(tmp_path / "texts", "--prompts", CAPTIONS, one, ALONE)
    assert said.endswith("used; the run's text encoder made them")
    assert torch.equal(one.encode_text(["", *CAPTIONS])["text"], expected)
    about, held = metadata_of(encoded / FILE), load_file(encoded / FILE)
    save_file({"embedding": held["hidden_states"]}, encoded / FILE, about)  # an earlier version's
    assert not use_negative_prompt(encoded, "", opened())
    save_file(held | {"pooled": torch.ones(3)}, encoded / FILE, about)
    with pytest.raises(UserError, match=r"negative_prompt\.safetensors is damaged \(a prompt has pooled .*: remove it"):
        use_negative_prompt(encoded, "", opened())


def test_a_tensor_named_like_another_column_is_refused():
    one = opened()
    one.text_shapes = {"text": (16, 32), "vae_latent": (3,)}
    with pytest.raises(UserError, match="columns files have already: vae_latent_bytes"):
        with_text(T2V, one)
    assert with_text(T2V, tiny_codec()).metadata.keys() == {TEXT_ENCODER.encode()}
