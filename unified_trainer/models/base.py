"""The protocols of a model family: networks to train, and a codec that all roles share."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from unified_trainer.basics.requests import Image, Request
from unified_trainer.basics.types import Condition, Latents, PerFrame, PerSample, Video
from unified_trainer.models.adapter_file import AdapterFile, diffusers_adapter
from unified_trainer.models.encoders import EncoderConfig
from unified_trainer.models.prompt_lengths import Cut
from unified_trainer.models.sparse_attention import SparseAttentionConfig
from unified_trainer.numerics.chunks import ChunkConfig
from unified_trainer.parallel.mesh import Mesh

if TYPE_CHECKING:
    from unified_trainer.models.blueprint import Blueprint

Shape = tuple[int, int, int, int]
Prompt = Mapping[str, Tensor]  # of one prompt, without the sample axis, unpadded, on the CPU
EXPERTS = ("transformer", "transformer_2")  # of high and of low noise; a folder of one network has the first alone


@dataclass(frozen=True)
class ActionForm:
    """The actions that a network takes: `size` numbers for each pixel frame."""

    size: int
    ratio: int  # pixel frames of a latent frame; the first latent frame has one

    def pixel_frames(self, latent_frames: int) -> int:
        """Return the pixel frames of the first latent frames of a video."""
        return self.ratio * (latent_frames - 1) + 1 if latent_frames else 0


class VideoModel(Protocol):
    """A network that predicts velocities; all unit conversion happens inside."""

    network: nn.Module
    # Share of the FLOPs of a plain pass that the last pass computed, by ends of the names of modules; others: all.
    pass_share: Mapping[str, Fraction]

    @property
    def adapter_layers(self) -> tuple[str, ...]:
        """Names of the linear layers that adapters usually go on."""

    @property
    def new_layers(self) -> tuple[str, ...]:
        """Ends of the names of weights that a folder may lack: they start at zero, and are trained beside adapters."""

    def velocity(self, x_t: Latents, sigma: PerSample, cond: Condition) -> Latents:
        """Predict velocity = noise - x0, in float32."""

    def guide(self, cond: Latents, uncond: Latents, guidance_scale: float | PerSample | PerFrame) -> Latents:
        """Return the velocity that guidance makes of both; the family's own rule, usually that of `flow.guide`."""

    @property
    def blocks(self) -> Sequence[nn.Module]:
        """The repeated blocks in the order of the forward pass, those of several block lists one after the other.

        They are the units of sharding, prefetch, compilation and recomputation.
        """

    @property
    def feature_size(self) -> int:
        """The number of channels of `features`."""

    def features(self, *, alone: bool = False) -> AbstractContextManager[list[Tensor]]:
        """Inside the context, every pass appends its middle block's output [b, tokens, feature_size] to the list.

        With `alone` the blocks behind the middle one do not run, and the velocity means nothing.
        """

    def read(self, mesh: Mesh, merged: AdapterFile | None = None) -> None:
        """Read the weights of a network that was opened without them, and add those of an adapter to them in float32.

        Each rank reads its shards.
        """

    def share_tokens(self, mesh: Mesh) -> None:
        """Spread every sample's tokens over the sequence ranks of the mesh; inputs and outputs stay whole samples."""

    def example(
        self, shape: Shape | None = None, samples: int = 1, text_tokens: int = 4
    ) -> tuple[Latents, PerSample, Condition]:
        """Return an input that is always the same: by default a small one, on which two copies can be compared.

        `shape` is that of a sample's latents [c, t, h, w], and `text_tokens` the rows of a text embedding.
        """

    def save(self, folder: Path, component: str, dtype: torch.dtype) -> None:
        """Write the network as a component of a pipeline folder; the weights in memory are rounded to `dtype` too."""

    def compiled_inputs(self, *inputs: Any) -> tuple[Any, ...]:
        """Return the inputs of a block as those of its compiled form.

        Their number does not change from pass to pass, and a dimension that grows is marked as dynamic.
        """


