"""The metrics in the groups of docs/metrics.md, and the healthy ranges that it states as numbers.

Placeholders in names are those of that page: NAME, S, LAG and ROLE.
"""

import math
import re
from collections.abc import Collection
from dataclasses import dataclass, replace

PLACEHOLDERS = {"NAME": r"[\w-]+", "S": r"\d+", "LAG": r"\d+", "ROLE": r"[a-z_]+(?:/(?:high|low))?"}
OTHER = "Other metrics"  # of methods and scorers outside the package

GROUPS: dict[str, str] = {
    "Reward and advantages": """reward reward_std reward_std_in_groups reward_std_between_groups reward/NAME
        reward/NAME_std_in_groups reward/retried frac_zero_advantage frac_zero_std_groups frac_below_threshold_groups
        skipped_updates resampled_groups failed_groups lag lag_max""",
    "Policy update": """log_ratio log_ratio_abs_max approx_kl approx_kl/S log_ratio_noise_floor
        log_ratio_noise_floor/S clip_fraction zero_gradient_fraction u_mean u_p50 u_p90 u_p99 ess approx_kl/lag_LAG
        clip_fraction/lag_LAG zero_gradient_fraction/lag_LAG ess/lag_LAG importance_weight importance_weight_truncated
        clip_low clip_high trust_region_left kl kl_coefficient window_first transitions_high transitions_low loss
        policy_gap old_decay""",
    "Value function": "explained_variance explained_variance/S value_mean value_loss",
    "Distillation": """critic_to_teacher_error critic_loss dmd_loss gap_low gap_mid gap_high sample_power gan_loss
        gan_critic_loss tilt_ess tilt_capped reward_gradient_loss loss validation/power_to_teacher
        validation/saturation_to_teacher validation/motion_to_teacher validation/diversity_to_teacher
        guard_alarm validation/guard_alarm""",
    "Optimizer": "ROLE/grad_norm ROLE/learning_rate",
    "Validation": """validation/reward validation/reward_std validation/reward/NAME validation/reward/NAME_std
        validation/accuracy validation/accuracy_std validation/accuracy/color validation/accuracy/shape
        validation/accuracy/direction validation/frechet validation/seconds validation/worker_seconds/NAME
        validation/reward_hacking""",
    "Pixels": """pixels/NAME validation/pixels/NAME validation/pixels/NAME_std pixels/diversity
        validation/pixels/diversity""",
    "Run": """rollbacks seconds seconds/NAME seconds/weights worker_seconds/copy_weights worker_seconds/rollout
        worker_seconds/score worker_samples_per_second samples_gib weights_gib worker_deaths
        validation/worker_deaths samples_per_second tokens_per_second model_flops_per_second mfu peak_memory_gib_max""",
}
# Metrics that one chart shows together while there is one run: the chart's title by the documented name.
TOGETHER = {
    "approx_kl/S": "approx_kl/S",
    "log_ratio_noise_floor/S": "log_ratio_noise_floor/S",
    "explained_variance/S": "explained_variance/S",
    "approx_kl/lag_LAG": "approx_kl/lag_LAG",
    "clip_fraction/lag_LAG": "clip_fraction/lag_LAG",
    "zero_gradient_fraction/lag_LAG": "zero_gradient_fraction/lag_LAG",
    "ess/lag_LAG": "ess/lag_LAG",
    "u_mean": "u",
    "u_p50": "u",
    "u_p90": "u",
    "u_p99": "u",
    "gap_low": "gap",
    "gap_mid": "gap",
    "gap_high": "gap",
    "seconds/NAME": "seconds by phase",
    "seconds/weights": "seconds by phase",
    "validation/accuracy/color": "validation/accuracy by attribute",
    "validation/accuracy/shape": "validation/accuracy by attribute",
    "validation/accuracy/direction": "validation/accuracy by attribute",
}
STACKED = "seconds by phase"  # parts of a sum


@dataclass(frozen=True)
class Healthy:
    """The healthy range of a metric: fixed, or relative to the first value of the run.

    `low` and `high` are bounds. `fall` and `drift` name a setting in standard deviations of the samples below, or
    around, the first value; `share` names a setting with a fraction of the first value; `high_settings` name settings
    whose smallest value is the upper bound.
    """

    low: float | None = None
    high: float | None = None
    excluded: bool = False  # whether the bounds themselves are outside
    mean_of: int = 1  # successive values whose mean is compared
    fall: str = ""
    drift: str = ""
    share: str = ""
    high_settings: tuple[str, ...] = ()
    held_out: bool = False  # only where no reward contains the metric
    advice: str = ""


