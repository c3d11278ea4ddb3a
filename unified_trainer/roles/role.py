"""A role: a model plus what may be done to its weights."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from unified_trainer.flow import guide
from unified_trainer.models.base import VideoModel
from unified_trainer.parallel.fsdp import full
from unified_trainer.roles.backbone import AdapterConfig, Backbone
from unified_trainer.roles.ema import EMA
from unified_trainer.types import Condition, Latents, PerSample

Precision = Literal["fp32", "bf16"]


@dataclass(frozen=True)
class RoleConfig:
    path: str = ""  # diffusers folder of the weights; "tiny" is the embedded one; empty takes the student's
    precision: Precision = "fp32"  # of the network's pass; with bf16, weights that nobody trains are held in it too
    activation_checkpointing: bool = False  # recompute activations in the backward pass: slower, smaller
    compile: bool = False  # the network's blocks, with torch.compile: a slow first step, faster ones after


@dataclass(frozen=True)
class TrainableConfig(RoleConfig):
    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    learning_rate: float = 1e-5  # after the warm-up
    betas: tuple[float, float] = (0.9, 0.999)  # of AdamW
    eps: float = 1e-8  # of AdamW
    weight_decay: float = 0.01  # of AdamW
    clip_norm: float = 1.0  # largest gradient norm, over all weights of the role; 0 does not clip
    warmup_updates: int = 0  # updates of this role over which the learning rate rises from 0
    decay: Literal["constant", "linear", "cosine"] = "constant"  # of the learning rate after the warm-up
    decay_updates: int = 0  # updates from the end of the warm-up to the lowest learning rate
    min_lr_ratio: float = 0.0  # lowest learning rate, as a share of learning_rate
    ema_decay: float = 0.0  # of the averaged weights, per update; 0 keeps none


class Role:
    """A network that predicts velocities, with or without guidance."""

    def __init__(self, name: str, backbone: Backbone, config: RoleConfig) -> None:
        self.name = name
        self.config = config
        self.device = backbone.mesh.device
        self._backbone = backbone

    def velocity(self, x_t: Latents, sigma: PerSample, cond: Condition) -> Latents:
        """velocity = noise - x0 of each sample at its own noise level, float32."""
        with self.running() as model:
            return model.velocity(x_t, sigma, cond)

    def guided_velocity(
        self, x_t: Latents, sigma: PerSample, cond: Condition, uncond: Condition, guidance_scale: float
    ) -> Latents:
        """uncond + w (cond - uncond), both in one batched pass; w = 1 asks for cond alone."""
        if guidance_scale == 1:
            return self.velocity(x_t, sigma, cond)
        both = self.velocity(torch.cat([x_t, x_t]), torch.cat([sigma, sigma]), cond.cat(uncond))
        return guide(*both.chunk(2), guidance_scale)

    @contextmanager
    def running(self) -> Iterator[VideoModel]:
        """The model as this role runs it: its adapter, its precision; on all ranks or RuntimeError on all."""
        self._backbone.mesh.agree(f"pass of {self.name} with{'' if torch.is_grad_enabled() else 'out'} gradient")
        autocast = torch.autocast(self.device.type, torch.bfloat16, enabled=self.config.precision == "bf16")
        with self._backbone.running(self.name) as model, autocast:
            yield model

    @property
    def precision(self) -> str:
        return f"weights {'bf16' if self._backbone.half else 'fp32'}, passes {self.config.precision}"

    @property
    def network(self) -> nn.Module:
        return self._backbone.model.network


class Frozen(Role):
    """A role nobody moves: a teacher, or a reference for KL."""

    @torch.no_grad()
    def velocity(self, x_t: Latents, sigma: PerSample, cond: Condition) -> Latents:
        return super().velocity(x_t, sigma, cond)


class Follower(Frozen):
    """A role with weights of its own that nobody trains: they are a trained role's of earlier, or their average."""

    def __init__(self, name: str, backbone: Backbone, config: RoleConfig) -> None:
        super().__init__(name, backbone, config)
        self._weights = backbone.own_weights(name)

    @torch.no_grad()
    def follow(self, leader: "Trainable", decay: float = 0.0) -> None:
        """weight <- decay weight + (1 - decay) of the leader's weight; without decay a copy, bit for bit."""
        for key, weight in self._weights.items():
            weight.lerp_(leader.weights[key].detach().to(weight.dtype), 1 - decay)

    def state_dict(self) -> dict[str, Tensor]:
        return {f"followed/{key}": weight.detach() for key, weight in self._weights.items()}

    def after_load(self, state: Mapping[str, Tensor]) -> None:
        """Nothing is left to do: the tensors were filled in place."""


