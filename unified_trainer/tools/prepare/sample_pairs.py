"""Pairs of a student's own samples, for the command preprocess: the best and the worst sample of each prompt."""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.terminal import say
from unified_trainer.data.clips import VideoConfig
from unified_trainer.data.fastvideo import T2V, t2v_row, text_of, with_text
from unified_trainer.models.base import Codec
from unified_trainer.tools.output_folder import check_empty, new_folder
from unified_trainer.tools.prepare.clip_folder import ClipFolder
from unified_trainer.tools.sample.rollout_folder import RolloutFolder

SIDES = ("preferred", "rejected")  # folders of parquet files, row by row the samples of a pair


def write_pairs(
    source: Path, scores: str, least_difference: float, out: Path, codec: Codec, rows_per_file: int
) -> None:
    """Write the latents of each pair of a folder of `rollout` to OUT/preferred and OUT/rejected.

    Raise UserError for scores that are not complete, for latents that are not of this codec, and without a pair.
    """
    rollouts = RolloutFolder.read(source)
    check_empty(out)
    pairs = best_and_worst(rollouts.rows(scores), least_difference)
    count = len(rollouts.about["prompts"])
    if not pairs:
        raise UserError(f"{source}: no prompt of {count} has two samples whose rewards {scores} differ as much")
    latents, video = lru_cache(2)(rollouts.latents), VideoConfig(**rollouts.about["video"])
    shape = codec.latent_shape(video.frames, video.height, video.width)
    with new_folder(out) as building:
        for side, name in enumerate(SIDES):
            (building / name).mkdir()
            written = ClipFolder(building / name, with_text(T2V, codec), rows_per_file)
            for pair in pairs:
                row = pair[side]
                x0 = latents(row["sample"] // rollouts.about["batch"])[[row["row"]]]
                if x0.shape[1:] != shape:
                    raise UserError(f"{source} holds latents of {tuple(x0.shape[1:])}, and --model has {shape}")
                made = t2v_row(f"prompt {row['prompt_id']}", row["prompt"], codec.raw(x0)[0], video)
                written.add(made | text_of(codec.prompts([row["prompt"]])[0], codec))
            written.finish()
    left_out = f"; {count - len(pairs)} prompts have none" if count > len(pairs) else ""
    say(f"{len(pairs)} pairs in {out}: --data.path {out / SIDES[0]} --data.rejected {out / SIDES[1]}{left_out}")


def best_and_worst(rows: Sequence[dict[str, Any]], least_difference: float) -> list[tuple[dict[str, Any], ...]]:
    """Return the best and the worst sample of each prompt, unless their rewards are equal or differ by less."""
    groups: dict[int, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(row["prompt_id"], []).append(row)
    ordered = [sorted(group, key=lambda row: row["reward"]) for group in groups.values()]
    gaps = [group[-1]["reward"] - group[0]["reward"] for group in ordered]
    return [
        (group[-1], group[0]) for group, gap in zip(ordered, gaps, strict=True) if gap > 0 and gap >= least_difference
    ]
