"""The Ray cluster of a run: one that exists, or one that is started on this machine and ends with the run.

Ray is imported in functions: variables of the environment that `connect` sets are read when Ray is imported.
"""

import math
import os
import secrets
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from fnmatch import fnmatchcase
from typing import Any

import psutil

from unified_trainer.basics.errors import UserError
from unified_trainer.parallel.device import RAY_RESOURCES
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.run.settings.workers import RayConfig

NAMESPACE = "unified-trainer"
OF_MEMORY = 0.3  # of a machine's memory is the object store that Ray takes by itself
# What Ray is told by environment variables before it starts; a variable of the user's wins.
ENVIRONMENT = {
    "RAY_worker_niceness": "0",  # 15 by default: workers would yield to every other process of the machine
    "RAY_prestart_worker_first_driver": "0",  # else one idle Python process for each core, as soon as Ray runs
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_COLOR_PREFIX": "0",
    "NIXL_LOG_LEVEL": "WARN",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # a process without a device does not lose sight of all of them
}
# Variables of the shell that ranks and workers get too, on whatever node; docs/scale.md lists them.
FORWARDED = (
    *("WANDB_*", "HF_*", "TRANSFORMERS_*", "TOKENIZERS_*", "TORCH_*", "PYTORCH_*"),
    *("NCCL_*", "GLOO_*", "HCCL_*", "UCX_*", "FI_*", "RDMAV_*", "http_proxy", "https_proxy", "no_proxy"),
)
Needs = Mapping[str, float]  # resources by Ray's names
SHOWN = 500  # characters of Ray's reason that a message repeats
LATER = threading.Event()  # never set


def connect(config: RayConfig, cores: float, mesh: Mesh | None = None, *, store: int = 0) -> None:
    """Connect this process to the cluster, unless it is; all ranks must call it, before they import Ray.

    Without an address the main rank starts Ray on this machine, for all ranks, with as many CPU cores as the machine
    has, or as the run counts: cores are only counted, so that a small machine can try a run with many processes. Its
    object store has `store` bytes where these are more than Ray would take.
    """
    if "ray" in sys.modules and sys.modules["ray"].is_initialized():
        return
    alone, is_main = mesh is None or mesh.size == 1, mesh is None or mesh.is_main
    address = config.address or os.environ.get("RAY_ADDRESS", "")
    # Ray would write a token into the home directory; this one is known to the processes of this run alone.
    token = "" if address else secrets.token_hex(32)
    if mesh is not None and not alone:
        token = mesh.broadcast(token)
    own = {"RAY_AUTH_TOKEN": token} if token else {}
    own |= {} if is_main or not token else {"RAY_AUTH_MODE": "token"}  # the main rank's Ray turns it on itself
    for name, value in {**ENVIRONMENT, **own}.items():  # Ray reads some when it is imported
        os.environ.setdefault(name, value)
    if is_main and address:
        _init(address)
    elif is_main:
        more = {"object_store_memory": store} if store > OF_MEMORY * psutil.virtual_memory().total else {}
        _init("local", num_cpus=max(psutil.cpu_count() or 1, math.ceil(cores)), include_dashboard=False, **more)
        for raylet in (child for child in psutil.Process().children() if child.name() == "raylet"):
            threading.Thread(target=_say_if_it_dies, args=(raylet,), name="raylet", daemon=True).start()
    if mesh is not None and not alone:
        address = mesh.broadcast(sys.modules["ray"].get_runtime_context().gcs_address if is_main else "")
        if not is_main:
            _init(address)


def devices(kind: str, count: float) -> Needs:
    """Return the resources of `count` devices of a kind that torch names; a CPU is none."""
    return {RAY_RESOURCES[kind]: count} if kind in RAY_RESOURCES and count else {}


def options(needs: Needs) -> dict[str, object]:
    """Return the options of a Ray actor with these needs."""
    other = {name: count for name, count in needs.items() if name not in ("CPU", "GPU")}
    return {"num_cpus": needs.get("CPU", 0), "num_gpus": needs.get("GPU", 0), "resources": other or None}


def forwarded() -> dict[str, str]:
    """Return the variables of this process that ranks and workers get too, by FORWARDED."""
    return {name: text for name, text in os.environ.items() if any(fnmatchcase(name, pattern) for pattern in FORWARDED)}


