"""Help pages of a method's settings and of a command's arguments; that of the program is in overview.py."""

import dataclasses
import functools
import inspect
import math
import sys
import typing
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any

import docstring_parser

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.ranges import Range
from unified_trainer.basics.suggestions import nearest
from unified_trainer.methods.base import Method, MethodConfig
from unified_trainer.rewards.reward import ScorerConfig
from unified_trainer.roles.role import Trainable
from unified_trainer.run.settings.config import RunConfig
from unified_trainer.run.settings.flags import choices, of_one_flag
from unified_trainer.run.settings.settings import REQUIRED, Setting, settings_of
from unified_trainer.tools.overview import PROGRAM, first_paragraph, row, wrapped

LARGE = 100  # upper bounds from here on refuse only what nobody means
FORMS = {int: "INT", float: "NUMBER", str: "TEXT", Path: "PATH"}

# Settings that --help explains; --help-all explains the others too. Of the method's own settings, algorithm.*, those
# are common that are neither in a group of their own nor experimental by their text.
COMMON = {
    *("method", "recipe", "config", "steps", "epochs", "seed", "output", "resume", "init_from", "checkpoint_every"),
    *("validate_every", "report", "prompts", "data.path", "reward.kind", "reward.path", "launcher"),
    *(f"sampler.{name}" for name in ("num_steps", "shift", "solver", "guidance_scale", "chunks.chunk_frames")),
    *("video.frames", "video.height", "video.width", "encoders.text_precision", "encoders.offload"),
    *("validation.num_samples", "validation.prompts", "rollouts.workers", "rollouts.ahead"),
    *("parallel.shard", "parallel.sequence", "tracking.tensorboard", "tracking.wandb"),
}
COMMON_OF_ROLES = ("path", "precision", "learning_rate", "ema_decay", "activation_memory", "adapter.rank")

# Arguments that several commands have; what their docstrings say of one takes precedence.
ARGUMENTS = {
    "run": "RUN[@step][:ema], a run directory: its newest checkpoint or that step's; with :ema the EMA weights.",
    "device": "Device to run on.",
    "base": "Pipeline folder that the student started from, if it is no longer where the run found it.",
    "families": "Model families of your own, in place of those of the run.",
    "port": "Port to listen at; 0 takes a free one.",
    "host": "Address to listen at.",
    "token_variable": "Environment variable that holds a token, which clients must then show as a bearer token. "
    "Without one, open the server only to a network that you trust.",
    "wait": "Seconds that the first request in the queue waits for others.",
}

# Groups of settings in the order of the page, below those of the run and before those of no group here.
GROUPS = {
    "algorithm": "the method's own settings",
    "sampler": "how the student generates samples",
    "video": "size of the videos",
    "ramp_up": "a batch that grows at the start of the run",
    "data": "clips to train on, and the order of prompts and clips",
    "encoders": "text encoder and VAE",
    "reward": "scorers of the samples",
    "validation": "what is measured during the run",
    "hacking_monitor": "detection of reward hacking, and what the run then does",
    "guard": "detection of a student that collapses, and what the run then does",
    "parallel": "ranks and what they share",
    "rollouts": "workers that make the samples of training",
    "ray": "processes on a Ray cluster",
    "tracking": "where metrics are written besides metrics.jsonl",
}


def of_method(method: type[Method], run: RunConfig, width: int, *, everything: bool, sought: str = "") -> str:
    """Return the page of a method's settings, with the values of `run` as defaults.

    They are those that the method reads. With `everything` all are explained, or those with `sought` in their key or
    explanation; UserError names the nearest ones if there are none. Else the common ones are explained, and the others
    are named.
    """
    scorers = {**run.reward.scorers, "NAME": ScorerConfig(settings={"KEY": ""})}
    run = dataclasses.replace(run, reward=dataclasses.replace(run.reward, scorers=scorers))
    groups: dict[str, list[Setting]] = {name: [] for name in ("", "algorithm", *run.roles, *GROUPS)}
    for setting in settings_of(run):
        section = setting.key.partition(".")[0] if "." in setting.key else ""
        if reads(method, setting.key) and (
            not everything or sought.lower() in f"{setting.flag} {setting.key} {explanation(setting)}".lower()
        ):
            groups.setdefault(section, []).append(setting)
    if not any(groups.values()):
        read = [setting.key for setting in settings_of(run) if reads(method, setting.key)]
        near = nearest(sought.removeprefix("--").replace("-", "_"), read)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise UserError(f"--help-all {sought}: no setting of {run.method} has it in its name or explanation{hint}")
    page = f"--help-all {sought}".strip() if everything else "--help"
    lines = [f"{PROGRAM} --method {run.method} {page}", "", *wrapped(summary(method), width), ""]
    lines += wrapped(
        f"Defaults are those of {f'--recipe {run.recipe}' if run.recipe else 'the recipe'}, then of --config and "
        "--init-from if they are given. A switch such as --async-save is turned off by --no-async-save, and "
        "--validation.ema by --validation.no-ema. "
        + ("" if everything else f"All settings are explained by {PROGRAM} --method {run.method} --help-all."),
        width,
    )
    for section, settings in groups.items():
        if not settings:
            continue
        lines += ["", ": ".join(filter(None, (section or "The run", _title(method, section))))]
        shown = [one for one in settings if everything or _is_common(one, run.roles)]
        for setting in shown:
            lines += _entry(setting, width)
        if others := [one.key.partition(".")[2] or one.key for one in settings if one not in shown]:
            prefix = f"--{section}.".replace("_", "-") if section else "--"
            lines += wrapped(f"Also {prefix}NAME: {', '.join(others)}.".replace("_", "-"), width, 2)
    return "\n".join(lines)


