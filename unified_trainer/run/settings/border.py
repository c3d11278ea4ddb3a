"""The border: everything that received settings and a received folder would do, asked about before any of it is done.

The facts are declared by the marks of the settings (basics/effects.py). One table shows all of them.
"""

import os
import shutil
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from unified_trainer.basics.effects import SENDS, Effect, effect_of
from unified_trainer.basics.plugins import OWN, Code, digest_of, installed
from unified_trainer.basics.trust import Fact, is_asking, remember, require
from unified_trainer.methods import METHODS
from unified_trainer.numerics.objectives import OBJECTIVES
from unified_trainer.rewards.own_settings import by_form
from unified_trainer.rewards.scorers import KINDS
from unified_trainer.run.settings.settings import Setting, hints

GROUPS: dict[str, Literal["methods", "scorers", "objectives"]] = {
    "method": "methods",
    "kind": "scorers",
    "algorithm.objective.kind": "objectives",
}
BOUND = ("run", "contact", "send")  # effects of a section that a secret in it belongs to


def ask_about(
    settings: Mapping[str, Any], known: Mapping[str, Setting], origins: Mapping[str, str], run: Path | None
) -> None:
    """Raise UserError with a table of what flat settings would do, unless the user agrees.

    `known` are the settings that there are, `origins` the file that each received one comes from, and `run` the folder
    of a run that is continued.
    """
    if is_asking():
        require([*_facts(settings, known, origins), *(_linked_folders(run) if run else ())])


def remember_own(settings: Mapping[str, Any], known: Mapping[str, Setting], run: Path) -> None:
    """Note that the user has agreed to a run that begins on this machine, so that to continue it asks nothing."""
    remember([*_facts(settings, known, {}), *_linked_folders(run)])


def _facts(settings: Mapping[str, Any], known: Mapping[str, Setting], origins: Mapping[str, str]) -> Iterator[Fact]:
    settings = {name.replace("-", "_"): value for name, value in settings.items()}
    for name in {key.split(".")[2] for key in settings if key.startswith("reward.scorers.")}:
        settings[f"reward.scorers.{name}.kind"] = settings.get(f"reward.scorers.{name}.kind") or name
    effects = {key: effect for key in settings if (effect := _effect(key, settings, known)) is not None}
    for key, effect in effects.items():
        for value in settings[key] if isinstance(settings[key], (list, tuple)) else [settings[key]]:
            text, origin = "" if value is None else str(value), origins.get(key, "")
            if effect.does == "nothing" or text in ("", *effect.unless):
                continue
            if effect.form != "code":
                content = _content(effect, text) or _section(key, settings, effects)
                yield Fact(key, effect.does, text, _place(effect, text), content, origin, effect.asked)
            elif code := _code(key, text):
                yield code.fact(key, text, origin)


def _linked_folders(run: Path) -> Iterator[Fact]:
    """Yield the links to folders outside of a run's folder: a run writes into them, and removes what lies there."""
    inside = os.path.join(os.path.realpath(run), "")
    for folder, names, _ in os.walk(run):
        for link in (os.path.join(folder, name) for name in names):
            if os.path.islink(link) and not os.path.realpath(link).startswith(inside):
                place = f"{os.path.abspath(link)} -> {os.path.realpath(link)}"
                yield Fact("resume", "write", link, place, origin=str(run))


def _effect(key: str, settings: Mapping[str, Any], known: Mapping[str, Setting]) -> Effect | None:
    """Return the mark of a setting, of a scorer's own too; what a user's code does with a text is not known."""
    section, _, name = key.partition(".settings.") if key.startswith("reward.") else (key, "", "")
    if name:
        kind = KINDS.get(str(settings.get(f"{section}.kind") or "hpsv3"))
        if kind is not None and kind.declared is not None:
            return effect_of(hints(kind.declared).get(name))
        return SENDS if isinstance(settings[key], str) and isinstance(by_form(settings[key]), str) else None
    setting = known.get(key)
    if setting is None or setting.effect is not None or setting.owner.__module__.startswith(OWN):
        return setting.effect if setting else None
    return SENDS if {str, Path} & {setting.kind, *typing.get_args(setting.kind)} else None


def _code(key: str, text: str) -> Code | None:
    """Return the code from outside this package that a setting names, also by a name of an installed package."""
    if ":" in text:
        return None if text.startswith(OWN) else Code.read(text)
    group = GROUPS.get(key) or GROUPS.get(key.rpartition(".")[2])
    if group is None or text in METHODS or text in OBJECTIVES or not (spec := installed(group).get(text)):
        return None
    return None if text in KINDS else Code.read(spec)


def _place(effect: Effect, text: str) -> str:
    """Return what a text names: an absolute path, or the text itself."""
    if effect.form == "program":
        text = shutil.which(text) or text
    return text if effect.form == "text" or "://" in text else os.path.abspath(text)


def _content(effect: Effect, text: str) -> str:
    """Return the digest of the program that a text names; "" where it names none."""
    place = _place(effect, text)
    return digest_of({place: Path(place).read_bytes()}) if effect.does == "run" and os.path.isfile(place) else ""


def _section(key: str, settings: Mapping[str, Any], effects: Mapping[str, Effect]) -> str:
    """Return the digest of what a secret belongs to, such as its server or its program; "" for what is no secret."""
    if effects[key].does != "send":
        return ""
    beside = [other for other, effect in effects.items() if effect.does in BOUND and _above(other) == _above(key)]
    return digest_of({other: str(settings[other]).encode(errors="surrogateescape") for other in sorted(beside)})


def _above(key: str) -> str:
    return key.partition(".settings.")[0] if ".settings." in key else key.rpartition(".")[0]
