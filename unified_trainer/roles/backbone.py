"""A network in memory: one role's own, or the shared base of several roles that each train an adapter on it."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from unified_trainer.basics.errors import NotFiniteError, UserError
from unified_trainer.basics.terminal import say
from unified_trainer.basics.types import Condition, Latents, PerSample
from unified_trainer.models.adapter_file import AdapterFile
from unified_trainer.models.base import VideoModel
from unified_trainer.models.tensor_file import write_tensors
from unified_trainer.parallel.fsdp import (
    ROUNDED,
    average_gradients,
    exchange_gradients,
    full,
    half_shards,
    is_sharded,
    local_part,
    reshard,
    rounded_weights,
    set_reshard_policy,
    shard,
    storage_device,
    to_local,
)
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.parallel.meter import Meter, Pass
from unified_trainer.roles.adapter import AdapterConfig
from unified_trainer.roles.blocks import Compile, compile_noise, compiles, prepare_blocks
from unified_trainer.roles.pass_costs import PassCost, PassCosts
from unified_trainer.roles.recompute import ActivationMemory, Recompute
from unified_trainer.roles.rounded_weights import keep_rounded

NO_ADAPTER = "none"  # no adapter has this name: peft then runs the base weights alone


def adapter_weights(model: VideoModel, role: str) -> dict[str, nn.Parameter]:
    """Return the adapter of a role on a model, by peft's names without the role's, and the new layers of the model."""
    mine, weights = f".{role}.", model.network.named_parameters()
    return {key.replace(mine, "."): p for key, p in weights if mine in key or key.endswith(model.new_layers)}


class Backbone:
    """A model with the adapters of its roles.

    When they are in place, its blocks are set to be recomputed or compiled, and its weights are sharded.

    With adapters, or with `trained` False, the model's own weights are frozen and can be held in half precision.
    """

    def __init__(
        self,
        model: VideoModel,
        mesh: Mesh,
        *,
        trained: bool = False,
        adapters: Mapping[str, AdapterConfig] | None = None,
        recompute: Recompute | ActivationMemory = "none",
        half: bool = False,
        half_passes: bool = False,
        compile: Compile = False,
        offload: bool = False,
        merged: AdapterFile | None = None,
        starts: Mapping[str, AdapterFile] | None = None,
    ) -> None:
        """Load the weights; `merged` is added to them, and the roles in `starts` begin with these adapters.

        `half` holds weights that are not trained in bf16; `half_passes` says that all passes are in bf16, so that
        weights can be gathered in it, or have bf16 copies. `compile` is as the setting of roles.
        """
        if offload:  # for this network, as parallel.offload_weights does for all
            mesh = replace(mesh, config=replace(mesh.config, offload_weights=True))
        self.model, self.mesh, self.half, self.merged = model, mesh, half, merged
        self.half_passes = half or half_passes
        self.adapters = dict(adapters or {})
        self._costs: PassCosts | None = PassCosts(model)  # None: they cannot be counted
        model.network.eval().requires_grad_(trained and not self.adapters)
        self._layers = self._inject() if self.adapters else []  # those with adapters, of peft
        if half:
            hold_in_bf16(model.network)
        self._running, self._role = "", ""
        self._features: list[Tensor] | None = None  # of a pass that ends at them
        self._switch(NO_ADAPTER)
        if mesh.config.sequence > 1:
            model.share_tokens(mesh)
        if not isinstance(recompute, Recompute):
            recompute = Recompute.of_setting(recompute, len(model.blocks))
        self.compiled = compiles(compile, mesh.device.type)
        inputs = model.compiled_inputs if self.compiled else None
        failed = self._uncompiled if compile == "auto" else None
        tuned = compile == "max_autotune"
        prepare_blocks(model.blocks, recompute, lambda: self._adapter(self._running), inputs, failed, tuned=tuned)
        if self.compiled:
            compile_noise(mesh.device.type)
        shard(model.network, model.blocks, mesh, half=self.half_passes)
        model.read(mesh, merged)
        trained_weights = [p for p in model.network.parameters() if p.requires_grad]
        self._whole = [p for p in trained_weights if not is_sharded(p)] if mesh.size > 1 else []
        for role, file in (starts or {}).items():
            self._start(role, file)
        rounded = self.half_passes and mesh.weights is None
        self._rounded = keep_rounded(model.network, model.blocks) if rounded else []
        model.network.register_forward_hook(self._count, with_kwargs=True)

    def _inject(self) -> list[Any]:
        from unified_trainer.roles.lora import inject, layers_of

        for name, config in self.adapters.items():
            inject(self.model, name, config, self.mesh.device)
            for p in adapter_weights(self.model, name).values():
                p.requires_grad_()
        return layers_of(self.model.network)

    def weights(self, role: str) -> dict[str, nn.Parameter]:
        """Return what this role trains: its adapter by peft's names, or every trained weight of the model."""
        own = self.own_weights(role)
        return own if role in self.adapters else {key: p for key, p in own.items() if p.requires_grad}

    def own_weights(self, role: str) -> dict[str, nn.Parameter]:
        """Return the role's adapter by peft's names, or without one every weight of the model, frozen ones too."""
        return (
            adapter_weights(self.model, role) if role in self.adapters else dict(self.model.network.named_parameters())
        )

    def bf16_weights(self, role: str) -> set[str]:
        """Return the names, in `own_weights`, of what all passes round to bf16; none of an adapter."""
        if not self.half_passes or role in self.adapters:
            return set()
        rounded = rounded_weights(self.model.network)
        return {key for key, p in self.own_weights(role).items() if p in rounded}

    @property
    def parameters(self) -> int:
        """The number of parameters of the whole network, without adapters."""
        shapes = [p.shape for key, p in self.model.network.named_parameters() if ".lora_" not in key]
        return sum(math.prod(shape) for shape in shapes)

    @contextmanager
    def running(self, role: str) -> Iterator[VideoModel]:
        """Yield the model with this role's adapter, or with none; the adapter active before is active again after."""
        set_reshard_policy(self.model.network, self.mesh)
        self._role = role
        with self._adapter(role if role in self.adapters else NO_ADAPTER):
            yield self.model

    def features(self, x_t: Latents, sigma: PerSample, cond: Condition) -> Float[Tensor, "b n d"]:
        """Return the features of the role that runs, from a pass that ends there."""
        with self.model.features(alone=True) as seen:
            self._features = seen
            try:
                self.model.velocity(x_t, sigma, cond)
            finally:
                self._features = None
        return seen[-1]

    def exchange_gradients(self, *, last: bool) -> None:
        """Set before a backward pass whether an update follows it: only then are the gradients reduced over ranks."""
        exchange_gradients(self.model.network, last=last, mesh=self.mesh)

    def average_gradients(self) -> None:
        """Take the mean over ranks of the gradients that FSDP2 does not reduce (a collective if there are any)."""
        average_gradients(self._whole, self.mesh)

    def reshard(self) -> None:
        """Free gathered weights: they are about to change."""
        reshard(self.model.network)

    @contextmanager
    def in_halves(self) -> Iterator[list[Tensor]]:
        """Yield the float32 weights that have bf16 copies, which alone the passes without gradient inside read."""
        for copies in self._rounded:
            copies.round_changed()
        with half_shards(self.model.network) as shards:
            yield [*shards, *(p for copies in self._rounded for p in copies.weights)]

    def merge(self, role: str) -> None:
        """Fold the role's adapter into the weights and forget all adapters, for good."""
        for key, layer in list(self.model.network.named_modules()):
            if layer in self._layers:
                layer.merge(safe_merge=True, adapter_names=[role])
                self.model.network.set_submodule(key, layer.get_base_layer())
        self.adapters, self._layers = {}, []

    @torch.no_grad()
    def _start(self, role: str, file: AdapterFile) -> None:
        """Set the role's adapter, or its first rows, to those of files; a layer's scale goes into B (a collective)."""
        config, weights = self.adapters[role], self.weights(role)
        scale = (config.alpha or config.rank) / config.rank
        for layer in file.layers:
            down, up = file.factors(layer, storage_device(self.mesh), scale)
            for key, value in ((f"{layer}.lora_A.weight", down), (f"{layer}.lora_B.weight", up)):
                if not bool(value.isfinite().all()):
                    raise NotFiniteError(f"{file.name}: {layer} holds a value that is not finite")
                whole = full(weights[key]).detach().clone()
                whole[: len(value), : value.shape[1]] = value
                to_local(weights[key]).copy_(local_part(whole, weights[key]))

    def save_adapter(self, role: str, folder: Path) -> None:
        """Write the role's adapter in peft's layout: adapter_config.json and adapter_model.safetensors."""
        from unified_trainer.roles.lora import lora_config

        weights = {f"base_model.model.{key}": p.detach().contiguous() for key, p in self.weights(role).items()}
        folder.mkdir(parents=True, exist_ok=True)
        write_tensors(folder / "adapter_model.safetensors", weights, {"format": "pt"})
        lora_config(self.model, self.adapters[role]).save_pretrained(str(folder))

    def _count(
        self,
        _network: nn.Module,
        inputs: tuple[Any, ...],
        named: Mapping[str, Any],
        output: Any,  # a tensor, or a tuple that begins with one or a list of them
    ) -> None:
        """Count tokens and FLOPs of a pass, and the FLOPs of its backward pass when a gradient reaches its end.

        A sequence rank counts its share.
        """
        meter = Meter.current()
        if meter is None:
            return
        features, ranks = self._features, self.mesh.config.sequence
        first = output[0] if isinstance(output, tuple) else output
        end = tree_leaves(first)[-1] if features is None else features[-1]  # some return a list of samples
        cost = self._cost(inputs, named, to_features=features is not None)
        if cost is None:
            meter.add(math.nan, math.nan)
            return
        meter.add(cost.tokens / ranks, cost.forward / ranks)
        if meter.note is not None:
            shapes = tuple(x.shape for x in (*inputs, *named.values()) if isinstance(x, Tensor))
            sizes = (len(first), cost.tokens, dict(self.model.pass_share), shapes)
            meter.note(Pass(self._role, end.requires_grad, *sizes, to_features=features is not None))
        if end.requires_grad:
            end.register_hook(lambda _gradient: meter.add(0, cost.backward / ranks))

    def _cost(self, inputs: tuple[Any, ...], named: Mapping[str, Any], *, to_features: bool) -> PassCost | None:
        if self._costs is not None:
            try:
                return self._costs.of(inputs, named, self._running, to_features=to_features)
            except UserError as error:
                say(f"warning: {self._role}: no MFU is measured: {error}", quiet=not self.mesh.is_main)
                self._costs = None
        return None

    def _uncompiled(self, reason: str) -> None:
        self.compiled = False
        say(f"warning: {reason}", quiet=not self.mesh.is_main)

    @contextmanager
    def _adapter(self, adapter: str) -> Iterator[None]:
        before = self._running
        self._switch(adapter)
        try:
            yield
        finally:
            self._switch(before)

    def _switch(self, adapter: str) -> None:
        """Set the active adapter directly: peft's set_adapter also changes requires_grad of weights under FSDP2."""
        if adapter == self._running:
            return
        for layer in self._layers:
            layer._active_adapter = adapter
        self._running = adapter


def hold_in_bf16(network: nn.Module) -> None:
    """Hold in bf16 the frozen weights that autocast would round in every pass; results are equal bit for bit."""
    for module in network.modules():
        if isinstance(module, ROUNDED) and not any(p.requires_grad for p in module.parameters()):
            module.to(torch.bfloat16)
