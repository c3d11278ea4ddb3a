"""Objects from outside the package: `package.module:NAME` or `path/to/file.py:NAME`."""

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

from unified_trainer.errors import UserError


def load_object(spec: str, key: str) -> Any:
    """Return the object that `spec` names; UserError, naming `key`, if file, module or name is missing."""
    place, _, name = spec.rpartition(":")
    if place.endswith(".py"):
        file = Path(place).resolve()
        if not file.is_file():
            raise UserError(f"{key} {spec}: no such file: {place}")
        module_name = f"unified_trainer_plugin_{file.stem}_{abs(hash(str(file)))}"
        module = sys.modules.get(module_name)
        if module is None:
            loaded = importlib.util.spec_from_file_location(module_name, file)
            module = sys.modules[module_name] = importlib.util.module_from_spec(loaded)
            loaded.loader.exec_module(module)
    else:
        module = importlib.import_module(place)
    if name not in vars(module):
        raise UserError(f"{key} {spec}: {place} has no {name}")
    return vars(module)[name]
