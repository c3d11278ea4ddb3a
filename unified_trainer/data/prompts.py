"""Prompts to generate from: the tiny world's, or a file with one a line."""

from dataclasses import dataclass
from pathlib import Path

from unified_trainer.data.tiny_world import HELD_OUT, PHRASINGS, SUBJECTS


@dataclass(frozen=True)
class Prompts:
    """A source without clips."""

    prompts: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.prompts)

    def prompt(self, index: int) -> str:
        return self.prompts[index]

    def latents(self, indices: list[int]) -> None:
        return None


def training_prompts() -> tuple[str, ...]:
    """Every training subject in every phrasing but the one it is validated in."""
    return tuple(
        subject.caption(phrasing)
        for i, subject in enumerate(SUBJECTS)
        for phrasing in range(len(PHRASINGS))
        if subject not in HELD_OUT and phrasing != i % len(PHRASINGS)
    )


def validation_prompts(count: int) -> tuple[str, ...]:
    """Captions that are no training prompts: every subject in one phrasing, the subjects held out altogether first."""
    captions = [(subject not in HELD_OUT, subject.caption(i % len(PHRASINGS))) for i, subject in enumerate(SUBJECTS)]
    ordered = [caption for _, caption in sorted(captions, key=lambda row: row[0])]
    return tuple(ordered[i % len(ordered)] for i in range(count))


def read_prompts(file: Path, key: str = "--prompts") -> tuple[str, ...]:
    """One prompt a line; ValueError names the lines that are blank or stand twice."""
    if not file.is_file():
        raise FileNotFoundError(f"{key} {file}: no such file")
    lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
    first_at: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        if not line:
            raise ValueError(f"{key} {file}: line {number} is blank; remove it")
        if line in first_at:
            raise ValueError(f"{key} {file}: line {number} repeats line {first_at[line]} ({line!r}); remove one")
        first_at[line] = number
    if not lines:
        raise ValueError(f"{key} {file} is empty")
    return tuple(lines)
