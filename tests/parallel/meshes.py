"""What the ranks of tests/parallel/test_meshes.py do, two of them or four.

The test compares with the same functions on one rank. 9 tokens do not divide by two sequence ranks.
"""

import dataclasses
import itertools
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from helpers import CAPTIONS, WAN, gradients, reward_of, reward_parts, small_causal, small_model, tiny_codec

from unified_trainer.data.clips import Clips
from unified_trainer.data.loader import Loader
from unified_trainer.methods.dance_grpo import DanceGRPO, DanceGRPOConfig
from unified_trainer.methods.dance_ppo import DancePPO, DancePPOConfig
from unified_trainer.methods.dmd2 import DMD2, DMD2Config
from unified_trainer.methods.finetune import Finetune, FinetuneConfig
from unified_trainer.methods.self_forcing import SelfForcing, SelfForcingConfig
from unified_trainer.models.base import VideoModel
from unified_trainer.models.wan.model import WanModel
from unified_trainer.numerics.chunks import ChunkConfig
from unified_trainer.parallel.fsdp import full
from unified_trainer.parallel.mesh import Mesh, ParallelConfig
from unified_trainer.parallel.random import Streams
from unified_trainer.roles.adapter import AdapterConfig
from unified_trainer.roles.backbone import Backbone
from unified_trainer.roles.causal import CausalStudent
from unified_trainer.roles.critic import Critic
from unified_trainer.roles.role import Frozen, RoleConfig, Trainable, TrainableConfig
from unified_trainer.roles.value import Value
from unified_trainer.run.trainer import Trainer
from unified_trainer.sampling.solver import SamplerConfig

SHAPE = (16, 3, 1, 3)
STEPS = 2
MESHES = {
    2: {
        "sharded": ParallelConfig(),
        "replicated": ParallelConfig(replicate=2),
        "sequence": ParallelConfig(sequence=2),
    },
    4: {
        "replicated and sharded": ParallelConfig(replicate=2),
        "sharded and sequence": ParallelConfig(sequence=2),
    },
}
METHODS = (
    "finetune",
    "dmd2",
    "dmd2 adapters",
    "self_forcing",
    "dance_grpo",
    "dance_ppo",
    "dance_ppo adapters",
    "dance_grpo in chunks",
)
# Sharded alone: those that test_two_ranks.py and OPTIONS do not have.
ON_TWO = (
    *itertools.product(["sharded"], ("dmd2 adapters", "self_forcing", "dance_ppo adapters")),
    *itertools.product(["replicated"], ("finetune", "dmd2 adapters", "dance_grpo")),
    *itertools.product(["sequence"], [method for method in METHODS if method != "dance_ppo adapters"]),
)
ON_FOUR = (
    ("replicated and sharded", "finetune"),
    ("sharded and sequence", "dmd2 adapters"),
    ("sharded and sequence", "self_forcing"),
)
# What must not change what finetune learns: the mesh, and the samples of a backward pass.
OPTIONS = {
    "accumulated by four": (ParallelConfig(), 1),
    "all at once": (ParallelConfig(), 4),
    "summed every time": (ParallelConfig(reduce_gradients="every"), 1),
    "kept gathered": (ParallelConfig(reshard_after_forward=False), 2),
    "offloaded": (ParallelConfig(offload_weights=True, offload_optimizer=True), 2),
    "weights offloaded": (ParallelConfig(offload_weights=True), 2),
    "moments offloaded": (ParallelConfig(offload_optimizer=True), 2),
}
# Far above rounding, so that AdamW does not turn a rounded gradient into a step of its own.
MOVING = {"learning_rate": 1e-3, "eps": 1e-2, "max_grad_norm": 1e3}
FEW = SamplerConfig(num_steps=3, guidance_scale=1.0, solver="sde")
# Chunks of one frame, each of three tokens; the last attends to one of the two before it.
FRAMES = ChunkConfig(chunk_frames=1, window_frames=1, context_noise=0.1)
GRPO = DanceGRPOConfig(num_prompts=2, num_samples=2, prompts_per_update=2, rollout_batch=2, timestep_fraction=1.0)


PPO = DancePPOConfig(
    num_prompts=4, prompts_per_update=4, rollout_batch=1, timestep_fraction=0.5, gae_lambda=0.8, value_clip=0.0
)


class RecordsGradients:
    """A role that keeps the whole gradient of every update."""

    gradients: list[dict[str, torch.Tensor]]

    def step(self) -> dict[str, float]:
        self.gradients.append({key: full(p.grad).clone() for key, p in self.weights.items() if p.grad is not None})
        return super().step()


