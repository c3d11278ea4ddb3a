"""Prompts that are longer than a network reads: they are cut, and equal up to there are equal to it."""

from collections.abc import Callable, Sequence
from typing import Any

NAMED = 8  # prompts that a line names
Cut = tuple[int, list[int]]  # the most tokens that are read, and the numbers of the prompts that have more


def cut_by(tokenizer: Any, longest: int, prompts: Sequence[str]) -> Cut:
    """Return which prompts have more tokens than `longest`."""
    counts = map(len, tokenizer(list(prompts), verbose=False)["input_ids"] if prompts else ())
    return longest, [number for number, count in enumerate(counts) if count > longest]


def cut_in_words(
    cut: Callable[[Sequence[str]], Cut], prompts: Sequence[str], place: Callable[[int], str], reader: str
) -> str:
    """Return a line with the places of prompts that `reader` cuts; "" if there are none."""
    longest, numbers = cut(prompts)
    listed = ", ".join(place(number) for number in numbers[:NAMED]) + (", ..." if len(numbers) > NAMED else "")
    count = f"{len(numbers)} of {len(prompts)} prompts are longer than the {longest} tokens that {reader} reads"
    return f"warning: {count}, which cuts them: {listed}" if numbers else ""
