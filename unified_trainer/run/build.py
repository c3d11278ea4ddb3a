"""Building a run from its settings: check everything, then load weights and connect the parts."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from unified_trainer.basics.requests import Request
from unified_trainer.basics.types import of_kind
from unified_trainer.data.clips import render_clips
from unified_trainer.data.loader import Loader, Source
from unified_trainer.data.negative_prompt import use_negative_prompt
from unified_trainer.data.parquet import (
    ParquetClips,
    ParquetFirstFrames,
    ParquetPairs,
    ParquetRows,
    ParquetTrajectories,
)
from unified_trainer.data.prompts import Prompts
from unified_trainer.data.raw_clips import encode_videos
from unified_trainer.data.stored_prompts import use_stored_prompts
from unified_trainer.methods.rl.rollout_config import RolloutConfig
from unified_trainer.methods.rl.rollout_method import with_buffer
from unified_trainer.methods.rl.rollouts import LocalRollouts, Rollouts
from unified_trainer.models.base import Codec
from unified_trainer.parallel.agreement import assert_equal
from unified_trainer.parallel.device import attention_order, has_tf32, require_memory
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.rewards.base import Features
from unified_trainer.rewards.latents import reward_of
from unified_trainer.rewards.reward import Reward, RewardSum
from unified_trainer.rewards.scorers import load_scorers
from unified_trainer.roles.causal import Causal
from unified_trainer.roles.role import Role, Trainable, TrainableConfig
from unified_trainer.roles.weight_copy import WeightCopy
from unified_trainer.run.build_worker import build_evaluation, build_sampling
from unified_trainer.run.checkpoint.manager import Keep
from unified_trainer.run.checkpoint.mirror import Mirror
from unified_trainer.run.guards.base import Guard
from unified_trainer.run.guards.distillation import DistillationGuard
from unified_trainer.run.guards.hacking_monitor import HackingMonitor
from unified_trainer.run.guards.responses import Guards
from unified_trainer.run.guards.teacher_probe import TeacherProbe
from unified_trainer.run.load_roles import load_roles
from unified_trainer.run.offloaded_rollouts import OffloadedRollouts
from unified_trainer.run.plan.plan import RunPlan, check, described
from unified_trainer.run.settings.code import code_of
from unified_trainer.run.settings.config import RunConfig, plain
from unified_trainer.run.stop_signal import safe_point
from unified_trainer.run.summary import summary
from unified_trainer.run.trainer import ProfiledTrainer, Trainer
from unified_trainer.run.validation.distances import distances_of
from unified_trainer.run.validation.report import Validation, ValidationSets, ValidationSource
from unified_trainer.run.workers import cluster

if TYPE_CHECKING:  # Ray is an extra
    from unified_trainer.run.workers.group import WorkerGroup

EMBEDDINGS = "prompt_embeddings"  # folder in the run directory


@dataclass(frozen=True)
class Built:
    """A run that is ready to start."""

    run: RunConfig  # its settings, with what its files decide filled in
    trainer: Trainer
    roles: Mapping[str, Role]
    codec: Codec
    reward: RewardSum  # a Reward where this process scores samples or validates, else the arithmetic alone
    validation: ValidationSource | None  # None for a run without validations
    summary: dict[str, str]  # models, reward, prompts and video size
    counts: dict[str, int | str]  # of one training step's batch
    notes: tuple[str, ...]  # ranks and precision
    keep: Keep
    learned: str  # about the student's pipeline
    stop_workers: Callable[[], None] | None = None  # of a run with workers

    def close(self) -> None:
        """End the reading of clips, and the workers of the run, if it has some."""
        self.trainer.loader.close()
        if self.stop_workers is not None:
            self.stop_workers()


def build(run: RunConfig, mesh: Mesh, output: Path | None = None, mirror: Mirror | None = None) -> Built:
    """Check a run, load its models and connect its parts.

    Embeddings of prompts are kept below the run directory `output`, or without one only in memory. A `mirror` is taken
    before a weight is read.
    """
    plan = check(run, mesh)
    assert_equal(mesh, plan.compared())
    if mirror is not None:
        mirror.take()
    run = _with_cache(plan.run, output)
    learned = described(run, plan.family, plan.folder)
    codec = plan.family.codec(plan.folder, mesh.device, run.encoders)
    _require_memory(run, plan, codec, mesh)
    source, requests = _requests(run, plan, codec)
    workers = _start_workers(run, plan, requests, mesh)
    scorers, features = load_scorers(run.reward, mesh.device) if plan.scores_here else ({}, None)
    reward = reward_of(scorers, codec, run.reward) if plan.scores_here else RewardSum(run.reward)
    roles = _load_roles(run, plan, mesh)
    loader = Loader(
        source,
        codec,
        plan.batch,
        plan.latent_shape,
        run.sampler.negative_prompt,
        run.seed,
        mesh,
        ahead=run.rollouts.ahead + run.rollouts.super_batch - 1,
        shuffle=run.data.shuffle,
    )
    places = _check_workers(run, plan, roles, workers)
    rollouts = _rollouts(run, plan, roles, reward, loader, mesh, workers)
    guards = _guards(run, plan, roles, codec, requests, mesh)
    trainer = _trainer(run, plan, roles, reward, codec, loader, rollouts, guards, output)
    validation = _validation(run, plan, roles, codec, reward, features, requests, mesh, workers)
    # Last, so that a folder of weights that is not whole is refused before any file is written.
    encoded = _encode(run, plan, codec, source, loader, requests if validation else (), mesh)
    return Built(
        run=plan.run,
        trainer=trainer,
        roles=roles,
        codec=codec,
        reward=reward,
        validation=validation,
        summary=summary(plan.run, plan, roles, source) | _kernels(run, mesh) | places,
        counts=plan.counts,
        notes=(*_notes(mesh, run), *encoded, *filter(None, (learned, *plan.notes))),
        keep=plan.keep,
        learned=learned,
        stop_workers=workers.stop if workers is not None else None,
    )


def _require_memory(run: RunConfig, plan: RunPlan, codec: Codec, mesh: Mesh) -> None:
    """Raise UserError unless the conditions and latents of a rank's samples of one training step fit on its device."""
    samples = plan.batch.prompts * plan.batch.num_samples // mesh.data_size
    prompts, num_samples, *_ = plan.batch.keys
    states, algorithm = 0, run.algorithm
    if isinstance(algorithm, RolloutConfig) and algorithm.trajectories == "device":
        states = algorithm.kept_states(run.sampler)
    size = 4 * samples * (sum(map(math.prod, codec.text_shapes.values())) + states * math.prod(plan.latent_shape))
    what = f"a rank's share of a training step, {samples} samples ({prompts} x {num_samples}),"
    require_memory(size, mesh.device, what, f"lower {num_samples if num_samples != '1' else prompts}")


