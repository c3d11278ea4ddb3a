"""The whole estimate of a run: memory by phase, calls and FLOPs of a step, time, bytes between ranks, checkpoints."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from unified_trainer.basics.errors import UserError
from unified_trainer.parallel.meter import Pass
from unified_trainer.roles.role import TrainableConfig
from unified_trainer.run.plan.plan import check_sampling, check_settings
from unified_trainer.run.plan.roles import check_heads
from unified_trainer.run.registry import method_named
from unified_trainer.run.settings.config import RunConfig
from unified_trainer.tools.plan.architecture import HPSV3_WEIGHTS, architecture_of
from unified_trainer.tools.plan.flops import PassFLOPs, pass_flops
from unified_trainer.tools.plan.hardware import Hardware
from unified_trainer.tools.plan.memory import BF16, FP32, Memory, Sizes, held_networks, memory_of, recompute_of, seat_of
from unified_trainer.tools.plan.rehearsal import HEAD, TEXT_TOKENS, Counts, paths_of, rehearse

STEPS = 5  # training steps of a rehearsal of a method with one update a step; others are rehearsed for one


@dataclass(frozen=True)
class Estimate:
    """The needs of a run: memory is that of one rank, everything else of all ranks."""

    run: RunConfig
    ranks: int
    sources: Mapping[str, str]  # of the sizes of each role's model
    parameters: Mapping[str, int]  # of each role
    counts: Counts
    sizes: Sizes
    calls: Mapping[str, Mapping[str, float]]  # of each role in a training step, on one rank
    tokens: float  # that went forward in a training step
    model_flops: float  # of a training step
    executed_flops: float  # with recomputed activations
    sent: float  # bytes that one rank sends in a training step for its weights and gradients
    checkpoint: float  # bytes on disk
    notes: tuple[str, ...]

    @cached_property
    def memory(self) -> Memory:
        """The memory of one rank; passes are traced for it, which takes seconds."""
        return memory_of(self.counts, self.sizes)

    def seconds(self, hardware: Hardware, mfu: float) -> float:
        """Return the seconds of a training step in which the networks reach this share of the peak."""
        return self.model_flops / (self.ranks * hardware.flops * mfu)

    def device_hours(self, hardware: Hardware, mfu: float) -> float:
        return self.run.steps * self.seconds(hardware, mfu) * self.ranks / 3600


def estimate(run: RunConfig, ranks: int, *, first: int = -1, steps: int = 0) -> Estimate:
    """Return the estimate, counted in a rehearsal of `steps` training steps from step `first` on.

    By default they are STEPS steps from the middle of the run on, and one step of a method with rollouts. Raise
    UserError for settings that no run could have, such as a batch that the ranks do not divide.
    """
    method = method_named(run.method)
    degrees = run.parallel.degrees(ranks)
    data_ranks = ranks // degrees.sequence
    paths = paths_of(run)
    models = {name: architecture_of(name, path, run) for name, path in paths.items()}
    for name in models:
        if run.roles[method.roles[name].copy_of or name].sparse.share:
            models[name] = replace(models[name], gates=1)
    check_settings(run, method)
    for name, model in models.items():
        check_heads(name, model.transformer["num_attention_heads"], degrees.sequence)
    table = run.algorithm.plan().table(data_ranks)
    video = run.video
    latent_shape = models["student"].latent_shape(video.frames, video.height, video.width)
    check_sampling(run, latent_shape)
    _, frames, height, width = latent_shape
    patch = models["student"].size.patch
    if height * width % patch:
        raise UserError(f"video.height and video.width {video.height} x {video.width}: patches do not divide them")
    boundaries = {paths[name]: model.boundary for name, model in models.items()}
    steps = steps or (1 if method.sampled_by else STEPS)
    first = first if first >= 0 else run.steps // 2
    shown = run.validated()
    shown_shape = models["student"].latent_shape(shown.video.frames, shown.video.height, shown.video.width)
    check_sampling(shown, shown_shape)
    counts = rehearse(run, frames, data_ranks, boundaries, first=first, steps=steps, shown_frames=shown_shape[1])
    scorers, notes = _scorers(run)
    sizes = Sizes(run, models, ranks, scorers, table["samples per rank"], table["accumulation"])
    share, frame_tokens = counts.repeats / counts.steps, height * width // patch
    passes = [(one, _flops(one, sizes, counts, frame_tokens)) for one in counts.passes]
    held = held_networks(counts, sizes)
    return Estimate(
        run=run,
        ranks=ranks,
        sources={name: model.source for name, model in models.items()},
        parameters={name: model.size.parameters for name, model in models.items()},
        counts=counts,
        sizes=sizes,
        calls=counts.calls(),
        tokens=data_ranks * share * sum(one.tokens * frame_tokens for one, _ in passes),
        model_flops=data_ranks * share * sum(f.trained if one.gradient else f.forward for one, f in passes),
        executed_flops=data_ranks * share * sum(f.executed if one.gradient else f.forward for one, f in passes),
        sent=_sent(counts, sizes),
        checkpoint=sum(one.stored for one in held.values()),
        notes=notes,
    )


def _scorers(run: RunConfig) -> tuple[float, tuple[str, ...]]:
    """Return the bytes of the scorers' weights, and which of them are not known."""
    total, notes = 0.0, []
    for name, config in run.reward.named().items():
        if config.kind == "hpsv3" and config.path != "tiny":
            total += HPSV3_WEIGHTS * (BF16 if config.precision == "bf16" else FP32)
        elif config.path != "tiny":
            notes.append(f"scorer {name} of kind {config.kind}: its memory is not known and not counted")
    uses = method_named(run.method).uses_reward
    if uses and not run.reward.named():
        total += HPSV3_WEIGHTS * (BF16 if run.reward.precision == "bf16" else FP32)
        notes.append(f"no scorer is named: HPSv3 in {run.reward.precision} is counted")
    return total, tuple(notes)


