"""The command plan: it says what a run needs, and whether it fits a machine, from its settings alone."""

import json as json_format
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from rich.table import Table

from unified_trainer.basics.ranges import Positive, PositiveFraction
from unified_trainer.basics.terminal import printable, say, show
from unified_trainer.run.exit_codes import DOES_NOT_FIT
from unified_trainer.run.plan.plan import described
from unified_trainer.run.settings.command_line import parse
from unified_trainer.run.settings.settings import AllRunFlags
from unified_trainer.tools.plan.advice import Better, better_settings, fitting_blocks
from unified_trainer.tools.plan.cost import CONVOLUTIONS, LINKS, PRODUCTS, PUBLISHED, TRAFFIC
from unified_trainer.tools.plan.estimate import Estimate, estimate
from unified_trainer.tools.plan.hardware import NODE, RESERVE, Hardware, gib, read_hardware
from unified_trainer.tools.plan.placement import placement, weights_for_workers
from unified_trainer.tools.plan.tracing import undisturbed

WIDTH = 140  # columns where the output is no terminal


@undisturbed()
def plan(
    hardware: str = "8xH200",
    mfu: PositiveFraction | None = None,
    bandwidth: Positive | None = None,
    price: Positive | None = None,
    json: bool = False,
    settings: AllRunFlags = (),
) -> int:
    """Say what a run needs and whether it fits; put plan before the flags of the run, such as --method.

    It computes memory by phase, network calls, FLOPs, time, bytes and checkpoints. Nothing is measured and no weight is
    read: a folder's configs, or published ones, are enough. Exit code 5: the run does not fit the hardware.

    Args:
        hardware: Number and kind of the accelerators, one rank on each: 8xH200, H100, 4xA100-40.
        mfu: Part of the dense bf16 peak that networks reached in a measurement. By default it is estimated from
            products and memory traffic.
        bandwidth: TB/s of the memory of a card, in place of its data sheet's.
        price: Price of a card for an hour, in any currency: the run's cost is then added.
        json: Print JSON instead of tables.
    """
    machine = replace(read_hardware(hardware), mfu=mfu)
    if bandwidth is not None:
        machine = replace(machine, bandwidth=bandwidth * 1e12)
    run = parse(settings)
    runs = run.by_bucket()
    estimates = {name: estimate(own, machine.count, bucket=name) for name, own in runs.items()}
    largest = max(runs, key=lambda name: _peak(estimates[name]))
    planned, run, peak = estimates[largest], runs[largest], _peak(estimates[largest])
    of_buckets = {name: _step(own, machine) for name, own in estimates.items() if name}
    fits = peak <= machine.usable
    if not json:
        _print(planned, machine, price, fits=fits)
        for name, numbers in of_buckets.items():
            say(f"bucket {name}: {', '.join(f'{key} {value:.3g}' for key, value in numbers.items())}")
    alone, together = ([], None) if fits else better_settings(run, machine.count, planned.memory, machine.usable)
    if not fits and (blocks := fitting_blocks(planned, machine.usable)) is not None:
        alone.append(blocks)
    if json:
        entries = [_entry(better) for better in alone]
        better = {"better_settings": entries, "better_settings_together": _entry(together) if together else None}
        better |= {"buckets": of_buckets} if of_buckets else {}
        say(json_format.dumps(_plain(planned, machine, price, better, fits=fits), indent=1))
    elif not fits:
        _say_better(machine, alone, together)
    return 0 if fits else DOES_NOT_FIT


