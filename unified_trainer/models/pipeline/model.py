"""The network of any pipeline as a `VideoModel`: it is called as the pipeline calls it."""

import copy
import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import diffusers
import torch
from torch import Tensor, nn

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.input_files import read_json
from unified_trainer.basics.types import Condition, Latents, PerFrame, PerSample
from unified_trainer.models.base import Shape
from unified_trainer.models.diffusers_model import DiffusersModel
from unified_trainer.models.image_tensors import to_first_frames
from unified_trainer.models.pipeline.attention import improve
from unified_trainer.models.pipeline.facts import Facts
from unified_trainer.models.pipeline.guidance import with_norm
from unified_trainer.models.pipeline.known import FOLDERS, Known, known
from unified_trainer.models.pipeline.latents import BEHIND, KNOWN
from unified_trainer.models.pipeline.sequence import SharedTokens
from unified_trainer.models.pipeline.tokens import blocks_of
from unified_trainer.models.pipeline.values import made_of, nested, part, stacked
from unified_trainer.numerics.flow import guide
from unified_trainer.parallel.mesh import Mesh

ROWS = " rows"  # behind the name of a padded argument: how many of its rows a prompt has


class PipelineModel(DiffusersModel):
    """A transformer of diffusers, behind the facts of its pipeline; conditions are named as its arguments."""

    adapter_layers: tuple[str, ...]

    def __init__(self, network: nn.Module, folder: Path | None, facts: Known) -> None:
        super().__init__(network, folder)
        self._here: Facts | None = None  # of the pass that runs
        self._known, self._moved = facts, dict[tuple[Shape, torch.device], "_Moved"]()
        self._blocks = blocks_of(network)
        self.adapter_layers = _attention_layers(network, self._blocks)
        self._takes = inspect.signature(network.forward).parameters
        improve(network)

    @classmethod
    def open(cls, folder: Path, component: str) -> Self:
        name = read_json(folder / component / "config.json").get("_class_name", "")
        kind = getattr(diffusers, name) if name in dir(diffusers) else None
        if not (isinstance(kind, type) and issubclass(kind, diffusers.ModelMixin)):
            raise UserError(f"{folder / component / 'config.json'}: {name!r} is no network of diffusers")
        return cls._opened(kind, folder / component, known(folder))

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return type(self)(copy.deepcopy(self.network, memo), None, self._known)

    @property
    def blocks(self) -> Sequence[nn.Module]:
        return self._blocks

    @property
    def feature_size(self) -> int:
        return self._known.any().tokens.channels

    def share_tokens(self, mesh: Mesh) -> None:
        SharedTokens(self.network, self._blocks, mesh)

    def whole(self, tokens: Any) -> Tensor:
        """Return the sample's tokens [b, n, d] of what a block returns."""
        return (self._here or self._known.any()).tokens.of(tokens)

    def velocity(self, x_t: Latents, sigma: PerSample, cond: Condition) -> Latents:
        """Predict the velocity by the call that was learned; times are slope w + offset, w = sigma without `warp`."""
        here, count = self._at(x_t), len(x_t)
        facts, given, latents = here.facts, here.facts.arguments, here.facts.latents
        self._here = facts
        if given.counted is not None and count > 1:  # a padded prompt would be another one
            return torch.cat([self.velocity(x_t[i : i + 1], sigma[i : i + 1], cond.take([i])) for i in range(count)])
        inputs = {name: _repeated(value, count, name in given.replicated) for name, value in here.constants.items()}
        inputs |= {name: cond[name] for name in given.images}
        for name, argument in given.text.items():
            inputs[name] = cond[name].to(argument.dtype)
            if argument.listed:
                rows = cond[name + ROWS].tolist()
                inputs[name] = [row[:n] for row, n in zip(inputs[name], rows, strict=True)]
                if given.counted is not None:
                    inputs[name] = torch.stack(inputs[name])
                    inputs |= {name: here.constants[name][: rows[0]] for name in given.counted}
        x = x_t.float()
        x = here.native(torch.cat([inputs.pop(KNOWN), x[:, :, latents.known :]], 2) if latents.known else x)
        x = torch.cat([x, inputs.pop(BEHIND)], latents.channels[0]) if latents.channels else x
        inputs[latents.name] = list(x) if latents.listed else x
        inputs[facts.time.name] = here.time.at(sigma.float().to(x.device, non_blocking=True))
        if facts.guidance:
            inputs[facts.guidance] = cond[facts.guidance]
        if "return_dict" in self._takes:
            inputs["return_dict"] = False
        v = part(stacked(made_of(self.network(**nested(inputs)))), facts.output).float() * facts.sign
        v = here.ours(v)
        return to_first_frames(v, x_t, sigma, cond[KNOWN]) if latents.known else v

    def save(self, folder: Path, component: str, dtype: torch.dtype, max_shard_size: str) -> None:
        super().save(folder, component, dtype, max_shard_size)
        FOLDERS[folder] = self._known  # the folder is read again before the rest of its pipeline is written

    def guide(self, cond: Latents, uncond: Latents, guidance_scale: float | PerSample | PerFrame) -> Latents:
        """Return the guided velocity, by the pipeline's own rule where that is known."""
        here, guided = self._at(cond), guide(cond, uncond, guidance_scale)
        if here.facts.rule != "norm":
            return guided
        return here.ours(with_norm(here.native(guided), here.native(cond)))

    @contextmanager
    def features(self, *, alone: bool = False) -> Iterator[list[Tensor]]:
        facts = self._known.any()
        if facts.arguments.counted is not None:
            raise UserError(f"{facts.pipeline} calls its network with each sample alone, without features")
        if facts.tokens.first is None:
            raise UserError(f"{facts.pipeline} mixes the tokens of text and sample, which have no features apart")
        with super().features(alone=alone) as seen:
            yield seen

    def _at(self, x_t: Latents) -> "_Moved":
        shape = (x_t.shape[1], x_t.shape[2], x_t.shape[3], x_t.shape[4])
        held = self._moved.get((shape, x_t.device))
        if held is None:
            held = self._moved[shape, x_t.device] = _Moved(self._known.of_shape(shape), x_t.device)
        return held

    def example(
        self, shape: Shape | None = None, samples: int = 1, text_tokens: int = 4
    ) -> tuple[Latents, PerSample, Condition]:
        """Return an input; its prompt is as long as any, because other arguments follow its length."""
        facts = self._known.of_shape(shape) if shape else self._known.any()
        draw = torch.Generator().manual_seed(0)
        device = next(self.network.parameters()).device

        def drawn(of: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            if dtype.is_floating_point:
                return torch.randn(samples, *of, generator=draw)
            return torch.ones(samples, *of, dtype=dtype)

        arguments = {**facts.arguments.text, **facts.arguments.images}
        tensors = {name: drawn(argument.shape, argument.dtype) for name, argument in arguments.items()}
        tensors |= {
            name + ROWS: torch.full((samples,), argument.shape[0])
            for name, argument in facts.arguments.text.items()
            if argument.listed
        }
        if facts.guidance:
            tensors[facts.guidance] = torch.ones(samples)
        x_t = torch.randn(samples, *facts.latents.shape, generator=draw)
        cond = Condition(tensors).map(lambda x: x.to(device))
        return x_t.to(device), torch.full((samples,), 0.5, device=device), cond


class _Moved:
    """Facts whose tensors are on a device."""

    def __init__(self, facts: Facts, device: torch.device) -> None:
        self.facts, order, fixed = facts, facts.latents.order, facts.time.fixed
        self.order = None if order is None else order.to(device)
        self.inverse = None if order is None else torch.argsort(order).to(device)
        self.time = facts.time if fixed is None else replace(facts.time, fixed=fixed.to(device))
        held = facts.arguments.constants
        self.constants = {name: _to(value, device) for name, value in held.items() if name != "return_dict"}

    def native(self, x: Tensor) -> Tensor:
        """Return our latents as the pipeline has them."""
        x = x if self.inverse is None else x.flatten(1)[:, self.inverse]
        return x.reshape(len(x), *self.facts.latents.native)

    def ours(self, x: Tensor) -> Latents:
        """Return latents of the pipeline as ours."""
        x = x if self.order is None else x.flatten(1)[:, self.order]
        return x.reshape(len(x), *self.facts.latents.shape)


def _to(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, (list, tuple)):
        return type(value)(_to(one, device) for one in value)
    return value


def _repeated(value: Any, count: int, replicated: bool) -> Any:
    if not replicated:
        return value
    return value.expand(count, *value.shape[1:]) if isinstance(value, Tensor) else value * count


def _attention_layers(network: nn.Module, blocks: Sequence[nn.Module]) -> tuple[str, ...]:
    """Return the linear layers of the blocks' attention, by the ends of their names, or whole where others have these.

    FLUX.2's `attn.to_out` is a layer in some blocks, and a list of layers in others.
    """
    names = {layer: name for name, layer in network.named_modules()}
    others = {f".{name}" for layer, name in names.items() if not isinstance(layer, nn.Linear)}
    found: dict[str, None] = {}
    for block in blocks:
        for name, layer in block.named_modules():
            place = max(name.rfind(f"{part}.") for part in ("attn", "attn1", "attn2", "attention", "self_attention"))
            if isinstance(layer, nn.Linear) and place >= 0:
                end = name[place:].partition(".")[2]
                found[names[layer] if any(other.endswith(f".{end}") for other in others) else end] = None
    return tuple(found)
