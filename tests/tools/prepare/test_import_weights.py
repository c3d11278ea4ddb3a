"""Weights of other trainers, each layout written here from one network: the folder's output equals the network's."""

import json
import os
import pickle
import re
import warnings

import pytest
import torch
from diffusers import AutoencoderKLWan, LTXVideoTransformer3DModel
from diffusers.loaders.single_file_utils import convert_wan_vae_to_diffusers
from helpers import ALONE, WAN
from safetensors.torch import load_file, save_file
from torch.distributed import checkpoint

from unified_trainer.__main__ import main
from unified_trainer.basics.errors import UserError
from unified_trainer.models.pipeline.family import pipeline_family
from unified_trainer.models.sparse_attention import SparseAttentionConfig
from unified_trainer.models.wan.model import WanModel
from unified_trainer.models.wan.sparse import SparseWanModel
from unified_trainer.tools.prepare.import_weights import VAE, _chosen, _flat_vae, _layouts, _replaced, _weights
from unified_trainer.tools.prepare.weight_source import read_source

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


def rcm(weights):
    """The network of rCM: patches are multiplied by a matrix, and tables of positions lie beside the weights."""
    named = renamed(weights, NATIVE, "net.")
    named["net.patch_embedding.weight"] = named["net.patch_embedding.weight"].flatten(1)
    tables = ("rope_position_embedding.seq", "pos_embedder.dim_spatial_range", "blocks.0.norm3._extra_state")
    return named | {f"net.{name}": torch.ones(1) for name in tables}


