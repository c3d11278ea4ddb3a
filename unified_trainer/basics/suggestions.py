"""The known name, or the number, that a wrong one probably means."""

from collections.abc import Collection, Sequence
from difflib import SequenceMatcher

from unified_trainer.basics.errors import UserError

CLOSE = 0.6  # similarity in [0, 1] from which a name is suggested
SHOWN = 3  # names in one message

# What other trainers call a setting: the ends of our keys, in order of preference.
USUAL: dict[str, tuple[str, ...]] = {
    "adapter_rank": ("adapter.rank",),
    "batch_size_per_gpu": ("micro_batch", "update_batch"),
    "bf16": ("precision",),
    "bs": ("batch_size", "num_prompts"),
    "cfg": ("guidance_scale",),
    "cfg_scale": ("guidance_scale",),
    "checkpointing_steps": ("checkpoint_every",),
    "checkpoints_total_limit": ("keep_last",),
    "data_path": ("data.path", "prompts"),
    "dataset": ("data.path", "prompts"),
    "ema": ("ema_decay",),
    "eval_steps": ("validate_every",),
    "flow_shift": ("sampler.shift",),
    "grad_clip": ("max_grad_norm",),
    "gradient_accumulation_steps": ("micro_batch", "update_batch"),
    "gradient_checkpointing": ("activation_memory",),
    "group_size": ("num_samples",),
    "guidance": ("guidance_scale",),
    "lora_alpha": ("adapter.alpha",),
    "lora_path": ("adapter.path",),
    "lora_rank": ("adapter.rank",),
    "lr": ("learning_rate",),
    "lr_scheduler": ("lr_schedule",),
    "lr_warmup_ratio": ("warmup_ratio",),
    "lr_warmup_steps": ("warmup_updates",),
    "lr_warmup_steps_ratio": ("warmup_ratio",),
    "max_ckpt_to_keep": ("keep_last",),
    "max_steps": ("steps",),
    "max_train_steps": ("steps",),
    "mixed_precision": ("precision",),
    "model": ("student.path",),
    "model_path": ("student.path",),
    "num_epochs": ("epochs",),
    "num_inference_steps": ("num_steps",),
    "num_train_epochs": ("epochs",),
    "optimizer_offload": ("parallel.offload_optimizer",),
    "output_dir": ("output",),
    "param_offload": ("parallel.offload_weights",),
    "ppo_mini_batch_size": ("prompts_per_update",),
    "pretrained_model_name_or_path": ("student.path",),
    "rampup_batch_size": ("ramp_up.start",),
    "report_to": ("tracking.wandb",),
    "resume_from": ("resume",),
    "resume_from_checkpoint": ("resume",),
    "save_freq": ("checkpoint_every",),
    "save_limit": ("keep_last",),
    "save_steps": ("checkpoint_every",),
    "test_freq": ("validate_every",),
    "total_epochs": ("epochs",),
    "train_batch_size": ("batch_size", "num_prompts"),
    "train_files": ("data.path", "prompts"),
    "val_files": ("validation.prompts",),
    "val_freq": ("validate_every",),
    "val_only": ("validate_only",),
    "validation_steps": ("validate_every",),
    "warmup_steps": ("warmup_updates",),
    "wd": ("weight_decay",),
}
# What other trainers call the number of ranks, which torchrun sets.
RANKS = ("devices", "gpus", "n_gpus", "ngpus", "nnodes", "nproc_per_node", "num_gpus", "num_processes", "world_size")


def nearest(key: str, known: Collection[str]) -> list[str]:
    """Return the known keys, such as student.learning_rate, that a wrong key may mean: the likeliest first.

    Keys with the same last part, or with what other trainers call so, come before similar ones.
    """
    section, _, last = key.rpartition(".")
    usual = [_ending(end, known) for end in USUAL.get(last, ())]
    if same := [*_ending(last, known), *next(filter(None, usual), [])]:
        return _shortest([candidate for candidate in same if section and candidate.startswith(f"{section}.")] or same)
    similar = {}
    for candidate in known:
        place, _, name = candidate.rpartition(".")
        alike = _similarity(last, name)
        similar[candidate] = alike if place == section else 0.85 * max(_similarity(key, candidate), alike)
    least = max(CLOSE, max(similar.values(), default=0.0) - 0.05)
    return _shortest(
        sorted(
            (candidate for candidate in known if similar[candidate] >= least), key=lambda candidate: -similar[candidate]
        )
    )


def multiples_near(value: int, unit: int) -> str:
    """Return the multiples of `unit` below and above a value, in words."""
    below = value // unit * unit
    return f"{below} or {below + unit}" if below > 0 else f"{unit}"


def must_know(what: str, name: str, known: Sequence[str]) -> None:
    """Raise UserError, with the nearest known name, unless `name` is known."""
    if name not in known:
        near = sorted(known, key=lambda other: -_similarity(name, other))[:1]
        hint = "".join(f"; did you mean {other}?" for other in near if _similarity(name, other) > 0.45) or "."
        raise UserError(f"{what} {name!r} is not known{hint} Have: {', '.join(known)}")


def _shortest(keys: list[str]) -> list[str]:
    """Return the first of those keys that lie in the fewest groups."""
    least = min((key.count(".") for key in keys), default=0)
    return [key for key in keys if key.count(".") == least][:SHOWN]


def _ending(end: str, known: Collection[str]) -> list[str]:
    return [key for key in known if key == end or key.endswith(f".{end}")]


def _similarity(left: str, right: str) -> float:
    return SequenceMatcher(None, left.lower(), right.lower()).ratio()
