"""Everything that mission.toml names starts: its command line up to where weights would be read, or a real run."""

import functools
import json
import re
import shlex
import shutil
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from cells import cells
from forked import program
from helpers import ALONE, REPO, WAN, refused

from unified_trainer.__main__ import COMMANDS, command_named, main
from unified_trainer.run import build
from unified_trainer.run.plan.plan import RunPlan, check
from unified_trainer.run.settings.command_line import parse
from unified_trainer.run.settings.config import flat, plain
from unified_trainer.run.settings.flags import apply, split
from unified_trainer.tools.report.glossary import documented_name

sys.path.insert(0, str(REPO / "scripts"))
from make_golden_runs import CLIPS, GROUPS, PARTS, SHORT, SINGLES, VIDEO

SIZES = {  # of a small run, before the flags of an entry
    "dance_grpo": f"{VIDEO} {GROUPS} --sampler.num-steps 3",
    "dance_ppo": f"{VIDEO} {SINGLES} --sampler.num-steps 3",
    "distill_rl": f"{VIDEO} {GROUPS} --sampler.num-steps 3",
    "dmd2": f"{VIDEO} {PARTS} --algorithm.student-every 1",
    "self_forcing": f"{VIDEO} {PARTS} --video.frames 13 --algorithm.student-every 1",
    "long_self_forcing": f"{VIDEO} {PARTS} --video.frames 13 --algorithm.student-every 1",
    "finetune": f"{CLIPS} --sampler.num-steps 2",
}
KINDS = ("metric", "role", "setting", "file", "said", "refusal")


@dataclass(frozen=True)
class Named:
    """A thing that the mission names."""

    system: str
    name: str
    start: str
    seen: tuple[str, ...]
    after: str = ""
    runs: bool = False
    ranks: int = 1
    method: str = ""  # of an entry that is meant in several

    def __str__(self) -> str:
        return f"{self.system}: {self.name} {self.method}".strip()

    def of(self, kind: str) -> list[str]:
        return [seen.removeprefix(f"{kind} ") for seen in self.seen if seen.startswith(f"{kind} ")]

    @property
    def is_command(self) -> bool:
        return self.start.split()[0] in COMMANDS


def words_of(start: str, folder: Path, output: str = "run") -> list[str]:
    """The command line, with what it needs below a folder, and the small sizes of its method before it."""
    places = {"RUN": "run", "COPY": "copy", "DIR": "model", "BEFORE": "before"}
    places |= {"PROMPTS": "prompts.txt", "CONFIG": "config.yaml"}
    words = [str(folder / places[word]) if word in places else word for word in shlex.split(start)]
    if words[0] in COMMANDS or words[0] == "--resume":
        return words
    method = words[1] if words[0] == "--method" else "dance_grpo"
    length = "" if "--epochs" in words else "--steps 1"
    small = shlex.split(f"{SHORT} --validate-every 0 {length} {SIZES[method]} --output {folder / output}")
    return [*words[:2], *small, *words[2:]]


def mission() -> Iterator[Named]:
    table = tomllib.loads((REPO / "tests" / "repo" / "mission.toml").read_text(encoding="utf-8"))
    for system, things in table.items():
        methods = things.pop("METHODS", [])
        for name, thing in things.items():
            thing["seen"] = tuple(thing["seen"])
            for method in methods or [""]:
                start = f"--method {method} {thing['start']}" if method else thing["start"]
                yield Named(system, name, method=method, **(thing | {"start": start}))


NAMED = list(mission())
# Each once; of those that are meant in several methods one, so that each method is among them.
RUN = cells([(one,) for one in NAMED if one.runs], lambda cell: ((cell[0].system, cell[0].name), cell[0].method))
READY = [thing for thing in NAMED if not thing.after and thing.ranks == 1]  # need no run before


class Checked(Exception):
    """A start came as far as its weights."""

    def __init__(self, plan: RunPlan) -> None:
        self.plan = plan


