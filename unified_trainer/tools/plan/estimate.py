"""The whole estimate of a run: memory by phase, calls and FLOPs of a step, time, bytes between ranks, checkpoints."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property

from unified_trainer.basics.errors import UserError
from unified_trainer.data.prompts import prompts_of, training_captions
from unified_trainer.methods.rl.rollout_config import RolloutConfig
from unified_trainer.models.base import Shape
from unified_trainer.models.pass_flops import PassCount
from unified_trainer.parallel.device import CARD_KIND
from unified_trainer.parallel.meter import Pass
from unified_trainer.rewards.ocr import KIND as OCR
from unified_trainer.roles.blocks import may_compile
from unified_trainer.roles.role import TrainableConfig
from unified_trainer.run.plan.actions import action_form, check_equal_actions
from unified_trainer.run.plan.data import check_sound, check_video
from unified_trainer.run.plan.length import with_steps
from unified_trainer.run.plan.plan import check_settings, checked_shape
from unified_trainer.run.plan.roles import check_families, check_heads
from unified_trainer.run.registry import method_named
from unified_trainer.run.settings.batch import batch_of, check_buffer, with_fitting_batch
from unified_trainer.run.settings.config import RunConfig
from unified_trainer.run.validation.samples import samples_of_rank
from unified_trainer.tools.plan.architecture import HPSV3_WEIGHTS, Architecture, architecture_of
from unified_trainer.tools.plan.cost import CORES, Work, decode_work, pass_work, score_work, seconds_sent
from unified_trainer.tools.plan.flops import PassFLOPs, pass_flops
from unified_trainer.tools.plan.hardware import NODE, Hardware, gib
from unified_trainer.tools.plan.memory import BF16, FP32, Memory, Sizes, held_networks, memory_of, recompute_of, seat_of
from unified_trainer.tools.plan.rehearsal import Counts, paths_of, rehearse

STEPS = 5  # training steps of a rehearsal of a method with one update a step; others are rehearsed for one


@dataclass(frozen=True)
class Needs:
    """The counts and sizes that the memory of a run follows from."""

    run: RunConfig  # with the batch that fits
    counts: Counts
    sizes: Sizes
    table: Mapping[str, int]  # how a training step's batch divides
    notes: tuple[str, ...]

    @cached_property
    def memory(self) -> Memory:
        """The memory of one rank; passes are traced for it, which takes seconds."""
        return memory_of(self.counts, self.sizes)


@dataclass(frozen=True)
class Estimate(Needs):
    """The needs of a run: memory is that of one rank, everything else of all ranks."""

    ranks: int
    sources: Mapping[str, str]  # of the sizes of each role's model
    parameters: Mapping[str, int]  # of each role
    tokens: float  # that went forward in a training step
    model_flops: float  # of a training step
    executed_flops: float  # with recomputed activations
    work: Work  # of one rank in a training step, without what workers do
    sampled: Work  # of one rollout worker's card in a training step
    scored: Work  # of the card that decodes and scores its samples: that one, or a reward worker's
    drawn: Work  # of one rank that makes the samples of a training step itself, in `parts` parts
    parts: float
    validation: Work  # of one rank in a validation
    encoded: float  # FLOPs of one rank to encode all prompts once, before the first step
    inside: float  # bytes that one rank sends in a training step to the ranks that share its copy of the weights
    across: float  # to those that hold the other copies
    checkpoint: float  # bytes on disk

    @property
    def sent(self) -> float:
        """The bytes that one rank sends in a training step."""
        return self.inside + self.across

    @property
    def cards(self) -> float:
        """The cards of the run: those of the training processes and of all workers."""
        return self.ranks + self.run.rollouts.devices

    def replicated(self, shard: int) -> tuple[float, float]:
        """The bytes that one rank sends in a step, and its peak of memory, with `shard` ranks to a copy of weights."""
        parallel = replace(self.run.parallel, replicate=0, shard=shard)
        sizes = replace(self.sizes, run=replace(self.run, parallel=parallel))
        memory = memory_of(self.counts, sizes)
        return sum(_sent(self.counts, sizes)), memory.total(memory.peak)

    def seconds(self, card: Hardware) -> dict[str, float]:
        """Return the seconds of a training step by what takes them."""
        by_part = self.work.seconds(card)
        far = self.sizes.shards > NODE  # a copy of the weights reaches over several nodes
        inside, across = (0.0, self.sent) if far else (self.inside, self.across)
        waited = seconds_sent(inside, across, card) - by_part["networks"] - by_part["recomputation"]
        by_part |= {"waiting for other ranks": max(0.0, waited)}
        # Samples of a part are scored on CPU cores while the next part is made and decoded.
        made = sum(self.drawn.seconds(card).values()) + by_part["VAE"] + by_part["scorers"]
        by_part[CORES] -= (1 - 1 / self.parts) * min(by_part[CORES], made)
        rollouts = self.run.rollouts
        sampled, scored = (sum(work.seconds(card).values()) for work in (self.sampled, self.scored))
        made = max(sampled, scored) if rollouts.reward_workers else sampled + scored
        beside = sum(by_part.values()) if rollouts.ahead else 0.0  # training goes on while the next samples are made
        return by_part | {"waiting for workers": max(0.0, made - beside)}

    def hours(self, card: Hardware) -> float:
        """Return the hours of all training steps and validations, and of encoding the prompts."""
        batch = batch_of(self.run)  # smaller at first where it grows
        steps = batch.prompts_before(self.run.steps) / batch.prompts * sum(self.seconds(card).values())
        count = self.run.steps // self.run.validate_every + 1 if self.run.validate_every else 0
        shown = count * sum(self.validation.seconds(card).values())
        return (steps + shown + sum(Work(products=self.encoded).seconds(card).values())) / 3600

    def mfu(self, card: Hardware) -> float:
        """Return the model's FLOPs over the peak in a training step, estimated where one is given too."""
        return self.model_flops / (self.cards * card.flops * sum(self.seconds(replace(card, mfu=None)).values()))


