"""Whether the samples of a run have the condition images that its student takes, known before any weight is read."""

from collections.abc import Mapping
from pathlib import Path

from unified_trainer.data.prompts import PromptFile
from unified_trainer.data.video_reader import SMALL
from unified_trainer.models.base import Family
from unified_trainer.run.plan.data import Clips, PromptFiles
from unified_trainer.run.plan.roles import RolePlan
from unified_trainer.run.registry import family_of
from unified_trainer.run.settings.config import ConfigError, RunConfig

CONDITION = "with the column condition, which names a clip or an image for each row"
TABLE = "give a table (.jsonl, .csv or .parquet) with the columns prompt and image"


def _has_images(run: RunConfig, family: Family, folder: Path, prompts: PromptFiles) -> bool:
    """Return whether samples have condition images; ConfigError for a number of them that the student cannot take."""
    fewest, most = family.images(folder)
    counts = {flag: _count(flag, file, fewest, most) for flag, file in prompts.items() if file.requests}
    if run.trains_on == "clips":
        counts["clips"] = int(conditions_on_first_frame(run, family, folder))
    if run.trains_on == "trajectories" and fewest:
        raise ConfigError("data.path holds trajectories, whose files have no images: train on prompts instead")
    return any(counts.values())


def conditions_on_first_frame(run: RunConfig, family: Family, folder: Path) -> bool:
    """Return whether the first frame of a clip is its condition image; ConfigError where there can be none."""
    fewest, most = family.images(folder)
    if run.data.first_frame and not most:
        raise ConfigError("data.first_frame: the student takes no condition image; leave it out")
    return bool(fewest) or run.data.first_frame


def check_images(
    run: RunConfig, roles: Mapping[str, RolePlan], prompts: PromptFiles, clips: Clips, *, scores: bool
) -> None:
    """Raise ConfigError for condition images that the student does not take, or that samples cannot be trained with.

    `scores` says whether the run scores samples, in training or in validations.
    """
    folders = {name: family_of(name, role.path) for name, role in roles.items()}
    takes = {name: family.images(folder) for name, (family, folder) in folders.items()}
    _check_clips(run, *folders["student"], prompts, clips)
    if not _has_images(run, *folders["student"], prompts):
        if needy := [name for name, (fewest, _) in takes.items() if fewest]:
            raise ConfigError(
                f"{needy[0]}.path {roles[needy[0]].path} needs a condition image, and the student's samples have none: "
                "name a model of text"
            )
        return
    if run.algorithm.needs_pairs:
        raise ConfigError(
            f"--method {run.method} needs a student without condition images: the clips of a pair differ in theirs"
        )
    in_need = [folders[name] for name, (fewest, _) in takes.items() if fewest]
    if clips.stored is not None and in_need:
        held = clips.stored.kind.images or all(family.latents_hold_image(folder) for family, folder in in_need)
        _check_stored(run, prompts, held=bool(held))
    if len(set(takes.values())) > 1:
        numbers = ", ".join(f"{name} {fewest} to {most}" for name, (fewest, most) in takes.items())
        raise ConfigError(f"the roles take different numbers of condition images ({numbers}): set their paths")
    student, folder = folders["student"]
    if run.algorithm.matches_windows and not student.latents_hold_image(folder):
        raise ConfigError(
            f"--method {run.method} matches windows of longer videos, whose first latent frame must be the condition "
            f"image, but student.path {roles['student'].path} reads it as channels: train it with self_forcing"
        )
    for shown in (run, run.validated()) if scores and not student.clips(folder) else ():
        for name, scorer in run.reward.named().items():
            if scorer.stride(shown.video.frames) >= shown.video.frames > 1:
                raise ConfigError(
                    f"{run.reward.key(name)}.frames {scorer.frames} scores the first frame alone. It is the condition "
                    "image, so that all samples of an image would have one reward: set it to all, or to every with a "
                    "smaller frame_stride"
                )


def _check_clips(run: RunConfig, family: Family, folder: Path, prompts: PromptFiles, clips: Clips) -> None:
    """Raise UserError for condition clips that are too short or not for the student, or which it lacks."""
    if not family.images(folder)[1]:
        return
    takes = family.clips(folder)
    frames = max(run.video.frames, run.validated().video.frames)
    for file in prompts.values():
        for image in {image for request in file.requests for image in request.images if image.is_clip}:
            image.frames(frames, *SMALL) if takes else image.picture(*SMALL)
    if run.trains_on != "clips":
        return
    counts = {len(video.conditions): video.name for video in clips.videos} or {0: "it"}
    fewest, most = family.images(folder)
    for count, name in counts.items():
        if not (fewest if takes else 0) <= count <= most or len(counts) > 1:
            raise ConfigError(
                f"data.path {run.data.path}: {name} names {count} conditions, and the student takes {fewest} to {most} "
                f"for each clip: give the videos in a table {CONDITION}"
            )


def _check_stored(run: RunConfig, prompts: PromptFiles, *, held: bool) -> None:
    """Raise ConfigError for encoded clips if samples of the run would lack the image that the student needs.

    `held` says whether the files hold that of each clip.
    """
    if not held:
        raise ConfigError("data.path: clips in parquet files hold no first frames: give the videos themselves")
    if run.validate_every and not prompts["--validation.prompts"].requests:
        raise ConfigError(
            f"data.path: encoded clips hold no images for validations: set --validation.prompts ({TABLE}), or "
            "--validate-every 0"
        )


def _count(key: str, file: PromptFile, fewest: int, most: int) -> int:
    """Return the number of images of each request of a file."""
    counts = {len(request.images): number for number, request in reversed(list(enumerate(file.requests)))}
    for count, number in counts.items():
        if not fewest <= count <= most:
            place = file.places[number] if file.places else f"{key}: prompt {number + 1}"
            wanted = f"{fewest}" if fewest == most else f"{fewest} to {most}"
            raise ConfigError(f"{place} has {count} condition images, and the student takes {wanted}: {TABLE}")
    if len(counts) > 1:
        without = file.places[counts[0]]
        raise ConfigError(f"{without} has no condition image, and others have one: put them into two files")
    return next(iter(counts))
