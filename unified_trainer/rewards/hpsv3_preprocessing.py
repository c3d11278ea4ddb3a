"""Images and prompts as HPSv3 reads them: Qwen2-VL's patches and the chat with the reward token (arXiv:2508.03789)."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor
from transformers import Qwen2Tokenizer, Qwen2VLConfig

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.input_files import read_as
from unified_trainer.basics.pictures import open_picture
from unified_trainer.models.chat_template import TEXT, Chat, fixed_chat
from unified_trainer.models.folder import read_tokenizer
from unified_trainer.numerics.resize import resize, resize_8bit
from unified_trainer.rewards.base import check_pixels
from unified_trainer.rewards.hpsv3_folder import (
    REWARD_TOKEN,
    SETTINGS,
    ChatTemplate,
    ImageStatistics,
    PromptSettings,
)
from unified_trainer.rewards.hpsv3_network import Inputs

LONGEST_ASPECT = 200  # Qwen2-VL reads no image with a longer side ratio

Images = Float[Tensor, "b 3 h w"] | Sequence[Image.Image | Path | str]
Bytes = Float[Tensor, "3 h w"]  # whole numbers from 0 to 255


@dataclass(frozen=True)
class Preprocessor:
    """The preprocessing of images and prompts to `Inputs`."""

    tokenizer: Qwen2Tokenizer
    chat: Chat  # around the text of the user
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
        tokenizer = read_tokenizer(Qwen2Tokenizer, folder, config.text_config.vocab_size)
        file, turn = folder / "chat_template.json", [{"type": "image"}, {"type": "text", "text": TEXT}]
        messages, tokens = json.dumps([{"role": "user", "content": turn}]), json.dumps(tokenizer.special_tokens_map)
        preprocessor = cls(
            tokenizer=tokenizer,
            chat=fixed_chat(read_as(ChatTemplate, file).chat_template, messages, tokens, str(file)),
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
        preprocessor.encode(["a prompt"], [1], str(folder))
        return preprocessor

    def __call__(self, images: Images, prompts: Sequence[str]) -> Inputs:
        """Prepare 8-bit images; raise ValueError, naming the sample, for input that would make a score meaningless."""
        self._refuse(prompts, len(images))
        return self._inputs([self.patches(image) for image in as_bytes(images)], prompts)

    def of_floats(self, images: Float[Tensor, "b 3 h w"], prompts: Sequence[str]) -> Inputs:
        """Prepare images in [0, 1] with a gradient to them; they are not rounded to 8 bits."""
        self._refuse(prompts, len(images))
        check_pixels(images, "HPSv3")
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
            counts = (int(is_image[i].sum()), int(is_reward[i].sum()))
            if counts != (count, 1):
                raise UserError(
                    f"{place}: sample {i} has {counts[0]} image and {counts[1]} {REWARD_TOKEN} tokens, "
                    f"expected {count} and 1; {SETTINGS}, chat_template.json and the tokenizer do not fit together"
                )
        return input_ids, encoded["attention_mask"], is_image, is_reward

    def text(self, prompt: str, image_tokens: int) -> str:
        """Write the chat of one sample: system message, image, instruction with the prompt, reward token."""
        text = self.instruction.format(text_prompt=prompt) + self.prompt_with_special_token
        chat = text.join(self.chat)
        image_token = self.tokenizer.convert_ids_to_tokens(self.image_token_id)
        return chat.replace(image_token, image_token * image_tokens)

    def patches(self, image: Bytes) -> tuple[Float[Tensor, "p d"], tuple[int, int, int]]:
        """Resize an 8-bit image and cut it into flattened patches; return them and their grid (time, height, width).

        The four patches of each merged token follow each other. All of it is computed on the image's device.
        """
        rows, columns = image.shape[1:]
        height, width = fit(rows, columns, self.pixels, self.patch_size * self.merge_size)
        return self._normalised(resize_8bit(image, height, width) / 255)

    def patches_of_floats(self, image: Float[Tensor, "3 h w"]) -> tuple[Float[Tensor, "p d"], tuple[int, int, int]]:
        """Resize and cut an image in [0, 1] as `patches` does, without rounding, with a gradient to it."""
        rows, columns = image.shape[1:]
        height, width = fit(rows, columns, self.pixels, self.patch_size * self.merge_size)
        return self._normalised(resize(image[None].float(), height, width)[0])

    def _normalised(self, image: Float[Tensor, "3 h w"]) -> tuple[Float[Tensor, "p d"], tuple[int, int, int]]:
        p, m = self.patch_size, self.merge_size
        mean, std = (torch.tensor(values).to(image, non_blocking=True) for values in (self.mean, self.std))
        scaled = (image.movedim(0, -1) - mean) / std
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
        special = special_tokens(self.tokenizer)
        for i, prompt in enumerate(prompts):
            for token in special:
                if token in prompt:
                    raise UserError(f"HPSv3: prompt {i} holds the special token {token}; remove it: {prompt!r}")


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


def as_bytes(images: Images) -> Sequence[Bytes]:
    """Return images with whole numbers from 0 to 255: a tensor in [0, 1] is rounded on its device, files are opened."""
    if not isinstance(images, Tensor):
        pictures = [image if isinstance(image, Image.Image) else _read(Path(image)) for image in images]
        return [torch.from_numpy(np.array(image.convert("RGB"))).movedim(-1, 0).float() for image in pictures]
    if images.ndim != 4 or images.shape[1] != 3:
        raise ValueError(f"HPSv3: images of shape {tuple(images.shape)}, expected [b, 3, h, w]")
    check_pixels(images, "HPSv3")
    return (images.float() * 255).round().unbind()


def _read(file: Path) -> Image.Image:
    with open_picture(file, str(file)) as opened:
        return opened.convert("RGB")


def special_tokens(tokenizer: Qwen2Tokenizer) -> tuple[str, ...]:
    """Return the texts that the tokenizer reads as one token of its own, which no prompt may hold."""
    return tuple(tokenizer.get_added_vocab())
