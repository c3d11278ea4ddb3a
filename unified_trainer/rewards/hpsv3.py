"""The scorer hpsv3: how much people prefer an image for a prompt, predicted by Qwen2-VL (HPSv3, arXiv:2508.03789)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from PIL import Image
from torch import Tensor, nn
from torch.nn.functional import interpolate
from transformers import Qwen2Tokenizer, Qwen2VLConfig
from transformers.models.qwen2_vl.modeling_qwen2_vl import (
    Qwen2VisionTransformerPretrainedModel,
    Qwen2VLRotaryEmbedding,
    Qwen2VLTextModel,
    Qwen2VLVisionRotaryEmbedding,
)

from unified_trainer.errors import NotFiniteError, UserError
from unified_trainer.input_files import read_as
from unified_trainer.models.folder import read_tokenizer
from unified_trainer.models.layout import reading_config, without_memory
from unified_trainer.models.tensor_file import floating_shapes, opened
from unified_trainer.rewards.base import ScorerConfig, ScorerKind, of_images
from unified_trainer.rewards.chat_template import check_template
from unified_trainer.rewards.hpsv3_folder import (
    CHECKPOINT,
    REWARD_TOKEN,
    SETTINGS,
    ChatTemplate,
    ImageStatistics,
    PromptSettings,
    check_folder,
    network_config,
)
from unified_trainer.types import PerSample, Video

EMBEDDED = Path(__file__).parents[1] / "assets" / "tiny" / "hpsv3"  # the folder that the path "tiny" means
UNUSED_KEYS = {"lm_head.weight"}
LONGEST_ASPECT = 200  # Qwen2-VL reads no image with a longer side ratio

Images = Float[Tensor, "b 3 h w"] | Sequence[Image.Image | Path | str]


@dataclass(frozen=True)
class Inputs:
    """A right-padded batch of Qwen2-VL's inputs; the patches of all images follow each other."""

    input_ids: Int[Tensor, "b n"]
    attention_mask: Int[Tensor, "b n"]
    patches: Float[Tensor, "p d"]
    grids: Int[Tensor, "b 3"]  # time, height and width of each image in patches
    is_image: Bool[Tensor, "b n"]
    is_reward: Bool[Tensor, "b n"]


class HPSv3Network(nn.Module):
    """Qwen2-VL with a reward head; its state_dict has the keys of the official checkpoint."""

    def __init__(self, config: Qwen2VLConfig, head_widths: tuple[int, int]) -> None:
        super().__init__()
        self.visual = Qwen2VisionTransformerPretrainedModel(config.vision_config)
        self.model = Qwen2VLTextModel(config.text_config)
        wide, narrow = head_widths
        self.rm_head = nn.Sequential(
            nn.Linear(config.text_config.hidden_size, wide),
            nn.ReLU(),
            nn.Dropout(0.05),
            nn.Linear(wide, narrow),
            nn.ReLU(),
            nn.Linear(narrow, 2),
        )

    def forward(self, inputs: Inputs) -> Float[Tensor, "b 2"]:
        """Compute (mu, raw sigma) from the final-norm hidden state at the reward token; the head computes in float32.

        HPSv3 was trained with positions 0..n-1 on all three M-RoPE axes, not with Qwen2-VL's image grid positions.
        """
        embeds = self.model.embed_tokens(inputs.input_ids)
        image_embeds = self.visual(inputs.patches, grid_thw=inputs.grids).pooler_output
        embeds = embeds.masked_scatter(inputs.is_image[..., None], image_embeds.to(embeds.dtype))
        b, n = inputs.input_ids.shape
        hidden = self.model(
            inputs_embeds=embeds,
            attention_mask=inputs.attention_mask,
            position_ids=torch.arange(n, device=embeds.device).expand(3, b, n),
            use_cache=False,
        ).last_hidden_state
        with torch.autocast(hidden.device.type, enabled=False):
            return self.rm_head(hidden[inputs.is_reward].float())


