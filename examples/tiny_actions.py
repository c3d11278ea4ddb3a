"""Write the clips of the tiny world with actions, and measure which actions the samples of a student obey.

In this world one colored shape moves as it is told.

python examples/tiny_actions.py make tiny_actions                      # clips, their prompts and held-out prompts
python examples/tiny_actions.py measure tiny_actions/held_out.jsonl samples  # of `sample --prompts held_out.jsonl`
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from unified_trainer.basics.terminal import say
from unified_trainer.data.captioned import CaptionedVideo
from unified_trainer.data.clips import VideoConfig
from unified_trainer.data.tiny_world import BACKGROUND, COLORS, FRAMES, RADIUS_RANGE, SHAPES, SIZE, coverage
from unified_trainer.data.video_files import to_uint8, write_mp4
from unified_trainer.data.video_reader import read_clips, to_video

FPS, CLIPS, PROMPTS = 8, 1000, 96
MOVES = ("left", "right", "up", "down", "stop")  # places of the one-hot actions, k = 5
ALONG = torch.tensor([(-1.0, 0.0), (1.0, 0.0), (0.0, -1.0), (0.0, 1.0), (0.0, 0.0)])  # x and y, of each move
RATIO = 4  # pixel frames of a latent frame, which have one move; the first latent frame has one pixel frame
STEP = 5.0  # pixels, of a latent frame
REACH = 1.35  # radii from the centre to the edge of the frame, at which the shape stops
CAPTION = "a {color} {shape}"


def make(folder: Path) -> None:
    """Write CLIPS videos with a table, their captions and actions as prompts, and PROMPTS held-out ones beside them."""
    (folder / "clips").mkdir(parents=True)
    generator, prompts = torch.Generator().manual_seed(0), dict[str, None]()
    with (folder / "clips" / "captions.jsonl").open("w") as table:
        for number in range(CLIPS):
            clip, name = draw_acted(generator, FRAMES), f"{number:05}.mp4"
            write_mp4(to_uint8(clip.render()[None])[0], folder / "clips" / name, FPS)
            table.write(json.dumps({"path": name} | _row(clip)) + "\n")
            prompts[json.dumps(_row(clip))] = None  # one of several with the same caption and actions
    of_clips = len(prompts)
    while len(prompts) < of_clips + PROMPTS:
        prompts[json.dumps(_row(draw_acted(generator, FRAMES)))] = None
    (folder / "prompts.jsonl").write_text("\n".join(list(prompts)[:of_clips]) + "\n")
    (folder / "held_out.jsonl").write_text("\n".join(list(prompts)[of_clips:]) + "\n")


def _row(clip: "ActedClip") -> dict[str, object]:
    return {"caption": clip.caption, "actions": clip.actions.tolist()}


def measure(prompts: Path, samples: Path) -> None:
    """Print the share of obeyed actions, of each move and of all."""
    rows = [json.loads(line) for line in prompts.read_text().splitlines()]
    asked, right = [], []
    for row, sample in zip(rows, json.loads((samples / "samples.json").read_text()), strict=True):
        video = CaptionedVideo(sample["video"], samples / sample["video"], (row["caption"],))
        ((_, clip),) = read_clips([video], VideoConfig(len(row["actions"]), SIZE, SIZE, FPS), 1)
        moves = torch.tensor(row["actions"]).argmax(1)[1::RATIO]
        asked.append(moves)
        right.append(obeyed(to_video(clip.frames)[0], moves))
    moves, good = torch.cat(asked), torch.cat(right).float()
    for place, name in enumerate(MOVES):
        say(f"{name}: {float(good[moves == place].mean()):.3f}")
    say(f"all: {float(good.mean()):.3f} of {len(good)}")


@dataclass(frozen=True)
class ActedClip:
    """A shape, where it starts, and its moves, one for each latent frame behind the first."""

    color: str
    shape: str
    radius: float
    start: tuple[float, float]  # centre in pixels
    moves: Int[Tensor, " steps"]  # places in MOVES

    @property
    def caption(self) -> str:
        return CAPTION.format(color=self.color, shape=self.shape)

    @property
    def actions(self) -> Float[Tensor, "frames 5"]:
        """The move of each pixel frame, one-hot; the first frame has none before it and stops."""
        stop = torch.tensor([MOVES.index("stop")])
        of_frames = torch.cat([stop, self.moves.repeat_interleave(RATIO)])
        return torch.nn.functional.one_hot(of_frames, len(MOVES)).float()

    def render(self) -> Float[Tensor, "3 frames h w"]:
        """Render the clip as antialiased video in [0, 1]."""
        at = [torch.tensor(self.start)]
        for move in self.moves.repeat_interleave(RATIO):
            at.append(moved(at[-1], move, STEP / RATIO, self.radius))
        x, y = torch.stack(at, 1)
        alpha = coverage(self.shape, x, y, torch.full_like(x, self.radius))
        ground, color = (torch.tensor(rgb).view(3, 1, 1, 1) for rgb in (BACKGROUND, COLORS[self.color]))
        return ground + alpha * (color - ground)


def draw_acted(generator: torch.Generator, frames: int) -> ActedClip:
    """Draw a clip of so many pixel frames, uniformly over color, shape, size, place and moves."""
    u = torch.rand(5, generator=generator, dtype=torch.float64).tolist()
    radius = RADIUS_RANGE[0] + u[0] * (RADIUS_RANGE[1] - RADIUS_RANGE[0])
    room = SIZE - 2 * REACH * radius
    start = (REACH * radius + u[1] * room, REACH * radius + u[2] * room)
    moves = torch.randint(len(MOVES), ((frames - 1) // RATIO,), generator=generator)
    color, shape = list(COLORS)[int(u[3] * len(COLORS))], SHAPES[int(u[4] * len(SHAPES))]
    return ActedClip(color, shape, radius, start, moves)


def moved(at: Float[Tensor, " 2"], move: Tensor, pixels: float, radius: float | Tensor) -> Float[Tensor, " 2"]:
    """Return the centre after a move; the edges of the frame stop it."""
    reach = REACH * radius
    return torch.minimum(
        torch.maximum(at + pixels * ALONG[move].to(at), reach * torch.ones(2)), SIZE - reach * torch.ones(2)
    )


def obeyed(video: Float[Tensor, "3 frames h w"], moves: Sequence[int] | Tensor) -> Bool[Tensor, " steps"]:
    """Check which moves a video in [0, 1] obeys, one for each latent frame behind the first.

    From the centre that it has before a latent frame, the shape must come within half a step, along both axes, of where
    the move leads. A frame without a shape of 100 pixels or more obeys nothing.
    """
    difference = (video.float() - torch.tensor(BACKGROUND).view(3, 1, 1, 1)).norm(dim=0)
    weight = torch.where(difference > 0.3, difference, 0.0)[::RATIO]
    area, grid = (weight > 0).sum((1, 2)), torch.arange(SIZE) + 0.5
    total = weight.sum((1, 2)).clamp(min=1e-6)
    at = torch.stack([weight.sum(1) @ grid, weight.sum(2) @ grid], 1) / total[:, None]
    radius = (area / torch.pi).sqrt()
    led = [moved(at[i], torch.as_tensor(move), STEP, radius[i]) for i, move in enumerate(moves)]
    near = ((at[1:] - torch.stack(led)).abs() < STEP / 2).all(1)
    return near & (area[1:] >= 100) & (area[:-1] >= 100)


if __name__ == "__main__":
    {"make": make, "measure": measure}[sys.argv[1]](*map(Path, sys.argv[2:]))
