"""Where the samples of a method with rollouts should be made: in the training processes, or apart, by workers."""

from dataclasses import replace

from unified_trainer.parallel.mesh import ParallelConfig
from unified_trainer.roles.role import TrainableConfig
from unified_trainer.run.registry import method_named
from unified_trainer.tools.plan.estimate import Estimate
from unified_trainer.tools.plan.hardware import gib
from unified_trainer.tools.plan.memory import BF16, FP32, SAMPLING, Sizes, held_networks, memory_of

TO_CPU = 5e9  # assumed: bytes a second from a card to CPU memory that is not pinned
# Parts of a phase; samples go to training when they are made.
OF_WORKERS = ("activations", "gathered weights", "KV cache", "VAE", "scorers")


def placement(planned: Estimate, usable: float) -> str | None:
    """Return where to make the samples and why, in words; None for a method that asks for none.

    The training processes make them where they can, because both phases then have all cards and no weights are sent;
    a card for workers waits for training, or makes samples ahead, with older weights.
    """
    if not method_named(planned.run.method).sampled_by:
        return None
    there, offloaded = (_sampling(planned, offload=offload) for offload in (False, True))
    if there <= usable:
        return f"in the training processes: {gib(there)} GiB a card, {gib(offloaded)} with --rollouts.offload"
    if offloaded <= usable:
        return (
            f"in the training processes with --rollouts.offload: {gib(offloaded)} GiB a card in place of {gib(there)}"
        )
    apart, ranks = _apart(planned), planned.run.rollouts.ranks
    share = f" on each of {ranks} cards" if ranks > 1 else ""
    needs = f"the training processes need {gib(offloaded)} GiB a card even with --rollouts.offload"
    if apart <= usable:
        return f"apart, by --rollouts.workers: {needs}, a worker {gib(apart)}{share}"
    return (
        f"nowhere: {needs}, a worker {gib(apart)}{share}; raise rollouts.ranks, or lower algorithm.rollout_batch or "
        "the size of the videos"
    )


def weights_for_workers(planned: Estimate) -> str | None:
    """Return what rollout workers cost a training process in each step, in words; None for a run without them."""
    run, sizes = planned.run, planned.sizes
    if not run.rollouts.workers:
        return None
    method = method_named(run.method)
    source = method.roles[method.sampled_by].copy_of or method.sampled_by
    networks = held_networks(planned.counts, sizes).items()
    shard = sum(network.trained for (name, _), network in networks if name == source) / sizes.shards
    config = run.roles[source]
    halved = config.precision == "bf16" and not (isinstance(config, TrainableConfig) and config.adapter.rank)
    copied, sent = FP32 * shard, (BF16 if halved else FP32) * shard
    if not run.rollouts.ahead:
        return f"{gib(sent)} GiB packed and sent by a rank, while training waits for samples"
    waited = f"{copied / TO_CPU:.2g} s of waiting at {TO_CPU / 1e9:g} GB/s"
    return f"{gib(copied)} GiB copied by a rank ({waited}), {gib(sent)} packed and sent beside training"


def _sampling(planned: Estimate, *, offload: bool) -> float:
    run = planned.run
    whole = run.parallel.offload_weights and run.parallel.offload_optimizer
    rollouts = replace(run.rollouts, offload=offload and not whole)
    memory = memory_of(planned.counts, replace(planned.sizes, run=replace(run, rollouts=rollouts)))
    return max(memory.total(phase) for phase in SAMPLING if phase in memory.phases)


def _apart(planned: Estimate) -> float:
    """Return the peak of a card of a rollout worker, whose cards share the role that samples.

    The worker scores its samples too, unless reward workers do.
    """
    counts, sizes = planned.counts, _of_worker(planned)
    memory = memory_of(counts, sizes)
    sampler = counts.roles[method_named(planned.run.method).sampled_by].backbones.values()
    weights = sum(
        network.weights
        for (name, expert), network in held_networks(counts, sizes).items()
        if counts.roles[name].backbones[expert] in sampler
    )
    apart = planned.run.rollouts.reward_workers
    own, scorers = (SAMPLING[:1], 0.0) if apart else (SAMPLING, memory.always["scorers"])
    phases = [sum(memory.phases[one].get(part, 0.0) for part in OF_WORKERS) for one in own if one in memory.phases]
    return weights + scorers + memory.always["VAE"] + max(phases)


def _of_worker(planned: Estimate) -> Sizes:
    """Return what the memory of a card of a rollout worker depends on."""
    ranks = planned.run.rollouts.ranks
    run = replace(planned.run, parallel=ParallelConfig(sequence=ranks))
    return replace(planned.sizes, ranks=ranks, run=run, copies=True)
