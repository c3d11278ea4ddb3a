"""Adapters made elsewhere: what is added to the weights is scale B A in every layout, and a wrong file says why."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from adapter_files import ENDS, LAYOUTS, by_hand, factors, kohya, named, peft, published
from diffusers import WanPipeline
from helpers import ALONE, WAN, assert_near, assert_same, weights
from safetensors.torch import load_file, save_file

from unified_trainer.basics.errors import MissingFileError, NotFiniteError, UserError
from unified_trainer.models.adapter_file import AdapterFile, open_adapter
from unified_trainer.models.adapter_location import checksum, locate
from unified_trainer.models.wan.family import WAN as FAMILY
from unified_trainer.models.wan.lora import published_adapter, published_layer
from unified_trainer.models.wan.model import WanModel
from unified_trainer.roles.adapter import AdapterConfig
from unified_trainer.roles.backbone import Backbone

pytestmark = pytest.mark.slow  # seconds together

RANK, ALPHA = 3, 2.0
OUTSIDE = ("text_embedder.linear_1", "time_embedder.linear_2", "time_proj", "proj_out")
BASE = load_file(WAN / "transformer" / "diffusion_pytorch_model.safetensors")


def opened() -> WanModel:
    return WanModel.open(WAN, "transformer")


@pytest.fixture(scope="module")
def given():
    return factors(opened().network, RANK)


def read(path, expert: int | None = None, factor: float = 1.0) -> AdapterFile:
    place = locate(path, "student.adapter.path", expert, FAMILY.experts, FAMILY.adapter_files)
    return open_adapter(replace(place, factor=factor), opened().network, FAMILY.experts, published_layer)


def merged(file: AdapterFile, **options) -> Backbone:
    return Backbone(opened(), ALONE, merged=file, **options)


@torch.no_grad()
def velocity(network) -> torch.Tensor:
    model = WanModel(network)
    return model.velocity(*model.example())


def rewritten(folder, change) -> None:
    """Change the tensors of a folder's only file."""
    (file,) = folder.glob("*.safetensors")
    held = load_file(file)
    change(held)
    save_file(held, file, metadata={"format": "pt"})


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_merged_is_the_scaled_product(layout, given, tmp_path):
    file = read(LAYOUTS[layout](tmp_path / "adapter", given, ALPHA))
    expected = by_hand(BASE, given, dict.fromkeys(given, ALPHA / RANK))
    network = merged(file).model.network
    assert_near(weights(network), expected, 1e-6)
    network_by_hand = WanModel.load(WAN, torch.device("cpu")).network
    before = velocity(network_by_hand)
    network_by_hand.load_state_dict(expected)
    torch.testing.assert_close(velocity(network), velocity(network_by_hand), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(velocity(network), before, atol=1e-2)


@pytest.mark.parametrize("layout", ["diffusers", "diffusers_without_settings", "published", "kohya"])
def test_diffusers_loads_the_same(layout, tmp_path):
    """Only files with all layers of the blocks are read by diffusers' converter of kohya's names."""
    given = factors(opened().network, RANK, ("to_q", "to_k", "to_v", "to_out.0", "ffn.net.0.proj", "ffn.net.2"))
    folder = LAYOUTS[layout](tmp_path / "adapter", given, ALPHA)
    (name,) = (path.name for path in folder.iterdir())
    pipeline = WanPipeline.from_pretrained(WAN, text_encoder=None, vae=None)
    pipeline.load_lora_weights(folder, weight_name=name)
    theirs = velocity(pipeline.transformer)
    ours = velocity(merged(read(folder)).model.network)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(ours, velocity(WanModel.load(WAN, torch.device("cpu")).network), atol=1e-2)


@pytest.mark.parametrize("layout", ["diffusers_without_settings", "published", "kohya"])
def test_layers_outside_of_the_blocks(layout, tmp_path):
    given = factors(opened().network, RANK, OUTSIDE)
    assert len(given) == len(OUTSIDE)
    file = read(LAYOUTS[layout](tmp_path / "adapter", given, ALPHA))
    expected = by_hand(BASE, given, dict.fromkeys(given, ALPHA / RANK))
    assert_near(weights(merged(file).model.network), expected, 1e-6)


def test_every_layer_may_have_its_own_alpha(given, tmp_path):
    scales = {layer: 0.5 + i for i, layer in enumerate(given)}
    alphas = {layer: RANK * scale for layer, scale in scales.items()}
    first = peft(tmp_path / "peft", given, 1.0, alpha_pattern=alphas)
    second = kohya(tmp_path / "kohya", given, 1.0)
    flat = {f"lora_unet_{published_layer(layer).replace('.', '_')}.alpha": value for layer, value in alphas.items()}
    rewritten(second, lambda held: held.update({key: torch.tensor(value) for key, value in flat.items()}))
    for folder in (first, second):
        assert_near(weights(merged(read(folder)).model.network), by_hand(BASE, given, scales), 1e-6)


def test_rank_stabilized_scale(given, tmp_path):
    """RsLoRA divides by the root of the rank (arXiv:2312.03732)."""
    file = read(peft(tmp_path / "a", given, ALPHA, use_rslora=True))
    assert {change.scale for changes in file.layers.values() for change in changes} == {ALPHA / RANK**0.5}


def test_differences_of_whole_weights_are_added(given, tmp_path):
    """Published distillation adapters hold them for norms and biases, and FastVideo for any parameter."""
    random = torch.Generator().manual_seed(1)
    added = {
        "blocks.0.attn1.to_q.bias": "blocks.0.self_attn.q.diff_b",
        "blocks.1.norm2.weight": "blocks.1.norm3.diff",
        "blocks.1.attn2.norm_k.weight": "blocks.1.cross_attn.norm_k.diff",
        "blocks.0.scale_shift_table": "blocks.0.modulation.diff",
        "scale_shift_table": "scale_shift_table.diff_param",
        "patch_embedding.weight": "patch_embedding.diff",
    }
    changes = {key: torch.randn(BASE[key].shape, generator=random) for key in added}
    folder = published(tmp_path / "adapter", given, ALPHA)
    rewritten(folder, lambda held: held.update({f"diffusion_model.{added[key]}": x for key, x in changes.items()}))
    expected = by_hand(BASE, given, dict.fromkeys(given, ALPHA / RANK))
    expected |= {key: BASE[key] + change for key, change in changes.items()}
    assert_near(weights(merged(read(folder)).model.network), expected, 1e-6)


def test_a_convolution_has_factors_too(tmp_path):
    weight = BASE["patch_embedding.weight"]
    a, b = torch.randn(2, *weight.shape[1:]), torch.randn(weight.shape[0], 2, 1, 1, 1)
    save_file(
        {"diffusion_model.patch_embedding.lora_down.weight": a, "diffusion_model.patch_embedding.lora_up.weight": b},
        tmp_path / "conv.safetensors",
    )
    expected = weight + torch.einsum("or,rcthw->octhw", b.flatten(1), a)
    network = merged(read(tmp_path / "conv.safetensors")).model.network
    torch.testing.assert_close(network.patch_embedding.weight, expected)


def test_the_sum_is_rounded_once(given, tmp_path):
    """A base that is held in bf16 gets bf16(W + scale B A) of the float32 W."""
    file = read(peft(tmp_path / "adapter", given, ALPHA))
    exact, half = merged(file).model.network, merged(file, half=True).model.network
    for layer in given:
        weight = half.get_submodule(layer).weight
        assert weight.dtype == torch.bfloat16
        assert torch.equal(weight, exact.get_submodule(layer).weight.bfloat16()), layer
    held = {x: BASE[f"{x}.weight"].bfloat16().float() for x in given}
    rounded = [(held[x] + ALPHA / RANK * b @ a).bfloat16() for x, (a, b) in given.items()]
    pairs = zip(given, rounded, strict=True)
    assert any(not torch.equal(half.get_submodule(layer).weight, twice) for layer, twice in pairs)


@pytest.mark.parametrize("half", [False, True])
def test_an_adapter_is_trained_on_from_where_it_is(given, tmp_path, half):
    """Its factors are those of the file; the velocity is that of the merged network."""
    file = read(peft(tmp_path / "adapter", given, ALPHA))
    config = AdapterConfig(RANK, ALPHA, ENDS)
    backbone = Backbone(opened(), ALONE, adapters={"student": config}, starts={"student": file}, half=half)
    held = named(given, "{}", "lora_A.weight", "lora_B.weight")
    assert_near(weights_of(backbone), held, 1e-6)
    if not half:
        with backbone.running("student") as model, torch.no_grad():
            ours = model.velocity(*model.example())
        torch.testing.assert_close(ours, velocity(merged(file).model.network), rtol=1e-4, atol=1e-5)


def test_scales_of_layers_are_folded_into_b(given, tmp_path):
    alphas = {layer: 1.0 + i for i, layer in enumerate(given)}
    file = read(peft(tmp_path / "adapter", given, 1.0, alpha_pattern=alphas))
    backbone = Backbone(opened(), ALONE, adapters={"student": AdapterConfig(RANK, 6.0, ENDS)}, starts={"student": file})
    with backbone.running("student") as model, torch.no_grad():
        ours = model.velocity(*model.example())
    torch.testing.assert_close(ours, velocity(merged(file).model.network), rtol=1e-4, atol=1e-5)


def test_a_sum_of_adapters_is_merged_and_trained_on_exactly(given, tmp_path):
    """Ranks 3 and 2 on the same and on other layers: 0.5 W1 + 2 W2 in the weights, or in factors side by side."""
    other = factors(opened().network, 2, ("to_q", "ffn.net.0.proj"), seed=1)
    first, second = published(tmp_path / "first", given, ALPHA), kohya(tmp_path / "second", other, 1.0)
    both = read(first, factor=0.5) + read(second, factor=2.0)
    expected = by_hand(BASE, given, dict.fromkeys(given, 0.5 * ALPHA / RANK))
    expected = by_hand(expected, other, dict.fromkeys(other, 2.0 * 1.0 / 2))
    assert_near(weights(merged(both).model.network), expected, 1e-6)
    config = AdapterConfig(RANK + 2, 1.0, (*ENDS, "ffn.net.0.proj"))
    backbone = Backbone(opened(), ALONE, adapters={"student": config}, starts={"student": both})
    held = weights_of(backbone)
    layers = {key.partition(".lora_")[0] for key in held}
    pairs = {layer: (held[f"{layer}.lora_A.weight"], held[f"{layer}.lora_B.weight"]) for layer in layers}
    assert_near(by_hand(BASE, pairs, dict.fromkeys(pairs, 1.0 / (RANK + 2))), expected, 1e-5)
    short_a, short_b = pairs["blocks.0.ffn.net.0.proj"]
    assert bool(short_a[2:].any(1).all()) and not bool(short_b[:, 2:].any())  # rows that can learn, and add nothing


def test_a_factor_is_of_whole_differences_too(given, tmp_path):
    """LightX2V's names: a modulation has `diff_m`, in a block and in the head."""
    folder, changes = published(tmp_path / "a", given, ALPHA), {}
    for key, weight in (("blocks.1.diff_m", "blocks.1.scale_shift_table"), ("head.diff_m", "scale_shift_table")):
        changes[weight] = torch.full(BASE[weight].shape, 0.5)
        rewritten(folder, lambda held, key=key, weight=weight: held.update({f"diffusion_model.{key}": changes[weight]}))
    network = merged(read(folder, factor=0.25)).model.network
    expected = by_hand(BASE, given, dict.fromkeys(given, 0.25 * ALPHA / RANK))
    expected |= {key: BASE[key] + 0.125 for key in changes}
    assert_near(weights(network), expected, 1e-6)


def weights_of(backbone: Backbone) -> dict[str, torch.Tensor]:
    return {key: p.detach() for key, p in backbone.weights("student").items()}


def test_what_is_written_under_published_names_is_read(given, tmp_path):
    held = named(given, "{}", "lora_A.weight", "lora_B.weight")
    save_file(published_adapter(held, ALPHA), tmp_path / "model.safetensors")
    file = read(tmp_path)
    assert_near(weights(merged(file).model.network), by_hand(BASE, given, dict.fromkeys(given, ALPHA / RANK)), 1e-6)


def test_two_networks_in_one_file(given, tmp_path):
    """Each expert takes the keys of its component."""
    other = factors(opened().network, RANK, seed=1)
    both = named(given, "transformer.{}", "lora_A.weight", "lora_B.weight")
    both |= named(other, "transformer_2.{}", "lora_A.weight", "lora_B.weight")
    save_file(both, tmp_path / "pytorch_lora_weights.safetensors")
    for expert, own in ((0, given), (1, other)):
        file = read(tmp_path, expert)
        assert_near(weights(merged(file).model.network), by_hand(BASE, own, dict.fromkeys(own, 1.0)), 1e-6)
    assert read(tmp_path, 0).name != read(tmp_path, 1).name


@pytest.mark.parametrize("names", [("transformer", "transformer_2"), ("high_noise_model", "low_noise_model")])
def test_a_folder_with_a_part_for_each_expert(given, tmp_path, names):
    other = factors(opened().network, RANK, seed=1)
    for name, own in zip(names, (given, other), strict=True):
        if name.startswith("transformer"):
            peft(tmp_path / name, own, ALPHA)
        else:
            (published(tmp_path / "written", own, ALPHA) / "wan.safetensors").replace(tmp_path / f"{name}.safetensors")
    for expert, own in enumerate((given, other)):
        file = read(tmp_path, expert)
        expected = by_hand(BASE, own, dict.fromkeys(own, ALPHA / RANK))
        assert_near(weights(merged(file).model.network), expected, 1e-6)


# What is refused, by the header alone.


def spoilt(change):
    """The message for a file in Wan's names with these changes."""

    def message(given, folder) -> str:
        published(folder, given, ALPHA)
        rewritten(folder, change)
        with pytest.raises(UserError) as refused:
            read(folder)
        return str(refused.value)

    return message


FIRST = "diffusion_model.blocks.0.self_attn.q"


def test_unknown_keys_are_listed_and_counted(given, tmp_path):
    extra = {f"diffusion_model.blocks.{i}.cross_attn.k_img.lora_down.weight": torch.zeros(1) for i in range(7)}
    message = spoilt(lambda held: held.update(extra))(given, tmp_path)
    assert "wan.safetensors: 7 keys fit no layer of the network: " in message
    assert all(key in message for key in sorted(extra)[:5]) and message.endswith(" and 2 more")


@pytest.mark.parametrize("key", ["lora_magnitude_vector.weight", "hada_w1_a", "lora_up.bias", "set_weight"])
def test_other_kinds_of_adapters_are_unknown_keys(given, tmp_path, key):
    message = spoilt(lambda held: held.update({f"{FIRST}.{key}": torch.zeros(1)}))(given, tmp_path)
    assert f"1 keys fit no layer of the network: {FIRST}.{key}" in message


def test_a_factor_alone_is_named(given, tmp_path):
    message = spoilt(lambda held: held.pop(f"{FIRST}.lora_up.weight"))(given, tmp_path)
    assert f"lack the other factor of their layer: {FIRST}.lora_down.weight" in message


def test_a_layer_twice_is_named(given, tmp_path):
    again = {"blocks.0.attn1.to_q.lora_A.weight": torch.zeros(RANK, 24)}
    message = spoilt(lambda held: held.update(again))(given, tmp_path)
    assert "1 keys are further factors of a layer that has both: " in message


def test_an_alpha_alone_is_named(given, tmp_path):
    extra = {"diffusion_model.head.head.alpha": torch.tensor(1.0)}
    message = spoilt(lambda held: held.update(extra))(given, tmp_path)
    assert "are of layers without factors: diffusion_model.head.head.alpha" in message


def test_a_shape_that_does_not_fit_is_named(given, tmp_path):
    wide = torch.zeros(RANK, 7)
    message = spoilt(lambda held: held.update({f"{FIRST}.lora_down.weight": wide}))(given, tmp_path)
    assert "1 keys have another shape than the network's weights" in message
    assert f"{FIRST}.lora_up.weight" in message and "(3, 7)" in message


def test_a_factor_without_a_shape_and_an_alpha_with_one_are_named(given, tmp_path):
    scalar = {f"{FIRST}.lora_{which}.weight": torch.tensor(1.0) for which in ("down", "up")}
    message = spoilt(lambda held: held.update(scalar))(given, tmp_path / "a")
    assert "1 keys have another shape than the network's weights" in message and "() x () of" in message
    message = spoilt(lambda held: held.update({f"{FIRST}.alpha": torch.ones(2)}))(given, tmp_path / "b")
    assert f"1 keys are alphas, but not one number: {FIRST}.alpha" in message


def test_ranks_of_two_factors_must_agree(given, tmp_path):
    b = given["blocks.0.attn1.to_q"][1][:, :2].contiguous()
    message = spoilt(lambda held: held.update({f"{FIRST}.lora_up.weight": b}))(given, tmp_path)
    assert "have another shape than the network's weights" in message


def test_settings_that_contradict_the_weights(given, tmp_path):
    with pytest.raises(UserError, match="has rank 3, but the adapter's settings say 8"):
        read(peft(tmp_path / "a", given, 1.0, r=8))
    (tmp_path / "a" / "adapter_config.json").write_text("{")
    with pytest.raises(UserError, match=r"adapter_config\.json is not JSON"):
        read(tmp_path / "a")


def test_a_file_of_something_else(tmp_path):
    save_file({"x.alpha": torch.zeros(1)}, tmp_path / "other.safetensors")
    with pytest.raises(UserError, match="1 keys fit no layer"):
        read(tmp_path / "other.safetensors")
    save_file({}, tmp_path / "empty.safetensors")
    with pytest.raises(UserError, match="holds no adapter"):
        read(tmp_path / "empty.safetensors")
    (tmp_path / "cut.safetensors").write_bytes((tmp_path / "other.safetensors").read_bytes()[:20])
    with pytest.raises(UserError, match=r"cut\.safetensors is damaged or cut short"):
        read(tmp_path / "cut.safetensors")


def test_where_an_adapter_lies_must_be_clear(given, tmp_path):
    with pytest.raises(MissingFileError, match=r"student\.adapter\.path .*nowhere: no such file or folder"):
        read(tmp_path / "nowhere")
    with pytest.raises(MissingFileError, match="if it is on the hub, run `hf download me/lora`"):
        read(Path("me/lora"))
    with pytest.raises(UserError, match="must hold one safetensors file, but holds none"):
        read(tmp_path)
    for name in ("a", "b"):
        save_file({}, tmp_path / f"{name}.safetensors")
    with pytest.raises(UserError, match=r"holds several: a\.safetensors, b\.safetensors; name the file itself"):
        read(tmp_path)
    (tmp_path / "lora.gguf").write_text("")
    with pytest.raises(UserError, match=r"lora\.gguf is no safetensors file"):
        read(tmp_path / "lora.gguf")
    folder = published(tmp_path / "one", given, ALPHA)
    with pytest.raises(UserError, match=r"two experts: .*student\.high\.adapter\.path and student\.low\.adapter\.path"):
        read(folder, 0)


@pytest.mark.parametrize("trained", [False, True])
def test_values_that_are_not_finite_are_refused(given, tmp_path, trained):
    folder = published(tmp_path / "a", given, ALPHA)
    rewritten(folder, lambda held: held[f"{FIRST}.lora_down.weight"].fill_(float("nan")))
    file = read(folder)
    config = {"student": AdapterConfig(RANK, ALPHA, ENDS)}
    with pytest.raises(NotFiniteError, match=r"wan\.safetensors: .*attn1\.to_q.* not finite"):
        Backbone(opened(), ALONE, adapters=config, starts={"student": file}) if trained else merged(file)


def test_the_checksum_is_of_every_byte_and_of_the_order(tmp_path):
    a, b = tmp_path / "a", tmp_path / "b"
    a.write_text("one"), b.write_text("two")
    both = checksum([a, b])
    assert both == checksum([a, b]) != checksum([b, a])
    b.write_text("twx")
    assert both != checksum([a, b])


def test_names_of_wan_are_one_to_one():
    names = [published_layer(key.rpartition(".")[0] or key) for key in BASE if key.endswith("weight")]
    assert None not in names and len(set(names)) == len(names)
    assert published_layer("blocks.0.attn1.rope") is None and published_layer("rope") is None


def test_other_networks_of_a_file_are_unknown_to_a_role_of_one(given, tmp_path):
    """A key of transformer_2 is not dropped in silence."""
    both = named(given, "transformer.{}", "lora_A.weight", "lora_B.weight")
    both |= named(factors(opened().network), "transformer_2.{}", "lora_A.weight", "lora_B.weight")
    save_file(both, tmp_path / "pytorch_lora_weights.safetensors")
    with pytest.raises(UserError, match="holds adapters of two networks"):
        read(tmp_path)


def test_without_an_adapter_nothing_changes():
    assert_same(weights(Backbone(opened(), ALONE).model.network), BASE)
