"""Bad model folders: each is one error of one line with file and field, before any weight is read."""

import json
import os

import pytest
import torch
from bad_inputs import ABSENT, edit, refused
from helpers import CPU, WAN, rewrite

from unified_trainer.basics.input_files import read_json
from unified_trainer.models.encoders import EncoderConfig
from unified_trainer.models.wan.codec import WanCodec
from unified_trainer.run.registry import family_of, open_model

WEIGHTS = "diffusion_pytorch_model.safetensors"
INDEX = "diffusion_pytorch_model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path):
    """A copy of the tiny pipeline: configs are copied, weights are links until a test writes them."""
    for file in WAN.rglob("*"):
        copy = tmp_path / "wan" / file.relative_to(WAN)
        if file.is_file():
            copy.parent.mkdir(parents=True, exist_ok=True)
            if file.suffix == ".json":
                copy.write_bytes(file.read_bytes())
            else:
                copy.symlink_to(file)
    return tmp_path / "wan"


def plan(folder):
    """What a run reads of a folder before any weight."""
    family, _ = family_of("student", str(folder))
    networks, _ = family.networks(folder)
    family.latent_shape(folder, 5, 32, 32)
    for component in networks:
        open_model("student", str(folder), component, causal=False)


def test_the_copy_is_sound(folder):
    plan(folder)


