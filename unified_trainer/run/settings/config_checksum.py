"""The checksum of a run's config.yaml: a comment below the settings, by which an edit by hand is noticed."""

import hashlib
import json
import re

from unified_trainer.basics.input_files import YamlLoader

LINE = re.compile(r"^# sha256 of these settings: ([0-9a-f]{64})$", re.MULTILINE)


def with_checksum(text: str) -> str:
    """Return the text of a YAML file with its checksum as the last line."""
    return f"{text}# sha256 of these settings: {_checksum(text)}\n"


def is_edited(text: str) -> bool:
    """Return whether the settings in a YAML file are not those of its checksum; a file that was cut off has none.

    Only values count: order, comments and spaces may differ.
    """
    line = LINE.search(text)
    return line is None or line[1] != _checksum(text)


def _checksum(text: str) -> str:
    tree = YamlLoader(text).get_single_data()
    return hashlib.sha256(json.dumps(tree, sort_keys=True, default=str).encode()).hexdigest()
