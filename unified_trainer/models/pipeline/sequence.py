"""Sequence ranks of a pipeline's network (Ulysses, arXiv:2309.14509), which divide the tokens of its blocks.

Tokens are divided at the first block of a list and gathered behind the last one, and behind the block of features: what
a network computes elsewhere is of whole samples, with whole gradients. Its code runs unchanged but for the attention.
"""

import copy
from collections.abc import Mapping, Sequence
from functools import partial
from inspect import Signature, signature, unwrap
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.utils._pytree import tree_map_only

from unified_trainer.basics.errors import UserError
from unified_trainer.parallel import sequence
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.parallel.sequence import Heads

Names = tuple[str, ...]
Lengths = tuple[int, ...]
SAMPLE, TEXT = "hidden_states", "encoder_hidden_states"
TEXT_FIRST, SAMPLE_FIRST, ANGLES = (TEXT, SAMPLE), (SAMPLE, TEXT), {"image_rotary_emb": 0}
# By class, each compared with one rank in tests/parallel/test_shared_tokens.py: the arguments of its blocks that are
# tokens, as attention joins them and as a block returns them, and what else is of tokens, with the dimension of these.
TOKENS: Mapping[str, tuple[Names, Names, Mapping[str, int]]] = {
    "AuraFlowTransformer2DModel": (TEXT_FIRST, TEXT_FIRST, {}),
    "BriaTransformer2DModel": (TEXT_FIRST, TEXT_FIRST, ANGLES),
    "ChromaTransformer2DModel": (TEXT_FIRST, TEXT_FIRST, ANGLES | {"attention_mask": 1}),
    "CogView4Transformer2DModel": (TEXT_FIRST, SAMPLE_FIRST, ANGLES),
    "Flux2Transformer2DModel": (TEXT_FIRST, TEXT_FIRST, ANGLES),
    "FluxTransformer2DModel": (TEXT_FIRST, TEXT_FIRST, ANGLES),
    "HunyuanVideoTransformer3DModel": (SAMPLE_FIRST, SAMPLE_FIRST, ANGLES | {"freqs_cis": 0, "attention_mask": 3}),
    "HunyuanVideo15Transformer3DModel": (SAMPLE_FIRST, SAMPLE_FIRST, {"freqs_cis": 0, "attention_mask": 1}),
    "LTXVideoTransformer3DModel": ((SAMPLE,), (SAMPLE,), {"image_rotary_emb": 1, "temb": 1}),
    "LongCatImageTransformer2DModel": (TEXT_FIRST, TEXT_FIRST, ANGLES),
    "Lumina2Transformer2DModel": ((SAMPLE,), (SAMPLE,), {"image_rotary_emb": 1, "attention_mask": 1}),
    "OvisImageTransformer2DModel": (TEXT_FIRST, TEXT_FIRST, ANGLES),
    "QwenImageTransformer2DModel": (TEXT_FIRST, TEXT_FIRST, ANGLES | {f"{TEXT}_mask": 1, "modulate_index": 1}),
    "SD3Transformer2DModel": (SAMPLE_FIRST, TEXT_FIRST, {}),
    "ZImageTransformer2DModel": (("x",), ("x",), {"freqs_cis": 1, "attn_mask": 1}),
}


def heads_of(network: nn.Module) -> int:
    """Return the attention heads that sequence ranks divide; 1 for a network whose tokens they cannot share."""
    config = network.config if type(network).__name__ in TOKENS else {"n_heads": 1}
    return int(config["n_heads" if "n_heads" in config else "num_attention_heads"])


