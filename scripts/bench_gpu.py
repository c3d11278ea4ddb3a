"""This script measures the trainer on the accelerator that it finds, with random weights of Wan2.1-1.3B's architecture.

    python scripts/bench_gpu.py --out DIR
    python scripts/bench_gpu.py --out DIR --only forward attention
    python scripts/bench_gpu.py --toy --out DIR

It needs no network, no checkpoint and no data. Every section is one part of the table and runs in its own process with
a share of the time that is left, the most useful section first. A row or a section that fails is marked, and the others
still run. No row begins after `--minutes`, and one that still runs GRACE seconds later is stopped. DIR gets bench.json,
which is written anew after every row, and bench.md, the table for docs/performance.md. `--toy` does the same with a
narrow network and small videos, for a CPU.

Model FLOPs are those of the forward and backward passes without recomputation; MFU divides them by the time and by the
device's published dense bf16 rate.
"""

import gc
import json
import math
import multiprocessing
import os
import shlex
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from unittest.mock import patch

import missing_readers  # noqa: F401 - before what would import them
import torch
import tyro
from random_wan import SPREAD, TOY, WAN_1_3B, Architecture, write
from recorded_calls import Call, recorded
from rich.console import Console
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.types import Condition
from unified_trainer.data.clips import Clips
from unified_trainer.methods.rl.on_policy_check import OnPolicyCheck
from unified_trainer.methods.rl.policy_update import PolicyUpdate
from unified_trainer.methods.rl.replay import Replay
from unified_trainer.models.encoders import EncoderConfig
from unified_trainer.models.wan.codec import WanCodec
from unified_trainer.models.wan.model import WanModel
from unified_trainer.numerics import philox
from unified_trainer.parallel.device import (
    OTHER_ATTENTION,
    Timeline,
    attention_order,
    device_name,
    peak_flops,
    peak_memory,
    use_attention,
)
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.parallel.meter import Meter
from unified_trainer.parallel.random import Streams
from unified_trainer.roles.adapter import AdapterConfig
from unified_trainer.roles.backbone import Backbone
from unified_trainer.roles.blocks import compile_noise
from unified_trainer.roles.recompute import Recomputed
from unified_trainer.roles.role import Trainable, TrainableConfig
from unified_trainer.run import build as building
from unified_trainer.run.build import Built
from unified_trainer.run.plan import data as data_plan
from unified_trainer.run.settings.command_line import parse
from unified_trainer.run.tracking.environment import environment

ROUNDS = 3  # measured repetitions of a pass, of which the fastest counts
LATENT_CHANNELS, TIME_STRIDE, SPACE_STRIDE = 16, 4, 8
WARM = 6  # most training steps before the one that is measured
GRACE = 20.0  # seconds that a section has to end the row that it measures
START = "spawn"  # how its process starts: CUDA cannot be used after a fork
QUADRATIC_TOKENS = 10_000  # beyond them the math kernel's matrix of all pairs does not fit
SHORT = (20, 16)  # tokens and head size of a small network, of which the gradients of attention are compared too
KERNELS = 20  # of the profile, those that take most time
RANK = 32  # of the adapters whose gradients are compared


@dataclass(frozen=True)
class Video:
    """A video's size in pixels."""

    frames: int
    height: int
    width: int

    def __str__(self) -> str:
        return f"{self.height}x{self.width}x{self.frames}"

    @property
    def latent_shape(self) -> tuple[int, int, int, int]:
        frames = 1 + (self.frames - 1) // TIME_STRIDE
        return LATENT_CHANNELS, frames, self.height // SPACE_STRIDE, self.width // SPACE_STRIDE

    @property
    def tokens(self) -> int:
        """Tokens of one sample: patches of 2 x 2 latent positions."""
        return math.prod(self.latent_shape[1:]) // 4

    @property
    def flags(self) -> list[str]:
        sizes = {"frames": self.frames, "height": self.height, "width": self.width}
        return [word for key, size in sizes.items() for word in (f"--video.{key}", str(size))]