def _flops(one: Pass, sizes: Sizes, counts: Counts, frame: int) -> PassFLOPs:
    """Return the FLOPs of a pass of the rehearsal at the real sizes, `frame` tokens for each latent frame."""
    name, expert = seat_of(counts, one)
    model, config = sizes.models[name], sizes.run.roles.get(name)
    trained = expert in counts.plans[name].layout.trained
    rank = config.adapter.rank if trained and isinstance(config, TrainableConfig) else 0
    layers = model.size.layers_to_features if one.to_features else model.size.layers
    repeated = min(recompute_of(name, expert, counts, sizes).full, layers) / layers  # the first blocks are
    frames = one.tokens / one.samples
    sparse = counts.plans[name].config.sparse
    if sparse.share:
        _, height, width = model.transformer["patch_size"]
        grid = (int(frames), sizes.latent[2] // height, sizes.latent[3] // width)
        pairs = float(sparse.pairs(grid, sparse.share))
    else:
        pairs = frame**2 * (one.attention / (4 * HEAD * one.samples) - frames * TEXT_TOKENS)
    found = pass_flops(
        model.size,
        int(frames * frame),
        model.text_tokens,
        rank=rank,
        repeated=repeated if trained else 0.0,
        pairs=pairs,
        text_keys=model.text_tokens if one.rows["text keys"] else 0,
        times=1 if one.rows["times"] == one.samples else int(frames * frame),
        to_features=one.to_features,
    )
    return found.times(one.samples)


def _sent(counts: Counts, sizes: Sizes) -> float:
    """Return the bytes that one rank sends: blocks gathered for each pass and its backward pass, gradients reduced.

    A ring sends (n - 1) / n of the whole. Tokens that sequence ranks exchange are not counted.
    """
    if sizes.ranks == 1:
        return 0.0
    held, share = held_networks(counts, sizes), counts.repeats / counts.steps
    ring = (sizes.shards - 1) / sizes.shards
    total = 0.0
    for one in counts.passes:
        seat = seat_of(counts, one)
        network = held.get(seat) or next(iter(held.values()))
        gathers = 2 if one.gradient and sizes.run.parallel.reshard_after_forward else 1
        size = sizes.models[seat[0]].size
        blocks = size.layers_to_features / size.layers if one.to_features else 1.0
        total += share * gathers * ring * network.sent * blocks
    updates = {loss[-1].role for loss in counts.losses if loss and any(one.gradient for one in loss)}
    reduced = sum(FP32 * one.trained for seat, one in held.items() if any(role.startswith(seat[0]) for role in updates))
    return total + 2 * ring * reduced
