"""The table that a run prints at its start: its models, reward, prompts and video size."""

import math
from collections.abc import Mapping

from unified_trainer.data.loader import Source
from unified_trainer.rewards.base import ScorerConfig
from unified_trainer.roles.role import Role, Trainable
from unified_trainer.run.plan.plan import RunPlan
from unified_trainer.run.plan.roles import RolePlan
from unified_trainer.run.settings.config import RunConfig


def summary(run: RunConfig, plan: RunPlan, roles: Mapping[str, Role], source: Source) -> dict[str, str]:
    """Return the rows of the table by name."""
    rows = {name: _role(plan.roles[name], role) for name, role in roles.items()}
    encoders = run.encoders.on(next(iter(roles.values())).device.type)
    rows["text encoder"] = encoders.text_precision
    ways = {
        "in CPU memory between uses": encoders.offload,
        "one sample at a time": encoders.vae_slicing,
        f"tiles of {encoders.vae_tile} pixels": encoders.vae_tile,
        "channels last": encoders.vae_channels_last,
    }
    rows["VAE"] = ", ".join([encoders.vae_precision, *(words for words, on in ways.items() if on)])
    for name, config in run.reward.named().items():
        rows["scorer " + name] = _scorer(config)
    if run.reward.offload:
        rows["networks of scorers"] = "in CPU memory between uses, of those that declare them"
    if not run.reward.named():
        rows["reward"] = "none: validations measure pixels alone"
    origin = run.prompts if run.trains_on == "prompts" else run.data.path
    rows[run.trains_on] = f"{origin}: {len(source)}"
    rows["validation prompts"] = (
        f"{run.validation.prompts or f'the first of {origin}'}: {run.validation.num_samples} samples"
    )
    for name, prompts in plan.validation_sets.items():
        rows[f"validation set {name}"] = f"{run.validation.sets[name]}: {len(prompts)} prompts"
    video, latent_shape = run.video, plan.latent_shape
    tokens = plan.family.tokens(plan.folder, latent_shape)
    rows["video"] = f"{video.frames} frames of {video.height} x {video.width} pixels"
    rows["latents"] = f"{' x '.join(map(str, latent_shape))} (channels, frames, height, width), {tokens} tokens"
    return rows


def _role(plan: RolePlan, role: Role) -> str:
    """Folder, size, precision, adapters made elsewhere, and what is trained."""
    passes = role.precision + (", blocks compiled" if role.compiled else "")
    line = f"{plan.path}: {_millions(role.parameters)}, {passes}; "
    for how, files in (("merged with", plan.merged), ("starts from", plan.starts)):
        line += "".join(f"{how} {file.name}; " for file in files.values())
    if not isinstance(role, Trainable):
        return line + "not trained"
    trained = sum(math.prod(p.shape) for p in role.weights.values())
    if role.config.adapter.rank:
        return line + f"trains an adapter of rank {role.config.adapter.rank}, {_millions(trained)}"
    return line + ("trains all" if trained == role.parameters else f"trains {_millions(trained)}")


def _scorer(config: ScorerConfig) -> str:
    every = f"every {config.frame_stride}th frame"
    frames = {"first": "first frame", "several": "up to 8 frames", "every": every, "all": "all frames"}[config.frames]
    what = f"weight {config.weight:g}" if config.weight else "held out: measured at validations only"
    network = [f"{config.path}, {config.precision}"] if config.path else []
    process = [f"in {config.python}"] if config.python else []
    own = [f"{key} {value}" for key, value in config.settings.items()]
    frames += f", the best {config.top_fraction:.0%}" if config.top_fraction != 1 else ""
    return ", ".join([*network, *process, *own, frames, f"scale {config.scale:g}", what])


def _millions(count: int) -> str:
    return f"{count / 1e9:.2f} B parameters" if count >= 1e9 else f"{count / 1e6:.2f} M parameters"
