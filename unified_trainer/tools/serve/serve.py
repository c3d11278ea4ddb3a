"""The command serve: it answers requests for videos of a student over HTTP, for evaluation and other programs."""

from pathlib import Path
from typing import Annotated

import tyro

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.ranges import Count, Port, at_least
from unified_trainer.parallel.device import Device
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.run.build import cache_memory
from unified_trainer.run.checkpoint.manifest import Spec, weights_digest
from unified_trainer.tools.load_run import LoadedRole, load_role
from unified_trainer.tools.report.run_folder import find_runs, is_run
from unified_trainer.tools.serve.guard import Door
from unified_trainer.tools.serve.service import Service
from unified_trainer.tools.serve.student_service import student_service
from unified_trainer.tools.serve.web_server import serve_until_stopped


def serve(
    run: Annotated[str, tyro.conf.Positional],
    port: Port = 8000,
    host: str = "127.0.0.1",
    token_variable: str = "",
    batch: Count = 8,
    wait: Annotated[float, at_least(0, 60)] = 0.05,
    device: Device = "auto",
    base: Path | None = None,
    families: tuple[str, ...] = (),
) -> None:
    """Serve videos of the student, generated with the sampler and the size of its run, until SIGTERM or Ctrl-C.

    The pages of runs are served by watch.

    Args:
        run: RUN[@step][:ema], a run directory: its newest checkpoint or that step's; with :ema the EMA weights.
        port: Port to listen at; 0 takes a free one.
        host: Address to listen at.
        token_variable: Environment variable that holds a token, which clients must then show: as a bearer token, or as
            the password that a browser asks for. Without one, open the server only to a network that you trust.
        batch: Most videos that are generated together; requests that wait are joined up to it.
        wait: Seconds that the first request in the queue waits for others.
        device: Device to run on.
        base: Pipeline folder that the student started from, if it is no longer where the run found it.
        families: Model families of your own, in place of those of the run.
    """
    folder, _, ema = Spec.of(run)
    if folder.is_dir() and not is_run(folder) and find_runs(folder):
        raise UserError(
            f"serve {run}: it holds runs, but serve generates videos of one: name it, or see all with watch {run}"
        )

    def load() -> Service:
        loaded = load_role(run, "student", base, Mesh.alone(device), causal=True, families=families)
        _require_cache(loaded, batch)
        codec = loaded.family.codec(loaded.base, loaded.role.device, loaded.run.encoders)
        name = f"{folder.resolve().name}@{loaded.metadata['step']}{':ema' if ema else ''}"
        digest = weights_digest(loaded.metadata, "student", ema=ema)
        return student_service(name, loaded, codec, batch, wait, digest, loaded.family.images(loaded.base))

    door = Door(host, port, token_variable)
    serve_until_stopped(door, load, lambda address: f"{run} at {address}: POST {address}/sample")


def _require_cache(loaded: LoadedRole, batch: int) -> None:
    """Raise UserError if the KV cache of a causal student does not fit in memory."""
    video = loaded.run.video
    if loaded.run.sampler.chunks.causal:
        shape = loaded.family.latent_shape(loaded.base, video.frames, video.height, video.width)
        cache_memory(loaded.run, loaded.role, shape, batch, "lower --batch")
