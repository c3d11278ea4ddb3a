"""The memory of one rank by phase of a training step, from a rehearsal's passes and the sizes of the models.

A phase has what is always there (weights, moments, EMA, scorers), what a step keeps (prompts, rollouts, gradients), and
the activations of the passes that run together.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from unified_trainer.methods.rl.rollout_config import RolloutConfig
from unified_trainer.parallel.meter import Pass
from unified_trainer.roles.backbone import Backbone
from unified_trainer.roles.experts import Expert
from unified_trainer.roles.optimizer import BUCKET
from unified_trainer.roles.recompute import Recompute
from unified_trainer.roles.role import Role, Trainable, TrainableConfig
from unified_trainer.roles.weight_copy import WeightCopy
from unified_trainer.run.registry import method_named
from unified_trainer.run.settings.config import RunConfig
from unified_trainer.run.validation.samples import samples_of_rank
from unified_trainer.tools.plan.architecture import Architecture
from unified_trainer.tools.plan.passes import NOTHING, Network, PassBytes, decode_bytes, pass_bytes
from unified_trainer.tools.plan.rehearsal import Counts

FP32, BF16 = 4, 2
PREFETCHED = 2  # blocks whose weights are gathered at a time
ROUNDING = 5  # numbers of 4 bytes for each element of a bucket: two moments, the random bits and two copies of them
SAMPLING = ("rollout", "reward")  # phases in which samples are made and scored
# Parts of a phase that do not shrink with its passes.
FIXED = ("gradients", "gathered weights", "gathered weights and gradients", "temporary", "scorers", "state of training")
LATENTS = 8  # tensors of the size of the latents that a loss holds besides its passes: noise, states, predictions


@dataclass(frozen=True)
class Held:
    """One network in memory, with what belongs to its training; bytes of one rank."""

    weights: float
    idle: float  # of the weights, what only training reads beyond the bf16 copies that a rollout may need instead
    gradients: float
    moments: float
    ema: float
    gathered: float  # weights of other ranks while a pass runs
    unsharded: float  # gradients of other ranks' weights: of two blocks, or of all until the last backward pass
    sent: float  # all weights as ranks send them, for one gathering
    stored: float  # in a checkpoint, of all ranks
    trained: int  # weights


@dataclass(frozen=True)
class Sizes:
    """The settings and sizes that memory depends on besides the rehearsal."""

    run: RunConfig
    models: Mapping[str, Architecture]  # by role
    ranks: int
    scorers: float = 0.0  # bytes of their weights, which are there only in a reward phase with reward.offload
    samples: int = 1  # of a step on this rank
    accumulation: int = 1  # backward passes of an update
    copies: bool = False  # whether weights only arrive, as in a rollout worker: in the precision of passes

    def recomputed(self, role: str) -> Recompute:
        """Return what the networks of a trained role recompute."""
        config = self.run.roles.get(role)  # None: a copy of another role, which is not trained
        if not isinstance(config, TrainableConfig):
            return Recompute()
        return Recompute.of_setting(config.activation_memory, self.models[role].size.layers)

    @property
    def shards(self) -> int:
        """Ranks that share one copy of the weights."""
        return self.ranks // self.run.parallel.degrees(self.ranks).replicate

    @property
    def fresh(self) -> bool:
        """Whether one backward pass makes all gradients of an update, which no rank shares."""
        return self.accumulation == 1 and self.ranks == 1

    @property
    def latent(self) -> tuple[int, int, int, int]:
        video = self.run.video
        return self.models["student"].latent_shape(video.frames, video.height, video.width)

    @property
    def frame_tokens(self) -> int:
        """Tokens of one latent frame, on average."""
        return self.models["student"].plain_pass(self.latent).tokens // self.latent[1]

    @property
    def latent_bytes(self) -> int:
        channels, frames, height, width = self.latent
        return FP32 * channels * frames * height * width


Networks = Mapping[tuple[str, Expert], Held]  # by the role that trains a network, or else the first that runs it
Phases = dict[str, dict[str, float]]  # bytes by phase and part


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank: what is there in every phase, and each phase's own."""

    always: dict[str, float]
    phases: Phases

    def total(self, phase: str) -> float:
        return sum(self.always.values()) + sum(self.phases[phase].values())

    @property
    def peak(self) -> str:
        """The phase that needs most."""
        return max(self.phases, key=self.total)


