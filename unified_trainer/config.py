"""The settings of a run: a frozen typed tree, read from a recipe, a saved file and flags, in that order."""

import dataclasses
import difflib
import functools
import math
import os
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import tyro
import yaml

from unified_trainer import renamed
from unified_trainer.data.clips import DataConfig, VideoConfig
from unified_trainer.errors import UserError
from unified_trainer.methods.base import DeclarationError, Method, MethodConfig, place_of
from unified_trainer.parallel.device import Device
from unified_trainer.parallel.mesh import ParallelConfig
from unified_trainer.rewards.hacking_monitor import HackingMonitorConfig
from unified_trainer.roles.reward import RewardConfig, ScorerConfig
from unified_trainer.roles.role import RoleConfig
from unified_trainer.sampling import SamplerConfig

Run = TypeVar("Run", bound="RunConfig | _RewardFile")
MethodNamed = Callable[[str], type[Method]]  # from the name of --method
SamplerOf = Callable[[str], Mapping[str, Any] | None]  # the sampler that the checkpoint of --init-from was trained for
RECIPES = Path(__file__).parent / "recipes"
# Flags that say where a run is read from and written to; a saved config leaves them out.
PATH_KEYS = ("config", "resume", "output", "allow")
# Settings that may differ when a run is resumed: they do not change what a step computes.
RESUMABLE_KEYS = (
    "steps",
    "checkpoint_every",
    "validate_every",
    "keep_last",
    "keep_best",
    "best_metric",
    "best_is",
    "async_save",
    "validation",
    "hacking_monitor",
    "tracking",
    "video.fps",
    "parallel",
    "algorithm.micro_batch",
    "algorithm.rollout_batch",
    "algorithm.update_batch",
)


class ConfigError(UserError):
    """A wrong setting; the message names the key and the way out."""


@dataclass(frozen=True)
class ValidationConfig:
    num_samples: int = 48
    """Videos generated and scored at each validation, from fixed prompts and noise."""
    batch: int = 48
    """Samples generated at a time."""
    seed: int = 1000
    """Seed of the noise."""
    frechet_stride: int = 4
    """Frames between two that enter the Frechet distance, which is measured in the tiny world only."""
    prompts: Path | None = None
    """File with one prompt per line, or a .jsonl or .parquet file; by default tiny-world captions that are not trained
    on."""
    prompts_column: str = ""
    """Column of a .jsonl or .parquet file of prompts; by default prompt, caption or text."""
    num_videos: int = 4
    """Samples written as mp4 and on the contact sheet."""
    ema: bool = True
    """Sample with the EMA weights if the student keeps any."""


@dataclass(frozen=True)
class TrackingConfig:
    tensorboard: bool = False
    """Also write TensorBoard events into the run directory."""
    wandb: Literal["off", "online", "offline"] = "off"
    """Also log to Weights & Biases."""
    wandb_project: str = "unified-trainer"
    """Project on Weights & Biases."""
    wandb_entity: str = ""
    """User or team that owns the project; empty is your default."""
    wandb_group: str = ""
    """Group of runs that this one belongs to."""
    wandb_tags: tuple[str, ...] = ()
    """Tags of the run."""
    wandb_name: str = ""
    """Name of the run; empty takes that of the run directory."""
    custom: tuple[str, ...] = ()
    """Trackers of your own, each path/to/file.py:Class or package.module:Class derived from
    unified_trainer.trackers.ExternalTracker."""


