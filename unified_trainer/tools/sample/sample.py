"""The command sample: it generates videos with a run's own sampler, of any length, whole or chunk by chunk."""

import contextlib
import dataclasses
import functools
import itertools
import json
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import tyro

from unified_trainer.basics.actions import Actions, actions_fault
from unified_trainer.basics.errors import UserError, writing
from unified_trainer.basics.own_files import without_link
from unified_trainer.basics.ranges import Count, FramesOrZero, Seed
from unified_trainer.basics.requests import Image, Request
from unified_trainer.basics.terminal import say
from unified_trainer.basics.types import Latents, Video, check_finite, of_kind
from unified_trainer.data.prompts import SUFFIXES, read_prompts
from unified_trainer.data.video_files import Row, contact_sheet, file_name, to_uint8, writer
from unified_trainer.data.video_reader import read_condition
from unified_trainer.models import hub
from unified_trainer.models.base import ActionForm, Codec, SoundDecoder
from unified_trainer.parallel.device import Device, fitting
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.roles.causal import Causal
from unified_trainer.run.build import cache_memory
from unified_trainer.sampling.solver import next_chunks, recomputed_cache
from unified_trainer.tools.load_run import LoadedRole, load_role
from unified_trainer.tools.output_folder import check_empty
from unified_trainer.tools.sample.latents import Stream, begin_samples, draw_latents

SHOWN = 64  # most videos on the contact sheet, whose frames stay in memory until the end
LONGEST_NAME = 255  # bytes
VIDEOS = "videos"  # folder of --prompt-names: programs that read prompts from its names take each file for a video