class SparseVideoModel(VideoModel, Protocol):
    """A model whose self-attention leaves out a share of the tiles of keys."""

    share: float  # that the next pass leaves out

    def lacks_kernel(self, device: str) -> str:
        """Return what keeps bf16 passes on such a device from block-sparse kernels; empty where they run on them."""


class Cache(Protocol):
    """The KV cache of one rollout: what later chunks attend to. Only `append` writes keys and values."""

    seen: int  # latent frames finished so far: the place of the next chunk in the video

    def start_prompt(self) -> None:
        """Switch the prompt for later passes; cached keys of finished chunks are unchanged."""


class CausalVideoModel(VideoModel, Protocol):
    """A model that also generates chunk by chunk; `velocity` stays bidirectional."""

    def velocity_masked(
        self,
        x_t: Latents,
        sigma: PerSample | PerFrame,
        cond: Condition,
        chunks: ChunkConfig,
        clean: Latents | None = None,
    ) -> Latents:
        """Predict the velocities of all chunks in one pass.

        A chunk attends to earlier chunks of `x_t`, or of `clean` (teacher forcing). Clean chunks must be at the context
        noise of `chunks`, as a cache holds them.
        """

    def open_cache(self, chunks: ChunkConfig) -> Cache:
        """Return an empty cache for one rollout; all its passes have one condition until `start_prompt`."""

    def velocity_cached(self, x_t: Latents, sigma: PerSample, cond: Condition, cache: Cache) -> Latents:
        """Predict the velocity of the next chunk, which attends to the cache; the cache stays as it is.

        Nothing in the cache gets a gradient.
        """

    def append(self, x: Latents, cond: Condition, cache: Cache) -> None:
        """Add a finished chunk to the cache, without gradient; `x` must be at the cache's context noise."""

    def cache_bytes(self, latent_shape: tuple[int, int, int, int], chunks: ChunkConfig, dtype: torch.dtype) -> int:
        """Return the memory of one sample's full cache on this rank when passes compute in `dtype`.

        The keys and values of the text are not counted. Raise UserError for more latent frames than the model has
        positions.
        """


class Codec(Protocol):
    """Text to conditions, and pixels to normalised latents and back; frozen, one for all roles."""

    folder: Path
    text_shapes: Mapping[str, tuple[int, ...]]  # by name, the largest (padded) shape of each tensor of a prompt
    causal: bool = True  # whether a decoded frame depends on no later latent, so that the first latent has the first

    @property
    def text_fingerprint(self) -> str:
        """A text that identifies text encoder, tokenizer, precision and longest prompt; no weights are loaded.

        Copies of one folder have equal fingerprints.
        """

    @property
    def video_fingerprint(self) -> str:
        """Identifies what latents depend on, but for rounding: VAE and precision; equal for copies of one folder."""

    def latent_shape(self, frames: int, height: int, width: int) -> tuple[int, int, int, int]:
        """Return channels, latent frames, height and width; raise UserError for a size that the VAE does not divide."""

    def prompts(self, prompts: Sequence[str]) -> list[Prompt]:
        """Return what `text_condition` pads and stacks."""

    def cut(self, prompts: Sequence[str]) -> Cut:
        """Return how many tokens the text encoder reads, and the numbers of the prompts that have more."""

    def remember(self, prompt: str, tensors: Prompt) -> None:
        """Use stored tensors, of this text encoder, for a prompt that has not been encoded yet."""

    def encode_text(self, prompts: Sequence[str]) -> Condition:
        """Return `text_condition` of `prompts`; a row is a function of its prompt alone, and may come from a cache."""

    def text_condition(self, prompts: Sequence[Prompt]) -> Condition:
        """Return the condition of stored tensors on the device; raise UserError for names or shapes that cannot be."""

    def text_difference(self, prompt: str, tensors: Prompt) -> float:
        """Return how far stored tensors are from those of the prompt: see `models.prompt_tensors.difference`."""

    def negative(self, prompt: str) -> str:
        """Return the text by which the functions above know a prompt of the unconditional branch."""
        return prompt

    def encode_ahead(self, prompts: Sequence[str], mesh: Mesh) -> str:
        """Encode prompts that will be needed, each rank a share, and remove the text encoder from memory.

        A collective. Return what was done in words, for the user.
        """

    def in_use(self) -> AbstractContextManager[None]:
        """Keep the VAE on the device while the context lasts, where it is elsewhere between uses."""

    def encode(self, video: Video) -> Latents:
        """Encode video to normalised latents: `normalise` of `encode_raw`."""

    def encode_raw(self, video: Video) -> Latents:
        """Encode video to the posterior's mean in float32, without noise, gradient and normalisation."""

    def normalise(self, raw: Latents) -> Latents:
        """Return (raw - mean) / std with the VAE's own statistics."""

    def raw(self, latents: Latents) -> Latents:
        """Undo `normalise`, on the device."""

    def decode(self, latents: Latents) -> Video:
        """Decode normalised latents, with a gradient to them if they take one."""

    def decoder(self) -> Callable[[Latents], Video]:
        """Return a decoder of consecutive chunks of one batch; its outputs in a row equal `decode` of the whole."""


