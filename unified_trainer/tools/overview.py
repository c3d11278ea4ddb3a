"""The help page of the program, and the layout of all help pages. What is named here is read, and not imported."""

import ast
import textwrap
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from unified_trainer.basics.plugins import installed
from unified_trainer.methods import METHODS

PROGRAM = "python -m unified_trainer"
EXAMPLES = """\
python -m unified_trainer --method dance_grpo
python -m unified_trainer --method dmd2 --steps 200 --output runs/dmd2
python -m unified_trainer --method dance_grpo --init-from runs/dmd2
python -m unified_trainer --resume runs/dmd2 --steps 400
python -m unified_trainer sample runs/dmd2:ema --output videos \\
    --prompts "a red circle moving left"
torchrun --shutdown-timeout 900 --nproc-per-node 8 -m unified_trainer \\
    --method finetune --recipe wan2.1-1.3b \\
    --student.path Wan2.1-T2V-1.3B-Diffusers --data.path clips"""


def overview(commands: Mapping[str, str], width: int) -> str:
    """Return the page of the program; `commands` are functions as `module:NAME`."""
    methods = {name: summary(method) for name, method in METHODS.items()}
    methods |= {name: f"Of an installed package: {point}." for name, point in installed("methods").items()}
    lines = [
        *wrapped(summary("unified_trainer"), width),
        "",
        f"Train:             {PROGRAM} --method METHOD [settings]",
        f"Run a command:     {PROGRAM} COMMAND [arguments]",
        "",
        "Methods",
        *_table(methods, width),
        *wrapped("A method of your own: --method path/to/file.py:Class or package.module:Class.", width, 2),
        "",
        "Commands",
        *_table({name: summary(command) for name, command in commands.items()}, width),
        "",
        "Examples",
        *(f"  {line}" for line in EXAMPLES.splitlines()),
        "",
        "Help",
        *_table(
            {
                "--method METHOD --help": "The settings that the method reads, with their defaults.",
                "--method METHOD --help-all": "The same with an explanation of every setting.",
                "--method METHOD --help-all WORD": "Settings with WORD in their name or explanation.",
                "COMMAND --help": "The arguments of a command.",
                "--version": "The versions of this program and of torch.",
            },
            width,
        ),
        "",
        *wrapped(
            "A saved config is a program: it may name methods, model families, scorers and trackers of its own. Such "
            "code runs if the command line names it, or after --trust was given once, until it changes.",
            width,
        ),
    ]
    return "\n".join(lines)


def summary(name: str) -> str:
    """Return the first paragraph about a module, or `module:NAME`, from the source: an import may take seconds.

    Of a function it is that of its docstring, of a class that of its module's.
    """
    module, _, inner = name.partition(":")
    spec = find_spec(module)
    assert spec is not None and spec.origin is not None  # the tables name modules of this package
    tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == inner]
    return first_paragraph(ast.get_docstring(functions[0] if functions else tree) or "")


def first_paragraph(docstring: str) -> str:
    """Return the first paragraph of a docstring in one line."""
    return " ".join(docstring.partition("\n\n")[0].split())


def row(heads: list[str], text: str, column: int, width: int) -> list[str]:
    """Return text beside the last head if that is short enough, else below it."""
    body = wrapped(text, width, column)
    lines = [f"  {head}" for head in heads]
    if body and len(lines[-1]) + 2 <= column:
        lines[-1] = lines[-1].ljust(column) + body.pop(0).strip()
    return lines + body


def wrapped(text: str, width: int, indent: int = 0) -> list[str]:
    """Return the text as lines of at most `width` columns, without a break inside a word."""
    space = " " * indent
    return textwrap.wrap(
        text, width, initial_indent=space, subsequent_indent=space, break_long_words=False, break_on_hyphens=False
    )


def _table(rows: Mapping[str, str], width: int) -> list[str]:
    column = max(map(len, rows)) + 4
    return [line for head, text in rows.items() for line in row([head], text, column, width)]
