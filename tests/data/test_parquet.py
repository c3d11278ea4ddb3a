"""FastVideo's parquet files of clips: what is refused before training, what is read, by whom and how often."""

import io
import math
import threading
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from clip_files import RAW, tensors, write_clips
from helpers import ALONE, CPU, LATENT_SHAPE, WAN

from unified_trainer.basics.errors import MissingFileError, NotFiniteError, UserError
from unified_trainer.basics.requests import Request
from unified_trainer.data import parquet
from unified_trainer.data.batch_plan import BatchPlan
from unified_trainer.data.loader import Loader
from unified_trainer.data.parquet import ParquetClips
from unified_trainer.data.parquet_files import StoredFiles, read_stored_files
from unified_trainer.data.row_kinds import ClipRows
from unified_trainer.models.encoders import EncoderConfig
from unified_trainer.models.wan.codec import WanCodec
from unified_trainer.parallel.mesh import Mesh

pytestmark = pytest.mark.slow  # seconds together

SHAPE = (16, 3, 8, 8)  # larger: 12 KiB
PLAN = BatchPlan.one_update(4, 4)


def clip_files(path: Path, shape=LATENT_SHAPE) -> StoredFiles:
    return read_stored_files(path, ClipRows(shape))


def source(path: Path, codec, shape=LATENT_SHAPE) -> ParquetClips:
    return ParquetClips(clip_files(path, shape), codec, lanes=4)


def many(folder: Path, count: int = 96, rows: int = 8, shape=LATENT_SHAPE, **more) -> torch.Tensor:
    """Write files of 32 rows in row groups of `rows`, and return the latents."""
    latents = torch.randn(count, *shape, generator=torch.Generator().manual_seed(5))
    for i in range(0, count, 32):
        captions = [f"a caption {n}" for n in range(i, min(i + 32, count))]
        write_clips(folder / f"{i:03}.parquet", latents[i : i + 32], rows=rows, caption=captions, **more)
    return latents


# What is read.


def test_latents_are_normalised_by_the_vae(codec, tmp_path):
    write_clips(tmp_path / "a.parquet")
    one = source(tmp_path, codec)
    assert len(one) == 3 and one.request(1) == Request("caption 1")
    mean, std = (torch.tensor(codec._outline.config[f"latents_{name}"]).view(-1, 1, 1, 1) for name in ("mean", "std"))
    torch.testing.assert_close(one.latents([2, 0]), (RAW[[2, 0]] - mean) / std)


def test_files_follow_each_other_in_the_order_of_their_names(codec, tmp_path):
    (tmp_path / "part").mkdir()
    write_clips(tmp_path / "part" / "b.parquet", RAW[1:], caption=["second", "third"])
    write_clips(tmp_path / "a.parquet", RAW[:1], caption=["first"])
    one = source(tmp_path, codec)
    assert [one.request(i).text for i in range(3)] == ["first", "second", "third"]
    torch.testing.assert_close(one.latents([0, 1, 2]), codec.normalise(RAW))


def test_a_single_file_is_a_data_set(codec, tmp_path):
    write_clips(tmp_path / "b.parquet")
    one = source(write_clips(tmp_path / "a.parquet", RAW[:2]), codec)
    assert len(one) == 2 and torch.equal(one.latents([1]), codec.normalise(RAW[1:2]))


@pytest.mark.parametrize("kind", [torch.float16, torch.float64])
def test_the_stored_type_is_honoured(codec, tmp_path, kind):
    write_clips(tmp_path / "a.parquet", RAW.to(kind))
    assert torch.equal(source(tmp_path, codec).latents([0, 2]), codec.normalise(RAW.to(kind).float()[[0, 2]]))


def test_image_conditions_of_kind_i2v_are_not_read_and_the_run_says_so(codec, tmp_path):
    write_clips(tmp_path / "a.parquet", **tensors("clip_feature", [torch.ones(2, 3)] * 3), fps=[16.0] * 3)
    assert torch.equal(source(tmp_path, codec).latents([0, 1, 2]), codec.normalise(RAW))
    assert (
        "has image conditions (clip_feature_bytes), which the student does not read" in clip_files(tmp_path).image_note
    )
    write_clips(tmp_path / "a.parquet")
    assert clip_files(tmp_path).image_note == ""


