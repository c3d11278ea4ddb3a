"""A rehearsal of training steps: the method's own code, on networks of one block and one token a latent frame.

It counts what a step does: passes of each role, samples decoded, states kept. None of these counts depends on the width
of a network or on the pixels of a frame, so that they hold for the real sizes.
"""

import atexit
import functools
import json
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, cast

import torch
from diffusers import WanTransformer3DModel
from torch import Tensor

from unified_trainer.basics.requests import Request
from unified_trainer.basics.types import Batch, Condition, Latents, Rollout, Trajectory, Video
from unified_trainer.data.batch_plan import largest_divisor
from unified_trainer.data.loader import Loader, Source
from unified_trainer.methods.base import Method, SingleUpdateConfig
from unified_trainer.methods.rl.policy import PolicyConfig
from unified_trainer.methods.rl.rollout_config import RolloutConfig
from unified_trainer.methods.rl.rollouts import LocalRollouts, ScoredSamples
from unified_trainer.models.base import Codec
from unified_trainer.models.encoders import EncoderConfig
from unified_trainer.models.sparse_attention import SparseAttentionConfig
from unified_trainer.models.wan.configs import EXPERTS
from unified_trainer.parallel.mesh import Mesh, ParallelConfig
from unified_trainer.parallel.meter import Meter, Pass
from unified_trainer.parallel.random import Streams
from unified_trainer.rewards.base import RewardConfig
from unified_trainer.rewards.reward import Reward
from unified_trainer.roles.adapter import AdapterConfig, AdapterFileConfig
from unified_trainer.roles.role import Role, RoleConfig, Trainable, TrainableConfig
from unified_trainer.roles.weight_copy import WeightCopy
from unified_trainer.run.load_roles import load_roles
from unified_trainer.run.plan.plan import check_method
from unified_trainer.run.plan.roles import RolePlan, plan_roles, role_path
from unified_trainer.run.registry import method_named
from unified_trainer.run.settings.config import RunConfig, ValidationConfig, plain
from unified_trainer.run.settings.workers import WorkerConfig
from unified_trainer.run.trainer import Trainer
from unified_trainer.run.validation.samples import samples_of_rank
from unified_trainer.sampling.solver import SamplerConfig, generate
from unified_trainer.tools.plan.tracing import quiet_norms

CHANNELS, TEXT_TOKENS, TEXT_WIDTH, HEAD = 4, 2, 4, 6  # of the rehearsal; 6 is the least width of a head
ALL_TOKENS = SparseAttentionConfig(share=1e-9, tile=(1, 1, 1))  # leaves out none: its pairs are those of a dense pass
PROMPTS = 4096  # more than a step has
SCORER = "rehearsal"


@dataclass
class Counts:
    """The counts of training steps on one rank."""

    steps: int  # that were counted
    repeats: float  # how many times each pass stands: micro-batches alike are rehearsed once
    plans: Mapping[str, RolePlan] = field(default_factory=dict)
    roles: Mapping[str, Role] = field(default_factory=dict)  # those of the rehearsal
    losses: list[list[Pass]] = field(default_factory=list)  # the passes that each loss needed, in order
    sampled: list[Pass] = field(default_factory=list)  # of these, the passes that make the samples of training
    decoded: list[tuple[int, int, bool]] = field(default_factory=list)  # samples, latent frames, with gradient
    kept: int = 0  # states and samples of a step's rollout, each as large as a sample's latents
    validation: list[Pass] = field(default_factory=list)  # of one batch of a validation

    @property
    def passes(self) -> list[Pass]:
        """All passes of training, in order."""
        return [call for passes in self.losses for call in passes]

    def listen(self) -> Meter:
        """Return a meter that notes every pass under the loss that needs it."""

        def show(label: str) -> None:
            if ", loss " in label:  # the trainer asks for the next loss
                self.losses.append([])

        return Meter(torch.device("cpu"), show, lambda one: self.losses[-1].append(one))

    def calls(self) -> dict[str, dict[str, float]]:
        """Return the passes of a training step by role: their number with and without gradient, and their samples."""
        counts: dict[str, dict[str, float]] = {}
        share = self.repeats / self.steps
        for call in self.passes:
            row = counts.setdefault(call.role, {"with gradient": 0.0, "without gradient": 0.0, "samples": 0.0})
            row["with gradient" if call.gradient else "without gradient"] += share
            row["samples"] += share * call.samples
        return counts


