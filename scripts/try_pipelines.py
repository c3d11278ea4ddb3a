"""Learn, compare and train small folders of the flow-matching pipelines of diffusers, and write docs/models.md.

    python scripts/try_pipelines.py                     every pipeline, each in a process of its own
    python scripts/try_pipelines.py --only FluxPipeline SanaPipeline   these; the rows of others stay

Each small folder is written by the tests with the real classes and random weights. The numbers compare what the
pipeline itself makes of a prompt with what the trainer makes of it, and each method trains two steps.
"""

import argparse
import contextlib
import io
import json
import logging
import multiprocessing
import os
import re
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

REPO = Path(__file__).parents[1]
sys.path.insert(0, str(REPO / "tests" / "support"))
warnings.filterwarnings("ignore")

import diffusers  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from PIL import Image  # noqa: E402
from pipelines.comparison import PROMPTS, Comparison  # noqa: E402
from pipelines.images import IMAGES  # noqa: E402
from pipelines.videos import VIDEOS  # noqa: E402
from real_clips import write_exactly  # noqa: E402

from unified_trainer.__main__ import main as program  # noqa: E402
from unified_trainer.basics.errors import UserError  # noqa: E402
from unified_trainer.models.pipeline.calls import ProbeError  # noqa: E402
from unified_trainer.run.registry import FAMILIES, family_of  # noqa: E402

SMALL = IMAGES | VIDEOS
PAGE, README = REPO / "docs" / "models.md", REPO / "README.md"
HEAD = REPO / "scripts" / "models_head.md"
METHODS = ("dmd2", "dance_grpo", "diffusion_nft", "reward_gradient", "finetune")
OF_FLOWS = ("FlowM", "Helios", "EulerAncestralRF", "PeRFlow")  # in the names of schedulers
BY_HAND = {name for name in FAMILIES if name in dir(diffusers)}
SAMPLES = {"algorithm.num-prompts": 2, "algorithm.num-samples": 2, "algorithm.prompts-per-update": 2}
SAMPLES |= {"algorithm.rollout-batch": 2, "algorithm.update-batch": 2}
SINGLE = {"algorithm.batch-size": 2, "algorithm.micro-batch": 1}
OWN = dict.fromkeys(METHODS, SINGLE) | {"dance_grpo": SAMPLES, "diffusion_nft": SAMPLES}
OWN |= {"dmd2": SINGLE | {"algorithm.student-every": 1}}
SHARED = {"recipe": "tiny", "device": "cpu", "steps": 2, "reward.path": "tiny", "validate-every": 0}
SHARED |= {"reward.frame-stride": 2, "validation.num-videos": 0, "sampler.num-steps": 2, "sampler.guidance-scale": 1}


def flow_matching() -> list[str]:
    """Return the pipeline classes of diffusers whose scheduler is of flow matching, or that have a small folder."""
    names = [name for name in dir(diffusers) if name.endswith("Pipeline") and name != "DiffusionPipeline"]
    classes = {name: getattr(diffusers, name) for name in names}
    with_folder = {name.split()[0] for name in SMALL}
    return [
        name
        for name, kind in classes.items()
        if name in with_folder or any(word in str(kind.__init__.__annotations__.get("scheduler")) for word in OF_FLOWS)
    ]


def opened(folder: Path, call: Mapping[str, Any]) -> Comparison:
    """Return the comparison at the size of the call, or at the one that the pipeline makes instead."""
    for size in ({}, {"height": 64, "width": 64}):
        try:
            return Comparison(folder, {**call, **size})
        except ProbeError as error:
            refused = error
            instead = {side: int(pixels) for side, pixels in re.findall(r"video\.(\w+) (\d+) in place", str(error))}
            if not instead:
                raise
    if "frames" in instead or call.get("num_frames", call.get("frames", 1)) > 1:
        raise refused
    return Comparison(folder, {**call, **size, **instead})


