"""Low-rank adapters that were made elsewhere: files in the usual layouts, read by a network's names.

Keys may be those of peft (lora_A, lora_B), of older diffusers (lora.down, lora.up) or of kohya and ComfyUI (lora_down,
lora_up, alpha); layers may have the network's own names or those that its family was published with.
"""

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from unified_trainer.basics.errors import NotFiniteError, UserError
from unified_trainer.models.adapter_location import Location
from unified_trainer.models.adapter_settings import FASTVIDEO_CONFIG, Statement, sources
from unified_trainer.models.tensor_file import opened, refuse_other_types

UNDERSCORED = "lora_unet_"  # kohya's prefix; the dots of the layer's name are underscores too
PREFIX = re.compile(r"^(?:(?:generator_lora|base_model\.model|model|diffusion_model|pipe\.dit|dit)\.)*")
WRAPPERS = re.compile(r"_fsdp_wrapped_module\.|_checkpoint_wrapped_module\.|_orig_mod\.|(?<=^lora_unet_)_")
CRITIC = "critic_lora."  # of LongLive, beside generator_lora: a network that no student starts from
FACTOR = re.compile(r"(.+)\.(lora_A|lora_B|lora_down|lora_up|lora\.down|lora\.up)(?:\.(?!bias$)\w+)?(?:\.weight)?")
ALPHA = re.compile(r"(.+)\.(?:lora_)?alpha")
DIFFERENCE = re.compile(r"(.+)\.(diff|diff_b|diff_m|diff_param)")
DOWN = ("lora_A", "lora_down", "lora.down")
SHOWN = 5  # keys that a message lists


@dataclass(frozen=True)
class LowRank:
    """The change scale x up @ down of one layer's weight; the scale holds the adapter's factor."""

    file: Path
    down: str  # keys in the file
    up: str
    rank: int
    scale: float


@dataclass(frozen=True)
class AdapterFile:
    """One network's adapter in a file, or the sum of several, checked against the network by their headers alone."""

    name: str  # the files, their parts that this adapter is, and factors: equal names are equal adapters
    layers: Mapping[str, tuple[LowRank, ...]]  # by the network's name of the layer
    differences: Mapping[str, tuple[tuple[Path, str, float], ...]]  # file, key and factor, by the name of the weight

    def __add__(self, other: "AdapterFile") -> "AdapterFile":
        layers, differences = _joined(self.layers, other.layers), _joined(self.differences, other.differences)
        return AdapterFile(f"{self.name} + {other.name}", layers, differences)

    @property
    def changed(self) -> set[str]:
        """The names of the weights that `change` changes."""
        return {f"{layer}.weight" for layer in self.layers} | set(self.differences)

    def change(self, weight: str, shape: torch.Size, device: torch.device) -> Tensor:
        """Return what is added to a weight of the network, in float32; NotFiniteError if it is not finite."""
        total = torch.zeros(shape, device=device)
        layer = weight.removesuffix(".weight")
        if layer in self.layers:
            down, up = self.factors(layer, device)
            total += (up @ down).view(shape)
        for file, key, factor in self.differences.get(weight, ()):
            total += factor * _read(file, key, device)
        if not bool(total.isfinite().all()):
            raise NotFiniteError(f"{self.name}: the change of {weight} holds a value that is not finite")
        return total

    def factors(self, layer: str, device: torch.device, scale: float = 1.0) -> tuple[Tensor, Tensor]:
        """Return float32 factors of a layer, of adapters side by side, whose product times `scale` is its change."""
        own = self.layers[layer]
        downs = [_read(one.file, one.down, device).flatten(1) for one in own]
        ups = [one.scale / scale * _read(one.file, one.up, device).flatten(1) for one in own]
        return torch.cat(downs), torch.cat(ups, 1)


