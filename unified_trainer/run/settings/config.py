"""The settings of a run: a frozen typed tree, how it is saved, and what may differ when a run is resumed."""

import dataclasses
import functools
import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
import yaml

from unified_trainer.basics.effects import ACCOUNT, READS, RUNS_CODE, RUNS_FILE, TRACKS, WRITES, Text
from unified_trainer.basics.errors import UserError
from unified_trainer.basics.input_files import YamlLoader, read_yaml
from unified_trainer.basics.own_files import without_link
from unified_trainer.basics.ranges import (
    LONGEST,
    MAY_CHANGE,
    MOST,
    Count,
    CountOrZero,
    FramesOrZero,
    Period,
    PeriodOrZero,
    PixelsOrZero,
    PositiveFraction,
    Seed,
    at_least,
)
from unified_trainer.basics.secrets import masked
from unified_trainer.basics.suggestions import must_know
from unified_trainer.data.buckets import sizes_of
from unified_trainer.data.clips import DataConfig, VideoConfig
from unified_trainer.data.ramp_up import RampUpConfig
from unified_trainer.methods.base import DeclarationError, Method, MethodConfig, place_of
from unified_trainer.models.encoders import EncoderConfig
from unified_trainer.parallel.device import Device
from unified_trainer.parallel.mesh import ParallelConfig
from unified_trainer.rewards.reward import RewardConfig, ScorerConfig
from unified_trainer.roles.role import RoleConfig
from unified_trainer.run.guards.distillation import DistillationGuardConfig
from unified_trainer.run.guards.hacking_monitor import HackingMonitorConfig
from unified_trainer.run.settings import run_paths
from unified_trainer.run.settings.settings import may_change
from unified_trainer.run.settings.workers import RayConfig, WorkerConfig
from unified_trainer.sampling.solver import SamplerConfig

RECIPES = Path(__file__).parents[2] / "recipes"
# Flags that say where a run is read from and written to; a saved config leaves them out.
PATH_KEYS = ("config", "resume", "output", "allow")
# The last line of a config.yaml, a comment, by which an edit by hand is noticed.
CHECKSUM = re.compile(r"^# sha256 of these settings: ([0-9a-f]{64})$", re.MULTILINE)
EDITED = "config"  # what --allow names to take a config.yaml that was edited by hand


class ConfigError(UserError):
    """A wrong setting; the message names the key and the way out."""


@dataclass(frozen=True)
class ValidationSampler:
    """The settings in which validations differ from the run's sampler; 0 or nothing takes the run's."""

    num_steps: CountOrZero = 0
    """Network calls per sample; 0 takes as many as sampler.num_steps."""
    step_sigmas: tuple[PositiveFraction, ...] = ()
    """Falling noise levels before the shift, one per step; empty takes sampler.step_sigmas, or even ones if num_steps
    is given."""
    shift: Annotated[float, at_least(0, 1000)] = 0.0
    """Shift of the noise levels; 0 takes sampler.shift."""
    solver: Literal["", "ode", "sde"] = ""
    """Solver, as sampler.solver; empty takes that one."""
    guidance_scale: Annotated[tuple[float, ...], at_least(0, 1000)] = ()
    """Guidance scale, or one for each expert; empty takes sampler.guidance_scale."""

    def of(self, sampler: SamplerConfig) -> SamplerConfig:
        """Return the run's sampler as it is at validations; UserError for settings that contradict each other."""
        if len(self.guidance_scale) > 2:
            raise ConfigError(f"validation.sampler.guidance_scale takes one or two numbers, not {self.guidance_scale}")
        scale = self.guidance_scale if len(self.guidance_scale) == 2 else next(iter(self.guidance_scale), None)
        kept = () if self.num_steps else sampler.step_sigmas
        steps = self.num_steps or len(self.step_sigmas) or sampler.num_steps
        run = dataclasses.replace(
            sampler,
            num_steps=steps,
            step_sigmas=self.step_sigmas or kept,
            shift=self.shift or sampler.shift,
            solver=self.solver or sampler.solver,
            guidance_scale=sampler.guidance_scale if scale is None else scale,
        )
        try:
            run.check()
        except UserError as error:
            raise ConfigError(f"validation.{error}") from error
        return run


