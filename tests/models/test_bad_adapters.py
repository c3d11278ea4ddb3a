"""Bad settings and weights of adapters made elsewhere: each is one error of one line with file and field."""

import pytest
import torch
from adapter_files import diffusers, peft
from bad_inputs import ABSENT, edit, refused
from helpers import rewrite, small_model
from safetensors.torch import load_file, save_file

from unified_trainer.models.adapter_file import open_adapter
from unified_trainer.models.adapter_location import locate
from unified_trainer.models.wan.family import WAN

LAYER = "blocks.0.attn1.to_q"
GIVEN = {LAYER: (torch.ones(3, 24), torch.ones(24, 3))}
NETWORK = small_model().network


def reading(path):
    def read():
        place = locate(path, "student.adapter.path", None, WAN.experts, WAN.adapter_files)
        return open_adapter(place, NETWORK, WAN.experts, WAN.published_layer)

    return read


FIELDS = [
    ("r", "3", "r must be a valid integer"),
    ("r", 0, "r must be greater"),
    ("r", 8, "has rank 3, but the adapter's settings say 8"),
    ("lora_alpha", "one", "lora_alpha must be a valid number"),
    ("lora_alpha", float("nan"), "lora_alpha must be a finite number"),
    ("lora_alpha", [1], "lora_alpha must be a valid number"),
    ("use_rslora", "yes", "use_rslora must be a valid boolean"),
    ("rank_pattern", [3], "rank_pattern must be a valid dictionary"),
    ("rank_pattern", {"to_q": "3"}, "rank_pattern.to_q must be a valid integer"),
    ("alpha_pattern", {"to_q": None}, "alpha_pattern.to_q must be a valid number"),
    ("alpha_pattern", {"to_(q": 1.0}, "is no pattern of layers"),
]


@pytest.mark.parametrize(("field", "value", "said"), FIELDS, ids=lambda value: str(value)[:30])
def test_settings(tmp_path, field, value, said):
    folder = peft(tmp_path / "peft", GIVEN, 1.0)
    assert reading(folder)().layers[LAYER].rank == 3
    edit(folder / "adapter_config.json", field, value)
    refused(reading(folder), str(folder), said)


@pytest.mark.parametrize("content", ["", "[]", "{", "null"])
def test_settings_that_are_none(tmp_path, content):
    folder = peft(tmp_path / "peft", GIVEN, 1.0)
    (folder / "adapter_config.json").write_text(content)
    refused(reading(folder), str(folder / "adapter_config.json"))


@pytest.mark.parametrize("kind", [torch.int64, torch.int8, torch.bool, torch.complex64], ids=str)
def test_factors_of_other_types(tmp_path, kind):
    folder = peft(tmp_path / "peft", GIVEN, 1.0)
    name = f"base_model.model.{LAYER}.lora_B.weight"
    rewrite(folder / "adapter_model.safetensors", lambda held: held.update({name: held[name].to(kind)}))
    refused(reading(folder), f"adapter_model.safetensors: {name} has type")


def test_absent_settings_are_sound(tmp_path):
    """The scale is then that of the rank, 1."""
    folder = peft(tmp_path / "peft", GIVEN, 1.0)
    for field in ("lora_alpha", "r"):
        edit(folder / "adapter_config.json", field, ABSENT)
    assert reading(folder)().layers[LAYER].scale == 1.0


@pytest.mark.parametrize(
    ("header", "said"),
    [("[]", "must hold a JSON object"), ("{", "is not JSON"), ('{"transformer.r": "3"}', "r must be a valid integer")],
)
def test_the_header_of_diffusers(tmp_path, header, said):
    file = next(diffusers(tmp_path / "diffusers", GIVEN, 1.0).glob("*.safetensors"))
    save_file(load_file(file), file, metadata={"lora_adapter_metadata": header})
    refused(reading(file), f"{file}: lora_adapter_metadata in its header", said)