# What is refused before training.


def refused(path: Path, message: str, kind: type[Exception] = UserError) -> None:
    with pytest.raises(kind, match=message):
        clip_files(path)


def test_rows_that_cannot_be_trained_on_are_named(tmp_path):
    """By file, row and id, several at once and those beyond five counted."""
    bad = {"caption": ["fine", " ", None], "vae_latent_shape": [[1, 2, 3, 4], [*LATENT_SHAPE], [*LATENT_SHAPE]]}
    write_clips(tmp_path / "a.parquet")
    write_clips(tmp_path / "b.parquet", **bad)
    refused(tmp_path, r"b\.parquet: row 1 \('clip0'\) has latents \(1, 2, 3, 4\), the run's video\.\* settings make")
    refused(tmp_path, r"; \S+b\.parquet: row 2 \('clip1'\) has no caption; \S+ row 3 \('clip2'\) has no caption$")
    write_clips(tmp_path / "c.parquet", vae_latent_dtype=["bfloat16", "int32", None], caption=["a", "b", "c"])
    refused(tmp_path, r"row 2 \('clip1'\) has latents of type int32, not float16, float32, float64; and 1 more rows$")


@pytest.mark.parametrize("missing", ["caption", "vae_latent_shape"])
def test_a_missing_column_is_named(tmp_path, missing):
    write_clips(tmp_path / "a.parquet", **{missing: None})
    refused(tmp_path, f"columns {missing} are missing in .*a.parquet")


def test_files_of_other_kinds_are_named(tmp_path):
    nothing = dict.fromkeys(tensors("vae_latent", []))
    file = write_clips(tmp_path / "text.parquet", text=[torch.ones(2, 3)] * 3, **nothing)
    refused(file, r"text\.parquet holds captions without clips; methods that train on none take --prompts$")
    file = write_clips(tmp_path / "ode.parquet", **tensors("trajectory_latents", [torch.ones(1, 2)] * 3), **nothing)
    refused(file, r"ode\.parquet holds trajectories of a teacher \(kind ode\)")


def test_files_with_other_columns_than_the_first_are_named(tmp_path):
    write_clips(tmp_path / "a.parquet")
    write_clips(tmp_path / "b.parquet")
    write_clips(tmp_path / "c.parquet", fps=[8.0] * 3, id=[1, 2, 3])
    refused(tmp_path, r"a\.parquet and \S+c\.parquet differ in columns fps, id: put files")


def test_a_folder_without_rows_and_a_file_cut_short_are_named(tmp_path):
    refused(tmp_path, r"holds no \.parquet files", MissingFileError)
    refused(tmp_path / "absent", "absent does not exist", MissingFileError)
    file = write_clips(tmp_path / "a.parquet", RAW[:0])
    refused(tmp_path, "its files hold no rows")
    file.write_bytes(write_clips(tmp_path / "a.parquet").read_bytes()[:100])
    refused(tmp_path, r"a\.parquet is not whole parquet")
    (tmp_path / "a.parquet").write_text("a caption")
    refused(tmp_path, r"a\.parquet is not whole parquet")


def test_a_window_that_is_too_small_is_refused(tmp_path):
    write_clips(tmp_path / "a.parquet", torch.randn(96, *LATENT_SHAPE), rows=24)
    files = clip_files(tmp_path)
    group = files.row_groups[0].size / 2**30
    assert 24 * RAW[0].nbytes < files.row_groups[0].size < 28 * RAW[0].nbytes
    assert [files.lanes(8, window * group) for window in (1.5, 3.9, 7.9, 100)] == [1, 2, 4, 8]
    with pytest.raises(UserError, match=r"row group 1 of \S+a\.parquet takes .* more than data\.window_gib"):
        files.lanes(8, 0.9 * group)


# What is found while rows are read.


