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
from unified_trainer.basics.trust import setting_of
from unified_trainer.methods import METHODS
from unified_trainer.numerics.chunks import ROLLED_OUT
from unified_trainer.numerics.objectives import OBJECTIVES
from unified_trainer.parallel.mesh import ParallelConfig
from unified_trainer.rewards.base import OF_SEVERAL
from unified_trainer.rewards.reward import RewardConfig, ScorerConfig
from unified_trainer.run.checkpoint.manifest import trained_sampler
from unified_trainer.run.checkpoint.remote_folder import checked_address
from unified_trainer.run.registry import add_families, method_named, objective_of
from unified_trainer.run.settings import border, run_paths
from unified_trainer.run.settings.config import (
    PATH_KEYS,
    ConfigError,
    RunConfig,
    flat,
    load_recipe,
    merged,
    plain,
    recipes,
    run_class,
)
from unified_trainer.run.settings.fitting import default_recipe
from unified_trainer.run.settings.flags import UnknownFlagError, apply, split, words_of
from unified_trainer.run.settings.settings import Setting, settings_of

OBJECTIVE_KIND = "algorithm.objective.kind"
ROLLED_OUT_KEYS = {f"sampler.chunks.{name}" for name in ROLLED_OUT}
OFFLOAD = "parallel.offload"  # in configs that were saved before it became two switches
# A count of a run, and the share of its data or of its updates that decides it where it is given.
SHARES = {"steps": "epochs", "warmup_updates": "warmup_ratio", "lr_decay_updates": "lr_decay_ratio"}


def parse(argv: Sequence[str]) -> RunConfig:
    """Return the run that the command line asks for; UserError names a wrong flag, or a wrong key and its file."""
    _ask_for_method(argv)
    run = before_flags(argv)
    with _other_methods_named(run):
        names = [name.removeprefix("--") for name, _ in split(argv)]
        run = apply(_with_named(run, dict.fromkeys(names, "")), argv)
    _refuse_decided(run, [name.replace("-", "_") for name in names])
    return _accepted(run)


def _ask_for_method(argv: Sequence[str]) -> None:
    """Raise ConfigError for weights to start with where no method is named, and no file that may name one."""
    sources, given = _Sources.read(argv), {name.replace("_", "-") for name, _ in split(argv)}
    flag = "--init-from" if sources.init_from else "--student.path"
    if flag in given and sources.method is None and sources.saved is None:
        raise ConfigError(f"{flag} needs --method NAME, the method that trains these weights: {', '.join(METHODS)}")


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
    mirror = checked_address(run.checkpoint_mirror, "--checkpoint-mirror")
    return dataclasses.replace(run, checkpoint_mirror=mirror)


