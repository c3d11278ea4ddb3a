"""The optimizer of a role, or of one of its experts: AdamW, learning-rate schedule, gradient clipping, EMA."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal, NoReturn

import torch
from torch import Tensor, nn

from unified_trainer.basics.errors import NotFiniteError
from unified_trainer.basics.ranges import (
    MAY_CHANGE,
    CountOrZero,
    Decay,
    Fraction,
    NonNegative,
    PeriodOrZero,
    PositiveFraction,
    at_least,
)
from unified_trainer.parallel.fsdp import clip, full, to_local, total_norm
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.roles.decay_groups import DecayGroups
from unified_trainer.roles.ema import EMA, HostEMA
from unified_trainer.roles.optimizer import AdamW, Moments, MovedAdamW


@dataclass(frozen=True)
class LearnerConfig:
    learning_rate: Fraction = 1e-5
    """Learning rate of AdamW after the warm-up."""
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    """Decay rates of AdamW's two moments."""
    eps: PositiveFraction = 1e-8
    """Epsilon of AdamW."""
    weight_decay: Annotated[float, at_least(0, 100)] = 0.01
    """Weight decay of AdamW."""
    weight_decay_on: Literal["all", "matrices"] = "all"
    """Weights that decay: all, or matrices, that is those of two and more dimensions: no bias and no scale of a norm
    decays."""
    moments: Moments = "fp32"
    """Precision of AdamW's two moments, in memory and in checkpoints. bf16 halves their memory: they are updated in
    float32 and rounded stochastically."""
    max_grad_norm: NonNegative = 1.0
    """Largest gradient norm over all weights of the role or the expert; 0 does not clip."""
    skip_not_finite: Annotated[CountOrZero, MAY_CHANGE] = 0
    """Updates in succession that are skipped if their gradient is not finite; one more ends the run. A skipped update
    changes no weight, moment or EMA, and learning rates do not count it. 0 skips none."""
    warmup_updates: PeriodOrZero = 0
    """Updates over which the learning rate rises linearly from 0."""
    warmup_ratio: Fraction = 0.0
    """These updates as a share of the role's updates in the run; warmup_updates is then computed when a run begins."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning-rate schedule after the warm-up."""
    lr_decay_updates: PeriodOrZero = 0
    """Updates from the end of the warm-up to the lowest learning rate."""
    lr_decay_ratio: Fraction = 0.0
    """These updates as a share of those after the warm-up: with 1 the lowest learning rate is at the end of the run.
    lr_decay_updates is then computed when a run begins."""
    min_lr_ratio: Fraction = 0.0
    """Lowest learning rate as a fraction of learning_rate."""
    ema_decay: Decay = 0.0
    """Decay of the exponential moving average (EMA) of the weights, per update; 0 keeps none. Rounding to float32
    leaves it up to 6e-8 / (1 - decay) of a weight behind a weight that no longer changes: 6e-4 at .9999."""
    ema_start: PeriodOrZero = 0
    """Updates after which the averaging starts; until then the EMA weights are the weights."""
    ema_device: Literal["same", "cpu"] = "same"
    """Where the EMA weights are: on the device of the weights (same), or in CPU memory (cpu), where a thread averages
    them while training goes on. cpu takes twice their size: the average, and a copy of the weights that it reads."""


