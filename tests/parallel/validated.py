"""What the ranks of tests/parallel/test_validation.py do.

The test compares with the same function on one rank.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from helpers import small_model, tiny_codec

from unified_trainer.basics.requests import Request
from unified_trainer.data.clips import VideoConfig
from unified_trainer.data.prompts import validation_captions
from unified_trainer.data.tiny_world import FRAMES, SIZE
from unified_trainer.parallel.mesh import Mesh, ParallelConfig
from unified_trainer.rewards.reward import Reward, RewardConfig, ScorerConfig
from unified_trainer.rewards.scorers import load_scorers
from unified_trainer.roles.backbone import Backbone
from unified_trainer.roles.role import Trainable, TrainableConfig
from unified_trainer.run.settings.config import ValidationConfig
from unified_trainer.run.validation.distances import distances_of
from unified_trainer.run.validation.report import Validation
from unified_trainer.sampling.solver import SamplerConfig

CONFIG = ValidationConfig(num_samples=4, batch=2, num_videos=0, frechet_stride=8)
REWARD = RewardConfig(
    path="tiny", scorers={"sharpness": ScorerConfig(weight=0.5), "saturation": ScorerConfig(weight=0.0)}
)


def measured(mesh: Mesh, folder: Path, samples: int = CONFIG.num_samples) -> dict[str, float]:
    """One validation of an untrained student in the tiny world; its samples are in samples.jsonl of the folder."""
    config = replace(CONFIG, num_samples=samples)
    codec, (scorers, features) = tiny_codec(), load_scorers(REWARD, torch.device("cpu"))
    reward, sampler = Reward(scorers, codec, REWARD), SamplerConfig(num_steps=2, guidance_scale=1.0)
    student = Trainable("student", Backbone(small_model(), mesh, trained=True), TrainableConfig())
    shape = codec.latent_shape(FRAMES, SIZE, SIZE)
    requests = Request.of(validation_captions(config.num_samples))
    distances = distances_of(config, VideoConfig(FRAMES, SIZE, SIZE), codec, features, requests, mesh.device)
    validation = Validation(config, codec, reward, distances, sampler, requests, shape, mesh, 8.0)
    validation.start(student, 0)
    return validation.finish(folder, 0).metrics


def work(folder: Path, samples: int) -> None:
    torch.set_num_threads(1)
    mesh = Mesh.join("cpu", ParallelConfig())
    metrics = measured(mesh, folder, samples)
    if mesh.is_main:
        (folder / "metrics.json").write_text(json.dumps(metrics))
    mesh.leave()
