"""The frozen typed tree of a run, read from a recipe, a saved file and flags, in that order."""

import dataclasses
import difflib
import math
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import tyro
import yaml

from unified_trainer.data.clips import DataConfig, VideoConfig
from unified_trainer.parallel.device import Device
from unified_trainer.parallel.mesh import ParallelConfig
from unified_trainer.rewards.hacking_monitor import HackingMonitorConfig
from unified_trainer.roles.reward import RewardConfig, ScorerConfig
from unified_trainer.roles.role import RoleConfig, TrainableConfig
from unified_trainer.sampling import SamplerConfig

Algorithm = TypeVar("Algorithm")
Run = TypeVar("Run", bound="RunConfig | _RewardFile")
RECIPES = Path(__file__).parent / "recipes"
# Flags that say where a run is read from and written to; a saved config leaves them out.
PATH_KEYS = ("config", "resume", "output", "allow")
# What may differ when a run is resumed: nothing that changes what a step computes.
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
    "parallel",
    "algorithm.micro_batch",
    "algorithm.rollout_batch",
    "algorithm.update_batch",
)


class ConfigError(ValueError):
    """A setting that cannot be; the message names the key and the way out."""


@dataclass(frozen=True)
class ValidationConfig:
    num_samples: int = 48  # videos generated and scored each time, from fixed prompts and noise
    batch: int = 48  # samples at a time
    seed: int = 1000  # of the noise
    frechet_stride: int = 4  # every so many frames enter the Frechet distance, in the tiny world
    prompts: Path | None = None  # file with one prompt a line; by default tiny-world captions not trained on
    num_videos: int = 4  # of the samples, how many are written as mp4 and on the contact sheet
    averaged: bool = True  # sample with the averaged weights when the student keeps any


@dataclass(frozen=True)
class TrackingConfig:
    tensorboard: bool = False  # also write TensorBoard events into the run directory
    wandb: Literal["off", "online", "offline"] = "off"  # also log to Weights & Biases
    wandb_project: str = "unified-trainer"  # its project


