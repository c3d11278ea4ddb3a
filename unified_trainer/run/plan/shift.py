"""The shift of noise levels that a model's scheduler computes from the size of a sample."""

import math
from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from unified_trainer.basics.input_files import Schema, read_as

NEAR = 0.01  # of the shift


class SchedulerConfig(Schema):
    """scheduler_config.json, as far as the shift depends on the number of tokens."""

    use_dynamic_shifting: bool = False
    base_image_seq_len: int = Field(256, ge=1, le=2**30)
    max_image_seq_len: int = Field(4096, ge=2, le=2**30)
    base_shift: float = Field(0.5, ge=-10, le=10)
    max_shift: float = Field(1.15, ge=-10, le=10)

    @model_validator(mode="after")
    def _lengths_differ(self) -> Self:
        if self.max_image_seq_len <= self.base_image_seq_len:
            raise ValueError(
                f"max_image_seq_len must be more than base_image_seq_len, {self.base_image_seq_len}, not "
                f"{self.max_image_seq_len}"
            )
        return self


def shift_of_size(folder: Path, tokens: int) -> float | None:
    """Return the shift that the scheduler of a pipeline folder has for samples of so many tokens.

    It is exp(mu), with mu linear in the tokens. None for a folder without a scheduler, or with one of a fixed shift.
    """
    file = folder / "scheduler" / "scheduler_config.json"
    config = read_as(SchedulerConfig, file) if file.is_file() else SchedulerConfig()
    if not config.use_dynamic_shifting:
        return None
    part = (tokens - config.base_image_seq_len) / (config.max_image_seq_len - config.base_image_seq_len)
    return math.exp(config.base_shift + part * (config.max_shift - config.base_shift))


def note_shift(folder: Path, tokens: int, shift: float) -> str:
    """Return a note if the run's shift is another one than the model's scheduler has for its samples, else ""."""
    own = shift_of_size(folder, tokens)
    if own is None or abs(shift / own - 1) < NEAR:
        return ""
    return f"sampler.shift is {shift:g}, but the model's scheduler has {own:.3f} for samples of {tokens} tokens"
