"""The settings of a role's adapter."""

from dataclasses import dataclass, field
from typing import Annotated

from unified_trainer.basics.effects import READS, Text
from unified_trainer.basics.ranges import at_least


@dataclass(frozen=True)
class ExpertFileConfig:
    path: Annotated[str, READS] = ""
    """Adapter made elsewhere, for this expert; empty takes the role's."""


Adapters = tuple[Annotated[str, READS], ...]


@dataclass(frozen=True)
class FrozenExpertConfig:
    adapter: ExpertFileConfig = field(default_factory=ExpertFileConfig)
    adapters: Adapters = ()
    """Adapters made elsewhere, for this expert, as those of the role; empty takes the role's."""


@dataclass(frozen=True, kw_only=True)
class AdapterFileConfig:
    path: Annotated[str, READS] = ""
    """Adapter made elsewhere: a folder or a safetensors file in one of the layouts of docs/weights.md. It is merged
    into the weights before the first step."""
    sha256: Text = ""
    """SHA-256 of the adapter's files, and factors. A run writes it into its config.yaml; other content is refused."""


@dataclass(frozen=True)
class AdapterConfig(AdapterFileConfig):
    rank: Annotated[int, at_least(0, 8192)] = 0
    """Rank of the LoRA adapter that is trained in place of the weights; 0 takes that of an adapter made elsewhere, and
    without one trains the weights themselves."""
    alpha: Annotated[float, at_least(0, 1e6)] = 0.0
    """The adapter's output is scaled by alpha / rank; 0 takes that of an adapter made elsewhere, else the rank."""
    layers: tuple[Text, ...] = ()
    """Names of the linear layers that get an adapter; empty takes those of an adapter made elsewhere, else the family's
    usual ones."""
    path: Annotated[str, READS] = field(default="", kw_only=True)
    """Adapter made elsewhere: a folder or a safetensors file in one of the layouts of docs/weights.md. It is trained
    on, unless `merge` is set."""
    merge: bool = field(default=False, kw_only=True)
    """Merge the adapter of `path` into the weights before the first step; with a rank, a new one is then trained."""
