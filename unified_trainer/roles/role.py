"""Roles: a network with the ways it is trained or kept."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from unified_trainer.basics.effects import READS
from unified_trainer.basics.errors import UserError, working_on
from unified_trainer.basics.ranges import CountOrZero, Decay
from unified_trainer.basics.types import Condition, Latents, PerFrame, PerSample
from unified_trainer.models.base import VideoModel
from unified_trainer.models.sparse_attention import DENSE, SparseAttentionConfig
from unified_trainer.numerics.flow import GuidanceScale, NoiseLevelLaw, law_on_side
from unified_trainer.parallel.random import Streams
from unified_trainer.roles.adapter import AdapterConfig, AdapterFileConfig, Adapters, FrozenExpertConfig
from unified_trainer.roles.backbone import Backbone
from unified_trainer.roles.blocks import Compile
from unified_trainer.roles.experts import (
    Balance,
    Expert,
    ExpertConfig,
    ExpertPair,
    Pick,
    RowMask,
    balanced_uniform,
    by_expert,
    expert_at,
    route,
    row_masks,
    scale_at,
)
from unified_trainer.roles.learner import Learner, LearnerConfig
from unified_trainer.roles.recompute import ActivationMemory
from unified_trainer.roles.skipping import SkippingLearner

__all__ = ["Frozen", "Precision", "Role", "RoleConfig", "Trainable", "TrainableConfig"]

Precision = Literal["fp32", "bf16"]
Quantize = Literal["none", "int8", "int4", "fp8", "nvfp4"]


@dataclass(frozen=True)
class RoleConfig:
    path: Annotated[str, READS] = ""
    """Diffusers folder of the weights, or a hub id owner/name[@revision]; "tiny" is the embedded one. Empty takes the
    path of the role it starts from."""
    precision: Precision = "fp32"
    """Precision of the forward pass. With bf16, weights that are not trained are also held in bf16."""
    boundary: Decay = 0.0
    """Noise level from which the high-noise expert runs; 0 takes the folder's. A trained role whose folder holds one
    network gets two experts, which both start from that network."""
    quantize: Quantize = "none"
    """Bits of the linear layers of the network's blocks, by torchao (docs/quantization.md). A frozen role has its
    weights and products in int8 or fp8. In a role that is trained, fp8 makes the products; the others need
    quantize_aware."""
    compile: Compile = "auto"
    """Compile the network's blocks with torch.compile, each as one graph: a slow first step, faster ones after it. auto
    does so on accelerators that have a compiler; blocks that cannot be compiled then run uncompiled, with a warning.
    max_autotune takes the kernels of products that are fastest when they are measured: another process may measure
    others, so that results are not repeated bit by bit, by a resumed run either."""
    adapter: AdapterFileConfig = field(default_factory=AdapterFileConfig)
    adapters: Adapters = ()
    """Adapters made elsewhere, in place of `adapter.path`: their changes are added, each times the factor after its
    colon, as in a.safetensors:0.8 b.safetensors:0.125; without a colon it is 1."""
    high: FrozenExpertConfig = field(default_factory=FrozenExpertConfig)
    low: FrozenExpertConfig = field(default_factory=FrozenExpertConfig)

    @property
    def trains_on_adapter(self) -> bool:
        """Whether an adapter made elsewhere is trained on."""
        return False

    @property
    def quantized(self) -> tuple[Quantize, str]:
        """Its bits, and the form in which `models.quantize` wraps its network."""
        return self.quantize, "weights" if self.quantize != "none" else ""

    @property
    def sparse(self) -> SparseAttentionConfig:
        """The settings of its sparse attention; a role that is never trained has dense attention."""
        return DENSE

    @property
    def is_flow_map(self) -> bool:
        """Whether its network predicts the mean velocity of a step; a role that is never trained does not."""
        return False

    @property
    def new_actions(self) -> int:
        """The size of the actions that its network learns to take; a role that is never trained learns none."""
        return 0

    @property
    def experts(self) -> Mapping[Expert, FrozenExpertConfig]:
        """The settings of two experts by name, high noise first."""
        return {"high": self.high, "low": self.low}


@dataclass(frozen=True)
class TrainableConfig(LearnerConfig, RoleConfig):
    activation_memory: ActivationMemory = "none"
    """Activations that the backward pass computes again, to save memory. none: nothing. selective: all but the results
    of matrix products and attention, at almost no extra FLOPs. full: everything, a third more FLOPs. A number n:
    full in the first n blocks of a network, selective in the others; the command plan names the n that fits."""
    sparse_attention: SparseAttentionConfig = field(default_factory=SparseAttentionConfig)
    quantize_aware: bool = False
    """Round in every pass as the student will when it is deployed with `export --quantize`; weights, gradients and
    checkpoints stay in full precision."""
    flow_map: bool = False
    """Give the network a second noise level, at which its step ends: it predicts the step's mean velocity, as students
    of flow_map do."""
    action_size: CountOrZero = 0
    """Give the network actions, so many numbers for each pixel frame, by a layer that starts at zero; 0: only those
    that its folder holds a layer for."""
    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    high: ExpertConfig = field(default_factory=ExpertConfig)
    low: ExpertConfig = field(default_factory=ExpertConfig)
    expert_balance: Balance = "mixed"
    """Noise levels drawn for a role with two trained experts: for both in every batch (mixed), or for one of them,
    drawn with its own probability (natural) or with probability 1/2 and the loss weighted back (equal). One expert a
    batch is faster on several ranks. Where one expert is trained, all are drawn for it."""

    @property
    def trains_on_adapter(self) -> bool:
        named = any(own.adapter.path or own.adapters for own in (self, self.high, self.low))
        return named and not self.adapter.merge

    @property
    def quantized(self) -> tuple[Quantize, str]:
        form = "aware" if self.quantize_aware else "products"
        return self.quantize, form if self.quantize != "none" else ""

    @property
    def sparse(self) -> SparseAttentionConfig:
        return self.sparse_attention

    @property
    def is_flow_map(self) -> bool:
        return self.flow_map

    @property
    def new_actions(self) -> int:
        return self.action_size

    @property
    def experts(self) -> Mapping[Expert, ExpertConfig]:
        return {"high": self.high, "low": self.low}

    def check(self, role: str) -> None:
        """Raise UserError, naming the key, for settings that contradict each other."""
        if self.lr_schedule != "constant" and not (self.lr_decay_updates or self.lr_decay_ratio):
            raise UserError(
                f"{role}.lr_schedule {self.lr_schedule} needs {role}.lr_decay_updates, the updates until the lowest "
                f"learning rate, or {role}.lr_decay_ratio"
            )
        if self.quantize_aware and role != "student":
            raise UserError(f"{role}.quantize_aware: the student alone is deployed, leave it out")
        if self.quantize_aware and self.quantize == "none":
            raise UserError(f"{role}.quantize_aware needs {role}.quantize int8, int4, fp8 or nvfp4")
        if self.quantized == (self.quantize, "products") and self.quantize != "fp8":
            way_out = f"set {role}.quantize_aware" if role == "student" else "leave it out"
            raise UserError(f"{role}.quantize {self.quantize}: no weight of so few bits is trained, {way_out}, or fp8")
        self.sparse_attention.check(f"{role}.sparse_attention")
        if self.flow_map and self.sparse.share:
            raise UserError(f"{role}.flow_map: no flow map has sparse attention, leave {role}.sparse_attention out")
        if self.action_size and (self.flow_map or self.sparse.share):
            raise UserError(f"{role}.action_size: neither flow maps nor sparse attention take actions, leave it out")

    def of(self, expert: Expert) -> "TrainableConfig":
        """Return the settings of one expert, or of a role's only network."""
        own = dataclasses.asdict(self.experts[expert]) if expert else {}
        given = {key: own[key] for key in ("learning_rate", "max_grad_norm") if expert and own[key] is not None}
        return dataclasses.replace(self, **given)


