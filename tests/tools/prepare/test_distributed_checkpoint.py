"""The metadata of a distributed checkpoint is data: every layout is read, and nothing that it names is called."""

import io
import os
import pickle
import sys
import warnings
import zipfile
from pathlib import Path, PurePosixPath

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import checkpoint
from torch.distributed._shard.sharded_tensor import metadata as of_torch_2_0
from torch.distributed.checkpoint import filesystem, metadata

from unified_trainer.__main__ import main
from unified_trainer.basics.errors import UserError
from unified_trainer.tools.prepare import distributed_checkpoint
from unified_trainer.tools.prepare.distributed_checkpoint import LARGEST, MOST, NAMES, stored_tensors

SIZE = torch.Size
WEIGHT = torch.arange(12.0).reshape(4, 3)
EVENTS: list[str] | None = None  # what the interpreter did, while it is watched


def note(event, arguments):
    if EVENTS is not None:
        EVENTS.append(event)


sys.addaudithook(note)


def written(folder, state):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.distributed is disabled")
        checkpoint.save(state, checkpoint_id=folder, no_dist=True)
    return folder


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    state = {"model": {"w": WEIGHT, "b": torch.ones(2, dtype=torch.bfloat16)}, "step": 3, "s": torch.tensor(2)}
    return written(tmp_path_factory.mktemp("real") / "dcp", state)


def part(file, start, length):
    return filesystem._StorageInfo(file, start, length)


def split(folder, properties=metadata.TensorProperties, **more):
    """Write a tensor as two ranks do, each two rows, and return its metadata."""
    folder.mkdir(exist_ok=True)
    chunks, places = [], {}
    for rank in range(2):
        content = io.BytesIO()
        torch.save(WEIGHT[2 * rank : 2 * rank + 2].clone(), content)
        (folder / f"__{rank}_0.distcp").write_bytes(b"before" + content.getvalue() + b"after")
        at = SIZE((2 * rank, 0))
        chunks.append(metadata.ChunkStorageMetadata(at, SIZE((2, 3))))
        index = metadata.MetadataIndex("w", at, rank)
        places[index] = part(f"__{rank}_0.distcp", len(b"before"), len(content.getvalue()))
    held = metadata.TensorStorageMetadata(properties(dtype=torch.float32), SIZE((4, 3)), chunks)
    return metadata.Metadata({"w": held, "step": metadata.BytesStorageMetadata()}, {"w": ("w",)}, places, **more)


def put(folder, content):
    folder.mkdir(exist_ok=True)
    (folder / ".metadata").write_bytes(content if isinstance(content, bytes) else pickle.dumps(content))
    return folder


def test_what_torch_writes_is_read(real):
    found = stored_tensors(real)
    assert found.keys() == {"model.w", "model.b", "s"}
    assert found["model.w"][0] == (4, 3) and torch.equal(found["model.w"][1](), WEIGHT)
    assert torch.equal(found["model.b"][1](), torch.ones(2, dtype=torch.bfloat16))
    with pytest.raises(UserError, match="s has type int64"):
        found["s"][1]()


@pytest.mark.parametrize("protocol", range(2, 6))
@pytest.mark.parametrize("properties", [metadata.TensorProperties, of_torch_2_0.TensorProperties])
@pytest.mark.parametrize(
    "more",
    [{}, {"storage_meta": metadata.StorageMeta(Path("/a/b"), "1", modules=["m"])}, {"version": "1.0.0"}],
    ids=["old", "named", "new"],
)
def test_layouts_of_older_and_newer_versions(tmp_path, protocol, properties, more):
    held = split(tmp_path, properties, **more)
    held.planner_data = {"w": ("model", 0, "w"), "nested": {"lr": [0.1, None, True, PurePosixPath("x"), -1, 2**40]}}
    put(tmp_path, pickle.dumps(held, protocol))
    assert torch.equal(stored_tensors(tmp_path)["w"][1](), WEIGHT)


def evil(command):
    """Metadata of allowed names alone: a class gets field names that `dataclass` would put into exec()."""

    def text(value):
        return b"X" + len(value.encode()).to_bytes(4, "little") + value.encode()

    def named(name):
        return b"c" + metadata.__name__.encode() + b"\n" + name + b"\n"

    fields = text(f"a:__import__('os').system('{command}'),b:\"") + text("InitVar") + b"s"
    fields = b"}" + fields + text('c:"') + text("InitVar") + b"s"
    state = b"}" + text("__module__") + text("dataclasses") + b"s" + text("__annotations__") + fields + b"s"
    return b"\x80\x02" + named(b"dataclass") + named(b"StorageMeta") + b"N" + state + b"\x86b" + b"\x85R."


class Calls:
    def __init__(self, called, *arguments):
        self.how = called, arguments

    def __reduce__(self):
        return self.how


