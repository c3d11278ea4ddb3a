"""A served student in an evaluation: what its server says of it, and its videos, several requests at a time."""

import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, fields
from itertools import islice
from typing import Any

import torch

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.types import Video
from unified_trainer.rewards.video_json import PROTOCOL, TORCH, Encoding
from unified_trainer.run.settings.command_line import with_settings
from unified_trainer.run.settings.config import RunConfig
from unified_trainer.tools.evaluate.plan import Plan, noise_number
from unified_trainer.tools.serve.remote_student import RemoteStudent

SIZE = ("frames", "height", "width", "fps")
TOLD = ("name", *SIZE, "latents", "weights", "sampler", "device")  # what GET /health must hold
OWN = "encoding=float32|uint8, timeout=SECONDS, token_variable=NAME and in_flight=REQUESTS"


def is_address(text: str) -> bool:
    """Whether a checkpoint's text is the address of a server."""
    return text.startswith(("http://", "https://"))


@dataclass(frozen=True)
class ServedStudent:
    """The student behind a server, asked as docs/tools.md says, with what `GET /health` answered."""

    url: str
    about: dict[str, Any] = field(hash=False)
    encoding: Encoding = "float32"
    timeout: float = 600.0  # seconds within which a request must be answered
    token_variable: str = ""  # environment variable with the server's token
    in_flight: int = 4  # requests that the server has at a time, at most

    @classmethod
    def of(cls, text: str) -> "ServedStudent":
        """Parse URL[,KEY=VALUE...] and ask the server what it is; UserError unless it can be evaluated."""
        url, *settings = text.split(",")
        own = dict(_setting(text, setting) for setting in settings)
        student = cls(url.rstrip("/"), {}, **own)
        student.client()  # refuses wrong settings
        return cls(student.url, student.health(), **own)

    def client(self) -> RemoteStudent:
        return RemoteStudent(self.url, self.encoding, self.timeout, self.token_variable)

    def health(self) -> dict[str, Any]:
        """Return what the server says of itself; UserError without an answer, or with one that lacks something."""
        try:
            about = self.client().exchange("health")
        except OSError as fault:
            raise UserError(f"{fault}; start the server first: python -m unified_trainer serve RUN") from fault
        protocol = about.get("protocol") if isinstance(about, dict) else None
        if protocol != PROTOCOL:
            raise UserError(f"{self.url} speaks protocol {protocol}, and this program {PROTOCOL}")
        if lacks := [name for name in TOLD if name not in about]:
            raise UserError(f"{self.url}/health lacks {', '.join(lacks)}, which an evaluation needs (docs/tools.md)")
        return about

    def settings(self, run: RunConfig) -> RunConfig:
        """Return the run with the sampler and the size of the server's videos; UserError names one that cannot be."""
        video = {key: self.about[key] for key in SIZE}
        return with_settings(run, {"sampler": self.about["sampler"], "video": video}, f"{self.url}/health")

    @property
    def name(self) -> str:
        """The name that the server gives itself, with the rounding of its videos if there is one."""
        rounded = "" if self.encoding == "float32" else f",encoding={self.encoding}"
        return f"{self.about['name']}{rounded}"

    @property
    def weights(self) -> str:
        return str(self.about["weights"])

    @property
    def images(self) -> tuple[int, int]:
        """The fewest and the most condition images that a sample takes; none where the server does not say."""
        images = self.about.get("images", [0, 0])
        if not isinstance(images, list) or len(images) != 2 or not all(type(count) is int for count in images):
            raise UserError(f"{self.url}/health: images must be the fewest and the most of a sample, not {images}")
        return images[0], images[1]

    @property
    def latent_shape(self) -> tuple[int, int, int, int]:
        """The shape of its latents [c, t, h, w], which two students must share to have the same noise."""
        shape = self.about["latents"]
        if not isinstance(shape, list) or len(shape) != 4 or not all(type(size) is int for size in shape):
            raise UserError(f"{self.url}/health: latents must be [channels, frames, height, width], not {shape}")
        channels, frames, height, width = shape
        return channels, frames, height, width


def _setting(text: str, setting: str) -> tuple[str, Any]:
    key, _, value = setting.partition("=")
    known = {field.name for field in fields(ServedStudent)} - {"url", "about"}
    if key not in known:
        raise UserError(f"{text}: {key} is no setting of a served student; have {OWN}")
    try:
        if key == "encoding":
            return key, {name: name for name in TORCH}[value]
        number = float(value) if key == "timeout" else int(value)
    except (KeyError, ValueError):
        raise UserError(f"{text}: {setting} cannot be; write {OWN}") from None
    if key == "in_flight" and not 1 <= number <= 1000:
        raise UserError(f"{text}: in_flight must be from 1 to 1000, not {number}")
    return key, number


class ServedVideos:
    """The videos of an evaluation's plan by a served student."""

    def __init__(self, student: ServedStudent, device: torch.device) -> None:
        """Videos are moved to `device`, where they are scored."""
        self.latent_shape, self.device = student.latent_shape, device
        self.seconds: list[float] = []  # of a sample, over all of them: decoding, transport and waiting are in it
        self._student = student

    def videos(self, plan: Plan) -> Iterator[Video]:
        """Yield the videos of each part, in order; UserError that names the server if it fails or has changed."""
        begun = ended = time.perf_counter()
        parts, sent, taken = plan.parts(), deque[Future[tuple[Video, float]]](), 0
        pool = ThreadPoolExecutor(self._student.in_flight, thread_name_prefix="request")
        try:
            sent.extend(pool.submit(self._request, plan, *part) for part in islice(parts, self._student.in_flight))
            while sent:
                video, end = self._answer(sent.popleft(), taken, plan)
                sent.extend(pool.submit(self._request, plan, *part) for part in islice(parts, 1))
                ended, taken = max(ended, end), taken + len(video)
                yield video.to(self.device)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
        self.seconds.append((ended - begun) / taken)
        if (now := self._student.health()) != self._student.about:
            raise UserError(
                f"{self._student.url} is another student than when the evaluation began: {now['name']} with weights "
                f"{now['weights']}, before {self._student.name} with {self._student.weights}; call again"
            )

    def _request(self, plan: Plan, seed: int, numbers: list[int]) -> tuple[Video, float]:
        first = noise_number(seed, numbers[0])  # the numbers of a part follow each other
        video = self._student.client().sample(plan.prompts_of(numbers), seed=first, batch=len(numbers))
        return video, time.perf_counter()

    def _answer(self, sent: Future[tuple[Video, float]], taken: int, plan: Plan) -> tuple[Video, float]:
        student, asked = self._student, plan.size * len(plan.seeds)
        try:
            video, ended = sent.result()
        except OSError as fault:
            raise UserError(
                f"{fault}. {taken} of {asked} videos of {student.name} had come; finished checkpoints of this "
                "evaluation are kept: start the server again and repeat the command"
            ) from fault
        size = tuple(student.about[key] for key in SIZE[:3])
        if video.shape[2:] != size:
            raise UserError(
                f"{student.url} gave videos of {list(video.shape[2:])}, but says that it makes {list(size)}"
            )
        return video, ended