@runtime_checkable
class ImageEncoder(Protocol):
    """The part of a codec that encodes condition images, in families that take some."""

    def encode_images(self, images: Sequence[tuple[Image, ...]], latent_shape: tuple[int, int, int, int]) -> Condition:
        """Encode the images of each sample of latents [c, t, h, w], without gradient; results may be kept.

        Images are scaled to cover the video that such latents decode to, and cropped around their center. A row is a
        function of its images and of the shape. The names are other ones than those of the text.
        """

    def first_frames(self, latents: Latents) -> Condition:
        """Return what `encode_images` makes of the first frames of clips, from the clips' normalised latents.

        Raise UserError where the latents of a clip do not hold it.
        """


@runtime_checkable
class JointEncoder(Protocol):
    """The part of a codec that encodes a text together with the images of its sample, in families that do so."""

    def encode_requests(self, requests: Sequence[Request], latent_shape: tuple[int, int, int, int]) -> Condition:
        """Return the conditions of requests, with what `encode_images` makes of their images."""


@runtime_checkable
class SoundDecoder(Protocol):
    """The part of a codec that decodes sounds, in families whose latents hold some."""

    sample_rate: int  # values per second

    def sound(self, latents: Latents) -> Float[Tensor, "b channels n"]:
        """Decode the sounds of videos, values in [-1, 1], without gradient."""


def name_in(weight: str, layer_name: Callable[[str], str | None]) -> str | None:
    """Return a weight's name in a layout that names layers, and parameters without one, by `layer_name`."""
    layer, _, kind = weight.rpartition(".")
    whole, of_layer = layer_name(weight), layer_name(layer)
    return whole or (of_layer and f"{of_layer}.{kind}")


