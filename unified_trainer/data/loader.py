"""The batches of a run: the samples of a rank are a function of the step, and of failures where they are counted."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Protocol, runtime_checkable
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from unified_trainer.basics.actions import ACTIONS
from unified_trainer.basics.errors import UserError
from unified_trainer.basics.requests import Request
from unified_trainer.basics.types import Batch, Condition, Trajectory
from unified_trainer.data.batch_plan import BatchPlan, Position
from unified_trainer.data.clips import Clips
from unified_trainer.data.epoch_order import Epochs, in_file_order, one_of_each, shuffled, shuffled_by_row_groups
from unified_trainer.models.base import Codec, ImageEncoder, JointEncoder
from unified_trainer.numerics.advantages import curriculum
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.parallel.random import generator


class Source(Protocol):
    """Rows of prompts, with or without clips."""

    def __len__(self) -> int: ...

    def request(self, index: int) -> Request:
        """Return the prompt of a row, and its condition images."""

    def latents(self, indices: list[int]) -> Tensor | None:
        """Return the clean, normalised latents of these rows, or None for a source without clips."""


@runtime_checkable
class PairSource(Source, Protocol):
    """Rows with a second clip, preferred less than the first."""

    def rejected(self, indices: list[int]) -> Tensor | None:
        """Return the clean, normalised latents of the second clips, or None for a source of single clips."""


@runtime_checkable
class StoredSource(Source, Protocol):
    """Rows in files, which are read row group by row group and may hold text embeddings."""

    row_groups: Sequence[int]  # number of rows of each
    lanes: int  # row groups that the rows of a batch come from

    def trajectory(self, indices: list[int]) -> Trajectory | None:
        """Return the teacher's trajectories of these rows, or None for a source without them."""

    def condition(self, indices: list[int]) -> Condition | None:
        """Return the conditions of these rows, or None if their requests are to be encoded."""

    def to_encode(self, rows: Sequence[int]) -> Sequence[int]:
        """Return the rows whose prompts are to be encoded before a training that draws these rows."""

    def prefetch(self, indices: list[int]) -> None:
        """Begin to read these rows, which are asked for next."""

    def close(self) -> None:
        """End the reading."""