def needs(run: RunConfig, ranks: int, *, first: int = -1, steps: int = 0, bucket: str = "") -> Needs:
    """Return what a run needs, counted in a rehearsal of `steps` training steps from step `first` on.

    By default they are STEPS steps from the middle of the run on, and one step of a method with rollouts. `bucket` is
    the name of a run of `by_bucket`. Raise UserError for settings that no run could have, such as a batch that the
    ranks do not divide.
    """
    method, (run, assumed) = method_named(run.method), _with_scorer(run)
    sequence = run.parallel.degrees(ranks).sequence
    data_ranks = ranks // sequence
    run, fitted = with_fitting_batch(run, data_ranks)
    check_settings(run, method)
    run = with_steps(run, batch_of(run), _rows(run)) if run.epochs else run
    check_buffer(run, batch_of(run), data_ranks)
    run = replace(run, encoders=run.encoders.on(CARD_KIND if run.device == "auto" else run.device))
    models = _models(run, sequence)
    check_sound(run, models["student"].family, models["student"].folder)
    check_video(run, models["student"].family)
    size_of = models["student"].latent_shape
    frames, shown_frames = checked_shape(run, size_of, bucket)[1], checked_shape(run.validated(), size_of)[1]
    table = batch_of(run).table(data_ranks)
    boundaries = {path: models[name].networks[1] for name, path in paths_of(run).items()}
    steps = steps or (1 if method.sampled_by else STEPS)
    first = first if first >= 0 else run.steps // 2
    causal = models["student"].blueprint.vae.causal
    counts = rehearse(
        run, frames, data_ranks, boundaries, first=first, steps=steps, shown_frames=shown_frames, causal=causal
    )
    scorers, notes = _scorers(run)
    sizes = Sizes(run, models, ranks, scorers, table["samples per rank"], table["accumulation"])
    fewer = [(name, role.quantize) for name, role in run.roles.items() if role.quantize != "none"]
    rounded = [f"not counted: what {name}.quantize {bits} changes in bytes and seconds" for name, bits in fewer]
    return Needs(run, counts, sizes, table, (*filter(None, [fitted]), *assumed, *notes, *rounded))


