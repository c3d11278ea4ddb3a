"""The reward role: it decodes the student's samples and scores their frames with a weighted set of scorers."""

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from unified_trainer.basics.errors import NotFiniteError, UnscoredError, UserError, working_on
from unified_trainer.basics.terminal import say
from unified_trainer.basics.types import Latents, PerSample, Video, check_finite, take_rows
from unified_trainer.models.base import Codec
from unified_trainer.numerics.advantages import Ids, spread
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.parallel.meter import phase
from unified_trainer.rewards.base import RETRIES, SERVED, ApartScorer, RewardConfig, Scorer, ScorerConfig, of_images
from unified_trainer.rewards.offloaded import OffloadedScorer
from unified_trainer.rewards.pixels import diversity, statistics, thumbnail
from unified_trainer.rewards.scorer_pool import ScorerPool

__all__ = ["Reward", "RewardConfig", "RewardSum", "Scorer", "ScorerConfig", "Scores", "VideoReward", "of_images"]

FAULTS = (OSError, RuntimeError)  # of a device, a disk or a connection: another call may succeed
LATER = threading.Event()  # never set: its wait lets signals through
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 60.0  # seconds before a call is repeated: twice as many after each fault
PROMPTS_NAMED = 3  # prompts that the traceback of a scorer names


@dataclass(frozen=True)
class Scores:
    """The scores and pixel statistics of b samples."""

    parts: Float[Tensor, "b r"]  # scale x score, a column for each scorer of the reward
    statistics: dict[str, PerSample]  # of the frames that were decoded; none where they were not computed
    thumbnails: Float[Tensor, "b d"]

    @classmethod
    def cat(cls, rows: Sequence["Scores"]) -> "Scores":
        """Concatenate samples, in order."""
        names = rows[0].statistics
        return cls(
            torch.cat([row.parts for row in rows]),
            {name: torch.cat([row.statistics[name] for row in rows]) for name in names},
            torch.cat([row.thumbnails for row in rows]),
        )

    def take(self, rows: Sequence[int]) -> "Scores":
        """Select samples, in this order."""
        index = list(rows)
        measured = {name: take_rows(values, index) for name, values in self.statistics.items()}
        return Scores(take_rows(self.parts, index), measured, take_rows(self.thumbnails, index))

    def gathered(self, mesh: Mesh) -> "Scores":
        """Gather the scores of all ranks, in float64 on the CPU; everything leaves the device in one copy."""
        columns = [self.parts, *(values[:, None] for values in self.statistics.values()), self.thumbnails]
        rows = mesh.gather(torch.cat([column.float() for column in columns], 1)).cpu().double()
        parts, *measured, thumbnails = rows.split([column.shape[1] for column in columns], 1)
        named = zip(self.statistics, measured, strict=True)
        return Scores(parts, {name: column.squeeze(1) for name, column in named}, thumbnails)


