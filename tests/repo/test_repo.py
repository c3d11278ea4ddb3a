"""The repository itself: layers, style, what the house forbids, and that its documents tell the truth."""

import ast
import dataclasses
import functools
import re
import shlex
import sysconfig
from pathlib import Path

import pytest
from helpers import REPO, shell
from rules import each

from unified_trainer.__main__ import COMMANDS, command_named, main
from unified_trainer.basics.input_files import read_yaml
from unified_trainer.numerics.objectives import OBJECTIVES
from unified_trainer.rewards import scorers  # noqa: F401  (it imports every kind)
from unified_trainer.rewards.aesthetic import Aesthetic
from unified_trainer.rewards.endpoint import Endpoint
from unified_trainer.rewards.reward import ScorerConfig
from unified_trainer.rewards.vlm import ChatModel
from unified_trainer.run.registry import METHODS, method_named
from unified_trainer.run.settings import command_line
from unified_trainer.run.settings import config as settings
from unified_trainer.run.settings.command_line import parse
from unified_trainer.run.settings.config import RECIPES, run_class
from unified_trainer.run.settings.flags import apply
from unified_trainer.run.settings.settings import settings_of

PACKAGE = REPO / "unified_trainer"
SOURCES = sorted(PACKAGE.rglob("*.py"))
TESTS = sorted(path for path in (REPO / "tests").rglob("*.py") if path != Path(__file__))
DOCUMENTS = [REPO / "README.md", REPO / "CONTRIBUTING.md", *sorted((REPO / "docs").rglob("*.md"))]
TEXTS = {path: path.read_text(encoding="utf-8") for path in SOURCES}


def name_of(path: Path) -> str:
    return str(path.relative_to(REPO))


# Layers and style.


def tool(name: str) -> str:
    return str(Path(sysconfig.get_path("scripts")) / name)


@pytest.mark.slow  # `make check` runs the tools themselves
def test_the_layers_hold():
    done = shell(tool("lint-imports"), "--no-cache")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_the_types_hold():
    done = shell(tool("mypy"))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("words", [("check",), ("format", "--check")])
def test_ruff_passes(words):
    done = shell(tool("ruff"), *words, "--no-cache", "unified_trainer", "tests", "scripts", "examples")
    assert done.returncode == 0, done.stdout + done.stderr


def imports_of(path: Path) -> set[str]:
    nodes = list(ast.walk(ast.parse(TEXTS[path])))
    modules = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return modules | {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}


NUMERICS = sorted((PACKAGE / "numerics").glob("*.py"))


@each(NUMERICS, name_of)
def test_formulas_need_torch_only(path):
    allowed = {"torch", "torch.nn.functional", "jaxtyping", "math", "typing", "dataclasses"}
    allowed |= {"collections.abc", "functools"}
    allowed |= {f"unified_trainer.basics.{name}" for name in ("effects", "errors", "ranges", "types")}
    assert {name for name in imports_of(path) if not name.startswith("unified_trainer.numerics.")} <= allowed


def test_the_trainer_names_no_method_and_no_family():
    words = {*METHODS, "wan", "hpsv3", "grpo", "finetune"}
    text = (PACKAGE / "run" / "trainer.py").read_text().lower()
    assert not [word for word in words if re.search(rf"\b{word}", text)]


def test_only_the_registry_knows_methods_and_families():
    """Methods and families are named in one place; tools/plan holds closed forms and traces of one family besides."""
    concrete = {f"unified_trainer.methods.{name}" for name in METHODS}
    others = [path for path in SOURCES if not re.search("/(models/wan|tools/plan)/", name_of(path))]
    knowing = {
        name_of(path)
        for path in others
        if any(name in concrete or name.startswith("unified_trainer.models.wan") for name in imports_of(path))
    }
    assert knowing <= {"unified_trainer/run/registry.py"}


def test_methods_do_not_know_of_experts():
    """Roles draw noise levels, route and answer what they train; a method sees velocities and noise levels."""
    banned = re.compile(r"boundary|\bidle\b|\bsides?\b|ExpertPair|ExpertLayout|row_masks|\.experts\b")
    rooms = sorted((PACKAGE / "methods").rglob("*.py"))
    assert len(rooms) > 20
    found = []
    for path in rooms:
        if path.name != "base.py":  # checks settings against the networks of roles, for all methods
            found += [f"{name_of(path)}: {line.strip()}" for line in TEXTS[path].splitlines() if banned.search(line)]
    assert [line for line in found if "boundary condition" not in line] == []


