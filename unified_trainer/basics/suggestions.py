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
    "epochs": ("steps",),
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
    "lr_warmup_steps": ("warmup_updates",),
    "max_steps": ("steps",),
    "max_train_steps": ("steps",),
    "mixed_precision": ("precision",),
    "model": ("student.path",),
    "model_path": ("student.path",),
    "num_epochs": ("steps",),
    "num_inference_steps": ("num_steps",),
    "num_train_epochs": ("steps",),
    "output_dir": ("output",),
    "pretrained_model_name_or_path": ("student.path",),
    "report_to": ("tracking.wandb",),
    "resume_from": ("resume",),
    "resume_from_checkpoint": ("resume",),
    "save_steps": ("checkpoint_every",),
    "train_batch_size": ("batch_size", "num_prompts"),
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
    if found := [*_ending(last, known), *next(filter(None, usual), [])]:
        return _shortest([one for one in found if section and one.startswith(f"{section}.")] or found)
    similar = {}
    for one in known:
        place, _, name = one.rpartition(".")
        alike = _similarity(last, name)
        similar[one] = alike if place == section else 0.85 * max(_similarity(key, one), alike)
    least = max(CLOSE, max(similar.values(), default=0.0) - 0.05)
    return _shortest(sorted((one for one in known if similar[one] >= least), key=lambda one: -similar[one]))


def multiples_near(value: int, unit: int) -> str:
    """Return the multiples of `unit` below and above a value, in words."""
    below = value // unit * unit
    return f"{below} or {below + unit}" if below > 0 else f"{unit}"


def must_know(what: str, name: str, known: Sequence[str]) -> None:
    """Raise UserError, with the nearest known name, unless `name` is known."""
    if name not in known:
        near = sorted(known, key=lambda one: -_similarity(name, one))[:1]
        hint = "".join(f"; did you mean {one}?" for one in near if _similarity(name, one) > 0.45) or "."
        raise UserError(f"{what} {name!r} is not known{hint} Have: {', '.join(known)}")


def _shortest(keys: list[str]) -> list[str]:
    """Return the first of those keys that lie in the fewest groups."""
    least = min((one.count(".") for one in keys), default=0)
    return [one for one in keys if one.count(".") == least][:SHOWN]


def _ending(end: str, known: Collection[str]) -> list[str]:
    return [one for one in known if one == end or one.endswith(f".{end}")]


def _similarity(left: str, right: str) -> float:
    return SequenceMatcher(None, left.lower(), right.lower()).ratio()
