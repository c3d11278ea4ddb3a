"""The base of all methods: what a method declares, and the losses it yields.

A method is declared, never discovered: it lists its roles, names its settings' class and says whether it reads a
reward. The declaration is checked when its module is imported.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from torch import Tensor

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.ranges import MAY_CHANGE, Count
from unified_trainer.basics.types import Batch, Rollout, of_kind
from unified_trainer.data.batch_plan import BatchPlan, largest_divisor
from unified_trainer.numerics.flow import GuidanceScale, NoiseLevelLaw
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.parallel.random import Streams
from unified_trainer.roles.experts import ExpertLayout, check_balance
from unified_trainer.roles.role import Frozen, Role, RoleConfig, Trainable, TrainableConfig
from unified_trainer.roles.weight_copy import WeightCopy
from unified_trainer.sampling.solver import SamplerConfig
from unified_trainer.sampling.teacher_ode import TeacherODE

Metrics = dict[str, float]  # of one training step; noted where they are computed
PARTS = ("reward", "loader", "rollouts", "codec")  # constructor arguments besides roles: see `Method.parts`


class DeclarationError(UserError):
    """A method is declared wrongly; the message names its file and line."""


@dataclass(frozen=True)
class Loss:
    """The value of one backward pass, and whether its role takes an optimizer step after it.

    The values of the losses up to an optimizer step must sum to the mean over this micro-batch's samples; the trainer
    divides by the number of micro-batches. Metrics are averaged over micro-batches, rounds and ranks: a number counts
    once, a vector once per element. A name that ends in _max is a maximum.
    """

    role: str
    value: Tensor
    step_after: bool = True
    metrics: dict[str, float | Tensor] = field(default_factory=dict)
    messages: tuple[str, ...] = ()  # lines for the terminal; each is printed once in a training step


@dataclass(frozen=True)
class RoleSpec:
    """A role that a method declares: how its weights are kept, and whose weights it starts from."""

    kind: type[Role]
    starts_from: str = ""  # role whose folder it takes when its own path is empty; "" is the first role of the method
    copy_of: str = ""  # trained role whose weights and settings it copies; it then has no settings of its own
    when: Callable[[Any], bool] = lambda config: True  # from the method's settings: whether the role is needed
    # from the method's settings: whether it generates in the chunks of a causal student, as copies of the student do
    in_chunks: Callable[[Any], bool] = lambda config: False

    @property
    def config_class(self) -> type[RoleConfig] | None:
        """Class of the role's settings; None for a copy, which has none of its own."""
        return None if self.copy_of else TrainableConfig if issubclass(self.kind, Trainable) else RoleConfig


def trained(kind: type[Trainable] = Trainable, *, starts_from: str = "") -> RoleSpec:
    """Declare a role with an optimizer; `kind` may be Critic or a subclass of Trainable of your own."""
    return RoleSpec(kind, starts_from)


def frozen(*, starts_from: str = "", in_chunks: Callable[[Any], bool] = lambda config: False) -> RoleSpec:
    """Declare a role whose weights never change, such as a teacher; `in_chunks` says when it is causal."""
    return RoleSpec(Frozen, starts_from, in_chunks=in_chunks)


def initial_copy(of: str, *, when: Callable[[Any], bool] = lambda config: True) -> RoleSpec:
    """Declare the weights that a trained role starts the run with, such as the reference of a KL."""
    return RoleSpec(Frozen, of, copy_of=of, when=when)


def updated_copy(of: str, *, when: Callable[[Any], bool] = lambda config: True) -> RoleSpec:
    """Declare a copy of a trained role that the method updates with `update_from`, such as an old policy."""
    return RoleSpec(WeightCopy, of, copy_of=of, when=when)


@dataclass(frozen=True)
class MethodSetup:
    """A run before any weight is read, as a method's `check` sees it."""

    sampler: SamplerConfig
    roles: Mapping[str, RoleConfig]  # settings of each role
    layouts: Mapping[str, ExpertLayout]  # networks of each role
    steps: int = 0  # training steps of the run; 0 if none are known

    def require_trained(self, role: str, levels: Sequence[Sequence[float]], key: str) -> None:
        """Raise UserError if none of the noise levels of some row is of a network that is trained."""
        layout = self.layouts[role]
        for row in levels:
            if not any(layout.trains(sigma) for sigma in row):
                shown = ", ".join(f"{sigma:.4g}" for sigma in row)
                raise UserError(
                    f"{key} lies wholly in the expert of {role} that is not trained: noise levels {shown}, boundary "
                    f"{layout.boundary:g}. Train the other expert, or change {key}"
                )

    def check_guidance(self, role: str, key: str, scale: float | tuple[float, float]) -> None:
        """Raise UserError if two guidance scales are given for a role of one network."""
        if isinstance(scale, tuple) and self.layouts[role].boundary is None:
            raise UserError(f"{key} {scale} is for two experts, but {role} is one network: give one number")

    def check_noise_levels(self, role: str, law: NoiseLevelLaw, partner: str = "") -> None:
        """Raise UserError unless `expert_balance` and the trained experts of the role fit its noise levels' law."""
        config, layout = of_kind(TrainableConfig, self.roles[role]), self.layouts[role]
        boundary = layout.boundary
        if boundary is not None and layout.trains_one_of_two:
            if law.share_above(boundary) == float("low" in layout.trained):
                raise UserError(
                    f"{role}: no noise level that is drawn for it is of its trained expert, {layout.trained[0]} of "
                    f"boundary {boundary:g}: train the other expert too, or change the shift or the range of the levels"
                )
            return
        if boundary is None and partner:
            boundary = self.layouts[partner].boundary
        share = None if boundary is None else law.share_above(boundary)
        check_balance(f"{role}.expert_balance", config.expert_balance, share)


