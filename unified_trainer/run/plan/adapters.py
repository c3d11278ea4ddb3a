"""Adapters made elsewhere, for the networks of a role: found and checked before any weight of the base is read."""

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import add
from pathlib import Path

from torch import nn

from unified_trainer.models.adapter_file import AdapterFile, open_adapter
from unified_trainer.models.adapter_location import Location, checksum, locate
from unified_trainer.models.base import Family
from unified_trainer.roles.adapter import AdapterConfig, FrozenExpertConfig
from unified_trainer.roles.experts import Expert, ExpertLayout
from unified_trainer.roles.role import Role, RoleConfig, Trainable, TrainableConfig
from unified_trainer.run.registry import family_of, open_model
from unified_trainer.run.settings.config import ConfigError

FACTOR = re.compile(r"(.+):([-+]?\d*\.?\d+(?:[eE][-+]?\d{1,2})?)")  # a path, and a factor after a colon


@dataclass(frozen=True)
class RoleAdapters:
    """The adapters of a role's networks, and its settings with what their files decide filled in."""

    config: RoleConfig
    merged: Mapping[Expert, AdapterFile] = field(default_factory=dict)  # added to the weights of the base
    starts: Mapping[Expert, AdapterFile] = field(default_factory=dict)  # trained on


def adapters_of(
    name: str, kind: type[Role], config: RoleConfig, path: str, layout: ExpertLayout, *, starting: bool
) -> RoleAdapters:
    """Return the adapters that a role's settings name, for its networks in the folder `path`.

    The adapter of a network that is not trained is merged, that of a trained one if the settings say so. Without
    `starting`, the weights of the role come from a checkpoint, and an adapter that is not merged is not read. Raise
    UserError, naming the key or the file, for settings or files that contradict each other or the network.
    """
    sources = _sources(name, config, layout)
    if not sources:
        if config.adapter.sha256 or (isinstance(config, TrainableConfig) and config.adapter.merge):
            raise ConfigError(f"{name}.adapter.sha256 and merge are for an adapter made elsewhere: set its path")
        return RoleAdapters(config)
    kept = isinstance(config, TrainableConfig) and not config.adapter.merge
    trained = {expert for expert in sources if kept and expert in layout.trained}
    if not starting and not sources.keys() - trained:
        return RoleAdapters(config)
    family, _ = family_of(name, path)
    places: list[Location] = []
    files: dict[Expert, AdapterFile] = {}
    networks: dict[Expert, nn.Module] = {}
    for expert, (key, texts) in sources.items():
        number = ("high", "low").index(expert) if expert and key.startswith(f"{name}.adapter") else None
        component = layout.components[expert]
        networks[expert] = open_model(name, path, component, causal=False, config=config).network
        names = (networks[expert], family.experts, family.published_layer)
        own = [place_of(key, text, number, family) for text in texts]
        files[expert] = reduce(add, (open_adapter(place, *names) for place in own))
        places += own
    config = _with_checksum(name, config, places)
    starts = {expert: files[expert] for expert in trained}
    if starts and isinstance(config, TrainableConfig):
        config = replace(config, adapter=_of_files(name, config.adapter, starts, networks))
    merged = {expert: file for expert, file in files.items() if expert not in trained}
    return RoleAdapters(config, merged, starts if starting and issubclass(kind, Trainable) else {})


def _sources(name: str, config: RoleConfig, layout: ExpertLayout) -> dict[Expert, tuple[str, tuple[str, ...]]]:
    """Return the setting and the adapters of each network that has some."""
    role = _named(name, config)
    given = {expert: _named(f"{name}.{expert}", own) for expert, own in config.experts.items()}
    if layout.boundary is None:
        if named := [key for key, texts in given.values() if texts]:
            raise ConfigError(f"{named[0]} is for a role with two experts, but {name} is one network: use {role[0]}")
        return {"": role} if role[1] else {}
    sources = {expert: source if source[1] else role for expert, source in given.items()}
    return {expert: (key, texts) for expert, (key, texts) in sources.items() if texts}


def _named(at: str, config: RoleConfig | FrozenExpertConfig) -> tuple[str, tuple[str, ...]]:
    """Return the setting, of two, that names adapters, and these."""
    if config.adapter.path and config.adapters:
        raise ConfigError(f"{at}.adapter.path and {at}.adapters both name adapters: put all into {at}.adapters")
    path = config.adapter.path
    return (f"{at}.adapters", config.adapters) if config.adapters else (f"{at}.adapter.path", (path,) if path else ())


