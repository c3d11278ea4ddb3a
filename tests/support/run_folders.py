"""Run directories as a training writes them, without a training: two validations, ten steps."""

import functools
import json
from pathlib import Path

import numpy as np

from unified_trainer.data.video_files import write_mp4
from unified_trainer.run.settings import config as settings
from unified_trainer.run.settings.command_line import parse

STEPS = 10
PROMPTS = (
    "a red circle moving left",
    "</script><script>document.title='broken'</script>",
    "\u202e\u05d0 & <b>",
    "\u2028e",
)


def write_lines(file: Path, rows: list[dict]) -> None:
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def training_row(step: int, **more: float) -> dict:
    values = {"reward": 2.0 + 0.1 * step, "skipped_updates": 0.0, "approx_kl": 1e-5, "reward/hpsv3": 2.0 + 0.1 * step}
    values |= {"seconds": 3.0, "seconds/rollout": 1.0, "seconds/update": 2.0, "student/grad_norm": 0.5}
    values |= {"samples_per_second": 8.0, "peak_memory_gib_max": 1.0} | more
    return {"step": step, "time": 1e9 + step, **{f"train/{name}": value for name, value in values.items()}}


def validation_row(step: int, **more: float) -> dict:
    values = {"reward": 2.0 + 0.1 * step, "reward_std": 1.0, "reward/hpsv3": 2.0 + 0.1 * step, "reward/hpsv3_std": 1.0}
    values |= {"accuracy": 0.7 + 0.02 * step, "accuracy_std": 0.4, "frechet": 50.0 - step, "reward_hacking": 0.0} | more
    return {"step": step, "time": 1e9 + step, **{f"validation/{name}": value for name, value in values.items()}}


def metric_rows() -> list[dict]:
    return [validation_row(0), *(training_row(step) for step in range(1, STEPS + 1)), validation_row(STEPS)]


def make_run(
    folder: Path, *flags: str, rows: list[dict] | None = None, videos: int = 2, checkpoint: int = STEPS
) -> Path:
    """Write a run directory; `videos` of its four validation samples have a video."""
    folder.mkdir(parents=True)
    settings.save(parsed(flags), folder / "config.yaml")
    write_lines(folder / "metrics.jsonl", metric_rows() if rows is None else rows)
    start = {"time": "2026-01-01T00:00:00+00:00", "step": 0, "command": "python -m unified_trainer", "host": "<i>h</i>"}
    write_lines(folder / "environment.jsonl", [{**start, "versions": {"torch": "2.13"}, "git": None}])
    (folder / "checkpoints" / f"step_{checkpoint}").mkdir(parents=True)
    for step in (0, STEPS):
        validation = folder / "validation" / f"step_{step}"
        validation.mkdir(parents=True)
        for i in range(videos):
            write_mp4(moving_square(i), validation / f"{i}.mp4", 8)
        write_lines(validation / "samples.jsonl", [sample_row(i, step, i < videos) for i in range(len(PROMPTS))])
    return folder


@functools.cache
def parsed(flags: tuple[str, ...]) -> settings.RunConfig:
    return parse(["--method", "dance_grpo", "--steps", str(STEPS), *flags])


def sample_row(i: int, step: int, video: bool) -> dict:
    scores = {"hpsv3": 1.0 + i + 0.1 * step, "clip": -float(i)}
    row = {"sample": i, "seed": 1000, "prompt": PROMPTS[i], "reward": 1.0 + i, "scores": scores}
    return {**row, "accuracy": {"color": True, "all": i % 2 == 0}, "video": f"{i}.mp4" if video else None}


def moving_square(shade: int) -> np.ndarray:
    frames = np.full((17, 64, 64, 3), 20, dtype=np.uint8)
    for t in range(len(frames)):
        frames[t, 16:32, 2 * t : 2 * t + 16] = (200, 60 * shade, 40)
    return frames