@dataclass(frozen=True)
class Family:
    """A model family: how a pipeline folder of one diffusers class is opened, and what its configs say.

    `folder` is the pipeline folder with model_index.json. A component is one of its networks, named as in that file.
    All functions raise UserError, naming the file, for a folder that is not whole or not consistent.
    """

    pipelines: tuple[str, ...]  # each a `_class_name` in the model_index.json of its folders
    model: Callable[[Path, str], VideoModel]  # (folder, component) -> the network in float32; `read` brings its weights
    # (folder, device, settings) -> text encoder and VAE, whose weights may be read when they are first used
    codec: Callable[[Path, torch.device, EncoderConfig], Codec]
    latent_channels: Callable[[Path], int]  # folder -> channels of the latents; reads configs only
    # (folder, frames, height, width of a video in pixels) -> latent channels, frames, height, width; reads configs only
    latent_shape: Callable[[Path, int, int, int], tuple[int, int, int, int]]
    tokens: Callable[[Path, tuple[int, int, int, int]], int]  # (folder, latent shape) -> tokens of one sample
    causal: Callable[[Path, str], CausalVideoModel] | None = None  # as `model`, but chunk by chunk
    # folder -> heads of self-attention, which sequence ranks divide; 1 refuses sequence ranks
    attention_heads: Callable[[Path], int] = lambda folder: 1
    # folder -> its networks, of high noise first, and the noise level in (0, 1) at which two experts meet; None where
    # the folder has one network or names no level.
    networks: Callable[[Path], tuple[tuple[str, ...], float | None]] = lambda folder: (EXPERTS[:1], None)
    experts: tuple[str, str] = EXPERTS  # components that an export of two experts is written to, high noise first
    # (weights by peft's names, alpha) -> the same weights by the names of the family's published adapters; by default
    # those that diffusers reads.
    published_adapter: Callable[[Mapping[str, Tensor], float], dict[str, Tensor]] = diffusers_adapter
    # folder -> the fewest and the most condition images of a sample; reads configs only
    images: Callable[[Path], tuple[int, int]] = lambda folder: (0, 0)
    # folder -> the arguments of the pipeline's call that take these as clips; empty: they are images
    clips: Callable[[Path], tuple[str, ...]] = lambda folder: ()
    # (folder, latent shape) -> shapes, by name, of what `encode_images` makes of a sample's image, if files of encoded
    # clips hold it; empty where a clip's latents hold its first frame, and where the family takes no image
    image_tensors: Callable[[Path, Shape], Mapping[str, tuple[int, ...]]] = lambda folder, latent_shape: {}
    # folder -> whether the latents of a clip hold its condition image, as `first_frames` takes it
    latents_hold_image: Callable[[Path], bool] = lambda folder: False
    # folder -> whether the pipeline gives its scheduler the levels 1, (n - 1) / n, ... 1 / n before the shift
    given_levels: Callable[[Path], bool] = lambda folder: False
    # (folder, scale w of uncond + w (cond - uncond), settings) -> the arguments of the pipeline's call that guide so
    guidance: Callable[[Path, float, EncoderConfig], Mapping[str, float]] = lambda folder, w, config: {
        "guidance_scale": w
    }
    # folder -> the recipe for models that no recipe was made for, and the size of videos that its pipeline names
    general_recipe: Callable[[Path], tuple[str, Mapping[str, int]]] = lambda folder: ("", {})
    # (folder, (frames, height, width) in pixels) -> what was learned about the pipeline, in words; "": nothing
    describe: Callable[[Path, tuple[int, int, int]], str] = lambda folder, size: ""
    # folder -> whether latents hold a sound too, which is not read from clips
    sound: Callable[[Path], bool] = lambda folder: False
    # config of the component that has the guidance scale in place of the pipeline's call: a ClassifierFreeGuidance
    guider: str = ""
    fps: float | None = None  # frames per second of the videos, if the positions of tokens are in seconds; None: any
    tile_unit: int = 64  # pixels: three quarters of a tile of so many must be whole latents, so 4 for each latent
    # names of the experts' published adapters, without suffix
    adapter_files: tuple[str, str] = ("high_noise", "low_noise")
    # a layer's or parameter's name -> its name in published adapters; None if that is the same or if there is none
    published_layer: Callable[[str], str | None] = lambda layer: None
    # layout of whole networks by `published_layer`: its name, and (network's folder, pipeline folder) -> its config
    native: tuple[str, Callable[[Path, Path], dict[str, Any]]] | None = None
    # module that an export carries as pipeline.py: a diffusers pipeline that reads scheduler/sampler.json
    exported_pipeline: Path | None = None
    # folder -> its networks without weights, by which `plan` counts memory and FLOPs; None: it refuses the family
    blueprint: "Callable[[Path], Blueprint] | None" = None
    # (folder, component, settings, causal or not) -> as `causal` or `model`, with sparse self-attention; None: no such
    # form
    sparse: Callable[[Path, str, SparseAttentionConfig, bool], SparseVideoModel] | None = None
    # (folder, component) -> as `model`, a flow map; None: the family has none
    flow_map: Callable[[Path, str], VideoModel] | None = None
    # (folder, size) -> the actions that its networks take, by a new layer if a size is given; None: none
    actions: Callable[[Path, int], ActionForm | None] = lambda folder, size: None
    # (folder, component, causal, size) -> a network that takes actions of this size from now on; None: none can
    acting: Callable[[Path, str, bool, int], VideoModel] | None = None
