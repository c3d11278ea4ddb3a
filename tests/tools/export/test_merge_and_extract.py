"""The commands merge and extract-adapter: weights against closed forms, and what is refused."""

import math
import re

import pytest
import torch
from adapter_files import by_hand, factors, named, peft, published
from diffusers import WanPipeline
from expert_world import expert_folder
from helpers import WAN, assert_near, copy_of, files_of, refused
from safetensors.torch import load_file, save_file

from unified_trainer.__main__ import main
from unified_trainer.basics.errors import UserError
from unified_trainer.models.wan.lora import published_adapter
from unified_trainer.models.wan.model import WanModel
from unified_trainer.tools.export.adapters import low_rank

FILE = "diffusion_pytorch_model.safetensors"
BASE = load_file(WAN / "transformer" / FILE)
NETWORK = WanModel.open(WAN, "transformer").network
ENDS = ("to_q", "to_out.0", "ffn.net.2")
OUTSIDE = ("time_embedder.linear_1", "time_proj", "proj_out")


@pytest.fixture(scope="module")
def given():
    return [factors(NETWORK, 3, ENDS, seed=seed) for seed in range(2)]


@pytest.mark.slow
def test_merged_weights_are_the_sum(given, tmp_path, monkeypatch):
    """W + .5 (2 / 3) B A - .25 (4 / 3) B' A', for two layouts; the other components are those of the base."""
    monkeypatch.chdir(tmp_path)
    peft(tmp_path / "one", given[0], 2.0)
    published(tmp_path / "two", given[1], 4.0)
    before = files_of(WAN)
    assert main(["merge", "tiny", "out", "--adapters", "one:0.5", "two/wan.safetensors:-.25"]) == 0
    expected = by_hand(BASE, given[0], dict.fromkeys(given[0], 0.5 * 2 / 3))
    expected = by_hand(expected, given[1], dict.fromkeys(given[1], -0.25 * 4 / 3))
    merged = load_file(tmp_path / "out" / "transformer" / FILE)
    assert_near(merged, expected, 1e-6)
    same = [key for key in BASE if key.removesuffix(".weight") not in given[0]]
    assert all(torch.equal(merged[key], BASE[key]) for key in same) and files_of(WAN) == before
    assert {path.name for path in WAN.iterdir() if path.is_dir()} <= {
        path.name for path in (tmp_path / "out").iterdir()
    }
    WanPipeline.from_pretrained("out")


@pytest.mark.slow
def test_adapters_of_two_experts(given, tmp_path, capsys):
    """A part for each, or one for the network that --component names; an export's pipeline.py comes along."""
    base = copy_of(expert_folder(tmp_path / "wan"), tmp_path / "base")
    (base / "pipeline.py").write_text("# of an export")
    for name, own in zip(("transformer", "transformer_2"), given, strict=True):
        peft(tmp_path / "both" / name, own, 3.0)
    assert main(["merge", str(base), str(tmp_path / "out"), "--adapters", str(tmp_path / "both")]) == 0
    alone = ("--adapters", tmp_path / "both" / "transformer", "--component", "transformer_2")
    assert main(["merge", str(base), *map(str, (tmp_path / "low", *alone))]) == 0
    for folder, component, own in (("out", "transformer", 0), ("out", "transformer_2", 1), ("low", "transformer_2", 0)):
        weights = load_file(base / component / FILE)
        expected = by_hand(weights, given[own], dict.fromkeys(given[own], 1.0))
        assert_near(load_file(tmp_path / folder / component / FILE), expected, 1e-6)
        assert (tmp_path / folder / "pipeline.py").read_text() == "# of an export"
    kept = tmp_path / "low" / "transformer" / FILE
    assert kept.read_bytes() == (base / "transformer" / FILE).read_bytes()
    assert "is the adapter of one network" in refused(
        capsys, "merge", base, tmp_path / "no", "--adapters", tmp_path / "both" / "transformer"
    )
    assert not (tmp_path / "no").exists()


