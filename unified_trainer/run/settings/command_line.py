"""The command line of a run: settings from a recipe, a saved file and flags, in that order."""

import dataclasses
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.input_files import read_yaml
from unified_trainer.basics.ranges import Minutes, range_of, reason
from unified_trainer.methods import METHODS
from unified_trainer.parallel.mesh import ParallelConfig
from unified_trainer.rewards.reward import RewardConfig, ScorerConfig
from unified_trainer.run.checkpoint.manifest import trained_sampler
from unified_trainer.run.registry import add_families, method_named
from unified_trainer.run.settings import run_paths
from unified_trainer.run.settings.config import ConfigError, RunConfig, flat, load_recipe, merged, run_class
from unified_trainer.run.settings.flags import UnknownFlagError, apply, split, words_of
from unified_trainer.run.settings.settings import Setting, settings_of

# A count of a run, and the share of its data or of its updates that decides it where it is given.
SHARES = {"steps": "epochs", "warmup_updates": "warmup_ratio", "lr_decay_updates": "lr_decay_ratio"}


def parse(argv: Sequence[str]) -> RunConfig:
    """Return the run that the command line asks for; UserError names a wrong flag, or a wrong key and its file."""
    run = before_flags(argv)
    with _other_methods_named(run):
        names = [name.removeprefix("--") for name, _ in split(argv)]
        run = apply(_with_named(run, names), argv)
    _refuse_decided(run, [name.replace("-", "_") for name in names])
    return _accepted(run)


def with_settings(run: RunConfig, settings: Mapping[str, Any], origin: str) -> RunConfig:
    """Return the run with settings changed, flat or nested; UserError names `origin` and a wrong key or value."""
    with _other_methods_named(run):
        run = _with_file(run, flat(settings), origin)
    _refuse_decided(run, list(flat(settings)))
    return _accepted(run)


def _refuse_decided(run: RunConfig, given: Sequence[str]) -> None:
    """Raise ConfigError for a count that is given although a share decides it."""
    counts, known = [key for key in given if key.rpartition(".")[2] in SHARES], _known(run)
    for key in counts:
        section, dot, name = key.rpartition(".")
        share = known.get(f"{section}{dot}{SHARES[name]}")
        if share is not None and share.default:
            raise ConfigError(
                f"{known[key].flag}: {share.key} {share.default} decides it. Leave one out, or set {share.flag} 0"
            )


def minutes_to_meet(argv: Sequence[str]) -> float:
    """Return parallel.timeout_minutes of a command line or of the file that it continues, before these are parsed.

    It is the default where they have none, or a wrong one, which `parse` then names.
    """
    saved: Mapping[str, Any] = {}
    with suppress(UserError):
        file = _Sources.read(argv).saved
        saved = flat(read_yaml(file)) if file else {}
    default = ParallelConfig().timeout_minutes
    try:
        minutes = float(_given(argv, saved).get("parallel.timeout_minutes", default))
    except (TypeError, ValueError):
        return default
    return default if reason(range_of(Minutes), minutes) else minutes


def _accepted(run: RunConfig) -> RunConfig:
    """Return a run whose families are known from here on; ConfigError for --allow without the run it is about."""
    if run.allow and not run.resume:
        raise ConfigError(f"--allow {run.allow[0]} is for --resume: leave it out, or name the run to continue")
    with run_paths.naming_origin(run.resume, "Call from the folder that has it"):
        add_families(run.families)
    return run


def before_flags(argv: Sequence[str]) -> RunConfig:
    """Return the run by the method, recipe and saved file that the command line names, without its other flags.

    The sampler that the checkpoint of --init-from was trained for, if any, overrides the recipe.
    """
    sources = _Sources.read(argv)
    saved = flat(read_yaml(sources.saved, "" if sources.resumed else "--config")) if sources.saved else {}
    saved = run_paths.located(saved, sources.saved.parent) if sources.saved else saved
    name = sources.method or str(saved.get("method", "dance_grpo"))
    if str(saved.get("method", name)) != name:
        raise ConfigError(f"{sources.saved} is a run of {saved['method']}, not of {name}: leave --method out")
    with run_paths.naming_origin(sources.run, "Call from the folder that has it"):
        run = run_class(method_named(name))()
    recipe = sources.recipe or str(saved.get("recipe", "")) or _default_recipe(argv, saved, run)
    # A saved run has all its settings; those that are newer keep the code's defaults, whatever its recipe says today.
    sections = load_recipe(recipe) if recipe and not sources.resumed else {}
    sampler = trained_sampler(sources.init_from) if sources.init_from and not sources.resumed else None
    settings = _without_other_path(merged(sections.get("common", {}), sections.get(name, {})), _given(argv, saved))
    layers = {
        f"recipe {recipe}": {**settings, "method": name, "recipe": recipe},
        f"--init-from {sources.init_from}": {"sampler": sampler} if sampler else {},
        str(sources.saved): saved,
    }
    for origin, layer in layers.items():
        with _other_methods_named(run):
            run = _with_file(run, flat(layer), origin)
    return run


def _default_recipe(argv: Sequence[str], saved: Mapping[str, Any], run: RunConfig) -> str:
    """Return tiny, or "" where a role has a path of its own: the run's plan then asks for a recipe."""
    given = _given(argv, saved)
    return "tiny" if {given.get(f"{role}.path", "") for role in run.roles} <= {"", "tiny"} else ""


