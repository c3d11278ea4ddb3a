"""The frame of every page: its head, style and scripts, around a template of the folder `page`."""

import functools
import shlex
import time
from collections.abc import Iterable, Mapping
from importlib.resources import files
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

from unified_trainer.tools.report.charts import finite

STYLE = "report.css"
INLINE = (  # the content security policy of a page that is one file and asks for nothing
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; media-src blob:"
)


def filled(template: str, scripts: Iterable[str], mark: str = "", **values: Any) -> str:
    """Return a page that is one file: a template with these values, in which text of users is escaped.

    `scripts` are what it runs, in order; `mark` is an element of its head.
    """
    elements = [Markup(f"<script>{script}</script>") for script in scripts]
    frame = {"style": Markup(own_file(STYLE)), "policy": Markup(INLINE), "mark": Markup(mark), "scripts": elements}
    written = time.strftime("%Y-%m-%d %H:%M:%S")
    return _templates().get_template(template).render(**frame, written=written, **values)


def own_file(name: str) -> str:
    """Return the text of a template, style or script of the pages."""
    return (files("unified_trainer.tools.report") / "page" / name).read_text(encoding="utf-8")


def number(value: Any) -> str:
    """Return a number as a page shows it, with four digits."""
    if value is None:
        return "–"  # noqa: RUF001
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1e5 and finite(value) is not None else f"{value:.4g}"
    return str(value)


@functools.cache
def _templates() -> Environment:
    environment = Environment(
        loader=FunctionLoader(own_file),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "ensure_ascii": False}
    environment.filters |= {"number": number, "commands": _commands, "sampler": _sampler}
    return environment


def _commands(run: Mapping[str, Any]) -> dict[str, str]:
    """Return the commands that continue, sample, export and compare a run, by what they do."""
    folder, program = str(run["folder"]), "python -m unified_trainer"
    quoted, best = shlex.quote(folder), shlex.quote(f"{folder}:ema")
    out = shlex.quote(f"{folder}-videos")
    return {
        "continue": f"{program} --resume {quoted} --steps {run['status'].steps * 2 or 100}",
        "sample": f"{program} sample {best} --prompts prompts.txt --output {out}",
        "export": f"{program} export {best} {shlex.quote(f'{folder}-student')}",
        "train on from its weights": f"{program} --method {shlex.quote(run['method'])} --init-from {best}",
        "report": f"{program} report {quoted} --out report.html",
    }


def _sampler(checkpoint: Mapping[str, Any]) -> str:
    """Return the settings of a checkpoint's sampler in words; those that are empty or zero are left out."""
    settings = checkpoint["sampler"]
    flat = {key: value for key, value in settings.items() if not isinstance(value, Mapping)} | settings["chunks"]
    shown = {key: " ".join(map(str, value)) if isinstance(value, list) else value for key, value in flat.items()}
    return ", ".join(f"{key} {value}" for key, value in shown.items() if value)