def error_of(codec, file: Path, row: int) -> str:
    one = source(file, codec)
    one.prefetch([row])
    with pytest.raises(UserError) as caught:
        one.latents([row])
    one.close()
    return str(caught.value)


def test_damage_within_a_row_is_named_when_it_is_read(codec, tmp_path):
    data = [RAW[0].numpy().tobytes(), RAW[1].numpy().tobytes()[:-4], b""]
    file = write_clips(tmp_path / "a.parquet", vae_latent_bytes=data)
    assert torch.equal(source(file, codec).latents([0]), codec.normalise(RAW[:1]))
    assert "a.parquet: row 2 ('clip1') is damaged: vae_latent_bytes (cannot reshape" in error_of(codec, file, 1)
    assert "a.parquet: row 3 ('clip2') is damaged" in error_of(codec, file, 2)
    latents = RAW.clone()
    latents[1, 0, 0, 0, 0] = math.nan
    one = source(write_clips(tmp_path / "a.parquet", latents), codec)
    with pytest.raises(NotFiniteError, match=r"row 2 \('clip1'\): vae_latent_bytes holds a value that is not finite"):
        one.latents([0, 1])


def test_a_flipped_bit_is_found_by_the_checksum_of_its_page(codec, tmp_path):
    file = write_clips(tmp_path / "a.parquet", compression="none")
    data = bytearray(file.read_bytes())
    data[data.index(RAW[1].numpy().tobytes()) + 100] ^= 1
    file.write_bytes(data)
    assert "a.parquet is damaged in row group 1 (" in error_of(codec, file, 0)


def test_a_file_that_changes_during_the_run_is_named(codec, tmp_path):
    file = write_clips(tmp_path / "a.parquet", RAW.repeat(4, 1, 1, 1, 1), rows=4)
    one = source(file, codec)
    one.latents([0])
    file.write_bytes(file.read_bytes()[:3000])
    with pytest.raises(UserError, match=r"a\.parquet is damaged in row group 3"):
        one.latents([9])
    file.unlink()
    with pytest.raises(UserError, match=r"a\.parquet is damaged in row group 2"):
        one.latents([5])


# How often, and by whom.


class Counting(io.FileIO):
    """A file that counts what is read."""

    bytes = 0

    def read(self, size=-1):
        data = super().read(size)
        Counting.bytes += len(data)
        return data

    def readinto(self, buffer):
        count = super().readinto(buffer)
        Counting.bytes += count
        return count


@pytest.fixture
def counted(monkeypatch):
    """Count the bytes that are read of row groups."""

    class File(pq.ParquetFile):
        def __init__(self, file, **options):
            self.opened = Counting(file)
            super().__init__(pa.PythonFile(self.opened), **options)

        def close(self, force=False):
            super().close(force)
            self.opened.close()

    monkeypatch.setattr(parquet.pq, "ParquetFile", File)
    Counting.bytes = 0


def loader(path: Path, codec, mesh: Mesh = ALONE, shape=LATENT_SHAPE) -> Loader:
    return Loader(source(path, codec, shape), codec, PLAN, shape, "", 0, mesh)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_bytes_read_are_hardly_more_than_the_bytes_wanted(codec, tmp_path, counted, ranks):
    """Two epochs of row groups of 8; whoever reads a row group for each row reads eight times the bytes wanted."""
    latents = many(tmp_path, 376, shape=SHAPE, compression="none")
    loaders = [loader(tmp_path, codec, Mesh(CPU, rank, ranks), SHAPE) for rank in range(ranks)]
    Counting.bytes, steps = 0, 2 * len(latents) // PLAN.prompts
    seen = []
    for step in range(steps):
        for batch in [one.batch(step) for one in loaders]:
            seen += batch.prompt_ids
            assert torch.equal(batch.latents, codec.normalise(latents[list(batch.prompt_ids)]))
    for one in loaders:
        one.close()
    wanted = steps * PLAN.prompts * latents[0].nbytes
    assert wanted < Counting.bytes < 1.2 * wanted
    assert sorted(seen[:376]) == sorted(seen[376:]) == list(range(376)) and seen[:376] != seen[376:]


