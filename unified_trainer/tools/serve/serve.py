"""The command serve: a student as a service, which answers requests for videos over HTTP as docs/tools.md says."""

import base64
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro
from starlette.routing import BaseRoute

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.ranges import Count, CountOrZero, FramesOrZero, Port, at_least
from unified_trainer.basics.requests import Request
from unified_trainer.basics.suggestions import must_know
from unified_trainer.basics.types import Video
from unified_trainer.data.video_files import to_uint8, write_mp4
from unified_trainer.models.base import ActionForm, Codec
from unified_trainer.parallel.device import Device
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.rewards.image_json import prompts_with_images
from unified_trainer.rewards.video_json import to_json
from unified_trainer.run.checkpoint.manifest import Spec, weights_digest
from unified_trainer.run.settings.config import plain
from unified_trainer.tools.load_run import load_role
from unified_trainer.tools.report.run_folder import find_runs, is_run
from unified_trainer.tools.sample.latents import SampledRole, Stream, draw_latents
from unified_trainer.tools.sample.sample import check_images, of_length
from unified_trainer.tools.serve.batch_queue import Batcher
from unified_trainer.tools.serve.guard import Door
from unified_trainer.tools.serve.service import Asked, Service, texts
from unified_trainer.tools.serve.streams import Chunk, First, Streams
from unified_trainer.tools.serve.web_server import serve_until_stopped

KEYS = ("protocol", "prompts", "seeds", "encoding", "images")  # of a request
MOST_BYTES = 2**24  # of a request


def serve(
    run: Annotated[str, tyro.conf.Positional],
    port: Port = 8000,
    host: str = "127.0.0.1",
    token_variable: str = "",
    batch: Count = 8,
    wait: Annotated[float, at_least(0, 60)] = 0.05,
    streams: CountOrZero = 4,
    action_names: tuple[str, ...] = (),
    window_frames: FramesOrZero | None = None,
    sink_frames: FramesOrZero | None = None,
    rolling_sink: bool = False,
    device: Device = "auto",
    base: Path | None = None,
    families: tuple[str, ...] = (),
) -> None:
    """Serve videos of the student, generated with the sampler and the size of its run, until SIGTERM or Ctrl-C.

    Args:
        batch: Most videos that are generated together; requests that wait are joined up to it.
        streams: Most videos of a causal student that are streamed at a time, chunk by chunk; 0 streams none.
        action_names: Names of the numbers in an action, in order, for a student that takes some: in a browser the arrow
            keys set those named left, right, up and down to 1, and stop is 1 while no key is pressed.
        window_frames: Finished latent frames that a causal student attends to; by default the run's. Only with a window
            is a stream longer than the run's videos.
        sink_frames: Number of them that are always the first frames of the video; by default the run's.
        rolling_sink: Move these first frames along with a video that outgrows the window, also if the run does not.
    """
    folder, _, ema = Spec.of(run)
    if folder.is_dir() and not is_run(folder) and find_runs(folder):
        raise UserError(f"serve {run}: it holds runs, but serve generates videos of one: name it")

    def load() -> Service:
        loaded = load_role(run, "student", base, Mesh.alone(device), causal=True, families=families)
        loaded = of_length(loaded, 0, window_frames, sink_frames, batch + streams, rolling=rolling_sink)
        codec = loaded.codec()
        name = f"{folder.resolve().name}@{loaded.metadata['step']}{':ema' if ema else ''}"
        digest = weights_digest(loaded.metadata, "student", ema=ema)
        images, form = loaded.family.images(loaded.base), loaded.actions
        if len(action_names) not in (0, form.size if form else 0):
            raise UserError(f"--action-names: {run} takes {form.size if form else 0} numbers, not {len(action_names)}")
        live = Live(streams, form, action_names)
        return student_service(name, loaded, codec, batch, wait, digest, images, live)

    door = Door(host, port, token_variable)
    serve_until_stopped(door, load, lambda address: f"{run} at {address}: POST {address}/sample")


@dataclass(frozen=True)
class Live:
    """How a causal student is streamed."""

    streams: int = 4  # at once
    form: ActionForm | None = None  # of the actions that it takes
    names: tuple[str, ...] = ()  # of the numbers in an action


@dataclass(frozen=True)
class Wanted(Asked):
    """The samples that one request asks for; all have the size of the run's videos."""

    seeds: list[int]
    encoding: Literal["float32", "uint8", "mp4"]


