"""Calls of a pipeline that are watched: what its network, its scheduler and its VAE are given."""

import inspect
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteSchedulerOutput
from PIL import Image as Picture
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.utils._pytree import tree_map

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.requests import Image
from unified_trainer.models.pipeline.values import Size, flat
from unified_trainer.models.pipeline.without_memory import WithoutMemory

SHORT = "a cat"
LONG = 'a red circle and a blue square above the words "moving left", ' * 100  # longer than any pipeline takes
STEPS = 4  # of a call: enough to tell a line from a curve
OFF = {"guidance_scale": 1.0, "true_cfg_scale": 1.0, "guidance_rescale": 0.0, "stg_scale": 0.0}
OFF |= {"use_resolution_binning": False, "_auto_resize": False}  # the size is what was asked for
OFF |= {"enable_prompt_rewrite": False, "use_pe": False}  # prompts of its own, written by chance
OFF |= {"sample_audio": False, "modality_scale": 1.0}
OFF |= {"audio_guidance_scale": 1.0, "audio_guidance_rescale": 0.0, "audio_stg_scale": 0.0, "audio_modality_scale": 1.0}
SIZES = {"num_frames": 0, "frames": 0, "height": 1, "width": 2}  # arguments of the call, and their place in a size
Color = tuple[int, int, int]
COLORS, OTHER_COLORS = ((200, 30, 30), (0, 0, 0)), ((30, 90, 200), (255, 255, 255))  # of an image or clip, and a mask
VAES = ("vae", "audio_vae")  # of the video and of its sound
IMAGES = ("image", "control_image")  # arguments of the call that may be a sample's condition image
CLIPS = ("video", "control_video")  # and a list of frames, behind which a mask of what is made anew may follow
Shown = Picture.Image | tuple[list[Picture.Image], ...]  # a sample's image, or its clips


class ProbeError(UserError):
    """A pipeline whose call does not say what the trainer must know."""


class CallError(ProbeError):
    """A pipeline that raises an error when it is called, such as one for the size."""


class _Reached(Exception):
    """The call reached what it was made for."""