def _joined(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    return {key: (*first.get(key, ()), *second.get(key, ())) for key in {**first, **second}}


def _read(file: Path, key: str, device: torch.device) -> Tensor:
    with opened(file) as held:
        return held.get_tensor(key).to(device, torch.float32)


def open_adapter(
    place: Location, network: nn.Module, components: Sequence[str], published: Callable[[str], str | None]
) -> AdapterFile:
    """Read the header of an adapter and check it against a network, which may be without memory.

    `published` gives the name that a layer has in the family's published adapters. Raise UserError, with the first keys
    and their number, if keys fit no layer, lack their partner, or have other shapes than the network's weights.
    """
    names = _Names(network, published)
    with opened(place.file) as held:
        shapes = {key: tuple(held.get_slice(key).get_shape()) for key in held.offset_keys()}
        keys = _Keys.of(shapes, place, components, names)
        refuse_other_types(place.file, held, keys.read())
        several = [key for key in keys.alphas.values() if math.prod(shapes[key]) != 1]
        _refuse(place.file, several, "are alphas, but not one number")
        alphas = {layer: float(held.get_tensor(key)) for layer, key in keys.alphas.items()}
        header = held.metadata() or {}
    keys.check(place.file)
    _check_shapes(place.file, keys, shapes, names)
    said = sources(place.file, place.settings, header, keys.component, components)
    stated = [Statement.of(at, content, (keys.named, *names.kinds)) for at, content in said]
    if not alphas and not stated and (alpha := header.get("ss_network_alpha")) != header.get("ss_network_dim"):
        raise UserError(
            f"{place.file}: its header has ss_network_alpha {alpha}, but no key of the file is an alpha: write the "
            f'scale into a {FASTVIDEO_CONFIG} beside it, {{"lora_rank": RANK, "lora_alpha": ALPHA}}'
        )
    layers = {}
    for layer, pair in keys.factors.items():
        rank, alpha = shapes[pair["down"]][0], alphas.get(layer)
        scales = {one.place: one.scale(layer, rank, alpha) for one in stated}
        scales = scales or {"": 1.0 if alpha is None else alpha / rank}
        if not math.isclose(min(scales.values()), max(scales.values())):
            raise UserError(f"{layer} is scaled by {', but by '.join(f'{x:g} ({at})' for at, x in scales.items())}")
        scale = place.factor * next(iter(scales.values()))
        layers[layer] = (LowRank(place.file, pair["down"], pair["up"], rank, scale),)
    differences = {name: ((place.file, key, place.factor),) for name, key in keys.differences.items()}
    parts = (str(place.file.resolve()), place.component, str(place.factor) if place.factor != 1 else "")
    return AdapterFile(":".join(filter(None, parts)), layers, differences)


@dataclass
class _Keys:
    """The keys of a file by what they are of which layer or weight of the network."""

    component: str  # the network that the keys are of; "": they do not say
    factors: dict[str, dict[str, str]] = field(default_factory=dict)  # up and down of a layer
    alphas: dict[str, str] = field(default_factory=dict)
    differences: dict[str, str] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)
    twice: list[str] = field(default_factory=list)
    named: dict[str, str] = field(default_factory=dict)  # the file's names of its layers

    @classmethod
    def of(cls, keys: Collection[str], place: Location, components: Sequence[str], names: "_Names") -> "_Keys":
        """Sort the keys of one network; UserError if they are of two and none is named."""
        parts = [prefix for prefix in components if any(key.startswith(f"{prefix}.") for key in keys)]
        if not place.component and len(parts) > 1:
            raise UserError(f"{place.file} holds adapters of two networks, {' and '.join(parts)}, but one is wanted")
        kinds = cls(place.component or "".join(parts))
        for key in keys:
            inner = _inside(key, place.component, components)
            if inner is not None:  # else it is of the other expert
                kinds._add(key, inner, names)
        return kinds

    def _add(self, key: str, inner: str, names: "_Names") -> None:
        if (match := FACTOR.fullmatch(inner)) and (layer := names.layer(match[1])):
            pair = self.factors.setdefault(layer, {})
            self.named[layer] = match[1] if "." in match[1] else layer  # kohya's names have no dots
            if pair.setdefault("down" if match[2] in DOWN else "up", key) != key:
                self.twice.append(key)
        elif (match := ALPHA.fullmatch(inner)) and (layer := names.layer(match[1])):
            self.alphas[layer] = key
        elif (match := DIFFERENCE.fullmatch(inner)) and (weight := names.weight(match[1], match[2])):
            self.differences[weight] = key
        else:
            self.unknown.append(key)

    def read(self) -> list[str]:
        """Return the keys whose tensors are read."""
        factors = [key for pair in self.factors.values() for key in pair.values()]
        return [*factors, *self.alphas.values(), *self.differences.values()]

    def check(self, file: Path) -> None:
        """Raise UserError for keys that are of nothing, and for factors that are not a pair."""
        _refuse(file, self.unknown, "fit no layer of the network")
        _refuse(file, self.twice, "are further factors of a layer that has both")
        lonely = [self.alphas[layer] for layer in self.alphas.keys() - self.factors.keys()]
        _refuse(file, lonely, "are of layers without factors")
        alone = [key for pair in self.factors.values() if len(pair) == 1 for key in pair.values()]
        _refuse(file, alone, "lack the other factor of their layer")
        if not self.factors and not self.differences:
            raise UserError(f"{file} holds no adapter: no key such as lora_A.weight or lora_down.weight")