def _with_cache(run: RunConfig, output: Path | None) -> RunConfig:
    """Return the run with the folder of its prompts' embeddings."""
    cache = run.encoders.cache or (str(output / EMBEDDINGS) if output else "")
    return replace(run, encoders=replace(run.encoders, cache=cache))


def _requests(run: RunConfig, plan: RunPlan, codec: Codec) -> tuple[Source, Sequence[Request]]:
    """Return the source of training data and the requests of validation: by default the first of the source."""
    source = _source(run, plan, codec)
    stored = Path(run.prompts if run.trains_on == "prompts" else run.data.path)
    use_negative_prompt(stored, run.sampler.negative_prompt, codec)
    count = min(run.validation.num_samples, len(source))
    return source, plan.validation_requests or [source.request(i) for i in range(count)]


def _start_workers(run: RunConfig, plan: RunPlan, requests: Sequence[Request], mesh: Mesh) -> "WorkerGroup | None":
    """Start the workers of a run that has some; they load while training loads."""
    if not (run.rollouts.workers or run.rollouts.evaluation_workers):
        return None
    needed = plan.store_bytes()
    cluster.connect(run.ray, run.rollouts.cores, mesh, store=needed)
    from unified_trainer.run.workers.group import WorkerGroup

    return WorkerGroup.start(run, build_sampling, build_evaluation, tuple(requests), mesh, store=needed)


def _load_roles(run: RunConfig, plan: RunPlan, mesh: Mesh) -> dict[str, Role]:
    """Load the roles; copies take the weights of the roles that they copy."""
    roles = load_roles(plan.roles, mesh)
    for name, role in roles.items():
        if isinstance(role, WeightCopy):
            role.update_from(roles[plan.method.roles[name].copy_of])
    if run.sampler.chunks.causal:
        way_out = "lower algorithm.micro_batch and validation.batch, or set sampler.chunks.window_frames"
        samples = max(plan.batch.micro_batch, run.validation.batch)
        needed = cache_memory(run, roles["student"], plan.latent_shape, samples, way_out)
        if plan.validation_shape != plan.latent_shape:
            needed = cache_memory(
                run.validated(), roles["student"], plan.validation_shape, run.validation.batch, way_out
            )
        plan.counts["KV cache of the student"] = needed
    return roles


def _check_workers(
    run: RunConfig, plan: RunPlan, roles: Mapping[str, Role], workers: "WorkerGroup | None"
) -> dict[str, str]:
    """Wait for the workers and compare their weights with those of training; return where each one runs."""
    if workers is None:
        return {}
    role = _sampled(roles, plan.method.sampled_by or "student")
    return workers.check(role, 60 * run.ray.timeout_minutes, code_of(run))