_CONSTANT = Healthy(low=0.0, excluded=True, advice="The scorers do not distinguish samples: change the reward.")
_DRIFT = Healthy(
    drift="hacking_monitor.drift", advice="Look at the videos; change the reward or add a KL if the reward rises."
)
_ALIKE = Healthy(
    share="hacking_monitor.collapse",
    advice="Samples of a prompt become alike: add a KL or lower student.learning_rate.",
)
_FALL = Healthy(
    fall="hacking_monitor.fall",
    held_out=True,
    advice="Falls while the reward rises: reward hacking. Stop earlier, add a KL, or change the reward.",
)
_LIKE_TEACHER = Healthy(
    low=0.5, high=2.0, advice="Look at the videos; train the critic more, or lower student.learning_rate."
)
_DIVERSE = replace(_LIKE_TEACHER, high=3.0)
_ALARM = Healthy(high=0.0, advice="Look at the samples; train the critic more or lower student.learning_rate.")
_YOUNGER = "make samples less ahead"
HEALTHY: dict[str, Healthy] = {
    "reward_std": _CONSTANT,
    "reward_std_in_groups": Healthy(
        low=0.0, excluded=True, advice="Raise algorithm.eta, use distinct initial noise, or harder prompts."
    ),
    "reward/NAME_std_in_groups": _CONSTANT,
    "reward/retried": Healthy(high=0.0, advice="Repair the device, disk or connection of the scorer."),
    "skipped_updates": Healthy(high=0.0, advice="Loosen the filters of groups, or raise algorithm.num_samples."),
    "approx_kl": Healthy(
        high_settings=("algorithm.clip_low", "algorithm.clip_high"),
        excluded=True,
        advice="Lower student.learning_rate, or bound it with algorithm.trust_region.",
    ),
    "zero_gradient_fraction/lag_LAG": Healthy(high=0.2, advice=f"Set algorithm.correction, {_YOUNGER}."),
    "ess/lag_LAG": Healthy(low=0.5, excluded=True, advice=f"Few samples carry the update: {_YOUNGER}."),
    "importance_weight_truncated": Healthy(
        high=0.1, excluded=True, advice="Raise algorithm.weight_max, or make samples less ahead."
    ),
    "explained_variance": Healthy(low=0.0, excluded=True, advice="Change value.learning_rate, or warm the value up."),
    "critic_to_teacher_error": Healthy(
        high=1.0, mean_of=8, advice="Train the critic more: critic.learning_rate, algorithm.student_every."
    ),
    "validation/saturation_to_teacher": _LIKE_TEACHER,
    "validation/motion_to_teacher": _LIKE_TEACHER,
    "validation/diversity_to_teacher": _DIVERSE,
    "guard_alarm": _ALARM,
    "validation/guard_alarm": _ALARM,
    "rollbacks": Healthy(high=0.0, advice="The run went back to a checkpoint; its terminal says why."),
    "gan_critic_loss": Healthy(high=2 * math.log(2), advice="The discriminator is worse than none."),
    "validation/reward_std": _CONSTANT,
    "validation/reward/NAME": _FALL,
    "validation/accuracy": _FALL,
    "validation/reward_hacking": Healthy(high=0.0, advice="Look at the samples; stop, add a KL or change the reward."),
    "pixels/NAME": _DRIFT,
    "validation/pixels/NAME": _DRIFT,
    "pixels/diversity": _ALIKE,
    "validation/pixels/diversity": _ALIKE,
    "worker_deaths": Healthy(high=0.0, advice="Read what the workers said."),
}


def _expression(name: str) -> re.Pattern[str]:
    words = re.split(r"(\bNAME|\bS\b|LAG\b|\bROLE\b)", name)
    return re.compile("".join(PLACEHOLDERS.get(word) or re.escape(word) for word in words))


DOCUMENTED = [(group, name, _expression(name)) for group, names in GROUPS.items() for name in names.split()]


def documented_name(metric: str) -> str | None:
    """Return the name in docs/metrics.md that a metric falls under, with its placeholders; the most literal one."""
    found = [name for _, name, expression in DOCUMENTED if expression.fullmatch(metric)]
    return max(found, key=_literal, default=None)


def grouped(metrics: Collection[str]) -> dict[str, list[str]]:
    """Return metrics by group, both in the order of docs/metrics.md; unknown ones come last.

    A name that two groups have belongs to the one with more metrics of the run.
    """
    names = {metric: documented_name(metric) for metric in metrics}
    groups: dict[str, list[str]] = {}
    for group, documented, _ in DOCUMENTED:
        groups.setdefault(documented, []).append(group)
    sizes = {group: sum(groups[name] == [group] for name in names.values() if name) for group in GROUPS}
    order = {(group, documented): i for i, (group, documented, _) in enumerate(DOCUMENTED)}
    found: dict[str, list[tuple[int, str]]] = {group: [] for group in (*GROUPS, OTHER)}
    for metric, name in names.items():
        if name is None:
            found[OTHER].append((0, metric))
        else:
            group = max(reversed(groups[name]), key=lambda one: sizes[one])
            found[group].append((order[group, name], metric))
    return {group: [metric for _, metric in sorted(rows)] for group, rows in found.items() if rows}


def _literal(name: str) -> int:
    """Return the number of characters that are no placeholder."""
    return len(re.sub("|".join(PLACEHOLDERS), "", name))