class Learner:
    """An optimizer with its own update counter and learning-rate schedule, and optionally an EMA of its weights."""

    def __init__(
        self, name: str, weights: Mapping[str, nn.Parameter], config: LearnerConfig, mesh: Mesh | None = None
    ) -> None:
        """The settings of `mesh` say where the moments are; without one they are with the weights."""
        self.name, self.config = name, config  # name in metrics and messages: student, or student/high
        self.weights = dict(weights)
        self.updates = 0
        self.rate_scale = 1.0  # factor of the learning rate besides its schedule
        kind: Callable[..., AdamW] = AdamW
        if mesh is not None and mesh.config.offload_weights != mesh.config.offload_optimizer:
            place = torch.device("cpu") if mesh.config.offload_optimizer else mesh.device
            kind = partial(MovedAdamW, device=mesh.device, place=place)
        grouped = partial(DecayGroups, kind=kind) if config.weight_decay_on == "matrices" else kind
        self._optimizer = grouped(
            self.weights,
            betas=(float(config.betas[0]), float(config.betas[1])),
            eps=config.eps,
            weight_decay=config.weight_decay,
            moments=config.moments,
        )
        self._ema = self._new_ema()

    def _new_ema(self) -> EMA | None:
        config = self.config
        if not config.ema_decay:
            return None
        kind = HostEMA if config.ema_device == "cpu" else EMA
        return kind(self.weights, config.ema_decay, config.ema_start)

    @property
    def has_gradient(self) -> bool:
        """Whether a backward pass reached any of the weights since the last update."""
        return any(p.grad is not None for p in self.weights.values())

    def gradient_norm(self) -> float:
        """Return the gradient norm over all weights; NotFiniteError, naming a weight, if it is not finite."""
        norm = self._norm()
        if not math.isfinite(norm):
            self._refuse()
        return norm

    def _norm(self) -> float:
        return float(total_norm([p.grad for p in self.weights.values() if p.grad is not None]))

    def _refuse(self) -> NoReturn:
        faulty = (key for key, p in self.weights.items() if p.grad is not None and not _finite(p.grad))
        bad, role = next(faulty, "all weights together"), self.name.split("/")[0]
        raise NotFiniteError(
            f"{self.name}: the gradient of {bad} is not finite at update {self.updates}; weights unchanged. "
            f"Lower {role}.learning_rate, look at the batch, or skip such updates with {role}.skip_not_finite; "
            "checkpoints never hold NaN or inf"
        )

    def step(self, norm: float) -> dict[str, float]:
        """Clip a gradient of this norm, update the weights once, and clear the gradient."""
        if self.config.max_grad_norm:
            clip([p.grad for p in self.weights.values() if p.grad is not None], self.config.max_grad_norm, norm)
        learning_rate = self.config.learning_rate * self.rate_scale * learning_rate_factor(self.config, self.updates)
        self._optimizer.step(learning_rate, self.updates)
        self._clear()
        self.updates += 1
        if self._ema:
            self._ema.update(self.updates)
        return {f"{self.name}/grad_norm": norm, f"{self.name}/learning_rate": learning_rate}

    def _clear(self) -> None:
        for p in self.weights.values():
            p.grad = None

    @property
    def idle_in_passes(self) -> list[Tensor]:
        """The tensors that no pass of the network reads: moments, and an EMA on the device of the weights."""
        averages = self._ema.shadow.values() if self._ema and self.config.ema_device == "same" else ()
        return [*self._optimizer.moments, *averages]

    def restart_ema(self) -> None:
        """Start the EMA anew from the weights as they are, after they were loaded."""
        if self._ema:
            self._ema = self._new_ema()

    @torch.no_grad()
    def start_from_ema(self) -> None:
        """Set the weights to their EMA, if the role keeps one."""
        if self._ema:
            shadow = self._ema.shadow
            for key, weight in self.weights.items():
                to_local(weight).copy_(to_local(shadow[key]))

    @contextmanager
    def ema_weights(self) -> Iterator[None]:
        """Swap in the EMA weights, if the role keeps any."""
        with self._ema.swapped() if self._ema else nullcontext():
            yield

    def state_dict(self) -> dict[str, Tensor]:
        """Return weights, optimizer moments, EMA weights and the update counter as one flat dict of tensors."""
        state = {f"weights/{key}": p.detach() for key, p in self.weights.items()}
        state |= {f"optimizer/{key}": value for key, value in self._optimizer.state().items()}
        if self._ema:
            state |= {f"ema/{key}": shadow for key, shadow in self._ema.shadow.items()}
        state["updates"] = torch.tensor(self.updates)
        return state


def learning_rate_factor(config: LearnerConfig, updates: int) -> float:
    """Return the factor of the learning rate at this update: linear warm-up, then constant, linear or cosine decay."""
    if updates < config.warmup_updates:
        return (updates + 1) / config.warmup_updates
    if config.lr_schedule == "constant":
        return 1.0
    done = min(1.0, (updates - config.warmup_updates) / max(1, config.lr_decay_updates))
    left = 1 - done if config.lr_schedule == "linear" else 0.5 + 0.5 * math.cos(math.pi * done)
    return config.min_lr_ratio + (1 - config.min_lr_ratio) * left


def _finite(gradient: Tensor) -> bool:
    return bool(full(gradient).isfinite().all())
