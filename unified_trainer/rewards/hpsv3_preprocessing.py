"""Images and prompts as HPSv3 and VideoAlign read them: Qwen2-VL's patches, and the chat with the reward tokens."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
Bytes = Float[Tensor, "3 h w"]  # numbers from 0 to 255, whole ones unless the image takes a gradient


@dataclass(frozen=True)
class Preprocessor:
    """The preprocessing of images and prompts to `Inputs`."""

    scorer: str  # its name, for messages
    tokenizer: Qwen2Tokenizer
    chat: Chat  # around the text of the user
    text_around: str  # holds {text_prompt}
    reward_tokens: tuple[str, ...]  # each of which a chat holds once
    pixels: tuple[int, int]  # the fewest and the most that an image is resized to
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
        return cls.of(
            folder,
            config,
            scorer="HPSv3",
            tokenizer=read_tokenizer(Qwen2Tokenizer, folder, config.text_config.vocab_size),
            text_around=settings.instruction + settings.prompt_with_special_token,
            reward_tokens=(REWARD_TOKEN,),
            pixels=(settings.pixels, settings.pixels),
            image_token_id=config.image_token_id,
        )

    @classmethod
    def of(cls, base: Path, config: Qwen2VLConfig, kind: str = "image", **own: Any) -> "Preprocessor":
        """Return one with the chat of the base's folder around an image or a `kind`; `own` are the other fields."""
        image = read_as(ImageStatistics, base / "preprocessor_config.json")
        file, turn = base / "chat_template.json", [{"type": kind}, {"type": "text", "text": TEXT}]
        messages, tokens = [{"role": "user", "content": turn}], own["tokenizer"].special_tokens_map
        template = read_as(ChatTemplate, file).chat_template
        preprocessor = cls(
            chat=fixed_chat(template, json.dumps(messages), json.dumps(tokens), str(file)),
            mean=tuple(image.image_mean),
            std=tuple(image.image_std),
            patch_size=config.vision_config.patch_size,
            temporal_patch_size=config.vision_config.temporal_patch_size,
            merge_size=config.vision_config.spatial_merge_size,
            **own,
        )
        preprocessor.encode(["a prompt"], [1], str(base))
        return preprocessor

    def __call__(self, images: Images, prompts: Sequence[str]) -> Inputs:
        """Prepare images; raise ValueError, naming the sample, for input that would make a score meaningless."""
        self.refuse(prompts, len(images))
        return self.inputs([self.patches(image) for image in as_bytes(images)], prompts)

    def inputs(self, rows: Sequence[tuple[Tensor, tuple[int, int, int]]], prompts: Sequence[str]) -> Inputs:
        """Put patches with their grids, and a prompt for each, together."""
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
        rewards = torch.tensor(self.tokenizer.convert_tokens_to_ids(self.reward_tokens))
        is_reward = torch.isin(input_ids, rewards)
        for i, count in enumerate(image_tokens):
            counts = (int(is_image[i].sum()), int(is_reward[i].sum()))
            if counts != (count, len(rewards)):
                named = ", ".join(self.reward_tokens)
                raise UserError(
                    f"{place}: sample {i} has {counts[0]} image and {counts[1]} {named} tokens, expected {count} and "
                    f"{len(rewards)}; the texts around the prompt, chat_template.json and the tokenizer do not fit"
                )
        return input_ids, encoded["attention_mask"], is_image, is_reward

    def text(self, prompt: str, image_tokens: int) -> str:
        """Write the chat of one sample: system message, image, instruction with the prompt, reward token."""
        chat = self.text_around.format(text_prompt=prompt).join(self.chat)
        image_token = self.tokenizer.convert_ids_to_tokens(self.image_token_id)
        return chat.replace(image_token, image_token * image_tokens)

    def patches(self, image: Bytes) -> tuple[Float[Tensor, "p d"], tuple[int, int, int]]:
        """Resize an image and cut it into flattened patches; return them and their grid (time, height, width).

        The four patches of each merged token follow each other. An image that takes a gradient is not rounded.
        """
        height, width = self.fit(image)
        if image.requires_grad:
            return self.normalised(resize(image[None] / 255, height, width))
        return self.normalised(resize_8bit(image, height, width)[None] / 255)

    def fit(self, image: Tensor) -> tuple[int, int]:
        """Return the height and width that an image is resized to; UserError as `fit` of this module."""
        height, width = image.shape[-2:]
        return fit(height, width, *self.pixels, self.patch_size * self.merge_size, self.scorer)

    def normalised(self, frames: Float[Tensor, "t 3 h w"]) -> tuple[Float[Tensor, "p d"], tuple[int, int, int]]:
        """Cut one image, or a video of whole temporal patches, into flattened patches; also return their grid."""
        p, m, of = self.patch_size, self.merge_size, self.temporal_patch_size
        mean, std = (torch.tensor(values).to(frames, non_blocking=True) for values in (self.mean, self.std))
        scaled = (frames.movedim(1, -1) - mean) / std
        if len(scaled) == 1:
            scaled = scaled.expand(of, -1, -1, -1)
        times, rows, columns = len(scaled) // of, scaled.shape[1] // p, scaled.shape[2] // p
        tiles = scaled.reshape(times, of, rows // m, m, p, columns // m, m, p, 3)
        tiles = tiles.permute(0, 2, 5, 3, 6, 8, 1, 4, 7)  # ..., channel, time, y, x
        return tiles.reshape(times * rows * columns, -1), (times, rows, columns)

    def refuse(self, prompts: Sequence[str], images: int) -> None:
        if isinstance(prompts, str):
            raise ValueError(f"{self.scorer}: prompts is one string, expected a list of them: {prompts!r}")
        if not images == len(prompts) > 0:
            raise ValueError(f"{self.scorer}: {images} images but {len(prompts)} prompts, expected one prompt for each")
        special = special_tokens(self.tokenizer)
        for i, prompt in enumerate(prompts):
            for token in special:
                if token in prompt:
                    raise UserError(f"{self.scorer}: prompt {i} holds the special token {token}; remove it: {prompt!r}")


def fit(height: int, width: int, fewest: int, most: int, multiple: int, scorer: str = "HPSv3") -> tuple[int, int]:
    """Return height and width as multiples of `multiple`, with about `fewest` to `most` pixels, of nearly this aspect.

    Raise UserError for an image that is too long or too narrow.
    """
    if max(height, width) > LONGEST_ASPECT * min(height, width):
        raise UserError(f"{scorer}: an image of {height}x{width} is longer than {LONGEST_ASPECT}:1; crop it")
    rounded = [max(1, round(side / multiple)) * multiple for side in (height, width)]
    area = math.prod(rounded)
    if fewest <= area <= most:
        return rounded[0], rounded[1]
    # The order of operations is Qwen2-VL's: rounding sends 102x102 to 476x476, where exact arithmetic says 448x448.
    if area > most:
        shrink = math.sqrt(height * width / most)
        fitted = [math.floor(side / shrink / multiple) * multiple for side in (height, width)]
    else:
        grow = math.sqrt(fewest / (height * width))
        fitted = [math.ceil(side * grow / multiple) * multiple for side in (height, width)]
    if 0 in fitted:
        raise UserError(f"{scorer}: an image of {height}x{width} is too narrow for {most} pixels; crop it")
    return fitted[0], fitted[1]


def as_bytes(images: Images) -> Sequence[Bytes]:
    """Return images with numbers from 0 to 255: a tensor in [0, 1] is rounded on its device, files are opened.

    Tensors that take a gradient are not rounded.
    """
    if not isinstance(images, Tensor):
        pictures = [image if isinstance(image, Image.Image) else _read(Path(image)) for image in images]
        return [torch.from_numpy(np.array(image.convert("RGB"))).movedim(-1, 0).float() for image in pictures]
    if images.ndim != 4 or images.shape[1] != 3:
        raise ValueError(f"HPSv3: images of shape {tuple(images.shape)}, expected [b, 3, h, w]")
    check_pixels(images, "HPSv3")
    scaled = images.float() * 255
    return (scaled if images.requires_grad else scaled.round()).unbind()


def _read(file: Path) -> Image.Image:
    with open_picture(file, str(file)) as opened:
        return opened.convert("RGB")


def special_tokens(tokenizer: Qwen2Tokenizer) -> tuple[str, ...]:
    """Return the texts that the tokenizer reads as one token of its own, which no prompt may hold."""
    return tuple(tokenizer.get_added_vocab())