def _sampled(roles: Mapping[str, Role], name: str) -> Trainable | WeightCopy:
    """Return a role that makes samples: one that is trained, or a copy of one."""
    role = roles[name]
    assert isinstance(role, Trainable | WeightCopy)
    return role


def _rollouts(
    run: RunConfig,
    plan: RunPlan,
    roles: Mapping[str, Role],
    reward: RewardSum,
    loader: Loader,
    mesh: Mesh,
    workers: "WorkerGroup | None",
) -> Rollouts | None:
    """Return where the samples of a method come from, if it asks for some: this process, or workers."""
    if not plan.method.sampled_by:
        return None
    role, algorithm = _sampled(roles, plan.method.sampled_by), of_kind(RolloutConfig, run.algorithm)
    if workers is not None and run.rollouts.workers:
        from unified_trainer.run.workers.rollouts import remote_rollouts

        return remote_rollouts(run, algorithm, workers, role, loader, mesh)
    reward = of_kind(Reward, reward)
    # Scorers in another process answer while samples are made, for which the VAE comes once for each part.
    last = reward.offloaded or (run.encoders.offload and not reward.apart)
    sample = partial(plan.method.sample, algorithm, run.sampler, role)
    rollouts = LocalRollouts(
        sample,
        reward,
        algorithm.rollout_batch,
        algorithm.trajectories,
        score_last=last,
        safe_point=partial(safe_point, mesh),
    )
    return OffloadedRollouts(rollouts, roles, role) if run.rollouts.offload else rollouts


def _trainer(
    run: RunConfig,
    plan: RunPlan,
    roles: Mapping[str, Role],
    reward: RewardSum,
    codec: Codec,
    loader: Loader,
    rollouts: Rollouts | None,
    guards: Guards,
    output: Path | None,
) -> Trainer:
    parts: dict[str, Any] = {"reward": reward} if plan.method.uses_reward else {}
    parts |= {"loader": loader} if "loader" in plan.method.parts() else {}
    parts |= {} if rollouts is None else {"rollouts": rollouts}
    parts |= {"codec": codec} if plan.method.uses_codec else {}
    copies = {name: role for name, role in roles.items() if isinstance(role, WeightCopy)}
    method = plan.method(run.algorithm, run.sampler, **roles, **parts)
    kind = partial(ProfiledTrainer, run=run, folder=output) if run.profile and output else Trainer
    return kind(
        method,
        {name: role for name, role in roles.items() if isinstance(role, Trainable)},
        loader,
        loader.mesh,
        copies={name: (role, plan.method.roles[name].copy_of) for name, role in copies.items()},
        seed=run.seed,
        trained_sampler=plain(run)["sampler"] if plan.method.trained_for_sampler else None,
        guards=guards,
        rollouts=rollouts,
        buffer=with_buffer(method, run.rollouts.buffer) if run.rollouts.buffer.share else None,
    )


def _validation(
    run: RunConfig,
    plan: RunPlan,
    roles: Mapping[str, Role],
    codec: Codec,
    reward: RewardSum,
    features: Features | None,
    requests: Sequence[Request],
    mesh: Mesh,
    workers: "WorkerGroup | None",
) -> ValidationSource | None:
    """Return what validates the student: this process, evaluation workers, or nothing."""
    if workers is not None and run.rollouts.evaluation_workers:
        from unified_trainer.run.workers.evaluation import remote_validation

        return remote_validation(run, workers, roles["student"], reward, requests, mesh)
    if not run.validate_every:
        return None
    sampler, shape = run.validated().sampler, plan.validation_shape

    def of(shown: Sequence[Request]) -> Validation:
        local = of_kind(Reward, reward)
        measured = distances_of(run.validation, run.validated().video, codec, features, shown, mesh.device)
        return Validation(run.validation, codec, local, measured, sampler, shown, shape, mesh, run.video.fps)

    if not plan.validation_sets:
        return of(requests)
    return ValidationSets(of(requests), {name: of(shown) for name, shown in plan.validation_sets.items()})


def _encode(
    run: RunConfig,
    plan: RunPlan,
    codec: Codec,
    source: Source,
    loader: Loader,
    validated: Sequence[Request],
    mesh: Mesh,
) -> tuple[str, ...]:
    """Encode the prompts of validation and of all training steps ahead of the first one."""
    compared = run.guard.teacher_prompts if run.guarded else 0
    shown = list(validated[: max(run.validation.num_samples, compared)])
    for requests in plan.validation_sets.values() if validated else ():
        shown += requests[: run.validation.num_samples]
    first, steps = [request.text for request in shown], 0 if run.validate_only else run.steps
    return _encode_ahead(run, codec, source, lambda: [*first, *loader.prompts(steps)], mesh)


