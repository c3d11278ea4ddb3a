"""The language of the package and its documents: whole sentences at the start, and the field's words.

Every failure lists all places as `file:line: text -> what to write instead`.
"""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from rules import each

REPO = Path(__file__).parents[2]
PACKAGE = REPO / "unified_trainer"


class Hit(NamedTuple):
    """A place with its fault."""

    file: str
    line: int
    text: str
    instead: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.text.strip()[:100]!r} -> {self.instead}"


class Opening(NamedTuple):
    """The first words of a docstring, help text, bullet or paragraph."""

    file: str
    line: int
    text: str


# Files.


def name_of(path: Path) -> str:
    return path.relative_to(REPO).as_posix()


def documents() -> list[Path]:
    """Return README, CONTRIBUTING and the pages of docs/."""
    return [REPO / "README.md", REPO / "CONTRIBUTING.md", *sorted((REPO / "docs").rglob("*.md"))]


def sources() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


# These pages tell of old words.
EXEMPT = {"CHANGELOG.md", "docs/decisions/0008-rooms-and-words.md", "tests/repo/test_language.py"}


CHECKED = ("unified_trainer", "scripts", "tests", "documents")


def texts(place: str) -> Iterator[tuple[Path, str]]:
    """Yield every file below `place` whose words are checked, with its text."""
    below = (
        path
        for kind in ("py", "yaml", "md")
        for path in (REPO / place).rglob(f"*.{kind}")
        if "golden" not in path.parts
    )
    for path in sorted([*documents(), REPO / "Makefile"] if place == "documents" else below):
        text = path.read_text(encoding="utf-8")
        if name_of(path) not in EXEMPT:
            yield path, text


# Openings.

FRAGMENT = re.compile(
    r"""(?ix) ^ (?:
        the \s same \b
      | (?: of | what | those | and | but | than | who | whose | nor ) \b
      | as \s (?: it | they ) \s (?: is | are | was | were ) \b
      | one \s (?: without | with | that | whose ) \b
      | how \s (?: often | many | much | far ) \b
      | so \s (?: many | much ) \b
      | over \s all \b
    )"""
)
INSTEAD = "open with a full sentence: subject, verb, object; 'Return ...' for a function, a noun phrase for a class"
INSTEAD_HELP = "open with the noun: 'number of ...', 'standard deviation of ...', or a full sentence"


def public_docstrings(path: Path) -> Iterator[Opening]:
    """Yield the docstrings of a module and of its public classes, functions and methods."""
    if any(part.startswith("_") and not part.startswith("__") for part in path.relative_to(REPO).parts):
        return

    def below(node: ast.Module | ast.ClassDef) -> Iterator[ast.AST]:
        yield node
        for child in node.body:
            if isinstance(child, ast.ClassDef) and not child.name.startswith("_"):
                yield from below(child)
            elif isinstance(child, ast.FunctionDef) and (not child.name.startswith("_") or child.name == "__init__"):
                yield child

    for node in below(ast.parse(path.read_text(encoding="utf-8"))):
        text = ast.get_docstring(node)
        if text:
            line = node.body[0].lineno
            yield Opening(name_of(path), line, text)
            yield from argument_helps(path, line, text)


def argument_helps(path: Path, line: int, docstring: str) -> Iterator[Opening]:
    """Yield the help texts in a docstring's section Args, which the command line shows."""
    head, section, rest = docstring.partition("\nArgs:\n")
    if section:
        first = line + head.count("\n") + 2
        for number, row in enumerate(rest.splitlines(), first):
            if match := re.match(r"    ?(?:    )?\w+: (.*)", row):
                yield Opening(name_of(path), number, match[1])


def help_texts(path: Path) -> Iterator[Opening]:
    """Yield the help text of every setting: the comment behind the field, or the string below it."""
    text = path.read_text(encoding="utf-8")
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    comments = {token.start[0]: token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT}
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.ClassDef) or not re.search(r"(Config|Parameters)$", node.name):
            continue
        for field, after in zip(node.body, [*node.body[1:], None], strict=True):
            if not isinstance(field, ast.AnnAssign):
                continue
            lines = range(field.lineno, (field.end_lineno or field.lineno) + 1)
            comment = next((number for number in lines if number in comments), None)
            if comment is not None:
                yield Opening(name_of(path), comment, comments[comment])
            if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                yield Opening(name_of(path), after.lineno, str(after.value.value))


