"""A served student in an evaluation: what its server says of it, and its videos, several requests at a time."""

import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Annotated, Any

import torch
from pydantic import Field

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.input_files import Schema, checked
from unified_trainer.basics.ranges import Seconds, at_least
from unified_trainer.basics.types import Video
from unified_trainer.rewards.video_json import PROTOCOL, Encoding
from unified_trainer.run.settings.command_line import with_settings
from unified_trainer.run.settings.config import RunConfig
from unified_trainer.run.settings.flags import apply, words_of
from unified_trainer.run.settings.settings import settings_of
from unified_trainer.tools.evaluate.plan import Plan, noise_number
from unified_trainer.tools.serve.remote_student import RemoteStudent

SIZE = ("frames", "height", "width", "fps")
Size = Annotated[int, Field(ge=0, le=2**20)]


class Health(Schema):
    """Fields that `GET /health` must hold for an evaluation; settings of a run check sampler and size."""

    name: str
    weights: str
    device: str
    sampler: Any
    frames: Any
    height: Any
    width: Any
    fps: Any
    latents: Annotated[list[Size], Field(min_length=4, max_length=4)]
    images: Annotated[list[Size], Field(min_length=2, max_length=2)] = [0, 0]  # noqa: RUF012 - pydantic copies it


@dataclass(frozen=True)
class AskConfig:
    """How a served student is asked: the settings behind its address."""

    encoding: Encoding = "float32"
    timeout: Seconds = 600.0  # within which a request must be answered
    token_variable: str = ""  # environment variable with the server's token
    in_flight: Annotated[int, at_least(1, 1000)] = 4  # requests that the server has at a time, at most


def is_address(text: str) -> bool:
    """Whether a checkpoint's text is the address of a server."""
    return text.startswith(("http://", "https://"))


@dataclass(frozen=True)
class ServedStudent:
    """The student behind a server, asked as docs/tools.md says, with what `GET /health` answered."""

    url: str
    asking: AskConfig
    about: dict[str, Any] = field(hash=False)

    @classmethod
    def of(cls, text: str) -> "ServedStudent":
        """Parse URL[,KEY=VALUE...] and ask the server what it is; UserError unless it can be evaluated."""
        url, *settings = text.split(",")
        known = {setting.key: setting for setting in settings_of(AskConfig())}
        given = {key: value for key, _, value in (setting.partition("=") for setting in settings)}
        asking = apply(AskConfig(), words_of(given, known, text), text)
        unasked = cls(url.rstrip("/"), asking, {})
        return replace(unasked, about=unasked.health())

    @property
    def client(self) -> RemoteStudent:
        return RemoteStudent(self.url, self.asking.encoding, self.asking.timeout, self.asking.token_variable)

    def health(self) -> dict[str, Any]:
        """Return what the server says of itself; UserError without an answer, or with one that lacks something."""
        try:
            about = self.client.exchange("health")
        except OSError as fault:
            raise UserError(f"{fault}; start the server first: python -m unified_trainer serve RUN") from fault
        protocol = about.get("protocol") if isinstance(about, dict) else None
        if protocol != PROTOCOL:
            raise UserError(f"{self.url} speaks protocol {protocol}, and this program {PROTOCOL}")
        checked(Health, about, f"{self.url}/health")
        return about

    def settings(self, run: RunConfig) -> RunConfig:
        """Return the run with the sampler and the size of the server's videos; UserError names one that cannot be."""
        video = {key: self.about[key] for key in SIZE}
        return with_settings(run, {"sampler": self.about["sampler"], "video": video}, f"{self.url}/health")

    @property
    def name(self) -> str:
        """The name that the server gives itself, with the rounding of its videos if there is one."""
        encoding = self.asking.encoding
        return self.about["name"] + ("" if encoding == "float32" else f",encoding={encoding}")

    @property
    def images(self) -> tuple[int, int]:
        """The fewest and the most condition images that a sample takes; none where the server does not say."""
        fewest, most = self.about.get("images", (0, 0))
        return fewest, most

    @property
    def latent_shape(self) -> tuple[int, int, int, int]:
        """The shape of its latents [c, t, h, w], which two students must share to have the same noise."""
        channels, frames, height, width = self.about["latents"]
        return channels, frames, height, width


def served_videos(student: ServedStudent, plan: Plan, seconds: list[float], device: torch.device) -> Iterator[Video]:
    """Yield the videos of each part, in order, on `device`; UserError that names the server if it fails or has changed.

    `seconds` gets the time of one sample, over all of them: decoding, transport and waiting are in it.
    """

    def request(seed: int, numbers: list[int]) -> tuple[Video, float]:
        first = noise_number(seed, numbers[0])  # the numbers of a part follow each other
        video = student.client.sample(plan.prompts_of(numbers), seed=first, batch=len(numbers))
        return video, time.perf_counter()

    begun = ended = time.perf_counter()
    size = [student.about[key] for key in SIZE[:3]]
    parts, sent, taken = plan.parts(), deque[Future[tuple[Video, float]]](), 0
    pool = ThreadPoolExecutor(student.asking.in_flight, thread_name_prefix="request")
    try:
        sent.extend(pool.submit(request, *part) for part in islice(parts, student.asking.in_flight))
        while sent:
            try:
                video, end = sent.popleft().result()
            except OSError as fault:
                raise UserError(
                    f"{fault}. {taken} of {plan.size * len(plan.seeds)} videos of {student.name} had come; finished "
                    "checkpoints of this evaluation are kept: start the server again and repeat the command"
                ) from fault
            if (shape := list(video.shape[2:])) != size:
                raise UserError(f"{student.url} gave videos of {shape}, but says that it makes {size}")
            sent.extend(pool.submit(request, *part) for part in islice(parts, 1))
            ended, taken = max(ended, end), taken + len(video)
            yield video.to(device)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    seconds.append((ended - begun) / taken)
    if (now := student.health()) != student.about:
        raise UserError(
            f"{student.url} is another student than when the evaluation began: {now['name']} with weights "
            f"{now['weights']}, before {student.name} with {student.about['weights']}; call again"
        )
