"""This script writes docs/hardware.md from `plan`: what the recipes of real models need, on 8 cards of each kind.

python scripts/write_hardware_page.py
"""

from collections.abc import Iterator
from pathlib import Path

from unified_trainer.run.settings.command_line import parse
from unified_trainer.tools.plan.estimate import Estimate, estimate
from unified_trainer.tools.plan.hardware import DEVICES, read_hardware

PAGE = Path(__file__).parent.parent / "docs" / "hardware.md"
CAUSAL = ("wan2.1-1.3b", "wan2.1-14b", "wan2.1-i2v-14b", "wan2.2-a14b", "wan2.2-i2v-a14b", "wan2.2-ti2v-5b")
OTHERS = ("hunyuanvideo-1.5", "hunyuanvideo-1.5-i2v", "ltx-2", "ltx-video", "qwen-image", "sd3.5-medium")
METHODS = ("finetune", "dmd2", "self_forcing", "dance_grpo", "diffusion_nft", "distill_rl")
CARDS = ("H100", "H200", "A100", "B200", "RTX4090", "RTX5090")
COUNTS = (1, 2, 4, 8)
HEAD = f"""# Hardware

`python scripts/write_hardware_page.py` writes this page from [`plan`](scale.md#sizing), with unchanged recipes.
Nothing here was measured on an accelerator: memory is computed, seconds and hours are estimated. Blocks are assumed
to be compiled ([`compile: auto`](performance.md#activations-and-compiled-blocks)).

Each cell is for 8 cards: memory per rank in GiB, seconds per training step and wall time of the whole run in hours.
If a run does not fit, the cell has only the memory, in parentheses; `plan` names the settings that lower it. The last
column is the smallest hardware on which the unchanged recipe fits: the smallest number of cards, tried with
{", ".join(map(str, COUNTS))}, and for this number the kind of card with the least memory.
"""


def cell(found: Estimate, name: str) -> str:
    """Return memory, seconds and hours on 8 cards, or memory alone where the run does not fit."""
    card, gib = read_hardware(f"8x{name}"), found.memory.total(found.memory.peak) / 2**30
    if gib * 2**30 > card.usable:
        return f"({gib:.0f} GiB)"
    return f"{gib:.0f} GiB, {sum(found.seconds(card).values()):.3g} s, {found.hours(card):.3g} h"


def smallest(recipe: str, method: str, of_8: Estimate) -> str:
    """Return the smallest hardware on which the recipe fits."""
    by_memory = sorted(DEVICES, key=lambda name: DEVICES[name][1])
    for count in COUNTS:
        found = of_8 if count == 8 else planned(recipe, method, count)
        peak = found.memory.total(found.memory.peak)
        for name in by_memory:
            if name in CARDS and peak <= read_hardware(name).usable:
                return f"{count} x {name}"
    return "more than 8 cards"


def planned(recipe: str, method: str, count: int) -> Estimate:
    return estimate(parse(["--recipe", recipe, "--method", method]), count)


def row(recipe: str, method: str) -> str:
    """Return the table's row of a method."""
    found = planned(recipe, method, 8)
    video = found.run.video
    size = f"{video.frames} x {video.height} x {video.width}"
    cells = [f"`{method}`", size, *(cell(found, name) for name in CARDS), smallest(recipe, method, found)]
    return f"| {' | '.join(cells)} |"


def methods(recipe: str) -> list[str]:
    """Return the methods that have a row: `self_forcing` needs a causal form, and LTX-2 reads no clips."""
    without = ("finetune", "self_forcing") if recipe == "ltx-2" else () if recipe in CAUSAL else ("self_forcing",)
    return [method for method in METHODS if method not in without]


def lines() -> Iterator[str]:
    """Yield the page."""
    yield HEAD
    for recipe in (*CAUSAL, *OTHERS):
        yield f"## {recipe}\n"
        head = ["method", "frames x pixels", *(f"8 x {name}" for name in CARDS), "smallest"]
        yield f"| {' | '.join(head)} |"
        yield f"| {' | '.join('---' for _ in head)} |"
        for method in methods(recipe):
            yield row(recipe, method)
        yield ""


if __name__ == "__main__":
    PAGE.write_text("\n".join(lines()).rstrip() + "\n", encoding="utf-8")
