"""Adapters made elsewhere, for the networks of a role: found and checked before any weight of the base is read."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from torch import nn

from unified_trainer.models.adapter_file import AdapterFile, open_adapter
from unified_trainer.models.adapter_location import Location, checksum, locate
from unified_trainer.roles.adapter import AdapterConfig
from unified_trainer.roles.experts import Expert, ExpertLayout
from unified_trainer.roles.role import Role, RoleConfig, Trainable, TrainableConfig
from unified_trainer.run.registry import family_of, open_model
from unified_trainer.run.settings.config import ConfigError


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
    places: dict[Expert, Location] = {}
    files: dict[Expert, AdapterFile] = {}
    networks: dict[Expert, nn.Module] = {}
    for expert, (key, source) in sources.items():
        number = ("high", "low").index(expert) if expert and key == f"{name}.adapter.path" else None
        places[expert] = locate(Path(source), key, number, family.experts, family.adapter_files)
        component = layout.components[expert]
        networks[expert] = open_model(
            name, path, component, causal=False, sparse=config.sparse, flow_map=config.is_flow_map
        ).network
        files[expert] = open_adapter(places[expert], networks[expert], family.experts, family.published_layer)
    config = _with_checksum(name, config, places.values())
    starts = {expert: files[expert] for expert in trained}
    if starts and isinstance(config, TrainableConfig):
        config = replace(config, adapter=_of_files(name, config.adapter, starts, networks))
    merged = {expert: file for expert, file in files.items() if expert not in trained}
    return RoleAdapters(config, merged, starts if starting and issubclass(kind, Trainable) else {})


def _sources(name: str, config: RoleConfig, layout: ExpertLayout) -> dict[Expert, tuple[str, str]]:
    """Return the setting and the path of the adapter of each network that has one."""
    role = (f"{name}.adapter.path", config.adapter.path)
    given = {
        expert: (f"{name}.{expert}.adapter.path", source.adapter.path) for expert, source in config.experts.items()
    }
    if layout.boundary is None:
        if named := [key for key, path in given.values() if path]:
            raise ConfigError(f"{named[0]} is for a role with two experts, but {name} is one network: use {role[0]}")
        return {"": role} if role[1] else {}
    sources = {expert: source if source[1] else role for expert, source in given.items()}
    return {expert: (key, path) for expert, (key, path) in sources.items() if path}


def _with_checksum(name: str, config: RoleConfig, places: Iterable[Location]) -> RoleConfig:
    """Return the settings with the checksum of the files; ConfigError if they have another one."""
    files = dict.fromkeys(file for place in places for file in place.files)
    digest = checksum(list(files))
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

    Layers whose scales differ keep them in their weights: the settings then scale by 1, unless they name an alpha.
    """
    merge = f"set {name}.adapter.merge to add it to the weights instead"
    for file in files.values():
        if file.differences:
            raise ConfigError(
                f"{file.file} also holds differences of whole weights ({min(file.differences.values())}), which no "
                f"adapter can train on: {merge}"
            )
    every = [layer for file in files.values() for layer in file.layers.values()]
    ranks, scales = {layer.rank for layer in every}, {layer.scale for layer in every}
    shown = ", ".join(str(file.file) for file in files.values())
    if len(ranks) > 1:
        raise ConfigError(f"{shown}: layers have different ranks ({', '.join(map(str, sorted(ranks)))}); {merge}")
    rank = ranks.pop()
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
                    f"{name}.adapter.layers {' '.join(config.layers)} are not those of {file.file}: leave them out"
                )
    return replace(config, rank=rank, alpha=config.alpha or alpha or float(rank), layers=config.layers or layers[0])


def _short_names(file: AdapterFile, network: nn.Module, merge: str) -> tuple[str, ...]:
    """Return the shortest ends of names that select exactly the layers of a file."""
    names: dict[str, None] = {}
    for layer in file.layers:
        if not isinstance(network.get_submodule(layer), nn.Linear):
            raise ConfigError(f"{file.file}: {layer} is no linear layer, so it cannot be trained on; {merge}")
        parts = layer.split(".")
        ends = (".".join(parts[i:]) for i in reversed(range(len(parts))) if not parts[i].isdigit() or not i)
        names[next((end for end in ends if _ending(end, network) <= file.layers.keys()), layer)] = None
    return tuple(sorted(names))


def _ending(end: str, network: nn.Module) -> set[str]:
    """Return the linear layers whose names are, or end in, these words."""
    layers = (key for key, module in network.named_modules() if isinstance(module, nn.Linear))
    return {key for key in layers if f".{key}".endswith(f".{end}")}
