"""This script measures causal students of the tiny world: quality beyond the length of their run, and speed.

    python scripts/measure_causal.py RUN... [--against RUN] [--samples 192] [--times 3] [--recache]
    python scripts/measure_causal.py RUN --latency 32 [--window-frames 4]

At a multiple of the length, the prompt alternates with its opposite: the shape moves there, back, and there again, so
that the first chunk does not determine the rest. Accuracy is measured for each part with its own prompt. The Frechet
distance compares the last frame of every chunk with that of real videos of the same motion, both decoded. Speeds are of
one video at a time, timed in turn with a bidirectional student.

With --latency, only the seconds and FLOPs of each chunk of one long video are measured: with the KV cache, and with the
finished chunks computed anew in one masked pass for every network call, as without a cache. Both make the same chunks.
"""

import argparse
import statistics
import time
from collections import defaultdict
from contextlib import ExitStack
from functools import cache
from itertools import cycle, islice

import torch
from rich.console import Console
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from unified_trainer.basics.requests import Request
from unified_trainer.basics.types import Batch, Latents, Video, of_kind
from unified_trainer.data.prompts import validation_captions
from unified_trainer.data.tiny_world import FRAMES, SUBJECT_OF_CAPTION, Subject, check_attributes, draw_clip, render
from unified_trainer.models.encoders import EncoderConfig
from unified_trainer.models.wan.codec import WanCodec
from unified_trainer.numerics.chunks import ChunkConfig
from unified_trainer.numerics.frechet import frechet_distance
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.rewards.hpsv3 import EMBEDDED, HPSv3
from unified_trainer.roles.causal import Causal
from unified_trainer.run.registry import TINY
from unified_trainer.sampling.solver import next_chunks
from unified_trainer.tools.load_run import LoadedRole, load_role
from unified_trainer.tools.sample.latents import begin_samples
from unified_trainer.tools.sample.sample import of_length, pieces

OPPOSITE = {"left": "right", "right": "left", "up": "down", "down": "up"}
CPU, BATCH, CHUNK = torch.device("cpu"), 32, 4
REPEATS, LONG_REPEATS = 10, 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", help="RUN[@step][:ema] of causal students")
    parser.add_argument("--against", default="", help="RUN of a bidirectional student, for the speeds")
    parser.add_argument("--samples", type=int, default=192)
    parser.add_argument("--times", type=int, default=3, help="length of long videos in clips")
    parser.add_argument("--window-frames", type=int, help="latent frames in the KV cache for long videos")
    parser.add_argument("--sink-frames", type=int, help="how many of them are the first ones")
    parser.add_argument("--rolling-sink", action="store_true", help="move the first ones along with the window")
    parser.add_argument("--recache", action="store_true", help="compute the KV cache anew where a prompt changes")
    parser.add_argument("--latency", type=int, default=0, help="latent frames of the video whose chunks are timed")
    arguments = parser.parse_args()
    console = Console(width=200)
    if arguments.latency:
        for run in arguments.runs:
            for line in latency(student(run), arguments.latency, arguments.window_frames):
                console.print(line, markup=False, soft_wrap=True)
        return
    codec = WanCodec.load(TINY / "wan", CPU, EncoderConfig())
    captions = validation_captions(arguments.samples)
    real = features(decoded(codec, turning(captions, arguments.times)))
    console.print("| student | accuracy | Frechet distance | accuracy of each part | Frechet distance of chunks |")
    console.print("| --- | --- | --- | --- | --- |")
    for run in arguments.runs:
        one = student(run)
        short = made(of_length(one, FRAMES, None, None, BATCH), list(captions))
        window, sink, rolling = arguments.window_frames, arguments.sink_frames, arguments.rolling_sink
        long = of_length(one, arguments.times * (FRAMES - 1) + 1, window, sink, BATCH, rolling=rolling)
        turned = [" | ".join(islice(cycle([here, there(here)]), arguments.times)) for here in captions]
        video = made(long, turned, recache=arguments.recache)
        parts = [accuracy(part, captions, turned=i % 2 == 1) for i, part in enumerate(split(video))]
        chunks = [frechet_distance(seen, truth) for seen, truth in zip(features(video), real, strict=True)]
        whole = frechet_distance(torch.cat(features(short)), torch.cat(real[: len(features(short))]))
        rates, drift = (" ".join(f"{value:.{n}f}" for value in row) for n, row in ((3, parts), (1, chunks)))
        console.print(
            f"| {run} | {accuracy(short, captions):.3f} | {whole:.1f} | {rates} | {drift} |",
            markup=False,
            soft_wrap=True,
        )
    if arguments.against:
        for line in speeds(student(arguments.runs[-1]), student(arguments.against)):
            console.print(line)


def student(run: str) -> LoadedRole:
    return load_role(run, "student", None, Mesh(CPU), causal=True)


def there(caption: str) -> str:
    """Return the caption with the opposite direction."""
    way = SUBJECT_OF_CAPTION[caption].direction
    return caption.replace(way, OPPOSITE[way])


def made(one: LoadedRole, prompts: list[str], *, recache: bool = False) -> Video:
    by_chunk = one.run.sampler.chunks.causal
    batches = pieces(one, Request.of(prompts), 0, BATCH, by_chunk=by_chunk, recache=recache)
    return torch.cat([torch.cat(list(parts), 2) for parts in batches])


def turning(captions: tuple[str, ...], times: int) -> Video:
    """Render real videos that move there and back in turn, so many times."""
    generator = torch.Generator().manual_seed(1)
    clips = render([draw_clip(SUBJECT_OF_CAPTION[caption], generator) for caption in captions])
    ways = islice(cycle([clips, clips.flip(2)]), times)
    return torch.cat([clips[:, :, :1], *(way[:, :, 1:] for way in ways)], 2)


