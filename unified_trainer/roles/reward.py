"""The reward role: decodes what the student made, and a weighted set of scorers judges some of its frames."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from unified_trainer.models.base import Codec
from unified_trainer.numerics.advantages import Ids, spread
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.rewards.pixels import diversity, statistics, thumbnail
from unified_trainer.types import Latents, PerSample, Video

# Videos in [0, 1] and their prompts to one number for each; raises rather than guess.
Scorer = Callable[[Video, Sequence[str]], PerSample]
FAULTS = (OSError, RuntimeError)  # of a device, a disk or a connection: what may go well when asked again


@dataclass(frozen=True)
class ScorerConfig:
    kind: str = ""  # of scorer: see docs/rewards.md; by default the name that it has in reward.scorers
    path: str = ""  # folder of its weights, if it has any; "tiny" is the embedded HPSv3
    precision: Literal["fp32", "bf16"] = "fp32"  # of its backbone
    frames: Literal["first", "every", "all"] = "first"  # which frames are scored; single images count by their mean
    frame_stride: int = 8  # with frames = every: every so many frames, the first included
    scale: float = 1.0  # what is logged and weighted is the score times this
    weight: float = 1.0  # in the reward, which is the weighted sum; 0 holds the scorer out: a witness in validation
    batch: int = 64  # images scored at a time
    device: str = ""  # where its network runs, as torch names it; empty is where the run does


@dataclass(frozen=True)
class RewardConfig(ScorerConfig):
    kind: str = "hpsv3"  # of the first scorer, which these settings describe; it is also its name
    path: str = "tiny"  # its folder: an HPSv3 folder as import-hpsv3 makes it; "tiny" is the embedded one
    scorers: dict[str, ScorerConfig] = field(default_factory=dict)  # more, each by its name: scorers.NAME.weight ...
    retries: int = 0  # how often a scorer is asked again when its device, disk or connection fails it

    def named(self) -> dict[str, ScorerConfig]:
        """Every scorer with its kind filled in."""
        first = ScorerConfig(**{f.name: getattr(self, f.name) for f in fields(ScorerConfig)})
        rest = {name: replace(config, kind=config.kind or name) for name, config in self.scorers.items()}
        return {self.kind: first, **rest}

    def check(self) -> None:
        """Raise ValueError, naming the key, for what cannot be; called before any weight is loaded."""
        if self.kind in self.scorers:
            raise ValueError(
                f"reward.scorers.{self.kind} has the name of the scorer that reward.path, reward.weight and so on "
                f"describe: set those, or give this one another name and kind {self.kind}"
            )
        for name, config in self.named().items():
            key = "reward" if name == self.kind else f"reward.scorers.{name}"
            if config.frame_stride < 1 or config.batch < 1:
                raise ValueError(f"{key}.frame_stride and {key}.batch must be at least 1")
            if not (math.isfinite(config.weight) and math.isfinite(config.scale)):
                raise ValueError(f"{key}.weight and {key}.scale must be finite numbers")
        weights = {name: config.weight for name, config in self.named().items()}
        if abs(sum(weights.values())) < 1e-9 * max(1.0, *map(abs, weights.values())):
            said = ", ".join(f"{name} {weight:g}" for name, weight in weights.items())
            raise ValueError(
                f"the weights of the reward sum to zero ({said}): what all its scorers like would count for nothing; "
                "change reward.weight or a reward.scorers.NAME.weight"
            )
        if self.retries < 0:
            raise ValueError(f"reward.retries must not be negative, but is {self.retries}")


@dataclass(frozen=True)
class Scores:
    """What the scorers and the pixels say of b samples."""

    parts: Float[Tensor, "b r"]  # scale x score, a column for each scorer of the reward
    statistics: dict[str, PerSample]  # of the frames that were decoded
    thumbnails: Float[Tensor, "b d"]

    @classmethod
    def cat(cls, rows: Sequence["Scores"]) -> "Scores":
        names = rows[0].statistics
        return cls(
            torch.cat([row.parts for row in rows]),
            {name: torch.cat([row.statistics[name] for row in rows]) for name in names},
            torch.cat([row.thumbnails for row in rows]),
        )

    def take(self, rows: Sequence[int]) -> "Scores":
        """These samples, in this order."""
        index = list(rows)
        measured = {name: values[index] for name, values in self.statistics.items()}
        return Scores(self.parts[index], measured, self.thumbnails[index])

    def everywhere(self, mesh: Mesh) -> "Scores":
        """Those of all ranks, in float64."""
        measured = {name: mesh.gather(values.double()) for name, values in self.statistics.items()}
        return Scores(mesh.gather(self.parts.double()), measured, mesh.gather(self.thumbnails.double()))


class Reward:
    """The weighted sum of the scorers' numbers, one for each sample."""

    def __init__(self, scorers: Mapping[str, Scorer], codec: Codec, config: RewardConfig) -> None:
        """`scorers` has one for each name of the config, held-out ones too."""
        config.check()
        self.scorers, self.config, self._codec, self._configs = dict(scorers), config, codec, config.named()
        if scorers.keys() != self._configs.keys():
            raise ValueError(f"reward: scorers {', '.join(scorers)} for settings of {', '.join(self._configs)}")
        self.weights = {name: part.weight for name, part in self._configs.items() if part.weight}
        self.held_out = tuple(name for name, part in self._configs.items() if not part.weight)
        self.retried = 0  # times that a scorer was asked again, on this rank

    @torch.no_grad()
    def judge(self, x0: Latents, prompts: tuple[str, ...]) -> Scores:
        """What the reward is made of, for clean latents, and what their decoded frames look like.

        The first frame is the first latent frame alone: the codec is causal.
        """
        video = self._decode(x0)
        return Scores(self.parts(video, prompts, self.weights), statistics(video), thumbnail(video))

    def score(self, x0: Latents, prompts: tuple[str, ...]) -> PerSample:
        """Reward of clean latents."""
        return self.total(self.judge(x0, prompts).parts)

    def score_with_gradient(self, x0: Latents, prompts: tuple[str, ...]) -> PerSample:
        """The same with its gradient, through the decoder and the scorers; ValueError if none of them has one."""
        reward = self.total(self.parts(self._decode(x0), prompts, self.weights))
        if not reward.requires_grad:
            raise ValueError(
                f"reward: none of {', '.join(self.weights)} has a gradient: take another method or reward.kind"
            )
        return reward

    def _decode(self, x0: Latents) -> Video:
        first = all(self._configs[name].frames == "first" for name in self.weights)
        return self._codec.decode(x0[:, :, :1] if first else x0)

    @torch.no_grad()
    def score_video(self, video: Video, prompts: tuple[str, ...]) -> PerSample:
        """Reward of decoded video."""
        return self.total(self.parts(video, prompts, self.weights))

    def parts(self, video: Video, prompts: tuple[str, ...], names: Iterable[str]) -> Float[Tensor, "b r"]:
        """scale x score by each of the named scorers; ValueError on another count, or on a score that is not finite."""
        if len(video) != len(prompts):
            raise ValueError(f"reward: {len(video)} videos but {len(prompts)} prompts")
        return torch.stack([self._part(name, video, prompts) for name in names], 1)

    def total(self, parts: Float[Tensor, "b r"]) -> PerSample:
        """The reward, of the parts in the order of `weights`."""
        return parts @ parts.new_tensor(list(self.weights.values()))

    def metrics(self, scores: Scores, ids: Ids) -> dict[str, float]:
        """The means of all parts and of the pixels' statistics, and the spread within groups of both."""
        found = {}
        for name, part in zip(self.weights, scores.parts.unbind(1), strict=True):
            found[f"reward/{name}"] = part.mean().item()
            found[f"reward/{name}_std_in_groups"] = spread(part, ids)[0]
        found |= {f"pixels/{name}": values.mean().item() for name, values in scores.statistics.items()}
        apart = diversity(scores.thumbnails, ids)
        if apart is not None:
            found["pixels/diversity"] = apart
        return found | ({"reward/retried": float(self.retried)} if self.config.retries else {})

    def _part(self, name: str, video: Video, prompts: tuple[str, ...]) -> PerSample:
        config = self._configs[name]
        stride = {"first": video.shape[2], "every": config.frame_stride, "all": 1}[config.frames]
        score = self._ask(name, video[:, :, ::stride], prompts)
        if len(score) != len(video):
            raise ValueError(f"reward: {name} gave {len(score)} scores for {len(video)} videos")
        score = config.scale * score.to(video.device, torch.float32)
        if not bool(score.isfinite().all()):
            bad = int((~score.isfinite()).nonzero()[0, 0])
            raise ValueError(f"reward: {name}: the score of sample {bad} ({prompts[bad]!r}) is not finite")
        return score

    def _ask(self, name: str, clips: Video, prompts: tuple[str, ...]) -> PerSample:
        """Ask until it answers, `retries` times again at most; a wrong input is not asked about again."""
        attempts = 1
        while True:
            try:
                return self.scorers[name](clips, prompts)
            except FAULTS as fault:
                if attempts > self.config.retries:
                    said = f"reward: {name} failed {attempts} times, at last with {fault!r}; mend it, or raise"
                    raise RuntimeError(f"{said} reward.retries") from fault
                attempts += 1
                self.retried += 1


def of_images(score: Callable[[Float[Tensor, "b 3 h w"], list[str]], PerSample], batch: int) -> Scorer:
    """A scorer of images, so many at a time, as one of videos: the mean over their frames."""

    def scorer(video: Video, prompts: Sequence[str]) -> PerSample:
        frames = video.movedim(2, 1)
        images, captions = frames.flatten(0, 1), [p for p in prompts for _ in range(frames.shape[1])]
        parts = [score(images[i : i + batch], captions[i : i + batch]) for i in range(0, len(images), batch)]
        scored = torch.cat(parts)
        if len(scored) != len(images):
            raise ValueError(f"the scorer gave {len(scored)} scores for {len(images)} images")
        return scored.float().unflatten(0, frames.shape[:2]).mean(1)

    return scorer