class SharedTokens:
    """Hooks and attention by which the ranks of a mesh share the tokens of a network.

    The whole lengths of what is joined come to each block as its last input, so that one that is computed again for its
    gradient has its own. They are constants of a compiled block.
    """

    def __init__(self, network: nn.Module, blocks: Sequence[nn.Module], mesh: Mesh) -> None:
        if (name := type(network).__name__) not in TOKENS:
            raise UserError(f"{name} cannot share tokens between ranks: set parallel.sequence 1")
        sequence.check_heads(heads_of(network), mesh)
        self._mesh, self._ranks, self._lengths = mesh, mesh.config.sequence, Lengths()
        self._joined, self._returned, self._others = TOKENS[name]
        self._whole, self._parts = dict[str, int](), dict[str, Any]()
        lists = [part for part in network.children() if isinstance(part, nn.ModuleList) and {*part} & {*blocks}]
        middle = len(blocks) // 2
        self._starts = {part[0] for part in lists} | {*blocks[middle + 1 : middle + 2]}
        self._ends = {part[-1] for part in lists} | {blocks[middle]}
        for block in blocks:
            block.register_forward_pre_hook(partial(self._divide, signature(block.forward)), with_kwargs=True)
            block.register_forward_hook(self._gather)
            block.forward = partial(self._run, block.forward)
            for place, part in block.named_children():
                crosses = place == "attn2" and len(self._joined) == 1  # to a text that every rank has as a whole
                if "processor" in vars(part) and not crosses:
                    part.processor = self._exchanging(part.processor)

    def _divide(self, takes: Signature, block: nn.Module, inputs: Any, named: Any) -> tuple[tuple[Any, ...], Any]:
        """Return a block's inputs by position, with this rank's tokens, and behind them the lengths."""
        bound = takes.bind(*inputs, **named)
        bound.apply_defaults()
        given = bound.arguments
        if block in self._starts:
            tokens = {name: given[name] for name in self._joined if isinstance(given.get(name), Tensor)}
            self._whole = {name: x.shape[1] for name, x in tokens.items()}
            self._lengths = tuple(self._whole.values())
            for name, x in tokens.items():
                own = sequence.split_tokens(sequence.whole_gradient(x, self._mesh), self._mesh)
                # with the strides of a block's output, also of one sample: a compiled graph is one for all blocks then
                given[name] = own.clone(memory_format=torch.contiguous_format)
            self._parts = {
                name: tree_map_only(Tensor, partial(self._part, dim), given[name])
                for name, dim in self._others.items()
                if name in given
            }
        given |= self._parts  # one object of all blocks of a list
        return (*bound.args, self._lengths), bound.kwargs

    def _part(self, dim: int, x: Tensor) -> Tensor:
        """Return this rank's part of what is of one sequence of tokens, or of those joined; others as they are."""
        lengths = (x.shape[dim],) if x.shape[dim] in self._lengths else self._lengths
        if x.shape[dim] != sum(lengths):
            return x
        parts = x.movedim(dim, 0)[None].split(lengths, 1)
        return torch.cat([sequence.split_tokens(part, self._mesh) for part in parts], 1)[0].movedim(0, dim)

    def _run(self, forward: Any, *inputs: Any) -> Any:
        if self._lengths != inputs[-1]:
            self._lengths = inputs[-1]
        return forward(*inputs[:-1])

    def _gather(self, block: nn.Module, _inputs: Any, output: Any) -> Any:
        if block not in self._ends:
            return output
        parts = (output,) if isinstance(output, Tensor) else output
        lengths = [self._whole[name] for name in self._returned if name in self._whole]
        whole = tuple(
            x if x is None else sequence.gather_tokens(x, length, self._mesh)
            for x, length in zip(parts, lengths, strict=True)
        )
        return whole[0] if isinstance(output, Tensor) else whole

    def _exchanging(self, processor: Any) -> Any:
        """Return a processor of the same code, in which the names of attention are those of `attend`."""

        def by_heads(query: Tensor, key: Tensor, value: Tensor, **how: Any) -> Tensor:
            return self.attend(*(x.transpose(1, 2) for x in (query, key, value)), **how).transpose(1, 2)

        code = unwrap(type(processor).__call__)
        functions = SimpleNamespace(**vars(nn.functional) | {"scaled_dot_product_attention": by_heads})
        names = code.__globals__ | {"F": functions, "dispatch_attention_fn": self.attend}
        del names["__name__"]  # by which a compiler would look for them in the module
        call = FunctionType(code.__code__, names, code.__name__, code.__defaults__, code.__closure__)
        ours = copy.copy(processor)
        ours.__class__ = type(type(processor).__name__, (type(processor),), {"__call__": call})
        return ours

    def attend(self, query: Heads, key: Heads, value: Heads, attn_mask: Tensor | None = None, **how: Any) -> Heads:
        """Return what this rank's tokens attend to: to all that are joined, or alone to the first sequence.

        A mask is of keys [b, 1, 1, own], or the product [b, 1, own, own] of one of zeros and ones with itself.
        """
        lengths = self._lengths if query.shape[1] == sum(map(self._own, self._lengths)) else self._lengths[:1]
        if attn_mask is not None:
            rows = attn_mask.amax(2)[:, 0, :, None, None].expand(-1, -1, self._ranks, 1)
            mask = self._to_heads(rows, lengths)[:, None, None, :, 0, 0]
            attn_mask = mask * mask.transpose(2, 3) if attn_mask.shape[2] > 1 else mask
        query, key, value = (self._to_heads(x.to(value), lengths) for x in (query, key, value))
        seen = dispatch_attention_fn(query, key, value, attn_mask=attn_mask, **how)
        parts = [pad(x, (0, 0, 0, 0, 0, -x.shape[1] % self._ranks)) for x in seen.split(lengths, 1)]
        by_rank = torch.cat([x.unflatten(1, (self._ranks, -1)) for x in parts], 2)
        return sequence.heads_to_tokens(by_rank.flatten(1, 2), self._mesh)

    def _to_heads(self, x: Tensor, lengths: Lengths) -> Tensor:
        """Exchange [b, own, all heads, d], parts of sequences, for whole ones [b, n, heads of this rank, d]."""
        by_rank = sequence.tokens_to_heads(x, self._ranks * x.shape[1], self._mesh).unflatten(1, (self._ranks, -1))
        parts = by_rank.split([*map(self._own, lengths)], 2)
        return torch.cat([part.flatten(1, 2)[:, :length] for part, length in zip(parts, lengths, strict=True)], 1)

    def _own(self, length: int) -> int:
        """Return how many tokens of a sequence each rank has, with padding."""
        return -(-length // self._ranks)