def test_a_crafted_file_runs_no_command(tmp_path, capsys):
    folder = put(tmp_path / "evil", evil(f"touch {tmp_path}/EXECUTED"))
    assert main(["import-weights", str(folder), str(tmp_path / "out"), "--base", "tiny"]) == 2
    assert "no metadata of a distributed checkpoint of tensors (it names torch.dist" in capsys.readouterr().err
    assert not (tmp_path / "EXECUTED").exists() and not (tmp_path / "out").exists()


@pytest.mark.parametrize("place", ["alone", "planner_data", "storage_meta", "key", "properties"])
@pytest.mark.parametrize("called", [os.system, eval, getattr, torch.load, io.open, metadata.dataclass, torch.hub.load])
def test_what_is_named_anywhere_is_neither_looked_up_nor_called(tmp_path, place, called):
    global EVENTS
    harm, held = Calls(called, f"touch {tmp_path}/EXECUTED"), split(tmp_path)
    if place == "alone":
        held = harm
    elif place == "key":
        held.state_dict_metadata[harm] = held.state_dict_metadata.pop("w")
    elif place == "properties":
        held.state_dict_metadata["w"].properties = harm
    else:
        setattr(held, place, harm)
    put(tmp_path, held)
    with pytest.raises(UserError, match="it names"):
        stored_tensors(tmp_path)  # Python compiles some of the program at its first call
    EVENTS = []
    try:
        with pytest.raises(UserError, match="it names"):
            stored_tensors(tmp_path)
    finally:
        seen, EVENTS = {*EVENTS}, None
    assert seen <= {"open"}, "a look-up is the event pickle.find_class, or import"


def deep(opening, closing, times=500_000):
    return b"\x80\x04" + opening * times + closing * times + b"."


def itself():
    held = metadata.Metadata({}, None, {})
    held.state_dict_metadata["w"] = held.state_dict_metadata
    held.storage_data = held
    return held


def doubled():
    """Thirty tuples, each of them the one before twice: 2^30 elements for whoever walks through them."""
    held = ("x",)
    for _ in range(60):
        held = (held, held)
    return metadata.Metadata({"w": held}, held, {metadata.MetadataIndex("w", None): held})


ODD = {
    "empty": b"",
    "no pickle": b"\xff\x00 text",
    "nul": bytes(1000),
    "a text": pickle.dumps("x"),
    "a list": pickle.dumps([1]),
    "None": pickle.dumps(None),
    "a dictionary": pickle.dumps({"state_dict_metadata": {}}),
    "without storage": pickle.dumps(metadata.Metadata({})),
    "storage that is a list": pickle.dumps(metadata.Metadata({}, None, [1])),
    "numbers as keys": pickle.dumps(metadata.Metadata({1: metadata.BytesStorageMetadata()}, None, {})),
    "a text as tensor": pickle.dumps(metadata.Metadata({"w": "x"}, None, {})),
    "itself": pickle.dumps(itself()),
    "doubled": pickle.dumps(doubled()),
    "deep tuples": b"\x80\x04" + b")" + b"\x85" * 500_000 + b".",
    "deep lists": deep(b"]", b"a"),
    "deep marks": deep(b"(", b"t"),
    "no stack": b"\x80\x04aaaa.",
    "no mark": b"\x80\x04t.",
    "an absent memo": b"\x80\x04h\x09.",
    "a far memo": b"\x80\x04Nr\xff\xff\xff\xff0.",
    "a persistent id": b"\x80\x04Pmodule\n.",
    "an extension": b"\x80\x04\x82\x01.",
    "a huge text": b"\x80\x04\x8d" + (2**62).to_bytes(8, "little") + b"x.",
    "a huge number": b"\x80\x04\x8b\xff\xff\xff\x7fx.",
    "bytes without end": b"\x80\x05\x96" + (2**40).to_bytes(8, "little") + b"x.",
    "a name of texts that are none": b"\x80\x04K\x01K\x02\x93.",
    "a call of a text": b"\x80\x04X\x01\x00\x00\x00a)R.",
    "a state of a text": b"\x80\x04X\x01\x00\x00\x00a}b.",
}


@pytest.mark.slow
@pytest.mark.parametrize("content", ODD.values(), ids=ODD)
def test_odd_files_are_one_sentence(tmp_path, content):
    with pytest.raises(UserError, match=r"\.metadata is no metadata of a distributed checkpoint") as caught:
        stored_tensors(put(tmp_path, content))
    assert len(str(caught.value)) < 500 and "\n" not in str(caught.value)


def spoilt(change):
    def content(folder):
        held = split(folder)
        change(held, held.state_dict_metadata["w"], next(iter(held.storage_data.values())))
        return held

    return content


