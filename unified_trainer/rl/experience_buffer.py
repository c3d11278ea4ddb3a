"""The experience buffer: groups of earlier training steps, stored to be trained on again (a replay buffer).

A stored group stays where its samples were made. It belongs to a place, the position of its prompt in the batch of an
update, and the rank that holds the samples of a place in one training step holds them in all: no sample travels, and
the samples of a place may be divided over ranks. Priorities are equal on all ranks, so that all draw the same groups.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from unified_trainer.data.batch_plan import largest_divisor
from unified_trainer.data.loader import Loader
from unified_trainer.numerics.flow import widest
from unified_trainer.numerics.priorities import draw_in_proportion, overwritten, present_priority
from unified_trainer.parallel.fsdp import to_local, zero_rows
from unified_trainer.parallel.random import Streams
from unified_trainer.rl.experience_config import ExperienceConfig
from unified_trainer.rl.groups import Advantages, GroupConfig
from unified_trainer.rl.kept_rollout import whole, with_stored
from unified_trainer.rl.minibatches import Minibatch, plan_minibatches
from unified_trainer.rl.past_streams import PastStreams, aged
from unified_trainer.rl.rollouts import ScoredSamples
from unified_trainer.roles.reward import Scores
from unified_trainer.types import PerSample, Rollout, take_rows

Drawn = list[list[tuple[int, int]]]  # the stored groups of each update: place, and position in the depth
Members = list[tuple[int, int, int]]  # stored samples: row among the rank's samples of an update, update, and position


@dataclass(frozen=True)
class Mixed:
    """This rank's samples of a training step: the fresh ones, then stored ones."""

    samples: ScoredSamples  # stored ones have no scores
    advantages: Advantages  # of these samples, with the minibatches of both and metrics of the buffer
    rng: Streams  # the random numbers of the rollouts of both


