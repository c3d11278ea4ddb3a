"""Computed cost of Wan2.1's networks on a GPU: FLOPs, seconds at a given share of the peak, bytes and memory.

FLOPs of the transformer are counted as `unified_trainer/meter.py` counts them. Nothing in this file is measured on a
GPU; assumptions are constants with a comment, or fields of `Gpu`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipeline import Load

from unified_trainer.errors import UserError
from unified_trainer.sizing.flops import TransformerSize, pass_flops

HEAD = 128  # channels of an attention head, in both sizes
FFN = {1536: 8960, 5120: 13824}  # width of the feed-forward layers by that of the network: configs of the folders
TEXT_TOKENS, CHANNELS, PATCH = 512, 16, 4  # equal in both sizes
TIME_STRIDE, SPACE_STRIDE = 4, 8  # of the VAE

# Decoding by the VAE, FLOPs for each latent position: torch's FLOP counter on the decoder at 480 x 832 pixels.
DECODE_FIRST, DECODE_NEXT = 4.352e12 / 6240, 13.55e12 / 6240  # of the first latent frame, and of each later one
VAE_BYTES = 0.51e9  # fp32
DECODE_BYTES = 8e9 / (480 * 832)  # assumed: activations of the decoder for each pixel of a frame, fp32
# HPSv3 on a frame, assumed: 512 tokens through 6.5e9 weights of the language model, 1008 patches through 0.68e9.
HPSV3_FLOPS, HPSV3_BYTES = 2 * (512 * 6.5e9 + 1008 * 0.68e9), 16.5e9
TEXT_FLOPS = 2 * TEXT_TOKENS * 5.7e9  # UMT5-XXL on a prompt
BF16, FP32 = 2, 4  # bytes
# Activations of a block, in multiples of 2 n d bytes for n tokens of width d, plus 2 f / d for the feed-forward layer.
KEPT_BLOCK = 34.0  # for its backward pass, counted on the tensors that autograd saves
PASSING_BLOCK = 10.0  # assumed: alive at a time in a pass without gradient
RESERVE = 3e9  # assumed: libraries, communication buffers and fragmentation


@dataclass(frozen=True)
class Gpu:
    """A GPU and how much of its peak the work reaches."""

    memory: float = 80e9
    """Memory of one GPU in bytes."""
    peak: float = 989e12
    """Dense bf16 FLOP/s: H100 and H200 SXM."""
    mfu: float = 0.4
    """Share of the peak that the transformer and the scorer reach; recomputed activations count as work (assumed)."""
    vae_flops: float = 100e12
    """FLOP/s of the VAE's convolutions in fp32 storage and TF32 products (assumed)."""
    sync: float = 2e9
    """Bytes per second of gathering and publishing the weights, and again of a worker's copy (assumed)."""

    @property
    def flops(self) -> float:
        return self.peak * self.mfu


@dataclass(frozen=True)
class Network:
    """Wan's transformer; with a rank, adapters are on all its attention and feed-forward matrices."""

    width: int
    layers: int
    ffn: int
    rank: int = 0

    @property
    def size(self) -> TransformerSize:
        return TransformerSize(self.width, self.layers, self.ffn)

    @property
    def parameters(self) -> int:
        """Number of weights, without adapters."""
        return self.size.parameters

    @property
    def adapter(self) -> int:
        """Number of adapter weights."""
        return self.size.adapter(self.rank)

    @property
    def trained(self) -> int:
        return self.adapter or self.parameters

    def forward(self, tokens: int) -> float:
        """Return the FLOPs of one pass over a sample."""
        return pass_flops(self.size, tokens, TEXT_TOKENS, rank=self.rank).forward

    def backward(self, tokens: int) -> float:
        """Return the FLOPs of its backward pass: a matrix that is not trained has no gradient of its own."""
        return pass_flops(self.size, tokens, TEXT_TOKENS, rank=self.rank).backward


