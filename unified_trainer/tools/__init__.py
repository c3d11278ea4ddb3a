"""The commands of `python -m unified_trainer` other than training."""
