"""Which samples a rank works on in a step: a pure function of the step, so that resuming needs no cursor."""

from typing import Protocol

import torch
from torch import Tensor

from unified_trainer.batching import BatchPlan
from unified_trainer.models.base import Codec
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.parallel.random import generator
from unified_trainer.types import Batch, Condition


class Source(Protocol):
    def __len__(self) -> int: ...

    def prompt(self, index: int) -> str: ...

    def latents(self, indices: list[int]) -> Tensor | None: ...


class Feed:
    """Batches by step: every epoch a new order, every sample once before any comes again."""

    def __init__(
        self,
        source: Source,
        codec: Codec,
        plan: BatchPlan,
        latent_shape: tuple[int, int, int, int],
        negative_prompt: str,
        seed: int,
        mesh: Mesh,
    ) -> None:
        self._source, self._codec, self._plan, self._mesh, self._seed = source, codec, plan, mesh, seed
        self._latent_shape = latent_shape
        self._uncond = codec.encode_text([negative_prompt])  # once: nothing else makes it
        self.samples = plan.prompts * plan.num_samples  # of one training step, over all ranks

    def batch(self, step: int) -> Batch:
        """This rank's share of the step's samples."""
        positions = self._plan.rank_samples(self._mesh.data_rank, self._mesh.data_size)
        rows = self._rows(step)
        indices = [rows[position // self._plan.num_samples] for position in positions]
        latents = self._source.latents(indices)
        return make_batch(
            self._codec,
            [self._source.prompt(i) for i in indices],
            self._uncond,
            self._latent_shape,
            prompt_ids=indices,
            sample_ids=positions,
            latents=None if latents is None else latents.to(self._mesh.device),
        )

    def _rows(self, step: int) -> list[int]:
        """The source's rows of the whole step: epoch after epoch, each in its own order."""
        size, count = len(self._source), self._plan.prompts
        first = step * count
        epochs = range(first // size, (first + count - 1) // size + 1)
        order = [row for epoch in epochs for row in generator(self._seed, "epoch", epoch).permutation(size).tolist()]
        start = first - epochs.start * size
        return order[start : start + count]


def make_batch(
    codec: Codec,
    prompts: list[str],
    uncond: Condition,
    latent_shape: tuple[int, int, int, int],
    *,
    prompt_ids: list[int],
    sample_ids: list[int],
    latents: Tensor | None = None,
) -> Batch:
    """A batch with its text encoded, each distinct prompt once; `uncond` is the one row of the negative prompt."""
    distinct = sorted(set(prompts))
    encoded = codec.encode_text(distinct)
    rows = torch.tensor([distinct.index(prompt) for prompt in prompts])
    ids = (tuple(prompts), tuple(prompt_ids), tuple(sample_ids))
    return Batch(
        *ids,
        latent_shape,
        encoded.map(lambda x: x[rows.to(x.device)]),
        uncond.map(lambda x: x.expand(len(prompts), *x.shape[1:])),
        latents,
    )
