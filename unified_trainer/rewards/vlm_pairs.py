"""The scorer vlm_pairs: how often a vision-language model prefers a video to the others of its prompt.

It is the pairwise preference reward of Pref-GRPO (arXiv:2508.20751), by any server with OpenAI's chat completions.
"""

import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import combinations

import torch

from unified_trainer.basics.effects import Text
from unified_trainer.basics.errors import UserError
from unified_trainer.basics.ranges import Count
from unified_trainer.basics.requests import identity_of
from unified_trainer.basics.types import PerSample, Video
from unified_trainer.numerics.advantages import groups
from unified_trainer.rewards.base import Scorer, ScorerConfig
from unified_trainer.rewards.endpoint import Endpoint
from unified_trainer.rewards.own_settings import kind_of
from unified_trainer.rewards.vlm import chat, image_parts, text_part

FIRST, SECOND = "These are frames of video 1, in order.", "These are frames of video 2, in order."
TEMPLATE = "Which of the two videos shows the following better?\n\n{prompt}\n\nAnswer with 1 or 2 alone."
ALONE = 0.5  # score of a video without others of its prompt


@dataclass(frozen=True, kw_only=True)
class PairwiseModel(Endpoint):
    """A model that compares two videos; the score of a video is the share of comparisons in its group that it wins.

    A group is the videos of equal prompt in a call; n of them take n (n - 1) / 2 requests, twice as many with
    `both_orders`, of which `config.batch` are under way at a time.
    """

    model: Text
    """Name of the model, as the server knows it."""
    template: Text = TEMPLATE
    """Question after the frames of both videos; {prompt} stands for their prompt."""
    pattern: Text = r"\s*([12])\s*"
    """Regular expression that the whole answer must match; its only group is the number of the better video."""
    both_orders: bool = True
    """Ask about each pair in both orders, since a model may prefer the video that it sees first."""
    max_tokens: Count = 16
    """Most tokens of an answer."""
    of_groups = True

    def check(self, config: ScorerConfig, key: str, frames: int) -> None:
        """Raise UserError, naming the key, for settings that cannot be."""
        super().check(config, key, frames)
        if "{prompt}" not in self.template:
            raise UserError(f"{key}.settings.template must hold {{prompt}}, which stands for the videos' prompt")
        try:
            count = re.compile(self.pattern).groups
        except re.error as error:
            raise UserError(f"{key}.settings.pattern {self.pattern!r} is no regular expression: {error}") from error
        if count != 1:
            raise UserError(f"{key}.settings.pattern must have one group, the number of a video, but has {count}")

    def load(self, config: ScorerConfig, device: torch.device) -> Scorer:
        """Return the function that asks the server."""

        def score(video: Video, prompts: Sequence[str]) -> PerSample:
            shown = [image_parts(clip) for clip in video.detach().to("cpu", torch.float32)]
            rows = [
                index.tolist() for index in groups(torch.empty(len(prompts)), list(map(identity_of, prompts))).values()
            ]
            pairs = [pair for group in rows for pair in combinations(group, 2)]
            pairs += [(j, i) for i, j in pairs] if self.both_orders else []

            def winner(pair: tuple[int, int]) -> int:
                first, second = (shown[i] for i in pair)
                question = text_part(self.template.replace("{prompt}", prompts[pair[0]]))
                content = [text_part(FIRST), *first, text_part(SECOND), *second, question]
                return pair[self._better(chat(self, self.model, content, self.max_tokens), prompts[pair[0]]) - 1]

            wins, asked = torch.zeros(len(prompts)), torch.zeros(len(prompts))
            with ThreadPoolExecutor(min(config.batch, max(1, len(pairs)))) as pool:
                for pair, won in zip(pairs, pool.map(winner, pairs), strict=True):
                    wins[won] += 1
                    asked[list(pair)] += 1
            return torch.where(asked > 0, wins / asked.clamp(min=1), ALONE).to(video.device)

        return score

    def _better(self, answer: str, prompt: str) -> int:
        """Return 1 or 2; raise UserError for an answer that is neither."""
        match = re.fullmatch(self.pattern, answer, re.DOTALL)
        if match is None or match[1] not in ("1", "2"):
            raise UserError(
                f"{self.model} answered {answer!r} about two videos of {prompt!r}, which is neither 1 nor 2 by its "
                "settings.pattern: change settings.template or pattern"
            )
        return int(match[1])


KIND = kind_of("vlm_pairs", PairwiseModel)
