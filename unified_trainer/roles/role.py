"""A role: a model plus what may be done to its weights."""

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from unified_trainer.models.base import VideoModel
from unified_trainer.numerics.flow import GuidanceScale, guide
from unified_trainer.roles.backbone import AdapterConfig, Backbone
from unified_trainer.roles.experts import (
    ExpertConfig,
    Experts,
    Rows,
    Share,
    Side,
    ask,
    scale_at,
    shares,
    side_of,
)
from unified_trainer.roles.learner import Learner, LearnerConfig, learning_rate_factor
from unified_trainer.types import Condition, Latents, PerFrame, PerSample

__all__ = ["Frozen", "Precision", "Role", "RoleConfig", "Trainable", "TrainableConfig", "learning_rate_factor"]

Precision = Literal["fp32", "bf16"]


@dataclass(frozen=True)
class RoleConfig:
    path: str = ""  # diffusers folder of the weights; "tiny" is the embedded one; empty takes the student's
    precision: Precision = "fp32"  # of the network's pass; with bf16, weights that nobody trains are held in it too
    boundary: float = 0.0  # noise level from which the high-noise expert runs; 0 takes the folder's. A role that
    # learns from a folder of one network then has two experts, which both start from it
    activation_checkpointing: bool = False  # recompute activations in the backward pass: slower, smaller
    selective_checkpointing: bool = False  # but keep what matrix products and attention gave: between the two in both
    compile: bool = False  # the network's blocks, with torch.compile: a slow first step, faster ones after


@dataclass(frozen=True)
class TrainableConfig(LearnerConfig, RoleConfig):
    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    high: ExpertConfig = field(default_factory=ExpertConfig)
    low: ExpertConfig = field(default_factory=ExpertConfig)

    @property
    def experts(self) -> dict[Side, ExpertConfig]:
        return {"high": self.high, "low": self.low}

    def of(self, side: Side) -> "TrainableConfig":
        """The settings of one expert, or of a role's only network."""
        own = dataclasses.asdict(self.experts[side]) if side else {}
        given = {key: own[key] for key in ("learning_rate", "max_grad_norm") if side and own[key] is not None}
        return dataclasses.replace(self, **given)


class Role:
    """A network that predicts velocities, or two of them that meet at a noise level; with or without guidance."""

    def __init__(self, name: str, networks: Backbone | Experts, config: RoleConfig) -> None:
        self.name = name
        self.config = config
        self.boundary: float | None = None
        self._backbones: dict[Side, Backbone]
        if isinstance(networks, Experts):
            self._backbones, self.boundary = {"high": networks.high, "low": networks.low}, networks.boundary
        else:
            self._backbones = {"": networks}
        self._mesh = next(iter(self._backbones.values())).mesh
        self.device = self._mesh.device

    def velocity(self, x_t: Latents, sigma: PerSample, cond: Condition) -> Latents:
        """velocity = noise - x0 of each sample at its own noise level, float32."""

        def of(side: Side, rows: Rows) -> tuple[Latents]:
            with self.running(side) as model:
                return (model.velocity(x_t[rows], sigma[rows], cond.map(lambda x: x[rows])),)

        return ask(self._shares(sigma), of)[0]

    def guided_velocity(
        self, x_t: Latents, sigma: PerSample, cond: Condition, uncond: Condition, guidance_scale: GuidanceScale
    ) -> Latents:
        """uncond + w (cond - uncond), both in one batched pass; w = 1 asks for cond alone."""
        scale = self.scale(sigma, guidance_scale)
        if isinstance(scale, float | int) and scale == 1:
            return self.velocity(x_t, sigma, cond)
        both = self.velocity(torch.cat([x_t, x_t]), torch.cat([sigma, sigma]), cond.cat(uncond))
        return guide(*both.chunk(2), scale)

    def scale(self, sigma: PerSample, guidance_scale: GuidanceScale) -> float | PerSample:
        """The guidance scale at these noise levels, of which each expert may have its own."""
        return scale_at(guidance_scale, sigma, self.boundary, self.name)

    @contextmanager
    def running(self, side: Side = "") -> Iterator[VideoModel]:
        """The model as this role runs it: its adapter, its precision; on all ranks or RuntimeError on all.

        A role with two experts is asked for one of them.
        """
        self._mesh.assert_same(f"pass of {self.key(self.name, side, ' ')} {_with_gradient()}")
        autocast = torch.autocast(self.device.type, torch.bfloat16, enabled=self.config.precision == "bf16")
        with self._backbones[side].running(self.key(self.name, side)) as model, autocast:
            yield model

    @property
    def sides(self) -> tuple[Side, ...]:
        """Its networks: "high" and "low", or "" for its only one."""
        return tuple(self._backbones)

    @property
    def precision(self) -> str:
        held = sorted({"bf16" if backbone.half else "fp32" for backbone in self._backbones.values()})
        experts = "" if self.boundary is None else f", two experts that meet at {self.boundary:g}"
        return f"weights {' and '.join(held)}, passes {self.config.precision}{experts}"

    @property
    def network(self) -> nn.Module:
        """The only one, or that of the high-noise expert."""
        return self._backbones[self.sides[0]].model.network

    @staticmethod
    def key(name: str, side: Side, between: str = "_") -> str:
        """What a backbone calls a role, or its expert."""
        return f"{name}{between}{side}" if side else name

    def _shares(self, sigma: PerSample | PerFrame) -> dict[Side, Share]:
        """Which rows each network runs on; the same networks on all ranks, some of them without a row here."""
        if self.boundary is None:
            return {"": torch.ones(len(sigma), dtype=torch.bool)}
        self._mesh.assert_same(f"pass of {self.name}, split at {self.boundary:g}, {_with_gradient()}")
        mine = shares(sigma, self.boundary)
        here = torch.tensor([[bool(share.any()) for share in mine.values()]])
        anywhere = self._mesh.all_gather_cpu(here).any(0).tolist()
        return {side: share for (side, share), runs in zip(mine.items(), anywhere, strict=True) if runs}