def _plain(
    planned: Estimate, machine: Hardware, price: float | None, better: dict[str, Any], *, fits: bool
) -> dict[str, Any]:
    memory, hours, seconds = planned.memory, planned.hours(machine), planned.seconds(machine)
    return {
        "measured": {},
        "computed": {
            "sizes_from": dict(planned.sources),
            "pipeline": _learned(planned),
            "parameters": dict(planned.parameters),
            "memory_bytes_of_a_rank": {"always": memory.always, "phases": memory.phases},
            "totals": {phase: memory.total(phase) for phase in memory.phases},
            "peak_phase": memory.peak,
            "calls_of_a_rank_and_step": {name: dict(row) for name, row in planned.counts.calls().items()},
            "tokens_of_a_step": planned.tokens,
            "model_flops_of_a_step": planned.model_flops,
            "executed_flops_of_a_step": planned.executed_flops,
            "bytes_sent_by_a_rank_and_step": planned.sent,
            "checkpoint_bytes": planned.checkpoint,
        },
        "assumed": {
            "notes": assumptions(planned, machine),
            "reserve_bytes": RESERVE,
            "hardware": {"count": machine.count, "name": machine.name, "memory_bytes": machine.memory},
        },
        "estimated": {
            "fits": fits,
            "seconds_of_a_step": sum(seconds.values()),
            "seconds_by_kind": seconds,
            "hours": hours,
            "devices": planned.cards,
            "device_hours": planned.cards * hours,
            "cost": None if price is None else price * planned.cards * hours,
            **better,
            "samples": placement(planned, machine.usable),
            "weights_for_workers": weights_for_workers(planned),
        },
    }


def _peak(planned: Estimate) -> float:
    return planned.memory.total(planned.memory.peak)


def _step(planned: Estimate, machine: Hardware) -> dict[str, float]:
    """Return the numbers of a training step on clips of one bucket."""
    seconds, flops = sum(planned.seconds(machine).values()), planned.model_flops
    return {"tokens": planned.tokens, "model_flops": flops, "seconds": seconds, "peak_bytes": _peak(planned)}


def _entry(better: Better) -> dict[str, Any]:
    return {"flags": better.flags, "peak_bytes": better.peak}


def _print(planned: Estimate, machine: Hardware, price: float | None, *, fits: bool) -> None:
    show(_overview(planned, machine, price, fits=fits), _memory(planned), _calls(planned), width=WIDTH)
    for note in assumptions(planned, machine):
        say(note)
    memory = planned.memory
    needs = f"{memory.peak} needs {gib(memory.total(memory.peak))} of {gib(machine.usable)} GiB"
    where = f"{machine.count} x {machine.name}"
    say(f"fits {where}: {needs}" if fits else f"does not fit {where}, because {needs}")


