"""The facts of a pipeline folder: learned once for each size of video, in each process."""

import functools
import itertools
import math
from pathlib import Path

import torch
from torch.utils._python_dispatch import _disable_current_modes

from unified_trainer.basics.errors import UserError
from unified_trainer.models.base import Shape
from unified_trainer.models.pipeline.calls import CallError, Pipeline, ProbeError, silent
from unified_trainer.models.pipeline.facts import Facts
from unified_trainer.models.pipeline.opening import open_pipeline
from unified_trainer.models.pipeline.probe import learn
from unified_trainer.models.pipeline.values import Size

FRAMES, SIDES = (5, 9, 17), (32, 64, 128, 256, 512, 1024)  # of the small videos that a pipeline is tried on


class Known:
    """The facts of a folder's pipeline, learned when they are first asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._facts = folder, dict[Size, Facts]()

    @functools.cached_property
    def pipeline(self) -> Pipeline:
        """The pipeline, whose networks have no memory."""
        with silent():
            return open_pipeline(self._folder)

    def of_size(self, size: Size) -> Facts:
        """Return the facts at a size in pixels; UserError for one that the pipeline does not make, with one near it."""
        try:
            return self._at(size)
        except CallError as error:
            near = next(filter(self._makes, _near(size)), None)
            if near is None:
                raise
            flags = "--video.frames {} --video.height {} --video.width {}".format(*near)
            raise UserError(f"{error}\nThe nearest size that it makes: {flags}") from error

    def _makes(self, size: Size) -> bool:
        try:
            return bool(self._at(size))
        except ProbeError:
            return False

    def _at(self, size: Size) -> Facts:
        if size[0] > 1 and not self.pipeline.makes_videos:
            raise self.pipeline.refuse(f"makes images: set --video.frames 1 instead of {size[0]}")
        if size not in self._facts:
            with silent(), torch.device("cpu"), _disable_current_modes():  # a caller may compute without memory
                self._facts[size] = self._learned(size)
        return self._facts[size]

    def _learned(self, size: Size) -> Facts:
        pipeline = self.pipeline
        try:
            facts = learn(pipeline, size)
        except ProbeError as error:
            # pipelines that need an image or a clip may have None by default
            if pipeline.takes_image or not (pipeline.clips or (pipeline.image and error.__cause__)):
                raise
            pipeline.takes_image = True
            try:
                facts = learn(pipeline, size)
            except ProbeError as with_image:
                pipeline.takes_image = with_image.__cause__ is None
                raise
        if self._facts and not facts.arguments.joint and facts.arguments.text != self.any().arguments.text:
            raise pipeline.refuse(f"makes {', '.join(facts.arguments.text)} of the prompt and the size together")
        return facts

    def any(self) -> Facts:
        """Return the facts at the size that was asked for first, or at a small one."""
        if self._facts:
            return next(iter(self._facts.values()))
        errors = list[ProbeError]()
        for side, frames in itertools.product(SIDES, FRAMES if self.pipeline.makes_videos else (1,)):
            try:
                return self._at((frames, side, side))
            except ProbeError as error:
                errors.append(error)
        raise errors[0]

    def of_shape(self, shape: Shape) -> Facts:
        """Return the facts of latents [c, t, h, w]."""
        for facts in self._facts.values():
            if facts.shape == shape:
                return facts
        like, about = self.any(), self.video_frames(shape)
        for frames in sorted(range(1, shape[1] + 1), key=lambda frames: abs(frames - about)):
            facts = self.of_size((like.frames_of(frames), shape[2] * like.pixels, shape[3] * like.pixels))
            if facts.shape == shape or not facts.sound:
                return facts
        raise self.pipeline.refuse(f"makes no video with a sound of latents {[*shape]}")

    def video_frames(self, shape: Shape) -> int:
        """Return about how many latent frames of [c, t, h, w] are the video's: a frame's sound has one size."""
        like, (channels, total, height, width) = self.any(), shape
        rate = math.prod(like.sound.latents.shape) / like.size[0] / (channels * height * width) if like.sound else 0.0
        fitting = (count for count in range(total, 1, -1) if count + math.ceil(rate * like.frames_of(count)) <= total)
        return next(fitting, 1)


def _near(size: Size) -> list[Size]:
    """Return sizes near one that pipelines are likely to make, the nearest first."""
    frames = {1 + round((size[0] - 1) / step) * step for step in (1, 4, 6, 8)}
    sides = [[max(step, round(side / step) * step) for side in size[1:]] for step in (8, 16, 32, 64)]
    found = {(count, height, width) for count in frames for height, width in sides} - {size}
    return sorted(found, key=lambda near: sum(abs(a / b - 1) for a, b in zip(near, size, strict=True)))


FOLDERS: dict[Path, Known] = {}


def known(folder: Path) -> Known:
    """Return what is known of a folder."""
    return FOLDERS.setdefault(folder, Known(folder))
