"""The scorer vlm: the number that a vision-language model answers when it is asked about a video's frames.

It asks any server with OpenAI's chat completions.
"""

import base64
import io
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor

from unified_trainer.basics.effects import Text
from unified_trainer.basics.errors import UserError
from unified_trainer.basics.ranges import Count, CountOrZero, Finite
from unified_trainer.basics.types import PerSample, Video
from unified_trainer.rewards.base import Scorer, ScorerConfig, or_unscored
from unified_trainer.rewards.endpoint import Endpoint
from unified_trainer.rewards.own_settings import kind_of
from unified_trainer.rewards.wire import RefusedError

TEMPLATE = (
    "These are frames of a video, in order. How well does the video show the following, from 0 (not at all) to 10 "
    "(perfectly)?\n\n{prompt}\n\nAnswer with the number alone."
)
T = TypeVar("T")
NUMBER = r"\s*(-?\d+(?:\.\d+)?)\s*"  # an answer that is a number and nothing else


class UnreadableError(UserError):
    """An answer holds no judgement; another draw may."""


@dataclass(frozen=True, kw_only=True)
class ChatModel(Endpoint):
    """A model behind an OpenAI-compatible server."""

    model: Text
    """Name of the model, as the server knows it."""
    max_tokens: Count = 16
    """Most tokens of an answer; a model that thinks aloud needs more, and a pattern."""
    redraws: CountOrZero = 3
    """Further answers that are drawn, at temperature 1, after one that cannot be read."""

    template: Text
    """Question; {prompt} stands for the prompt."""
    pattern: Text
    """Regular expression that the whole answer must match; its only group is the number."""

    def check(self, config: ScorerConfig, key: str, frames: int) -> None:
        """Raise UserError, naming the key, for settings that cannot be, and unless the server answers."""
        super().check(config, key, frames)
        if "{prompt}" not in self.template:
            raise UserError(f"{key}.settings.template must hold {{prompt}}, which stands for the prompt")
        try:
            groups = re.compile(self.pattern).groups
        except re.error as error:
            raise UserError(f"{key}.settings.pattern {self.pattern!r} is no regular expression: {error}") from error
        if groups != 1:
            raise UserError(f"{key}.settings.pattern must have one group, the number, but has {groups}")
        with suppress(RefusedError):  # by a server that lists no models
            self.look("models", key)

    def read(self, content: Sequence[Mapping[str, Any]], judgement: Callable[[str], T]) -> T | str:
        """Return the judgement of the first answer that has one, or why the last has none.

        The first answer is the most likely one. A redraw has no seed: a resumed run does not get the same ones again.
        """
        reason = ""
        body = {"model": self.model, "messages": [{"role": "user", "content": content}], "max_tokens": self.max_tokens}
        for temperature in (0, *[1] * self.redraws):
            try:
                answer = self.exchange("chat/completions", body | {"temperature": temperature})
                return judgement(text_of(answer, self.url))
            except (UnreadableError, RefusedError) as error:
                reason = str(error)
        return reason


@dataclass(frozen=True, kw_only=True)
class VisionLanguageModel(ChatModel):
    """A vision-language model that rates a video; `config.batch` requests are under way at a time."""

    template: Text = TEMPLATE
    """Question about the frames; {prompt} stands for the video's prompt."""
    pattern: Text = NUMBER
    """Regular expression that the whole answer must match; its only group is the number."""
    lowest: Finite = 0.0
    """Lowest number that is an answer."""
    highest: Finite = 10.0
    """Highest number that is an answer."""

    def check(self, config: ScorerConfig, key: str, frames: int) -> None:
        """Raise UserError, naming the key, for settings that cannot be."""
        if not self.lowest < self.highest:
            raise UserError(f"{key}.settings.lowest must be below {key}.settings.highest")
        super().check(config, key, frames)

    def load(self, config: ScorerConfig, device: torch.device) -> Scorer:
        """Return the function that asks the server."""

        def score(video: Video, prompts: Sequence[str]) -> PerSample:
            with ThreadPoolExecutor(min(config.batch, max(1, len(prompts)))) as pool:
                answers = pool.map(self._answer, video.detach().to("cpu", torch.float32), prompts)
                return or_unscored(list(answers), video.device)

        return score

    def _answer(self, clip: Float[Tensor, "3 frames h w"], prompt: str) -> float | str:
        """Return the number of one video, or why there is none."""
        question = text_part(self.template.replace("{prompt}", prompt))
        return self.read([*image_parts(clip), question], lambda answer: self.number_of(answer, prompt))

    def number_of(self, answer: str, prompt: str) -> float:
        """Read the number of an answer; raise UnreadableError unless there is one in the range."""
        match = re.fullmatch(self.pattern, answer, re.DOTALL)
        try:
            number = float(match[1]) if match else None
        except (TypeError, ValueError):  # the group took no part, or holds something else
            number = None
        if number is None or not self.lowest <= number <= self.highest:
            raise UnreadableError(
                f"{self.model} answered {answer!r} about {prompt!r}, which is no number from {self.lowest:g} to "
                f"{self.highest:g} by its settings.pattern: change settings.template, pattern, lowest or highest"
            )
        return number


def image_parts(clip: Float[Tensor, "3 frames h w"]) -> list[dict[str, Any]]:
    """Return the frames of a clip as parts of a message."""
    return [{"type": "image_url", "image_url": {"url": png_url(frame)}} for frame in clip.unbind(1)]


def text_part(text: str) -> dict[str, Any]:
    """Return a text as a part of a message."""
    return {"type": "text", "text": text}


def text_of(completion: Any, url: str) -> str:
    """Return the text of a chat completion; raise UnreadableError for one without, UserError for another answer."""
    text, kind = None, UserError
    with suppress(KeyError, IndexError, TypeError):
        text = completion["choices"][0]["message"]["content"]
        kind = UnreadableError  # such as one that a filter of contents took away
    if not isinstance(text, str):
        raise kind(f"{url} answered {str(completion)[:300]}, which is no chat completion with a text")
    return text


def png_url(frame: Float[Tensor, "3 h w"]) -> str:
    """Return a frame in [0, 1], rounded to 8 bits, as the data URL of a PNG."""
    pixels = (255 * frame.clamp(0, 1)).round().to(torch.uint8).movedim(0, -1).contiguous().numpy()
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


KIND = kind_of("vlm", VisionLanguageModel)
