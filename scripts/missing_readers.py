"""Imported first, this stands in for readers of files that are not installed and that a benchmark does not use."""

import importlib.util
import sys
from unittest.mock import MagicMock

for name in ("pyarrow", "pyarrow.parquet", "av"):
    if importlib.util.find_spec(name.partition(".")[0]) is None:
        sys.modules[name] = MagicMock()
