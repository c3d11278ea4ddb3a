"""What is read of a source: every container and the scales of weights; refusals name file, key and way out."""

import json
import pickle
from argparse import Namespace
from functools import partial

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed import destroy_process_group, init_process_group
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from unified_trainer.basics.errors import UserError
from unified_trainer.tools.prepare.weight_source import read_source

WEIGHT = torch.arange(12.0).reshape(4, 3) - 5  # exact in fp8
FP8, INT8 = torch.float8_e4m3fn, torch.int8
ROWS = torch.tensor([0.5, 2.0, 0.3, 1.7])


def read(source, component="transformer"):
    return {key: load() for key, (_, load) in read_source(source, component).items()}


def wrote(file, weights, header=None):
    save_file(weights, file, header)
    return file


@pytest.mark.parametrize(
    ("name", "dtype", "scale", "product"),
    [
        ("scale_weight", FP8, torch.tensor([0.3]), 0.3),
        ("scale_weight", torch.float8_e5m2, torch.tensor(0.25), 0.25),
        ("weight_scale", FP8, torch.tensor(3.0, dtype=torch.bfloat16), 3),
        ("weight_scale", FP8, ROWS, ROWS[:, None]),
        ("weight_scale_inv", FP8, ROWS[:, None], ROWS[:, None]),
        ("weight_scale", INT8, ROWS[:, None], ROWS[:, None]),
        ("SCB", INT8, 127 * ROWS, ROWS[:, None]),
    ],
)
def test_a_weight_is_times_its_scale(tmp_path, name, dtype, scale, product):
    """The scale of the tensor, or of each row; what a program needs for activations is no weight."""
    held = {
        "l.weight": WEIGHT.to(dtype),
        f"l.{name}": scale,
        "l.input_scale": torch.ones(()),
        "l.bias": ROWS.bfloat16(),
    }
    got = read(wrote(tmp_path / "w.safetensors", held | {"scaled_fp8": torch.zeros(2).to(FP8)}))
    assert got.keys() == {"l.weight", "l.bias"}
    torch.testing.assert_close(got["l.weight"], held["l.weight"].float() * product, rtol=1e-6, atol=0)


def test_fp8_without_scales_is_cast(tmp_path):
    (got,) = read(wrote(tmp_path / "w.safetensors", {"l.weight": WEIGHT.to(FP8)})).values()
    assert torch.equal(got.float(), WEIGHT)


def comfy(**settings):
    return torch.tensor(list(json.dumps(settings).encode()), dtype=torch.uint8)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"l.weight_scale": torch.ones(2, 1)}, r"l\.weight_scale \[2, 1\] scales blocks of l\.weight \[4, 3\]"),
        ({"l.weight_scale": torch.ones(1, 3)}, r"l\.weight_scale \[1, 3\] scales blocks"),
        ({"l.weight_scale": torch.ones(4, 3)}, r"l\.weight_scale \[4, 3\] scales blocks"),
        (
            {"l.weight_scale": torch.ones(1), "l.scale_weight": torch.ones(1)},
            r"l\.weight has two scales, l\.\w+ and l\.",
        ),
        ({"l.weight": WEIGHT.to(INT8)}, r"l\.weight has type int8 and no scale beside it"),
        (
            {"l.weight": WEIGHT.to(torch.uint8), "l.weight_scale": torch.ones(1)},
            r"l\.weight_scale scales l\.weight, which has type uint8",
        ),
        (
            {"l.weight": WEIGHT.bfloat16(), "l.weight_scale": torch.ones(1)},
            r"l\.\w+ scales l\.weight, which has type bfloat16",
        ),
        (
            {"m.weight": WEIGHT.to(FP8), "m.weight_scale": torch.ones(1)},
            r"l\.weight has type float8_e4m3fn and no scale",
        ),
        ({"l.comfy_quant": comfy(format="int8_rowwise", convrot=True)}, r"l\.comfy_quant: quantized as .*convrot"),
        ({"l.comfy_quant": comfy(format="nvfp4")}, r"l\.comfy_quant: quantized as .*nvfp4"),
    ],
)
def test_other_quantizations_are_named(tmp_path, more, said):
    """Each with the way out; they would be read as other numbers."""
    with pytest.raises(
        UserError, match=rf"w\.safetensors: {said}.*: take a file of the same network in bf16, or in fp8"
    ):
        read(wrote(tmp_path / "w.safetensors", {"l.weight": WEIGHT.to(FP8)} | more))


def test_a_header_tells_of_other_quantizations(tmp_path):
    def header(kind):
        return {"_quantization_metadata": json.dumps({"layers": {"l": {"format": kind}}})}

    weights = {"l.weight": WEIGHT.to(FP8), "l.weight_scale": torch.ones(1)}
    assert read(wrote(tmp_path / "w.safetensors", weights, header("float8_e4m3fn"))).keys() == {"l.weight"}
    with pytest.raises(UserError, match=r"l in _quantization_metadata of its header: quantized as .*mxfp8"):
        read(wrote(tmp_path / "w.safetensors", weights, header("mxfp8")))


