"""VBench's imaging quality and dynamic degree (arXiv:2311.17982) as scorers, each of one file of weights.

docs/rewards.md says where the files come from.
"""

import importlib.util
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import conv2d, gelu, interpolate, max_pool2d, pad, relu, scaled_dot_product_attention, unfold

from unified_trainer.basics.errors import MissingPackageError, UserError
from unified_trainer.basics.input_files import check_file
from unified_trainer.basics.ranges import Positive
from unified_trainer.basics.types import PerSample, Video
from unified_trainer.models.tensor_file import opened
from unified_trainer.rewards.base import NetworkScorer, ScorerConfig, check_pixels, of_images
from unified_trainer.rewards.own_settings import ScorerSettings

LONGEST = 512  # pixels of the longer side that VBench shows MUSIQ
SCALES = (224, 384)  # longer sides of the two smaller copies of an image
PATCH, GRID, WIDTH, HEADS, LAYERS = 32, 10, 384, 6, 14  # of MUSIQ
RATE = 8  # frames per second that dynamic degree looks at
TOP = 0.05  # share of the pixels whose flow counts, those that move most
FLOW, SIDE = 6.0, 256  # pixels of flow above which a frame of this shorter side moves
SMALLEST = 128  # pixels of a side that RAFT's correlations need


@dataclass(frozen=True)
class ImagingQuality(ScorerSettings):
    """MUSIQ's number for technical quality (arXiv:2108.05997), divided by 100."""

    per_frame = True

    def check(self, config: ScorerConfig, key: str, frames: int) -> None:
        """Raise UserError unless the file of weights is there."""
        check_file(Path(config.path), f"{key}.path")

    def load(self, config: ScorerConfig, device: torch.device) -> NetworkScorer:
        """Load the network; raise UserError, naming the file, for other weights."""
        network = filled(MUSIQ(), Path(config.path), device).to(config.dtype)

        def score(images: Float[Tensor, "b 3 h w"], prompts: Sequence[str]) -> PerSample:
            check_pixels(images, "MUSIQ")
            return network(shrunk(images.to(network.embedding.weight))).float() / 100

        return NetworkScorer(of_images(score, config.batch, config.top_fraction), (network,))


@dataclass(frozen=True)
class DynamicDegree(ScorerSettings):
    """1 for a video that moves, 0 for one that does not, by RAFT's optical flow (arXiv:2003.12039)."""

    frame_rate: Positive
    """Frames per second of the videos."""
    min_frames = 2

    def check(self, config: ScorerConfig, key: str, frames: int) -> None:
        """Raise UserError, naming the key, for frames of another rate, missing weights or no torchvision."""
        if config.frames != "all":
            raise UserError(f"{key}.frames must be all, not {config.frames}: settings.frame_rate tells which are seen")
        if config.precision != "fp32":
            raise UserError(f"{key}.precision must be fp32, not {config.precision}")
        check_file(Path(config.path), f"{key}.path")
        if importlib.util.find_spec("torchvision") is None:
            raise MissingPackageError(f"{key}: dynamic degree needs RAFT of torchvision; run `pip install torchvision`")

    def load(self, config: ScorerConfig, device: torch.device) -> NetworkScorer:
        """Load RAFT; raise UserError, naming the file, for other weights."""
        from torchvision.models.optical_flow import raft_large

        raft = filled(raft_large(), Path(config.path), device)

        def flow(first: Float[Tensor, "b 3 h w"], second: Float[Tensor, "b 3 h w"]) -> Float[Tensor, "b 2 h w"]:
            return raft(first, second, num_flow_updates=20)[-1]

        def score(video: Video, prompts: Sequence[str]) -> PerSample:
            check_pixels(video.flatten(2, 3), "RAFT")
            return dynamic_degree(video.to(next(raft.parameters())), self.frame_rate, flow, config.batch)

        return NetworkScorer(score, (raft,))


def filled(network: nn.Module, file: Path, device: torch.device) -> nn.Module:
    """Fill a network with the weights of a file, frozen; raise UserError, naming the file, unless they fit."""
    with opened(file) as held:
        weights = {key: held.get_tensor(key) for key in held.offset_keys()}
    try:
        network.load_state_dict(weights)
    except RuntimeError as error:
        raise UserError(f"{file} does not fit: {' '.join(str(error).split())[:300]}") from error
    return network.to(device).requires_grad_(False).eval()


