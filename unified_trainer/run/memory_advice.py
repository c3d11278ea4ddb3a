"""Advice for a run that ran out of memory."""

from collections.abc import Iterator
from contextlib import contextmanager

from unified_trainer.parallel.device import out_of_memory
from unified_trainer.roles.role import TrainableConfig
from unified_trainer.run.settings.config import RunConfig

ADVISED = 3  # settings named


@contextmanager
def memory_advice(run: RunConfig) -> Iterator[None]:
    """Add to an out-of-memory error the settings that lower memory most for this run."""
    try:
        yield
    except RuntimeError as error:
        if out_of_memory(error):
            error.add_note(f"out of memory: {'; '.join(advice(run)[:ADVISED])}")
        raise


def advice(run: RunConfig) -> list[str]:
    """Return ways to lower the memory of a run, largest effect first; those already taken are left out."""
    settings = []
    trained = {name: config for name, config in run.roles.items() if isinstance(config, TrainableConfig)}
    for name, config in trained.items():
        if config.activation_memory != "full":
            less = "selective" if config.activation_memory == "none" else "full"
            settings.append(f"set --{name}.activation-memory {less}")
    plan = run.algorithm.plan()
    if plan.micro_batch > 1:
        settings.append(f"lower --{plan.keys[3].replace('_', '-')} (now {plan.micro_batch})")
    for name, config in trained.items():
        if not config.adapter.rank:
            settings.append(f"train an adapter: --{name}.adapter.rank 16")
        if config.precision == "fp32":
            settings.append(f"set --{name}.precision bf16")
    if not (run.parallel.offload_optimizer or all(config.adapter.rank for config in trained.values())):
        settings.append("keep moments in CPU memory: --parallel.offload-optimizer")
    if not run.parallel.offload_weights:
        settings.append("use more ranks with --parallel.shard, or --parallel.offload-weights")
    settings.append("lower --video.frames, --video.height or --video.width")
    return settings