@dataclass(frozen=True)
class Scale:
    """What is measured: an architecture and two sizes of video."""

    architecture: Architecture
    small: Video  # that of the recipe for reinforcement learning
    large: Video


FULL = Scale(WAN_1_3B, Video(53, 240, 416), Video(81, 480, 832))
SMALL = Scale(TOY, Video(5, 32, 32), Video(9, 32, 32))

GROUPS = "--algorithm.num-prompts 1 --algorithm.num-samples 2 --algorithm.prompts-per-update 1 --sampler.num-steps"
PAIR = "--algorithm.batch-size 1 --algorithm.micro-batch 1"
MATCHING = f"{PAIR} --algorithm.student-every 1"  # one update of each role in every step
# A method's step: its name, its flags at the small size and at the large one; None leaves that out.
STEPS = {
    "dance_grpo": ("dance_grpo", f"{GROUPS} 4", f"{GROUPS} 2"),
    "dmd2, adapters": ("dmd2", None, f"{MATCHING} --student.adapter.rank 64 --critic.adapter.rank 64"),
    "dmd2": ("dmd2", None, MATCHING),
    "finetune": ("finetune", None, f"{PAIR} --data.path tiny"),
    "diffusion_nft": ("diffusion_nft", f"{GROUPS} 4", f"{GROUPS} 2"),
    "self_forcing": ("self_forcing", None, MATCHING),
}
COMPILED = {"compiled": True, "uncompiled": False}
RECOMPUTE: tuple[Recomputed, ...] = ("none", "selective", "full")


