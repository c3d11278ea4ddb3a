"""Text encoders and VAE of any pipeline as a codec: the pipeline's own call encodes prompts, alone or with an image."""

import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Self

import diffusers
import torch
import transformers
from jaxtyping import Float
from torch import Tensor, nn
from transformers import AutoTokenizer

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.requests import Image, Request
from unified_trainer.basics.types import DTYPES, Condition, Latents, Video
from unified_trainer.models.base import Prompt, Shape
from unified_trainer.models.encoders import EncoderConfig
from unified_trainer.models.folder import check_described, fingerprint, no_progress_bar, read_pretrained, read_tokenizer
from unified_trainer.models.frozen_codec import FrozenCodec
from unified_trainer.models.frozen_network import FrozenNetwork, channels_last
from unified_trainer.models.image_tensors import ImageTensors
from unified_trainer.models.pipeline.arguments import ROWS
from unified_trainer.models.pipeline.calls import SHORT, Pipeline, Shown
from unified_trainer.models.pipeline.facts import Facts
from unified_trainer.models.pipeline.guidance import guided
from unified_trainer.models.pipeline.known import known
from unified_trainer.models.pipeline.latents import KNOWN
from unified_trainer.models.pipeline.opening import NETWORKS, component_classes
from unified_trainer.models.pipeline.vae import decoded, fix, tile
from unified_trainer.models.pipeline.values import differ
from unified_trainer.models.prompt_embeddings import PromptEmbeddings
from unified_trainer.models.prompt_lengths import Cut, cut_by
from unified_trainer.models.prompt_tensors import stack
from unified_trainer.parallel.device import rounds_products
from unified_trainer.parallel.mesh import Mesh

UNLIKE = "\0negative: "  # before a text that is encoded as a negative prompt
SOUND_PARTS = ("audio_vae", "vocoder")
OTHER_PARTS = ("vae", "image_encoder", *SOUND_PARTS)  # components that encode no prompts


