"""Every field of peft's settings is used as peft uses it, changes nothing, or is refused by its name."""

import json
import re
from dataclasses import MISSING, fields
from pathlib import Path

import pytest
import torch
from adapter_files import named, wans
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file, save_file
from torch import nn

from unified_trainer.basics.errors import UserError
from unified_trainer.models.adapter_file import AdapterFile, open_adapter
from unified_trainer.models.adapter_location import locate
from unified_trainer.models.adapter_settings import FREE, OFF, ONLY, AdapterSettings
from unified_trainer.models.wan.family import WAN
from unified_trainer.models.wan.lora import published_layer

RANK, ALPHA, WIDTH = 2, 3, 6
AB = ("lora_A.weight", "lora_B.weight")


class Block(nn.Module):
    """Layers by the names of Wan's."""

    def __init__(self):
        super().__init__()
        self.attn1 = nn.ModuleDict(
            {"to_q": nn.Linear(WIDTH, WIDTH), "to_out": nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Dropout()])}
        )


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.blocks = nn.ModuleList([Block(), Block()])


NETWORK = Network()
LAYERS = [key for key, module in NETWORK.named_modules() if isinstance(module, nn.Linear)]
WANS = {"attn1": "self_attn", "to_q": "q", "to_out.0": "o"}


def factors(ranks=None):
    draw = torch.Generator().manual_seed(1)
    ranks = dict.fromkeys(LAYERS, RANK) | (ranks or {})
    return {
        x: (torch.randn(ranks[x], WIDTH, generator=draw), torch.randn(WIDTH, ranks[x], generator=draw)) for x in LAYERS
    }


def settings(**changes):
    return LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=["to_q", "to_out.0"]).to_dict() | changes


