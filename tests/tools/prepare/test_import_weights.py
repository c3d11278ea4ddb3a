"""Weights of other trainers, each layout written here from one network: the folder's output equals the network's."""

import os
import pickle
import warnings

import pytest
import torch
from helpers import ALONE, WAN
from safetensors.torch import save_file
from torch.distributed import checkpoint

from unified_trainer.__main__ import main
from unified_trainer.models.sparse_attention import SparseAttentionConfig
from unified_trainer.models.wan.model import WanModel
from unified_trainer.models.wan.sparse import SparseWanModel

NATIVE = [  # diffusers' and Wan's parts of names, in the order in which they are replaced
    ("condition_embedder.text_embedder.linear_1", "text_embedding.0"),
    ("condition_embedder.text_embedder.linear_2", "text_embedding.2"),
    ("condition_embedder.time_embedder.linear_1", "time_embedding.0"),
    ("condition_embedder.time_embedder.linear_2", "time_embedding.2"),
    ("condition_embedder.time_proj", "time_projection.1"),
    ("proj_out", "head.head"),
    ("norm2", "norm3"),
    ("attn1", "self_attn"),
    ("attn2", "cross_attn"),
    ("to_out.0", "o"),
    ("to_q", "q"),
    ("to_k", "k"),
    ("to_v", "v"),
    ("ffn.net.0.proj", "ffn.0"),
    ("ffn.net.2", "ffn.2"),
]
FASTVIDEO = [
    ("patch_embedding", "patch_embedding.proj"),
    ("text_embedder.linear_1", "text_embedder.fc_in"),
    ("text_embedder.linear_2", "text_embedder.fc_out"),
    ("time_embedder.linear_1", "time_embedder.mlp.fc_in"),
    ("time_embedder.linear_2", "time_embedder.mlp.fc_out"),
    ("time_proj", "time_modulation.linear"),
    ("norm2", "self_attn_residual_norm.norm"),
    ("attn1.", ""),
    ("to_out.0", "to_out"),
    ("ffn.net.0.proj", "ffn.fc_in"),
    ("ffn.net.2", "ffn.fc_out"),
]


@pytest.fixture(scope="module")
def weights():
    """The tiny world's weights and a little noise: unlike those of the base."""
    draw = torch.Generator().manual_seed(0)
    state = WanModel.load(WAN, ALONE.device).network.state_dict()
    return {key: weight + 0.01 * torch.randn(weight.shape, generator=draw) for key, weight in state.items()}


def renamed(weights, names, prefix=""):
    found = {}
    for key, weight in weights.items():
        name = key
        for ours, theirs in names:
            name = name.replace(ours, theirs)
        if names is NATIVE and name.endswith("scale_shift_table"):
            block = name.startswith("blocks.")
            name = name.replace("scale_shift_table", "modulation" if block else "head.modulation")
        found[prefix + name] = weight.clone()
    assert len(found) == len(weights)
    return found


def velocity(model):
    with torch.no_grad():
        return model.velocity(*model.example())


def expected(weights):
    model = WanModel.load(WAN, ALONE.device)
    model.network.load_state_dict(weights)
    return velocity(model)


def run(source, out, *words):
    return main(["import-weights", str(source), str(out), "--base", "tiny", *words])


def distributed(folder, state):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.distributed is disabled")
        checkpoint.save(state, checkpoint_id=folder, no_dist=True)
    return folder


def pipeline(folder, weights):
    """A folder of FastVideo's: another class is named in both configs, with diffusers' keys."""
    (folder / "transformer").mkdir(parents=True)
    save_file(weights, folder / "transformer" / "model.safetensors")
    for file in ("model_index.json", "transformer/config.json"):
        text = (WAN / file).read_text()
        text = text.replace("WanPipeline", "WanDMDPipeline").replace(
            "WanTransformer3DModel", "CausalWanTransformer3DModel"
        )
        (folder / file).write_text(text)
    return folder


def torch_file(file, state):
    torch.save(state, file)
    return file


def tensor_file(file, weights):
    save_file(weights, file)
    return file