@dataclass(frozen=True)
class Video:
    """The size of a video."""

    frames: int
    height: int
    width: int

    @property
    def latent_frames(self) -> int:
        return (self.frames - 1) // TIME_STRIDE + 1

    @property
    def latent_positions(self) -> int:
        """Positions of one latent frame."""
        return (self.height // SPACE_STRIDE) * (self.width // SPACE_STRIDE)

    @property
    def tokens(self) -> int:
        return self.latent_frames * self.latent_positions // PATCH

    @property
    def decode_flops(self) -> float:
        return self.latent_positions * (DECODE_FIRST + (self.latent_frames - 1) * DECODE_NEXT)

    @property
    def latent_bytes(self) -> int:
        return FP32 * CHANNELS * self.latent_frames * self.latent_positions


@dataclass(frozen=True)
class Workload:
    """A training step of dance_grpo on a model, by the settings of its recipe."""

    network: Network
    video: Video
    prompts: int
    num_samples: int
    item: int  # samples of a work item
    update_batch: int  # samples of a backward pass
    calls: int  # network calls of the sampler
    transitions: int  # trained ones
    branches: int  # passes of a network call: 2 with guidance
    scored_frames: int
    recompute: bool
    ema: bool

    @classmethod
    def of(cls, fits: Mapping[str, int], settings: Mapping[str, Any]) -> "Workload":
        """Read the section `fits` of a recipe, and its settings for dance_grpo; UserError for an unknown model."""
        width = HEAD * fits["num_attention_heads"]
        if fits["networks"] != 1 or width not in FFN:
            raise UserError("costs are known for the models of Wan2.1 alone: name their recipes")
        student, sampler, algorithm = settings["student"], settings["sampler"], settings["algorithm"]
        video = Video(*(settings["video"][key] for key in ("frames", "height", "width")))
        rank = student.get("adapter", {}).get("rank", 0)
        return cls(
            network=Network(width, fits["num_layers"], FFN[width], rank),
            video=video,
            prompts=algorithm["num_prompts"],
            num_samples=algorithm["num_samples"],
            item=algorithm["rollout_batch"],
            update_batch=algorithm["update_batch"],
            calls=sampler["num_steps"],
            transitions=max(1, round(algorithm["timestep_fraction"] * (sampler["num_steps"] - 1))),
            branches=1 if sampler["guidance_scale"] == 1 else 2,
            scored_frames=math.ceil(video.frames / settings["reward"]["frame_stride"]),
            recompute=student["activation_memory"] != "none",  # selective counts as full
            ema=student.get("ema_decay", 0) > 0,
        )

    @property
    def forward(self) -> float:
        """FLOPs of one network call on one sample."""
        return self.branches * self.network.forward(self.video.tokens)

    @property
    def train(self) -> float:
        """FLOPs of training on one transition of one sample."""
        backward = self.branches * self.network.backward(self.video.tokens)
        return (2 if self.recompute else 1) * self.forward + backward

    @property
    def sync_bytes(self) -> int:
        """Bytes of the trained weights, fp32."""
        return FP32 * self.network.trained

    @property
    def rollout_bytes(self) -> int:
        """Bytes of one sample: its states before and after every stochastic transition, and its clean latents."""
        return (self.calls + 1) * self.video.latent_bytes

    def load(self, gpu: Gpu, ranks: int, prompts: int) -> Load:
        """Return the seconds of a step with this number of prompts; every prompt is encoded once."""
        sync = self.sync_bytes / gpu.sync
        return Load(
            samples=prompts * self.num_samples,
            item=self.item,
            rollout=self.calls * self.forward / gpu.flops,
            reward=self.video.decode_flops / gpu.vae_flops + self.scored_frames * HPSV3_FLOPS / gpu.flops,
            train=self.transitions * self.train / gpu.flops,
            fixed=math.ceil(prompts / ranks) * TEXT_FLOPS / gpu.flops,
            publish=sync,
            fetch=sync,
        )

    def worker_memory(self, *, scores: bool, weight_bytes: int = BF16) -> float:
        """Return the bytes of a rollout worker: the whole network, one item, the VAE and the scorer if it scores."""
        tokens = self.item * self.branches * self.video.tokens
        weights = weight_bytes * self.network.parameters + FP32 * self.network.adapter
        passing = BF16 * tokens * (PASSING_BLOCK * self.network.width + 2 * self.network.ffn)
        decoding = DECODE_BYTES * self.video.height * self.video.width * self.item + VAE_BYTES if scores else 0.0
        made = self.item * self.rollout_bytes
        return weights + max(passing, decoding) + made + (HPSV3_BYTES if scores else 0.0) + RESERVE

    def rank_memory(self, ranks: int, prompts: int, *, colocated: bool) -> float:
        """Return the bytes of a training rank: its shard, two gathered blocks, activations and its samples.

        Weights, gradients, moments and EMA are sharded over all ranks.
        """
        network, tokens = self.network, self.update_batch * self.branches * self.video.tokens
        unit = BF16 * tokens * network.width
        trained = (4 + self.ema) * FP32 * network.trained
        shard = (trained + (BF16 * network.parameters if network.rank else 0)) / ranks
        gathered = 2 * FP32 * network.parameters / network.layers
        block = unit * KEPT_BLOCK + 2 * BF16 * tokens * network.ffn
        activations = network.layers * unit + block if self.recompute else network.layers * block
        samples = math.ceil(prompts * self.num_samples / ranks) * self.rollout_bytes
        extra = HPSV3_BYTES + VAE_BYTES if colocated else 0.0
        return shard + gathered + activations + samples + extra + RESERVE