def plain(folder: Path, keys, config) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(keys, folder / "adapter_model.safetensors", {"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps(config, default=list))
    return folder


def by_peft(folder, given, config):
    return plain(folder, named(given, "base_model.model.{}", *AB), config)


def by_peft_on_wan(folder, given, config):
    """As peft writes it for a network with Wan's own names."""
    text = json.dumps(config, default=list)
    for ours, theirs in WANS.items():
        text = text.replace(ours, theirs)
    return plain(folder, named(wans(given), "base_model.model.{}", *AB), json.loads(text))


def by_diffusers(folder, given, config):
    folder.mkdir(parents=True, exist_ok=True)
    header = json.dumps({f"transformer.{key}": value for key, value in config.items()}, default=list)
    held = named(given, "transformer.{}", *AB)
    save_file(held, folder / "pytorch_lora_weights.safetensors", {"lora_adapter_metadata": header})
    return folder


def read(path) -> AdapterFile:
    place = locate(path, "student.adapter.path", None, WAN.experts, WAN.adapter_files)
    return open_adapter(place, NETWORK, WAN.experts, published_layer)


def merged(file) -> dict[str, torch.Tensor]:
    weights = NETWORK.state_dict()
    return weights | {
        key: weights[key] + file.change(key, weights[key].shape, torch.device("cpu")) for key in file.changed
    }


def of_peft(folder) -> dict[str, torch.Tensor] | None:
    """What peft makes of a folder; None if it refuses it."""
    try:
        return PeftModel.from_pretrained(Network(), folder).merge_and_unload().state_dict()
    except Exception:  # noqa: BLE001  # of many kinds
        return None


INITS = "gaussian pissa pissa_niter_4 olora eva corda loftq orthogonal mica lora_ga new"
VALUES = {
    "task_type": ["FEATURE_EXTRACTION"],
    "peft_type": ["LOHA", "ADALORA"],
    "r": [RANK + 1],
    "lora_alpha": [5],
    "target_modules": [["to_q"], "all", r".*\.(to_q|to_out.0)", [*LAYERS]],
    "exclude_modules": [["to_q"], r".*to_q", ["nothing"]],
    "layers_to_transform": [[0, 1], 0, [1]],
    "layers_pattern": [[]],  # another needs layers_to_transform
    "rank_pattern": [{"to_q": RANK}, {"to_k": 4}, {"to_q": 4}],
    "alpha_pattern": [{"attn1.to_q": 7.0}, {r"blocks\.1\.attn1\.to_q": 9, "to_q": 5}, {"to_k": 4.0}],
    "init_lora_weights": [False, *INITS.split()],
    "eva_config": [{"rho": 1.5}],
    "corda_config": [{"corda_method": "kpm"}],
    "lora_ga_config": [{"direction": "ArBr"}],
    "bias": ["all", "lora_only"],
}


def values(field):
    """The values of a field that are tried: those above, or one that is not its default."""
    default = field.default_factory() if field.default_factory is not MISSING else field.default
    by_type = {bool: not default, int: 3, float: 0.5, str: "text", dict: {"a": 1}}
    return VALUES.get(field.name, [by_type.get(type(default), ["to_q"])])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("written", [by_peft, by_peft_on_wan, by_diffusers])
def test_every_field_is_as_peft_has_it_or_refused_by_name(written, tmp_path):
    """A used field and one that changes nothing are not refused, unless peft drops a layer of the file."""
    accepted, given = set(), factors()
    for number, (field, value) in enumerate((f, value) for f in fields(LoraConfig) for value in values(f)):
        config = settings(**{field.name: value})
        expected = of_peft(by_peft(tmp_path / f"peft {number}", given, config))
        try:
            ours = merged(read(written(tmp_path / f"{written.__name__} {number}", given, config)))
        except UserError as error:
            base = NETWORK.state_dict()
            whole = expected and not any(torch.equal(expected[f"{x}.weight"], base[f"{x}.weight"]) for x in LAYERS)
            known = field.name in FREE.split() or field.name in AdapterSettings.model_fields
            said = str(error)
            assert field.name in said, (field.name, value, said)
            assert not (known and whole) or "to_k" in said, (field.name, value, said)
            continue
        assert expected is not None, (field.name, value)
        accepted.add(field.name)
        for key, weight in expected.items():
            torch.testing.assert_close(ours[key], weight, rtol=0, atol=1e-5, msg=f"{field.name} {value}: {key}")
    assert accepted >= {*FREE.split(), "use_rslora", "lora_alpha", "alpha_pattern", "rank_pattern", "target_modules"}


@pytest.mark.parametrize(
    "changes",
    [
        {"layers_to_transform": [0, 1], "layers_pattern": "blocks"},
        {"use_rslora": True},
        {"alpha_pattern": {r"blocks\.0\..*": 5}},
    ],
)
@pytest.mark.parametrize("written", [by_peft, by_peft_on_wan, by_diffusers])
def test_patterns_of_ranks(written, changes, tmp_path):
    """The first pattern that fits a layer counts."""
    ranks = {"blocks.0.attn1.to_q": 3, "blocks.1.attn1.to_q": 4}
    config = settings(rank_pattern={r"blocks\.0\.attn1\.to_q": 3, "to_q": 4}, **changes)
    expected = of_peft(by_peft(tmp_path / "peft", factors(ranks), config))
    ours = merged(read(written(tmp_path / "ours", factors(ranks), config)))
    for key, weight in expected.items():
        torch.testing.assert_close(ours[key], weight, rtol=0, atol=1e-5)


def test_the_table_has_every_field_and_the_page_too():
    known = {*FREE.split(), *ONLY, *OFF.split(), *AdapterSettings.model_fields}
    assert {field.name for field in fields(LoraConfig)} == known
    page = (Path(__file__).parents[2] / "docs" / "weights.md").read_text()
    assert known <= set(re.findall(r"`(\w+)`", page))


@pytest.mark.parametrize(("value", "refused"), [(None, False), (False, False), ([], False), (0.1, True), ("on", True)])
def test_a_field_of_a_newer_peft_must_be_off(value, refused, tmp_path):
    folder = by_peft(tmp_path, factors(), settings(new_field=value))
    if refused:
        with pytest.raises(UserError, match=rf"adapter_config\.json: new_field is {value!r}: such an adapter"):
            read(folder)
    else:
        assert read(folder).layers


# Settings of other programs, and several sources of them.


def bare(folder: Path, name="mine.safetensors", header=None, **more) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(named(factors(), "transformer.{}", *AB) | more, folder / name, header)
    return folder


def scales(path) -> set[float]:
    return {change.scale for (change,) in read(path).layers.values()}


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("lora_config.json", {"step": 7, "lora_params": {"lora_rank": 2, "lora_alpha": 8, "target_modules": ["q"]}}, 4),
        ("lora_config.json", {"lora_rank": 2, "lora_alpha": 8}, 4),
        ("lora_config.json", {"lora_rank": 2, "lora_alpha": None}, 1),
        ("lora_config.json", {"lora_rank": 4, "lora_alpha": 8}, "has rank 2, but the adapter's settings say 4"),
        ("lora_config.json", {"lora_alpha": 8, "use_dora": True}, "use_dora is True"),
        ("lora_config.json", {"lora_alpha": 8, "sparsity": 0.5}, "sparsity is 0.5"),
        ("lora_config.json", {"lora_params": ["to_q"]}, "lora_params is"),
        ("adapter_config.json", {"peft_type": "LORA", "r": 2}, 4),  # 8 / r, peft's default
        ("adapter_config.json", {"peft_type": "LORA", "lora_alpha": 2}, "has rank 2, but the adapter's settings say 8"),
    ],
)
def test_settings_beside_weights_of_any_name(name, content, expected, tmp_path):
    bare(tmp_path)
    (tmp_path / name).write_text(json.dumps(content))
    if isinstance(expected, str):
        with pytest.raises(UserError, match=re.escape(expected)):
            read(tmp_path)
    else:
        assert scales(tmp_path) == {expected}
        assert scales(tmp_path / "mine.safetensors") == {expected}