def memory_of(counts: Counts, sizes: Sizes) -> Memory:
    """Return the memory of one rank."""
    held = held_networks(counts, sizes)
    phases = _sampling(counts, sizes, held) | _scoring(counts, sizes)
    for name, role in counts.roles.items():
        losses = [loss for loss in counts.losses if any(p.gradient and p.role.startswith(name) for p in loss)]
        if isinstance(role, Trainable) and losses:
            phases |= _training(name, losses, counts, sizes, held)
    if sizes.run.validate_every and counts.validation and not sizes.run.rollouts.evaluation_workers:
        phases["validation"] = _validating(counts, sizes, held)
    memory = Memory(_always(held.values(), sizes), phases)
    return _offloaded(memory, held.values()) if sizes.run.rollouts.offload else memory


def _offloaded(memory: Memory, held: Iterable[Held]) -> Memory:
    """Return the memory where the state of training is in CPU memory while samples are made and scored."""
    idle, always = sum(network.idle for network in held), memory.always
    state = {"state of training": always["moments"] + always["EMA"] + idle}
    phases = {name: parts | ({} if name in SAMPLING else state) for name, parts in memory.phases.items()}
    return Memory(always | {"weights": always["weights"] - idle, "moments": 0.0, "EMA": 0.0}, phases)


def _sampling(counts: Counts, sizes: Sizes, held: Networks) -> Phases:
    """The phase in which samples are made, of a method that makes some."""
    passes = [_without(counts, sizes, call) for call in _largest(counts.passes) if not call.gradient]
    if not passes:
        return {}
    rollouts, part = _rollouts(counts, sizes)
    ode = sizes.run.algorithm.teacher_ode(sizes.run.sampler)
    maker = ode.role if ode is not None and ode.made_in is not None and sizes.run.needs_role(ode.role) else "student"
    rollout = {
        "activations": max(max(one.peak for one in passes), part),  # the states of a part are joined at its end
        "gathered weights": _gathered(held),
        "KV cache": _cache(sizes, counts, maker),
        "rollouts": rollouts + part,
        "prompts and clips": _inputs(counts, sizes, in_parts=True),
    }
    return {"rollout": rollout}


def _scoring(counts: Counts, sizes: Sizes) -> Phases:
    """The phase in which samples are decoded and scored, of a method that learns from rewards."""
    if not counts.decoded:
        return {}
    samples, frames, gradient = max(counts.decoded, key=lambda one: (one[2], one[0] * one[1]))
    reward = {
        "VAE": _decoding(sizes, samples, frames, gradient=gradient),
        "scorers": sizes.scorers if sizes.run.reward.offload else 0.0,
        "rollouts": _rollouts(counts, sizes)[0],
        "prompts and clips": _inputs(counts, sizes, in_parts=True),
    }
    return {"reward": reward}


def _training(name: str, losses: list[list[Pass]], counts: Counts, sizes: Sizes, held: Networks) -> Phases:
    """The phases in which a role is trained: the largest of its losses, and the step of its optimizer."""
    own = [network for (user, _), network in held.items() if user == name]
    gradients = sum(network.gradients for network in own)
    needs = [_activations(counts, sizes, held, loss) for loss in _largest_losses(losses)]
    activations, added = max(needs, key=lambda pair: pair[0])
    kept = {
        "rollouts": _rollouts(counts, sizes)[0],
        "prompts and clips": _inputs(counts, sizes, in_parts=not counts.kept),
    }
    update = {
        "activations": activations,
        "gradients": max(0.0, added + (gradients if sizes.accumulation > 1 else 0.0)),
        "gathered weights and gradients": _gathered(held) + max(network.unsharded for network in own),
        "KV cache": _cache(sizes, counts) if name == "student" else 0.0,
    }
    optimizer = {"gradients": gradients, "temporary": _temporary(sizes, name, sum(network.trained for network in own))}
    return {f"update of {name}": update | kept, f"optimizer of {name}": optimizer | kept}


