"""The prompts and clips of a run, read and checked before any weight is."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from unified_trainer.basics.actions import Actions
from unified_trainer.basics.errors import UserError
from unified_trainer.data.batch_plan import BatchPlan
from unified_trainer.data.buckets import sizes_of
from unified_trainer.data.captioned import CaptionedVideo, left_out
from unified_trainer.data.clips import check_tiny_clips
from unified_trainer.data.parquet_files import StoredFiles, read_stored_files
from unified_trainer.data.prompts import PromptFile, prompts_of, training_captions, validation_captions
from unified_trainer.data.raw_clips import checked_videos, holds_videos
from unified_trainer.data.row_kinds import ClipRows, RowKind, Shape, TrajectoryRows
from unified_trainer.methods.base import Method
from unified_trainer.models.base import Codec, Family
from unified_trainer.models.prompt_lengths import cut_in_words
from unified_trainer.parallel.agreement import files_in_words
from unified_trainer.rewards.scorers import check_prompts
from unified_trainer.run.settings.config import ConfigError, RunConfig


@dataclass(frozen=True)
class Clips:
    """The clips or trajectories of data.path: parquet files, videos of a folder, or none."""

    stored: StoredFiles | None = None
    videos: tuple[CaptionedVideo, ...] = ()
    rejected: StoredFiles | None = None  # the other clips of pairs

    @property
    def captions(self) -> Sequence[str]:
        return self.stored.captions if self.stored is not None else tuple(caption for _, caption in self._rows)

    @property
    def _rows(self) -> list[tuple[CaptionedVideo, str]]:
        return [(video, caption) for video in self.videos for caption in video.captions]

    def __len__(self) -> int:
        return len(self.videos) if self.stored is None else len(self.stored.captions)

    def in_words(self) -> dict[str, str]:
        """Return the files with their names, sizes and captions, which must be equal on all ranks."""
        stored = {"data.path": self.stored, "data.rejected": self.rejected}
        words = {
            key: files_in_words([clips.file for clips in files.files], files.captions)
            for key, files in stored.items()
            if files is not None
        }
        videos = {"data.path": files_in_words([clips.holder or clips.file for clips in self.videos], self.captions)}
        return words | (videos if self.videos else {})

    @property
    def actions(self) -> Sequence[Actions]:
        """The actions of each caption's clip."""
        return self.stored.actions if self.stored is not None else [video.actions for video, _ in self._rows]

    def place(self, number: int) -> str:
        """Return where the caption of this number stands."""
        if self.stored is not None:
            return f"data.path: {self.stored.place(number)}"
        return f"data.path: the caption of {self._rows[number][0].file}"


SETS = "--validation.sets."  # before the name of a set of prompts
PromptFiles = dict[str, PromptFile]  # by the flag that names the file


def prompt_files(run: RunConfig, *, images: float) -> PromptFiles:
    """Return all prompts of a run; those of training or validation are none where it takes captions of clips.

    `images` is 0 if the student takes no condition images, which tables name, and else the rate of their clips.
    """
    prompts = validation = PromptFile(())
    if run.trains_on == "prompts":
        prompts = prompts_of(run.prompts, training_captions(), "--prompts", run.prompts_column, images=images)
    if run.validation.prompts:
        captions, column = validation_captions(run.validation.num_samples), run.validation.prompts_column
        validation = prompts_of(run.validation.prompts, captions, "--validation.prompts", column, images=images)
    return {"--prompts": prompts, "--validation.prompts": validation} | validation_sets(run, images=images)


def validation_sets(run: RunConfig, *, images: float = 0) -> PromptFiles:
    """Return the further sets of validation prompts."""
    captions, column = validation_captions(run.validation.num_samples), run.validation.prompts_column
    named = {f"{SETS}{name}": path for name, path in run.validation.sets.items() if path}
    return {flag: prompts_of(path, captions, flag, column, images=images) for flag, path in named.items()}