FIELDS = [
    ("model_index.json", "_class_name", ABSENT, "_class_name is missing"),
    ("model_index.json", "_class_name", 3, "_class_name must be a valid string"),
    ("model_index.json", "_class_name", "FluxPipeline", "FluxPipeline is not supported"),
    ("model_index.json", "boundary_ratio", "0.9", "boundary_ratio must be a valid number"),
    ("model_index.json", "boundary_ratio", 0.9, "no transformer_2 is named"),
    ("model_index.json", "boundary_ratio", 0, "boundary_ratio must be greater than 0"),
    ("model_index.json", "boundary_ratio", 1.0, "boundary_ratio must be less than 1"),
    ("model_index.json", "boundary_ratio", -0.5, "boundary_ratio must be greater than 0"),
    ("model_index.json", "boundary_ratio", [0.9], "boundary_ratio must be a valid number"),
    ("model_index.json", "boundary_ratio", float("nan"), "boundary_ratio must be a finite number"),
    ("model_index.json", "transformer_2", "yes", "transformer_2 must be a valid list"),
    ("model_index.json", "transformer_2", [], "transformer_2 list must have at least 2 items"),
    ("model_index.json", "transformer_2", [1, 2], "transformer_2.0 must be a valid string"),
    ("model_index.json", "transformer_2", ["diffusers", "WanTransformer3DModel"], "config.json is missing"),
    ("transformer", "_class_name", ABSENT, "_class_name is missing"),
    ("transformer", "_class_name", "FluxTransformer2DModel", "_class_name must be 'WanTransformer3DModel'"),
    ("transformer", "_class_name", None, "_class_name must be 'WanTransformer3DModel'"),
    ("transformer", "patch_size", ABSENT, "patch_size is missing"),
    ("transformer", "patch_size", 1, "patch_size must be a valid list"),
    ("transformer", "patch_size", [1, 1], "patch_size list must have at least 3 items"),
    ("transformer", "patch_size", [1, 1, 1, 1], "patch_size list must have at most 3 items"),
    ("transformer", "patch_size", [1, 0, 1], "patch_size.1 must be greater than or equal to 1"),
    ("transformer", "patch_size", [1, 1.5, 1], "patch_size.1 must be a valid integer"),
    ("transformer", "in_channels", ABSENT, "in_channels is missing"),
    ("transformer", "in_channels", "16", "in_channels must be a valid integer"),
    ("transformer", "in_channels", -16, "in_channels must be greater"),
    ("transformer", "in_channels", 36, "out_channels is 16 and in_channels 36"),
    ("transformer", "out_channels", 0, "out_channels must be greater"),
    ("transformer", "num_attention_heads", 0, "num_attention_heads must be greater"),
    ("transformer", "num_attention_heads", None, "num_attention_heads must be a valid integer"),
    ("transformer", "attention_head_dim", 7, "attention_head_dim must be a multiple of 2"),
    ("transformer", "attention_head_dim", 0, "attention_head_dim must be greater"),
    ("transformer", "num_layers", 0, "num_layers must be greater"),
    ("transformer", "num_layers", 100_000, "num_layers must be less than or equal to 1000"),
    ("transformer", "num_layers", True, "num_layers must be a valid integer"),
    ("transformer", "ffn_dim", 1e30, "ffn_dim must be a valid integer"),
    ("transformer", "ffn_dim", 10**12, "ffn_dim must be less than"),
    ("transformer", "freq_dim", 63, "freq_dim must be a multiple of 2"),
    ("transformer", "eps", 0, "eps must be greater than 0"),
    ("transformer", "eps", "small", "eps must be a valid number"),
    ("transformer", "qk_norm", "layer_norm", "qk_norm must be 'rms_norm_across_heads'"),
    ("transformer", "cross_attn_norm", "yes", "cross_attn_norm must be a valid boolean"),
    ("transformer", "rope_max_seq_len", {}, "rope_max_seq_len must be a valid integer"),
    ("vae", "_class_name", "AutoencoderKL", "_class_name must be 'AutoencoderKLWan'"),
    ("vae", "_class_name", ABSENT, "_class_name is missing"),
    ("vae", "z_dim", 0, "z_dim must be greater"),
    ("vae", "z_dim", 8, "latents_mean must have a number for each of the 8 channels"),
    ("vae", "latents_mean", [0.5], "latents_mean must have a number for each of the 16 channels (z_dim), not 1"),
    ("vae", "latents_mean", [], "latents_mean must have a number for each of the 16 channels (z_dim), not 0"),
    ("vae", "latents_mean", 0.0, "latents_mean must be a valid list"),
    ("vae", "latents_mean", [0.0] * 15 + [None], "latents_mean.15 must be a valid number"),
    ("vae", "latents_mean", [0.0] * 15 + [float("inf")], "latents_mean.15 must be a finite number"),
    ("vae", "latents_std", [1.0] * 15 + [0.0], "latents_std.15 must be greater than 0, not 0.0"),
    ("vae", "latents_std", [-1.0] * 16, "latents_std.0 must be greater than 0"),
    ("vae", "latents_std", [1.0] * 17, "latents_std must have a number for each of the 16 channels (z_dim), not 17"),
    ("vae", "latents_std", [float("nan")] * 16, "latents_std.0 must be a finite number"),
    ("vae", "latents_std", "ones", "latents_std must be a valid list"),
    ("vae", "scale_factor_temporal", 0, "scale_factor_temporal must be greater"),
    ("vae", "scale_factor_spatial", "16", "scale_factor_spatial must be a valid integer"),
    ("vae", "scale_factor_spatial", None, "scale_factor_spatial must be a valid integer"),
    ("vae", "temperal_downsample", [True], "temperal_downsample must have one value less than dim_mult"),
    ("vae", "temperal_downsample", "no", "temperal_downsample must be a valid list"),
    ("vae", "dim_mult", [], "dim_mult list must have at least 1 item"),
    ("vae", "dim_mult", [1, 0, 2], "dim_mult.1 must be greater"),
    ("vae", "base_dim", 0, "base_dim must be greater"),
    ("text_encoder", "model_type", "t5", "model_type must be 'umt5'"),
    ("text_encoder", "model_type", ABSENT, "model_type is missing"),
    ("text_encoder", "d_model", 0, "d_model must be greater"),
    ("text_encoder", "d_model", "32", "d_model must be a valid integer"),
    ("text_encoder", "d_model", 64, "d_model is 64, but text_dim of transformer/config.json is 32"),
    ("text_encoder", "num_layers", -1, "num_layers must be greater"),
    ("text_encoder", "num_heads", 1.5, "num_heads must be a valid integer"),
    ("text_encoder", "dropout_rate", 1, "dropout_rate must be less than 1"),
    ("text_encoder", "vocab_size", None, "vocab_size must be a valid integer"),
    ("text_encoder", "layer_norm_epsilon", -1, "layer_norm_epsilon must be greater than 0"),
]