def _title(method: type[Method], section: str) -> str:
    if section in method.roles:
        return "a trained role" if issubclass(method.roles[section].kind, Trainable) else "a frozen role"
    return GROUPS.get(section, "")


def of_command(name: str, command: Callable[..., int | None], width: int) -> str:
    """Return the page of a command's arguments."""
    settings = list(settings_of(command))
    needed = [one for one in settings if one.default is REQUIRED]
    usage = " ".join(one.shown if one.positional else f"{one.flag} {form(one.kind)}" for one in needed)
    lines = [*wrapped(f"{PROGRAM} {name} {usage} [flags]", width), "", *wrapped(summary(command), width), ""]
    for setting in settings:
        lines += _entry(setting, width)
    return "\n".join(lines)


def _is_common(setting: Setting, roles: Iterable[str]) -> bool:
    section, _, rest = setting.key.partition(".")
    if section == "algorithm":
        return "." not in rest and "(experimental)" not in explanation(setting)
    return setting.key in COMMON or (section in roles and rest in COMMON_OF_ROLES)


def reads(method: type[Method], key: str) -> bool:
    """Whether a method with some settings reads a setting. All methods are validated with reward.*."""
    may_need_clips = method.config_class.needs_clips is not MethodConfig.needs_clips
    always_needs_clips = method.config_class.needs_clips is True
    section, _, name = key.partition(".")
    if key in ("data.rejected", "data.shuffle"):
        return method.config_class.needs_pairs or key == "data.shuffle"
    return {
        "hacking_monitor": method.uses_reward,
        "ramp_up": not method.config_class.continues_samples,
        "guard": method.config_class.teacher_guidance is not MethodConfig.teacher_guidance,
        "rollouts": bool(method.sampled_by) or name.startswith(("evaluation", "transport", "timeout")),
        "data": may_need_clips or method.config_class.teacher_ode is not MethodConfig.teacher_ode,
        "prompts": not always_needs_clips,
        "prompts_column": not always_needs_clips,
    }.get(section, True)


def summary(owner: type[Method] | Callable[..., int | None]) -> str:
    """Return the first sentence about a method, which is its module's, or about a command."""
    documented = owner if inspect.isfunction(owner) else sys.modules[owner.__module__]
    return first_paragraph(inspect.getdoc(documented) or inspect.getdoc(owner) or "")


def explanation(setting: Setting) -> str:
    """Return the help text of a setting: the docstring below its field, or the line of a command's argument."""
    owners = setting.owner.__mro__ if isinstance(setting.owner, type) else (setting.owner,)
    names = setting.key.split(".")[:-3:-1]  # its own, and that of the field if it is an entry of a dict
    paragraphs = (texts[name] for name in names for owner in owners if name in (texts := _explanations(owner)))
    return next(paragraphs, ARGUMENTS.get(setting.key, "") if inspect.isfunction(setting.owner) else "")


@functools.cache
def _explanations(owner: Any) -> dict[str, str]:
    if owner is object:
        return {}
    documented = docstring_parser.parse_from_object(owner).params
    return {one.arg_name: " ".join((one.description or "").split()) for one in documented}


def _entry(setting: Setting, width: int) -> list[str]:
    """Return the lines of one setting: its flags, and below or beside them its explanation and default."""
    named = setting.shown if setting.positional else f"{setting.flag} {form(setting.kind)}"
    heads = [setting.flag, setting.off] if setting.switch else [named]
    text = " ".join(filter(None, (explanation(setting), _limits(setting), _default(setting.default))))
    joined = ", ".join(heads)
    return row([joined] if len(joined) + 2 <= width else heads, text, width // 3, width)


def _limits(setting: Setting) -> str:
    """Return the range in words where it surprises: numbers from 0 or 1 on, up to LARGE or more, are expected."""
    limits = setting.limits or Range()
    if limits.high >= LARGE:
        limits = dataclasses.replace(limits, high=math.inf)
    from_0_or_1 = limits.low == 0 or (limits.low == 1 and not limits.open_low)
    if limits.low <= -LARGE or (from_0_or_1 and limits.high == math.inf):
        limits = dataclasses.replace(limits, low=-math.inf, open_low=False)
    return "" if limits == Range() or limits.interval in explanation(setting) else f"Must be {limits}."


def _default(value: Any) -> str:
    """Return the default in words; "" where the explanation says what happens without a value."""
    if value is REQUIRED:
        return "Required."
    if value in (None, "", ()):
        return ""
    if isinstance(value, bool):
        return f"Default: {'on' if value else 'off'}."
    values = value if isinstance(value, tuple) else (value,)
    return f"Default: {' '.join(f'{one:g}' if isinstance(one, float) else str(one) for one in values)}."


def form(kind: Any) -> str:
    """Return how the values of a type are written."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        return form(of_one_flag(kind))
    if named := choices(kind):
        return "{" + ",".join(map(str, named)) + "}"
    if origin is tuple and inner[1:] == (...,):
        return f"[{form(inner[0])} ...]"
    if origin is tuple:
        return " ".join(map(form, inner))
    if inner:
        return " | ".join(form(part) for part in inner if part is not type(None))
    return FORMS.get(kind) or kind.__name__.upper()
