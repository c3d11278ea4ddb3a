"""The checkpoints of an evaluation, as they are written on the command line; no weight is read."""

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from unified_trainer.basics.errors import MissingFileError, UserError
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.run.checkpoint.init_from import roles_in
from unified_trainer.run.checkpoint.manager import Keep
from unified_trainer.run.checkpoint.manifest import (
    CheckpointError,
    digest,
    find,
    folders,
    read,
    step_of,
    weights_digest,
)
from unified_trainer.run.registry import family_of
from unified_trainer.run.settings.command_line import parse
from unified_trainer.run.settings.config import RunConfig
from unified_trainer.run.settings.fitting import recipe_to_add
from unified_trainer.run.settings.flags import split
from unified_trainer.tools.load_run import LoadedRole, load_folder, load_role

GRAMMAR = "RUN[@STEP|@best|@latest][:ema|:weights] or a model folder, then [,KEY=VALUE...] of its sampler"
SPEC = re.compile(
    r"(?P<place>.+?)(?:@(?P<step>[0-9]+|best|latest))?(?P<weights>:ema|:weights|:student)?(?P<own>(?:,\w[\w.]*=[^,]*)*)"
)
SECTIONS = ("sampler", "reward", "encoders")  # settings that flags may change
TINY = "tiny"  # the embedded model, in place of a folder
OF_TINY = ("--method", "finetune", "--recipe", TINY)
STUDENT = "student"


@dataclass(frozen=True)
class Checkpoint:
    """One row of an evaluation: weights, and the settings that they are sampled with."""

    name: str  # short and unlike those of the others
    spec: str  # RUN@STEP[:ema], or the model folder
    step: int | None  # None for a model folder
    ema: bool
    run: RunConfig
    flags: tuple[str, ...]  # that changed the run's settings
    digest: str  # of the weights: checksums of a checkpoint; names, sizes and times of a model folder's files

    def check(self) -> tuple[int, int, int, int]:
        """Return the shape of its latents; raise UserError for a sampler or a size that cannot be."""
        self.run.sampler.check()
        family, folder = family_of(STUDENT, self._path)
        video = self.run.video
        return family.latent_shape(folder, video.frames, video.height, video.width)

    @property
    def images(self) -> tuple[int, int]:
        """The fewest and the most condition images that a sample takes."""
        family, folder = family_of(STUDENT, self._path)
        return family.images(folder)

    def load(self, mesh: Mesh) -> LoadedRole:
        """Read the weights."""
        if self.step is None:
            return load_folder(self.spec, self.run, mesh)
        return load_role(self.spec, STUDENT, None, mesh, causal=True, flags=self.flags)

    @property
    def _path(self) -> str:
        return self.spec if self.step is None else self.run.roles[STUDENT].path


def read_checkpoints(texts: Sequence[str], flags: Sequence[str], recipe: str) -> tuple[Checkpoint, ...]:
    """Return the checkpoints that the command line names; UserError for one that does not exist or is named twice.

    `flags` change the settings of all. A model folder has those of `recipe`, or without one of the first run.
    """
    for name, _ in split(flags):
        if name and name.removeprefix("--").partition(".")[0] not in SECTIONS:
            raise UserError(f"{name}: evaluate changes settings of {', '.join(SECTIONS)} only; leave it out")
    if not texts:
        raise UserError("evaluate needs a checkpoint: " + GRAMMAR)
    parsed = [_Parsed.of(text) for text in texts]
    first = next((checkpoint for checkpoint in parsed if checkpoint.is_run), None)
    of_models = ["--method", "finetune", "--recipe", recipe] if recipe else []
    if first is not None and not recipe:
        of_models = ["--resume", str(first.place)]
    checkpoints: list[Checkpoint] = []
    for text, own in zip(texts, parsed, strict=True):
        found = _run(own, flags) if own.is_run else _model(own, flags, of_models)
        for other, before in zip(texts, checkpoints, strict=False):
            if (before.digest, before.run) == (found.digest, found.run):
                raise UserError(f"{text} is {other} once more: name each checkpoint once")
        checkpoints.append(found)
    return _with_names(checkpoints, texts)


