"""Evaluations without a model: two checkpoints with given numbers, their files and pages."""

from pathlib import Path
from typing import Any

import torch
from run_folders import moving_square

from unified_trainer.data.video_files import write_mp4
from unified_trainer.run.settings.command_line import parse
from unified_trainer.tools.evaluate import files, pages
from unified_trainer.tools.evaluate.checkpoints import Checkpoint
from unified_trainer.tools.evaluate.measures import BootstrapConfig, Summary, summarise
from unified_trainer.tools.evaluate.plan import Plan
from unified_trainer.tools.evaluate.samples import Measured

HOSTILE = "</script><script>document.title='broken'</script>"
PLAN = Plan(("a red circle", HOSTILE, "\u202e\u05d0 & <b>", "d"), 2, (0, 7), 8, 1, 4)
NAMES = ("first@1", "second@2:ema")
BOOTSTRAP = BootstrapConfig(resamples=500)


def measured(
    folder: Path, plan: Plan = PLAN, shift: float = 0.0, *, features: int = 3, videos: bool = False
) -> Measured:
    """Rows in the order of `Plan.parts`, with a reward that falls from prompt to prompt, plus `shift`."""
    random, rows = torch.Generator().manual_seed(0), []
    if videos:
        folder.mkdir(parents=True)
    for seed in plan.seeds:
        for number in range(plan.size):
            prompt, sample = divmod(number, plan.samples)
            row: dict[str, Any] = {"seed": seed, "prompt": prompt, "sample": sample, "noise": number}
            noise = float(torch.randn((), generator=random))
            row |= {"reward": -float(prompt) + noise + shift, "reward/hpsv3": noise, "reward/clip": prompt + shift}
            row |= {"accuracy": 1.0, "accuracy/color": 1.0, "video": None}
            if videos and sample < plan.videos:
                row["video"] = f"{seed}-{prompt}-{sample}.mp4"
                write_mp4(moving_square(int(shift) + prompt), folder / row["video"], 8)
            rows.append(row)
    count = len(rows)
    tensors = {"thumbnails": torch.randn(count, 6, generator=random) + shift}
    tensors["features/frechet"] = torch.randn(count, 2, features, generator=random) * (1 + shift)
    return Measured(folder, rows, [9.0, 0.5, 0.25, 0.5], 4, tensors)


def evaluated(output: Path, *, limit: int = 10**6, seed: int = 0) -> Summary:
    """Write an evaluation of two checkpoints with videos: all files and both pages."""
    files.begin(output)
    shifts = (0.0, 1.0)
    rows = [measured(output / files.SAMPLES / f"{i}", shift=shift, videos=True) for i, shift in enumerate(shifts)]
    run = parse(["--method", "finetune"])
    checkpoints = [Checkpoint(name, name, i, i == 1, run, (), "00") for i, name in enumerate(NAMES, 1)]
    summary = summarise(rows, PLAN, BOOTSTRAP, [rows[0].features] * 2)
    about = files.write(output, checkpoints, rows, PLAN, BOOTSTRAP, summary, NAMES[0])
    pages.write(output, about, rows, PLAN.prompts, limit, seed)
    return summary
