"""The FLOPs of a pass of a network by module, as torch counts them on tensors without memory (the meta device).

A product with a matrix of p weights takes 2 p FLOPs a row, and elementwise work none.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from unified_trainer.basics.errors import UserError
from unified_trainer.models.base import VideoModel

OF_ACTIVATIONS = (torch.ops.aten.bmm, torch.ops.aten.baddbmm)  # products of two activations, as in attention


@dataclass(frozen=True)
class Part:
    """The FLOPs of a module itself in a forward pass, without those of the modules inside it."""

    module: str
    block: int  # number of its block; -1 before the first block, the number of blocks behind the last one
    products: int  # with its own weights
    attention: int  # of two activations

    def times(self, factor: Fraction | int) -> "Part":
        return replace(self, products=int(factor * self.products), attention=int(factor * self.attention))


@dataclass(frozen=True)
class PassCount:
    """The FLOPs of a forward pass over whole samples."""

    tokens: int  # latent tokens of all samples: rows that enter the first block
    elements: int  # that the first block returns
    parts: tuple[Part, ...]

    def scaled(self, share: Mapping[str, Fraction]) -> "PassCount":
        """Return the FLOPs of a pass that computes this share of a plain pass, by ends of the modules' names."""

        def factor(part: Part) -> Fraction | int:
            return next((x for end, x in share.items() if f".{part.module}".endswith(f".{end}")), 1)

        return replace(self, parts=tuple(part.times(factor(part)) for part in self.parts))


def count_pass(model: VideoModel, run: Callable[[], object]) -> PassCount:
    """Count `run`, a pass of a model on the meta device; UserError for a network that cannot run there."""
    network, seen = model.network, list[tuple[Tensor, int]]()

    def note(_block: nn.Module, inputs: tuple[Any, ...], named: Mapping[str, Any], output: Any) -> None:
        first = next(x for x in (*inputs, *named.values()) if isinstance(x, Tensor))
        seen.append((first, sum(x.numel() for x in tree_leaves(output) if isinstance(x, Tensor))))

    record = _Record(network, model.blocks)
    try:
        with (*model.blocks, network)[0].register_forward_hook(note, with_kwargs=True), record.listening():
            run()
    except Exception as error:  # a forward that needs values may fail in any way; no run shall end by it
        reason = str(error).partition("\n")[0]
        raise UserError(
            f"the FLOPs of {type(network).__name__} are unknown: they are counted on tensors without values, and its "
            f"forward fails on them ({type(error).__name__}: {reason})"
        ) from error
    x, elements = seen[0]
    channels = x.shape[2] if x.ndim == 3 else x.shape[1]  # of tokens [b, n, d], or of [b, c, ...]
    return PassCount(x.numel() // channels, elements, tuple(record.parts()))


class _Record:
    """The FLOPs that each module computes itself, by operation."""

    def __init__(self, network: nn.Module, blocks: Sequence[nn.Module]) -> None:
        self._modules, self._numbers = dict(network.named_modules()), {block: i for i, block in enumerate(blocks)}
        self._counter, self._counted = FlopCounterMode(display=False), Counter[Any]()
        self._running, self._block = [""], -1  # the modules that run, the innermost last
        self._flops: dict[tuple[str, int], Counter[Any]] = defaultdict(Counter)  # by module and block
        self._runs: dict[tuple[Any, ...], tuple[dict[str, Counter[Any]], Any]] = {}  # of blocks: FLOPs and output

    @contextmanager
    def listening(self) -> Iterator[None]:
        with ExitStack() as hooks, self._counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
            for name, module in self._modules.items():
                hooks.enter_context(module.register_forward_pre_hook(partial(self._enter, name), prepend=True))
                hooks.enter_context(module.register_forward_hook(self._leave))
                if module in self._numbers:
                    own = (setattr, module, "forward", module.forward) if "forward" in vars(module) else None
                    hooks.callback(*own or (delattr, module, "forward"))
                    module.forward = self._once(name, module)
            yield

    def parts(self) -> Iterator[Part]:
        for (name, block), flops in self._flops.items():
            module, total = self._modules[name], flops.total()
            has_matrix, is_leaf = any(p.ndim > 1 for p in module.parameters(recurse=False)), not any(module.children())
            products = sum(n for op, n in flops.items() if has_matrix and (is_leaf or op not in OF_ACTIVATIONS))
            if total:
                yield Part(name, block, products, total - products)

    def _once(self, name: str, block: nn.Module) -> Callable[..., Any]:
        """Return a forward pass of a block that runs only where none alike has run on inputs of these shapes."""
        forward, form = block.forward, repr([_form(part) for part in block.modules()])

        def call(*inputs: Any, **named: Any) -> Any:
            leaves, tree = tree_flatten((inputs, named))
            key = (form, str(tree), *((x.shape, x.dtype) if isinstance(x, Tensor) else repr(x) for x in leaves))
            self._note()
            if key in self._runs:
                own, output = self._runs[key]
                for inside, flops in own.items():
                    self._flops[name + inside, self._block] += flops
                return tree_map_only(Tensor, torch.empty_like, output)
            before = {place: Counter(flops) for place, flops in self._flops.items()}
            output = forward(*inputs, **named)
            self._note()
            ran = {place: flops - before.get(place, Counter()) for place, flops in self._flops.items()}
            own = {module.removeprefix(name): flops for (module, at), flops in ran.items() if at == self._block}
            self._runs[key] = own, output
            return output

        return call

    def _enter(self, name: str, module: nn.Module, _inputs: Any) -> None:
        self._note()
        self._running.append(name)
        self._block = self._numbers.get(module, self._block)

    def _leave(self, module: nn.Module, _inputs: Any, _output: Any) -> None:
        self._note()
        self._running.pop()
        if module in self._numbers:
            self._block = len(self._numbers) if self._block == len(self._numbers) - 1 else -1

    def _note(self) -> None:
        now = Counter(self._counter.flop_counts["Global"])
        self._flops[self._running[-1], self._block] += now - self._counted
        self._counted = now


def _form(module: nn.Module) -> tuple[Any, ...]:
    """Return what the FLOPs of a module follow from, beside its inputs and the modules inside it."""
    plain = {name: x if isinstance(x, (bool, int, float, str, tuple)) else type(x) for name, x in vars(module).items()}
    return type(module), [(name, p.shape) for name, p in module.named_parameters(recurse=False)], plain