@dataclass(frozen=True)
class _Parsed:
    text: str
    place: Path
    step: str  # a number, best, latest or ""
    weights: str
    own: tuple[str, ...]  # flags of its own
    is_run: bool

    @classmethod
    def of(cls, text: str) -> "_Parsed":
        """Parse a text; an existing folder with the whole text as its name is the place."""
        if "://" in text:
            raise UserError(f"{text} is an address: evaluate reads runs and model folders of this machine")
        match = None if Path(text).is_dir() else SPEC.fullmatch(text)
        parts = (
            match.groupdict(default="") if match else dict.fromkeys(("step", "weights", "own"), "") | {"place": text}
        )
        place = Path(parts["place"])
        is_run = (place / "config.yaml").is_file() or (place / "checkpoints").is_dir()
        if not is_run and parts["place"] != TINY and not (place / "model_index.json").is_file():
            what = "is neither a run directory nor a model folder" if place.is_dir() else "does not exist"
            raise MissingFileError(f"{text}: {place} {what}; write {GRAMMAR}")
        if not is_run and (parts["step"] or parts["weights"]):
            raise UserError(f"{text}: {place} is a model folder, which has no steps and no EMA weights: leave them out")
        own: list[str] = []
        for setting in filter(None, parts["own"].split(",")):
            key, _, value = setting.partition("=")
            own += [f"--sampler.{key.replace('_', '-')}", *value.split()]
        return cls(text, place, parts["step"], parts["weights"].removeprefix(":"), tuple(own), is_run)


def _run(parsed: _Parsed, flags: Sequence[str]) -> Checkpoint:
    if not (parsed.place / "config.yaml").is_file():
        raise CheckpointError(f"{parsed.place / 'config.yaml'} is missing: {parsed.text} must be a run directory")
    changed = (*flags, *parsed.own)
    run = parse(["--resume", str(parsed.place), *changed])
    step = _best(parsed, run) if parsed.step == "best" else parsed.step
    place = str(parsed.place) if step in ("", "latest") else f"{parsed.place}@{step}"
    folder, metadata = find(place)
    ema = parsed.weights == "ema"
    kind = f"{STUDENT}/{'ema' if ema else 'weights'}/"
    if STUDENT not in roles_in(metadata):
        raise CheckpointError(f"{folder} holds no weights of a student")
    if not any(name.startswith(kind) for name in metadata["files"]):
        raise CheckpointError(f"{parsed.text}: {folder} holds no EMA weights of {STUDENT}; leave :ema out")
    spec = f"{parsed.place}@{step_of(folder)}{':ema' if ema else ''}"
    return Checkpoint("", spec, step_of(folder), ema, run, changed, weights_digest(metadata, STUDENT, ema=ema))


def _best(parsed: _Parsed, run: RunConfig) -> str:
    """Return the step of the run's best checkpoint, by its own settings best_metric and best_is."""
    metrics: dict[int, dict[str, float]] = {}
    for folder in folders(parsed.place / "checkpoints"):
        metadata, fault = read(folder)
        if fault is None:
            metrics[step_of(folder)] = metadata.get("metrics") or {}
    best = Keep(1, 1, run.best_metric, run.best_is).ranked(metrics)
    if not best:
        have = ", ".join(map(str, metrics)) or "no checkpoint"
        raise CheckpointError(
            f"{parsed.text}: no checkpoint was saved after a validation that measured {run.best_metric}; name a step: "
            f"{parsed.place} has {have}"
        )
    return str(best[0])


def _model(parsed: _Parsed, flags: Sequence[str], settings: Sequence[str]) -> Checkpoint:
    if not settings and str(parsed.place) != TINY:
        recipe = recipe_to_add(STUDENT, str(parsed.place)) or "add a --recipe"
        raise UserError(f"{parsed.text} is a model folder: {recipe}, or name a run too, for sampler and video size")
    changed = (*flags, *parsed.own)
    run = parse([*(settings or OF_TINY), *changed])
    _, folder = family_of(STUDENT, str(parsed.place))
    files = {str(path.relative_to(folder)): path.stat() for path in sorted(folder.rglob("*")) if path.is_file()}
    about = {name: [stat.st_size, stat.st_mtime_ns] for name, stat in files.items()}
    return Checkpoint("", str(parsed.place), None, False, run, changed, digest({str(folder.resolve()): about}))


def _with_names(checkpoints: Sequence[Checkpoint], texts: Sequence[str]) -> tuple[Checkpoint, ...]:
    """Give each checkpoint the name of its folder with step, weights and settings; with the whole path if two agree."""
    short, whole = [], []
    for checkpoint, text in zip(checkpoints, texts, strict=True):
        own = "" if Path(text).is_dir() else "".join(text.partition(",")[1:])
        short.append(f"{Path(checkpoint.spec).name}{own}")
        whole.append(f"{checkpoint.spec}{own}")
    names = [name if short.count(name) == 1 else longer for name, longer in zip(short, whole, strict=True)]
    return tuple(dataclasses.replace(one, name=name) for one, name in zip(checkpoints, names, strict=True))