class Loader:
    """The batches of each step: every row once per epoch, in a new order each epoch; or in that of the file, or drawn
    by failures.
    """

    def __init__(
        self,
        source: Source,
        codec: Codec,
        plan: BatchPlan,
        latent_shape: tuple[int, int, int, int],
        negative_prompt: str,
        seed: int,
        mesh: Mesh,
        *,
        ahead: int = 0,
        shuffle: bool = True,
    ) -> None:
        """The prompts of a step are known `ahead` steps before it, even where failures decide them.

        Without `shuffle` every epoch has the rows in the order of their file.
        """
        self._source, self._codec, self._plan, self._seed = source, codec, plan, seed
        self._shuffle = shuffle
        self.mesh, self.latent_shape, self._negative_prompt = mesh, latent_shape, negative_prompt
        self.samples = plan.prompts * plan.num_samples  # of one training step at most, over all ranks
        self.samples_per_prompt = plan.num_samples
        self.updates = plan.prompts // plan.prompts_per_update  # of one training step, for each role
        if plan.by_failures and plan.prompts > len(source):
            raise UserError(
                f"{plan.keys[0]} must be at most the {len(source)} prompts that are drawn by failures, not "
                f"{plan.prompts}"
            )
        # Counts of failures: the present ones, and those of 1, 2, ... `ahead` steps ago.
        dtype = torch.int64 if plan.failures_kept == 1 else torch.float64
        counts = torch.zeros(ahead + 1, len(source), dtype=dtype)
        self._failures = counts if plan.by_failures else None
        self._ahead = ahead
        self._stored = source if isinstance(source, StoredSource) else None
        self.go_on(plan.begun)

    def go_on(self, position: Position) -> None:
        """Let the batches follow on those before a position, of whatever sizes they were."""
        begun = self._laid_out(position)
        self._plan = replace(self._plan, begun=begun)
        self._epochs = self._epochs_of(np.arange(len(self._source)), begun.layouts)

    def _laid_out(self, position: Position) -> Position:
        """Return a position with the layout of the present batches, if row groups are read."""
        layouts = list(position.layouts)
        if self._stored is not None:
            layout = [self._plan.prompts, self._stored.lanes]
            if not layouts or list(layouts[-1][1:]) != layout:
                layouts.append([position.prompts if layouts else 0, *layout])
        return replace(position, layouts=layouts)

    def _epochs_of(self, rows: np.ndarray, layouts: Sequence[Sequence[int]]) -> Epochs:
        """Return the epochs of these rows of the source, in rising order."""
        size = len(rows)
        if not self._shuffle:
            order = partial(in_file_order, size=size)
        elif self._stored is None:
            order = partial(shuffled, seed=self._seed, size=size)
        else:
            groups = np.diff(np.searchsorted(rows, np.cumsum([0, *self._stored.row_groups]))).tolist()
            order = partial(shuffled_by_row_groups, seed=self._seed, row_groups=groups, layouts=layouts)
        known = self._source.clip_of if isinstance(self._source, Clips) else ()
        clip_of = [known[row] for row in rows] if known else []
        if len({*clip_of}) < len(clip_of):
            order, size = partial(one_of_each, order=order, clip_of=clip_of, seed=self._seed), len({*clip_of})
        return Epochs(lru_cache(maxsize=2)(lambda epoch: rows[order(epoch)]), size)

    def position(self, step: int) -> Position:
        """Return where the data are after `step` training steps; `go_on` continues from there."""
        return Position(step, self._plan.prompts_before(step), self._plan.begun.layouts)

    def batch(self, step: int) -> Batch:
        """Return this rank's samples of the step, and begin to read those of the next one."""
        batch = self.batch_of(*self.rows(step))
        if self._stored is not None and self._failures is None:
            self._stored.prefetch(self.rows(step + 1)[0])
        return batch

    def rows(self, step: int, early: int = 0) -> tuple[list[int], list[int]]:
        """Return the rows and ids of this rank's samples of a step, as known `early` steps before it."""
        positions = self._plan.at(step).rank_samples(self.mesh.data_rank, self.mesh.data_size)
        rows = self._rows(step, early)
        return [rows[position // self.samples_per_prompt] for position in positions], positions

    def samples_at(self, step: int) -> int:
        """Return the number of samples of a training step, over all ranks."""
        return self._plan.at(step).prompts * self.samples_per_prompt

    def request(self, row: int) -> Request:
        """Return the prompt of a row, and its condition images."""
        return self._source.request(row)

    def checksum(self, row: int) -> int:
        """Return a number of the prompt and the images of a row, by which changed ones are seen; -1 without the row."""
        return crc32(self.request(row).identity.encode()) if row < len(self._source) else -1

    def prompts(self, steps: int) -> list[str]:
        """Return the negative prompt, and the prompts to encode for the batches that this many steps can hold."""
        rows = self._rows_before(steps)
        if self._stored is not None:
            rows = self._stored.to_encode(rows)
        requests = [self._source.request(row) for row in rows]
        return [self._codec.negative(self._negative_prompt), *encoded_texts(self._codec, requests)]

    def further(self, step: int, skip: int, count: int) -> list[int]:
        """Return up to `count` rows outside the step's batch, after the first `skip` of them; none is repeated."""
        taken = set(self._rows(step))
        failures = self._failures[0] if self._failures is not None else torch.zeros(len(self._source))
        if self._shuffle:
            rows = self._drawn(step, "further", len(self._source), failures)
        else:
            rows = self._epochs.rows(self._plan.prompts_before(step + 1), self._epochs.size)
        order = [row for row in rows if row not in taken]
        return order[skip : skip + count]

    def note_failures(self, rows: Iterable[int]) -> None:
        """Count a failure of each of these rows, once in a step, and less of those before.

        All ranks must give the same rows.
        """
        failures = self._failures
        assert failures is not None  # the batch plan draws prompts by failures
        failures[1:] = failures[:-1].clone()
        failures[0] = failures[0] * self._plan.failures_kept
        failures[0, list(rows)] += 1

    def state_dict(self) -> dict[str, Tensor]:
        """Return the failure counts, if failures are counted."""
        if self._failures is None:
            return {}
        before = {f"failures_{steps}_ago": counts for steps, counts in enumerate(self._failures[1:], 1)}
        return {"failures": self._failures[0], **before}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Do nothing: the tensors of `state_dict` are filled in place."""

    def batch_of(self, indices: list[int], sample_ids: list[int]) -> Batch:
        """Make a batch of these rows of the source."""
        latents = self._source.latents(indices)
        rejected = self._source.rejected(indices) if isinstance(self._source, PairSource) else None
        trajectory = None if self._stored is None else self._stored.trajectory(indices)
        device = self.mesh.device
        return make_batch(
            self._codec,
            [self._source.request(i) for i in indices],
            self._negative_prompt,
            self.latent_shape if latents is None else (*latents.shape[1:],),
            prompt_ids=indices,
            sample_ids=sample_ids,
            latents=None if latents is None else latents.to(device),
            trajectory=None if trajectory is None else trajectory.map(lambda x: x.to(device)),
            cond=None if self._stored is None else self._stored.condition(indices),
            rejected=None if rejected is None else rejected.to(device),
        )

    def close(self) -> None:
        """End the reading of rows ahead."""
        if self._stored is not None:
            self._stored.close()

    def _rows_before(self, steps: int) -> Sequence[int]:
        """Return the rows that the batches of this many steps can hold."""
        drawn, size = self._plan.prompts_before(steps), self._epochs.size
        if self._plan.by_failures or self._plan.further or drawn > size < len(self._source):
            return range(len(self._source))
        return self._epochs.rows(0, min(drawn, size))

    def _rows(self, step: int, early: int = 0) -> list[int]:
        """Return the source's rows of the whole step, of all ranks."""
        count = self._plan.at(step).prompts
        if self._failures is not None:
            return self._drawn(step, "batch", count, self._failures[self._ahead - early])
        return self._epochs.rows(self._plan.prompts_before(step), count)

    def _drawn(self, step: int, name: str, count: int, failures: Tensor) -> list[int]:
        """Draw `count` different rows in random order; more failures make a row likelier and earlier."""
        chance = curriculum(failures.double()).numpy().astype(np.float64)
        return generator(self._seed, name, step).choice(len(chance), count, replace=False, p=chance).tolist()


def encoded_texts(codec: Codec, requests: Iterable[Request]) -> Iterator[str]:
    """Yield the texts of requests that are encoded."""
    for request in requests:
        yield request.text
        if request.negative:
            yield codec.negative(request.negative)


def make_batch(
    codec: Codec,
    requests: Sequence[Request],
    negative_prompt: str,
    latent_shape: tuple[int, int, int, int],
    *,
    prompt_ids: list[int],
    sample_ids: list[int],
    latents: Tensor | None = None,
    trajectory: Trajectory | None = None,
    cond: Condition | None = None,
    rejected: Tensor | None = None,
) -> Batch:
    """Make a batch; the requests are encoded unless `cond` holds their conditions.

    Requests without a negative prompt of their own have this one; both branches of guidance have the images of their
    row.
    """
    if cond is None:
        cond = conditions_of(codec, requests, latent_shape)
    cond = with_actions(cond, requests)
    negatives = [codec.negative(request.negative or negative_prompt) for request in requests]
    if isinstance(codec, JointEncoder):
        without = [replace(request, text=text) for request, text in zip(requests, negatives, strict=True)]
        uncond = codec.encode_requests(without, latent_shape)
    elif len({*negatives}) == 1:
        uncond = codec.encode_text(negatives[:1]).expand(len(requests))
    else:
        uncond = codec.encode_text(negatives)
    return Batch(
        requests=tuple(requests),
        prompt_ids=tuple(prompt_ids),
        sample_ids=tuple(sample_ids),
        latent_shape=latent_shape,
        cond=cond,
        uncond=cond.updated(uncond),
        latents=latents,
        trajectory=trajectory,
        rejected=rejected,
    )


def with_actions(cond: Condition, requests: Sequence[Request]) -> Condition:
    """Return conditions with the actions of their requests, if these have some; UserError for different lengths."""
    if not any(request.actions for request in requests):
        return cond
    values = [request.actions.values for request in requests]
    if len({value.shape for value in values}) > 1:
        raise UserError(f"actions of one batch differ in shape, {values[0].shape} and others: give all rows equal ones")
    device = next(iter(cond.tensors.values())).device
    return cond.updated(Condition({ACTIONS: torch.from_numpy(np.stack(values)).to(device)}))


def conditions_of(codec: Codec, requests: Sequence[Request], latent_shape: tuple[int, int, int, int]) -> Condition:
    """Return the conditions of requests: each distinct prompt is encoded once, and the images where there are some."""
    if isinstance(codec, JointEncoder):
        return codec.encode_requests(requests, latent_shape)
    prompts = [request.text for request in requests]
    distinct = sorted(set(prompts))
    cond = codec.encode_text(distinct).take([distinct.index(prompt) for prompt in prompts])
    if not any(request.images for request in requests):
        return cond
    assert isinstance(codec, ImageEncoder)  # other families take no images, and requests then have none
    return cond.updated(codec.encode_images([request.images for request in requests], latent_shape))
