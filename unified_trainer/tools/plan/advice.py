"""The settings that lower a run's peak memory most, found by planning the run with each of them."""

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from unified_trainer.basics.errors import UserError
from unified_trainer.methods.rl.rollout_config import RolloutConfig
from unified_trainer.roles.role import TrainableConfig
from unified_trainer.run.registry import method_named
from unified_trainer.run.settings.command_line import with_settings
from unified_trainer.run.settings.config import RunConfig, flat, plain
from unified_trainer.tools.plan.estimate import Estimate, needs
from unified_trainer.tools.plan.memory import FIXED, Memory, memory_of

BEST = 3  # settings that are named
LEAST = 0.01  # of the peak that a setting must lower to be named
RANK = 16  # of the adapters that are tried


class Better(NamedTuple):
    """Settings as flags, and the peak in bytes with them."""

    flags: str
    peak: float


def better_settings(run: RunConfig, ranks: int, memory: Memory, usable: float) -> tuple[list[Better], Better | None]:
    """Return up to BEST settings, each with the peak that it alone gives, lowest first; and those of them together.

    A setting that lowers the peak by less than LEAST of it is left out. The second is None if one of them alone fits
    into `usable` bytes, or if there are fewer than two. Smaller passes, which take a rehearsal and traces of their own,
    are planned only if the peak that they cannot go below is among the best.
    """
    helpful, bound = list[tuple[Mapping[str, Any], float]](), partial(_bound, run, memory)
    for settings in sorted(candidates(run, ranks), key=bound):
        worst = helpful[-1][1] if len(helpful) == BEST else (1 - LEAST) * memory.total(memory.peak)
        if bound(settings) > worst:
            break
        lower = _peak(run, settings, ranks)
        if lower is not None and lower <= worst:
            helpful = sorted([*helpful, (settings, lower)], key=lambda pair: pair[1])[:BEST]
    alone = [_better(settings, lower) for settings, lower in helpful]
    if len(helpful) < 2 or alone[0].peak <= usable:
        return alone, None
    joined: dict[str, Any] = {}
    for settings, _ in reversed(helpful):  # of two values of one setting the better one stays
        joined |= settings
    if "parallel.offload_weights" in joined:  # nothing is left to leave the device for a rollout
        joined.pop("rollouts.offload", None)
    together = _peak(run, joined, ranks)
    return alone, None if together is None or together >= alone[0].peak else _better(joined, together)


def fitting_blocks(planned: Estimate, usable: float) -> Better | None:
    """Return the smallest number of blocks as activation_memory of all trained roles that fits `usable` bytes.

    None where selective fits, or full in all blocks does not: no number then is the answer.
    """
    trained = [name for name, config in planned.run.roles.items() if isinstance(config, TrainableConfig)]

    def peak(blocks: int) -> float:
        changes = {f"{name}.activation_memory": blocks or "selective" for name in trained}
        memory = memory_of(planned.counts, replace(planned.sizes, run=with_settings(planned.run, changes, "plan")))
        return memory.total(memory.peak)

    most = max(planned.sizes.models[name].size.layers for name in trained)
    if peak(most) > usable:
        return None
    fitting = bisect_left(range(most), True, key=lambda blocks: peak(blocks) <= usable)
    if not 0 < fitting < most:
        return None
    return _better({f"{name}.activation_memory": fitting for name in trained}, peak(fitting))


def _bound(run: RunConfig, memory: Memory, settings: Mapping[str, Any]) -> float:
    """Return the peak that fewer frames or samples in a pass cannot go below, 0 for other settings.

    No tensor of a pass shrinks by more than their share.
    """
    if not settings.keys() <= {"video.frames", run.algorithm.plan().keys[3], "algorithm.rollout_batch"}:
        return 0.0
    values = flat(plain(run))
    share = min(value / values[key] for key, value in settings.items())
    phases = (
        sum(size * (1 if part in FIXED else share) for part, size in parts.items()) for parts in memory.phases.values()
    )
    return sum(memory.always.values()) + max(phases)


def _peak(run: RunConfig, settings: Mapping[str, Any], ranks: int) -> float | None:
    """Return the peak in bytes with these settings; None if the run cannot have them."""
    try:
        memory = needs(with_settings(run, settings, "plan"), ranks).memory
    except UserError:
        return None
    return memory.total(memory.peak)


def _better(settings: Mapping[str, Any], peak: float) -> Better:
    return Better(" ".join(_flag(key, value) for key, value in settings.items()), peak)


def candidates(run: RunConfig, ranks: int) -> list[Mapping[str, Any]]:
    """Return changes of settings that lower memory and are not taken yet."""
    roles, parallel, values = run.roles.items(), run.parallel, flat(plain(run))
    trained = [(name, config) for name, config in roles if isinstance(config, TrainableConfig)]
    batches = [key for key in (run.algorithm.plan().keys[3], "algorithm.rollout_batch") if values.get(key, 1) > 1]
    fewest = max(2, ranks // parallel.sequence)
    validates_more = run.validate_every and run.validation.num_samples > fewest
    keeps_states = isinstance(run.algorithm, RolloutConfig) and run.algorithm.trajectories == "device"
    method, here = method_named(run.method), not (run.rollouts.offload or run.rollouts.workers)
    changes: list[Mapping[str, Any]] = [
        {f"{name}.activation_memory": "selective" for name, role in trained if role.activation_memory == "none"},
        {f"{name}.activation_memory": "full" for name, role in trained if role.activation_memory != "full"},
        {f"{name}.adapter.rank": RANK for name, role in trained if not role.adapter.rank},
        {f"{name}.precision": "bf16" for name, role in roles if role.precision == "fp32"},
        {f"{name}.ema_decay": 0.0 for name, role in trained if role.ema_decay},
        {f"{name}.ema_device": "cpu" for name, role in trained if role.ema_decay and role.ema_device == "same"},
        {f"{name}.moments": "bf16" for name, role in trained if role.moments == "fp32"},
        dict.fromkeys(batches, 1),
        {"validation.num_samples": fewest} if validates_more else {},
        {"video.frames": (run.video.frames - 1) // 8 * 4 + 1} if run.video.frames > 1 and not run.data.buckets else {},
        {"algorithm.trajectories": "cpu"} if keeps_states else {},
        {} if run.encoders.offload else {"encoders.offload": True},
        {"reward.offload": True} if method.uses_reward and not run.reward.offload else {},
        {"rollouts.offload": True} if method.sampled_by and here else {},
        {} if parallel.offload_optimizer else {"parallel.offload_optimizer": True},
        {"parallel.offload_weights": True, "parallel.offload_optimizer": True}
        if ranks > 1 and not parallel.offload_weights
        else {},
        {"parallel.replicate": 1} if parallel.replicate > 1 else {},
        {"parallel.sequence": 2 * parallel.sequence} if ranks % (2 * parallel.sequence) == 0 else {},
    ]
    return list(filter(None, changes))


def _flag(key: str, value: Any) -> str:
    name = key.replace("_", "-")
    if value is True:
        return f"--{name}"
    if value is False:
        section, _, last = name.rpartition(".")
        return f"--{section}.no-{last}"
    return f"--{name} {value:g}" if isinstance(value, int | float) else f"--{name} {value}"