def student_service(
    name: str,
    student: SampledRole,
    codec: Codec,
    batch: int,
    wait: float,
    weights: str,
    images: tuple[int, int] = (0, 0),
    live: Live = Live(0),
) -> Service[Any, Any]:
    """Return a service that generates `batch` videos at a time; the first request waits `wait` seconds for others.

    `name` and `weights`, a digest of the student's weights, are what it says of itself. `images` are how many condition
    images a sample takes, at least and at most, and `live` says how a causal student is streamed.
    """
    video = student.run.video

    @torch.no_grad()
    def together(requests: Sequence[Wanted]) -> list[Video]:
        samples = [pair for request in requests for pair in zip(request.prompts, request.seeds, strict=True)]
        parts = []
        for start in range(0, len(samples), batch):
            prompts, seeds = zip(*samples[start : start + batch], strict=True)
            parts.append(codec.decode(draw_latents(student, codec, Request.of(prompts), seeds)).cpu())
        return list(torch.cat(parts).split([request.size for request in requests]))

    def work(jobs: Sequence[Any]) -> Sequence[Any]:
        return [job.make() for job in jobs] if isinstance(jobs[0], Chunk) else together(jobs)

    def read(asked: dict[str, Any]) -> Wanted:
        wanted = _read(asked)
        if live.form:
            raise UserError("this student takes actions, which only a stream is given: GET /stream")
        way_out = "send images, a PNG file in base64 for each prompt" if images[0] else "leave images out"
        check_images(name, images, Request.of(wanted.prompts), way_out)
        return wanted

    def write(wanted: Wanted, videos: Video) -> dict[str, Any]:
        if wanted.encoding == "mp4":
            return {"videos": _mp4_json(videos, video.fps)}
        return {"videos": to_json(videos, wanted.encoding)}

    about = {"name": name, "frames": video.frames, "height": video.height, "width": video.width, "fps": video.fps}
    about |= {"latents": list(codec.latent_shape(video.frames, video.height, video.width)), "weights": weights}
    about |= {"sampler": plain(student.run)["sampler"], "device": student.role.device.type, "images": list(images)}
    batcher, routes = Batcher[Any, Any](work, batch, wait), list[BaseRoute]()
    if student.run.sampler.chunks.causal and live.streams:
        most = video.frames if images[1] or not student.run.sampler.chunks.window_frames else 0
        size = live.form.size if live.form else 0
        about["stream"] = {"most_frames": most, "streams": live.streams, "action_size": size, "actions": live.names}

        def open_video(first: First, request: Request) -> Stream:
            check_images(name, images, [request], "send image" if images[0] else "leave image out")
            _check_length(student, codec, first.frames, most)
            return Stream(student, codec, [request], [first.seed], live.form)

        routes = Streams(open_video, batcher, live.streams, size).routes()
    return Service(about, "/sample", read, write, batcher, MOST_BYTES, routes)


def _check_length(student: SampledRole, codec: Codec, frames: int, most: int) -> None:
    """Raise UserError unless a video can have so many frames; 0 stands for no end, both in `frames` and in `most`."""
    video, chunks = student.run.video, student.run.sampler.chunks
    if most and not 0 < frames <= most:
        raise UserError(
            f"frames must be from 1 to {most}, not {frames}: a longer stream, or one without end, needs a student with "
            "a window (serve --window-frames) and without condition images"
        )
    if frames:
        chunks.ranges(codec.latent_shape(frames, video.height, video.width)[1])


def _read(asked: dict[str, Any]) -> Wanted:
    for key in asked:
        must_know("key of a request", key, KEYS)
    prompts, seeds, encoding = texts(asked, "prompts"), asked.get("seeds"), asked.get("encoding", "float32")
    if not prompts:
        raise UserError("prompts must not be empty")
    if not isinstance(seeds, list) or not all(type(seed) is int and -(2**63) <= seed < 2**63 for seed in seeds):
        raise UserError("seeds must be a list of integers of 64 bits")
    if len(seeds) != len(prompts):
        raise UserError(f"{len(prompts)} prompts but {len(seeds)} seeds, expected one seed for each")
    if encoding not in ("float32", "uint8", "mp4"):
        raise UserError(f"encoding must be float32, uint8 or mp4, not {encoding!r}")
    return Wanted(prompts_with_images(prompts, asked.get("images")), seeds, encoding)


def _mp4_json(videos: Video, fps: float) -> dict[str, Any]:
    """Return videos as JSON with an H.264 file in base64 for each."""
    files = []
    with tempfile.TemporaryDirectory() as folder:
        for i, frames in enumerate(to_uint8(videos)):
            write_mp4(frames, Path(folder) / f"{i}.mp4", fps)
            files.append(base64.b64encode((Path(folder) / f"{i}.mp4").read_bytes()).decode())
    return {"shape": list(videos.shape), "encoding": "mp4", "data": files}