@dataclass(frozen=True)
class RunConfig(Generic[Algorithm]):
    algorithm: Algorithm  # what the method itself reads
    method: str = "dance_grpo"  # algorithm: see --help of each
    recipe: str = "tiny"  # settings for a model: a name in unified_trainer/recipes
    config: Path | None = None  # a saved config.yaml to start from
    steps: int = 60  # training steps; one is a rollout with its updates, or one update
    seed: int = 0  # of everything random
    output: Path | None = None  # run directory; runs/METHOD-N by default
    resume: Path | None = None  # run directory to continue
    allow: tyro.conf.UseAppendAction[tuple[str, ...]] = ()  # setting in which --resume may differ; repeatable
    init_from: str | None = None  # RUN[@step][:ema]: its newest checkpoint, or that step's, gives the trained roles'
    # weights, the averaged ones with :ema
    checkpoint_every: int = 20  # training steps between checkpoints; the last step always saves; 0 saves no other
    async_save: bool = False  # write checkpoints from a copy in CPU memory while training goes on
    keep_last: int = 2  # newest checkpoints kept
    keep_best: int = 0  # checkpoints kept besides, of those saved after a validation: the best so many
    best_metric: str = "reward"  # the validation metric that they are best in
    best_is: Literal["highest", "lowest"] = "highest"  # value of it
    validate_every: int = 10  # training steps between validations, before the first and after the last too; 0 is never
    prompts: Path | None = None  # file with one training prompt a line, instead of the built-in ones
    device: Device = "auto"  # where to run
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    video: VideoConfig = field(default_factory=VideoConfig)
    student: TrainableConfig = field(default_factory=TrainableConfig)
    teacher: RoleConfig = field(default_factory=RoleConfig)
    critic: TrainableConfig = field(default_factory=TrainableConfig)
    sampler: SamplerConfig = field(default_factory=SamplerConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    data: DataConfig = field(default_factory=DataConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    hacking_monitor: HackingMonitorConfig = field(default_factory=HackingMonitorConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)


def parse(
    argv: Sequence[str], algorithms: Mapping[str, type], trained_sampler_of: Callable[[str], Mapping[str, Any] | None]
) -> RunConfig:
    """The run that the command line asks for; exits with code 2 and one message on a key or value that cannot be.

    `algorithms` maps each method's name to the dataclass of its own settings. `trained_sampler_of` gives the sampler that the
    checkpoint of --init-from was made for, if it was made for one: it stands above the recipe and below the flags.
    """
    sources = _Sources.read(argv)
    saved = _load(sources.saved) if sources.saved else {}
    method = sources.method or saved.get("method", "dance_grpo")
    recipe = sources.recipe or saved.get("recipe", "tiny")
    known = [path.stem for path in sorted(RECIPES.glob("*.yaml"))]
    _must_know("method", method, list(algorithms))
    _must_know("recipe", recipe, known)
    if saved and saved.get("method", method) != method:
        raise ConfigError(f"{sources.saved} is a run of {saved['method']}, not of {method}: leave --method out")
    contract = trained_sampler_of(sources.init_from) if sources.init_from else None
    sections = _load(RECIPES / f"{recipe}.yaml")
    layers = {
        f"recipe {recipe}": {**sections.get("common", {}), "method": method, "recipe": recipe},
        f"recipe {recipe}, {method}": sections.get(method, {}),
        f"--init-from {sources.init_from}": {"sampler": contract} if contract else {},
        str(sources.saved): saved,
    }
    kind = RunConfig[algorithms[method]]
    run = RunConfig(algorithm=algorithms[method]())
    for name, layer in layers.items():
        run = _apply(kind, run, _flags(layer), name)
    run = _apply(kind, run, list(argv), "")
    for key, value in _flat(plain(run)).items():
        if any(isinstance(one, float) and math.isnan(one) for one in (value if isinstance(value, list) else [value])):
            raise ConfigError(f"{key} is {value}: nan is no number")
    return run


@dataclass(frozen=True)
class _RewardFile:
    reward: RewardConfig = field(default_factory=RewardConfig)


def read_reward(file: Path) -> RewardConfig:
    """The section `reward` of a YAML file, read as in a recipe; exits with code 2 on a key or value that cannot be."""
    if not file.is_file():
        raise ConfigError(f"--reward {file}: no such file")
    section = _load(file).get("reward")
    if not isinstance(section, dict):
        raise ConfigError(f"--reward {file} must hold a section reward, as in a recipe")
    return _apply(_RewardFile, _RewardFile(), _flags({"reward": section}), str(file)).reward


def save(run: RunConfig, file: Path) -> None:
    """Write the resolved settings, whole or not at all, so that --config FILE runs them again."""
    building = file.with_suffix(".tmp")
    with building.open("w", encoding="utf-8") as opened:
        yaml.safe_dump(plain(run), opened, sort_keys=False)
        opened.flush()
        os.fsync(opened.fileno())
    building.replace(file)


def plain(run: RunConfig) -> dict[str, Any]:
    """The settings as nested dicts of plain values, without the flags that only say where."""

    def convert(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: convert(inner) for key, inner in value.items()}
        if isinstance(value, tuple):
            return [convert(inner) for inner in value]
        return str(value) if isinstance(value, Path) else value

    return {key: value for key, value in convert(dataclasses.asdict(run)).items() if key not in PATH_KEYS}


def check_resumable(run: RunConfig, file: Path) -> list[str]:
    """Every setting that differs from the saved run's, in words.

    ConfigError if one would change what a step computes, unless --allow names it.
    """
    old, new = _flat(_load(file)), _flat(plain(run))
    changed = {key: f"{key}: {old.get(key)!r} -> {new.get(key)!r}" for key in sorted(old.keys() | new.keys())}
    changed = {key: words for key, words in changed.items() if old.get(key) != new.get(key)}
    allowed = {key.replace("-", "_") for key in run.allow}
    if unknown := sorted(allowed - changed.keys()):
        raise ConfigError(f"--allow {unknown[0]}: this setting does not differ from that of --resume {file.parent}")
    refused = {key: words for key, words in changed.items() if not _is_resumable(key) and key not in allowed}
    if refused:
        raise ConfigError(
            f"--resume {file.parent} cannot change {'; '.join(refused.values())}. Leave these flags out, say "
            f"{' '.join(f'--allow {key}' for key in refused)}, or start a new run with --init-from {file.parent}"
        )
    return list(changed.values())


def _is_resumable(key: str) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in RESUMABLE_KEYS)


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


def _must_know(what: str, name: str, known: list[str]) -> None:
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"--{what} {name!r} is not known{hint} Have: {', '.join(known)}")


def _apply(kind: Any, run: Run, flags: list[str], origin: str) -> Run:
    """The settings after these flags; tyro explains what it refuses and exits with code 2."""
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
    """The run with every scorer that a flag names, --reward.scorers.NAME.weight, for tyro to know its settings."""
    named = [re.match(r"--reward\.scorers\.([\w-]+)\.", flag) for flag in flags]
    scorers = {match[1].replace("-", "_"): ScorerConfig() for match in named if match}
    return dataclasses.replace(run, reward=dataclasses.replace(run.reward, scorers=scorers | run.reward.scorers))


def _load(file: Path) -> dict[str, Any]:
    try:
        loaded = yaml.safe_load(file.read_text()) or {}
    except yaml.YAMLError as error:
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
    """Settings as the command line would say them, so that files and flags are checked by one parser."""
    flags: list[str] = []
    for key, value in _flat(tree).items():
        flags.append(f"--{key}")
        flags += [str(item) for item in value] if isinstance(value, list) else [str(value)]
    return flags