SPOILT = {
    "a file outside": lambda m, w, p: setattr(p, "relative_path", "../other/__0_0.distcp"),
    "an absolute file": lambda m, w, p: setattr(p, "relative_path", "/dev/zero"),
    "a compressed part": lambda m, w, p: setattr(p, "transform_descriptors", ["stream.zstd"]),
    "a negative start": lambda m, w, p: setattr(p, "offset", -1),
    "a fraction": lambda m, w, p: setattr(p, "length", 1.5),
    "a far start": lambda m, w, p: setattr(p, "offset", LARGEST),
    "a negative size": lambda m, w, p: setattr(w, "size", SIZE((-4, 3))),
    "a size that is a list": lambda m, w, p: setattr(w, "size", [4, 3]),
    "a part outside": lambda m, w, p: setattr(w.chunks[1], "offsets", SIZE((3, 0))),
    "a part of two axes more": lambda m, w, p: setattr(w.chunks[1], "sizes", SIZE((1, 1, 2, 3))),
    "an absent part": lambda m, w, p: m.storage_data.clear(),
    "no parts in a list": lambda m, w, p: setattr(w, "chunks", 3),
    "properties that are a text": lambda m, w, p: setattr(w, "properties", "float32"),
}


@pytest.mark.parametrize("change", SPOILT.values(), ids=SPOILT)
def test_records_that_contradict_each_other_are_refused(tmp_path, change):
    with pytest.raises(UserError, match="no metadata of a distributed"):
        stored_tensors(put(tmp_path, spoilt(change)(tmp_path)))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda m, w, p: setattr(p, "length", 9), "no file of tensors that torch.save wrote"),
        (lambda m, w, p: setattr(p, "offset", 2**40), "no file of tensors that torch.save wrote"),
        (lambda m, w, p: setattr(p, "relative_path", "absent"), "absent is missing"),
        (lambda m, w, p: setattr(p, "relative_path", "pipe"), "a device or pipe"),
        (lambda m, w, p: setattr(w.properties, "dtype", torch.float16), "does not hold w as .metadata describes it"),
        (lambda m, w, p: setattr(w.properties, "dtype", torch.int64), "w has type int64"),
    ],
)
def test_a_part_that_is_not_as_described_is_refused(tmp_path, change, said):
    os.mkfifo(tmp_path / "pipe")
    read = stored_tensors(put(tmp_path, spoilt(change)(tmp_path)))["w"][1]
    with pytest.raises(UserError, match=said):
        read()


def squeezed(content):
    """The same archive with compressed entries."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as source, zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as target:
        for entry in source.namelist():
            target.writestr(entry, source.read(entry))
    return out.getvalue()


@pytest.mark.parametrize(
    "other",
    [
        {"w": 1},
        torch.ones(3),
        torch.ones(2, 3).to_sparse(),
        torch.ones(2, 3, device="meta"),
        Calls(os.system, "exit 1"),
        None,
    ],
    ids=["a dictionary", "another shape", "sparse", "meta", "code", "compressed"],
)
def test_a_part_holds_a_plain_tensor_alone(tmp_path, other):
    held, content = split(tmp_path), io.BytesIO()
    torch.save(torch.ones(2, 3) if other is None else other, content)
    value = squeezed(content.getvalue()) if other is None else content.getvalue()
    (tmp_path / "__1_0.distcp").write_bytes(value)
    held.storage_data[metadata.MetadataIndex("w", SIZE((2, 0)))] = part("__1_0.distcp", 0, len(value))
    with pytest.raises(UserError, match=r"__1_0\.distcp (is no file of tensors|does not hold w)"):
        stored_tensors(put(tmp_path, held))["w"][1]()


def test_elements_that_no_part_holds_are_no_numbers(tmp_path):
    held = split(tmp_path)
    held.state_dict_metadata["w"].chunks.pop()
    assert stored_tensors(put(tmp_path, held))["w"][1]().isnan().tolist() == [[False] * 3] * 2 + [[True] * 3] * 2


def test_a_large_file_is_refused_by_its_size(tmp_path):
    put(tmp_path, b"")
    os.truncate(tmp_path / ".metadata", MOST + 1)
    with pytest.raises(UserError, match=f"has {MOST + 1} bytes, more than"):
        stored_tensors(tmp_path)


@given(st.data())
def test_no_damage_is_a_traceback(real, tmp_path_factory, data):
    """Cut anywhere, or with bytes changed anywhere: the keys are read, or one sentence says why not."""
    folder, content = tmp_path_factory.mktemp("damaged"), bytearray((real / ".metadata").read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    put(folder, bytes(content[: data.draw(st.integers(0, len(content)))]))
    try:
        stored_tensors(folder)
    except UserError as error:
        assert ".metadata is no metadata" in str(error)


def test_the_names_are_told_one_by_one():
    """No whole module, and nothing that does more than hold values."""
    assert len(NAMES) < 40 and all(name.isidentifier() for _, name in NAMES)
    assert {module for module, _ in NAMES} < {*sys.modules, "pathlib._local"}
    assert not {"pickle", "importlib"} & {*vars(distributed_checkpoint)}