def sharded(folder, named, **files):
    for name, weights in files.items():
        save_file(weights, folder / f"{name}.safetensors")
    (folder / "w.safetensors.index.json").write_text(json.dumps({"weight_map": named}))
    return folder


def test_a_weight_is_read_from_the_file_that_the_index_names(tmp_path):
    stale = {"a": torch.zeros(1), "b": torch.ones(1)}
    fresh = {"a": torch.ones(1)}
    for order in ((stale, fresh), (fresh, stale)):
        named = dict(zip(("stale", "fresh"), ("one", "two") if order[0] is stale else ("two", "one"), strict=True))
        folder = tmp_path / named["fresh"]
        folder.mkdir()
        home = {"a": f"{named['fresh']}.safetensors", "b": f"{named['stale']}.safetensors"}
        assert all(value == 1 for value in read(sharded(folder, home, one=order[0], two=order[1])).values())


def test_an_index_that_does_not_fit_is_named(tmp_path):
    sharded(tmp_path, {"a": "one.safetensors", "b": "one.safetensors"}, one={"a": torch.ones(1)})
    with pytest.raises(UserError, match=r"index\.json: weight_map places b in one\.safetensors, which lacks it"):
        read(tmp_path)
    sharded(tmp_path, {"a": "one.safetensors"}, two={"a": torch.ones(1)})
    with pytest.raises(UserError, match=r"several networks, by w\.safetensors\.index\.json and two\.safetensors: give"):
        read(tmp_path)


def test_files_of_several_networks_are_listed(tmp_path):
    for name in ("high", "low"):
        save_file({"a": torch.ones(1)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(UserError, match=r"several networks, high\.safetensors, low\.safetensors, all with a: give one"):
        read(tmp_path)
    assert read(tmp_path / "low.safetensors").keys() == {"a"}


def test_a_folder_without_weights_is_listed(tmp_path):
    (tmp_path / "notes.txt").touch()
    with pytest.raises(
        UserError, match=r"holds neither \.metadata nor files of one network, but notes\.txt: check SOURCE"
    ):
        read(tmp_path)


def test_a_native_folder_has_a_place_for_each_component(tmp_path):
    for name in ("high_noise_model", "low_noise_model"):
        (tmp_path / name).mkdir()
        save_file({name: torch.ones(1)}, tmp_path / name / "diffusion_pytorch_model.safetensors")
    for name in ("models_t5_umt5-xxl-enc-bf16.pth", "Wan2.1_VAE.pth"):
        torch.save({name.partition("_")[0]: torch.ones(1)}, tmp_path / name)
    held = {part: next(iter(read(tmp_path, part))) for part in ("transformer", "transformer_2", "text_encoder", "vae")}
    names = {"transformer": "high_noise_model", "transformer_2": "low_noise_model"}
    assert held == names | {"text_encoder": "models", "vae": "Wan2.1"}


@pytest.mark.parametrize("save", [torch.save, partial(torch.save, _use_new_zipfile_serialization=False)])
def test_a_file_of_torch_save_old_or_new(tmp_path, save):
    """With weights that share memory, and lists and numbers beside them."""
    both = torch.stack([WEIGHT, 2 * WEIGHT])
    save({"model": {"a": both[0], "b": both[1].t()}, "epochs": [1, 2], "step": 3}, tmp_path / "w.pth")
    got = read(tmp_path / "w.pth")
    assert torch.equal(got["model.a"], WEIGHT) and torch.equal(got["model.b"], 2 * WEIGHT.t()) and len(got) == 2


def test_the_class_in_a_pickle_is_named(tmp_path):
    for old in (False, True):
        torch.save({"w": WEIGHT, "args": Namespace(a=1)}, tmp_path / "w.pt", _use_new_zipfile_serialization=not old)
        with pytest.raises(
            UserError, match=r"its pickle names argparse\.Namespace, which is never run here\. If you trust"
        ):
            read(tmp_path / "w.pt")


def test_a_dtensor_is_read_where_it_is_whole(tmp_path):
    init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (2,))
        whole = DTensor.from_local(WEIGHT, mesh, [Replicate()], run_check=False)
        torch.save({"w": whole}, tmp_path / "whole.pt")
        torch.save({"w": DTensor.from_local(WEIGHT, mesh, [Shard(0)], run_check=False)}, tmp_path / "part.pt")
    finally:
        destroy_process_group()
    got = read(tmp_path / "whole.pt")["w"]
    assert type(got) is torch.Tensor and torch.equal(got, WEIGHT)
    with pytest.raises(UserError, match=r"w is the part that one rank has of a DTensor \[8, 3\].*full_state_dict"):
        read(tmp_path / "part.pt")


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("w.gguf", b"GGUF\3\0\0\0", "is a GGUF file, whose weights are quantized in blocks: take a file"),
        ("w.safetensors", b"GGUF\3\0\0\0", "is a GGUF file"),
        ("w.safetensors", b"version https://git-lfs.github.com/spec/v1", "is a pointer of Git LFS.*git lfs pull"),
        ("w.pt", pickle.dumps({"a": 1}), "is no file of tensors that torch.save wrote"),
    ],
)
def test_other_files_are_named(tmp_path, name, content, said):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=f"{name} {said}"):
        read(tmp_path / name)
