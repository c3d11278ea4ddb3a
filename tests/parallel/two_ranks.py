"""What the ranks of tests/parallel/test_two_ranks.py do.

The main rank writes what each part gave into a folder; the test compares it with the same functions on one rank.
"""

import dataclasses
import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from helpers import (
    CAPTIONS,
    LATENT_SHAPE,
    SMALL,
    Recorder,
    ScriptedScorer,
    StubbornScorer,
    dance_grpo,
    dance_ppo,
    dmd2,
    finetune,
    flags,
    random_clips,
    reward_of,
    reward_parts,
    small_model,
    tiny_codec,
)

from unified_trainer import __main__ as program
from unified_trainer.basics.requests import Request
from unified_trainer.data.clips import Clips
from unified_trainer.data.loader import Loader
from unified_trainer.data.prompts import Prompts
from unified_trainer.methods.awm import AWM, AWMConfig
from unified_trainer.methods.crd import CRD, CRDConfig
from unified_trainer.methods.dance_grpo import DanceGRPOConfig
from unified_trainer.methods.dance_ppo import DancePPOConfig
from unified_trainer.methods.dmd2 import DMD2Config
from unified_trainer.methods.finetune import FinetuneConfig
from unified_trainer.methods.flow_dpo import FlowDPO, FlowDPOConfig, OnlineDPO, OnlineDPOConfig
from unified_trainer.methods.rcm import RCM, RCMConfig
from unified_trainer.methods.rl.buffer import BufferConfig
from unified_trainer.methods.rl.rollout_method import with_buffer
from unified_trainer.parallel.fsdp import full
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.roles.backbone import Backbone
from unified_trainer.roles.role import Frozen, RoleConfig, TrainableConfig
from unified_trainer.roles.weight_copy import WeightCopy
from unified_trainer.run.checkpoint import dcp as checkpoint
from unified_trainer.run.trainer import Trainer
from unified_trainer.sampling.solver import SamplerConfig

REWARDS = (-2.0, 2.0, 4.0, 5.0, 9.0, -1.0, 1.0, 1.0)
SIZES = {"num_prompts": 2, "num_samples": 4, "prompts_per_update": 1, "rollout_batch": 2, "update_batch": 2}
# Of each group the best and the worst are kept: in the first one on each rank, in the second both on the main one.
# Half of the transitions from a noise level of at most .95 are drawn: one of two.
GRPO = DanceGRPOConfig(**SIZES, noise_range=(0.0, 0.95), timestep_fraction=0.5, best_of_n=2, init_same_noise=True)
# Eight prompts; a rank has two samples of each update, whose values differ.
PPO = DancePPOConfig(
    num_prompts=8,
    prompts_per_update=4,
    rollout_batch=2,
    update_batch=1,
    timestep_fraction=0.5,
    gae_lambda=0.8,
)
MOVING = TrainableConfig(learning_rate=1e-3, ema_decay=0.5, max_grad_norm=0.1, warmup_updates=3)
MATCHING = DMD2Config(batch_size=4, micro_batch=1, guidance_scale=2.0, student_every=1, gan_weight=0.5)
# The first prompt teaches nothing, so that one rank lacks a group and the other none.
DYNAMIC_SAMPLING = DanceGRPOConfig(
    **SIZES | {"prompts_per_update": 2}, timestep_fraction=0.5, dynamic_sampling_rounds=2
)
# A rank has a group of each update and half of another; each group of the first step is trained on again.
BUFFERED = DanceGRPOConfig(**SIZES | {"num_prompts": 6, "prompts_per_update": 3}, timestep_fraction=0.5)
# dmd2_shared: adapters over one base, recomputed activations.
METHODS = ("finetune", "dance_grpo", "dance_ppo", "dynamic_sampling", "dmd2", "dmd2_shared")
METHODS += ("buffer", "dmd2_sid", "dmd2_decoupled", "awm", "crd", "rcm", "flow_dpo", "online_dpo")
ONE_UPDATE = SIZES | {"prompts_per_update": 2}
FORWARD = {  # a method on noised samples: its class and its settings
    "awm": (AWM, AWMConfig(**ONE_UPDATE)),
    "crd": (CRD, CRDConfig(**SIZES, best_of_n=2, beta=5.0)),  # groups over ranks; one has padding alone
    "online_dpo": (OnlineDPO, OnlineDPOConfig(**ONE_UPDATE, beta=20.0)),
}
PROGRAM = SMALL["dance_grpo"] + flags(
    {"steps": 2, "validate-every": 2, "validation.num-videos": 1, "student.ema-decay": 0.5}
    | {"algorithm.update-batch": 2, "algorithm.rollout-batch": 2}
)