def _kernels(run: RunConfig, mesh: Mesh) -> dict[str, str]:
    """Return the rows of the table at the start that depend on the device."""
    kernels = ", ".join(attention_order(run.parallel.attention, mesh.device)) or "torch's order of kernels"
    return {"attention": kernels} | ({"TF32": run.parallel.tf32} if has_tf32(mesh.device) else {})


def cache_memory(
    run: RunConfig, student: Role, latent_shape: tuple[int, int, int, int], samples: int, way_out: str
) -> str:
    """Return the memory of a causal student's KV cache in words; UserError when it does not fit."""
    dtype = torch.bfloat16 if student.config.precision == "bf16" else torch.float32
    size = samples * of_kind(Causal, student).cache_bytes(
        latent_shape, run.sampler.chunks, dtype, run.sampler.sigmas()[:-1]
    )
    size *= 1 if run.sampler.guidance_scale == 1 else 2
    require_memory(size, student.device, "the student's KV cache", way_out)
    return f"{size / 2**30:.3f} GiB for {samples} samples"


def _source(run: RunConfig, plan: RunPlan, codec: Codec) -> Source:
    if run.trains_on == "prompts":
        return Prompts(plan.requests)
    if run.data.path == "tiny":
        pairs = run.algorithm.needs_pairs
        return render_clips(run.data, codec, run.video, run.seed, pairs=pairs, first_frames=plan.first_frames)
    stored, rejected = plan.clips.stored, plan.clips.rejected
    if stored is None:
        return encode_videos(Path(run.data.path), codec, run.video, first_frames=plan.first_frames)
    lanes = stored.lanes(plan.batch.prompts, run.data.window_gib)
    if rejected is not None:
        return ParquetPairs(stored, rejected, codec, lanes)
    clips = ParquetFirstFrames if plan.first_frames else ParquetClips
    kind = clips if run.trains_on == "clips" else ParquetTrajectories
    return kind(stored, codec, lanes)


def _encode_ahead(
    run: RunConfig, codec: Codec, source: Source, prompts: Callable[[], list[str]], mesh: Mesh
) -> tuple[str, ...]:
    """Encode the prompts of a run; of captions with stored embeddings, first those that tell whether these fit."""
    first = prompts()
    files = {"--validation.prompts": run.validation.prompts}
    files |= {f"--validation.sets.{name}": path for name, path in run.validation.sets.items()}
    files |= {"--prompts": run.prompts} if run.trains_on == "prompts" else {}
    named = {key: Path(path) for key, path in files.items() if path not in ("", "tiny")}
    stored = [use_stored_prompts(path, key, first, codec, mesh) for key, path in named.items()]
    said = codec.encode_ahead(first, mesh)
    if not isinstance(source, ParquetRows):
        return said, *filter(None, stored)
    text = source.check_text(mesh)
    if {*prompts()} - {*first}:
        said = codec.encode_ahead(prompts(), mesh)
    return said, text, *filter(None, stored)


def _guards(
    run: RunConfig, plan: RunPlan, roles: Mapping[str, Role], codec: Codec, requests: Sequence[Request], mesh: Mesh
) -> Guards:
    """Return the guards of a run; samples are compared with the teacher's where there are validations."""
    guards: list[Guard] = []
    probe = None
    if plan.method.uses_reward:
        held_out = [f"reward/{name}" for name, scorer in run.reward.named().items() if not scorer.weight]
        guards.append(HackingMonitor(run.hacking_monitor, ("accuracy", *held_out)))
    if run.guarded:
        guards.append(DistillationGuard(run.guard))
        if run.validate_every and "teacher" in roles:
            guidance_scale = run.algorithm.teacher_guidance
            assert guidance_scale is not None  # a run is guarded for it
            probe = TeacherProbe(
                run.guard,
                codec,
                roles["teacher"],
                guidance_scale,
                run.sampler,
                requests,
                plan.latent_shape,
                mesh,
                seed=run.validation.seed,
                batch=run.validation.batch,
                ema=run.validation.ema,
            )
    return Guards(guards, of_kind(Trainable, roles["student"]), mesh, probe)


def _notes(mesh: Mesh, run: RunConfig) -> tuple[str, ...]:
    rest = "gradients and their sums over ranks, optimizers, guidance, losses and log-probabilities fp32; sigmas fp64"
    trained = {name: config for name, config in run.roles.items() if isinstance(config, TrainableConfig)}
    half = ", ".join(name for name, config in trained.items() if config.moments == "bf16")
    moments = f"; moments of {half} bf16" if half else ""
    return (f"ranks: {mesh}", f"precision: {rest}{moments}")