class Trainable(Role):
    """A role with an optimizer, a learning-rate clock of its own updates, and optionally averaged weights."""

    config: TrainableConfig

    def __init__(self, name: str, backbone: Backbone, config: TrainableConfig) -> None:
        super().__init__(name, backbone, config)
        self.updates = 0
        self._weights = self._own_weights()
        self._optimizer = torch.optim.AdamW(
            self._weights.values(),
            lr=config.learning_rate,
            betas=(float(config.betas[0]), float(config.betas[1])),
            eps=config.eps,
            weight_decay=config.weight_decay,
        )
        self._ema = EMA(self._weights, config.ema_decay) if config.ema_decay else None

    def _own_weights(self) -> dict[str, nn.Parameter]:
        return self._backbone.weights(self.name)

    @property
    def weights(self) -> Mapping[str, nn.Parameter]:
        """What it trains, by name."""
        return self._weights

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add to the gradient; `last` says that `step` comes next."""
        self._backbone.exchange_gradients(last=last)
        loss.backward()

    def step(self) -> dict[str, float]:
        """Clip and move the weights once, and forget the gradient; FloatingPointError, unmoved, if it is not finite."""
        norm = torch.nn.utils.get_total_norm([p.grad for p in self._weights.values() if p.grad is not None])
        grad_norm = float(full(norm))
        if not math.isfinite(grad_norm):
            bad = next(key for key, p in self._weights.items() if p.grad is not None and not _finite(p.grad))
            raise FloatingPointError(
                f"{self.name}: the gradient of {bad} is not finite at update {self.updates}; weights not moved. "
                f"Lower {self.name}.learning_rate, or look at the batch; the last checkpoint is sound"
            )
        if self.config.clip_norm:
            torch.nn.utils.clip_grads_with_norm_(self._weights.values(), self.config.clip_norm, norm)
        learning_rate = self.config.learning_rate * learning_rate_factor(self.config, self.updates)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.updates += 1
        if self._ema:
            self._ema.update()
        return {f"{self.name}/grad_norm": grad_norm, f"{self.name}/learning_rate": learning_rate}

    def merge(self) -> None:
        """Fold an adapter into the weights, for good; nothing is left to train."""
        self._backbone.merge(self.name)
        self._weights = {}

    def save_adapter(self, folder: Path) -> None:
        """The adapter in peft's layout."""
        self._backbone.save_adapter(self.name, folder)

    def restart_average(self) -> None:
        """Average anew from the weights as they are, after they were loaded."""
        if self._ema:
            self._ema = EMA(self._weights, self.config.ema_decay)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """The role with its averaged weights, if it keeps any."""
        with self._ema.swapped() if self._ema else nullcontext():
            yield

    def state_dict(self) -> dict[str, Tensor]:
        """Weights, optimizer moments, averaged weights and the update counter, as one flat dict of tensors."""
        state = {f"weights/{key}": p.detach() for key, p in self._weights.items()}
        for key, p in self._weights.items():
            moments = self._optimizer.state[p]
            if not moments:  # what AdamW starts from
                moments["step"] = torch.tensor(0.0)
                moments["exp_avg"] = torch.zeros_like(p, memory_format=torch.preserve_format)
                moments["exp_avg_sq"] = torch.zeros_like(p, memory_format=torch.preserve_format)
            state |= {f"optimizer/{key}/{name}": value for name, value in moments.items()}
        if self._ema:
            state |= {f"ema/{key}": shadow for key, shadow in self._ema.shadow.items()}
        state["updates"] = torch.tensor(self.updates)
        return state

    def after_load(self, state: Mapping[str, Tensor]) -> None:
        """Take the counter of a state whose tensors, handed out by `state_dict`, were filled in place."""
        self.updates = int(state["updates"])


def learning_rate_factor(config: TrainableConfig, updates: int) -> float:
    """Share of the learning rate at this update: linear warm-up, then constant, linear or cosine decay."""
    if updates < config.warmup_updates:
        return (updates + 1) / config.warmup_updates
    if config.decay == "constant":
        return 1.0
    done = min(1.0, (updates - config.warmup_updates) / max(1, config.decay_updates))
    left = 1 - done if config.decay == "linear" else 0.5 + 0.5 * math.cos(math.pi * done)
    return config.min_lr_ratio + (1 - config.min_lr_ratio) * left


def _finite(gradient: Tensor) -> bool:
    return bool(full(gradient).isfinite().all())