@pytest.mark.slow
def test_an_extracted_adapter_is_what_was_added(tmp_path, capsys):
    """A change of rank 2 is extracted whole, also where a layer is smaller than the rank, and merged again."""
    own = factors(NETWORK, 2, (*ENDS, *OUTSIDE))
    tuned = by_hand(BASE, own, dict.fromkeys(own, 1.0))
    folder = copy_of(WAN, tmp_path / "tuned")
    (folder / "transformer" / FILE).unlink()  # a link to the base's
    save_file({key: w.contiguous() for key, w in tuned.items()}, folder / "transformer" / FILE, {"format": "pt"})
    assert main(["extract-adapter", str(folder), str(tmp_path / "adapter"), "--base", "tiny", "--rank", "70"]) == 0
    said = capsys.readouterr().out
    assert f"rank 70. transformer: {len(own)} layers, error" in said and "other weights" not in said
    assert float(re.search(r"error ([\d.e+-]+)", said)[1]) < 1e-5
    assert main(["merge", "tiny", str(tmp_path / "again"), "--adapters", str(tmp_path / "adapter")]) == 0
    assert_near(load_file(tmp_path / "again" / "transformer" / FILE), tuned, 1e-5)
    pipeline = WanPipeline.from_pretrained(WAN)
    pipeline.load_lora_weights(tmp_path / "adapter", weight_name="model.safetensors")
    pipeline.fuse_lora()
    pipeline.unload_lora_weights()
    assert_near(dict(pipeline.transformer.state_dict()), tuned, 1e-5)


def two_layers(change):
    """Networks of a linear layer and a norm; `change` is added to the weight, and 2 to the norm's first weight."""
    pair = [torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4)) for _ in range(2)]
    pair[1].load_state_dict(pair[0].state_dict())
    with torch.no_grad():
        pair[1][0].weight += change
        pair[1][1].weight[0] += 2
    return pair


def test_the_error_is_that_of_the_singular_values_left_out():
    """D = diag(5, 3, 1) and |change of the norm| = 2, of rank 2: sqrt((1 + 4) / (25 + 9 + 1 + 4))."""
    change = torch.zeros(4, 3)
    change[:3] = torch.diag(torch.tensor([5.0, 3.0, 1.0]))
    old, new = two_layers(change)
    found, said = low_rank(old, new, 2, torch.device("cpu"))
    left, right = found["0.lora_B.weight"], found["0.lora_A.weight"]
    expected = change.clone()
    expected[2, 2] = 0
    torch.testing.assert_close(left @ right, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(left.T @ left, right @ right.T, rtol=0, atol=1e-5)  # both have the square roots
    error, other = math.sqrt(5 / 39), math.sqrt(4 / 39)
    assert (
        said
        == f"1 layers, error {error:.1e} of the norm of the change, {other:.1e} in 1 other weights such as 1.weight"
    )


def test_outside_of_the_blocks_a_published_adapter_has_no_alpha():
    weights = named(factors(NETWORK, 3, (*ENDS, *OUTSIDE)), "{}", "lora_A.weight", "lora_B.weight")
    held = published_adapter(weights, 6.0)
    alphas = [key for key in held if key.endswith(".alpha")]
    assert alphas and all(".blocks." in key for key in alphas)
    assert torch.equal(held["diffusion_model.head.head.lora_up.weight"], 2 * weights["proj_out.lora_B.weight"])
    with pytest.raises(UserError, match=r"patch_embedding.lora_A.weight has no name in published Wan adapters"):
        published_adapter({"patch_embedding.lora_A.weight": torch.ones(1, 2, 1, 1, 1)}, 1.0)


def test_what_cannot_be_merged_or_extracted_is_named(tmp_path, capsys):
    out = tmp_path / "out"
    peft(tmp_path / "one", factors(NETWORK, 1, ("to_q",)), 1.0)
    cases = {
        "--adapters names no adapter": ("merge", "tiny", out, "--adapters"),
        "absent:x: no such file or folder": ("merge", "tiny", out, "--adapters", tmp_path / "one:2", "absent:x"),
        "--component 'other' is not known. Have: transformer": (
            "merge",
            "tiny",
            out,
            "--adapters",
            tmp_path / "one",
            "--component",
            "other",
        ),
        "there is nothing to extract": ("extract-adapter", "tiny", out, "--base", "tiny"),
        "rank must be from 1 to 8192": ("extract-adapter", "tiny", out, "--base", "tiny", "--rank", "0"),
    }
    for said, words in cases.items():
        assert said in " ".join(refused(capsys, *words).split())
        assert not out.exists()
