"""From settings to a trainer: what a run is made of, cheap checks before expensive ones."""

import inspect
from dataclasses import dataclass

from unified_trainer.config import RunConfig
from unified_trainer.data.clips import render_clips
from unified_trainer.data.feed import Feed, Source
from unified_trainer.data.parquet import ParquetClips
from unified_trainer.data.prompts import Prompts, read_prompts, training_prompts
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.registry import METHODS, family_of, load_scorer
from unified_trainer.roles.reward import Reward
from unified_trainer.roles.role import Trainable
from unified_trainer.trainer import Trainer
from unified_trainer.validation import Validation


@dataclass(frozen=True)
class Built:
    trainer: Trainer
    validation: Validation
    counts: dict[str, int]  # of one training step's batch


def build(run: RunConfig, mesh: Mesh) -> Built:
    """Everything that `run` names, with the roles that its method's constructor asks for."""
    if run.keep_last < 1:
        raise ValueError(f"keep_last must be at least 1, not {run.keep_last}")
    run.algorithm.check(run.sampler)
    plan = run.algorithm.plan()
    counts = plan.table(mesh.size)
    prompts = training_prompts() if run.prompts is None else read_prompts(run.prompts)
    family, folder = family_of(run.student.path)
    codec = family.codec(folder, mesh.device)
    latent_shape = codec.latent_shape(run.video.frames, run.video.height, run.video.width)
    reward = Reward(load_scorer(run.reward.path, run.reward.precision, mesh.device), codec, run.reward)
    student = Trainable("student", family.model(folder, mesh.device), run.student, mesh)

    method_type, _ = METHODS[run.method]
    parts = {"config": run.algorithm, "sampler": run.sampler, "student": student, "reward": reward}
    method = method_type(**{name: parts[name] for name in inspect.signature(method_type).parameters})
    if not method.learns_from_data:
        source: Source = Prompts(prompts)
    elif run.data.path:
        source = ParquetClips(run.data.path, codec, latent_shape)
    else:
        source = render_clips(run.data, codec, run.video, run.seed)
    feed = Feed(source, codec, plan, latent_shape, run.sampler.negative_prompt, run.seed, mesh)
    validation = Validation(run.validation, codec, reward, run.sampler, latent_shape, mesh)
    return Built(Trainer(method, {"student": student}, feed, mesh, seed=run.seed), validation, counts)