@dataclass(frozen=True)
class ValidationConfig:
    num_samples: Annotated[int, at_least(2, MOST)] = 48
    """Videos generated and scored at each validation, from fixed prompts and noise."""
    batch: Count = 48
    """Samples generated at a time."""
    seed: Seed = 1000
    """Seed of the noise."""
    frechet_stride: Count = 4
    """Frames between two that enter the Frechet distance."""
    real_clips: Annotated[str, READS] = ""
    """Folder of real videos that the Frechet distances compare samples with, at least num_samples of them; empty
    measures the distances in the tiny world only, to clips drawn for its captions."""
    i3d: Annotated[str, RUNS_FILE] = ""
    """TorchScript file of I3D, such as StyleGAN-V's i3d_torchscript.pt: validation/fvd is then the Frechet distance of
    its features."""
    prompts: Annotated[str, READS] = ""
    """As --prompts; "tiny": captions of the tiny world that are not trained on. Empty takes the first training
    prompts."""
    prompts_column: Text = ""
    """As --prompts-column."""
    sets: Annotated[dict[str, str], READS] = field(default_factory=dict)
    """Further prompts by name, sets.NAME as --prompts: each is measured by itself with num_samples samples, as
    validation/sets/NAME/reward and so on. An empty text leaves a saved set out."""
    num_videos: CountOrZero = 4
    """First samples written as mp4 and on the contact sheet; above 0, the two best and two worst are written too."""
    ema: bool = True
    """Sample with the EMA weights if the student keeps any."""
    frames: FramesOrZero = 0
    """Pixel frames of the videos; 0 takes video.frames."""
    height: PixelsOrZero = 0
    """Height in pixels; 0 takes video.height."""
    width: PixelsOrZero = 0
    """Width in pixels; 0 takes video.width."""
    sampler: ValidationSampler = field(default_factory=ValidationSampler)


@dataclass(frozen=True)
class TrackingConfig:
    tensorboard: bool = False
    """Also write TensorBoard events into the run directory."""
    rollouts_every: PeriodOrZero = 0
    """Training steps between rollouts whose first validation.num_videos samples are written into RUN/rollouts and
    logged to the trackers; 0 shows none. Of a distillation the student's next update is shown, in RUN/matching: its
    sample x, x_tau, the x0 of teacher (real) and critic (fake), and the gradient g."""
    wandb: Annotated[Literal["off", "online", "offline"], TRACKS] = "off"
    """Also log to Weights & Biases."""
    wandb_project: Annotated[str, ACCOUNT] = "unified-trainer"
    """Project on Weights & Biases."""
    wandb_entity: Annotated[str, ACCOUNT] = ""
    """User or team that owns the project; empty is your default."""
    wandb_group: Text = ""
    """Group of runs that this one belongs to."""
    wandb_tags: tuple[Text, ...] = ()
    """Tags of the run."""
    wandb_name: Text = ""
    """Name of the run; empty takes that of the run directory."""
    swanlab: Annotated[Literal["off", "online", "offline"], TRACKS] = "off"
    """Also log to SwanLab; offline writes into the run directory."""
    swanlab_project: Annotated[str, ACCOUNT] = "unified-trainer"
    """Project on SwanLab."""
    swanlab_workspace: Annotated[str, ACCOUNT] = ""
    """User or organization that owns the project; empty is your default."""
    custom: Annotated[tuple[str, ...], RUNS_CODE] = ()
    """Trackers of your own, each path/to/file.py:Class or package.module:Class derived from
    unified_trainer.run.tracking.external.ExternalTracker."""


