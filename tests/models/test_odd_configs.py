"""Odd values in every field of the tiny world's configs: each is refused by its file, or changes no number.

`--odd-values N` tries N values of each file, and 10000 all of them; without it a few that are drawn.
"""

import json
import time
from collections import Counter

import pytest
from bad_inputs import edit, refused
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from helpers import WAN, copy_of
from odd_configs import CONFIGS, copied, digest, outcome, sample

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.input_files import parse_object
from unified_trainer.models.folder import outline
from unified_trainer.models.layout import arguments_of, reading_config
from unified_trainer.models.wan.configs import TransformerConfig, VAEConfig
from unified_trainer.run.registry import family_of

FEW = 10  # values of a file in every run of the tests


@pytest.mark.slow
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)
def test_odd_values(tmp_path, request, config, unchecked):
    folder = copied(config, tmp_path / "folder")
    sound = digest(config.load(folder))
    tried = sample(config, request.config.getoption("--odd-values") or FEW)
    found = [(field, value, *outcome(config, folder, field, value, sound)) for field, value in tried]
    print(config.name, Counter(result for *_, result, _ in found))
    assert [one for one in found if one[2] not in ("refused", "no effect")] == []


@pytest.mark.parametrize(
    ("kind", "schema"), [(WanTransformer3DModel, TransformerConfig), (AutoencoderKLWan, VAEConfig)]
)
def test_every_argument_of_a_network_has_a_range(kind, schema):
    """A version of diffusers with a further argument fails here, and not in a run."""
    arguments = {field.alias for field in arguments_of(kind).model_fields.values()}
    assert arguments == {field.alias or name for name, field in schema.model_fields.items()} - {"_class_name"}


def test_types_are_those_that_a_class_declares():
    """Of a family's own network there is no schema but its arguments."""
    fields = json.loads((WAN / "transformer" / "config.json").read_text())
    arguments_of(WanTransformer3DModel).model_validate(fields)
    for name, value in (("patch_size", ["1", 1, 1]), ("eps", "small"), ("qk_norm", 3), ("cross_attn_norm", "x")):
        with pytest.raises(ValueError, match=name):
            arguments_of(WanTransformer3DModel).model_validate(fields | {name: value})


OF_WEIGHTS = [
    ("transformer", WanTransformer3DModel, "num_layers", 1000, "many times those of the file"),
    ("transformer", WanTransformer3DModel, "num_layers", 4, "unexpected keys ['blocks.4."),
    ("transformer", WanTransformer3DModel, "num_layers", 6, "missing keys ['blocks.5."),
    ("transformer", WanTransformer3DModel, "ffn_dim", 2**20, "mismatched keys ['blocks.0.ffn"),
    ("transformer", WanTransformer3DModel, "num_attention_heads", 10**12, "no WanTransformer3DModel can be made"),
    ("vae", AutoencoderKLWan, "dropout", -1, "dropout probability has to be between 0 and 1"),
    ("vae", AutoencoderKLWan, "is_residual", "x", "is_residual must be a valid boolean, not 'x'"),
    ("vae", AutoencoderKLWan, "latents_mean", None, "latents_mean must be a valid list, not None"),
    ("vae", AutoencoderKLWan, "base_dim", 16, "mismatched keys"),
]


def test_a_network_is_that_of_its_weights(tmp_path, subtests):
    """At once and without memory for what is described."""
    for number, (part, kind, field, value, said) in enumerate(OF_WEIGHTS):
        with subtests.test(f"{part} {field} {value}"):
            folder = copy_of(WAN / part, tmp_path / str(number))
            edit(folder / "config.json", field, value)
            begin = time.process_time()
            refused(lambda: outline(kind, folder), str(folder / "config.json"), said)  # noqa: B023
            assert time.process_time() - begin < 5


def test_a_video_is_no_longer_than_the_table_of_positions(tmp_path):
    folder = copy_of(WAN, tmp_path / "wan")
    edit(folder / "transformer" / "config.json", "rope_max_seq_len", 4)
    family, _ = family_of("student", str(folder))
    assert family.latent_shape(folder, 5, 64, 64) == (16, 2, 4, 4)
    refused(
        lambda: family.latent_shape(folder, 5, 32, 80), "transformer/config.json: rope_max_seq_len is 4", "5 tokens"
    )


def test_a_bug_shows_its_traceback(tmp_path, unchecked):
    """What a library raises is the file's fault, what this package raises is its own; memory and disks are neither."""
    said = r"a\.json: no network can be made of it \(KeyError: 'x'\): fetch"
    with pytest.raises(UserError, match=said), reading_config(tmp_path / "a.json", "network"):
        raise KeyError("x")
    with pytest.raises(AttributeError), reading_config(tmp_path / "a.json", "network"):
        parse_object(None, "a bug of a caller")
    for error in (MemoryError(), OSError(5, "Input/output error")):
        with pytest.raises(type(error)), reading_config(tmp_path / "a.json", "network"):
            raise error
