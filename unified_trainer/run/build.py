"""Building a run from its settings: check everything, then load weights and connect the parts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from unified_trainer.data.clips import render_clips
from unified_trainer.data.loader import Loader, Source
from unified_trainer.data.negative_prompt import use_negative_prompt
from unified_trainer.data.parquet import ParquetClips, ParquetRows, ParquetTrajectories
from unified_trainer.data.prompts import Prompts
from unified_trainer.data.raw_clips import encode_videos
from unified_trainer.data.stored_prompts import use_stored_prompts
from unified_trainer.methods.base import Method
from unified_trainer.methods.rl.rollouts import LocalRollouts, Sampling
from unified_trainer.models.base import Codec
from unified_trainer.parallel.agreement import assert_equal
from unified_trainer.parallel.device import attention_order, has_tf32, require_memory, use_attention, use_tf32
from unified_trainer.parallel.mesh import Mesh, ParallelConfig
from unified_trainer.rewards.reward import Reward, RewardSum
from unified_trainer.rewards.scorers import load_scorers
from unified_trainer.roles.causal import Causal, causal_form
from unified_trainer.roles.role import Role, Trainable, TrainableConfig
from unified_trainer.roles.weight_copy import WeightCopy
from unified_trainer.run.checkpoint.manager import Keep
from unified_trainer.run.guards.base import Guard
from unified_trainer.run.guards.distillation import DistillationGuard
from unified_trainer.run.guards.hacking_monitor import HackingMonitor
from unified_trainer.run.guards.responses import Guards
from unified_trainer.run.guards.teacher_probe import TeacherProbe
from unified_trainer.run.load_roles import load_roles
from unified_trainer.run.plan.downloads import fetched
from unified_trainer.run.plan.plan import RunPlan, check
from unified_trainer.run.plan.roles import RolePlan, plan_roles
from unified_trainer.run.registry import add_families, family_of, method_named, open_model
from unified_trainer.run.settings.config import RunConfig, plain
from unified_trainer.run.summary import summary
from unified_trainer.run.trainer import Trainer
from unified_trainer.run.validation.report import Report, Validation, ValidationSource
from unified_trainer.run.validation.samples import SampleMaker, sample_prompts
from unified_trainer.run.workers import cluster

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
    stop_workers: Callable[[], None] | None = None  # of a run with workers

    def close(self) -> None:
        """End the reading of clips, and the workers of the run, if it has some."""
        self.trainer.loader.close()
        if self.stop_workers is not None:
            self.stop_workers()


def build(run: RunConfig, mesh: Mesh, output: Path | None = None) -> Built:
    """Check a run, load its models and connect its parts.

    Embeddings of prompts are kept below the run directory `output`, or without one only in memory.
    """
    plan = check(run, mesh)
    run, workers = plan.run, None
    assert_equal(mesh, plan.compared())
    encoders = replace(run.encoders, cache=run.encoders.cache or (str(output / EMBEDDINGS) if output else ""))
    codec = plan.family.codec(plan.folder, mesh.device, encoders)
    source = _source(run, plan, codec)
    use_negative_prompt(
        Path(run.prompts if run.trains_on == "prompts" else run.data.path), run.sampler.negative_prompt, codec
    )
    prompts = plan.validation_prompts or [source.prompt(i) for i in range(min(run.validation.num_samples, len(source)))]
    beside = run.rollouts.evaluation_workers > 0
    if run.rollouts.workers or beside:
        cluster.connect(run.ray, run.rollouts.cores, mesh)
        from unified_trainer.run.workers.weights import WeightSender  # Ray is an extra
        from unified_trainer.run.workers.workers import WorkerGroup

        kinds = (build_sampling, build_evaluation)
        workers = WorkerGroup.start(replace(run, encoders=encoders), *kinds, tuple(prompts), mesh)
    scores_here = (plan.method.uses_reward and not run.rollouts.workers) or (run.validate_every > 0 and not beside)
    scorers, features = load_scorers(run.reward, mesh.device) if scores_here else ({}, None)
    reward = Reward(scorers, codec, run.reward) if scores_here else RewardSum(run.reward)
    roles = load_roles(plan.roles, mesh)
    copies = {name: role for name, role in roles.items() if isinstance(role, WeightCopy)}
    for name, copy in copies.items():
        copy.update_from(roles[plan.method.roles[name].copy_of])
    if run.sampler.chunks.causal:
        way_out = "lower algorithm.micro_batch and validation.batch, or set sampler.chunks.window_frames"
        samples = max(plan.batch.micro_batch, run.validation.batch)
        needed = cache_memory(run, roles["student"], plan.latent_shape, samples, way_out)
        plan.counts["KV cache of the student"] = needed
    data = (source, codec, plan.batch, plan.latent_shape, run.sampler.negative_prompt, run.seed, mesh)
    loader = Loader(*data, ahead=run.rollouts.ahead)
    parts = {"reward": reward, "loader": loader} if plan.method.uses_reward else {}
    places: dict[str, str] = {}
    if workers is not None:
        places = workers.check(roles[plan.method.sampled_by or "student"].weights, 60 * run.ray.timeout_minutes)
    if plan.method.sampled_by:
        role, size = roles[plan.method.sampled_by], run.algorithm.rollout_batch
        if not run.rollouts.workers:
            sample = partial(plan.method.sample, run.algorithm, run.sampler, role)
            # Scorers in another process answer while samples are made, for which the VAE comes once for each part.
            last = reward.offloaded or (run.encoders.offload and not reward.apart)
            parts["rollouts"] = LocalRollouts(sample, reward, size, run.algorithm.trajectories, score_last=last)
        else:
            from unified_trainer.run.workers.rollouts import RemoteRollouts

            how = {"ahead": run.rollouts.ahead, "check_every": run.rollouts.check_every}
            how["trajectories"] = run.algorithm.trajectories
            sender = WeightSender(mesh, run.rollouts.transport, half=run.rollouts.send == "bf16")
            parts["rollouts"] = RemoteRollouts(workers, role, loader, mesh, sender, size=size, **how)
    trainer = Trainer(
        plan.method(run.algorithm, run.sampler, **roles, **parts),
        {name: role for name, role in roles.items() if isinstance(role, Trainable)},
        loader,
        mesh,
        copies={name: (role, plan.method.roles[name].copy_of) for name, role in copies.items()},
        seed=run.seed,
        trained_sampler=plain(run)["sampler"] if plan.method.trained_for_sampler else None,
        guards=_guards(run, plan, roles, codec, prompts, mesh),
        rollouts=parts.get("rollouts"),
    )
    validation: ValidationSource | None = None
    if beside:
        from unified_trainer.run.workers.evaluation import RemoteValidation

        report = Report(run.validation, reward, sample_prompts(prompts, run.validation), mesh, run.video.fps)
        validation = RemoteValidation(workers, run.validation, report, mesh, WeightSender(mesh, run.rollouts.transport))
    elif run.validate_every:
        measured = (codec, reward, features, run.sampler, prompts, plan.latent_shape)
        validation = Validation(run.validation, *measured, mesh, run.video.fps)
    # Last, so that a folder of weights that is not whole is refused before any file is written.
    compared = run.guard.teacher_prompts if run.guarded else 0
    validated = prompts[: max(run.validation.num_samples, compared)] if validation else ()
    encoded = _encode_ahead(run, codec, source, lambda: [*validated, *loader.prompts(run.steps)], mesh)
    kernels = ", ".join(attention_order(run.parallel.attention, mesh.device)) or "torch's order of kernels"
    rows = summary(run, plan, roles, source) | {"attention": kernels}
    rows |= {"TF32": run.parallel.tf32} if has_tf32(mesh.device) else {}
    rows |= places
    notes = (*_notes(mesh, run), *encoded, *plan.notes)
    stop = workers.stop if workers is not None else None
    return Built(run, trainer, roles, codec, reward, validation, rows, plan.counts, notes, plan.keep, stop)


def build_sampling(run: RunConfig, device: torch.device, samples: bool, scores: bool) -> Sampling:
    """Load what a worker needs to make samples, or to score them: one role without an optimizer, encoders, scorers."""
    run, method = _in_worker(run, device)
    name = method.sampled_by
    plan = plan_roles(run, method, starting=False)[name]  # its weights are sent by training
    codec, video = _codec_of(name, plan, run, device), run.video
    parts: dict[str, Any] = {"sample": None, "weights": {}, "reward": None}
    if samples:
        role = _weights_of_training(name, plan, run, device, "a rollout worker", "sample", "--rollouts.workers 0")
        parts |= {"sample": partial(method.sample, run.algorithm, run.sampler, role), "weights": role.weights}
    if scores:
        parts["reward"] = Reward(load_scorers(run.reward, device)[0], codec, run.reward)
    return Sampling(
        **parts, codec=codec, latent_shape=codec.latent_shape(video.frames, video.height, video.width), device=device
    )


def build_evaluation(run: RunConfig, device: torch.device, prompts: Sequence[str]) -> tuple[WeightCopy, SampleMaker]:
    """Load what an evaluation worker needs: the student without an optimizer, encoders, and all scorers."""
    run, method = _in_worker(run, device)
    plan = plan_roles(run, method, starting=False)["student"]
    codec, video = _codec_of("student", plan, run, device), run.video
    way_out = "--rollouts.evaluation-workers 0"
    role = _weights_of_training("student", plan, run, device, "an evaluation worker", "validate", way_out)
    scorers, features = load_scorers(run.reward, device)
    shape = codec.latent_shape(video.frames, video.height, video.width)
    measured = (codec, Reward(scorers, codec, run.reward), features, run.sampler, prompts, shape, device)
    return role, SampleMaker(run.validation, *measured)


def _in_worker(run: RunConfig, device: torch.device) -> tuple[RunConfig, type[Method]]:
    """Return run and method as a process of one device sees them that Ray started; set how it computes."""
    add_families(run.families)
    method = method_named(run.method)
    use_attention(run.parallel.attention, device)
    use_tf32(run.parallel.tf32)
    return fetched(replace(run, parallel=ParallelConfig()), Mesh(device)), method  # that of the training processes


def _codec_of(name: str, plan: RolePlan, run: RunConfig, device: torch.device) -> Codec:
    family, folder = family_of(name, plan.path)
    return family.codec(folder, device, run.encoders)


def _weights_of_training(
    name: str, plan: RolePlan, run: RunConfig, device: torch.device, worker: str, does: str, instead: str
) -> WeightCopy:
    """Load a role whose trained weights training sends; UserError, with the way out, if the device is too small."""
    kind = causal_form(WeightCopy) if run.sampler.chunks.causal else WeightCopy
    way_out = f"set the role's precision to bf16, train an adapter, or {does} in the training processes, which share "
    require_memory(_bytes(name, plan), device, f"the model of {worker}", f"{way_out}the model: {instead}")
    role: Any = load_roles({name: replace(plan, kind=kind)}, Mesh(device))[name]
    return role


def _bytes(name: str, plan: RolePlan) -> int:
    """Return the bytes of a role's networks on one device, read from configs alone."""
    causal = issubclass(plan.kind, Causal)
    total = 0
    for expert, component in plan.layout.components.items():
        network = open_model(name, plan.path, component, causal=causal).network
        changes = expert in plan.layout.trained and not plan.config.adapter.rank
        size = 2 if plan.config.precision == "bf16" and not changes else 4
        total += size * sum(p.numel() for p in network.parameters())
    return total


