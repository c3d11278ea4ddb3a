"""This script measures rounded students against the unrounded one in the tiny world: plain rounding, aware training.

    python scripts/measure_quantize.py --seeds 0 1 2

A student begins with the tiny model's weights and learns the tiny model's velocities on noised clips, while it rounds
in each pass. The table has the relative error of its velocity, on clips and noise that it did not see, before the first
update (plain rounding) and after the last; that of the unrounded model is 0.
"""

import statistics
import sys

import torch
import tyro

from unified_trainer.basics.types import Condition, Latents, PerSample
from unified_trainer.data.tiny_world import SUBJECT_OF_CAPTION, real_clip, render
from unified_trainer.models.encoders import EncoderConfig
from unified_trainer.models.quantize import wrap
from unified_trainer.numerics.flow import add_noise
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.roles.backbone import Backbone
from unified_trainer.roles.role import Frozen, RoleConfig, Trainable, TrainableConfig
from unified_trainer.run.registry import family_of

ALONE = Mesh(torch.device("cpu"))
CLIPS, BATCH = 192, 16
Inputs = tuple[Latents, PerSample, Condition]


def main(
    kinds: tuple[str, ...] = ("int8", "int4", "fp8", "nvfp4"),
    seeds: tuple[int, ...] = (0, 1, 2),
    steps: int = 150,
    learning_rate: float = 3e-4,
) -> None:
    """Train and print the table.

    Args:
        kinds: bits of the students
        seeds: seeds of noise and batches
        steps: updates of each student
        learning_rate: largest learning rate, which falls to 0
    """
    captions = [*SUBJECT_OF_CAPTION]
    prompts = [captions[i % len(captions)] for i in range(CLIPS)]
    family, folder = family_of("student", "tiny")
    codec = family.codec(folder, ALONE.device, EncoderConfig())
    clips = codec.encode(render([real_clip(prompt, 0, i) for i, prompt in enumerate(prompts)]))
    cond = codec.encode_text(prompts)
    teacher = Frozen("teacher", Backbone(family.model(folder, "transformer"), ALONE), RoleConfig())

    def inputs(seed: int, part: slice) -> Inputs:
        generator = torch.Generator().manual_seed(seed)
        x0 = clips[part]
        noise = torch.randn(x0.shape, generator=generator)
        sigma = torch.rand(len(x0), generator=generator, dtype=torch.float64)
        return add_noise(x0, noise, sigma), sigma, cond.map(lambda rows: rows[part])

    held_out = inputs(10_000, slice(CLIPS - 64, CLIPS))
    with torch.no_grad():
        wanted = teacher.velocity(*held_out)

    def error(student: Trainable) -> float:
        with torch.no_grad():
            return float((student.velocity(*held_out) - wanted).norm() / wanted.norm())

    sys.stdout.write("| bits | seeds | unrounded | plain rounding | after aware training |\n|" + " --- |" * 5 + "\n")
    for kind in kinds:
        before, after = [], []
        for seed in seeds:
            model = family.model(folder, "transformer")
            mesh = wrap(model, kind, "aware", ALONE)
            config = TrainableConfig(
                learning_rate=learning_rate, lr_schedule="linear", lr_decay_updates=steps, weight_decay=0.0
            )
            student = Trainable("student", Backbone(model, mesh, trained=True), config)
            before.append(error(student))
            for step in range(steps):
                first = torch.Generator().manual_seed(1000 * seed + step)
                start = int(torch.randint(CLIPS - 64 - BATCH, (), generator=first))
                given = inputs(1 + 1000 * seed + step, slice(start, start + BATCH))
                with torch.no_grad():
                    target = teacher.velocity(*given)
                student.backward((student.velocity(*given) - target).square().mean(), last=True)
                student.step()
            after.append(error(student))
        row = [kind, str(len(seeds)), "0", f"{before[0]:.2%}", spread(after)]
        sys.stdout.write(f"| {' | '.join(row)} |\n")
        sys.stdout.flush()


def spread(values: list[float]) -> str:
    """Return the mean, and Bessel's standard deviation of several values."""
    apart = f" ± {statistics.stdev(values):.2%}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.2%}{apart}"


if __name__ == "__main__":
    tyro.cli(main)