class Frozen(Role):
    """A role nobody moves: a teacher, or a reference for KL."""

    @torch.no_grad()
    def velocity(self, x_t: Latents, sigma: PerSample, cond: Condition) -> Latents:
        return super().velocity(x_t, sigma, cond)


class Trainable(Role):
    """A role that learns, all of it or one of its two experts; each has an optimizer and a clock of its own."""

    config: TrainableConfig

    def __init__(self, name: str, networks: Backbone | Experts, config: TrainableConfig) -> None:
        super().__init__(name, networks, config)
        self._learners: dict[Side, Learner] = {
            side: Learner(self.key(self.name, side, "/"), self._own_weights(side), config.of(side))
            for side in self.sides
            if not side or config.experts[side].trained
        }

    def _own_weights(self, side: Side) -> dict[str, nn.Parameter]:
        return self._backbones[side].weights(self.key(self.name, side))

    @property
    def weights(self) -> Mapping[str, nn.Parameter]:
        """What it trains, by name; of two experts as high/NAME and low/NAME."""
        return {
            f"{side}/{key}" if side else key: p
            for side, learner in self._learners.items()
            for key, p in learner.weights.items()
        }

    @property
    def updates(self) -> int:
        """How often its weights have moved, those of two experts together."""
        return sum(learner.updates for learner in self._learners.values())

    def learns(self, sigma: Float[Tensor, ""]) -> bool:
        """Whether the network that runs at this noise level is trained."""
        return side_of(float(sigma), self.boundary) in self._learners

    def count(self, sigmas: Float[Tensor, " s"]) -> dict[str, float]:
        """How many of these noise levels each expert runs at; nothing of a role with one network."""
        sides = [side_of(sigma, self.boundary) for sigma in sigmas.tolist()]
        return {side: float(sides.count(side)) for side in self.sides if side}

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add to the gradient; `last` says that `step` comes next.

        A loss that only an expert which does not learn had a part in teaches nothing. The ranks exchange the gradients
        of two experts after every pass: which pass is an expert's last before it moves, none of them knows.
        """
        for side in self.sides:
            self._exchange_gradients(side, last=last or bool(side))
        if loss.requires_grad or len(self._learners) == len(self.sides):
            loss.backward()

    def _exchange_gradients(self, side: Side, *, last: bool) -> None:
        self._backbones[side].exchange_gradients(last=last)

    def step(self) -> dict[str, float]:
        """Clip and move what got a gradient, once, and forget that; what got none stays as it is, its average too.

        FloatingPointError, with nothing moved, if a gradient is not finite.
        """
        norms = {side: learner.gradient_norm() for side, learner in self._learners.items() if learner.has_gradient}
        metrics: dict[str, float] = {}
        for side, norm in norms.items():
            self._backbones[side].reshard()
            metrics |= self._learners[side].move(norm)
        return metrics

    def merge(self) -> None:
        """Fold adapters into the weights, for good; nothing is left to train."""
        for side in self._learners:
            self._backbones[side].merge(self.key(self.name, side))
        self._learners = {}

    def adapter(self, side: Side) -> tuple[dict[str, nn.Parameter], float]:
        """The weights of one network's adapter by peft's names, and its alpha."""
        config = self.config.adapter
        return self._backbones[side].weights(self.key(self.name, side)), config.alpha or config.rank

    def save_adapter(self, side: Side, folder: Path) -> None:
        """The adapter of one network in peft's layout."""
        self._backbones[side].save_adapter(self.key(self.name, side), folder)

    def restart_ema(self) -> None:
        """Average anew from the weights as they are, after they were loaded."""
        for learner in self._learners.values():
            learner.restart_ema()

    @contextmanager
    def ema_weights(self) -> Iterator[None]:
        """The role with its averaged weights, if it keeps any."""
        with ExitStack() as stack:
            for learner in self._learners.values():
                stack.enter_context(learner.ema_weights())
            yield

    def state_dict(self) -> dict[str, Tensor]:
        """Weights, optimizer moments, averaged weights and update counters, as one flat dict of tensors.

        Two experts are apart by name: weights/high/NAME.
        """
        return {
            _named(side, key): value
            for side, learner in self._learners.items()
            for key, value in learner.state_dict().items()
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take the counters of a state whose tensors, handed out by `state_dict`, were filled in place."""
        for side, learner in self._learners.items():
            learner.updates = int(state[_named(side, "updates")])


def _named(side: Side, key: str) -> str:
    """`weights/NAME` of an expert is `weights/high/NAME`."""
    kind, *name = key.split("/", 1)
    return "/".join([kind, *([side] if side else []), *name])


def _with_gradient() -> str:
    return "with gradient" if torch.is_grad_enabled() else "without gradient"
