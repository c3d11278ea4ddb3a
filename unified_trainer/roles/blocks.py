"""The forward pass of a network's blocks: recomputed in the backward pass, compiled, or both."""

import functools
import inspect
import logging
import os
import shutil
import signal
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from unified_trainer.basics.errors import UserError
from unified_trainer.numerics import philox
from unified_trainer.parallel.device import COMPILERS, GRAPHS
from unified_trainer.roles.recompute import Recompute, Recomputed, selective_policy

Contexts = tuple[AbstractContextManager[object], AbstractContextManager[object]]
BlockInputs = Callable[..., tuple[Any, ...]]
Compile = Literal["auto", "max_autotune"] | bool
BACKEND = "inductor"
# Options of Inductor are given with each graph: whenever Dynamo has compiled a frame, torch sets the global
# `deterministic` back, so that only the first graph of a process would have it.
INDUCTOR: Mapping[str, bool] = {
    "emulate_precision_casts": True,  # fused kernels round in bf16 where the uncompiled block does
    # Reductions are not chosen by measured time: passes with and without gradient, and those of a resumed run, would
    # add in another order.
    "deterministic": True,
    # It leaves parts of the gradients of scale_shift_table and of the time embedding unwritten (pytorch issue 193061).
    "triton.mix_order_reduction": False,
}
# Kernels of products by their measured time too, which deterministic mode does not allow.
AUTOTUNED = {**INDUCTOR, "max_autotune": True, "deterministic": False}


def may_compile(setting: Compile, kind: str) -> bool:
    """Return whether blocks of a role with this setting are compiled on devices of a kind, if there is a compiler.

    With `auto` they are on accelerators that Inductor has a compiler for.
    """
    return kind != "cpu" and kind in COMPILERS if setting == "auto" else bool(setting)


def compiles(setting: Compile, kind: str) -> bool:
    """Return whether blocks of a role with this setting are compiled here; with `auto` only where a compiler is."""
    found = setting != "auto" or any(map(shutil.which, _compilers(kind)))
    return found and may_compile(setting, kind)


def widest(settings: Iterable[Compile]) -> Compile:
    """Return the setting of a network that these roles share: the last of False, auto, True and max_autotune."""
    return max(settings, key=[False, "auto", True, "max_autotune"].index)


def check_compiler(role: str, kind: str) -> None:
    """Raise UserError unless there is the compiler that Inductor calls for devices of this kind, of a compiled role."""
    names = _compilers(kind)
    if names and not any(map(shutil.which, names)):
        raise UserError(
            f"{role}.compile needs a compiler, and {' or '.join(names)} is not on the PATH: install one "
            f"(apt-get install g++), or set --{role}.compile False"
        )


def _compilers(kind: str) -> Sequence[str]:
    variable, usual = COMPILERS.get(kind, ("", ()))
    return (os.environ[variable],) if variable in os.environ else usual


def start_compilers() -> None:
    """Start the processes of Inductor's compilers for accelerators with SIGTERM and SIGHUP blocked; torch ends them.

    Both signals may go to all processes of a run, and torch waits forever for compilers that have ended.
    """
    from torch._inductor.async_compile import maybe_warm_pool  # seconds, for compiled blocks alone

    unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGHUP])
    try:
        maybe_warm_pool()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)


def prepare_blocks(
    blocks: Sequence[nn.Module],
    recompute: Recompute,
    adapter: Callable[[], AbstractContextManager[object]],
    compiled_inputs: BlockInputs | None = None,
    failed: Callable[[str], object] | None = None,
    *,
    tuned: bool = False,
) -> None:
    """Set the forward pass of each block; hooks of a block, such as those of FSDP2, stay outside of it.

    `adapter` makes a context for each pass in which its activations can be recomputed later. With `compiled_inputs` the
    blocks are compiled; it turns a block's inputs into those of the compiled function. If a block cannot be compiled,
    `failed` gets the reason once and all blocks run uncompiled from there on; without `failed` this is a UserError.
    `tuned` chooses kernels of products by their time.
    """
    graphs = _Graphs(failed, AUTOTUNED if tuned else INDUCTOR)
    if compiled_inputs is not None and BACKEND == "inductor":
        start_compilers()
    for place, block in enumerate(blocks):
        how = recompute.of(place)
        if compiled_inputs is not None:
            block.forward = _by_position(block.forward, graphs.compiled(block.forward, how, adapter, compiled_inputs))
        elif how != "none":
            block.forward = _by_position(block.forward, _recomputed(block.forward, how, adapter))


def compile_noise(kind: str) -> None:
    """Make the random words of noise on accelerators of a kind by one kernel from here on, in place of about 100.

    They are integers: their bits are the same. Where Inductor cannot compile it, they are made as before.
    """
    if kind == "cpu" or kind in philox.COMPILED or BACKEND != "inductor":
        return
    graph = torch.compile(philox.words, fullgraph=True, dynamic=True, options=dict(INDUCTOR))

    def words(streams: Tensor, start: int, stop: int) -> tuple[Tensor, Tensor]:
        try:
            return graph(streams, start, stop)
        except torch._dynamo.exc.TorchDynamoException:
            philox.COMPILED[kind] = philox.words
        return philox.words(streams, start, stop)

    philox.COMPILED[kind] = words