class RewardSum:
    """The arithmetic of a reward: the weighted sum of its scorers' scores, and their metrics. It needs no scorer."""

    def __init__(self, config: RewardConfig) -> None:
        """Raise UserError for settings that cannot be."""
        config.check()
        self.config, self._configs = config, config.named()
        self.reason = ""  # why a sample was not scored last, in this process
        self.weights = {name: part.weight for name, part in self._configs.items() if part.weight}
        self.held_out = tuple(name for name, part in self._configs.items() if not part.weight)

    def total(self, parts: Float[Tensor, "b r"], prompts: Sequence[str] = (), first: int = 0) -> PerSample:
        """Return the rewards: the weighted sum of parts in the order of `weights`; NotFiniteError as `check_real`."""
        weights = parts.new_tensor(list(self.weights.values()))
        rewards, names = parts @ weights, list(self.weights)
        check_real(rewards, lambda row: f"{names[int((parts[row] * weights).abs().argmax())]}: ", prompts, first)
        return rewards

    def partial_total(self, parts: Float[Tensor, "b r"], prompts: Sequence[str] = (), first: int = 0) -> PerSample:
        """Return what `total` does, and NaN for samples without a score."""
        lost = parts.isnan().any(1)
        return self.total(parts.masked_fill(lost[:, None], 0.0), prompts, first).masked_fill(lost, math.nan)

    def count_unscored(self, parts: Float[Tensor, "all r"]) -> dict[str, float]:
        """Return how many samples have no score, if some; UserError for more than `unscored` allows, or for all."""
        lost, count, share = int(parts.isnan().any(1).sum()), len(parts), self.config.unscored
        if lost > min(math.ceil(share * count), count - 1):
            raise UserError(
                f"reward: {lost} of {count} samples cannot be scored, more than reward.unscored {share:g} allows"
                f"{self.reason and f': {self.reason}'}"
            )
        return {"reward/unscored": float(lost)} if lost else {}

    def metrics(self, scores: Scores, ids: Ids) -> dict[str, float]:
        """Return means over the samples: of each part with its standard deviation within groups, and of the pixels.

        Statistics within groups are absent if every group has one sample.
        """
        found = {}
        for name, part in zip(self.weights, scores.parts.unbind(1), strict=True):
            found[f"reward/{name}"] = part.mean().item()
            if (in_groups := spread(part, ids)[0]) is not None:
                found[f"reward/{name}_std_in_groups"] = in_groups
        found |= {f"pixels/{name}": values.mean().item() for name, values in scores.statistics.items()}
        apart = diversity(scores.thumbnails, ids)
        return found if apart is None else found | {"pixels/diversity": apart}


class VideoReward(RewardSum):
    """The reward of decoded videos: its scorers, and the weighted sum of their scaled scores."""

    def __init__(self, scorers: Mapping[str, Scorer], config: RewardConfig) -> None:
        """Take a scorer for each name of the config, held-out ones too; raise UserError for settings that cannot be."""
        super().__init__(config)
        self.scorers = dict(scorers)
        if scorers.keys() != self._configs.keys():
            raise ValueError(f"reward: scorers {', '.join(scorers)} for settings of {', '.join(self._configs)}")
        self._repeated: list[str] = []  # scorers whose calls were repeated after a fault, in this process

    @property
    def retried(self) -> int:
        """Calls that were repeated after a fault, in this process."""
        return len(self._repeated)

    @contextmanager
    def in_use(self, names: Iterable[str]) -> Iterator[None]:
        """Keep the networks of the named scorers on the device, where they are elsewhere between uses."""
        with ExitStack() as stack:
            for name in names:
                if isinstance(scorer := self.scorers[name], OffloadedScorer):
                    stack.enter_context(scorer.in_use())
            yield

    @phase("score")
    def parts(self, video: Video, prompts: tuple[str, ...], names: Iterable[str]) -> Float[Tensor, "b r"]:
        """Return scale x score of decoded videos, a column for each named scorer.

        Raise UserError unless a scorer gives one real number for each video, NotFiniteError for one that is not finite.
        """
        if len(video) != len(prompts):
            raise ValueError(f"reward: {len(video)} videos but {len(prompts)} prompts")
        columns = [self._part(name, video, prompts) for name in names]
        return torch.stack(columns, 1) if columns else video.new_zeros(len(video), 0)

    def _part(self, name: str, video: Video | Latents, prompts: tuple[str, ...]) -> PerSample:
        config, version = self._configs[name], _version(video)
        score = self._call(name, video[:, :, :: config.stride(video.shape[2])], prompts)
        if _version(video) != version:
            raise UserError(
                f"reward: {name} changed the videos that it was given, which other scorers read too: let it work on "
                "videos.clone()"
            )
        wanted = f"expected one real number for each of {len(video)} videos"
        if not isinstance(score, Tensor):
            raise UserError(f"reward: {name} gave a {type(score).__name__}, {wanted}")
        if score.ndim != 1 or len(score) != len(video):
            raise UserError(f"reward: {name} gave scores of shape {list(score.shape)}, {wanted}")
        if score.is_complex() or score.dtype == torch.bool:
            raise UserError(f"reward: {name} gave scores of type {str(score.dtype).removeprefix('torch.')}, {wanted}")
        score = config.scale * score.to(video.device, torch.float32)
        if not bool(score.isfinite().all()):
            bad = int((~score.isfinite()).nonzero()[0, 0])
            raise NotFiniteError(f"reward: {name}: the score of sample {bad} ({prompts[bad]!r}) is not finite")
        return score

    def _call(self, name: str, clips: Video | Latents, prompts: tuple[str, ...]) -> object:
        """Call a scorer, and again after a fault and a pause, `retries` times at most."""
        named = ", ".join(map(repr, prompts[:PROMPTS_NAMED])) + (", ..." if len(prompts) > PROMPTS_NAMED else "")
        calls, retries = 1, self.config.retries
        if retries is None:
            retries = RETRIES if self._configs[name].kind in SERVED else 0
        with working_on(f"scorer {name}, prompts {named}"):
            while True:
                try:
                    return self.scorers[name](clips, prompts)
                except UserError:
                    raise
                except SystemExit as ended:
                    raise RuntimeError(
                        f"the scorer called sys.exit({ended.code!r}), which would end the run"
                    ) from ended
                except FAULTS as fault:
                    if calls > retries and isinstance(fault, TimeoutError):
                        raise UserError(f"{fault}; asked {calls} time{'s' * (calls > 1)} (reward.retries)") from fault
                    if calls > retries:
                        fault.add_note(
                            f"reward: scorer {name} failed {calls} time{'s' * (calls > 1)}; a fault that may pass is "
                            "retried with a higher reward.retries"
                        )
                        raise
                    LATER.wait(pause_after(calls))
                    calls += 1
                    self._repeated.append(name)  # from any thread