@dataclass
class Bench:
    """The rows measured so far, and where they are written."""

    out: Path
    model: Path
    scale: Scale
    mesh: Mesh
    end: float  # when no further row is begun
    environment: dict[str, Any]
    rows: list[dict[str, Any]] = field(default_factory=list)  # those of earlier sections too

    def row(self, section: str, name: str, measure: Callable[[], dict[str, Any]]) -> None:
        """Measure one row and write all rows; a failure becomes the row's result."""
        if time.monotonic() > self.end:
            found: dict[str, Any] = {"skipped": "no time left"}
        else:
            _forget_peak(self.mesh.device)
            try:
                found = measure()
            except torch.OutOfMemoryError:
                found = {"failed": "out of memory"}
            except Exception as error:  # noqa: BLE001 - the rows after it are measured all the same; the traceback is kept
                traceback.print_exc()
                found = {"failed": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
        self.rows.append({"section": section, "name": name, **found})
        Console().print(f"{section}: {name}: {_in_words(found)}", markup=False, highlight=False, soft_wrap=True)
        _write(self.out, self.environment, self.rows)

    def rate(self, seconds: float, flops: float, tokens: float) -> dict[str, Any]:
        """Return a row of what took these seconds."""
        peak = peak_flops(device_name(self.mesh.device))
        return {
            "ms": 1000 * seconds,
            "model_tflop": flops / 1e12,
            "mfu": flops / seconds / peak if peak else None,
            "tokens_per_second": tokens / seconds,
            "peak_gib": peak_memory(self.mesh.device),
        }


def _write(out: Path, facts: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """Write bench.json and bench.md; a process that is stopped meanwhile leaves the files of before."""
    texts = {"bench.json": json.dumps({"environment": facts, "rows": rows}, indent=1)}
    texts["bench.md"] = markdown(facts, rows) if facts else ""
    for name, text in texts.items():
        (out / f"{name}.new").write_text(text)
        os.replace(out / f"{name}.new", out / name)


def _forget_peak(device: torch.device) -> None:
    if device.type != "cpu":
        gc.collect()
        torch.get_device_module(device).empty_cache()
        torch.get_device_module(device).reset_peak_memory_stats(device)


def seconds(device: torch.device, work: Callable[[], object]) -> float:
    """Return the seconds from the start of the work until the device has finished it."""
    timeline = Timeline(device)
    timeline.mark()
    work()
    timeline.mark()
    return timeline.seconds()[0]


def fastest(device: torch.device, work: Callable[[], object]) -> float:
    """Return the seconds of the fastest of some repetitions, after one that is not counted."""
    work()
    return min(seconds(device, work) for _ in range(ROUNDS))


def forward(bench: Bench) -> None:
    """A forward pass of the transformer as it is, and with compiled blocks."""
    for video in (bench.scale.small, bench.scale.large):
        for name, compile in COMPILED.items():
            bench.row("forward", f"{video}, {name}", _Passes(bench, video, compile=compile).forward)


def backward(bench: Bench) -> None:
    """Forward and backward of the transformer, by recomputation, as it is and with compiled blocks."""
    for video in (bench.scale.small, bench.scale.large):
        for name, compile in COMPILED.items():
            for recompute in RECOMPUTE[compile:]:  # a compiler chooses itself what it keeps
                passes = _Passes(bench, video, recompute, compile=compile)
                bench.row("forward and backward", f"{video}, {name}, recomputing {recompute}", passes.both)


def attention(bench: Bench) -> None:
    """Self-attention of one layer by kernel of torch; a forward pass of the network with each, and with others."""
    others = [kernel for kernel in OTHER_ATTENTION if _is_installed(bench, kernel)]
    sizes = (bench.scale.large, bench.scale.small)
    for video in sizes:
        for kernel in _kernels(bench, video):
            bench.row("attention", f"{video}, one layer, {kernel}", lambda v=video, k=kernel: _attention(bench, v, k))
    for video in sizes:
        for kernel in (*_kernels(bench, video), *others):
            with _attention_kernel(bench, kernel):
                bench.row("attention", f"{video}, forward, {kernel}", _Passes(bench, video).forward)


def kernels(bench: Bench) -> None:
    """The kernels that take most of a pass and its backward pass, compiled; noise and Q, K, V in two ways."""
    for name in ("small kernels", *(["one compiled kernel"] if bench.mesh.device.type != "cpu" else [])):
        bench.row("noise", f"{bench.scale.large}, {name}", lambda n=name: _noise(bench, small=n == "small kernels"))
    for video in (bench.scale.large, bench.scale.small):
        for name, project in PROJECTIONS.items():
            row = f"{video}, Q, K, V of one layer, {name}"
            bench.row("projections", row, lambda v=video, p=project: _projections(bench, v, p))
    compile = bench.mesh.device.type != "cpu"
    for video in (bench.scale.large, bench.scale.small):
        passes = _Passes(bench, video, compile=compile)
        for name, found in passes.kernels().items():
            bench.row("kernels", f"{video}, {name}", lambda found=found: found)


def methods(bench: Bench) -> None:
    """One training step of every method, and its model calls repeated alone."""
    for name, (method, small, large) in STEPS.items():
        for video, flags in ((bench.scale.small, small), (bench.scale.large, large)):
            if flags is not None:
                bench.row("step", f"{name}, {video}", lambda m=method, v=video, f=flags: _step(bench, m, v, f.split()))


def vae(bench: Bench) -> None:
    """Decoding of one sample, by precision and memory layout."""
    for precision in ("fp32", "bf16"):
        for last in (False, True):
            config = EncoderConfig(vae_precision=precision, vae_channels_last=last)
            name = f"decode {bench.scale.small}, {precision}, {'channels last' if last else 'contiguous'}"
            bench.row("vae", name, lambda c=config: _decode(bench, c))
    with torch.backends.cudnn.flags(enabled=True, benchmark=True):
        bench.row("vae", f"{name}, kernels of convolutions by their time", lambda c=config: _decode(bench, c))


def log_ratio(bench: Bench) -> None:
    """The log-ratio of replayed transitions before any weight has changed: what rounding alone makes of it."""
    for precision in ("bf16", "fp32"):
        for made, replayed in ((1, 1), (2, 2), (2, 1)):
            flags = f"{GROUPS} 4 --student.precision {precision} --algorithm.rollout-batch {made}"
            flags += f" --algorithm.update-batch {replayed} --student.learning-rate 0"
            name = f"{precision}, samples per pass {made} in the rollout, {replayed} in the replay"
            bench.row("log-ratio", name, lambda f=flags: _log_ratio(bench, f.split()))


def gradients(bench: Bench) -> None:
    """Gradients of blocks that keep products against those that recompute all, and of attention by kernel."""
    for video in (bench.scale.small, bench.scale.large):
        for name, compile in COMPILED.items():
            bench.row("gradients", f"{video}, {name}", lambda v=video, c=compile: _gradients(bench, v, compile=c))
    for name, compile in COMPILED.items():
        bench.row(
            "gradients",
            f"{bench.scale.small}, {name}, adapters of rank {RANK}",
            lambda c=compile: _gradients(bench, bench.scale.small, compile=c, rank=RANK),
        )
    for tokens, size in (SHORT, (bench.scale.small.tokens, bench.scale.architecture.head_dim)):
        for kernel in attention_order("flash", bench.mesh.device) if bench.mesh.device.type in ("cpu", "cuda") else ():
            name = f"attention of {tokens} tokens, head size {size}, {kernel}"
            bench.row("gradients", name, lambda t=tokens, d=size, k=kernel: _attention_gradients(bench, t, d, k))


SECTIONS = {f.__name__: f for f in (gradients, log_ratio, forward, attention, methods, backward, vae, kernels)}
SHARES = {
    "gradients": 1.0,
    "log_ratio": 2.0,
    "forward": 1.0,
    "attention": 1.0,
    "methods": 4.0,
    "backward": 2.0,
    "vae": 0.5,
    "kernels": 0.5,
}


class _Passes:
    """Passes of the transformer on one sample, as a role runs them in bf16."""

    def __init__(
        self, bench: Bench, video: Video, recompute: Recomputed = "none", *, compile: bool = False, rank: int = 0
    ) -> None:
        """With a rank, adapters are trained in place of the weights."""
        self._bench, self._video, self._recompute, self._compile = bench, video, recompute, compile
        self._adapters = {"student": AdapterConfig(rank=rank)} if rank else {}

    def forward(self) -> dict[str, Any]:
        role, inputs = self._role()

        def work() -> None:
            with torch.no_grad():
                role.velocity(*inputs)

        return self._measured(work)

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradient of every weight, on the CPU."""
        role, inputs = self._role()
        role.backward(role.velocity(*inputs).square().mean(), last=True)
        return {key: p.grad.cpu() for key, p in role.network.named_parameters() if p.grad is not None}

    def both(self) -> dict[str, Any]:
        role, inputs = self._role()

        def work() -> None:
            role.backward(role.velocity(*inputs).square().mean(), last=True)
            role.network.zero_grad()

        return self._measured(work)

    def kernels(self) -> dict[str, dict[str, Any]]:
        """Return time, share and number of calls of the largest kernels of a pass and its backward pass, by name."""
        device, (role, inputs) = self._bench.mesh.device, self._role()
        on_device = device.type != "cpu"

        def work() -> None:
            role.backward(role.velocity(*inputs).square().mean(), last=True)
            role.network.zero_grad()

        seconds(device, work)  # compiles
        activity = ProfilerActivity.CUDA if on_device else ProfilerActivity.CPU
        with profile(activities=[activity]) as profiler:
            seconds(device, work)
        times = {
            row.key: (row.self_device_time_total if on_device else row.self_cpu_time_total, row.count)
            for row in profiler.key_averages()
        }
        total = sum(microseconds for microseconds, _ in times.values())
        largest = sorted(times.items(), key=lambda row: -row[1][0])[:KERNELS]
        return {name: {"ms": us / 1e3, "share": us / total, "calls": count} for name, (us, count) in largest if us}

    def _measured(self, work: Callable[[], None]) -> dict[str, Any]:
        taken, meter = fastest(self._bench.mesh.device, work), Meter(self._bench.mesh.device)
        with meter.measure():
            work()
        return self._bench.rate(taken, meter.flops, meter.tokens)

    def _role(self) -> tuple[Trainable, tuple[Tensor, Tensor, Condition]]:
        mesh, size = self._bench.mesh, self._bench.scale.architecture
        model = WanModel.open(self._bench.model, "transformer")
        how: dict[str, Any] = {"compile": self._compile, "recompute": self._recompute, "half_passes": True}
        backbone = Backbone(model, mesh, trained=True, adapters=self._adapters, **how)
        if self._adapters:  # their second factors begin at zero, which would hide the gradients of the first ones
            torch.manual_seed(0)
            for weight in backbone.weights("student").values():
                nn.init.normal_(weight, std=SPREAD)
        role = Trainable("student", backbone, TrainableConfig(precision="bf16"))
        draw = torch.Generator(mesh.device).manual_seed(0)
        x = torch.randn(1, *self._video.latent_shape, device=mesh.device, generator=draw)
        text = torch.randn(1, size.text_tokens, size.text_dim, device=mesh.device, generator=draw)
        return role, (x, torch.full((1,), 0.5, dtype=torch.float64), Condition({"text": text}))


Weights = list[tuple[Tensor, Tensor]]


def three_products(x: Tensor, weights: Weights) -> tuple[Tensor, ...]:
    """Return Q, K and V of the same tokens, as runs compute them."""
    return tuple(nn.functional.linear(x, *pair) for pair in weights)


def wide_product(x: Tensor, weights: Weights) -> tuple[Tensor, ...]:
    """Return the same of one product, with weights that are copied into one matrix in every pass."""
    weight, bias = (torch.cat(parts) for parts in zip(*weights, strict=True))
    return nn.functional.linear(x, weight, bias).chunk(len(weights), -1)


PROJECTIONS = {"three products": three_products, "one wide product": wide_product}


def _projections(bench: Bench, video: Video, project: Callable[..., tuple[Tensor, ...]]) -> dict[str, Any]:
    """Measure forward and backward of the products of queries, keys and values in bf16."""
    size, how = bench.scale.architecture.width, {"device": bench.mesh.device, "dtype": torch.bfloat16}
    x = torch.randn(1, video.tokens, size, requires_grad=True, **how)
    weights = [tuple(torch.randn(*s, requires_grad=True, **how) for s in ((size, size), (size,))) for _ in range(3)]
    inputs, gradients = [x, *(one for pair in weights for one in pair)], [torch.randn_like(x) for _ in weights]

    def work() -> None:
        torch.autograd.grad(project(x, weights), inputs, gradients)

    return bench.rate(fastest(bench.mesh.device, work), 3 * 3 * 2 * video.tokens * size**2, video.tokens)


def _noise(bench: Bench, *, small: bool) -> dict[str, Any]:
    """Measure the noise of one sample; the kernel is compiled before."""
    device, shape = bench.mesh.device, bench.scale.large.latent_shape
    with patch.dict(philox.COMPILED, clear=True):
        if not small:
            compile_noise(device.type)
        return {"ms": 1000 * fastest(device, lambda: Streams(0, 0, device).noise("noise", [0], shape))}


def _kernels(bench: Bench, video: Video) -> list[str]:
    known = attention_order("flash", bench.mesh.device) if bench.mesh.device.type in ("cpu", "cuda") else []
    return [kernel for kernel in known if kernel != "math" or video.tokens <= QUADRATIC_TOKENS]


def _is_installed(bench: Bench, kernel: str) -> bool:
    try:
        attention_order(kernel, bench.mesh.device)
    except UserError:
        return False
    return True


@contextmanager
def _attention_kernel(bench: Bench, kernel: str) -> Iterator[None]:
    """Use a kernel inside, and the default order of kernels after it."""
    use_attention(kernel, bench.mesh.device)
    try:
        yield
    finally:
        use_attention("auto", bench.mesh.device)


def _attention(bench: Bench, video: Video, kernel: str) -> dict[str, Any]:
    """Measure forward and backward of one self-attention in bf16."""
    size, device = bench.scale.architecture, bench.mesh.device
    shape = (1, size.heads, video.tokens, size.head_dim)
    parts = [torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]

    def work() -> None:
        nn.functional.scaled_dot_product_attention(*parts).sum().backward()

    with _attention_kernel(bench, kernel):
        taken = fastest(device, work)
    return bench.rate(taken, 3 * 4 * size.width * video.tokens**2, video.tokens)


def _gradients(bench: Bench, video: Video, *, compile: bool, rank: int = 0) -> dict[str, Any]:
    """Compare the gradients of all weights, or of adapters, with those of uncompiled blocks."""
    expected = _Passes(bench, video, "full", rank=rank).gradients()
    return _differences(_Passes(bench, video, "selective", compile=compile, rank=rank).gradients(), expected)


def _attention_gradients(bench: Bench, tokens: int, head_dim: int, kernel: str) -> dict[str, Any]:
    """Compare the gradients of queries, keys and values in bf16 with those of products in float32."""
    device, found = bench.mesh.device, []
    draw = torch.Generator(device).manual_seed(0)
    shape = (1, bench.scale.architecture.heads, tokens, head_dim)
    drawn = [torch.randn(shape, device=device, generator=draw).bfloat16() for _ in range(3)]
    for dtype, chosen in ((torch.bfloat16, kernel), (torch.float32, "math")):
        parts = {name: x.to(dtype, copy=True).requires_grad_() for name, x in zip("qkv", drawn, strict=True)}
        with _attention_kernel(bench, chosen):
            nn.functional.scaled_dot_product_attention(*parts.values()).square().mean().backward()
        found.append({name: x.grad.float() for name, x in parts.items() if x.grad is not None})
    return _differences(*found)


def _differences(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, Any]:
    """Return the largest relative difference of a gradient, and whose it is; one that is not finite differs by inf."""
    differences = {key: float((found[key] - g).norm() / g.norm()) for key, g in expected.items()}
    differences = {key: d if math.isfinite(d) else math.inf for key, d in differences.items()}
    worst = max(differences, key=lambda key: differences[key])
    whole = sum(float((found[key] - g).square().sum()) for key, g in expected.items())
    norm = sum(float(g.square().sum()) for g in expected.values())
    return {
        "gradient_difference": differences[worst],
        "worst_weight": worst,
        "whole_difference": math.sqrt(whole / norm),
    }


def _decode(bench: Bench, config: EncoderConfig) -> dict[str, Any]:
    """Measure the decoding of one sample, without gradient."""
    device = bench.mesh.device
    codec = WanCodec.load(bench.model, device, config)
    draw = torch.Generator(device).manual_seed(0)
    latents = torch.randn(1, *bench.scale.small.latent_shape, device=device, generator=draw)

    @torch.no_grad()
    def work() -> None:
        codec.decode(latents)

    return {"ms": 1000 * fastest(device, work), "peak_gib": peak_memory(device)}


def _run(bench: Bench, method: str, video: Video, flags: list[str]) -> Built:
    prompts = bench.out / "prompts.txt"
    prompts.write_text("a red ball rolls over green grass\n")
    words = ["--method", method, "--recipe", "wan2.1-1.3b", "--student.path", str(bench.model), "--seed", "0"]
    words += ["--validate-every", "0", "--steps", "1000", "--encoders.no-offload", *video.flags]
    words += [] if "--data.path" in flags else ["--prompts", str(prompts)]
    if method == "self_forcing":  # the recipe's teacher has 14B
        words += ["--teacher.path", str(bench.model), "--critic.path", str(bench.model)]
    words += ["--reward.path", "tiny"] if method in ("dance_grpo", "diffusion_nft") else []

    def random_clips(*_settings: object, **_more: object) -> Clips:
        return Clips(("a red ball",), torch.randn(1, *video.latent_shape, device=bench.mesh.device))

    with patch.object(data_plan, "check_tiny_clips"), patch.object(building, "render_clips", random_clips):
        return building.build(parse([*words, *flags]), bench.mesh)


def _step(bench: Bench, method: str, video: Video, flags: list[str]) -> dict[str, Any]:
    """Measure a training step that compiles nothing, and the model calls of the next repeated without the trainer."""
    device, built = bench.mesh.device, _run(bench, method, video, flags)
    try:
        begun = time.monotonic()
        step = _compiled(built)
        warm = time.monotonic() - begun
        _forget_peak(device)
        meter = Meter(device)
        with meter.measure():
            built.trainer.step(step)
        phases = meter.seconds()
        found = bench.rate(sum(phases.values()), meter.flops, meter.tokens) | {"warm_seconds": warm}
        calls: list[Call] = []
        with recorded(calls):
            recorded_step = seconds(device, lambda: built.trainer.step(step + 1))
        bare = seconds(device, lambda: [call.repeat() for call in calls])
    finally:
        built.close()
    shares = {phase: spent / sum(phases.values()) for phase, spent in phases.items()}
    return found | {"calls": len(calls), "over_bare_calls": recorded_step / bare, "phases": shares}


def _compiled(built: Built) -> int:
    """Train until a step makes no graph, as steps differ in batch sizes; return the number of the next."""
    counted = torch._dynamo.utils.counters["stats"]
    for step in range(WARM):
        before = counted["unique_graphs"]
        built.trainer.step(step)
        if counted["unique_graphs"] == before:
            break
    return step + 1


def _log_ratio(bench: Bench, flags: list[str]) -> dict[str, Any]:
    built, found = _run(bench, "dance_grpo", bench.scale.small, flags), []

    def note(_check: OnPolicyCheck, replay: Replay, _s: int) -> None:
        spread = (2 * replay.kl_old.detach().double() / replay.elements).sqrt()
        found.append((replay.ratio.detach().double().abs().cpu(), spread.cpu(), min(replay.clip)))

    def unrefused(_update: PolicyUpdate, *_facts: object) -> dict[str, float]:
        return {}

    try:
        with patch.object(OnPolicyCheck, "update", note), patch.object(PolicyUpdate, "_rounding", unrefused):
            built.trainer.step(0)
    finally:
        built.close()
    ratios, spreads = (torch.cat([row[part] for row in found]) for part in (0, 1))
    clip = found[0][2]
    return {
        "largest_log_ratio": float(ratios.max()),
        "noise_floor": float(spreads.max()),
        "clip_range": clip,
        "clipped_share": float((ratios > clip).double().mean()),
    }


def _in_words(found: dict[str, Any]) -> str:
    """Return a row's figures in one line."""
    if words := found.get("failed") or found.get("skipped"):
        return words
    parts = {
        "ms": "{:.1f} ms",
        "share": "{:.1%}",
        "calls": "{} calls",
        "model_tflop": "{:.3g} TFLOP",
        "mfu": "MFU {:.1%}",
        "tokens_per_second": "{:.3g} tokens/s",
        "peak_gib": "peak {:.1f} GiB",
        "over_bare_calls": "{:.3f} of its calls alone",
        "warm_seconds": "{:.0f} s of steps before it",
        "gradient_difference": "gradients differ by at most {:.2g} of their norm",
        "worst_weight": "in {}",
        "whole_difference": "all together by {:.2g}",
        "largest_log_ratio": "largest log-ratio {:.2g}",
        "noise_floor": "largest noise floor {:.2g}",
        "clip_range": "clip range {:g}",
        "clipped_share": "{:.1%} of the transitions clipped",
    }
    said = [form.format(found[key]) for key, form in parts.items() if found.get(key) is not None]
    shares = sorted(found.get("phases", {}).items(), key=lambda phase: -phase[1])
    return ", ".join([*said, *(f"{phase} {share:.0%}" for phase, share in shares if share >= 0.01)])


def markdown(facts: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """Return the tables for docs/performance.md."""
    versions = facts["versions"]
    lines = [f"{facts['device']}, torch {versions['torch']}, {facts['time'][:10]}, `{facts['command']}`."]
    for section in dict.fromkeys(row["section"] for row in rows):
        lines += ["", f"| {section} | measured |", "| --- | --- |"]
        lines += [f"| {row['name']} | {_in_words(row)} |" for row in rows if row["section"] == section]
    return "\n".join(lines) + "\n"


def prepare(out: Path, model: Path, scale: Scale, command: str) -> None:
    """Write the random weights, and the facts about this machine into bench.json."""
    mesh = Mesh.join("auto")
    facts = environment([], 0, 0, mesh)
    facts |= {"command": command, "time": datetime.now(UTC).isoformat(timespec="seconds")}
    _write(out, facts, [])
    write(model, scale.architecture, mesh.device)


def measure(section: str, out: Path, model: Path, scale: Scale, end: float) -> None:
    """Add the rows of one section to bench.json."""
    mesh = Mesh.join("auto")
    use_attention("auto", mesh.device)
    facts, rows = _read(out)
    SECTIONS[section](Bench(out, model, scale, mesh, end, facts, rows))


def _read(out: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    held = json.loads((out / "bench.json").read_text())
    return held["environment"], held["rows"]


def _in_process(section: str, out: Path, end: float, work: Callable[..., None], *arguments: object) -> bool:
    """Run the work in a process of its own; if it does not end well and in time, add a row that says so."""
    process = multiprocessing.get_context(START).Process(target=work, args=arguments)
    process.start()
    process.join(max(0.0, end + GRACE - time.monotonic()))
    late = process.is_alive()
    if late:
        process.kill()
        process.join()
    if process.exitcode == 0:
        return True
    failure = "stopped at its time limit" if late else f"its process ended with exit code {process.exitcode}"
    facts, rows = _read(out)
    _write(out, facts, [*rows, {"section": section, "name": "the rest of the section", "failed": failure}])
    Console().print(f"{section}: {failure}", markup=False, highlight=False, soft_wrap=True)
    return False


def main(out: Path, toy: bool = False, only: tuple[str, ...] = (), minutes: float = 7.0) -> None:
    """Measure the trainer on this machine's accelerator.

    Args:
        out: Folder for bench.json and bench.md.
        toy: Take a narrow network and small videos.
        minutes: Time after which no further row is begun.
    """
    if unknown := sorted(set(only) - set(SECTIONS)):
        sys.exit(f"--only {' '.join(unknown)}: the sections are {', '.join(SECTIONS)}")
    end = time.monotonic() + 60 * minutes
    out.mkdir(parents=True, exist_ok=True)
    scale = SMALL if toy else FULL
    command = shlex.join(["python", "scripts/bench_gpu.py", *sys.argv[1:]])
    _write(out, {}, [])
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "wan"
        if _in_process("weights", out, end, prepare, out, model, scale, command):
            sections = only or tuple(SECTIONS)
            for place, section in enumerate(sections):
                begun = time.monotonic()
                share = SHARES[section] / sum(SHARES[later] for later in sections[place:])
                until = begun + share * max(0.0, end - begun)
                _in_process(section, out, until, measure, section, out, model, scale, until)
    if any("failed" in row for row in _read(out)[1]):
        sys.exit(1)


if __name__ == "__main__":
    tyro.cli(main)