def _check_shapes(file: Path, keys: _Keys, shapes: Mapping[str, tuple[int, ...]], names: "_Names") -> None:
    """Raise UserError for factors and differences that do not have the shapes of the network's weights."""
    wrong = []
    for layer, pair in keys.factors.items():
        (rank, *width), (height, *inner_rank) = shapes[pair["down"]] or (0,), shapes[pair["up"]] or (0,)
        out, *rest = names.shapes[f"{layer}.weight"]
        if (height, math.prod(inner_rank), math.prod(width)) != (out, rank, math.prod(rest)):
            wrong.append(f"{pair['up']} {shapes[pair['up']]} x {shapes[pair['down']]} of {(out, *rest)}")
    for weight, key in keys.differences.items():
        if shapes[key] != names.shapes[weight]:
            wrong.append(f"{key} {shapes[key]} of {names.shapes[weight]}")
    _refuse(file, wrong, "have another shape than the network's weights")


class _Names:
    """A network's layers and weights by every name that a file may give them."""

    def __init__(self, network: nn.Module, published: Callable[[str], str | None]) -> None:
        self.shapes = {name: tuple(weight.shape) for name, weight in network.named_parameters()}
        self._names: dict[str, str] = {}
        own = dict.fromkeys(re.sub(r"\.(weight|bias)$", "", weight) for weight in self.shapes)
        self.kinds = [{name: name for name in own}, {name: published(name) or name for name in own}]
        for kind in self.kinds:
            for name, alias in kind.items():
                self._names[alias] = self._names[f"{UNDERSCORED}{alias.replace('.', '_')}"] = name

    def layer(self, name: str) -> str | None:
        """Return the layer that has a weight of two or more axes and this name."""
        own_name = self._names.get(name)
        return own_name if own_name and len(self.shapes.get(f"{own_name}.weight", ())) > 1 else None

    def weight(self, name: str, kind: str) -> str | None:
        """Return the weight that a difference of this kind changes."""
        own = self._names.get(f"{name}.modulation" if kind == "diff_m" else name)
        wanted = {"diff": (f"{own}.weight", own), "diff_b": (f"{own}.bias",)}.get(kind, (own,))
        return next((key for key in wanted if key in self.shapes), None)


def _inside(key: str, component: str, components: Sequence[str]) -> str | None:
    """Return a key without the prefix of its component, or None if it is another component's."""
    key = WRAPPERS.sub("", key)
    for prefix in components:
        if key.startswith(f"{prefix}."):
            return key.removeprefix(f"{prefix}.") if component in ("", prefix) else None
    return None if key.startswith(CRITIC) else PREFIX.sub("", key, count=1)


def _refuse(file: Path, keys: Sequence[str], what: str) -> None:
    if keys:
        more = f" and {len(keys) - SHOWN} more" if len(keys) > SHOWN else ""
        raise UserError(f"{file}: {len(keys)} keys {what}: {', '.join(sorted(keys)[:SHOWN])}{more}")


def diffusers_adapter(weights: Mapping[str, Tensor], alpha: float) -> dict[str, Tensor]:
    """Rename an adapter's weights, given by peft's names, to those that diffusers reads for a component `transformer`.

    Such a file has no alpha: B is multiplied by alpha / rank. All tensors are on the CPU in float32.
    """
    named = {}
    for key, weight in weights.items():
        scale = alpha / weight.shape[1] if ".lora_B." in key else 1.0
        named[f"transformer.{key}"] = scale * weight.detach().float().cpu().contiguous()
    return named