# The no-list; `test_security.py` has what unpickles.


@each(
    [
        r"(?<![\w.])print\(",
        r"\bhasattr\(",
        r"\*\*kwargs",
        r"nan_to_num",
        r"except\s*:",
        r"except BaseException",
        r"\bsleep\(",
        r"\b_target_\b",
        r"is_i2v",
        r"\bTODO\b",
        r"\bFIXME\b",
        r"\bXXX\b",
        r"os\.environ\.get\(\"UT_",
    ]
)
def test_the_no_list(banned):
    assert not [name_of(path) for path, text in TEXTS.items() if re.search(banned, text)]


@pytest.mark.slow
def test_getattr_has_no_default():
    """A default that hides a missing attribute; getattr of a field's name is fine."""
    for path, text in TEXTS.items():
        calls = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Call) and ast.unparse(n.func) == "getattr"]
        assert all(len(call.args) == 2 for call in calls), name_of(path)


@each(
    [
        "noise_pred",
        "model_output",
        "pred_original_sample",
        "prev_sample",
        "real_score",
        "fake_score",
        "num_generations",
        "timesteps",
    ]
)
def test_words_of_the_house(word):
    assert not [name_of(path) for path, text in TEXTS.items() if re.search(rf"\b{word}\b", text)]


def test_there_is_no_drawer_for_everything():
    assert not [name_of(path) for path in SOURCES if path.stem in ("utils", "util", "common", "misc")]


def test_only_one_file_names_accelerators():
    """cuda, npu and their libraries live in parallel/device.py; a default of `auto` elsewhere is no device."""
    naming = [p for p, text in TEXTS.items() if re.search(r"\bcuda\b|\bnccl\b|\bhccl\b|torch_npu|\.cuda\(", text)]
    assert [name_of(path) for path in naming] == ["unified_trainer/parallel/device.py"]


def test_only_one_file_writes_safetensors():
    """The library writes with mode 0600; models/tensor_file.py leaves the umask to decide. Diffusers calls it too."""
    assert [name_of(path) for path, text in TEXTS.items() if re.search(r"\bsave_file\b|serialize_file", text)] == [
        "unified_trainer/models/tensor_file.py"
    ]


# Files of tests that may look again and again, and why nothing tells them.
LOOKS_AGAIN = {
    "tests/support/chromium.py": "a page tells its driver nothing: selenium asks it",
}
PAUSES = ("sleep", "usleep", "sched_yield", "implicitly_wait", "WebDriverWait")
LOOKS = ("exists", "is_file", "is_dir", "poll", "is_alive", "read_text", "stat", "time", "monotonic", "perf_counter")


def waits_for_a_time(text: str) -> list[int]:
    """Lines with a pause, a wait on an event that nobody sets, or a loop until a look finds what it waits for."""
    lines = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func).rpartition(".")[2]
            alone = name == "wait" and ast.unparse(node.func).endswith("Event().wait") and node.args
            lines += [node.lineno] if name in PAUSES or alone else []
        elif isinstance(node, ast.While):
            calls = [call for call in ast.walk(node.test) if isinstance(call, ast.Call)]
            looks = any(ast.unparse(call.func).rpartition(".")[2] in LOOKS for call in calls)
            lines += [node.lineno] if looks or ast.unparse(node.test) in ("not condition()", "not happened()") else []
    return lines


def test_the_rule_of_waits_finds_them():
    for text in (
        "time.sleep(1)",
        "threading.Event().wait(0.1)",
        "while not path.exists():\n    pass",
        "while job.poll() is None:\n    look()",
        "while time.monotonic() < end:\n    look()",
    ):
        assert waits_for_a_time(text) == [1], text
    for text in ("begun.wait(30)", "threading.Event().wait()", "while queue:\n    queue.pop()"):
        assert waits_for_a_time(text) == [], text