def rehearse(
    run: RunConfig,
    latent_frames: int,
    ranks: int,
    boundaries: Mapping[str, float | None],
    *,
    first: int,
    steps: int,
    shown_frames: int,
    causal: bool,
) -> Counts:
    """Count what a rank of `ranks` data ranks does in training steps `first`, `first` + 1, ..., and in a validation.

    `latent_frames` are those of training, and `shown_frames` those of validations. `causal` is that of the codec.
    `boundaries` holds for each path of a role the noise level at which its two networks meet, None for one network. All
    groups have different rewards, so that no update is skipped.
    """
    method = method_named(run.method)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        folders = {path: _folder(number, boundary) for number, (path, boundary) in enumerate(boundaries.items())}
        small, repeats = _small(run, method, ranks, folders)
        plans = plan_roles(small, method)
        check_method(run, {name: run.roles[method.roles[name].copy_of or name] for name in plans}, plans)
        seen, asked = replace(small, validation=ValidationConfig(), validate_every=0), range(first, first + steps)
        if (key := f"{plain(seen)} {latent_frames} {asked} {causal}") not in _TRAINED:
            _TRAINED[key] = _train(small, method, plans, latent_frames, asked, causal=causal)
    trainer, counts = _TRAINED[key]
    counts = replace(counts, repeats=repeats, kept=round(repeats * counts.kept), validation=[])
    if run.validate_every:
        samples = min(run.validation.batch, samples_of_rank(run.validation.num_samples, ranks))
        shown = f"{key} {samples} {shown_frames} {(sampler := small.validated().sampler)}"
        if shown not in _VALIDATED:
            _VALIDATED[shown] = _validate(trainer, counts.roles["student"], samples, shown_frames, sampler)
        counts.validation.extend(_VALIDATED[shown])
    return counts


# Training steps that were rehearsed in this process: runs that differ in nothing that a pass shows share them.
_TRAINED: dict[str, tuple[Trainer, Counts]] = {}
_VALIDATED: dict[str, list[Pass]] = {}  # and the passes of a batch of their validations


def _train(
    run: RunConfig, method: type[Method], plans: Mapping[str, RolePlan], frames: int, steps: range, *, causal: bool
) -> tuple[Trainer, Counts]:
    mesh = Mesh(torch.device("cpu"))
    counts = Counts(len(steps), 1.0, plans, load_roles(plans, mesh, half=True))
    trainer = _trainer(run, method, mesh, (CHANNELS, frames, 1, 1), counts, causal=causal)
    for step in steps:
        with quiet_norms(), counts.listen().measure():
            trainer.step(step)
    return trainer, counts


def _validate(trainer: Trainer, student: Role, samples: int, frames: int, sampler: SamplerConfig) -> list[Pass]:
    passes: list[Pass] = []
    batch = trainer.loader.batch_of([0] * samples, list(range(samples)))
    noise = torch.zeros(samples, CHANNELS, frames, 1, 1, device=trainer.mesh.device)
    with quiet_norms(), Meter(noise.device, note=passes.append).measure():
        generate(student, noise, batch, sampler, lambda s: noise)
    return passes


def paths_of(run: RunConfig) -> dict[str, str]:
    """Return the path of each role that the run loads; "" is the model that the recipe was made for."""
    method = method_named(run.method)
    return {
        name: role_path(run, method, name)
        for name, spec in method.roles.items()
        if spec.when(run.algorithm) and run.needs_role(name)
    }