def sample(
    run: Annotated[str, tyro.conf.Positional],
    prompts: tuple[str, ...],
    output: Path,
    image: Path | None = None,
    actions: Path | None = None,
    num_samples: Count = 1,
    prompt_names: bool = False,
    seed: Seed = 0,
    batch: Count = 8,
    frames: FramesOrZero = 0,
    stream: bool = False,
    recache: bool = False,
    window_frames: FramesOrZero | None = None,
    sink_frames: FramesOrZero | None = None,
    rolling_sink: bool = False,
    device: Device = "auto",
    base: Path | None = None,
    families: tuple[str, ...] = (),
) -> None:
    """Write videos of the student, generated with the steps, solver, guidance and size of its run.

    Args:
        prompts: Prompts, or files with one prompt per line; "a | b" with --stream switches from a to b in one video.
        output: Folder to write: N.mp4 or N.png of video N, contact_sheet.png of the first ones, samples.json; it must
            be empty or absent.
        image: Condition image of all videos: their first frame. A table of prompts names images in its column image.
        actions: Actions of all videos, [frames, k] in a .npy or .safetensors file: a row for each pixel frame. A table
            of prompts names such files, or has lists, in its column actions.
        num_samples: Videos of each prompt, one after the other.
        prompt_names: Name the videos videos/PROMPT-INDEX.mp4: VBench's program runs on the folder OUTPUT/videos, made
            with --num-samples 5 for its prompts.
        seed: Seed of the first video's noise; video i has seed + i.
        batch: Videos generated at a time.
        frames: Pixel frames of a video; 0 takes the run's.
        stream: Write the frames chunk by chunk as they are generated, and report the speed; causal students only.
        recache: At a switch of prompts, compute keys and values of the finished frames that stay in the KV cache anew
            with the new prompt, as streaming_tuning trains it; by default they are unchanged.
        window_frames: Finished latent frames that a causal student attends to; by default the run's. A video longer
            than the run's, of a run without a window, has the longest past of the run.
        sink_frames: Number of them that are always the first frames of the video; by default the run's.
        rolling_sink: Move these first frames along with a video that outgrows the window, also if the run does not.
    """
    check_empty(output)
    lines = read_lines(prompts)
    loaded = load_role(run, "student", base, Mesh.join(device), causal=True, families=families)
    given = () if image is None else (read_condition(image, "--image", loaded.run.video.fps),)
    lines = with_images(loaded, prompts, lines, given)
    if actions is not None:
        shared = Actions.read(str(actions.absolute()), Path(), "--actions")
        lines = [dataclasses.replace(line, actions=shared) for line in lines]
    lines = [line for line in lines for _ in range(num_samples)]
    stems = [f"{VIDEOS}/{name}" for name in of_prompts(lines, num_samples)] if prompt_names else range(len(lines))
    loaded = of_length(loaded, frames, window_frames, sink_frames, min(batch, len(lines)), rolling=rolling_sink)
    check_actions(loaded.name, loaded.actions, loaded.run.video.frames, lines)
    if stream and not loaded.run.sampler.chunks.causal:
        raise UserError(f"--stream needs a causal student, but {run} generates all frames at once: leave it out")
    if recache and not stream:
        raise UserError("--recache is for prompts that switch in one video: add --stream, or leave it out")
    names = [file_name(stem, loaded.run.video.frames) for stem in stems]
    rows: list[dict[str, Any]] = [
        {"video": names[i], "prompt": line.text, "seed": seed + i} | line.files for i, line in enumerate(lines)
    ]
    with writing(output), fitting(f"a batch of {min(batch, len(lines))} videos", "lower --batch"):
        (output / names[0]).parent.mkdir(parents=True, exist_ok=True)
        clips, speed = _write(loaded, lines, seed, batch, [output / name for name in names], stream, recache)
        sheet = [
            Row(clip, f"seed {seed + i}", line.text, line.pictures(*clip.shape[1:3]))
            for i, (clip, line) in enumerate(zip(clips, lines, strict=False))
        ]
        contact_sheet(sheet, output / "contact_sheet.png")
        without_link(output / "samples.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    say(f"{len(lines)} videos in {output}: {loaded.said}{speed}")


def of_prompts(requests: Sequence[Request], count: int) -> list[str]:
    """Return the names PROMPT-INDEX of the videos of requests, each `count` times in a row.

    Raise UserError for a prompt that cannot be a file name, and for one that comes twice.
    """
    names = [f"{request.text}-{i % count}" for i, request in enumerate(requests)]
    for name, request in zip(names, requests, strict=True):
        if "/" in name or "\0" in name or name.startswith(".") or len(file_name(name, 1).encode()) > LONGEST_NAME:
            raise UserError(f"--prompt-names: the prompt {request.text!r} cannot name a file; leave it out")
    if len({*names}) < len(names):
        twice = next(request.text for i, request in enumerate(requests) if names[i] in names[:i])
        raise UserError(f"--prompt-names: the prompt {twice!r} comes twice; give it once, with --num-samples")
    return names


def of_length(
    loaded: LoadedRole, frames: int, window: int | None, sink: int | None, batch: int, *, rolling: bool = False
) -> LoadedRole:
    """Set the number of frames and the attention window of a loaded student; None, 0 and False keep the run's.

    For videos longer than the run's, a causal student without a window gets the longest past of its run as window.
    Raise UserError for settings that cannot be, or for a cache that does not fit in memory.
    """
    run, chunks = loaded.run, loaded.run.sampler.chunks
    video = dataclasses.replace(run.video, frames=frames or run.video.frames)
    shape = loaded.family.latent_shape(loaded.base, video.frames, video.height, video.width)
    if not chunks.causal:
        if window is not None or sink is not None or rolling:
            raise UserError("--window-frames, --sink-frames and --rolling-sink are for causal students: leave them out")
        return dataclasses.replace(loaded, run=dataclasses.replace(run, video=video))
    frames_of_run = loaded.family.latent_shape(loaded.base, run.video.frames, video.height, video.width)[1]
    if window is None:
        window = chunks.window_frames or (frames_of_run - chunks.chunk_frames if shape[1] > frames_of_run else 0)
    sink = (chunks.sink_frames if window else 0) if sink is None else sink
    rolling = rolling or (chunks.rolling_sink and sink > 0)
    chunks = dataclasses.replace(chunks, window_frames=window, sink_frames=sink, rolling_sink=rolling)
    sampler = dataclasses.replace(run.sampler, chunks=chunks)
    sampler.check()
    if loaded.role.config.sparse.share:
        sampler.chunks.check_whole()
    sampler.chunks.ranges(shape[1])
    run = dataclasses.replace(run, video=video, sampler=sampler)
    cache_memory(run, loaded.role, shape, batch, "lower --batch, or set --window-frames")
    return dataclasses.replace(loaded, run=run)


def read_lines(prompts: Sequence[str], *, images: float = 0) -> list[Request]:
    """Return the prompts, a file or folder replaced by its prompts; raise UserError if there are none.

    The name of a file or folder that is there is read; so is a text that ends in .txt, .json, .jsonl, .csv or .parquet
    or holds a slash, which must exist, here or on the hub.
    """
    lines: list[Request] = []
    for text in prompts:
        if not (text.endswith(SUFFIXES) or "/" in text or os.path.exists(text)):
            lines.append(Request(text))
            continue
        read = read_prompts(hub.local_file(text, "--prompts", hub.download), images=images)
        lines += read.requests
        if read.note:
            say(read.note)
    if not lines:
        raise UserError("--prompts needs at least one prompt or file of prompts")
    return lines


def with_images(
    loaded: LoadedRole, prompts: Sequence[str], lines: list[Request], given: tuple[Image, ...] = ()
) -> list[Request]:
    """Return the requests of `read_lines` with their condition images: `given` for all, or those of the tables.

    Raise UserError for a number of images that the student does not take.
    """
    takes = loaded.family.images(loaded.base)
    if given:
        lines = [dataclasses.replace(line, images=given) for line in lines]
    elif takes[1]:
        lines = read_lines(prompts, images=loaded.run.video.fps)
    way_out = "give --image FILE, or a table of prompts with a column image" if takes[0] else "leave --image out"
    check_images(loaded.name, takes, lines, way_out)
    return lines


def check_images(name: str, takes: tuple[int, int], requests: Sequence[Request], way_out: str) -> None:
    """Raise UserError unless each request has as many images as the student of that name takes, from fewest to most."""
    fewest, most = takes
    for request in requests:
        if not fewest <= len(request.images) <= most:
            raise UserError(
                f"{name} takes {fewest if fewest == most else f'{fewest} to {most}'} condition images, not "
                f"{len(request.images)} ({request.text!r}): {way_out}"
            )


def check_actions(name: str, takes: ActionForm | None, frames: int, requests: Sequence[Request]) -> None:
    """Raise UserError unless each request has the actions that the student of that name takes, for so many frames."""
    for request in requests:
        if fault := actions_fault(request.actions, takes.size if takes else 0, frames):
            raise UserError(f"{name}: {request.text!r} {fault}")


def videos(loaded: LoadedRole, requests: Sequence[Request], seed: int, batch: int) -> Iterator[Video]:
    """Generate the videos of the requests, `batch` at a time."""
    for parts in pieces(loaded, requests, seed, batch, by_chunk=False):
        yield torch.cat(list(parts), 2)


def pieces(
    loaded: LoadedRole, requests: Sequence[Request], seed: int, batch: int, *, by_chunk: bool, recache: bool = False
) -> Iterator[Iterator[Video]]:
    """Generate the videos of the requests, each batch as an iterator over its frames: all at once, or by chunks.

    With `recache` chunks after a switch of prompts attend to a KV cache that is computed anew.
    """
    for codec, made in _batches(loaded, requests, seed, batch, by_chunk=by_chunk, recache=recache):
        yield map(codec.decoder(), made)


def _batches(
    loaded: LoadedRole, requests: Sequence[Request], seed: int, batch: int, *, by_chunk: bool, recache: bool
) -> Iterator[tuple[Codec, Iterator[Latents]]]:
    """Generate the latents of each batch, all at once or by chunks, with their codec."""
    codec = loaded.codec()
    for start in range(0, len(requests), batch):
        part = requests[start : start + batch]
        seeds = range(seed + start, seed + start + len(part))
        if by_chunk:
            yield codec, _stream(loaded, codec, part, seeds, recache=recache)
        else:
            yield codec, iter([draw_latents(loaded, codec, part, seeds)])


@torch.no_grad()
def _stream(
    loaded: LoadedRole, codec: Codec, requests: Sequence[Request], seeds: Sequence[int], *, recache: bool
) -> Iterator[Latents]:
    """Generate chunk by chunk; each prompt of "a | b" has an equal number of chunks, up to rounding."""
    video, both = loaded.run.video, [(request, request.text.split(" | ")) for request in requests]
    count = len(loaded.run.sampler.chunks.ranges(codec.latent_shape(video.frames, video.height, video.width)[1]))
    now = [
        [dataclasses.replace(request, text=scene[i * len(scene) // count]) for request, scene in both]
        for i in range(count)
    ]
    if recache:
        yield from _recached(loaded, codec, now, seeds)
        return
    stream = Stream(loaded, codec, now[0], seeds)
    for requests_now in now:
        yield stream.next(requests_now)


def _recached(
    loaded: LoadedRole, codec: Codec, now: Sequence[Sequence[Request]], seeds: Sequence[int]
) -> Iterator[Latents]:
    """Generate chunk i with the requests now[i]; where they change, the KV cache is computed anew for them."""
    batch_of, draw = begin_samples(loaded, codec, seeds)
    noise, role, sampler = draw(0), of_kind(Causal, loaded.role), loaded.run.sampler
    ranges, draw, past = sampler.chunks.ranges(noise.shape[2]), functools.cache(draw), list[Latents]()
    visible, exits = sampler.chunks.visible_frames(noise.shape[2]), [sampler.num_steps - 1] * len(ranges)
    starts = [i for i in range(len(now)) if i == 0 or now[i] != now[i - 1]]
    for first, stop in itertools.pairwise([*starts, len(ranges)]):
        seen = visible[first]
        kept, batch = torch.cat(past, 2)[:, :, seen] if seen else noise[:, :, :0], batch_of(now[first])
        cache = recomputed_cache(role, kept, seen, batch, sampler, lambda s, f=seen: draw(s)[:, :, f], exits)
        for x0 in next_chunks(cache, noise, sampler, draw, ranges[first:stop], exits[first:stop]):
            check_finite(x0, loaded.name)
            past.append(x0)
            yield x0


def _write(
    loaded: LoadedRole,
    requests: Sequence[Request],
    seed: int,
    batch: int,
    names: Sequence[Path],
    by_chunk: bool,
    recache: bool,
) -> tuple[list[np.ndarray], str]:
    """Write the videos as their frames come, each to its file.

    Return the frames of the first SHOWN videos, and the speed in words if it was chunk by chunk.
    """
    clips: list[np.ndarray] = []
    began, first, written, count = time.perf_counter(), 0.0, 0, 0
    for codec, made in _batches(loaded, requests, seed, batch, by_chunk=by_chunk, recache=recache):
        decode = codec.decoder()
        rate, sound = (codec.sample_rate, codec.sound) if isinstance(codec, SoundDecoder) else (0, lambda _: ())
        with contextlib.ExitStack() as open_files:
            files, seen = [], []
            for x0 in made:
                seen.append(to_uint8(part := decode(x0)))
                first = first or time.perf_counter() - began
                if not files:
                    here = names[written : written + len(part)]
                    files = [open_files.enter_context(writer(name, loaded.run.video.fps, rate)) for name in here]
                for file, frames in zip(files, seen[-1], strict=True):
                    file.add(frames)
                for file, values in zip(files, sound(x0), strict=False):
                    file.add_sound(values.float().cpu().numpy())
        written += len(files)
        count += sum(len(frames) for part in seen for frames in part)
        if len(clips) < SHOWN:
            clips += [np.concatenate(of_one) for of_one in zip(*seen, strict=True)][: SHOWN - len(clips)]
    speed = count / (time.perf_counter() - began)
    return clips, f"; first frames after {first:.2f} s, {speed:.1f} frames/s over all videos" if by_chunk else ""