@pytest.mark.slow
def test_tests_wait_for_events_and_mock_nothing():
    """Another process tells by a pipe, a socket or its end; tests/support/events.py waits for files and ends."""
    texts = {name_of(path): path.read_text(encoding="utf-8") for path in TESTS}
    waits = {name: lines for name, text in texts.items() if (lines := waits_for_a_time(text))}
    assert {f"{name}: {lines}" for name, lines in waits.items() if name not in LOOKS_AGAIN} == set()
    assert set(LOOKS_AGAIN) <= set(waits)
    assert not [name for name, text in texts.items() if re.search(r"unittest\.mock|MagicMock", text)]


def test_methods_do_not_inherit():
    for path in (PACKAGE / "methods").rglob("*.py"):
        for node in ast.walk(ast.parse(TEXTS[path])):
            if isinstance(node, ast.ClassDef) and "Config" not in node.name:
                bases = {ast.unparse(base) for base in node.bases}
                assert bases <= {
                    "Protocol",
                    "Method",
                    "RolloutMethod",
                    "PolicyMethod",
                    "OldPolicyMethod",
                    "Correction",
                    "MatchingMethod",
                    "DirectedMethod",
                    "NamedTuple",
                    "UserError",
                    "RuntimeError",
                    "AroundRollouts",
                }, name_of(path)


@each(SOURCES, name_of)
def test_every_module_says_what_it_is(path):
    assert ast.get_docstring(ast.parse(TEXTS[path]))


def test_the_assets_are_small():
    size = sum(path.stat().st_size for path in (PACKAGE / "assets").rglob("*") if path.is_file())
    assert size <= 12e6


# Settings.


def fields_of(kind: type, prefix: str = "") -> list[tuple[type, str, str]]:
    """Owner, flag and name of every setting below a config class."""
    found = []
    for field in dataclasses.fields(kind):
        default = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
        if dataclasses.is_dataclass(default):
            found += fields_of(type(default), f"{prefix}{field.name}.")
        else:
            owner = next(one for one in reversed(kind.__mro__) if field.name in vars(one).get("__annotations__", {}))
            found.append((owner, f"{prefix}{field.name}", field.name))
    return found


SETTINGS = list({row[1:]: row for name in METHODS for row in fields_of(run_class(method_named(name)))}.values())
SETTINGS += fields_of(ScorerConfig, "reward.scorers.NAME.")
# Settings that kinds of scorers declare for themselves.
OWN = [
    (kind, f"reward.scorers.NAME.settings.{name}", name)
    for kind in (Endpoint, *Endpoint.__subclasses__(), *ChatModel.__subclasses__(), Aesthetic)
    for name in vars(kind)["__annotations__"]
]
SETTINGS += OWN


READ = {name for text in TEXTS.values() for name in re.findall(r"\.(\w+)\b(?!\s*=[^=])", text)}


@each(SETTINGS)
def test_every_setting_is_read(owner, flag, name):
    """`.name` is used somewhere; a key that nobody reads is a lie. --config is read as a word of the flags."""
    assert name in READ or name == "config", f"{owner.__name__}.{name} is read by nothing"


def test_the_settings_of_kinds_of_scorers_are_documented():
    """They are in no help page, which knows no kinds."""
    text = (REPO / "docs/rewards.md").read_text(encoding="utf-8")
    assert len(OWN) >= 12 and [name for _, _, name in OWN if f"settings.{name}`" not in text] == []


CLASSES: dict[str, list[ast.ClassDef]] = {}
for text in TEXTS.values():
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef):
            CLASSES.setdefault(node.name, []).append(node)


@each(sorted({owner for owner, _, _ in SETTINGS}, key=lambda kind: kind.__name__))
def test_every_setting_says_what_it_is(kind):
    """The docstring under each field is its help text; tyro prints it."""
    (tree,) = CLASSES[kind.__name__]
    for field, after in zip(tree.body, [*tree.body[1:], None], strict=True):
        nested = isinstance(field, ast.AnnAssign) and "default_factory" in ast.unparse(field)
        if isinstance(field, ast.AnnAssign) and "ClassVar" not in ast.unparse(field.annotation) and not nested:
            documented = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            assert documented, f"{kind.__name__}.{ast.unparse(field.target)} has no docstring"


@pytest.mark.slow
@each([(recipe, method) for recipe in sorted(RECIPES.glob("[dt]i*.yaml")) for method in METHODS])
def test_digits_and_tiny_recipes_parse_for_every_method(recipe, method):
    """The others are read by tests/run/settings/test_recipes.py."""
    run = parse(["--recipe", recipe.stem, "--method", method])
    assert (run.recipe, run.method) == (recipe.stem, method)


