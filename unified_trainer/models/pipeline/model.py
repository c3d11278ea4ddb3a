"""The network of any pipeline as a `VideoModel`: it is called as the pipeline calls it."""

import copy
import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
from unified_trainer.models.folder import outline
from unified_trainer.models.pipeline.attention import improve
from unified_trainer.models.pipeline.calls import made_of, stacked
from unified_trainer.models.pipeline.facts import BEHIND, Facts, nested
from unified_trainer.models.pipeline.guidance import with_norm
from unified_trainer.models.pipeline.known import KNOWN, Known, known
from unified_trainer.models.pipeline.probe import blocks_of
from unified_trainer.models.pipeline.sequence import SharedTokens
from unified_trainer.numerics.flow import guide
from unified_trainer.parallel.mesh import Mesh

ROWS = " rows"  # behind the name of a padded argument: how many of its rows a prompt has


class PipelineModel(DiffusersModel):
    """A transformer of diffusers, behind the facts of its pipeline; conditions are named as its arguments."""

    adapter_layers: tuple[str, ...]

    def __init__(self, network: nn.Module, folder: Path | None, facts: Known) -> None:
        super().__init__(network, folder)
        self._known, self._moved = facts, dict[tuple[Shape, torch.device], "_Moved"]()
        self._blocks = blocks_of(network)
        self.adapter_layers = _attention_layers(self._blocks)
        self._takes = inspect.signature(network.forward).parameters
        improve(network)

    @classmethod
    def open(cls, folder: Path, component: str) -> Self:
        name = read_json(folder / component / "config.json").get("_class_name", "")
        kind = getattr(diffusers, name) if name in dir(diffusers) else None
        if not (isinstance(kind, type) and issubclass(kind, diffusers.ModelMixin)):
            raise UserError(f"{folder / component / 'config.json'}: {name!r} is no network of diffusers")
        return cls(outline(kind, folder / component), folder / component, known(folder))

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return type(self)(copy.deepcopy(self.network, memo), None, self._known)

    @property
    def blocks(self) -> Sequence[nn.Module]:
        return self._blocks

    @property
    def feature_size(self) -> int:
        return self._known.any().features[1]

    def share_tokens(self, mesh: Mesh) -> None:
        SharedTokens(self.network, self._blocks, mesh)

    def whole(self, tokens: Any) -> Tensor:
        """Return the sample's tokens [b, n, d] of what a block returns."""
        place = self._known.any().features[0]
        x = tokens if place is None else tokens[place]
        return x.flatten(1, -2)

    def velocity(self, x_t: Latents, sigma: PerSample, cond: Condition) -> Latents:
        """Predict the velocity by the call that was learned; times are slope w + offset, w = sigma without `warp`."""
        here = self._at(x_t)
        facts, count = here.facts, len(x_t)
        if facts.counted is not None and count > 1:  # a padded prompt would be another one
            return torch.cat([self.velocity(x_t[i : i + 1], sigma[i : i + 1], cond.take([i])) for i in range(count)])
        x = here.native(x_t.float())
        inputs = {name: _repeated(value, count, name in facts.replicated) for name, value in here.constants.items()}
        inputs |= {name: cond[name] for name in facts.images}
        for name, argument in facts.text.items():
            inputs[name] = cond[name].to(argument.dtype)
            if argument.listed:
                rows = cond[name + ROWS].tolist()
                inputs[name] = [row[:n] for row, n in zip(inputs[name], rows, strict=True)]
                if facts.counted is not None:
                    inputs[name] = torch.stack(inputs[name])
                    inputs |= {name: here.constants[name][: rows[0]] for name in facts.counted}
        if facts.channels:
            x = torch.cat([x, inputs.pop(BEHIND)], facts.channels[0])
        level = sigma.float().to(x.device, non_blocking=True)
        time = facts.slope * (level / (facts.warp - (facts.warp - 1) * level)) + facts.offset
        inputs[facts.latents] = [row.reshape(facts.listed_shape) for row in x] if facts.listed_shape else x
        inputs[facts.time] = time.view(-1, *[1] * len(facts.time_shape)).expand(-1, *facts.time_shape)
        if facts.guidance:
            inputs[facts.guidance] = cond[facts.guidance]
        if "return_dict" in self._takes:
            inputs["return_dict"] = False
        v = stacked(made_of(self.network(**nested(inputs)))).float() * facts.sign
        if facts.output:
            v = v.narrow(facts.output[0], 0, facts.output[1])
        return here.ours(v)

    def save(self, folder: Path, component: str, dtype: torch.dtype, max_shard_size: str) -> None:
        super().save(folder, component, dtype, max_shard_size)
        KNOWN[folder] = self._known  # the folder is read again before the rest of its pipeline is written

    def guide(self, cond: Latents, uncond: Latents, guidance_scale: float | PerSample | PerFrame) -> Latents:
        """Return the guided velocity, by the pipeline's own rule where that is known."""
        here, guided = self._at(cond), guide(cond, uncond, guidance_scale)
        if here.facts.rule != "norm":
            return guided
        return here.ours(with_norm(here.native(guided), here.native(cond)))

    @contextmanager
    def features(self, *, alone: bool = False) -> Iterator[list[Tensor]]:
        if self._known.any().counted is not None:
            raise UserError(f"{self._known.any().pipeline} calls its network with each sample alone, without features")
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

        arguments = {**facts.text, **facts.images}
        tensors = {name: drawn(argument.shape, argument.dtype) for name, argument in arguments.items()}
        tensors |= {
            name + ROWS: torch.full((samples,), argument.shape[0])
            for name, argument in facts.text.items()
            if argument.listed
        }
        if facts.guidance:
            tensors[facts.guidance] = torch.ones(samples)
        x_t = torch.randn(samples, *facts.shape, generator=draw)
        cond = Condition(tensors).map(lambda x: x.to(device))
        return x_t.to(device), torch.full((samples,), 0.5, device=device), cond


class _Moved:
    """Facts whose tensors are on a device."""

    def __init__(self, facts: Facts, device: torch.device) -> None:
        self.facts, order = facts, facts.order
        self.order = None if order is None else order.to(device)
        self.inverse = None if order is None else torch.argsort(order).to(device)
        self.constants = {name: _to(value, device) for name, value in facts.constants.items() if name != "return_dict"}

    def native(self, x: Tensor) -> Tensor:
        """Return our latents as the pipeline has them."""
        x = x if self.inverse is None else x.flatten(1)[:, self.inverse]
        return x.reshape(len(x), *self.facts.native)

    def ours(self, x: Tensor) -> Latents:
        """Return latents of the pipeline as ours."""
        x = x if self.order is None else x.flatten(1)[:, self.order]
        return x.reshape(len(x), *self.facts.shape)


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


def _attention_layers(blocks: Sequence[nn.Module]) -> tuple[str, ...]:
    """Return the linear layers of the blocks' attention, by the ends of their names."""
    ends: dict[str, None] = {}
    for block in blocks:
        for name, layer in block.named_modules():
            place = max(name.rfind(f"{part}.") for part in ("attn", "attn1", "attn2", "attention", "self_attention"))
            if isinstance(layer, nn.Linear) and place >= 0:
                ends[name[place:].partition(".")[2]] = None
    return tuple(ends)