@pytest.fixture
def folder(tmp_path):
    """What entries name: a copy of the tiny model, prompts, and a config."""
    shutil.copytree(WAN, tmp_path / "model")
    (tmp_path / "prompts.txt").write_text("a red circle moving left\na blue square moving up\n" * 4)
    (tmp_path / "config.yaml").write_text("method: dance_grpo\nalgorithm:\n  clip_low: 0.25\n  clip_high: 0.25\n")
    return tmp_path


@pytest.fixture(scope="module")
def before(tmp_path_factory) -> Callable[[str], Path]:
    """The run that comes before that of an entry; each is made once."""

    @functools.cache
    def made(after: str) -> Path:
        folder = tmp_path_factory.mktemp("before")
        done = program("-m", "unified_trainer", *words_of(f"{after} --checkpoint-every 1", folder), where=folder)
        assert done.returncode == 0, done.stdout + done.stderr
        return folder / "run"

    return made


def started(words: list[str], monkeypatch) -> RunPlan:
    """The plan of a real start, which ends where it would read weights; of a run on Ray, that of its check."""
    run = parse(words)
    if run.launcher == "ray" or run.rollouts.workers or run.rollouts.evaluation_workers:
        return check(run, ALONE)

    def reached(checked, mesh):
        raise Checked(check(checked, mesh))

    monkeypatch.setattr(build, "check", reached)
    with pytest.raises(Checked) as reason:
        main(words)
    return reason.value.plan


@pytest.mark.slow  # together
@pytest.mark.parametrize("thing", [thing for thing in READY if not thing.is_command], ids=str)
def test_it_starts_up_to_where_weights_are_read(thing, folder, monkeypatch, capsys):
    words = words_of(thing.start, folder)
    if missing := thing.of("refusal"):
        assert re.search(missing[0], refused(capsys, *words))
        return
    plan = started(words, monkeypatch)
    settings = flat(plain(plan.run))
    assert {*thing.of("role")} <= {*plan.roles} and {*thing.of("setting")} <= {*settings}
    assert all(documented_name(metric.removeprefix("validation/")) for metric in thing.of("metric")), thing.seen
    for flag, values in split(words):  # nothing else has the last word
        key = flag.removeprefix("--").replace("-", "_")
        last = [given for name, given in split(words) if name == flag][-1]
        if key in settings and len(values) == 1 and values == last:
            assert is_the_same(settings[key], values[0]), flag


def is_the_same(value: object, word: str) -> bool:
    try:
        return float(str(value)) == float(word)
    except ValueError:
        return str(value) in (word, f"file://{word}")


@pytest.mark.slow
@pytest.mark.parametrize("thing", [thing for thing in READY if thing.is_command], ids=str)
def test_its_command_takes_these_words(thing, folder):
    """`plan` reads no weights and is called; the others are given their settings."""
    name, *words = words_of(thing.start, folder)
    command = apply(command_named(name), words)
    assert name != "plan" or not command()


@pytest.mark.slow
@pytest.mark.parametrize("thing", RUN, ids=str)
def test_it_runs(thing, folder, before):
    if thing.after:
        shutil.copytree(before(thing.after), folder / "before")
    done = program("-m", "unified_trainer", *words_of(thing.start, folder), ranks=thing.ranks, where=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    file = folder / "run" / "metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    found = {name.removeprefix("train/") for row in rows for name in row}
    assert {*thing.of("metric")} <= found, sorted(found)
    assert all((folder / "run" / file).resolve().exists() for file in thing.of("file")), thing.seen
    assert all(re.search(words, done.stdout) for words in thing.of("said")), done.stdout


# The list itself.


def test_each_thing_is_observed_somehow():
    assert len(NAMED) > 120 and len({str(thing) for thing in NAMED}) == len(NAMED)
    for thing in NAMED:
        assert all(seen.split()[0] in KINDS for seen in thing.seen), thing
        assert thing.seen or thing.is_command, thing
        assert thing.runs or not (thing.after or thing.ranks > 1), thing  # else nothing starts it