def _init(address: str, **how: Any) -> None:
    import ray

    try:
        ray.init(address, namespace=NAMESPACE, logging_level="error", **how)
    except Exception as error:  # a node that does not start in time is a plain Exception
        said = " ".join(str(error).split())[:SHOWN]
        raise UserError(
            f"ray.address {address}: no Ray cluster can be reached, or started on this machine ({said}); start one "
            "with `ray start --head`, or leave ray.address out to use this machine alone"
        ) from error


def _say_if_it_dies(raylet: psutil.Process) -> None:
    """Wait for the end of the Ray of this machine; say so if the run needs it, which Ray itself then ends soon."""
    import ray

    raylet.wait()
    if ray.is_initialized():
        why = "its raylet was killed, perhaps for want of memory"
        sys.stderr.write(f"error: Ray ended on this machine ({why}): continue the run with --resume\n")


def wait_for_room(config: RayConfig, needs: Sequence[Needs]) -> None:
    """Wait until the whole cluster is large enough for processes with these needs.

    Raise UserError if it is not after `ray.timeout_minutes`, or at once for this machine alone. Ray itself would wait
    without a word. Meanwhile a placement group asks for the room, by which an autoscaler adds nodes.
    """
    alone = not (config.address or os.environ.get("RAY_ADDRESS"))
    end = time.monotonic() + (0 if alone else 60 * config.timeout_minutes)
    if not _lacking(needs):
        return
    with nullcontext() if alone else _demand(needs):
        while lacking := _lacking(needs):
            if time.monotonic() >= end:
                raise UserError(_no_room(needs, lacking))
            LATER.wait(1.0)  # a node may join


def check_store(needed: int) -> None:
    """Raise UserError unless the object stores of the cluster hold so many bytes: Ray would write the rest to disk.

    It is a lower bound, because samples and weights may be on several nodes at a time.
    """
    import ray

    if (there := ray.cluster_resources().get("object_store_memory", 0)) < needed:
        raise UserError(
            f"samples and weights on their way between training and workers take {needed / 2**30:.3g} GiB, but Ray's "
            f"object store has {there / 2**30:.3g}: start Ray with `ray start --object-store-memory {needed}` and as "
            "much in /dev/shm, and give ray.address; or lower algorithm.num_prompts, algorithm.num_samples or "
            "rollouts.ahead"
        )


def has_room(needs: Sequence[Needs]) -> bool:
    """Return whether the whole cluster is large enough for processes with these needs."""
    return not _lacking(needs)


def _lacking(needs: Sequence[Needs]) -> Needs:
    """Return what these processes need of resources of which the cluster, or every node for one of them, has less."""
    wanted = {name: sum(need.get(name, 0) for need in needs) for need in needs for name in need}
    most = {name: max(need.get(name, 0) for need in needs) for name in wanted}
    there = {name: _there(name) for name in wanted}
    return {name: n for name, n in wanted.items() if n > sum(there[name]) or most[name] > max(there[name])}


def _there(name: str) -> list[float]:
    """Return what each node has of a resource."""
    import ray

    return [node["Resources"].get(name, 0) for node in ray.nodes() if node["Alive"]] or [0]


def _no_room(needs: Sequence[Needs], lacking: Needs) -> str:
    there = ", ".join(f"{sum(_there(name)):g} {name}" for name in lacking)
    node = ", ".join(f"{max(_there(name)):g} of {max(need.get(name, 0) for need in needs):g}" for name in lacking)
    asked = ", ".join(f"{count:g} {name}" for name, count in lacking.items())
    return (
        f"the run needs {asked} for {len(needs)} processes on Ray, but the cluster has {there}, and a node at most "
        f"{node} for one process: lower rollouts.workers, rollouts.ranks, rollouts.reward_workers, rollouts.gpus or "
        "ray.ranks, or add nodes"
    )


@contextmanager
def _demand(needs: Sequence[Needs]) -> Iterator[None]:
    """Inside, a placement group of these processes is requested; nothing runs in it."""
    from ray.util.placement_group import placement_group, remove_placement_group

    group = placement_group([dict(need) for need in needs], strategy="PACK")
    try:
        yield
    finally:
        remove_placement_group(group)
