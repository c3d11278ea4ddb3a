"""A folder of rollouts: how they were generated, their latents in parts, and a file of scores for each reward.

rollout.json            how the samples were made, their prompts, and files and SHA-256 of condition images
latents/N.safetensors   x0 of part N: clean latents [b, c, t, h, w], normalised; the header holds a checksum
scores/NAME.jsonl       one line a sample: prompt, seed, where its latents are, reward, parts
scores/NAME.json        the settings of the reward that NAME is
"""

import json
import os
import zlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import Field
from safetensors import SafetensorError, safe_open

from unified_trainer.basics.errors import MissingFileError, OutputExistsError, UserError, writing
from unified_trainer.basics.input_files import Schema, checked, read_json, read_text
from unified_trainer.basics.own_files import no_follow
from unified_trainer.basics.requests import Image, Request
from unified_trainer.basics.types import Latents, Video, check_finite
from unified_trainer.models.base import Codec
from unified_trainer.models.tensor_file import write_tensors
from unified_trainer.rewards.reward import Reward, RewardConfig, ScorerConfig
from unified_trainer.tools.output_folder import begin_output, write_text

OnVideo = Callable[[range, Video], None]  # sample numbers and their decoded videos
ABOUT = "rollout.json"
VERSION = 1
CHECKSUM = "crc32"  # key in the header of a file of latents


class RolloutSize(Schema):
    """The size of the videos."""

    frames: int = Field(ge=1)
    height: int = Field(ge=1)
    width: int = Field(ge=1)


class About(Schema):
    """The fields of rollout.json that scoring needs."""

    prompts: list[str] = Field(min_length=1)
    num_samples: int = Field(ge=1)
    batch: int = Field(ge=1)
    seed: int
    video: RolloutSize
    base: str
    families: list[str] = []  # noqa: RUF012 - pydantic copies it
    images: list[list[str]] = []  # noqa: RUF012 - SHA-256 of the condition images of each prompt
    image_files: list[list[str]] = []  # noqa: RUF012