class RecordingTrainable(RecordsGradients, Trainable):
    def __init__(self, *arguments) -> None:
        super().__init__(*arguments)
        self.gradients = []


class RecordingCausal(RecordsGradients, CausalStudent):
    def __init__(self, *arguments) -> None:
        super().__init__(*arguments)
        self.gradients = []


class RecordingCritic(RecordsGradients, Critic):
    def __init__(self, *arguments) -> None:
        super().__init__(*arguments)
        self.gradients = []
        with torch.no_grad():
            self._heads[""].weight.fill_(0.1)  # it starts from zero, with nothing to say to the student


class RecordingValue(RecordsGradients, Value):
    def __init__(self, *arguments) -> None:
        super().__init__(*arguments)
        self.gradients = []
        with torch.no_grad():
            self._heads[""].weight.fill_(0.1)


def own(name: str, kind: type, mesh: Mesh, model: VideoModel, **settings) -> Trainable:
    """A role that trains all weights."""
    return kind(name, Backbone(model, mesh, trained=True, **settings), TrainableConfig(**MOVING))


def finetune(mesh: Mesh, micro_batch: int = 2) -> tuple[Finetune, dict[str, Trainable], Clips]:
    student = own("student", RecordingTrainable, mesh, small_model())
    encoded = torch.randn(8, *SHAPE, generator=torch.Generator().manual_seed(7))
    clips = Clips(tuple(CAPTIONS[i % 3] for i in range(8)), encoded)
    config = FinetuneConfig(batch_size=8, micro_batch=micro_batch, caption_dropout=0.5)
    return Finetune(config, SamplerConfig(), student=student), {"student": student}, clips


def dmd2(mesh: Mesh, micro_batch: int = 1, student_every: int = 2) -> tuple[DMD2, dict[str, Trainable], Clips]:
    """With the GAN term, whose gradient goes through the critic to the samples."""
    student = own("student", RecordingTrainable, mesh, small_model())
    critic = own("critic", RecordingCritic, mesh, small_model(1))
    teacher = Frozen("teacher", Backbone(small_model(2), mesh), RoleConfig())
    return matching(student, teacher, critic, micro_batch, student_every)


def dmd2_adapters(mesh: Mesh, micro_batch: int = 1) -> tuple[DMD2, dict[str, Trainable], Clips]:
    """Student and critic as adapters of the teacher, activations recomputed."""
    backbone, config = two_adapters(mesh, "critic")
    student, critic = RecordingTrainable("student", backbone, config), RecordingCritic("critic", backbone, config)
    return matching(student, Frozen("teacher", backbone, RoleConfig()), critic, micro_batch, 1)


def two_adapters(mesh: Mesh, other: str) -> tuple[Backbone, TrainableConfig]:
    """A network with adapters of the student and of another role."""
    adapter = AdapterConfig(rank=2)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Already found a `peft_config`")  # two adapters are the point
        adapters = {"student": adapter, other: adapter}
        backbone = Backbone(small_model(layers=3), mesh, adapters=adapters, recompute="full")
    return backbone, TrainableConfig(**MOVING, adapter=adapter)


def matching(student: Trainable, teacher: Frozen, critic: Critic, micro_batch: int, student_every: int):
    config = DMD2Config(
        batch_size=4,
        micro_batch=micro_batch,
        guidance_scale=2.0,
        student_every=student_every,
        gan_weight=0.1,
        gan_critic_weight=0.1,
    )
    method = DMD2(config, FEW, student=student, teacher=teacher, critic=critic)
    encoded = torch.randn(4, *SHAPE, generator=torch.Generator().manual_seed(8))
    return method, {"student": student, "critic": critic}, Clips(CAPTIONS, encoded)


def self_forcing(mesh: Mesh, micro_batch: int = 1) -> tuple[SelfForcing, dict[str, Trainable], Clips]:
    """Exits of their own for the chunks, activations recomputed when the cache is further on."""
    student = own("student", RecordingCausal, mesh, small_causal(), recompute="selective")
    critic = own("critic", RecordingCritic, mesh, small_model(1))
    teacher = Frozen("teacher", Backbone(small_model(2), mesh), RoleConfig())
    config = SelfForcingConfig(
        batch_size=4, micro_batch=micro_batch, guidance_scale=2.0, student_every=2, same_step_across_chunks=False
    )
    sampler = dataclasses.replace(FEW, guidance_scale=2.0, chunks=FRAMES)
    method = SelfForcing(config, sampler, student=student, teacher=teacher, critic=critic)
    return method, {"student": student, "critic": critic}, Clips(CAPTIONS, torch.zeros(4, *SHAPE))


