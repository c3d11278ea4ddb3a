"""The network of any pipeline as a `VideoModel`: it is called as the pipeline calls it."""

import copy
import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import diffusers
import torch
from diffusers import HunyuanVideo15Transformer3DModel
from torch import Tensor, nn

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.input_files import read_json
from unified_trainer.basics.types import Condition, Latents, PerFrame, PerSample
from unified_trainer.models.base import Shape
from unified_trainer.models.diffusers_model import DiffusersModel, widen
from unified_trainer.models.image_tensors import to_first_frames
from unified_trainer.models.pipeline.arguments import ROWS
from unified_trainer.models.pipeline.facts import Facts
from unified_trainer.models.pipeline.hunyuan_video15 import with_masks
from unified_trainer.models.pipeline.known import FOLDERS, Known, known
from unified_trainer.models.pipeline.latents import BEHIND, KNOWN
from unified_trainer.models.pipeline.opening import component_class
from unified_trainer.models.pipeline.sequence import SharedTokens
from unified_trainer.models.pipeline.sound import Parts
from unified_trainer.models.pipeline.tokens import blocks_of
from unified_trainer.models.pipeline.values import made_of, nested, on_device, part, stacked
from unified_trainer.parallel.mesh import Mesh

SMALLEST = 1e-6  # noise level by which the known part of the latents of a sound is divided at least


class PipelineModel(DiffusersModel):
    """A transformer of diffusers, behind the facts of its pipeline; conditions are named as its arguments."""

    adapter_layers: tuple[str, ...]

    def __init__(self, network: nn.Module, folder: Path | None, facts: Known) -> None:
        super().__init__(network, folder)
        self._here: Facts | None = None  # of the pass that runs
        self._known, self._facts = facts, dict[tuple[Shape, torch.device], Facts]()
        self._blocks = blocks_of(network)
        self.adapter_layers = _attention_layers(network, self._blocks)
        self._takes = inspect.signature(network.forward).parameters
        if isinstance(network, HunyuanVideo15Transformer3DModel):
            with_masks(network)
        for module in network.modules():
            if isinstance(module, nn.RMSNorm):
                module.register_forward_pre_hook(widen)

    @classmethod
    def open(cls, folder: Path, component: str) -> Self:
        file = folder / component / "config.json"
        kind = component_class(file, "diffusers", read_json(file).get("_class_name", ""))
        if not issubclass(kind, diffusers.ModelMixin):
            raise UserError(f"{file}: {kind.__name__} is no network of diffusers")
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
        facts, count = self._at(x_t), len(x_t)
        if facts.arguments.counted is not None and count > 1:  # a padded prompt would be another one
            return torch.cat([self.velocity(x_t[i : i + 1], sigma[i : i + 1], cond.take([i])) for i in range(count)])
        return self._pass(facts, x_t, sigma, cond, {})[0]

    def _pass(
        self, facts: Facts, x_t: Latents, sigma: PerSample, cond: Condition, others: dict[str, Tensor]
    ) -> tuple[Latents, Any]:
        """Make the call that was learned, with other inputs beside; return the velocity and all that the network makes.

        Times are slope w + offset, w = sigma without `warp`.
        """
        given, latents, self._here, count = facts.arguments, facts.latents, facts, len(x_t)
        inputs = {name: _repeated(value, count, name in given.replicated) for name, value in given.constants.items()}
        inputs |= {name: cond[name] for name in given.images}
        for name, argument in given.text.items():
            inputs[name] = cond[name].to(argument.dtype)
            if argument.listed:
                rows = cond[name + ROWS].tolist()
                inputs[name] = [row[:n] for row, n in zip(inputs[name], rows, strict=True)]
                if given.counted is not None:
                    inputs[name] = torch.stack(inputs[name])
                    inputs |= {name: given.constants[name][: rows[0]] for name in given.counted}
        x = x_t.float()
        x = latents.packed(torch.cat([inputs.pop(KNOWN), x[:, :, latents.known :]], 2) if latents.known else x)
        x = torch.cat([x, inputs.pop(BEHIND)], latents.channels[0]) if latents.channels else x
        inputs[latents.name] = list(x) if latents.listed else x
        level = sigma.float().to(x.device, non_blocking=True)
        inputs |= {time.name: time.at(level) for time in facts.times}
        if facts.guidance:
            inputs[facts.guidance] = cond[facts.guidance]
        if "return_dict" in self._takes:
            inputs["return_dict"] = False
        output = self.network(**nested(inputs | others))
        v = latents.ours(part(stacked(made_of(output)), facts.output).float() * facts.sign)
        return to_first_frames(v, x_t, sigma, cond[KNOWN]) if latents.known else v, output

    def save(self, folder: Path, component: str, dtype: torch.dtype) -> None:
        super().save(folder, component, dtype)
        FOLDERS[folder] = self._known  # the folder is read again before the rest of its pipeline is written

    def guide(self, cond: Latents, uncond: Latents, guidance_scale: float | PerSample | PerFrame) -> Latents:
        """Return the guided velocity, by the pipeline's own rule where that is known."""
        facts = self._at(cond)
        return facts.rule.guided(cond, uncond, guidance_scale, facts.latents)

    @contextmanager
    def features(self, *, alone: bool = False) -> Iterator[list[Tensor]]:
        facts = self._known.any()
        if facts.arguments.counted is not None:
            raise UserError(f"{facts.pipeline} calls its network with each sample alone, without features")
        if facts.tokens.first is None:
            raise UserError(f"{facts.pipeline} mixes the tokens of text and sample, which have no features apart")
        with super().features(alone=alone) as seen:
            yield seen

    def _at(self, x_t: Latents) -> Facts:
        """Return the facts of latents of this shape, on their device."""
        key = (x_t.shape[1], x_t.shape[2], x_t.shape[3], x_t.shape[4]), x_t.device
        if key not in self._facts:
            self._facts[key] = on_device(self._known.of_shape(key[0]), x_t.device)
        return self._facts[key]

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
        x_t = torch.randn(samples, *facts.shape, generator=draw)
        cond = Condition(tensors).map(lambda x: x.to(device))
        return x_t.to(device), torch.full((samples,), 0.5, device=device), cond


