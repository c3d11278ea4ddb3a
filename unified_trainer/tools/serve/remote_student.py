"""A student behind an HTTP server, such as that of the command serve: its videos, asked for from Python."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.requests import identity_of, with_image_files
from unified_trainer.basics.types import Video
from unified_trainer.rewards.image_json import images_to_json
from unified_trainer.rewards.video_json import PROTOCOL, Encoding, from_json
from unified_trainer.rewards.wire import MOST_BYTES, check_server, exchange, token_of


@dataclass(frozen=True)
class RemoteStudent:
    """A student behind the server at `url`, such as http://10.0.0.7:8000, which answers as docs/tools.md says.

    `encoding` is the transport of the frames: float32 is exact, and uint8 takes a quarter of the bytes and rounds to 8
    bits. `timeout` is the seconds within which the server must answer a request. `token_variable` names the environment
    variable with the server's token, if it asks for one.
    """

    url: str
    encoding: Encoding = "float32"
    timeout: float = 600.0
    token_variable: str = ""

    def __post_init__(self) -> None:
        check_server(self.url, self.timeout, self.token_variable)

    def sample(
        self, prompts: Sequence[str], *, seed: int = 0, batch: int = 8, images: Sequence[str | Path] = ()
    ) -> Video:
        """Return a video of each prompt, in [0, 1], `[n, 3, frames, height, width]`, on the CPU.

        Video i depends on its prompt and on seed + i, as that of `Student.sample`. `images` are files with a condition
        image for each prompt, for a student that takes some. A request has at most `batch` prompts. Raise UserError for
        a request that the server refuses, and ConnectionError if it fails or gives no answer.
        """
        if not prompts or batch < 1:
            raise UserError(f"sample needs at least one prompt and a batch of at least 1, not {len(prompts)}, {batch}")
        given = with_image_files(prompts, images)
        return torch.cat([self._videos(given[i : i + batch], seed + i) for i in range(0, len(given), batch)])

    def _videos(self, prompts: list[str], seed: int) -> Video:
        body: dict[str, Any] = {"protocol": PROTOCOL, "prompts": prompts, "encoding": self.encoding}
        body["seeds"] = list(range(seed, seed + len(prompts)))
        if images := [image for prompt in prompts for image in identity_of(prompt)[1]]:
            about = self.exchange("health")
            body["images"] = images_to_json(images, about["height"], about["width"])
        answer = self.exchange("sample", body, 2**35)
        if not isinstance(answer, dict):
            raise UserError(f"{self.url}/sample answered {str(answer)[:200]}; expected an object with videos")
        videos = from_json(answer.get("videos"))
        if len(videos) != len(prompts):
            raise UserError(f"{self.url}/sample gave {len(videos)} videos for {len(prompts)} prompts")
        return videos

    def exchange(self, path: str, body: dict[str, Any] | None = None, most_bytes: int = MOST_BYTES) -> Any:
        """Return what the server answers, as `wire.exchange`."""
        token = token_of(self.token_variable)
        return exchange(self.url, path, body, timeout=self.timeout, token=token, most_bytes=most_bytes)
