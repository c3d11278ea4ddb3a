"""Trainers of all methods over the small network, each role as one network or as two experts."""

import dataclasses
import functools
import json
from pathlib import Path

import torch
from helpers import (
    ALONE,
    CAPTIONS,
    WAN,
    Recording,
    RecordingCritic,
    RecordingStudent,
    copy_of,
    replicated,
    reward_of,
    reward_parts,
    rewrite,
    small_model,
    tiny_codec,
)

from unified_trainer.data.clips import Clips
from unified_trainer.data.loader import Loader
from unified_trainer.methods.dance_grpo import DanceGRPO, DanceGRPOConfig
from unified_trainer.methods.dmd2 import DMD2, DMD2Config
from unified_trainer.methods.finetune import Finetune, FinetuneConfig
from unified_trainer.methods.self_forcing import SelfForcing, SelfForcingConfig
from unified_trainer.models.wan.causal import CausalWanModel
from unified_trainer.numerics.chunks import ChunkConfig
from unified_trainer.parallel.fsdp import full
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.roles.adapter import AdapterConfig
from unified_trainer.roles.backbone import Backbone
from unified_trainer.roles.experts import Balance, ExpertConfig, ExpertPair
from unified_trainer.roles.role import Frozen, RoleConfig, TrainableConfig
from unified_trainer.run.trainer import Trainer
from unified_trainer.sampling.solver import SamplerConfig

SHAPE = (16, 3, 1, 3)
BOUNDARY = 0.8  # of the noise levels 1, .857 and .6 of three steps, two are high
SDE = SamplerConfig(num_steps=3, solver="sde", guidance_scale=1.0)
POLICY = SamplerConfig(num_steps=4, guidance_scale=2.0)  # 1, .9, .75, .5
CAUSAL = dataclasses.replace(SDE, chunks=ChunkConfig(chunk_frames=1))
MATCHING = {"batch_size": 4, "micro_batch": 2, "guidance_scale": 2.0, "student_every": 1}
MATCHING |= {"gan_weight": 0.1, "gan_critic_weight": 0.1}
ADAPTER = AdapterConfig(rank=2)
STAYS = TrainableConfig(max_grad_norm=0.0)
# Far above rounding, so that AdamW does not turn a rounded gradient into a step of its own.
MOVES = TrainableConfig(learning_rate=1e-3, eps=1e-2, max_grad_norm=1e3, ema_decay=0.5)
CONFIGS = {
    "finetune": FinetuneConfig(batch_size=8, micro_batch=2, caption_dropout=0.5),
    "dmd2": DMD2Config(**MATCHING),
    "self_forcing": SelfForcingConfig(**MATCHING, same_step_across_chunks=False),
    "dance_grpo": DanceGRPOConfig(
        num_prompts=2, num_samples=2, prompts_per_update=2, rollout_batch=2, update_batch=1, timestep_fraction=1.0
    ),
}
ROLES = ("student", "teacher", "critic")


def networks(
    name: str,
    mesh: Mesh,
    seeds: tuple[int, ...],
    *,
    frozen: tuple[str, ...] = (),
    adapters: bool = False,
    causal: bool = False,
    boundary: float = BOUNDARY,
    offload: bool = False,
) -> Backbone | ExpertPair:
    """A role's only network, or two: of one seed for each."""

    def backbone(seed: int, keys: tuple[str, ...], trained: bool) -> Backbone:
        model = CausalWanModel(small_model(seed).network) if causal else small_model(seed)
        own = dict.fromkeys(keys if trained and adapters else (), ADAPTER)
        made = Backbone(model, mesh, trained=trained and not own, adapters=own, offload=offload and not trained)
        random = torch.Generator().manual_seed(5)
        for key in own:
            for inner, weight in made.weights(key).items():
                value = 0.3 * torch.randn(weight.shape, generator=random)
                if "lora_B" in inner:
                    weight.data.copy_(replicated(value, weight))
        return made

    learns = name != "teacher"
    if len(seeds) == 1:
        return backbone(seeds[0], (name,), learns)
    keys = tuple(f"{name}_{side}" for side in ("high", "low"))
    if adapters and seeds[0] == seeds[1]:  # two adapters over one base
        return ExpertPair(*[backbone(seeds[0], keys, learns)] * 2, boundary)
    sides = zip(seeds, keys, ("high", "low"), strict=True)
    return ExpertPair(*(backbone(seed, (key,), learns and side not in frozen) for seed, key, side in sides), boundary)


