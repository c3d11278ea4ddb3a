"""The settings that lower a run's peak memory most, found by estimating the run with each of them."""

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from unified_trainer.basics.errors import UserError
from unified_trainer.methods.rl.rollout_config import RolloutConfig
from unified_trainer.roles.role import TrainableConfig
from unified_trainer.run.registry import method_named
from unified_trainer.run.settings.command_line import with_settings
from unified_trainer.run.settings.config import RunConfig, flat, plain
from unified_trainer.tools.plan.estimate import Estimate, estimate
from unified_trainer.tools.plan.memory import memory_of

BEST = 3  # settings that are named
LEAST = 0.01  # of the peak that a setting must lower to be named
RANK = 16  # of the adapters that are tried


class Better(NamedTuple):
    """Settings as flags, and the peak in bytes with them."""

    flags: str
    peak: float


def better_settings(run: RunConfig, ranks: int, peak: float, usable: float) -> tuple[list[Better], Better | None]:
    """Return up to BEST settings, each with the peak that it alone gives, lowest first; and those of them together.

    A setting that lowers the peak by less than LEAST of it is left out. The second is None if one of them alone fits
    into `usable` bytes, or if there are fewer than two.
    """
    helpful = []
    for settings in candidates(run, ranks):
        lower = _peak(run, settings, ranks)
        if lower is not None and lower <= (1 - LEAST) * peak:
            helpful.append((settings, lower))
    helpful = sorted(helpful, key=lambda pair: pair[1])[:BEST]
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


def _peak(run: RunConfig, settings: Mapping[str, Any], ranks: int) -> float | None:
    """Return the peak in bytes with these settings; None if the run cannot have them."""
    try:
        memory = estimate(with_settings(run, settings, "plan"), ranks).memory
    except UserError:
        return None
    return memory.total(memory.peak)


def _better(settings: Mapping[str, Any], peak: float) -> Better:
    return Better(" ".join(_flag(key, value) for key, value in settings.items()), peak)


def candidates(run: RunConfig, ranks: int) -> Iterator[Mapping[str, Any]]:
    """Yield changes of settings that lower memory and are not taken yet."""
    trained = {name: config for name, config in run.roles.items() if isinstance(config, TrainableConfig)}
    if plain := [name for name, role in trained.items() if role.activation_memory == "none"]:
        yield {f"{name}.activation_memory": "selective" for name in plain}
    if kept := [name for name, role in trained.items() if role.activation_memory != "full"]:
        yield {f"{name}.activation_memory": "full" for name in kept}
    if whole := [name for name, role in trained.items() if not role.adapter.rank]:
        yield {f"{name}.adapter.rank": RANK for name in whole}
    if exact := [name for name, role in run.roles.items() if role.precision == "fp32"]:
        yield {f"{name}.precision": "bf16" for name in exact}
    if averaged := [name for name, role in trained.items() if role.ema_decay]:
        yield {f"{name}.ema_decay": 0.0 for name in averaged}
    if near := [name for name in averaged if trained[name].ema_device == "same"]:
        yield {f"{name}.ema_device": "cpu" for name in near}
    if exact := [name for name, role in trained.items() if role.moments == "fp32"]:
        yield {f"{name}.moments": "bf16" for name in exact}
    key = run.algorithm.plan().keys[3]
    parts = [batch for batch in (key, "algorithm.rollout_batch") if _value(run, batch) > 1]
    if parts:
        yield dict.fromkeys(parts, 1)
    fewest = max(2, ranks // run.parallel.sequence)
    if run.validate_every and run.validation.num_samples > fewest:
        yield {"validation.num_samples": fewest}
    if run.video.frames > 1:
        yield {"video.frames": (run.video.frames - 1) // 8 * 4 + 1}  # half of the latent frames
    if isinstance(run.algorithm, RolloutConfig) and run.algorithm.trajectories == "device":
        yield {"algorithm.trajectories": "cpu"}
    if not run.encoders.offload:
        yield {"encoders.offload": True}
    if not run.reward.offload and method_named(run.method).uses_reward:
        yield {"reward.offload": True}
    if method_named(run.method).sampled_by and not (run.rollouts.offload or run.rollouts.workers):
        yield {"rollouts.offload": True}
    if not run.parallel.offload_optimizer:
        yield {"parallel.offload_optimizer": True}
    if ranks > 1 and not run.parallel.offload_weights:
        yield {"parallel.offload_weights": True, "parallel.offload_optimizer": True}
    if run.parallel.replicate > 1:
        yield {"parallel.replicate": 1}
    if ranks % (2 * run.parallel.sequence) == 0:
        yield {"parallel.sequence": 2 * run.parallel.sequence}


def _value(run: RunConfig, key: str) -> int:
    return flat(plain(run)).get(key, 1)


def _flag(key: str, value: Any) -> str:
    name = key.replace("_", "-")
    if value is True:
        return f"--{name}"
    if value is False:
        section, _, last = name.rpartition(".")
        return f"--{section}.no-{last}"
    return f"--{name} {value:g}" if isinstance(value, int | float) else f"--{name} {value}"
