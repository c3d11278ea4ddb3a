"""python -m unified_trainer sample: videos by a run's own sampler."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import torch
import tyro
from rich.console import Console
from torch import Tensor

from unified_trainer.commands.trained import Trained, load_trained
from unified_trainer.data.feed import make_batch
from unified_trainer.data.prompts import read_prompts
from unified_trainer.models.base import Codec
from unified_trainer.parallel.device import Device
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.sampling import generate
from unified_trainer.types import Latents, Video
from unified_trainer.video_files import contact_sheet, to_uint8, write_mp4


def sample(
    run: Annotated[str, tyro.conf.Positional],
    prompts: tuple[str, ...],
    output: Path,
    seed: int = 0,
    batch: int = 8,
    device: Device = "auto",
    base: Path | None = None,
) -> None:
    """Write videos of the student, made as its run samples: same steps, solver, guidance, size.

    Args:
        run: RUN[@step][:ema], a run directory: its newest checkpoint or that step's, the averaged weights with :ema
        prompts: each a prompt, or a file with one a line
        output: folder to write: N.mp4 of prompt N, contact_sheet.png, samples.json; must be empty or absent
        seed: of the first video's noise; the next ones count on
        batch: videos at a time
        device: where to run
        base: pipeline folder that the student started from, if it is no longer where the run found it
    """
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise FileExistsError(f"{output} exists and is not an empty folder; choose another one or remove it")
    if batch < 1:
        raise ValueError(f"--batch must be at least 1, not {batch}")
    lines = read_lines(prompts)
    trained = load_trained(run, "student", base, Mesh.join(device), causal=True)
    clips = [clip for part in videos(trained, lines, seed, batch) for clip in to_uint8(part)]
    output.mkdir(parents=True, exist_ok=True)
    for i, clip in enumerate(clips):
        write_mp4(clip, output / f"{i}.mp4")
    contact_sheet(clips, lines, output / "contact_sheet.png")
    rows = [{"video": f"{i}.mp4", "prompt": prompt, "seed": seed + i} for i, prompt in enumerate(lines)]
    (output / "samples.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    Console().print(f"{len(lines)} videos in {output}: {trained.said}", highlight=False, soft_wrap=True)


def read_lines(prompts: Sequence[str]) -> list[str]:
    """The prompts, those of files among them; ValueError if there are none."""
    lines = [line for text in prompts for line in (read_prompts(Path(text)) if Path(text).is_file() else [text])]
    if not lines:
        raise ValueError("--prompts needs at least one prompt or file of prompts")
    return lines


def videos(trained: Trained, prompts: Sequence[str], seed: int, batch: int) -> Iterator[Video]:
    """The videos of the prompts, so many at a time."""
    codec = trained.family.codec(trained.base, trained.role.device)
    for start in range(0, len(prompts), batch):
        numbers = range(start, min(start + batch, len(prompts)))
        yield codec.decode(draw_latents(trained, codec, prompts, numbers, seed))


def draw_latents(trained: Trained, codec: Codec, prompts: Sequence[str], numbers: range, seed: int) -> Latents:
    """Clean latents of the samples of these numbers; number i depends on prompts[i], seed + i and not on the others.

    Its noise is what diffusers draws with `torch.Generator().manual_seed(seed + i)`.
    """
    run, device = trained.run, trained.role.device
    shape = codec.latent_shape(run.video.frames, run.video.height, run.video.width)
    uncond = codec.encode_text([run.sampler.negative_prompt])
    streams = [torch.Generator().manual_seed(seed + i) for i in numbers]

    def draw(_: int = 0) -> Tensor:
        return torch.cat([torch.randn(1, *shape, generator=stream) for stream in streams]).to(device)

    mine = list(numbers)
    part = make_batch(codec, [prompts[i] for i in mine], uncond, shape, prompt_ids=mine, sample_ids=mine)
    return generate(trained.role, draw(), part, run.sampler, draw)
