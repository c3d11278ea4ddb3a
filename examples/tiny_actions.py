"""Write the clips of the tiny world with actions, and measure which actions the samples of a student obey.

python examples/tiny_actions.py make tiny_actions                      # clips and prompts, in a second folder each
python examples/tiny_actions.py measure tiny_actions/prompts.jsonl samples   # of `sample --prompts prompts.jsonl`
"""

import json
import sys
from pathlib import Path

import torch

from unified_trainer.basics.terminal import say
from unified_trainer.data.captioned import CaptionedVideo
from unified_trainer.data.clips import VideoConfig
from unified_trainer.data.tiny_actions import MOVES, RATIO, draw_acted, obeyed
from unified_trainer.data.tiny_world import FRAMES, SIZE
from unified_trainer.data.video_files import to_uint8, write_mp4
from unified_trainer.data.video_reader import read_clips, to_video

FPS, CLIPS, PROMPTS = 8, 1000, 96


def make(folder: Path) -> None:
    """Write CLIPS videos with a table of their captions and actions, and prompts with actions that no clip has."""
    (folder / "clips").mkdir(parents=True)
    generator = torch.Generator().manual_seed(0)
    with (folder / "clips" / "captions.jsonl").open("w") as table, (folder / "prompts.jsonl").open("w") as prompts:
        for number in range(CLIPS + PROMPTS):
            clip = draw_acted(generator, FRAMES)
            row = {"caption": clip.caption, "actions": clip.actions.tolist()}
            if number < CLIPS:
                name = f"{number:05}.mp4"
                write_mp4(to_uint8(clip.render()[None])[0], folder / "clips" / name, FPS)
                table.write(json.dumps({"path": name} | row) + "\n")
            else:
                prompts.write(json.dumps(row) + "\n")


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


if __name__ == "__main__":
    {"make": make, "measure": measure}[sys.argv[1]](*map(Path, sys.argv[2:]))
