"""A network read from its folder: exactly its weights, beside those that are there already."""

import json

import pytest
import torch
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from helpers import ALONE, CPU, WAN, copy_of, rewrite
from safetensors.torch import load_file, save_file

from unified_trainer.basics.errors import UserError
from unified_trainer.models.folder import check_component, load_strictly
from unified_trainer.models.wan.model import WanModel
from unified_trainer.roles.adapter import AdapterConfig
from unified_trainer.roles.backbone import Backbone

FILE = "diffusion_pytorch_model.safetensors"


@pytest.fixture
def folder(tmp_path):
    """A pipeline folder of its own, of which only the transformer counts."""
    copy_of(WAN / "transformer", tmp_path / "wan" / "transformer")
    return tmp_path / "wan"


def test_it_is_what_diffusers_reads():
    """Weights, buffers and their types; an outline holds none of the weights before."""
    outline = WanModel.open(WAN, "transformer").network
    assert {p.device.type for p in outline.parameters()} == {"meta"}
    assert {buffer.device.type for buffer in outline.buffers()} == {"cpu"}
    ours, theirs = WanModel.load(WAN, CPU).network, WanTransformer3DModel.from_pretrained(WAN / "transformer")
    for one, other in (
        (ours.state_dict(), theirs.state_dict()),
        (dict(ours.named_buffers()), dict(theirs.named_buffers())),
    ):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[key], other[key]) and one[key].dtype == other[key].dtype for key in one)


def test_a_folder_in_half_precision_becomes_float32(folder):
    rewrite(folder / "transformer" / FILE, lambda held: held.update({key: x.bfloat16() for key, x in held.items()}))
    assert {p.dtype for p in WanModel.load(folder, CPU).network.parameters()} == {torch.float32}


def test_adapters_on_an_outline_stay_as_they_were_made():
    """Each on layers of its own: A drawn from its stream, B zero, and the base weights the folder's."""
    adapters = {"student": AdapterConfig(rank=2, layers=("to_q",)), "critic": AdapterConfig(rank=3, layers=("to_k",))}
    backbone = Backbone(WanModel.open(WAN, "transformer"), ALONE, adapters=adapters)
    drawn = Backbone(WanModel.load(WAN, CPU), ALONE, adapters=adapters)
    for role in adapters:
        weights = backbone.weights(role)
        assert all(torch.equal(weights[key], p) for key, p in drawn.weights(role).items())
        assert all(bool(p.any()) == ("lora_A" in key) for key, p in weights.items())
    stored = load_file(WAN / "transformer" / FILE)
    state = backbone.model.network.state_dict()
    assert torch.equal(state["blocks.0.attn1.to_q.base_layer.weight"], stored["blocks.0.attn1.to_q.weight"])


def test_sharded_files_are_read_by_their_index(folder):
    held = load_file(folder / "transformer" / FILE)
    (folder / "transformer" / FILE).unlink()
    names = [f"diffusion_pytorch_model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    keys = sorted(held)
    parts = dict(zip(names, (keys[::2], keys[1::2]), strict=True))
    for name, part in parts.items():
        save_file({key: held[key] for key in part}, folder / "transformer" / name)
    listed = {key: name for name, part in parts.items() for key in part}
    (folder / "transformer" / f"{FILE}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": listed}))
    state = WanModel.load(folder, CPU).network.state_dict()
    assert all(torch.equal(state[key], value) for key, value in held.items())


@pytest.mark.parametrize("stale", [1, 2])
def test_a_weight_in_several_files_is_that_of_the_index(tmp_path, stale):
    """Of a network whose shards are read by each rank, and of a VAE that diffusers reads."""
    for component, load in (
        ("transformer", lambda: WanModel.load(tmp_path, CPU).network),
        ("vae", lambda: load_strictly(AutoencoderKLWan, tmp_path / "vae")),
    ):
        place = copy_of(WAN / component, tmp_path / component)
        held = load_file(place / FILE)
        (place / FILE).unlink()
        one, two = (f"diffusion_pytorch_model-0000{i}-of-00002.safetensors" for i in (stale, 3 - stale))
        key = next(key for key in sorted(held) if key.endswith("bias"))
        save_file(held | {key: held[key] + 1}, place / one)
        save_file({key: held[key]}, place / two)
        home = dict.fromkeys(held, one) | {key: two}
        (place / f"{FILE}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": home}))
        assert torch.equal(load().state_dict()[key], held[key])
        (place / f"{FILE}.index.json").write_text(json.dumps({"weight_map": home | {"proj_out.bias": two}}))
        with pytest.raises(UserError, match=rf"weight_map places \S+ in {two}, which lacks it"):
            check_component(place, "diffusion_pytorch_model")


def test_a_link_to_nothing_is_named(folder):
    """A file, the index, a shard, and the folder around them."""
    file, index = folder / "transformer" / FILE, folder / "transformer" / f"{FILE}.index.json"
    file.rename(folder / "weights")
    file.symlink_to(folder / "gone")
    with pytest.raises(UserError, match=rf"{FILE} is a link to .*gone, which is not there"):
        WanModel.load(folder, CPU)
    index.write_text(json.dumps({"weight_map": {"a": FILE}}))
    with pytest.raises(UserError, match=rf"{FILE} is a link to .*gone, which is not there"):
        WanModel.load(folder, CPU)
    index.unlink()
    file.unlink()
    (folder / "weights").rename(file)
    index.symlink_to(folder / "gone")
    with pytest.raises(UserError, match=r"index\.json is a link to .*gone, which is not there"):
        WanModel.load(folder, CPU)
    (folder / "link").symlink_to(folder / "gone")
    with pytest.raises(UserError, match=r"link is a link to .*gone, which is not there"):
        WanModel.load(folder / "link", CPU)


def test_the_same_weights_twice_are_refused(folder):
    held = load_file(folder / "transformer" / FILE)
    save_file(held, folder / "transformer" / "diffusion_pytorch_model.fp16.safetensors")
    with pytest.raises(ValueError, match=r"must hold exactly .*, but holds \['diffusion_pytorch_model\.fp16"):
        WanModel.load(folder, CPU)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda held: held.pop("proj_out.bias"), r"missing keys \['proj_out\.bias'\]"),
        (lambda held: held.update(more=torch.zeros(1)), r"unexpected keys \['more'\]"),
        (lambda held: held.update({"proj_out.bias": torch.zeros(3)}), r"mismatched keys \['proj_out\.bias "),
        (
            lambda held: held["proj_out.bias"].fill_(float("nan")),
            r"weight proj_out\.bias holds a value that is not finite",
        ),
    ],
)
def test_what_is_not_exactly_its_weights_is_refused(folder, change, said):
    rewrite(folder / "transformer" / FILE, change)
    with pytest.raises(ValueError, match=said):
        WanModel.load(folder, CPU)