def decoded(codec: WanCodec, video: Video) -> Video:
    """Encode and decode a video."""
    return torch.cat([codec.decode(codec.encode(part)) for part in video.split(BATCH)])


def features(video: Video) -> list[Tensor]:
    """Return HPSv3's features of the last frame of every chunk, by chunk."""
    network = HPSv3.load(EMBEDDED, CPU, torch.float32)
    frames = video[:, :, ::CHUNK].unbind(2)
    return [torch.cat([network.features(part) for part in frame.split(BATCH)]) for frame in frames]


def split(video: Video) -> list[Video]:
    """Return the parts of a video as long as a clip, each with the frame it starts from."""
    return [video[:, :, start : start + FRAMES] for start in range(0, video.shape[2] - 1, FRAMES - 1)]


def accuracy(video: Video, captions: tuple[str, ...], *, turned: bool = False) -> float:
    asked = [SUBJECT_OF_CAPTION[caption] for caption in captions]
    if turned:
        asked = [Subject(one.color, one.shape, OPPOSITE[one.direction]) for one in asked]
    return check_attributes(video, asked)["all"].double().mean().item()


def speeds(causal: LoadedRole, whole: LoadedRole) -> list[str]:
    """Measure frames per second and the latency of the first frames of both students, timed in turn."""
    prompt = Request.of(validation_captions(1))
    seconds: dict[str, list[float]] = {"causal": [], "first": [], "whole": []}
    for _ in range(REPEATS + 1):  # the first warms up
        for name, one in (("causal", causal), ("whole", whole)):
            (parts,) = pieces(one, prompt, 0, 1, by_chunk=name == "causal")
            began = time.perf_counter()
            for i, _part in enumerate(parts):
                if name == "causal" and i == 0:
                    seconds["first"].append(time.perf_counter() - began)
            seconds[name].append(time.perf_counter() - began)
    took = {name: statistics.median(row[1:]) for name, row in seconds.items()}
    return [
        f"frames per second: causal {FRAMES / took['causal']:.1f}, bidirectional {FRAMES / took['whole']:.1f}, "
        f"ratio {took['whole'] / took['causal']:.2f}",
        f"first frames: causal {took['first']:.3f} s, bidirectional {took['whole']:.3f} s, "
        f"ratio {took['first'] / took['whole']:.2f}",
    ]


class Recomputed:
    """Finished chunks in place of a KV cache: each network call computes all of them anew, in one masked pass."""

    def __init__(self, role: Causal, batch: Batch, chunks: ChunkConfig, past: Latents) -> None:
        self.role, self.batch, self.chunks, self.past = role, batch, chunks, past

    def velocity(self, x_t: Latents, sigma: Tensor) -> Latents:
        known = self.past.shape[2]
        levels = torch.cat([torch.zeros(1, known), sigma.float().expand(1, x_t.shape[2])], 1)
        x = torch.cat([self.past, x_t], 2)
        return self.role.masked_velocity(x, levels, self.batch.cond, self.chunks)[:, :, known:]

    def append(self, x: Latents) -> None:
        self.past = torch.cat([self.past, x], 2)


@torch.no_grad()
def latency(one: LoadedRole, latent_frames: int, window: int | None) -> list[str]:
    """Measure the chunks of one video, of a cache and recomputed in turn, and print those at powers of two."""
    one = of_length(one, (latent_frames - 1) * CHUNK + 1, window, None, 1)
    role, sampler, codec = of_kind(Causal, one.role), one.run.sampler, one.codec()
    batch_of, draw = begin_samples(one, codec, [0])
    batch, noise, drawn = batch_of(Request.of(validation_captions(1))), draw(0), cache(draw)
    ranges, exits = sampler.chunks.ranges(noise.shape[2]), [sampler.num_steps - 1]
    seconds, flops = defaultdict(list), {}
    for repeat in range(LONG_REPEATS + 2):  # the first warms up, the second counts
        kept = role.open_cache(batch.cond, batch.uncond, sampler.chunks, sampler.guidance_scale, sampler.sigmas()[:-1])
        ways = {"cached": kept, "recomputed": Recomputed(role, batch, sampler.chunks, noise[:, :, :0])}
        for chunk, own in enumerate(ranges, 1):
            made = []
            for name, past in ways.items():
                with ExitStack() as stack:
                    if repeat == 1:
                        stack.enter_context(sdpa_kernel(SDPBackend.MATH))  # whose products torch counts on a CPU
                        counter = stack.enter_context(FlopCounterMode(display=False))
                    began = time.perf_counter()
                    made += next_chunks(past, noise, sampler, drawn, [own], exits)
                    if repeat == 1:
                        flops[name, chunk] = counter.get_total_flops() / 1e6
                    elif repeat:
                        seconds[name, chunk].append(time.perf_counter() - began)
            torch.testing.assert_close(*made, rtol=1e-3, atol=1e-3)
    lines = [
        "| chunk | cached, ms | recomputed, ms | ratio | cached, MFLOP | recomputed, MFLOP | ratio |",
        "| --- " * 7 + "|",
    ]
    for chunk in (2**n for n in range(10) if 2**n < len(ranges)):
        took = [1000 * statistics.median(seconds[name, chunk]) for name in ways]
        cost = [flops[name, chunk] for name in ways]
        lines.append(
            f"| {chunk} | {took[0]:.1f} | {took[1]:.1f} | {took[1] / took[0]:.2f} | "
            f"{cost[0]:.1f} | {cost[1]:.1f} | {cost[1] / cost[0]:.2f} |"
        )
    return lines


if __name__ == "__main__":
    main()