class PipelineCodec(FrozenCodec):
    """The frozen components of a pipeline folder. A prompt's tensors are the network's arguments that follow from it.

    The pipeline is called up to its network, each prompt alone, or beside a long one where only then it pads.
    """

    causal = False
    libraries = (torch, transformers, diffusers)

    def __init__(self, folder: Path, device: torch.device, config: EncoderConfig) -> None:
        """Open a folder, of which no weight is read yet; UserError for settings that a pipeline does not take."""
        self.folder, self._device, config = folder, device, config.on(device.type)
        self._known, self._facts = known(folder), known(folder).any()
        parts, self._config = component_classes(folder), config
        self._names = {name for name in parts if name not in (*NETWORKS, "vae", *SOUND_PARTS, "scheduler")}
        networks = {name: kind for name, kind in parts.items() if issubclass(kind, nn.Module) and name not in NETWORKS}
        self._parts = {
            name: FrozenNetwork(partial(self._read, name, kind), device, offload=config.offload, pinned=name == "vae")
            for name, kind in networks.items()
        }
        self._vae = self._parts["vae"]
        self._settings = f"{config.text_precision} {config.vae_precision}"
        self._tiles = f" tiles {config.vae_tile}" if config.vae_tile else ""
        self._guidance = config.embedded_guidance
        if self._guidance is not None and not self._facts.guidance:
            raise UserError(f"encoders.embedded_guidance: the network of {folder} takes no guidance; leave it out")
        if self._guidance is None and self._facts.guidance:
            self._guidance = float(self._known.pipeline.names["guidance_scale"].default)
        self.text_shapes = self._facts.arguments.text_shapes
        tf32 = rounds_products() and config.text_precision == "fp32"
        encoder = f"{self._identity()} {config.text_precision} {device.type} {tf32} {self.text_shapes}"
        self._embeddings = PromptEmbeddings(self._embed, encoder, self.text_shapes, config)
        self._images = ImageTensors(config)

    def _read(self, name: str, kind: Any) -> nn.Module:
        config = self._config
        precision = config.vae_precision if name == "vae" else config.text_precision
        precision = "fp32" if name in SOUND_PARTS else precision
        network = read_whole(kind, self.folder / name, DTYPES[precision])
        if name != "vae":
            return network
        fix(network)
        if config.vae_tile:
            tile(network, config.vae_tile, self._facts.pixels)
        return channels_last(network) if config.vae_channels_last else network

    @classmethod
    def load(cls, folder: Path, device: torch.device, config: EncoderConfig) -> Self:
        """Open a folder and read the VAE; other networks are read when they are first used."""
        codec = cls(folder, device, config)
        codec._vae.load()
        return codec

    @cached_property
    def text_fingerprint(self) -> str:
        return f"{self._facts.pipeline} {self._settings} {fingerprint(*self._text_parts())}"

    @cached_property
    def video_fingerprint(self) -> str:
        return f"{self._facts.pipeline} {self._settings}{self._tiles} {fingerprint(self.folder / 'vae')}"

    def latent_shape(self, frames: int, height: int, width: int) -> Shape:
        return self._known.of_size((frames, height, width)).shape

    # Prompts

    def cut(self, prompts: Sequence[str]) -> Cut:
        """Compare with the tokenizer that reads most: others, such as CLIP's beside T5, cut the same text earlier."""
        rows = max(shape[0] for shape in self.text_shapes.values() if len(shape) > 1)
        names = sorted(name for name in self._names if name.startswith("tokenizer"))
        read = [read_tokenizer(AutoTokenizer, self.folder / name) for name in names]
        cuts = [cut_by(tokenizer, int(min(tokenizer.model_max_length, rows)), prompts) for tokenizer in read]
        return max(cuts, key=lambda cut: cut[0], default=(rows, []))

    def text_condition(self, prompts: Sequence[Prompt]) -> Condition:
        return self._text_condition(stack(prompts, self.text_shapes))

    def _text_condition(self, tensors: dict[str, Tensor]) -> Condition:
        if self._facts.guidance:
            assert self._guidance is not None  # from the setting or the pipeline
            tensors[self._facts.guidance] = torch.full(
                (len(next(iter(tensors.values()))),), self._guidance * self._facts.guidance_factor
            )
        return Condition(tensors).map(lambda x: x.to(self._device, non_blocking=True))

    def negative(self, prompt: str) -> str:
        return UNLIKE + prompt if self._facts.negative else prompt

    def _embed(self, prompts: Sequence[str]) -> Generator[Prompt, None, None]:
        with self._calling(self._text_networks()) as pipeline:
            for prompt in prompts:
                yield self._row(pipeline, self._facts, prompt)

    def _row(self, pipeline: Pipeline, facts: Facts, prompt: str, shown: Shown | None = None) -> dict[str, Tensor]:
        """Return the tensors of a prompt, which a pipeline may read together with an image."""
        call, place = (facts.negative or (0, 0)) if prompt.startswith(UNLIKE) else (0, 0)
        if prompt.startswith(UNLIKE):
            seen = guided(pipeline, facts.size, shown, prompt.removeprefix(UNLIKE), stop=call + 1)
        else:
            both = [prompt, pipeline.long] if facts.arguments.paired else [prompt]
            seen = pipeline.call(both, facts.size, shown, stop=1)
        given = facts.latents.apart(seen.inputs[call])
        if not call | place:
            self._check_constants(facts, given, prompt)
        tensors: dict[str, Tensor] = {}
        for name, argument in facts.arguments.text.items():
            # a mask that is left out marks all rows
            row = torch.ones(argument.shape) if given.get(name) is None else given[name][place]
            tensors[name] = row.to(argument.dtype).cpu()
            if argument.listed:
                tensors[name + ROWS] = torch.tensor(len(row))
        return tensors

    def _check_constants(self, facts: Facts, given: Mapping[str, Any], prompt: str) -> None:
        """Raise UserError if this prompt changes an argument that was learned to follow from no prompt."""
        arguments = facts.arguments
        for name in {*given, *arguments.constants} - {
            "return_dict",
            *arguments.of_pass,
            *arguments.text,
            *arguments.images,
        }:
            value, held = arguments.constants.get(name), given.get(name)
            if name in (arguments.counted or ()) and isinstance(held, Tensor):
                value = arguments.constants[name][: len(held)]
            if differ(value, held, row=name in arguments.replicated):
                raise UserError(
                    f"{self.folder}: {facts.pipeline} makes {name} of prompt {prompt!r}, not of others: "
                    "this prompt cannot be trained with this pipeline"
                )

    # Images

    def encode_images(self, images: Sequence[tuple[Image, ...]], latent_shape: Shape) -> Condition:
        """Return the network's arguments that follow from each sample's image."""
        return self._images.condition(images, latent_shape, self._encode_shown).map(lambda x: x.to(self._device))

    def first_frames(self, latents: Latents) -> Condition:
        facts = self._of(latents)
        if not facts.latents_hold_image:
            raise UserError(f"{self.folder}: this network needs the first frames of clips, not their latents")
        return Condition({KNOWN: latents[:, :, : facts.latents.known]})

    def _encode_shown(self, images: tuple[Image, ...], latent_shape: Shape) -> dict[str, Tensor]:
        facts = self._known.of_shape(latent_shape)
        shown, arguments = self._known.pipeline.shown(images, facts.size), facts.arguments
        with self._calling(arguments.image_parts) as pipeline:
            given = facts.latents.apart(pipeline.call([SHORT], facts.size, shown, stop=1).inputs[0])
        return {name: given[name][0].to(argument.dtype).cpu() for name, argument in arguments.images.items()}

    # Latents

    @torch.no_grad()
    def encode_raw(self, video: Video) -> Latents:
        pixels = video.to(self._device) * 2 - 1
        with self._vae.in_use() as vae:
            pixels = (pixels[:, :, 0] if self._facts.latents.flat else pixels).to(vae.dtype)
            held = [vae.encode(rows, return_dict=False)[0] for rows in self._slices(pixels)]
            raw = torch.cat([x if isinstance(x, Tensor) else x.mean for x in held]).float()
        return raw[:, :, None] if self._facts.latents.flat else raw

    def _slices(self, x: Tensor) -> tuple[Tensor, ...]:
        return x.split(1) if self._config.vae_slicing else (x,)

    def normalise(self, raw: Latents) -> Latents:
        facts = self._of(raw)
        return (raw.to(self._device) - facts.latents.shift.to(self._device)) / facts.latents.scale.to(self._device)

    def raw(self, latents: Latents) -> Latents:
        return self._of(latents).latents.raw(latents.to(self._device))

    def decode(self, latents: Latents) -> Video:
        facts = self._of(latents)
        raw = facts.latents.raw(facts.of_video(latents.to(self._device)))
        with self._vae.in_use() as vae:
            video = torch.cat([decoded(vae, rows, facts.latents) for rows in self._slices(raw)])
        return (video.float() / 2 + 0.5).clamp(0, 1)

    def decoder(self) -> Callable[[Latents], Video]:
        return torch.no_grad()(self.decode)

    def _of(self, latents: Latents) -> Facts:
        return self._known.of_shape((latents.shape[1], latents.shape[2], latents.shape[3], latents.shape[4]))

    # Components

    def _text_parts(self) -> list[Path]:
        return [self.folder / name for name in sorted(self._names)]

    def _text_networks(self) -> list[str]:
        return [name for name in self._parts if name not in OTHER_PARTS]

    def _free_text(self) -> None:
        for name in self._text_networks():
            self._parts[name].free()

    @contextmanager
    def _calling(self, names: Sequence[str]) -> Iterator[Any]:
        """Let the pipeline be called with these networks, on the device."""
        with ExitStack() as uses:
            parts = {name: uses.enter_context(self._parts[name].in_use()) for name in names}
            uses.enter_context(self._known.pipeline.using(parts, self._device))
            yield self._known.pipeline


