"""Where the sample's tokens are in what the middle block of a pipeline's network returns."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from unified_trainer.models.pipeline.calls import SHORT, Pipeline, ProbeError
from unified_trainer.models.pipeline.latents import FoundLatents
from unified_trainer.models.pipeline.values import Size


@dataclass(frozen=True)
class FoundTokens:
    """The tokens [b, n, d] of the sample at one size."""

    place: int | None  # in a tuple; None: the block returns no tuple
    first: bool | None  # whether they stand before the tokens of text, or behind; None: neither
    rows: int  # of the sample and of images beside it, which follow
    count: int
    channels: int
    turned: bool  # whether the block returns [n, b, d]

    def of(self, output: Any) -> Tensor:
        """Return the tokens of the sample in what a block returns."""
        x = output if self.place is None else output[self.place]
        x = x.transpose(0, 1) if self.turned else x.flatten(1, -2)
        return x.narrow(1, 0 if self.first else x.shape[1] - self.rows, self.count)


@dataclass
class BlockRecord(TorchFunctionMode):
    """The record of what the middle block returns, and of the tensors that were joined before."""

    outputs: list[Any] = field(default_factory=list)
    joined: list[list[int]] = field(default_factory=list)  # lengths of the parts

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_function__(self, func: Any, types: Any, inputs: Any = (), named: Any = None) -> Any:
        made = func(*inputs, **(named or {}))
        if func in (torch.cat, torch.concat) and inputs and made.dim() in (2, 3) and not self.outputs:
            dim = (named or {}).get("dim", inputs[1] if len(inputs) > 1 else 0) % made.dim()
            if dim == made.dim() - 2:
                # rows of single samples are padded behind, so that the last part has no fixed place
                self.joined.append([part.shape[dim] for part in inputs[0]] + [0] * (dim == 0))
        return made


@contextmanager
def noted_block(pipeline: Pipeline) -> Iterator[BlockRecord]:
    """Note what the middle block returns."""
    blocks, record = blocks_of(pipeline.pipe.components[pipeline.networks[0]]), BlockRecord()
    if not blocks:
        raise pipeline.refuse("has a network without a list of blocks with attention")
    note = lambda _block, _inputs, output: record.outputs.append(output)  # noqa: E731
    hook = blocks[len(blocks) // 2].register_forward_hook(note)
    try:
        with record:
            yield record
    finally:
        hook.remove()


def tokens_of(pipeline: Pipeline, size: Size, latents: FoundLatents, one: BlockRecord) -> FoundTokens:
    """Compare the record of one call with that of a sample twice as high: as many rows as are new are the sample's.

    Half as high, where the pipeline makes no higher ones.
    """
    try:
        two, times = _record_of_height(pipeline, size, 2 * size[1]), 1
    except ProbeError:
        two, times = _record_of_height(pipeline, size, size[1] // 2), -2
    found = list[FoundTokens]()
    for (place, x), (_, higher) in zip(*(_parts(record.outputs[0]) for record in (one, two)), strict=True):
        turned = len(x) != len(higher)
        all_rows, more = (len(one) if turned else math.prod(one.shape[1:-1]) for one in (x, higher))
        rows = times * (more - all_rows)
        parts = [rows] if rows == all_rows else next((p for p in reversed(one.joined) if sum(p) == all_rows), [0])
        first = None if rows <= 0 else True if parts[0] == rows else False if parts[-1] == rows else None
        beside = latents.channels and latents.channels[0] == 1 and len(latents.native) == 2
        found.append(FoundTokens(place, first, rows, latents.native[0] if beside else rows, x.shape[-1], turned))
    return max(found, key=lambda one: one.count)


def _record_of_height(pipeline: Pipeline, size: Size, height: int) -> BlockRecord:
    with noted_block(pipeline) as record:
        pipeline.call([SHORT], (size[0], height, size[2]))
    return record


def _parts(output: Any) -> list[tuple[int | None, Tensor]]:
    parts = list(enumerate(output)) if isinstance(output, tuple) else [(None, output)]
    return [(place, x) for place, x in parts if isinstance(x, Tensor)]


def blocks_of(network: nn.Module) -> tuple[nn.Module, ...]:
    """Return the blocks of a network in the order of its lists: those that hold attention."""
    lists = [part for part in network.children() if isinstance(part, nn.ModuleList)]
    return tuple(
        block for part in lists for block in part if any("Attention" in type(m).__name__ for m in block.modules())
    )