@dataclass(frozen=True)
class RunConfig:
    """The settings of every run; `run_class` adds those of a method and of its roles."""

    method: Annotated[str, RUNS_CODE] = "dance_grpo"
    """Method: a name, or path/to/file.py:Class or package.module:Class of your own."""
    recipe: Annotated[str, READS] = ""
    """Settings for a model: a name in unified_trainer/recipes, or path/to/file.yaml. By default tiny, while no path of
    a role is given."""
    config: Annotated[Path | None, READS] = None
    """Saved config.yaml to start from."""
    steps: Annotated[Period, MAY_CHANGE] = 60
    """Training steps; one is a rollout with its updates, or one update."""
    epochs: Annotated[CountOrZero, MAY_CHANGE] = 0
    """Passes over the prompts or clips, from which steps is then computed; 0 takes steps."""
    ramp_up: RampUpConfig = field(default_factory=RampUpConfig)
    seed: Seed = 0
    """Seed of all random numbers."""
    output: Annotated[Path | None, WRITES] = None
    """Run directory; runs/METHOD-N by default."""
    resume: Annotated[Path | None, WRITES] = None
    """Run directory to continue; auto continues the run that --output holds, or else begins it. The address of a mirror
    copies its run into --output first, or into runs/NAME."""
    allow: tyro.conf.UseAppendAction[tuple[Text, ...]] = ()
    """Setting in which --resume may differ from the saved run, or "config" if config.yaml was edited by hand;
    repeatable."""
    init_from: Annotated[str | None, READS] = None
    """RUN[@step][:ema]: a run whose newest checkpoint, or that step's, gives the weights of the trained roles; with
    :ema their EMA weights."""
    checkpoint_every: Annotated[int, at_least(-1, LONGEST), MAY_CHANGE] = 20
    """Training steps between checkpoints; the last step is saved too. 0 saves the last alone, and -1 none at all."""
    checkpoint_minutes: Annotated[float, at_least(0, MOST), MAY_CHANGE] = 0.0
    """Minutes after the last checkpoint when the next is due, besides those of checkpoint_every; the step is finished
    first. 0 counts steps alone."""
    async_save: Annotated[bool, MAY_CHANGE] = False
    """Write checkpoints from a copy in CPU memory while training goes on."""
    checkpoint_mirror: Annotated[str, MAY_CHANGE, WRITES] = ""
    """Also copy complete checkpoints into this folder of a remote storage, which no other run uses: an address such as
    s3://bucket/folder, of a kind that fsspec knows, without a password. --resume takes the same address."""
    keep_last: Annotated[Count, MAY_CHANGE] = 2
    """Newest checkpoints kept."""
    keep_best: Annotated[CountOrZero, MAY_CHANGE] = 0
    """Best checkpoints kept besides, among those saved after a validation."""
    best_metric: Annotated[Text, MAY_CHANGE] = "reward"
    """Validation metric that ranks them."""
    best_is: Annotated[Literal["highest", "lowest"], MAY_CHANGE] = "highest"
    """Order of that metric."""
    profile: Annotated[bool, MAY_CHANGE] = False
    """Trace one training step with torch's profiler, on each rank, into RUN/profile, which ui.perfetto.dev opens."""
    profile_step: Annotated[Count, MAY_CHANGE] = 2
    """Number of that step after the run is started or resumed: the first one compiles. The last one, if fewer are
    left."""
    validate_every: Annotated[PeriodOrZero, MAY_CHANGE] = 10
    """Training steps between validations; one runs before the first step and after the last too. 0 is never."""
    validate_only: Annotated[bool, MAY_CHANGE] = False
    """Load the weights, validate once and end: no training step is made, and no checkpoint."""
    report: Annotated[bool, MAY_CHANGE] = False
    """Also write report.html into the run directory when the run ends."""
    families: Annotated[tuple[str, ...], RUNS_CODE] = ()
    """Model families of your own, each path/to/file.py:NAME or package.module:NAME."""
    prompts: Annotated[str, READS] = ""
    """File with one training prompt per line, or a .json, .jsonl, .csv or .parquet file, here or on the hub as
    hf://datasets/owner/name/file; or a folder of .parquet files, whose text embeddings are used if the run's text
    encoder made them, or of videos with x.txt beside x.mp4; "tiny": captions of the tiny world. Methods that train on
    clips take the clips' captions instead."""
    prompts_column: Text = ""
    """Column of a .json, .jsonl, .csv or .parquet file; by default prompt, caption, text, cap or prompt_en."""
    launcher: Annotated[Literal["process", "ray"], MAY_CHANGE] = "process"
    """Starter of the training processes: process runs in this one, or in those of torchrun; ray starts ray.ranks."""
    device: Device = "auto"
    """Device to run on."""
    parallel: Annotated[ParallelConfig, MAY_CHANGE] = field(default_factory=ParallelConfig)
    ray: Annotated[RayConfig, MAY_CHANGE] = field(default_factory=RayConfig)
    rollouts: WorkerConfig = field(default_factory=WorkerConfig)
    video: VideoConfig = field(default_factory=VideoConfig)
    encoders: EncoderConfig = field(default_factory=EncoderConfig)
    sampler: SamplerConfig = field(default_factory=SamplerConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    data: DataConfig = field(default_factory=DataConfig)
    validation: Annotated[ValidationConfig, MAY_CHANGE] = field(default_factory=ValidationConfig)
    hacking_monitor: Annotated[HackingMonitorConfig, MAY_CHANGE] = field(default_factory=HackingMonitorConfig)
    guard: Annotated[DistillationGuardConfig, MAY_CHANGE] = field(default_factory=DistillationGuardConfig)
    tracking: Annotated[TrackingConfig, MAY_CHANGE] = field(default_factory=TrackingConfig)
    algorithm: MethodConfig = field(default_factory=MethodConfig)

    @property
    def roles(self) -> dict[str, RoleConfig]:
        """Settings of the method's roles by name, of those that have settings of their own."""
        own = {f.name for f in dataclasses.fields(self)} - {f.name for f in dataclasses.fields(RunConfig)}
        return {name: config for name, config in vars(self).items() if name in own}

    @property
    def validation_lag(self) -> int:
        """Training steps after which the result of a validation takes effect."""
        lag = self.rollouts.evaluation_lag or self.validate_every
        return lag if self.rollouts.evaluation_workers else 0

    @property
    def sequence_of_workers(self) -> int:
        """Ranks of a rollout worker that share a sample's tokens: half of all where a half has a branch of guidance."""
        ranks, sampler = self.rollouts.ranks, self.sampler
        guided = not sampler.chunks.causal and sampler.guidance_scale not in (1, (1, 1))
        return ranks // 2 if guided and ranks % 2 == 0 else ranks

    def validated(self) -> "RunConfig":
        """Return the run with the sampler and the size of its validations."""
        own = self.validation
        size = {name: value for name in ("frames", "height", "width") if (value := getattr(own, name))}
        if not size and own.sampler == ValidationSampler():
            return self
        video = dataclasses.replace(self.video, **size)
        return dataclasses.replace(self, sampler=own.sampler.of(self.sampler), video=video)

    def by_bucket(self) -> "dict[str, RunConfig]":
        """Return by name a run for each of data.buckets, with its size as video.*; without any, the run as ""."""
        if not self.data.buckets:
            return {"": self}
        shown = self.validated().video
        held = dataclasses.replace(self.validation, frames=shown.frames, height=shown.height, width=shown.width)
        sizes = zip(self.data.buckets, sizes_of(self.data, self.video), strict=True)
        return {name: dataclasses.replace(self, video=size, validation=held) for name, size in sizes}

    @property
    def guarded(self) -> bool:
        """Whether the guard of distillation watches the run."""
        return self.algorithm.teacher_guidance is not None and self.guard.action != "off"

    @property
    def trains_on(self) -> Literal["prompts", "clips", "trajectories"]:
        """The content of a batch: prompts alone, or the clips or the teacher's trajectories of data.path."""
        if self.algorithm.needs_clips:
            return "clips"
        stored = self.data.path not in ("", "tiny")  # tiny is the recipe's, for methods that train on clips
        return "trajectories" if stored and self.algorithm.teacher_ode(self.sampler) is not None else "prompts"

    def needs_role(self, name: str) -> bool:
        """Whether a role that the method declares is loaded: not the teacher whose trajectories are stored."""
        ode = self.algorithm.teacher_ode(self.sampler)
        return ode is None or self.trains_on != "trajectories" or ode.role != name


_RUN_CLASSES: dict[type[Method], type[RunConfig]] = {}  # by method: classes of equal settings are one


def run_class(method: type[Method]) -> type[RunConfig]:
    """Return the class of a method's settings: those of every run, of the method, and of each of its roles.

    DeclarationError if a role has the name of a setting.
    """
    if method in _RUN_CLASSES:
        return _RUN_CLASSES[method]
    taken = {f.name for f in dataclasses.fields(RunConfig)}
    if both := sorted(taken & method.roles.keys()):
        raise DeclarationError(
            f"{place_of(method)}: method {method.__name__} cannot call a role {both[0]!r}: that is a run's setting"
        )
    sections: dict[str, type] = {"algorithm": method.config_class}
    sections |= {name: spec.config_class for name, spec in method.roles.items() if spec.config_class}
    fields = [(name, kind, field(default_factory=kind)) for name, kind in sections.items()]
    _RUN_CLASSES[method] = dataclasses.make_dataclass("RunConfig", fields, bases=(RunConfig,), frozen=True)
    return _RUN_CLASSES[method]


def save(run: RunConfig, file: Path) -> None:
    """Write the resolved settings atomically; --config FILE runs them again.

    Over the file of a resumed run, relative paths that were found from the folder of its start stay relative.
    """
    building, tree = file.with_suffix(".tmp"), plain(run)
    if file.exists():
        tree = run_paths.as_typed(tree, flat(read_yaml(file)), file.parent)
    with without_link(building).open("w", encoding="utf-8") as opened:
        opened.write(with_checksum(yaml.safe_dump(tree, sort_keys=False)))
        opened.flush()
        os.fsync(opened.fileno())
    building.replace(file)


def with_checksum(text: str) -> str:
    """Return the text of a YAML file with its checksum as the last line."""
    return f"{text}# sha256 of these settings: {_checksum(text)}\n"


def is_edited(text: str) -> bool:
    """Return whether the settings in a YAML file are not those of its checksum; a file that was cut off has none.

    Only values count: order, comments and spaces may differ.
    """
    line = CHECKSUM.search(text)
    return line is None or line[1] != _checksum(text)


def _checksum(text: str) -> str:
    tree = YamlLoader(text).get_single_data()
    return hashlib.sha256(json.dumps(tree, sort_keys=True, default=str).encode()).hexdigest()


def plain(run: RunConfig) -> dict[str, Any]:
    """Return the settings as nested dicts of plain values, without the flags that only name places."""

    def convert(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: convert(inner) for key, inner in value.items()}
        if isinstance(value, tuple):
            return [convert(inner) for inner in value]
        return str(value) if isinstance(value, Path) else value

    return {key: value for key, value in convert(dataclasses.asdict(run)).items() if key not in PATH_KEYS}


def check_resumable(run: RunConfig, file: Path) -> list[str]:
    """Return every setting that differs from the saved run's, in words.

    ConfigError if one would change what a step computes, unless --allow names it; also if the file was edited by hand,
    unless --allow names EDITED.
    """
    saved, edited = run_paths.located(flat(read_yaml(file)), file.parent), is_edited(file.read_text(encoding="utf-8"))
    scorers = [key.split(".")[2] for key in saved if key.startswith("reward.scorers.")]
    defaults = flat(plain(type(run)(reward=RewardConfig(scorers=dict.fromkeys(scorers, ScorerConfig())))))
    new, old = flat(plain(run)), saved
    old = {key: value for key, value in defaults.items() if key in new} | old  # a setting newer than the saved file
    if run.epochs:
        new["steps"] = old["steps"]  # follows from them
    keys = sorted(old.keys() | new.keys())
    different = [key for key in keys if old.get(key) != new.get(key)]
    changed = {key: masked(f"{key}: {old.get(key)!r} -> {new.get(key)!r}") for key in different}
    allowed = {key.replace("-", "_") for key in run.allow}
    held_out = {name for name in (*scorers, *run.reward.scorers) if _held_out(name, saved) and _held_out(name, new)}
    if edited and EDITED not in allowed:
        raise ConfigError(
            f"{file} was edited by hand or cut off: undo that and give the setting as a flag, --resume {file.parent} "
            f"--KEY VALUE --allow KEY; or add --allow {EDITED}, which takes the file as it is"
        )
    if unknown := sorted(allowed - changed.keys() - ({EDITED} if edited else set())):
        raise ConfigError(f"--allow {unknown[0]}: this setting does not differ from that of --resume {file.parent}")
    free = tuple(f"reward.scorers.{name}." for name in held_out)
    refused = {
        key: words
        for key, words in changed.items()
        if not (may_change(run, key) or key in allowed or key.startswith(free))
    }
    if refused:
        raise ConfigError(
            f"--resume {file.parent} cannot change {'; '.join(refused.values())}. Leave these flags out, add "
            f"{' '.join(f'--allow {key}' for key in refused)}, or start a new run with --init-from {file.parent}"
        )
    return [*changed.values(), *([f"{file}: edited by hand"] if edited else [])]


def _held_out(name: str, settings: Mapping[str, Any]) -> bool:
    """Whether flat settings have a scorer of this name with weight 0, or none."""
    return not settings.get(f"reward.scorers.{name}.weight", 0)


def recipes() -> list[str]:
    """Return the names of the recipes."""
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


@functools.cache
def _packaged(file: Path) -> dict[str, Any]:
    """Read a recipe of this package once: one run asks for it a dozen times."""
    return read_yaml(file, "--recipe")


def load_recipe(name: str, above: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the sections of a recipe: `fits`, `common` and one for each method; ConfigError for an unknown name.

    `name` is that of a file of this package, or a path to a .yaml file. The settings of the recipe that it names as its
    `base` are filled in; `above` are the recipes that have this one below them.
    """
    file = Path(name)
    if file.suffix != ".yaml":
        must_know("--recipe", name, recipes())
        file = RECIPES / f"{name}.yaml"
    own = dict(_packaged(file) if file.parent == RECIPES else read_yaml(file, "--recipe"))
    base = own.pop("base", "")
    if not isinstance(base, str) or base in (name, *above):
        raise ConfigError(f"--recipe {file}: base must name another recipe, not {base!r}")
    for section, settings in own.items():
        if not isinstance(settings, dict):
            raise ConfigError(f"--recipe {file}: {section} must hold keys and values, not {settings!r}")
    return merged(load_recipe(base, (name, *above)), own) if base else own


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Return two trees of settings as one; where both have a value, `above` wins."""
    both = {key: merged(below[key], value) for key, value in above.items() if key in below and isinstance(value, dict)}
    return {**below, **above, **both}


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings as one mapping from keys such as student.learning_rate."""
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        leaves |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return leaves
