"""Building a run from its settings: check everything, then load weights and connect the parts."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from unified_trainer.basics.requests import Request
from unified_trainer.basics.types import of_kind
from unified_trainer.data.bucket_loader import BucketLoader
from unified_trainer.data.buckets import sizes_of
from unified_trainer.data.clips import Clips, render_clips
from unified_trainer.data.loader import Loader, Source, encoded_texts
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
from unified_trainer.parallel.device import attention_in_words, has_tf32, require_memory
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.rewards.latents import reward_of
from unified_trainer.rewards.reward import Reward, RewardSum
from unified_trainer.rewards.scorers import load_scorers
from unified_trainer.roles.causal import Causal
from unified_trainer.roles.role import Role, Trainable, TrainableConfig
from unified_trainer.roles.weight_copy import WeightCopy
from unified_trainer.run.build_worker import build_evaluation, build_sampling
from unified_trainer.run.checkpoint.mirror import Mirror
from unified_trainer.run.guards.base import Guard
from unified_trainer.run.guards.distillation import DistillationGuard
from unified_trainer.run.guards.hacking_monitor import HackingMonitor
from unified_trainer.run.guards.responses import Guards
from unified_trainer.run.guards.teacher_probe import TeacherProbe
from unified_trainer.run.load_roles import load_roles
from unified_trainer.run.offloaded_rollouts import OffloadedRollouts
from unified_trainer.run.plan.data import note_cut
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
PRECISION = "gradients and their sums over ranks, optimizers, guidance, losses and log-probabilities fp32; sigmas fp64"


class Built:
    """A run that is ready to start: its models are loaded, and its parts connected."""

    def __init__(self, run: RunConfig, mesh: Mesh, output: Path | None, mirror: Mirror | None) -> None:
        plan = self._plan = check(run, mesh)
        assert_equal(mesh, plan.compared())
        if mirror is not None:
            mirror.take()
        self.run = plan.run  # the settings, with what the run's files decide filled in
        self.keep, self._mesh = plan.keep, mesh
        self.counts = plan.counts  # of one training step's batch
        cache = plan.run.encoders.cache or (str(output / EMBEDDINGS) if output else "")
        run = self._with_cache = replace(plan.run, encoders=replace(plan.run.encoders, cache=cache))
        self.learned = described(run, plan.family, plan.folder)  # about the student's pipeline
        self.codec = plan.family.codec(plan.folder, mesh.device, run.encoders)
        self._require_memory()
        self._source = _source(run, plan, self.codec)
        stored = Path(run.prompts if run.trains_on == "prompts" else run.data.path)
        use_negative_prompt(stored, run.sampler.negative_prompt, self.codec)
        count = min(run.validation.num_samples, len(self._source))
        # The requests of validation: by default the first of the training data.
        self._requests = plan.validation_requests or [self._source.request(i) for i in range(count)]
        self._workers = self._start_workers()
        scorers, self._features = load_scorers(run.reward, mesh.device) if plan.scores_here else ({}, None)
        # A Reward where this process scores samples or validates, else the arithmetic alone.
        self.reward = reward_of(scorers, self.codec, run.reward) if plan.scores_here else RewardSum(run.reward)
        self.roles = self._load_roles()
        source = self._source
        shapes = source.shapes if run.data.buckets and isinstance(source, Clips | ParquetRows) else ()
        self._loader: Loader = (partial(BucketLoader, shapes=shapes) if shapes else Loader)(
            self._source,
            self.codec,
            plan.batch,
            plan.latent_shape,
            run.sampler.negative_prompt,
            run.seed,
            mesh,
            ahead=run.rollouts.ahead + run.rollouts.super_batch - 1,
            shuffle=run.data.shuffle,
        )
        places: dict[str, str] = {}  # where each worker runs
        if self._workers is not None:
            role = self._sampled(plan.method.sampled_by or "student")
            places = self._workers.check(role, 60 * run.ray.timeout_minutes, code_of(run))
        self.trainer = self._trainer(self._rollouts(), self._guards(), output)
        self.validation = self._validation()
        # Last, so that a folder of weights that is not whole is refused before any file is written.
        encoded = self._encode()
        kernel, slower = attention_in_words(run.parallel.attention, mesh.device)
        # Models, reward, prompts and video size.
        self.summary = summary(plan.run, plan, self.roles, self._source) | {"attention": kernel}
        buckets = plan.trained_shapes.items() if shapes else ()
        self.summary |= {f"bucket {name}": f"{shapes.count(shape)} clips, latents {shape}" for name, shape in buckets}
        self.summary |= ({"TF32": run.parallel.tf32} if has_tf32(mesh.device) else {}) | places
        trained = {name: config for name, config in run.roles.items() if isinstance(config, TrainableConfig)}
        half = ", ".join(name for name, config in trained.items() if config.moments == "bf16")
        precision = f"precision: {PRECISION}{f'; moments of {half} bf16' if half else ''}"
        self.notes = (f"ranks: {mesh}", precision, *encoded, *filter(None, (slower, self.learned, *plan.notes)))

    def close(self) -> None:
        """End the reading of clips, and the scorers' processes and the workers of the run, if it has some."""
        self._loader.close()
        if isinstance(self.reward, Reward):
            self.reward.close()
        if self._workers is not None:
            self._workers.stop()

    def _require_memory(self) -> None:
        """Raise UserError unless the conditions and latents of a rank's samples of one step fit on its device."""
        plan, run = self._plan, self.run
        samples = plan.batch.prompts * plan.batch.num_samples // self._mesh.data_size
        prompts, num_samples, *_ = plan.batch.keys
        states, algorithm = 0, run.algorithm
        if isinstance(algorithm, RolloutConfig) and algorithm.trajectories == "device":
            states = algorithm.kept_states(run.sampler)
        text = sum(map(math.prod, self.codec.text_shapes.values()))
        size = 4 * samples * (text + states * math.prod(plan.latent_shape))
        what = f"a rank's share of a training step, {samples} samples ({prompts} x {num_samples}),"
        require_memory(size, self._mesh.device, what, f"lower {num_samples if num_samples != '1' else prompts}")

    def _start_workers(self) -> "WorkerGroup | None":
        """Start the workers of a run that has some; they load while training loads."""
        run, mesh = self._with_cache, self._mesh
        if not (run.rollouts.workers or run.rollouts.evaluation_workers):
            return None
        needed = self._plan.store_bytes()
        cluster.connect(run.ray, run.rollouts.cores, mesh, store=needed)
        from unified_trainer.run.workers.group import WorkerGroup

        return WorkerGroup.start(run, build_sampling, build_evaluation, tuple(self._requests), mesh, store=needed)

    def _load_roles(self) -> dict[str, Role]:
        """Load the roles; copies take the weights of the roles that they copy."""
        run, plan = self.run, self._plan
        roles = load_roles(plan.roles, self._mesh)
        for name, role in roles.items():
            if isinstance(role, WeightCopy):
                role.update_from(roles[plan.method.roles[name].copy_of])
        if run.sampler.chunks.causal:
            way_out = "lower algorithm.micro_batch and validation.batch, or set sampler.chunks.window_frames"
            samples = max(plan.batch.micro_batch, run.validation.batch)
            largest = max(plan.trained_shapes.values(), key=math.prod)
            needed = cache_memory(run, roles["student"], largest, samples, way_out)
            if plan.validation_shape != largest:
                shape, samples = plan.validation_shape, run.validation.batch
                needed = cache_memory(run.validated(), roles["student"], shape, samples, way_out)
            self.counts["KV cache of the student"] = needed
        return roles

    def _sampled(self, name: str) -> Trainable | WeightCopy:
        """Return a role that makes samples: one that is trained, or a copy of one."""
        role = self.roles[name]
        assert isinstance(role, Trainable | WeightCopy)
        return role

    def _rollouts(self) -> Rollouts | None:
        """Return where the samples of a method come from, if it asks for some: this process, or workers."""
        run, method = self._with_cache, self._plan.method
        if not method.sampled_by:
            return None
        role, algorithm = self._sampled(method.sampled_by), of_kind(RolloutConfig, run.algorithm)
        if self._workers is not None and run.rollouts.workers:
            from unified_trainer.run.workers.rollouts import remote_rollouts

            return remote_rollouts(run, algorithm, self._workers, role, self._loader, self._mesh)
        reward = of_kind(Reward, self.reward)
        rollouts = LocalRollouts(
            partial(method.sample, algorithm, run.sampler, role),
            reward,
            algorithm.rollout_batch,
            algorithm.trajectories,
            # Scorers in another process answer while samples are made, for which the VAE comes once for each part.
            score_last=reward.offloaded or (run.encoders.offload and not reward.apart),
            safe_point=partial(safe_point, self._mesh),
        )
        return OffloadedRollouts(rollouts, self.roles, role) if run.rollouts.offload else rollouts

    def _trainer(self, rollouts: Rollouts | None, guards: Guards, output: Path | None) -> Trainer:
        run, kind = self._with_cache, self._plan.method
        parts: dict[str, Any] = {"reward": self.reward} if kind.uses_reward else {}
        parts |= {"loader": self._loader} if "loader" in kind.parts() else {}
        parts |= {} if rollouts is None else {"rollouts": rollouts}
        parts |= {"codec": self.codec} if kind.uses_codec else {}
        method = kind(run.algorithm, run.sampler, **self.roles, **parts)
        copies = {name: role for name, role in self.roles.items() if isinstance(role, WeightCopy)}
        trainer = partial(ProfiledTrainer, run=run, folder=output) if run.profile and output else Trainer
        return trainer(
            method,
            {name: role for name, role in self.roles.items() if isinstance(role, Trainable)},
            self._loader,
            self._mesh,
            copies={name: (role, kind.roles[name].copy_of) for name, role in copies.items()},
            seed=run.seed,
            trained_sampler=plain(run)["sampler"] if kind.trained_for_sampler else None,
            guards=guards,
            rollouts=rollouts,
            buffer=with_buffer(method, run.rollouts.buffer) if run.rollouts.buffer.share else None,
        )

    def _validation(self) -> ValidationSource | None:
        """Return what validates the student: this process, evaluation workers, or nothing."""
        run, plan, mesh = self._with_cache, self._plan, self._mesh
        if self._workers is not None and run.rollouts.evaluation_workers:
            from unified_trainer.run.workers.evaluation import remote_validation

            return remote_validation(run, self._workers, self.roles["student"], self.reward, self._requests, mesh)
        if not run.validate_every:
            return None
        sampler, shape, video = run.validated().sampler, plan.validation_shape, run.validated().video

        def of(shown: Sequence[Request]) -> Validation:
            local = of_kind(Reward, self.reward)
            measured = distances_of(run.validation, video, self.codec, self._features, shown, mesh.device)
            return Validation(run.validation, self.codec, local, measured, sampler, shown, shape, mesh, run.video.fps)

        if not plan.validation_sets:
            return of(self._requests)
        return ValidationSets(of(self._requests), {name: of(shown) for name, shown in plan.validation_sets.items()})

    def _guards(self) -> Guards:
        """Return the guards of a run; samples are compared with the teacher's where there are validations."""
        run, guards, probe = self._with_cache, list[Guard](), None
        if self._plan.method.uses_reward:
            held_out = [f"reward/{name}" for name, scorer in run.reward.named().items() if not scorer.weight]
            guards.append(HackingMonitor(run.hacking_monitor, ("accuracy", *held_out)))
        if run.guarded:
            guards.append(DistillationGuard(run.guard))
            if run.validate_every and "teacher" in self.roles:
                guidance_scale = run.algorithm.teacher_guidance
                assert guidance_scale is not None  # a run is guarded for it
                probe = TeacherProbe(
                    run.guard,
                    self.codec,
                    self.roles["teacher"],
                    guidance_scale,
                    run.sampler,
                    self._requests,
                    self._plan.latent_shape,
                    self._mesh,
                    seed=run.validation.seed,
                    batch=run.validation.batch,
                    ema=run.validation.ema,
                )
        return Guards(guards, of_kind(Trainable, self.roles["student"]), self._mesh, probe)

    def _encode(self) -> tuple[str, ...]:
        """Encode the prompts of validation and of all training steps ahead of the first one; return what was done.

        Of captions with stored embeddings, first those are encoded that tell whether these fit.
        """
        run, codec, mesh, count = self._with_cache, self.codec, self._mesh, self.run.validation.num_samples
        shown: list[Request] = []
        if self.validation is not None:
            shown += self._requests[: max(count, run.guard.teacher_prompts if run.guarded else 0)]
            shown += [request for requests in self._plan.validation_sets.values() for request in requests[:count]]

        def prompts() -> list[str]:
            return [*encoded_texts(codec, shown), *self._loader.prompts(0 if run.validate_only else run.steps)]

        first = prompts()
        files = {"--validation.prompts": run.validation.prompts}
        files |= {f"--validation.sets.{name}": path for name, path in run.validation.sets.items()}
        files |= {"--prompts": run.prompts} if run.trains_on == "prompts" else {}
        named = {key: Path(path) for key, path in files.items() if path not in ("", "tiny")}
        notes = [use_stored_prompts(path, key, first, codec, mesh) for key, path in named.items()]
        notes += note_cut(codec, self._plan.prompts, self._plan.clips)
        said = codec.encode_ahead(first, mesh)
        if not isinstance(self._source, ParquetRows):
            return said, *filter(None, notes)
        text = self._source.check_text(mesh)
        if {*prompts()} - {*first}:
            said = codec.encode_ahead(prompts(), mesh)
        return said, text, *filter(None, notes)


def build(run: RunConfig, mesh: Mesh, output: Path | None = None, mirror: Mirror | None = None) -> Built:
    """Check a run, load its models and connect its parts.

    Embeddings of prompts are kept below the run directory `output`, or without one only in memory. A `mirror` is taken
    before a weight is read.
    """
    return Built(run, mesh, output, mirror)


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
        path = Path(run.data.path)
        sizes = sizes_of(run.data, run.video)
        return encode_videos(path, codec, sizes, run.data.columns, first_frames=plan.first_frames)
    lanes = stored.lanes(plan.batch.prompts, run.data.window_gib)
    if rejected is not None:
        return ParquetPairs(stored, rejected, codec, lanes)
    clips = ParquetFirstFrames if plan.first_frames else ParquetClips
    kind = clips if run.trains_on == "clips" else ParquetTrajectories
    return kind(stored, codec, lanes)