def before_flags(argv: Sequence[str]) -> RunConfig:
    """Return the run by the method, recipe, saved file and objective that the command line names, without other flags.

    The sampler that the checkpoint of --init-from was trained for, if any, overrides the recipe in what the student
    fits. How the method rolls out is the recipe's affair; where it does not say, it is the checkpoint's.
    """
    sources = _Sources.read(argv)
    saved = flat(read_yaml(sources.saved, "" if sources.resumed else "--config")) if sources.saved else {}
    saved = run_paths.located(saved, sources.saved.parent) if sources.saved else saved
    if OFFLOAD in saved:
        saved |= dict.fromkeys(("parallel.offload_weights", "parallel.offload_optimizer"), saved.pop(OFFLOAD))
    name = sources.method or str(saved.get("method", "dance_grpo"))
    if str(saved.get("method", name)) != name:
        anew = f", or begin a run of {name} with its weights: --method {name} --init-from {sources.run}"
        raise ConfigError(
            f"{sources.saved} is a run of {saved['method']}, not of {name}: leave --method out"
            f"{anew if sources.resumed else ''}"
        )
    recipe = sources.recipe or str(saved.get("recipe", ""))
    # A saved run has all its settings; those that are newer keep the code's defaults, whatever its recipe says today.
    sections = load_recipe(recipe) if recipe and not sources.resumed else {}
    received = {str(sources.saved): saved}
    if recipe not in recipes():  # those of this package need no agreement
        received = {recipe: flat(merged(sections.get("common", {}), sections.get(name, {})))} | received
    built_in = run_class(method_named(name))() if name in METHODS else RunConfig()
    _ask(built_in, argv, received, sources.run)
    with run_paths.naming_origin(sources.run, "Call from the folder that has it"):
        run = run_class(method_named(name))()
    _ask(run, argv, received, sources.run)  # also about the settings of the user's own method
    size: Mapping[str, int] = {}
    if not recipe:
        recipe, size = _default_recipe(argv, saved, run)
        sections = load_recipe(recipe) if recipe else {}
    sampler = trained_sampler(sources.init_from) if sources.init_from and not sources.resumed else None
    fits, rolled_out = _divided(sampler or {})
    settings = _without_other_path(merged(sections.get("common", {}), sections.get(name, {})), _given(argv, saved))
    if ROLLED_OUT_KEYS & flat(settings).keys():
        rolled_out = {}
    layers = {
        f"--init-from {sources.init_from}, its chunks": rolled_out,
        f"recipe {recipe}": {**settings, "method": name, "recipe": recipe},
        "the size that the pipeline names": {"video": size},
        f"--init-from {sources.init_from}": fits,
        str(sources.saved): saved,
    }
    for origin, layer in layers.items():
        with _other_methods_named(run):
            run = _with_file(run, flat(layer), origin)
    return _with_objective(run, _given(argv, {}).get(OBJECTIVE_KIND))


def replaced_by_checkpoint(run: RunConfig) -> str:
    """Return in words the settings of the recipe that the checkpoint of --init-from replaced; "" for none."""
    sampler = trained_sampler(run.init_from) if run.init_from and run.recipe and not run.resume else None
    if sampler is None:
        return ""
    recipe = before_flags(["--method", run.method, "--recipe", run.recipe])
    own, now, there = (
        flat({"sampler": values}) for values in (plain(recipe)["sampler"], plain(run)["sampler"], sampler)
    )
    replaced = [key for key in there if own.get(key) != now.get(key) == there[key]]
    values = ", ".join(f"{key} {there[key]!r} (recipe: {own.get(key)!r})" for key in replaced)
    return f"--init-from {run.init_from} sets {values}" if replaced else ""


