"""The scorer vlm_pairs: how often a vision-language model prefers a video to the others of its prompt.

It is the pairwise preference reward of Pref-GRPO (arXiv:2508.20751), by any server with OpenAI's chat completions.
"""

import re
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain, combinations

import torch

from unified_trainer.basics.effects import Text
from unified_trainer.basics.requests import identity_of
from unified_trainer.basics.types import PerSample, Video
from unified_trainer.numerics.advantages import groups
from unified_trainer.rewards.base import Scorer, ScorerConfig, or_unscored
from unified_trainer.rewards.own_settings import kind_of
from unified_trainer.rewards.vlm import ChatModel, UnreadableError, image_parts, text_part

FIRST, SECOND = "These are frames of video 1, in order.", "These are frames of video 2, in order."
TEMPLATE = "Which of the two videos shows the following better?\n\n{prompt}\n\nAnswer with 1 or 2 alone."
ALONE = 0.5  # score of a video without others of its prompt


@dataclass(frozen=True, kw_only=True)
class PairwiseModel(ChatModel):
    """A model that compares two videos; the score of a video is the share of comparisons in its group that it wins.

    A group is the videos of equal prompt in a call; n of them take n (n - 1) / 2 requests, twice as many with
    `both_orders`, of which `config.batch` are under way at a time.
    """

    template: Text = TEMPLATE
    """Question after the frames of both videos; {prompt} stands for their prompt."""
    pattern: Text = r"\s*([12])\s*"
    """Regular expression that the whole answer must match; its only group is the number of the better video."""
    both_orders: bool = True
    """Ask about each pair in both orders, since a model may prefer the video that it sees first."""
    of_groups = True

    def load(self, config: ScorerConfig, device: torch.device) -> Scorer:
        """Return the function that asks the server."""

        def score(video: Video, prompts: Sequence[str]) -> PerSample:
            shown = [image_parts(clip) for clip in video.detach().to("cpu", torch.float32)]
            rows = [
                index.tolist() for index in groups(torch.empty(len(prompts)), list(map(identity_of, prompts))).values()
            ]
            pairs = [pair for group in rows for pair in combinations(group, 2)]
            pairs += [(j, i) for i, j in pairs] if self.both_orders else []

            def better(pair: tuple[int, int]) -> int | str:
                first, second = (shown[i] for i in pair)
                question = text_part(self.template.replace("{prompt}", prompts[pair[0]]))
                content = [text_part(FIRST), *first, text_part(SECOND), *second, question]
                return self.read(content, lambda answer: self._better(answer, prompts[pair[0]]))

            wins, asked = torch.zeros(len(prompts)), torch.zeros(len(prompts))
            failed: dict[tuple[int, int], str] = {}
            with ThreadPoolExecutor(min(config.batch, max(1, len(pairs)))) as pool:
                for pair, number in zip(pairs, pool.map(better, pairs), strict=True):
                    if isinstance(number, str):
                        failed[pair] = number
                        continue
                    wins[pair[number - 1]] += 1
                    asked[list(pair)] += 1
            scores: list[float | str] = torch.where(asked > 0, wins / asked.clamp(min=1), ALONE).tolist()
            while failed:  # the fewest videos that explain the failures, such as one that a filter refuses
                worst = Counter(chain.from_iterable(failed)).most_common(1)[0][0]
                scores[worst] = next(reason for pair, reason in failed.items() if worst in pair)
                failed = {pair: reason for pair, reason in failed.items() if worst not in pair}
            return or_unscored(scores, video.device)

        return score

    def _better(self, answer: str, prompt: str) -> int:
        """Return 1 or 2; raise UnreadableError for an answer that is neither."""
        match = re.fullmatch(self.pattern, answer, re.DOTALL)
        if match is None or match[1] not in ("1", "2"):
            raise UnreadableError(
                f"{self.model} answered {answer!r} about two videos of {prompt!r}, which is neither 1 nor 2 by its "
                "settings.pattern: change settings.template or pattern"
            )
        return int(match[1])


KIND = kind_of("vlm_pairs", PairwiseModel)