def estimate(run: RunConfig, ranks: int, *, first: int = -1, steps: int = 0, bucket: str = "") -> Estimate:
    """Return the estimate of what a run `needs`, with its FLOPs, bytes and work."""
    needed = needs(run, ranks, first=first, steps=steps, bucket=bucket)
    run, counts, sizes, table = needed.run, needed.counts, needed.sizes, needed.table
    models, sequence = sizes.models, run.parallel.degrees(ranks).sequence
    data_ranks = ranks // sequence
    share = counts.repeats / counts.steps
    passes = _with_flops(counts.passes, sizes, counts)
    inside, across = _sent(counts, sizes)
    seen = _seen(sizes, counts).times(share)
    work = _work(passes, sizes, counts).times(share / sequence)
    sampled, scored = Work(), Work()
    own = _work(_with_flops(counts.sampled, sizes, counts), sizes, counts)
    drawn, parts = own.times(share / sequence), _parts(run, counts)
    if workers := run.rollouts.workers:  # they make the samples of all ranks
        work += drawn.times(-1)
        drawn, parts, sampled = Work(), 1.0, own.times(share * data_ranks / (workers * run.rollouts.ranks))
        scored, seen = seen.times(data_ranks / (run.rollouts.reward_workers or workers)), Work()
    stored, told = _stored(sizes)
    prompts = table["prompts"] / data_ranks * run.steps if run.trains_on == "prompts" else 0
    return Estimate(
        run=run,
        counts=counts,
        sizes=sizes,
        table=table,
        notes=(*needed.notes, *told, *_on_cores((work + seen + scored).on_cores)),
        ranks=ranks,
        sources={name: model.source for name, model in models.items()},
        parameters={name: model.size.parameters for name, model in models.items()},
        tokens=data_ranks * share * sum(call.tokens * sizes.frame_tokens for call in counts.passes),
        model_flops=data_ranks * share * sum(f.trained if call.gradient else f.forward for call, f in passes),
        executed_flops=data_ranks * share * sum(f.executed if call.gradient else f.forward for call, f in passes),
        work=work + seen,
        sampled=sampled,
        scored=scored,
        drawn=drawn,
        parts=parts,
        validation=_validation(sizes, counts, data_ranks),
        encoded=prompts * models["student"].blueprint.encode_flops(),
        inside=inside,
        across=across,
        checkpoint=sum(network.stored for network in held_networks(counts, sizes).values()) + data_ranks * stored,
    )


def _rows(run: RunConfig) -> int:
    """Return the number of prompts or clips of an epoch, of those that are quick to count."""
    if run.trains_on == "prompts" and run.prompts:
        return len(prompts_of(run.prompts, training_captions(), "--prompts", run.prompts_column).requests)
    if run.trains_on == "clips" and run.data.path == "tiny":
        return run.data.num_clips
    raise UserError(f"--epochs {run.epochs}: plan counts the rows of --prompts alone; give --steps")


def _stored(sizes: Sizes) -> tuple[float, tuple[str, ...]]:
    """Return the bytes of the experience buffer on one rank, and a note on them."""
    buffer, algorithm = sizes.run.rollouts.buffer, sizes.run.algorithm
    if not (buffer.share and isinstance(algorithm, RolloutConfig)):
        return 0.0, ()
    size = float(buffer.capacity * sizes.samples * algorithm.kept_states(sizes.run.sampler) * sizes.latent_bytes)
    words = f"experience buffer: {gib(size)} GiB of CPU memory on each rank and of a checkpoint"
    return size, (f"{words}; seconds are of steps that make all samples",)


def _models(run: RunConfig, sequence: int) -> dict[str, Architecture]:
    """Return the model of each role; UserError for one that `sequence` ranks or a causal sampler cannot have."""
    method, models = method_named(run.method), dict[str, Architecture]()
    for name, path in paths_of(run).items():
        model = architecture_of(name, path, run)
        config = run.roles[method.roles[name].copy_of or name]
        models[name] = replace(
            model,
            gates=int(config.sparse.share > 0),
            flow_map=config.is_flow_map,
            actions=action_form(name, model.family, model.folder, config.new_actions),
            new_actions=config.new_actions > 0,
        )
    check_families({name: model.family for name, model in models.items()})
    check_equal_actions({name: model.actions for name, model in models.items()})
    for name, model in models.items():
        heads = model.family.attention_heads(model.folder)  # 1 where sequence ranks cannot divide them
        check_heads(name, heads, sequence)
        if name == method.sampled_by:
            check_heads(name, heads, run.sequence_of_workers, "rollouts.ranks")
        if model.family.causal is None and run.sampler.chunks.causal:
            raise UserError(f"{name}: this network has no causal form; set sampler.chunks.chunk_frames 0")
    return models