def dance_grpo(mesh: Mesh, micro_batch: int = 1) -> tuple[DanceGRPO, dict[str, Trainable], Clips]:
    return policy_gradient(own("student", RecordingTrainable, mesh, small_model()), ChunkConfig(), micro_batch)


def dance_grpo_in_chunks(mesh: Mesh, micro_batch: int = 1) -> tuple[DanceGRPO, dict[str, Trainable], Clips]:
    """Updates attend to the clean chunks in one masked pass, every token at its own noise level."""
    return policy_gradient(
        own("student", RecordingCausal, mesh, small_causal()), ChunkConfig(chunk_frames=1), micro_batch
    )


def policy_gradient(student: Trainable, chunks: ChunkConfig, micro_batch: int):
    config = dataclasses.replace(GRPO, update_batch=micro_batch)
    sampler = SamplerConfig(num_steps=3, guidance_scale=2.0, chunks=chunks)
    clips = Clips(CAPTIONS, torch.zeros(4, *SHAPE))
    loader = Loader(clips, tiny_codec(), config.plan(), SHAPE, "", 0, student._mesh)
    parts = reward_parts(DanceGRPO, config, sampler, student, reward_of(), loader)
    return DanceGRPO(config, sampler, student=student, **parts), {"student": student}, clips


def dance_ppo(mesh: Mesh, micro_batch: int = 1) -> tuple[DancePPO, dict[str, Trainable], Clips]:
    student = own("student", RecordingTrainable, mesh, small_model())
    return with_values(student, own("value", RecordingValue, mesh, small_model(1, layers=4)), micro_batch)


def dance_ppo_adapters(mesh: Mesh, micro_batch: int = 1) -> tuple[DancePPO, dict[str, Trainable], Clips]:
    """Student and value function as adapters of one network, activations recomputed."""
    backbone, config = two_adapters(mesh, "value")
    student, value = RecordingTrainable("student", backbone, config), RecordingValue("value", backbone, config)
    return with_values(student, value, micro_batch)


def with_values(student: Trainable, value: Value, micro_batch: int):
    config = dataclasses.replace(PPO, update_batch=micro_batch)
    sampler, clips = SamplerConfig(num_steps=3, guidance_scale=2.0), Clips(CAPTIONS, torch.zeros(4, *SHAPE))
    loader = Loader(clips, tiny_codec(), config.plan(), SHAPE, "", 0, student._mesh)
    parts = reward_parts(DancePPO, config, sampler, student, reward_of(), loader)
    roles = {"student": student, "value": value}
    return DancePPO(config, sampler, **roles, **parts), roles, clips


PARTS: dict[str, Callable] = {
    "finetune": finetune,
    "dmd2": dmd2,
    "dmd2 adapters": dmd2_adapters,
    "self_forcing": self_forcing,
    "dance_grpo": dance_grpo,
    "dance_ppo": dance_ppo,
    "dance_ppo adapters": dance_ppo_adapters,
    "dance_grpo in chunks": dance_grpo_in_chunks,
}


def trainer(mesh: Mesh, method, roles, clips) -> Trainer:
    loader = Loader(clips, tiny_codec(), method.config.plan(), SHAPE, "", 0, mesh)
    return Trainer(method, roles, loader, mesh, seed=0)


def trajectory(mesh: Mesh, method, roles, clips) -> dict[str, torch.Tensor]:
    """The gradients of every update of two training steps, and the steps' metrics."""
    one = trainer(mesh, method, roles, clips)
    result = {}
    for step in range(STEPS):
        metrics = one.step(step)
        result |= {f"metrics/{step}/{key}": torch.tensor(value, dtype=torch.float64) for key, value in metrics.items()}
    for name, role in roles.items():
        for i, given in enumerate(role.gradients):
            result |= {f"gradients/{name}/{i}/{key}": gradient for key, gradient in given.items()}
    return result


def samples_and_noise(mesh: Mesh) -> tuple[torch.Tensor, torch.Tensor]:
    """Which samples all ranks hold in a step, and the noise each of them draws for its own."""
    ids = trainer(mesh, *finetune(mesh)).loader.batch(0).sample_ids
    noise = Streams(0, 0).noise("initial", ids, SHAPE)
    return mesh.gather(torch.tensor(ids)), mesh.gather(noise)


