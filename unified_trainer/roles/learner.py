"""Weights that move together: a whole role's, or those of one of its experts."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from unified_trainer.parallel.fsdp import full
from unified_trainer.roles.ema import EMA


@dataclass(frozen=True)
class LearnerConfig:
    learning_rate: float = 1e-5  # after the warm-up
    betas: tuple[float, float] = (0.9, 0.999)  # of AdamW
    eps: float = 1e-8  # of AdamW
    weight_decay: float = 0.01  # of AdamW
    max_grad_norm: float = 1.0  # largest gradient norm, over all weights of the role or the expert; 0 does not clip
    warmup_updates: int = 0  # updates over which the learning rate rises from 0
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"  # of the learning rate after the warm-up
    lr_decay_updates: int = 0  # updates from the end of the warm-up to the lowest learning rate
    min_lr_ratio: float = 0.0  # lowest learning rate, as a share of learning_rate
    ema_decay: float = 0.0  # of the averaged weights, per update; 0 keeps none


class Learner:
    """An optimizer, a learning-rate clock of its own updates, and optionally averaged weights."""

    def __init__(self, name: str, weights: Mapping[str, nn.Parameter], config: LearnerConfig) -> None:
        self.name, self.config = name, config  # the name is for metrics and messages: student, or student/high
        self.weights = dict(weights)
        self.updates = 0
        self._optimizer = torch.optim.AdamW(
            self.weights.values(),
            lr=config.learning_rate,
            betas=(float(config.betas[0]), float(config.betas[1])),
            eps=config.eps,
            weight_decay=config.weight_decay,
        )
        self._ema = EMA(self.weights, config.ema_decay) if config.ema_decay else None

    @property
    def has_gradient(self) -> bool:
        """Whether a backward pass reached any of the weights since the last move."""
        return any(p.grad is not None for p in self.weights.values())

    def gradient_norm(self) -> Tensor:
        """Over all weights; FloatingPointError, naming a weight, if it is not finite."""
        norm = full(torch.nn.utils.get_total_norm([p.grad for p in self.weights.values() if p.grad is not None]))
        if not math.isfinite(float(norm)):
            bad = next(key for key, p in self.weights.items() if p.grad is not None and not _finite(p.grad))
            role = self.name.split("/")[0]
            raise FloatingPointError(
                f"{self.name}: the gradient of {bad} is not finite at update {self.updates}; weights not moved. "
                f"Lower {role}.learning_rate, or look at the batch; the last checkpoint is sound"
            )
        return norm

    def move(self, norm: Tensor) -> dict[str, float]:
        """Clip a gradient of this norm, move the weights once, and forget it."""
        if self.config.max_grad_norm:
            torch.nn.utils.clip_grads_with_norm_(self.weights.values(), self.config.max_grad_norm, norm)
        learning_rate = self.config.learning_rate * learning_rate_factor(self.config, self.updates)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.updates += 1
        if self._ema:
            self._ema.update()
        return {f"{self.name}/grad_norm": float(norm), f"{self.name}/learning_rate": learning_rate}

    def restart_ema(self) -> None:
        """Average anew from the weights as they are, after they were loaded."""
        if self._ema:
            self._ema = EMA(self.weights, self.config.ema_decay)

    @contextmanager
    def ema_weights(self) -> Iterator[None]:
        """The averaged weights in place of the weights, if there are any."""
        with self._ema.swapped() if self._ema else nullcontext():
            yield

    def state_dict(self) -> dict[str, Tensor]:
        """Weights, optimizer moments, averaged weights and the update counter, as one flat dict of tensors."""
        state = {f"weights/{key}": p.detach() for key, p in self.weights.items()}
        for key, p in self.weights.items():
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


def learning_rate_factor(config: LearnerConfig, updates: int) -> float:
    """Share of the learning rate at this update: linear warm-up, then constant, linear or cosine decay."""
    if updates < config.warmup_updates:
        return (updates + 1) / config.warmup_updates
    if config.lr_schedule == "constant":
        return 1.0
    done = min(1.0, (updates - config.warmup_updates) / max(1, config.lr_decay_updates))
    left = 1 - done if config.lr_schedule == "linear" else 0.5 + 0.5 * math.cos(math.pi * done)
    return config.min_lr_ratio + (1 - config.min_lr_ratio) * left


def _finite(gradient: Tensor) -> bool:
    return bool(full(gradient).isfinite().all())