def _scorers(run: RunConfig) -> tuple[float, tuple[str, ...]]:
    """Return the bytes of the scorers' weights, and which of them are not known."""
    total, notes = 0.0, []
    for name, config in run.reward.named().items():
        if config.kind == "hpsv3" and config.path != "tiny":
            total += HPSV3_WEIGHTS * (BF16 if config.precision == "bf16" else FP32)
        elif config.path != "tiny" and config.kind != OCR.name:
            notes.append(f"not counted: memory and time of scorer {name}, whose kind {config.kind} has unknown sizes")
    return total, tuple(notes)


def _parts(run: RunConfig, counts: Counts) -> float:
    """Return the parts of a rank's samples of which one is scored while the next is made; 1 where none is."""
    scorers = [scorer for scorer in run.reward.named().values() if scorer.weight]
    last = run.reward.offload and any(scorer.path for scorer in scorers)  # all are scored when all are made
    if last or not counts.sampled or any(scorer.kind == OCR.name and scorer.processes == 0 for scorer in scorers):
        return 1.0
    return max(1.0, counts.repeats / counts.steps * len(counts.decoded))


def _on_cores(seconds: float) -> tuple[str, ...]:
    source = f"{OCR.cpu_seconds:g} CPU s a frame (0.4 to 0.45 measured at 480 x 832 pixels)"
    note = f"assumed: ocr takes {source}, {seconds:.3g} s a step by reward.processes here, with those behind sampling"
    return (note,) if seconds else ()


def _with_scorer(run: RunConfig) -> tuple[RunConfig, tuple[str, ...]]:
    """Return the run with HPSv3 where its method needs a scorer and none is named, and a note that says so."""
    if run.reward.named() or not method_named(run.method).uses_reward:
        return run, ()
    note = f"assumed: no scorer is named; HPSv3 in {run.reward.precision} scores"
    return replace(run, reward=replace(run.reward, kind="hpsv3")), (note,)


def _with_flops(passes: Sequence[Pass], sizes: Sizes, counts: Counts) -> list[tuple[Pass, PassFLOPs]]:
    """Return each pass with its FLOPs, which are computed once for passes that are alike."""
    known = {f"{call}": call for call in passes}
    flops = {key: _flops(call, sizes, counts) for key, call in known.items()}
    return [(call, flops[f"{call}"]) for call in passes]


def _work(passes: Iterable[tuple[Pass, PassFLOPs]], sizes: Sizes, counts: Counts) -> Work:
    work = Work()
    for call, flops in passes:
        name, expert = seat_of(counts, call)
        recompute, layers = recompute_of(name, expert, counts, sizes), sizes.models[name].size.layers
        work += pass_work(flops, recompute, layers, gradient=call.gradient)
    return work


def _seen(sizes: Sizes, counts: Counts) -> Work:
    run, student = sizes.run, sizes.models["student"]
    half, total = run.encoders.vae_precision == "bf16", Work()
    scorers = [scorer for scorer in run.reward.named().values() if scorer.weight]
    for samples, frames, gradient in counts.decoded:
        latent = (sizes.latent[0], frames, *sizes.latent[2:])
        total += decode_work(student, latent, samples, half=half, gradient=gradient)
        shown = 1 if frames == 1 else run.video.frames
        total += score_work(scorers, shown, samples, min(sizes.ranks, NODE), gradient=gradient)
    return total