def stale(mesh: Mesh) -> torch.Tensor:
    """Return the velocity after the weights changed, of a network that ran before the change."""
    role = own("student", RecordingTrainable, mesh, small_model())
    x_t = torch.randn(1, *SHAPE, generator=torch.Generator().manual_seed(0))
    cond = tiny_codec().encode_text([CAPTIONS[0]])
    with torch.no_grad():
        role.velocity(x_t, torch.tensor([0.5]), cond)
        for weight in role.network.parameters():
            weight.mul_(0.5)
        return role.velocity(x_t, torch.tensor([0.5]), cond)


def causal_passes(mesh: Mesh) -> dict[str, torch.Tensor]:
    """Return passes of a causal network over three frames, their gradients, and the bytes that its cache takes.

    It has four heads, so that each of two ranks has more than one: their order counts.
    """
    backbone = Backbone(small_causal(heads=4), mesh, trained=True, recompute="full")
    model, cond = backbone.model, tiny_codec().encode_text(CAPTIONS[:2])
    draw = torch.Generator().manual_seed(0)
    x_t, clean = torch.randn(2, 2, *SHAPE, generator=draw)
    weight, levels = torch.randn(2, *SHAPE, generator=draw), torch.rand(2, 3, dtype=torch.float64, generator=draw)
    x_t.requires_grad_()
    cache, chunks = model.open_cache(FRAMES), []
    for i in range(3):
        chunks.append(model.velocity_cached(x_t[:, :, i : i + 1], levels[:, i], cond, cache))
        model.append(clean[:, :, i : i + 1], cond, cache)
    found = {
        "cached": torch.cat(chunks, 2),
        "masked": model.velocity_masked(x_t, levels, cond, FRAMES),
        "forced": model.velocity_masked(x_t, levels, cond, FRAMES, clean),
    }
    for name, velocity in found.copy().items():
        (velocity * weight).mean().backward()
        grads = gradients(model.network) | {"x_t": x_t.grad}
        found |= {f"gradients of {name}/{key}": value.clone() for key, value in grads.items()}
        x_t.grad = None
        model.network.zero_grad()
    held = [part for chunk in cache.past for pair in chunk.own for part in pair]
    found["held"] = torch.tensor(sum(part.numel() * part.element_size() for part in held))
    found["said"] = torch.tensor(2 * model.cache_bytes(SHAPE, FRAMES, torch.float32))
    return {key: value.detach() for key, value in found.items()}


def disagreement(mesh: Mesh) -> str:
    """Return the error of ranks that follow different update schedules."""
    one = trainer(mesh, *dmd2(mesh, student_every=1 + mesh.rank))
    one.step(0)
    try:
        one.step(1)
    except RuntimeError as error:
        return str(error)
    return ""


def read(mesh: Mesh) -> dict[str, torch.Tensor]:
    """The tiny world's weights as the ranks read them, and how much of them this rank holds."""
    network = Backbone(WanModel.open(WAN, "transformer"), mesh, trained=True).model.network
    share = sum(weight.to_local().numel() for weight in network.parameters())
    whole = sum(weight.numel() for weight in network.parameters())
    return {key: full(weight) for key, weight in network.state_dict().items()} | {"share": torch.tensor(share / whole)}


def on_two(mesh: Mesh) -> tuple[dict[str, torch.Tensor], str]:
    """Return the results of two ranks that hold on any mesh."""
    found = {f"read/{key}": value for key, value in read(mesh).items()}
    for name, (config, micro_batch) in OPTIONS.items():
        one = Mesh.join("cpu", config)
        rows = trajectory(one, *finetune(one, micro_batch))
        found |= {f"options/{name}/{key}": value for key, value in rows.items()}
    found |= {f"causal/{key}": value for key, value in causal_passes(Mesh.join("cpu", MESHES[2]["sequence"])).items()}
    return found, disagreement(mesh)


def work(folder: Path) -> None:
    torch.set_num_threads(1)
    first = Mesh.join("cpu")
    tensors, words = {}, ""
    for name, config in MESHES[first.size].items():
        mesh = Mesh.join("cpu", config)
        for method in METHODS:
            if (name, method) in (ON_TWO if first.size == 2 else ON_FOUR):
                found = trajectory(mesh, *PARTS[method](mesh))
                tensors |= {f"{name}/{method}/{key}": value for key, value in found.items()}
        tensors[f"{name}/samples"], tensors[f"{name}/noise"] = samples_and_noise(mesh)
        tensors[f"{name}/stale"] = stale(mesh)
    if first.size == 2:
        found, words = on_two(first)
        tensors |= found
    if first.is_main:
        folder.mkdir(exist_ok=True)
        save_file({key: value.contiguous() for key, value in tensors.items()}, folder / "tensors.safetensors")
        (folder / "words.txt").write_text(words)
    first.barrier()