def _given(argv: Sequence[str], saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a saved file and the flags set, by key; of a flag with several values the first one."""
    flags = {name.removeprefix("--").replace("-", "_"): values[0] for name, values in split(argv) if values}
    return {**saved, **flags}


def _without_other_path(recipe: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recipe's settings without the path of its first scorer if `given` sets a scorer of another kind."""
    reward = recipe.get("reward", {})
    kind = given.get("reward.kind", "")
    if not kind or kind == (reward.get("kind") or "hpsv3"):
        return dict(recipe)
    return {**recipe, "reward": {key: value for key, value in reward.items() if key != "path"}}


@dataclass(frozen=True)
class _RewardFile:
    reward: RewardConfig = field(default_factory=RewardConfig)


def read_reward(file: Path) -> RewardConfig:
    """Return the section `reward` of a YAML file; UserError names a wrong key or value."""
    section = read_yaml(file, "--reward").get("reward")
    if not isinstance(section, dict):
        raise ConfigError(f"--reward {file} must hold a section reward, as in a recipe")
    reward = _with_file(_RewardFile(), flat({"reward": section}), str(file)).reward
    if not reward.named():
        raise ConfigError(f"--reward {file} names no scorer: set path, kind or scorers in its section reward")
    return reward


@dataclass(frozen=True)
class _Sources:
    """The flags that decide which settings exist, read before the rest."""

    method: str | None
    recipe: str | None
    saved: Path | None
    resumed: bool  # whether the saved file is that of --resume
    init_from: str | None

    @property
    def run(self) -> Path | None:
        """The run directory to continue."""
        return self.saved.parent if self.saved is not None and self.resumed else None

    @classmethod
    def read(cls, argv: Sequence[str]) -> "_Sources":
        given: dict[str, str] = {}
        for name, values in split(argv):
            flag = name.replace("_", "-")
            if flag in ("--method", "--recipe", "--config", "--resume", "--init-from"):
                if not values or (not values[0] and flag != "--recipe"):
                    raise ConfigError(f"{name} needs a value")
                given[flag] = values[0]
        if "--config" in given and "--resume" in given:
            raise ConfigError("--config and --resume exclude each other: a resumed run has its config")
        saved = None
        if "--resume" in given:
            saved = Path(given["--resume"]) / "config.yaml"
            if not saved.is_file():
                raise ConfigError(f"--resume {given['--resume']}: no config.yaml there, so it is not a run directory")
        elif "--config" in given:
            saved = Path(given["--config"])
            if os.path.isdir(saved):  # unlike Path.is_dir, it does not raise for a path that is too long
                raise ConfigError(f"--config {saved}: it is a folder; give a file, such as {saved / 'config.yaml'}")
        resumed, init_from = "--resume" in given, given.get("--init-from")
        return cls(given.get("--method"), given.get("--recipe"), saved, resumed, init_from)


@contextmanager
def _other_methods_named(run: RunConfig) -> Iterator[None]:
    """Say of a setting that does not exist which methods have it."""
    try:
        yield
    except UnknownFlagError as error:
        having = [name for name in METHODS if error.key in _known(run_class(method_named(name))())]
        if not having:
            raise
        raise ConfigError(f"{error.name} is a setting of {', '.join(having)}, not of {run.method}") from error


def _with_file(tree: Any, values: Mapping[str, Any], file: str) -> Any:
    """Apply the values of a file by the same parser as flags."""
    tree = _with_named(tree, list(values))
    known = _known(tree)
    changed = {key: value for key, value in values.items() if key not in known or not _equal(known[key].default, value)}
    return apply(tree, words_of(changed, known, file), file) if changed else tree


def _equal(default: Any, value: Any) -> bool:
    """Whether a file's value is the one that a setting has: the parser, which takes long for each, need not see it."""
    return type(default) is type(value) and default == value


def _with_named(tree: Any, keys: Sequence[str]) -> Any:
    """Add every scorer, setting of a scorer's own and set of prompts that a key names, so that the key is known.

    Such keys are reward.scorers.NAME.weight, reward.settings.KEY, reward.scorers.NAME.settings.KEY and
    validation.sets.NAME.
    """
    matches = [re.match(r"reward(?:\.scorers\.([\w-]+))?(?:\.settings\.([\w-]+)$)?", key) for key in keys]
    named = [[part and part.replace("-", "_") for part in match.groups()] for match in matches if match]
    scorers = {name: ScorerConfig() for name, _ in named if name} | tree.reward.scorers
    reward = dataclasses.replace(tree.reward, scorers=scorers)
    for name, key in named:
        if key and name:
            scorers[name] = _with_setting(scorers[name], key)
        elif key:
            reward = _with_setting(reward, key)
    tree = dataclasses.replace(tree, reward=reward)
    found = [match[1].replace("-", "_") for key in keys if (match := re.fullmatch(r"validation\.sets\.([\w-]+)", key))]
    if not found:
        return tree
    sets = dict.fromkeys(found, "") | tree.validation.sets
    return dataclasses.replace(tree, validation=dataclasses.replace(tree.validation, sets=sets))


def _with_setting(config: ScorerConfig, key: str) -> Any:
    return dataclasses.replace(config, settings={**config.settings, key: config.settings.get(key, "")})


def _known(tree: Any) -> dict[str, Setting]:
    return {setting.key: setting for setting in settings_of(tree)}