def dynamic_degree(video: Video, frame_rate: float, flow: Callable[[Tensor, Tensor], Tensor], batch: int) -> PerSample:
    """Return 1 where a quarter of about 8 frames per second moves: flow above 6 pixels at a shorter side of 256.

    The flow of a frame is the mean over the 5% of pixels that move most. Raise UserError for frames below 128 pixels.
    """
    seen = 2 * video[:, :, :: max(1, round(frame_rate / RATE))].movedim(2, 1) - 1
    count, (height, width) = seen.shape[1], seen.shape[-2:]
    if min(height, width) < SMALLEST:
        raise UserError(f"dynamic degree: frames of {height}x{width} are below the {SMALLEST} pixels that RAFT needs")
    rows, columns = -height % 8, -width % 8
    sides = (columns // 2, columns - columns // 2, rows // 2, rows - rows // 2)
    padded = pad(seen.flatten(0, 1), sides, mode="replicate").unflatten(0, seen.shape[:2])
    pairs = zip(padded[:, :-1].flatten(0, 1).split(batch), padded[:, 1:].flatten(0, 1).split(batch), strict=True)
    moved = torch.cat([_moved(flow(*pair)) for pair in pairs]).unflatten(0, (len(video), count - 1))
    moving = moved > FLOW * min(height, width) / SIDE
    return (moving.sum(1) >= round(count / 4)).float()


def _moved(flow: Float[Tensor, "b 2 h w"]) -> PerSample:
    lengths = flow.norm(dim=1).flatten(1)
    return lengths.topk(int(TOP * lengths.shape[1])).values.mean(1)


def shrunk(images: Float[Tensor, "b 3 h w"]) -> Float[Tensor, "b 3 height width"]:
    """Resize images whose longer side is above 512 pixels to it (bilinear, not antialiased), as VBench does."""
    scale = LONGEST / max(images.shape[2:])
    if scale >= 1:
        return images
    return interpolate(images, [int(scale * length) for length in images.shape[2:]], mode="bilinear")


class MUSIQ(nn.Module):
    """The multi-scale image quality transformer; its state_dict has the keys of the package pyiqa."""

    def __init__(self) -> None:
        super().__init__()
        self.conv_root = StandardConv(3, 64, 7, 2, bias=False)
        self.gn_root = nn.GroupNorm(32, 64, eps=1e-6)
        self.block1 = Bottleneck()
        self.embedding = nn.Linear(256 * (PATCH // 4) ** 2, WIDTH)
        self.transformer_encoder = Encoder()
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, images: Float[Tensor, "b 3 h w"]) -> PerSample:
        """Return the quality of images in [0, 1], from 0 to 100, of their patches at three scales."""
        images, longest = 2 * images - 1, max(images.shape[2:])
        copies = [
            interpolate(images, [round(length * scale / longest) for length in images.shape[2:]], mode="bicubic")
            for scale in SCALES
        ]
        encoder = self.transformer_encoder
        tokens = [self.patches(copy) + encoder.places(copy, number) for number, copy in enumerate([*copies, images])]
        return self.head(encoder(torch.cat(tokens, 1)))[:, 0]

    def patches(self, images: Float[Tensor, "b 3 h w"]) -> Float[Tensor, "b n d"]:
        """Embed patches of 32 x 32 pixels, the outermost filled with grey, after one block of a ResNet on each."""
        cut = unfold(same(images, PATCH, PATCH), PATCH, stride=PATCH).mT
        x = self.gn_root(self.conv_root(cut.reshape(-1, 3, PATCH, PATCH)))
        x = self.block1(max_pool2d(same(relu(x), 3, 2), 3, 2))
        return self.embedding(x.movedim(1, -1).reshape(*cut.shape[:2], -1))


class Encoder(nn.Module):
    """A transformer whose positions are those of a grid of 10 x 10, whatever the size of the image."""

    def __init__(self) -> None:
        super().__init__()
        self.posembed_input = nn.ParameterDict({"position_emb": torch.zeros(1, GRID**2, WIDTH)})
        self.scaleembed_input = nn.ParameterDict({"scale_emb": torch.zeros(len(SCALES) + 1, WIDTH)})
        self.cls = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.transformer = nn.ModuleDict({f"encoderblock_{i}": Layer() for i in range(LAYERS)})
        self.encoder_norm = nn.LayerNorm(WIDTH, eps=1e-6)

    def places(self, images: Float[Tensor, "b 3 h w"], scale: int) -> Float[Tensor, "n d"]:
        """Return the embeddings of each patch's place and of the image's scale."""
        line = torch.arange(float(GRID)).view(1, 1, -1)
        rows, columns = (interpolate(line, math.ceil(length / PATCH)).long().flatten() for length in images.shape[2:])
        grid = (GRID * rows[:, None] + columns).flatten()
        return self.posembed_input["position_emb"][0, grid] + self.scaleembed_input["scale_emb"][scale]

    def forward(self, tokens: Float[Tensor, "b n d"]) -> Float[Tensor, "b d"]:
        x = torch.cat([self.cls.expand(len(tokens), -1, -1), tokens], 1)
        for layer in self.transformer.values():
            x = layer(x)
        return self.encoder_norm(x[:, 0])


class Layer(nn.Module):
    """Attention and two linear layers, each of normed tokens and added to them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH, eps=1e-6), nn.LayerNorm(WIDTH, eps=1e-6)
        self.attention = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in ("query", "key", "value", "out")})
        self.mlp = nn.ModuleDict({"fc1": nn.Linear(WIDTH, 3 * WIDTH), "fc2": nn.Linear(3 * WIDTH, WIDTH)})

    def forward(self, x: Float[Tensor, "b n d"]) -> Float[Tensor, "b n d"]:
        normed = self.norm1(x)
        parts = (self.attention[name](normed).unflatten(-1, (HEADS, -1)) for name in ("query", "key", "value"))
        seen = scaled_dot_product_attention(*(part.transpose(1, 2) for part in parts))
        x = x + self.attention["out"](seen.transpose(1, 2).flatten(2))
        return x + self.mlp["fc2"](gelu(self.mlp["fc1"](self.norm2(x))))


class Bottleneck(nn.Module):
    """A block of a ResNet, from 64 to 256 channels, with group norms."""

    def __init__(self) -> None:
        super().__init__()
        for name, out, kernel in (("1", 64, 1), ("2", 64, 3), ("3", 256, 1), ("_proj", 256, 1)):
            self.add_module(f"conv{name}", StandardConv(64, out, kernel, bias=False))
            self.add_module(f"gn{name}", nn.GroupNorm(32, out, eps=1e-4))

    def forward(self, x: Float[Tensor, "b 64 h w"]) -> Float[Tensor, "b 256 h w"]:
        inner = relu(self.through("2", relu(self.through("1", x))))
        return relu(self.through("3", inner) + self.through("_proj", x))

    def through(self, name: str, x: Tensor) -> Tensor:
        return self.get_submodule(f"gn{name}")(self.get_submodule(f"conv{name}")(x))


class StandardConv(nn.Conv2d):
    """A convolution whose weights have mean 0 and deviation 1 for each output (arXiv:1903.10520)."""

    def forward(self, x: Float[Tensor, "b c h w"]) -> Float[Tensor, "b d height width"]:
        deviation, mean = torch.std_mean(self.weight, (1, 2, 3), keepdim=True)
        weight = (self.weight - mean) / (deviation + 1e-5)
        return conv2d(same(x, self.kernel_size[0], self.stride[0]), weight, stride=self.stride)


def same(x: Float[Tensor, "b c h w"], kernel: int, stride: int) -> Float[Tensor, "b c height width"]:
    """Pad with zeros as TensorFlow's SAME does: windows begin at each stride, and the larger half comes behind."""
    rows, columns = ((math.ceil(length / stride) - 1) * stride + kernel - length for length in x.shape[2:])
    return pad(x, (columns // 2, columns - columns // 2, rows // 2, rows - rows // 2))
