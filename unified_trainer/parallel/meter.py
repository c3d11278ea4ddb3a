"""The cost of a training step: its phase and seconds by phase, and the tokens and FLOPs of its networks.

The code that does the work marks it with `phase` and adds to `Meter.current()`. Whoever wants to know runs it inside
`Meter.measure`; elsewhere the marks do nothing. No method needs code for it.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from fractions import Fraction

import torch

from unified_trainer.parallel.device import Timeline, device_name, peak_flops, peak_memory
from unified_trainer.parallel.mesh import Mesh

OTHER = "other"  # the phase outside of all others


def ignore(_label: str) -> None:
    """Show nothing."""


@dataclass(frozen=True)
class Pass:
    """One pass of a network."""

    role: str  # student, or student_high for one of two experts
    gradient: bool  # whether its output has a graph
    samples: int
    tokens: int  # latent tokens of all samples
    share: Mapping[str, Fraction]  # of a plain pass's FLOPs, as `VideoModel.pass_share`
    inputs: tuple[torch.Size, ...]  # shapes of the tensors that the network was given
    to_features: bool = False  # whether it ends at the features of the middle block


class Meter:
    """Measures the work that runs inside `measure` on this rank; used once."""

    def __init__(
        self,
        device: torch.device,
        show: Callable[[str], None] = ignore,
        note: Callable[[Pass], None] | None = None,
    ) -> None:
        """`show` is called with the present phase in words, such as "rollout 3/8", whenever it changes.

        `note` is called with every pass of a network.
        """
        self.tokens = 0.0  # latent tokens that went forward through the networks of all roles
        # Of the forward and backward passes of these networks, without recomputation. Both are NaN if one is unknown.
        self.flops = 0.0
        self._timeline, self._show, self.note = Timeline(device), show, note
        self._open: list[tuple[str, str]] = []  # name and label of each open phase
        self._names: list[str] = []  # of the phase that begins at each point of the timeline

    @staticmethod
    def current() -> "Meter | None":
        """Return the meter inside whose `measure` the caller runs."""
        return _CURRENT.get()

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Measure what runs inside."""
        before = _CURRENT.set(self)
        try:
            with self.phase(OTHER, ""):
                yield
        finally:
            _CURRENT.reset(before)

    @contextmanager
    def phase(self, name: str, label: str) -> Iterator[None]:
        """Run a phase; the time of phases inside it is theirs. Inside a phase of its own name it keeps that label."""
        outer = self._open[-1] if self._open else None
        self._enter(name, outer[1] if outer is not None and outer[0] == name else label)
        try:
            yield
        finally:
            self._open.pop()
            if self._open:
                self._enter(*self._open.pop())
            else:
                self._timeline.mark()

    def detail(self, text: str) -> None:
        """Show how far the present phase is."""
        self._show(f"{self._open[-1][1]}, {text}")

    def add(self, tokens: float, flops: float) -> None:
        """Count the work of a network; a backward pass may do so from another thread."""
        self.tokens += tokens
        self.flops += flops

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each phase, without phases inside it; they sum to the time inside `measure`."""
        totals: dict[str, float] = {}
        for name, spent in zip(self._names, self._timeline.seconds(), strict=True):
            totals[name] = totals.get(name, 0.0) + spent
        return totals

    def _enter(self, name: str, label: str) -> None:
        self._open.append((name, label))
        self._names.append(name)
        self._timeline.mark()
        if label:
            self._show(label)


_CURRENT: ContextVar[Meter | None] = ContextVar("meter", default=None)


@contextmanager
def phase(name: str, number: int = 0, total: int = 0) -> Iterator[None]:
    """Mark a phase of the work, as a context or a decorator: part `number` of `total`, where they are known."""
    meter = Meter.current()
    if meter is None:
        yield
        return
    part = f" {number}/{total}" if total else f" {number}" if number else ""
    with meter.phase(name, name + part):
        yield


def detail(text: str) -> None:
    """Say how far the present phase is, such as "step 3/20"."""
    meter = Meter.current()
    if meter is not None:
        meter.detail(text)


def step_cost(meter: Meter, mesh: Mesh, samples: int) -> dict[str, float]:
    """Return the cost of a training step: this rank's seconds, and rates and memory over all ranks (collective).

    `samples` are those of the step, over all ranks.
    """
    seconds, device = meter.seconds(), mesh.device
    total, peak = sum(seconds.values()), peak_flops(device_name(device)) or 0.0
    own = torch.tensor([[meter.tokens, meter.flops, peak, peak_memory(device)]], dtype=torch.float64)
    tokens, flops, peaks, memory = mesh.all_gather_cpu(own).unbind(1)
    cost = {"seconds": total, **{f"seconds/{name}": spent for name, spent in seconds.items()}}
    cost["samples_per_second"] = samples / total
    if bool(flops.isfinite().all()):
        cost["tokens_per_second"] = float(tokens.sum()) / total
        cost["model_flops_per_second"] = float(flops.sum()) / total
    if bool(flops.isfinite().all() and (peaks > 0).all()):
        cost["mfu"] = cost["model_flops_per_second"] / float(peaks.sum())
    return cost | {"peak_memory_gib_max": float(memory.max())}
