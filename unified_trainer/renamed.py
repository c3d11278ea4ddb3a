"""Names of version 0.1.0 and what they are called now; delete this file with the version after next.

A renamed setting or metric on the command line is refused with its new name. Saved config files and checkpoints of
0.1.0 are translated as they are read.
"""

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

# Old key as a regular expression, and its new name. None: the setting was removed.
SETTINGS: tuple[tuple[str, str | None], ...] = (
    (r"teacher\.(activation_checkpointing|keep_products)", None),
    (r"(\w+|\w+\.(?:high|low))\.clip_norm", r"\1.max_grad_norm"),
    (r"(student|critic)\.decay", r"\1.lr_schedule"),
    (r"(student|critic)\.decay_updates", r"\1.lr_decay_updates"),
    (r"(\w+)\.(?:activation_checkpointing|selective_checkpointing|keep_products)", r"\1.activation_memory"),
    (r"algorithm\.keep_samples", "algorithm.best_of_n"),
    (r"algorithm\.refill_rounds", "algorithm.dynamic_sampling_rounds"),
    (r"algorithm\.shape\.(\w+)", r"algorithm.objective_parameters.\1"),
    (r"algorithm\.calendar", "algorithm.update_schedule"),
    (r"algorithm\.critic_first", "algorithm.critic_warmup_steps"),
    (r"sampler\.step_list", "sampler.step_sigmas"),
    (r"parallel\.reshard", "parallel.reshard_after_forward"),
    (r"parallel\.gradients", "parallel.reduce_gradients"),
    (r"validation\.averaged", "validation.ema"),
    (r"sentinel\.(\w+)", r"hacking_monitor.\1"),
)
BALANCE = "algorithm.expert_balance"  # now a setting of the role whose noise levels it balances
# Added to the message of a renamed flag, by the last part of its name.
UNITS = {
    "step_list": ", in [0, 1] instead of thousandths",
    "activation_checkpointing": " full",
    "selective_checkpointing": " selective",
    "keep_products": " selective",
}
# Settings whose null was the tiny world's; now they are texts, and the empty one is "not given".
TINY = ("prompts", "validation.prompts", "data.path")
METRICS = {
    "k": "approx_kl",
    "k_noise": "log_ratio_noise_floor",
    "outside": "clip_fraction",
    "dead": "zero_gradient_fraction",
    "advantage_zero": "frac_zero_advantage",
    "filtered_groups": "frac_zero_std_groups",
    "refilled_groups": "resampled_groups",
    "critic_alarm": "critic_to_teacher_error",
    "judge": "accuracy",
    "judge_std": "accuracy_std",
    "judge_colour": "accuracy/color",
    "judge_shape": "accuracy/shape",
    "judge_direction": "accuracy/direction",
    "sentinel": "reward_hacking",
}
# Kinds of checkpoint state: present name, and name in 0.1.0.
STATE = {"loader/failures": "feed/failures", "reference/copied": "reference/followed", "old/copied": "old/followed"}


def new_setting(key: str, method: str) -> str | None:
    """Return the present name of a setting of 0.1.0: itself if it was not renamed, None if it was removed."""
    if key == BALANCE:
        return "student.expert_balance" if method == "finetune" else "critic.expert_balance"
    for old, new in SETTINGS:
        if re.fullmatch(old, key):
            return None if new is None else re.sub(old, new, key)
    return key


def translate_settings(flat: Mapping[str, Any], method: str, known: Collection[str]) -> dict[str, Any]:
    """Return the settings of a saved config file under their present names.

    `known` are the settings that runs of the method have. A method of one's own may have one with an old name, which is
    kept. Files of 0.1.0 hold the settings of all roles of all methods: those of other roles are left out.
    """
    flat = {key: "tiny" if value is None and key in TINY else value for key, value in flat.items()}
    if all(key in known or new_setting(key, method) == key for key in flat):
        return flat
    kept = {}
    for key, value in flat.items():
        name = key if key in known else new_setting(key, method)
        if name is None or (name not in known and name.split(".")[0] in ("teacher", "critic")):
            continue
        if key == "sampler.step_list":
            value = [step / 1000 for step in value]
        if name != key and name.endswith(".activation_memory"):
            value = _activation_memory(flat, name.partition(".")[0])
        if key == "best_metric":
            value = METRICS.get(value, value)
        kept[name] = value
    return kept


def translate_metadata(metadata: dict[str, Any]) -> dict[str, Any]:
    """Return a checkpoint's metadata under present names."""
    found = dict(metadata)
    if "sentinel" in found:
        found["hacking_monitor"] = _metrics(found.pop("sentinel"))
        found["metrics"] = _metrics(found.get("metrics", {}))
    sampler = found.get("sampler")
    if sampler and "step_list" in sampler:
        levels = [step / 1000 for step in sampler["step_list"]]
        found["sampler"] = {key: value for key, value in sampler.items() if key != "step_list"} | {
            "step_sigmas": levels
        }
    return found


def stored_key(folder: Path, key: str) -> str:
    """Return the name of a tensor in a checkpoint folder, which may be of 0.1.0."""
    for new, old in STATE.items():
        if f"{key}/".startswith(f"{new}/") and not (folder / new).is_dir() and (folder / old).is_dir():
            return old + key.removeprefix(new)
    return key


def _activation_memory(flat: Mapping[str, Any], role: str) -> str:
    """Return in one word what two switches of a role said."""
    if not flat.get(f"{role}.activation_checkpointing"):
        return "none"
    kept = (f"{role}.selective_checkpointing", f"{role}.keep_products")
    return "selective" if any(flat.get(key) for key in kept) else "full"


def _metrics(values: Mapping[str, float]) -> dict[str, float]:
    return {METRICS.get(name, name): value for name, value in values.items()}
