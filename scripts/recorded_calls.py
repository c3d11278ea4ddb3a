"""The calls of a run's models, recorded in a training step and repeated without the trainer."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor

from unified_trainer.models.wan.causal import CausalWanModel, WanCache
from unified_trainer.models.wan.codec import WanCodec
from unified_trainer.models.wan.model import WanModel
from unified_trainer.rewards.hpsv3 import HPSv3

TEXT = "WanCodec.encode_text"
FROZEN_CALLS = ((WanCodec, "encode_text"), (WanCodec, "decode"), (HPSv3, "score"), (CausalWanModel, "append"))
TRAINED_CALLS = ((WanModel, "velocity"), (CausalWanModel, "velocity_cached"), (CausalWanModel, "velocity_masked"))


@dataclass(frozen=True)
class Call:
    """A recorded call of a model."""

    name: str
    call: Callable[[], Any]
    grad: bool
    half: bool  # whether it ran in bf16
    device: str
    adapters: Sequence[tuple[LoraLayer, str | list[str]]]  # that its layers ran with

    def repeat(self) -> None:
        """Repeat the forward pass, and the backward pass where the step had one, in the same precision."""
        for layer, adapter in self.adapters:
            layer._active_adapter = adapter
        with torch.set_grad_enabled(self.grad):
            with torch.autocast(self.device, torch.bfloat16, enabled=self.half, cache_enabled=False):
                out = self.call()
            if self.grad and out.requires_grad:
                out.square().mean().backward()


def at_call(argument: object) -> object:
    """Copy a cache as it was at the call; no other argument changes later."""
    return replace(argument, text=list(argument.text)) if isinstance(argument, WanCache) else argument


@contextmanager
def recorded(calls: list[Call]) -> Iterator[None]:
    """Append every call of the models to the list."""
    with ExitStack() as patches:
        for kind, name in (*TRAINED_CALLS, *FROZEN_CALLS):
            original, trained = getattr(kind, name), (kind, name) in TRAINED_CALLS

            def note(
                *args: object,
                original: Callable = original,
                trained: bool = trained,
                label: str = f"{kind.__name__}.{name}",
            ) -> Tensor:
                calls.append(_call(label, original, args, grad=torch.is_grad_enabled() and trained))
                return original(*args)

            patches.enter_context(patch.object(kind, name, note))
        yield


def _call(label: str, original: Callable, args: Sequence[object], *, grad: bool) -> Call:
    network = args[0].network if isinstance(args[0], WanModel) else None
    layers = [layer for layer in network.modules() if isinstance(layer, LoraLayer)] if network else []
    device = next(network.parameters()).device.type if network else "cpu"
    half = torch.is_autocast_enabled(device)
    adapters = [(layer, layer._active_adapter) for layer in layers]
    return Call(label, partial(original, *map(at_call, args)), grad, half, device, adapters)


def seconds(work: Callable[[], object]) -> tuple[float, float]:
    """Return the seconds of the clock and of the processor that the work takes."""
    start, worked = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - start, time.process_time() - worked