def test_no_more_row_groups_are_kept_than_the_window_holds(codec, tmp_path):
    many(tmp_path)
    one = loader(tmp_path, codec)
    for step in range(24):
        one.batch(step)
        one._source._asked[1].result()
        assert len(one._source._tables) <= 4
    one.close()


def test_batches_are_those_of_one_rank_and_of_a_run_that_was_resumed(codec, tmp_path):
    latents = many(tmp_path)
    whole = loader(tmp_path, codec)
    batches = [whole.batch(step) for step in range(30)]
    for step in (29, 7, 8):  # out of order, as after a resume
        again = loader(tmp_path, codec).batch(step)
        assert again.prompt_ids == batches[step].prompt_ids and torch.equal(again.latents, batches[step].latents)
        assert again.prompts == tuple(f"a caption {row}" for row in again.prompt_ids)
        assert torch.equal(again.latents, codec.normalise(latents[list(again.prompt_ids)]))
        parts = [loader(tmp_path, codec, Mesh(CPU, rank, 2)).batch(step) for rank in range(2)]
        assert torch.equal(torch.cat([part.latents for part in parts]), again.latents)
        assert sum((part.sample_ids for part in parts), ()) == again.sample_ids


def test_the_next_step_is_read_while_this_one_trains(codec, tmp_path, monkeypatch):
    """One step ahead, in order, on a thread that ends with the loader."""
    many(tmp_path)
    one, read = loader(tmp_path, codec), []
    original = ParquetClips._read

    def noted(self, rows):
        read.append((threading.current_thread(), [*rows]))
        return original(self, rows)

    monkeypatch.setattr(ParquetClips, "_read", noted)
    for step in range(3):
        batch = one.batch(step)
        one._source._asked[1].result()
        assert [rows for _, rows in read] == [one.rows(k)[0] for k in range(step + 2)]
        assert list(batch.prompt_ids) == read[step][1]
    (thread,) = {thread for thread, _ in read}
    assert thread is not threading.main_thread() and thread.is_alive()
    one.close()
    assert not thread.is_alive()