def _by_position(forward: Callable[..., Any], run: Callable[..., Any]) -> Callable[..., Any]:
    """Return `run` for calls that name inputs of a block, as some networks of diffusers do: it gets all by position."""
    signature = inspect.signature(forward)

    def call(*inputs: Any, **named: Any) -> Any:
        if not named:
            return run(*inputs)
        bound = signature.bind(*inputs, **named)
        bound.apply_defaults()
        if bound.kwargs:
            raise TypeError(f"{forward}: a block takes its inputs by position, but {', '.join(bound.kwargs)} has none")
        return run(*bound.args)

    return call


def _recomputed(
    forward: Callable[..., Any], how: Recomputed, adapter: Callable[[], AbstractContextManager[object]]
) -> Callable[..., Any]:
    def contexts() -> Contexts:
        kept: Contexts = (nullcontext(), nullcontext())
        if how == "selective":
            kept = create_selective_checkpoint_contexts(selective_policy)
        return kept[0], _both(adapter(), kept[1])

    def run(*inputs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*inputs)
        return checkpoint(forward, *inputs, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)

    return run


class _Graphs:
    """The compiled blocks of a network."""

    def __init__(self, failed: Callable[[str], object] | None, options: Mapping[str, bool]) -> None:
        self._failed, self._off, self._options = failed, False, dict(options)

    def compiled(
        self,
        forward: Callable[..., Any],
        how: Recomputed,
        adapter: Callable[[], AbstractContextManager[object]],
        inputs_of: BlockInputs,
    ) -> Callable[..., Any]:
        """Compile a block as one graph for each shape of its inputs.

        What is recomputed in part must be so inside of the graph: a compiled function is one operation, and what its
        backward pass needs is not seen from outside. What is recomputed as a whole is a graph that runs twice. The
        backward pass is compiled with the forward pass, so that all failures are in a forward pass. Fused kernels round
        where the uncompiled block does: else a pass with gradient, which is cut into other kernels, gives other
        velocities in bf16 than one without, and a replay other log-densities than its rollout.
        """
        logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)  # "context_fn is passed"
        warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores")  # parallel.tf32 decides
        _configure()
        inner = _kept_products(forward) if how == "selective" else forward
        options = self._options if BACKEND == "inductor" else None
        graph = torch.compile(inner, fullgraph=True, dynamic=False, backend=BACKEND, options=options)
        uncompiled = _recomputed(forward, how, adapter) if how == "selective" else forward

        def run(*inputs: Any) -> Any:
            if self._off:
                return uncompiled(*inputs)
            try:
                return graph(*inputs_of(*inputs))
            except (torch._dynamo.exc.TorchDynamoException, torch._dynamo.exc.FailOnRecompileLimitHit) as error:
                self._stop(error)
            return uncompiled(*inputs)

        return _recomputed(run, how, adapter) if how == "full" else run

    def _stop(self, error: Exception) -> None:
        """Compile no more, and say why; an error if blocks must be compiled."""
        reason = _why(error)
        if self._failed is None:
            of_user = isinstance(error, (torch._dynamo.exc.Unsupported, torch._dynamo.exc.FailOnRecompileLimitHit))
            raise (UserError(reason) if of_user else error) from error
        self._off = True
        self._failed(f"{reason}. They run uncompiled from here on")


def _configure() -> None:
    """Set what torch's compiler does in this process."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, GRAPHS)
    torch._functorch.config.force_non_lazy_backward_lowering = True


def _why(error: Exception) -> str:
    if isinstance(error, torch._dynamo.exc.FailOnRecompileLimitHit):
        return (
            f"compiled blocks need more than {GRAPHS} graphs, one for each batch size, video size, adapter and "
            "kind of pass: set compile to false"
        )
    reason = str(error.msg if isinstance(error, torch._dynamo.exc.Unsupported) else error).strip().partition("\n")[0]
    return (
        "a block cannot be compiled as one graph: set compile to false, or parallel.attention to auto if it is "
        f"a kernel of another package ({reason})"
    )


def _kept_products(forward: Callable[..., Any]) -> Callable[..., Any]:
    contexts = functools.partial(create_selective_checkpoint_contexts, selective_policy)

    def run(first: Tensor, *others: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(first, *others)

        def one(x: Tensor) -> Any:  # only tensors may be arguments of a checkpoint in a graph
            return forward(x, *others)

        return checkpoint(one, first, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)

    return run


@contextmanager
def _both(first: AbstractContextManager[object], second: AbstractContextManager[object]) -> Iterator[None]:
    with first, second:
        yield
