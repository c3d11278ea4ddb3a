"""The scorer http: it asks a server, such as that of the command serve-reward, for the scores."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from types import NoneType

import torch

from unified_trainer.basics.effects import Text
from unified_trainer.basics.errors import UserError
from unified_trainer.basics.requests import Prompt
from unified_trainer.basics.types import PerSample, Video
from unified_trainer.rewards.base import Scorer, ScorerConfig, or_unscored
from unified_trainer.rewards.endpoint import Endpoint
from unified_trainer.rewards.image_json import images_to_json
from unified_trainer.rewards.own_settings import kind_of
from unified_trainer.rewards.video_json import PROTOCOL, Encoding, to_json


@dataclass(frozen=True, kw_only=True)
class Remote(Endpoint):
    """A scorer behind an HTTP server that answers the requests of docs/rewards.md.

    It sends `config.batch` videos in a request, and its scores have no gradient.
    """

    name: Text = ""
    """Name that the server must give itself; empty takes any."""
    encoding: Encoding = "float32"
    """Transport of the frames: float32 is exact; uint8 takes a quarter of the bytes and rounds to 8 bits."""

    def check(self, config: ScorerConfig, key: str, frames: int) -> None:
        """Ask the server what it is; raise UserError unless it speaks this protocol and can score such videos."""
        super().check(config, key, frames)
        about = self.look("health", key)
        known = isinstance(about, dict) and isinstance(about.get("name"), str) and type(about.get("min_frames")) is int
        if not known:
            raise UserError(f"{key}: {self.url}/health answered {about}; expected name, protocol and min_frames")
        if about.get("protocol") != PROTOCOL:
            raise UserError(f"{key}: {self.url} speaks protocol {about.get('protocol')}, and this program {PROTOCOL}")
        if self.name not in ("", about["name"]):
            raise UserError(f"{key}.settings.name is {self.name}, but the server at {self.url} is {about['name']}")
        scored = max(1, -(-frames // config.stride(frames)))
        if scored < about["min_frames"]:
            raise UserError(
                f"{key}: {about['name']} at {self.url} needs at least {about['min_frames']} frames of a video, but "
                f"gets {scored}; set {key}.frames all"
            )

    def load(self, config: ScorerConfig, device: torch.device) -> Scorer:
        """Return the function that asks the server."""

        @cache
        def takes_images() -> bool:
            return self.exchange("health").get("images") is True

        def score(video: Video, prompts: Sequence[str]) -> PerSample:
            starts = range(0, len(video), config.batch)
            images = any(isinstance(prompt, Prompt) for prompt in prompts) and takes_images()
            parts = [self._scores(video[i : i + config.batch], prompts[i : i + config.batch], images) for i in starts]
            return or_unscored([value for part in parts for value in part], video.device)

        return score

    def _scores(self, video: Video, prompts: Sequence[str], images: bool) -> list[float | str]:
        body = {"protocol": PROTOCOL, "prompts": list(prompts), "videos": to_json(video, self.encoding)}
        if images:
            given = [prompt.images[0] for prompt in prompts if isinstance(prompt, Prompt)]
            body["images"] = images_to_json(given, *video.shape[-2:])
        answer = self.exchange("score", body)
        scores = answer.get("scores") if isinstance(answer, dict) else None
        if not isinstance(scores, list) or not all(type(score) in (int, float, NoneType) for score in scores):
            raise UserError(f"{self.url}/score answered {str(answer)[:200]}; expected {{'scores': [numbers or null]}}")
        if len(scores) != len(video):
            raise UserError(f"{self.url}/score gave {len(scores)} scores for {len(video)} videos")
        return [f"{self.url} answered null" if score is None else score for score in scores]


KIND = kind_of("http", Remote)