def test_an_error_of_the_thread_arrives_with_its_step(codec, tmp_path):
    """The step before it trains; the error is the one that the row would have raised without the thread."""
    latents = many(tmp_path)
    bad = loader(tmp_path, codec).rows(1)[0][2]
    latents[bad] = math.inf
    many_again = latents[bad // 32 * 32 : bad // 32 * 32 + 32]
    captions = [f"a caption {n}" for n in range(32)]
    write_clips(tmp_path / f"{bad // 32 * 32:03}.parquet", many_again, rows=8, caption=captions)
    one = loader(tmp_path, codec)
    one.batch(0)
    with pytest.raises(NotFiniteError, match=rf"{bad // 32 * 32:03}\.parquet: row {bad % 32 + 1} \('clip{bad % 32}'\)"):
        one.batch(1)
    one.close()


def test_a_loader_is_closed_while_rows_are_read(codec, tmp_path, monkeypatch):
    """As after an interrupt: what is being read ends, and nothing is read after it."""
    many(tmp_path)
    one, began, go, read = loader(tmp_path, codec), threading.Event(), threading.Event(), []
    original = ParquetClips._read_row_group

    def slow(self, number, columns):
        began.set()
        assert go.wait(10)
        read.append(number)
        return original(self, number, columns)

    monkeypatch.setattr(ParquetClips, "_read_row_group", slow)
    one._source.prefetch([0])
    one._source.prefetch([40])
    assert began.wait(10)
    closing = threading.Thread(target=one.close)
    closing.start()
    go.set()
    closing.join(10)
    assert not closing.is_alive() and read == [0]


# Text embeddings.


def embeddings(codec, count: int = 3) -> list[torch.Tensor]:
    return [prompt["text"] for prompt in codec.prompts([f"caption {i}" for i in range(count)])]


def own_codec(asked: list[str], **settings) -> WanCodec:
    """A codec that notes the prompts that it encodes."""
    one = WanCodec.load(WAN, CPU, EncoderConfig(**settings))
    embed = one._embeddings._encode
    one._embeddings._encode = lambda prompts: asked.extend(prompts) or embed(prompts)
    return one


def checked(path: Path, codec) -> tuple[Loader, str]:
    one = loader(path, codec)
    codec.encode_ahead(one.prompts(1), ALONE)
    return one, one._source.check_text(ALONE)


def test_embeddings_of_the_runs_encoder_are_used_without_it(codec, tmp_path):
    """Known by the fingerprint; the conditions are those of the captions, bit by bit."""
    asked: list[str] = []
    write_clips(tmp_path / "a.parquet", text=embeddings(codec), encoder=codec.text_fingerprint)
    one, said = checked(tmp_path, own_codec(asked))
    assert said == "text embeddings of data.path: used; the run's text encoder made them"
    batch = one.batch(0)
    assert asked == [""]
    assert torch.equal(batch.cond["text"], codec.encode_text(list(batch.prompts))["text"])


@pytest.mark.parametrize("encoder", ["", "another"])
def test_embeddings_that_name_no_encoder_are_compared(codec, tmp_path, encoder):
    """The first rows of up to four files; bf16 is within the tolerance, and padding does not count."""
    (bf16,) = (own_codec([], text_precision="bf16"),)
    text = [torch.nn.functional.pad(x.float(), (0, 0, 0, 16 - len(x))) for x in embeddings(bf16)]
    for i in range(9):
        write_clips(tmp_path / f"{i}.parquet", text=text, encoder=encoder, caption=["caption 0", f"a {i}", f"b {i}"])
    asked: list[str] = []
    one, said = checked(tmp_path, own_codec(asked))
    assert asked == ["caption 0"]
    assert said.startswith("text embeddings of data.path: used; 3 compared, which differ from the run's text encoder")
    assert 0 < float(said.split()[-1].rstrip("%")) < 5
    assert one._source._compared == [0, 9, 18]
    batch = one.batch(0)
    assert torch.equal(batch.cond["text"], torch.stack([text[row % 3] for row in batch.prompt_ids]))


@pytest.mark.parametrize("change", [lambda x: -x, lambda x: x[:-1], lambda x: torch.cat([x, x[:1]])])
def test_embeddings_of_another_encoder_are_not_used(codec, tmp_path, change):
    """One file of several is enough. All captions are encoded instead."""
    write_clips(tmp_path / "a.parquet", text=embeddings(codec))
    write_clips(tmp_path / "b.parquet", text=[change(x) for x in embeddings(codec)])
    asked: list[str] = []
    one, said = checked(tmp_path, own_codec(asked))
    assert "captions are encoded instead; that of" in said and "b.parquet: row 1 ('clip0') differs" in said
    batch = one.batch(0)
    assert torch.equal(batch.cond["text"], codec.encode_text(list(batch.prompts))["text"])
    assert set(one.prompts(2)) == {"", "caption 0", "caption 1", "caption 2"}


def test_files_whose_embeddings_have_no_shape_say_why_they_are_not_used(codec, tmp_path):
    one, said = checked(write_clips(tmp_path / "a.parquet"), codec)
    assert said.endswith("captions are encoded instead; " + str(tmp_path / "a.parquet") + " holds none")
    text = [*embeddings(codec, 2), torch.zeros(0)]
    one, said = checked(write_clips(tmp_path / "a.parquet", text=text, encoder=codec.text_fingerprint), codec)
    assert said.endswith("a.parquet: row 3 ('clip2') has one of shape [0]")
    assert torch.equal(one.batch(0).cond["text"], codec.encode_text(list(one.batch(0).prompts))["text"])


def test_an_embedding_longer_than_the_model_takes_is_refused(codec):
    with pytest.raises(UserError, match=r"a prompt has text .* \[17, 32\], expected .* \[1, 32\] to \[16, 32\]"):
        codec.text_condition([{"text": torch.ones(17, 32)}])
