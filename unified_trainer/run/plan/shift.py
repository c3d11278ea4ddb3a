"""A model's scheduler: what its network predicts, and how its shift of noise levels differs from a run's."""

import math
from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.input_files import Schema, read_as
from unified_trainer.sampling.solver import SamplerConfig

NEAR = 0.01  # of the shift


class SchedulerConfig(Schema):
    """scheduler_config.json, as far as the shift and what the network predicts depend on it."""

    class_name: str = Field("", alias="_class_name")
    prediction_type: str | None = "flow_prediction"
    shift: float | None = Field(None, gt=0, le=1e6)  # as FlowMatchEulerDiscreteScheduler names it
    flow_shift: float | None = Field(None, gt=0, le=1e6)  # as UniPC and others name it
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

    It is exp(mu), with mu linear in the tokens, or fixed. None for a folder without a scheduler or shift.
    """
    config = _config(folder)
    if not config.use_dynamic_shifting:
        return config.flow_shift if config.shift is None else config.shift
    part = (tokens - config.base_image_seq_len) / (config.max_image_seq_len - config.base_image_seq_len)
    return math.exp(config.base_shift + part * (config.max_shift - config.base_shift))


def _config(folder: Path) -> SchedulerConfig:
    file = folder / "scheduler" / "scheduler_config.json"
    config = read_as(SchedulerConfig, file) if file.is_file() else SchedulerConfig()
    if config.prediction_type not in (None, "flow_prediction"):
        raise UserError(
            f"{file}: prediction_type is {config.prediction_type}, but networks predict velocities here: take a model "
            "of flow matching; if this is one, write flow_prediction"
        )
    return config


def note_scheduler(folder: Path, tokens: int, sampler: SamplerConfig, *, chosen: bool = False) -> str:
    """Return notes on what the model's scheduler does and the run's sampler does not; UserError for no velocities.

    `chosen` says that the recipe was made for this model: its shift then needs no note beside a fixed one.
    """
    config, own = _config(folder), shift_of_size(folder, tokens)
    notes = []
    if "LCM" in config.class_name and sampler.solver != "sde":
        notes += [
            f"the model's scheduler, {config.class_name}, adds fresh noise at each step, as --sampler.solver sde does"
        ]
    unlike = own is not None and abs(sampler.shift / own - 1) >= NEAR
    if unlike and not sampler.step_sigmas and (config.use_dynamic_shifting or not chosen):
        of = f" for samples of {tokens} tokens" if config.use_dynamic_shifting else ""
        notes += [f"sampler.shift is {sampler.shift:g}, but the model's scheduler has {own:.3f}{of}"]
    return "; ".join(notes)
