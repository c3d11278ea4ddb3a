"""Building the parts of a run in a process of Ray: a rollout, reward or evaluation worker."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from unified_trainer.basics.requests import Request
from unified_trainer.methods.base import Method
from unified_trainer.methods.rl.rollouts import Sampling
from unified_trainer.models.base import Codec
from unified_trainer.parallel.device import require_memory, use_attention, use_tf32
from unified_trainer.parallel.mesh import Mesh, ParallelConfig
from unified_trainer.rewards.latents import reward_of
from unified_trainer.rewards.scorers import load_scorers
from unified_trainer.roles.causal import Causal, causal_form
from unified_trainer.roles.weight_copy import BranchedCopy, WeightCopy
from unified_trainer.run.load_roles import load_roles
from unified_trainer.run.plan.downloads import fetched
from unified_trainer.run.plan.roles import RolePlan, plan_roles
from unified_trainer.run.registry import add_families, family_of, method_named, open_model
from unified_trainer.run.settings.config import RunConfig
from unified_trainer.run.validation.distances import distances_of
from unified_trainer.run.validation.samples import SampleMaker


def build_sampling(run: RunConfig, mesh: Mesh, samples: bool, scores: bool) -> Sampling:
    """Load what a worker needs to make samples, or to score them: one role without an optimizer, encoders, scorers.

    Several ranks share the role. All must call it.
    """
    (run, method), device = _in_worker(run, mesh), mesh.device
    name = method.sampled_by
    plan = plan_roles(run, method, starting=False)[name]  # its weights are sent by training
    codec, video = _codec_of(name, plan, run, device), run.video
    parts: dict[str, Any] = {"sample": None, "weights": {}, "reward": None}
    if samples:
        role = _weights_of_training(name, plan, run, mesh, "a rollout worker", "sample", "--rollouts.workers 0")
        parts |= {"sample": partial(method.sample, run.algorithm, run.sampler, role), "weights": role.weights}
    if scores:
        parts["reward"] = reward_of(load_scorers(run.reward, device)[0], codec, run.reward)
    return Sampling(
        **parts, codec=codec, latent_shape=codec.latent_shape(video.frames, video.height, video.width), device=device
    )


def build_evaluation(
    run: RunConfig, device: torch.device, requests: Sequence[Request]
) -> tuple[WeightCopy, SampleMaker]:
    """Load what an evaluation worker needs: the student without an optimizer, encoders, and all scorers."""
    mesh = Mesh(device)
    run, method = _in_worker(run, mesh)
    plan = plan_roles(run, method, starting=False)["student"]
    codec, shown = _codec_of("student", plan, run, device), run.validated()
    way_out = "--rollouts.evaluation-workers 0"
    role = _weights_of_training("student", plan, run, mesh, "an evaluation worker", "validate", way_out)
    scorers, features = load_scorers(run.reward, device)
    shape = codec.latent_shape(shown.video.frames, shown.video.height, shown.video.width)
    reward = reward_of(scorers, codec, run.reward)
    measured = distances_of(run.validation, shown.video, codec, features, requests, device)
    return role, SampleMaker(run.validation, codec, reward, measured, shown.sampler, requests, shape, device)


def _in_worker(run: RunConfig, mesh: Mesh) -> tuple[RunConfig, type[Method]]:
    """Return run and method as a process sees them that Ray started; set how it computes."""
    add_families(run.families)
    method = method_named(run.method)
    use_attention(run.parallel.attention, mesh.device)
    use_tf32(run.parallel.tf32)
    return fetched(replace(run, parallel=ParallelConfig()), mesh), method  # that of the training processes


def _codec_of(name: str, plan: RolePlan, run: RunConfig, device: torch.device) -> Codec:
    family, folder = family_of(name, plan.path)
    return family.codec(folder, device, run.encoders)


def _weights_of_training(
    name: str, plan: RolePlan, run: RunConfig, mesh: Mesh, worker: str, does: str, instead: str
) -> WeightCopy:
    """Load a role whose trained weights training sends; UserError, with the way out, if the device is too small."""
    kind = causal_form(WeightCopy) if run.sampler.chunks.causal else BranchedCopy if mesh.data_size > 1 else WeightCopy
    way_out = f"set the role's precision to bf16, train an adapter, or {does} in the training processes, which share "
    size = _bytes(name, plan) // mesh.size
    require_memory(size, mesh.device, f"the model of {worker}", f"{way_out}the model: {instead}")
    role: Any = load_roles({name: replace(plan, kind=kind)}, mesh, sampling=True)[name]
    return role


def _bytes(name: str, plan: RolePlan) -> int:
    """Return the bytes of a role's networks on one device, read from configs alone."""
    causal, size = issubclass(plan.kind, Causal), 2 if plan.config.precision == "bf16" else 4
    total = 0
    for component in plan.layout.components.values():
        network = open_model(name, plan.path, component, causal=causal, config=plan.config).network
        total += size * sum(p.numel() for p in network.parameters())
    return total