@pytest.mark.parametrize(("part", "field", "value", "said"), FIELDS, ids=lambda x: str(x)[:30])
def test_fields(folder, part, field, value, said):
    file = folder / part if part.endswith(".json") else folder / part / "config.json"
    edit(file, field, value)
    refused(lambda: plan(folder), said, "transformer_2/config.json" if said == "config.json is missing" else str(file))


CONFIGS = ("model_index.json", "transformer/config.json", "vae/config.json", "text_encoder/config.json")


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("content", ["", "[]", "{}", "null", "3", "{"])
def test_configs_that_are_none(folder, name, content):
    (folder / name).write_text(content)
    refused(lambda: plan(folder), str(folder / name))


@pytest.mark.parametrize("name", ["model_index.json", "transformer/config.json", "vae/config.json"])
def test_configs_that_are_no_files(folder, name):
    (folder / name).unlink()
    refused(lambda: plan(folder), f"{folder / name} is missing")
    (folder / name).mkdir()
    refused(lambda: plan(folder), f"{folder / name}: it is a folder, not a file")


def change(folder, part, spoil):
    """Write the weights of a part again, spoilt."""
    file = folder / part
    data = file.read_bytes()
    file.unlink()
    file.write_bytes(data)
    rewrite(file, spoil)


@pytest.mark.parametrize("kind", [torch.int64, torch.int8, torch.uint8, torch.bool, torch.complex64], ids=str)
@pytest.mark.parametrize("part", ["transformer", "vae"])
def test_weights_of_other_types(folder, part, kind):
    name = next(iter(sorted(name for name in _keys(folder / part / WEIGHTS) if name.endswith("bias"))))
    change(folder, f"{part}/{WEIGHTS}", lambda held: held.update({name: held[name].to(kind)}))
    refused(lambda: plan(folder), f"{part}/{WEIGHTS}: {name} has type", "floating-point")


def _keys(file):
    header = int.from_bytes(file.read_bytes()[:8], "little")
    return [name for name in json.loads(file.read_bytes()[8 : 8 + header]) if name != "__metadata__"]


@pytest.mark.parametrize("data", [b"", b"\0" * 8, b"\xff" * 64, b'{"a": 1}', b"PK\x03\x04" + bytes(60)], ids=repr)
def test_weights_that_are_none(folder, data):
    file = folder / "transformer" / WEIGHTS
    file.unlink()
    file.write_bytes(data)
    refused(lambda: plan(folder), f"{file} is damaged")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{}", "weight_map is missing"),
        ("[]", "not a list"),
        ('{"weight_map": []}', "weight_map must be a valid dictionary"),
        ('{"weight_map": {"a": 1}}', "weight_map.a must be a valid string"),
        ('{"weight_map": {"a": "b.safetensors"}}', "names b.safetensors, which is not in this folder"),
        ('{"weight_map": {"a": "../vae/' + WEIGHTS + '"}}', "which is not in this folder"),
    ],
)
def test_indices(folder, content, said):
    (folder / "transformer" / INDEX).write_text(content)
    refused(lambda: plan(folder), str(folder / "transformer" / INDEX), said)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("tokenizer.json", None, "holds none of tokenizer.json"),
        ("tokenizer.json", "", "tokenizer.json is empty"),
        ("tokenizer.json", "[]", "not a list"),
        ("tokenizer.json", "{}", "no tokenizer can be made"),
        ("tokenizer.json", '{"model": {"type": "Nothing"}}', "no tokenizer can be made"),
        ("tokenizer_config.json", "[]", "not a list"),
        ("tokenizer_config.json", "{", "is not JSON"),
        ("tokenizer_config.json", '{"model_max_length": 0}', "model_max_length must be greater than or equal to 1"),
        ("tokenizer_config.json", '{"model_max_length": "x"}', "model_max_length must be a valid integer"),
    ],
)
def test_tokenizers(folder, name, content, said):
    file = folder / "tokenizer" / name
    file.unlink()
    if content is not None:
        file.write_text(content)
    refused(lambda: WanCodec.load(folder, CPU, EncoderConfig()), str(file.parent), said)


def test_a_path_that_is_too_long_names_itself(tmp_path):
    refused(lambda: read_json(tmp_path / ("x" * 300) / "config.json"), "File name too long")
    assert os.listdir(tmp_path) == []
