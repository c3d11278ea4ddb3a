"""The interface of a scorer, and the settings of the scorers that a reward is made of."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from unified_trainer.basics.effects import READS, RUNS_CODE, RUNS_PROGRAM, SENDS, Text
from unified_trainer.basics.errors import UnscoredError, UserError
from unified_trainer.basics.ranges import (
    MAY_CHANGE,
    Count,
    CountOrZero,
    Finite,
    Fraction,
    Period,
    PositiveFraction,
    Range,
    Seconds,
)
from unified_trainer.basics.requests import first_images
from unified_trainer.basics.types import Latents, PerSample, Video
from unified_trainer.models.prompt_lengths import Cut
from unified_trainer.rewards.scorer_child import asks_for_images

# Videos in [0, 1] and one prompt for each -> one number for each; higher is better. A scorer raises rather than guess.
Scorer = Callable[[Video, Sequence[str]], PerSample]
Frames = Literal["", "first", "several", "every", "all"]
SEVERAL, OF_SEVERAL = 8, dict[str, Frames](vlm="several", vlm_pairs="several")  # frames, and kinds that see them
SERVED, RETRIES = ("http", *OF_SEVERAL), 5  # kinds that ask a server, and the retries of their faults
Features = Callable[[Float[Tensor, "b 3 h w"]], Float[Tensor, "b d"]]  # rows that a Frechet distance compares


@dataclass(frozen=True)
class ScorerConfig:
    """The settings of one scorer of a reward."""

    kind: Annotated[str, RUNS_CODE] = ""
    """Kind of scorer: a name in docs/rewards.md, or path/to/file.py:NAME or package.module:NAME of your own; by default
    the name that the scorer has in reward.scorers."""
    path: Annotated[str, READS] = ""
    """Folder of the weights, for kinds that have some, or for networks of CLIP and DINO a hub id owner/name[@revision];
    "tiny" is the embedded HPSv3."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Precision of the backbone."""
    frames: Frames = ""
    """Frames that are scored: the first, several (at most 8, evenly spaced), every frame_stride-th, or all; by default
    several for vlm and vlm_pairs, and else the first. Scorers of images give the mean over them."""
    top_fraction: PositiveFraction = 1.0
    """Fraction of the scored frames, those of the highest scores, that a scorer of images averages; 1 is the mean."""
    frame_stride: Count = 8
    """Distance of the scored frames with frames = every; the first frame is always scored."""
    scale: Annotated[float, Range(never=(0,))] = 1.0
    """Factor of the score; scale x score is logged and weighted."""
    weight: Finite = 1.0
    """Weight in the reward, which is a weighted sum; 0 holds the scorer out: it is measured at validations only."""
    batch: Count = 64
    """Images scored at a time."""
    device: Text = ""
    """Device of the scorer's network, as torch names it; empty is the device of the run."""
    python: Annotated[str, RUNS_PROGRAM] = ""
    """Python executable that runs the scorer in a process of its own, with the packages of that Python, such as
    venv/bin/python; for kinds of the form path/to/file.py:NAME."""
    python_variables: Annotated[tuple[str, ...], SENDS] = ()
    """Environment variables that the scorer's own Python gets besides the usual ones of docs/rewards.md, such as
    HF_TOKEN."""
    processes: Annotated[CountOrZero | None, MAY_CHANGE] = None
    """Processes in which ocr, or a function or class of path/to/file.py:NAME, scores videos one by one while further
    samples are made. By default 0; for ocr one for each core of a rank but one, at most 8."""
    settings: dict[str, str] = field(default_factory=dict)
    """Settings of the kind's own, settings.KEY; docs/rewards.md lists those of each kind."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of `precision`."""
        return torch.bfloat16 if self.precision == "bf16" else torch.float32

    def stride(self, frames: int) -> int:
        """Return the stride of the frames that are scored in a video of `frames` frames; the first is always one."""
        first, several = max(frames, 1), max(1, -(-frames // SEVERAL))
        return {"": first, "first": first, "several": several, "every": self.frame_stride, "all": 1}[self.frames]


@dataclass(frozen=True)
class RewardConfig(ScorerConfig):
    """The settings of a reward: those of its first scorer, and of more scorers by name."""

    kind: Annotated[str, RUNS_CODE] = ""
    """Kind of the first scorer, which the settings at this level describe. The scorer is called by its kind, or by NAME
    for file.py:NAME. By default hpsv3 if a path is given; without kind and path there is no first scorer."""
    path: Annotated[str, READS] = ""
    """Folder of the first scorer's weights; "tiny" is the embedded HPSv3, others are written by import-hpsv3."""
    scorers: dict[str, ScorerConfig] = field(default_factory=dict)
    """Further scorers by name: scorers.NAME.weight and so on."""
    allow_negative: bool = False
    """Accept scorers whose scale x weight sum to less than 0: the student then learns to lower their scores."""
    offload: Annotated[bool, MAY_CHANGE] = False
    """Keep the networks of the scorers that declare theirs (docs/rewards.md) in pinned CPU memory, copied to the device
    while samples are scored: once for all samples of a training step, which are then all made first. Changes no
    result."""
    statistics_every: Annotated[Period, MAY_CHANGE] = 1
    """Training steps from one with pixel statistics of its rollout (pixels/NAME) to the next. The hacking monitor reads
    those of validations, which are always computed, and the diversity of every training step."""
    retries: Annotated[CountOrZero | None, MAY_CHANGE] = None
    """Calls of a scorer that are repeated after a fault of its device, disk or connection: after half a second, and
    after twice as long each time, a minute at most. By default 5 for scorers that ask a server, and 0 for others."""
    unscored: Annotated[Fraction, MAY_CHANGE] = 0.01
    """Share of the samples of a training step or validation, rounded up, that a scorer may leave without a score; more
    end the run. Their groups are left out of the step, and their numbers out of the validation's means."""
    timeout: Annotated[Seconds, MAY_CHANGE] = 600.0
    """Seconds within which a scorer must answer a call, and one with a Python of its own must load; scorers that ask a
    server have settings.timeout instead."""

    @property
    def first(self) -> str:
        """The name of the first scorer: its kind, or NAME of a kind package.module:NAME or path/to/file.py:NAME.

        It is empty if there is no first scorer.
        """
        kind = self.kind or ("hpsv3" if self.path else "")
        return kind.rpartition(":")[2]

    def named(self) -> dict[str, ScorerConfig]:
        """Return every scorer's settings by its name, with kind and frames filled in; none without a reward."""
        own = {f.name: getattr(self, f.name) for f in fields(ScorerConfig)}
        first = ScorerConfig(**own | {"kind": self.kind or self.first})
        rest = {name: replace(config, kind=config.kind or name) for name, config in self.scorers.items()}
        parts = {self.first: first, **rest} if self.first else rest
        return {n: replace(part, frames=part.frames or OF_SEVERAL.get(part.kind, "first")) for n, part in parts.items()}

    def key(self, name: str) -> str:
        """Return the setting under which a scorer is described, for messages."""
        return "reward" if name == self.first else f"reward.scorers.{name}"

    def check(self) -> None:
        """Raise UserError, naming the key, unless the scorers fit each other; called before any weight is read."""
        if self.first in self.scorers:
            raise UserError(
                f"reward.scorers.{self.first} has the name of the scorer that reward.path, reward.weight and so on "
                f"describe: set those, or give this one another name and kind {self.first}"
            )
        scorers = self.named()
        if scorers and not any(config.weight for config in scorers.values()):
            raise UserError(
                f"every scorer has weight 0 ({', '.join(scorers)}): there is no reward; set reward.weight or a "
                "reward.scorers.NAME.weight"
            )
        total = sum(config.scale * config.weight for config in scorers.values())
        if total < 0 and not self.allow_negative:
            listed = ", ".join(f"{name} {config.scale * config.weight:g}" for name, config in scorers.items())
            raise UserError(
                f"scale x weight of the scorers sum to {total:g} ({listed}): the student would learn to lower their "
                "scores; change a sign, or set --reward.allow-negative"
            )


@dataclass(frozen=True)
class NetworkScorer:
    """A scorer that declares the networks that it runs; it finds their device by their weights, at each call."""

    score: Scorer
    networks: tuple[nn.Module, ...]

    def __call__(self, video: Video, prompts: Sequence[str]) -> PerSample:
        return self.score(video, prompts)


def with_images(scorer: Scorer) -> Scorer:
    """Return the scorer, or one that gives it `images` if its function has such a parameter behind videos and prompts.

    They are the condition images of the prompts at the size of the videos, in [0, 1], [b, 3, height, width], on the
    device of the videos; None where a prompt has no image.
    """
    asking = scorer.score if isinstance(scorer, NetworkScorer) else scorer
    if not asks_for_images(asking):
        return scorer

    def score(video: Video, prompts: Sequence[str]) -> PerSample:
        images = first_images(prompts, *video.shape[-2:])
        return asking(video, prompts, images=None if images is None else images.to(video.device))  # type: ignore[call-arg]

    return score


@dataclass(frozen=True)
class ApartScorer:
    """A scorer whose work is done in another process: its calls may come from another thread, one at a time."""

    scorer: Scorer

    def __call__(self, video: Video, prompts: Sequence[str]) -> PerSample:
        return self.scorer(video, prompts)


@dataclass(frozen=True)
class LatentScorer:
    """A scorer that reads clean latents where others read videos: only a LatentReward can call it."""

    scorer: Callable[[Latents, Sequence[str]], PerSample]

    def __call__(self, video: Video, prompts: Sequence[str]) -> PerSample:
        raise UserError("this scorer reads latents, but here are videos alone: leave it out")


@dataclass(frozen=True)
class PromptRules:
    """The demands of a scorer on prompts, known before a run."""

    special: Sequence[str] = ()  # texts that no prompt may hold
    cleaned: Callable[[str], str] = str  # a prompt as the scorer reads it, which `special` is looked for in
    fault: Callable[[str], str] = lambda prompt: ""  # why it cannot score a prompt; "" if it can
    cut: Callable[[Sequence[str]], Cut] | None = None  # which prompts are longer than it reads


@dataclass(frozen=True)
class ScorerKind:
    """A kind of scorer: how its settings are checked and how it is loaded.

    A module-level object of this class, in a file that a setting names as path/to/file.py:NAME, is all that a new kind
    needs; those of this folder have a name in scorers.py.
    """

    name: str  # the value of `kind` in the settings
    # reads the weights of `config.path`; the device is given. A NetworkScorer declares its networks for reward.offload
    load: Callable[[ScorerConfig, torch.device], Scorer]
    # (config, key, frames of a video): raises UserError, naming the key, for settings that cannot be; reads no weights.
    check: Callable[[ScorerConfig, str, int], None]
    min_frames: int = 1  # frames of a video that a score needs
    # patterns of the files that it reads of a repository on the hub; () for a kind whose path is no hub id
    files: tuple[str, ...] = ()
    features: Callable[[Any], Features] | None = None  # of a loaded scorer: image features for the Frechet distance
    per_frame: bool = False  # whether it scores images and reads `config.top_fraction`
    own_settings: bool = False  # whether it reads `config.settings`
    own_timeout: bool = False  # whether its calls end by themselves, so that reward.timeout does not count
    apart: bool = False  # whether it scores in another process, which samples need not wait for; with own_timeout only
    of_groups: bool = False  # whether it compares the samples of a prompt: a call of training then has whole groups
    of_latents: bool = False  # whether it reads clean latents in place of videos; `frames` then counts latent frames
    prompt_rules: Callable[[ScorerConfig], PromptRules] | None = None  # reads the tokenizer, and no weights
    program: str = ""  # path/to/file.py:NAME of what scores in another process, if it can
    cpu_seconds: float = 0.0  # of a frame on one core, for a kind that scores each for itself and so in processes
    declared: type | None = None  # the dataclass of `config.settings`


def or_unscored(answers: Sequence[float | str], device: torch.device) -> PerSample:
    """Return the numbers of samples; raise UnscoredError if some are the reason why there is none."""
    if reasons := [answer for answer in answers if isinstance(answer, str)]:
        raise UnscoredError(reasons[0], [None if isinstance(answer, str) else answer for answer in answers])
    return torch.tensor(answers, dtype=torch.float32, device=device)


def check_path(config: ScorerConfig, key: str, frames: int) -> None:
    """Check a kind whose weights are in a folder: raise UserError unless `path` is given."""
    if config.path in ("", "tiny"):
        raise UserError(f"{key}.path must be the folder of a {config.kind} scorer, not {config.path!r}")


def check_no_weights(config: ScorerConfig, key: str, frames: int) -> None:
    """Check a kind without weights: raise UserError for a path or a device, which it would not use."""
    for name, value in (("path", config.path), ("device", config.device)):
        if value:
            raise UserError(f"{key}.{name} {value}: {config.kind} has no weights; leave it out, or set it to ''")


def check_pixels(images: Float[Tensor, "b 3 h w"], network: str) -> None:
    """Raise ValueError, which names the network and the image, for an image outside [0, 1]."""
    low, high = images.flatten(1).amin(1), images.flatten(1).amax(1)
    for i in (~((low >= 0) & (high <= 1))).nonzero().flatten().tolist():
        raise ValueError(f"{network}: image {i} spans {float(low[i])}..{float(high[i])}, expected values in [0, 1]")


def of_images(
    score: Callable[[Float[Tensor, "b 3 h w"], list[str]], PerSample], batch: int, top_fraction: float = 1.0
) -> Scorer:
    """Return a scorer of videos that averages a scorer of images over the frames, `batch` images at a time.

    Of n frames, the max(1, round(top_fraction n)) highest scores are averaged.
    """

    def scorer(video: Video, prompts: Sequence[str]) -> PerSample:
        frames = video.movedim(2, 1)
        images, captions = frames.flatten(0, 1), [p for p in prompts for _ in range(frames.shape[1])]
        parts = [score(images[i : i + batch], captions[i : i + batch]) for i in range(0, len(images), batch)]
        scored = torch.cat(parts)
        if len(scored) != len(images):
            raise ValueError(f"the scorer gave {len(scored)} scores for {len(images)} images")
        of_frames = scored.float().unflatten(0, frames.shape[:2])
        if top_fraction == 1:
            return of_frames.mean(1)
        return of_frames.topk(max(1, round(top_fraction * frames.shape[1])), dim=1).values.mean(1)

    return scorer
