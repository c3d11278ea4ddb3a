"""A diffusers pipeline that samples as the run of an export did: the same noise, solver, guidance and chunks.

`export` copies this file into the folders that it writes, as pipeline.py. It needs torch and diffusers alone:

    pipe = DiffusionPipeline.from_pretrained(FOLDER, custom_pipeline="pipeline", trust_remote_code=True)
    frames = pipe("a red circle moving left", generator=torch.Generator().manual_seed(3)).frames[0]

Students with a condition image take it as `image=`, and those with actions take them as `actions=`.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

import torch
from diffusers import (
    AutoencoderKLWan,
    ConfigMixin,
    FlowMatchEulerDiscreteScheduler,
    WanPipeline,
    WanTransformer3DModel,
)
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.transformers.transformer_wan import WanAttention
from diffusers.pipelines.wan.pipeline_output import WanPipelineOutput
from diffusers.utils.torch_utils import randn_tensor
from PIL import Image, ImageOps
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoTokenizer, BaseImageProcessor, CLIPVisionModel, UMT5EncoderModel

TIME_SCALE = 1000  # the network's time is 1000 sigma
MAX_TEXT_TOKENS = 512  # what Wan was trained with; a tokenizer may say less
ALIGNMENT = 64  # bytes, of what torch allocates on a CPU
GATE = "to_gate_compress"  # FastVideo's name of the layer that adds the coarse branch of sparse attention
SPAN = "span_proj"  # the layer by which a flow map reads how far a step goes
ACTIONS = "action_proj"  # the layer by which a network reads actions
NOISE = -1  # number of the draw that sampling starts from
MASK_CHANNELS = 4  # beside image latents: pixel frames of a latent frame


@dataclass(frozen=True)
class Sampler:
    """The content of scheduler/sampler.json."""

    sigmas: list[float]  # noise levels of the steps, 1 is pure noise, and a last 0
    solver: str  # "ode": Euler steps; "sde": fresh noise is added to the predicted x0
    guidance_scale: list[float]  # w of uncond + w (cond - uncond), of the high- and of the low-noise network
    negative_prompt: str
    boundary: float | None  # noise level from which transformer runs, and transformer_2 below; None: one network
    precision: str  # "bf16": passes run under autocast; "fp32": in the precision of the weights
    sparse_share: float  # share of the tiles of keys that self-attention leaves out; 0: dense
    sparse_tile: list[int]  # tokens of a tile along time, height and width
    flow_map: bool  # whether the network predicts the mean velocity of a whole step
    action_size: int  # numbers for each pixel frame in the actions that the network takes; 0: none
    frames: int  # size of the run's videos in pixels
    height: int
    width: int
    chunk_frames: int  # latent frames that a causal student generates at a time; 0: all frames at once
    independent_first_frame: bool  # the first latent frame is a chunk of its own
    window_frames: int  # finished latent frames that a chunk attends to, the sink included; 0: all
    sink_frames: int  # first latent frames that always stay among them
    rolling_sink: bool  # whether a video that outgrows the window moves them along
    context_noise: float  # noise level at which finished chunks are attended to

    def ranges(self, frames: int) -> list[tuple[int, int]]:
        """Return (start, stop) of the chunks of latent frames; all frames are one chunk unless the student is causal.

        Raise ValueError if chunk_frames does not divide them.
        """
        if not self.chunk_frames:
            return [(0, frames)]
        first = int(self.independent_first_frame)
        if (frames - first) % self.chunk_frames:
            raise ValueError(f"{frames - first} latent frames are no multiple of chunk_frames, {self.chunk_frames}")
        starts = range(first, frames, self.chunk_frames)
        return [(0, 1)] * first + [(start, start + self.chunk_frames) for start in starts]

    def window(self, frames: int, frames_of_run: int) -> int:
        """Return the window in latent frames: a longer video than the run's attends to at most the run's past.

        Raise ValueError for one that cuts a chunk, whose tiles sparse attention needs whole.
        """
        window = self.window_frames or (frames_of_run - self.chunk_frames if frames > frames_of_run else 0)
        if self.sparse_share and window and (window - self.sink_frames) % self.chunk_frames:
            raise ValueError(
                f"{frames} latent frames are more than the run's {frames_of_run}, whose past of {window} frames cuts a "
                f"chunk: set window_frames in scheduler/sampler.json to a multiple of {self.chunk_frames}"
            )
        return window


class SamplerFile(ConfigMixin):
    """scheduler/sampler.json of a folder, or of a repository on the hub."""

    config_name = "sampler.json"


class TrainedWanPipeline(WanPipeline):
    """WanPipeline with the sampler that its student was trained for, in place of a scheduler and its settings.

    It also loads the folders of WanImageToVideoPipeline.
    """

    _optional_components = [*WanPipeline._optional_components, "image_encoder", "image_processor"]  # noqa: RUF012
    model_cpu_offload_seq = "text_encoder->image_encoder->transformer->transformer_2->vae"
    sampler: Sampler | None = None

    def __init__(
        self,
        tokenizer: AutoTokenizer,
        text_encoder: UMT5EncoderModel,
        vae: AutoencoderKLWan,
        scheduler: FlowMatchEulerDiscreteScheduler,
        transformer: Optional[WanTransformer3DModel] = None,  # noqa: UP045 - diffusers 0.36 reads no `X | None`
        transformer_2: Optional[WanTransformer3DModel] = None,  # noqa: UP045
        boundary_ratio: Optional[float] = None,  # noqa: UP045
        expand_timesteps: bool = False,
        image_encoder: Optional[CLIPVisionModel] = None,  # noqa: UP045
        image_processor: Optional[BaseImageProcessor] = None,  # noqa: UP045
    ) -> None:
        networks = (transformer, transformer_2, boundary_ratio, expand_timesteps)
        super().__init__(tokenizer, text_encoder, vae, scheduler, *networks)
        self.register_modules(image_encoder=image_encoder, image_processor=image_processor)

    def load_sampler(self, folder: str | Path, **options: object) -> Sampler:
        """Read the sampler of an export, by its folder or its name on the hub (`options`: revision, token ...)."""
        self.sampler = Sampler(**SamplerFile.load_config(folder, subfolder="scheduler", **options))
        return self.sampler

    @torch.no_grad()
    def __call__(
        self,
        prompt: str | list[str],
        generator: torch.Generator | list[torch.Generator] | None = None,
        num_frames: int | None = None,
        height: int | None = None,
        width: int | None = None,
        output_type: str = "np",
        return_dict: bool = True,
        image: Image.Image | list[Image.Image] | None = None,
        actions: Tensor | None = None,
    ) -> WanPipelineOutput | tuple:
        """Generate a video of each prompt, with a generator each: video i of `sample --seed S` has seed S + i.

        Sizes are in pixels, by default the run's. `output_type` is np, pt, pil or latent, as in WanPipeline. `image` is
        the first frame of the videos, or a list with that of each; it is scaled to cover the size, and cropped around
        its center. `actions` [frames, size] are those of all videos, or [prompts, frames, size] those of each.
        """
        sampler = self.sampler or self.load_sampler(Path(self.transformer.config._name_or_path).parent)
        align(module for module in self.components.values() if isinstance(module, nn.Module))
        prompts, device = [prompt] if isinstance(prompt, str) else prompt, self._execution_device
        shape = self._latent_shape(num_frames or sampler.frames, height or sampler.height, width or sampler.width)
        frames, frames_of_run = shape[1], (sampler.frames - 1) // self.vae_scale_factor_temporal + 1
        ranges, window = sampler.ranges(frames), sampler.window(frames, frames_of_run)

        @functools.cache
        def draw(_: int) -> Tensor:
            """Return the noise of one step for all chunks; the generators are read in the order of the steps."""
            return randn_tensor((len(prompts), *shape), generator=generator, device=device, dtype=torch.float32)

        images = [image] * len(prompts) if isinstance(image, Image.Image) else image
        condition = self._encode_images(images, len(prompts), shape, device)
        text, negative = self._embed(prompts, device), self._embed([sampler.negative_prompt], device)
        calls = len(ranges) * (len(sampler.sigmas) - 1)
        given = condition, self._actions(sampler, actions, len(prompts), num_frames or sampler.frames, device)
        with Networks(self, sampler, text, negative, *given) as networks, self.progress_bar(total=calls) as bar:
            chunks = []
            for start, stop in ranges:
                own = slice(start, stop)
                chunks.append(solve(sampler, networks.velocity, draw, own, bar.update))
                if stop < frames:
                    context = add_context_noise(sampler, chunks[-1], draw, own)
                    networks.append(context, window)
        video = torch.cat(chunks, 2)
        if output_type != "latent":
            video = self.video_processor.postprocess_video(self._decode(video), output_type)
        self.maybe_free_model_hooks()
        return WanPipelineOutput(frames=video) if return_dict else (video,)

    def _actions(
        self, sampler: Sampler, actions: Tensor | None, samples: int, frames: int, device: torch.device
    ) -> Tensor | None:
        """Return the actions of each video; ValueError for others than the network takes."""
        if actions is not None and actions.ndim == 2:
            actions = actions.expand(samples, -1, -1)
        wanted = (samples, frames, sampler.action_size) if sampler.action_size else None
        if (None if actions is None else tuple(actions.shape)) != wanted or not (
            actions is None or bool(actions.isfinite().all())
        ):
            given = None if actions is None else tuple(actions.shape)
            raise ValueError(f"this pipeline takes finite actions of the shape {wanted}, not {given}")
        return actions if actions is None else actions.to(device, torch.float32)

    def _latent_shape(self, frames: int, height: int, width: int) -> tuple[int, int, int, int]:
        time, space = self.vae_scale_factor_temporal, self.vae_scale_factor_spatial
        if frames % time != 1 or height % space or width % space:
            raise ValueError(
                f"num_frames must be {time}k + 1 and height and width multiples of {space}, "
                f"not {frames}, {height} and {width}"
            )
        return self.vae.config.z_dim, frames // time + 1, height // space, width // space

    def _embed(self, prompts: list[str], device: torch.device) -> Tensor:
        """Encode prompts one by one: the rounding of a row can depend on the other rows of a batch."""
        length = min(MAX_TEXT_TOKENS, self.tokenizer.model_max_length)
        rows = [self._get_t5_prompt_embeds([prompt], 1, length, device) for prompt in prompts]
        return torch.cat(rows).float()

    def _encode_images(
        self, images: list[Image.Image] | None, samples: int, shape: tuple[int, int, int, int], device: torch.device
    ) -> "ImageCondition | None":
        """Encode the first frame of each video, one by one; ValueError for a number of images that cannot be."""
        network = self.transformer.config
        needs_image = network.in_channels != network.out_channels
        if images is None and not needs_image:
            return None
        if images is None or len(images) != samples or not (needs_image or self.config.expand_timesteps):
            wanted = f"takes {samples if needs_image or self.config.expand_timesteps else 'no'} condition images"
            raise ValueError(f"this pipeline {wanted} for {samples} prompts, not {len(images or ())}")
        rows = [self._encode_image(one, shape, needs_image, device) for one in images]
        latents, clip = (torch.cat(parts) if parts[0] is not None else None for parts in zip(*rows, strict=True))
        return ImageCondition(latents, clip)

    def _encode_image(
        self, image: Image.Image, shape: tuple[int, int, int, int], needs_image: bool, device: torch.device
    ) -> tuple[Tensor, Tensor | None]:
        """Return the latents of a first frame, with gray frames behind it if they are channels, and tokens of CLIP."""
        _, frames, height, width = shape
        height, width = height * self.vae_scale_factor_spatial, width * self.vae_scale_factor_spatial
        picture = cover(ImageOps.exif_transpose(image).convert("RGB"), height, width)
        pixels = torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8).view(1, 1, height, width, 3)
        video = pixels.movedim(-1, 1).float() / 255
        if needs_image:
            gray = video.new_full((1, 3, (frames - 1) * self.vae_scale_factor_temporal, height, width), 0.5)
            video = torch.cat([video, gray], 2)
        encoded = self.vae.encode((video.to(device) * 2 - 1).to(self.vae.dtype)).latent_dist.mean.float()
        mean, std = self._statistics(encoded)
        if self.image_encoder is None:
            return (encoded - mean) / std, None
        seen = self.image_processor(images=picture, return_tensors="pt").pixel_values
        tokens = self.image_encoder(seen.to(device, self.image_encoder.dtype), output_hidden_states=True)
        return (encoded - mean) / std, tokens.hidden_states[-2].float()

    def _statistics(self, like: Tensor) -> Iterable[Tensor]:
        """Return mean and standard deviation of the VAE's latents."""
        config = self.vae.config
        return (torch.tensor(each).view(1, -1, 1, 1, 1).to(like) for each in (config.latents_mean, config.latents_std))

    def _decode(self, latents: Tensor) -> Tensor:
        mean, std = self._statistics(latents)
        return self.vae.decode((latents * std + mean).to(self.vae.dtype), return_dict=False)[0].float()