@functools.cache
def _folder(_number: int, boundary: float | None) -> str:
    """Return a pipeline folder with one or two transformers of one block and nothing else, until the process ends."""
    folder = Path(tempfile.mkdtemp(prefix="unified-trainer-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    parts = EXPERTS[: 1 if boundary is None else 2]
    for part in parts:
        widths = {"attention_head_dim": HEAD, "in_channels": CHANNELS, "out_channels": CHANNELS, "text_dim": TEXT_WIDTH}
        few = {"patch_size": (1, 1, 1), "num_attention_heads": 1, "freq_dim": 2, "ffn_dim": 2, "num_layers": 1}
        WanTransformer3DModel(**widths, **few).save_pretrained(folder / part)
    index: dict[str, Any] = {part: ["diffusers", "WanTransformer3DModel"] for part in parts}
    index |= {"_class_name": "WanPipeline"} | ({} if boundary is None else {"boundary_ratio": boundary})
    (folder / "model_index.json").write_text(json.dumps(index), encoding="utf-8")
    return str(folder)


def _small(run: RunConfig, method: type[Method], ranks: int, paths: Mapping[str, str]) -> tuple[RunConfig, float]:
    """Return the run of one rank on small networks, and how many times what it does stands for."""
    at = {name: role_path(run, method, name) for name in run.roles}
    roles = {name: _small_role(config, paths[at[name]]) for name, config in run.roles.items() if at[name] in paths}
    algorithm, repeats = _share(run.algorithm, ranks)
    if isinstance(algorithm, PolicyConfig):  # no ratio leaves it: the student does not change
        algorithm = replace(algorithm, clip_low=1.0, clip_high=1.0, clip_velocity=0.0)
    changes = {"algorithm": algorithm, "parallel": ParallelConfig(), "rollouts": WorkerConfig(), **roles}
    reward = replace(run.reward, offload=False)
    return replace(run, init_from=None, resume=None, encoders=EncoderConfig(), reward=reward, **changes), repeats


def _small_role(config: RoleConfig, path: str) -> RoleConfig:
    config = replace(config, path=path, compile=False, quantize="none")  # as passes are counted, on any device
    if not isinstance(config, TrainableConfig):
        return replace(config, adapter=AdapterFileConfig())
    adapter = AdapterConfig(rank=min(1, config.adapter.rank))
    unseen: dict[str, Any] = {"learning_rate": 0.0, "activation_memory": "none", "ema_decay": 0.0, "ema_device": "same"}
    unseen |= {"quantize_aware": False, "action_size": 0}  # the batches of a rehearsal have no actions
    unseen |= {"sparse_attention": ALL_TOKENS} if config.sparse.share else {}
    return replace(config, adapter=adapter, moments="fp32", **unseen)


def _share(algorithm: Any, ranks: int) -> tuple[Any, float]:
    """Return the settings of one rank's share, cut to as few passes as show all, and the factor of the cut.

    A rank with one sample of an update, whose group is on others, is shown as half of one with two.
    """
    counts = algorithm.plan().table(ranks)
    per_update, size = counts["samples per update and rank"], counts["micro-batch"]
    if isinstance(algorithm, SingleUpdateConfig):
        return replace(algorithm, batch_size=size), per_update // size
    if not isinstance(algorithm, RolloutConfig):
        return algorithm, 1
    algorithm = replace(algorithm, trajectories="device")  # where they are counted
    updates = counts["optimizer updates"]
    groups = max(1, algorithm.prompts_per_update // ranks)
    members = per_update // groups
    rollout_batch = min(algorithm.rollout_batch, per_update * updates)
    if per_update == 1:
        pair = {"num_prompts": updates, "prompts_per_update": 1, "num_samples": 2}
        return replace(algorithm, **pair, update_batch=1, rollout_batch=rollout_batch), 0.5
    for few in range(1, groups + 1):
        samples = few * members
        whole = samples * updates % rollout_batch == 0 and largest_divisor(samples, algorithm.update_batch) == size
        if groups % few == 0 and samples * updates > 1 and whole:
            groups, repeats = few, groups // few
            break
    else:
        repeats = 1
    share = {"num_prompts": groups * updates, "prompts_per_update": groups, "num_samples": members}
    return replace(algorithm, **share), repeats


class _Prompts(Source):
    def __len__(self) -> int:
        return PROMPTS

    def request(self, index: int) -> Request:
        return Request(str(index))

    def latents(self, indices: list[int]) -> None:
        return None


class _Batches(Loader):
    """Random batches, with latents and trajectories where the run trains on them."""

    run: RunConfig

    def batch_of(self, indices: list[int], sample_ids: list[int]) -> Batch:
        count, run, shape, device = len(indices), self.run, self.latent_shape, self.mesh.device
        text = Condition({"text": torch.zeros(count, TEXT_TOKENS, TEXT_WIDTH, device=device)})
        latents = torch.randn(count, *shape, device=device) if run.trains_on == "clips" else None
        trajectory = None
        if run.trains_on == "trajectories":
            ode: Any = run.algorithm.teacher_ode(run.sampler)  # a run on trajectories has one
            levels = ode.levels
            states = torch.randn(count, len(levels), *shape, device=device)
            trajectory = Trajectory(levels, states, states[:, -1])
        rejected = torch.randn(count, *shape, device=device) if run.algorithm.needs_pairs else None
        ids = (Request.of(map(str, indices)), tuple(indices), tuple(sample_ids))
        return Batch(*ids, shape, text, text, latents, trajectory, rejected)


@dataclass(frozen=True)
class _Codec(Codec):
    """Decodes latents to eight pixels a frame, and notes it; an image is encoded without a note."""

    counts: Counts
    causal: bool
    folder = Path()
    text_fingerprint = video_fingerprint = ""
    text_shapes = MappingProxyType({"text": (TEXT_TOKENS, TEXT_WIDTH)})

    def in_use(self) -> AbstractContextManager[None]:
        return nullcontext()

    def decode(self, latents: Latents) -> Video:
        self.counts.decoded.append((len(latents), latents.shape[2], latents.requires_grad))
        return latents[:, :3].expand(-1, -1, -1, 8, 8).sigmoid()

    def decoder(self) -> Callable[[Latents], Video]:
        return self.decode

    def encode(self, video: Video) -> Latents:
        return video.new_zeros(len(video), CHANNELS, video.shape[2], 1, 1)


class _Rollouts(LocalRollouts):
    """Samples of this process; notes what it keeps of them."""

    counts: Counts

    def samples(self, batch: Batch, step: int, rng: Streams) -> ScoredSamples:
        before = len(self.counts.losses[-1])
        scored = super().samples(batch, step, rng)
        self.counts.sampled += self.counts.losses[-1][before:]
        kept = cast(Rollout, scored.rollout)  # that of a rehearsal is on the device
        values = sum(x.numel() for x in (kept.states, kept.x0))
        self.counts.kept = values // kept.x0[0].numel()
        return scored


def _score(video: Video, prompts: Sequence[str]) -> Tensor:
    """Give every sample another reward, with a gradient."""
    number = torch.arange(len(video), device=video.device)
    return video.flatten(1).mean(1) + number + torch.rand_like(number, dtype=torch.float32)


def _trainer(
    run: RunConfig, method: type[Method], mesh: Mesh, shape: tuple[int, int, int, int], counts: Counts, *, causal: bool
) -> Trainer:
    roles, codec = counts.roles, _Codec(counts, causal)  # type: ignore[abstract]  # it has what a step calls
    loader = _Batches(_Prompts(), codec, run.algorithm.plan(), shape, "", run.seed, mesh)
    loader.run = run
    first = all(scorer.frames == "first" for scorer in run.reward.named().values())
    frames: Literal["first", "all"] = "first" if first else "all"
    reward = Reward({SCORER: _score}, codec, RewardConfig(kind=SCORER, frames=frames))
    parts: dict[str, Any] = {"reward": reward} if method.uses_reward else {}
    parts |= {"loader": loader} if "loader" in method.parts() else {}
    if method.sampled_by:
        sample: Callable[..., Any] = partial(method.sample, run.algorithm, run.sampler, roles[method.sampled_by])
        parts["rollouts"] = _Rollouts(sample, reward, cast(Any, run.algorithm).rollout_batch)
        parts["rollouts"].counts = counts
    parts |= {"codec": codec} if method.uses_codec else {}
    copies = {name: role for name, role in roles.items() if isinstance(role, WeightCopy)}
    return Trainer(
        method(run.algorithm, run.sampler, **roles, **parts),
        {name: role for name, role in roles.items() if isinstance(role, Trainable)},
        loader,
        mesh,
        copies={name: (role, method.roles[name].copy_of) for name, role in copies.items()},
        seed=run.seed,
    )