def _validating(counts: Counts, sizes: Sizes, held: Networks) -> dict[str, float]:
    run = sizes.run
    share = samples_of_rank(run.validation.num_samples, max(1, sizes.ranks // run.parallel.sequence))
    batch = min(run.validation.batch, share)
    shown = replace(sizes, run=run.validated())
    video = shown.run.video
    peak = max(_without(counts, shown, call).peak for call in _largest(counts.validation))
    decode = _decoding(shown, batch, shown.latent[1], gradient=False)
    return {
        "activations or VAE": max(peak + _gathered(held) + _cache(shown, counts), decode),
        "videos": batch * FP32 * 3.0 * video.height * video.width * video.frames,
        "scorers": sizes.scorers if run.reward.offload else 0.0,
    }


def _gathered(held: Networks) -> float:
    """The weights of other ranks while the network that gathers most runs."""
    return max(network.gathered for network in held.values())


def _inputs(counts: Counts, sizes: Sizes, *, in_parts: bool) -> float:
    """The prompts and clips of a step: whole where a rollout keeps them, and twice where they are cut into parts."""
    student = sizes.models["student"]
    prompts = float(sizes.samples * FP32 * sum(map(math.prod, student.blueprint.text_shapes.values())))
    clips = float(sizes.samples * sizes.latent_bytes) if sizes.run.trains_on == "clips" else 0.0
    return clips + (prompts if counts.kept else 0.0) + (2 * prompts if in_parts else 0.0)


def held_networks(counts: Counts, sizes: Sizes) -> dict[tuple[str, Expert], Held]:
    """Return each network once, under the role that trains it or else the first that runs it."""
    users: dict[int, list[tuple[str, Expert, Role]]] = {}
    for name, role in counts.roles.items():
        for expert, backbone in role.backbones.items():
            users.setdefault(id(backbone), []).append((name, expert, role))
    networks: dict[tuple[str, Expert], Held] = {}
    for seats in users.values():
        base = True
        for name, expert, role in sorted(seats, key=lambda seat: not isinstance(seat[2], Trainable)):
            if not base and not _trained(counts, name, expert):
                continue
            networks[name, expert] = _held(counts, sizes, name, expert, role.backbones[expert], base=base)
            base = False
    return networks


def _trained(counts: Counts, name: str, expert: Expert) -> bool:
    return isinstance(counts.roles[name], Trainable) and expert in counts.plans[name].layout.trained


def _held(counts: Counts, sizes: Sizes, name: str, expert: Expert, backbone: Backbone, *, base: bool) -> Held:
    size, run, config = sizes.models[name].size, sizes.run, sizes.run.roles.get(name)
    whole, rank = size.parameters, _rank(sizes, name)
    small = size.small
    as_read = backbone.half or (sizes.copies and backbone.half_passes)
    held = BF16 * (whole - small) + FP32 * small if as_read else FP32 * whole
    trained = 0 if not _trained(counts, name, expert) else size.adapter(rank) if rank else whole
    adapter = FP32 * trained if rank else 0
    several, shards = sizes.ranks > 1, sizes.shards
    copies = adapter / 2 if as_read else BF16 * (whole - small)  # in bf16, of weights in float32
    rounded = 0.0 if several or not backbone.half_passes else copies
    # Gathered in bf16, and norms whole on every rank.
    half = backbone.half_passes and several and not run.parallel.offload_weights
    unit, kept = (BF16, FP32 * small) if half else (held / whole, 0)
    moving = unit * (whole - small) if half else held
    block = unit * max(size.blocks)
    outside = moving - unit * sum(size.blocks)
    gathered = (outside + PREFETCHED * block if run.parallel.reshard_after_forward else moving) if several else 0.0
    waits = sizes.accumulation > 1 and run.parallel.reduce_gradients == "last"
    unsharded = FP32 * trained if waits else FP32 * trained * PREFETCHED / size.layers
    method = method_named(run.method)
    sampler = counts.roles.get(method.sampled_by)
    samples = sampler is not None and backbone in sampler.backbones.values()
    copies_of = [method.roles[one].copy_of for one, role in counts.roles.items() if isinstance(role, WeightCopy)]
    on_device, kept_there = (int(not off) for off in (run.parallel.offload_weights, run.parallel.offload_optimizer))
    training = config if isinstance(config, TrainableConfig) and trained else None
    moment = BF16 if training and training.moments == "bf16" else FP32
    ema = FP32 * trained if training and training.ema_decay else 0
    weights = on_device * (((held - kept) / shards + kept if base else 0) + adapter / shards)
    return Held(
        weights=weights + rounded,
        idle=(copies / shards if half else FP32 / BF16 * rounded) if samples else weights,
        gradients=on_device * FP32 * trained / shards,
        moments=kept_there * 2 * moment * trained / shards,
        ema=on_device * ema / shards if training and training.ema_device == "same" else 0.0,
        gathered=gathered,
        unsharded=unsharded if several else 0.0,
        sent=(moving if base else 0) + adapter * (BF16 / FP32 if half else 1),
        stored=(FP32 * (1 + copies_of.count(name)) + 2 * moment) * trained + ema,
        trained=trained,
    )


def _always(held: Iterable[Held], sizes: Sizes) -> dict[str, float]:
    networks, encoders = list(held), sizes.run.encoders
    vae = (BF16 if encoders.vae_precision == "bf16" else FP32) * sizes.models["student"].vae_weights
    return {
        "weights": sum(network.weights for network in networks),
        "moments": sum(network.moments for network in networks),
        "EMA": sum(network.ema for network in networks),
        "scorers": 0.0 if sizes.run.reward.offload else sizes.scorers,
        "VAE": 0.0 if encoders.offload else float(vae),
    }


def _rank(sizes: Sizes, name: str) -> int:
    config = sizes.run.roles.get(name)
    return config.adapter.rank if isinstance(config, TrainableConfig) else 0


def seat_of(counts: Counts, call: Pass) -> tuple[str, Expert]:
    """Return the role and the expert that a pass ran."""
    name, _, expert = call.role.rpartition("_")
    for known in ("high", "low"):
        if expert == known and name in counts.roles:
            return name, known
    return call.role, ""


def recompute_of(name: str, expert: Expert, counts: Counts, sizes: Sizes) -> Recompute:
    """Return what a network recomputes: what suits all trained roles that share it."""
    backbone = counts.roles[name].backbones[expert]
    return Recompute.least_memory(
        sizes.recomputed(user)
        for user, role in counts.roles.items()
        if isinstance(role, Trainable) and backbone in role.backbones.values()
    )


def _pass(counts: Counts, sizes: Sizes, call: Pass) -> PassBytes:
    name, expert = seat_of(counts, call)
    config, backbone = counts.plans[name].config, counts.roles[name].backbones[expert]
    rank, model = _rank(sizes, name), sizes.models[name]
    trained = _trained(counts, name, expert) and not rank
    gradient = call.gradient and bool(trained or rank)
    layers = model.size.layers_to_features if call.to_features else model.size.layers
    recompute = recompute_of(name, expert, counts, sizes)
    network = Network(
        model.kind,
        model.config,
        config.precision,
        backbone.half,
        layers,
        rank=rank,
        trained=trained,
        recompute=replace(recompute, full=min(recompute.full, layers)) if gradient else NOTHING,
    )
    channels, _, height, width = sizes.latent
    shape = (channels, call.tokens // call.samples, height, width)
    traced = pass_bytes(network, shape, model.text_tokens, call.samples, gradient=gradient, fresh=sizes.fresh)
    share = 1 / sizes.run.parallel.sequence
    return PassBytes(*(share * value for value in vars(traced).values()))


def _without(counts: Counts, sizes: Sizes, call: Pass) -> PassBytes:
    traced, extra = _pass(counts, sizes, call), LATENTS * sizes.latent_bytes * call.samples
    return PassBytes(traced.peak + extra, traced.kept, traced.backward, traced.first)


def _activations(counts: Counts, sizes: Sizes, held: Networks, passes: list[Pass]) -> tuple[float, float]:
    """Return the activations of one loss, and the gradients at its peak that were not there before."""
    graph = [call for call in passes if call.gradient]
    with_graph = [_pass(counts, sizes, call) for call in graph]
    silent = [_pass(counts, sizes, call).peak for call in _largest(passes) if not call.gradient]
    kept, last = sum(call.kept for call in with_graph), with_graph[-1]
    extra = LATENTS * sizes.latent_bytes * max(call.samples for call in passes)
    peak = kept + max([0.0, *silent, max(call.peak - call.kept for call in with_graph), last.backward - last.kept])
    if sizes.fresh:
        return peak + extra, max(0.0, kept - last.kept + last.first - peak)
    network = held.get(seat_of(counts, graph[0]))
    if sizes.accumulation > 1 or network is None:  # of several passes they are counted as a whole
        return peak + extra, 0.0
    return peak + extra, network.gradients


def _rollouts(counts: Counts, sizes: Sizes) -> tuple[float, float]:
    """Return the bytes on the device of a step's rollout, and of the part of it that is being made."""
    whole, algorithm = float(counts.kept * sizes.latent_bytes), sizes.run.algorithm
    if not isinstance(algorithm, RolloutConfig):
        return whole, 0.0
    part = whole * min(1.0, algorithm.rollout_batch / sizes.samples)
    if algorithm.trajectories == "cpu":
        return 0.0, part
    return whole, part if part < whole else 0.0  # a single part is the whole


def _largest(passes: Iterable[Pass]) -> list[Pass]:
    """Return the passes that no other one covers: it then needs as much memory, and tracing a pass takes time."""
    return [call for (call,) in _largest_losses([[call] for call in passes])]


def _largest_losses(losses: list[list[Pass]]) -> list[list[Pass]]:
    """Return the losses whose passes no other loss covers one by one."""
    distinct = list({tuple((p.role, p.samples, p.tokens, p.gradient) for p in loss): loss for loss in losses}.values())

    def covered(loss: list[Pass]) -> bool:
        others = [other for other in distinct if other is not loss and len(other) == len(loss)]
        return any(all(map(_covers, other, loss)) for other in others)

    return [loss for loss in distinct if not covered(loss)]


def _covers(large: Pass, small: Pass) -> bool:
    """Whether a pass of the same network has as many samples, and as many tokens of each."""
    same = (large.role, large.gradient, large.to_features) == (small.role, small.gradient, small.to_features)
    return same and large.samples >= small.samples and large.tokens * small.samples >= small.tokens * large.samples


def _cache(sizes: Sizes, counts: Counts, role: str = "student") -> float:
    """The KV cache of a causal role for the samples of a rollout."""
    run, size = sizes.run, sizes.models[role].size
    if not run.sampler.chunks.causal:
        return 0.0
    samples = max(call.samples for call in counts.passes if call.role.startswith(role))
    frames = min(sizes.latent[1], run.sampler.chunks.window_frames or sizes.latent[1])
    tokens = frames * sizes.frame_tokens
    width = BF16 if run.roles[role].precision == "bf16" else FP32
    return 2.0 * size.layers * samples * tokens * size.width * width / run.parallel.sequence


def _decoding(sizes: Sizes, samples: int, frames: int, *, gradient: bool) -> float:
    model, encoders = sizes.models["student"], sizes.run.encoders
    half = encoders.vae_precision == "bf16"
    shape = (sizes.latent[0], frames, *sizes.latent[2:])
    weights = (BF16 if half else FP32) * model.vae_weights if encoders.offload else 0
    others = 0.0
    if encoders.vae_slicing and not gradient:  # without gradient a slice leaves its video alone
        video = sizes.run.video
        others, samples = FP32 * 3.0 * video.height * video.width * video.frames * (samples - 1), 1
    tile = encoders.vae_tile
    decoded = decode_bytes(model.blueprint.vae, model.vae, shape, samples, half=half, gradient=gradient, tile=tile)
    return weights + others + decoded


def _temporary(sizes: Sizes, name: str, trained: int) -> float:
    """Return what an optimizer step needs: two tensors like the largest weight, and a bucket of what is moved to the
    device, or of moments in bf16.
    """
    largest, config, parallel = sizes.models[name].size.largest, sizes.run.roles[name], sizes.run.parallel
    half = isinstance(config, TrainableConfig) and config.moments == "bf16"
    moved = 2.0 * (BF16 if half and parallel.offload_optimizer else FP32)  # two moments, or weight and gradient
    moved *= parallel.offload_weights != parallel.offload_optimizer
    bucket = min(max(BUCKET, largest / sizes.shards), trained / sizes.shards)
    return (ROUNDING * FP32 * half + moved) * bucket + 2.0 * FP32 * largest / sizes.shards
