"""A folder of rollouts: what made them, their latents in parts, and a file of scores for each reward set.

rollout.json            how the samples were made, their prompts
latents/N.safetensors   x0 of part N: clean latents [b, c, t, h, w], normalised
scores/NAME.jsonl       one line a sample: prompt, seed, where its latents are, reward, parts
scores/NAME.json        the reward set that NAME is
"""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from unified_trainer.models.base import Codec
from unified_trainer.roles.reward import Reward, RewardConfig
from unified_trainer.types import Latents, Video

Seen = Callable[[range, Video], None]
ABOUT = "rollout.json"
VERSION = 1


@dataclass(frozen=True)
class RolloutFolder:
    """Samples prompt-major, `num_samples` of each prompt, in parts of `batch`."""

    folder: Path
    about: dict[str, Any]

    @classmethod
    def read(cls, folder: Path) -> "RolloutFolder":
        """One that `rollout` has begun; FileNotFoundError or ValueError if there is none."""
        if not (folder / ABOUT).is_file():
            raise FileNotFoundError(
                f"{folder / ABOUT} is missing: `python -m unified_trainer rollout` writes such folders"
            )
        about = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
        if about["version"] != VERSION:
            raise ValueError(f"{folder / ABOUT} has version {about['version']}, this program reads {VERSION}")
        return cls(folder, about)

    @classmethod
    def begin(cls, folder: Path, about: Mapping[str, Any]) -> "RolloutFolder":
        """A new one, or the same one again to continue; FileExistsError names what is another."""
        about = json.loads(json.dumps({"version": VERSION, **about}))
        if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
            (folder / "latents").mkdir(parents=True)
            (folder / "scores").mkdir()
            _write(folder / ABOUT, json.dumps(about, indent=1) + "\n")
            return cls(folder, about)
        if not (folder / ABOUT).is_file():
            raise FileExistsError(f"{folder} exists and is no folder of rollouts; choose another one or remove it")
        held = cls.read(folder).about
        if differing := [key for key in about if held.get(key) != about[key]]:
            key = differing[0]
            raise FileExistsError(
                f"{folder} holds other rollouts: their {key} is {_short(held.get(key))}, now {_short(about[key])}; "
                "choose another folder"
            )
        return cls(folder, held)

    @property
    def samples(self) -> list[tuple[int, str]]:
        """Prompt id and prompt of every sample."""
        prompts, count = self.about["prompts"], self.about["num_samples"]
        return [(i, prompt) for i, prompt in enumerate(prompts) for _ in range(count)]

    @property
    def parts(self) -> list[range]:
        """The samples of each part."""
        total, size = len(self.samples), self.about["batch"]
        return [range(start, min(start + size, total)) for start in range(0, total, size)]

    def file(self, part: int) -> Path:
        return self.folder / "latents" / f"{part}.safetensors"

    def write(self, part: int, x0: Latents) -> None:
        """A part's latents, whole or not at all."""
        building = self.file(part).with_suffix(".tmp")
        save_file({"x0": x0.float().cpu().contiguous()}, building)
        building.replace(self.file(part))

    def latents(self, part: int) -> Latents:
        if not self.file(part).is_file():
            raise FileNotFoundError(f"{self.file(part)} is missing: the same `rollout` again goes on where it ended")
        return load_file(self.file(part))["x0"]

    @torch.no_grad()
    def score(self, name: str, reward: Reward, codec: Codec, device: torch.device, seen: Seen | None = None) -> float:
        """Score all parts that have no scores of this name yet; the mean reward of all samples.

        `seen` is shown every video that is decoded for it. FileExistsError if the name has another reward set.
        """
        settings, table = self.folder / "scores" / f"{name}.json", self.folder / "scores" / f"{name}.jsonl"
        _same_set(settings, reward.config, name)
        rows = _whole_rows(table, self.parts)
        with table.open("a", encoding="utf-8") as opened:
            for part, numbers in enumerate(self.parts):
                if numbers.stop <= len(rows):
                    continue
                video = codec.decode(self.latents(part).to(device))
                if seen is not None:
                    seen(numbers, video)
                new = self._rows(part, numbers, reward, video)
                opened.write("".join(json.dumps(row) + "\n" for row in new))
                opened.flush()
                os.fsync(opened.fileno())
                rows += new
        return sum(row["reward"] for row in rows) / len(rows)

    def _rows(self, part: int, numbers: range, reward: Reward, video: Video) -> list[dict[str, Any]]:
        samples = [self.samples[i] for i in numbers]
        names = (*reward.weights, *reward.held_out)
        parts = reward.parts(video, tuple(prompt for _, prompt in samples), names).double()
        totals = reward.total(parts[:, : len(reward.weights)]).tolist()
        return [
            {"sample": number, "prompt_id": prompt_id, "prompt": prompt, "seed": self.about["seed"] + number}
            | {"latents": str(self.file(part).relative_to(self.folder)), "row": row}
            | {"reward": totals[row], "parts": dict(zip(names, parts[row].tolist(), strict=True))}
            for row, (number, (prompt_id, prompt)) in enumerate(zip(numbers, samples, strict=True))
        ]


def _same_set(file: Path, config: RewardConfig, name: str) -> None:
    settings = json.loads(json.dumps(asdict(config)))
    if not file.is_file():
        _write(file, json.dumps(settings, indent=1) + "\n")
    elif json.loads(file.read_text(encoding="utf-8")) != settings:
        raise FileExistsError(f"{file}: the scores {name} are of another reward set; give these another --name")


def _whole_rows(table: Path, parts: list[range]) -> list[dict[str, Any]]:
    """The rows of the parts that are whole; what a process that was killed had begun is dropped from the file."""
    if not table.is_file():
        return []
    lines = table.read_text(encoding="utf-8").splitlines(keepends=True)
    whole = sum(line.endswith("\n") for line in lines)
    kept = max((part.stop for part in parts if part.stop <= whole), default=0)
    if kept < len(lines):
        _write(table, "".join(lines[:kept]))
    return [json.loads(line) for line in lines[:kept]]


def _write(file: Path, text: str) -> None:
    """Whole or not at all."""
    building = file.with_suffix(file.suffix + ".tmp")
    building.write_text(text, encoding="utf-8")
    building.replace(file)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