class ExperienceBuffer:
    """Stores the groups of highest priority, and adds some of them to each update."""

    def __init__(self, config: ExperienceConfig, groups: GroupConfig, loader: Loader, transitions: int) -> None:
        """`transitions` is the number of stochastic transitions of a rollout. Without groups nothing is stored."""
        self._config, self._groups, self._loader, self._mesh = config, groups, loader, loader.mesh
        self._updates, self._places = groups.num_prompts // groups.prompts_per_update, groups.prompts_per_update
        whole = self._places * groups.num_samples  # samples of an update
        self._share = whole // self._mesh.data_size if config.groups else 0
        self._rows: dict[str, Tensor] = {}  # of samples, [samples of an update, updates, depth, ...]
        self._table: dict[str, Tensor] = {}  # of groups, [places, updates, depth]; equal on all ranks
        if not config.groups:
            return
        latent, floats = loader.latent_shape, widest(self._mesh.device)
        kinds = {
            "states": ((transitions + 1, *latent), torch.float32),
            "x0": (latent, torch.float32),
            "log_probs": ((transitions,), floats),
            "versions": ((), torch.int64),
            "sample_ids": ((), torch.int64),
            "advantages": ((), torch.float32),
        }
        several = (self._updates, config.depth)
        for name, (shape, dtype) in kinds.items():
            self._rows[name] = zero_rows((whole, *several, *shape), dtype, self._mesh)
        self._table["priority"] = torch.zeros(self._places, *several, dtype=torch.float64)  # 0: no group
        for name in ("made_in", "prompt", "prompt_hash"):
            self._table[name] = torch.zeros(self._places, *several, dtype=torch.int64)
        self._table["useful"] = torch.zeros(whole, *several, dtype=torch.bool)  # samples left by the filters
        self._table["max_age"] = torch.tensor(config.max_age)

    def mix(self, samples: ScoredSamples, advantages: Advantages, step: int, rng: Streams) -> Mixed:
        """Return fresh samples with the stored ones that the updates of training step `step` also train on.

        Then the fresh groups are stored, where their priority is above the least one that is stored at their place.
        `rng` are the random numbers of the rollout. All ranks must call it; it waits for no other rank.
        """
        if not self._config.groups:
            return Mixed(samples, advantages, rng)
        present = self._present(step)
        drawn = self._draw(present, rng)
        metrics = {"experience_stored": float((present > 0).sum()), "experience_groups": float(sum(map(len, drawn)))}
        mixed = Mixed(samples, replace(advantages, metrics=advantages.metrics | metrics), rng)
        if any(drawn):
            mixed = self._mixed(samples, mixed.advantages, drawn, step, rng)
        self._store(samples, advantages, present, step)
        return mixed

    def draw_younger(self) -> None:
        """Draw groups of one training step less from now on: stored samples lag too far; all ranks call it at once."""
        if self._config.groups:
            self._table["max_age"].sub_(1).clamp_(min=1)

    def state_dict(self) -> dict[str, Tensor]:
        return {f"experience/{name}": value for name, value in (self._rows | self._table).items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Forget the groups whose prompts have changed; the tensors of `state_dict` were filled in place."""
        if not self._config.groups:
            return
        for at in map(tuple, (self._table["priority"] > 0).nonzero().tolist()):
            row, stored = int(self._table["prompt"][at]), int(self._table["prompt_hash"][at])
            if not (self._loader.has_prompt(row) and _hash(self._loader.prompt(row)) == stored):
                self._table["priority"][at] = 0.0

    def _present(self, step: int) -> Float[Tensor, "places updates depth"]:
        """Return the priorities of the stored groups in a training step; 0 if there is none, or it is too old."""
        age = step - self._table["made_in"]
        return present_priority(self._table["priority"], age, self._config.half_life, int(self._table["max_age"]))

    def _draw(self, present: Float[Tensor, "places updates depth"], rng: Streams) -> Drawn:
        """Draw one group of each equal part of an update's places, in proportion to its priority."""
        count, drawn = self._config.groups, []
        uniform = rng.uniform("experience", range(self._updates * count)).reshape(self._updates, count).tolist()
        for update, draws in enumerate(uniform):
            found, parts = [], present[:, update].reshape(count, -1)
            for part, (weights, u) in enumerate(zip(parts, draws, strict=True)):
                at = draw_in_proportion(weights, u)
                if at is not None:
                    found.append(divmod(part * parts.shape[1] + at, self._config.depth))
            drawn.append(found)
        return drawn

    def _mixed(self, samples: ScoredSamples, advantages: Advantages, drawn: Drawn, step: int, rng: Streams) -> Mixed:
        """Return fresh samples and the drawn groups, with minibatches of both."""
        ranks, share, size = self._mesh.data_size, self._share, self._groups.num_samples
        members = [  # of each update: rank, row among its samples of an update, and position in the depth
            [(*divmod(place * size + i, share), at) for place, at in found for i in range(size)] for found in drawn
        ]
        extra = max(sum(rank == one for rank, _, _ in found) for found in members for one in range(ranks))
        useful = torch.zeros(ranks, self._updates, share + extra, dtype=torch.bool)
        teaching = torch.ones_like(useful, dtype=torch.float64)  # only groups with an advantage are stored
        fresh = (ranks, self._updates, share)
        useful[..., :share], teaching[..., :share] = (
            advantages.of_all.useful.reshape(fresh),
            advantages.of_all.advantages.reshape(fresh),
        )
        own: Members = []
        rows = torch.arange(self._updates)[:, None] * share + torch.arange(share + extra).clamp(max=share - 1)
        for update, found in enumerate(members):
            filled = [share] * ranks
            for rank, row, at in found:
                useful[rank, update, filled[rank]] = self._table["useful"][rank * share + row, update, at]
                if rank == self._mesh.data_rank:
                    rows[update, filled[rank]] = self._updates * share + len(own)
                    own.append((row, update, at))
                filled[rank] += 1
        plan = (self._mesh.data_rank, ranks, self._updates, largest_divisor(share + extra, self._groups.update_batch))
        minibatches = [
            [Minibatch(rows.flatten()[one.rows], one.weights) for one in parts]
            for parts in plan_minibatches(useful.flatten(), teaching.flatten(), *plan)
        ]
        skipped = float(sum(not parts for parts in minibatches))
        made = [int(self._table["made_in"][place, update, at]) for update, one in enumerate(drawn) for place, at in one]
        metrics = advantages.metrics | {"skipped_updates": skipped, "experience_age": step - sum(made) / len(made)}
        messages = advantages.messages if skipped == advantages.metrics["skipped_updates"] else ()
        values = advantages.values
        if own:
            stored, of_stored = self._stored(own, step)
            samples, values = _joined(samples, stored), torch.cat([values, of_stored])
        mixed = replace(advantages, values=values, minibatches=minibatches, metrics=metrics, messages=messages)
        return Mixed(samples, mixed, PastStreams(rng))

    def _stored(self, own: Members, step: int) -> tuple[ScoredSamples, PerSample]:
        """Return this rank's samples of drawn groups, and their advantages."""
        index = torch.tensor(own).unbind(1)
        rows = {name: to_local(tensor)[index] for name, tensor in self._rows.items()}
        first = self._mesh.data_rank * self._share
        groups = torch.tensor([((first + row) // self._groups.num_samples, *rest) for row, *rest in own]).unbind(1)
        since, ids = (step - self._table["made_in"][groups]).tolist(), rows["sample_ids"].tolist()
        keys = [aged(key, age) for key, age in zip(ids, since, strict=True)]
        batch = self._loader.batch_of(self._table["prompt"][groups].tolist(), keys)
        rollout = Rollout(rows["states"], rows["log_probs"], rows["x0"], rows["x0"][:, None][:, :0])
        return ScoredSamples(batch, rollout, _no_scores(len(ids)), rows["versions"]), rows["advantages"]

    def _store(
        self, samples: ScoredSamples, advantages: Advantages, present: Float[Tensor, "places updates depth"], step: int
    ) -> None:
        """Store the fresh groups that have an advantage, where their priority is above the least present one."""
        fresh, size = advantages.of_all, self._groups.num_samples
        ids, rewards, useful, values = map(self._by_group, (fresh.ids, fresh.rewards, fresh.useful, fresh.advantages))
        teaches = (useful & (values != 0)).any(-1)
        priority = torch.where(teaches, rewards.std(-1) ** self._config.exponent, 0.0)
        position, taken = overwritten(present, priority)
        own: Members = []
        for place, update in taken.nonzero().tolist():
            at, row = int(position[place, update]), int(ids[place, update, 0])
            entry = {"priority": priority[place, update], "made_in": step, "prompt": row}
            for name, value in (entry | {"prompt_hash": _hash(self._loader.prompt(row))}).items():
                self._table[name][place, update, at] = value
            rows = slice(place * size, (place + 1) * size)
            self._table["useful"][rows, update, at] = useful[place, update]
            of_rank = [divmod(i, self._share) for i in range(rows.start, rows.stop)]
            own += [(row, update, at) for rank, row in of_rank if rank == self._mesh.data_rank]
        if not own:
            return
        made = [update * self._share + row for row, update, _ in own]
        rollout = whole(samples.rollout.take(made))
        columns = {name: getattr(rollout, name) for name in ("states", "x0", "log_probs")}
        others = {"versions": samples.versions, "advantages": advantages.values}
        others["sample_ids"] = torch.tensor(samples.batch.sample_ids)
        columns |= {name: take_rows(column, made) for name, column in others.items()}
        for name, column in columns.items():
            to_local(self._rows[name])[torch.tensor(own).unbind(1)] = column.cpu()

    def _by_group(self, of_all: Tensor) -> Tensor:
        """Return what all ranks' samples have, rank by rank, as [places, updates, samples of a group]."""
        by_update = of_all.reshape(self._mesh.data_size, self._updates, self._share).transpose(0, 1)
        return by_update.reshape(self._updates, self._places, -1).transpose(0, 1)


def _joined(fresh: ScoredSamples, stored: ScoredSamples) -> ScoredSamples:
    """Return both, without the scores and the early predictions of x0 that stored samples do not have."""
    return ScoredSamples(
        fresh.batch.cat(stored.batch),
        with_stored(fresh.rollout, whole(stored.rollout)),
        _no_scores(len(fresh.batch) + len(stored.batch)),
        torch.cat([fresh.versions, stored.versions]),
    )


def _no_scores(samples: int) -> Scores:
    none = torch.zeros(samples, 0)
    return Scores(none, {}, none)


def _hash(prompt: str) -> int:
    return int.from_bytes(hashlib.blake2b(prompt.encode(), digest_size=8).digest(), "little", signed=True)
