"""Wan with video sparse attention (arXiv:2505.13389), in the layout of FastVideo's FastWan folders.

Each block has one layer more, `to_gate_compress`, which reads what the self-attention reads. A folder of a dense model
has none, and opens with gates of zero.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import compress
from pathlib import Path
from typing import Any, Self

import torch
from diffusers import WanTransformer3DModel
from diffusers.models.transformers.transformer_wan import WanAttention
from jaxtyping import Bool
from torch import Tensor, nn

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.types import Latents
from unified_trainer.models.adapter_file import AdapterFile
from unified_trainer.models.folder import WEIGHTS, check_component, check_new_layers, outline
from unified_trainer.models.masked_attention import Keys, Queries
from unified_trainer.models.sparse_attention import (
    ChunkTiles,
    Fine,
    Grid,
    SparseAttentionConfig,
    attend_sparsely,
    kernel_fine,
    masked_fine,
    plain_fine,
)
from unified_trainer.models.wan.attention import LayerPass, SelfAttention, set_attention
from unified_trainer.models.wan.image_model import FirstFrameWanModel
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.parallel.sequence import Heads

GATE = "to_gate_compress"


@dataclass(frozen=True)
class TiledPass(LayerPass):
    """A `LayerPass` with the tiles of its tokens."""

    tiles: ChunkTiles

    def joined(self) -> LayerPass:
        keys = self.tiles.keys
        for part in (keys.of_token, keys.slot, keys.sizes) if self.past else ():
            torch._dynamo.maybe_mark_dynamic(part, 0)
        return super().joined()


class SparseWanModel(FirstFrameWanModel):
    """A Wan transformer of text, or of TI2V, whose self-attention leaves out a share of the tiles of keys."""

    new_layers = (f"{GATE}.weight", f"{GATE}.bias")

    def __init__(
        self, network: WanTransformer3DModel, folder: Path | None, config: SparseAttentionConfig, gates: torch.device
    ) -> None:
        """Add gates on the device `gates`: zero, or on the meta device without memory until `read` brings them."""
        super().__init__(network, folder)
        self._config, self.share = config, config.share
        self._tiles: ChunkTiles | None = None  # of the pass that runs
        self._fine: tuple[Fine, Fine] = masked_fine, masked_fine  # in bf16, and in other precisions
        for block in network.blocks:
            gate = nn.Linear(self.feature_size, self.feature_size, device=gates)
            for p in gate.parameters():
                nn.init.zeros_(p)
            block.register_module(GATE, gate)
        self._set_attention()
        for block in network.blocks:
            block.register_forward_pre_hook(self._with_tiles)
        network.register_forward_pre_hook(self._tile)

    @classmethod
    def open_with(cls, folder: Path, component: str, config: SparseAttentionConfig) -> Self:
        """Open a component of a dense or a sparse folder.

        Raise UserError for one with gates in some blocks alone, and for one that reads an image as channels.
        """
        place = folder / component
        network = outline(cls.network_class, place, cls.new_layers)
        if network.config.in_channels != network.config.out_channels:
            raise UserError(
                f"{place} reads an image as channels, and no such network has sparse attention: leave it out"
            )
        model = cls(network, place, config, torch.device("meta"))
        check_new_layers(network, place, cls.new_layers)
        return model

    def read(self, mesh: Mesh, merged: AdapterFile | None = None) -> None:
        plain = plain_fine(mesh.device)
        super().read(mesh, merged)
        self._fine = plain if self.lacks_kernel(mesh.device.type) else kernel_fine(), plain
        self._set_attention()

    def lacks_kernel(self, device: str) -> str:
        """Return what keeps bf16 passes on such a device from the kernels; empty where they run on them."""
        return self._config.lacks_kernel(device, self.network.config.attention_head_dim)

    def share_tokens(self, mesh: Mesh) -> None:
        super().share_tokens(mesh)
        self._set_attention()

    def _set_attention(self) -> None:
        set_attention(self.network.blocks)
        for block in self.network.blocks:
            block.attn1.processor = _SparseAttention(block, self._fine)

    def _grid(self, x: Latents) -> Grid:
        time, height, width = (
            size // part for size, part in zip(x.shape[2:], self.network.config.patch_size, strict=True)
        )
        return time, height, width

    def _tile(self, _network: nn.Module, inputs: Sequence[Any]) -> None:
        x, config = inputs[0], self._config
        grid = self._grid(x)
        frames, sees = self._chunks(grid[0])
        chunks = [(count, *grid[1:]) for count in frames]
        self._tiles = ChunkTiles.of(config, chunks, sees, self.share).to(x.device)
        rows = zip(chunks[-len(sees) :], sees.tolist(), strict=True)
        pairs = sum(config.pairs(own, [*compress(chunks, row)], self.share) for own, row in rows)
        self.pass_share = {**self.pass_share, "attn1": Fraction(pairs, config.pairs(grid, [grid], 0.0))}

    def _chunks(self, frames: int) -> tuple[list[int], Bool[Tensor, "own chunks"]]:
        """Return the frames of each chunk of keys, and whether each chunk of the pass sees it: here one has all."""
        return [frames], torch.ones(1, 1, dtype=torch.bool)

    def _with_tiles(self, _block: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Give a block's attention the tiles of the pass, which a later recomputation of the block then has too."""
        *others, now = inputs
        assert self._tiles is not None  # the network's own hook ran before
        return *others, TiledPass(**vars(now), tiles=self._tiles)


class _SparseAttention(SelfAttention):
    """Self-attention to the kept tiles, of the past and of the pass."""

    def __init__(self, block: nn.Module, fine: tuple[Fine, Fine]) -> None:
        self._block, self._fine = block, fine

    def projected(self, attn: WanAttention, x: Tensor, now: LayerPass) -> tuple[Heads, ...]:
        gate = self._block.get_submodule(GATE)(x).unflatten(2, (attn.heads, -1))
        return *super().projected(attn, x, now), gate

    def attended(self, now: LayerPass, query: Queries, key: Keys, value: Keys, *more: Queries) -> Queries:
        assert isinstance(now, TiledPass)
        (gate,) = more
        fine = self._fine[value.dtype != torch.bfloat16]  # kernels compute in bf16 alone
        return attend_sparsely(query, key, value, gate, now.tiles, fine)


def check_dense(folder: Path) -> None:
    """Raise UserError if a component's files hold gates: its weights are those of a sparse model."""
    if any(key.endswith(SparseWanModel.new_layers) for key in check_component(folder, WEIGHTS)):
        raise UserError(
            f"{folder} holds a network with sparse attention ({GATE}): set sparse_attention.share of the role that "
            "opens it, such as --student.sparse-attention.share 0.8, or name the folder of a dense model"
        )