def cover(picture: Image.Image, height: int, width: int) -> Image.Image:
    """Scale a picture to cover a size and crop it around its center."""
    scale = max(width / picture.width, height / picture.height)
    own_width, own_height = min(width / scale, picture.width), min(height / scale, picture.height)
    left, top = (picture.width - own_width) / 2, (picture.height - own_height) / 2
    box = (left, top, left + own_width, top + own_height)
    return picture.resize((width, height), Image.Resampling.LANCZOS, box)


@dataclass(frozen=True)
class ImageCondition:
    """The first frames of a batch: latents [b, c, t, h, w] as channels, or [b, c, 1, h, w] as first latent frame."""

    latents: Tensor
    clip: Tensor | None  # tokens of CLIP [b, n, d]

    def velocity(
        self, network: WanTransformer3DModel, x: Tensor, sigma: float, text: Tensor, dtype: torch.dtype, start: int
    ) -> Tensor:
        """Run a network on frames of the video from number `start` on; x may hold the batch more than once."""
        times, (b, _, t, h, w) = len(x) // len(self.latents), x.shape
        latents = self.latents.repeat(times, 1, 1, 1, 1)
        time = torch.full((b,), TIME_SCALE * sigma, device=x.device)
        if network.config.in_channels != network.config.out_channels:
            mask = torch.zeros_like(latents[:, :MASK_CHANNELS])
            mask[:, :, 0] = 1
            clip = None if self.clip is None else self.clip.repeat(times, 1, 1).to(dtype)
            beside = torch.cat([mask, latents], 1)[:, :, start : start + t]
            inputs = torch.cat([x, beside], 1).to(dtype)
            return network(inputs, time, text, clip, return_dict=False)[0].float()
        if start > 0:
            return network(x.to(dtype), time, text, return_dict=False)[0].float()
        _, high, wide = network.config.patch_size
        time = torch.full((b, t, h // high * (w // wide)), TIME_SCALE * sigma, device=x.device)
        time[:, 0] = 0  # the first latent frame is known
        inputs = torch.cat([latents, x[:, :, 1:]], 2).to(dtype)
        v = network(inputs, time.flatten(1), text, return_dict=False)[0].float()
        return torch.cat([(x[:, :, :1] - latents) / sigma, v[:, :, 1:]], 2)


def align(modules: Iterable[nn.Module]) -> None:
    """Copy weights that begin where torch would not allocate any.

    Those of a file begin anywhere, and a CPU rounds the product of a matrix and one row by where its weights begin.
    """
    for weight in (weight for module in modules for weight in module.parameters()):
        if weight.device.type == "cpu" and weight.data_ptr() % ALIGNMENT:
            weight.data = weight.data.clone()


def solve(
    sampler: Sampler,
    velocity: Callable[[Tensor, float], Tensor],
    draw: Callable[[int], Tensor],
    own: slice,
    count: Callable[[], object],
) -> Tensor:
    """Follow the noise levels from noise to the x0 of the latent frames `own`; draw(s) is the noise of step s."""
    x = draw(NOISE)[:, :, own]
    for step, (sigma, after) in enumerate(zip(sampler.sigmas, sampler.sigmas[1:], strict=False)):
        v = velocity(x, sigma)
        count()
        x0 = x - sigma * v
        if after == 0:
            return x0
        x = x + (after - sigma) * v if sampler.solver == "ode" else (1 - after) * x0 + after * draw(step)[:, :, own]
    raise ValueError("sampler.json: sigmas must end in 0")


def add_context_noise(sampler: Sampler, x0: Tensor, draw: Callable[[int], Tensor], own: slice) -> Tensor:
    """Noise a finished chunk to the level at which later chunks attend to it."""
    level = sampler.context_noise
    return (1 - level) * x0 + level * draw(len(sampler.sigmas))[:, :, own] if level else x0


class Networks:
    """The guided velocity of one batch; inside its context, networks of a causal student have KV caches."""

    def __init__(
        self,
        pipeline: WanPipeline,
        sampler: Sampler,
        text: Tensor,
        negative: Tensor,
        image: ImageCondition | None = None,
        actions: Tensor | None = None,
    ) -> None:
        self.sampler, self.text, self.image, self.seen = sampler, text, image, 0  # latent frames that are finished
        self.both = torch.cat([text, negative.expand_as(text)])
        self.guided = any(scale != 1 for scale in sampler.guidance_scale)
        boundary = sampler.boundary or 0.0
        self.high, self.low = pipeline.transformer, pipeline.transformer_2
        running = [self.high] * (sampler.sigmas[0] >= boundary) + [self.low] * (sampler.sigmas[-2] < boundary)
        self.caches = [KVCache(network, sampler.rolling_sink) for network in running] if sampler.chunk_frames else []
        self._norms = [layer for network in running for layer in network.modules() if isinstance(layer, nn.RMSNorm)]
        sparse, flow_maps = (running if has else [] for has in (sampler.sparse_share, sampler.flow_map))
        self.acting = [] if actions is None else [ActionLayer(network, actions) for network in running]
        caches: list[KVCache | None] = [*self.caches] or [None] * len(running)
        self.opened: list[KVCache | SparseAttention | FlowMap | ActionLayer] = [
            *self.caches,
            *(SparseAttention(network, sampler, cache) for network, cache in zip(sparse, caches, strict=False)),
            *(FlowMap(network, sampler) for network in flow_maps),
            *self.acting,
        ]

    def __enter__(self) -> "Networks":
        for attention in self.opened:
            attention.open()
        half = self.sampler.precision == "bf16"
        self._hooks = [norm.register_forward_pre_hook(in_float32) for norm in self._norms if half]
        return self

    def __exit__(self, *_: object) -> None:
        for attention in self.opened:
            attention.close()
        for hook in self._hooks:
            hook.remove()

    def velocity(self, x: Tensor, sigma: float) -> Tensor:
        """Return uncond + w (cond - uncond), both from one pass; w = 1 runs cond alone unless a cache has both."""
        is_low = sigma < (self.sampler.boundary or 0.0)
        network, scale = self.low if is_low else self.high, self.sampler.guidance_scale[is_low]
        if scale == 1 and not (self.guided and self.caches):
            return self._pass(network, x, sigma, self.text)
        cond, uncond = self._pass(network, torch.cat([x, x]), sigma, self.both).chunk(2)
        return uncond + scale * (cond - uncond)

    def append(self, x: Tensor, window: int) -> None:
        """Let later chunks attend to a finished one, which is at the context's noise level."""
        rows, text = (torch.cat([x, x]), self.both) if self.guided else (x, self.text)
        for cache in self.caches:
            self._pass(cache.network, rows, self.sampler.context_noise, text)
            cache.append(x.shape[2], window, self.sampler.sink_frames)
        self.seen += x.shape[2]
        for layer in self.acting:
            layer.seen = self.seen

    def _pass(self, network: WanTransformer3DModel, x: Tensor, sigma: float, text: Tensor) -> Tensor:
        time, half = torch.full((len(x),), TIME_SCALE * sigma, device=x.device), self.sampler.precision == "bf16"
        dtype = torch.float32 if half else network.dtype
        with torch.autocast(x.device.type, torch.bfloat16, enabled=half, cache_enabled=False):
            if self.image is not None:
                return self.image.velocity(network, x, sigma, text.to(dtype), dtype, self.seen)
            return network(x.to(dtype), time, text.to(dtype), return_dict=False)[0].float()


class KVCache:
    """While it is open, a network attends to the finished chunks that were appended, at absolute positions."""

    def __init__(self, network: WanTransformer3DModel, rolling_sink: bool) -> None:
        self.network, self.seen = network, 0  # latent frames finished so far
        self.chunks: list[int] = []  # latent frames of each chunk in the cache, if the window keeps whole chunks
        self.layers = [RollingSink() if rolling_sink else CachedAttention() for _ in network.blocks]
        self._before = [block.attn1.processor for block in network.blocks]

    def open(self) -> None:
        """Put the attention with a cache into the network."""
        self._hook = self.network.rope.register_forward_pre_hook(self._positions)
        self._set(self.layers)

    def close(self) -> None:
        """Put the network's own attention back."""
        self._hook.remove()
        self._set(self._before)

    def append(self, frames: int, window: int, sink: int) -> None:
        """Keep keys and values of the pass that just ran, of so many latent frames, and drop what leaves the window."""
        self.seen += frames
        starts = [*itertools.accumulate(self.chunks, initial=0)]
        left = range(sink, sink + starts[-1] + frames - window) if window else ()
        self.chunks = [size for start, size in zip(starts, [*self.chunks, frames], strict=True) if start not in left]
        for layer in self.layers:
            layer.append(frames, window, sink)

    def _set(self, processors: list) -> None:
        for block, processor in zip(self.network.blocks, processors, strict=True):
            block.attn1.processor = processor

    def _positions(self, _rope: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
        """Ask for the positions of all frames up to the last of this pass; the attention takes those of its tokens."""
        (x,) = inputs
        return (x[:, :, :1].expand(-1, -1, self.seen + x.shape[2], -1, -1),)


class CachedAttention:
    """Self-attention of one block over the tokens of finished chunks and of this pass."""

    _attention_backend = _parallel_config = None  # as WanAttnProcessor has them, for set_attention_backend

    def __init__(self) -> None:
        self.past: list[Tensor] = []  # keys and values
        self.latest: list[Tensor] = []

    def __call__(self, attn: WanAttention, x: Tensor, _text: None, _mask: None, rope: tuple[Tensor, Tensor]) -> Tensor:
        query, key, value = (
            part.unflatten(2, (attn.heads, -1))
            for part in (attn.norm_q(attn.to_q(x)), attn.norm_k(attn.to_k(x)), attn.to_v(x))
        )
        cos, sin = (table[:, -x.shape[1] :] for table in rope)
        query, key = rotate(query, cos, sin).to(value), rotate(key, cos, sin).to(value)
        out = dispatch_attention_fn(query, *self.seen(key, value, rope), backend=self._attention_backend)
        return attn.to_out[1](attn.to_out[0](out.flatten(2)))

    def seen(self, key: Tensor, value: Tensor, rope: tuple[Tensor, Tensor]) -> list[Tensor]:
        """Return the keys and values of finished chunks and of this pass, which are those that `append` keeps."""
        self.latest = [key, value]
        return self._all()

    def append(self, frames: int, window: int, sink: int) -> None:
        """Keep the latest keys and values: all, or the sink and the newest that fit into the window."""
        tokens = self.latest[0].shape[1] // frames
        self.past = self._all()
        over = self.past[0].shape[1] - window * tokens if window else 0
        if over > 0:
            first, then = sink * tokens, sink * tokens + over
            self.past = [torch.cat([part[:, :first], part[:, then:]], 1) for part in self.past]

    def _all(self) -> list[Tensor]:
        if not self.past:
            return self.latest
        return [torch.cat(parts, 1) for parts in zip(self.past, self.latest, strict=True)]


class RollingSink(CachedAttention):
    """Attention whose keys of the sink are turned by as many frames as the video is longer than the window."""

    def __init__(self) -> None:
        super().__init__()
        self.sink = self.turn = 0  # in tokens

    def seen(self, key: Tensor, value: Tensor, rope: tuple[Tensor, Tensor]) -> list[Tensor]:
        """Return the keys and values of finished chunks, those of the sink turned, and of this pass."""
        past = self.past
        if self.turn:
            first = slice(self.turn, self.turn + 1)  # the first token of a frame: row 0, column 0
            sink = rotate(past[0][:, : self.sink].float(), *(table[:, first] for table in rope)).to(key)
            self.past = [torch.cat([sink, past[0][:, self.sink :]], 1), past[1]]
        every = super().seen(key, value, rope)
        self.past = past
        return every

    def append(self, frames: int, window: int, sink: int) -> None:
        """Keep the latest keys and values as they are, and count by how much those of the sink are turned from now."""
        before = self.past[0].shape[1] if self.past else 0
        super().append(frames, window, sink)
        tokens = self.latest[0].shape[1]
        self.sink, self.turn = sink * tokens // frames, self.turn + before + tokens - self.past[0].shape[1]


def in_float32(_norm: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
    """Let queries and keys be normalised and rotated in float32, as in training; attention rounds them to bf16."""
    return (inputs[0].float(),)


class SparseAttention:
    """While it is open, the self-attention of a network leaves out tiles of keys (VSA, arXiv:2505.13389).

    All pairs of tokens are computed, head by head, and those of the other tiles masked. With a KV cache, which is open
    before, they are the tiles of finished chunks and of the pass.
    """

    def __init__(self, network: WanTransformer3DModel, sampler: Sampler, cache: KVCache | None) -> None:
        self.network, self.share, self.tile = network, sampler.sparse_share, sampler.sparse_tile
        self.cache = cache
        self._before = [block.attn1.processor for block in network.blocks]
        for number, block in enumerate(network.blocks):
            add_layer(network, f"blocks.{number}", GATE, block.attn1.to_q)

    def open(self) -> None:
        """Put the sparse attention into the network."""
        self._hook = self.network.register_forward_pre_hook(self._set_tiles)
        layers = [None] * len(self.network.blocks) if self.cache is None else self.cache.layers
        for block, layer in zip(self.network.blocks, layers, strict=True):
            block.attn1.processor = functools.partial(self._attend, block, layer)

    def close(self) -> None:
        """Put the network's own attention back."""
        self._hook.remove()
        for block, processor in zip(self.network.blocks, self._before, strict=True):
            block.attn1.processor = processor

    def _set_tiles(self, _network: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        """Number the tiles of the pass's tokens, and of all tokens that it attends to."""
        x, patch = inputs[0], self.network.config.patch_size
        frames, *plane = [length // part for length, part in zip(x.shape[2:], patch, strict=True)]
        past = [] if self.cache is None else self.cache.chunks
        self.queries, self.keys = (Tiles(self.tile, each, plane, x.device) for each in ([frames], [*past, frames]))
        self.kept = max(1, math.ceil((1 - self.share) * len(self.keys.sizes)))

    def _attend(
        self,
        block: nn.Module,
        layer: CachedAttention | None,
        attn: WanAttention,
        x: Tensor,
        _text: None,
        _mask: None,
        rope: tuple[Tensor, Tensor],
    ) -> Tensor:
        query, key, value, gate = (
            part.unflatten(2, (attn.heads, -1))
            for part in (attn.norm_q(attn.to_q(x)), attn.norm_k(attn.to_k(x)), attn.to_v(x), getattr(block, GATE)(x))
        )
        cos, sin = (table[:, -x.shape[1] :] for table in rope)
        query, key = rotate(query, cos, sin).to(value), rotate(key, cos, sin).to(value)
        key, value = (key, value) if layer is None else layer.seen(key, value, rope)
        query, key, value, gate = (part.transpose(1, 2) for part in (query, key, value, gate))
        scores = (self.queries.means(query) @ self.keys.means(key).transpose(2, 3)).float() / math.sqrt(query.shape[3])
        coarse = scores.softmax(-1).to(value) @ self.keys.means(value)
        order = (-scores).argsort(dim=-1, stable=True)[..., : self.kept]
        chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, order, True)
        masks = (chosen[:, [head]][:, :, self.queries.of_token][..., self.keys.of_token] for head in range(attn.heads))
        fine = [
            scaled_dot_product_attention(query[:, [head]], key[:, [head]], value[:, [head]], attn_mask=mask)
            for head, mask in enumerate(masks)
        ]
        out = torch.cat(fine, 1) + gate * coarse[:, :, self.queries.of_token]
        return attn.to_out[1](attn.to_out[0](out.transpose(1, 2).flatten(2)))


class Tiles:
    """The tiles of chunks of so many latent frames, one chunk after the other, and the place of each token in them."""

    def __init__(self, tile: list[int], chunks: list[int], plane: list[int], device: torch.device) -> None:
        counted, tokens, slots = 0, [], []
        for frames in chunks:
            size = [frames, *plane]
            count = [-(-length // part) for length, part in zip(size, tile, strict=True)]
            at = torch.meshgrid(*(torch.arange(length) for length in size), indexing="ij")
            t, h, w = (place // part for place, part in zip(at, tile, strict=True))
            i, j, k = (place % part for place, part in zip(at, tile, strict=True))
            tokens.append((counted + (t * count[1] + h) * count[2] + w).flatten())
            slots.append(((i * tile[1] + j) * tile[2] + k).flatten())
            counted += math.prod(count)
        self.of_token, self.whole = torch.cat(tokens).to(device), math.prod(tile)
        self.slot = self.of_token * self.whole + torch.cat(slots).to(device)
        self.sizes = torch.bincount(self.of_token, minlength=counted)

    def means(self, x: Tensor) -> Tensor:
        """Return the mean of each tile of x [b, heads, n, d]."""
        slots = x.new_zeros(*x.shape[:2], len(self.sizes) * self.whole, x.shape[3])
        sums = slots.index_copy(2, self.slot, x).unflatten(2, (len(self.sizes), -1)).sum(3, dtype=torch.float32)
        return (sums / self.sizes[:, None]).to(x)


class FlowMap:
    """While it is open, a network predicts the mean velocity of each of the sampler's steps (arXiv:2505.13447).

    To the embedding of the time it adds a layer of the embedding of the step's length, by the same embedder.
    """

    def __init__(self, network: WanTransformer3DModel, sampler: Sampler) -> None:
        self.network, self.embedder = network, network.condition_embedder
        ends = sampler.sigmas[1:] if sampler.solver == "ode" else [0.0] * len(sampler.sigmas)
        levels = torch.tensor([TIME_SCALE * sigma for sigma in sampler.sigmas]).tolist()  # rounded to float32
        lengths = (TIME_SCALE * (sigma - end) for sigma, end in zip(sampler.sigmas, ends, strict=False))
        self.lengths = dict(zip(levels, lengths, strict=False))
        add_layer(network, "condition_embedder", SPAN, self.embedder.time_embedder.linear_2)

    def open(self) -> None:
        """Let the embedding of the time hold the length of the step too."""
        hook = self.embedder.time_embedder.register_forward_hook(self._add_length)
        self._hooks = [self.network.register_forward_pre_hook(self._note_step), hook]

    def close(self) -> None:
        """Give the network its own embedding back."""
        for hook in self._hooks:
            hook.remove()

    def _note_step(self, _network: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        """Find the length of the step in the pass's time, of which tokens of a known frame have 0."""
        x, time = inputs[:2]
        self.length = torch.full((len(x),), self.lengths[time.max().item()], device=x.device)

    def _add_length(self, embedder: nn.Module, inputs: tuple[Tensor], embedded: Tensor) -> Tensor:
        waves = self.embedder.timesteps_proj(self.length).to(inputs[0])
        added = getattr(self.embedder, SPAN)(embedder.forward(waves))
        return embedded + (added if embedded.ndim == 2 else added[:, None])


class ActionLayer:
    """While it is open, a network reads the actions [b, frames, size] of the pixel frames of each latent frame.

    To the embedding of the time of a frame's tokens it adds a layer of them. The first latent frame has one pixel
    frame, and zeros before it.
    """

    def __init__(self, network: WanTransformer3DModel, actions: Tensor) -> None:
        self.network, self.actions, self.seen = network, actions, 0  # latent frames that are finished
        self.embedder = network.condition_embedder
        add_layer(network, "condition_embedder", ACTIONS, self.embedder.time_embedder.linear_2)

    def open(self) -> None:
        """Give every token a time of its own, and let its embedding hold the actions."""
        hook = self.embedder.time_embedder.register_forward_hook(self._add)
        self._hooks = [self.network.register_forward_pre_hook(self._spread), hook]

    def close(self) -> None:
        """Give the network its own embedding back."""
        for hook in self._hooks:
            hook.remove()

    def _spread(self, _network: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x, time, *rest = inputs
        _, high, wide = self.network.config.patch_size
        self.frames, tokens = x.shape[2], x.shape[2] * (x.shape[3] // high) * (x.shape[4] // wide)
        return (x, time[:, None].expand(-1, tokens) if time.ndim == 1 else time, *rest)

    def _add(self, _embedder: nn.Module, inputs: tuple[Tensor], embedded: Tensor) -> Tensor:
        layer = getattr(self.embedder, ACTIONS)
        (ratio,) = layer.kernel_size
        joined = nn.functional.pad(self.actions, (0, 0, ratio - 1, 0)).unfold(1, ratio, ratio)
        own = joined[:, self.seen : self.seen + self.frames].repeat(len(embedded) // len(joined), 1, 1, 1)
        added = layer(own.flatten(0, 1).to(inputs[0])).view(len(embedded), self.frames, 1, -1)
        return (embedded.unflatten(1, (self.frames, -1)) + added).flatten(1, 2)


def add_layer(network: WanTransformer3DModel, parent: str, name: str, like: nn.Linear) -> None:
    """Add a layer that diffusers' class does not have, read from the network's folder, unless it is there.

    It is linear, or a convolution over frames that do not overlap, by the axes of its weight.
    """
    module = network.get_submodule(parent)
    if name in dict(module.named_children()):
        return
    held: dict[str, Tensor] = {}
    for file in sorted(Path(network.config._name_or_path).glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            own = [key for key in tensors.offset_keys() if key.startswith(f"{parent}.{name}.")]
            held |= {key.rpartition(".")[2]: tensors.get_tensor(key) for key in own}
    outputs, size, *ratio = held["weight"].shape
    made: nn.Module = nn.Conv1d(size, outputs, ratio[0], ratio[0]) if ratio else nn.Linear(size, outputs)
    made.load_state_dict(held)
    layer = made.to(like.weight.device, like.weight.dtype)
    module.register_module(name, layer.requires_grad_(False))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs of adjacent channels by the angles of their token's position."""
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos[..., 0::2], sin[..., 1::2]
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)