@dataclass(frozen=True)
class RunConfig:
    """The settings of every run; `run_class` adds those of a method and of its roles."""

    method: str = "dance_grpo"
    """Method: a name, or path/to/file.py:Class or package.module:Class of your own."""
    recipe: str = "tiny"
    """Settings for a model: a name in unified_trainer/recipes."""
    config: Path | None = None
    """Saved config.yaml to start from."""
    steps: int = 60
    """Training steps; one is a rollout with its updates, or one update."""
    seed: int = 0
    """Seed of all random numbers."""
    output: Path | None = None
    """Run directory; runs/METHOD-N by default."""
    resume: Path | None = None
    """Run directory to continue."""
    allow: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Setting in which --resume may differ from the saved run; repeatable."""
    init_from: str | None = None
    """RUN[@step][:ema]: a run whose newest checkpoint, or that step's, gives the weights of the trained roles; with
    :ema their EMA weights."""
    checkpoint_every: int = 20
    """Training steps between checkpoints; the last step is always saved, and 0 saves no other."""
    async_save: bool = False
    """Write checkpoints from a copy in CPU memory while training goes on."""
    keep_last: int = 2
    """Newest checkpoints kept."""
    keep_best: int = 0
    """Best checkpoints kept besides, among those saved after a validation."""
    best_metric: str = "reward"
    """Validation metric that ranks them."""
    best_is: Literal["highest", "lowest"] = "highest"
    """Order of that metric."""
    validate_every: int = 10
    """Training steps between validations; one runs before the first step and after the last too. 0 is never."""
    prompts: Path | None = None
    """File with one training prompt per line, or a .jsonl or .parquet file, instead of the built-in prompts."""
    prompts_column: str = ""
    """Column of a .jsonl or .parquet file of prompts; by default prompt, caption or text."""
    device: Device = "auto"
    """Device to run on."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    video: VideoConfig = field(default_factory=VideoConfig)
    sampler: SamplerConfig = field(default_factory=SamplerConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    data: DataConfig = field(default_factory=DataConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    hacking_monitor: HackingMonitorConfig = field(default_factory=HackingMonitorConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    algorithm: MethodConfig = field(default_factory=MethodConfig)

    @property
    def roles(self) -> dict[str, RoleConfig]:
        """Settings of the method's roles by name, of those that have settings of their own."""
        own = {f.name for f in dataclasses.fields(self)} - {f.name for f in dataclasses.fields(RunConfig)}
        return {name: config for name, config in vars(self).items() if name in own}


@functools.cache
def run_class(method: type[Method]) -> type[RunConfig]:
    """Return the class of a method's settings: those of every run, of the method, and of each of its roles.

    DeclarationError if a role has the name of a setting.
    """
    taken = {f.name for f in dataclasses.fields(RunConfig)}
    if both := sorted(taken & method.roles.keys()):
        raise DeclarationError(
            f"{place_of(method)}: method {method.__name__} cannot call a role {both[0]!r}: that is a run's setting"
        )
    sections = {"algorithm": method.config_class}
    sections |= {name: spec.config_class for name, spec in method.roles.items() if spec.config_class}
    fields = [(name, kind, field(default_factory=kind)) for name, kind in sections.items()]
    return dataclasses.make_dataclass("RunConfig", fields, bases=(RunConfig,), frozen=True)


def parse(argv: Sequence[str], method_named: MethodNamed, trained_sampler_of: SamplerOf) -> RunConfig:
    """Return the run that the command line asks for; exit with code 2 and one message on a wrong key or value.

    `trained_sampler_of` gives the sampler that the checkpoint of --init-from was trained for, if any: it overrides the
    recipe, and flags override it.
    """
    sources = _Sources.read(argv)
    saved = _flat(load_yaml(sources.saved)) if sources.saved else {}
    name = sources.method or saved.get("method", "dance_grpo")
    if saved and saved.get("method", name) != name:
        raise ConfigError(f"{sources.saved} is a run of {saved['method']}, not of {name}: leave --method out")
    method = method_named(name)
    kind = run_class(method)
    known = _flat(plain(kind()))
    recipe = sources.recipe or saved.get("recipe", "tiny")
    must_know("recipe", recipe, [path.stem for path in sorted(RECIPES.glob("*.yaml"))])
    sampler = trained_sampler_of(sources.init_from) if sources.init_from else None
    sections = load_yaml(RECIPES / f"{recipe}.yaml")
    layers = {
        f"recipe {recipe}": {**sections.get("common", {}), "method": name, "recipe": recipe},
        f"recipe {recipe}, {name}": sections.get(name, {}),
        f"--init-from {sources.init_from}": {"sampler": sampler} if sampler else {},
        str(sources.saved): renamed.translate_settings(saved, name, known),
    }
    run = kind()
    for origin, layer in layers.items():
        run = _apply(kind, run, _flags(layer), origin)
    _refuse_renamed(argv, name, known)
    run = _apply(kind, run, list(argv), "")
    for key, value in _flat(plain(run)).items():
        if any(isinstance(one, float) and math.isnan(one) for one in (value if isinstance(value, list) else [value])):
            raise ConfigError(f"{key} is {value}: give a number")
    return run


@dataclass(frozen=True)
class _RewardFile:
    reward: RewardConfig = field(default_factory=RewardConfig)


def read_reward(file: Path) -> RewardConfig:
    """Return the section `reward` of a YAML file; exit with code 2 on a wrong key or value."""
    if not file.is_file():
        raise ConfigError(f"--reward {file}: no such file")
    section = load_yaml(file).get("reward")
    if not isinstance(section, dict):
        raise ConfigError(f"--reward {file} must hold a section reward, as in a recipe")
    return _apply(_RewardFile, _RewardFile(), _flags({"reward": section}), str(file)).reward


def save(run: RunConfig, file: Path) -> None:
    """Write the resolved settings atomically; --config FILE runs them again."""
    building = file.with_suffix(".tmp")
    with building.open("w", encoding="utf-8") as opened:
        yaml.safe_dump(plain(run), opened, sort_keys=False)
        opened.flush()
        os.fsync(opened.fileno())
    building.replace(file)


def plain(run: RunConfig) -> dict[str, Any]:
    """Return the settings as nested dicts of plain values, without the flags that only name places."""

    def convert(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: convert(inner) for key, inner in value.items()}
        if isinstance(value, tuple):
            return [convert(inner) for inner in value]
        return str(value) if isinstance(value, Path) else value

    return {key: value for key, value in convert(dataclasses.asdict(run)).items() if key not in PATH_KEYS}


def check_resumable(run: RunConfig, file: Path) -> list[str]:
    """Return every setting that differs from the saved run's, in words.

    ConfigError if one would change what a step computes, unless --allow names it.
    """
    new, defaults = _flat(plain(run)), _flat(plain(type(run)()))
    old = renamed.translate_settings(_flat(load_yaml(file)), run.method, defaults)
    old = {key: value for key, value in defaults.items() if key in new} | old  # a setting newer than the saved file
    keys = sorted(old.keys() | new.keys())
    changed = {key: f"{key}: {old.get(key)!r} -> {new.get(key)!r}" for key in keys if old.get(key) != new.get(key)}
    allowed = {key.replace("-", "_") for key in run.allow}
    if unknown := sorted(allowed - changed.keys()):
        raise ConfigError(f"--allow {unknown[0]}: this setting does not differ from that of --resume {file.parent}")
    refused = {key: words for key, words in changed.items() if not _is_resumable(key) and key not in allowed}
    if refused:
        raise ConfigError(
            f"--resume {file.parent} cannot change {'; '.join(refused.values())}. Leave these flags out, add "
            f"{' '.join(f'--allow {key}' for key in refused)}, or start a new run with --init-from {file.parent}"
        )
    return list(changed.values())


def must_know(what: str, name: str, known: Sequence[str]) -> None:
    """Raise ConfigError, with the nearest known name, unless `name` is known."""
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
        hint = f"; did you mean {near[0]}?" if near else "."
        flag = what if what == "command" else f"--{what}"
        raise ConfigError(f"{flag} {name!r} is not known{hint} Have: {', '.join(known)}")


def _is_resumable(key: str) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in RESUMABLE_KEYS)


def _refuse_renamed(argv: Sequence[str], method: str, known: Collection[str]) -> None:
    """Raise ConfigError, with the new name, for a flag of an earlier version."""
    for word in argv:
        if word.startswith("--"):
            flag = word.partition("=")[0]
            key = flag.removeprefix("--").replace("-", "_")
            new = key if key in known else renamed.new_setting(key, method)
            if new is None:
                raise ConfigError(f"{flag} was removed: a role that is not trained keeps no activations; leave it out")
            if new != key:
                raise ConfigError(f"{flag}: renamed to --{new.replace('_', '-')}{renamed.UNITS.get(key, '')}")


@dataclass(frozen=True)
class _Sources:
    """The flags that decide which settings exist, read before the rest."""

    method: str | None
    recipe: str | None
    saved: Path | None
    init_from: str | None

    @classmethod
    def read(cls, argv: Sequence[str]) -> "_Sources":
        found: dict[str, str] = {}
        for position, word in enumerate(argv):
            name, equals, value = word.partition("=")
            if name in ("--method", "--recipe", "--config", "--resume", "--init-from", "--init_from"):
                if not equals:
                    value = argv[position + 1] if position + 1 < len(argv) else ""
                found[name] = value
        if "--config" in found and "--resume" in found:
            raise ConfigError("--config and --resume exclude each other: a resumed run has its config")
        saved = None
        if "--resume" in found:
            saved = Path(found["--resume"]) / "config.yaml"
            if not saved.is_file():
                raise ConfigError(f"--resume {found['--resume']}: no config.yaml there, so it is not a run directory")
        elif "--config" in found:
            saved = Path(found["--config"])
            if not saved.is_file():
                raise ConfigError(f"--config {saved}: no such file")
        init_from = found.get("--init-from") or found.get("--init_from")
        return cls(found.get("--method"), found.get("--recipe"), saved, init_from)


def _apply(kind: Any, run: Run, flags: list[str], origin: str) -> Run:
    """Apply flags to the settings; tyro explains what it refuses and exits with code 2."""
    try:
        return tyro.cli(
            kind,
            args=flags,
            default=_with_scorers(run, flags),
            prog="python -m unified_trainer",
            config=(tyro.conf.FlagConversionOff,),
        )
    except SystemExit as stop:
        if origin and stop.code:
            sys.stderr.write(f"(the settings above come from {origin})\n")
        raise


def _with_scorers(run: Run, flags: Sequence[str]) -> Run:
    """Add every scorer that a flag names, --reward.scorers.NAME.weight, so that tyro knows its settings."""
    named = [re.match(r"--reward\.scorers\.([\w-]+)\.", flag) for flag in flags]
    scorers = {match[1].replace("-", "_"): ScorerConfig() for match in named if match}
    return dataclasses.replace(run, reward=dataclasses.replace(run.reward, scorers=scorers | run.reward.scorers))


def load_yaml(file: Path) -> dict[str, Any]:
    """Return the mapping that a YAML file holds; ConfigError names the file otherwise."""
    try:
        loaded = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not valid YAML: {error}") from error
    if not isinstance(loaded, dict):
        raise ConfigError(f"{file} must hold keys and values, not a {type(loaded).__name__}")
    return loaded


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


def _flags(tree: Mapping[str, Any]) -> list[str]:
    """Write settings as flags, so that files and flags are checked by one parser."""
    flags: list[str] = []
    for key, value in _flat(tree).items():
        flags.append(f"--{key}")
        flags += [str(item) for item in value] if isinstance(value, list) else [str(value)]
    return flags
