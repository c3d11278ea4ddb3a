"""A pipeline of diffusers beside the trainer's model and codec, which learned it: what both make of the same noise."""

import inspect
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
from helpers import ALONE, CPU
from torch import Tensor
from torch.utils._pytree import tree_map

from unified_trainer.basics.requests import Image, Request
from unified_trainer.basics.types import Condition
from unified_trainer.data.loader import conditions_of
from unified_trainer.models.encoders import EncoderConfig
from unified_trainer.models.pipeline.calls import most_likely
from unified_trainer.models.pipeline.family import networks, open_codec
from unified_trainer.models.pipeline.known import known
from unified_trainer.models.pipeline.model import open_model
from unified_trainer.models.pipeline.opening import flow_scheduler
from unified_trainer.models.pipeline.sound import Parts

PROMPTS = ("a red circle", "a cat moving left over the blue square")  # of different length
STEPS = 3


class Comparison:
    """A folder of one pipeline, opened by diffusers and by the trainer."""

    def __init__(self, folder: Path, call: Mapping[str, Any]) -> None:
        frames = call.get("num_frames", call.get("frames", 1))
        self.folder, self.size = folder, (frames, call.get("height", 32), call.get("width", 48))
        self.known = known(folder)
        self.facts = self.known.of_size(self.size)
        self.codec = open_codec(folder, CPU, EncoderConfig())
        names, self._boundary = networks(folder)
        self._models = [open_model(folder, name) for name in names]
        for model in self._models:
            model.read(ALONE)
        self.model = self._models[0]

    @cached_property
    def pipeline(self) -> Any:
        """The pipeline with all weights, and with Euler's law."""
        pipeline = diffusers.DiffusionPipeline.from_pretrained(self.folder)
        pipeline.set_progress_bar_config(disable=True)
        pipeline.scheduler = flow_scheduler(self.folder / "scheduler")
        if pipeline.components.get("guider") is not None:
            pipeline.guider = type(pipeline.guider)(guidance_scale=1.0)
        return pipeline

    @cached_property
    def images(self) -> tuple[Image, ...]:
        """The condition image, or clips, where the pipeline needs some."""
        shape = (self.size[1], self.size[2], 3)
        draw, pipeline = np.random.default_rng(0), self.known.pipeline
        if not pipeline.takes_image:
            return ()
        if not pipeline.clips:
            return (Image.of(draw.integers(0, 255, shape, dtype=np.uint8)),)
        clip, mask = (draw.integers(0, high, (self.size[0], *shape), dtype=np.uint8) for high in (255, 2))
        return (Image.of(clip), Image.of(mask * 255))[: len(pipeline.clips)]

    @cached_property
    def condition(self) -> Condition:
        """The conditions of both prompts."""
        return conditions_of(self.codec, [Request(text, self.images) for text in PROMPTS], self.facts.shape)

    @cached_property
    def walks(self) -> Sequence[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """Of each prompt: our last latents and frames, those of the pipeline."""
        return [self._walk(number) for number in range(len(PROMPTS))]

    @torch.no_grad()
    def _walk(self, number: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        with noting(self.pipeline) as (started, decoded), most_likely():
            made = self.pipeline(
                prompt=PROMPTS[number],
                num_inference_steps=STEPS,
                generator=torch.Generator().manual_seed(1),
                output_type="pt",
                **self._arguments(),
            )
        frames = made[0]
        frames = frames.float()[:, :, None] if frames.dim() == 4 else frames.float().transpose(1, 2)
        last = (decoded[0][:, :, None] if self.facts.latents.flat else decoded[0]).float()
        last = (last - self.facts.latents.shift) / self.facts.latents.scale
        x = self._start(started[0])
        levels = self.pipeline.scheduler.sigmas.tolist()
        for sigma, following in itertools.pairwise(levels):
            at = torch.tensor([sigma], dtype=torch.float64)
            model = self._models[-1 if self._boundary is not None and sigma < self._boundary else 0]
            x = x + (following - sigma) * model.velocity(x, at, self.condition.take([number]))
        return x, self.codec.decode(x), last, frames

    def _start(self, given: Mapping[str, Any]) -> Tensor:
        """The noise that the network is given, with that of a sound, whose known part is zero."""
        video, sound = self.facts.latents.ours(self.facts.latents.of_argument(given)), self.facts.sound
        if sound is None:
            return video
        heard = sound.latents.ours(sound.latents.of_argument(given))
        rest = math.prod(sound.shape) - video.numel() - heard.numel()
        return sound.joined(Parts(video, heard, video.new_zeros(1, rest)))

    def _arguments(self) -> dict[str, Any]:
        names = self.known.pipeline.names
        places = {"num_frames": 0, "frames": 0, "height": 1, "width": 2}
        given = {name: self.size[place] for name, place in places.items() if name in names} | self.facts.no_guidance
        given |= {"max_area": self.size[1] * self.size[2]} if "max_area" in names else {}
        given |= {"guidance_scale": float(names["guidance_scale"].default)} if self.facts.guidance else {}
        pipeline = self.known.pipeline
        shown = pipeline.shown(self.images, self.size) if self.images else ()
        if isinstance(shown, tuple):
            return given | dict(zip(pipeline.clips, shown, strict=False))
        return given | {pipeline.image: shown}

    def difference(self) -> tuple[float, float]:
        """The largest difference of latents, in parts of the largest latent, and that of pixels in 0 to 1."""
        ends = [(self.facts.of_video(x), last) for x, _, last, _ in self.walks]
        latents = max(float((x - last).abs().max() / last.abs().max()) for x, last in ends)
        return latents, max(float((frames - own).abs().max()) for _, frames, _, own in self.walks)

    @torch.no_grad()
    def batch_difference(self) -> float:
        """The largest difference of a batch, with a sigma of its own for each sample, from single passes."""
        x, sigma = torch.cat([x for x, *_ in self.walks]), torch.tensor([0.7, 0.3], dtype=torch.float64)
        both, cond = self.model.velocity(x, sigma, self.condition), self.condition
        alone = [self.model.velocity(x[[n]], sigma[[n]], cond.take([n])) for n in range(len(PROMPTS))]
        return float((both - torch.cat(alone)).abs().max() / both.abs().max())

    def gradient_difference(self, steps: Sequence[float] = (1e-3, 3e-4)) -> float:
        """The difference of the decoder's gradient, along itself, from a central difference, in parts of it.

        Curvature spoils large steps and rounding small ones, so the better of two counts.
        """
        x = self.walks[0][0].clone().requires_grad_()
        (gradient,) = torch.autograd.grad(self.codec.decode(x).mean(), x)
        along, size = gradient / gradient.norm(), float(gradient.norm())

        @torch.no_grad()
        def slope(step: float) -> float:
            up, down = (self.codec.decode(x + move * along).double().mean() for move in (step, -step))
            return float(up - down) / (2 * step)

        return min(abs(slope(step) - size) / size for step in steps)

    @torch.no_grad()
    def decoding_difference(self) -> float:
        """The largest difference of decode(encode(clip)) from the VAE alone."""
        clip = torch.rand(1, 3, *self.size, generator=torch.Generator().manual_seed(0))
        vae, flat = self.pipeline.vae, self.facts.latents.flat
        held = vae.encode((clip[:, :, 0] if flat else clip) * 2 - 1)
        latents = held.latent_dist.mode() if "latent_dist" in held else held.latent
        alone = vae.decode(latents, **self.facts.latents.decode).sample
        alone = (alone[:, :, None] if flat else alone) / 2 + 0.5
        return float((self.codec.decode(self.codec.encode(clip)) - alone.clamp(0, 1)).abs().max())


@contextmanager
def noting(pipeline: Any) -> Iterator[tuple[list[Mapping[str, Any]], list[Tensor]]]:
    """Note the arguments of the network's calls, and what the VAE decodes."""
    started, decoded = list[Mapping[str, Any]](), list[Tensor]()
    network, vae = pipeline.transformer, pipeline.vae
    signature, own = inspect.signature(network.forward), vae.decode

    def decode(z: Tensor, *more: Any, **named: Any) -> Any:
        decoded.append(z)
        return own(z, *more, **named)

    def note(_network: Any, given: Any, named: Any) -> None:
        started.append(tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, bound(given, named)))

    def bound(given: Any, named: Any) -> Any:
        return dict(signature.bind(*given, **named).arguments)

    hook = network.register_forward_pre_hook(note, with_kwargs=True)
    vae.decode = decode
    try:
        yield started, decoded
    finally:
        hook.remove()
        del vae.decode