def test_settings_beside_are_of_the_weights_that_usually_have_them(tmp_path):
    by_peft(tmp_path, factors(), settings())
    bare(tmp_path)
    assert scales(tmp_path / "mine.safetensors") == {1.0}
    assert scales(tmp_path) == {ALPHA / RANK}


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ({"format": "pt", "author": "me"}, 1),
        ({"lora_alpha": "8", "rank": "2"}, 4),
        ({"rank": "4"}, "has rank 2, but the adapter's settings say 4"),
        ({"lora_alpha": "2", "use_rslora": "True"}, 2 / 2**0.5),
        ({"use_dora": "True"}, "its header: use_dora is True"),
        ({"use_dora": "False"}, 1),
        ({"ss_network_alpha": "2.0", "ss_network_dim": "2"}, "its header has ss_network_alpha 2.0, but no key"),
        ({"ss_network_alpha": "2", "ss_network_dim": "2"}, 1),
        ({"lora_adapter_metadata": json.dumps({"r": 2, "lora_alpha": 8})}, 4),
        ({"lora_adapter_metadata": json.dumps({"transformer_2.r": 9, "transformer.r": 2})}, 4),
        ({"lora_adapter_metadata": json.dumps({"unet.r": 2})}, "unet.r is of a network unet"),
    ],
)
def test_what_a_header_says(header, expected, tmp_path):
    bare(tmp_path, header=header)
    if isinstance(expected, str):
        with pytest.raises(UserError, match=re.escape(expected)):
            read(tmp_path)
    else:
        assert scales(tmp_path) == {expected}


def test_sources_that_contradict_each_other(tmp_path):
    alphas = {f"transformer.{layer}.alpha": torch.tensor(2.0) for layer in LAYERS}
    bare(tmp_path, **alphas)
    (tmp_path / "lora_config.json").write_text(json.dumps({"lora_alpha": 2}))
    assert scales(tmp_path) == {1.0}
    (tmp_path / "lora_config.json").write_text(json.dumps({"lora_alpha": 4}))
    with pytest.raises(UserError, match=r"alpha of blocks.* is 4, but 2 by its key in the file"):
        read(tmp_path)
    bare(tmp_path, header={"lora_alpha": "8"})
    with pytest.raises(UserError, match=r"is scaled by 2 \(.*lora_config\.json\), but by 4 \(.*its header\)"):
        read(tmp_path)


# Published names.


def test_names_of_videox_fun_and_of_longlive(tmp_path):
    expected = merged(read(bare(tmp_path / "bare")))
    flat = {layer.replace(".", "_"): pair for layer, pair in wans(factors()).items()}
    save_file(named(flat, "lora_unet__{}", "lora_down.weight", "lora_up.weight"), tmp_path / "fun.safetensors")
    peft = named(wans(factors()), "base_model.model.{}", *AB)
    other = {key: torch.zeros_like(x) for key, x in peft.items()}
    torch.save({"generator_lora": peft, "critic_lora": other, "step": 700}, tmp_path / "lora.pt")
    save_file({f"generator_lora.{key}": x for key, x in peft.items()}, tmp_path / "longlive.safetensors")
    wrapped = {key.replace("blocks.0.", "blocks.0._fsdp_wrapped_module."): x for key, x in peft.items()}
    torch.save(wrapped, tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    for name in ("fun.safetensors", "lora.pt", "longlive.safetensors", "old.pth"):
        for key, weight in merged(read(tmp_path / name)).items():
            assert torch.equal(weight, expected[key]), (name, key)
    torch.save({"generator_lora": peft, "generator_ema_lora": peft}, tmp_path / "two.pt")
    with pytest.raises(UserError, match="8 keys fit no layer of the network: generator_ema_lora"):
        read(tmp_path / "two.pt")
    torch.save({**peft, "lora_alpha": 8}, tmp_path / "alpha.pt")
    assert scales(tmp_path / "alpha.pt") == {8 / RANK}


def test_a_pickle_runs_no_code(tmp_path):
    torch.save({"a": Path("x")}, tmp_path / "lora.pt")
    with pytest.raises(UserError, match=r"lora\.pt is no file of tensors alone: its pickle names pathlib"):
        read(tmp_path / "lora.pt")
    held = load_file(bare(tmp_path / "bare") / "mine.safetensors")
    torch.save({key: x.int() for key, x in held.items()}, tmp_path / "lora.pt")
    with pytest.raises(UserError, match=r"has type INT32, but weights are floating-point numbers"):
        read(tmp_path / "lora.pt")