@dataclass(frozen=True)
class Preprocessor:
    """The preprocessing of images and prompts to `Inputs`."""

    tokenizer: Qwen2Tokenizer
    chat_template: str
    instruction: str  # holds {text_prompt}
    prompt_with_special_token: str  # holds the reward token
    pixels: int  # every image is resized to about this many
    mean: tuple[float, ...]  # per channel, of images in [0, 1]
    std: tuple[float, ...]
    patch_size: int
    temporal_patch_size: int
    merge_size: int
    image_token_id: int

    @classmethod
    def load(cls, folder: Path, config: Qwen2VLConfig) -> "Preprocessor":
        """Read the tokenizer and the three JSON files of an imported folder; raise UserError, naming the file."""
        settings = read_as(PromptSettings, folder / SETTINGS)
        image = read_as(ImageStatistics, folder / "preprocessor_config.json")
        vision = config.vision_config
        preprocessor = cls(
            tokenizer=read_tokenizer(Qwen2Tokenizer, folder, config.text_config.vocab_size),
            chat_template=read_as(ChatTemplate, folder / "chat_template.json").chat_template,
            instruction=settings.instruction,
            prompt_with_special_token=settings.prompt_with_special_token,
            pixels=settings.pixels,
            mean=tuple(image.image_mean),
            std=tuple(image.image_std),
            patch_size=vision.patch_size,
            temporal_patch_size=vision.temporal_patch_size,
            merge_size=vision.spatial_merge_size,
            image_token_id=config.image_token_id,
        )
        check_template(
            preprocessor.chat_template, preprocessor.messages("a prompt"), str(folder / "chat_template.json")
        )
        preprocessor.encode(["a prompt"], [1], str(folder))
        return preprocessor

    def __call__(self, images: Images, prompts: Sequence[str]) -> Inputs:
        """Prepare 8-bit images; raise ValueError, naming the sample, for input that would make a score meaningless."""
        self._refuse(prompts, len(images))
        return self._inputs([self.patches(image) for image in _as_pil(images)], prompts)

    def of_floats(self, images: Float[Tensor, "b 3 h w"], prompts: Sequence[str]) -> Inputs:
        """Prepare images in [0, 1] with a gradient to them; they are not rounded to 8 bits."""
        self._refuse(prompts, len(images))
        _refuse_outside(images)
        return self._inputs([self.patches_of_floats(image) for image in images], prompts)

    def _inputs(self, rows: list[tuple[Tensor, tuple[int, int, int]]], prompts: Sequence[str]) -> Inputs:
        patches, grids = zip(*rows, strict=True)
        grid_rows = torch.tensor(grids)
        image_tokens = (grid_rows.prod(-1) // self.merge_size**2).tolist()
        input_ids, mask, is_image, is_reward = self.encode(prompts, image_tokens)
        return Inputs(input_ids, mask, torch.cat(patches), grid_rows, is_image, is_reward)

    def encode(self, prompts: Sequence[str], image_tokens: Sequence[int], place: str = "HPSv3") -> tuple[Tensor, ...]:
        """Return the tokens of each sample's chat [b, n], their mask, and where image and reward tokens are.

        Raise UserError, which begins with `place`, for a chat without the sample's image or reward tokens.
        """
        texts = [self.text(prompt, count) for prompt, count in zip(prompts, image_tokens, strict=True)]
        encoded = self.tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")
        input_ids = encoded["input_ids"]
        is_image = input_ids == self.image_token_id
        is_reward = input_ids == self.tokenizer.convert_tokens_to_ids(REWARD_TOKEN)
        for i, count in enumerate(image_tokens):
            found = (int(is_image[i].sum()), int(is_reward[i].sum()))
            if found != (count, 1):
                raise UserError(
                    f"{place}: sample {i} has {found[0]} image and {found[1]} {REWARD_TOKEN} tokens, "
                    f"expected {count} and 1; {SETTINGS}, chat_template.json and the tokenizer do not fit together"
                )
        return input_ids, encoded["attention_mask"], is_image, is_reward

    def messages(self, prompt: str) -> list[dict[str, Any]]:
        """Return the chat of one sample, as its template takes it: image, and instruction with the prompt."""
        text = self.instruction.format(text_prompt=prompt) + self.prompt_with_special_token
        return [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": text}]}]

    def text(self, prompt: str, image_tokens: int) -> str:
        """Write the chat of one sample: system message, image, instruction with the prompt, reward token."""
        chat = self.tokenizer.apply_chat_template(
            self.messages(prompt),
            chat_template=self.chat_template,
            tokenize=False,
            add_generation_prompt=True,
        )
        image_token = self.tokenizer.convert_ids_to_tokens(self.image_token_id)
        return chat.replace(image_token, image_token * image_tokens)

    def patches(self, image: Image.Image) -> tuple[Float[Tensor, "p d"], tuple[int, int, int]]:
        """Resize an image and cut it into flattened patches; return them and their grid (time, height, width).

        The four patches of each merged token follow each other.
        """
        p, m = self.patch_size, self.merge_size
        height, width = fit(image.height, image.width, self.pixels, p * m)
        resized = image.convert("RGB").resize((width, height), Image.Resampling.BICUBIC)
        scaled = (np.asarray(resized, dtype=np.float32) / 255 - np.float32(self.mean)) / np.float32(self.std)
        return self._tiles(torch.from_numpy(scaled))

    def patches_of_floats(self, image: Float[Tensor, "3 h w"]) -> tuple[Float[Tensor, "p d"], tuple[int, int, int]]:
        """Resize and cut an image in [0, 1] as `patches` does, without rounding, with a gradient to it."""
        rows, columns = image.shape[1:]
        height, width = fit(rows, columns, self.pixels, self.patch_size * self.merge_size)
        small = image[None].float()
        for shape in ((rows, width), (height, width)):  # width first, each clipped: as PIL does it
            small = interpolate(small, shape, mode="bicubic", antialias=True).clamp(0, 1)
        mean, std = (small.new_tensor(values) for values in (self.mean, self.std))
        return self._tiles((small[0].movedim(0, -1) - mean) / std)

    def _tiles(self, scaled: Float[Tensor, "h w 3"]) -> tuple[Float[Tensor, "p d"], tuple[int, int, int]]:
        p, m = self.patch_size, self.merge_size
        rows, columns = scaled.shape[0] // p, scaled.shape[1] // p
        tiles = scaled.reshape(rows // m, m, p, columns // m, m, p, 3)
        tiles = tiles.permute(0, 3, 1, 4, 6, 2, 5).unsqueeze(5)  # ..., channel, time, y, x
        tiles = tiles.expand(*tiles.shape[:5], self.temporal_patch_size, p, p)
        return tiles.reshape(rows * columns, -1), (1, rows, columns)

    def _refuse(self, prompts: Sequence[str], images: int) -> None:
        if isinstance(prompts, str):
            raise ValueError(f"HPSv3: prompts is one string, expected a list of them: {prompts!r}")
        if not images == len(prompts) > 0:
            raise ValueError(f"HPSv3: {images} images but {len(prompts)} prompts, expected one prompt for each")
        special = _special(self.tokenizer)
        for i, prompt in enumerate(prompts):
            for token in special:
                if token in prompt:
                    raise UserError(f"HPSv3: prompt {i} holds the special token {token}; remove it: {prompt!r}")


@dataclass(frozen=True)
class HPSv3:
    """A native implementation of HPSv3; it agrees with the package hpsv3 1.0.0 to float32 rounding."""

    network: HPSv3Network
    preprocessor: Preprocessor

    @classmethod
    def load(cls, folder: Path | str, device: torch.device | str, dtype: torch.dtype) -> "HPSv3":
        """Load a frozen scorer from a folder written by `import-hpsv3`; `dtype` is the backbone's.

        Raise UserError, before any weight is read, when the folder is not whole or not consistent.
        """
        folder = Path(folder)
        config = network_config(folder)
        preprocessor = Preprocessor.load(folder, config)
        network = skeleton(config, folder / "config.json", folder / CHECKPOINT)
        # The package casts the whole backbone, so that in bfloat16 the rotary frequencies are rounded too.
        network.visual.rotary_pos_emb = Qwen2VLVisionRotaryEmbedding(config.vision_config).to(device, dtype)
        network.model.rotary_emb = Qwen2VLRotaryEmbedding(config.text_config).to(device, dtype)
        with opened(folder / CHECKPOINT) as file:
            weights = {
                key: file.get_tensor(key).to(device, torch.float32 if key.startswith("rm_head.") else dtype)
                for key in network.state_dict()
            }
        network.load_state_dict(weights, assign=True)
        return cls(network.requires_grad_(False).eval(), preprocessor)

    @torch.no_grad()
    def score(self, images: Images, prompts: Sequence[str]) -> Float[Tensor, "b 2"]:
        """Return (mu, raw sigma) of each image for its prompt; mu is the reward, exp(raw sigma) its deviation.

        Images are a tensor in [0, 1] (rounded to 8 bits, no gradient), PIL images or paths. Raise UserError for a
        prompt with a special token, NotFiniteError for a score, ValueError for an image outside [0, 1]; all name the
        sample.
        """
        return self._score(self.preprocessor(images, prompts), prompts)

    def score_with_gradient(self, images: Float[Tensor, "b 3 h w"], prompts: Sequence[str]) -> Float[Tensor, "b 2"]:
        """Return what `score` returns, with a gradient to the images, which are not rounded to 8 bits."""
        return self._score(self.preprocessor.of_floats(images, prompts), prompts)

    def _score(self, inputs: Inputs, prompts: Sequence[str]) -> Float[Tensor, "b 2"]:
        device = next(self.network.parameters()).device
        scores = self.network(Inputs(**{name: tensor.to(device) for name, tensor in vars(inputs).items()}))
        for i in (~scores.isfinite().all(-1)).nonzero().flatten().tolist():
            raise NotFiniteError(f"HPSv3: the score of sample {i} is {scores[i].tolist()} (prompt {prompts[i]!r})")
        return scores

    @torch.no_grad()
    def features(self, images: Images) -> Float[Tensor, "b d"]:
        """Return the mean of each image's vision tokens, which the Frechet distance compares."""
        device = next(self.network.parameters()).device
        patches, grids = zip(*(self.preprocessor.patches(image) for image in _as_pil(images)), strict=True)
        grid_rows = torch.tensor(grids)
        tokens = self.network.visual(torch.cat(patches).to(device), grid_thw=grid_rows.to(device)).pooler_output
        counts = (grid_rows.prod(-1) // self.preprocessor.merge_size**2).tolist()
        return torch.stack([part.float().mean(0) for part in tokens.split(counts)])


def skeleton(config: Qwen2VLConfig, config_file: Path, checkpoint: Path) -> HPSv3Network:
    """Build the network of a checkpoint without weights (meta device); raise UserError if keys or shapes differ."""
    shapes = checkpoint_shapes(checkpoint)
    heads = ("rm_head.0.weight", "rm_head.3.weight")
    absent = [key for key in heads if key not in shapes]
    if absent:
        raise UserError(f"{checkpoint}: missing {', '.join(absent)}; this is not an HPSv3 checkpoint")
    widths = (shapes[heads[0]][0], shapes[heads[1]][0])
    with reading_config(config_file, HPSv3Network.__name__):
        network = without_memory(lambda: HPSv3Network(config, widths), 2 * len(shapes) + 2)
    wanted = {key: tuple(tensor.shape) for key, tensor in network.state_dict().items()}
    problems = [f"missing {key}" for key in wanted.keys() - shapes.keys()]
    problems += [f"unexpected {key}" for key in shapes.keys() - wanted.keys() - UNUSED_KEYS]
    problems += [
        f"{key} is {shapes[key]}, config.json wants {wanted[key]}"
        for key in wanted.keys() & shapes.keys()
        if shapes[key] != wanted[key]
    ]
    if problems:
        shown = "; ".join(sorted(problems)[:8]) + (f"; and {len(problems) - 8} more" if len(problems) > 8 else "")
        raise UserError(f"{checkpoint} does not fit {config_file}: {shown}; import it with the right --base")
    return network


def checkpoint_shapes(checkpoint: Path) -> dict[str, tuple[int, ...]]:
    """Read the shape of every key from the header of a safetensors file."""
    return floating_shapes(checkpoint)


def fit(height: int, width: int, pixels: int, multiple: int) -> tuple[int, int]:
    """Return height and width as multiples of `multiple`, with about `pixels` pixels and nearly the same aspect ratio.

    Raise UserError for an image that is too long or too narrow.
    """
    if max(height, width) > LONGEST_ASPECT * min(height, width):
        raise UserError(f"HPSv3: an image of {height}x{width} is longer than {LONGEST_ASPECT}:1; crop it")
    rounded = [max(1, round(side / multiple)) * multiple for side in (height, width)]
    area = math.prod(rounded)
    if area == pixels:
        return rounded[0], rounded[1]
    # The order of operations is Qwen2-VL's: rounding sends 102x102 to 476x476, where exact arithmetic says 448x448.
    if area > pixels:
        shrink = math.sqrt(height * width / pixels)
        fitted = [math.floor(side / shrink / multiple) * multiple for side in (height, width)]
    else:
        grow = math.sqrt(pixels / (height * width))
        fitted = [math.ceil(side * grow / multiple) * multiple for side in (height, width)]
    if 0 in fitted:
        raise UserError(f"HPSv3: an image of {height}x{width} is too narrow for {pixels} pixels; crop it")
    return fitted[0], fitted[1]


def _as_pil(images: Images) -> list[Image.Image]:
    if not isinstance(images, Tensor):
        return [image if isinstance(image, Image.Image) else Image.open(image) for image in images]
    if images.ndim != 4 or images.shape[1] != 3:
        raise ValueError(f"HPSv3: images of shape {tuple(images.shape)}, expected [b, 3, h, w]")
    _refuse_outside(images)
    bytes_ = (images.float() * 255).round().to("cpu", torch.uint8).movedim(1, -1).numpy()
    return [Image.fromarray(pixels) for pixels in bytes_]


def _refuse_outside(images: Float[Tensor, "b 3 h w"]) -> None:
    low, high = (images.flatten(1).amin(1), images.flatten(1).amax(1))
    for i in (~((low >= 0) & (high <= 1))).nonzero().flatten().tolist():
        raise ValueError(f"HPSv3: image {i} spans {float(low[i])}..{float(high[i])}, expected values in [0, 1]")


@dataclass(frozen=True)
class HPSv3Scorer:
    """HPSv3's mu as a scorer of videos; frames that take a gradient are scored with it."""

    hpsv3: HPSv3
    batch: int  # images scored at a time
    top_fraction: float = 1.0

    def __call__(self, video: Video, prompts: Sequence[str]) -> PerSample:
        return of_images(self._mu, self.batch, self.top_fraction)(video, prompts)

    def _mu(self, images: Float[Tensor, "b 3 h w"], prompts: Sequence[str]) -> PerSample:
        score = self.hpsv3.score_with_gradient if images.requires_grad else self.hpsv3.score
        return score(images, prompts)[:, 0]


def _special(tokenizer: Qwen2Tokenizer) -> tuple[str, ...]:
    return tuple(tokenizer.get_added_vocab())


def _special_tokens(config: ScorerConfig) -> tuple[str, ...]:
    check_folder(_folder(config))
    return _special(read_tokenizer(Qwen2Tokenizer, _folder(config)))


def _folder(config: ScorerConfig) -> Path:
    return EMBEDDED if config.path == "tiny" else Path(config.path)


def _load(config: ScorerConfig, device: torch.device) -> HPSv3Scorer:
    return HPSv3Scorer(HPSv3.load(_folder(config), device, config.dtype), config.batch, config.top_fraction)


def _check(config: ScorerConfig, key: str, frames: int) -> None:
    if not config.path:
        raise UserError(f"{key}.path must be the folder of a {config.kind} scorer, not {config.path!r}")


KIND = ScorerKind(
    "hpsv3",
    _load,
    _check,
    features=lambda scorer: scorer.hpsv3.features,
    per_frame=True,
    special_tokens=_special_tokens,
)