def _validation(sizes: Sizes, counts: Counts, ranks: int) -> Work:
    """Return the work of a validation: samples, their videos and the scores of all scorers."""
    run = sizes.run.validated()
    shown, own = replace(sizes, run=run), samples_of_rank(run.validation.num_samples, ranks)
    if not counts.validation or run.rollouts.evaluation_workers:
        return Work()
    share = own / min(run.validation.batch, own) / run.parallel.sequence
    total = _work(_with_flops(counts.validation, shown, counts), shown, counts).times(share)
    half = run.encoders.vae_precision == "bf16"
    total += decode_work(shown.models["student"], shown.latent, own, half=half, gradient=False)
    here = min(sizes.ranks, NODE)
    return total + score_work(run.reward.named().values(), run.video.frames, own, here, gradient=False)


def _flops(call: Pass, sizes: Sizes, counts: Counts) -> PassFLOPs:
    name, expert = seat_of(counts, call)
    model, config = sizes.models[name], sizes.run.roles.get(name)
    trained = expert in counts.plans[name].layout.trained
    rank = config.adapter.rank if trained and isinstance(config, TrainableConfig) else 0
    layers = model.size.layers_to_features if call.to_features else model.size.layers
    repeated = min(recompute_of(name, expert, counts, sizes).full, layers) / layers  # the first blocks are
    shape = (sizes.latent[0], call.tokens // call.samples, *sizes.latent[2:])
    device = sizes.run.device
    compile = sizes.run.roles[method_named(sizes.run.method).roles[name].copy_of or name].compile
    flops = pass_flops(
        model.size,
        _forward(call, sizes, counts, shape),
        rank=rank,
        repeated=repeated if trained else 0.0,
        to_features=call.to_features,
        fused=may_compile(compile, CARD_KIND if device == "auto" else device),
    )
    return flops.times(call.samples)


def _forward(call: Pass, sizes: Sizes, counts: Counts, shape: Shape) -> PassCount:
    """Return the FLOPs of a pass of the rehearsal, forward over one sample at the real sizes.

    It computes the share of a plain pass that the rehearsal's did, and of its pairs those that sparse attention keeps:
    in chunks within a tile for each tile of queries. Where every token has a noise level, the layers that see one row a
    sample see one a token.
    """
    name, _ = seat_of(counts, call)
    model, (_, frames, high, wide) = sizes.models[name], shape
    plain, share = model.plain_pass(shape), dict(call.share)
    sparse = sizes.run.roles[method_named(sizes.run.method).roles[name].copy_of or name].sparse
    if sparse.share:
        _, height, width = json.loads(model.config)["patch_size"]
        grid = (frames, high // height, wide // width)
        share["attn1"] = Fraction(sparse.pairs(grid, [grid], sparse.share), plain.tokens**2) * share.get("attn1", 1)
    _, times, *_ = call.inputs  # latents, times and text of a Wan
    if len(times) == 2:
        once = {name: 2 * matrix.weights for name, matrix in model.size.matrices.items()}
        parts = (p.times(plain.tokens if p.products == once.get(p.module) else 1) for p in plain.parts)
        plain = replace(plain, parts=tuple(parts))
    return plain.scaled(share)


def _sent(counts: Counts, sizes: Sizes) -> tuple[float, float]:
    """Return the bytes that one rank sends inside its group of shards, and to other copies of its shard.

    Blocks are gathered for each pass and its backward pass, gradients are reduced once an update. A ring of n sends
    (n - 1) / n of the whole, and twice that where every rank keeps the sum. Tokens that sequence ranks exchange are not
    counted.
    """
    held, share, copies = held_networks(counts, sizes), counts.repeats / counts.steps, sizes.ranks // sizes.shards
    ring = (sizes.shards - 1) / sizes.shards
    total = 0.0
    for call in counts.passes:
        seat = seat_of(counts, call)
        network = held.get(seat) or next(iter(held.values()))
        gathers = 2 if call.gradient and sizes.run.parallel.reshard_after_forward else 1
        size = sizes.models[seat[0]].size
        blocks = size.layers_to_features / size.layers if call.to_features else 1.0
        total += share * gathers * ring * network.sent * blocks
    updates = {
        [call.role for call in loss if call.gradient][-1] for loss in counts.losses if any(p.gradient for p in loss)
    }
    reduced = sum(
        FP32 * network.trained for seat, network in held.items() if any(role.startswith(seat[0]) for role in updates)
    )
    return total + ring * reduced, 2 * (copies - 1) / copies * reduced / sizes.shards