def check_real(rewards: PerSample, of: Callable[[int], str], prompts: Sequence[str], first: int) -> None:
    """Raise NotFiniteError for a reward that is not finite in float32: sums of squares of larger ones are not either.

    It names the row's origin as `of` says, and its prompt if it is one of `prompts`, those of the rows from `first` on.
    """
    if not bool(rewards.float().isfinite().all()):
        row = int((~rewards.float().isfinite()).nonzero()[0, 0])
        shown = f" ({prompts[row - first]!r})" if 0 <= row - first < len(prompts) else ""
        raise NotFiniteError(
            f"reward: {of(row)}the reward of sample {row}{shown} is not finite in float32: {float(rewards[row]):g}"
        )


def pause_after(faults: int) -> float:
    """Return the seconds before a call is repeated after so many faults: a server that restarts needs some."""
    return min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** min(faults - 1, 60))


def _version(video: Tensor) -> int:
    """Return how often a video, or a part of it, was changed in place; inference tensors do not count it."""
    return 0 if video.is_inference() else video._version


class Reward(VideoReward):
    """The reward of a sample: its latents are decoded, and the video is scored.

    `rewards.latents.reward_of` makes one that fits its scorers.
    """

    def __init__(self, scorers: Mapping[str, Scorer], codec: Codec, config: RewardConfig) -> None:
        """Take the scorers as `VideoReward` does, and the codec that decodes."""
        super().__init__(scorers, config)
        self._codec = codec
        # whether scorers have networks in CPU memory, and whether some are asked in another process
        self.offloaded = any(isinstance(self.scorers[name], OffloadedScorer) for name in self.weights)
        self.apart = [name for name in self.weights if isinstance(self.scorers[name], ApartScorer)]
        self._thread = ThreadPoolExecutor(1, "apart") if self.apart else None  # one call at a time, in their order

    def _part(self, name: str, video: Video | Latents, prompts: tuple[str, ...]) -> PerSample:
        try:
            return super()._part(name, video, prompts)
        except UnscoredError as error:
            if not self.config.unscored or len(error.scores) != len(video):
                raise
            self.reason = f"{name}: {error}"
            say(f"reward: {self.reason}")
            scores = [math.nan if score is None else score for score in error.scores]
            return self._configs[name].scale * torch.tensor(scores, dtype=torch.float32, device=video.device)

    def close(self) -> None:
        """End the pools of processes, also in the middle of a call."""
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)
        for scorer in self.scorers.values():
            if isinstance(scorer, ApartScorer) and isinstance(scorer.scorer, ScorerPool):
                scorer.scorer.close()

    @contextmanager
    def scoring(self) -> Iterator[None]:
        """Keep the VAE and the networks of the reward on the device while many samples are scored."""
        with self._codec.in_use(), self.in_use(self.weights):
            yield

    def parts_of(
        self, x0: Latents, video: Video, prompts: tuple[str, ...], names: Iterable[str]
    ) -> Float[Tensor, "b r"]:
        """Return what `parts` does, of samples whose latents are known besides their videos."""
        return self.parts(video, prompts, names)

    @torch.no_grad()
    def score(self, x0: Latents, prompts: tuple[str, ...], step: int = 0) -> Scores:
        """Decode clean latents and score them; `total` of the parts is the reward.

        Where all scorers look at the first frame alone, only the first latent frame is decoded if the codec is causal.
        Pixel statistics are computed in every `statistics_every`-th training `step`, and in step 0. Raise
        NotFiniteError that names the student for latents that are not finite, if a scorer fails on them.
        """
        return self.begin(x0, prompts, step)()

    @torch.no_grad()
    def begin(self, x0: Latents, prompts: tuple[str, ...], step: int = 0) -> Callable[[], Scores]:
        """Decode clean latents and begin to score them; the returned function waits and returns what `score` does.

        Scorers that run in another process are asked in a thread, in the order of the calls. An exception of theirs is
        raised by the returned function. Without such scorers everything is done at once.
        """
        video, when = self._decode(x0), f"training step {step + 1}"
        here = [name for name in self.weights if name not in self.apart]
        answer = self._thread.submit(self.parts, video.cpu(), prompts, self.apart) if self._thread else None
        with of_finite(x0, when):
            parts = self.parts_of(x0, video, prompts, here)
            seen = self._seen(video, step)

        def finish() -> Scores:
            if answer is None:
                return Scores(parts, *seen)
            with phase("score"), of_finite(x0, when):
                others = answer.result().to(parts.device)
            order = [[*here, *self.apart].index(name) for name in self.weights]
            return Scores(torch.cat([parts, others], 1)[:, order], *seen)

        return finish

    def _seen(self, video: Video, step: int) -> tuple[dict[str, PerSample], Float[Tensor, "b d"]]:
        return statistics(video) if step % self.config.statistics_every == 0 else {}, thumbnail(video)

    def score_with_gradient(self, x0: Latents, prompts: tuple[str, ...], when: str = "training") -> PerSample:
        """Return the reward with its gradient to x0, through the decoder and the scorers.

        Raise UserError if no scorer has a gradient; `when` is the step, for messages.
        """
        with of_finite(x0, when):
            reward = self.total(self.parts_of(x0, self._decode(x0), prompts, self.weights))
        if not reward.requires_grad:
            raise UserError(
                f"reward: none of {', '.join(self.weights)} has a gradient: take another method or reward.kind"
            )
        return reward

    @phase("decode")
    def _decode(self, x0: Latents) -> Video:
        first = self._codec.causal and all(self._configs[name].frames == "first" for name in self.weights)
        return self._codec.decode(x0[:, :, :1] if first else x0)


@contextmanager
def of_finite(x0: Latents, when: str) -> Iterator[None]:
    """Raise NotFiniteError, which names the student, in place of what a scorer says of samples that are not finite.

    They are looked at after a failure alone: it takes a wait for the device.
    """
    try:
        yield
    except Exception:
        check_finite(x0, when)
        raise
