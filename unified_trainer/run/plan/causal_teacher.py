"""The check of a causal teacher: its folder must say that it generates in the student's chunks."""

from collections.abc import Mapping

from unified_trainer.basics.input_files import Schema, read_as
from unified_trainer.roles.causal import Causal
from unified_trainer.run.plan.roles import RolePlan
from unified_trainer.run.registry import family_of
from unified_trainer.run.settings.config import ConfigError, RunConfig


class SampledAs(Schema):
    """The chunks of the sampler in an exported folder."""

    chunk_frames: int
    independent_first_frame: bool


def check_causal_teacher(run: RunConfig, roles: Mapping[str, RolePlan]) -> str:
    """Return a warning for a causal teacher whose folder does not say that it was trained in chunks.

    Raise ConfigError for one whose folder says that it was trained in other chunks than the run's, or in none.
    """
    if "teacher" not in roles or not issubclass(roles["teacher"].kind, Causal):
        return ""
    path = roles["teacher"].path
    file = family_of("teacher", path)[1] / "scheduler" / "sampler.json"
    if not file.is_file():
        return (
            f"warning: nothing in teacher.path {path} says that it is a causal model, which this teacher must be. To "
            "make one: finetune with --algorithm.forcing teacher, export it, and give the folder as --teacher.path"
        )
    theirs, chunks = read_as(SampledAs, file), run.sampler.chunks
    own = SampledAs(chunk_frames=chunks.chunk_frames, independent_first_frame=chunks.independent_first_frame)
    if theirs != own:
        raise ConfigError(
            f"teacher.path {path} must be a causal model of the student's chunks: {file} has {theirs}, sampler.chunks "
            f"has {own}"
        )
    return ""