SOURCES = {
    "wan": lambda at, w: tensor_file(at / "wan.safetensors", renamed(w, NATIVE)),
    "pipeline": lambda at, w: pipeline(at / "fast", renamed(w, [])),
    "checkpoint": lambda at, w: distributed(
        at / "dcp",
        {"model": renamed(w, FASTVIDEO), "optimizer": {"state": {"patch_embedding.proj.weight": {"step": 3}}}},
    ),
    "self-forcing": lambda at, w: torch_file(
        at / "model.pt",
        {
            "generator": renamed({key: 0 * x for key, x in w.items()}, NATIVE, "model._fsdp_wrapped_module."),
            "generator_ema": renamed(w, NATIVE, "model."),
            "critic": renamed(w, NATIVE, "model."),
            "step": 600,
        },
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", SOURCES)
def test_a_network_of_each_layout_gives_its_output(tmp_path, weights, layout, capsys):
    words = ("--part", "generator_ema") if layout == "self-forcing" else ()
    assert run(SOURCES[layout](tmp_path, weights), tmp_path / "out", *words) == 0, capsys.readouterr().err
    assert torch.equal(velocity(WanModel.load(tmp_path / "out", ALONE.device)), expected(weights))
    for part in ("vae", "text_encoder", "tokenizer", "scheduler"):
        assert sorted(os.listdir(tmp_path / "out" / part)) == sorted(os.listdir(WAN / part))


def test_a_sparse_network_keeps_its_gates(tmp_path, weights):
    outline = SparseWanModel.open_with(WAN, "transformer", SparseAttentionConfig(share=0.5)).network.state_dict()
    gates = {key: torch.full(weight.shape, 0.1) for key, weight in outline.items() if "to_gate_compress" in key}
    source = distributed(tmp_path / "dcp", {"model": renamed(weights | gates, FASTVIDEO)})
    assert run(source, tmp_path / "out") == 0
    again = SparseWanModel.open_with(tmp_path / "out", "transformer", SparseAttentionConfig(share=0.5))
    again.read(ALONE)
    state = again.network.state_dict()
    assert gates and all(torch.equal(state[key], weight) for key, weight in (weights | gates).items())


def refused(capsys):
    return " ".join(capsys.readouterr().err.split())


def test_a_source_that_does_not_fit_is_refused_with_its_key(tmp_path, weights, capsys):
    native, out = renamed(weights, NATIVE), tmp_path / "out"
    cases = {
        "unknown key blocks.0.self_attn.gate.weight, by Wan's names": native
        | {"blocks.0.self_attn.gate.weight": torch.ones(1)},
        "missing key head.modulation": {key: w for key, w in native.items() if key != "head.modulation"},
        "head.modulation has shape [1, 2, 5]": native | {"head.modulation": torch.ones(1, 2, 5)},
        "head.modulation holds a value that is no finite": native
        | {"head.modulation": native["head.modulation"] * float("nan")},
        "no key ends in patch_embedding.weight": {"other.weight": torch.ones(1)},
    }
    for message, state in cases.items():
        assert run(tensor_file(tmp_path / "source.safetensors", state), out) == 2
        assert message in refused(capsys)
    several = torch_file(tmp_path / "model.pt", {"generator": native, "generator_ema": native})
    assert run(several, out) == 2
    assert "name one by --part, of generator, generator_ema" in refused(capsys)
    assert not out.exists()


def test_a_shape_is_compared_before_it_takes_memory(tmp_path, weights, capsys):
    """A tensor of 2^50 numbers that is one number in memory, and metadata that tell of 2^50 numbers."""
    native, out = renamed(weights, NATIVE), tmp_path / "out"
    wide = native | {"head.modulation": torch.ones(1).expand(2**50)}
    assert run(torch_file(tmp_path / "model.pt", wide), out) == 2
    assert "head.modulation has shape [1125899906842624]" in refused(capsys)
    folder = distributed(tmp_path / "dcp", {"model": renamed(weights, FASTVIDEO)})
    held = pickle.loads((folder / ".metadata").read_bytes())  # noqa: S301 - written here
    held.state_dict_metadata["model.scale_shift_table"].size = torch.Size((2**20, 2**20, 2**10))
    (folder / ".metadata").write_bytes(pickle.dumps(held))
    assert run(folder, out) == 2
    assert "scale_shift_table has shape [1048576, 1048576, 1024]" in refused(capsys)


@pytest.mark.slow
def test_a_file_of_torch_save_is_data(tmp_path, weights, capsys):
    """Code, dictionaries that hold themselves or each other many times, and tensors without memory are refused."""
    itself, twice = {}, {"w": torch.ones(1)}
    itself["a"] = itself
    for _ in range(60):
        twice = {"a": twice, "b": twice}
    native = renamed(weights, NATIVE)
    cases = {
        "is no file of tensors": {"generator": Harmful()},
        "its dictionaries hold each other": itself,
        "holds no network: its": twice,
        "head.modulation holds a value": native | {"head.modulation": native["head.modulation"].to("meta")},
        "head.head.bias holds a value": native | {"head.head.bias": native["head.head.bias"].to_sparse()},
    }
    for message, state in cases.items():
        assert run(torch_file(tmp_path / "model.pt", state), tmp_path / "out") == 2
        assert message in refused(capsys)
    numbered = {"optimizer": {"state": {0: {"step": torch.ones(1)}}}}
    words = (torch_file(tmp_path / "model.pt", {"generator": native, **numbered}), tmp_path / "out")
    assert run(*words) == 0, capsys.readouterr().err


class Harmful:
    def __reduce__(self):
        return os.system, ("exit 1",)