def test_no_recipe_has_a_section_of_no_method():
    for recipe in RECIPES.glob("*.yaml"):
        assert read_yaml(recipe).keys() <= {"base", "fits", "built", "common", *METHODS}, recipe


# Documents.


def code_lines(path: Path) -> list[str]:
    """The lines of a document's code blocks, comments and continuations resolved."""
    text = path.read_text(encoding="utf-8")
    blocks = re.finditer(r"```\w*\n(?P<fenced>.*?)```|(?P<indented>(?:^    .+\n)+)", text, re.S | re.M)
    joined = "\n".join(block["fenced"] or block["indented"] for block in blocks).replace("\\\n", " ")
    return [line.strip() for line in joined.splitlines()]


def commands() -> list[tuple[str, list[str]]]:
    """Document and flags of every `python -m unified_trainer` in the documents."""
    found = []
    for path in DOCUMENTS:
        for line in code_lines(path) if path.is_file() else []:
            if "-m unified_trainer" in line:
                words = shlex.split(line.removesuffix(" &"), comments=True)
                if any(".py:" in word for word in words[words.index("unified_trainer") :]):
                    continue  # a method or scorer of the guide, which tests run from the guide's own file
                found.append((name_of(path), words[words.index("unified_trainer") + 1 :]))
    return found


def test_the_readme_shows_the_two_commands_first():
    lines = code_lines(REPO / "README.md")
    assert [line.split()[:2] for line in lines[:2]] == [["make", "demo"], ["make", "test"]]


@pytest.mark.slow
@pytest.mark.parametrize(("document", "flags"), commands(), ids=lambda value: " ".join(value)[:60])
def test_the_commands_of_the_documents_parse(document, flags, tmp_path, monkeypatch):
    """A run directory of a document is one of the method that its name holds, such as runs/dmd2."""
    if flags[0] in COMMANDS:
        apply(command_named(flags[0]), flags[1:])  # parsed, and not run
        return
    method = next(
        (name for name in METHODS if "--resume" in flags and name in flags[flags.index("--resume") + 1]), None
    )
    chosen = ["--method", method] if method else []
    monkeypatch.setattr(command_line, "trained_sampler", lambda spec: None)  # --init-from names no run of this machine
    settings.save(parse(chosen), tmp_path / "config.yaml")
    places = {"--resume": str(tmp_path), "--config": str(tmp_path / "config.yaml")}
    for i, flag in enumerate(flags[:-1]):
        flags[i + 1] = places.get(flag, flags[i + 1])
    if {"--help", "--help-all"} & {*flags}:
        assert main(flags) == 0
    else:
        parse(flags)


@each(DOCUMENTS, name_of)
def test_what_a_document_links_to_is_there(path):
    text = path.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        if "://" not in target:
            assert (path.parent / target).exists(), target


@each(DOCUMENTS, name_of)
def test_files_a_document_names_are_there(path):
    text = path.read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:unified_trainer|scripts|tests|docs)/[\w./-]+\.\w+)`", text))
    assert not [name for name in named if not (REPO / name).exists()]


@functools.cache
def known_names() -> set[str]:
    """Every function, class, method, attribute and setting of the package."""
    names = {flag for _, flag, _ in SETTINGS} | {flag.rpartition(".")[0] for _, flag, _ in SETTINGS}
    runs = [run_class(method_named(name))() for name in METHODS]
    names |= {one.off.removeprefix("--").replace("-", "_") for run in runs for one in settings_of(run) if one.switch}
    names |= {f"algorithm.objective.{name}" for kind in OBJECTIVES.values() for name in kind.__dataclass_fields__}
    for text in TEXTS.values():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                names.add(node.name)
    return names


@pytest.mark.slow
@each(DOCUMENTS, name_of)
def test_settings_a_document_names_exist(path):
    """`section.key` in backticks, where the section is one of ours."""
    sections = {flag.split(".")[0] for _, flag, _ in SETTINGS if "." in flag}
    pattern = rf"`(?:--)?((?:{'|'.join(sorted(sections))})(?:\.[\w-]+)+)"
    named = {name.replace("-", "_") for name in re.findall(pattern, path.read_text(encoding="utf-8"))}
    named = {re.sub(r"reward\.scorers\.\w+\.", "reward.scorers.NAME.", name) for name in named}
    named = {re.sub(r"validation\.sets\.\w+", "validation.sets", name) for name in named}
    files = {f"{section}.{kind}" for section in sections for kind in ("py", "yaml", "json", "md")}
    assert named - files <= known_names()