class SoundModel(PipelineModel):
    """A `PipelineModel` that denoises a sound with its video, at the same noise level."""

    def velocity(self, x_t: Latents, sigma: PerSample, cond: Condition) -> Latents:
        facts = self._at(x_t)
        sound = facts.sound
        assert sound is not None  # as the folder was opened
        parts, found = sound.parts(x_t.float()), sound.latents
        v, output = self._pass(facts, parts.video, sigma, cond, {found.name: found.packed(parts.sound)})
        of_sound = found.ours(part(stacked(made_of(output, 1)), sound.output).float() * sound.sign)
        known = parts.rest / sigma.float().to(x_t.device, non_blocking=True).clamp_min(SMALLEST)[:, None]
        return sound.joined(Parts(v, of_sound, known))


def model_kind(facts: Known) -> type[PipelineModel]:
    """Return the class of the networks of a folder."""
    return SoundModel if facts.any().sound else PipelineModel


def open_model(folder: Path, component: str) -> PipelineModel:
    """Open a component of a pipeline folder in float32, without weights."""
    return model_kind(known(folder)).open(folder, component)


def _repeated(value: Any, count: int, replicated: bool) -> Any:
    if not replicated:
        return value
    return value.expand(count, *value.shape[1:]) if isinstance(value, Tensor) else value * count


def _attention_layers(network: nn.Module, blocks: Sequence[nn.Module]) -> tuple[str, ...]:
    """Return the linear layers of the blocks' attention, by the ends of their names, or whole where others have these.

    FLUX.2's `attn.to_out` is a layer in some blocks, and a list of layers in others. LTX-2.3's gates, of one number a
    head, are left out.
    """
    names = {layer: name for name, layer in network.named_modules()}
    others = {f".{name}" for layer, name in names.items() if not isinstance(layer, nn.Linear)}
    found: dict[str, None] = {}
    for block in blocks:
        for name, layer in block.named_modules():
            place = max(name.rfind(f"{part}.") for part in ("attn", "attn1", "attn2", "attention", "self_attention"))
            if isinstance(layer, nn.Linear) and place >= 0 and not name.endswith("to_gate_logits"):
                end = name[place:].partition(".")[2]
                found[names[layer] if any(other.endswith(f".{end}") for other in others) else end] = None
    return tuple(found)