class JointCodec(PipelineCodec):
    """A `PipelineCodec` that encodes each prompt with the image of its sample when both are drawn."""

    def encode_requests(self, requests: Sequence[Request], latent_shape: Shape) -> Condition:
        """Return the conditions of requests; the tensors of the last ones are kept in memory."""
        facts = self._known.of_shape(latent_shape)
        if any(len(request.images) != 1 for request in requests):
            raise UserError(f"{self.folder}: {facts.pipeline} needs a condition image for each prompt")
        rows = [
            self._images.get((request.identity, *latent_shape), partial(self._together, request, latent_shape))
            for request in requests
        ]
        text = self._text_condition(stack(rows, facts.arguments.text_shapes))
        if not facts.arguments.images:
            return text
        return text.updated(self.encode_images([request.images for request in requests], latent_shape))

    def _together(self, request: Request, latent_shape: Shape) -> dict[str, Tensor]:
        facts = self._known.of_shape(latent_shape)
        with self._calling(self._text_networks()) as pipeline:
            return self._row(pipeline, facts, request.text, pipeline.shown(request.images, facts.size))

    def prompts(self, prompts: Sequence[str]) -> list[Prompt]:
        raise UserError(
            f"{self.folder}: {self._facts.pipeline} encodes a prompt together with its image, so that prompts alone "
            "cannot be encoded or stored"
        )

    def encode_ahead(self, prompts: Sequence[str], mesh: Mesh) -> str:
        return "text encoder: each prompt is encoded with its image, when it is drawn"