SOURCES = {
    "rcm": lambda at, w: torch_file(at / "rcm.pt", rcm(w)),
    "comfyui": lambda at, w: tensor_file(at / "comfy.safetensors", renamed(w, NATIVE, "model.diffusion_model.")),
    "norm_added_q": lambda at, w: tensor_file(
        at / "i2v.safetensors", renamed(w, []) | {"blocks.0.attn2.norm_added_q.weight": torch.ones(1)}
    ),
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


@pytest.mark.slow
def test_a_sparse_network_keeps_its_gates(tmp_path, weights):
    outline = SparseWanModel.open_with(WAN, "transformer", SparseAttentionConfig(share=0.5)).network.state_dict()
    gates = {key: torch.full(weight.shape, 0.1) for key, weight in outline.items() if "to_gate_compress" in key}
    source = distributed(tmp_path / "dcp", {"model": renamed(weights | gates, FASTVIDEO)})
    assert run(source, tmp_path / "out") == 0
    again = SparseWanModel.open_with(tmp_path / "out", "transformer", SparseAttentionConfig(share=0.5))
    again.read(ALONE)
    state = again.network.state_dict()
    assert gates and all(torch.equal(state[key], weight) for key, weight in (weights | gates).items())


def native_t5(key):
    """Wan's own name of a weight of UMT5."""
    if not key.startswith("encoder.block."):
        return {"shared.weight": "token_embedding.weight", "encoder.final_layer_norm.weight": "norm.weight"}[key]
    number, part, name = re.fullmatch(r"encoder\.block\.(\d+)\.layer\.(\d)\.(.+)\.weight", key).groups()
    name = name.replace("SelfAttention.relative_attention_bias", "pos_embedding.embedding")
    name = name.replace("SelfAttention", "attn").replace("layer_norm", f"norm{int(part) + 1}")
    for theirs, own in (("wi_0", "gate.0"), ("wi_1", "fc1"), ("wo", "fc2")):
        name = name.replace(f"DenseReluDense.{theirs}", f"ffn.{own}")
    return f"blocks.{number}.{name}.weight"


def native_vae(key):
    """Wan's own name of a weight of the tiny VAE, which has the layout of Wan2.2 and one block of each size."""
    key = re.sub(r"(down|up)_blocks\.(\d+)\.resnets\.(\d+)", r"\1samples.\2.\1samples.\3", key)
    key = re.sub(r"down_blocks\.(\d+)\.downsampler", r"downsamples.\1.downsamples.1", key)
    key = re.sub(r"up_blocks\.(\d+)\.upsampler", r"upsamples.\1.upsamples.2", key)
    for ours, theirs in (
        ("norm1", "residual.0"),
        ("conv1", "residual.2"),
        ("norm2", "residual.3"),
        ("conv2", "residual.6"),
    ):
        key = key.replace(ours, theirs)
    for ours, theirs in (
        ("mid_block.resnets.0", "middle.0"),
        ("mid_block.attentions.0", "middle.1"),
        ("mid_block.resnets.1", "middle.2"),
        ("conv_shortcut", "shortcut"),
        ("norm_out", "head.0"),
        ("conv_out", "head.2"),
        ("conv_in", "conv1"),
        ("post_quant_conv", "conv2"),
        ("quant_conv", "conv1"),
    ):
        key = key.replace(ours, theirs)
    return key


@pytest.mark.parametrize(
    ("component", "file", "name", "native"),
    [
        ("text_encoder", "model.safetensors", "models_t5_umt5-xxl-enc-bf16.pth", native_t5),
        ("vae", "diffusion_pytorch_model.safetensors", "Wan2.2_VAE.pth", native_vae),
    ],
)
def test_encoders_of_a_native_folder(tmp_path, capsys, component, file, name, native):
    """Their weights replace those of the base; the network and the configs stay."""
    held = {key: weight + 1 for key, weight in load_file(WAN / component / file).items()}
    (tmp_path / "native").mkdir()
    torch.save({native(key): weight for key, weight in held.items()}, tmp_path / "native" / name)
    assert run(tmp_path / "native", tmp_path / "out", "--component", component) == 0, capsys.readouterr().err
    got = load_file(tmp_path / "out" / component / file)
    assert got.keys() == held.keys() and all(torch.equal(got[key], held[key]) for key in held)
    for same in (f"{component}/config.json", "transformer/diffusion_pytorch_model.safetensors"):
        assert (tmp_path / "out" / same).read_bytes() == (WAN / same).read_bytes()


@pytest.mark.slow
def test_a_text_encoder_has_its_embedding_by_either_name(tmp_path, capsys):
    """As ComfyUI repacks it, with its tokenizer in the file, and with both names of transformers."""
    held = load_file(WAN / "text_encoder" / "model.safetensors")
    tied = held | {"encoder.embed_tokens.weight": held["shared.weight"].clone()}
    other = {key: weight for key, weight in tied.items() if key != "shared.weight"}
    for number, source in enumerate((tied, other | {"spiece_model": torch.ones(3, dtype=torch.uint8)})):
        file, out = tensor_file(tmp_path / "t5.safetensors", source), tmp_path / f"out{number}"
        assert run(file, out, "--component", "text_encoder") == 0, capsys.readouterr().err
        got = load_file(out / "text_encoder" / "model.safetensors")
        assert got.keys() == held.keys() and all(torch.equal(got[key], held[key]) for key in held)


def test_names_of_wans_first_vae_are_those_that_diffusers_converts():
    with torch.device("meta"):
        vae = AutoencoderKLWan()
    names = {_replaced(_flat_vae(key, vae.config), VAE): key for key in vae.state_dict()}
    converted = convert_wan_vae_to_diffusers(dict(names))
    assert len(converted) == len(vae.state_dict()) and all(ours == key for ours, key in converted.items())


def test_a_single_file_of_another_family(tmp_path, capsys):
    """LTX-Video as its authors write it, beside its VAE, by diffusers' own conversion."""
    sizes = {"in_channels": 4, "out_channels": 4, "num_attention_heads": 2, "attention_head_dim": 12, "num_layers": 2}
    network = LTXVideoTransformer3DModel(cross_attention_dim=24, caption_channels=24, **sizes)
    network.save_pretrained(place := tmp_path / "base" / "transformer")
    held, theirs = network.state_dict(), {"vae.decoder.conv_in.conv.bias": torch.ones(3)}
    for key, weight in held.items():
        name = key.replace("time_embed", "adaln_single").replace("norm_q", "q_norm").replace("norm_k", "k_norm")
        theirs["model.diffusion_model." + re.sub("^proj_in", "patchify_proj", name)] = weight
    source, shapes = tmp_path / "ltx.safetensors", {key: tuple(weight.shape) for key, weight in held.items()}

    def imported():
        found = read_source(tensor_file(source, theirs), "transformer")
        network = _chosen(found, shapes, _layouts(place, pipeline_family("LTXPipeline"), shapes), source, None)
        return _weights(network, shapes, LTXVideoTransformer3DModel, source, place)

    got = imported()
    assert got.keys() == held.keys() and all(torch.equal(got[key], held[key]) for key in held)
    assert "numbers" not in capsys.readouterr().out
    theirs["model.diffusion_model.vae_more"] = torch.ones(1)  # diffusers' converter leaves it out
    assert imported().keys() == held.keys()
    numbers = sum(weight.numel() for weight in held.values())
    assert f"makes {numbers} numbers of transformer from the {numbers + 1} of this part" in capsys.readouterr().out
    theirs["model.diffusion_model.more"] = torch.ones(1)
    with pytest.raises(UserError, match=r"ltx.safetensors: unknown key more, by the original code's names"):
        imported()
    del theirs["model.diffusion_model.more"], theirs["model.diffusion_model.patchify_proj.weight"]
    with pytest.raises(UserError, match=r"ltx.safetensors: missing key proj_in.weight, by the original code's names"):
        imported()


def test_a_config_beside_the_weights_must_agree(tmp_path, weights, capsys):
    """Heads change no shape; Wan's own code calls them otherwise."""
    source = tmp_path / "native"
    source.mkdir()
    tensor_file(source / "diffusion_pytorch_model.safetensors", renamed(weights, NATIVE))
    (source / "config.json").write_text(json.dumps({"_class_name": "WanModel", "num_heads": 8, "eps": 1e-6}))
    assert run(source, tmp_path / "out") == 2
    assert "config.json: num_attention_heads is 8, but 4 in" in refused(capsys)


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
        "holds no network with the weights of --base": {"other.weight": torch.ones(1)},
        "it is an adapter: name it by --student.adapter.path": {"blocks.0.attn1.to_q.lora_A.weight": torch.ones(1)},
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
