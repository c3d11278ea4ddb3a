"""Whether the samples of a run have the actions that its student takes, known before any weight is read."""

from collections.abc import Mapping
from pathlib import Path

from unified_trainer.basics.actions import actions_fault
from unified_trainer.models.base import ActionForm, Family
from unified_trainer.run.plan.data import Clips, PromptFiles
from unified_trainer.run.plan.roles import RolePlan
from unified_trainer.run.registry import family_of
from unified_trainer.run.settings.config import ConfigError, RunConfig


def check_actions(run: RunConfig, roles: Mapping[str, RolePlan], prompts: PromptFiles, clips: Clips) -> None:
    """Raise ConfigError for roles of different actions, and for rows without those that the student takes."""
    folders = {name: family_of(name, role.path) for name, role in roles.items()}
    size = check_equal_actions(
        {name: action_form(name, *folders[name], role.config.new_actions) for name, role in roles.items()}
    )
    shown = run.validated().video.frames
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


def action_form(name: str, family: Family, folder: Path, new: int) -> ActionForm | None:
    """Return the actions that a role takes, by a new layer if a size is given; ConfigError for one that cannot be."""
    held = family.actions(folder, 0)
    if new and family.acting is None:
        raise ConfigError(f"{name}.action_size: {folder} is of a family whose networks take no actions, leave it out")
    if held and new not in (0, held.size):
        raise ConfigError(f"{name}.action_size {new}: {folder} takes actions of size {held.size}, leave it out")
    return family.actions(folder, new)


def check_equal_actions(forms: Mapping[str, ActionForm | None]) -> int:
    """Return the size of the actions of all roles, 0 for none; ConfigError for roles of different ones."""
    sizes = {name: form.size if form else 0 for name, form in forms.items()}
    if len({*sizes.values()}) > 1:
        numbers = ", ".join(f"{name} {own}" for name, own in sizes.items())
        raise ConfigError(
            f"the roles take actions of different sizes ({numbers}; 0 is none): set their paths, or finetune a model "
            "with --student.action-size, export it, and start from the export"
        )
    return sizes["student"]