@dataclass
class CallRecord:
    """The record of one call of a pipeline."""

    inputs: list[dict[str, Any]] = field(default_factory=list)  # of the network, by name
    outputs: list[Any] = field(default_factory=list)
    steps: list[tuple[Any, Tensor, Tensor]] = field(default_factory=list)  # the scheduler's velocity, latents, result
    sound_steps: list[tuple[Any, Tensor, Tensor]] = field(default_factory=list)  # those of a copy of the scheduler
    sigmas: Tensor = field(default_factory=lambda: torch.empty(0))
    given_levels: bool = False
    encoded: list[Tensor] = field(default_factory=list)  # by the VAE
    # the arguments of the decode of the VAE, and of that of the sound's
    decoded: list[tuple[Tensor, tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)


@contextmanager
def silent() -> Iterator[None]:
    """Let no library warn: of prompts that are longer than it takes, as a probe's are on purpose, or of new classes."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


@contextmanager
def most_likely() -> Iterator[list[Tensor]]:
    """Note what a VAE encodes; its posterior is its mode, also for pipelines that draw the latents of an image."""
    kind, encoded = DiagonalGaussianDistribution, list[Tensor]()
    before = {name: vars(kind)[name] for name in ("sample", "mode")}

    def mode(posterior: Any, generator: Any = None) -> Tensor:
        encoded.append(before["mode"](posterior))
        return encoded[-1]

    try:
        kind.sample = kind.mode = mode
        yield encoded
    finally:
        kind.sample, kind.mode = before["sample"], before["mode"]


class Pipeline:
    """A pipeline of diffusers whose call is watched; guidance is off as `no_guidance` says."""

    def __init__(self, folder: Path, pipe: Any, networks: Sequence[str], memory: WithoutMemory) -> None:
        self.folder, self.pipe, self.networks, self.memory = folder, pipe, networks, memory
        self.names = inspect.signature(type(pipe).__call__).parameters
        self.makes_videos = bool({"num_frames", "frames"} & self.names.keys())
        self.no_guidance = {name: value for name, value in OFF.items() if name in self.names}
        self.long = LONG
        plain = [(name, one) for name, one in self.names.items() if one.kind is one.POSITIONAL_OR_KEYWORD]
        self._needed = [name for name, one in plain if one.default is one.empty and name not in ("self", "prompt")]
        self.image = next((name for name in (*IMAGES, *CLIPS) if name in self.names), "")
        self.clips = tuple(n for n in (self.image, "mask") if n in self.names) if self.image in CLIPS else ()
        self.takes_image = bool(self.image) and self.names[self.image].default is inspect.Parameter.empty

    def shown(self, images: Sequence[Image], size: Size) -> Shown:
        """Return the condition images or clips of a sample as the call takes them."""
        if not self.clips:
            return images[0].picture(*size[1:])
        return tuple(image.frames(*size) for image in images)

    def uniform(self, size: Size, *colors: Color) -> Shown:
        """Return an image of the first color, or clips of these colors."""
        pictures = [Picture.new("RGB", size[:0:-1], color) for color in colors]
        return tuple([picture] * size[0] for picture in pictures[: len(self.clips)]) if self.clips else pictures[0]

    def refuse(self, why: str) -> ProbeError:
        """Return the error of a pipeline that cannot be trained, which names it."""
        return ProbeError(f"{self.folder}: {type(self.pipe).__name__} {why}")

    @contextmanager
    def using(self, parts: Mapping[str, nn.Module], device: torch.device) -> Iterator[None]:
        """Call the pipeline on a device with these networks in place of those without memory."""
        before = {name: self.pipe.components[name] for name in parts}
        try:
            self.pipe.call_device = device
            for name, part in parts.items():
                setattr(self.pipe, name, part)
            yield
        finally:
            self.pipe.call_device = torch.device("cpu")
            for name, part in before.items():
                setattr(self.pipe, name, part)

    def call(
        self,
        prompts: Sequence[str],
        size: Size,
        shown: Shown | None = None,
        *,
        latents: Sequence[Tensor] = (),
        stop: int = 0,
        **options: Any,
    ) -> CallRecord:
        """Call the pipeline, by default with an image, or clips, of one color; ProbeError for a call that fails.

        `latents`, of the video and of its sound, are what each of two solver steps returns, up to the decoding of the
        last of them. With `stop` the call ends at that call of the network, counted from 1.
        """
        given: dict[str, Any] = dict(self.no_guidance)
        given |= {name: size[place] for name, place in SIZES.items() if name in self.names}
        given |= {"max_area": size[1] * size[2]} if "max_area" in self.names else {}
        if self.takes_image:
            shown = shown or self.uniform(size, *COLORS)
            given |= dict(zip(self.clips, shown, strict=False)) if isinstance(shown, tuple) else {self.image: shown}
        given |= options
        if lacks := [name for name in self._needed if name not in given]:
            raise self.refuse(f"needs {', '.join(lacks)}, which rows of prompts do not hold")
        given["output_type"] = "pt" if latents else "latent"
        given["num_inference_steps"] = 2 if latents else STEPS
        seen, text = CallRecord(), prompts[0] if len(prompts) == 1 else list(prompts)
        try:
            with (
                torch.no_grad(),
                silent(),
                most_likely() as seen.encoded,
                self._watched(seen, len(prompts), latents, stop=stop),
            ):
                self.pipe(prompt=text, generator=torch.Generator().manual_seed(1), **given)
        except _Reached:
            pass
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise self.refuse(
                f"has a network whose shapes follow from values ({error}): it cannot be learned"
            ) from error
        except Exception as error:  # whatever a pipeline of diffusers raises says why it cannot be called so
            where = f"{size[0]} frames of {size[1]} x {size[2]}"
            why = f"cannot be called for {where}: {type(error).__name__}: {error}"
            raise CallError(str(self.refuse(why))) from error
        seen.sigmas = self.pipe.scheduler.sigmas
        return seen

    @contextmanager
    def _watched(self, seen: CallRecord, samples: int, latents: Sequence[Tensor], *, stop: int) -> Iterator[None]:
        scheduler, kind = self.pipe.scheduler, type(self.pipe.scheduler)
        euler, set_timesteps = kind.step, kind.set_timesteps

        def watched(network: nn.Module) -> Any:
            forward, signature = network.forward, inspect.signature(network.forward)

            def call(*inputs: Any, **named: Any) -> Any:
                given = flat(signature.bind(*inputs, **named).arguments, samples)
                # pipelines may go on to write into tensors that they gave
                seen.inputs.append(tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, given))
                if len(seen.inputs) == stop:
                    raise _Reached
                output = forward(*inputs, **named)
                seen.outputs.append(output)
                return output

            return call

        def step(
            own: Any, velocity: Any, time: Any, x: Tensor, *more: Any, return_dict: bool = True, **named: Any
        ) -> Any:
            x, of_sound = x.clone(), own is not scheduler
            moved = euler(own, velocity, time, x, *more, return_dict=False, **named)[0]
            (seen.sound_steps if of_sound else seen.steps).append((velocity, x, moved))
            moved = latents[of_sound].to(x.dtype) if len(latents) > of_sound else moved
            return FlowMatchEulerDiscreteSchedulerOutput(moved) if return_dict else (moved,)

        def levels(own: Any, *inputs: Any, **named: Any) -> Any:
            seen.given_levels = named.get("sigmas") is not None
            return set_timesteps(own, *inputs, **named)

        def noted(decode: Any) -> Any:
            def call(z: Tensor, *inputs: Any, **named: Any) -> Any:
                seen.decoded.append((z, inputs, named))
                if len(seen.decoded) == len(latents):
                    raise _Reached
                return decode(z, *inputs, **named)

            return call

        levels.__signature__ = inspect.signature(set_timesteps)  # type: ignore[attr-defined]  # pipelines look
        changed = [(one, "forward", watched(one)) for one in map(self.pipe.components.get, self.networks)]
        vaes = filter(None, map(self.pipe.components.get, VAES[: len(latents)]))
        changed += [(vae, "decode", noted(vae.decode)) for vae in vaes]
        chooser = "calculate_default_height_width"  # of a size beside the one that was asked for
        if chooser in dir(processor := vars(self.pipe).get("video_processor")):
            changed += [(processor, chooser, lambda **named: (named["height"], named["width"]))]
        before = [(owner, name, vars(owner).get(name)) for owner, name, _ in changed]
        for owner, name, value in changed:
            vars(owner)[name] = value
        # Of the class itself, whose name pipelines compare: a copy that one makes of its scheduler is watched too.
        kind.step, kind.set_timesteps = step, levels
        try:
            yield
        finally:
            kind.step, kind.set_timesteps = euler, set_timesteps
            for owner, name, value in before:
                if value is None:
                    del vars(owner)[name]
                else:
                    vars(owner)[name] = value