def _divided(sampler: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the settings of a trained sampler that its student fits, and those of how it was rolled out.

    Chunks of a bidirectional student are none: a method for causal students has its own.
    """
    given = flat({"sampler": sampler})
    if not given.get("sampler.chunks.chunk_frames"):
        given = {key: value for key, value in given.items() if not key.startswith("sampler.chunks.")}
    rolled_out = {key: value for key, value in given.items() if key in ROLLED_OUT_KEYS}
    return {key: value for key, value in given.items() if key not in rolled_out}, rolled_out


def _ask(run: RunConfig, argv: Sequence[str], received: Mapping[str, Mapping[str, Any]], folder: Path | None) -> None:
    """Ask about all that received files would do and that no flag overrides; flags are agreed to, and remembered."""
    settings: dict[str, Any] = {"method": run.method}
    origins: dict[str, str] = {}
    for file, layer in received.items():
        settings |= {key.replace("-", "_"): value for key, value in layer.items()}
        origins |= dict.fromkeys((key.replace("-", "_") for key in layer), file)
    flags = {setting_of(name): values if values[1:] else values[0] for name, values in split(argv) if values}
    settings = {key: value for key, value in (settings | flags).items() if key not in {*PATH_KEYS} & flags.keys()}
    border.ask_about(settings, _known(_with_named(run, dict.fromkeys(settings))), origins, folder)


def _default_recipe(argv: Sequence[str], saved: Mapping[str, Any], run: RunConfig) -> tuple[str, Mapping[str, int]]:
    """Return tiny, or a general recipe and the size that its student's pipeline names; "": the plan asks for one."""
    given = _given(argv, saved)
    if {given.get(f"{role}.path", "") for role in run.roles} <= {"", "tiny"}:
        return "tiny", {}
    student = str(given.get("student.path", ""))
    return ("", {}) if student in ("", "tiny") or given.get("families") else default_recipe(student, given)


def _given(argv: Sequence[str], saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a saved file and the flags set, by key; of a flag with several values the first one."""
    flags = {name.removeprefix("--").replace("-", "_"): values[0] for name, values in split(argv) if values}
    return {**saved, **flags}


def _without_other_path(recipe: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recipe's settings without those of its first scorer alone if `given` sets a scorer of another kind."""
    reward = recipe.get("reward", {})
    kind = given.get("reward.kind", "")
    if not kind or kind == (reward.get("kind") or "hpsv3"):
        return dict(recipe)
    of_other = ("path", "frames", "frame_stride") if kind in OF_SEVERAL else ("path",)
    return {**recipe, "reward": {key: value for key, value in reward.items() if key not in of_other}}


@dataclass(frozen=True)
class _RewardFile:
    reward: RewardConfig = field(default_factory=RewardConfig)


def read_reward(file: Path) -> RewardConfig:
    """Return the section `reward` of a YAML file; UserError names a wrong key or value."""
    section = read_yaml(file, "--reward").get("reward")
    if not isinstance(section, dict):
        raise ConfigError(f"--reward {file} must hold a section reward, as in a recipe")
    given = flat({"reward": section})
    border.ask_about(given, _known(_with_named(_RewardFile(), given)), dict.fromkeys(given, str(file)), None)
    reward = _with_file(_RewardFile(), given, str(file)).reward
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
        section, _, name = error.key.rpartition(".")
        kinds, known = [kind for kind, made in OBJECTIVES.items() if name in made.__dataclass_fields__], _known(run)
        if f"{section}.kind" == OBJECTIVE_KIND and kinds and OBJECTIVE_KIND in known:
            others = f"{' or '.join(kinds)}, not of {known[OBJECTIVE_KIND].default}"
            raise ConfigError(f"{error.name} is a setting of --{OBJECTIVE_KIND} {others}") from error
        having = [name for name in METHODS if error.key in _known(run_class(method_named(name))())]
        if not having:
            raise
        raise ConfigError(f"{error.name} is a setting of {', '.join(having)}, not of {run.method}") from error


def _with_file(tree: Any, values: Mapping[str, Any], file: str) -> Any:
    """Apply the values of a file by the same parser as flags."""
    tree = _with_named(tree, values)
    return apply(tree, words_of(values, _known(tree), file), file) if values else tree


def _with_named(tree: Any, given: Mapping[str, Any]) -> Any:
    """Add what keys and values name, so that the keys of its settings are known.

    Such keys are reward.scorers.NAME.weight, reward.settings.KEY, reward.scorers.NAME.settings.KEY,
    validation.sets.NAME, and algorithm.objective.kind, whose value decides which settings an objective has.
    """
    keys, tree = list(given), _with_objective(tree, given.get(OBJECTIVE_KIND))
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


def _with_objective(tree: Any, kind: object) -> Any:
    """Return the tree with the objective of this kind, unless it has one of it already or its method has none."""
    if not kind or not isinstance(kind, str):
        return tree
    known = _known(tree)
    if OBJECTIVE_KIND not in known or known[OBJECTIVE_KIND].default == kind:
        return tree
    algorithm = dataclasses.replace(tree.algorithm, objective=objective_of(kind))
    return dataclasses.replace(tree, algorithm=algorithm)


def _with_setting(config: ScorerConfig, key: str) -> Any:
    return dataclasses.replace(config, settings={**config.settings, key: config.settings.get(key, "")})


def _known(tree: Any) -> dict[str, Setting]:
    return {setting.key: setting for setting in settings_of(tree)}
