"""The experience buffer: stored groups of earlier training steps in place of some new ones (a replay buffer).

A stored group goes back to its slot, the place of its prompt in the training step: no sample travels between ranks, and
no other group of the step has its sample ids. Its samples lag: they keep rewards, log-densities and versions of the
weights, and the noise of the training step that made them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import torch
from torch import Tensor

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.ranges import Count, Range
from unified_trainer.basics.types import Batch, Rollout, widest
from unified_trainer.data.loader import Loader
from unified_trainer.methods.base import Metrics
from unified_trainer.methods.rl.kept_rollout import HostRollout
from unified_trainer.methods.rl.rollouts import STORED, AroundRollouts, Rollouts, ScoredSamples
from unified_trainer.parallel.fsdp import to_local, zero_rows
from unified_trainer.parallel.random import Streams
from unified_trainer.rewards.reward import Scores

COUNTS = ("made_in", "version", "prompt", "text", "sample_id")  # columns of integers; made_in counts from 1


@dataclass(frozen=True)
class BufferConfig:
    share: Annotated[float, Range(0, 1, open_high=True)] = 0.0
    """Share of the groups of a training step that come from the buffer instead of being made, from the second training
    step on; the first one makes all. 0 stores nothing (experimental)."""
    capacity: Count = 4
    """Groups stored for each slot, the place of a prompt in the training step: num_prompts x capacity in all, in CPU
    memory and in checkpoints. A new group takes the place of the oldest one of its slot."""
    order: Literal["random", "newest"] = "random"
    """Which stored group of a slot is taken: any with equal chances, or the newest."""

    def slots(self, step: int, prompts: int, updates: int) -> set[int]:
        """Return the slots of stored groups in a step: evenly spaced over updates and ranks, and moved each step."""
        count = round(self.share * prompts) if step else 0
        numbers = ((step + i * prompts // count) % prompts for i in range(count))  # place by place in their updates
        return {(n + n // updates) % updates * (prompts // updates) + n // updates for n in numbers}


class FreshRows:
    """The rows of a loader without those of stored groups: what a source is asked for, and may make ahead."""

    def __init__(self, config: BufferConfig, loader: Loader) -> None:
        self._config, self._loader, self.request = config, loader, loader.request

    def rows(self, step: int, early: int = 0) -> tuple[list[int], list[int]]:
        """Return the rows and ids of this rank's new samples of a step, as known `early` steps before it."""
        size, (rows, ids) = self._loader.samples_per_prompt, self._loader.rows(step, early)
        taken = self._config.slots(step, self._loader.samples // size, self._loader.updates)
        new = [at for at, i in enumerate(ids) if i // size not in taken]
        return [rows[at] for at in new], [ids[at] for at in new]


class ExperienceBuffer(AroundRollouts):
    """Samples of another source, whose groups it stores and gives again in later steps."""

    def __init__(self, source: Rollouts, config: BufferConfig, loader: Loader) -> None:
        super().__init__(source)
        self._config, self._loader = config, loader
        self._reach = torch.tensor(config.capacity)  # newest groups of a slot, of which one is drawn
        self._columns: dict[str, Tensor] = {}  # [samples of an update, updates, capacity, ...]; rows of all ranks
        self._metrics: Metrics = {}

    def samples(self, batch: Batch, step: int, rng: Streams) -> ScoredSamples:
        size = self._loader.samples_per_prompt
        taken = self._config.slots(step, self._loader.samples // size, self._loader.updates) if self._columns else ()
        slots = [i // size for i in batch.sample_ids]
        made, old = ([row for row, slot in enumerate(slots) if (slot in taken) is stored] for stored in (False, True))
        fresh = self._source.samples(batch.take(made), step, rng)
        self._store(fresh, made, step)
        held = (to_local(self._columns["made_in"]) > 0).sum() * self._loader.mesh.data_size
        self._metrics = {"buffer_groups": float(held) / size}
        if not old:
            return fresh
        order = sorted(range(len(batch)), key=[*made, *old].__getitem__)
        return fresh.joined(self._stored(old, rng.uniform("buffer", [slots[row] for row in old]), step, fresh), order)

    def metrics(self) -> Metrics:
        return self._metrics | super().metrics()

    def lower_ahead(self) -> None:
        super().lower_ahead()
        self._reach.sub_(1).clamp_(min=1)  # a slot's oldest groups are drawn no more

    def allocate(self, shapes: Mapping[str, Sequence[int]]) -> None:
        """Make room for columns of these shapes, of which the first three are known: those that a checkpoint holds."""
        mesh, updates = self._loader.mesh, self._loader.updates
        every = (self._loader.samples // updates, updates, self._config.capacity)
        for path, shape in shapes.items():
            name = path.removeprefix("buffer/columns/")
            dtype = widest(mesh.device) if name == "log_probs" else torch.int64 if name in COUNTS else torch.float32
            self._columns[name] = zero_rows((*every, *shape[3:]), dtype, mesh)

    def state_dict(self) -> dict[str, Tensor]:
        return {"reach": self._reach} | {f"columns/{name}": column for name, column in self._columns.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None: ...  # the tensors were filled in place

    def _at(self, rows: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return the places of this rank's rows, which come update by update, in the columns."""
        share, index = self._loader.samples // self._loader.updates // self._loader.mesh.data_size, torch.tensor(rows)
        return index % share, index // share

    def _store(self, samples: ScoredSamples, rows: Sequence[int], step: int) -> None:
        """Store samples in place of the oldest ones of their slots."""
        rollout, scores, batch, every = samples.rollout, samples.scores, samples.batch, range(len(rows))
        columns = {"x0": rollout.end(every), "parts": scores.parts, "thumbnails": scores.thumbnails}
        columns |= {f"statistics/{name}": values for name, values in scores.statistics.items()}
        if transitions := rollout.log_probs.shape[1]:
            states = [rollout.state(number, every) for number in range(transitions + 1)]
            columns |= {"states": torch.stack(states, 1), "log_probs": rollout.log_probs}
        texts, made_in = map(self._loader.checksum, batch.prompt_ids), [step + 1] * len(rows)
        counts = (made_in, samples.versions.tolist(), batch.prompt_ids, [*texts], batch.sample_ids)
        columns |= {name: torch.tensor(values) for name, values in zip(COUNTS, counts, strict=True)}
        if not self._columns:
            self.allocate({name: (0, 0, *column.shape) for name, column in columns.items()})
        oldest = to_local(self._columns["made_in"])[self._at(rows)].argmin(-1)
        for name, column in columns.items():
            own = to_local(self._columns[name])
            own[(*self._at(rows), oldest)] = column.detach().to(own)

    def _stored(self, rows: Sequence[int], uniform: Tensor, step: int, fresh: ScoredSamples) -> ScoredSamples:
        """Return a stored sample for each row, by a number in [0, 1) of its slot, kept where the fresh ones are."""
        made_in, device = to_local(self._columns["made_in"])[self._at(rows)], self._loader.mesh.device
        count = (made_in > 0).sum(1).clamp(max=self._reach)
        drawn = (uniform * count).long() if self._config.order == "random" else torch.zeros_like(count)
        index = (*self._at(rows), (-made_in).argsort(1).gather(1, drawn[:, None])[:, 0])
        columns = {name: to_local(column)[index] for name, column in self._columns.items()}
        made, version, prompts, texts, ids = (columns[name] for name in COUNTS)
        self._metrics["buffer_age"] = float((age := step + 1 - made).double().mean())
        if [self._loader.checksum(row) for row in prompts.tolist()] != texts.tolist():
            raise UserError("the prompts are not those of the samples in the experience buffer: start with --init-from")
        batch = self._loader.batch_of(prompts.tolist(), ids.tolist())
        batch = replace(batch, prompt_ids=tuple((prompts + age * STORED).tolist()))
        hosted = isinstance(fresh.rollout, HostRollout)
        held = columns if hosted else {name: column.to(device) for name, column in columns.items()}
        x0 = held["x0"]
        whole = Rollout(held["states"], held["log_probs"], x0) if "states" in held else Rollout.from_x0(x0)
        kept = HostRollout.of(whole, device) if hosted else whole
        statistics = {name: columns[f"statistics/{name}"].to(device) for name in fresh.scores.statistics}
        scores = Scores(columns["parts"].to(device), statistics, columns["thumbnails"].to(device))
        return ScoredSamples(batch, kept, scores, version, dict(zip(ids.tolist(), (made - 1).tolist(), strict=True)))
