"""The command line of a run: settings from a recipe, a saved file and flags, in that order."""

import dataclasses
import math
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import tyro

from unified_trainer import renamed
from unified_trainer.checkpoint.dcp import trained_sampler
from unified_trainer.config import ConfigError, RunConfig, flat, load_yaml, must_know, plain, run_class
from unified_trainer.registry import method_named
from unified_trainer.roles.reward import RewardConfig, ScorerConfig

Run = TypeVar("Run", bound="RunConfig | _RewardFile")
RECIPES = Path(__file__).parent / "recipes"


def parse(argv: Sequence[str]) -> RunConfig:
    """Return the run that the command line asks for; exit with code 2 and one message on a wrong key or value.

    The sampler that the checkpoint of --init-from was trained for, if any, overrides the recipe; flags override it.
    """
    sources = _Sources.read(argv)
    saved = flat(load_yaml(sources.saved)) if sources.saved else {}
    name = sources.method or saved.get("method", "dance_grpo")
    if saved and saved.get("method", name) != name:
        raise ConfigError(f"{sources.saved} is a run of {saved['method']}, not of {name}: leave --method out")
    method = method_named(name)
    kind = run_class(method)
    known = flat(plain(kind()))
    recipe = sources.recipe or saved.get("recipe", "tiny")
    must_know("recipe", recipe, [path.stem for path in sorted(RECIPES.glob("*.yaml"))])
    sampler = trained_sampler(sources.init_from) if sources.init_from else None
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
    for key, value in flat(plain(run)).items():
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


def _flags(tree: Mapping[str, Any]) -> list[str]:
    """Write settings as flags, so that files and flags are checked by one parser."""
    flags: list[str] = []
    for key, value in flat(tree).items():
        flags.append(f"--{key}")
        flags += [str(item) for item in value] if isinstance(value, list) else [str(value)]
    return flags