class SoundCodec(PipelineCodec):
    """A `PipelineCodec` that decodes the sound of latents too, by networks in float32."""

    def __init__(self, folder: Path, device: torch.device, config: EncoderConfig) -> None:
        super().__init__(folder, device, config)
        for name in SOUND_PARTS:  # whose weights are read when a sound is first decoded
            check_described(component_classes(folder)[name], folder / name)
        self.sample_rate = self._known.pipeline.pipe.vocoder.config.output_sampling_rate

    def encode_raw(self, video: Video) -> Latents:
        raise UserError(f"{self.folder}: these latents hold a sound, which frames alone do not give")

    @torch.no_grad()
    def sound(self, latents: Latents) -> Float[Tensor, "b channels n"]:
        sound = self._of(latents).sound
        assert sound is not None  # as the folder was opened
        raw = sound.latents.raw(sound.parts(latents.to(self._device)).sound)
        with self._parts["audio_vae"].in_use() as vae, self._parts["vocoder"].in_use() as vocoder:
            return vocoder(vae.decode(raw[:, :, 0], return_dict=False)[0])


def read_whole(kind: Any, folder: Path, dtype: torch.dtype) -> nn.Module:
    """Read a network; UserError, which names weights, unless the folder holds exactly its weights, all finite."""
    diffused = issubclass(kind, diffusers.ModelMixin)
    options = {"torch_dtype": dtype, "low_cpu_mem_usage": False} if diffused else {"dtype": dtype}
    options |= {"output_loading_info": True, "ignore_mismatched_sizes": True}  # they are refused below
    with no_progress_bar():
        network, info = read_pretrained(kind, folder, use_safetensors=True, **options)
    for said, key in (
        ("lacks", "missing_keys"),
        ("holds unknown", "unexpected_keys"),
        ("has another size of", "mismatched_keys"),
    ):
        if info[key]:
            names = sorted(map(str, info[key]))
            raise UserError(f"{folder} {said} {', '.join(names[:3])}{f' and {len(names) - 3} more' * (len(names) > 3)}")
    for name, weight in network.state_dict().items():
        if not math.isfinite(float(weight.float().sum())) and not bool(weight.isfinite().all()):
            raise UserError(f"{folder}: weight {name} holds a value that is not finite")
    return network