def _overview(planned: Estimate, machine: Hardware, price: float | None, *, fits: bool) -> Table:
    memory, run, video, counts = planned.memory, planned.run, planned.run.video, planned.table
    seconds, hours = planned.seconds(machine), planned.hours(machine)
    need, have = gib(memory.total(memory.peak)), gib(machine.usable)
    rows = Table(f"{run.method}, recipe {run.recipe or '(none)'}", "", title="plan: nothing below was measured")
    rows.add_row("memory", f"{'fits' if fits else 'DOES NOT FIT'}: {need} of {have} GiB a card, in {memory.peak}")
    rows.add_row("hardware", f"{machine.count} x {machine.name}")
    rows.add_row("video", f"{video.frames} frames of {video.height} x {video.width} pixels")
    rows.add_row("a training step", f"{counts['prompts']} prompts x {counts['samples per prompt']} samples")
    rows.add_row("seconds of a step, estimated", f"{sum(seconds.values()):.3g}: {_listed(seconds, '{:.3g}'.format)}")
    rows.add_row(f"hours of {run.steps} steps, estimated", f"{hours:.3g}, with validations every {run.validate_every}")
    of_workers = f", of which workers have {planned.run.rollouts.devices:g}" if planned.cards > planned.ranks else ""
    rows.add_row("card hours, estimated", f"{hours * planned.cards:.3g} on {planned.cards:g} cards{of_workers}")
    if price is not None:
        rows.add_row("cost, estimated", f"{hours * planned.cards * price:.6g} at {price:g} for a card and hour")
    if (run.recipe, run.method) in PUBLISHED:
        rows.add_row("published", PUBLISHED[run.recipe, run.method])
    rows.add_row("MFU, estimated", f"{planned.mfu(machine):.2g} of {machine.flops / 1e12:.0f} TFLOP/s in a step")
    rows.add_row("model FLOPs, computed", f"{planned.model_flops:.3g} (executed {planned.executed_flops:.3g})")
    inside, across = gib(planned.inside), gib(planned.across)
    rows.add_row("sent by a rank, computed", f"{inside} GiB to its shards, {across} to copies")
    if (place := placement(planned, machine.usable)) is not None:
        rows.add_row("samples", place)
    if (cost := weights_for_workers(planned)) is not None:
        rows.add_row("weights for workers", cost)
    for copy, ranks in (("rank", run.parallel.sequence), ("node", NODE)):
        if planned.sizes.shards % ranks or planned.sizes.shards == ranks or ranks % run.parallel.sequence:
            continue
        sent, peak = planned.replicated(shard := ranks // run.parallel.sequence)
        if peak <= machine.usable:
            flags = f"--parallel.replicate 0 --parallel.shard {shard}"
            rows.add_row(f"with a copy on every {copy}", f"{gib(sent)} GiB sent, {gib(peak)} GiB a card: {flags}")
    rows.add_row("checkpoint, computed", f"{gib(planned.checkpoint)} GiB")
    for name, source in planned.sources.items():
        rows.add_row(f"{name}, {_size(planned.parameters[name])}", printable(source))
    if learned := _learned(planned):
        rows.add_row("learned from the pipeline", printable(learned))
    return rows


def _learned(planned: Estimate) -> str:
    student = planned.sizes.models["student"]
    return described(planned.run, student.family, student.folder)


def _memory(planned: Estimate) -> Table:
    memory = planned.memory
    table = Table("phase", "GiB", "of which", title=f"computed memory of one rank of {planned.ranks}")
    table.add_row("always", gib(sum(memory.always.values())), _listed(memory.always))
    for phase, parts in memory.phases.items():
        table.add_row(phase + (" (peak)" if phase == memory.peak else ""), gib(memory.total(phase)), _listed(parts))
    return table


def _calls(planned: Estimate) -> Table:
    calls = Table("role", "parameters", "calls with gradient", "without", "samples", title="computed calls of a rank")
    for name, row in planned.counts.calls().items():
        numbers = [f"{row[key]:g}" for key in ("with gradient", "without gradient", "samples")]
        size = planned.parameters.get(name) or planned.parameters[name.rpartition("_")[0]]
        calls.add_row(name, _size(size), *numbers)
    return calls


def _say_better(machine: Hardware, alone: list[Better], together: Better | None) -> None:
    for flags, lower in alone:
        say(f"  {flags}: peak {gib(lower)} GiB")
    if not any(better.peak <= machine.usable for better in alone):
        say("none of these alone fits" if alone else "no single setting lowers the peak by a hundredth of it")
    if together is not None:
        fitting = "fits" if together.peak <= machine.usable else "does not fit"
        say(f"together {together.flags}: peak {gib(together.peak)} GiB, which {fitting}")


def assumptions(planned: Estimate, machine: Hardware) -> list[str]:
    """Return what the estimate takes for granted, in words."""
    traffic = f"elementwise traffic at {TRAFFIC:g} of {machine.bandwidth / 1e12:.3g} TB/s"
    estimated = f"products at {PRODUCTS:g} of the bf16 peak, then {traffic}"
    chosen = planned.run.parallel.attention
    kernel = f"{chosen} first" if chosen != "auto" else "cuDNN's on Hopper and Blackwell, which cuDNN above 9.15 has"
    return [
        f"assumed: attention: {kernel}",
        f"assumed: networks: {estimated if machine.mfu is None else f'MFU {machine.mfu:g}'}",
        f"assumed: VAE: {CONVOLUTIONS:g} of the peak; HPSv3: {PRODUCTS:g}; links: {LINKS:g}; "
        "no time for optimizers, checkpoints, compilation and reading",
        *planned.notes,
    ]


def _listed(parts: dict[str, float], text: Callable[[float], str] = gib) -> str:
    return ", ".join(f"{name} {text(size)}" for name, size in parts.items() if size)


def _size(weights: int) -> str:
    return f"{weights / 1e9:.3g} B" if weights >= 1e9 else f"{weights / 1e6:.3g} M"