def trainer(
    method: str,
    *,
    two: tuple[str, ...] = (),
    equal: bool = False,
    mesh: Mesh = ALONE,
    moves: bool = False,
    role: TrainableConfig = STAYS,
    frozen: tuple[str, ...] = (),
    adapters: bool = False,
    offload: bool = False,
    sampler: SamplerConfig | None = None,
    expert_balance: Balance = "mixed",
    **settings,
) -> Trainer:
    """The roles in `two` have two experts, of equal weights if `equal`.

    Of the student's, those in `frozen` are not trained, and wait in CPU memory with `offload`. Student and critic have
    this `expert_balance`.
    """
    role = dataclasses.replace(role, expert_balance=expert_balance)
    if frozen:
        role = dataclasses.replace(role, **dict.fromkeys(frozen, ExpertConfig(trained=False)))
    causal = method == "self_forcing"
    made = {}
    for i, name in enumerate(ROLES):
        seeds = (i,) if name not in two else (i, i) if equal else (i, 10 + i)
        stays = frozen if name == "student" else ()
        chunked = causal and name == "student"
        made[name] = functools.partial(
            networks,
            name,
            mesh,
            seeds,
            frozen=stays,
            adapters=adapters,
            causal=chunked,
            offload=offload and bool(stays),
        )
    kind = RecordingStudent if causal else Recording
    student = kind("student", made["student"](), role, moves=moves)
    config = dataclasses.replace(CONFIGS[method], **settings)
    encoded = torch.randn(8, *SHAPE, generator=torch.Generator().manual_seed(7))
    clips = Clips(tuple(CAPTIONS[i % 4] for i in range(8)), encoded)
    loader = Loader(clips, tiny_codec(), config.plan(), SHAPE, "", 0, mesh)
    roles = {"student": student}
    if method == "finetune":
        algorithm = Finetune(config, sampler or SamplerConfig(), student=student)
    elif method == "dance_grpo":
        parts = reward_parts(DanceGRPO, config, sampler or POLICY, student, reward_of(), loader)
        algorithm = DanceGRPO(config, sampler or POLICY, student=student, **parts)
    else:
        learning = TrainableConfig(**{**vars(role), "high": ExpertConfig(), "low": ExpertConfig()})
        critic = RecordingCritic("critic", made["critic"](), learning, moves=moves)
        for head in critic._heads.values():
            for weight in head.parameters():
                weight.data.fill_(0.1)
        parts = {"student": student, "teacher": Frozen("teacher", made["teacher"](), RoleConfig()), "critic": critic}
        kinds = {"dmd2": (DMD2, SDE), "self_forcing": (SelfForcing, CAUSAL)}
        algorithm = kinds[method][0](config, sampler or kinds[method][1], **parts)
        roles["critic"] = critic
    return Trainer(algorithm, roles, loader, mesh, seed=0)


def trajectory(one: Trainer, steps: int = 3) -> dict[str, torch.Tensor]:
    """The gradients of every update of some training steps, the metrics, and what the roles are in the end."""
    result = {}
    for step in range(steps):
        metrics = one.step(step)
        result |= {f"metrics/{step}/{key}": torch.tensor(value, dtype=torch.float64) for key, value in metrics.items()}
    for name, role in one.roles.items():
        for i, gradients in enumerate(role.gradients):
            result |= {f"gradients/{name}/{i}/{key}": gradient for key, gradient in gradients.items()}
    return result | {f"state/{key}": full(value).clone() for key, value in one.tensors().items()}


def expert_folder(folder: Path, boundary: float | None = 0.875) -> Path:
    """The tiny world with a second transformer, whose weights are other ones."""
    copy_of(WAN, folder)
    copy_of(folder / "transformer", folder / "transformer_2")
    change_index(folder, transformer_2=["diffusers", "WanTransformer3DModel"], boundary_ratio=boundary)
    rewrite(folder / "transformer_2" / "diffusion_pytorch_model.safetensors", _scaled)
    return folder


def change_index(folder: Path, **changes: object) -> None:
    file = folder / "model_index.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def _scaled(tensors: dict[str, torch.Tensor]) -> None:
    for key in tensors:
        tensors[key] = tensors[key] * 0.9