class Role:
    """A velocity field: one network, or two experts that meet at a noise level."""

    keeps_graph: bool = True  # False: no pass of this role has a gradient, not even to its inputs
    boundary: float | None = None  # noise level at which its two experts meet; None for one network

    def __init__(self, name: str, networks: Backbone | ExpertPair, config: RoleConfig) -> None:
        self.name = name
        self.config = config
        self.boundary = networks.boundary if isinstance(networks, ExpertPair) else None
        self._backbones = by_expert(networks)
        self._mesh = next(iter(self._backbones.values())).mesh
        self.device = self._mesh.device

    @property
    def backbones(self) -> Mapping[Expert, Backbone]:
        """Its networks in memory, which other roles may share, high noise first."""
        return self._backbones

    @property
    def parameters(self) -> int:
        """The number of parameters of its networks, without adapters."""
        return sum(backbone.parameters for backbone in self._backbones.values())

    def velocity(self, x_t: Latents, sigma: PerSample, cond: Condition) -> Latents:
        """Return velocity = noise - x0 of each sample at its own noise level, in float32."""
        if self.boundary is None:
            with self.running() as model:
                return model.velocity(x_t, sigma, cond)

        def call(expert: Expert, pick: Pick) -> tuple[Latents]:
            with self.running(expert) as model:
                return (model.velocity(pick(x_t), pick(sigma), cond.map(pick)),)

        return route(self._row_masks(sigma), call)[0]

    def guided_velocity(
        self, x_t: Latents, sigma: PerSample, cond: Condition, uncond: Condition, guidance_scale: GuidanceScale
    ) -> Latents:
        """Return uncond + w (cond - uncond), the velocities of `branches`; w = 1 runs cond alone."""
        scale = self.scale(sigma, guidance_scale)
        if isinstance(scale, float | int) and scale == 1:
            return self.velocity(x_t, sigma, cond)
        conditional, unconditional = self.branches(x_t, sigma, cond, uncond).chunk(2)
        return self.guide(conditional, unconditional, scale)

    def branches(
        self, x_t: Latents, sigma: PerSample, cond: Condition, uncond: Condition
    ) -> Float[Tensor, "both c t h w"]:
        """Return the velocities of all samples with `cond`, and then those with `uncond`, from one batched pass."""
        return self.velocity(torch.cat([x_t, x_t]), torch.cat([sigma, sigma]), cond.cat(uncond))

    def guide(self, cond: Latents, uncond: Latents, scale: float | PerSample | PerFrame) -> Latents:
        """Return the velocity that the model's rule of guidance makes of both, with a scale of `scale`."""
        return self._backbones[self.experts[0]].model.guide(cond, uncond, scale)

    def scale(self, sigma: PerSample | PerFrame, guidance_scale: GuidanceScale) -> float | PerSample | PerFrame:
        """Return the guidance scale at these noise levels; each expert may have its own."""
        return scale_at(guidance_scale, sigma, self.boundary, self.name)

    @contextmanager
    def running(self, expert: Expert = "") -> Iterator[VideoModel]:
        """Yield one network with this role's adapter and precision; RuntimeError on all ranks unless all run it.

        A role with two experts names the one to run.
        """
        key = self.key(self.name, expert, " ")
        self._mesh.assert_same_pass(f"pass of {key} {self._with_gradient()}")
        half = self.config.precision == "bf16"
        # The cache would keep a bf16 copy of all weights until the pass ends, also of those that FSDP has freed.
        autocast = torch.autocast(self.device.type, torch.bfloat16, enabled=half, cache_enabled=False)
        running = self._backbones[expert].running(self.key(self.name, expert))
        graph = torch.is_grad_enabled() and self.keeps_graph
        with working_on(f"role {key}"), torch.set_grad_enabled(graph), running as model, autocast:
            yield model

    def on_any_rank(self, flag: bool) -> bool:
        """Return whether the flag is set on any rank, all of which run the network together (a CPU collective)."""
        return self._mesh.any(flag)

    @property
    def bf16_weights(self) -> set[str]:
        """The names of the weights that all passes round to bf16, so that who only samples may hold them so."""
        return {
            f"{expert}/{key}" if expert else key
            for expert, backbone in self._backbones.items()
            for key in backbone.bf16_weights(self.key(self.name, expert))
        }

    @property
    def experts(self) -> tuple[Expert, ...]:
        """Names of the role's networks: "high" and "low", or "" for its only one."""
        return tuple(self._backbones)

    @property
    def precision(self) -> str:
        """Precision of weights and passes, for the table printed at start."""
        held = sorted({"bf16" if backbone.half else "fp32" for backbone in self._backbones.values()})
        experts = "" if self.boundary is None else f", two experts that meet at {self.boundary:g}"
        if self.boundary is not None and len(self.experts) == 1:
            experts += f", of which training runs {self.experts[0]} alone"
        kind, form = self.config.quantized
        blocks = f", {form} of the blocks {kind}".replace("aware of", "rounding of") if form else ""
        return f"weights {' and '.join(held)}, passes {self.config.precision}{blocks}{experts}"

    @property
    def compiled(self) -> bool:
        """Whether blocks of it are compiled, as long as none failed to be."""
        return any(backbone.compiled for backbone in self._backbones.values())

    @property
    def network(self) -> nn.Module:
        """The only network, or that of the high-noise expert."""
        return self._backbones[self.experts[0]].model.network

    @staticmethod
    def key(name: str, expert: Expert, between: str = "_") -> str:
        """Return the name under which a backbone knows a role, or one of its experts."""
        return f"{name}{between}{expert}" if expert else name

    def _row_masks(self, sigma: PerSample | PerFrame) -> dict[Expert, RowMask]:
        """Rows of each expert that runs on any rank; some may have no row on this one."""
        if self.boundary is None:
            return {"": torch.ones(len(sigma), dtype=torch.bool)}
        self._mesh.assert_same_pass(f"pass of {self.name}, split at {self.boundary:g}, {self._with_gradient()}")
        mine = row_masks(sigma, self.boundary)
        here = torch.tensor([[bool(mask.any()) for mask in mine.values()]])
        anywhere = self._mesh.all_gather_cpu(here).any(0).tolist()
        return {expert: mask for (expert, mask), runs in zip(mine.items(), anywhere, strict=True) if runs}

    def _with_gradient(self) -> str:
        return "with gradient" if torch.is_grad_enabled() and self.keeps_graph else "without gradient"