def document_openings(path: Path) -> Iterator[Opening]:
    """Yield the start of every paragraph and bullet, and of the text behind a bullet's bold label."""
    fenced, before = False, ""
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if line.startswith("```"):
            fenced = not fenced
        bullet = re.match(r"\s*(?:[-*]|\d+\.)\s+(.*)", line)
        paragraph = not before.strip() and line.strip() and not re.match(r"    |[#|!]", line)
        if not fenced and (bullet or paragraph):
            text = bullet[1] if bullet else line
            yield Opening(name_of(path), number, text)
            if label := re.match(r"\*\*[^*]+\.\*\*\s+(.*)", text):
                yield Opening(name_of(path), number, label[1])
        before = line


def fragments(openings: Iterator[Opening], instead: str) -> list[Hit]:
    return [Hit(*opening, instead) for opening in openings if FRAGMENT.match(opening.text.lstrip("*_`\"' \n"))]


def report(hits: list[Hit]) -> str:
    """Return all hits, one per line, under their number."""
    return "\n".join([f"{len(hits)} places:", *map(str, hits)])


def test_public_docstrings_open_with_a_sentence():
    hits = fragments((opening for path in sources() for opening in public_docstrings(path)), INSTEAD)
    assert not hits, report(hits)


@pytest.mark.slow
def test_help_texts_open_with_a_noun():
    hits = fragments((opening for path in sources() for opening in help_texts(path)), INSTEAD_HELP)
    assert not hits, report(hits)


def test_paragraphs_and_bullets_open_with_a_sentence():
    hits = fragments((opening for path in documents() for opening in document_openings(path)), INSTEAD)
    assert not hits, report(hits)


@each(["The same over all ranks.", "Of AdamW.", "of AdamW", "What a method is.", "As it is."])
def test_fragments_are_found(text):
    assert FRAGMENT.match(text)


@each(
    [
        "Whether the student is updated in this step.",
        "Offload the weights to CPU memory.",
        "Return the same tensor.",
        "One network or two experts.",
        "However large the batch is, one graph is alive.",
        "Thousands of clips fit.",
    ]
)
def test_sentences_are_left_alone(text):
    assert not FRAGMENT.match(text)


# Words.