@pytest.mark.slow
@each(DOCUMENTS, name_of)
def test_functions_a_document_names_exist(path):
    called = set(re.findall(r"`(?:\w+\.)*(\w+)\([^`]*\)`", path.read_text(encoding="utf-8")))
    foreign = {
        "FlowMatchEulerDiscreteScheduler",
        "Generator",
        "from_pretrained",
        "load_lora_adapter",
        "int",
        "exp",
        "min",
        "max",
    }
    assert called - foreign <= known_names()


def defined_in(path: Path) -> set[str]:
    """Every name that a file of the package defines: functions, classes, attributes and module constants."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    named = {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    targets = [node.target for node in nodes if isinstance(node, ast.AnnAssign)]
    targets += [target for node in nodes if isinstance(node, ast.Assign) for target in node.targets]
    return named | {ast.unparse(target).removeprefix("self.") for target in targets}


CODE_LINK = re.compile(r"\[`([\w.]+)[^`]*`\]\(([\w./]+\.py)\)")


@pytest.mark.slow
@each(DOCUMENTS, name_of)
def test_code_that_a_document_links_to_is_in_that_file(path):
    """A link `Class.member` or `function` to a source file: the file defines the last part, and a class before it."""
    for name, target in CODE_LINK.findall(path.read_text(encoding="utf-8")):
        *owners, last = name.split(".")
        wanted = {last, *(owner for owner in owners if owner[0].isupper())}
        names = {Path(target).name} if last == "py" else defined_in(path.parent / target)
        assert (Path(name).name if last == "py" else last) in names and (last == "py" or wanted <= names), name


@each([path for path in DOCUMENTS if path.parent.name == "methods"], name_of)
def test_functions_of_a_method_are_links(path):
    """The column "function" of the tables in docs/methods names code by links alone."""
    in_table = False
    for line in path.read_text(encoding="utf-8").splitlines():
        cells = line.strip().strip("|").split(" | ")
        in_table = line.startswith("|") and (in_table or cells[-1].strip() == "function")
        if in_table:
            plain = re.findall(r"(?<!\[)`[\w./]+(?:\([^`]*\))?`", cells[-1])
            assert not plain, f"{plain} is no link to a source file"


@pytest.mark.slow
@each(DOCUMENTS, name_of)
def test_classes_a_document_names_have_what_it_names(path):
    """`Class.member`, also outside of links, of a class of the package; inherited members count."""
    members, bases = class_members()

    def has(owner: str, name: str) -> bool:
        return name in members[owner] or any(has(base, name) for base in bases[owner] if base in members)

    text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.S)
    named = re.findall(r"`(?:\w+\.)*([A-Z]\w*)\.(\w+)(?:\([^`]*\))?`", text)
    assert not [f"{owner}.{name}" for owner, name in named if owner in members and not has(owner, name)]


@functools.cache
def class_members() -> tuple[dict[str, set[str]], dict[str, set[str]]]:
    """Members of every class of the package by its name, and its base classes."""
    members: dict[str, set[str]] = {}
    bases: dict[str, set[str]] = {}
    for path in SOURCES:
        for node in ast.walk(ast.parse(TEXTS[path])):
            if isinstance(node, ast.ClassDef):
                body = list(ast.walk(node))
                own = {one.name for one in body if isinstance(one, ast.FunctionDef)}
                own |= {ast.unparse(one.target).removeprefix("self.") for one in body if isinstance(one, ast.AnnAssign)}
                own |= {
                    ast.unparse(target).removeprefix("self.")
                    for one in body
                    if isinstance(one, ast.Assign)
                    for tuple_or_name in one.targets
                    for target in getattr(tuple_or_name, "elts", [tuple_or_name])
                }
                members.setdefault(node.name, set()).update(own)
                names = {ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in node.bases}
                bases.setdefault(node.name, set()).update(names)
    return members, bases