@dataclass(frozen=True)
class RolloutFolder:
    """The samples of `rollout`, prompt-major, `num_samples` of each prompt, in parts of `batch`."""

    folder: Path
    about: dict[str, Any]

    @classmethod
    def read(cls, folder: Path) -> "RolloutFolder":
        """Open a folder that `rollout` wrote or began; raise UserError if it is none."""
        if not (folder / ABOUT).is_file():
            raise MissingFileError(
                f"{folder / ABOUT} is missing: `python -m unified_trainer rollout` writes such folders"
            )
        about = read_json(folder / ABOUT)
        if about.get("version") != VERSION:
            raise UserError(f"{folder / ABOUT} has version {about.get('version')}, this program reads {VERSION}")
        checked(About, about, str(folder / ABOUT))
        return cls(folder, about)

    @classmethod
    def begin(cls, folder: Path, about: Mapping[str, Any]) -> "RolloutFolder":
        """Begin a new folder, or continue one of the same `about`; raise OutputExistsError if it differs."""
        begin_output(folder, ABOUT, {"version": VERSION, **about}, "rollouts")
        for name in ("latents", "scores"):
            with writing(folder):
                (folder / name).mkdir(exist_ok=True)
        return cls.read(folder)

    @property
    def samples(self) -> list[tuple[int, str]]:
        """The prompt id and the prompt of every sample."""
        return [(i, prompt) for i, prompt in enumerate(self.about["prompts"]) for _ in range(self.about["num_samples"])]

    @property
    def parts(self) -> list[range]:
        """The numbers of the samples of each part."""
        total, size = len(self.samples), self.about["batch"]
        return [range(start, min(start + size, total)) for start in range(0, total, size)]

    def file(self, part: int) -> Path:
        """Return the file of a part's latents."""
        return self.folder / "latents" / f"{part}.safetensors"

    def write(self, part: int, x0: Latents) -> None:
        """Write a part's latents atomically."""
        building, x0 = self.file(part).with_suffix(".tmp"), x0.float().cpu().contiguous()
        with writing(self.file(part)):
            write_tensors(building, {"x0": x0}, {CHECKSUM: _checksum(x0)})
            building.replace(self.file(part))

    def latents(self, part: int) -> Latents:
        """Read a part's latents; raise UserError if its file is missing or damaged.

        Files of version 0.1.0 hold no checksum.
        """
        if not self.file(part).is_file():
            raise MissingFileError(f"{self.file(part)} is missing: call the same `rollout` again to write it")
        try:
            with safe_open(self.file(part), framework="pt") as opened:
                x0, checksum = opened.get_tensor("x0"), (opened.metadata() or {}).get(CHECKSUM)
        except (SafetensorError, OSError) as error:
            raise UserError(f"{self.file(part)} is damaged ({error}): remove it and call `rollout` again") from error
        if checksum not in (None, _checksum(x0)):
            raise UserError(f"{self.file(part)} is damaged (its checksum is wrong): remove it and call `rollout` again")
        return x0

    @torch.no_grad()
    def score(
        self, name: str, reward: Reward, codec: Codec, device: torch.device, on_video: OnVideo | None = None
    ) -> float:
        """Score all parts that have no scores of this name yet; return the mean reward of all samples.

        `on_video` is called with every video that is decoded. Raise OutputExistsError if the name has another reward.
        """
        file, table = self.folder / "scores" / f"{name}.json", self.folder / "scores" / f"{name}.jsonl"
        settings = json.loads(json.dumps(asdict(reward.config)))
        if not file.is_file():
            write_text(file, json.dumps(settings, indent=1) + "\n")
        elif _scoring(read_json(file)) != _scoring(settings):
            raise OutputExistsError(f"{file}: the scores {name} are of another reward; give these another --name")
        rows = _whole_rows(table, self.parts)
        with writing(table), open(table, "a", encoding="utf-8", opener=no_follow) as opened:
            for part, numbers in enumerate(self.parts):
                if numbers.stop <= len(rows):
                    continue
                x0 = self.latents(part).to(device)
                check_finite(x0, str(self.file(part)))
                video = codec.decode(x0)
                if on_video is not None:
                    on_video(numbers, video)
                new = self._rows(part, numbers, reward, x0, video)
                opened.write("".join(json.dumps(row) + "\n" for row in new))
                opened.flush()
                os.fsync(opened.fileno())
                rows += new
        return sum(row["reward"] for row in rows) / len(rows)

    def rows(self, name: str) -> list[dict[str, Any]]:
        """Return the scores of this name, of all samples; raise UserError if some are missing."""
        table = self.folder / "scores" / f"{name}.jsonl"
        rows = _whole_rows(table, self.parts)
        if len(rows) < len(self.samples):
            way_out = "call the same `rollout`, or `score`, again"
            raise MissingFileError(f"{table} has scores of {len(rows)} of {len(self.samples)} samples: {way_out}")
        return rows

    @property
    def _prompts(self) -> list[str]:
        """The prompts, with their condition images for scorers that ask for them."""
        texts, digests = self.about["prompts"], self.about.get("images", [])
        files = self.about.get("image_files", [])
        if not files:
            return texts
        images = [tuple(map(Image, *pair)) for pair in zip(digests, [map(Path, names) for names in files], strict=True)]
        return [Request(text, given).prompt for text, given in zip(texts, images, strict=True)]

    def _rows(self, part: int, numbers: range, reward: Reward, x0: Latents, video: Video) -> list[dict[str, Any]]:
        prompts, count = self._prompts, self.about["num_samples"]
        samples = [(i // count, prompts[i // count]) for i in numbers]
        names = (*reward.weights, *reward.held_out)
        parts = reward.parts_of(x0, video, tuple(prompt for _, prompt in samples), names).double()
        totals = reward.total(parts[:, : len(reward.weights)]).tolist()
        return [
            {"sample": number, "prompt_id": prompt_id, "prompt": prompt, "seed": self.about["seed"] + number}
            | {"latents": str(self.file(part).relative_to(self.folder)), "row": row}
            | {"reward": totals[row], "parts": dict(zip(names, parts[row].tolist(), strict=True))}
            for row, (number, (prompt_id, prompt)) in enumerate(zip(numbers, samples, strict=True))
        ]


def _checksum(x0: Latents) -> str:
    shape = zlib.crc32(f"{x0.dtype} {tuple(x0.shape)}".encode())
    return str(zlib.crc32(x0.contiguous().numpy().tobytes(), shape))


def _scoring(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a reward that change scores; one that an older file does not hold has its default."""
    scorers = {name: asdict(ScorerConfig()) | config for name, config in settings["scorers"].items()}
    whole = asdict(RewardConfig()) | settings | {"scorers": scorers}
    return {name: value for name, value in whole.items() if name not in ("retries", "timeout")}


def _whole_rows(table: Path, parts: list[range]) -> list[dict[str, Any]]:
    """Read the rows of complete parts; rows of a part that was interrupted are removed from the file."""
    if not table.is_file():
        return []
    lines = read_text(table).splitlines(keepends=True)
    whole = sum(line.endswith("\n") for line in lines)
    kept = max((part.stop for part in parts if part.stop <= whole), default=0)
    if kept < len(lines):
        write_text(table, "".join(lines[:kept]))
    try:
        return [json.loads(line) for line in lines[:kept]]
    except (ValueError, RecursionError) as error:
        raise UserError(f"{table} is damaged ({error}): remove it to score again") from error
