"""The command plan: it says what a run needs, and whether it fits a machine, from its settings alone."""

import json as json_format
from typing import Any

from rich.table import Table

from unified_trainer.basics.ranges import PositiveFraction
from unified_trainer.basics.terminal import console, printable, say
from unified_trainer.run.exit_codes import DOES_NOT_FIT
from unified_trainer.run.settings.command_line import parse
from unified_trainer.run.settings.settings import AllRunFlags
from unified_trainer.tools.plan.advice import Better, better_settings, fitting_blocks
from unified_trainer.tools.plan.estimate import Estimate, estimate
from unified_trainer.tools.plan.hardware import RESERVE, Hardware, read_hardware

GIB = 2**30
WIDTH = 140  # columns where the output is no terminal


def plan(
    hardware: str = "8xH200",
    mfu: PositiveFraction = 0.4,
    json: bool = False,
    settings: AllRunFlags = (),
) -> int:
    """Say what a run needs and whether it fits; put plan before the flags of the run, such as --method.

    It computes memory by phase, network calls, FLOPs, time, bytes and checkpoints. Nothing is measured and no weight is
    read: a folder's configs, or published ones, are enough. Exit code 5: the run does not fit the hardware.

    Args:
        hardware: Number and kind of the accelerators, one rank on each: 8xH200, H100, 4xA100-40.
        mfu: Part of the dense bf16 peak that the networks are assumed to reach.
        json: Print JSON instead of tables.
    """
    machine = read_hardware(hardware)
    run = parse(settings)
    found = estimate(run, machine.count)
    peak = found.memory.total(found.memory.peak)
    fits = peak <= machine.usable
    alone, together = ([], None) if fits else better_settings(run, machine.count, peak, machine.usable)
    if not fits and (blocks := fitting_blocks(found, machine.usable)) is not None:
        alone = [*alone, blocks]
    if json:
        say(json_format.dumps(_plain(found, machine, mfu, fits=fits, alone=alone, together=together), indent=1))
    else:
        _print(found, machine, mfu, fits=fits, alone=alone, together=together)
    return 0 if fits else DOES_NOT_FIT


def _plain(
    found: Estimate, machine: Hardware, mfu: float, *, fits: bool, alone: list[Better], together: Better | None
) -> dict[str, Any]:
    memory = found.memory
    return {
        "measured": {},
        "computed": {
            "sizes_from": dict(found.sources),
            "parameters": dict(found.parameters),
            "memory_bytes_of_a_rank": {"always": memory.always, "phases": memory.phases},
            "totals": {phase: memory.total(phase) for phase in memory.phases},
            "peak_phase": memory.peak,
            "calls_of_a_rank_and_step": {name: dict(row) for name, row in found.calls.items()},
            "tokens_of_a_step": found.tokens,
            "model_flops_of_a_step": found.model_flops,
            "executed_flops_of_a_step": found.executed_flops,
            "bytes_sent_by_a_rank_and_step": found.sent,
            "checkpoint_bytes": found.checkpoint,
        },
        "assumed": {
            "mfu": mfu,
            "reserve_bytes": RESERVE,
            "hardware": {"count": machine.count, "name": machine.name, "memory_bytes": machine.memory},
            "notes": list(found.notes),
        },
        "estimated": {
            "fits": fits,
            "seconds_of_a_step": found.seconds(machine, mfu),
            "device_hours": found.device_hours(machine, mfu),
            "better_settings": [_entry(one) for one in alone],
            "better_settings_together": _entry(together) if together else None,
        },
    }


def _entry(one: Better) -> dict[str, Any]:
    return {"flags": one.flags, "peak_bytes": one.peak}


def _print(
    found: Estimate, machine: Hardware, mfu: float, *, fits: bool, alone: list[Better], together: Better | None
) -> None:
    screen = console()
    if not screen.is_terminal:
        screen.width = WIDTH
    memory, run = found.memory, found.run
    table = Table("phase", "GiB", "of which", title=f"computed memory of one rank of {found.ranks}")
    table.add_row("always", _gib(sum(memory.always.values())), _parts(memory.always))
    for phase, parts in memory.phases.items():
        table.add_row(phase + (" (peak)" if phase == memory.peak else ""), _gib(memory.total(phase)), _parts(parts))
    screen.print(table)
    calls = Table("role", "parameters", "calls with gradient", "without", "samples", title="computed calls of a rank")
    for name, row in found.calls.items():
        numbers = [f"{row[key]:g}" for key in ("with gradient", "without gradient", "samples")]
        size = found.parameters.get(name) or found.parameters[name.rpartition("_")[0]]
        calls.add_row(name, f"{size / 1e9:.3g} B" if size >= 1e9 else f"{size / 1e6:.3g} M", *numbers)
    screen.print(calls)
    rows = Table("a training step", "", title=f"{run.method}, recipe {run.recipe or '(none)'}")
    rows.add_row("sizes from", printable(", ".join(dict.fromkeys(found.sources.values()))))
    rows.add_row("tokens, computed", f"{found.tokens:.4g}")
    rows.add_row("model FLOPs, computed", f"{found.model_flops:.4g} (executed: {found.executed_flops:.4g})")
    rows.add_row("sent by a rank, computed", f"{_gib(found.sent)} GiB")
    rows.add_row("checkpoint, computed", f"{_gib(found.checkpoint)} GiB")
    rows.add_row(f"seconds, estimated at MFU {mfu:g}", f"{found.seconds(machine, mfu):.4g}")
    rows.add_row(f"{machine.name} hours for {run.steps} steps, estimated", f"{found.device_hours(machine, mfu):.4g}")
    screen.print(rows)
    for note in found.notes:
        say(note)
    need, have = _gib(memory.total(memory.peak)), _gib(machine.usable)
    if fits:
        say(f"fits {machine.count} x {machine.name}: {memory.peak} needs {need} of {have} GiB")
        return
    say(f"does not fit {machine.count} x {machine.name}, because {memory.peak} needs {need} of {have} GiB")
    for flags, lower in alone:
        say(f"  {flags}: peak {_gib(lower)} GiB")
    if not any(one.peak <= machine.usable for one in alone):
        say("none of these alone fits" if alone else "no single setting lowers the peak by a hundredth of it")
    if together is not None:
        fitting = "fits" if together.peak <= machine.usable else "does not fit"
        say(f"together {together.flags}: peak {_gib(together.peak)} GiB, which {fitting}")


def _parts(parts: dict[str, float]) -> str:
    return ", ".join(f"{name} {_gib(size)}" for name, size in parts.items() if size)


def _gib(size: float) -> str:
    return f"{size / GIB:.3g}"