@dataclass(frozen=True)
class MethodConfig:
    """A method's own settings: a frozen dataclass with a default and a docstring for every field."""

    matches_windows: ClassVar[bool] = False  # whether the teacher sees parts of videos that it would not make
    needs_pairs: ClassVar[bool] = False  # whether batches must hold a rejected clip beside each clip
    continues_samples: ClassVar[bool] = False  # whether a training step goes on with the samples of the one before
    masks_chunks: ClassVar[bool] = True  # whether a causal student is trained on all chunks in one masked pass
    # Where a step runs an expert that is not trained, of a role that trains the other: sampling on the way to a trained
    # noise level (before), at the end of a step from one (below), or elsewhere (any). If nowhere, it is not loaded.
    runs_untrained: ClassVar[tuple[str, ...]] = ("any",)

    @property
    def needs_clips(self) -> bool:
        """Whether batches must hold clean latents of clips."""
        return False

    def teacher_ode(self, sampler: SamplerConfig) -> TeacherODE | None:
        """Return the teacher's ODE whose trajectories data.path may hold, or None for a method that takes none.

        Its role is not loaded where data.path holds them: the method's constructor needs a default for it.
        """
        return None

    @property
    def teacher_guidance(self) -> GuidanceScale | None:
        """Guidance scale of the role `teacher` whose samples the student's are to look like; None without one.

        Such a method has the guard of distillation, which reads its critic_to_teacher_error and sample_power.
        """
        return None

    def check(self, setup: MethodSetup) -> None:
        """Raise UserError, naming the key, for settings that cannot work; called before any weight is loaded."""

    def updates(self, role: str, steps: int, sampler: SamplerConfig) -> int:
        """Return the updates of a trained role in the first `steps` training steps, if none is skipped.

        A share of the run's updates (`warmup_ratio`) is a share of these.
        """
        plan = self.plan()
        return steps * (plan.prompts // plan.prompts_per_update)

    def plan(self) -> BatchPlan:
        """Return how the samples of a training step divide into updates, ranks and micro-batches."""
        raise NotImplementedError(f"{type(self).__name__} must define plan(), or derive from SingleUpdateConfig")


@dataclass(frozen=True)
class SingleUpdateConfig(MethodConfig):
    """Settings of a method whose training step is one optimizer update on one batch."""

    batch_size: Count = 32
    """Samples per optimizer update, over all ranks."""
    micro_batch: Annotated[Count, MAY_CHANGE] = 32
    """Samples per backward pass, at most: a rank takes the largest size that divides its share."""

    def plan(self) -> BatchPlan:
        return BatchPlan.one_update(self.batch_size, self.micro_batch)


class Method:
    """An algorithm: roles in, a generator of losses out.

    A subclass sets `config_class` and `roles` and defines `step`; everything else has a default. Its constructor
    takes the settings, the sampler and, by name, its roles (and `reward` and `loader` if it sets `uses_reward`,
    `loader` alone if it sets `uses_loader`, `rollouts` if it sets `sampled_by`, `codec` if it sets `uses_codec`);
    without a constructor of its own they become attributes.
    """

    config_class: ClassVar[type[MethodConfig]] = MethodConfig
    roles: ClassVar[Mapping[str, RoleSpec]] = {}
    uses_reward: ClassVar[bool] = False  # the reward and the data loader are constructor arguments
    sampled_by: ClassVar[str] = ""  # the role that makes the samples of `rollouts`, a constructor argument then
    trains_flow_maps: ClassVar[bool] = False  # the student may be a flow map: `flow_map` of its settings
    uses_loader: ClassVar[bool] = False  # the data loader is a constructor argument without the reward too
    uses_codec: ClassVar[bool] = False  # the codec, which decodes and encodes videos, is a constructor argument
    trained_for_sampler: ClassVar[bool] = False  # the student fits the run's sampler alone: checkpoints keep it

    def __init_subclass__(cls, *, shared: bool = False) -> None:
        """Check the declaration of a method; a `shared` base class of several methods declares nothing."""
        super().__init_subclass__()
        if not shared:
            _check_declaration(cls)

    def __init__(self, config: Any, sampler: SamplerConfig, **parts: Any) -> None:
        self.config, self.sampler = config, sampler
        vars(self).update(parts)

    @classmethod
    def parts(cls) -> tuple[str, ...]:
        """Return the names of the constructor arguments besides settings, sampler and roles."""
        given = {
            "reward": cls.uses_reward,
            "loader": cls.uses_reward or cls.uses_loader,
            "rollouts": cls.sampled_by,
            "codec": cls.uses_codec,
        }
        return tuple(name for name in PARTS if given[name])

    @staticmethod
    def sample(config: Any, sampler: SamplerConfig, role: Role, batch: Batch, step: int, rng: Streams) -> Rollout:
        """Generate the samples of a batch in training step `step`, for a method that sets `sampled_by`.

        It may run in another process than the method, with a copy of the role: it must be a function of its arguments.
        """
        raise NotImplementedError

    def micro_batches(self, batch: Batch) -> list[Batch]:
        """Return the parts of this rank's batch; `step` is called on each, and all advance in lockstep."""
        return batch.split(largest_divisor(len(batch), self.config.micro_batch))

    def step(self, batch: Batch, step: int, rng: Streams, mesh: Mesh) -> Iterator[Loss]:
        """Yield the losses of one micro-batch in training step `step`, in the order of their backward passes."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Tensor]:
        """Return what the method remembers from step to step, as tensors by name; it goes into the checkpoints."""
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state_dict` returned."""


def _check_declaration(cls: type[Method]) -> None:
    """Raise DeclarationError for a method class that build cannot construct."""
    config_class = cls.config_class
    derived = (
        isinstance(config_class, type) and issubclass(config_class, MethodConfig) and config_class is not MethodConfig
    )
    if not derived or "__dataclass_fields__" not in vars(config_class):
        raise _wrong(cls, "must set config_class to a frozen dataclass derived from MethodConfig or SingleUpdateConfig")
    _check_roles(cls)
    if cls.sampled_by and not (cls.uses_reward and cls.sampled_by in cls.roles and cls.sample is not Method.sample):
        raise _wrong(cls, "sets sampled_by: it must name one of its roles, set uses_reward, and define sample(...)")
    if cls.sampled_by and "rollout_batch" not in config_class.__dataclass_fields__:
        raise _wrong(
            cls,
            "sets sampled_by: its config_class needs a field rollout_batch, the samples generated at a time; derive it "
            "from unified_trainer.methods.rl.rollout_config.RolloutConfig, or from GroupConfig",
        )
    if cls.step is Method.step:
        raise _wrong(cls, "must define step(batch, step, rng, mesh), a generator of losses")
    if cls.__init__ is not Method.__init__:
        parameters = inspect.signature(cls.__init__).parameters.values()
        takes_others = any(p.kind is p.VAR_KEYWORD for p in parameters)  # it hands them on to Method's constructor
        given = [p.name for p in parameters if p.kind is not p.VAR_KEYWORD][1:]
        wanted = ["config", "sampler", *cls.roles, *cls.parts()]
        if not {*given} <= {*wanted} or (not takes_others and len(given) != len(wanted)):
            raise _wrong(cls, f"has a constructor with {', '.join(given)}, but declares {', '.join(wanted)}")


def _check_roles(cls: type[Method]) -> None:
    roles = cls.roles
    if not isinstance(roles, Mapping) or not roles:
        raise _wrong(cls, 'must declare its roles: roles = {"student": trained(), ...}')
    first = next(iter(roles))
    if "student" not in roles or not issubclass(roles["student"].kind, Trainable):
        raise _wrong(cls, 'must declare a trained role "student": validation, sampling and export use it')
    if first != "student":
        raise _wrong(
            cls, f'must declare "student" first, not "{first}": other roles start from it unless they say otherwise'
        )
    for name, spec in roles.items():
        if not isinstance(spec, RoleSpec):
            raise _wrong(
                cls, f"declares role {name} as {spec!r}: use trained(), frozen(), initial_copy() or updated_copy()"
            )
        if not name.isidentifier() or name in PARTS:
            raise _wrong(cls, f"cannot call a role {name!r}: it must be an identifier, and not {' or '.join(PARTS)}")
        origin = spec.starts_from or first
        if origin not in roles:
            raise _wrong(
                cls,
                f"declares that role {name} starts from {origin}, which is not one of its roles ({', '.join(roles)})",
            )
        if origin != first and list(roles).index(origin) >= list(roles).index(name):
            raise _wrong(
                cls, f"declares that role {name} starts from {origin}: a role starts from one declared before it"
            )
        if spec.copy_of and not issubclass(roles[spec.copy_of].kind, Trainable):
            raise _wrong(cls, f"declares role {name} as a copy of {spec.copy_of}, which is not trained")


def _wrong(cls: type[Method], why: str) -> DeclarationError:
    return DeclarationError(f"{place_of(cls)}: method {cls.__name__} {why}")


def place_of(cls: type) -> str:
    """Return the file and line of a class."""
    try:
        return f"{inspect.getsourcefile(cls)}:{inspect.getsourcelines(cls)[1]}"
    except (OSError, TypeError):
        return cls.__module__
