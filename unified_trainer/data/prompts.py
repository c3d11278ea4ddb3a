"""Prompts to generate from: those of the tiny world, or a file with one prompt per line."""

from dataclasses import dataclass
from pathlib import Path

from unified_trainer.data.tiny_world import HELD_OUT, PHRASINGS, SUBJECTS
from unified_trainer.errors import MissingFileError, UserError


@dataclass(frozen=True)
class Prompts:
    """A source of prompts without clips."""

    prompts: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.prompts)

    def prompt(self, index: int) -> str:
        """Return the prompt of a row."""
        return self.prompts[index]

    def latents(self, indices: list[int]) -> None:
        """Return None: there are no clips."""
        return None


def training_prompts() -> tuple[str, ...]:
    """Return captions of every training subject in all phrasings but the one that it is validated in."""
    return tuple(
        subject.caption(phrasing)
        for i, subject in enumerate(SUBJECTS)
        for phrasing in range(len(PHRASINGS))
        if subject not in HELD_OUT and phrasing != i % len(PHRASINGS)
    )


def validation_prompts(count: int) -> tuple[str, ...]:
    """Return `count` captions that are no training prompts: each subject in one phrasing, held-out subjects first."""
    captions = [(subject not in HELD_OUT, subject.caption(i % len(PHRASINGS))) for i, subject in enumerate(SUBJECTS)]
    ordered = [caption for _, caption in sorted(captions, key=lambda row: row[0])]
    return tuple(ordered[i % len(ordered)] for i in range(count))


def read_prompts(file: Path, key: str = "--prompts") -> tuple[str, ...]:
    """Read one prompt per line; raise UserError for a blank line, a repeated one or a file that cannot be read.

    `key` is the setting that names the file, for messages.
    """
    if not file.is_file():
        raise MissingFileError(f"{key} {file}: no such file")
    try:
        lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{key} {file} cannot be read as UTF-8 text: {error}") from error
    first_at: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        if not line:
            raise UserError(f"{key} {file}: line {number} is blank; remove it")
        if line in first_at:
            raise UserError(f"{key} {file}: line {number} repeats line {first_at[line]} ({line!r}); remove one")
        first_at[line] = number
    if not lines:
        raise UserError(f"{key} {file} is empty; write one prompt per line")
    return tuple(lines)
