"""Wan with video sparse attention (arXiv:2505.13389), in the layout of FastVideo's FastWan folders.

Each block has one layer more, `to_gate_compress`, which reads what the self-attention reads. A folder of a dense model
has none, and opens with gates of zero.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Self

import torch
from diffusers import WanTransformer3DModel
from diffusers.models.transformers.transformer_wan import WanAttention
from jaxtyping import Float
from torch import Tensor, nn

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.types import Latents
from unified_trainer.models.adapter_file import AdapterFile
from unified_trainer.models.folder import WEIGHTS, check_component, check_new_layers, outline
from unified_trainer.models.sparse_attention import (
    Fine,
    SparseAttentionConfig,
    Tiles,
    attend_sparsely,
    kernel_fine,
    masked_fine,
    plain_fine,
)
from unified_trainer.models.wan.attention import LayerPass, SelfAttention, normed, project_out, rotate, set_attention
from unified_trainer.models.wan.image_model import FirstFrameWanModel
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.parallel.sequence import heads_to_tokens, tokens_to_heads

GATE = "to_gate_compress"


@dataclass(frozen=True)
class TiledPass(LayerPass):
    """A `LayerPass` with the tiles of its tokens."""

    tiles: Tiles


class SparseWanModel(FirstFrameWanModel):
    """A Wan transformer of text, or of TI2V, whose self-attention leaves out a share of the tiles of keys."""

    new_layers = (f"{GATE}.weight", f"{GATE}.bias")

    def __init__(
        self, network: WanTransformer3DModel, folder: Path | None, config: SparseAttentionConfig, gates: torch.device
    ) -> None:
        """Add gates on the device `gates`: zero, or on the meta device without memory until `read` brings them."""
        super().__init__(network, folder)
        self._config, self.share = config, config.share
        self._tiles: Tiles | None = None  # of the pass that runs
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

    def _grid(self, x: Latents) -> tuple[int, int, int]:
        time, height, width = (
            size // part for size, part in zip(x.shape[2:], self.network.config.patch_size, strict=True)
        )
        return time, height, width

    def _tile(self, _network: nn.Module, inputs: Sequence[Any]) -> None:
        x = inputs[0]
        grid = self._grid(x)
        self._tiles = Tiles.of(self._config, grid, self.share).to(x.device)
        self.pass_share = {"attn1": Fraction(*(self._config.pairs(grid, share) for share in (self.share, 0.0)))}

    def _with_tiles(self, _block: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Give a block's attention the tiles of the pass, which a later recomputation of the block then has too."""
        *others, now = inputs
        assert self._tiles is not None  # the network's own hook ran before
        return *others, TiledPass(**vars(now), tiles=self._tiles)


class _SparseAttention(SelfAttention):
    """Sparse self-attention over the tokens of the pass: all tokens, and on each rank its heads."""

    def __init__(self, block: nn.Module, fine: tuple[Fine, Fine]) -> None:
        self._block, self._fine = block, fine

    def __call__(
        self, attn: WanAttention, x: Tensor, _encoder: None, _mask: None, now: LayerPass
    ) -> Float[Tensor, "b n width"]:
        assert isinstance(now, TiledPass)
        query, key, value, gate = (
            part.unflatten(2, (attn.heads, -1))
            for part in (
                normed(attn.norm_q, attn.to_q(x)),
                normed(attn.norm_k, attn.to_k(x)),
                attn.to_v(x),
                self._block.get_submodule(GATE)(x),
            )
        )
        query, key = rotate(query, now).to(value), rotate(key, now).to(value)
        if now.mesh:
            query, key, value, gate = (
                tokens_to_heads(part, now.tokens, now.mesh) for part in (query, key, value, gate)
            )
        fine = self._fine[value.dtype != torch.bfloat16]  # kernels compute in bf16 alone
        out = attend_sparsely(query, key, value, gate, now.tiles, fine)
        return project_out(attn, heads_to_tokens(out, now.mesh) if now.mesh else out)


def check_dense(folder: Path) -> None:
    """Raise UserError if a component's files hold gates: its weights are those of a sparse model."""
    if any(key.endswith(SparseWanModel.new_layers) for key in check_component(folder, WEIGHTS)):
        raise UserError(
            f"{folder} holds a network with sparse attention ({GATE}): set sparse_attention.share of the role that "
            "opens it, such as --student.sparse-attention.share 0.8, or name the folder of a dense model"
        )
