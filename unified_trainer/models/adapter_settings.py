"""The settings of an adapter made elsewhere: each field is used, changes nothing, or is refused by name.

They lie beside the weights, in peft's adapter_config.json or FastVideo's lora_config.json, or in the header of the
weights' file. What several of them state must agree.
"""

import json
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.input_files import Schema, checked, parse_object, read_json

PEFT_CONFIG, FASTVIDEO_CONFIG = "adapter_config.json", "lora_config.json"
DIFFUSERS_CONFIG = "lora_adapter_metadata"  # in the header: peft's fields behind the names of components
PEFT_DEFAULTS = {"r": 8, "lora_alpha": 8}

# What becomes of the fields of peft's LoraConfig that are not in `AdapterSettings`.
FREE = (  # of training, of the base, or read with a refused field alone: any value
    "task_type auto_mapping peft_version base_model_name_or_path revision inference_mode lora_dropout fan_in_fan_out "
    "megatron_core loftq_config eva_config corda_config lora_ga_config qalora_group_size runtime_config"
)
ONLY = {  # these values alone
    "peft_type": ("LORA",),
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal", "mica"),  # others change the base's weights
}
OFF = (  # None, False or empty alone, as every field that is not known
    "modules_to_save megatron_config trainable_token_indices use_dora velora_config alora_invocation_tokens use_qalora "
    "monteclora_config layer_replication lora_bias target_parameters use_bdlora arrow_config kasa_config "
    "ensure_weight_tying"
)
PLAIN = dict.fromkeys(("rank", "lora_rank", "network_dim"), "r") | dict.fromkeys(
    ("alpha", "network_alpha"), "lora_alpha"
)
OF_TRAINING = {"step", "epoch", "target_modules", "lora_target_modules"}  # in lora_config.json: all keys are read
Names = Sequence[Mapping[str, str]]  # a network's layers by several kinds of names, those of the file first


class AdapterSettings(Schema):
    """The fields of peft's LoraConfig that decide what is added to which layer; None states nothing."""

    r: int | None = Field(None, ge=1)
    lora_alpha: float | None = None
    use_rslora: bool = False
    rank_pattern: dict[str, int] | None = None  # by regular expressions of layers
    alpha_pattern: dict[str, float] | None = None
    target_modules: str | list[str] | None = None  # a regular expression, or ends of names
    exclude_modules: str | list[str] | None = None
    layers_to_transform: int | list[int] | None = None
    layers_pattern: str | list[str] | None = None


@dataclass(frozen=True)
class Statement:
    """A source of settings: the rank and alpha that it states for each layer."""

    place: str  # the file, or its header
    settings: AdapterSettings
    ranks: Mapping[str, int]  # of layers that a pattern names
    alphas: Mapping[str, float]

    @classmethod
    def of(cls, place: str, content: Mapping[str, Any], names: Names) -> "Statement":
        """Check every field; UserError, naming it, if the adapter may be more than a low-rank change of its layers."""
        for key, value in content.items():
            free = key in FREE.split() or key in AdapterSettings.model_fields
            if value and not free and value not in ONLY.get(key, ()):
                raise UserError(
                    f"{place}: {key} is {value!r}: such an adapter is not, or may not be, a low-rank change of its "
                    "layers alone. Merge it with the program that wrote it, and start from the merged network"
                )
        settings = checked(AdapterSettings, content, place)
        try:
            patterns = (settings.rank_pattern, "rank_pattern"), (settings.alpha_pattern, "alpha_pattern")
            ranks, alphas = (_by_layer(pattern or {}, names, f"{place}: {key}") for pattern, key in patterns)
            left = _unselected(settings, names)
        except re.error as error:
            raise UserError(f"{place}: {error.pattern!r} is no pattern of layers: {error}") from error
        if left:
            raise UserError(
                f"{place}: target_modules, exclude_modules and layers_to_transform leave out {len(left)} layers of "
                f"the file, which peft would drop: {', '.join(sorted(left)[:5])}"
            )
        return cls(place, settings, ranks, alphas)

    def scale(self, layer: str, rank: int, alpha: float | None) -> float:
        """Return alpha / rank of a layer, or alpha / sqrt(rank); `alpha` is that of a key of the file."""
        stated = self.ranks.get(layer, self.settings.r)
        if stated not in (None, rank):
            field = "rank_pattern" if layer in self.ranks else "r"
            raise UserError(f"{self.place}: {layer} has rank {rank}, but the adapter's settings say {stated} ({field})")
        own = self.alphas.get(layer, self.settings.lora_alpha)
        if own is None:
            own = rank if alpha is None else alpha
        elif alpha is not None and not math.isclose(own, alpha, rel_tol=1e-2):  # keys may be bf16
            raise UserError(f"{self.place}: alpha of {layer} is {own:g}, but {alpha:g} by its key in the file")
        return own / (math.sqrt(rank) if self.settings.use_rslora else rank)


def _by_layer(pattern: Mapping[str, Any], names: Names, place: str) -> dict[str, Any]:
    """Return the value of the first pattern that fits a layer, by the first kind of names that the pattern fits."""
    values: dict[str, Any] = {}
    for key, value in pattern.items():
        fits = re.compile(rf"(.*\.)?({key})").fullmatch
        hits = ([layer for layer, name in kind.items() if fits(name)] for kind in names)
        if not (hit := next(filter(None, hits), None)):
            raise UserError(f"{place} names {key!r}, but no layer of the network has this name")
        values |= {layer: value for layer in hit if layer not in values}
    return values


def _unselected(settings: AdapterSettings, names: Names) -> Collection[str]:
    """Return the layers of the file that peft would not read, by the kind of names that selects most of them."""
    if settings.target_modules in (None, "all-linear"):
        if not settings.exclude_modules:
            return ()
        settings = settings.model_copy(update={"target_modules": ".*"})
    from peft.tuners.tuners_utils import check_target_module_exists as selects  # seconds to import

    return min(([x for x in names[0] if not selects(settings, kind.get(x, x))] for kind in names), key=len)


def sources(
    file: Path, beside: Sequence[Path], header: Mapping[str, str], component: str, components: Collection[str]
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the settings beside a file and in its header, those of one of the networks that it may be of."""
    for config in beside:
        content = read_json(config)
        if config.name == PEFT_CONFIG:
            yield str(config), PEFT_DEFAULTS | content
            continue
        if isinstance(content.get("lora_params"), dict):
            content |= content.pop("lora_params")
        yield str(config), {PLAIN.get(key, key): value for key, value in content.items() if key not in OF_TRAINING}
    if DIFFUSERS_CONFIG in header:
        place, own = f"{file}: {DIFFUSERS_CONFIG} in its header", dict(PEFT_DEFAULTS)
        for key, value in parse_object(header[DIFFUSERS_CONFIG], place).items():
            part, _, name = key.rpartition(".")
            if part not in ("", *components):
                raise UserError(f"{place}: {key} is of a network {part}; here they are {' and '.join(components)}")
            own |= {name: value} if part in ("", component) or not component else {}
        yield place, own
    read = {*ONLY, *OFF.split(), *AdapterSettings.model_fields} - OF_TRAINING
    if plain := {name: _value(text) for key, text in header.items() if (name := PLAIN.get(key, key)) in read}:
        yield f"{file}: its header", plain


def _value(text: str) -> Any:
    words = {"none": None, "true": True, "false": False}
    try:
        return words[text.lower()] if text.lower() in words else json.loads(text)
    except ValueError:
        return text
