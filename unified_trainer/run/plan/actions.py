"""Whether the samples of a run have the actions that its student takes, known before any weight is read."""

from collections.abc import Mapping

from unified_trainer.basics.actions import actions_fault
from unified_trainer.run.plan.data import Clips, PromptFiles
from unified_trainer.run.plan.roles import RolePlan
from unified_trainer.run.registry import family_of
from unified_trainer.run.settings.config import ConfigError, RunConfig


def check_actions(run: RunConfig, roles: Mapping[str, RolePlan], prompts: PromptFiles, clips: Clips) -> None:
    """Raise ConfigError for roles of different actions, and for rows without those that the student takes."""
    sizes = {name: _size(name, role) for name, role in roles.items()}
    size, shown = sizes["student"], run.validated().video.frames
    if len({*sizes.values()}) > 1:
        numbers = ", ".join(f"{name} {own}" for name, own in sizes.items())
        raise ConfigError(
            f"the roles take actions of different sizes ({numbers}; 0 is none): set their paths, or finetune a model "
            "with --student.action-size, export it, and start from the export"
        )
    read = prompts if run.validate_every else {"--prompts": prompts["--prompts"]}
    for key, file in read.items():
        frames = run.video.frames if key == "--prompts" else shown
        for number, request in enumerate(file.requests):
            if fault := actions_fault(request.actions, size, frames):
                place = file.places[number] if file.places else f"{key}: prompt {number + 1}"
                raise ConfigError(f"{place} {fault}")
    if size and run.trains_on != "prompts":
        _check_clips(run, prompts, shown)
    if run.trains_on == "clips" and run.data.path != "tiny":
        for number, actions in enumerate(clips.actions):
            if fault := actions_fault(actions, size, run.video.frames):
                raise ConfigError(f"{clips.place(number)} {fault}")


def _check_clips(run: RunConfig, prompts: PromptFiles, shown: int) -> None:
    """Raise ConfigError for data of a student with actions that can have none."""
    alone = not prompts["--validation.prompts"].requests  # validations take the actions of the first clips
    faults = (
        (run.data.path == "tiny", "--data.path tiny has no actions: examples/tiny_actions.py writes clips that have"),
        (run.trains_on == "trajectories", "data.path: files of trajectories hold no actions, train on prompts"),
        (run.algorithm.needs_pairs, f"--method {run.method} reads no actions: those of the clips of a pair differ"),
        (bool(run.data.buckets), "data.buckets: clips with actions have one size, leave it out"),
        (
            run.validate_every > 0 and shown != run.video.frames and alone,
            f"validations have {shown} frames, and the actions of a clip {run.video.frames}: set --validation.prompts",
        ),
    )
    if fault := next((text for holds, text in faults if holds), ""):
        raise ConfigError(fault)


def _size(name: str, role: RolePlan) -> int:
    family, folder = family_of(name, role.path)
    held, new = family.action_size(folder), role.config.new_actions
    if new and family.acting is None:
        raise ConfigError(f"{name}.action_size: {folder} is of a family whose networks take no actions, leave it out")
    if held and new not in (0, held):
        raise ConfigError(f"{name}.action_size {new}: {role.path} takes actions of size {held}, leave it out")
    return new or held
