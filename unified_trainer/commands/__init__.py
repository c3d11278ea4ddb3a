"""Commands of `python -m unified_trainer`."""
