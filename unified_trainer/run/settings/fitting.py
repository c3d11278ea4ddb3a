"""Recipes that were made for a model, by the configs of its folder, and the one for models without a recipe."""

from collections.abc import Mapping
from pathlib import Path

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.input_files import read_json
from unified_trainer.run.registry import family_of
from unified_trainer.run.settings.config import ConfigError, RunConfig, flat, load_recipe, plain, recipes


def check_built(run: RunConfig) -> None:
    """Raise ConfigError, which names the command, if a file is missing in a folder that the recipe says to build."""
    built = load_recipe(run.recipe).get("built", {}) if run.recipe and not run.resume else {}
    named = [str(value).partition(":")[0] for value in flat(plain(run)).values()]
    for folder, command in built.items():
        for path in (path for path in named if path.startswith(f"{folder}/") and not Path(path).exists()):
            raise ConfigError(f"recipe {run.recipe}: {path} is not there: run where {folder} is, or first `{command}`")


def recipe_to_add(role: str, path: str) -> str:
    """Say which flag adds a shipped recipe that was made for the model in a role's folder; "" if there is none."""
    fitting = [f"--recipe {recipe}" for recipe in recipes() if fits(recipe, role, path)]
    if not fitting and (general := general_recipe(role, path)[0]):
        return f"add --recipe {general}, for models that no recipe was made for"
    return f"add {' or '.join(fitting)}, made for this model" if fitting else ""


def fits(recipe: str, role: str, path: str) -> bool:
    """Return whether a recipe was made for the model in a role's folder, by the configs of its networks."""
    family, folder = family_of(role, path)
    components, _ = family.networks(folder)
    model = {"networks": len(components)} | read_json(folder / components[0] / "config.json")
    return load_recipe(recipe).get("fits", {}).items() <= model.items()


def general_recipe(role: str, path: str) -> tuple[str, Mapping[str, int]]:
    """Return the recipe for models like this one that no recipe was made for, and the size its pipeline names."""
    family, folder = family_of(role, path)
    return family.general_recipe(folder)


def default_recipe(path: str, given: Mapping[str, object]) -> tuple[str, Mapping[str, int]]:
    """Return the general recipe of a student's folder, and the size of its videos; "" where a recipe is to be named.

    ConfigError for a pipeline that names no size, where none is `given`.
    """
    try:
        if any(fits(recipe, "student", path) for recipe in recipes()):
            return "", {}
        recipe, size = general_recipe("student", path)
    except UserError:  # the run's plan names it, with all other faults
        return "", {}
    named = {*given, *(f"video.{key}" for key in size)}
    if recipe and (lacking := [f"--{key}" for key in ("video.height", "video.width") if key not in named]):
        raise ConfigError(f"--student.path {path}: its pipeline names no size: give {' and '.join(lacking)}")
    return recipe, size