WORDS = {
    # metrics
    r"\bjudged?_(?:std|colou?r|shape|direction)\b": "accuracy_std, accuracy/color, accuracy/shape, accuracy/direction",
    r"\bjudg(?:e|es|ed|ing)\b|(?<![a-z])judge(?:d)?_|_judged?(?![a-z])": "accuracy, score, compute_advantages",
    r"\bk_noise\b": "log_ratio_noise_floor",
    r"\badvantage_zero\b": "frac_zero_advantage",
    r"\bfiltered_groups\b": "frac_zero_std_groups",
    r"\bcritic_alarm\b": "critic_to_teacher_error",
    r"[\"'`](?:dead|outside)[\"'`]": "zero_gradient_fraction, clip_fraction",
    # settings
    r"\bclip_norm\b|\bclip-norm\b": "max_grad_norm",
    r"(?<![\w.-])decay[_-]updates\b": "lr_decay_updates",
    r"\bkeep[_-]products\b": "activation_memory",
    r"\bkeep[_-]samples\b": "best_of_n",
    r"\bstep_list\b|\bstep-list\b|\bstep lists?\b": "step_sigmas",
    r"\bthousandths?\b": "noise levels in [0, 1]",
    r"\bcalendars?\b": "update schedule",
    r"\bcritic[_-]first\b": "critic_warmup_steps",
    r"\balgorithm\.expert[_-]balance\b": "student.expert_balance or critic.expert_balance",
    r"\bparallel\.reshard\b(?![_-])": "parallel.reshard_after_forward",
    r"\bparallel\.gradients\b": "parallel.reduce_gradients",
    r"\bvalidation\.averaged\b": "validation.ema",
    r"sentinel": "hacking monitor",
    # identifiers and nouns
    r"[Ll]esson": "Minibatch, minibatch",
    r"[Rr]efill": "dynamic sampling, resample",
    r"\bKept\b|\bafter_load\b": "Stateful, load_state_dict",
    r"\bgenerators\(": "micro_batches(",
    r"\btrains_sampler\b": "trained_for_sampler",
    r"\bdescend(?:s|ed|ing)?\b": "euler_step, Euler step",
    r"\bPolicy\.pull\b|\.pull\(|\bequal pull\b": "mean_gain",
    r"\bone_side\b|\bSide\b(?! of)|(?<=: )Share\b|\bShare\]|\bside_of\b|\bsplit_of\b": "Expert, row mask, ExpertLayout",
    r"(?<![\w.])ask\(": "route(",
    r"\bcontract\b": "the sampler it was trained for (trained_sampler)",
    r"\bcarrying\b|\bcarried (?:in|over)\b|\bcarries weights\b|\bcarried\s*=|\{carried\}": "initialize",
    r"\beveryone\b": "all ranks, all_gather_cpu",
    r"\.everywhere\(mesh\)": ".gathered(mesh)",
    r"\bmesh\.(?:agree|largest|talk|aside|everyone)\b": "assert_same, max, control_group, for_thread, all_gather_cpu",
    r"\bbeside=|\bbeside the training\b": "asynchronous",
    r"\bLived\b|\bclass (?:Seen|Record)\b": "Trajectories, ReplayStats, ReplayCollector",
    r"\blearning_calls\b": "trainable_steps",
    r"[Ff]ollowers?\b|\bfollow\(|\bfollowed/": "weight copy, WeightCopy, update_from",
    r"\bPast\b": "KVCache, KV cache",
    r"\blook(?:s|ed|ing)?[_ ]back\b": "attends to, the KV cache",
    r"\blet_go\b|\bat_home\b|\bown_part\b|\bkeep_gathered\b": "reshard, storage_device, to_local, set_reshard_policy",
    r"\bFeed\b|\bfeed(?=[=.:,)])": "Loader, loader",
    r"\baveraged (?:weights|ones)\b": "EMA weights",
    r"\bwitness": "held-out scorer",
    r"\bHARMLESS\b|\bPLACES\b|\bMENDABLE\b|\bmend(?:ed|ing|s)?\b": "MAY_CHANGE, PATH_KEYS, UserError, fix",
    r"\bof_end\b": "from_x0",
    r"\bsurrogates\.\w|\bpolicy\.(?:transition|log_prob)`|\bgroups\.judge\b": "objectives, kernels, compute_advantages",
    # American spelling
    r"(?i)colour|\bbehaviour|\bneighbour": "color, behavior, neighbor",
}
COMPILED = [(re.compile(pattern), instead) for pattern, instead in WORDS.items()]


def old_words(path: Path, text: str) -> list[Hit]:
    """Return the old words of a file's lines and of its name."""
    rows = [(0, path.stem), *enumerate(text.splitlines(), 1)]
    return [
        Hit(name_of(path), number, row, f"{match[0]!r} is {instead}")
        for number, row in rows
        for pattern, instead in COMPILED
        for match in [pattern.search(row)]
        if match
    ]


@pytest.mark.slow
@each(CHECKED)
def test_words_are_those_of_the_field(place):
    hits = [hit for path, text in texts(place) for hit in old_words(path, text)]
    assert not hits, report(hits)


@each(
    [
        "share of the pixels, one side of a square, the shape of a tensor",
        "samples that carry the gradient; a run that takes turns",
        "lr_decay_updates: int = 0",
        "parallel.reshard_after_forward False",
        "Share of pixels with luma below 0.05.",
        "the feed-forward layers feed the next block",
        'f"{outside} and dead code"',
        "no past key is stored; the following block",
        "the contracts of import-linter in pyproject.toml",
        "task(1), mask(x), flask()",
    ]
)
def test_ordinary_words_are_left_alone(line):
    assert old_words(REPO / "README.md", line) == []


@each(
    [
        "the judge says so",
        "judge_colour",
        "--student.clip-norm 1",
        "class Lesson:",
        "algorithm.refill_rounds",
        "the averaged weights",
        "validation/sentinel",
        "ask(self._shares(sigma), of)",
    ]
)
def test_old_words_are_found(line):
    assert old_words(REPO / "README.md", line)