class Frozen(Role):
    """A role whose weights never change: a teacher, or the reference of a KL."""

    keeps_graph = False


class Trainable(Role):
    """A role that is trained, whole or one of its two experts; each expert has an optimizer and an update counter."""

    config: TrainableConfig

    def __init__(self, name: str, networks: Backbone | ExpertPair, config: TrainableConfig) -> None:
        super().__init__(name, networks, config)
        kind = SkippingLearner if config.skip_not_finite else Learner
        self._learners: dict[Expert, Learner] = {
            expert: kind(self.key(name, expert, "/"), self._own_weights(expert), config.of(expert), backbone.mesh)
            for expert, backbone in self._backbones.items()
            if not expert or config.experts[expert].trained
        }

    def _own_weights(self, expert: Expert) -> dict[str, nn.Parameter]:
        return self._backbones[expert].weights(self.key(self.name, expert))

    @property
    def learners(self) -> Mapping[Expert, Learner]:
        """The optimizers of its trained networks."""
        return self._learners

    @property
    def weights(self) -> Mapping[str, nn.Parameter]:
        """The trained weights by name; those of two experts as high/NAME and low/NAME."""
        return {
            f"{expert}/{key}" if expert else key: p
            for expert, learner in self._learners.items()
            for key, p in learner.weights.items()
        }

    @property
    def updates(self) -> int:
        """Number of optimizer steps, those of two experts added."""
        return sum(learner.updates for learner in self._learners.values())

    def trains(self, sigma: Float[Tensor, ""]) -> bool:
        """Return whether the network that runs at this noise level is trained."""
        return expert_at(float(sigma), self.boundary) in self._learners

    @property
    def trains_one_of_two(self) -> bool:
        """Whether one of two experts is trained."""
        return self.boundary is not None and len(self._learners) == 1

    def trained_levels(self, law: NoiseLevelLaw, u: PerSample | PerFrame) -> PerSample | PerFrame:
        """Return the noise levels of u, uniform in [0, 1), by the law given that their network is trained."""
        if self.boundary is None or not self.trains_one_of_two:
            return law(u)
        return law_on_side(law, u, self.boundary, above="high" in self._learners)

    def transition_counts(self, sigmas: Float[Tensor, " s"]) -> dict[str, float]:
        """Return metrics: how many of these transitions each expert makes; none for a role with one network."""
        experts = [expert_at(sigma, self.boundary) for sigma in sigmas.tolist()]
        return {f"transitions_{expert}": float(experts.count(expert)) for expert in self.experts if expert}

    def draw_noise_levels(
        self, name: str, sample_ids: Sequence[int], rng: Streams, law: NoiseLevelLaw, partner: Role | None = None
    ) -> tuple[PerSample, float]:
        """Draw one noise level for each sample, and return them with the weight of the loss there.

        The levels follow `trained_levels`, and `expert_balance` if both experts are trained. `partner` is a role
        evaluated at the same levels: where this role is one network and the partner has two experts, one of the
        partner's is drawn.
        """
        u, weight = rng.uniform(name, sample_ids), 1.0
        if self.config.expert_balance != "mixed" and not self.trains_one_of_two:
            boundary = self.boundary if self.boundary is not None or partner is None else partner.boundary
            assert boundary is not None  # a role without experts draws mixed levels
            u, weight = balanced_uniform(u, law.share_above(boundary), self.config.expert_balance, rng.shared)
        return self.trained_levels(law, u), weight

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add the gradient of a loss; `last` says that `step` comes next.

        A loss in which only an expert that is not trained took part has no gradient and is skipped. The ranks
        exchange the gradients of two experts after every pass: none of them knows which pass is an expert's last
        before its step. Gradients of weights that are not sharded are averaged here too.
        """
        for expert in self.experts:
            self._exchange_gradients(expert, last=last or bool(expert))
        if loss.requires_grad or len(self._learners) == len(self.experts):
            with working_on(f"the backward pass of role {self.name}"):
                loss.backward()
        for expert, backbone in self._backbones.items():
            if last or expert:
                backbone.average_gradients()

    def _exchange_gradients(self, expert: Expert, *, last: bool) -> None:
        self._backbones[expert].exchange_gradients(last=last)

    def step(self) -> dict[str, float]:
        """Clip the gradients and update the weights that have one; the others, and their EMA, stay as they are.

        NotFiniteError, with no weight changed, if a gradient is not finite.
        """
        norms = {name: learner.gradient_norm() for name, learner in self._learners.items() if learner.has_gradient}
        metrics: dict[str, float] = {}
        for expert, norm in norms.items():
            self._backbones[expert].reshard()
            metrics |= self._learners[expert].step(norm)
        return metrics

    def merge(self) -> None:
        """Fold adapters into the weights, for good; nothing is left to train."""
        for expert in self._learners:
            self._backbones[expert].merge(self.key(self.name, expert))
        self._learners = {}

    def adapter(self, expert: Expert) -> tuple[dict[str, nn.Parameter], float]:
        """Return the weights of one network's adapter by peft's names, and its alpha.

        UserError if it was trained on weights that another adapter was merged into: it fits no others.
        """
        self._check_alone(expert)
        config = self.config.adapter
        return self._backbones[expert].weights(self.key(self.name, expert)), config.alpha or config.rank

    def save_adapter(self, expert: Expert, folder: Path) -> None:
        """Write the adapter of one network in peft's layout; UserError as `adapter`."""
        self._check_alone(expert)
        self._backbones[expert].save_adapter(self.key(self.name, expert), folder)

    def _check_alone(self, expert: Expert) -> None:
        if self._backbones[expert].model.new_layers:
            raise UserError(
                f"{self.name} trains layers that its base lacks beside its adapter, which no layout of adapters holds: "
                "write both with --adapter merge"
            )
        if merged := self._backbones[expert].merged:
            raise UserError(
                f"the adapter of {self.name} is on top of {merged.name}, which is merged into its base: it is of use "
                "to no other base; write both as one with --adapter merge"
            )

    def restart_ema(self) -> None:
        """Start the EMA anew from the weights as they are, after they were loaded."""
        for learner in self._learners.values():
            learner.restart_ema()

    def start_from_ema(self) -> None:
        """Set the weights to their EMA; a role without one keeps its weights."""
        for learner in self._learners.values():
            learner.start_from_ema()

    def scale_learning_rate(self, scale: float) -> None:
        """Multiply the learning rate of every later update by `scale`, besides its schedule."""
        for learner in self._learners.values():
            learner.rate_scale = scale

    def sampling_weights(self, *, ema: bool) -> AbstractContextManager[None]:
        """Run the role with the weights that samples are made with: with `ema` its EMA weights, if it keeps any."""
        return self.ema_weights() if ema else nullcontext()

    @contextmanager
    def ema_weights(self) -> Iterator[None]:
        """Run the role with its EMA weights, if it keeps any."""
        with ExitStack() as stack:
            for learner in self._learners.values():
                stack.enter_context(learner.ema_weights())
            yield

    def state_dict(self) -> dict[str, Tensor]:
        """Return weights, optimizer moments, EMA and update counters as one flat dict; experts as weights/high/NAME."""
        return {
            _named(expert, key): value
            for expert, learner in self._learners.items()
            for key, value in learner.state_dict().items()
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore the update counters; the tensors of `state_dict` were already filled in place."""
        for expert, learner in self._learners.items():
            learner.updates = int(state[_named(expert, "updates")])


def _named(expert: Expert, key: str) -> str:
    """`weights/NAME` of an expert is `weights/high/NAME`."""
    kind, *name = key.split("/", 1)
    return "/".join([kind, *([expert] if expert else []), *name])
