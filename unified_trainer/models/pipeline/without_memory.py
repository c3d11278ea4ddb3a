"""Networks without memory: they answer each call with random numbers of the shapes that they would return."""

import functools
import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Never

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map
from transformers import GenerationMixin

KNOWN = 2**12  # elements of a tensor that is computed: lengths, grids and positions of tokens
PERIOD = 65521  # numbers of an answer that are drawn: a prime, so that no packing of them is another
LARGE = 2**22  # numbers of an answer from which its rows overlap in memory, and of an input that its answer depends on
# Numbers of an answer from which none is drawn: 49 layers of Gemma 3 for 1024 tokens, of which another network makes an
# embedding. That one tells texts apart by their masks.
HUGE = 160 * 2**20
FACTORIES = (torch.ops.aten.arange, torch.ops.aten.scalar_tensor)


class _Answering(FakeTensorMode):
    """Fake tensors whose numbers are not zero, for code that looks at them; numbers that are known stay known."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [x for x in tree_leaves((args, kwargs or {})) if isinstance(x, Tensor)]
        known = all(x.numel() <= KNOWN and not isinstance(x, FakeTensor) | x.is_floating_point() for x in given)
        if known and (given or func.overloadpacket in FACTORIES):
            return func(*args, **(kwargs or {}))
        if func is torch.ops.aten._local_scalar_dense.default:
            return 1.0 if args[0].is_floating_point() else True if args[0].dtype == torch.bool else 1
        if func is torch.ops.aten.nonzero.default:
            with self:
                return torch.empty(args[0].numel(), args[0].dim(), dtype=torch.int64)
        if func is torch.ops.aten.index.Tensor:
            args = (args[0], [one for index in args[1] for one in _places(index)])
        if func is torch.ops.aten.bincount.default:  # of experts: all tokens go to the first
            return torch.tensor([args[0].numel()])
        return super().__torch_dispatch__(func, types, args, kwargs)


class WithoutMemory:
    """Lets modules on the meta device run: their weights are fake, and what a call returns is drawn, or ones.

    Only the outermost call of a module is answered; the modules inside it see fake tensors. An answer is a function of
    the inputs: equal inputs have equal answers. `answers` are those of former calls, without their numbers. Blocks of a
    list that are alike answer equal shapes as the first of them did.
    """

    def __init__(self) -> None:
        self._mode = _Answering(allow_non_fake_inputs=True)
        self._inside, self._otherwise, self._repeats = 0, list[nn.Module](), True
        self.answers = dict[Any, Any]()

    @contextmanager
    def otherwise(self, networks: Sequence[nn.Module]) -> Iterator[None]:
        """Let these networks give other answers, by which what follows from one shows."""
        self._otherwise = list(networks)
        try:
            yield
        finally:
            self._otherwise = []

    @contextmanager
    def every_layer(self) -> Iterator[None]:
        """Let each layer of each network run, for hooks that count them."""
        self.answers.clear()
        self._repeats = False
        try:
            yield
        finally:
            self._repeats = True

    def prepare(self, network: nn.Module) -> nn.Module:
        """Return the network, on the meta device, as one that answers; its buffers stay what they are."""
        for module in network.modules():
            for name, weight in list(module.named_parameters(recurse=False)):
                fake = FakeTensor(self._mode, weight.data, torch.device("cpu"))
                fake._is_param = True  # a Parameter, without the copy that its constructor makes
                setattr(module, name, fake)
            for name, table in list(module.named_buffers(recurse=False)):
                if table.is_meta:
                    setattr(module, name, torch.ones(table.shape, dtype=table.dtype))
        for module in network.modules():
            module.forward = self._answering(module.forward, network)
        lists = [part for part in network.modules() if isinstance(part, nn.ModuleList) and len(part) > 1]
        for block in {block for part in lists for block in part}:
            block.forward = self._repeating(block.forward, _form(block))
        if isinstance(network, GenerationMixin):
            network.generate = _writes_nothing
        return network.eval()

    def _answering(self, forward: Any, network: nn.Module) -> Any:
        def call(*inputs: Any, **named: Any) -> Any:
            if self._inside:
                return forward(*inputs, **named)
            before = _key(inputs, sorted(named.items()))
            output = self.answers.get((forward, before))
            if output is None:
                with self._running(), torch.no_grad():
                    output = forward(*inputs, **named)
                # and it did not write to its inputs, as VAEs do to their caches
                if before and before == _key(inputs, sorted(named.items())):
                    self.answers[forward, before] = output
            return self._drawn(output, _seed((inputs, named)) ^ any(other is network for other in self._otherwise))

        call.__signature__ = inspect.signature(forward)  # type: ignore[attr-defined]  # pipelines look at it
        return call

    def _repeating(self, forward: Any, form: tuple[Any, ...]) -> Any:
        def call(*inputs: Any, **named: Any) -> Any:
            key = _key(inputs, named)
            repeats = self._inside and self._repeats
            output = self.answers.get((form, key)) if repeats else None
            if output is None:
                output = forward(*inputs, **named)
                if key and repeats and key == _key(inputs, named):
                    self.answers[form, key] = output
            return output

        call.__signature__ = inspect.signature(forward)  # type: ignore[attr-defined]
        return call

    @contextmanager
    def _running(self) -> Iterator[None]:
        self._inside += 1
        try:
            with self._mode:
                yield
        finally:
            self._inside -= 1

    def _drawn(self, output: Any, seed: int) -> Any:
        sizes = [x.numel() for x in tree_leaves(output) if isinstance(x, FakeTensor)]
        if sum(size for size in sizes if size <= LARGE) > HUGE:
            return output
        draw = torch.Generator().manual_seed(seed)

        def one(x: Any) -> Any:
            if not isinstance(x, FakeTensor):
                return x
            if x.is_floating_point():
                if x.numel() > LARGE:  # the words of a vocabulary for each token would take gigabytes
                    steps = [1 if dim == x.dim() - 1 else 2 * (x.dim() - dim) + 1 for dim in range(x.dim())]
                    last = sum((size - 1) * step for size, step in zip(x.shape, steps, strict=True))
                    return torch.randn(last + 1, generator=draw).to(x.dtype).as_strided(x.shape, steps)
                drawn = torch.randn(min(x.numel(), PERIOD), generator=draw).to(x.dtype)
                return drawn.repeat(-(-x.numel() // PERIOD))[: x.numel()].reshape(x.shape)
            return torch.ones(x.shape, dtype=x.dtype)  # a mask of all tokens

        return tree_map(one, output)


def _writes_nothing(*inputs: Any, **named: Any) -> Never:
    raise TypeError("a network that writes tokens one by one cannot be called without its weights")


def _places(index: Tensor | None) -> Sequence[Tensor | None]:
    """Return an index of a tensor; for a mask whose values are known, the places where it is true."""
    known = index is not None and index.dtype == torch.bool and not isinstance(index, FakeTensor)
    return index.nonzero().unbind(1) if known else [index]  # type: ignore[union-attr]


def _form(block: nn.Module) -> tuple[Any, ...]:
    """Return what the shapes of a block's answers follow from, beside its inputs: its class, weights and switches."""
    weights = tuple((name, weight.shape) for name, weight in block.named_parameters())
    switches = tuple((name, value) for name, value in vars(block).items() if isinstance(value, (bool, str)))
    return type(block), weights, switches


def _key(*inputs: Any) -> tuple[Any, ...] | None:
    """Return what the shapes of an answer follow from: all inputs but the numbers of floats; None for other objects."""
    leaves, tree = tree_flatten(inputs)
    key: list[Any] = [str(tree)]
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            known = not isinstance(leaf, FakeTensor) | leaf.is_floating_point()
            key += [leaf.shape, leaf.dtype, leaf.numpy().tobytes() if known else None]
        elif leaf is None or isinstance(leaf, (bool, int, float, str, torch.dtype, torch.device)):
            key.append((type(leaf), leaf))
        else:
            return None
    return tuple(key)


def _seed(inputs: Any) -> int:
    total = 0.0
    for place, leaf in enumerate(tree_leaves(inputs)):
        if isinstance(leaf, Tensor) and leaf.numel() and not isinstance(leaf, FakeTensor):
            flat = leaf.detach().flatten()[:: -(-leaf.numel() // LARGE)].double()
            total += float((flat * _ramp(len(flat))).sum()) / (place + 1)
    return hash(round(total, 6)) % 2**62


@functools.lru_cache(maxsize=8)
def _ramp(count: int) -> Tensor:
    return torch.linspace(1, 2, count, dtype=torch.float64)
