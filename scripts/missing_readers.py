"""Imported first, this stands in for readers of files that are not installed and that a benchmark does not use."""

import importlib
import sys
from importlib.machinery import ModuleSpec
from unittest.mock import MagicMock

for name in ("pyarrow", "pyarrow.parquet", "av"):
    try:
        importlib.import_module(name)
    except ImportError:
        sys.modules[name] = MagicMock()
        sys.modules[name].__spec__ = ModuleSpec(name, None)  # transformers and diffusers ask for it