def prepared(place: Path, frames: int, condition: str, clips_of: int) -> dict[str, object]:
    """Write prompts and clips, whose rows name an image or so many clips as `condition`; return their settings."""
    clips = place / "clips"
    clips.mkdir()
    rows = []
    for number, prompt in enumerate(PROMPTS):
        clip = np.random.default_rng(number).integers(256, size=(frames, 80, 112, 3)).astype(np.uint8)
        if frames == 1:
            Image.fromarray(clip[0]).save(clips / f"{number}.png")
        else:
            write_exactly(clips / f"{number}.mkv", clip, 8)
        (clips / f"{number}.txt").write_text(prompt)
        Image.fromarray(clip[0]).save(place / f"{number}.png")
        named: object = [f"clips/{1 - number}.mkv"] * clips_of or f"{number}.png"
        row = {"prompt": prompt} | ({condition: named} if condition else {})
        rows.append(row | ({"path": f"clips/{number}.mkv"} if clips_of else {}))
    (place / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    prompts = place / "prompts.jsonl"
    return {"prompts": prompts, "validation.prompts": prompts, "data.path": prompts if clips_of else clips}


def trained(made: Comparison, place: Path, method: str, given: Mapping[str, object]) -> str:
    """Train two steps; return why not in a few words, or nothing."""
    sides: dict[str, object] = dict(zip(("video.frames", "video.height", "video.width"), made.size, strict=True))
    sides |= {"video.fps": family_of("student", str(made.folder))[0].fps or 8}
    settings = {**SHARED, **sides, **OWN[method], "student.path": made.folder, "output": place / method}
    settings |= {
        name: value for name, value in given.items() if name != ("prompts" if method == "finetune" else "data.path")
    }
    words = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            code = program(["--method", method, *words])
    except Exception as error:  # noqa: BLE001  (whatever a run raises is its row)
        return brief(f"{type(error).__name__}: {error}")
    lines = [line for line in said.getvalue().splitlines() if line.strip()]
    return "" if code == 0 else brief(next((line for line in reversed(lines) if "rror" in line), lines[-1]))


def brief(text: str) -> str:
    """Return the first words of a message, without folders, as a cell of a table."""
    text = re.sub(r"(?:/[^/:,\n]+)+/", "", " ".join(text.split()))
    text = re.sub(r"^\w+(?: [\w ]+)?: (?=\w+Pipeline )", "", re.sub(r"\x1b\[[\d;]*m", "", text)).replace("|", "/")
    return text if len(text) <= 140 else text[:140].rpartition(" ")[0] + " ..."


def row_of(name: str, methods: tuple[str, ...]) -> list[str]:
    """Return the cells behind a pipeline's name."""
    with tempfile.TemporaryDirectory() as at:
        place = Path(at)
        folder = place / name
        try:
            SMALL[name].write(folder)
            made = opened(folder, SMALL[name].call)
            latents, pixels = made.difference()
            numbers = f"{pixels:.0e}, latents {latents:.0e}, batch {made.batch_difference():.0e}, "
            numbers += f"gradient {made.gradient_difference():.0e}"
        except Exception as error:  # noqa: BLE001  (whatever a pipeline raises is its row)
            kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
            also = "; a family of its own opens it" if name.split()[0] in BY_HAND else ""
            return ["", "", f"refused: {kind}{brief(str(error))}{also}"]
        pipeline = made.known.pipeline
        condition = "condition" if pipeline.takes_image else ""
        given = prepared(place, made.size[0], condition, len(pipeline.clips) * pipeline.takes_image)
        why = {method: trained(made, place, method, given) for method in methods}
    ran = ", ".join(method for method in methods if not why[method])
    ran += " by a family of its own" if ran and name.split()[0] in BY_HAND else ""
    reasons = dict.fromkeys(why[method] for method in methods if why[method])
    not_run = [f"not {', '.join(m for m in methods if why[m] == reason)}: {reason}" for reason in reasons]
    return [str(made.facts), numbers, "; ".join([ran] * bool(ran) + not_run)]


def in_process(name: str, methods: tuple[str, ...], seconds: float) -> list[str]:
    """Return a row that a process of its own makes, which ends after some seconds."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()

    def work() -> None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        theirs.send(row_of(name, methods))

    process = context.Process(target=work)
    process.start()
    theirs.close()
    try:
        return ours.recv() if ours.poll(seconds) else ["", "", f"not tried: took more than {seconds:.0f} s"]
    except EOFError:
        return ["", "", "not tried: its process ended without an answer"]
    finally:
        process.kill()
        process.join()


def rows_of(page: str) -> dict[str, list[str]]:
    """Return the cells of the page's table by the pipeline's name."""
    lines = [line for line in page.splitlines() if re.match(r"\| `\w+Pipeline", line)]
    cells = [[cell.strip().removeprefix("-") for cell in line.strip("|").split(" | ")] for line in lines]
    return {cell[0].strip("`"): cell[1:] for cell in cells}


def training(rows: Mapping[str, list[str]], methods: Sequence[str] = ()) -> set[str]:
    """Return the classes that trained by a method, or by all of these."""
    ran = {name: cells[2].partition(";")[0] for name, cells in rows.items() if cells[2].startswith(METHODS)}
    return {name.split()[0] for name, done in ran.items() if all(method in done for method in methods)}


def note_count(rows: Mapping[str, list[str]]) -> None:
    """Write the number of classes that train into README."""
    said = f"{len(training(rows))} classes of diffusers {diffusers.__version__} train"
    text = README.read_text(encoding="utf-8")
    README.write_text(re.sub(r"\d+ classes of diffusers [\d.]+ train", said, text), encoding="utf-8")


def written(rows: Mapping[str, list[str]], classes: list[str]) -> str:
    """Return the page: the introduction, the count and the table."""
    count = (
        f"diffusers {diffusers.__version__} has {len(classes)} pipeline classes of flow matching. "
        f"{len({name.split()[0] for name in rows if rows[name][0]})} were learned from small random folders, "
        f"{len(training(rows))} trained two steps by at least one method, and {len(training(rows, METHODS))} by all."
    )
    lines = ["| pipeline | learned | largest difference | two steps of training |", "| --- | --- | --- | --- |"]
    lines += [f"| `{name}` | {' | '.join(cell or '-' for cell in rows[name])} |" for name in sorted(rows)]
    return HEAD.read_text(encoding="utf-8").replace("COUNT", count) + "\n" + "\n".join(lines) + "\n"


def main() -> None:
    """Make rows, and write the page and the number in README after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="these pipelines; the other rows stay")
    parser.add_argument("--methods", nargs="*", default=METHODS, choices=METHODS, help="methods that train")
    parser.add_argument("--seconds", type=float, default=400, help="after which a pipeline is given up")
    args = parser.parse_args()
    classes = flow_matching()
    if unknown := [name for name in args.only if name not in SMALL and name not in classes]:
        parser.error(f"{', '.join(unknown)}: no small folder and no flow-matching pipeline of diffusers")
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    for library in (diffusers, transformers):
        library.logging.set_verbosity_error()
    rows = rows_of(PAGE.read_text(encoding="utf-8")) if PAGE.exists() else {}
    known = [*(name for name in classes if name not in {word.split()[0] for word in SMALL}), *SMALL]
    rows = {name: cells for name, cells in rows.items() if name in known}
    for name in args.only or known:
        begun = time.monotonic()
        cells = in_process(name, tuple(args.methods), args.seconds) if name in SMALL else None
        rows[name] = cells or ["", "", "not tried: the tests write no small folder of it"]
        PAGE.write_text(written(rows, classes), encoding="utf-8")
        note_count(rows)
        sys.stdout.write(f"{name}: {time.monotonic() - begun:.0f} s: {rows[name][1]}: {rows[name][2]}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