def place_of(key: str, text: str, expert: int | None, family: Family) -> Location:
    """Return the location of an adapter and the factor after its colon, which is 1 without one."""
    parts = None if os.path.exists(text) else FACTOR.fullmatch(text)
    path, factor = parts.groups() if parts else (text, "1")
    return replace(locate(Path(path), key, expert, family.experts, family.adapter_files), factor=float(factor))


def _with_checksum(name: str, config: RoleConfig, places: Sequence[Location]) -> RoleConfig:
    """Return the settings with the checksum of the files and their factors; ConfigError if they have another one."""
    files = dict.fromkeys(file for place in places for file in place.files)
    digest = checksum(list(files)) + "".join(f":{place.factor:g}" for place in places if place.factor != 1)
    if config.adapter.sha256 not in ("", digest):
        raise ConfigError(
            f"{name}.adapter: {', '.join(map(str, files))} changed: SHA-256 is {digest}, but {name}.adapter.sha256 is "
            f"{config.adapter.sha256}. Restore the files, or start a new run with --{name}.adapter.sha256 ''"
        )
    return replace(config, adapter=replace(config.adapter, sha256=digest))


def _of_files(
    name: str, config: AdapterConfig, files: Mapping[Expert, AdapterFile], networks: Mapping[Expert, nn.Module]
) -> AdapterConfig:
    """Return the settings of an adapter that is trained on, from its files; ConfigError if they contradict each other.

    Layers whose scales differ keep them in their weights: the settings then scale by 1, unless they name an alpha. The
    rank is the largest.
    """
    merge = f"set {name}.adapter.merge to add it to the weights instead"
    for file in files.values():
        for (path, key, _), *_ in file.differences.values():
            raise ConfigError(f"{path} also holds differences of whole weights ({key}), which are not trained: {merge}")
    every = [changes for file in files.values() for changes in file.layers.values()]
    scales = {change.scale for changes in every for change in changes}
    shown = ", ".join(file.name for file in files.values())
    rank = max(sum(change.rank for change in changes) for changes in every)
    alpha = rank * scales.pop() if len(scales) == 1 else 0.0  # 0: any
    if config.rank not in (0, rank):
        raise ConfigError(
            f"{name}.adapter.rank is {config.rank}, but {shown} has rank {rank}: leave it out; to train a new "
            f"adapter of rank {config.rank}, set {name}.adapter.merge"
        )
    if config.alpha and alpha and not math.isclose(config.alpha, alpha):
        raise ConfigError(f"{name}.adapter.alpha is {config.alpha:g}, but {shown} has alpha {alpha:g}: leave it out")
    layers = [_short_names(file, networks[expert], merge) for expert, file in files.items()]
    if len({frozenset(one) for one in layers}) > 1:
        raise ConfigError(f"{shown}: the adapters of the two experts are on different layers; {merge}")
    if config.layers:
        for expert, file in files.items():
            if {layer for one in config.layers for layer in _ending(one, networks[expert])} != file.layers.keys():
                raise ConfigError(
                    f"{name}.adapter.layers {' '.join(config.layers)} are not those of {file.name}: leave them out"
                )
    return replace(config, rank=rank, alpha=config.alpha or alpha or float(rank), layers=config.layers or layers[0])


def _short_names(file: AdapterFile, network: nn.Module, merge: str) -> tuple[str, ...]:
    """Return the shortest ends of names that select exactly the layers of a file."""
    names: dict[str, None] = {}
    for layer in file.layers:
        if not isinstance(network.get_submodule(layer), nn.Linear):
            raise ConfigError(f"{file.name}: {layer} is no linear layer, so it cannot be trained on; {merge}")
        parts = layer.split(".")
        ends = (".".join(parts[i:]) for i in reversed(range(len(parts))) if not parts[i].isdigit() or not i)
        names[next((end for end in ends if _ending(end, network) <= file.layers.keys()), layer)] = None
    return tuple(sorted(names))


def _ending(end: str, network: nn.Module) -> set[str]:
    """Return the linear layers whose names are, or end in, these words."""
    layers = (key for key, module in network.named_modules() if isinstance(module, nn.Linear))
    return {key for key in layers if f".{key}".endswith(f".{end}")}
