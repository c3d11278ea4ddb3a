"""Folders of published models without weights: the configs of their sizes, which recipes are chosen by."""

import json
import shutil
from pathlib import Path

from unified_trainer.run.settings.config import load_recipe
from unified_trainer.tools.plan.architecture import published, published_folder


def model_folder(folder: Path, recipe: str, **changes: object) -> Path:
    """Write the folder of the published model that a recipe is made for, with changes of the transformer's config."""
    fits = load_recipe(recipe)["fits"]
    for name, parts in published().items():
        if fits.items() <= {**parts["transformer"], "networks": 2 if "transformer_2" in parts else 1}.items():
            shutil.copytree(published_folder(name), folder)
            file = folder / "transformer" / "config.json"
            file.write_text(json.dumps(json.loads(file.read_text()) | changes))
            return folder
    raise AssertionError(f"no published model fits {json.dumps(fits)}")
