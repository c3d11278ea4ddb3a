"""Runs of methods that match a causal student chunk by chunk, on the small networks.

Chunks of two latent frames after a first one of its own; teacher and critic know three frames of nine.
"""

import dataclasses

from helpers import (
    ALONE,
    CAPTIONS,
    FEW_STEPS,
    RecordingCritic,
    RecordingStudent,
    small_causal,
    small_model,
    tiny_codec,
)

from unified_trainer.basics.requests import Request
from unified_trainer.data.loader import Loader
from unified_trainer.data.prompts import Prompts
from unified_trainer.methods.base import Method
from unified_trainer.methods.chunk_matching import ChunkMatchingConfig
from unified_trainer.numerics.chunks import ChunkConfig
from unified_trainer.roles.backbone import Backbone
from unified_trainer.roles.role import Frozen, RoleConfig, TrainableConfig
from unified_trainer.run.trainer import Trainer
from unified_trainer.sampling.solver import SamplerConfig

FRAMES, KNOWN = 9, 3
CHUNKS = ChunkConfig(chunk_frames=2, independent_first_frame=True)
SAMPLER = dataclasses.replace(FEW_STEPS, chunks=CHUNKS)
KEPT = TrainableConfig(max_grad_norm=0.0)


def causal_student() -> RecordingStudent:
    return RecordingStudent("student", Backbone(small_causal(), ALONE, trained=True), KEPT)


def trainer_of(
    method: type[Method], config: ChunkMatchingConfig, sampler: SamplerConfig = SAMPLER, frames: int = FRAMES
) -> Trainer:
    teacher = Frozen("teacher", Backbone(small_model(1), ALONE), RoleConfig())
    critic = RecordingCritic("critic", Backbone(small_model(2), ALONE, trained=True), KEPT)
    roles = {"student": causal_student(), "critic": critic}
    loader = Loader(Prompts(Request.of(CAPTIONS)), tiny_codec(), config.plan(), (16, frames, 2, 2), "", 0, ALONE)
    parts = {"loader": loader, "codec": tiny_codec()}
    given = {name: parts[name] for name in method.parts()}
    return Trainer(method(config, sampler, **roles, teacher=teacher, **given), roles, loader, ALONE, seed=0)