def trainer(method: str, mesh: Mesh, *, moves: bool = False) -> Trainer:
    recorder = {"mesh": mesh, "moves": moves, "role": MOVING if moves else None}
    if method == "finetune":
        config = FinetuneConfig(batch_size=8, micro_batch=2, caption_dropout=0.5)
        return finetune(config, **recorder)
    if method == "flow_dpo":
        return on_pairs(FlowDPOConfig(batch_size=4, micro_batch=1, beta=20.0), **recorder)
    if method == "rcm":
        config = RCMConfig(batch_size=4, micro_batch=1, guidance_scale=2.0, student_every=1, teacher_steps=6)
        return dmd2(config, kind=RCM, **recorder)
    if method.startswith("dmd2"):
        shared, direction = method == "dmd2_shared", method.removeprefix("dmd2_")
        if direction in ("sid", "decoupled"):
            return dmd2(dataclasses.replace(MATCHING, gan_weight=0.0, direction=direction), **recorder)
        return dmd2(MATCHING, shared=shared, checkpointing=shared, **recorder)
    if method == "buffer":
        one = dance_grpo(BUFFERED, **recorder)
        buffer = with_buffer(one.method, BufferConfig(share=0.5, capacity=2))
        return Trainer(one.method, one.roles, one.loader, mesh, seed=one.seed, buffer=buffer)
    if method == "dynamic_sampling":
        first = dance_grpo(DYNAMIC_SAMPLING).loader.batch(0).prompts[0]
        return dance_grpo(DYNAMIC_SAMPLING, scorer=StubbornScorer({first}), **recorder)
    scorer, sampler = ScriptedScorer(()), SamplerConfig(num_steps=4, guidance_scale=2.0)
    if method in FORWARD:
        one = on_noised_samples(*FORWARD[method], scorer, **recorder)
    elif method == "dance_ppo":
        one = dance_ppo(PPO, sampler=sampler, scorer=scorer, head=0.3, **recorder)
    else:
        one = dance_grpo(GRPO, sampler=sampler, scorer=scorer, **recorder)
    batch = one.loader.batch(0)  # the rewards of this rank's samples, whatever rank holds them
    scorer.rewards = [REWARDS[sample] for sample in batch.sample_ids]
    return one


def on_noised_samples(kind, config, scorer, *, mesh: Mesh, **recorder) -> Trainer:
    """A trainer of a method with copies of the student, of which the old policy samples, or with a reference."""
    sampler, student = SamplerConfig(num_steps=3, guidance_scale=1.0), Recorder(mesh=mesh, **recorder)
    copied = {name: seed for seed, (name, spec) in enumerate(kind.roles.items()) if spec.kind is WeightCopy}
    copies = {
        name: WeightCopy(name, Backbone(small_model(seed), mesh), TrainableConfig()) for name, seed in copied.items()
    }
    reference = Frozen("reference", Backbone(small_model(1), mesh), RoleConfig()) if kind is OnlineDPO else None
    roles = {"student": student, **copies, "reference": reference}
    captions = CAPTIONS[:1] if kind is OnlineDPO else CAPTIONS  # the pair of a prompt is of both ranks
    loader = Loader(Prompts(Request.of(captions)), tiny_codec(), config.plan(), LATENT_SHAPE, "", 0, mesh)
    parts = reward_parts(kind, config, sampler, roles[kind.sampled_by], reward_of(scorer), loader)
    kept = {name: (role, "student") for name, role in copies.items()}
    return Trainer(kind(config, sampler, **roles, **parts), {"student": student}, loader, mesh, copies=kept, seed=0)


def on_pairs(config: FlowDPOConfig, *, mesh: Mesh, **recorder) -> Trainer:
    """A trainer on stored pairs."""
    student = Recorder(mesh=mesh, **recorder)
    reference = Frozen("reference", Backbone(small_model(1), mesh), RoleConfig())
    clips = random_clips(8)
    pairs = Clips(clips.prompts[:4], clips.encoded[:4], clips.encoded[4:])
    loader = Loader(pairs, tiny_codec(), config.plan(), LATENT_SHAPE, "", 0, mesh)
    method = FlowDPO(config, SamplerConfig(guidance_scale=1.0), student=student, reference=reference)
    return Trainer(method, {"student": student}, loader, mesh, seed=0)


def gradients(method: str, mesh: Mesh) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """The gradients of the updates of one training step, or of three where samples are stored, and the last metrics."""
    one = trainer(method, mesh)
    for step in range(3 if method == "buffer" else 1):
        metrics = one.step(step)
    flat = {
        f"{name}/{i}/{key}": gradient
        for name, role in one.roles.items()
        for i, row in enumerate(role.gradients)
        for key, gradient in row.items()
    }
    return flat, metrics


def whole(one: Trainer) -> dict[str, torch.Tensor]:
    """The state of a trainer, unsharded."""
    return {key: full(value).clone() for key, value in one.tensors().items()}


def averaged(one: Trainer) -> torch.Tensor:
    """A weight as validation would see it."""
    with one.roles["student"].ema_weights():
        return full(one.roles["student"].network.proj_out.weight.detach()).clone()


def work(folder: Path) -> None:
    torch.set_num_threads(1)
    mesh = Mesh.join("cpu")
    tensors, metrics = {}, {}
    for method in METHODS:
        grads, metrics[method] = gradients(method, mesh)
        tensors |= {f"{method}/gradients/{key}": value for key, value in grads.items()}
        one = trainer(method, mesh, moves=True)
        for step in range(2):
            one.step(step)
        checkpoint.save(folder / method / "checkpoints", 2, one.tensors(), mesh)
        tensors |= {f"{method}/state/{key}": value for key, value in whole(one).items()}
        tensors[f"{method}/averaged"] = averaged(one)
    metrics["shards"] = type(next(one.roles["student"].network.parameters())).__name__
    metrics["any"] = [mesh.any(mesh.rank == 1), mesh.any(False)]
    metrics["gathered"] = mesh.gather(torch.full((1, 2), float(mesh.rank))).tolist()
    if mesh.is_main:
        save_file({key: value.contiguous() for key, value in tensors.items()}, folder / "tensors.safetensors")
        (folder / "metrics.json").write_text(json.dumps(metrics | {"config": dataclasses.asdict(GRPO)}, default=str))
    mesh.barrier()
    program.main([*PROGRAM, "--output", str(folder / "program")])