def cache_memory(
    run: RunConfig, student: Role, latent_shape: tuple[int, int, int, int], samples: int, way_out: str
) -> str:
    """Return the memory of a causal student's KV cache in words; UserError when it does not fit."""
    dtype = torch.bfloat16 if student.config.precision == "bf16" else torch.float32
    size = samples * student.cache_bytes(latent_shape, run.sampler.chunks, dtype, run.sampler.sigmas()[:-1])
    size *= 1 if run.sampler.guidance_scale == 1 else 2
    require_memory(size, student.device, "the student's KV cache", way_out)
    return f"{size / 2**30:.3f} GiB for {samples} samples"


def _source(run: RunConfig, plan: RunPlan, codec: Codec) -> Source:
    if run.trains_on == "prompts":
        return Prompts(plan.prompts)
    if run.data.path == "tiny":
        return render_clips(run.data, codec, run.video, run.seed)
    if plan.stored is None:
        return encode_videos(Path(run.data.path), codec, run.video)
    kind = ParquetClips if run.trains_on == "clips" else ParquetTrajectories
    return kind(plan.stored, codec, plan.stored.lanes(plan.batch.prompts, run.data.window_gib))


def _encode_ahead(
    run: RunConfig, codec: Codec, source: Source, prompts: Callable[[], list[str]], mesh: Mesh
) -> tuple[str, ...]:
    """Encode the prompts of a run; of captions with stored embeddings, first those that tell whether these fit."""
    first = prompts()
    files = {"--validation.prompts": run.validation.prompts}
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
    run: RunConfig, plan: RunPlan, roles: Mapping[str, Role], codec: Codec, prompts: Sequence[str], mesh: Mesh
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
            teacher = (roles["teacher"], run.algorithm.teacher_guidance)
            how = {"seed": run.validation.seed, "batch": run.validation.batch, "ema": run.validation.ema}
            probe = TeacherProbe(run.guard, codec, *teacher, run.sampler, prompts, plan.latent_shape, mesh, **how)
    return Guards(guards, roles["student"], mesh, probe)


def _notes(mesh: Mesh, run: RunConfig) -> tuple[str, ...]:
    rest = "gradients and their sums over ranks, optimizers, guidance, losses and log-probabilities fp32; sigmas fp64"
    trained = {name: config for name, config in run.roles.items() if isinstance(config, TrainableConfig)}
    half = ", ".join(name for name, config in trained.items() if config.moments == "bf16")
    moments = f"; moments of {half} bf16" if half else ""
    return (f"ranks: {mesh}", f"precision: {rest}{moments}")
