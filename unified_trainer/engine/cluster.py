"""The Ray cluster of a run: one that exists, or one that is started on this machine and ends with the run."""

import json
import math
import os
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import psutil
import ray

from unified_trainer.engine.config import RayConfig
from unified_trainer.errors import UserError
from unified_trainer.parallel.device import RAY_RESOURCES
from unified_trainer.parallel.mesh import Mesh

NAMESPACE = "unified-trainer"
TOKEN = "RAY_AUTH_TOKEN"
# What Ray is told by environment variables before it starts; a variable of the user's wins.
ENVIRONMENT = {
    "RAY_worker_niceness": "0",  # 15 by default: workers would yield to every other process of the machine
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_COLOR_PREFIX": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # a process without a device does not lose sight of all of them
}
Needs = Mapping[str, float]  # resources by Ray's names


def connect(config: RayConfig, cores: float, mesh: Mesh | None = None) -> None:
    """Connect this process to the cluster, unless it is; all ranks must call it.

    Without an address the main rank starts Ray on this machine, for all ranks, with as many CPU cores as the machine
    has, or as the run counts: cores are only counted, so that a small machine can try a run with many processes.
    """
    if ray.is_initialized():
        return
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    told: dict[str, str] = {}
    if mesh is None or mesh.is_main:
        _join(config, cores)
        told = {"address": ray.get_runtime_context().gcs_address, "token": os.environ.get(TOKEN, "")}
    if mesh is None or mesh.size == 1:
        return
    told = json.loads(mesh.broadcast(json.dumps(told)))
    if not mesh.is_main:
        os.environ.update({TOKEN: told["token"]} if told["token"] else {})
        _init(config, address=told["address"])


def devices(kind: str, count: float) -> Needs:
    """Return the resources of `count` devices of a kind that torch names; a CPU is none."""
    return {RAY_RESOURCES[kind]: count} if kind in RAY_RESOURCES and count else {}


def options(needs: Needs) -> dict[str, object]:
    """Return the options of a Ray actor with these needs."""
    other = {name: count for name, count in needs.items() if name not in ("CPU", "GPU")}
    return {"num_cpus": needs.get("CPU", 0), "num_gpus": needs.get("GPU", 0), "resources": other or None}


def _join(config: RayConfig, cores: float) -> None:
    address = config.address or os.environ.get("RAY_ADDRESS", "")
    if address:
        _init(config, address=address)
        return
    # Ray would write a token into the home directory; this one is known to the processes of this run alone.
    os.environ.setdefault(TOKEN, secrets.token_hex(32))
    _init(config, num_cpus=max(psutil.cpu_count() or 1, math.ceil(cores)), include_dashboard=False)


def _init(config: RayConfig, **how: Any) -> None:
    try:
        ray.init(namespace=NAMESPACE, logging_level="error", **how)
    except (ConnectionError, OSError, RuntimeError, ValueError) as error:
        raise UserError(
            f"ray.address {how.get('address', '')}: no Ray cluster can be reached or started ({error}); start one with "
            "`ray start --head`, or leave ray.address out to use this machine alone"
        ) from error


def check_room(needs: Sequence[Needs]) -> None:
    """Raise UserError if the whole cluster is too small: Ray itself would wait without a word."""
    there = ray.cluster_resources()
    for name in sorted({name for need in needs for name in need}):
        wanted = sum(need.get(name, 0) for need in needs)
        if wanted > there.get(name, 0):
            raise UserError(
                f"the run needs {wanted:g} {name} for {len(needs)} processes on Ray, but the cluster has "
                f"{there.get(name, 0):g}: lower rollouts.workers, rollouts.reward_workers, rollouts.gpus or ray.ranks"
            )