def read_clips(run: RunConfig, family: Family, folder: Path, shapes: Sequence[Shape]) -> Clips:
    """Return the clips that a run trains on; UserError names the file that is missing or does not fit.

    `folder` is that of the student, and `shapes` are those that latents may have.
    """
    path, pairs = Path(run.data.path), run.algorithm.needs_pairs
    if run.data.rejected and (not pairs or run.data.path == "tiny"):
        raise UserError(f"--data.rejected {run.data.rejected}: {run.method} reads no pairs with these settings")
    if run.trains_on == "prompts":
        return Clips()
    check_sound(run, family, folder)
    if run.trains_on == "clips" and run.data.path == "tiny":
        check_tiny_clips(run.video)
        return Clips()
    if pairs:
        if not run.data.rejected or holds_videos(path) or holds_videos(Path(run.data.rejected)):
            raise UserError(
                f"--method {run.method} needs --data.path and --data.rejected, two folders of encoded clips: put both "
                "videos of a pair under one name into two folders, and preprocess both"
            )
        stored, rejected = (
            read_stored_files(place, _row_kind(run, family, folder, shapes))
            for place in (path, Path(run.data.rejected))
        )
        stored.check_rejected(rejected)
        return Clips(stored=stored, rejected=rejected)
    if run.trains_on == "clips" and holds_videos(path):
        return Clips(videos=checked_videos(path, sizes_of(run.data, run.video), run.data.columns))
    return Clips(stored=read_stored_files(path, _row_kind(run, family, folder, shapes)))


def check_video(run: RunConfig, family: Family) -> None:
    """Raise UserError for a rate of frames or a tile of the VAE that the student's family does not have."""
    if family.fps not in (None, run.video.fps):
        raise ConfigError(
            f"video.fps must be {family.fps:g}, not {run.video.fps:g}: the positions of this model's tokens are seconds"
        )
    run.encoders.check_tile(family.tile_unit)


def check_sound(run: RunConfig, family: Family, folder: Path) -> None:
    """Raise ConfigError for a run on clips whose student makes a sound too: that of a clip is not read."""
    if run.trains_on == "clips" and family.sound(folder):
        raise ConfigError(
            f"--method {run.method} learns from clips, whose sound is not read, but the student's latents hold one: "
            "take a method that learns from prompts"
        )


def check_texts(run: RunConfig, method: type[Method], prompts: PromptFiles, clips: Clips) -> list[str]:
    """Return a line for each scorer that cuts prompts or captions; UserError for one that a scorer cannot score."""
    (training, place), *others = (file.placed for file in prompts.values())
    # Without a reward validation alone scores, by default the first prompts or captions.
    own = prompts["--validation.prompts"].requests or not run.validate_every
    scored = None if method.uses_reward else 0 if own else run.validation.num_samples
    return check_prompts(run.reward, (training[:scored], place), *others, (clips.captions[:scored], clips.place))


def note_cut(codec: Codec, prompts: PromptFiles, clips: Clips) -> list[str]:
    """Return a line for each file of prompts, and for videos, of which the text encoder cuts some."""
    captions = () if clips.stored else clips.captions  # stored embeddings were cut when they were made
    placed = [*(file.placed for file in prompts.values()), (captions, clips.place)]
    return [line for source in placed if (line := cut_in_words(codec.cut, *source, "the text encoder"))]


def count_lanes(run: RunConfig, batch: BatchPlan, clips: Clips) -> dict[str, int]:
    """Return the number of row groups that parquet files are read from at a time, a row of the table at the start."""
    if clips.stored is None:
        return {}
    return {"row groups read from": clips.stored.lanes(batch.prompts, run.data.window_gib)}


def note_files(run: RunConfig, batch: BatchPlan, prompts: PromptFiles, clips: Clips, ranks: int) -> list[str]:
    """Return warnings of files that can be read, but not as their user may expect."""
    notes = [file.note for file in prompts.values()]
    if clips.stored is not None:
        notes.append(clips.stored.image_note)
    if clips.videos:
        notes.append(left_out(Path(run.data.path)))
    for lanes in count_lanes(run, batch, clips).values():
        if lanes < ranks:
            notes.append(
                f"warning: {ranks} ranks read from {lanes} row groups at a time, several from the same one: raise "
                "data.window_gib, or write smaller row groups"
            )
    return notes


def _row_kind(run: RunConfig, family: Family, folder: Path, shapes: Sequence[Shape]) -> RowKind:
    if run.trains_on == "clips":
        images = [{} if run.algorithm.needs_pairs else family.image_tensors(folder, shape) for shape in shapes]
        return ClipRows(shapes[0], images[0], *map(ClipRows, shapes[1:], images[1:]))
    ode = run.algorithm.teacher_ode(run.sampler)
    assert ode is not None  # a run that trains on trajectories
    return TrajectoryRows(shapes[0], ode.levels, run.sampler.shift)
